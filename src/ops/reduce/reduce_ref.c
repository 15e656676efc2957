/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of sum, max and max_bwd: an operand is (outer, n, inner) around the
 * axis, and (1, all, 1) when the axis is -1.
 */
#include "support/op_case.h"

typedef struct extent {
  int64_t outer, n, inner;
} extent;

static extent around(const rfi_arg *x, int64_t axis) {
  extent e = {1, 1, 1};
  if (axis == -1) e.n = rfi_count(&x->type);
  else e.n = x->type.shape[axis];
  for (int d = 0; axis >= 0 && d < x->type.rank; d++) {
    if (d < axis) e.outer *= x->type.shape[d];
    if (d > axis) e.inner *= x->type.shape[d];
  }
  return e;
}

RFT_REF(sum) {
  const double *x = call->in[0].data, *acc = call->n_in > 1 ? call->in[1].data : NULL;
  extent e = around(&call->in[0], call->attr[0].i);
  double *y = call->out[0].data;
  for (int64_t o = 0; o < e.outer; o++)
    for (int64_t j = 0; j < e.inner; j++) {
      double s = acc ? acc[o * e.inner + j] : 0;
      for (int64_t k = 0; k < e.n; k++) s += x[(o * e.n + k) * e.inner + j];
      y[o * e.inner + j] = s;
    }
}
RFT_CASES(sum) = {"sum(f[7,13]) axis=0 to=f32",          "sum(f[1,37]/2) axis=1 to=f",
                  "sum(f[11,5]^T, F[11]) axis=1 to=f32", "sum(f[3,5,17], F[3,17]) axis=1 to=f32",
                  "sum(f[0,4]) axis=0 to=f32",           "sum(f[2,19]) axis=-1 to=f32",
                  "sum(f[5,3]^T, F[1]) axis=-1 to=f32",  "sum(f[23]) axis=0 to=f",
                  "sum(f[331,401]) axis=0 to=f32",       "sum(f[257,509]) axis=1 to=f32",
                  "sum(f[257,521]) axis=-1 to=f32",      NULL};

RFT_REF(max) {
  const double *x = call->in[0].data;
  extent e = around(&call->in[0], call->attr[0].i);
  double *y = call->out[0].data;
  for (int64_t o = 0; o < e.outer; o++)
    for (int64_t j = 0; j < e.inner; j++) {
      double m = x[o * e.n * e.inner + j];
      for (int64_t k = 1; k < e.n; k++)
        if (x[(o * e.n + k) * e.inner + j] > m) m = x[(o * e.n + k) * e.inner + j];
      y[o * e.inner + j] = m;
    }
}
RFT_CASES(max) = {"max(f[7,13]) axis=0",    "max(f[1,37]/2) axis=1",
                  "max(f[11,5]^T) axis=1",  "max(f[3,5,17]) axis=1",
                  "max(f[0,4]) axis=1",     "max(f[2,19]) axis=-1",
                  "max(f[331,401]) axis=0", "max(f[257,509]) axis=-1",
                  "max(f[257,509]) axis=1", NULL};

RFT_REF(max_bwd) {
  const double *dy = call->in[0].data, *x = call->in[1].data, *y = call->in[2].data;
  extent e = around(&call->in[1], call->attr[0].i);
  double *dx = call->out[0].data;
  for (int64_t o = 0; o < e.outer; o++)
    for (int64_t j = 0; j < e.inner; j++) {
      bool found = false;
      for (int64_t k = 0; k < e.n; k++) {
        int64_t i = (o * e.n + k) * e.inner + j, r = o * e.inner + j;
        bool hit = !found && x[i] == y[r];
        found |= hit;
        dx[i] = hit ? dy[r] : 0;
      }
    }
}
/* Only ties: the gradient check of max covers different values. */
RFT_CASES(max_bwd) = {"max_bwd(f[13], f[7,13]=1, f[13]=1) axis=0",
                      "max_bwd(f[1], f[1,37]/2=2, f[1]=2) axis=1",
                      "max_bwd(f[3,17], f[3,5,17], f[3,17]) axis=1",
                      "max_bwd(f[0], f[0,4], f[0]) axis=1",
                      "max_bwd(f[1], f[2,19]=1, f[1]=1) axis=-1",
                      "max_bwd(f[211], f[211,307]=1, f[211]=1) axis=1",
                      NULL};
