/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of losses per token and per sequence.
 */
#include <math.h>
#include <string.h>

#include "ops/loss/loss_ref.h"
#include "support/op_case.h"

/* ---- losses of tokens ---- */

RFT_REF(token_loss) {
  const double *logits = call->in[0].data;
  const int32_t *targets = call->in[1].data;
  double *nll = call->out[0].data, *lse = call->out[1].data;
  int64_t T = call->in[0].type.shape[0], V = call->in[0].type.shape[1];
  for (int64_t t = 0; t < T; t++) {
    double l = row_lse(logits + t * V, V);
    if (nll) nll[t] = is_valid(targets[t], call->attr[0].i, V) ? l - logits[t * V + targets[t]] : 0;
    if (lse) lse[t] = l;
  }
}
RFT_CASES(token_loss) = {
    "token_loss(f[7,13], i[7]<13) ignore=-100",
    "token_loss(f[11,257], i[11]<257) ignore=3",
    "token_loss(f[1,2053], i[1]<2053) ignore=-100",
    "token_loss(f[5,1], i[5]=0,-100,0,0,0) ignore=-100",
    "token_loss(f[3,37], i[3]=36,-1,40) ignore=-100",
    "token_loss(f[0,9], i[0]<9) ignore=-100",
    NULL,
};

RFT_REF(token_loss_bwd) {
  const double *dnll = call->in[0].data, *logits = call->in[1].data, *lse = call->in[3].data;
  const int32_t *targets = call->in[2].data;
  double *dlogits = call->out[0].data;
  int64_t T = call->in[1].type.shape[0], V = call->in[1].type.shape[1];
  for (int64_t t = 0; t < T; t++)
    for (int64_t v = 0; v < V; v++)
      dlogits[t * V + v] = is_valid(targets[t], call->attr[0].i, V)
                               ? (exp(logits[t * V + v] - lse[t]) - (v == targets[t])) * dnll[t]
                               : 0;
}
RFT_CASES(token_loss_bwd) = {
    "token_loss_bwd(F[7], f[7,13], i[7]<13, F[7]>0) ignore=-100",
    "token_loss_bwd(F[11], f[11,257], i[11]<257, F[11]=6) ignore=3",
    "token_loss_bwd(F[1]=-1, f[1,2053], i[1]<2053, F[1]=8) ignore=-100",
    "token_loss_bwd(F[5], f[5,1], i[5]=0,-100,0,0,0, F[5]) ignore=-100",
    "token_loss_bwd(F[67], f[67,1031], i[67]<1031, F[67]=7) ignore=-100",
    "token_loss_bwd(F[0], f[0,9], i[0]<9, F[0]) ignore=-100",
    NULL,
};

/* One row of logits and of their gradient at a time. */
RFT_REF(linear_token_loss) {
  const double *x = call->in[0].data, *w = call->in[1].data, *dnll = call->in[3].data;
  const int32_t *targets = call->in[2].data;
  double *nll = call->out[0].data, *dx = call->out[1].data, *dw = call->out[2].data, row[4096];
  double cap = call->attr[2].f;
  int64_t T = call->in[0].type.shape[0], C = call->in[0].type.shape[1], V = call->in[1].type.shape[0];
  if (dw && !call->in[4].data) memset(dw, 0, (size_t)(V * C) * sizeof *dw);
  if (dx) memset(dx, 0, (size_t)(T * C) * sizeof *dx);
  for (int64_t t = 0; t < T; t++) {
    for (int64_t v = 0; v < V; v++) {
      row[v] = dot(x + t * C, w + v * C, C, (rfr_dtype)call->attr[3].i);
      if (cap > 0) row[v] = cap * tanh(row[v] / cap);
    }
    double lse = row_lse(row, V);
    int valid = is_valid(targets[t], call->attr[0].i, V);
    if (nll) nll[t] = valid ? lse - row[targets[t]] : 0;
    for (int64_t v = 0; dnll && valid && v < V; v++) {
      double d = (exp(row[v] - lse) - (v == targets[t])) * dnll[t];
      if (cap > 0) d *= 1 - row[v] / cap * (row[v] / cap);
      for (int64_t c = 0; dx && c < C; c++) dx[t * C + c] += d * w[v * C + c];
      for (int64_t c = 0; dw && c < C; c++) dw[v * C + c] += d * x[t * C + c];
    }
  }
}
RFT_CASES(linear_token_loss) = {
    "linear_token_loss(f[7,13], f[11,13], i[7]<11, F[7], _) ignore=-100 chunk=3 cap=0 to=f32",
    "linear_token_loss(f[29,17], f[101,17], i[29]<101, F[29], F[101,17]) ignore=4 chunk=8 cap=0 to=f32",
    "linear_token_loss(f[5,1], f[3,1], i[5]=0,-100,2,7,1, F[5], _) ignore=-100 chunk=64 cap=0 to=f32",
    "linear_token_loss(f[1,33], f[1049,33], i[1]<1049, F[1]=1, _) ignore=-100 chunk=1 cap=0 to=f32",
    "linear_token_loss(f[64,40], f[259,40], i[64]<259, F[64], _) ignore=-100 chunk=32 cap=0 to=f32",
    "linear_token_loss(f[64,40], f[259,40], i[64]<259, F[64], _) ignore=-100 chunk=32 cap=0 to=f",
    "linear_token_loss(f[31,19], f[67,19], i[31]<67, F[31], _) ignore=-100 chunk=8 cap=1.5 to=f32",
    "linear_token_loss(f[0,5], f[7,5], i[0]<7, F[0], _) ignore=-100 chunk=16 cap=0 to=f32",
    "linear_token_loss(f[0,5], f[7,5], i[0]<7, F[0], F[7,5]) ignore=-100 chunk=16 cap=0 to=f32",
    NULL,
};

/* ---- sums of segments ---- */

RFT_REF(segment_sum) {
  const double *x = call->in[0].data;
  const int32_t *offsets = call->in[1].data;
  double *y = call->out[0].data;
  for (int64_t s = 0; s < call->out[0].type.shape[0]; s++) {
    y[s] = 0;
    for (int64_t t = offsets[s]; t < offsets[s + 1]; t++) y[s] += x[t];
  }
}
RFT_CASES(segment_sum) = {
    "segment_sum(f[13], i[5]=0,3,3,11,13)",
    "segment_sum(f[67], i[4]=2,2,61,66)",
    "segment_sum(f[1], i[2]=0,1)",
    "segment_sum(f[1031], i[6]=0,257,258,259,1000,1031)",
    "segment_sum(f[7], i[1]=0)",
    "segment_sum(f[0], i[3]=0)",
    NULL,
};

RFT_REF(segment_sum_bwd) {
  const double *dy = call->in[0].data;
  const int32_t *offsets = call->in[1].data;
  double *dx = call->out[0].data;
  memset(dx, 0, (size_t)call->out[0].type.shape[0] * sizeof *dx);
  for (int64_t s = 0; s < call->in[0].type.shape[0]; s++)
    for (int64_t t = offsets[s]; t < offsets[s + 1]; t++) dx[t] = dy[s];
}
RFT_CASES(segment_sum_bwd) = {
    "segment_sum_bwd(F[4], i[5]=0,3,3,11,13) rows=13 to=f",
    "segment_sum_bwd(F[3], i[4]=2,2,61,66) rows=67 to=f",
    "segment_sum_bwd(F[1], i[2]=0,1) rows=1 to=f",
    "segment_sum_bwd(F[5], i[6]=0,257,258,259,1000,1031) rows=1031 to=f",
    "segment_sum_bwd(F[0], i[1]=0) rows=7 to=f",
    "segment_sum_bwd(F[2], i[3]=0) rows=0 to=f",
    NULL,
};

/* ---- pairs ---- */

static double gain(const double *sums, const double *reference, int64_t p) {
  return sums[2 * p + 1] - sums[2 * p] - reference[p];
}
static double log_sigmoid(double x) { return x > 0 ? -log1p(exp(-x)) : x - log1p(exp(x)); }

RFT_REF(dpo_loss) {
  const double beta = call->attr[0].f, smoothing = call->attr[1].f, inv = *(double *)call->in[3].data;
  double sums[3] = {0};
  for (int64_t p = 0; p < call->in[2].type.shape[0]; p++) {
    if (((int32_t *)call->in[2].data)[p] < 0) continue;
    const double h = gain(call->in[0].data, call->in[1].data, p);
    sums[0] -= (1 - smoothing) * log_sigmoid(beta * h) + smoothing * log_sigmoid(-beta * h);
    sums[1] += beta * h;
    sums[2] += h > 0;
  }
  for (int j = 0; j < 3; j++)
    if (call->out[j].data) *(double *)call->out[j].data = sums[j] * inv;
}
RFT_CASES(dpo_loss) = {
    "dpo_loss(f[6], F[3], i[3]=0,1,2, F[1]=0.333) beta=0.1 smoothing=0",
    "dpo_loss(f[14], F[7], i[7]=5,-100,4,0,-1,2,9, F[1]=0.2) beta=0.5 smoothing=0.1",
    "dpo_loss(f[2], F[1], i[1]=3, F[1]=1) beta=2 smoothing=0.25",
    "dpo_loss(f[538], F[269], i[269]<50, F[1]=0.00371) beta=0.1 smoothing=0",
    "dpo_loss(f[10], F[5], i[5]=-100, F[1]=0) beta=0.1 smoothing=0",
    "dpo_loss(f[0], F[0], i[0]=1, F[1]=0) beta=0.1 smoothing=0",
    NULL,
};

RFT_REF(dpo_loss_bwd) {
  const double beta = call->attr[0].f, smoothing = call->attr[1].f;
  const double by = *(double *)call->in[0].data * *(double *)call->in[4].data * beta;
  double *d = call->out[0].data;
  for (int64_t p = 0; p < call->in[3].type.shape[0]; p++) {
    const double z = beta * gain(call->in[1].data, call->in[2].data, p), s = 1 / (1 + exp(-z));
    const double slope = ((int32_t *)call->in[3].data)[p] < 0 ? 0 : smoothing * s - (1 - smoothing) * (1 - s);
    d[2 * p] = -by * slope;
    d[2 * p + 1] = by * slope;
  }
}
RFT_CASES(dpo_loss_bwd) = {
    "dpo_loss_bwd(F[1]=1, f[6], F[3], i[3]=0,1,2, F[1]=0.333) beta=0.1 smoothing=0",
    "dpo_loss_bwd(F[1]=-2, f[14], F[7], i[7]=5,-100,4,0,-1,2,9, F[1]=0.2) beta=0.5 smoothing=0.1",
    "dpo_loss_bwd(F[1]=1, f[2], F[1], i[1]=3, F[1]=1) beta=2 smoothing=0.25",
    "dpo_loss_bwd(F[1]=0.5, f[538], F[269], i[269]<50, F[1]=0.00371) beta=0.1 smoothing=0",
    "dpo_loss_bwd(F[1]=1, f[0], F[0], i[0]=1, F[1]=0) beta=0.1 smoothing=0",
    NULL,
};
