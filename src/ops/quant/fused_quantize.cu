/* SPDX-License-Identifier: Apache-2.0
 *
 * X_quantize on a GPU. Full tiles in 16 bits are computed and encoded in one pass (codes.cuh), without a copy in 16
 * bits if the op's result is unused:
 *
 *   given scale      one pass
 *   no given scale   a pass that only finds the largest magnitude, then a pass that encodes. Computing the elements
 *                    twice moves fewer bytes than storing them
 *   norms            first the norm's kernel, without y, for the statistics of the rows. The tiles begin with the last
 *                    one, whose sums are still in the L2 cache
 *
 * All other calls run X and then quantize, with bitwise equal results.
 */
#include "ops/elementwise/map.cuh"
#include "ops/quant/fused.h"
#include "ops/quant/sources.cuh"

/* ---- the separate calls ---- */

static rfr_status run_both(const rfi_fused &f, const rfi_cuda_kernel &op) {
  rfr_status s = op.run(&f.op);
  for (int p = 0; p < f.form.parts && s == RFR_OK; p++) s = RFI_CUDA(quantize).run(&f.quantize[p]);
  return s;
}

static size_t workspace_both(const rfi_fused &f, const rfi_cuda_kernel &op) {
  const size_t first = op.workspace ? op.workspace(&f.op) : 0, then = RFI_CUDA(quantize).workspace(&f.quantize[0]);
  return f.scratch + (first > then ? first : then);
}

/* ---- tiles ---- */

static bool is_aligned(const rfr_arg &x) { return (uintptr_t)x.data % 16 == 0; }

/* Whether the tiles support the call; an absent operand or result has the address NULL. */
static bool is_full(const rfr_call *c, const rfi_fused &f) {
  const rfr_type *y = &f.made[f.form.first].type;
  if (y->dtype == RFR_F32 || y->shape[0] == 0 || y->shape[1] == 0) return false;
  if (y->shape[0] % RFI_CODES_SIDE != 0 || y->shape[1] % RFI_CODES_SIDE != 0) return false;
  for (int k = 0; k < f.form.n_in; k++)
    if (!is_aligned(c->in[k])) return false;
  for (int j = 0; j < c->n_out; j++)
    if (!is_aligned(c->out[j])) return false;
  return !f.form.first || c->out[0].data; /* the norm reads the sum from there */
}

enum { FOUND = 256 }; /* bytes of the workspace for the largest magnitudes, padded */

/* The quantized matrix p; its largest magnitude is in the result amax, or in `found`. */
static rfi_codes codes_of(const rfr_call *c, const rfi_fused &f, int p, uint32_t *found) {
  const rfr_arg *out = f.out[p], &scale = f.in[p][RFI_IN_quantize_scale];
  rfi_codes to = {};
  to.given = scale.type.rank >= 0 ? (const float *)scale.data : NULL;
  to.largest = (uint32_t *)out[RFI_OUT_quantize_amax].data;
  if (!to.largest && !to.given) to.largest = found + p;
  to.row = (uint8_t *)out[RFI_OUT_quantize_row].data, to.col = (uint8_t *)out[RFI_OUT_quantize_col].data;
  to.row_scale = (float *)out[RFI_OUT_quantize_row_scale].data;
  to.col_scale = (float *)out[RFI_OUT_quantize_col_scale].data;
  to.wide = c->out[f.form.first + p].data;
  to.format = (rfr_dtype)f.attr[RFI_AT_quantize_format].i;
  to.pow2 = (f.attr[RFI_AT_quantize_options].i & RFR_QUANTIZE_POW2) != 0;
  return to;
}

template <typename T, class S>
static rfr_status run_tiles(const rfr_call *c, const rfi_fused &f, const S &source, uint32_t *found, bool backwards) {
  rfi_codes_of<S::PARTS> to;
  to.backwards = backwards;
  bool given = true, noted = false;
  const rfr_type *y = &f.made[f.form.first].type;
  const int64_t M = y->shape[0], K = y->shape[1];
  cudaStream_t stream = rfi_stream(c);
  for (int p = 0; p < S::PARTS; p++) {
    to.part[p] = codes_of(c, f, p, found);
    given = given && to.part[p].given, noted = noted || to.part[p].largest;
    if (to.part[p].largest) cudaMemsetAsync(to.part[p].largest, 0, sizeof(uint32_t), stream);
  }
  const rfi_codes_slices slices = {M};
  const unsigned tiles = (unsigned)(M / RFI_CODES_SIDE * (K / RFI_CODES_SIDE));
  if (given && noted) rfi_codes_tiles<T, S, true, true><<<tiles, RFI_CODES_THREADS, 0, stream>>>(source, to, slices, K);
  else if (given) rfi_codes_tiles<T, S, true, false><<<tiles, RFI_CODES_THREADS, 0, stream>>>(source, to, slices, K);
  else {
    rfi_codes_tiles<T, S, false, true><<<tiles, RFI_CODES_THREADS, 0, stream>>>(source, to, slices, K);
    to.backwards = !backwards;
    rfi_codes_tiles<T, S, true, false><<<tiles, RFI_CODES_THREADS, 0, stream>>>(source, to, slices, K);
  }
  return rfi_cuda_launched("tiles of codes");
}

/* ---- SwiGLU ---- */

template <typename T> static rfi_source_swiglu<T> swiglu_of(const rfr_call *c) {
  const int64_t K = c->in[0].type.shape[1];
  return {(const T *)c->in[0].data, (const T *)c->in[1].data, K, K};
}
template <typename T> static rfi_source_swiglu_bwd<T> swiglu_bwd_of(const rfr_call *c) {
  const int64_t K = c->in[0].type.shape[1];
  return {(const T *)c->in[0].data, (const T *)c->in[1].data, (const T *)c->in[2].data, K, K, K};
}

static rfr_status run_swiglu(const rfr_call *c) {
  rfi_fused f;
  rfi_fused_of(c, RFI_OP_swiglu_quantize, &f);
  uint32_t *found = (uint32_t *)c->workspace;
  if (!is_full(c, f)) return run_both(f, RFI_CUDA(swiglu));
  return c->in[0].type.dtype == RFR_BF16 ? run_tiles<rfi_bf16>(c, f, swiglu_of<rfi_bf16>(c), found, false)
                                         : run_tiles<rfi_f16>(c, f, swiglu_of<rfi_f16>(c), found, false);
}
static rfr_status run_swiglu_bwd(const rfr_call *c) {
  rfi_fused f;
  rfi_fused_of(c, RFI_OP_swiglu_bwd_quantize, &f);
  uint32_t *found = (uint32_t *)c->workspace;
  if (!is_full(c, f)) return run_both(f, RFI_CUDA(swiglu_bwd));
  return c->in[0].type.dtype == RFR_BF16 ? run_tiles<rfi_bf16>(c, f, swiglu_bwd_of<rfi_bf16>(c), found, false)
                                         : run_tiles<rfi_f16>(c, f, swiglu_bwd_of<rfi_f16>(c), found, false);
}
static size_t workspace_swiglu(const rfr_call *c) {
  rfi_fused f;
  rfi_fused_of(c, RFI_OP_swiglu_quantize, &f);
  return is_full(c, f) ? (size_t)FOUND : workspace_both(f, RFI_CUDA(swiglu));
}
static size_t workspace_swiglu_bwd(const rfr_call *c) {
  rfi_fused f;
  rfi_fused_of(c, RFI_OP_swiglu_bwd_quantize, &f);
  return is_full(c, f) ? (size_t)FOUND : workspace_both(f, RFI_CUDA(swiglu_bwd));
}

/* ---- norms ---- */

/* Result places of a norm: y, then mean for layernorm, then rstd. */
template <bool MEAN> static size_t statistics_bytes(const rfi_fused &f) {
  return ((size_t)f.made[f.form.first].type.shape[0] * sizeof(float) + 255) / 256 * 256 * (1 + MEAN);
}

template <typename T, bool MEAN>
static rfr_status run_norm_tiles(const rfr_call *c, rfi_fused *f, const rfi_cuda_kernel &op) {
  const int y = f->form.first, w = 1 + f->form.first;
  const rfr_arg *b = MEAN && c->in[w + 1].type.rank >= 0 ? &c->in[w + 1] : NULL;
  char *space = (char *)c->workspace + FOUND;
  for (int j = 1; j <= 1 + MEAN; j++, space += statistics_bytes<false>(*f))
    if (!f->made[y + j].data) f->made[y + j].data = space;
  f->made[y].data = NULL;
  const rfr_status s = op.run(&f->op);
  if (s != RFR_OK) return s;
  const rfi_source_norm<T, MEAN> source = {(const T *)(y ? c->out[0].data : c->in[0].data),
                                           c->in[w].data,
                                           b ? b->data : NULL,
                                           MEAN ? (const float *)f->made[y + 1].data : NULL,
                                           (const float *)f->made[y + 1 + MEAN].data,
                                           f->made[y].type.shape[1],
                                           c->in[w].type.dtype,
                                           b ? b->type.dtype : RFR_F32};
  return run_tiles<T>(c, *f, source, (uint32_t *)c->workspace, true);
}

template <bool MEAN> static rfr_status run_norm(const rfr_call *c, rfi_opcode code, const rfi_cuda_kernel &op) {
  rfi_fused f;
  rfi_fused_of(c, code, &f);
  if (!is_full(c, f)) return run_both(f, op);
  return c->in[0].type.dtype == RFR_BF16 ? run_norm_tiles<rfi_bf16, MEAN>(c, &f, op)
                                         : run_norm_tiles<rfi_f16, MEAN>(c, &f, op);
}
template <bool MEAN> static size_t workspace_norm(const rfr_call *c, rfi_opcode code, const rfi_cuda_kernel &op) {
  rfi_fused f;
  rfi_fused_of(c, code, &f);
  return is_full(c, f) ? FOUND + statistics_bytes<MEAN>(f) : workspace_both(f, op);
}

#define NORM(name, MEAN)                                                      \
  static rfr_status run_##name(const rfr_call *c) {                           \
    return run_norm<MEAN>(c, RFI_OP_##name##_quantize, RFI_CUDA(name));       \
  }                                                                           \
  static size_t workspace_##name(const rfr_call *c) {                         \
    return workspace_norm<MEAN>(c, RFI_OP_##name##_quantize, RFI_CUDA(name)); \
  }                                                                           \
  extern "C" const rfi_cuda_kernel RFI_CUDA(name##_quantize) = {run_##name, workspace_##name};
NORM(rmsnorm, false)
NORM(add_rmsnorm, false)
NORM(layernorm, true)
NORM(add_layernorm, true)

extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_quantize) = {run_swiglu, workspace_swiglu, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_bwd_quantize) = {run_swiglu_bwd, workspace_swiglu_bwd,
                                                                  rfi_takes_floats};
