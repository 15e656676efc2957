/* SPDX-License-Identifier: Apache-2.0
 *
 * X_quantize on the CPU: X, then quantize.
 */
#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "ops/quant/fused.h"

static rfr_status run(const rfi_call *call, rfi_opcode code, const rfi_kernel *op) {
  rfi_fused f;
  rfi_fused_of(call, code, &f);
  RFI_TRY(op->run(&f.op));
  for (int p = 0; p < f.form.parts; p++) RFI_TRY(RFI_CPU(quantize).run(&f.quantize[p]));
  return RFR_OK;
}

static size_t workspace(const rfi_call *call, rfi_opcode code, const rfi_kernel *op) {
  rfi_fused f;
  rfi_fused_of(call, code, &f);
  const size_t first = op->workspace ? op->workspace(&f.op) : 0, then = RFI_CPU(quantize).workspace(&f.quantize[0]);
  return f.scratch + (first > then ? first : then);
}

#define KERNEL(name, n_in, n_out, n_attrs, first, parts)                                                               \
  static rfr_status run_##name(const rfi_call *c) { return run(c, RFI_OP_##name##_quantize, &RFI_CPU(name)); }         \
  static size_t workspace_##name(const rfi_call *c) { return workspace(c, RFI_OP_##name##_quantize, &RFI_CPU(name)); } \
  const rfi_kernel RFI_CPU(name##_quantize) = {run_##name, workspace_##name};
RFI_FUSED_OPS(KERNEL)
