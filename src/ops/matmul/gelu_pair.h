/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_gelu_bwd as two calls, the GEMM and then gelu_bwd, for backends without a fused kernel. Results are bitwise
 * equal to those of the separate ops.
 */
#ifndef RFI_GELU_PAIR_H
#define RFI_GELU_PAIR_H

#include "ops/call.h"
#include "ops/op_index.h"

typedef struct rfi_gelu_pair {
  rfi_arg in[2];
  rfi_attr attr;
  rfi_call gemm, gelu; /* matmul, gelu_bwd */
} rfi_gelu_pair;

/* The calls reference `p` and `call`. gelu_bwd works in place: it reads each element before it writes it. */
static inline void rfi_gelu_pair_of(const rfi_call *call, rfi_gelu_pair *p) {
  *p = (rfi_gelu_pair){.in = {call->out[0], call->in[RFI_IN_matmul_gelu_bwd_x]}, .gemm = *call, .gelu = *call};
  p->attr.i = 1;
  p->gemm.n_in = RFI_IN_matmul_gelu_bwd_x; /* the operands and attributes before it are those of matmul */
  p->gelu.n_in = 2, p->gelu.in = p->in, p->gelu.attr = &p->attr;
}

#endif
