/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the CUDA module, for C and for kernels.
 *
 * A kernel file X.cu lies beside X_cpu.c and ends with
 *   const rfi_cuda_kernel RFI_CUDA(rmsnorm) = {run, workspace};
 * in extern "C". `run` enqueues on call->stream and returns; it allocates nothing, waits for
 * nothing and reads nothing of the device: grids come from shapes. call->library is the
 * device's rfi_cuda_info, both when the workspace is asked for and when it runs.
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
  int ordinal, sms; /* ordinal -1: no device, for plans alone */
  int major, minor; /* compute capability */
  int portable;     /* nothing above sm_80 */
} rfi_cuda_info;

static inline const rfi_cuda_info *rfi_cuda_info_of(const rfr_call *call) {
  return (const rfi_cuda_info *)call->library;
}

/* RFR_OK, or the error with what was being done. */
rfr_status rfi_cuda_check(cudaError_t error, const char *what);
/* After an error of a library that works in the stream: backend.dead if the device's context is, else RFR_OK. A capture
 * of the stream is void then, as it is after the error. */
rfr_status rfi_cuda_alive(cudaStream_t stream, const char *what);
/* After a launch: what the launch itself said. */
static inline rfr_status rfi_cuda_launched(const char *kernel) { return rfi_cuda_check(cudaGetLastError(), kernel); }

/* inspect.cu: the backend's `inspect`, without waiting. */
rfr_status rfi_cuda_inspect(rfi_range *ranges, int n, cudaStream_t stream);

#define RFI_CUDA_PASTE_(a, b) a##b
#define RFI_CUDA(op) RFI_CUDA_PASTE_(rfi_cuda_, op)
typedef struct rfi_cuda_kernel {
  rfr_kernel_fn run;
  rfr_workspace_fn workspace;         /* NULL: none */
  int (*takes)(const rfr_call *call); /* by shapes and strides; NULL: all that the op's rule allows */
  rfr_status (*run_all)(const rfr_call *const *calls, int n); /* of ops that write in place alone: n that follow each
                                                                 other, at once; NULL: one by one */
  const char *(*needs)(const rfr_call *call); /* the code that runs, by what it needs: "sm90"; NULL: "sm80" */
} rfi_cuda_kernel;
#define RFI_OP(name, family, operands, results, attributes, flags) \
  extern const rfi_cuda_kernel RFI_CUDA(name) __attribute__((weak));
#include "ops/ops.def"
#undef RFI_OP

#ifdef __cplusplus
}
#endif
#endif
