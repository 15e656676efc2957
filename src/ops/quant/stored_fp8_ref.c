/* SPDX-License-Identifier: Apache-2.0
 *
 * transposed as loops, and its cases.
 */
#include "support/op_case.h"

RFT_REF(transposed) {
  const rfr_type *x = &call->in[0].type;
  const int64_t slices = x->rank == 3 ? x->shape[0] : 1, N = x->shape[x->rank - 2], K = x->shape[x->rank - 1];
  const double *from = call->in[0].data;
  double *to = call->out[0].data;
  for (int64_t g = 0; g < slices; g++)
    for (int64_t i = 0; i < N; i++)
      for (int64_t k = 0; k < K; k++) to[(g * K + k) * N + i] = from[(g * N + i) * K + k];
}

RFT_CASES(transposed) = {
    "transposed(e[7,13])",      "transposed(e[3,67,131])",
    "transposed(e[1,300])",     "transposed(e[257,1])",
    "transposed(e[2,144,272])", "transposed(e[400,16])",
    "transposed(e[129,128])",   "transposed(e[96,517])",
    "transposed(e[0,5])",       NULL,
};
