/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of the rings.
 */
#include <string.h>

#include "support/op_case.h"

RFT_REF(ring_read) {
  const rfi_arg *ring = &call->in[0], *x = &call->out[0];
  int64_t attempted = *(int64_t *)call->in[1].data;
  size_t bytes = (size_t)rfi_bytes(&x->type);
  if (bytes) memcpy(x->data, (char *)ring->data + (size_t)(attempted % ring->type.shape[0]) * bytes, bytes);
}
RFT_CASES(ring_read) = {
    "ring_read(f[3,7,5], I[4]=0,0,1,0)",
    "ring_read(i[2,13]<50, I[4]=7,5,1,2)",
    "ring_read(f[1,1,33], I[4]=1000000007,4,1,0)",
    "ring_read(f[4,0,3], I[4]=2,2,1,0)",
    "ring_read(i[5]<9, I[4]=14,2,1,0)",
    NULL,
};

RFT_REF(metrics_write) {
  const rfi_arg *ring = &call->out[0];
  int64_t attempted = *(int64_t *)call->in[1].data, width = ring->type.shape[1];
  double *row = (double *)ring->data + attempted % ring->type.shape[0] * width;
  row[0] = (double)(attempted + 1);
  const int64_t last = call->n_in - 2;
  for (int64_t k = 1; k <= last; k++) {
    const rfi_arg *v = &call->in[1 + k];
    if (v->type.dtype == RFR_I32) row[k] = *(int32_t *)v->data;
    else if (v->type.dtype == RFR_I64) row[k] = (double)*(int64_t *)v->data;
    else memcpy(&row[k], v->data, (size_t)(k < last ? 1 : width - last) * sizeof *row); /* a scalar, or the vector */
  }
}
RFT_CASES(metrics_write) = {
    "metrics_write(D[3,4], I[4]=0,0,1,0, F[1], F[1]=2.5, i[1]=7)",
    "metrics_write(D[2,2], I[4]=5,5,1,0, I[1]=123456789012)",
    "metrics_write(D[1,1], I[4]=41,2,1,0)",
    "metrics_write(D[5,3], I[4]=7,5,1,2, i[1]=-3, F[1])",
    "metrics_write(D[3,73], I[4]=4,5,1,2, i[1]=-3, F[1], F[70])",
    "metrics_write(D[2,2], I[4]=4,5,1,2, i[1]=-3, F[0])",
    NULL,
};
