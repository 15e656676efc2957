/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of pad and concat: every operand is (outer, n, inner) around the axis.
 */
#include <string.h>

#include "support/op_case.h"

static size_t element(const rfi_arg *a) {
  return a->type.dtype == RFR_I32 ? sizeof(int32_t) : sizeof(double); /* f64 or i64 */
}

/* Copies x into y at `start` along the axis. */
static void place(const rfi_arg *y, const rfi_arg *x, int64_t axis, int64_t start) {
  int64_t outer = 1, inner = 1, n = x->type.shape[axis], m = y->type.shape[axis];
  for (int d = 0; d < axis; d++) outer *= x->type.shape[d];
  for (int d = (int)axis + 1; d < x->type.rank; d++) inner *= x->type.shape[d];
  size_t size = element(x);
  for (int64_t o = 0; o < outer; o++)
    for (int64_t k = 0; k < n * inner; k++)
      memcpy((char *)y->data + (size_t)((o * m + start) * inner + k) * size,
             (const char *)x->data + (size_t)(o * n * inner + k) * size, size);
}

RFT_REF(pad) {
  const rfi_arg *y = &call->out[0];
  if (rfi_count(&y->type) == 0) return;
  memset(y->data, 0, (size_t)rfi_count(&y->type) * element(y));
  place(y, &call->in[0], call->attr[0].i, call->attr[1].i);
}
RFT_CASES(pad) = {"pad(f[7,13]) axis=0 start=2 count=11",
                  "pad(f[1,37]) axis=1 start=0 count=41",
                  "pad(f[5,3]^T) axis=1 start=3 count=8",
                  "pad(f[2,3,17]/2) axis=1 start=1 count=5",
                  "pad(f[0,4]) axis=0 start=1 count=3",
                  "pad(f[151,233]) axis=1 start=7 count=241",
                  NULL};

RFT_REF(concat) {
  if (rfi_count(&call->out[0].type) == 0) return;
  int64_t start = 0;
  for (int i = 0; i < call->n_in; i++) {
    place(&call->out[0], &call->in[i], call->attr[0].i, start);
    start += call->in[i].type.shape[call->attr[0].i];
  }
}
RFT_CASES(concat) = {"concat(f[7,13], f[3,13]) axis=0",
                     "concat(f[5,1], f[5,11]/2, f[5,4]) axis=1",
                     "concat(f[3,2,17]) axis=2",
                     "concat(f[0,4], f[5,4], f[0,4]) axis=0",
                     "concat(f[6,5]^T, f[6,7]) axis=1",
                     "concat(i[3]<9, i[5]<9) axis=0",
                     "concat(f[101,223], f[101,229]) axis=1",
                     NULL};
