/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention in double, row by row, and its cases: several documents, a document of one row, an empty document (equal
 * offsets), rows before the first and after the last document, offsets that descend or are out of range, shared heads,
 * D that is not a multiple of 16, a prime T, documents that cross blocks, no rows at all; windows of one row, within a
 * tile, across tiles, longer than a document; weak and strong caps. The backward reads the lse of the forward in
 * double. Cases with non-finite rows: a row of q affects its own row, a row of k the rows that attend to it; with a
 * score of +inf, the maximum, the row is NaN. In a backward non-finite values may spread to rows that are computed
 * together, so those cases have one document without a mask.
 */
#include <math.h>

#include "support/op_case.h"

enum { SCALE, CAUSAL, WINDOW, CAP };

/* The keys that row t attends to: those of its document, up to itself if causal, only the last ones if there is a
 * window. Returns their number. */
static int64_t keys_of(const rfi_arg *offsets, int64_t T, int64_t t, const rfi_attr *attr, int64_t *first) {
  const int32_t *x = offsets->data;
  int64_t next = 0;
  for (int64_t d = 0; d + 1 < offsets->type.shape[0]; d++) {
    int64_t from = x[d] > next ? x[d] : next, to = x[d + 1] < T ? x[d + 1] : T;
    if (t >= from && t < to) {
      int64_t end = attr[CAUSAL].i ? t + 1 : to;
      *first = attr[WINDOW].i && end - from > attr[WINDOW].i ? end - attr[WINDOW].i : from;
      return end - *first;
    }
    if (to > next) next = to;
  }
  *first = 0;
  return 0;
}

static double dot(const double *a, const double *b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

/* The score of two rows, and its derivative with respect to their dot product. */
static double score(const rfi_attr *attr, const double *a, const double *b, int64_t D, double *slope) {
  double x = attr[SCALE].f * dot(a, b, D), cap = attr[CAP].f;
  *slope = attr[SCALE].f;
  if (cap == 0) return x;
  double bent = tanh(x / cap);
  *slope *= 1 - bent * bent;
  return cap * bent;
}

static void forward(const rfi_call *call) {
  const rfr_type *qt = &call->in[0].type;
  int64_t T = qt->shape[0], H = qt->shape[1], D = qt->shape[2], Hk = call->in[1].type.shape[1];
  const double *q = call->in[0].data, *k = call->in[1].data, *v = call->in[2].data;
  double *o = call->out[0].data, *lse = call->out[1].data, slope;
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++) {
      int64_t first, n = keys_of(&call->in[3], T, t, call->attr, &first), g = h / (H / Hk);
      const double *row = q + (t * H + h) * D;
      double *y = o + (t * H + h) * D, max = -INFINITY, sum = 0;
      for (int64_t d = 0; d < D && o; d++) y[d] = 0;
      for (int64_t s = first; s < first + n; s++)
        max = fmax(max, score(call->attr, row, k + (s * Hk + g) * D, D, &slope));
      for (int64_t s = first; s < first + n; s++) {
        double p = exp(score(call->attr, row, k + (s * Hk + g) * D, D, &slope) - max);
        sum += p;
        for (int64_t d = 0; d < D && o; d++) y[d] += p * v[(s * Hk + g) * D + d];
      }
      for (int64_t d = 0; d < D && o && n > 0; d++) y[d] /= sum;
      if (lse) lse[h * T + t] = n > 0 ? max + log(sum) : -INFINITY;
    }
}

RFT_REF(attention_cached) {
  const rfr_type *qt = &call->in[0].type, *kt = &call->in[1].type;
  int64_t T = qt->shape[0], H = qt->shape[1], D = qt->shape[2], capacity = kt->shape[0], Hk = kt->shape[1];
  int64_t window = call->attr[WINDOW].i;
  const double *q = call->in[0].data, *k = call->in[1].data, *v = call->in[2].data;
  const int64_t *cursor = call->in[3].data;
  double *o = call->out[0].data, slope;
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++) {
      int64_t at = cursor[0] + t, g = h / (H / Hk), first = window > 0 && at >= window ? at - window + 1 : 0;
      bool counts = cursor[0] >= 0 && at < cursor[1] && at < capacity;
      const double *row = q + (t * H + h) * D;
      double *y = o + (t * H + h) * D, max = -INFINITY, sum = 0;
      for (int64_t d = 0; d < D; d++) y[d] = 0;
      for (int64_t s = first; counts && s <= at; s++)
        max = fmax(max, score(call->attr, row, k + (s * Hk + g) * D, D, &slope));
      for (int64_t s = first; counts && s <= at; s++) {
        double p = exp(score(call->attr, row, k + (s * Hk + g) * D, D, &slope) - max);
        sum += p;
        for (int64_t d = 0; d < D; d++) y[d] += p * v[(s * Hk + g) * D + d];
      }
      for (int64_t d = 0; d < D && counts; d++) y[d] /= sum;
    }
}

RFT_REF(attention) { forward(call); }

/* lse must be the forward's, otherwise probabilities could be larger than 1. o is random: if all rows of v were equal,
 * the forward's o would leave only rounding errors in the gradient. */
RFT_OPERANDS(attention_bwd) {
  const rfi_arg in[4] = {call->in[1], call->in[2], call->in[3], call->in[6]}, out[2] = {{0}, call->in[5]};
  forward(&(rfi_call){.n_in = 4, .n_out = 2, .in = in, .out = out, .attr = call->attr});
}

/* Results whose rows have a stride of `row` elements; NULL: not computed. */
static void backward(const rfi_call *call, double *const out[3], const int64_t row[3]) {
  const rfr_type *qt = &call->in[1].type;
  int64_t T = qt->shape[0], H = qt->shape[1], D = qt->shape[2], Hk = call->in[2].type.shape[1];
  const double *dy = call->in[0].data, *q = call->in[1].data, *k = call->in[2].data, *v = call->in[3].data;
  const double *o = call->in[4].data, *lse = call->in[5].data;
  double slope;
  for (int i = 0; i < 3 && T > 0; i++)
    for (int64_t t = 0; t < T && out[i]; t++)
      for (int64_t d = 0; d < (i == 0 ? H : Hk) * D; d++) out[i][t * row[i] + d] = 0;
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++) {
      int64_t first, n = keys_of(&call->in[6], T, t, call->attr, &first), g = h / (H / Hk);
      int64_t at = (t * H + h) * D;
      double delta = dot(dy + at, o + at, D);
      for (int64_t s = first; s < first + n; s++) {
        int64_t key = (s * Hk + g) * D;
        double p = exp(score(call->attr, q + at, k + key, D, &slope) - lse[h * T + t]);
        double ds = slope * p * (dot(dy + at, v + key, D) - delta);
        for (int64_t d = 0; d < D; d++) {
          if (out[0]) out[0][t * row[0] + h * D + d] += ds * k[key + d];
          if (out[1]) out[1][s * row[1] + g * D + d] += ds * q[at + d];
          if (out[2]) out[2][s * row[2] + g * D + d] += p * dy[at + d];
        }
      }
    }
}

RFT_REF(attention_bwd) {
  const int64_t D = call->in[1].type.shape[2], q_row = call->in[1].type.shape[1] * D;
  const int64_t row[3] = {q_row, call->in[2].type.shape[1] * D, call->in[2].type.shape[1] * D};
  double *const out[3] = {call->out[0].data, call->out[1].data, call->out[2].data};
  backward(call, out, row);
}

RFT_OPERANDS(attention_bwd_packed) {
  const rfi_arg in[4] = {call->in[1], call->in[2], call->in[3], call->in[6]}, out[2] = {{0}, call->in[5]};
  forward(&(rfi_call){.n_in = 4, .n_out = 2, .in = in, .out = out, .attr = call->attr});
}

RFT_REF(attention_bwd_packed) {
  const int64_t D = call->in[1].type.shape[2], H = call->in[1].type.shape[1], Hk = call->in[2].type.shape[1];
  const int64_t all = (H + 2 * Hk) * D, row[3] = {all, all, all};
  double *to = call->out[0].data, *const out[3] = {to, to + H * D, to + (H + Hk) * D};
  backward(call, out, row);
}

RFT_CASES(attention) = {
    "attention(f[13,2,5], f[13,1,5], f[13,1,5], i[2]=0,13) scale=0.4472135954999579 causal=1",
    "attention(f[7,3,4], f[7,3,4], f[7,3,4], i[2]=0,7) scale=0.5 causal=0",
    "attention(f[1,2,3], f[1,2,3], f[1,2,3], i[2]=0,1) scale=0.5 causal=1",
    "attention(f[37,6,24], f[37,2,24], f[37,2,24], i[6]=0,9,10,10,31,37) scale=0.2 causal=1",
    "attention(f[71,6,32], f[71,2,32], f[71,2,32], i[4]=0,33,34,71) scale=0.17677669529663687 causal=1",
    "attention(f[131,2,17], f[131,1,17], f[131,1,17], i[3]=0,100,131) scale=0.25 causal=0",
    "attention(f[197,1,40], f[197,1,40], f[197,1,40], i[2]=0,197) scale=0.158 causal=1",
    "attention(f[67,4,64]/2, f[67,2,64], f[67,2,64]/2, i[3]=0,66,67) scale=0.125 causal=1",
    "attention(f[19,2,8], f[19,1,8], f[19,1,8], i[3]=3,11,17) scale=0.3 causal=1",
    "attention(f[23,2,6], f[23,2,6], f[23,2,6], i[6]=-4,9,5,40,-7,12) scale=0.3 causal=0",
    "attention(f[11,2,6], f[11,1,6], f[11,1,6], i[1]=0) scale=0.3 causal=1",
    "attention(f[0,2,4], f[0,1,4], f[0,1,4], i[2]=0,0) scale=0.5 causal=1",
    "attention(f[17,2,6], f[17,1,6], f[17,1,6], i[3]=0,10,17) scale=0.4 causal=1 window=1",
    "attention(f[83,2,18], f[83,1,18], f[83,1,18], i[3]=0,20,83) scale=0.25 causal=1 window=7",
    "attention(f[199,2,20], f[199,1,20], f[199,1,20], i[3]=0,140,199) scale=0.2 causal=1 window=67",
    "attention(f[43,2,8], f[43,2,8], f[43,2,8], i[3]=0,31,43) scale=0.3 causal=1 window=31 cap=1.5",
    "attention(f[29,3,10], f[29,1,10], f[29,1,10], i[3]=0,13,29) scale=0.3 causal=0 cap=50",
    "attention(f[71,2,20], f[71,2,20], f[71,2,20], i[2]=0,71) scale=0.9 causal=1 cap=3 longest=71",
    "attention(f[190,2,72], f[190,1,72], f[190,1,72], i[3]=0,29,190) scale=0.118 causal=1",
    "attention(f[128,4,64], f[128,4,64], f[128,4,64], i[3]=0,64,128) scale=0.125 causal=1 longest=64",
    "attention(f[67,4,64]/2, f[67,2,64], f[67,2,64]/2, i[3]=2,61,66) scale=0.125 causal=0 longest=64",
    "attention(f[190,6,72], f[190,2,72], f[190,2,72], i[6]=-3,29,9,71,190,7) scale=0.118 causal=1 window=50 cap=2 "
    "longest=30", /* `longest` is wrong on purpose: it must cost only time */
    "attention(f[71,4,24]@29=nan, f[71,2,24], f[71,2,24], i[3]=0,40,71) scale=0.2 causal=1",
    "attention(f[71,4,24], f[71,2,24]@29=nan, f[71,2,24], i[3]=0,40,71) scale=0.2 causal=1",
    "attention(f[131,4,64], f[131,2,64]@70=nan, f[131,2,64], i[3]=0,60,131) scale=0.125 causal=1 window=33 cap=2",
    "attention(f[67,2,40]@13=inf, f[67,1,40]>0, f[67,1,40], i[3]=0,40,67) scale=0.158 causal=0",
    "attention(f[128,4,64], f[128,4,64]@64=nan, f[128,4,64], i[3]=0,64,128) scale=0.125 causal=1 longest=64",
    NULL,
};

/* The cursor: cached, known, dropped, seed. The cases: one row, few rows, blocks; rows past the count; a text at its
 * end. */
RFT_CASES(attention_cached) = {
    "attention_cached(f[1,4,24], f[300,2,24], f[300,2,24], I[4]=0,1,0,0) scale=0.2 causal=1 window=0 cap=0",
    "attention_cached(f[1,6,32], f[300,3,32], f[300,3,32], I[4]=131,132,0,0) scale=0.18 causal=1 window=0 cap=0",
    "attention_cached(f[1,2,17], f[201,1,17], f[201,1,17], I[4]=200,201,7,0) scale=0.25 causal=1 window=0 cap=0",
    "attention_cached(f[1,2,5], f[7,1,5], f[7,1,5], I[4]=7,8,0,0) scale=0.44 causal=1 window=0 cap=0",
    "attention_cached(f[5,3,8], f[70,3,8], f[70,3,8], I[4]=61,64,0,0) scale=0.3 causal=1 window=0 cap=0",
    "attention_cached(f[3,4,6]/2, f[19,2,6]/2, f[19,2,6], I[4]=0,3,0,0) scale=0.3 causal=1 window=0 cap=0",
    "attention_cached(f[37,6,24], f[131,2,24], f[131,2,24], I[4]=0,37,0,0) scale=0.2 causal=1 window=0 cap=0",
    "attention_cached(f[67,2,40], f[197,1,40], f[197,1,40], I[4]=100,151,0,0) scale=0.158 causal=1 window=0 cap=0",
    "attention_cached(f[32,4,64]/2, f[67,2,64], f[67,2,64], I[4]=40,400,0,0) scale=0.125 causal=1 window=0 cap=0",
    "attention_cached(f[11,2,6], f[13,1,6], f[13,1,6], I[4]=-4,9,0,0) scale=0.3 causal=1 window=0 cap=0",
    "attention_cached(f[11,2,6], f[13,1,6], f[13,1,6], I[4]=9,4,0,0) scale=0.3 causal=1 window=0 cap=0",
    "attention_cached(f[0,2,4], f[9,1,4], f[9,1,4], I[4]=0,5,0,0) scale=0.5 causal=1 window=0 cap=0",
    "attention_cached(f[2,2,4], f[0,1,4], f[0,1,4], I[4]=0,5,0,0) scale=0.5 causal=1 window=0 cap=0",
    "attention_cached(f[1,4,24], f[300,2,24], f[300,2,24], I[4]=211,212,0,0) scale=0.2 causal=1 window=70 cap=0",
    "attention_cached(f[1,4,24], f[300,2,24], f[300,2,24], I[4]=99,100,0,0) scale=0.9 causal=1 window=0 cap=1.5",
    "attention_cached(f[67,2,40], f[197,1,40], f[197,1,40], I[4]=90,151,0,0) scale=0.2 causal=1 window=37 cap=2",
    "attention_cached(f[5,2,40], f[197,1,40], f[197,1,40], I[4]=0,151,0,0) scale=0.2 causal=1 window=3 cap=4",
    "attention_cached(f[5,2,40]@3=nan, f[197,1,40], f[197,1,40], I[4]=90,151,0,0) scale=0.2 causal=1 window=0 cap=0",
    "attention_cached(f[5,2,40], f[197,1,40]@93=nan, f[197,1,40], I[4]=90,151,0,0) scale=0.2 causal=1 window=0 cap=0",
    "attention_cached(f[67,2,40], f[197,1,40]@93=nan, f[197,1,40], I[4]=40,151,0,0) scale=0.2 causal=1 window=9 cap=0",
    "attention_cached(f[5,4,24]@0=inf, f[70,2,24]>0, f[70,2,24], I[4]=50,64,0,0) scale=0.2 causal=1 window=0 cap=0",
    "attention_cached(f[1,2,24]@0=nan, f[70,1,24], f[70,1,24], I[4]=50,64,0,0) scale=0.2 causal=1 window=0 cap=0",
    NULL,
};

RFT_CASES(attention_bwd) = {
    "attention_bwd(f[13,2,5], f[13,2,5], f[13,1,5], f[13,1,5], f[13,2,5], F[2,13], i[2]=0,13) scale=0.44 causal=1",
    "attention_bwd(f[7,3,4], f[7,3,4], f[7,3,4], f[7,3,4], f[7,3,4], F[3,7], i[2]=0,7) scale=0.5 causal=0",
    "attention_bwd(f[1,2,3], f[1,2,3], f[1,2,3], f[1,2,3], f[1,2,3], F[2,1], i[2]=0,1) scale=0.5 causal=1",
    "attention_bwd(f[37,6,24], f[37,6,24], f[37,2,24], f[37,2,24], f[37,6,24], F[6,37], i[6]=0,9,10,10,31,37) "
    "scale=0.2 causal=1",
    "attention_bwd(f[71,6,32], f[71,6,32], f[71,2,32], f[71,2,32], f[71,6,32], F[6,71], i[4]=0,33,34,71) scale=0.18 "
    "causal=1",
    "attention_bwd(f[131,3,17], f[131,3,17], f[131,1,17], f[131,1,17], f[131,3,17], F[3,131], i[3]=0,100,131) "
    "scale=0.25 causal=0",
    "attention_bwd(f[23,2,6], f[23,2,6], f[23,2,6], f[23,2,6], f[23,2,6], F[2,23], i[6]=-4,9,5,40,-7,12) scale=0.3 "
    "causal=0",
    "attention_bwd(f[0,2,4], f[0,2,4], f[0,1,4], f[0,1,4], f[0,2,4], F[2,0], i[2]=0,0) scale=0.5 causal=1",
    "attention_bwd(f[17,2,6], f[17,2,6], f[17,1,6], f[17,1,6], f[17,2,6], F[2,17], i[3]=0,10,17) "
    "scale=0.4 causal=1 window=1",
    "attention_bwd(f[83,2,18], f[83,2,18], f[83,1,18], f[83,1,18], f[83,2,18], F[2,83], i[3]=0,20,83) "
    "scale=0.25 causal=1 window=7",
    "attention_bwd(f[199,2,20], f[199,2,20], f[199,1,20], f[199,1,20], f[199,2,20], F[2,199], i[3]=0,140,199) "
    "scale=0.2 causal=1 window=67",
    "attention_bwd(f[43,2,8], f[43,2,8], f[43,2,8], f[43,2,8], f[43,2,8], F[2,43], i[3]=0,31,43) "
    "scale=0.3 causal=1 window=31 cap=1.5",
    "attention_bwd(f[29,3,10], f[29,3,10], f[29,1,10], f[29,1,10], f[29,3,10], F[3,29], i[3]=0,13,29) "
    "scale=0.3 causal=0 cap=50",
    "attention_bwd(f[71,2,20], f[71,2,20], f[71,2,20], f[71,2,20], f[71,2,20], F[2,71], i[2]=0,71) "
    "scale=0.9 causal=1 cap=3",
    "attention_bwd(f[128,4,64], f[128,4,64], f[128,4,64], f[128,4,64], f[128,4,64], F[4,128], i[3]=0,64,128) "
    "scale=0.125 causal=1 longest=64",
    "attention_bwd(f[190,6,72], f[190,6,72], f[190,2,72], f[190,2,72], f[190,6,72], F[6,190], i[6]=-3,29,9,71,190,7) "
    "scale=0.118 causal=1 window=50 cap=2 longest=30",
    "attention_bwd(f[71,4,24], f[71,4,24]@29=nan, f[71,2,24], f[71,2,24], f[71,4,24], F[4,71], i[2]=0,71) scale=0.2 "
    "causal=0",
    "attention_bwd(f[61,4,64], f[61,4,64], f[61,2,64]@29=nan, f[61,2,64], f[61,4,64], F[4,61], i[2]=0,61) scale=0.125 "
    "causal=0 longest=61",
    "attention_bwd(f[131,2,40], f[131,2,40]@13=inf, f[131,1,40]>0, f[131,1,40], f[131,2,40], F[2,131], i[2]=0,131) "
    "scale=0.02 causal=0",
    NULL,
};

RFT_CASES(attention_bwd_packed) = {
    "attention_bwd_packed(f[13,2,5], f[13,2,5], f[13,1,5], f[13,1,5], f[13,2,5], F[2,13], i[2]=0,13) scale=0.44 "
    "causal=1",
    "attention_bwd_packed(f[37,6,24], f[37,6,24], f[37,2,24], f[37,2,24], f[37,6,24], F[6,37], i[6]=0,9,10,10,31,37) "
    "scale=0.2 causal=1",
    "attention_bwd_packed(f[67,4,64]/2, f[67,4,64], f[67,2,64]/2, f[67,2,64], f[67,4,64], F[4,67], i[3]=0,66,67) "
    "scale=0.125 causal=1",
    "attention_bwd_packed(f[67,4,64]/2, f[67,4,64], f[67,2,64]/2, f[67,2,64], f[67,4,64], F[4,67], i[3]=0,61,67) "
    "scale=0.125 causal=1 longest=64",
    "attention_bwd_packed(f[131,3,17], f[131,3,17], f[131,1,17], f[131,1,17], f[131,3,17], F[3,131], i[3]=0,100,131) "
    "scale=0.25 causal=0",
    "attention_bwd_packed(f[0,2,4], f[0,2,4], f[0,1,4], f[0,1,4], f[0,2,4], F[2,0], i[2]=0,0) scale=0.5 causal=1",
    "attention_bwd_packed(f[199,2,72], f[199,2,72], f[199,1,72], f[199,1,72], f[199,2,72], F[2,199], i[3]=0,140,199) "
    "scale=0.118 causal=1 window=67 cap=2",
    NULL,
};
