/* SPDX-License-Identifier: Apache-2.0
 *
 * Recipes in graphed callables: two layers, one callable each, compared with one program of the same step and the same
 * number of microbatches. Gradients and the states of delayed scaling must be bitwise equal in each step: with B, or
 * with W later and in another order, captured or eager, with recompute, and with one microbatch on each of two ranks.
 * Evaluation, warm-up and an aborted step must not change the states.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "refrain/graphs.h"
#include "refrain/ops.h"
#include "refrain/recipe.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/thin.h"
#include "trace/trace.h"

enum { ROWS = 64, K = 32, H = 96, N = 64, MICROBATCHES = 2, STEPS = 3, HISTORY = 4, SLOTS = 6 };
enum { GRADIENTS = H * K + N * H + H };

/* The results of a step that are compared. */
typedef struct result {
  float gradient[GRADIENTS];
  float history[HISTORY * SLOTS], scale[SLOTS];
} result;

typedef struct set {
  rfr_recipe recipe;
  const char *schedule; /* NULL: none */
  bool eager;
  rfr_recompute recompute;
  int warmups;
  rfr_comm *comm;
  int64_t first_linear; /* rfr_callable.first_linear of the first callable; 0: not given */
  const rfr_binding *tensors;
  int n_tensors;
} set;

static const struct parameter {
  const char *name;
  rfr_type type;
} parameters[] = {{"w1", {.dtype = RFR_F32, .rank = 2, .shape = {H, K}}},
                  {"w2", {.dtype = RFR_F32, .rank = 2, .shape = {N, H}}},
                  {"b1", {.dtype = RFR_F32, .rank = 1, .shape = {H}}}};
enum { PARAMETERS = sizeof parameters / sizeof *parameters };

static rfr_recipe recipe_of(rfr_recipe_kind kind) {
  rfr_recipe r = rfr_recipe_default(kind);
  if (kind == RFR_RECIPE_FP8_DELAYED) r.history = HISTORY;
  return r;
}

static rfr_value declare(rfr_trace *t, int i) {
  const rfr_type *type = &parameters[i].type;
  return rfr_input(t, parameters[i].name, RFR_ROLE_TRAINABLE, type->dtype, type->rank, type->shape);
}

static rfr_value first_layer(rfr_trace *t, rfr_value x, rfr_value w, rfr_value b) {
  return rfr_gelu(t, rfr_linear(t, x, w, b), 1);
}

static rfr_value second_layer(rfr_trace *t, rfr_value h, rfr_value w, rfr_value r) {
  return rfr_sum(t, rfr_mul(t, rfr_linear(t, h, w, RFR_NONE), r), -1);
}

static rfr_value input(rfr_trace *t, const char *name, int m, rfr_role role, int64_t columns) {
  char text[16];
  snprintf(text, sizeof text, m < 0 ? "%s" : "%s%d", name, m);
  return rfr_input(t, text, role, RFR_F32, 2, ((int64_t[]){ROWS, columns}));
}

/* ---- one program ---- */

static rfr_trace *record_step(rfr_ctx *own, const rfr_recipe *recipe) {
  rfr_trace *t;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  const rfr_value step = rfr_step_block(t), w1 = declare(t, 0), w2 = declare(t, 1), b1 = declare(t, 2);
  rfr_value loss = RFR_NONE;
  rfr_recipe_begin(t, recipe);
  for (int m = 0; m < MICROBATCHES; m++) {
    rfr_microbatch(t, m);
    const rfr_value h = first_layer(t, input(t, "x", m, RFR_ROLE_INPUT, K), w1, b1);
    const rfr_value y = second_layer(t, h, w2, input(t, "r", m, RFR_ROLE_INPUT, N));
    rfr_microbatch(t, -1);
    loss = m ? rfr_add(t, loss, y) : y;
  }
  rfr_recipe_end(t);
  const rfr_value w[] = {w1, w2, b1};
  for (int i = 0; i < PARAMETERS; i++) rfr_output(t, parameters[i].name, rfr_gradient(t, loss, w[i], RFR_F32));
  rfr_step_end(t, step, rfr_fill(t, 0, RFR_I32, 1, ((int64_t[]){1})));
  return rfr_trace_finish(t) == RFR_OK ? t : NULL;
}

/* The first element of a state or parameter. */
static void fill_start(const rfr_tensor *x) {
  float *data = x->data;
  for (int i = 0; i < PARAMETERS; i++)
    if (strcmp(x->name, parameters[i].name) == 0) rft_fill(x, 10 + (uint64_t)i);
  if (strcmp(x->name, RFR_RECIPE_HISTORY) == 0) memset(data, 0, (size_t)x->bytes);
  for (int64_t k = 0; strcmp(x->name, RFR_RECIPE_SCALE) == 0 && k < rfi_count(&x->type); k++) data[k] = 1;
}

/* Values of microbatch m of a step; their magnitude changes from step to step. */
static void fill_batch(const rfr_tensor *x, char name, int step, int m) {
  rft_fill(x, (uint64_t)name * 64 + (uint64_t)(step * MICROBATCHES + m));
  for (int64_t i = 0; i < rfi_count(&x->type); i++) ((float *)x->data)[i] *= 1.0f + (float)((step + 2 * m) % 3);
}

static void take(const char *name, const void *data, size_t bytes, result *to) {
  float *at = to->gradient;
  for (int i = 0; i < PARAMETERS; at += rfi_count(&parameters[i].type), i++)
    if (strcmp(name, parameters[i].name) == 0) memcpy(at, data, bytes);
}

static void run_program(const rfr_recipe *recipe, result *out) {
  rfr_trace *t = record_step(ctx, recipe);
  rfr_tensor x;
  assert_non_null(t);
  rfr_programs *p = rft_compile(t, NULL);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) fill_start(&x);
  OK(rfr_programs_load(p));
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
      if (x.role == RFR_ROLE_INPUT) fill_batch(&x, x.name[0], step, x.name[1] - '0');
    OK(rfr_program_run(p, 0));
    out[step] = (result){0};
    for (int i = 0; i < PARAMETERS; i++) {
      OK(rfr_program_output(p, 0, parameters[i].name, &x));
      take(parameters[i].name, x.data, (size_t)x.bytes, &out[step]);
    }
    if (rfr_programs_tensor(p, RFR_RECIPE_HISTORY, &x) != RFR_OK) continue;
    memcpy(out[step].history, x.data, (size_t)x.bytes);
    OK(rfr_programs_tensor(p, RFR_RECIPE_SCALE, &x));
    memcpy(out[step].scale, x.data, (size_t)x.bytes);
  }
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* ---- callables ---- */

static rfr_trace *record_layer(rfr_ctx *own, int layer, const rfr_recipe *recipe) {
  rfr_trace *t;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  rfr_recipe_begin(t, recipe);
  rfr_step_block(t);
  if (layer == 0) {
    const rfr_value w = declare(t, 0), b = declare(t, 2);
    rfr_output(t, "h", first_layer(t, input(t, "x", -1, RFR_ROLE_INPUT, K), w, b));
  } else {
    const rfr_value w = declare(t, 1), h = input(t, "h", -1, RFR_ROLE_INPUT_GRAD, H);
    rfr_output(t, "y", second_layer(t, h, w, input(t, "r", -1, RFR_ROLE_INPUT, N)));
  }
  rfr_recipe_end(t);
  return rfr_trace_finish(t) == RFR_OK ? t : NULL;
}

static rfr_status create(rfr_ctx *own, const set *s, const rfr_recipe *second, rfr_graphs **g) {
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  const rfr_callable_link link = {.input = "h", .callable = 0, .output = "h"};
  rfr_schedule *schedule = NULL;
  rfr_trace *t[2] = {record_layer(own, 0, &s->recipe), record_layer(own, 1, second)};
  if (!t[0] || !t[1]) return RFR_INTERNAL;
  for (int i = 0; i < 2; i++) c[i].trace = t[i];
  c[1].links = &link, c[1].n_links = 1;
  if (s->first_linear > 0) c[0].first_linear = s->first_linear;
  o.tensors = s->tensors, o.n_tensors = s->n_tensors;
  if (s->schedule) {
    RFI_TRY(rfr_schedule_parse(own, "test", s->schedule, strlen(s->schedule), &schedule));
    RFI_TRY(rfr_schedule_set_layers(schedule, (int[]){2}, 1));
  }
  o.schedule = schedule;
  o.eager = s->eager, o.recompute = s->recompute, o.warmup_iterations = s->warmups, o.comm = s->comm;
  const rfr_status status = rfr_graphs_create(own, c, 2, &o, g);
  rfr_schedule_destroy(schedule);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  return status;
}

static rfr_status start(rfr_graphs *g) {
  static const char *const states[] = {RFR_RECIPE_HISTORY, RFR_RECIPE_SCALE};
  for (int i = 0; i < PARAMETERS + 2; i++) {
    rfr_tensor x;
    float data[N * H];
    if (rfr_graphs_tensor(g, i < PARAMETERS ? parameters[i].name : states[i - PARAMETERS], &x) != RFR_OK) continue;
    const rfr_tensor host = {.name = x.name, .type = x.type, .bytes = x.bytes, .data = data};
    fill_start(&host);
    RFI_TRY(rfr_graphs_write(g, &x, data));
  }
  return RFR_OK;
}

/* Makes the calls of a step up to its end, or up to call `until`. Microbatch m has the values of batch `batch` + m. */
static rfr_status run_calls(rfr_graphs *g, int step, int batch, int microbatches, int until) {
  static const rfr_type x = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, K}},
                        r = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, N}},
                        one = {.dtype = RFR_F32, .rank = 1, .shape = {1}};
  float data[ROWS * N];
  rfr_tensor out[2];
  rfr_action a;
  int callable;
  for (int i = 0; i < until; i++) {
    RFI_TRY(rfr_graphs_expected(g, &a, &callable));
    if (callable < 0 || (callable == 0 && a.op == RFR_ACTION_F && a.microbatch == microbatches)) return RFR_OK;
    const rfr_binding in = {callable ? "r" : "x", callable ? r : x, data}, grad = {"y", one, (float[]){1}};
    const rfr_tensor host = {.type = in.type, .bytes = rfi_count(&in.type) * 4, .data = data};
    fill_batch(&host, in.name[0], step, batch + a.microbatch);
    if (a.op == RFR_ACTION_F) RFI_TRY(rfr_graphs_forward(g, callable, a.microbatch, &in, 1, out, 1));
    else if (a.op == RFR_ACTION_W) RFI_TRY(rfr_graphs_wgrad(g, callable, a.microbatch));
    else RFI_TRY(rfr_graphs_backward(g, callable, a.microbatch, &grad, callable, out, 1));
  }
  return RFR_OK;
}

static rfr_status read_states(rfr_graphs *g, result *out) {
  rfr_tensor x;
  if (rfr_graphs_tensor(g, RFR_RECIPE_HISTORY, &x) != RFR_OK) return RFR_OK;
  RFI_TRY(rfr_graphs_read(g, &x, out->history));
  RFI_TRY(rfr_graphs_tensor(g, RFR_RECIPE_SCALE, &x));
  return rfr_graphs_read(g, &x, out->scale);
}

static rfr_status train_step(rfr_graphs *g, int step, int batch, int microbatches, result *out) {
  float data[N * H];
  rfr_tensor x;
  *out = (result){0};
  RFI_TRY(rfr_graphs_begin_step(g, NULL, 0));
  RFI_TRY(run_calls(g, step, batch, microbatches, 1000));
  RFI_TRY(rfr_graphs_end_step(g));
  for (int i = 0; i < PARAMETERS; i++) {
    RFI_TRY(rfr_graphs_gradient(g, parameters[i].name, &x));
    RFI_TRY(rfr_graphs_read(g, &x, data));
    take(parameters[i].name, data, (size_t)x.bytes, out);
  }
  return read_states(g, out);
}

static void compare(const result *a, const result *b, const char *what, int step) {
  if (memcmp(a->history, b->history, sizeof a->history) != 0) fail_msg("%s, step %d: the histories differ", what, step);
  if (memcmp(a->scale, b->scale, sizeof a->scale) != 0) fail_msg("%s, step %d: the scales differ", what, step);
  for (int i = 0; i < GRADIENTS; i++)
    if (memcmp(&a->gradient[i], &b->gradient[i], sizeof(float)) != 0)
      fail_msg("%s, step %d: gradient element %d is %.9g for %.9g", what, step, i, (double)a->gradient[i],
               (double)b->gradient[i]);
}

/* ---- tests ---- */

static void like_one_program(void **state) {
  static const char *const schedules[] = {NULL, "0F0 0F1 0I1 0W1 0I0 0W0", "0F0 0F1 0I0 0I1 0W0 0W1"};
  (void)state;
  for (int kind = RFR_RECIPE_FP8_DELAYED; kind <= RFR_RECIPE_NVFP4; kind++) {
    result want[STEPS], got;
    const rfr_recipe recipe = recipe_of((rfr_recipe_kind)kind);
    run_program(&recipe, want);
    for (int way = 0; way < 12; way++) {
      if (RFT_LEFT_OUT(way + kind, 5)) continue;
      const set s = {.recipe = recipe,
                     .schedule = schedules[way % 3],
                     .eager = way / 3 % 2,
                     .recompute = way / 6 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP,
                     .warmups = way % 2};
      rfr_graphs *g;
      char what[64];
      snprintf(what, sizeof what, "%s, way %d", rfr_recipe_name(recipe.kind), way);
      OK(create(ctx, &s, &s.recipe, &g));
      OK(start(g));
      for (int step = 0; step < STEPS; step++) {
        OK(train_step(g, step, 0, MICROBATCHES, &got));
        compare(&got, &want[step], what, step);
      }
      rfr_graphs_destroy(g);
    }
  }
}

/* Evaluation and an aborted step change neither history nor scales, nor later steps. */
static void only_steps_count(void **state) {
  const set s = {.recipe = recipe_of(RFR_RECIPE_FP8_DELAYED), .warmups = 2};
  result want[STEPS], before, after, got;
  rfr_graphs *g;
  (void)state;
  run_program(&s.recipe, want);
  OK(create(ctx, &s, &s.recipe, &g));
  OK(start(g));
  OK(train_step(g, 0, 0, MICROBATCHES, &before));
  OK(rfr_graphs_begin_evaluation(g, NULL, 0));
  OK(run_calls(g, 2, 1, 1, 2));
  OK(rfr_graphs_end_step(g));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(run_calls(g, 2, 1, 1, 3));
  OK(rfr_graphs_abort_step(g));
  after = before;
  OK(read_states(g, &after));
  compare(&after, &before, "evaluation and abort", 0);
  for (int step = 1; step < STEPS; step++) {
    OK(train_step(g, step, 0, MICROBATCHES, &got));
    compare(&got, &want[step], "after an abort", step);
  }
  rfr_graphs_destroy(g);
}

/* Slots are numbered after those of earlier linears, up to the number of the caller's scales. If the amaxes are in the
 * caller's memory, the caller updates history and scales; the graphs do not change them. */
static void callers_states(void **state) {
  enum { BEFORE = 3, MINE = 3 * BEFORE, ALL = MINE + SLOTS + 3 };
  _Alignas(64) static float history[HISTORY * ALL], scale[ALL], amax[2 * ALL];
  const rfr_binding tensors[] = {{RFR_RECIPE_HISTORY, {.dtype = RFR_F32, .rank = 2, .shape = {HISTORY, ALL}}, history},
                                 {RFR_RECIPE_SCALE, {.dtype = RFR_F32, .rank = 1, .shape = {ALL}}, scale},
                                 {RFR_RECIPE_AMAX, {.dtype = RFR_F32, .rank = 2, .shape = {2, ALL}}, amax}};
  set s = {.recipe = recipe_of(RFR_RECIPE_FP8_DELAYED), .first_linear = BEFORE};
  rfr_graphs *g;
  rfr_tensor x;
  result want[STEPS];
  (void)state;
  run_program(&s.recipe, want);
  OK(create(ctx, &s, &s.recipe, &g));
  OK(rfr_graphs_tensor(g, RFR_RECIPE_SCALE, &x));
  assert_int_equal(x.type.shape[0], MINE + SLOTS);
  rfr_graphs_destroy(g);
  for (int i = 0; i < ALL; i++) scale[i] = 1;
  s.tensors = tensors, s.n_tensors = 3;
  OK(create(ctx, &s, &s.recipe, &g));
  OK(start(g));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(run_calls(g, 0, 0, MICROBATCHES, 1000));
  OK(rfr_graphs_end_step(g));
  for (int i = 0; i < ALL; i++) {
    const float most = amax[i] > amax[ALL + i] ? amax[i] : amax[ALL + i];
    const bool mine = i >= MINE && i < MINE + SLOTS;
    assert_true(most == (mine ? want[0].history[i - MINE] : 0)); /* the newest row */
    assert_true(scale[i] == 1 && history[i] == 0);
  }
  rfr_graphs_destroy(g);
  s.first_linear = INT64_MAX;
  assert_int_equal(create(ctx, &s, &s.recipe, &g), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "first_linear is 9223372036854775807"));
}

typedef struct rank_job {
  set s;
  result got[STEPS];
} rank_job;

static rfr_status train_rank(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  rank_job *j = rank;
  rfr_graphs *g;
  j->s.comm = comm;
  RFI_TRY(create(own, &j->s, &j->s.recipe, &g));
  rfr_status s = start(g);
  for (int step = 0; step < STEPS && s == RFR_OK; step++) s = train_step(g, step, number, 1, &j->got[step]);
  rfr_graphs_destroy(g);
  return s;
}

/* The states equal those of one rank with all microbatches; the caller reduces gradients. */
static void over_ranks(void **state) {
  static rank_job job[MICROBATCHES];
  result want[STEPS];
  const set s = {.recipe = recipe_of(RFR_RECIPE_FP8_DELAYED)};
  (void)state;
  run_program(&s.recipe, want);
  for (int r = 0; r < MICROBATCHES; r++) job[r] = (rank_job){.s = s};
  rft_run_ranks(MICROBATCHES, job, sizeof *job, train_rank);
  for (int r = 0; r < MICROBATCHES; r++)
    for (int step = 0; step < STEPS; step++) {
      memcpy(job[r].got[step].gradient, want[step].gradient, sizeof want[step].gradient);
      compare(&job[r].got[step], &want[step], r ? "rank 1" : "rank 0", step);
    }
}

static void refused(void **state) {
  set s = {.recipe = recipe_of(RFR_RECIPE_FP8_DELAYED)};
  rfr_recipe other = s.recipe;
  rfr_graphs *g;
  (void)state;
  other.margin = 1;
  assert_int_equal(create(ctx, &s, &other, &g), RFR_UNSUPPORTED);
  assert_non_null(strstr(rfr_last_error()->message, "different history, margin or rule"));
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(like_one_program), rft_context_test(only_steps_count),
                                     rft_context_test(callers_states), rft_context_test(over_ranks),
                                     rft_context_test(refused)};
  return cmocka_run_group_tests_name("recipe_graphs", tests, NULL, NULL);
}
