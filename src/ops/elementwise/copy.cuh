/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies between two tensors of one shape and element size, each with its own strides, on a GPU. The element type does
 * not matter, so the unit of a copy is as wide as shapes, strides and addresses allow: 16 bytes where rows are dense,
 * one element where they are not.
 */
#ifndef RFI_COPY_CUH
#define RFI_COPY_CUH

#include "ops/elementwise/map.cuh"

enum { RFI_COPY_UNITS = 4 }; /* loads in flight per thread */

struct rfi_copy_args {
  char *to;
  const char *from;
  int64_t n; /* in units */
  int tail;  /* bytes after the last unit, for a flat copy */
  rfi_strided_loop walk;
};

template <typename UNIT, bool FLAT>
static __global__ void __launch_bounds__(RFI_MAP_THREADS) rfi_copy_kernel(const __grid_constant__ rfi_copy_args a) {
  const int64_t step = (int64_t)gridDim.x * RFI_MAP_THREADS * RFI_COPY_UNITS;
  UNIT *to = (UNIT *)a.to;
  const UNIT *from = (const UNIT *)a.from;
  for (int64_t first = (int64_t)blockIdx.x * RFI_MAP_THREADS * RFI_COPY_UNITS + threadIdx.x; first < a.n;
       first += step) {
    UNIT x[RFI_COPY_UNITS];
#pragma unroll
    for (int u = 0; u < RFI_COPY_UNITS; u++) {
      int64_t p = first + u * RFI_MAP_THREADS;
      p = p < a.n ? p : a.n - 1;
      x[u] = from[FLAT ? p : rfi_strided_loop_offset(a.walk, 1, p)];
    }
#pragma unroll
    for (int u = 0; u < RFI_COPY_UNITS; u++) {
      const int64_t p = first + u * RFI_MAP_THREADS;
      if (p < a.n) to[FLAT ? p : rfi_strided_loop_offset(a.walk, 0, p)] = x[u];
    }
  }
  if (FLAT && blockIdx.x == 0 && threadIdx.x < a.tail) {
    const int64_t i = a.n * (int64_t)sizeof(UNIT) + threadIdx.x;
    a.to[i] = a.from[i];
  }
}

template <typename UNIT> static void rfi_copy_launch(const rfr_call *call, const rfi_copy_args &a) {
  const unsigned grid = rfi_grid(call, a.n > 0 ? a.n : 1, RFI_MAP_THREADS * RFI_COPY_UNITS);
  const bool flat = a.walk.rank == 1 && a.walk.stride[0][0] == 1 && a.walk.stride[1][0] == 1;
  if (flat) rfi_copy_kernel<UNIT, true><<<grid, RFI_MAP_THREADS, 0, rfi_stream(call)>>>(a);
  else rfi_copy_kernel<UNIT, false><<<grid, RFI_MAP_THREADS, 0, rfi_stream(call)>>>(a);
}

/* Whether every row consists of aligned units of `bytes`; a single row may have a tail. */
static inline bool rfi_copy_takes(const rfi_copy_args *a, int bytes, int element) {
  const int last = a->walk.rank - 1, k = bytes / element;
  if ((uintptr_t)a->to % bytes || (uintptr_t)a->from % bytes) return false;
  if (bytes == element) return true;
  if (a->walk.stride[0][last] != 1 || a->walk.stride[1][last] != 1) return false;
  for (int d = 0; d < last; d++)
    if (a->walk.stride[0][d] % k || a->walk.stride[1][d] % k) return false;
  return last == 0 || a->walk.dim[last] % k == 0;
}

static inline rfr_status rfi_copy(const rfr_call *call, const rfr_arg *to, const rfr_arg *from, int element,
                                  const char *name) {
  const rfr_arg *const args[] = {to, from};
  rfi_copy_args a;
  int bytes = 16;
  a.to = (char *)to->data;
  a.from = (const char *)from->data;
  a.n = rfi_elements(from);
  if (a.n == 0) return RFR_OK;
  rfi_strided_loop_init(&a.walk, 2, args);
  while (bytes > element && !rfi_copy_takes(&a, bytes, element)) bytes /= 2;
  const int last = a.walk.rank - 1, k = bytes / element;
  a.tail = (int)(a.n % k) * element; /* 0 unless it is one row */
  a.n /= k;
  a.walk.dim[last] /= k;
  for (int d = 0; d < last; d++)
    for (int j = 0; j < 2; j++) a.walk.stride[j][d] /= k;
  switch (bytes) {
    case 1: rfi_copy_launch<uint8_t>(call, a); break;
    case 2: rfi_copy_launch<uint16_t>(call, a); break;
    case 4: rfi_copy_launch<uint32_t>(call, a); break;
    case 8: rfi_copy_launch<uint64_t>(call, a); break;
    default: rfi_copy_launch<uint4>(call, a);
  }
  return rfi_cuda_launched(name);
}

#endif
