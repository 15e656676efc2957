/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of the ops around experts. Routing is by definition: sort all, take the first. In maps that
 * leave tokens out, -1 stands for a slot without a row and a row without a slot.
 */
#include <math.h>
#include <stdlib.h>

#include "support/op_case.h"

static double *zeros(int64_t n) {
  double *x = calloc((size_t)n + 1, sizeof *x);
  if (!x) abort();
  return x;
}

static double logistic(double x) { return 1 / (1 + exp(-x)); }

/* p: softmax of n values; returns the log of the sum of their exponentials. */
static double softmax(const double *x, int64_t n, double *p) {
  double max = x[0], sum = 0;
  for (int64_t i = 1; i < n; i++) max = x[i] > max ? x[i] : max;
  for (int64_t i = 0; i < n; i++) sum += p[i] = exp(x[i] - max);
  for (int64_t i = 0; i < n; i++) p[i] /= sum;
  return max + log(sum);
}

/* The number of values that precede the one at i: larger ones, and equal ones before it. */
static int64_t rank_of(const double *x, int64_t n, int64_t i) {
  int64_t better = 0;
  for (int64_t j = 0; j < n; j++) better += x[j] > x[i] || (x[j] == x[i] && j < i);
  return better;
}

static void all_scores(const double *l, int64_t n, int64_t kind, double *s) {
  if (kind == RFR_MOE_SOFTMAX) softmax(l, n, s);
  for (int64_t e = 0; kind != RFR_MOE_SOFTMAX && e < n; e++) s[e] = kind == RFR_MOE_SIGMOID ? logistic(l[e]) : l[e];
}

/* The scores of the chosen experts, before norm and scale. */
static void chosen_scores(const double *s, const int32_t *index, int64_t k, int64_t kind, double *r) {
  double *l = zeros(k);
  for (int64_t j = 0; j < k; j++) l[j] = r[j] = s[index[j]];
  if (kind == RFR_MOE_SOFTMAX_CHOSEN) softmax(l, k, r);
  free(l);
}

RFT_REF(moe_route) {
  const rfi_attr *a = call->attr;
  const int64_t T = call->in[0].type.shape[0], E = call->in[0].type.shape[1], k = a[0].i, G = a[3].i, size = E / G;
  const double *logits = call->in[0].data, *bias = call->n_in > 1 ? call->in[1].data : NULL;
  double *weight = call->out[0].data, *s = zeros(E), *c = zeros(E), *g = zeros(G), *r = zeros(k);
  int32_t *index = call->out[1].data;
  for (int64_t t = 0; t < T; t++) {
    int32_t *chosen = calloc((size_t)k + 1, sizeof *chosen);
    if (!chosen) abort();
    all_scores(logits + t * E, E, a[1].i, s);
    for (int64_t e = 0; e < E; e++) c[e] = (bias || G > 1 ? s[e] : logits[t * E + e]) + (bias ? bias[e] : 0);
    for (int64_t i = 0; i < G; i++) {
      g[i] = 0;
      for (int64_t e = 0; e < size; e++)
        if (rank_of(c + i * size, size, e) < k / a[4].i) g[i] += c[i * size + e];
    }
    for (int64_t e = 0; e < E; e++)
      if (G > 1 && rank_of(g, G, e / size) >= a[4].i) c[e] = -INFINITY;
    for (int64_t e = 0; e < E; e++)
      if (rank_of(c, E, e) < k) chosen[rank_of(c, E, e)] = (int32_t)e;
    chosen_scores(s, chosen, k, a[1].i, r);
    double sum = 0;
    for (int64_t j = 0; j < k; j++) sum += r[j];
    for (int64_t j = 0; j < k; j++) {
      if (weight) weight[t * k + j] = a[5].f * (a[2].i ? r[j] / sum : r[j]);
      if (index) index[t * k + j] = chosen[j];
    }
    free(chosen);
  }
  free(s), free(c), free(g), free(r);
}
RFT_CASES(moe_route) = {
    "moe_route(f[7,5]) k=2 score=0 norm=0 groups=1 group_k=1 scale=1",
    "moe_route(f[11,8]) k=3 score=0 norm=1 groups=1 group_k=1 scale=1.5",
    "moe_route(f[5,13]) k=4 score=1 norm=0 groups=1 group_k=1 scale=1",
    "moe_route(f[9,12], F[12]) k=4 score=2 norm=1 groups=4 group_k=2 scale=2.5",
    "moe_route(f[3,6], F[6]) k=2 score=2 norm=0 groups=1 group_k=1 scale=1",
    "moe_route(f[6,16]) k=2 score=0 norm=1 groups=4 group_k=1 scale=1",
    "moe_route(F[4,5]=0.5) k=3 score=0 norm=1 groups=1 group_k=1 scale=1",
    "moe_route(F[4,6]=0.5) k=2 score=2 norm=1 groups=3 group_k=2 scale=1",
    "moe_route(f[1,1]) k=1 score=0 norm=0 groups=1 group_k=1 scale=1",
    "moe_route(f[2,3]) k=3 score=1 norm=1 groups=1 group_k=1 scale=1",
    "moe_route(f[0,4]) k=2 score=0 norm=1 groups=1 group_k=1 scale=1",
    "moe_route(F[67,128]) k=8 score=0 norm=1 groups=1 group_k=1 scale=1",
    "moe_route(f[70,8]) k=2 score=0 norm=1 groups=1 group_k=1 scale=1",
    "moe_route(f[37,60]) k=4 score=2 norm=1 groups=1 group_k=1 scale=2",
    "moe_route(F[33,128]) k=8 score=0 norm=0 groups=1 group_k=1 scale=1",
    "moe_route(f[19,202]) k=6 score=1 norm=0 groups=1 group_k=1 scale=1",
    NULL,
};

RFT_REF(moe_route_bwd) {
  const int64_t T = call->in[1].type.shape[0], E = call->in[1].type.shape[1], k = call->in[0].type.shape[1];
  const int64_t kind = call->attr[0].i;
  const double *dweight = call->in[0].data, *logits = call->in[1].data, scale = call->attr[2].f;
  const int32_t *index = call->in[2].data;
  double *d = call->out[0].data, *s = zeros(E), *r = zeros(k), *dr = zeros(k), *ds = zeros(E);
  for (int64_t t = 0; t < T; t++) {
    double sum = 0, dot = 0;
    all_scores(logits + t * E, E, kind, s);
    chosen_scores(s, index + t * k, k, kind, r);
    for (int64_t j = 0; j < k; j++) sum += r[j];
    for (int64_t j = 0; j < k; j++) dot += dweight[t * k + j] * r[j] / sum;
    for (int64_t j = 0; j < k; j++)
      dr[j] = scale * (call->attr[1].i ? (dweight[t * k + j] - dot) / sum : dweight[t * k + j]);
    dot = 0;
    for (int64_t j = 0; j < k; j++) dot += dr[j] * r[j];
    for (int64_t e = 0; e < E; e++) ds[e] = 0;
    for (int64_t j = 0; j < k; j++)
      ds[index[t * k + j]] += kind == RFR_MOE_SOFTMAX_CHOSEN ? (dr[j] - dot) * r[j] : dr[j];
    for (int64_t e = 0; e < E; e++)
      d[t * E + e] = kind == RFR_MOE_SOFTMAX   ? s[e] * (ds[e] - dot)
                     : kind == RFR_MOE_SIGMOID ? ds[e] * s[e] * (1 - s[e])
                                               : ds[e];
  }
  free(s), free(r), free(dr), free(ds);
}
RFT_CASES(moe_route_bwd) = {
    "moe_route_bwd(F[3,2], f[3,5], i[3,2]=4,1,0,3,2,0) score=0 norm=0 scale=1",
    "moe_route_bwd(F[3,2], f[3,5], i[3,2]=4,1,0,3,2,0) score=0 norm=1 scale=2",
    "moe_route_bwd(F[2,3], f[2,7], i[2,3]=6,1,0,3,2,5) score=1 norm=1 scale=1",
    "moe_route_bwd(F[2,3], f[2,7], i[2,3]=6,1,0,3,2,5) score=1 norm=0 scale=1.5",
    "moe_route_bwd(F[3,2], f[3,5], i[3,2]=4,1,0,3,2,0) score=2 norm=1 scale=2.5",
    "moe_route_bwd(F[3,2], f[3,5], i[3,2]=4,1,0,3,2,0) score=2 norm=0 scale=1",
    "moe_route_bwd(F[1,1], f[1,1], i[1,1]=0) score=0 norm=0 scale=1",
    "moe_route_bwd(F[0,2], f[0,5], i[0,2]<5) score=0 norm=1 scale=1",
    NULL,
};

RFT_REF(moe_sort) {
  const int64_t E = call->attr[0].i, slots = call->in[0].type.shape[0] * call->in[0].type.shape[1];
  const int32_t *index = call->in[0].data;
  int32_t *splits = call->out[0].data, *order = call->out[1].data, *place = call->out[2].data, row = 0;
  for (int64_t i = 0; i < slots; i++) {
    if (order) order[i] = -1;
    if (place) place[i] = -1;
  }
  for (int32_t e = 0; e < E; e++) {
    const int32_t first = row;
    for (int32_t i = 0; i < slots; i++)
      if (index[i] == e) {
        if (place) place[i] = row;
        if (order) order[row] = i;
        row++;
      }
    if (splits) splits[e] = row - first;
  }
}
RFT_CASES(moe_sort) = {"moe_sort(i[7,2]<5) experts=5",
                       "moe_sort(i[13,3]<4) experts=6",
                       "moe_sort(i[3,2]=2,-1,0,7,2,1) experts=3",
                       "moe_sort(i[4,2]=1) experts=3",
                       "moe_sort(i[1,1]=0) experts=1",
                       "moe_sort(i[0,2]<3) experts=4",
                       "moe_sort(i[509,8]<128) experts=128",
                       NULL};

/* ---- rows ---- */

#define MAPS "i[6]=3,0,4,1,2,5, i[3,2]=1,3,4,0,2,5" /* three tokens, two slots each */
#define HOLES "i[6]=3,0,2,-1,-1,-1, i[3,2]=1,-1,2,0,-1,-1"
/* one slot per token, as slots' weights are moved */
#define SLOTS "i[6]=3,0,2,-1,-1,-1, i[6,1]=1,-1,2,0,-1,-1"

RFT_REF(moe_permute) {
  const double *x = call->in[0].data, *weight = call->n_in > 3 ? call->in[3].data : NULL;
  const int32_t *order = call->in[1].data;
  const int64_t k = call->in[2].type.shape[1], C = call->in[0].type.shape[1];
  double *y = call->out[0].data;
  for (int64_t r = 0; r < call->in[1].type.shape[0]; r++)
    for (int64_t j = 0; j < C; j++)
      y[r * C + j] = order[r] < 0 ? 0 : x[order[r] / k * C + j] * (weight ? weight[order[r]] : 1);
}
RFT_CASES(moe_permute) = {"moe_permute(f[3,7], " MAPS ")",
                          "moe_permute(f[3,600], " MAPS ", f[3,2])",
                          "moe_permute(f[3,5], " HOLES ", F[3,2])",
                          "moe_permute(f[3,5], " HOLES ")",
                          "moe_permute(f[6,1], " SLOTS ")",
                          "moe_permute(f[3,3], " MAPS ", F[3,2])",
                          "moe_permute(f[1,1], i[1]=0, i[1,1]=0, F[1,1])",
                          "moe_permute(f[0,4], i[0]<1, i[0,2]<1)",
                          NULL};

RFT_REF(moe_unpermute) {
  const double *y = call->in[0].data, *weight = call->n_in > 3 ? call->in[3].data : NULL;
  const int32_t *place = call->in[2].data;
  const int64_t k = call->in[2].type.shape[1], C = call->in[0].type.shape[1];
  double *out = call->out[0].data;
  for (int64_t t = 0; t < call->in[2].type.shape[0]; t++)
    for (int64_t j = 0; j < C; j++) {
      double sum = 0;
      for (int64_t i = t * k; i < (t + 1) * k; i++)
        if (place[i] >= 0) sum += y[place[i] * C + j] * (weight ? weight[i] : 1);
      out[t * C + j] = sum;
    }
}
RFT_CASES(moe_unpermute) = {
    "moe_unpermute(f[6,7], " MAPS ")",          "moe_unpermute(f[6,600], " MAPS ", f[3,2])",
    "moe_unpermute(f[6,5], " HOLES ", F[3,2])", "moe_unpermute(f[1,1], i[1]=0, i[1,1]=0, F[1,1])",
    "moe_unpermute(f[6,1], " SLOTS ")",         "moe_unpermute(f[6,3], " HOLES ", f[3,2])",
    "moe_unpermute(f[0,4], i[0]<1, i[0,2]<1)",  NULL};

RFT_REF(moe_unpermute_dw) {
  const double *y = call->in[0].data, *dout = call->in[2].data;
  const int32_t *place = call->in[1].data;
  const int64_t k = call->in[1].type.shape[1], C = call->in[0].type.shape[1];
  double *dw = call->out[0].data;
  for (int64_t i = 0; i < call->in[1].type.shape[0] * k; i++) {
    dw[i] = 0;
    for (int64_t j = 0; place[i] >= 0 && j < C; j++) dw[i] += y[place[i] * C + j] * dout[i / k * C + j];
  }
}
RFT_CASES(moe_unpermute_dw) = {"moe_unpermute_dw(f[6,7], i[3,2]=1,3,4,0,2,5, f[3,7]) to=f32",
                               "moe_unpermute_dw(f[6,601], i[3,2]=1,3,4,0,2,5, F[3,601]) to=f",
                               "moe_unpermute_dw(f[6,5], i[3,2]=1,-1,2,0,-1,-1, f[3,5]) to=f32",
                               "moe_unpermute_dw(f[1,1], i[1,1]=0, f[1,1]) to=f32",
                               "moe_unpermute_dw(f[0,4], i[0,2]<1, f[0,4]) to=f",
                               NULL};

/* ---- losses ---- */

/* Counts of the chosen experts and sums of probabilities over the valid tokens; p and lse of all tokens. */
typedef struct losses {
  int64_t T, E, k;
  double valid, *n, *P, *p, *lse, *soft;
} losses;

static losses losses_make(const rfi_call *call, int first) {
  losses l = {call->in[first].type.shape[0], call->in[first].type.shape[1], call->in[first + 1].type.shape[1]};
  const double *logits = call->in[first].data;
  const int32_t *index = call->in[first + 1].data, *targets = call->in[first + 2].data;
  l.n = zeros(l.E), l.P = zeros(l.E), l.p = zeros(l.T * l.E), l.lse = zeros(l.T), l.soft = zeros(l.T * l.E);
  for (int64_t t = 0; t < l.T; t++) {
    double sum = 0, *p = l.p + t * l.E;
    l.lse[t] = softmax(logits + t * l.E, l.E, l.soft + t * l.E);
    for (int64_t e = 0; e < l.E; e++) p[e] = call->attr[0].i ? logistic(logits[t * l.E + e]) : l.soft[t * l.E + e];
    for (int64_t e = 0; e < l.E; e++) sum += p[e];
    for (int64_t e = 0; e < l.E; e++) p[e] /= sum;
    if (targets[t] == call->attr[3].i) continue;
    l.valid++;
    for (int64_t j = 0; j < l.k; j++) l.n[index[t * l.k + j]]++;
    for (int64_t e = 0; e < l.E; e++) l.P[e] += p[e];
  }
  return l;
}
static void losses_free(losses *l) { free(l->n), free(l->P), free(l->p), free(l->lse), free(l->soft); }

RFT_REF(moe_loss) {
  losses l = losses_make(call, 0);
  const int32_t *targets = call->in[2].data;
  double balance = 0, z = 0;
  for (int64_t e = 0; e < l.E; e++) balance += l.n[e] * l.P[e];
  for (int64_t t = 0; t < l.T; t++) z += targets[t] == call->attr[3].i ? 0 : l.lse[t] * l.lse[t];
  const double by = l.valid > 0 ? call->attr[1].f * (double)l.E / (l.valid * l.valid) : 0;
  *(double *)call->out[0].data = by * balance + (l.valid > 0 ? call->attr[2].f * z / l.valid : 0);
  losses_free(&l);
}
#define CHOSEN "i[5,2]=0,1,2,0,1,0,2,1,0,2"
RFT_CASES(moe_loss) = {
    "moe_loss(f[5,3], " CHOSEN ", i[5]=1,2,-100,0,3) sigmoid=0 balance=0.5 z=0.25 ignore=-100",
    "moe_loss(f[5,3], " CHOSEN ", i[5]=1,2,7,0,3) sigmoid=1 balance=0.5 z=0.25 ignore=7",
    "moe_loss(f[5,3], " CHOSEN ", i[5]=1) sigmoid=0 balance=1 z=0 ignore=-100",
    "moe_loss(f[5,3], " CHOSEN ", i[5]=-100) sigmoid=0 balance=1 z=1 ignore=-100",
    "moe_loss(f[1,1], i[1,1]=0, i[1]=1) sigmoid=0 balance=0 z=1 ignore=-100",
    "moe_loss(f[0,4], i[0,2]<4, i[0]<3) sigmoid=0 balance=1 z=1 ignore=-100",
    "moe_loss(f[601,31], i[601,4]<31, i[601]<3) sigmoid=0 balance=0.01 z=0.001 ignore=2",
    NULL,
};

RFT_REF(moe_loss_bwd) {
  losses l = losses_make(call, 1);
  const int32_t *targets = call->in[3].data;
  const double dloss = *(double *)call->in[0].data;
  double *d = call->out[0].data;
  for (int64_t t = 0; t < l.T; t++) {
    const double *p = l.p + t * l.E, by = call->attr[1].f * (double)l.E / (l.valid * l.valid);
    double dot = 0;
    for (int64_t e = 0; e < l.E; e++) dot += by * l.n[e] * p[e];
    for (int64_t e = 0; e < l.E; e++) {
      const double slope = call->attr[0].i ? 1 - logistic(((const double *)call->in[1].data)[t * l.E + e]) : 1;
      const double z = 2 * call->attr[2].f / l.valid * l.lse[t] * l.soft[t * l.E + e];
      d[t * l.E + e] = targets[t] == call->attr[3].i ? 0 : dloss * (p[e] * slope * (by * l.n[e] - dot) + z);
    }
  }
  losses_free(&l);
}
RFT_CASES(moe_loss_bwd) = {
    "moe_loss_bwd(F[1], f[5,3], " CHOSEN ", i[5]=1,2,-100,0,3) sigmoid=0 balance=0.5 z=0.25 ignore=-100",
    "moe_loss_bwd(F[1], f[5,3], " CHOSEN ", i[5]=1,2,7,0,3) sigmoid=1 balance=0.5 z=0.25 ignore=7",
    "moe_loss_bwd(F[1], f[5,3], " CHOSEN ", i[5]=1) sigmoid=1 balance=1 z=0 ignore=-100",
    "moe_loss_bwd(F[1], f[5,3], " CHOSEN ", i[5]=-100) sigmoid=0 balance=1 z=1 ignore=-100",
    "moe_loss_bwd(F[1], f[1,1], i[1,1]=0, i[1]=1) sigmoid=0 balance=0 z=1 ignore=-100",
    "moe_loss_bwd(F[1], f[0,4], i[0,2]<4, i[0]<3) sigmoid=0 balance=1 z=1 ignore=-100",
    "moe_loss_bwd(F[1], f[401,31], i[401,4]<31, i[401]<3) sigmoid=0 balance=0.01 z=0.001 ignore=2",
    NULL,
};

RFT_REF(moe_load) {
  double most = 0, least = INFINITY, *by_layer = (double *)call->out[2].data;
  const int64_t layers = call->attr[0].i;
  int64_t routing = 0;
  for (int64_t l = 0; by_layer && l < layers; l++) by_layer[l] = 0;
  for (int i = 0; i < call->n_in; i++) {
    const rfr_type *type = &call->in[i].type;
    const int64_t E = type->shape[type->rank - 1];
    for (int64_t r = 0; r < (type->rank == 2 ? type->shape[0] : 1); r++, routing++) {
      const int32_t *splits = (int32_t *)call->in[i].data + r * E;
      double sum = 0;
      for (int64_t e = 0; e < E; e++) sum += splits[e];
      for (int64_t e = 0; e < E && sum > 0; e++) {
        double *layer = by_layer ? &by_layer[routing % layers] : &most;
        *layer = fmax(*layer, splits[e] * (double)E / sum);
        most = fmax(most, splits[e] * (double)E / sum);
        least = fmin(least, splits[e] * (double)E / sum);
      }
    }
  }
  if (call->out[0].data) *(double *)call->out[0].data = most;
  if (call->out[1].data) *(double *)call->out[1].data = isinf(least) ? 0 : least;
}
RFT_CASES(moe_load) = {"moe_load(i[4]=3,0,5,2) layers=1",
                       "moe_load(i[3]=4,1,1, i[5]=2,2,3,2,2) layers=2",
                       "moe_load(i[2]=0, i[3]=1,2,3) layers=3",
                       "moe_load(i[3]=0) layers=1",
                       "moe_load(i[2,3]=0,0,0,1,2,3, i[4]=3,0,5,2) layers=2",
                       "moe_load(i[70,5]<9, i[0,4]<2, i[3,2]<7) layers=7",
                       "moe_load(i[201,6]<9, i[5]<3) layers=67",
                       "moe_load() layers=4",
                       NULL};
