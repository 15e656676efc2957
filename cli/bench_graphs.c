/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench graphs: the host's cost of replaying a graphed callable, beyond the launch itself. Callables of one
 * small op are replayed, forward and backward, alternating with captured programs of the same op; the difference of the
 * medians is the cost of order, signature and copies. Linked callables copy nothing; unlinked ones copy their input.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "refrain/graphs.h"
#include "refrain/ops.h"

enum { CALLABLES = 64, ELEMENTS = 64, ROUNDS = 401, WARM = 20 };

static const rfr_type type = {.dtype = RFR_F32, .rank = 1, .shape = {ELEMENTS}};

/* y = 1.5 x, whose gradient is the same op. */
static rfr_status record(rfr_ctx *ctx, rfr_role role, rfr_trace **out) {
  rfr_status s = rfr_trace_create(ctx, out);
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(*out, "x", role, RFR_F32, 1, type.shape);
  rfr_output(*out, "y", rfr_scale(*out, x, 1.5, RFR_NONE));
  return rfr_trace_finish(*out);
}

static rfr_status make_graphs(rfr_ctx *ctx, bool linked, rfr_graphs **out) {
  rfr_callable c[CALLABLES];
  rfr_callable_link link[CALLABLES];
  rfr_trace *t = NULL;
  rfr_status s = record(ctx, RFR_ROLE_INPUT_GRAD, &t);
  for (int i = 0; i < CALLABLES; i++) {
    link[i] = (rfr_callable_link){"x", i - 1, "y"};
    c[i] = rfr_callable_default();
    c[i].trace = t;
    c[i].links = &link[i], c[i].n_links = linked && i > 0;
  }
  if (s == RFR_OK) s = rfr_graphs_create(ctx, c, CALLABLES, NULL, out);
  rfr_trace_destroy(t);
  return s;
}

static rfr_status make_programs(rfr_ctx *ctx, rfr_programs **out) {
  rfr_trace *t[CALLABLES] = {NULL};
  rfr_status s = RFR_OK;
  for (int i = 0; i < CALLABLES && s == RFR_OK; i++) s = record(ctx, RFR_ROLE_INPUT, &t[i]);
  if (s == RFR_OK) s = rfr_compile(ctx, CALLABLES, (const rfr_trace *const *)t, NULL, NULL, out);
  for (int i = 0; i < CALLABLES && s == RFR_OK; i++) s = rfr_program_capture(*out, i);
  for (int i = 0; i < CALLABLES; i++) rfr_trace_destroy(t[i]);
  return s;
}

/* Median host seconds per replay. */
typedef struct times {
  double launch, forward[2], backward[2]; /* unlinked, linked */
} times;

typedef struct samples {
  double launch[ROUNDS], forward[2][ROUNDS], backward[2][ROUNDS];
} samples;

static rfr_status replay_programs(rfr_programs *p, double *seconds) {
  rfr_status s = RFR_OK;
  const double start = cli_now();
  for (int i = 0; i < CALLABLES && s == RFR_OK; i++) s = rfr_program_replay(p, i, NULL, 0);
  *seconds = (cli_now() - start) / CALLABLES;
  return s == RFR_OK ? rfr_programs_wait(p) : s;
}

static rfr_status replay_graphs(rfr_graphs *g, bool linked, double *forward, double *backward) {
  rfr_tensor y, dx;
  rfr_status s = rfr_graphs_begin_step(g, NULL, 0);
  if (s == RFR_OK) s = rfr_graphs_wait(g);
  double start = cli_now();
  rfr_binding in = {NULL, type, NULL};
  static const float zeros[ELEMENTS];
  in.data = zeros;
  for (int i = 0; i < CALLABLES && s == RFR_OK; i++) {
    s = rfr_graphs_forward(g, i, 0, &in, !linked || i == 0, &y, 1);
    in.data = y.data;
  }
  *forward = (cli_now() - start) / CALLABLES;
  if (s == RFR_OK) s = rfr_graphs_wait(g);
  start = cli_now();
  for (int i = CALLABLES - 1; i >= 0 && s == RFR_OK; i--) {
    s = rfr_graphs_backward(g, i, 0, &in, !linked || i == CALLABLES - 1, &dx, !linked || i == 0);
    if (!linked) in.data = dx.data;
  }
  *backward = (cli_now() - start) / CALLABLES;
  if (s == RFR_OK) s = rfr_graphs_wait(g);
  return s == RFR_OK ? rfr_graphs_end_step(g) : s;
}

static rfr_status measure(rfr_programs *p, rfr_graphs *const g[2], times *t) {
  static samples x; /* too large for the stack; benchmarks run one at a time */
  rfr_status s = RFR_OK;
  for (int r = -WARM; r < ROUNDS && s == RFR_OK; r++) {
    const int i = r < 0 ? 0 : r;
    s = replay_programs(p, &x.launch[i]);
    for (int linked = 0; linked < 2 && s == RFR_OK; linked++)
      s = replay_graphs(g[linked], linked, &x.forward[linked][i], &x.backward[linked][i]);
  }
  if (s != RFR_OK) return s;
  t->launch = cli_median(x.launch, ROUNDS);
  for (int linked = 0; linked < 2; linked++) {
    t->forward[linked] = cli_median(x.forward[linked], ROUNDS) - t->launch;
    t->backward[linked] = cli_median(x.backward[linked], ROUNDS) - t->launch;
  }
  return s;
}

static void print(cli *c, const times *t) {
  char device[160];
  cli_device(c, device);
  if (!c->json) {
    printf("graphs (%d callables of one op of %d elements, on one thread), %s\n", CALLABLES, ELEMENTS, device);
    printf("  host us: launch %.3f; added by forward and backward: linked %.3f %.3f, with copies %.3f %.3f\n",
           1e6 * t->launch, 1e6 * t->forward[1], 1e6 * t->backward[1], 1e6 * t->forward[0], 1e6 * t->backward[0]);
    return;
  }
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "name", "graphs");
  json_text(&j, "device", device);
  json_int(&j, "callables", CALLABLES);
  json_double(&j, "launch_us", 1e6 * t->launch);
  json_double(&j, "forward_linked_us", 1e6 * t->forward[1]);
  json_double(&j, "backward_linked_us", 1e6 * t->backward[1]);
  json_double(&j, "forward_copied_us", 1e6 * t->forward[0]);
  json_double(&j, "backward_copied_us", 1e6 * t->backward[0]);
  json_end(&j, '}');
  putchar('\n');
}

rfr_status bench_graphs(cli *c) {
  rfr_ctx *ctx = NULL;
  rfr_programs *p = NULL;
  rfr_graphs *g[2] = {NULL, NULL};
  times t = {0};
  rfr_machine m;
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_status s = rfr_machine_describe(c->ctx, &m);
  o.threads = 1; /* waking other threads is not part of a replay's cost */
  if (s == RFR_OK && strcmp(m.device, "cpu") == 0) s = rfr_ctx_create(&o, &ctx);
  rfr_ctx *on = ctx ? ctx : c->ctx;
  if (s == RFR_OK) s = make_programs(on, &p);
  for (int linked = 0; linked < 2 && s == RFR_OK; linked++) s = make_graphs(on, linked, &g[linked]);
  if (s == RFR_OK) s = measure(p, g, &t);
  if (s == RFR_OK) print(c, &t);
  for (int linked = 0; linked < 2; linked++) rfr_graphs_destroy(g[linked]);
  rfr_programs_destroy(p);
  rfr_ctx_destroy(ctx);
  return s;
}
