/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_swiglu on the CPU: a GEMM, then the activation. Fusing the two would gain nothing: their data fits into the
 * caches or it does not.
 */
#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "ops/grouped/pair.h"

static size_t workspace(const rfi_call *call) {
  rfi_pair p;
  rfi_pair_of(call, &p);
  return p.scratch + RFI_CPU(grouped_matmul).workspace(&p.gemm);
}

static rfr_status run(const rfi_call *call) {
  rfi_pair p;
  rfi_pair_of(call, &p);
  RFI_TRY(RFI_CPU(grouped_matmul).run(&p.gemm));
  return p.act.out->data ? RFI_CPU(swiglu_weighted).run(&p.act) : RFR_OK;
}

const rfi_kernel RFI_CPU(grouped_swiglu) = {run, workspace};
