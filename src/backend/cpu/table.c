/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel table of one instruction set, made from ops.def; compiled once per set.
 */
#include "backend/cpu/cpu.h"

extern const rfi_kernel *const RFI_CPU(table)[RFI_OP_COUNT];
const rfi_kernel *const RFI_CPU(table)[RFI_OP_COUNT] = {
#define RFI_OP(name, family, operands, results, attributes, flags) [RFI_OP_##name] = &RFI_CPU(name),
#include "ops/ops.def"
#undef RFI_OP
};
