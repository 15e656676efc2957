/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of the CUDA module, for C and for kernels.
 *
 * A kernel file X.cu is in the folder of X_cpu.c and ends with
 *   const rfi_cuda_kernel RFI_CUDA(rmsnorm) = {run, workspace};
 * in extern "C". `run` enqueues on call->stream and returns; it does not allocate, wait or read
 * device memory: grids follow from shapes. call->library is the device's rfi_cuda_info, in
 * `workspace` and in `run`.
 */
#ifndef RFI_CUDA_H
#define RFI_CUDA_H

#include <cuda_runtime_api.h>

#include "backend/range.h"
#include "refrain/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfi_cuda_info {
  int ordinal, sms; /* ordinal -1: no device, planning only */
  int major, minor; /* compute capability */
  int portable;     /* 1: use only kernels for sm_80 */
} rfi_cuda_info;

static inline const rfi_cuda_info *rfi_cuda_info_of(const rfr_call *call) {
  return (const rfi_cuda_info *)call->library;
}

/* RFR_OK, or the error; `what` is the operation. */
rfr_status rfi_cuda_check(cudaError_t error, const char *what);
/* After an error of a library that uses the stream: backend.dead if the device's context is dead, else RFR_OK.
 * Invalidates a capture of the stream, as the error itself does. */
rfr_status rfi_cuda_alive(cudaStream_t stream, const char *what);
/* After a launch: returns the launch error, if any. */
static inline rfr_status rfi_cuda_launched(const char *kernel) { return rfi_cuda_check(cudaGetLastError(), kernel); }

/* inspect.cu: the backend's `inspect`, enqueued. */
rfr_status rfi_cuda_inspect(rfi_range *ranges, int n, cudaStream_t stream);

/* fill.cu: the kernel fill(unsigned char *to, uint4 pattern, int64_t bytes), with RFI_FILL_THREADS threads per block.
 * Every aligned group of 16 bytes becomes the pattern. */
enum { RFI_FILL_THREADS = 256 };
void *rfi_fill_kernel(void);

#define RFI_CUDA_PASTE_(a, b) a##b
#define RFI_CUDA(op) RFI_CUDA_PASTE_(rfi_cuda_, op)
typedef struct rfi_cuda_kernel {
  rfr_kernel_fn run;
  rfr_workspace_fn workspace; /* NULL: none */
  /* supports a call, by shapes and strides; NULL: every call that the op's rule allows */
  int (*takes)(const rfr_call *call);
  rfr_status (*run_all)(const rfr_call *const *calls, int n); /* one launch for n successive independent ops, on the
                                                                 stream of the first; NULL: one launch per op */
  const char *(*needs)(const rfr_call *call);                 /* architecture of the kernel: "sm90"; NULL: "sm80" */
  /* Writes why there is no kernel for the call, or no faster one; returns false if no reason is known. NULL: no
   * reasons. */
  bool (*lacks)(const rfr_call *call, char *text, size_t size);
} rfi_cuda_kernel;
#define RFI_OP(name, family, operands, results, attributes, flags) \
  extern const rfi_cuda_kernel RFI_CUDA(name) __attribute__((weak));
#include "ops/ops.def"
#undef RFI_OP

#ifdef __cplusplus
}
#endif
#endif
