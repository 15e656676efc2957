/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_gelu_bwd on the CPU: a GEMM, then gelu_bwd. Programs for the CPU do not have this op, because a library can
 * run the separate GEMM.
 */
#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "ops/matmul/gelu_pair.h"

static rfr_status run(const rfi_call *call) {
  rfi_gelu_pair p;
  rfi_gelu_pair_of(call, &p);
  RFI_TRY(RFI_CPU(matmul).run(&p.gemm));
  return RFI_CPU(gelu_bwd).run(&p.gelu);
}

static size_t workspace(const rfi_call *call) {
  rfi_gelu_pair p;
  rfi_gelu_pair_of(call, &p);
  return RFI_CPU(matmul).workspace(&p.gemm);
}

const rfi_kernel RFI_CPU(matmul_gelu_bwd) = {run, workspace};
