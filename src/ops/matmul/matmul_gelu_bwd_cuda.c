/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_gelu_bwd on a GPU, for calls that cuBLASLt does not support as one GEMM: a GEMM, then gelu_bwd. Kernel
 * selection offers the GEMM to cuBLASLt: call->library is a rfi_head_library.
 */
#include "backend/cuda/cuda.h"
#include "ops/loss/head.h"
#include "ops/matmul/gelu_pair.h"

static rfr_status run(const rfr_call *call) {
  const rfi_head_library *chosen = call->library;
  rfi_gelu_pair p;
  rfi_gelu_pair_of(call, &p);
  p.gelu.library = (void *)(uintptr_t)chosen->device;
  p.gemm.library = chosen->run ? chosen->handle : p.gelu.library;
  const rfr_status s = chosen->run ? chosen->run(&p.gemm) : RFI_CUDA(matmul).run(&p.gemm);
  return s == RFR_OK ? RFI_CUDA(gelu_bwd).run(&p.gelu) : s;
}

const rfi_cuda_kernel RFI_CUDA(matmul_gelu_bwd) = {run, NULL};
