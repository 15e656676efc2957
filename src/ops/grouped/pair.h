/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_swiglu as two calls, the GEMM and then the activation, for backends without a fused kernel. Results are
 * bitwise equal to those of a fused kernel. If the GEMM's result is unused, it is stored at the beginning of the
 * workspace.
 */
#ifndef RFI_PAIR_H
#define RFI_PAIR_H

#include "ops/call.h"

typedef struct rfi_pair {
  rfi_arg made, in[3];
  rfi_call gemm, act; /* grouped_matmul, swiglu_weighted */
  size_t scratch;     /* bytes before the GEMM's workspace */
} rfi_pair;

/* The calls point into `p`. */
static inline void rfi_pair_of(const rfi_call *call, rfi_pair *p) {
  enum { WEIGHT = 3 };
  *p = (rfi_pair){.made = call->out[0], .gemm = *call, .act = *call};
  const int64_t rows = p->made.type.shape[0], columns = p->made.type.shape[1];
  const int64_t bytes = columns * (p->made.type.dtype == RFR_F32 ? 4 : 2); /* bytes of a row */
  p->scratch = p->made.data ? 0 : ((size_t)(rows * bytes) + 255) / 256 * 256;
  if (!p->made.data) p->made.data = call->workspace;
  p->made.stride[0] = columns, p->made.stride[1] = 1;
  p->gemm.n_in = WEIGHT, p->gemm.n_out = 1, p->gemm.out = &p->made;
  p->gemm.workspace = call->workspace ? (char *)call->workspace + p->scratch : NULL;
  p->in[0] = p->in[1] = p->made, p->in[2] = call->in[WEIGHT];
  p->in[0].type.shape[1] = p->in[1].type.shape[1] = columns / 2;
  if (p->made.data) p->in[1].data = (char *)p->made.data + bytes / 2;
  p->act.n_in = 3, p->act.in = p->in, p->act.attr = NULL;
  p->act.n_out = 1, p->act.out = &call->out[1];
}

#endif
