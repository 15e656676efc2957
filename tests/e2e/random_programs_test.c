/* SPDX-License-Identifier: Apache-2.0
 *
 * Random programs: small graphs of GEMMs, norms, views and state updates over shared and
 * per-microbatch values, compiled with all options that must not change results. Pruning,
 * recompute, debug mode and replay change no bit; the fuse pass may only round differently.
 * Gradients are also compared with a finite difference of the loss along a random direction,
 * which does not depend on autodiff.
 *
 * RANDOM_PROGRAMS=first:count runs other seeds than the default ones.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "core/rng.h"
#include "exec/exec.h"

static rfr_ctx *ctx;
static uint64_t state_of_draw, seed_now;

static unsigned draw(unsigned n) {
  rfi_u32x4 r = rfi_draw4(rfi_stream_key(seed_now, 1), state_of_draw++, 0, 0, 0);
  return r.v[0] % n;
}

#define OK(call)                                                                                        \
  do {                                                                                                  \
    if ((call) != RFR_OK)                                                                               \
      fail_msg("program %llu: %s: %s", (unsigned long long)seed_now, #call, rfr_last_error()->message); \
  } while (0)

/* ---- one random program ---- */

enum { MOST_VALUES = 160, MOST_WEIGHTS = 5, MOST_MICROBATCHES = 3 };

/* A value with its dependencies: bit k for weight k; DETOURS for paths without a gradient. */
typedef struct node {
  rfr_value v;
  unsigned reach;
} node;

typedef struct program {
  rfr_trace *t;
  node pool[MOST_VALUES];
  int n, n_shared;
  rfr_value weight[MOST_WEIGHTS];
  bool trainable[MOST_WEIGHTS];
  int n_weights, n_outputs;
  rfr_value step;
  bool smooth; /* no dropout, max or detach, so that finite differences are valid */
} program;

static node pick(program *g) { return g->pool[draw((unsigned)g->n)]; }

static void keep(program *g, rfr_value v, unsigned reach) {
  rfr_type type = rfr_value_type(g->t, v);
  if (type.rank == 1) v = rfr_reshape(g->t, v, 2, ((int64_t[]){1, type.shape[0]}));
  if (g->n < MOST_VALUES) g->pool[g->n++] = (node){v, reach};
}

static bool pair(program *g, int ka, int kb, node *a, node *b) {
  for (int tries = 0; tries < 24; tries++) {
    *a = pick(g);
    *b = pick(g);
    rfr_type x = rfr_value_type(g->t, a->v), y = rfr_value_type(g->t, b->v);
    if (ka < 0 ? x.shape[0] == y.shape[0] && x.shape[1] == y.shape[1] : x.shape[ka] == y.shape[kb]) return true;
  }
  return false;
}

static node find_vector(program *g, int64_t n) {
  for (int i = 0; i < 24; i++) {
    node b = pick(g);
    rfr_type x = rfr_value_type(g->t, b.v);
    if (x.shape[0] == 1 && x.shape[1] == n) return (node){rfr_reshape(g->t, b.v, 1, &n), b.reach};
  }
  return (node){rfr_fill(g->t, 0.75, RFR_F32, 1, &n), 0};
}

static void random_op(program *g) {
  rfr_trace *t = g->t;
  node a = pick(g), b;
  rfr_type x = rfr_value_type(t, a.v);
  int64_t rows = x.shape[0], columns = x.shape[1];
  switch (draw(22)) {
    case 0:
    case 1:
      if (pair(g, -1, 0, &a, &b)) keep(g, rfr_scale(t, rfr_add(t, a.v, b.v), 0.7, RFR_NONE), a.reach | b.reach);
      break;
    case 2:
      if (pair(g, -1, 0, &a, &b)) keep(g, rfr_add(t, a.v, b.v), a.reach | b.reach);
      break;
    case 3:
      if (pair(g, -1, 0, &a, &b)) keep(g, rfr_mul(t, a.v, b.v), a.reach | b.reach);
      break;
    case 4:
    case 5:
    case 6:
    case 7: {
      int ta = (int)draw(2), tb = (int)draw(2);
      if (!pair(g, ta ? 0 : 1, tb ? 1 : 0, &a, &b)) break;
      rfr_type y = rfr_value_type(t, b.v);
      node bias = {RFR_NONE, 0};
      if (draw(3) == 0) bias = find_vector(g, y.shape[tb ? 0 : 1]);
      rfr_value p = rfr_matmul(t, a.v, b.v, bias.v, ta, tb, RFR_F32);
      unsigned reach = a.reach | b.reach | bias.reach;
      if (draw(2)) keep(g, rfr_scale(t, p, 0.4, RFR_NONE), reach);
      else keep(g, rfr_silu(t, p), reach);
      break;
    }
    case 8: keep(g, draw(2) ? rfr_silu(t, a.v) : rfr_softcap(t, a.v, 1.5), a.reach); break;
    case 9: keep(g, rfr_gelu(t, a.v, (int)draw(2)), a.reach); break;
    case 10:
      if (!pair(g, -1, 0, &a, &b)) break;
      if (draw(2)) {
        keep(g, rfr_swiglu(t, a.v, b.v), a.reach | b.reach);
      } else {
        node weight = find_vector(g, rfr_value_type(t, a.v).shape[0]);
        if (weight.v >= 0) keep(g, rfr_swiglu_weighted(t, a.v, b.v, weight.v), a.reach | b.reach | weight.reach);
      }
      break;
    case 11: keep(g, rfr_transpose(t, a.v, 0, 1), a.reach); break;
    case 12: keep(g, rfr_reshape(t, a.v, 2, ((int64_t[]){columns, rows})), a.reach); break;
    case 13:
    case 14: {
      int axis = (int)draw(2);
      int64_t n = x.shape[axis], start = (int64_t)draw((unsigned)n + 1),
              count = (int64_t)draw((unsigned)(n - start) + 1);
      if (count == 0 && draw(8)) break;
      keep(g, rfr_slice(t, a.v, axis, start, count), a.reach);
      break;
    }
    case 15:
      if (rows == 1) keep(g, rfr_expand(t, a.v, 0, 1 + (int64_t)draw(4)), a.reach);
      else if (columns == 1) keep(g, rfr_expand(t, a.v, 1, 1 + (int64_t)draw(4)), a.reach);
      break;
    case 16: {
      int axis = (int)draw(2);
      if (!pair(g, !axis, !axis, &a, &b)) break;
      if (rfr_value_type(t, a.v).shape[axis] + rfr_value_type(t, b.v).shape[axis] > 12) break;
      keep(g, rfr_concat(t, 2, ((rfr_value[]){a.v, b.v}), axis), a.reach | b.reach);
      break;
    }
    case 17:
      keep(g, draw(2) ? rfr_mean(t, a.v, (int)draw(2)) : rfr_scale(t, rfr_sum(t, a.v, (int)draw(2)), 0.3, RFR_NONE),
           a.reach);
      break;
    case 18: {
      node w = find_vector(g, columns);
      keep(g, rfr_rmsnorm(t, a.v, w.v, 0.1), a.reach | w.reach);
      break;
    }
    case 19: {
      node w = find_vector(g, columns), c = draw(2) ? find_vector(g, columns) : (node){RFR_NONE, 0};
      keep(g, rfr_layernorm(t, a.v, w.v, c.v, 0.1), a.reach | w.reach | c.reach);
      break;
    }
    case 20:
      if (g->smooth) keep(g, rfr_copy(t, a.v), a.reach);
      else if (draw(2)) keep(g, rfr_dropout(t, a.v, g->step, 0.25, 0), a.reach);
      else keep(g, rfr_detach(t, a.v), 0);
      break;
    default:
      if (g->n_outputs < 4) {
        char name[16];
        snprintf(name, sizeof name, "o%d", g->n_outputs++);
        /* an update may overwrite a weight, and views of it, before the end of the trace */
        const rfi_value *shown = &t->values[a.v];
        bool copied = draw(2) || !rfi_is_dense(shown) || t->values[shown->base].op < 0;
        rfr_output(t, name, copied ? rfr_copy(t, a.v) : a.v);
      }
  }
}

static void random_ops(program *g, int n) {
  for (int i = 0; i < n; i++) random_op(g);
}

/* A scalar from a value, with its dependencies. */
static node number(program *g, node a) {
  return (node){rfr_scale(g->t, rfr_sum(g->t, a.v, -1), 0.1, RFR_NONE), a.reach};
}

static rfr_trace *random_program(bool smooth) {
  static const int64_t sizes[] = {1, 2, 3, 4, 6};
  program g = {.smooth = smooth};
  OK(rfr_trace_create(ctx, &g.t));
  rfr_trace *t = g.t;
  g.step = rfr_step_block(t);
  g.n_weights = 1 + (int)draw(MOST_WEIGHTS);
  for (int i = 0; i < g.n_weights; i++) {
    char name[8];
    snprintf(name, sizeof name, "w%d", i);
    g.trainable[i] = draw(3) > 0;
    rfr_role role = g.trainable[i] ? draw(6) ? RFR_ROLE_TRAINABLE : RFR_ROLE_INPUT_GRAD
                    : draw(3)      ? RFR_ROLE_FROZEN
                                   : RFR_ROLE_CONST;
    int64_t shape[2] = {draw(4) ? sizes[draw(5)] : 1, sizes[draw(5)]};
    g.weight[i] = rfr_input(t, name, role, RFR_F32, 2, shape);
    keep(&g, g.weight[i], g.trainable[i] ? 1u << i : 0);
  }
  random_ops(&g, (int)draw(6));
  g.n_shared = g.n;
  int microbatches = 1 + (int)draw(MOST_MICROBATCHES);
  int64_t rows = draw(12) ? sizes[draw(5)] : 0, columns = sizes[draw(5)];
  bool same_code = draw(2);
  uint64_t from = state_of_draw;
  node loss[MOST_MICROBATCHES + 1];
  for (int m = 0; m < microbatches; m++) {
    char name[8];
    rfr_microbatch(t, m);
    g.n = g.n_shared;
    if (same_code) state_of_draw = from;
    snprintf(name, sizeof name, "x%d", m);
    keep(&g, rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){rows, columns})), 0);
    random_ops(&g, 3 + (int)draw(14));
    node a = number(&g, g.pool[g.n - 1]), b = number(&g, pick(&g)), c = number(&g, pick(&g));
    rfr_value l = rfr_add(t, a.v, b.v);
    if (draw(3) == 0) l = rfr_add(t, l, rfr_mul(t, l, c.v));
    else l = rfr_add(t, l, c.v);
    loss[m] = (node){l, a.reach | b.reach | c.reach};
  }
  rfr_microbatch(t, -1);
  node total = loss[0];
  for (int m = 1; m < microbatches; m++) total = (node){rfr_add(t, total.v, loss[m].v), total.reach | loss[m].reach};
  rfr_output(t, "loss", total.v);
  rfr_value gradient[MOST_WEIGHTS], lr = RFR_NONE;
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  for (int i = 0; i < g.n_weights; i++) {
    char name[8];
    gradient[i] = RFR_NONE;
    if (!(total.reach >> i & 1)) continue;
    gradient[i] = rfr_gradient(t, total.v, g.weight[i], RFR_F32);
    snprintf(name, sizeof name, "g%d", i);
    rfr_output(t, name, gradient[i]);
  }
  for (int i = 0; i < g.n_weights && !smooth; i++) {
    if (gradient[i] == RFR_NONE || t->values[g.weight[i]].role != RFR_ROLE_TRAINABLE || draw(2)) continue;
    if (lr == RFR_NONE) lr = rfr_lr_schedule(t, g.step, NULL);
    rfr_sgd(t, g.weight[i], gradient[i], RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0.0, 0.01, 1.0);
  }
  return t;
}

/* ---- ways to run it ---- */

static void fill_inputs(rfr_programs *p) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    float *f = x.data;
    if (x.type.dtype != RFR_F32) continue;
    for (int64_t k = 0; k < x.bytes / 4; k++) {
      rfi_u32x4 r = rfi_draw4(rfi_stream_key(seed_now, 2), (uint64_t)k, (uint32_t)i, 0, 0);
      f[k] = (float)(r.v[0] >> 8) / 8388608.0f - 1.0f;
    }
  }
}

static rfr_programs *compile(const rfr_trace *t, int prune, int fuse, int debug, rfr_recompute recompute) {
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  o.prune = prune;
  o.fuse = fuse;
  o.debug = debug;
  o.recompute = recompute;
  OK(rfr_compile(ctx, 1, &t, NULL, &o, &p));
  fill_inputs(p);
  OK(rfr_programs_load(p));
  return p;
}

static void compare_tensor(const rfr_tensor *a, const rfr_tensor *b, double tolerance, const char *what) {
  if (tolerance == 0 || a->type.dtype != RFR_F32) {
    if (a->bytes && memcmp(a->data, b->data, (size_t)a->bytes) != 0)
      fail_msg("program %llu, %s: %s has other bits", (unsigned long long)seed_now, what, a->name);
    return;
  }
  const float *x = a->data, *y = b->data;
  double size = 1;
  for (int64_t i = 0; i < a->bytes / 4; i++)
    if (fabs((double)x[i]) > size) size = fabs((double)x[i]);
  for (int64_t i = 0; i < a->bytes / 4; i++)
    if (!(fabs((double)x[i] - (double)y[i]) <= tolerance * size))
      fail_msg("program %llu, %s: %s[%lld] is %g, not %g", (unsigned long long)seed_now, what, a->name, (long long)i,
               (double)y[i], (double)x[i]);
}

static void compare(rfr_programs *a, rfr_programs *b, double tolerance, const char *what) {
  const rfr_trace *t = rfr_program_trace(a, 0, "record");
  rfr_tensor x, y;
  for (int i = 0; i < t->n_outputs; i++) {
    OK(rfr_program_output(a, 0, t->outputs[i].name, &x));
    OK(rfr_program_output(b, 0, t->outputs[i].name, &y));
    compare_tensor(&x, &y, tolerance, what);
  }
  for (int i = 0; rfr_programs_tensor_at(a, i, &x) == RFR_OK; i++) {
    OK(rfr_programs_tensor(b, x.name, &y));
    compare_tensor(&x, &y, tolerance, what);
  }
}

static void check_ways(uint64_t seed) {
  seed_now = seed;
  state_of_draw = 0;
  rfr_trace *t = random_program(false);
  OK(rfr_trace_finish(t));
  rfr_programs *plain = compile(t, 0, 0, 0, RFR_RECOMPUTE_KEEP);
  OK(rfr_program_run(plain, 0));
  static const struct {
    const char *what;
    int prune, fuse, debug;
    rfr_recompute recompute;
    double tolerance;
  } ways[] = {
      {"pruned", 1, 0, 0, RFR_RECOMPUTE_KEEP, 0},
      {"fused", 0, 1, 0, RFR_RECOMPUTE_KEEP, 1e-4},
      {"all passes", 1, 1, 0, RFR_RECOMPUTE_KEEP, 1e-4},
      {"recomputed", 1, 0, 0, RFR_RECOMPUTE_ALL, 0},
      {"fused, recomputed", 1, 1, 0, RFR_RECOMPUTE_ALL, 1e-4},
      {"debugged", 1, 1, 1, RFR_RECOMPUTE_ALL, 1e-4},
  };
  rfr_programs *fused = NULL;
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    rfr_programs *p = compile(t, ways[i].prune, ways[i].fuse, ways[i].debug, ways[i].recompute);
    OK(rfr_program_capture(p, 0));
    OK(rfr_program_replay(p, 0, NULL, 0));
    OK(rfr_programs_check(p));
    compare(plain, p, ways[i].tolerance, ways[i].what);
    if (ways[i].prune && ways[i].fuse && fused) compare(fused, p, 0, ways[i].what);
    if (ways[i].prune && ways[i].fuse && !fused) fused = p;
    else rfr_programs_destroy(p);
  }
  rfr_programs_destroy(fused);
  rfr_programs_destroy(plain);
  rfr_trace_destroy(t);
}

/* ---- gradients against finite differences ---- */

static double loss_of(rfr_programs *p) {
  rfr_tensor x;
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "loss", &x));
  return (double)*(float *)x.data;
}

static void move_along(rfr_programs *p, double by, double *slope) {
  rfr_tensor w, g;
  for (int i = 0; i < MOST_WEIGHTS; i++) {
    char name[8];
    snprintf(name, sizeof name, "w%d", i);
    if (rfr_programs_tensor(p, name, &w) != RFR_OK) continue;
    name[0] = 'g';
    bool wanted = rfr_program_output(p, 0, name, &g) == RFR_OK;
    if (!wanted) continue;
    for (int64_t k = 0; k < w.bytes / 4; k++) {
      rfi_u32x4 r = rfi_draw4(rfi_stream_key(seed_now, 3), (uint64_t)k, (uint32_t)i, 0, 0);
      double d = r.v[0] & 1 ? 1 : -1;
      if (slope) *slope += d * (double)((float *)g.data)[k];
      else ((float *)w.data)[k] += (float)(by * d);
    }
  }
}

/* Differences of f32 losses have large rounding errors, and rounding may make a kink anywhere. So the slope is measured
 * with two widths, and one of them must agree. */
static void check_slope(uint64_t seed) {
  seed_now = seed;
  state_of_draw = 0;
  rfr_trace *t = random_program(true);
  OK(rfr_trace_finish(t));
  rfr_programs *p = compile(t, 1, 1, 0, RFR_RECOMPUTE_KEEP);
  double base = loss_of(p), slope = 0, found[2];
  move_along(p, 0, &slope);
  bool agrees = false;
  for (int k = 0; k < 2; k++) {
    double eps = k ? 1.0 / 1024 : 1.0 / 128;
    fill_inputs(p);
    move_along(p, eps, NULL);
    double up = loss_of(p);
    fill_inputs(p);
    move_along(p, -eps, NULL);
    found[k] = (up - loss_of(p)) / (2 * eps);
    agrees = agrees || fabs(found[k] - slope) <= 2e-2 * (fabs(slope) + fabs(found[k])) + 4e-7 * (fabs(base) + 1) / eps;
  }
  if (!agrees)
    fail_msg("program %llu: the gradient says %g, differences of the loss say %g and %g", (unsigned long long)seed,
             slope, found[0], found[1]);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* ---- the tests ---- */

static void seeds(uint64_t *first, uint64_t *count) {
  const char *text = getenv("RANDOM_PROGRAMS");
  char *end;
  *first = 1;
  *count = 120;
  if (!text) return;
  *first = strtoull(text, &end, 10);
  if (*end == ':') *count = strtoull(end + 1, NULL, 10);
}

static void test_ways(void **state) {
  (void)state;
  uint64_t first, count;
  seeds(&first, &count);
  for (uint64_t i = 0; i < count; i++) check_ways(first + i);
}

static void test_slopes(void **state) {
  (void)state;
  uint64_t first, count;
  seeds(&first, &count);
  for (uint64_t i = 0; i < 2 * count; i++) check_slope(first + i);
}

static int setup(void **state) {
  (void)state;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  o.use_onednn = 0;
  return rfr_ctx_create(&o, &ctx) == RFR_OK ? 0 : -1;
}
static int teardown(void **state) {
  (void)state;
  int live = (int)rfr_ctx_get_stats(ctx).live_blocks;
  rfr_ctx_destroy(ctx);
  return live;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_ways, setup, teardown),
      cmocka_unit_test_setup_teardown(test_slopes, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
