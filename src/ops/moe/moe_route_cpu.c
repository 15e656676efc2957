/* SPDX-License-Identifier: Apache-2.0
 *
 * Routing and its aux losses on the CPU, in f32, for RFI_LANES tokens at a time (route.h).
 *
 * Where scores have the order of the logits, logits are compared: rounding of the scores cannot make different logits
 * equal. NaN comes after everything, so the chosen experts are always k different ones. The losses' sums over tokens
 * are added in f64 by each part, and then in the order of parts.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/moe/route.h"
#include "ops/walk.h"

static int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int parts_of(const rfi_call *c, const rfi_arg *logits) {
  return rfi_parts(c, logits->type.shape[0], 16 * logits->type.shape[1]);
}

/* Reads tokens first ... first + n - 1 into lanes; the other lanes are zeros. */
static void read_lanes(rfi_lanes *to, const rfi_arg *x, int64_t first, int64_t n) {
  const int64_t experts = x->type.shape[1];
  float buffer[RFI_BLOCK];
  if (n < RFI_LANES) memset(to, 0, (size_t)experts * sizeof *to);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < experts; j += RFI_BLOCK) {
      const int64_t m = experts - j < RFI_BLOCK ? experts - j : RFI_BLOCK;
      const float *from = rfi_read(buffer, x, (first + i) * experts + j, 1, m);
      for (int64_t e = 0; e < m; e++) to[j + e][i] = from[e];
    }
}
static void write_lanes(const rfi_lanes *from, const rfi_arg *y, int64_t first, int64_t n) {
  const int64_t experts = y->type.shape[1];
  float buffer[RFI_BLOCK];
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < experts; j += RFI_BLOCK) {
      const int64_t m = experts - j < RFI_BLOCK ? experts - j : RFI_BLOCK, at = (first + i) * experts + j;
      float *to = rfi_target(buffer, y, at);
      for (int64_t e = 0; e < m; e++) to[e] = from[j + e][i];
      rfi_flush(to, y, at, m);
    }
}
static void read_indices(rfi_int_lanes *to, const rfi_arg *index, int64_t first, int64_t n) {
  const int64_t k = index->type.shape[1];
  const int32_t *from = (const int32_t *)index->data + first * k;
  if (n < RFI_LANES) memset(to, 0, (size_t)k * sizeof *to);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < k; j++) to[j][i] = from[i * k + j];
}
static int64_t lanes_of(int64_t first, int64_t end) { return end - first < RFI_LANES ? end - first : RFI_LANES; }

/* ---- moe_route ---- */

enum { K, SCORE, NORM, GROUPS, GROUP_K, SCALE };

/* The scratch of a part: scores, compared values, group scores, the weights and indices of the chosen experts, and
 * marks for experts that are already chosen or excluded. */
typedef struct part_scratch {
  rfi_lanes *scores, *compared, *groups, *weight;
  rfi_int_lanes *index, *taken;
} part_scratch;

static int64_t lanes_per_part(const rfi_call *c) {
  return 3 * c->in[0].type.shape[1] + c->attr[GROUPS].i + 2 * c->attr[K].i;
}
static part_scratch part_scratch_of(const rfi_call *c, int part) {
  const int64_t experts = c->in[0].type.shape[1], k = c->attr[K].i;
  rfi_lanes *at = (rfi_lanes *)c->workspace + part * lanes_per_part(c), *groups = at + 2 * experts;
  rfi_lanes *weight = groups + c->attr[GROUPS].i;
  return (part_scratch){
      at, at + experts, groups, weight, (rfi_int_lanes *)(weight + k), (rfi_int_lanes *)(weight + 2 * k)};
}
static size_t route_workspace(const rfi_call *c) {
  return (size_t)(parts_of(c, &c->in[0]) * lanes_per_part(c)) * sizeof(rfi_lanes);
}

/* For each token, finds the best of n values that is not marked, the first of equal ones, and marks it. -1: none is
 * left. */
static void take_best(const rfi_lanes *x, rfi_int_lanes *taken, int64_t n, rfi_int_lanes best, rfi_lanes value) {
  for (int i = 0; i < RFI_LANES; i++) best[i] = -1, value[i] = 0;
  for (int64_t e = 0; e < n; e++)
    for (int i = 0; i < RFI_LANES; i++) {
      const int better = (x[e][i] > value[i]) | ((value[i] != value[i]) & (x[e][i] == x[e][i])) | (best[i] < 0);
      const int takes = better & (taken[e][i] == 0);
      best[i] = takes ? (int32_t)e : best[i];
      value[i] = takes ? x[e][i] : value[i];
    }
  for (int i = 0; i < RFI_LANES; i++)
    if (best[i] >= 0) taken[best[i]][i] = 1;
}

/* Marks all experts outside the best groups. */
static void limit_groups(const rfi_attr *a, const part_scratch *r, int64_t experts) {
  const int64_t groups = a[GROUPS].i, size = experts / groups, best = a[K].i / a[GROUP_K].i;
  rfi_int_lanes which;
  rfi_lanes value;
  memset(r->groups, 0, (size_t)groups * sizeof *r->groups);
  for (int64_t g = 0; g < groups; g++)
    for (int64_t j = 0; j < best; j++) {
      take_best(r->compared + g * size, r->taken + g * size, size, which, value);
      for (int i = 0; i < RFI_LANES; i++) r->groups[g][i] += value[i];
    }
  memset(r->taken, 0, (size_t)groups * sizeof *r->taken);
  for (int64_t j = 0; j < a[GROUP_K].i; j++) take_best(r->groups, r->taken, groups, which, value);
  for (int64_t g = 0; g < groups; g++)
    for (int i = 0; i < RFI_LANES; i++) r->groups[g][i] = (float)r->taken[g][i];
  for (int64_t e = 0; e < experts; e++)
    for (int i = 0; i < RFI_LANES; i++) r->taken[e][i] = r->groups[e / size][i] == 0;
}

static void choose(const rfi_call *c, const part_scratch *r) {
  const rfi_attr *a = c->attr;
  const int64_t experts = c->in[0].type.shape[1];
  const float *bias = c->n_in > 1 ? c->in[1].data : NULL;
  const bool plain = !bias && a[GROUPS].i == 1;
  rfi_lanes value;
  if (plain) memcpy(r->compared, r->scores, (size_t)experts * sizeof *r->scores);
  rfi_route_scores(r->scores, experts, a[SCORE].i);
  for (int64_t e = 0; !plain && e < experts; e++)
    for (int i = 0; i < RFI_LANES; i++) r->compared[e][i] = r->scores[e][i] + (bias ? bias[e] : 0);
  memset(r->taken, 0, (size_t)experts * sizeof *r->taken);
  if (a[GROUPS].i > 1) limit_groups(a, r, experts);
  for (int64_t j = 0; j < a[K].i; j++) take_best(r->compared, r->taken, experts, r->index[j], value);
}

static void route_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_attr *a = c->attr;
  const int64_t experts = c->in[0].type.shape[1], k = a[K].i;
  const float scale = (float)a[SCALE].f;
  const part_scratch r = part_scratch_of(c, part);
  int32_t *indices = c->out[1].data;
  float *weights = c->out[0].data;
  for (int64_t t = begin; t < end; t += RFI_LANES) {
    const int64_t n = lanes_of(t, end);
    rfi_lanes *w = r.weight, sum;
    read_lanes(r.scores, &c->in[0], t, n);
    choose(c, &r);
    rfi_route_chosen(r.scores, experts, r.index, k, a[SCORE].i, w);
    for (int i = 0; i < RFI_LANES; i++) sum[i] = RFI_ROUTE_TINY;
    for (int64_t j = 0; j < k; j++)
      for (int i = 0; i < RFI_LANES; i++) sum[i] += w[j][i];
    for (int64_t j = 0; j < k; j++)
      for (int i = 0; i < RFI_LANES; i++) w[j][i] = scale * (a[NORM].i ? w[j][i] / sum[i] : w[j][i]);
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < k; j++) {
        if (indices) indices[(t + i) * k + j] = r.index[j][i];
        if (weights) weights[(t + i) * k + j] = w[j][i];
      }
  }
}

static rfr_status run_route(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, c->in[0].type.shape[0], 16 * c->in[0].type.shape[1], route_part);
  return RFR_OK;
}

/* ---- moe_route_bwd ---- */

/* Replaces dw by the gradient of the chosen scores. */
static void through_norm(const rfi_lanes *r, rfi_lanes *dw, int64_t k, bool norm, float scale) {
  rfi_lanes sum, dot;
  for (int i = 0; i < RFI_LANES; i++) sum[i] = RFI_ROUTE_TINY, dot[i] = 0;
  for (int64_t j = 0; j < k; j++)
    for (int i = 0; i < RFI_LANES; i++) sum[i] += r[j][i], dot[i] += dw[j][i] * r[j][i];
  for (int64_t j = 0; j < k; j++)
    for (int i = 0; i < RFI_LANES; i++)
      dw[j][i] = norm ? scale * (dw[j][i] - dot[i] / sum[i]) / sum[i] : scale * dw[j][i];
}

/* Scratch of a part: scores of all experts and of the chosen ones, their gradients, and the chosen indices. */
static int64_t route_bwd_lanes(const rfi_call *c) { return 2 * c->in[1].type.shape[1] + 3 * c->in[0].type.shape[1]; }
static size_t route_bwd_workspace(const rfi_call *c) {
  return (size_t)(parts_of(c, &c->in[1]) * route_bwd_lanes(c)) * sizeof(rfi_lanes);
}

/* Reads dw of the chosen experts into lanes; in memory, each token is a row. */
static void read_weights(rfi_lanes *to, const rfi_arg *dw, int64_t first, int64_t n) {
  const int64_t k = dw->type.shape[1];
  const float *from = (const float *)dw->data + first * k;
  if (n < RFI_LANES) memset(to, 0, (size_t)k * sizeof *to);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < k; j++) to[j][i] = from[i * k + j];
}

/* Adds the gradients of the chosen scores to ds. */
static void add_chosen(rfi_lanes *ds, int64_t experts, const rfi_int_lanes *index, int64_t k, int64_t kind,
                       const rfi_lanes *r, const rfi_lanes *dr, const rfi_lanes dot) {
  for (int64_t j = 0; j < k; j++) {
    rfi_lanes by;
    for (int i = 0; i < RFI_LANES; i++)
      by[i] = kind == RFR_MOE_SOFTMAX   ? dr[j][i] * r[j][i]
              : kind == RFR_MOE_SIGMOID ? dr[j][i] * r[j][i] * (1 - r[j][i])
                                        : (dr[j][i] - dot[i]) * r[j][i];
    for (int i = 0; i < RFI_LANES; i++)
      if (index[j][i] >= 0 && index[j][i] < experts) ds[index[j][i]][i] += by[i];
  }
}

static void route_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_attr *a = c->attr;
  const int64_t experts = c->in[1].type.shape[1], k = c->in[0].type.shape[1], kind = a[0].i;
  rfi_lanes *s = (rfi_lanes *)c->workspace + part * route_bwd_lanes(c), *ds = s + experts;
  rfi_lanes *r = ds + experts, *dr = r + k;
  rfi_int_lanes *index = (rfi_int_lanes *)(dr + k);
  for (int64_t t = begin; t < end; t += RFI_LANES) {
    const int64_t n = lanes_of(t, end);
    rfi_lanes dot = {0};
    read_lanes(s, &c->in[1], t, n);
    read_indices(index, &c->in[2], t, n);
    read_weights(dr, &c->in[0], t, n);
    memset(ds, 0, (size_t)experts * sizeof *ds);
    rfi_route_scores(s, experts, kind);
    rfi_route_chosen(s, experts, index, k, kind, r);
    through_norm(r, dr, k, a[1].i != 0, (float)a[2].f);
    for (int64_t j = 0; j < k; j++)
      for (int i = 0; i < RFI_LANES; i++) dot[i] += dr[j][i] * r[j][i];
    add_chosen(ds, experts, index, k, kind, r, dr, dot);
    for (int64_t e = 0; kind == RFR_MOE_SOFTMAX && e < experts; e++)
      for (int i = 0; i < RFI_LANES; i++) ds[e][i] -= dot[i] * s[e][i];
    write_lanes(ds, &c->out[0], t, n);
  }
}

static rfr_status run_route_bwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, c->in[1].type.shape[0], 16 * c->in[1].type.shape[1], route_bwd_part);
  return RFR_OK;
}

/* ---- moe_loss ---- */

enum { SIGMOID, BALANCE, Z, IGNORE };

/* Returns the number of valid tokens, and counts how often each expert was chosen by them. */
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

/* Replaces l by the probabilities of all experts. over gets their divisor; lse, unless NULL, the log of the sum of
 * exp(l); s the sigmoids, if those are the scores. */
static void probabilities(rfi_lanes *l, int64_t experts, bool sigmoid, rfi_lanes *s, rfi_lanes over, float *lse) {
  rfi_lanes max;
  if (sigmoid) rfi_route_sigmoids(l, experts, s);
  rfi_route_exp(l, experts, max, over);
  for (int i = 0; lse && i < RFI_LANES; i++) lse[i] = max[i] + logf(over[i]);
  for (int i = 0; sigmoid && i < RFI_LANES; i++) over[i] = RFI_ROUTE_TINY;
  for (int64_t e = 0; sigmoid && e < experts; e++)
    for (int i = 0; i < RFI_LANES; i++) over[i] += s[e][i];
  if (sigmoid) memcpy(l, s, (size_t)experts * sizeof *l);
  for (int64_t e = 0; e < experts; e++)
    for (int i = 0; i < RFI_LANES; i++) l[e][i] /= over[i];
}

/* The workspace: how often each expert was chosen; then, per part, the sums of probabilities, lse^2, and two tables. */
static int64_t loss_part_bytes(int64_t experts) {
  return round64((experts + 1) * 8) + 2 * experts * (int64_t)sizeof(rfi_lanes);
}
static size_t loss_workspace(const rfi_call *c) {
  const int64_t experts = c->in[0].type.shape[1];
  return (size_t)(round64(experts * 8) + parts_of(c, &c->in[0]) * loss_part_bytes(experts));
}

static void loss_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const int64_t experts = c->in[0].type.shape[1];
  const int32_t *targets = c->in[2].data;
  double *sums = (double *)((char *)c->workspace + round64(experts * 8) + part * loss_part_bytes(experts));
  rfi_lanes *p = (rfi_lanes *)((char *)sums + round64((experts + 1) * 8)), over, lse;
  memset(sums, 0, (size_t)(experts + 1) * 8);
  for (int64_t t = begin; t < end; t += RFI_LANES) {
    const int64_t n = lanes_of(t, end);
    read_lanes(p, &c->in[0], t, n);
    probabilities(p, experts, c->attr[SIGMOID].i != 0, p + experts, over, lse);
    for (int64_t i = 0; i < n; i++) {
      if (targets[t + i] == c->attr[IGNORE].i) continue;
      for (int64_t e = 0; e < experts; e++) sums[e] += p[e][i];
      sums[experts] += (double)lse[i] * lse[i];
    }
  }
}

static rfr_status run_loss(const rfi_call *c) {
  const int64_t experts = c->in[0].type.shape[1];
  double *chosen = c->workspace, balance = 0, z = 0;
  RFI_TRY(rfi_check_floats(c));
  const double valid = count_chosen(c->attr, &c->in[1], &c->in[2], experts, chosen);
  rfi_parallel(c, c->in[0].type.shape[0], 16 * experts, loss_part);
  for (int part = 0; part < parts_of(c, &c->in[0]); part++) {
    const double *sums = (double *)((char *)c->workspace + round64(experts * 8) + part * loss_part_bytes(experts));
    for (int64_t e = 0; e < experts; e++) balance += chosen[e] * sums[e];
    z += sums[experts];
  }
  const double loss = c->attr[BALANCE].f * (double)experts / (valid * valid) * balance + c->attr[Z].f * z / valid;
  *(float *)c->out[0].data = valid > 0 ? (float)loss : 0.0f;
  return RFR_OK;
}

/* ---- moe_loss_bwd ---- */

static size_t loss_bwd_workspace(const rfi_call *c) {
  const int64_t experts = c->in[1].type.shape[1];
  return (size_t)(round64((experts + 1) * 8) + parts_of(c, &c->in[1]) * 2 * experts * (int64_t)sizeof(rfi_lanes));
}

static void loss_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const int64_t experts = c->in[1].type.shape[1];
  const double *chosen = c->workspace, valid = chosen[experts], dloss = *(const float *)c->in[0].data;
  const int32_t *targets = c->in[3].data;
  rfi_lanes *p = (rfi_lanes *)((char *)c->workspace + round64((experts + 1) * 8)) + part * 2 * experts;
  rfi_lanes *s = p + experts, over, lse = {0};
  const bool sigmoid = c->attr[SIGMOID].i != 0, z = c->attr[Z].f != 0;
  const float by = (float)(dloss * c->attr[BALANCE].f * (double)experts / (valid * valid));
  const float z_by = z ? (float)(dloss * 2 * c->attr[Z].f / valid) : 0;
  for (int64_t t = begin; t < end; t += RFI_LANES) {
    const int64_t n = lanes_of(t, end);
    rfi_lanes dot = {0};
    read_lanes(p, &c->in[1], t, n);
    probabilities(p, experts, sigmoid, s, over, z ? lse : NULL);
    for (int64_t e = 0; e < experts; e++)
      for (int i = 0; i < RFI_LANES; i++) dot[i] += p[e][i] * (float)chosen[e];
    if (!sigmoid) {
      for (int64_t e = 0; e < experts; e++)
        for (int i = 0; i < RFI_LANES; i++) p[e][i] *= by * ((float)chosen[e] - dot[i]) + z_by * lse[i];
    } else {
      for (int64_t e = 0; e < experts; e++)
        for (int i = 0; i < RFI_LANES; i++)
          p[e][i] = by * ((float)chosen[e] - dot[i]) / over[i] * s[e][i] * (1 - s[e][i]);
      if (z) read_lanes(s, &c->in[1], t, n);
      for (int64_t e = 0; z && e < experts; e++)
        for (int i = 0; i < RFI_LANES; i++) p[e][i] += z_by * lse[i] * rfi_expf(s[e][i] - lse[i]);
    }
    for (int64_t i = 0; i < n; i++)
      for (int64_t e = 0; e < experts && targets[t + i] == c->attr[IGNORE].i; e++) p[e][i] = 0;
    write_lanes(p, &c->out[0], t, n);
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
