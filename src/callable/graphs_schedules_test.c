/* SPDX-License-Identifier: Apache-2.0
 *
 * Callables under generated schedules, on every rank, and under order lists, with and without recompute: bitwise equal
 * to the steps without a schedule, which graphs_test compares with one program; as many slots as microbatches in
 * flight; memory near the bound; frozen weights and low-rank updates; inference; weights that two stages share. The
 * ranks of a pipeline are sets of graphs in one process, with activations passed between them.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"
#include "support/random.h"
#include "support/thin.h"

enum { T = RFT_T, C = RFT_C, BYTES = RFT_T * RFT_C * 4, MOST_RANKS = 4, LOW = 4 };

/* A weight with a low-rank update; the weight is frozen in the blocks that the scene freezes. */
static rfr_value low_rank(rft_recorder *r, rfr_value x) {
  char name[3][16];
  rfr_value w[3];
  static const char *const what[3] = {"w", "down", "up"};
  const int64_t shape[3][2] = {{C, C}, {LOW, C}, {C, LOW}};
  for (int i = 0; i < 3; i++) {
    const bool frozen = i == 0 || (r->frozen >> r->block & 1);
    snprintf(name[i], sizeof name[i], "b%d.%s", r->block, what[i]);
    w[i] = rfr_input(r->t, name[i], frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, r->dtype, 2, shape[i]);
  }
  return rfr_add(r->t, rfr_linear(r->t, x, w[0], RFR_NONE),
                 rfr_linear(r->t, rfr_linear(r->t, x, w[1], RFR_NONE), w[2], RFR_NONE));
}

/* ---- ranks ---- */

typedef struct pipeline {
  const rft_scene *s;
  const rfr_schedule *schedule;
  int ranks, layers;
  rfr_graphs *g[MOST_RANKS];
  int local[RFT_BLOCKS]; /* index of each block on its rank */
  rft_buffers *b;
  bool made[2][RFT_BLOCKS][RFT_MICROBATCHES]; /* the forward, the backward of each block has run */
} pipeline;

static int rank_of(const pipeline *p, int block) { return rfr_schedule_rank(p->schedule, block / p->layers); }

static rfr_graphs *make(const rft_scene *s, const rfr_schedule *schedule, int rank, int layers, int *local) {
  rfr_trace *t[RFT_BLOCKS];
  rfr_callable c[RFT_BLOCKS];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  int64_t site = 0;
  int n = 0;
  for (int i = 0; i < s->blocks; i++) {
    t[i] = rft_block_trace(s, i);
    const int64_t first = site;
    site += t[i]->next_site;
    if (schedule && rfr_schedule_rank(schedule, i / layers) != rank) continue;
    c[n] = rfr_callable_default();
    c[n].trace = t[i];
    if (schedule) c[n].first_site = first;
    if (local) local[i] = n;
    n++;
  }
  o.schedule = schedule;
  o.rank = rank;
  o.fuse = s->fuse;
  if (schedule) o.recompute = s->recompute;
  OK(rfr_graphs_create(ctx, c, n, &o, &g));
  for (int i = 0; i < s->blocks; i++) rfr_trace_destroy(t[i]);
  return g;
}

/* Initial values, derived from the name, so that every rank has the same. */
static void init(rfr_graphs *g) {
  static const int32_t documents[3] = {0, 10, T};
  for (int i = 0; i < g->m.store.n; i++) {
    const rfr_tensor *x = &g->m.store.named[i].tensor;
    uint64_t seed = 5;
    for (const char *c = x->name; *c; c++) seed = seed * 131 + (unsigned char)*c;
    if (strcmp(x->name, "offsets") == 0) memcpy(x->data, documents, sizeof documents);
    else if (g->m.store.named[i].parameter < 0 && rfr_dtype_is_float(x->type.dtype)) rft_fill_by(x, seed, 0.4f);
  }
}

static void begin(rfr_graphs *g, int step) {
  const int64_t block[4] = {step, step, 77, 0};
  const rfr_binding now = {"step", {.dtype = RFR_I64, .rank = 1, .shape = {4}}, block};
  rfr_tensor x;
  OK(rfr_graphs_begin_step(g, &now, rfr_graphs_tensor(g, "step", &x) == RFR_OK));
}

static void forward(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int callable, int block, int m) {
  const rfr_binding x = {NULL, rft_activation(s), b->x[m][block]};
  rfr_tensor y;
  OK(rfr_graphs_forward(g, callable, m, &x, 1, &y, 1));
  OK(rfr_graphs_read(g, &y, b->x[m][block + 1]));
}

static void backward(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int callable, int block, int m) {
  const rfr_binding dy = {NULL, rft_activation(s), b->dx[m][block + 1]};
  rfr_tensor dx;
  OK(rfr_graphs_backward(g, callable, m, &dy, 1, &dx, 1));
  OK(rfr_graphs_read(g, &dx, b->dx[m][block]));
}

/* Whether the inputs of an action have been computed, also those on other ranks. */
static bool is_ready(const pipeline *p, const rfr_action *a) {
  const int first = a->stage * p->layers, end = first + p->layers;
  if (a->op == RFR_ACTION_F) return first == 0 || p->made[0][first - 1][a->microbatch];
  if (a->op == RFR_ACTION_W) return true;
  return end == p->s->blocks || p->made[1][end][a->microbatch];
}

static void act(pipeline *p, const rfr_action *a) {
  for (int k = 0; k < p->layers; k++) {
    const int block = a->stage * p->layers + (a->op == RFR_ACTION_F ? k : p->layers - 1 - k), m = a->microbatch;
    rfr_graphs *g = p->g[rank_of(p, block)];
    if (a->op == RFR_ACTION_F) forward(g, p->s, p->b, p->local[block], block, m);
    else if (a->op != RFR_ACTION_W) backward(g, p->s, p->b, p->local[block], block, m);
    else if (rfr_graphs_ops(g, p->local[block], RFR_ACTION_W) > 0) OK(rfr_graphs_wgrad(g, p->local[block], m));
    if (a->op != RFR_ACTION_W) p->made[a->op != RFR_ACTION_F][block][m] = true;
  }
}

static void run_ranks(pipeline *p, int step) {
  int at[MOST_RANKS] = {0}, moved = 1;
  memset(p->made, 0, sizeof p->made);
  for (int r = 0; r < p->ranks; r++) begin(p->g[r], step);
  while (moved > 0) {
    moved = 0;
    for (int r = 0; r < p->ranks; r++) {
      int n;
      const rfr_action *a = rfr_schedule_actions(p->schedule, r, &n);
      for (; at[r] < n && is_ready(p, &a[at[r]]); at[r]++, moved++) act(p, &a[at[r]]);
    }
  }
  for (int r = 0; r < p->ranks; r++) OK(rfr_graphs_end_step(p->g[r])); /* fails with the name of a missing call */
}

static void run_plain(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int step) {
  begin(g, step);
  for (int m = 0; m < s->microbatches; m++) {
    for (int i = 0; i < s->blocks; i++) forward(g, s, b, i, i, m);
    for (int i = s->blocks - 1; i >= 0; i--) backward(g, s, b, i, i, m);
  }
  OK(rfr_graphs_end_step(g));
}

static void draw_all(const rft_scene *s, rft_buffers *b, int step) {
  for (int m = 0; m < s->microbatches; m++) {
    rft_draw(s, b->x[m][0], step, m, 1);
    rft_draw(s, b->dx[m][s->blocks], step, m, 2);
  }
}

/* Every main gradient of `a` is bitwise equal to that of `b`, which has all of them. */
static void same_gradients(rfr_graphs *a, rfr_graphs *b) {
  for (int i = 0; i < a->m.store.n; i++) {
    rfr_tensor y;
    const rfr_tensor *x = &a->m.store.named[i].tensor;
    if (a->m.store.named[i].parameter < 0) continue;
    OK(rfr_graphs_gradient(b, x->name + 5, &y));
    if (memcmp(x->data, y.data, (size_t)x->bytes) != 0) fail_msg("%s differs", x->name);
    bool any = false;
    for (int64_t k = 0; k < x->bytes / 4; k++) any = any || ((const float *)x->data)[k] != 0;
    if (!any) fail_msg("%s is zeros", x->name);
  }
}

/* Runs two steps of a schedule on all its ranks, and without a schedule. */
static void check_schedule(const rft_scene *s, const rfr_schedule *schedule, int layers) {
  static rft_buffers ours, plain;
  rfr_schedule_info info;
  pipeline p = {.s = s, .schedule = schedule, .layers = layers, .b = &ours};
  OK(rfr_schedule_get_info(schedule, &info));
  p.ranks = info.ranks;
  rfr_graphs *whole = make(s, NULL, 0, 1, NULL);
  init(whole);
  for (int r = 0; r < p.ranks; r++) {
    p.g[r] = make(s, schedule, r, layers, p.local);
    init(p.g[r]);
  }
  memset(&ours, 0, sizeof ours);
  memset(&plain, 0, sizeof plain);
  for (int step = 0; step < 2; step++) {
    draw_all(s, &ours, step);
    draw_all(s, &plain, step);
    run_ranks(&p, step);
    run_plain(whole, s, &plain, step);
    assert_memory_equal(&ours, &plain, sizeof ours);
    for (int r = 0; r < p.ranks; r++) same_gradients(p.g[r], whole);
  }
  for (int r = 0; r < p.ranks; r++) rfr_graphs_destroy(p.g[r]);
  rfr_graphs_destroy(whole);
}

/* ---- generators ---- */

static const struct {
  rfr_schedule_kind kind;
  int ranks, chunks;
} kinds[] = {{RFR_SCHEDULE_GPIPE, 2, 0}, {RFR_SCHEDULE_1F1B, 4, 0},  {RFR_SCHEDULE_INTERLEAVED, 2, 2},
             {RFR_SCHEDULE_ZB_H1, 4, 0}, {RFR_SCHEDULE_ZB_H1, 2, 2}, {RFR_SCHEDULE_ZB_V, 2, 2}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void check_kind(int kind, rft_block block, rfr_dtype dtype, int microbatches, unsigned frozen) {
  const int stages = kinds[kind].ranks * (kinds[kind].chunks ? kinds[kind].chunks : 1), layers = RFT_BLOCKS / stages;
  const rft_scene s = {.block = block,
                       .blocks = RFT_BLOCKS,
                       .microbatches = microbatches,
                       .dtype = dtype,
                       .fuse = true,
                       .frozen = frozen,
                       .recompute = microbatches % 2 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP};
  rfr_schedule *schedule = rft_generate(kinds[kind].kind, kinds[kind].ranks, microbatches, kinds[kind].chunks);
  OK(rfr_schedule_set_layers(schedule, &layers, 1));
  check_schedule(&s, schedule, layers);
  rfr_schedule_destroy(schedule);
}

static void test_generators(void **state) {
  (void)state;
  static const rft_block blocks[] = {rft_block_linear, rft_block_mlp, rft_block_attention, rft_block_transformer,
                                     rft_block_experts};
  static const int microbatches[] = {1, 2, 3, 8};
  for (int kind = 0; kind < KINDS; kind++)
    for (size_t block = 0; block < sizeof blocks / sizeof *blocks; block++)
      for (int bf16 = 0; bf16 < 2; bf16++)
        for (int i = 0; i < 4; i++)
          if (!RFT_LEFT_OUT(kind + (int)block + bf16 + i, 5))
            check_kind(kind, blocks[block], bf16 ? RFR_BF16 : RFR_F32, microbatches[i], 0);
}

/* Frozen weights and low-rank updates: callables without trained weights have no W, and results stay bitwise equal. */
static void test_frozen(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++)
    for (unsigned frozen = 0; frozen < 16; frozen += 5) {
      if (RFT_LEFT_OUT((unsigned)kind + frozen, 3)) continue;
      check_kind(kind, low_rank, RFR_F32, 3, frozen);
      if (frozen != 15) check_kind(kind, rft_block_transformer, RFR_F32, 2, frozen);
    }
}

/* ---- hooks ---- */

enum { MOST_EVENTS = 8192 };
typedef struct events {
  struct event {
    int point, callable, microbatch, capture, iteration;
  } event[MOST_EVENTS];
  int n;
} events;

static void record(events *t, struct event e) {
  assert_true(t->n < MOST_EVENTS);
  t->event[t->n++] = e;
}

static rfr_status listen(const rfr_hook_event *e, void *user) {
  record(user, (struct event){e->point, e->callable, e->microbatch, e->capture, e->iteration});
  return RFR_OK;
}

/* The expected order of a rank's warm-up and capture: the first action of each stage, slot and part; forwards in the
 * order of the callables, the other parts in reverse. */
static void expected_walk(events *t, const rfr_schedule *schedule, int rank, int layers, int capture, int iteration) {
  static const rfr_hook_point points[3] = {RFR_HOOK_PRE_FORWARD, RFR_HOOK_PRE_BACKWARD, RFR_HOOK_PRE_WGRAD};
  bool seen[RFT_BLOCKS][16][3] = {{{false}}};
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, rank, &n);
  for (int i = 0; i < n; i++) {
    int first = 0;
    for (int stage = 0; stage < a[i].stage; stage++) first += rfr_schedule_rank(schedule, stage) == rank ? layers : 0;
    const int slot = rfr_schedule_slot(schedule, a[i].stage, a[i].microbatch);
    for (int k = 0; k < layers; k++)
      for (int part = 0; part < 3; part++) {
        const bool has = part == 0   ? a[i].op == RFR_ACTION_F
                         : part == 1 ? a[i].op == RFR_ACTION_I || a[i].op == RFR_ACTION_B
                                     : a[i].op == RFR_ACTION_W || a[i].op == RFR_ACTION_B;
        const int callable = first + (part == 0 ? k : layers - 1 - k);
        if (!has || seen[callable][slot][part]) continue;
        seen[callable][slot][part] = true;
        for (int post = 0; post < 2; post++)
          record(t, (struct event){(int)points[part] + post, callable, a[i].microbatch, capture, iteration});
      }
  }
}

/* The order and number of hook calls, for each generator, rank and number of warm-ups. Replays call no hooks. */
static void test_hooks(void **state) {
  (void)state;
  static events ours, meant;
  static const int warmups[3] = {0, 1, 3};
  for (int kind = 0; kind < KINDS; kind++)
    for (int w = 0; w < 3; w++) {
      if (RFT_LEFT_OUT(kind + w, 3)) continue;
      const int stages = kinds[kind].ranks * (kinds[kind].chunks ? kinds[kind].chunks : 1),
                layers = RFT_BLOCKS / stages;
      rfr_schedule *schedule = rft_generate(kinds[kind].kind, kinds[kind].ranks, 6, kinds[kind].chunks);
      OK(rfr_schedule_set_layers(schedule, &layers, 1));
      for (int rank = 0; rank < kinds[kind].ranks; rank++) {
        const rft_scene s = {.block = rft_block_linear, .blocks = RFT_BLOCKS, .dtype = RFR_F32};
        const rfr_hook hook = {listen, &ours};
        const rfr_hook_list list = {&hook, 1};
        rfr_hooks hooks[RFT_BLOCKS];
        rfr_callable c[RFT_BLOCKS];
        rfr_trace *t[RFT_BLOCKS];
        rfr_graphs_options o = rfr_graphs_options_default();
        rfr_graphs *g;
        ours.n = meant.n = 0;
        for (int i = 0; i < RFT_BLOCKS; i++) {
          c[i] = rfr_callable_default();
          c[i].trace = t[i] = rft_block_trace(&s, i);
          hooks[i] = rfr_hooks_default();
          hooks[i].pre_forward = hooks[i].post_forward = hooks[i].pre_backward = hooks[i].post_backward = list;
          hooks[i].pre_wgrad = hooks[i].post_wgrad = list;
        }
        o.schedule = schedule, o.rank = rank;
        o.hooks = hooks, o.n_hooks = RFT_BLOCKS / kinds[kind].ranks;
        o.warmup_iterations = warmups[w];
        o.pre_warmup = o.post_warmup = list;
        OK(rfr_graphs_create(ctx, c, o.n_hooks, &o, &g));
        if (warmups[w] > 0) record(&meant, (struct event){RFR_HOOK_PRE_WARMUP, -1, -1, 0, 0});
        for (int i = 0; i < warmups[w]; i++) expected_walk(&meant, schedule, rank, layers, 0, i);
        if (warmups[w] > 0) record(&meant, (struct event){RFR_HOOK_POST_WARMUP, -1, -1, 0, 0});
        expected_walk(&meant, schedule, rank, layers, 1, 0);
        assert_int_equal(ours.n, meant.n);
        assert_memory_equal(ours.event, meant.event, (size_t)meant.n * sizeof meant.event[0]);
        rfr_graphs_destroy(g);
        assert_int_equal(ours.n, meant.n);
        for (int i = 0; i < RFT_BLOCKS; i++) rfr_trace_destroy(t[i]);
      }
      rfr_schedule_destroy(schedule);
    }
}

/* ---- order lists ---- */

typedef struct text {
  char data[512];
  size_t n;
} text;

static void add(const char *piece, size_t n, void *user) {
  text *to = user;
  assert_true(to->n + n < sizeof to->data);
  memcpy(to->data + to->n, piece, n);
  to->n += n;
}

/* Order lists in the format of other frameworks are compared with one program: weights after ten steps. */
static void test_order_lists(void **state) {
  (void)state;
  static const struct {
    const char *list;
    int microbatches, chunks;
  } cases[] = {{"[1,2,1,2,-2,-1,1,2,-2,-1,-2,-1]", 3, 2},
               {"[1,2,1,2,-2,-2.5,-1,-1.5,1,2,-2,-2.5,-1,-1.5,-2,-2.5,-1,-1.5]", 3, 2},
               {"[1,2,1,2,-2,-1,-2.5,1,2,-2,-1.5,-1,-2.5,-1.5,-2,-1,-2.5,-1.5]", 3, 2},
               {"[1,2,1,2,-2,-1,1,2,-2,-1,-2,-1,-2.5,-2.5,-2.5,-1.5,-1.5,-1.5]", 3, 2},
               {"[1,1,-1,-1,-1.5,-1.5]", 2, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int kind = 0; kind < 2; kind++) {
      rfr_schedule *schedule;
      text printed = {{0}, 0};
      OK(rfr_schedule_parse_order(ctx, "test", cases[i].list, strlen(cases[i].list), NULL, 0, &schedule));
      OK(rfr_schedule_print(schedule, add, &printed));
      rft_run_scene(&(rft_scene){.block = kind ? rft_block_experts : rft_block_transformer,
                                 .blocks = 2 * cases[i].chunks,
                                 .microbatches = cases[i].microbatches,
                                 .dtype = kind ? RFR_F32 : RFR_BF16,
                                 .fuse = true,
                                 .schedule = printed.data,
                                 .layers = 2,
                                 .linked = kind,
                                 .recompute = (kind + i) % 2 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP});
      rfr_schedule_destroy(schedule);
    }
}

/* ---- random schedules ---- */

static uint64_t random_state;
static int random_below(int n) { return (int)rft_below(&random_state, (uint32_t)n); }

enum { NOT_BEGUN, FORWARD, HALF, DONE };

/* A random order of one rank's actions that respects only their dependences. Weight gradients of a stage run in
 * ascending microbatches. In `lazy` of 8 cases another action runs before a weight gradient. */
static void write_random(int stages, int microbatches, int lazy, bool split, char *to, size_t n) {
  int done[RFT_BLOCKS][RFT_MICROBATCHES] = {{NOT_BEGUN}}, next_w[RFT_BLOCKS] = {0};
  int left = stages * microbatches;
  to[0] = 0;
  while (left > 0) {
    const int s = random_below(stages), m = random_below(microbatches);
    const bool gradient = s == stages - 1 || done[s + 1][m] >= HALF;
    const char *op = NULL;
    if (done[s][m] == NOT_BEGUN && (s == 0 || done[s - 1][m] >= FORWARD)) {
      op = "F", done[s][m] = FORWARD;
    } else if (done[s][m] == FORWARD && gradient && random_below(8) >= lazy) {
      const bool both = next_w[s] == m && (!split || random_below(2));
      op = both ? "B" : "I", done[s][m] = both ? DONE : HALF;
      next_w[s] += both;
    } else if (done[s][m] == HALF && next_w[s] == m && random_below(8) >= lazy) {
      op = "W", done[s][m] = DONE;
      next_w[s]++;
    }
    if (!op) continue;
    left -= done[s][m] == DONE;
    const size_t at = strlen(to);
    assert_true(at + 16 < n);
    snprintf(to + at, n - at, "%d%s%d ", s, op, m);
  }
}

/* For random schedules, memory and recompute options results are bitwise equal to those of one program. Half of the
 * cases run in debug mode, where a late read gets NaN. */
static void test_random_schedules(void **state) {
  (void)state;
  static const rft_block blocks[] = {rft_block_mlp, rft_block_attention, rft_block_transformer, rft_block_experts};
  for (int seed = 1; seed <= 40; seed++) {
    if (RFT_LEFT_OUT(seed, 5)) continue;
    char text[1024];
    random_state = (uint64_t)seed;
    const int stages = 1 + random_below(2), layers = 1 + random_below(2), microbatches = 1 + random_below(5);
    write_random(stages, microbatches, random_below(7), random_below(2), text, sizeof text);
    const unsigned all = (1u << stages * layers) - 1, frozen = random_below(2) ? 0 : (unsigned)random_below((int)all);
    const rft_scene s = {.block = blocks[random_below(4)],
                         .blocks = stages * layers,
                         .microbatches = microbatches,
                         .dtype = random_below(2) ? RFR_BF16 : RFR_F32,
                         .frozen = frozen,
                         .schedule = text,
                         .layers = layers,
                         .fuse = random_below(4) > 0,
                         .linked = random_below(2),
                         .debug = seed & 1,
                         .recompute = random_below(2) ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP};
    print_message("%d: %s\n", seed, text);
    rft_run_scene(&s);
  }
}

/* ---- slots ---- */

static void test_slots(void **state) {
  (void)state;
  static const int wanted[4] = {8, 8, 4, 4};
  rfr_schedule *schedule = rft_generate(RFR_SCHEDULE_INTERLEAVED, 4, 32, 4);
  const rft_scene s = {.block = rft_block_transformer, .blocks = 4, .dtype = RFR_BF16, .fuse = true};
  rfr_trace *t[4];
  rfr_callable c[4];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  for (int i = 0; i < 4; i++) {
    t[i] = rft_block_trace(&s, i);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    c[i].first_site = 8 * i;
  }
  o.schedule = schedule;
  OK(rfr_graphs_create(ctx, c, 4, &o, &g));
  const rfr_graphs_memory *m = &g->memory;
  for (int i = 0; i < 4; i++) assert_int_equal(g->stage[i].slots, wanted[i]);
  assert_int_equal(m->slots, 24);
  assert_int_equal(m->graphs, 24 * 3); /* F, I and W of each */
  assert_true(100 * (m->slot_bytes + m->shared_bytes) <= 101 * m->lower_bound_bytes);
  assert_int_equal(m->live, 19);
  assert_int_equal(19 * m->slot_bytes, 24 * m->live_bytes); /* equal blocks have equal slots */
  rfr_graphs_destroy(g);
  for (int i = 0; i < 4; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
}

/* ---- blocks: memory that is dead after I ---- */

static const rft_scene delayed = {.block = rft_block_transformer,
                                  .blocks = 2,
                                  .layers = 2,
                                  .fuse = true,
                                  .frozen = 1,
                                  .microbatches = 3,
                                  .dtype = RFR_F32,
                                  .linked = true};

/* One, two and three microbatches are in flight before their W; each schedule has three slots. */
static void test_blocks(void **state) {
  (void)state;
  static const char *const text[3] = {"0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2", "0F0 0F1 0I0 0I1 0F2 0I2 0W0 0W1 0W2",
                                      "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"};
  rfr_schedule *schedule[3];
  rfr_graphs *g[3];
  for (int i = 0; i < 3; i++) {
    rft_scene s = delayed;
    s.schedule = text[i];
    for (int debug = 0; debug < 2; debug++) {
      s.debug = debug;
      rft_run_scene(&s); /* compares with one program */
    }
    s.debug = false;
    g[i] = rft_make_graphs(&s, &schedule[i]);
    const rfi_stage_plan *stage = g[i]->stage;
    assert_int_equal(stage->slots, 3);
    assert_int_equal(stage->blocks, i + 1);
    assert_int_equal(g[i]->memory.slot_bytes,
                     3 * stage->bytes + (stage->block_bytes > 0 ? i + 1 : 0) * stage->block_bytes);
    assert_true(100 * (g[i]->memory.slot_bytes + g[i]->memory.shared_bytes) <= 101 * g[i]->memory.lower_bound_bytes);
  }
  const rfi_stage_plan *one = g[0]->stage, *two = g[1]->stage, *all = g[2]->stage;
  assert_int_equal(all->block_bytes, 0);
  assert_int_equal(one->bytes, two->bytes);
  assert_int_equal(one->block_bytes, two->block_bytes);
  assert_true(one->block_bytes > 0 && one->bytes < all->bytes);
  assert_true(g[0]->memory.slot_bytes < g[1]->memory.slot_bytes);
  assert_true(g[1]->memory.slot_bytes < g[2]->memory.slot_bytes);
  assert_int_equal(g[0]->memory.live_bytes, g[0]->memory.slot_bytes);
  for (int from = 0; from < 3; from++)
    for (int to = 0; to < 3; to++)
      if (to <= from || from == 2) OK(rfr_graphs_reschedule(g[from], schedule[to]));
      else
        rft_refused(rfr_graphs_reschedule(g[from], schedule[to]), "graphs.schedule",
                    from == 0 && to == 1 ? "slots 0 and 1 of stage 0" : "between F and I at the same time");
  for (int i = 0; i < 3; i++) {
    rfr_graphs_destroy(g[i]);
    rfr_schedule_destroy(schedule[i]);
  }
}

/* A linked output in a block is valid until its reader has run, whichever slot it is in. */
static void test_block_validity(void **state) {
  (void)state;
  static rft_buffers b;
  rft_scene s = delayed;
  rfr_schedule *schedule;
  s.schedule = "0F0 0I0 0F1 0I1 0F2 0I2 0F3 0I3 0W0 0W1 0W2 0W3";
  s.frozen = 2, s.microbatches = 4;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  static unsigned char to[RFT_T * RFT_C * 4];
  rfr_tensor y[3];
  init(g);
  draw_all(&s, &b, 0);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++) {
    const rfr_binding x = {NULL, rft_activation(&s), b.x[m][0]};
    OK(rfr_graphs_forward(g, 0, m, &x, 1, &y[m], 1));
    OK(rfr_graphs_read(g, &y[m], to));
    OK(rfr_graphs_forward(g, 1, m, NULL, 0, &y[2], 1));
    rft_refused(rfr_graphs_read(g, &y[m], to), "argument", "no longer valid");
    OK(rfr_graphs_read(g, &y[2], to));
    const rfr_binding dy = {NULL, rft_activation(&s), b.dx[m][2]};
    rfr_tensor dx;
    OK(rfr_graphs_backward(g, 1, m, &dy, 1, NULL, 0));
    OK(rfr_graphs_backward(g, 0, m, NULL, 0, &dx, 1));
    OK(rfr_graphs_read(g, &dx, to));
  }
  const rfi_port *out = &g->callable[0].out[0];
  assert_int_equal(g->callable[0].u.place[out->data.value].region, RFI_BLOCK); /* precondition of this test */
  assert_ptr_equal(y[0].data, y[1].data);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* ---- inference within a training step ---- */

/* The callables of the training set also form an inference set over the same weights. Inference between any two calls
 * of a step does not change the step's results; without dropout it returns the same outputs. */
static void test_inference_between(void **state) {
  (void)state;
  static rft_buffers with, without;
  const rft_scene s = {.block = rft_block_experts, .blocks = 2, .microbatches = 3, .dtype = RFR_F32, .fuse = true};
  static const char text[] = "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2";
  rfr_schedule *schedule;
  OK(rfr_schedule_parse(ctx, "test", text, sizeof text - 1, &schedule));
  OK(rfr_schedule_set_layers(schedule, &(int){2}, 1));
  rfr_graphs *a = make(&s, schedule, 0, 2, NULL), *b = make(&s, schedule, 0, 2, NULL), *inference;
  init(a);
  init(b);
  rfr_binding tensors[32];
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  for (int i = 0; i < 2; i++) c[i].trace = t[i], c[i].inference = 1;
  for (int i = 0; i < a->m.store.n; i++)
    if (a->m.store.named[i].parameter < 0)
      tensors[o.n_tensors++] = (rfr_binding){a->m.store.named[i].tensor.name, a->m.store.named[i].tensor.type,
                                             a->m.store.named[i].tensor.data};
  o.tensors = tensors;
  OK(rfr_graphs_create(ctx, c, 2, &o, &inference));
  memset(&with, 0, sizeof with);
  memset(&without, 0, sizeof without);
  draw_all(&s, &with, 0);
  draw_all(&s, &without, 0);
  OK(rfr_graphs_begin_step(a, NULL, 0));
  OK(rfr_graphs_begin_step(b, NULL, 0));
  OK(rfr_graphs_begin_step(inference, NULL, 0));
  int n, passes = 0;
  const rfr_action *actions = rfr_schedule_actions(schedule, 0, &n);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < 2; k++) {
      const int m = actions[i].microbatch, block = actions[i].op == RFR_ACTION_F ? k : 1 - k;
      for (int side = 0; side < 2; side++) {
        rfr_graphs *g = side ? b : a;
        rft_buffers *to = side ? &without : &with;
        if (actions[i].op == RFR_ACTION_F) forward(g, &s, to, block, block, m);
        else if (actions[i].op == RFR_ACTION_W) OK(rfr_graphs_wgrad(g, block, m));
        else backward(g, &s, to, block, block, m);
      }
      rft_buffers seen = {{{{0}}}, {{{0}}}};
      memcpy(seen.x[0][0], with.x[0][0], BYTES);
      for (int layer = 0; layer < 2; layer++) {
        const rfr_binding x = {NULL, rft_activation(&s), seen.x[0][layer]};
        rfr_tensor y;
        OK(rfr_graphs_forward(inference, layer, passes, &x, 1, &y, 1));
        memcpy(seen.x[0][layer + 1], y.data, BYTES);
      }
      passes++;
      if (i > 0) assert_memory_equal(seen.x[0][2], with.x[0][2], BYTES);
    }
  OK(rfr_graphs_end_step(a));
  OK(rfr_graphs_end_step(b));
  OK(rfr_graphs_end_step(inference));
  assert_memory_equal(&with, &without, sizeof with);
  same_gradients(a, b);
  rfr_graphs_destroy(inference);
  rfr_graphs_destroy(a);
  rfr_graphs_destroy(b);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
}

/* ---- tied weights ---- */

/* The first and the last stage share a weight. Each has it under a separate name, with the same memory but a separate
 * main gradient; the caller adds these in stage order. */
static void test_tied(void **state) {
  (void)state;
  static _Alignas(16) float w[C * C], of_stage[2][C * C];
  static rft_buffers b;
  static float sum[C * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .microbatches = 3, .dtype = RFR_F32};
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const rfr_binding tied[2] = {{"b0.w", square, w}, {"b1.w", square, w}};
  const rfr_main_gradient gradients[2] = {rft_main_gradient("b0.w", square, of_stage[0], 0),
                                          rft_main_gradient("b1.w", square, of_stage[1], 0)};
  static const char text[] = "0F0 1F0 0F1 1I0 0I0 1F1 1I1 1W0 0I1 0F2 1F2 1B2 0B2 1W1 0W1 0W0";
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule;
  rfr_graphs *g;
  OK(rfr_schedule_parse(ctx, "test", text, sizeof text - 1, &schedule));
  for (int i = 0; i < 2; i++) c[i].trace = t[i];
  o.schedule = schedule;
  o.tensors = tied, o.n_tensors = 2;
  o.gradients = gradients, o.n_gradients = 2;
  OK(rfr_graphs_create(ctx, c, 2, &o, &g));
  init(g);
  draw_all(&s, &b, 0);
  pipeline p = {.s = &s, .schedule = schedule, .ranks = 1, .layers = 1, .g = {g}, .local = {0, 1}, .b = &b};
  run_ranks(&p, 0);
  for (int stage = 0; stage < 2; stage++) /* REDUCE */
    for (int i = 0; i < C * C; i++) sum[i] = stage == 0 ? of_stage[0][i] : sum[i] + of_stage[stage][i];
  for (int i = 0; i < C; i++)
    for (int k = 0; k < C; k++) { /* dw = sum over microbatches and both uses of dy^T x */
      double want = 0, size = 0;
      for (int m = 0; m < 3; m++)
        for (int block = 0; block < 2; block++)
          for (int row = 0; row < T; row++) {
            const float *x = (const float *)b.x[m][block], *dy = (const float *)b.dx[m][block + 1];
            want += (double)dy[row * C + i] * x[row * C + k];
            size += fabs((double)dy[row * C + i] * x[row * C + k]);
          }
      assert_true(fabs(sum[i * C + k] - want) <= 1e-6 * size);
    }
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

/* Blocks are small, so one thread: otherwise starting threads takes most of the time. */
static int setup(void **state) {
  rfr_ctx_options o = rfr_ctx_options_default();
  (void)state;
  o.threads = 1;
  return rfr_ctx_create(&o, &ctx) == RFR_OK ? 0 : -1;
}

#define on_one_thread(f) cmocka_unit_test_setup_teardown(f, setup, rft_context_teardown)

int main(void) {
  const struct CMUnitTest tests[] = {
      on_one_thread(test_generators),  on_one_thread(test_frozen),           on_one_thread(test_hooks),
      on_one_thread(test_order_lists), on_one_thread(test_random_schedules), on_one_thread(test_slots),
      on_one_thread(test_blocks),      on_one_thread(test_block_validity),   on_one_thread(test_inference_between),
      on_one_thread(test_tied)};
  return cmocka_run_group_tests_name("graphs under schedules", tests, NULL, NULL);
}
