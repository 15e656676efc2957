/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings on a GPU: host memory that the device reads and writes at the host's addresses. The last store of a metrics
 * entry is element 0, the step's sequence number, after a system-wide fence: a host thread that reads it with acquire
 * order and finds attempted + 1 sees all of that step's metrics.
 */
#include "backend/cuda/kernels.cuh"

enum { THREADS = 256, WARP = 32, LOADS = 4 };

static __device__ __forceinline__ int64_t slot_of(const int64_t *step, int64_t slots) {
  const int64_t slot = step[0] % slots;
  return slot < 0 ? slot + slots : slot;
}

template <typename UNIT>
static __global__ void __launch_bounds__(THREADS)
    read_slot(const UNIT *ring, const int64_t *step, int64_t slots, UNIT *x, int64_t n) {
  const UNIT *from = ring + slot_of(step, slots) * n;
  for (int64_t first = (int64_t)blockIdx.x * THREADS * LOADS + threadIdx.x; first < n;
       first += (int64_t)gridDim.x * THREADS * LOADS) {
    UNIT a[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++) a[u] = from[first + u * THREADS < n ? first + u * THREADS : n - 1];
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (first + u * THREADS < n) x[first + u * THREADS] = a[u];
  }
}

template <typename UNIT> static void launch_read(const rfr_call *call, int64_t bytes) {
  const int64_t n = bytes / (int64_t)sizeof(UNIT), need = rfi_blocks(n, THREADS * LOADS), most = 64;
  read_slot<UNIT><<<(unsigned)(need < most ? need : most), THREADS, 0, rfi_stream(call)>>>(
      (const UNIT *)call->in[0].data, (const int64_t *)call->in[1].data, call->in[0].type.shape[0],
      (UNIT *)call->out[0].data, n);
}

static rfr_status run_read(const rfr_call *call) {
  const int64_t bytes = rfi_elements(&call->out[0]) * rfi_element_bytes(call->out[0].type.dtype);
  const uintptr_t all = (uintptr_t)call->in[0].data | (uintptr_t)call->out[0].data | (uintptr_t)bytes;
  if (bytes == 0 || !call->out[0].data) return RFR_OK;
  if (all % 16 == 0) launch_read<uint4>(call, bytes);
  else if (all % 4 == 0) launch_read<uint32_t>(call, bytes);
  else launch_read<uint8_t>(call, bytes);
  return rfi_cuda_launched("ring_read");
}

struct metrics {
  double *ring;
  const int64_t *step;
  int64_t slots;
  int values, more; /* `more`: elements of a vector after the values */
  const float *vector;
  const void *value[WARP - 1];
  rfr_dtype dtype[WARP - 1];
};

static __device__ double scalar(const void *x, rfr_dtype dtype) {
  switch (dtype) {
    case RFR_I32: return *(const int32_t *)x;
    case RFR_I64: return (double)*(const int64_t *)x;
    default: return *(const float *)x;
  }
}

/* One warp: a lane per value, then the elements of a vector. */
static __global__ void __launch_bounds__(WARP) write_slot(const __grid_constant__ metrics m) {
  volatile double *row = m.ring + slot_of(m.step, m.slots) * (1 + m.values + m.more);
  const int lane = threadIdx.x;
  if (lane < m.values) row[lane + 1] = scalar(m.value[lane], m.dtype[lane]);
  for (int k = lane; k < m.more; k += WARP) row[1 + m.values + k] = m.vector[k];
  __threadfence_system();
  __syncwarp();
  if (lane != 0) return;
  __threadfence_system();
  row[0] = (double)(m.step[0] + 1);
}

static rfr_status run_write(const rfr_call *call) {
  const rfr_arg *last = &call->in[call->n_in - 1];
  const bool vector = call->n_in > 2 && last->type.dtype == RFR_F32;
  metrics m = {(double *)call->in[0].data, (const int64_t *)call->in[1].data, call->in[0].type.shape[0]};
  m.values = call->n_in - 2 - (int)vector;
  m.more = vector ? (int)last->type.shape[0] : 0;
  m.vector = (const float *)last->data;
  for (int i = 2; i < 2 + m.values; i++) {
    m.value[i - 2] = call->in[i].data;
    m.dtype[i - 2] = call->in[i].type.dtype;
  }
  write_slot<<<1, WARP, 0, rfi_stream(call)>>>(m);
  return rfi_cuda_launched("metrics_write");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(ring_read) = {run_read, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(metrics_write) = {run_write, NULL, NULL};
