/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of collectives over one rank, where each is a copy; collective_test.c tests more ranks.
 */
#include <string.h>

#include "support/op_case.h"

static void copy(const rfi_call *call) {
  int64_t n = 1;
  for (int d = 0; d < call->in[0].type.rank; d++) n *= call->in[0].type.shape[d];
  if (n > 0 && call->out[0].data)
    memcpy(call->out[0].data, call->in[0].data, (size_t)(n * rfr_dtype_bits(call->in[0].type.dtype) / 8));
}

RFT_REF(all_gather) { copy(call); }
RFT_CASES(all_gather) = {
    "all_gather(f[7,13]) ranks=1", "all_gather(f[1,5,3]) ranks=1",  "all_gather(f[33]) ranks=1",
    "all_gather(f[0,3]) ranks=1",  "all_gather(i[17]<100) ranks=1", NULL,
};

RFT_REF(reduce_scatter) { copy(call); }
RFT_CASES(reduce_scatter) = {
    "reduce_scatter(f[7,13]) ranks=1",
    "reduce_scatter(f[1,5,3]) ranks=1",
    "reduce_scatter(f[33]) ranks=1",
    "reduce_scatter(f[0,3]) ranks=1",
    NULL,
};

RFT_REF(all_reduce) { copy(call); }
RFT_CASES(all_reduce) = {
    "all_reduce(f[7,13]) ranks=1",
    "all_reduce(f[1,5,3]) ranks=1",
    "all_reduce(f[33]) ranks=1",
    "all_reduce(f[0,3]) ranks=1",
    NULL,
};

RFT_REF(all_to_all) { copy(call); }
RFT_CASES(all_to_all) = {
    "all_to_all(f[7,13]) ranks=1", "all_to_all(f[1,5,3]) ranks=1",  "all_to_all(f[33]) ranks=1",
    "all_to_all(f[0,3]) ranks=1",  "all_to_all(i[17]<100) ranks=1", NULL,
};

RFT_REF(all_to_all_rows) {
  const int64_t rows = call->in[0].type.shape[0], C = call->in[0].type.shape[1];
  const double *x = call->in[0].data;
  const int32_t *received = call->in[2].data;
  double *y = call->out[0].data;
  int64_t n = 0;
  for (int64_t g = 0; g < call->in[2].type.shape[0]; g++) n += received[g] > 0 ? received[g] : 0;
  for (int64_t i = 0; i < rows * C; i++) y[i] = i / C < n ? x[i] : 0;
}
RFT_CASES(all_to_all_rows) = {
    "all_to_all_rows(f[7,13], i[2]=3,4, i[2]=3,4) ranks=1",
    "all_to_all_rows(f[1,5], i[1]=1, i[1]=1) ranks=1",
    "all_to_all_rows(f[33,1], i[3]=40,1,0, i[3]=40,1,0) ranks=1",
    "all_to_all_rows(f[0,3], i[1]=2, i[1]=2) ranks=1",
    NULL,
};
