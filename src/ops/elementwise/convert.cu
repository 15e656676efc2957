/* SPDX-License-Identifier: Apache-2.0
 *
 * cast, copy and fill on a GPU. Casts between f32, bf16 and f16 are a map; those from or to f64 or an integer convert
 * each element through the widest type of its kind, so that only f64 to a 16-bit float rounds twice.
 */
#include <string.h>

#include "ops/elementwise/copy.cuh"

/* ---- cast ---- */

struct same_op : rfi_map_op {
  template <int V> __device__ void operator()(int64_t, const float (&x)[1][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v];
  }
};

/* Truncates and saturates; NaN gives 0. The bounds are exact in f64; 2^63 is the first value that is too large. */
static __host__ __device__ int64_t to_int(double x, bool narrow) {
  if (x != x) return 0;
  if (narrow) return x >= INT32_MAX ? INT32_MAX : x <= INT32_MIN ? INT32_MIN : (int64_t)x;
  return x >= 0x1p63 ? INT64_MAX : x <= -0x1p63 ? INT64_MIN : (int64_t)x;
}
static __device__ double get_float(const void *x, rfr_dtype dtype, int64_t i) {
  switch (dtype) {
    case RFR_F64: return ((const double *)x)[i];
    case RFR_BF16: return rfi_widen(((const rfi_bf16 *)x)[i]);
    case RFR_F16: return rfi_widen(((const rfi_f16 *)x)[i]);
    default: return ((const float *)x)[i];
  }
}
static __device__ void put_f32(void *y, rfr_dtype dtype, int64_t i, float x) {
  switch (dtype) {
    case RFR_BF16: ((rfi_bf16 *)y)[i] = rfi_narrow<rfi_bf16>(x); break;
    case RFR_F16: ((rfi_f16 *)y)[i] = rfi_narrow<rfi_f16>(x); break;
    default: ((float *)y)[i] = x;
  }
}
static __device__ void put_int(void *y, rfr_dtype dtype, int64_t i, int64_t x) {
  if (dtype == RFR_I64) ((int64_t *)y)[i] = x;
  else ((int32_t *)y)[i] = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x;
}

struct conversion {
  void *y;
  const void *x;
  rfr_dtype to, from;
  bool to_float, from_float;
  int64_t n;
  rfi_strided_loop walk;
};

static __global__ void __launch_bounds__(RFI_MAP_THREADS) convert(const __grid_constant__ conversion c) {
  for (int64_t i = (int64_t)blockIdx.x * RFI_MAP_THREADS + threadIdx.x; i < c.n;
       i += (int64_t)gridDim.x * RFI_MAP_THREADS) {
    const int64_t j = rfi_strided_loop_offset(c.walk, 0, i);
    if (c.from_float) {
      const double x = get_float(c.x, c.from, j);
      if (!c.to_float) put_int(c.y, c.to, i, to_int(x, c.to == RFR_I32));
      else if (c.to == RFR_F64) ((double *)c.y)[i] = x;
      else put_f32(c.y, c.to, i, (float)x);
    } else {
      const int64_t x = c.from == RFR_I64 ? ((const int64_t *)c.x)[j] : ((const int32_t *)c.x)[j];
      if (!c.to_float) put_int(c.y, c.to, i, x);
      else if (c.to == RFR_F64) ((double *)c.y)[i] = (double)x;
      else put_f32(c.y, c.to, i, (float)x);
    }
  }
}

static bool is_map(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

static rfr_status run_cast(const rfr_call *call) {
  const rfr_arg *x = &call->in[0], *y = &call->out[0];
  const rfr_dtype from = x->type.dtype, to = y->type.dtype;
  rfr_status s = RFR_OK;
  if (from == to) return rfi_copy(call, y, x, rfi_element_bytes(to), "cast");
  if (is_map(from) && is_map(to)) {
    RFI_WITH_FLOAT(from, X, RFI_WITH_FLOAT(to, Y, s = rfi_map<X, Y, 1, 1>(call, "cast", same_op())));
    return s;
  }
  conversion c;
  c.y = y->data;
  c.x = x->data;
  c.to = to;
  c.from = from;
  c.to_float = to == RFR_F64 || is_map(to);
  c.from_float = from == RFR_F64 || is_map(from);
  c.n = rfi_elements(y);
  if (c.n == 0) return RFR_OK;
  rfi_strided_loop_init(&c.walk, 1, &x);
  convert<<<rfi_grid(call, c.n, RFI_MAP_THREADS), RFI_MAP_THREADS, 0, rfi_stream(call)>>>(c);
  return rfi_cuda_launched("cast");
}

/* ---- copy ---- */

static rfr_status run_copy(const rfr_call *call) {
  return rfi_copy(call, &call->out[0], &call->in[0], rfi_element_bytes(call->out[0].type.dtype), "copy");
}

/* ---- fill ---- */

static rfr_status run_fill(const rfr_call *call) {
  const rfr_arg *y = &call->out[0];
  const rfr_dtype dtype = y->type.dtype;
  const double value = call->attr[0].f;
  const int size = rfi_element_bytes(dtype);
  int64_t bytes = rfi_elements(y) * size;
  const float f = (float)value;
  const rfi_bf16 b = __float2bfloat16_rn(f);
  const rfi_f16 h = __float2half_rn(f);
  const int64_t wide = to_int(value, false);
  const int32_t narrow = (int32_t)to_int(value, true);
  const void *element = dtype == RFR_F64    ? (const void *)&value
                        : dtype == RFR_BF16 ? (const void *)&b
                        : dtype == RFR_F16  ? (const void *)&h
                        : dtype == RFR_I64  ? (const void *)&wide
                        : dtype == RFR_I32  ? (const void *)&narrow
                                            : (const void *)&f;
  uint4 pattern;
  void *to = y->data, *args[] = {&to, &pattern, &bytes};
  if (bytes == 0) return RFR_OK;
  for (int k = 0; k < 16; k += size) memcpy((char *)&pattern + k, element, (size_t)size);
  return rfi_cuda_check(cudaLaunchKernel(rfi_fill_kernel(), rfi_grid(call, bytes / 16 + 1, RFI_FILL_THREADS),
                                         RFI_FILL_THREADS, args, 0, rfi_stream(call)),
                        "fill");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(cast) = {run_cast, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(copy) = {run_copy, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(fill) = {run_fill, NULL, NULL};
