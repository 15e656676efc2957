/* SPDX-License-Identifier: Apache-2.0
 *
 * Sharded parameters: each rank has a shard of every weight and main gradient, and gathers parameters only while a
 * layer runs. Parameters are gathered by hooks and the loop, by each call, or by schedule actions. In each case,
 * weights after ten steps, outputs and input gradients are bitwise equal to those of one rank that has all weights and
 * accumulates the microbatches of all ranks in rank order.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/graphs.h"
#include "refrain/ops.h"
#include "support/context.h"
#include "support/graphs_scene.h"
#include "trace/trace.h"

enum { T = 7, C = 10, HIDDEN = 19, LAYERS = 3, PARAMETERS = 3, STEPS = 10, MOST_RANKS = 3, ROOM = 256 };

/* ---- the model ---- */

static const int64_t sizes[PARAMETERS] = {C, HIDDEN *C, C *HIDDEN};
static const char *const kinds[PARAMETERS] = {"norm", "up", "down"};

static const char *name_of(int layer, int k, char name[16]) {
  snprintf(name, 16, "%s%d", kinds[k], layer);
  return name;
}

static rfr_type type_of(int k) {
  return k == 0   ? (rfr_type){RFR_F32, 1, {C}}
         : k == 1 ? (rfr_type){RFR_F32, 2, {HIDDEN, C}}
                  : (rfr_type){RFR_F32, 2, {C, HIDDEN}};
}
static const rfr_type activation = {RFR_F32, 2, {T, C}};

static rfr_trace *frozen_trace(rfr_ctx *own, int layer, unsigned frozen) {
  rfr_trace *t;
  rfr_value w[PARAMETERS];
  char name[16];
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, activation.shape);
  for (int k = 0; k < PARAMETERS; k++) {
    const rfr_type type = type_of(k);
    w[k] = rfr_input(t, name_of(layer, k, name), frozen >> k & 1 ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32,
                     type.rank, type.shape);
  }
  rfr_value h = rfr_gelu(t, rfr_linear(t, rfr_rmsnorm(t, x, w[0], 1e-5), w[1], RFR_NONE), 1);
  rfr_output(t, "y", rfr_add(t, x, rfr_linear(t, h, w[2], RFR_NONE)));
  rfr_trace_finish(t);
  return t;
}

static rfr_trace *layer_trace(rfr_ctx *own, int layer) { return frozen_trace(own, layer, 0); }

static float noise(int64_t seed, int64_t i) {
  const uint32_t z = (uint32_t)(seed * 2654435761u + i * 40503u + 12345u);
  return (float)((z ^ z >> 13) * 2246822519u >> 8) / 8388608.0f - 1.0f;
}

static float first_weight(int layer, int k, int64_t i) {
  return (k == 0 ? 1.0f : 0.0f) + 0.3f * noise(100 + layer * 10 + k, i);
}

/* Elementwise, so that a shard is updated like the full weight. */
static void update(float *w, float *momentum, const float *g, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    momentum[i] = 0.9f * momentum[i] + g[i];
    w[i] -= 0.05f * momentum[i];
  }
}

/* ---- one rank ---- */

typedef struct result { /* over all ranks, in rank order */
  float weights[LAYERS][PARAMETERS][ROOM];
  float y[MOST_RANKS][T * C], dx[MOST_RANKS][T * C]; /* of the last step */
  rfr_graphs_memory memory;
} result;

typedef struct side {
  rfr_ctx *ctx;
  rfr_comm *comm;
  rfr_graphs *g;
  int rank, ranks, fuse, schedule;
  unsigned frozen; /* a bit per parameter of a layer */
  rfr_recompute recompute;
  result *result;
  char error[256];
  /* the shards of this rank */
  float part[LAYERS][PARAMETERS][ROOM], momentum[LAYERS][PARAMETERS][ROOM], part_gradient[PARAMETERS][ROOM];
  /* the gathered parameters of the current layer; all layers share one buffer */
  _Alignas(64) float whole[PARAMETERS][ROOM], gradient[PARAMETERS][ROOM];
  float x[LAYERS + 1][T * C], dy[T * C];
} side;

#define TRY(call)                 \
  do {                            \
    const rfr_status s_ = (call); \
    if (s_ != RFR_OK) return s_;  \
  } while (0)

static int64_t part_size(const side *s, int k) { return (sizes[k] + s->ranks - 1) / s->ranks; }

static void input_of(float *x, int step, int microbatch) {
  for (int i = 0; i < T * C; i++) x[i] = noise(step * 16 + microbatch, i);
}

/* The loss: half of (y - target)^2, with one target per microbatch. */
static void gradient_of(float *dy, const float *y, int step, int microbatch) {
  for (int i = 0; i < T * C; i++) dy[i] = 0.02f * (y[i] - noise(step * 16 + microbatch + 7777, i));
}

static rfr_status forward(side *s, int layer, int microbatch) {
  const rfr_binding x = {NULL, activation, s->x[layer]};
  rfr_tensor y;
  TRY(rfr_graphs_forward(s->g, layer, microbatch, &x, 1, &y, 1));
  memcpy(s->x[layer + 1], y.data, sizeof s->x[0]);
  return RFR_OK;
}

static rfr_status backward(side *s, int layer, int microbatch) {
  const rfr_binding dy = {NULL, activation, s->dy};
  rfr_tensor dx;
  TRY(rfr_graphs_backward(s->g, layer, microbatch, &dy, 1, &dx, 1));
  memcpy(s->dy, dx.data, sizeof s->dy);
  return RFR_OK;
}

/* ---- the reference: one rank with all parameters ---- */

static rfr_status create(side *s, const rfr_graphs_options *o) {
  rfr_callable c[LAYERS];
  rfr_trace *t[LAYERS];
  for (int i = 0; i < LAYERS; i++) {
    t[i] = frozen_trace(s->ctx, i, s->frozen);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    c[i].sharded = o->comm != NULL;
  }
  rfr_status st = rfr_graphs_create(s->ctx, c, LAYERS, o, &s->g);
  s->result->memory.size = sizeof s->result->memory;
  if (st == RFR_OK) st = rfr_graphs_get_memory(s->g, &s->result->memory);
  for (int i = 0; i < LAYERS; i++) rfr_trace_destroy(t[i]);
  return st;
}

static rfr_status run_alone(side *s, int microbatches) {
  static float momentum[LAYERS][PARAMETERS][ROOM];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_tensor w, g;
  char name[16];
  o.fuse = s->fuse;
  TRY(create(s, &o));
  memset(momentum, 0, sizeof momentum);
  for (int l = 0; l < LAYERS; l++)
    for (int k = 0; k < PARAMETERS; k++) {
      TRY(rfr_graphs_tensor(s->g, name_of(l, k, name), &w));
      for (int64_t i = 0; i < sizes[k]; i++) ((float *)w.data)[i] = first_weight(l, k, i);
    }
  for (int step = 0; step < STEPS; step++) {
    TRY(rfr_graphs_begin_step(s->g, NULL, 0));
    for (int m = 0; m < microbatches; m++) {
      input_of(s->x[0], step, m);
      for (int l = 0; l < LAYERS; l++) TRY(forward(s, l, m));
      gradient_of(s->dy, s->x[LAYERS], step, m);
      memcpy(s->result->y[m], s->x[LAYERS], sizeof s->x[0]);
      for (int l = LAYERS - 1; l >= 0; l--) TRY(backward(s, l, m));
      memcpy(s->result->dx[m], s->dy, sizeof s->dy);
    }
    TRY(rfr_graphs_end_step(s->g));
    for (int l = 0; l < LAYERS; l++)
      for (int k = 0; k < PARAMETERS; k++) {
        TRY(rfr_graphs_tensor(s->g, name_of(l, k, name), &w));
        if (!(s->frozen >> k & 1)) {
          TRY(rfr_graphs_gradient(s->g, name_of(l, k, name), &g));
          update(w.data, momentum[l][k], g.data, sizes[k]);
        }
        memcpy(s->result->weights[l][k], w.data, sizeof(float) * (size_t)sizes[k]);
      }
  }
  return RFR_OK;
}

/* ---- gathering in hooks and in the loop ---- */

static rfr_status unshard(side *s, int layer) {
  for (int k = 0; k < PARAMETERS; k++)
    TRY(rfr_comm_all_gather(s->comm, s->part[layer][k], s->whole[k], part_size(s, k), RFR_F32));
  return RFR_OK;
}

/* Fills the gathered parameters with NaN, so that a late read changes the results. */
static void reshard(side *s) { memset(s->whole, 0xFF, sizeof s->whole); }

static rfr_status unshard_hook(const rfr_hook_event *e, void *user) { return unshard(user, e->callable); }
static rfr_status reshard_hook(const rfr_hook_event *e, void *user) {
  (void)e;
  reshard(user);
  return RFR_OK;
}

static rfr_status step_around(side *s, int step) {
  TRY(rfr_graphs_begin_step(s->g, NULL, 0));
  input_of(s->x[0], step, s->rank);
  for (int l = 0; l < LAYERS; l++) {
    TRY(unshard(s, l));
    TRY(forward(s, l, 0));
    reshard(s);
  }
  memcpy(s->result->y[s->rank], s->x[LAYERS], sizeof s->x[0]);
  gradient_of(s->dy, s->x[LAYERS], step, s->rank);
  for (int l = LAYERS - 1; l >= 0; l--) {
    TRY(unshard(s, l));
    memset(s->gradient, 0, sizeof s->gradient);
    TRY(backward(s, l, 0));
    reshard(s);
    for (int k = 0; k < PARAMETERS; k++) {
      const int64_t n = part_size(s, k);
      TRY(rfr_comm_reduce_scatter(s->comm, s->gradient[k], s->part_gradient[k], n, RFR_F32));
      update(s->part[l][k], s->momentum[l][k], s->part_gradient[k], n);
    }
  }
  memcpy(s->result->dx[s->rank], s->dy, sizeof s->dy);
  return rfr_graphs_end_step(s->g);
}

static rfr_status run_around(side *s) {
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_binding tensors[LAYERS * PARAMETERS];
  rfr_main_gradient gradients[LAYERS * PARAMETERS];
  char names[LAYERS * PARAMETERS][16];
  const rfr_hook gather = {unshard_hook, s}, drop = {reshard_hook, s};
  rfr_hooks hooks[LAYERS];
  for (int i = 0; i < LAYERS; i++) {
    hooks[i] = rfr_hooks_default();
    hooks[i].pre_forward = hooks[i].pre_backward = (rfr_hook_list){&gather, 1};
    hooks[i].post_forward = hooks[i].post_wgrad = (rfr_hook_list){&drop, 1};
    for (int k = 0; k < PARAMETERS; k++) {
      const char *name = name_of(i, k, names[i * PARAMETERS + k]);
      tensors[i * PARAMETERS + k] = (rfr_binding){name, type_of(k), s->whole[k]};
      gradients[i * PARAMETERS + k] = rft_main_gradient(name, type_of(k), s->gradient[k], 1);
    }
  }
  o.fuse = s->fuse;
  o.tensors = tensors, o.n_tensors = LAYERS * PARAMETERS;
  o.gradients = gradients, o.n_gradients = LAYERS * PARAMETERS;
  o.hooks = hooks, o.n_hooks = LAYERS;
  o.warmup_iterations = 1;
  TRY(create(s, &o));
  for (int step = 0; step < STEPS; step++) TRY(step_around(s, step));
  return RFR_OK;
}

/* ---- gathering in the library ---- */

/* Each layer is a stage. The last one is not resharded between its forward and its backward. */
static const char *const schedules[] = {
    "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 2RESHARD 2REDUCE 1UNSHARD 1B0 1REDUCE 1RESHARD "
    "0UNSHARD 0B0 0REDUCE 0RESHARD",
    /* the next layer is gathered before the last one is freed; weight gradients are separate actions */
    "0UNSHARD 0F0 1UNSHARD 0RESHARD 1F0 2UNSHARD 1RESHARD 2F0 2I0 1UNSHARD 1I0 0UNSHARD 0I0 2W0 2REDUCE 2RESHARD "
    "0RESHARD 1W0 0W0 0REDUCE 1REDUCE 1RESHARD",
    /* gathered in each call */
    "0F0 1F0 2F0 2I0 1I0 0I0 2W0 1W0 0W0",
    NULL,
};
enum { SCHEDULES = sizeof schedules / sizeof *schedules };

static bool has_word(const char *schedule, char stage) {
  const char word[] = {stage, 'W', '0', 0};
  return schedule && strstr(schedule, word);
}

static rfr_status step_inside(side *s, int step, const char *schedule) {
  char name[16];
  rfr_tensor w, g;
  TRY(rfr_graphs_begin_step(s->g, NULL, 0));
  input_of(s->x[0], step, s->rank);
  for (int l = 0; l < LAYERS; l++) TRY(forward(s, l, 0));
  memcpy(s->result->y[s->rank], s->x[LAYERS], sizeof s->x[0]);
  gradient_of(s->dy, s->x[LAYERS], step, s->rank);
  for (int l = LAYERS - 1; l >= 0; l--) TRY(backward(s, l, 0));
  memcpy(s->result->dx[s->rank], s->dy, sizeof s->dy);
  if (has_word(schedule, '2'))
    for (int i = 0; i < LAYERS; i++) TRY(rfr_graphs_wgrad(s->g, (int[]){2, 1, 0}[i], 0));
  TRY(rfr_graphs_end_step(s->g));
  for (int l = 0; l < LAYERS; l++)
    for (int k = 0; k < PARAMETERS; k++) {
      if (s->frozen >> k & 1) continue;
      TRY(rfr_graphs_tensor(s->g, name_of(l, k, name), &w));
      TRY(rfr_graphs_gradient(s->g, name, &g));
      update(w.data, s->momentum[l][k], g.data, part_size(s, k));
      memcpy(s->part[l][k], w.data, (size_t)w.bytes);
    }
  return RFR_OK;
}

static rfr_status run_inside(side *s) {
  const char *text = schedules[s->schedule];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule = NULL;
  rfr_tensor w;
  char name[16];
  if (text) TRY(rfr_schedule_parse(s->ctx, "test", text, strlen(text), &schedule));
  o.fuse = s->fuse;
  o.debug = s->fuse; /* freed memory is filled, so that a late read changes the results */
  o.comm = s->comm;
  o.schedule = schedule;
  o.warmup_iterations = s->schedule;
  o.recompute = s->recompute;
  rfr_status st = create(s, &o);
  for (int l = 0; l < LAYERS && st == RFR_OK; l++)
    for (int k = 0; k < PARAMETERS && st == RFR_OK; k++) {
      st = rfr_graphs_tensor(s->g, name_of(l, k, name), &w);
      if (st == RFR_OK) memcpy(w.data, s->part[l][k], (size_t)w.bytes);
    }
  for (int step = 0; step < STEPS && st == RFR_OK; step++) st = step_inside(s, step, text);
  rfr_schedule_destroy(schedule);
  return st;
}

/* ---- ranks as threads ---- */

typedef struct job {
  side *s;
  rfr_status (*run)(side *s);
} job;

static void *run_rank(void *arg) {
  const job *j = arg;
  side *s = j->s;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  o.use_onednn = 0; /* the context of the reference */
  for (int l = 0; l < LAYERS; l++)
    for (int k = 0; k < PARAMETERS; k++)
      for (int64_t i = 0; i < part_size(s, k); i++) {
        const int64_t at = s->rank * part_size(s, k) + i;
        s->part[l][k][i] = at < sizes[k] ? first_weight(l, k, at) : 0;
      }
  rfr_status st = rfr_ctx_create(&o, &s->ctx);
  if (st == RFR_OK) st = j->run(s);
  for (int l = 0; l < LAYERS && st == RFR_OK; l++)
    for (int k = 0; k < PARAMETERS && st == RFR_OK; k++)
      st = rfr_comm_all_gather(s->comm, s->part[l][k], s->whole[k], part_size(s, k), RFR_F32),
      memcpy(s->result->weights[l][k], s->whole[k], sizeof(float) * (size_t)sizes[k]);
  if (st != RFR_OK) {
    snprintf(s->error, sizeof s->error, "%s", rfr_last_error()->message);
    rfr_comm_abort(s->comm);
  }
  rfr_graphs_destroy(s->g);
  s->g = NULL;
  rfr_ctx_destroy(s->ctx);
  return NULL;
}

static void run_ranks(int ranks, int fuse, int schedule, rfr_status (*run)(side *s), result *results) {
  rfr_comm *comm[MOST_RANKS];
  pthread_t thread[MOST_RANKS];
  job jobs[MOST_RANKS];
  OK(rfr_comm_threads_create(ctx, ranks, 60, comm));
  for (int r = 0; r < ranks; r++) {
    side *s = aligned_alloc(64, sizeof *s);
    assert_non_null(s);
    memset(s, 0, sizeof *s);
    s->comm = comm[r], s->rank = r, s->ranks = ranks, s->fuse = fuse, s->schedule = schedule, s->result = &results[r];
    jobs[r] = (job){s, run};
    assert_int_equal(pthread_create(&thread[r], NULL, run_rank, &jobs[r]), 0);
  }
  for (int r = 0; r < ranks; r++) pthread_join(thread[r], NULL);
  for (int r = 0; r < ranks; r++) rfr_comm_destroy(comm[r]);
  for (int r = 0; r < ranks; r++)
    if (jobs[r].s->error[0]) fail_msg("rank %d: %s", r, jobs[r].s->error);
  for (int r = 0; r < ranks; r++) free(jobs[r].s);
}

static void expect_same(const result *want, const result *got, int rank) {
  for (int l = 0; l < LAYERS; l++)
    for (int k = 0; k < PARAMETERS; k++)
      assert_memory_equal(want->weights[l][k], got->weights[l][k], sizeof(float) * (size_t)sizes[k]);
  assert_memory_equal(want->y[rank], got->y[rank], sizeof want->y[0]);
  assert_memory_equal(want->dx[rank], got->dx[rank], sizeof want->dx[0]);
}

static void alone_with(int ranks, int fuse, unsigned frozen, result *out) {
  side *s = aligned_alloc(64, sizeof *s);
  assert_non_null(s);
  memset(s, 0, sizeof *s);
  s->ctx = rft_one_thread();
  s->fuse = fuse, s->frozen = frozen, s->ranks = 1, s->result = out;
  OK(run_alone(s, ranks));
  rfr_graphs_destroy(s->g);
  rfr_ctx_destroy(s->ctx);
  free(s);
}

static void alone(int ranks, int fuse, result *out) { alone_with(ranks, fuse, 0, out); }

static result one, many[MOST_RANKS];

static void test_around(void **state) {
  (void)state;
  for (int ranks = 2; ranks <= MOST_RANKS; ranks++) {
    alone(ranks, 0, &one);
    run_ranks(ranks, 0, 0, run_around, many);
    for (int r = 0; r < ranks; r++) expect_same(&one, &many[r], r);
  }
}

static void test_inside(void **state) {
  static result around[MOST_RANKS];
  (void)state;
  for (int ranks = 1; ranks <= MOST_RANKS; ranks++)
    for (int k = 0; k < 2 * SCHEDULES; k++) {
      const int fuse =
          k / SCHEDULES; /* GEMMs accumulate in place: ranks agree bitwise with each other, not with the reference */
      if (fuse) run_ranks(ranks, 1, 0, run_around, around);
      else alone(ranks, 0, &one);
      run_ranks(ranks, fuse, k % SCHEDULES, run_inside, many);
      for (int r = 0; r < ranks; r++) expect_same(fuse ? &around[r] : &one, &many[r], r);
    }
}

enum { MIDDLE = 2 };
static rfr_status run_frozen(side *s) {
  s->frozen = MIDDLE;
  return run_inside(s);
}
static rfr_status run_recompute(side *s) {
  s->recompute = RFR_RECOMPUTE_ALL;
  return run_inside(s);
}

/* A frozen parameter is gathered and has no gradient; recomputed ops read parameters only while they are gathered, not
 * in a W after RESHARD. */
static void test_frozen_and_recompute(void **state) {
  (void)state;
  int clones = 0;
  for (int k = 0; k < SCHEDULES; k++) {
    alone_with(3, 0, MIDDLE, &one);
    run_ranks(3, 0, k, run_frozen, many);
    for (int r = 0; r < 3; r++) expect_same(&one, &many[r], r);
    alone(3, 0, &one);
    run_ranks(3, 0, k, run_recompute, many);
    for (int r = 0; r < 3; r++) expect_same(&one, &many[r], r);
    clones += many[0].memory.recomputed;
  }
  assert_true(clones > 0);
}

/* The plan has memory for the parameters and gradients that are gathered at the same time: those of one layer, or of
 * more in the second schedule. Persistent memory holds only shards. */
static void test_memory(void **state) {
  enum { BLOCK = 256 + 768 + 768 }; /* one layer, each tensor at a multiple of 256 bytes */
  (void)state;
  alone(2, 0, &one);
  assert_int_equal(one.memory.window_bytes, 0);
  assert_int_equal(one.memory.persistent_bytes, LAYERS * 2 * BLOCK);
  for (int k = 0; k < SCHEDULES; k++) {
    run_ranks(2, 0, k, run_inside, many);
    const rfr_graphs_memory *m = &many[1].memory;
    assert_int_equal(m->window_bytes, k == 1 ? 4 * BLOCK : 2 * BLOCK);
    assert_int_equal(m->persistent_bytes, LAYERS * 2 * (256 + 512 + 512));
    assert_int_equal(m->planned_bytes,
                     m->persistent_bytes + m->slot_bytes + m->shared_bytes + m->window_bytes + m->scratch_bytes);
  }
}

/* ---- refusals ---- */

static rfr_status try_schedule(const char *text, bool tied, rfr_graphs **g) {
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_trace *t[2] = {layer_trace(ctx, 0), layer_trace(ctx, tied ? 0 : 1)};
  rfr_schedule *schedule = NULL;
  if (text) OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule));
  for (int i = 0; i < 2; i++) c[i].trace = t[i], c[i].sharded = 1;
  o.schedule = schedule;
  *g = NULL;
  const rfr_status s = rfr_graphs_create(ctx, c, tied || !text || strstr(text, "1F0") ? 2 : 1, &o, g);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
  return s;
}

static void refused(const char *text, bool tied, const char *says) {
  rfr_graphs *g;
  assert_int_equal(try_schedule(text, tied, &g), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "graphs.callable");
  if (!strstr(rfr_last_error()->message, says)) fail_msg("%s", rfr_last_error()->message);
}

static void test_refused(void **state) {
  rfr_graphs *g;
  rfr_schedule *other;
  rfr_tensor x;
  static float values[T * C];
  const rfr_binding in = {NULL, activation, values};
  (void)state;
  refused("0F0 0B0 0REDUCE", false, "action 0 (0F0): it reads parameters of sharded callables, which are not gathered");
  refused("0F0 1F0 1B0 0B0", true, "cannot share parameters");
  refused("0UNSHARD 0F0 0B0 0REDUCE 0REDUCE 0RESHARD", false, "action 4 (0REDUCE): REDUCE without a weight gradient");
  refused("0UNSHARD 0F0 0B0 0REDUCE", false, "stage 0 is still gathered: add RESHARD");
  refused("0UNSHARD 0F0 0B0 0RESHARD", false, "stage 0 is not reduced: add REDUCE");
  refused("0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0REDUCE 1REDUCE 0RESHARD 1RESHARD", true, "cannot share parameters");
  OK(try_schedule("0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE 0RESHARD", false, &g));
  OK(rfr_schedule_parse(ctx, "test", "0UNSHARD 0F0 0B0 0REDUCE 0RESHARD", 33, &other));
  assert_int_equal(rfr_graphs_reschedule(g, other), RFR_MISMATCH);
  assert_string_equal(rfr_last_error()->slug, "graphs.schedule");
  assert_int_equal(rfr_graphs_reschedule(g, NULL), RFR_MISMATCH);
  rfr_schedule_destroy(other);
  assert_int_equal(rfr_graphs_tensor(g, "unreduced.grad.up0", &x), RFR_INVALID);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++) {
    int n;
    OK(rfr_graphs_forward(g, 0, m, &in, 1, &x, 1));
    assert_int_equal(rfr_graphs_gradient(g, "up0", &x), RFR_MISMATCH); /* before W and REDUCE */
    OK(rfr_graphs_backward(g, 0, m, &in, 1, &x, 1));
    OK(rfr_graphs_grads_ready(g, NULL, 0, &n));
    assert_int_equal(n, m == 0 ? 0 : PARAMETERS);
  }
  OK(rfr_graphs_gradient(g, "up0", &x));
  assert_int_equal(x.type.rank, 1);
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  /* parameters are gathered in each call, so any schedule is accepted */
  OK(try_schedule("0F0 0B0 0F1 0B1", false, &g));
  OK(rfr_schedule_parse(ctx, "test", "0F0 0B0 0F1 0B1 0F2 0B2", 23, &other));
  OK(rfr_graphs_reschedule(g, other));
  rfr_schedule_destroy(other);
  OK(rfr_graphs_reschedule(g, NULL));
  rfr_graphs_destroy(g);
}

/* The gradients of a layer over two microbatches; the layer is sharded over one rank, or not sharded. */
static void two_gradients(const char *text, int sharded, float *out) {
  rfr_graphs *g;
  rfr_schedule *schedule;
  rfr_tensor x;
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  float in[T * C], dy[T * C];
  rfr_trace *t = layer_trace(ctx, 0);
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule));
  c.trace = t, c.sharded = sharded;
  o.schedule = schedule, o.fuse = 0;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  OK(rfr_graphs_tensor(g, "up0", &x));
  for (int64_t i = 0; i < sizes[1]; i++) ((float *)x.data)[i] = first_weight(0, 1, i);
  OK(rfr_graphs_tensor(g, "norm0", &x));
  for (int64_t i = 0; i < sizes[0]; i++) ((float *)x.data)[i] = first_weight(0, 0, i);
  for (int step = 0; step < 2; step++) {
    OK(rfr_graphs_begin_step(g, NULL, 0));
    for (int m = 0; m < 2; m++) {
      const rfr_binding given = {NULL, activation, in}, back = {NULL, activation, dy};
      input_of(in, step, m);
      input_of(dy, step, m + 5);
      OK(rfr_graphs_forward(g, 0, m, &given, 1, &x, 1));
      OK(rfr_graphs_backward(g, 0, m, &back, 1, &x, 1));
    }
    OK(rfr_graphs_end_step(g));
  }
  OK(rfr_graphs_gradient(g, "down0", &x));
  memcpy(out, x.data, sizeof(float) * (size_t)sizes[2]);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  rfr_trace_destroy(t);
}

/* Gradients may be reduced once for all microbatches, or after each one. */
static void test_reduce_each(void **state) {
  static float want[ROOM], got[ROOM];
  (void)state;
  two_gradients("0F0 0B0 0F1 0B1", 0, want);
  two_gradients("0UNSHARD 0F0 0B0 0F1 0B1 0RESHARD 0REDUCE", 1, got);
  assert_memory_equal(want, got, sizeof want);
  memset(got, 0, sizeof got);
  two_gradients("0UNSHARD 0F0 0B0 0REDUCE 0F1 0B1 0RESHARD 0REDUCE", 1, got);
  assert_memory_equal(want, got, sizeof want);
  memset(got, 0, sizeof got);
  two_gradients("0F0 0B0 0F1 0B1", 1, got);
  assert_memory_equal(want, got, sizeof want);
}

/* Inference gathers parameters and reduces nothing. */
static void infer(const char *text, int sharded, float *out) {
  rfr_graphs *g;
  rfr_schedule *schedule;
  rfr_tensor x;
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  float in[T * C];
  char name[16];
  const rfr_binding given = {NULL, activation, in};
  rfr_trace *t = layer_trace(ctx, 0);
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule));
  c.trace = t, c.sharded = sharded, c.inference = 1;
  o.schedule = schedule;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  for (int k = 0; k < PARAMETERS; k++) {
    OK(rfr_graphs_tensor(g, name_of(0, k, name), &x));
    for (int64_t i = 0; i < sizes[k]; i++) ((float *)x.data)[i] = first_weight(0, k, i);
  }
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++) {
    input_of(in, 3, m);
    OK(rfr_graphs_forward(g, 0, m, &given, 1, &x, 1));
    memcpy(out + m * T * C, x.data, sizeof in);
  }
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  rfr_trace_destroy(t);
}

static void test_inference(void **state) {
  static float want[2 * T * C], got[2 * T * C];
  (void)state;
  infer("0F0 0F1", 0, want);
  infer("0F0 0F1", 1, got);
  assert_memory_equal(want, got, sizeof want);
  memset(got, 0, sizeof got);
  infer("0UNSHARD 0F0 0F1 0RESHARD", 1, got);
  assert_memory_equal(want, got, sizeof want);
}

/* If a rank has failed, calls that need it return a status, and the step can only be aborted. */
static void test_rank_that_left(void **state) {
  rfr_comm *comm[2];
  rfr_graphs *g;
  rfr_schedule *schedule;
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  static const char text[] = "0UNSHARD 0F0 0B0 0REDUCE 0RESHARD";
  (void)state;
  OK(rfr_comm_threads_create(ctx, 2, 0, comm));
  rfr_trace *t = layer_trace(ctx, 0);
  OK(rfr_schedule_parse(ctx, "test", text, sizeof text - 1, &schedule));
  c.trace = t, c.sharded = 1;
  o.schedule = schedule, o.comm = comm[0];
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  rfr_comm_destroy(comm[1]);
  assert_int_equal(rfr_graphs_begin_step(g, NULL, 0), RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "dist.peer");
  assert_int_equal(rfr_graphs_end_step(g), RFR_MISMATCH);
  OK(rfr_graphs_abort_step(g));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  rfr_trace_destroy(t);
  rfr_comm_destroy(comm[0]);
}

/* y = x w, and w as an output: itself, as another shape, or as a copy. */
static rfr_trace *output_weight(const char *w, char how) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, ((int64_t[]){4}));
  rfr_value p = rfr_input(t, w, how == 'f' ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){4}));
  rfr_output(t, "y", rfr_mul(t, x, p));
  if (how == 'v') rfr_output(t, "out", rfr_reshape(t, p, 2, ((int64_t[]){2, 2})));
  else rfr_output(t, "out", how == 'c' ? rfr_copy(t, p) : p);
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_status create_outputs(char how, rfr_graphs **g) {
  rfr_trace *t[2] = {output_weight("a", how), output_weight("b", how)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  for (int i = 0; i < 2; i++) c[i].trace = t[i], c[i].sharded = 1;
  const rfr_status s = rfr_graphs_create(ctx, c, 2, NULL, g);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  return s;
}

/* Gathered parameters are freed after the call, so an output must not alias one; a copy is accepted. */
static void test_parameter_outputs(void **state) {
  static const rfr_type type = {.dtype = RFR_F32, .rank = 1, .shape = {4}};
  static const float a[4] = {1, 2, 3, 4}, b[4] = {10, 20, 30, 40};
  rfr_graphs *g;
  rfr_tensor w, y[2], z[2];
  (void)state;
  for (const char *how = "pvf"; *how; how++) {
    assert_int_equal(create_outputs(*how, &g), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "graphs.callable");
    assert_non_null(strstr(rfr_last_error()->message, "output \"out\" aliases a parameter of a sharded callable"));
  }
  OK(create_outputs('c', &g));
  OK(rfr_graphs_tensor(g, "a", &w));
  OK(rfr_graphs_write(g, &w, a));
  OK(rfr_graphs_tensor(g, "b", &w));
  OK(rfr_graphs_write(g, &w, b));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  const rfr_binding x = {NULL, type, a};
  OK(rfr_graphs_forward(g, 0, 0, &x, 1, y, 2));
  OK(rfr_graphs_forward(g, 1, 0, &x, 1, z, 2));
  assert_memory_equal(y[1].data, a, sizeof a);
  assert_memory_equal(z[1].data, b, sizeof b);
  OK(rfr_graphs_abort_step(g));
  rfr_graphs_destroy(g);
}

/* Every allocation of creation fails once: each failure is a status, and no memory leaks. */
static void test_allocation_faults(void **state) {
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  rfr_schedule *schedule;
  rfr_trace *t = layer_trace(ctx, 0);
  (void)state;
  OK(rfr_schedule_parse(ctx, "test", "0UNSHARD 0F0 0B0 0REDUCE 0RESHARD", 33, &schedule));
  c.trace = t, c.sharded = 1;
  o.schedule = schedule;
  rfr_graphs_destroy(rft_create_after_faults(&c, &o, 20));
  rfr_schedule_destroy(schedule);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_around),
                                     rft_context_test(test_inside),
                                     rft_context_test(test_frozen_and_recompute),
                                     rft_context_test(test_memory),
                                     rft_context_test(test_refused),
                                     rft_context_test(test_reduce_each),
                                     rft_context_test(test_inference),
                                     rft_context_test(test_rank_that_left),
                                     rft_context_test(test_parameter_outputs),
                                     rft_context_test(test_allocation_faults)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
