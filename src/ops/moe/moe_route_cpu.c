/* SPDX-License-Identifier: Apache-2.0
 *
 * Routing and its losses on the CPU, token by token in f32.
 *
 * Where the order of scores is that of the logits, logits are compared: two that differ stay different, whatever
 * rounding makes of their scores. A NaN comes behind everything, so the chosen are k different experts always.
 * What the losses add up over tokens is added in f64 by each part and then in the order of parts.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/moe/route.h"
#include "ops/walk.h"

static int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int parts_of(const rfi_call *c, const rfi_arg *logits) {
  return rfi_parts(c, logits->type.shape[0], 16 * logits->type.shape[1]);
}

static void read_row(float *to, const rfi_arg *x, int64_t row) {
  const int64_t n = x->type.shape[1];
  for (int64_t j = 0; j < n; j += RFI_BLOCK) {
    const int64_t m = n - j < RFI_BLOCK ? n - j : RFI_BLOCK;
    const float *from = rfi_read(to + j, x, row * n + j, 1, m);
    if (from != to + j) memcpy(to + j, from, (size_t)m * sizeof *to);
  }
}
static void write_row(const float *from, const rfi_arg *y, int64_t row) {
  const int64_t n = y->type.shape[1];
  if (y->type.dtype == RFR_F32) memcpy((float *)y->data + row * n, from, (size_t)n * sizeof *from);
  else rfi_flush(from, y, row * n, n);
}

/* ---- moe_route ---- */

enum { K, SCORE, NORM, GROUPS, GROUP_K, SCALE };

/* A part's scratch: scores, what is compared, the groups' scores, the weights and the names of the chosen, who is
 * taken. */
typedef struct room {
  float *scores, *compared, *groups, *weight;
  int32_t *index;
  bool *taken;
} room;

static int64_t room_floats(const rfi_call *c) {
  return 2 * c->in[0].type.shape[1] + c->attr[GROUPS].i + 2 * c->attr[K].i;
}
static int64_t room_bytes(const rfi_call *c) { return round64(room_floats(c) * 4) + round64(c->in[0].type.shape[1]); }
static room room_of(const rfi_call *c, int part) {
  const int64_t experts = c->in[0].type.shape[1], k = c->attr[K].i;
  float *at = (float *)((char *)c->workspace + part * room_bytes(c)), *groups = at + 2 * experts;
  float *weight = groups + c->attr[GROUPS].i;
  return (room){at, at + experts, groups, weight, (int32_t *)(weight + k), (bool *)at + round64(room_floats(c) * 4)};
}
static size_t route_workspace(const rfi_call *c) { return (size_t)(parts_of(c, &c->in[0]) * room_bytes(c)); }

static bool better(float x, float than) { return x > than || (isnan(than) && !isnan(x)); }

/* The best of n that is not taken, of equals the first; it is then. */
static int64_t take_best(const float *x, bool *taken, int64_t n) {
  int64_t best = -1;
  for (int64_t e = 0; e < n; e++)
    if (!taken[e] && (best < 0 || better(x[e], x[best]))) best = e;
  if (best >= 0) taken[best] = true;
  return best;
}

/* Takes all experts but those of the best groups. */
static void limit_groups(const rfi_attr *a, const room *r, int64_t experts) {
  const int64_t groups = a[GROUPS].i, size = experts / groups, best = a[K].i / a[GROUP_K].i;
  for (int64_t g = 0; g < groups; g++) {
    r->groups[g] = 0;
    for (int64_t j = 0; j < best; j++)
      r->groups[g] += r->compared[g * size + take_best(r->compared + g * size, r->taken + g * size, size)];
  }
  memset(r->taken, 0, (size_t)groups);
  for (int64_t j = 0; j < a[GROUP_K].i; j++) take_best(r->groups, r->taken, groups);
  for (int64_t g = 0; g < groups; g++) r->groups[g] = r->taken[g];
  for (int64_t e = 0; e < experts; e++) r->taken[e] = r->groups[e / size] == 0;
}

static void route_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_attr *a = c->attr;
  const int64_t experts = c->in[0].type.shape[1], k = a[K].i;
  const float *bias = c->n_in > 1 ? c->in[1].data : NULL;
  const room r = room_of(c, part);
  int32_t *indices = c->out[1].data;
  float *weights = c->out[0].data;
  for (int64_t t = begin; t < end; t++) {
    float *w = r.weight, sum = RFI_ROUTE_TINY;
    read_row(r.scores, &c->in[0], t);
    memset(r.taken, 0, (size_t)experts);
    const bool plain = !bias && a[GROUPS].i == 1;
    if (plain) memcpy(r.compared, r.scores, (size_t)experts * 4);
    rfi_route_scores(r.scores, experts, a[SCORE].i);
    for (int64_t e = 0; !plain && e < experts; e++) r.compared[e] = r.scores[e] + (bias ? bias[e] : 0);
    if (a[GROUPS].i > 1) limit_groups(a, &r, experts);
    for (int64_t j = 0; j < k; j++) r.index[j] = (int32_t)take_best(r.compared, r.taken, experts);
    rfi_route_chosen(r.scores, experts, r.index, k, a[SCORE].i, w);
    for (int64_t j = 0; j < k; j++) sum += w[j];
    for (int64_t j = 0; j < k; j++) w[j] = (float)a[SCALE].f * (a[NORM].i ? w[j] / sum : w[j]);
    if (indices) memcpy(indices + t * k, r.index, (size_t)k * sizeof *indices);
    if (weights) memcpy(weights + t * k, w, (size_t)k * sizeof *w);
  }
}

static rfr_status run_route(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, c->in[0].type.shape[0], 16 * c->in[0].type.shape[1], route_part);
  return RFR_OK;
}

/* ---- moe_route_bwd ---- */

/* dw becomes the gradient of the chosen scores. */
static void through_norm(const float *r, float *dw, int64_t k, bool norm, float scale) {
  float sum = RFI_ROUTE_TINY, dot = 0;
  for (int64_t j = 0; j < k; j++) sum += r[j];
  for (int64_t j = 0; j < k; j++) dot += dw[j] * r[j];
  for (int64_t j = 0; j < k; j++) dw[j] = norm ? scale * (dw[j] - dot / sum) / sum : scale * dw[j];
}

/* A part's: a row of scores and one of their gradients, of all experts and of the chosen. */
static int64_t route_bwd_bytes(const rfi_call *c) {
  return round64(2 * (c->in[1].type.shape[1] + c->in[0].type.shape[1]) * 4);
}
static size_t route_bwd_workspace(const rfi_call *c) { return (size_t)(parts_of(c, &c->in[1]) * route_bwd_bytes(c)); }

static void route_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_attr *a = c->attr;
  const int64_t experts = c->in[1].type.shape[1], k = c->in[0].type.shape[1], kind = a[0].i;
  float *s = (float *)((char *)c->workspace + part * route_bwd_bytes(c)), *ds = s + experts;
  float *r = ds + experts, *dr = r + k;
  for (int64_t t = begin; t < end; t++) {
    const int32_t *index = (const int32_t *)c->in[2].data + t * k;
    float dot = 0;
    read_row(s, &c->in[1], t);
    memset(ds, 0, (size_t)experts * 4);
    rfi_route_scores(s, experts, kind);
    rfi_route_chosen(s, experts, index, k, kind, r);
    memcpy(dr, (const float *)c->in[0].data + t * k, (size_t)k * 4);
    through_norm(r, dr, k, a[1].i != 0, (float)a[2].f);
    for (int64_t j = 0; j < k; j++) dot += dr[j] * r[j];
    for (int64_t j = 0; j < k; j++) {
      if (index[j] < 0 || index[j] >= experts) continue;
      if (kind == RFR_MOE_SOFTMAX) ds[index[j]] += dr[j] * r[j];
      else if (kind == RFR_MOE_SIGMOID) ds[index[j]] += dr[j] * r[j] * (1 - r[j]);
      else ds[index[j]] += (dr[j] - dot) * r[j];
    }
    for (int64_t e = 0; kind == RFR_MOE_SOFTMAX && e < experts; e++) ds[e] -= dot * s[e];
    write_row(ds, &c->out[0], t);
  }
}

static rfr_status run_route_bwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, c->in[1].type.shape[0], 16 * c->in[1].type.shape[1], route_bwd_part);
  return RFR_OK;
}

/* ---- moe_loss ---- */

enum { SIGMOID, BALANCE, Z, IGNORE };

/* Over all tokens: valid ones, and how often each expert was chosen by those. */
static double count_chosen(const rfi_attr *a, const rfi_arg *index, const rfi_arg *targets, int64_t experts,
                           double *chosen) {
  const int64_t tokens = index->type.shape[0], k = index->type.shape[1];
  double valid = 0;
  memset(chosen, 0, (size_t)experts * sizeof *chosen);
  for (int64_t t = 0; t < tokens; t++) {
    if (((const int32_t *)targets->data)[t] == a[IGNORE].i) continue;
    valid++;
    for (int64_t j = 0; j < k; j++) {
      const int32_t e = ((const int32_t *)index->data)[t * k + j];
      if (e >= 0 && e < experts) chosen[e]++;
    }
  }
  return valid;
}

/* l becomes the probabilities of all experts; returns the log of the sum of exp(l), and s, if it is sigmoids,
 * their sum. */
static float probabilities(float *l, int64_t experts, bool sigmoid, float *sigmoids, float *sum) {
  float max, all;
  for (int64_t e = 0; sigmoid && e < experts; e++) sigmoids[e] = rfi_sigmoidf(l[e]);
  all = rfi_route_exp(l, experts, &max);
  const float lse = max + logf(all);
  if (sigmoid) {
    all = RFI_ROUTE_TINY;
    for (int64_t e = 0; e < experts; e++) all += sigmoids[e];
    memcpy(l, sigmoids, (size_t)experts * 4);
  }
  for (int64_t e = 0; e < experts; e++) l[e] /= all;
  *sum = all;
  return lse;
}

/* Workspace: how often each was chosen, then of each part the sums of probabilities, lse^2, and room for two rows. */
static int64_t loss_part_bytes(int64_t experts) { return round64((experts + 1) * 8) + round64(2 * experts * 4); }
static size_t loss_workspace(const rfi_call *c) {
  const int64_t experts = c->in[0].type.shape[1];
  return (size_t)(round64(experts * 8) + parts_of(c, &c->in[0]) * loss_part_bytes(experts));
}

static void loss_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const int64_t experts = c->in[0].type.shape[1];
  double *sums = (double *)((char *)c->workspace + round64(experts * 8) + part * loss_part_bytes(experts));
  float *p = (float *)((char *)sums + round64((experts + 1) * 8)), sum;
  memset(sums, 0, (size_t)(experts + 1) * 8);
  for (int64_t t = begin; t < end; t++) {
    if (((const int32_t *)c->in[2].data)[t] == c->attr[IGNORE].i) continue;
    read_row(p, &c->in[0], t);
    const double lse = probabilities(p, experts, c->attr[SIGMOID].i != 0, p + experts, &sum);
    for (int64_t e = 0; e < experts; e++) sums[e] += p[e];
    sums[experts] += lse * lse;
  }
}

static rfr_status run_loss(const rfi_call *c) {
  const int64_t experts = c->in[0].type.shape[1], k = c->in[1].type.shape[1];
  double *chosen = c->workspace, balance = 0, z = 0;
  RFI_TRY(rfi_check_floats(c));
  const double valid = count_chosen(c->attr, &c->in[1], &c->in[2], experts, chosen);
  rfi_parallel(c, c->in[0].type.shape[0], 16 * experts, loss_part);
  for (int part = 0; part < parts_of(c, &c->in[0]); part++) {
    const double *sums = (double *)((char *)c->workspace + round64(experts * 8) + part * loss_part_bytes(experts));
    for (int64_t e = 0; e < experts; e++) balance += chosen[e] * sums[e];
    z += sums[experts];
  }
  const double loss =
      c->attr[BALANCE].f * (double)experts / ((double)k * valid * valid) * balance + c->attr[Z].f * z / valid;
  *(float *)c->out[0].data = valid > 0 && k > 0 ? (float)loss : 0.0f;
  return RFR_OK;
}

/* ---- moe_loss_bwd ---- */

static size_t loss_bwd_workspace(const rfi_call *c) {
  const int64_t experts = c->in[1].type.shape[1];
  return (size_t)(round64((experts + 1) * 8) + parts_of(c, &c->in[1]) * round64(2 * experts * 4));
}

static void loss_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const int64_t experts = c->in[1].type.shape[1], k = c->in[2].type.shape[1];
  const double *chosen = c->workspace, valid = chosen[experts], dloss = *(const float *)c->in[0].data;
  float *p = (float *)((char *)c->workspace + round64((experts + 1) * 8) + part * round64(2 * experts * 4));
  float *s = p + experts, sum;
  const bool sigmoid = c->attr[SIGMOID].i != 0;
  const float by = (float)(dloss * c->attr[BALANCE].f * (double)experts / ((double)k * valid * valid));
  const float z_by = (float)(dloss * 2 * c->attr[Z].f / valid);
  for (int64_t t = begin; t < end; t++) {
    float dot = 0;
    if (((const int32_t *)c->in[3].data)[t] == c->attr[IGNORE].i) {
      memset(p, 0, (size_t)experts * 4);
      write_row(p, &c->out[0], t);
      continue;
    }
    read_row(p, &c->in[1], t);
    const float lse = probabilities(p, experts, sigmoid, s, &sum);
    for (int64_t e = 0; e < experts; e++) dot += p[e] * (float)chosen[e];
    if (!sigmoid) {
      for (int64_t e = 0; e < experts; e++) p[e] *= by * ((float)chosen[e] - dot) + z_by * lse;
    } else {
      for (int64_t e = 0; e < experts; e++) p[e] = by * ((float)chosen[e] - dot) / sum * s[e] * (1 - s[e]);
      read_row(s, &c->in[1], t);
      for (int64_t e = 0; z_by != 0 && e < experts; e++) p[e] += z_by * lse * rfi_expf(s[e] - lse);
    }
    write_row(p, &c->out[0], t);
  }
}

static rfr_status run_loss_bwd(const rfi_call *c) {
  const int64_t experts = c->in[1].type.shape[1];
  double *chosen = c->workspace;
  RFI_TRY(rfi_check_floats(c));
  chosen[experts] = count_chosen(c->attr, &c->in[2], &c->in[3], experts, chosen);
  rfi_parallel(c, c->in[1].type.shape[0], 16 * experts, loss_bwd_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(moe_route) = {run_route, route_workspace};
const rfi_kernel RFI_CPU(moe_route_bwd) = {run_route_bwd, route_bwd_workspace};
const rfi_kernel RFI_CPU(moe_loss) = {run_loss, loss_workspace};
const rfi_kernel RFI_CPU(moe_loss_bwd) = {run_loss_bwd, loss_bwd_workspace};
