/* SPDX-License-Identifier: Apache-2.0
 *
 * The graph is captured once; routing may change at every replay. Training steps of grouped GEMMs are recorded once,
 * captured with even splits, and replayed with a thousand others: random ones, with empty groups, all rows in one
 * group, fewer rows than the buffer has, and invalid ones, whose update must not happen. A second copy of the program
 * runs eagerly, except for invalid splits; after every step both must be bitwise equal. Rows outside all groups are NaN
 * in all operands, in every step, and must be zeros in the results.
 *
 * Delayed wgrads are tested with a graphed callable: W of all microbatches is replayed after I of all of them, and the
 * same callable runs eagerly with W right after I. A step with invalid splits is aborted, with and without its Ws.
 *
 *   routings_test [--device NAME] [STEPS [ROWS]]
 *
 * With a device (or REFRAIN_DEVICE) the programs run on it; the exit code is 77 if it is missing.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "refrain/graphs.h"
#include "refrain/ops.h"
#include "support/context.h"
#include "support/device.h"

/* ---- the programs: every pair of choices of two axes occurs in at least one of them ---- */

typedef enum extra { PLAIN, BIAS, SCALED_BIAS } extra;
/* How a weight's gradient is summed. In a program: not at all; over two microbatches; for the odd weights (packed: for
 * none) only over the first, while the bias has both; into a state that no step clears. In a callable, the main
 * gradients are cleared for each microbatch; for two; for two, but never those of the even weights; never. */
typedef enum sum { OVERWRITE, ACCUMULATE, MIXED, ONTO_STATE } sum;

typedef struct setup {
  rfr_dtype dtype;
  int64_t in, out; /* multiples of 8 where TMA is available */
  bool separate;
  extra extra;
  sum sum;
  bool frozen;  /* if weights are separate, that of group FROZEN is frozen */
  bool delayed; /* a callable with delayed wgrads */
} setup;

enum { GROUPS = 5, FROZEN = 2, MOST_MICROBATCHES = 2, STEPS = 1000, ROWS = 37, DEVICE_ROWS = 1500 };

static const setup setups[] = {
    {RFR_F32, 24, 40, false, PLAIN, OVERWRITE, false, false},
    {RFR_BF16, 24, 40, false, BIAS, ACCUMULATE, false, false},
    {RFR_BF16, 19, 33, false, SCALED_BIAS, MIXED, false, false},
    {RFR_F32, 19, 33, true, BIAS, MIXED, true, false},
    {RFR_BF16, 24, 40, true, SCALED_BIAS, OVERWRITE, true, false},
    {RFR_F32, 24, 40, true, SCALED_BIAS, ACCUMULATE, false, false},
    {RFR_BF16, 19, 33, true, PLAIN, ACCUMULATE, true, false},
    {RFR_BF16, 24, 40, true, PLAIN, MIXED, false, false},
    {RFR_F32, 19, 33, true, BIAS, OVERWRITE, false, false},
    {RFR_F32, 24, 40, false, BIAS, ONTO_STATE, false, false},
    {RFR_BF16, 19, 33, true, SCALED_BIAS, ONTO_STATE, true, false},
    {RFR_BF16, 24, 40, true, PLAIN, ONTO_STATE, false, false},
    {RFR_F32, 24, 40, false, BIAS, OVERWRITE, false, true},
    {RFR_BF16, 24, 40, false, SCALED_BIAS, ACCUMULATE, false, true},
    {RFR_BF16, 19, 33, false, PLAIN, ONTO_STATE, false, true},
    {RFR_BF16, 24, 40, true, BIAS, MIXED, true, true},
    {RFR_F32, 19, 33, true, SCALED_BIAS, ACCUMULATE, true, true},
    {RFR_BF16, 24, 40, true, PLAIN, ONTO_STATE, true, true},
    {RFR_F32, 24, 40, true, PLAIN, OVERWRITE, false, true},
    {RFR_F32, 24, 40, false, SCALED_BIAS, MIXED, false, true},
};
enum { N_SETUPS = sizeof setups / sizeof *setups };

static int64_t n_rows = ROWS;
static int n_steps = STEPS;

static int microbatches_of(const setup *s) {
  return s->sum == ACCUMULATE || s->sum == MIXED || (s->delayed && s->sum == ONTO_STATE) ? 2 : 1;
}

static rfr_value input(rfr_trace *t, const char *name, int number, rfr_role role, rfr_dtype dtype, int rank,
                       const int64_t *shape) {
  char text[24];
  snprintf(text, sizeof text, "%s%d", name, number);
  return rfr_input(t, text, role, dtype, rank, shape);
}

typedef struct weights {
  rfr_value w[GROUPS], bias; /* packed: w[0] has all groups */
} weights;

/* Declares the weights and the bias as inputs, and lists those that are trained. */
static weights record_weights(rfr_trace *t, const setup *s, rfr_value *trained, int *n_trained) {
  weights weights = {.bias = RFR_NONE};
  *n_trained = 0;
  for (int g = 0; g < (s->separate ? GROUPS : 1); g++) {
    const bool frozen = s->frozen && g == FROZEN;
    const int64_t shape[3] = {GROUPS, s->out, s->in};
    weights.w[g] = input(t, "w", g, frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, s->dtype, s->separate ? 2 : 3,
                         shape + s->separate);
    if (!frozen) trained[(*n_trained)++] = weights.w[g];
  }
  if (s->extra != PLAIN)
    trained[(*n_trained)++] = weights.bias =
        rfr_input(t, "bias", RFR_ROLE_TRAINABLE, RFR_F32, 2, (int64_t[]){GROUPS, s->out});
  return weights;
}

/* y of one microbatch. */
static rfr_value product(rfr_trace *t, const setup *s, int m, weights weights, rfr_value *x, rfr_value *scale,
                         rfr_value *bad) {
  const int64_t R = n_rows, groups = GROUPS;
  *x = input(t, "x", m, RFR_ROLE_INPUT_GRAD, s->dtype, 2, (int64_t[]){R, s->in});
  const rfr_value splits = input(t, "splits", m, RFR_ROLE_INPUT, m ? RFR_I32 : RFR_I64, 1, &groups);
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, R, bad);
  if (m == 1 && s->sum == MIXED)
    for (int g = 0; g < (s->separate ? GROUPS : 1); g++)
      if (!s->separate || g % 2 == 1) weights.w[g] = rfr_detach(t, weights.w[g]);
  *scale = s->extra == SCALED_BIAS ? input(t, "scale", m, RFR_ROLE_INPUT_GRAD, RFR_F32, 1, &R) : RFR_NONE;
  const rfr_value y = s->separate ? rfr_grouped_linear_separate(t, *x, GROUPS, weights.w, offsets, weights.bias, *scale)
                                  : rfr_grouped_linear(t, *x, weights.w[0], offsets, weights.bias, *scale);
  char name[8];
  snprintf(name, sizeof name, "y%d", m);
  rfr_output(t, name, y);
  return y;
}

/* y . r of one microbatch, so that the gradient of y is r; r has NaN after the last group. */
static rfr_value forward(rfr_trace *t, const setup *s, int m, weights weights, rfr_value *x, rfr_value *scale,
                         rfr_value *bad) {
  const rfr_value y = product(t, s, m, weights, x, scale, bad);
  const rfr_value r = input(t, "r", m, RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){n_rows, s->out});
  return rfr_sum(t, rfr_mul(t, s->dtype == RFR_F32 ? y : rfr_cast(t, y, RFR_F32), r), -1);
}

static void output(rfr_trace *t, const char *name, int number, rfr_value v) {
  char text[24];
  snprintf(text, sizeof text, "%s%d", name, number);
  if (v != RFR_NONE) rfr_output(t, text, v);
}

/* Records all gradients, and an update that invalid splits skip. */
static rfr_programs *compile(const setup *s) {
  const int n = microbatches_of(s);
  rfr_trace *t;
  rfr_value x[MOST_MICROBATCHES], scale[MOST_MICROBATCHES], bad[MOST_MICROBATCHES], loss = RFR_NONE, skip;
  rfr_value trained[GROUPS + 1], gradient[GROUPS + 1];
  int n_trained;
  OK(rfr_trace_create(ctx, &t));
  const weights weights = record_weights(t, s, trained, &n_trained);
  for (int m = 0; m < n; m++) {
    rfr_microbatch(t, m);
    const rfr_value part = forward(t, s, m, weights, &x[m], &scale[m], &bad[m]);
    rfr_microbatch(t, -1);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  for (int m = 0; m < n; m++) {
    output(t, "dx", m, rfr_gradient(t, loss, x[m], RFR_F32));
    if (scale[m] != RFR_NONE) output(t, "dscale", m, rfr_gradient(t, loss, scale[m], RFR_F32));
  }
  for (int i = 0; i < n_trained; i++) {
    const rfr_type type = rfr_value_type(t, trained[i]);
    if (s->sum == ONTO_STATE)
      gradient[i] =
          rfr_gradient_onto(t, loss, trained[i], input(t, "sum", i, RFR_ROLE_STATE, RFR_F32, type.rank, type.shape));
    else output(t, "d", i, gradient[i] = rfr_gradient(t, loss, trained[i], RFR_F32));
  }
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  const rfr_value norm = rfr_grad_norm(t, n_trained, gradient, &skip),
                  rate = rfr_fill(t, 0.01, RFR_F32, 1, (int64_t[]){1});
  rfr_value which, group;
  skip = rfr_skip_bad(t, skip, n, bad, &which, &group);
  for (int i = 0; i < n_trained; i++)
    rfr_sgd(t, trained[i], gradient[i], RFR_NONE, RFR_NONE, rate, RFR_NONE, skip, 0, 0, 1);
  rfr_output(t, "norm", norm);
  rfr_output(t, "skip", skip);
  rfr_output(t, "which", which);
  rfr_output(t, "group", group);
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rfr_trace_destroy(t);
  return p;
}

/* ---- splits ---- */

static uint32_t draw(uint64_t step, int what, uint32_t below) {
  return rfi_draw4(rfi_stream_key(step, (uint64_t)what), 0, 0, 0, 0).v[0] % below;
}

/* Chooses the splits of one microbatch; *rows rows are in groups. Returns the group that makes them invalid, or -1.
 * Those of the second microbatch are always valid, but sometimes without rows. */
static int choose(uint64_t step, int m, int64_t *splits, int64_t *rows) {
  enum { EVEN, ONE, NONE, BAD, RANDOM, KINDS = 8 };
  const int what = 100 * m;
  const uint32_t kind = step ? draw(step, what, KINDS) : EVEN;
  int64_t left = n_rows;
  int bad = -1;
  for (int g = 0; g < GROUPS; g++) {
    const bool empty = kind == ONE || (kind == NONE && m == 1) || draw(step, what + 10 + g, 3) == 0;
    splits[g] = kind == EVEN ? n_rows / GROUPS : empty ? 0 : draw(step, what + 20 + g, (uint32_t)(2 * n_rows / GROUPS));
    if (splits[g] > left) splits[g] = left;
    left -= splits[g];
  }
  const int g = (int)draw(step, what + 2, GROUPS);
  if (kind == ONE) splits[g] = n_rows;
  if (kind > RANDOM && kind % 2) splits[GROUPS - 1] += left;
  if (kind == BAD && m == 0) {
    bad = g;
    splits[g] = draw(step, what + 3, 2) ? -1 - (int64_t)draw(step, what + 4, 9) : n_rows + 1;
  }
  *rows = 0;
  for (int k = 0; k < GROUPS; k++) /* rows that are cut off belong to no group */
    *rows += splits[k] < 0 ? 0 : splits[k] < n_rows - *rows ? splits[k] : n_rows - *rows;
  return bad;
}

/* ---- values ---- */

/* Pseudo-random rows that depend only on the letter and the microbatch; rows of no group are NaN. The caller frees
 * them. */
static void *make_rows(const rfr_type *type, int64_t bytes, char letter, int m, int64_t rows) {
  const int64_t cols = type->rank == 2 ? type->shape[1] : 1, size = rfr_dtype_bits(type->dtype) / 8;
  char *data = malloc((size_t)bytes);
  assert_non_null(data);
  for (int64_t i = 0; i < rows * cols; i++) {
    const uint32_t hash = ((uint32_t)i + 7 * (uint32_t)m + (uint32_t)letter) * 2654435761u;
    const float v = (float)(hash >> 8) / 8388608.0f - 1;
    if (size == 4) ((float *)data)[i] = v;
    else ((uint16_t *)data)[i] = (uint16_t)rfr_float_to_bits(type->dtype, v);
  }
  memset(data + rows * cols * size, 0xFF, (size_t)(bytes - rows * cols * size));
  return data;
}

/* Writes the same rows into both programs. */
static void write_rows(rfr_programs *const p[2], const char *name, int m, int64_t rows) {
  rfr_tensor x, y;
  char text[16];
  snprintf(text, sizeof text, "%s%d", name, m);
  if (rfr_programs_tensor(p[0], text, &x) != RFR_OK) return;
  OK(rfr_programs_tensor(p[1], text, &y));
  void *data = make_rows(&x.type, x.bytes, *name, m, rows);
  OK(rfr_programs_write(p[0], &x, data));
  OK(rfr_programs_write(p[1], &y, data));
  free(data);
}

static void write_splits(rfr_programs *p, int m, const int64_t *splits) {
  rfr_tensor x;
  int32_t narrow[GROUPS];
  OK(rfr_programs_tensor(p, m ? "splits1" : "splits0", &x));
  for (int g = 0; g < GROUPS; g++) narrow[g] = (int32_t)splits[g];
  OK(rfr_programs_write(p, &x, m ? (const void *)narrow : splits));
}

/* The values of parameter i; the caller frees them. */
static void *make_weight(const rfr_tensor *x, int i) {
  const int64_t size = rfr_dtype_bits(x->type.dtype) / 8, n = x->bytes / size;
  char *data = malloc((size_t)x->bytes);
  assert_non_null(data);
  for (int64_t k = 0; k < n; k++) {
    const float v = (float)((k * 37 + i * 11) % 101 - 50) / 50;
    if (size == 4) ((float *)data)[k] = v;
    else ((uint16_t *)data)[k] = (uint16_t)rfr_float_to_bits(x->type.dtype, v);
  }
  return data;
}

static void write_weights(rfr_programs *p) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_TRAINABLE && x.role != RFR_ROLE_FROZEN) continue;
    void *data = make_weight(&x, i);
    OK(rfr_programs_write(p, &x, data));
    free(data);
  }
  OK(rfr_programs_load(p));
}

/* The bytes of a tensor, which may be on a device; the caller frees them. */
static void *bytes_of(rfr_programs *p, const rfr_tensor *x) {
  void *data = malloc((size_t)x->bytes + 1);
  assert_non_null(data);
  OK(rfr_programs_read(p, x, data));
  return data;
}

static int32_t number(rfr_programs *p, const char *name) {
  rfr_tensor x;
  int32_t value;
  OK(rfr_program_output(p, 0, name, &x));
  OK(rfr_programs_read(p, &x, &value));
  return value;
}

static void same(rfr_programs *p, const rfr_tensor *x, rfr_programs *q, const rfr_tensor *y, const char *name,
                 int step) {
  void *a = bytes_of(p, x), *b = bytes_of(q, y);
  assert_int_equal(x->bytes, y->bytes);
  if (memcmp(a, b, (size_t)x->bytes) != 0) fail_msg("step %d: %s has other bits than eager", step, name);
  free(a);
  free(b);
}

/* Rows of no group must be zeros; no element may be NaN. */
static void clean_bytes(const void *data, const rfr_type *type, const char *name, int m, int64_t rows, int step) {
  const int64_t cols = type->rank == 2 ? type->shape[1] : 1, size = rfr_dtype_bits(type->dtype) / 8;
  for (int64_t i = 0; i < n_rows * cols; i++) {
    const float v =
        size == 4 ? ((const float *)data)[i] : (float)rfr_float_from_bits(type->dtype, ((const uint16_t *)data)[i]);
    if (!isfinite(v) || (i >= rows * cols && v != 0))
      fail_msg("step %d: %s%d is %g in row %lld; %lld are in groups", step, name, m, (double)v, (long long)(i / cols),
               (long long)rows);
  }
}

static void clean(rfr_programs *p, const char *name, int m, int64_t rows, int step) {
  rfr_tensor x;
  char text[16];
  snprintf(text, sizeof text, "%s%d", name, m);
  if (rfr_program_output(p, 0, text, &x) != RFR_OK) return;
  void *data = bytes_of(p, &x);
  clean_bytes(data, &x.type, name, m, rows, step);
  free(data);
}

static void assert_same(rfr_programs *p, rfr_programs *q, int step) {
  static const char *const names[] = {"y0", "y1", "dx0", "dx1", "dscale0", "dscale1", "d0",    "d1",
                                      "d2", "d3", "d4",  "d5",  "norm",    "skip",    "which", "group"};
  rfr_tensor x, y;
  int n = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (rfr_program_output(p, 0, names[i], &x) != RFR_OK) continue;
    OK(rfr_program_output(q, 0, names[i], &y));
    same(p, &x, q, &y, names[i], step);
    n++;
  }
  assert_true(n >= 6);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_TRAINABLE && x.role != RFR_ROLE_STATE) continue;
    OK(rfr_programs_tensor(q, x.name, &y));
    same(p, &x, q, &y, x.name, step);
  }
}

/* ---- the campaign ---- */

typedef struct tally {
  int steps, bad, after_bad, empty, one, short_of;
} tally;

static void count(tally *c, const int64_t *splits, int64_t rows, bool bad, bool was_bad) {
  bool empty = false, one = false;
  for (int g = 0; g < GROUPS; g++) empty |= splits[g] == 0, one |= splits[g] == n_rows;
  c->steps++;
  c->bad += bad;
  c->after_bad += was_bad && !bad;
  c->empty += empty;
  c->one += one;
  c->short_of += rows < n_rows;
}

/* p[0] is replayed, p[1] runs eagerly. */
static void replay(const setup *s, tally *tally) {
  static const char *const inputs[] = {"x", "r", "scale"}, *const made[] = {"y", "dx", "dscale"};
  const int n = microbatches_of(s);
  rfr_programs *const p[2] = {compile(s), compile(s)};
  bool was_bad = false;
  for (int k = 0; k < 2; k++) write_weights(p[k]);
  for (int step = 0; step < n_steps; step++) {
    int64_t splits[MOST_MICROBATCHES][GROUPS], rows[MOST_MICROBATCHES];
    int bad = -1;
    for (int m = 0; m < n; m++) {
      const int wrong = choose((uint64_t)step, m, splits[m], &rows[m]);
      if (bad < 0) bad = wrong;
      for (int k = 0; k < 2; k++) write_splits(p[k], m, splits[m]);
      for (int i = 0; i < 3; i++) write_rows(p, inputs[i], m, rows[m]);
    }
    if (step == 0) OK(rfr_program_capture(p[0], 0));
    OK(rfr_program_replay(p[0], 0, NULL, 0));
    assert_int_equal(number(p[0], "skip"), bad >= 0);
    assert_int_equal(number(p[0], "which"), bad >= 0);
    assert_int_equal(number(p[0], "group"), bad >= 0 ? bad : 0);
    count(tally, splits[0], rows[0], bad >= 0, was_bad);
    was_bad = bad >= 0;
    if (was_bad && s->sum != ONTO_STATE) continue; /* the eager program does not run this step */
    OK(rfr_program_run(p[1], 0));
    assert_same(p[0], p[1], step);
    for (int m = 0; m < n; m++)
      for (int i = 0; i < 3; i++) clean(p[0], made[i], m, rows[m], step);
  }
  for (int k = 0; k < 2; k++) rfr_programs_destroy(p[k]);
}

/* ---- callables with delayed wgrads ---- */

typedef struct side {
  rfr_schedule *order;
  rfr_graphs *graphs;
  /* per microbatch of a step */
  void *y[MOST_MICROBATCHES], *dx[MOST_MICROBATCHES], *dscale[MOST_MICROBATCHES];
  rfr_tensor of_y, of_dx, of_dscale;
  int32_t bad[MOST_MICROBATCHES];
} side;

static side make_side(const setup *s, bool delayed) {
  static const char *const orders[2][2] = {{"0F0 0B0", "0F0 0B0 0F1 0B1"}, {"0F0 0I0 0W0", "0F0 0F1 0I0 0I1 0W0 0W1"}};
  const char *text = orders[delayed][microbatches_of(s) - 1];
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_main_gradient kept[GROUPS + 1];
  rfr_value trained[GROUPS + 1], x, scale, bad;
  side made = {NULL};
  rfr_trace *t;
  int n_trained;
  OK(rfr_trace_create(ctx, &t));
  const weights weights = record_weights(t, s, trained, &n_trained);
  product(t, s, 0, weights, &x, &scale, &bad);
  rfr_output(t, "bad", bad);
  OK(rfr_trace_finish(t));
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &made.order));
  for (int i = 0; i < n_trained; i++)
    if (s->sum == ONTO_STATE || (s->sum == MIXED && i % 2 == 0)) {
      rfr_main_gradient *main = &kept[o.n_gradients++];
      *main = rfr_main_gradient_default();
      main->parameter = rfr_value_name(t, trained[i]), main->accumulate = 1;
      main->type = rfr_value_type(t, trained[i]), main->type.dtype = RFR_F32;
    }
  c.trace = t;
  o.gradients = kept;
  o.schedule = made.order;
  o.eager = !delayed;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &made.graphs));
  rfr_trace_destroy(t);
  return made;
}

static void clear_made(side *p) {
  for (int m = 0; m < MOST_MICROBATCHES; m++) {
    free(p->y[m]), free(p->dx[m]), free(p->dscale[m]);
    p->y[m] = p->dx[m] = p->dscale[m] = NULL;
  }
}

/* The bytes of a call's result; the caller frees them. */
static void *copy_of(rfr_graphs *g, const rfr_tensor *x) {
  void *data = malloc((size_t)x->bytes + 1);
  assert_non_null(data);
  OK(rfr_graphs_read(g, x, data));
  return data;
}

static rft_room room; /* for splits of the replayed program */

static void run_forward(side *p, const setup *s, int m, int64_t *splits, int64_t rows) {
  const rfr_type x = {.dtype = s->dtype, .rank = 2, .shape = {n_rows, s->in}};
  const rfr_type scale = {.dtype = RFR_F32, .rank = 1, .shape = {n_rows}};
  rfr_tensor out[2];
  const void *there = rft_room_put(&room, 0, splits, GROUPS * sizeof *splits); /* reused: the earlier reader has run */
  rfr_binding in[3] = {{"x0", x, make_rows(&x, n_rows * s->in * rfr_dtype_bits(s->dtype) / 8, 'x', m, rows)},
                       {"splits0", {.dtype = RFR_I64, .rank = 1, .shape = {GROUPS}}, there},
                       {"scale0", scale, make_rows(&scale, n_rows * 4, 's', m, rows)}};
  OK(rfr_graphs_forward(p->graphs, 0, m, in, s->extra == SCALED_BIAS ? 3 : 2, out, 2));
  p->of_y = out[0];
  p->y[m] = copy_of(p->graphs, &out[0]);
  OK(rfr_graphs_read(p->graphs, &out[1], &p->bad[m]));
  free((void *)in[0].data);
  free((void *)in[2].data);
}

static void run_backward(side *p, const setup *s, int m, int64_t rows) {
  const rfr_type y = {.dtype = s->dtype, .rank = 2, .shape = {n_rows, s->out}};
  const bool scaled = s->extra == SCALED_BIAS;
  rfr_tensor out[3];
  const rfr_binding dy = {"y0", y, make_rows(&y, n_rows * s->out * rfr_dtype_bits(s->dtype) / 8, 'r', m, rows)};
  OK(rfr_graphs_backward(p->graphs, 0, m, &dy, 1, out, scaled ? 3 : 2));
  assert_null(out[1].data); /* splits have no gradient */
  p->of_dx = out[0];
  p->dx[m] = copy_of(p->graphs, &out[0]);
  if (scaled) p->of_dscale = out[2], p->dscale[m] = copy_of(p->graphs, &out[2]);
  free((void *)dy.data);
}

/* Runs a step. wgrad 0: without weight gradients, and the step stays open. */
static void run_order(side *p, const setup *s, int64_t (*splits)[GROUPS], const int64_t *rows, bool wgrad) {
  int n;
  const rfr_action *a = rfr_schedule_actions(p->order, 0, &n);
  clear_made(p);
  OK(rfr_graphs_begin_step(p->graphs, NULL, 0));
  for (int i = 0; i < n; i++) {
    const int m = a[i].microbatch;
    if (a[i].op == RFR_ACTION_F) run_forward(p, s, m, splits[m], rows[m]);
    if (a[i].op == RFR_ACTION_I || a[i].op == RFR_ACTION_B) run_backward(p, s, m, rows[m]);
    if (a[i].op == RFR_ACTION_W && wgrad) OK(rfr_graphs_wgrad(p->graphs, 0, m));
  }
}

/* The i-th parameter and its gradient, if any; false: there is no i-th parameter. */
static bool parameter_at(const side *p, int i, rfr_tensor *w, rfr_tensor *gradient) {
  char name[8];
  if (i > GROUPS) return false;
  snprintf(name, sizeof name, i < GROUPS ? "w%d" : "bias", i);
  if (rfr_graphs_tensor(p->graphs, name, w) != RFR_OK) w->data = NULL;
  if (!w->data || rfr_graphs_gradient(p->graphs, name, gradient) != RFR_OK) gradient->data = NULL;
  return true;
}

static void same_parts(const side *p, const side *q, int step, int n, const int64_t *rows) {
  rfr_tensor w, x, y;
  for (int m = 0; m < n; m++) {
    const void *const ours[] = {p->y[m], p->dx[m], p->dscale[m]}, *const theirs[] = {q->y[m], q->dx[m], q->dscale[m]};
    const rfr_tensor *const of[] = {&p->of_y, &p->of_dx, &p->of_dscale};
    static const char *const names[] = {"y", "dx", "dscale"};
    for (int i = 0; i < 3; i++) {
      if (!ours[i]) continue;
      if (memcmp(ours[i], theirs[i], (size_t)of[i]->bytes) != 0)
        fail_msg("step %d: %s%d has other bits than eager", step, names[i], m);
      clean_bytes(ours[i], &of[i]->type, names[i], m, rows[m], step);
    }
  }
  int gradients = 0;
  for (int i = 0; parameter_at(p, i, &w, &x); i++) {
    parameter_at(q, i, &w, &y);
    if (!x.data) continue;
    void *a = copy_of(p->graphs, &x), *b = copy_of(q->graphs, &y);
    if (memcmp(a, b, (size_t)x.bytes) != 0) fail_msg("step %d: %s has other bits than eager", step, x.name);
    free(a);
    free(b);
    gradients++;
  }
  assert_true(gradients >= 1);
}

/* Copies the main gradients from `from` to `to`, where an aborted step may have changed them. */
static void restore(side *to, const side *from) {
  rfr_tensor w, x, y;
  for (int i = 0; parameter_at(from, i, &w, &x); i++) {
    parameter_at(to, i, &w, &y);
    if (!x.data) continue;
    void *data = copy_of(from->graphs, &x);
    OK(rfr_graphs_write(to->graphs, &y, data));
    free(data);
  }
}

/* p is replayed with W at the end, q runs eagerly with W after each I. */
static void replay_delayed(const setup *s, tally *tally) {
  const int n = microbatches_of(s);
  side p = make_side(s, true), q = make_side(s, false), *const both[2] = {&p, &q};
  rfr_tensor w, gradient;
  bool was_bad = false;
  room = rft_room_open(ctx, GROUPS * sizeof(int64_t));
  for (int k = 0; k < 2; k++)
    for (int i = 0; parameter_at(both[k], i, &w, &gradient); i++) {
      if (!w.data) continue;
      void *data = make_weight(&w, i);
      OK(rfr_graphs_write(both[k]->graphs, &w, data));
      OK(rfr_graphs_changed(both[k]->graphs));
      free(data);
    }
  for (int step = 0; step < n_steps; step++) {
    int64_t splits[MOST_MICROBATCHES][GROUPS], rows[MOST_MICROBATCHES];
    int bad = -1;
    for (int m = 0; m < n; m++) {
      const int wrong = choose((uint64_t)step, m, splits[m], &rows[m]);
      if (m == 0) bad = wrong;
    }
    run_order(&p, s, splits, rows, bad < 0 || step % 2);
    for (int m = 0; m < n; m++) assert_int_equal(p.bad[m], m == 0 && bad >= 0 ? 1 + bad : 0);
    count(tally, splits[0], rows[0], bad >= 0, was_bad);
    was_bad = bad >= 0;
    if (was_bad) { /* the eager callable does not run this step */
      OK(rfr_graphs_abort_step(p.graphs));
      if (step % 2) restore(&p, &q);
      continue;
    }
    OK(rfr_graphs_end_step(p.graphs));
    run_order(&q, s, splits, rows, true);
    OK(rfr_graphs_end_step(q.graphs));
    same_parts(&p, &q, step, n, rows);
  }
  for (int k = 0; k < 2; k++) {
    clear_made(both[k]);
    rfr_graphs_destroy(both[k]->graphs);
    rfr_schedule_destroy(both[k]->order);
  }
  rft_room_close(&room);
}

static void replays(void **state) {
  tally tally = {0};
  (void)state;
  for (int i = 0; i < N_SETUPS; i++) (setups[i].delayed ? replay_delayed : replay)(&setups[i], &tally);
  print_message("%d programs, %d replays: %d with bad splits, %d after such, %d with empty groups, %d with all rows in "
                "one, %d with rows in none\n",
                (int)N_SETUPS, tally.steps, tally.bad, tally.after_bad, tally.empty, tally.one, tally.short_of);
  assert_true(tally.bad && tally.after_bad && tally.empty && tally.one && tally.short_of);
}

/* Checks the table above: every pair of choices that can be recorded occurs in some row. */
static void pairs(void **state) {
  enum { AXES = 7 };
  static const int choices[AXES] = {2, 2, 2, 3, 4, 2, 2};
  (void)state;
  for (int a = 0; a < AXES; a++)
    for (int b = a + 1; b < AXES; b++)
      for (int i = 0; i < choices[a]; i++)
        for (int k = 0; k < choices[b]; k++) {
          bool found = false;
          for (int s = 0; s < N_SETUPS; s++) {
            const setup *row = &setups[s];
            const int of[AXES] = {row->dtype == RFR_BF16, row->in % 8 == 0, row->separate, (int)row->extra,
                                  (int)row->sum,          row->frozen,      row->delayed};
            found |= of[a] == i && of[b] == k;
          }
          if (a == 2 && b == 5 && i == 0 && k == 1) continue; /* a single group of packed weights cannot be frozen */
          if (!found) fail_msg("no program has choice %d of axis %d with choice %d of axis %d", i, a, k, b);
        }
}

int main(int argc, char **argv) {
  if (!rft_device_named(&argc, argv)) return 77;
  if (getenv("REFRAIN_DEVICE")) n_rows = DEVICE_ROWS;
  if (argc > 1) n_steps = atoi(argv[1]);
  if (argc > 2) n_rows = atoi(argv[2]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(pairs), rft_context_test(replays)};
  return cmocka_run_group_tests_name("routings", tests, NULL, NULL);
}
