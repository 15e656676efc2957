/* SPDX-License-Identifier: Apache-2.0
 *
 * The module's kernel table, made from ops.def. An op without a kernel here is refused with bind.no_kernel.
 */
#include "backend/cuda/table.h"

static const rfi_cuda_kernel *const table[RFI_OP_COUNT] = {
#define RFI_OP(name, family, operands, results, attributes, flags) [RFI_OP_##name] = &RFI_CUDA(name),
#include "ops/ops.def"
#undef RFI_OP
};

const rfi_cuda_kernel *rfi_cuda_kernel_of(rfi_opcode code) { return code < RFI_OP_COUNT ? table[code] : NULL; }
