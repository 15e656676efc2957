/* SPDX-License-Identifier: Apache-2.0
 *
 * What each op family gives the tests, in X_ref.c beside its kernels:
 *
 *   RFT_REF(rmsnorm) { ... }       reference kernel: plain loops, every float operand and
 *                                  result is f64, dense; integers stay what they are. Absent
 *                                  operands and dead results have data == NULL. A result that
 *                                  shares its operand's storage (acc, state) arrives with the
 *                                  same pointer.
 *   RFT_CASES(rmsnorm) = {"rmsnorm(f[7,13], f[13]) eps=1e-5", ..., NULL};
 *
 * A case is one op in text. Operands: f[..] a float of the type under test (f32, bf16),
 * F[..] always f32 (statistics, master weights, scalars of the step), i[..]<50 int32 below
 * 50, i[..]=0,3,7 given int32, I[..]=... given int64, _ absent. After a float shape: ">0" positive
 * values, "=1" a constant, "^T" stored transposed (last two dimensions swapped in memory: a
 * strided view), "/2" every second column of a wider row (a strided view); the last two only
 * for ops that take such strides. "@mb=3" after the operands sets the microbatch.
 * Attributes as the trace prints them: eps=1e-05 ta=1 to=f32 (to=f: the type under test).
 *
 * At least four cases an op: primes, a dimension of size 1, a length that is no multiple of
 * 16, an empty tensor. Dimensions within a case differ, so that swapped ones show.
 */
#ifndef RFT_OP_CASE_H
#define RFT_OP_CASE_H

#include "ops/call.h"

#define RFT_REF(op) void rft_ref_##op(const rfi_call *call)
#define RFT_CASES(op) const char *const rft_cases_##op[]

#endif
