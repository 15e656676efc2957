/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA errors as statuses. After an error that leaves the device's context unusable, the runtime
 * returns that error from every later call, and so does the module: no result is valid any more. A
 * library that sees it first reports only that its own call failed, so the context is queried.
 */
#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

static rfi_cuda_fail fail; /* set once, before anything else is called */

void rfi_cuda_errors_go_to(rfi_cuda_fail to) { fail = to; }

/* Errors that the context returns from every later call. */
static bool is_sticky(cudaError_t e) {
  switch (e) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained: return true;
    default: return false;
  }
}

rfr_status rfi_cuda_check(cudaError_t e, const char *what) {
  if (e == cudaSuccess) return RFR_OK;
  if (is_sticky(e))
    return fail(RFI_E_BACKEND_DEAD, "%s: the GPU's context is dead: %s (%s)", what, cudaGetErrorString(e),
                cudaGetErrorName(e));
  const bool memory = e == cudaErrorMemoryAllocation;
  cudaGetLastError(); /* clears the error, so that the next call does not report it */
  return fail(memory ? RFI_E_NO_MEMORY : RFI_E_CUDA, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

rfr_status rfi_cuda_alive(cudaStream_t stream, const char *what) {
  const cudaError_t e = cudaStreamQuery(stream);
  if (is_sticky(e)) return rfi_cuda_check(e, what);
  cudaGetLastError();
  return RFR_OK;
}
