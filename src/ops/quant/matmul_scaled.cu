/* SPDX-License-Identifier: Apache-2.0
 *
 * The scaled GEMMs on a GPU, for any shape, format and scaling. They run if neither cuBLASLt nor scaled_sm90.cu
 * supports a GEMM.
 *
 * An element is decoded and multiplied by its block's scale while it is loaded. This is exact for E8M0 and E4M3 scales,
 * even in bf16, so the tiles of tile_decoded.cuh use tensor cores. With an f32 scale it rounds once, to f32, and the
 * tiles are those of tile_any.cuh. Scales of a tensor are applied after the sum, one by one, because their product
 * alone might underflow.
 */
#include <stdio.h>

#include "backend/cuda/any_type.cuh"
#include "ops/matmul/tile_any.cuh"
#include "ops/quant/scaled_cuda.h"
#include "ops/quant/scaled_gemm.cuh"
#include "ops/quant/tile_decoded.cuh"

static rfi_factor factor_of(const rfr_call *c, int q, int scale, int global) {
  const rfr_type *x = &c->in[q].type, *s = &c->in[scale].type;
  rfi_factor f = {};
  f.q = (const uint8_t *)c->in[q].data;
  f.scale = c->in[scale].data;
  f.global = global < c->n_in ? (const float *)c->in[global].data : NULL;
  f.dtype = x->dtype;
  f.scaling = rfi_scaling_of(x, s);
  f.rows = x->shape[x->rank - 2];
  f.row = x->shape[x->rank - 1] * (x->dtype == RFR_U8 ? 2 : 1);
  f.scale_row = s->shape[s->rank - 1];
  return f;
}

/* Element (i, k) of slice g without the factors that apply after the sum. */
static __device__ __forceinline__ float element(const rfi_factor &f, int64_t g, int64_t i, int64_t k) {
  const int64_t line = g * f.rows + i, at = line * f.row + k;
  float x;
  if (f.dtype == RFR_U8) x = rfi_e2m1_widen((uint8_t)(f.q[at / 2] >> (at % 2 * 4)));
  else x = f.dtype == RFR_E4M3 ? rfi_e4m3_widen(f.q[at]) : rfi_e5m2_widen(f.q[at]);
  switch (f.scaling) {
    case RFR_SCALING_ROW128: return x * ((const float *)f.scale)[line * f.scale_row + k / 128];
    case RFR_SCALING_BLOCK128:
      return x * ((const float *)f.scale)[(g * rfi_blocks_of(f.rows, 128) + i / 128) * f.scale_row + k / 128];
    case RFR_SCALING_MX32: return x * rfi_e8m0_widen(((const uint8_t *)f.scale)[line * f.scale_row + k / 32]);
    case RFR_SCALING_NV16: return x * rfi_e4m3_widen(((const uint8_t *)f.scale)[line * f.scale_row + k / 16]);
    default: return x;
  }
}

static __device__ __forceinline__ float late_scale(const rfi_factor &f, int64_t slice) {
  const float scale = f.scaling == RFR_SCALING_TENSOR ? ((const float *)f.scale)[slice] : 1.0f;
  return f.global ? scale * f.global[slice] : scale;
}

static __device__ __forceinline__ void finish(const rfi_scaled_gemm &p, int64_t slice, int64_t at, int64_t row,
                                              int64_t j, float sum) {
  float y = sum * late_scale(p.a, slice) * late_scale(p.b, slice);
  if (p.bias) {
    const float by = p.bias_scale ? rfi_load(p.bias_scale, p.bias_scale_type, row) : 1.0f;
    y += by * rfi_load(p.bias, p.bias_type, slice * p.b.rows + j);
  }
  if (p.accumulate) y += rfi_load(p.y, p.y_type, at);
  rfi_store(p.y, p.y_type, at, y);
}

/* The tile at (i0, j0) of a group: rows of a from line `first` on, M of them, and slice g of b; the sum begins at
 * element `start` of the lines and has K elements. HALF: on tensor cores in bf16, else in f32. */
template <bool HALF> struct scaled_tile {
  enum { SIDE = HALF ? (int)RFI_DECODED : (int)RFI_TILE };
  template <class END>
  static __device__ __forceinline__ void run(const rfi_scaled_gemm &p, int64_t first, int64_t i0, int64_t M, int64_t g,
                                             int64_t j0, int64_t start, int64_t K, const END &end) {
    if constexpr (HALF) rfi_tile_decoded(p.a, first, i0, M, p.b, g * p.b.rows, j0, p.b.rows, start, K, end);
    else
      rfi_tile(
          i0, M, j0, p.b.rows, K, [&](int64_t i, int64_t k) { return element(p.a, 0, first + i, start + k); }, true,
          [&](int64_t j, int64_t k) { return element(p.b, g, j, start + k); }, true, end);
  }
};
static_assert((int)RFI_DECODED_THREADS == (int)RFI_TILE_THREADS, "both tiles have blocks of one size");

template <bool HALF>
static __global__ void __launch_bounds__(RFI_TILE_THREADS, HALF ? 2 : 4)
    matmul_scaled(const rfi_scaled_gemm p, int64_t tiles_m) {
  enum { SIDE = scaled_tile<HALF>::SIDE };
  const int64_t i0 = (int64_t)(blockIdx.x % tiles_m) * SIDE, j0 = (int64_t)(blockIdx.x / tiles_m) * SIDE;
  scaled_tile<HALF>::run(p, 0, i0, p.a.rows, 0, j0, 0, p.a.row,
                         [&](int64_t i, int64_t j, float sum) { finish(p, 0, i * p.b.rows + j, i, j, sum); });
}

/* The rows after the last group are treated as one more group, of zeros. */
template <bool HALF>
static __global__ void __launch_bounds__(RFI_TILE_THREADS, HALF ? 2 : 4) grouped_scaled(const rfi_scaled_gemm p) {
  enum { SIDE = scaled_tile<HALF>::SIDE };
  const int wide = (int)((p.b.rows + SIDE - 1) / SIDE);
  rfi_unit_walk<1> u;
  for (int unit = blockIdx.x; u.find(p.groups, unit, SIDE, wide); unit += gridDim.x) {
    const int64_t i0 = (int64_t)((unit - u.before) / wide) * SIDE, first = u.first, g = u.group;
    const int64_t j0 = (int64_t)((unit - u.before) % wide) * SIDE;
    const bool rest = u.group == p.groups.n;
    scaled_tile<HALF>::run(p, first, i0, u.size, rest ? 0 : g, j0, 0, rest ? 0 : p.a.row,
                           [&](int64_t i, int64_t j, float sum) {
                             const int64_t row = first + i, at = row * p.b.rows + j;
                             if (rest) rfi_store(p.y, p.y_type, at, 0.0f);
                             else finish(p, g, at, row, j, sum);
                           });
  }
}

template <bool HALF>
static __global__ void __launch_bounds__(RFI_TILE_THREADS, HALF ? 2 : 4)
    wgrad_scaled(const rfi_scaled_gemm p, int64_t tiles_m) {
  enum { SIDE = scaled_tile<HALF>::SIDE };
  const int64_t i0 = (int64_t)(blockIdx.x % tiles_m) * SIDE, j0 = (int64_t)(blockIdx.x / tiles_m) * SIDE;
  const int64_t g = blockIdx.y, begin = rfi_group_begin(p.groups.offset, g, p.a.row);
  const int64_t start = rfi_group_start(begin, p.first + g, p.block) * p.block;
  const int64_t rows = min(rfi_group_end(p.groups.offset, g, p.a.row) - begin, p.a.row - start);
  if (rows <= 0 && p.accumulate) return;
  scaled_tile<HALF>::run(p, 0, i0, p.a.rows, 0, j0, start, max(rows, (int64_t)0), [&](int64_t i, int64_t j, float sum) {
    finish(p, g, (g * p.a.rows + i) * p.b.rows + j, i, j, sum);
  });
}

static const rfr_arg *given(const rfr_call *c, int i) {
  return i >= 0 && i < c->n_in && c->in[i].data ? &c->in[i] : NULL;
}

static rfi_scaled_gemm gemm_of(const rfr_call *c, const rfi_factor &a, const rfi_factor &b, int bias, int scale,
                               int acc) {
  const rfr_arg *with = given(c, bias), *by = given(c, scale), *y = &c->out[0];
  rfi_scaled_gemm p = {};
  p.a = a, p.b = b;
  p.bias = with ? with->data : NULL;
  p.bias_type = with ? with->type.dtype : RFR_F32;
  p.bias_scale = by ? by->data : NULL;
  p.bias_scale_type = by ? by->type.dtype : RFR_F32;
  p.y = y->data;
  p.y_type = y->type.dtype;
  p.accumulate = given(c, acc) != NULL;
  return p;
}

static bool has_sm90(const rfr_call *c) {
  const rfi_cuda_info *info = rfi_cuda_info_of(c);
  return info->major == 9 && !info->portable;
}

/* Supports groups along the sum only where other kernels do not: when adding to y, and when both operands have scales
 * per line. */
static rfi_scaled_gemm dense_of(const rfr_call *c, bool forward) {
  rfi_scaled_gemm p =
      gemm_of(c, factor_of(c, RFI_IN_matmul_scaled_a, RFI_IN_matmul_scaled_scale_a, RFI_IN_matmul_scaled_global_a),
              factor_of(c, RFI_IN_matmul_scaled_b, RFI_IN_matmul_scaled_scale_b, RFI_IN_matmul_scaled_global_b),
              RFI_IN_matmul_scaled_bias, -1, RFI_IN_matmul_scaled_acc);
  p.along = p.accumulate || p.b.scaling == RFR_SCALING_ROW128, p.narrow = forward;
  p.slices = 1, p.block = rfi_group_block(p.a.scaling);
  p.groups.n = 1, p.groups.rows = (int)(p.along ? p.a.row : p.a.rows), p.groups.high = p.along ? (int)p.a.rows : 0;
  return p;
}

static rfi_scaled_gemm grouped_of(const rfr_call *c, bool forward) {
  rfi_scaled_gemm p = gemm_of(c,
                              factor_of(c, RFI_IN_grouped_matmul_scaled_a, RFI_IN_grouped_matmul_scaled_scale_a,
                                        RFI_IN_grouped_matmul_scaled_global_a),
                              factor_of(c, RFI_IN_grouped_matmul_scaled_w, RFI_IN_grouped_matmul_scaled_scale_w,
                                        RFI_IN_grouped_matmul_scaled_global_w),
                              RFI_IN_grouped_matmul_scaled_bias, RFI_IN_grouped_matmul_scaled_scale, -1);
  p.narrow = forward;
  p.slices = c->in[RFI_IN_grouped_matmul_scaled_offsets].type.shape[0] - 1;
  p.groups.offset = (const int32_t *)c->in[RFI_IN_grouped_matmul_scaled_offsets].data;
  p.groups.n = p.groups.last = (int)p.slices;
  p.groups.rows = (int)p.a.rows;
  return p;
}

static rfi_scaled_gemm wgrad_of(const rfr_call *c) {
  rfi_scaled_gemm p = gemm_of(c,
                              factor_of(c, RFI_IN_grouped_wgrad_scaled_dy, RFI_IN_grouped_wgrad_scaled_scale_dy,
                                        RFI_IN_grouped_wgrad_scaled_global_dy),
                              factor_of(c, RFI_IN_grouped_wgrad_scaled_x, RFI_IN_grouped_wgrad_scaled_scale_x,
                                        RFI_IN_grouped_wgrad_scaled_global_x),
                              -1, -1, RFI_IN_grouped_wgrad_scaled_acc);
  p.along = true, p.slices = c->out[0].type.shape[0];
  p.groups.offset = (const int32_t *)c->in[RFI_IN_grouped_wgrad_scaled_offsets].data;
  p.groups.n = (int)p.slices, p.groups.last = (int)p.slices - 1;
  p.groups.rows = (int)p.a.row, p.groups.high = (int)p.a.rows;
  p.first = c->attr[2].i;
  p.block = rfi_group_block(p.a.scaling);
  return p;
}

static rfr_status launch_sm90(const rfr_call *c, const rfi_scaled_gemm &p) {
  return rfi_scaled_sm90(p, (int32_t *)c->workspace, rfi_cuda_info_of(c)->sms, rfi_stream(c));
}

/* Whether decoding the operands to bf16 is exact, and their lines are multiples of eight elements. */
static bool is_exact(const rfi_factor &f) {
  return (f.scaling == RFR_SCALING_TENSOR || f.scaling == RFR_SCALING_MX32 || f.scaling == RFR_SCALING_NV16) &&
         f.row % 8 == 0 && (uintptr_t)f.q % 8 == 0;
}
static bool in_half(const rfi_scaled_gemm &p) { return is_exact(p.a) && is_exact(p.b); }
static int64_t side_of(const rfi_scaled_gemm &p) {
  return in_half(p) ? (int64_t)scaled_tile<true>::SIDE : (int64_t)scaled_tile<false>::SIDE;
}

template <bool FORWARD> static rfr_status run(const rfr_call *c) {
  const rfi_scaled_gemm p = dense_of(c, FORWARD);
  const int64_t tiles_m = rfi_blocks(p.a.rows, side_of(p)), tiles = tiles_m * rfi_blocks(p.b.rows, side_of(p));
  if (has_sm90(c) && !rfi_scaled_sm90_lacks(p)) return launch_sm90(c, p);
  if (tiles == 0) return RFR_OK;
  const auto kernel = in_half(p) ? matmul_scaled<true> : matmul_scaled<false>;
  kernel<<<(unsigned)tiles, RFI_TILE_THREADS, 0, rfi_stream(c)>>>(p, tiles_m);
  return rfi_cuda_launched("matmul_scaled");
}

template <bool FORWARD> static rfr_status run_grouped(const rfr_call *c) {
  const rfi_scaled_gemm p = grouped_of(c, FORWARD);
  const int64_t most = (int64_t)rfi_cuda_info_of(c)->sms * 8;
  const int64_t tiles = (p.a.rows / side_of(p) + p.slices + 2) * rfi_blocks(p.b.rows, side_of(p));
  if (has_sm90(c) && !rfi_scaled_sm90_lacks(p)) return launch_sm90(c, p);
  if (p.a.rows == 0 || p.b.rows == 0) return RFR_OK;
  const auto kernel = in_half(p) ? grouped_scaled<true> : grouped_scaled<false>;
  kernel<<<(unsigned)(tiles < most ? tiles : most), RFI_TILE_THREADS, 0, rfi_stream(c)>>>(p);
  return rfi_cuda_launched("grouped_matmul_scaled");
}

static rfr_status run_wgrad(const rfr_call *c) {
  const rfi_scaled_gemm p = wgrad_of(c);
  const int64_t tiles_m = rfi_blocks(p.a.rows, side_of(p)), tiles = tiles_m * rfi_blocks(p.b.rows, side_of(p));
  if (has_sm90(c) && !rfi_scaled_sm90_lacks(p)) return launch_sm90(c, p);
  if (tiles == 0 || p.slices == 0) return RFR_OK;
  const auto kernel = in_half(p) ? wgrad_scaled<true> : wgrad_scaled<false>;
  kernel<<<dim3((unsigned)tiles, (unsigned)p.slices), RFI_TILE_THREADS, 0, rfi_stream(c)>>>(p, tiles_m);
  return rfi_cuda_launched("grouped_wgrad_scaled");
}

static const char *name_of(const rfr_call *c, const rfi_scaled_gemm &p) {
  return has_sm90(c) && !rfi_scaled_sm90_lacks(p) ? "sm90" : "sm80";
}
static const char *needs(const rfr_call *c) { return name_of(c, dense_of(c, true)); }
static const char *grouped_needs(const rfr_call *c) { return name_of(c, grouped_of(c, true)); }
static const char *wgrad_needs(const rfr_call *c) { return name_of(c, wgrad_of(c)); }

static bool say(const rfr_call *c, const rfi_scaled_gemm &p, char *text, size_t size) {
  const char *why = has_sm90(c) ? rfi_scaled_sm90_lacks(p) : "no tensor core takes its scaling, formats or sides";
  if (why) snprintf(text, size, "decoded to %s: %s", in_half(p) ? "bf16" : "f32", why);
  return why != NULL;
}
static bool lacks(const rfr_call *c, char *text, size_t size) { return say(c, dense_of(c, true), text, size); }
static bool grouped_lacks(const rfr_call *c, char *text, size_t size) {
  return say(c, grouped_of(c, true), text, size);
}
static bool wgrad_lacks(const rfr_call *c, char *text, size_t size) { return say(c, wgrad_of(c), text, size); }

static size_t workspace(const rfr_call *c) { return has_sm90(c) ? RFI_GROUPED_TAKEN : 0; }

extern "C" const rfi_cuda_kernel RFI_CUDA(matmul_scaled) = {run<false>, workspace, NULL, NULL, needs, lacks};
extern "C" const rfi_cuda_kernel RFI_CUDA(grouped_matmul_scaled) = {run_grouped<false>, workspace,    NULL, NULL,
                                                                    grouped_needs,      grouped_lacks};
extern "C" const rfi_cuda_kernel RFI_CUDA(grouped_wgrad_scaled) = {run_wgrad, workspace,   NULL,
                                                                   NULL,      wgrad_needs, wgrad_lacks};
extern "C" const rfi_cuda_kernel rfi_cuda_scaled_forward = {run<true>, workspace, NULL, NULL, needs, lacks};
extern "C" const rfi_cuda_kernel rfi_cuda_grouped_scaled_forward = {run_grouped<true>, workspace,    NULL, NULL,
                                                                    grouped_needs,     grouped_lacks};
