/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs of two linear layers under every recipe: plain and grouped, with packed and separate weights; weights,
 * biases, factors of biases and input trained or not; one group empty; one or two microbatches; with and without
 * recompute. For each, eager and replayed runs must be bitwise equal, results must be close to those in f32, and the
 * number of quantized copies must follow a closed formula.
 *
 * x is read as x.row, and as x.col if the weight of its layer is trained; w is read as w.row, and as w.col if the input
 * of its layer needs a gradient; dy is read as dy.row and dy.col in these two cases.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "pass/pass.h"
#include "support/context.h"
#include "trace/trace.h"

enum { GROUPS = 3, ROWS = 64, K = 32, H = 96, N = 64, USED = 57 };

typedef struct cell {
  rfr_recipe_kind recipe; /* NONE: in f32 */
  bool grouped, bias, train_x, train_w1, train_w2;
  int microbatches;
  bool high; /* the backward is not quantized */
  rfr_recompute recompute;
  bool separate, scaled; /* grouped: separate: one weight per group; scaled: a factor per row of the bias */
  bool freeze_one;       /* separate: the first weight of each linear is frozen */
} cell;

typedef struct weights {
  rfr_value of[GROUPS];
  bool trained[GROUPS];
  int n;
} weights;

static weights declare_weights(rfr_trace *t, const cell *c, const char *name, bool trained, int64_t out, int64_t in) {
  weights w = {.n = c->separate ? GROUPS : 1};
  for (int e = 0; e < w.n; e++) {
    char own[8];
    snprintf(own, sizeof own, c->separate ? "%s.%d" : "%s", name, e);
    w.trained[e] = trained && !(c->freeze_one && e == 0);
    const rfr_role role = w.trained[e] ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN;
    w.of[e] = c->grouped && !c->separate ? rfr_input(t, own, role, RFR_F32, 3, ((int64_t[]){GROUPS, out, in}))
                                         : rfr_input(t, own, role, RFR_F32, 2, ((int64_t[]){out, in}));
  }
  return w;
}

static rfr_value bias(rfr_trace *t, const cell *c, const char *name, int64_t out) {
  if (!c->bias) return RFR_NONE;
  if (c->grouped) return rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){GROUPS, out}));
  return rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){out}));
}

static rfr_value linear(rfr_trace *t, const cell *c, rfr_value x, const weights *w, rfr_value offsets, rfr_value b,
                        rfr_value scale) {
  if (c->separate) return rfr_grouped_linear_separate(t, x, GROUPS, w->of, offsets, b, scale);
  return c->grouped ? rfr_grouped_linear(t, x, w->of[0], offsets, b, scale) : rfr_linear(t, x, w->of[0], b);
}

static void want(rfr_trace *t, rfr_value loss, rfr_value of, bool wanted, const char *name, int number) {
  char text[16];
  snprintf(text, sizeof text, number < 0 ? "d_%s" : "d_%s.%d", name, number);
  if (wanted) rfr_output(t, text, rfr_gradient(t, loss, of, RFR_F32));
}

static void want_weights(rfr_trace *t, rfr_value loss, const cell *c, const weights *w, const char *name) {
  for (int e = 0; e < w->n; e++) want(t, loss, w->of[e], w->trained[e], name, c->separate ? e : -1);
}

static rfr_trace *record(const cell *c) {
  rfr_trace *t;
  rfr_recipe recipe = rfr_recipe_default(c->recipe);
  OK(rfr_trace_create(ctx, &t));
  recipe.high_backward = c->high;
  const weights w1 = declare_weights(t, c, "w1", c->train_w1, H, K),
                w2 = declare_weights(t, c, "w2", c->train_w2, N, H);
  const rfr_value b1 = bias(t, c, "b1", H), b2 = bias(t, c, "b2", N);
  rfr_step_block(t);
  const rfr_value offsets =
      c->grouped ? rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){GROUPS + 1})) : RFR_NONE;
  const rfr_value scale =
      c->scaled ? rfr_input(t, "scale", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, ((int64_t[]){ROWS})) : RFR_NONE;
  rfr_value x[2], loss = RFR_NONE;
  rfr_recipe_begin(t, &recipe);
  for (int m = 0; m < c->microbatches; m++) {
    char name[2][8];
    snprintf(name[0], sizeof name[0], "x%d", m);
    snprintf(name[1], sizeof name[1], "r%d", m);
    rfr_microbatch(t, m);
    x[m] = rfr_input(t, name[0], c->train_x ? RFR_ROLE_INPUT_GRAD : RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, K}));
    const rfr_value r = rfr_input(t, name[1], RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, N}));
    const rfr_value h = rfr_gelu(t, linear(t, c, x[m], &w1, offsets, b1, scale), 1);
    rfr_value y = linear(t, c, h, &w2, offsets, b2, scale);
    y = rfr_sum(t, rfr_mul(t, y, r), -1);
    rfr_microbatch(t, -1);
    loss = m ? rfr_add(t, loss, y) : y;
  }
  rfr_recipe_end(t);
  rfr_output(t, "loss", loss);
  want_weights(t, loss, c, &w1, "w1");
  want_weights(t, loss, c, &w2, "w2");
  want(t, loss, b1, c->bias, "b1", -1);
  want(t, loss, b2, c->bias, "b2", -1);
  want(t, loss, scale, c->scaled, "scale", -1);
  for (int m = 0; m < c->microbatches; m++) want(t, loss, x[m], c->train_x, m ? "x1" : "x0", -1);
  OK(rfr_trace_finish(t));
  return t;
}

/* Separate weights get the values of the packed one. */
static void fill_weight(const rfr_tensor *x) {
  static float packed[GROUPS * H * N];
  const int64_t n = rfi_count(&x->type), group = x->name[2] ? x->name[3] - '0' : 0;
  rfr_tensor all = *x;
  all.data = packed, all.bytes = (int64_t)sizeof packed;
  all.type = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {GROUPS * H * N}};
  rft_fill(&all, 90 + (uint64_t)x->name[1]);
  memcpy(x->data, packed + group * n, (size_t)x->bytes);
}

static rfr_programs *compile(const cell *c) {
  rfr_trace *t = record(c);
  rfr_compile_options o = rfr_compile_options_default();
  rfr_tensor x;
  o.recompute = c->recompute;
  rfr_programs *p = rft_compile(t, &o);
  /* by name, because programs may have different inputs */
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    if (x.type.dtype == RFR_F32) rft_fill(&x, (uint64_t)x.name[0] * 256 + (uint64_t)x.name[1]);
    if (x.name[0] == 'w') fill_weight(&x);
    if (strcmp(x.name, "offsets") == 0) memcpy(x.data, (int32_t[]){0, 21, 21, USED}, (size_t)x.bytes);
    if (strcmp(x.name, RFR_RECIPE_HISTORY) == 0) memset(x.data, 0, (size_t)x.bytes);
    for (int64_t k = 0; strcmp(x.name, RFR_RECIPE_SCALE) == 0 && k < rfi_count(&x.type); k++) ((float *)x.data)[k] = 1;
  }
  OK(rfr_programs_load(p));
  rfr_trace_destroy(t);
  return p;
}

static const char *text_of(const cell *c) {
  static char text[160];
  snprintf(text, sizeof text, "%s%s%s%s%s, train %s%s%s, %d microbatches%s%s", rfr_recipe_name(c->recipe),
           c->grouped ? c->separate ? " separate" : " grouped" : "", c->bias ? " bias" : "", c->scaled ? " scaled" : "",
           c->freeze_one ? " one frozen" : "", c->train_x ? "x" : "", c->train_w1 ? " w1" : "",
           c->train_w2 ? " w2" : "", c->microbatches, c->high ? ", high backward" : "",
           c->recompute == RFR_RECOMPUTE_ALL ? ", recompute" : "");
  return text;
}

/* Counts live results row and col of the quantize ops. */
static int copies_in(const rfr_trace *t, rfr_phase phase) {
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    const bool quantizes = op->def->code == RFI_OP_quantize || op->def->code == RFI_OP_grouped_quantize;
    if (quantizes && (phase == RFR_PHASE_OPTIM || op->phase == phase)) n += (op->out[0] >= 0) + (op->out[1] >= 0);
  }
  return n;
}

static void check_copies(const cell *c, const rfr_programs *p) {
  const rfr_trace *t = rfr_program_trace(p, 0, "prune");
  const bool back = !c->high;
  const int dx = back && c->train_x, dw1 = back && c->train_w1, dw2 = back && c->train_w2;
  const int dh = back && (c->train_x || c->train_w1 || c->bias); /* the first linear computes a gradient */
  const int tensors = c->separate ? GROUPS : 1;
  const int weights = (2 + dh + dx) * tensors, rest = 2 + dh + dx + 2 * dw1 + 2 * dw2;
  const int all = copies_in(t, RFR_PHASE_OPTIM);
  if (all != weights + rest * c->microbatches)
    fail_msg("%s: %d copies, not %d + %d x %d", text_of(c), all, weights, rest, c->microbatches);
  const int frozen_w1 = c->train_w1 ? c->freeze_one : tensors, frozen_w2 = c->train_w2 ? c->freeze_one : tensors;
  const int frozen = frozen_w1 * (1 + dx) + frozen_w2 * (1 + dh);
  if (c->recipe != RFR_RECIPE_FP8_DELAYED) { /* its scales are not constant */
    if (copies_in(t, RFR_PHASE_LOAD) != frozen)
      fail_msg("%s: %d copies in load, not %d", text_of(c), copies_in(t, RFR_PHASE_LOAD), frozen);
  }
  const int hoisted = c->recipe == RFR_RECIPE_FP8_DELAYED ? 0 : frozen;
  const int setup = c->microbatches > 1 ? weights - hoisted : 0;
  if (copies_in(t, RFR_PHASE_SETUP) != setup)
    fail_msg("%s: %d copies in setup, not %d", text_of(c), copies_in(t, RFR_PHASE_SETUP), setup);
}

/* The relative difference of two outputs in the Frobenius norm. */
static double difference(const rfr_programs *a, const rfr_programs *b, const char *name) {
  rfr_tensor x, y;
  double error = 0, norm = 0;
  OK(rfr_program_output(a, 0, name, &x));
  OK(rfr_program_output(b, 0, name, &y));
  assert_int_equal(x.bytes, y.bytes);
  for (int64_t i = 0; i < rfi_count(&x.type); i++) {
    const double d = ((float *)x.data)[i] - ((float *)y.data)[i];
    error += d * d, norm += (double)((float *)y.data)[i] * (double)((float *)y.data)[i];
  }
  return norm > 0 ? sqrt(error / norm) : error;
}

static void check_bits(const cell *c, rfr_programs *p) {
  rfr_programs *q = compile(c);
  const rfr_trace *t = rfr_program_trace(p, 0, "lower");
  OK(rfr_program_capture(q, 0));
  for (int round = 0; round < 2; round++) { /* in the second step fp8_delayed has other scales */
    OK(rfr_program_run(p, 0));
    OK(rfr_program_replay(q, 0, NULL, 0));
    for (int i = 0; i < t->n_outputs; i++) {
      rfr_tensor x, y;
      OK(rfr_program_output(p, 0, t->outputs[i].name, &x));
      OK(rfr_program_output(q, 0, t->outputs[i].name, &y));
      if (memcmp(x.data, y.data, (size_t)x.bytes) != 0) fail_msg("%s: %s differs", text_of(c), t->outputs[i].name);
    }
  }
  rfr_programs_destroy(q);
}

static void check(const cell *c) {
  static const double bound[] = {[RFR_RECIPE_FP8_DELAYED] = 0.12,
                                 [RFR_RECIPE_FP8_CURRENT] = 0.12,
                                 [RFR_RECIPE_FP8_BLOCK] = 0.08,
                                 [RFR_RECIPE_MXFP8] = 0.08,
                                 [RFR_RECIPE_NVFP4] = 0.45};
  cell plain = *c;
  plain.recipe = RFR_RECIPE_NONE, plain.high = false, plain.recompute = RFR_RECOMPUTE_KEEP;
  rfr_programs *p = compile(c), *f32 = compile(&plain);
  if (c->recompute == RFR_RECOMPUTE_KEEP) check_copies(c, p);
  check_bits(c, p);
  OK(rfr_program_run(f32, 0));
  const rfr_trace *t = rfr_program_trace(f32, 0, "lower");
  for (int i = 1; i < t->n_outputs; i++) { /* the loss is a sum with cancellation */
    const double d = difference(p, f32, t->outputs[i].name);
    if (!(d <= bound[c->recipe])) fail_msg("%s: %s differs by %g", text_of(c), t->outputs[i].name, d);
    const bool empty = strstr(t->outputs[i].name, ".1"); /* the weight of the empty group */
    if (d == 0 && !c->high && !empty && strncmp(t->outputs[i].name, "d_b", 3) != 0)
      fail_msg("%s: %s is not quantized", text_of(c), t->outputs[i].name);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(f32);
}

static void cells(void **state) {
  (void)state;
  for (int recipe = RFR_RECIPE_FP8_DELAYED; recipe <= RFR_RECIPE_NVFP4; recipe++)
    for (int grouped = 0; grouped < 2; grouped++)
      for (int train = 1; train < 8; train++)
        for (int k = 0; k < 4; k++)
          check(&(cell){.recipe = (rfr_recipe_kind)recipe,
                        .grouped = grouped,
                        .bias = k % 2,
                        .scaled = grouped && k % 2,
                        .train_x = train & 1,
                        .train_w1 = train >> 1 & 1,
                        .train_w2 = train >> 2,
                        .microbatches = 1 + k / 2});
}

static void assert_part(const rfr_programs *p, const rfr_programs *q, const cell *c, const char *name, int group) {
  char own[16];
  rfr_tensor x, y;
  snprintf(own, sizeof own, "%s.%d", name, group);
  OK(rfr_program_output(p, 0, own, &x));
  OK(rfr_program_output(q, 0, name, &y));
  if (memcmp(x.data, (const char *)y.data + group * x.bytes, (size_t)x.bytes) != 0)
    fail_msg("%s: %s differs from the packed weight", text_of(c), own);
}

/* The packed program is bitwise equal; if one separate weight is frozen, the others still are. */
static void check_packed(const cell *c) {
  cell packed = *c;
  packed.separate = packed.freeze_one = false;
  rfr_programs *p = compile(c), *q = compile(&packed);
  for (int round = 0; round < 2; round++) {
    OK(rfr_program_run(p, 0));
    OK(rfr_program_run(q, 0));
    for (int e = c->freeze_one; e < GROUPS; e++) {
      if (c->train_w1) assert_part(p, q, c, "d_w1", e);
      if (c->train_w2) assert_part(p, q, c, "d_w2", e);
    }
    if (c->train_x && difference(p, q, "d_x0") != 0)
      fail_msg("%s: round %d, d_x0 differs by %g from packed", text_of(c), round, difference(p, q, "d_x0"));
    assert_true(difference(p, q, "d_scale") == 0);
    assert_true(difference(p, q, "loss") == 0);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
}

static void separate(void **state) {
  (void)state;
  for (int recipe = RFR_RECIPE_FP8_DELAYED; recipe <= RFR_RECIPE_NVFP4; recipe++)
    for (int train = 1; train < 8; train++)
      for (int k = 0; k < 2; k++) {
        const cell c = {.recipe = (rfr_recipe_kind)recipe,
                        .grouped = true,
                        .separate = true,
                        .bias = true,
                        .scaled = true,
                        .freeze_one = k,
                        .train_x = train & 1,
                        .train_w1 = train >> 1 & 1,
                        .train_w2 = train >> 2,
                        .microbatches = 1 + k};
        check(&c);
        check_packed(&c);
      }
}

static void recomputed_and_high(void **state) {
  (void)state;
  for (int recipe = RFR_RECIPE_FP8_DELAYED; recipe <= RFR_RECIPE_NVFP4; recipe++)
    for (int k = 0; k < 6; k++)
      check(&(cell){.recipe = (rfr_recipe_kind)recipe,
                    .grouped = k % 3 > 0,
                    .separate = k % 3 == 2,
                    .bias = k % 3 > 0,
                    .scaled = k % 3 > 0,
                    .train_x = true,
                    .train_w1 = true,
                    .train_w2 = true,
                    .microbatches = 2,
                    .high = k / 3,
                    .recompute = k / 3 ? RFR_RECOMPUTE_KEEP : RFR_RECOMPUTE_ALL});
}

/* An amax counts once per tensor and microbatch, even if its op is recomputed. */
static void amaxes(void **state) {
  (void)state;
  for (int recompute = 0; recompute < 2; recompute++) {
    const cell c = {.recipe = RFR_RECIPE_FP8_DELAYED,
                    .train_x = true,
                    .train_w1 = true,
                    .train_w2 = true,
                    .microbatches = 2,
                    .recompute = recompute ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP};
    rfr_programs *p = compile(&c);
    const rfr_trace *t = rfr_program_trace(p, 0, "lower");
    int counted = 0, made = 0;
    for (int i = 0; i < t->n_ops; i++) {
      const rfi_opr *op = &t->ops[i];
      if (op->def->code == RFI_OP_collect_amax) counted += op->n_in - 1;
      if (op->def->code == RFI_OP_quantize) made += op->out[6] >= 0;
    }
    assert_int_equal(counted, 4 * 2 + 2); /* x and dy of two linears, and their weights */
    assert_int_equal(made, 4 * 2 + 2);
    rfr_programs_destroy(p);
  }
}

/* A slot has more amaxes than one op takes: the largest one, of the last microbatch, must be in the history. */
static void many_amaxes(void **state) {
  (void)state;
  enum { MANY = RFR_MAX_LIST + 9, SIDE = 16 };
  rfr_trace *t;
  rfr_tensor x;
  const rfr_recipe recipe = rfr_recipe_default(RFR_RECIPE_FP8_DELAYED);
  OK(rfr_trace_create(ctx, &t));
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){SIDE, SIDE}));
  rfr_value loss = RFR_NONE;
  rfr_recipe_begin(t, &recipe);
  for (int m = 0; m < MANY; m++) {
    char name[16];
    snprintf(name, sizeof name, "x%d", m);
    rfr_microbatch(t, m);
    const rfr_value in = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){SIDE, SIDE}));
    const rfr_value one = rfr_sum(t, rfr_linear(t, in, w, RFR_NONE), -1);
    rfr_microbatch(t, -1);
    loss = m ? rfr_add(t, loss, one) : one;
  }
  rfr_recipe_end(t);
  rfr_output(t, "d_w", rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    const bool history = strcmp(x.name, RFR_RECIPE_HISTORY) == 0;
    for (int64_t k = 0; k < rfi_count(&x.type); k++)
      ((float *)x.data)[k] = history ? 0.0f : x.name[0] == 'x' ? (float)(1 + atoi(x.name + 1)) : 1.0f;
  }
  OK(rfr_program_run(p, 0));
  OK(rfr_programs_tensor(p, RFR_RECIPE_HISTORY, &x));
  assert_true(((const float *)x.data)[0] == (float)MANY);
  assert_true(((const float *)x.data)[1] == 1.0f);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* The reported reasons why a GEMM is not quantized. */
static void reasons(void **state) {
  (void)state;
  static const struct {
    int64_t m, k, n;
    rfr_recipe_kind recipe;
    const char *keep, *says;
  } rows[] = {{8, 32, 32, RFR_RECIPE_FP8_CURRENT, NULL, "8 x 32 x 32 are not multiples of 16"},
              {16, 24, 32, RFR_RECIPE_FP8_CURRENT, NULL, "16 x 32 x 24 are not multiples of 16"},
              {16, 32, 40, RFR_RECIPE_FP8_BLOCK, NULL, "16 x 40 x 32 are not multiples of 16"},
              {16, 32, 32, RFR_RECIPE_MXFP8, NULL, "16 x 32 x 32 are not multiples of 32"},
              {16, 32, 32, RFR_RECIPE_FP8_CURRENT, "w*", "weight is kept by name"},
              {16, 32, 48, RFR_RECIPE_FP8_CURRENT, NULL, "quantized: 1 of 1 GEMMs; 2 tensors of 8192 bytes"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_trace *t;
    rfr_recipe r = rfr_recipe_default(rows[i].recipe);
    r.keep = &rows[i].keep, r.n_keep = rows[i].keep != NULL;
    OK(rfr_trace_create(ctx, &t));
    const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){rows[i].m, rows[i].k}));
    const rfr_value w = rfr_input(t, "weight", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){rows[i].n, rows[i].k}));
    rfr_recipe_begin(t, &r);
    rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
    rfr_recipe_end(t);
    rfr_programs *p = rft_compile(t, NULL);
    const char *report = rfr_program_report(p, 0, "quantize");
    if (!strstr(report, rows[i].says)) fail_msg("\"%s\" is not in\n%s", rows[i].says, report);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
}

static void refused(void **state) {
  (void)state;
  rfr_trace *t;
  rfr_programs *p;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){16, 16}));
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){16, 16}));
  for (int i = 0; i < 2; i++) {
    rfr_recipe r = rfr_recipe_default(RFR_RECIPE_FP8_DELAYED);
    r.margin = i;
    rfr_recipe_begin(t, &r);
    x = rfr_linear(t, x, w, RFR_NONE);
    rfr_recipe_end(t);
  }
  rfr_output(t, "y", x);
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, NULL, &p), RFR_UNSUPPORTED);
  assert_string_equal(rfr_last_error()->slug, "recipe.unsupported");
  rfr_trace_destroy(t);
  /* stochastic rounding without a step block */
  OK(rfr_trace_create(ctx, &t));
  const rfr_recipe nv = rfr_recipe_default(RFR_RECIPE_NVFP4);
  x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){16, 16}));
  const rfr_value v = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){16, 16}));
  rfr_recipe_begin(t, &nv);
  const rfr_value y = rfr_linear(t, x, v, RFR_NONE);
  rfr_recipe_end(t);
  rfr_output(t, "d", rfr_gradient(t, rfr_sum(t, y, -1), v, RFR_F32));
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, NULL, &p), RFR_UNSUPPORTED);
  assert_non_null(strstr(rfr_last_error()->message, "step block"));
  rfr_trace_destroy(t);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      rft_context_test(cells),  rft_context_test(separate),    rft_context_test(recomputed_and_high),
      rft_context_test(amaxes), rft_context_test(many_amaxes), rft_context_test(reasons),
      rft_context_test(refused)};
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests_name("recipe_programs", tests, NULL, NULL);
}
