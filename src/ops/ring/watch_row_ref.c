/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of the watch ring.
 */
#include <math.h>

#include "ops/ring/watch_sums.h"
#include "support/op_case.h"

static double *row_of(const rfi_call *call, int64_t row) {
  const rfr_type *ring = &call->out[0].type;
  const int64_t slot = *(int64_t *)call->in[1].data % ring->shape[0];
  return (double *)call->out[0].data + (slot * ring->shape[1] + row) * RFI_WATCH_SUMS;
}

RFT_REF(watch_row) {
  const double *x = call->in[2].data;
  const int64_t n = rfi_count(&call->in[2].type);
  double *row = row_of(call, call->attr[0].i);
  for (int k = 0; k < RFI_WATCH_SUMS && !call->attr[1].i; k++) row[k] = 0;
  for (int64_t i = 0; i < n; i++) {
    row[RFI_WATCH_COUNT] += 1;
    if (isnan(x[i])) row[RFI_WATCH_NANS] += 1;
    else if (isinf(x[i])) row[RFI_WATCH_INFS] += 1;
    else if (x[i] == 0) row[RFI_WATCH_ZEROS] += 1;
    if (!isfinite(x[i])) continue;
    row[RFI_WATCH_SUM] += x[i];
    row[RFI_WATCH_SQUARES] += x[i] * x[i];
    if (fabs(x[i]) > row[RFI_WATCH_MAX]) row[RFI_WATCH_MAX] = fabs(x[i]);
    if (x[i] != 0 && (row[RFI_WATCH_LEAST] == 0 || fabs(x[i]) < row[RFI_WATCH_LEAST]))
      row[RFI_WATCH_LEAST] = fabs(x[i]);
  }
}
RFT_CASES(watch_row) = {
    "watch_row(D[3,4,8], I[4]=7,5,1,2, f[13,37]) row=2 more=0",
    "watch_row(D[2,3,8], I[4]=0,0,1,0, f[1,1531]) row=1 more=1",
    "watch_row(D[1,2,8], I[4]=41,2,1,0, f[0,5]) row=1 more=0",
    "watch_row(D[1,2,8], I[4]=41,2,1,0, f[0,5]) row=1 more=1",
    "watch_row(D[4,2,8], I[4]=3,2,1,0, f[1]=0) row=1 more=0",
    "watch_row(D[1,7,8], I[4]=1000000007,4,1,0, f[7,33]@3=nan) row=6 more=0",
    "watch_row(D[1,3,8], I[4]=2,4,1,0, f[5,19]@1=inf) row=2 more=1",
    "watch_row(D[1,2,8], I[4]=2,4,1,0, f[127,523]) row=1 more=0",
    NULL,
};

RFT_REF(watch_end) { *row_of(call, 0) = (double)(*(int64_t *)call->in[1].data + 1); }
RFT_CASES(watch_end) = {
    "watch_end(D[3,4,8], I[4]=7,5,1,2)",
    "watch_end(D[1,1,8], I[4]=0,0,1,0)",
    "watch_end(D[2,3,8], I[4]=1000000007,5,1,2)",
    "watch_end(D[5,2,8], I[4]=4,5,1,2)",
    NULL,
};
