/* SPDX-License-Identifier: Apache-2.0
 *
 * Every op with its reference, its plain reference and its cases, found by name: a new op needs its row in ops.def and
 * its X_ref.c, and cannot be forgotten.
 */
#include "support/op_check.h"

#define RFI_OP(name, family, operands, results, attributes, flags)   \
  RFT_REF(name) __attribute__((weak));                               \
  void rft_plain_##name(const rfi_call *call) __attribute__((weak)); \
  RFT_OPERANDS(name) __attribute__((weak));                          \
  extern RFT_CASES(name) __attribute__((weak));
#include "ops/ops.def"
#undef RFI_OP

static const struct {
  rft_ref_fn ref, plain, operands;
  const char *const *cases;
} found[RFI_OP_COUNT] = {
#define RFI_OP(name, family, operands, results, attributes, flags) \
  {rft_ref_##name, rft_plain_##name, rft_operands_##name, rft_cases_##name},
#include "ops/ops.def"
#undef RFI_OP
};

rft_op rft_op_get(rfi_opcode code) {
  return (rft_op){rfi_op_def_get(code), found[code].ref, found[code].plain, found[code].operands, found[code].cases};
}
