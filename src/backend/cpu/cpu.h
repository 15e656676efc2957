/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend: one kernel table per instruction set.
 *
 * A kernel file X_cpu.c is compiled once for each set and ends with
 *   const rfi_kernel RFI_CPU(rmsnorm) = {run, workspace};
 * so that the name becomes rfi_cpu_rmsnorm_v4. Everything else in it is static.
 */
#ifndef RFI_CPU_H
#define RFI_CPU_H

#include "ops/call.h"

#define RFI_PASTE3_(a, b, c) a##b##_##c
#define RFI_PASTE3(a, b, c) RFI_PASTE3_(a, b, c)
#ifdef RFI_ISA
#define RFI_CPU(op) RFI_PASTE3(rfi_cpu_, op, RFI_ISA)
#define RFI_OP(name, family, operands, results, attributes, flags) \
  extern const rfi_kernel RFI_CPU(name) __attribute__((weak));
#include "ops/ops.def"
#undef RFI_OP
#endif

/* The kernel of an op for an instruction set ("v2", "v3", "v4"); NULL where there is none. */
const rfi_kernel *rfi_cpu_kernel(const char *isa, rfi_opcode code);

#endif
