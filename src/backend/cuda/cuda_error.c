/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors of CUDA as ours. After one that leaves the device's context unusable the runtime gives
 * that error to every later call, and so do we: no result can be trusted any more. A library
 * that meets it first says no more than that its own call failed, so the context is asked.
 */
#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

static rfi_cuda_fail fail; /* set once, before anything else is called */

void rfi_cuda_errors_go_to(rfi_cuda_fail to) { fail = to; }

/* Errors after which the context answers nothing else, whatever it is asked. */
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
  cudaGetLastError(); /* an error that is not sticky must not turn up in the next call */
  return fail(memory ? RFI_E_NO_MEMORY : RFI_E_CUDA, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

rfr_status rfi_cuda_alive(cudaStream_t stream, const char *what) {
  const cudaError_t e = cudaStreamQuery(stream);
  if (is_sticky(e)) return rfi_cuda_check(e, what);
  cudaGetLastError();
  return RFR_OK;
}
