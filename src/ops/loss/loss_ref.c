/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of the losses.
 */
#include <math.h>
#include <string.h>

#include "ops/loss/loss_ref.h"
#include "support/op_case.h"

RFT_REF(token_count) {
  double count = 0;
  for (int i = 0; i < call->n_in; i++)
    for (int64_t k = 0; k < rfi_count(&call->in[i].type); k++) {
      int32_t target = ((int32_t *)call->in[i].data)[k];
      count += target >= 0 && target != call->attr[0].i;
    }
  if (call->out[0].data) *(double *)call->out[0].data = count > 0 ? 1 / count : 0;
  if (call->out[1].data) *(double *)call->out[1].data = count;
}
RFT_CASES(token_count) = {
    "token_count(i[7]=3,0,9,3,-100,5,2) ignore=-100",
    "token_count(i[13]<50, i[1]=-100, i[31]<9) ignore=-100",
    "token_count(i[3,11]<4, i[2,5]<4) ignore=2",
    "token_count(i[1]=7) ignore=7",
    "token_count(i[0]<9) ignore=-100",
    NULL,
};

RFT_REF(cross_entropy) {
  const double *logits = call->in[0].data, *inv_valid = call->in[2].data;
  const int32_t *targets = call->in[1].data;
  double *loss = call->out[0].data, *lse = call->out[1].data, sum = 0;
  int64_t T = call->in[0].type.shape[0], V = call->in[0].type.shape[1];
  for (int64_t t = 0; t < T; t++) {
    double l = row_lse(logits + t * V, V);
    if (is_valid(targets[t], call->attr[0].i, V)) sum += l - logits[t * V + targets[t]];
    if (lse) lse[t] = l;
  }
  if (loss) *loss = sum * *inv_valid;
}
RFT_CASES(cross_entropy) = {
    "cross_entropy(f[7,13], i[7]<13, F[1]=0.142857) ignore=-100",
    "cross_entropy(f[11,257], i[11]<257, F[1]=0.1) ignore=3",
    "cross_entropy(f[1,2053], i[1]<2053, F[1]=1) ignore=-100",
    "cross_entropy(f[5,1], i[5]=0,-100,0,0,0, F[1]=0.25) ignore=-100",
    "cross_entropy(f[3,37], i[3]=36,-1,40, F[1]=1) ignore=-100",
    "cross_entropy(f[67,1031], i[67]<1031, F[1]=0.0149254) ignore=-100",
    "cross_entropy(f[0,9], i[0]<9, F[1]=0) ignore=-100",
    NULL,
};

RFT_REF(cross_entropy_bwd) {
  const double *dloss = call->in[0].data, *logits = call->in[1].data, *lse = call->in[3].data;
  const double *inv_valid = call->in[4].data;
  const int32_t *targets = call->in[2].data;
  double *dlogits = call->out[0].data;
  int64_t T = call->in[1].type.shape[0], V = call->in[1].type.shape[1];
  for (int64_t t = 0; t < T; t++)
    for (int64_t v = 0; v < V; v++)
      dlogits[t * V + v] = is_valid(targets[t], call->attr[0].i, V)
                               ? (exp(logits[t * V + v] - lse[t]) - (v == targets[t])) * *inv_valid * *dloss
                               : 0;
}
RFT_CASES(cross_entropy_bwd) = {
    "cross_entropy_bwd(F[1]=1, f[7,13], i[7]<13, F[7]>0, F[1]=0.142857) ignore=-100",
    "cross_entropy_bwd(F[1]=0.5, f[11,257], i[11]<257, F[11]=6, F[1]=0.1) ignore=3",
    "cross_entropy_bwd(F[1]=-1, f[1,2053], i[1]<2053, F[1]=8, F[1]=1) ignore=-100",
    "cross_entropy_bwd(F[1]=2, f[5,1], i[5]=0,-100,0,0,0, F[5], F[1]=0.25) ignore=-100",
    "cross_entropy_bwd(F[1]=1, f[3,37], i[3]=36,-1,40, F[3]=4, F[1]=1) ignore=-100",
    "cross_entropy_bwd(F[1]=1, f[67,1031], i[67]<1031, F[67]=7, F[1]=0.0149254) ignore=-100",
    "cross_entropy_bwd(F[1]=1, f[0,9], i[0]<9, F[0], F[1]=0) ignore=-100",
    NULL,
};

/* One row of logits and of their gradient at a time. */
RFT_REF(linear_cross_entropy) {
  const double *x = call->in[0].data, *w = call->in[1].data, *inv_valid = call->in[3].data, *dloss = call->in[4].data;
  const int32_t *targets = call->in[2].data;
  double *dx = call->out[1].data, *dw = call->out[2].data, sum = 0, row[4096], cap = call->attr[2].f;
  int64_t T = call->in[0].type.shape[0], C = call->in[0].type.shape[1], V = call->in[1].type.shape[0];
  if (dw && !call->in[5].data) memset(dw, 0, (size_t)(V * C) * sizeof *dw);
  if (dx) memset(dx, 0, (size_t)(T * C) * sizeof *dx);
  for (int64_t t = 0; t < T; t++) {
    for (int64_t v = 0; v < V; v++) {
      row[v] = dot(x + t * C, w + v * C, C, (rfr_dtype)call->attr[3].i);
      if (cap > 0) row[v] = cap * tanh(row[v] / cap);
    }
    if (!is_valid(targets[t], call->attr[0].i, V)) continue;
    double lse = row_lse(row, V);
    sum += lse - row[targets[t]];
    for (int64_t v = 0; dloss && v < V; v++) {
      double d = (exp(row[v] - lse) - (v == targets[t])) * *inv_valid * *dloss;
      if (cap > 0) d *= 1 - row[v] / cap * (row[v] / cap);
      for (int64_t c = 0; dx && c < C; c++) dx[t * C + c] += d * w[v * C + c];
      for (int64_t c = 0; dw && c < C; c++) dw[v * C + c] += d * x[t * C + c];
    }
  }
  if (call->out[0].data) *(double *)call->out[0].data = sum * *inv_valid;
}
RFT_CASES(linear_cross_entropy) = {
    "linear_cross_entropy(f[7,13], f[11,13], i[7]<11, F[1]=0.142857, F[1]=1, _) ignore=-100 chunk=3 cap=0 to=f32",
    "linear_cross_entropy(f[29,17], f[101,17], i[29]<101, F[1]=0.0357, F[1]=0.5, F[101,17]) "
    "ignore=4 chunk=8 cap=0 to=f32",
    "linear_cross_entropy(f[5,1], f[3,1], i[5]=0,-100,2,7,1, F[1]=0.25, F[1]=2, _) ignore=-100 chunk=64 cap=0 to=f32",
    "linear_cross_entropy(f[1,33], f[1049,33], i[1]<1049, F[1]=1, F[1]=1, _) ignore=-100 chunk=1 cap=0 to=f32",
    "linear_cross_entropy(f[6,9], f[1,9], i[6]=0,0,0,0,0,0, F[1]=0.166, F[1]=1, F[1,9]) "
    "ignore=-100 chunk=4 cap=0 to=f32",
    "linear_cross_entropy(f[64,40], f[259,40], i[64]<259, F[1]=0.0156, F[1]=1, _) ignore=-100 chunk=32 cap=0 to=f32",
    "linear_cross_entropy(f[64,40], f[259,40], i[64]<259, F[1]=0.0156, F[1]=1, _) ignore=-100 chunk=32 cap=0 to=f",
    "linear_cross_entropy(f[9,23], f[1037,23], i[9]<1037, F[1]=0.111, F[1]=0.5, F[1037,23]) "
    "ignore=7 chunk=4 cap=0 to=f",
    "linear_cross_entropy(f[31,19], f[67,19], i[31]<67, F[1]=0.0322, F[1]=1, _) ignore=-100 chunk=8 cap=1.5 to=f32",
    "linear_cross_entropy(f[9,23], f[1037,23], i[9]<1037, F[1]=0.111, F[1]=0.5, F[1037,23]) "
    "ignore=7 chunk=9 cap=3 to=f32",
    "linear_cross_entropy(f[0,5], f[7,5], i[0]<7, F[1]=0, F[1]=1, _) ignore=-100 chunk=16 cap=0 to=f32",
    "linear_cross_entropy(f[0,5], f[7,5], i[0]<7, F[1]=0, F[1]=1, F[7,5]) ignore=-100 chunk=16 cap=0 to=f32",
    NULL,
};
