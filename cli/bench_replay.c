/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench replay: the cost of a replay beyond the kernels. A program of small ops is replayed on one thread,
 * alternating with a plain loop over the same kernel calls; the difference of the medians, per op, is the program's own
 * cost. The op is registered here, so that its kernel can record each call of a first run for the plain loop.
 *
 * On a GPU a replay is one launch of a graph. There it is the host's time of that launch, against the number of
 * nodes: with the device idle, and with the previous replay still running.
 */
#include <string.h>

#include "bench.h"
#include "refrain/op.h"
#include "refrain/ops.h"

enum { OPS = 1000, ELEMENTS = 64, ROUNDS = 501, TIMES = 10 };

typedef struct recorded {
  rfr_kernel_fn run[OPS];
  const rfr_call *call[OPS];
  int n;
  bool is_on;
} recorded;

static rfr_status kernel(const rfr_call *call) {
  recorded *k = call->user;
  const float *x = call->in[0].data;
  float *y = call->out[0].data;
  if (k->is_on && k->n < OPS) k->run[k->n] = kernel, k->call[k->n++] = call;
  for (int i = 0; i < ELEMENTS; i++) y[i] = x[i] * 0.5f + 1.0f;
  return RFR_OK;
}

static const char *shape(const rfr_infer *c) {
  c->out[0] = c->in[0];
  return NULL;
}

static rfr_status make(rfr_ctx *ctx, recorded *k, rfr_programs **out) {
  rfr_op_desc d = rfr_op_desc_default();
  const rfr_op *op;
  rfr_trace *t = NULL;
  d.name = "bench.step", d.operands = "x", d.results = "y", d.shape = shape, d.cpu = kernel, d.user = k;
  rfr_status s = rfr_op_register(ctx, &d, &op);
  if (s == RFR_OK) s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){ELEMENTS}));
  for (int i = 0; i < OPS; i++) x = rfr_record(t, op, 1, &x, NULL, NULL);
  rfr_output(t, "y", x);
  s = rfr_trace_finish(t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, out);
  rfr_trace_destroy(t);
  return s;
}

static rfr_status run_plain(const recorded *k) {
  rfr_status s = RFR_OK;
  for (int i = 0; i < k->n && s == RFR_OK; i++) s = k->run[i](k->call[i]);
  return s;
}

/* Medians of the seconds per op. */
static rfr_status measure(rfr_programs *p, recorded *k, double *replayed, double *plain) {
  double replays[ROUNDS], loops[ROUNDS];
  k->is_on = true;
  rfr_status s = rfr_program_run(p, 0);
  k->is_on = false;
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  for (int r = 0; r < ROUNDS && s == RFR_OK; r++) {
    const double start = cli_now();
    for (int i = 0; i < TIMES && s == RFR_OK; i++) s = rfr_program_replay(p, 0, NULL, 0);
    const double middle = cli_now();
    for (int i = 0; i < TIMES && s == RFR_OK; i++) s = run_plain(k);
    replays[r] = (middle - start) / TIMES / OPS;
    loops[r] = (cli_now() - middle) / TIMES / OPS;
  }
  *replayed = s == RFR_OK ? cli_median(replays, ROUNDS) : 0;
  *plain = s == RFR_OK ? cli_median(loops, ROUNDS) : 0;
  return s;
}

/* ---- on a device ---- */

typedef struct launch {
  int nodes;
  double idle[2], busy[2]; /* host seconds with the device idle and busy: median and 10th percentile */
  double node;             /* seconds per node */
} launch;

/* A chain of ops that no pass shortens. */
static rfr_status make_chain(rfr_ctx *ctx, int nodes, rfr_programs **out) {
  rfr_trace *t = NULL;
  rfr_compile_options o = rfr_compile_options_default();
  o.fuse = 0;
  o.keep_traces = 0;
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){ELEMENTS}));
  for (int i = 0; i < nodes; i++) x = rfr_scale(t, x, 1.0 + 1e-6 * (i + 1), RFR_NONE);
  rfr_output(t, "y", x);
  s = rfr_trace_finish(t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, out);
  rfr_trace_destroy(t);
  return s;
}

static rfr_status timed_replay(rfr_programs *p, double *seconds) {
  const double start = cli_now();
  rfr_status s = rfr_program_replay(p, 0, NULL, 0);
  *seconds = cli_now() - start;
  return s;
}

static rfr_status measure_launches(rfr_programs *p, launch *l) {
  double idle[ROUNDS] = {0}, busy[ROUNDS] = {0}, both[ROUNDS] = {0};
  rfr_status s = rfr_program_capture(p, 0);
  for (int r = -TIMES; r < ROUNDS && s == RFR_OK; r++) { /* the first ones are a warm-up */
    const int i = r < 0 ? 0 : r;
    const double start = cli_now();
    s = timed_replay(p, &idle[i]);
    if (s == RFR_OK) s = timed_replay(p, &busy[i]);
    if (s == RFR_OK) s = rfr_programs_wait(p);
    both[i] = cli_now() - start;
  }
  l->idle[0] = cli_median(idle, ROUNDS), l->idle[1] = idle[ROUNDS / 10]; /* sorted now */
  l->busy[0] = cli_median(busy, ROUNDS), l->busy[1] = busy[ROUNDS / 10];
  l->node = cli_median(both, ROUNDS) / 2 / l->nodes;
  return s;
}

static void print_launches(cli *c, const launch *l, int n) {
  char device[160];
  cli_device(c, device);
  if (!c->json) {
    printf("replay (a chain of ops of %d elements as one graph), %s\n", ELEMENTS, device);
    printf("  %8s %26s %26s %12s\n", "nodes", "host us: idle, 10th pct", "busy, 10th pct", "us per node");
    for (int i = 0; i < n; i++)
      printf("  %8d %17.2f %8.2f %17.2f %8.2f %12.3f\n", l[i].nodes, 1e6 * l[i].idle[0], 1e6 * l[i].idle[1],
             1e6 * l[i].busy[0], 1e6 * l[i].busy[1], 1e6 * l[i].node);
    return;
  }
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "name", "replay");
  json_text(&j, "device", device);
  json_begin(&j, "launches", '[');
  for (int i = 0; i < n; i++) {
    json_begin(&j, NULL, '{');
    json_int(&j, "nodes", l[i].nodes);
    json_double(&j, "host_us_idle", 1e6 * l[i].idle[0]);
    json_double(&j, "host_us_idle_tenth", 1e6 * l[i].idle[1]);
    json_double(&j, "host_us_busy", 1e6 * l[i].busy[0]);
    json_double(&j, "host_us_busy_tenth", 1e6 * l[i].busy[1]);
    json_double(&j, "us_per_node", 1e6 * l[i].node);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
}

static rfr_status bench_launches(cli *c) {
  launch launches[] = {{.nodes = 1000}, {.nodes = 5000}, {.nodes = 10000}};
  enum { N = sizeof launches / sizeof launches[0] };
  rfr_status s = RFR_OK;
  for (int i = 0; i < N && s == RFR_OK; i++) {
    rfr_programs *p = NULL;
    s = make_chain(c->ctx, launches[i].nodes, &p);
    if (s == RFR_OK) s = measure_launches(p, &launches[i]);
    rfr_programs_destroy(p);
  }
  if (s == RFR_OK) print_launches(c, launches, N);
  return s;
}

/* ---- the benchmark ---- */

rfr_status bench_replay(cli *c) {
  static recorded k; /* too large for the stack; benchmarks run one at a time */
  double replayed = 0, plain = 0;
  rfr_ctx *ctx = NULL;
  rfr_programs *p = NULL;
  rfr_machine m;
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_status s = rfr_machine_describe(c->ctx, &m);
  if (s == RFR_OK && strcmp(m.device, "cpu") != 0) return bench_launches(c);
  o.threads = 1;
  memset(&k, 0, sizeof k);
  if (s == RFR_OK) s = rfr_ctx_create(&o, &ctx);
  if (s == RFR_OK) s = make(ctx, &k, &p);
  if (s == RFR_OK) s = measure(p, &k, &replayed, &plain);
  rfr_programs_destroy(p);
  rfr_ctx_destroy(ctx);
  if (s != RFR_OK) return s;
  const double cost = 1e6 * (replayed - plain);
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "name", "replay");
    json_int(&j, "ops", k.n);
    json_double(&j, "replay_us_per_op", 1e6 * replayed);
    json_double(&j, "loop_us_per_op", 1e6 * plain);
    json_double(&j, "cost_us_per_op", cost);
    json_end(&j, '}');
    putchar('\n');
  } else {
    printf("replay (%d ops of %d elements, one thread)\n"
           "  %.4f us per op replayed, %.4f in a plain loop over the same calls: %.4f us of its own\n",
           k.n, ELEMENTS, 1e6 * replayed, 1e6 * plain, cost);
  }
  return RFR_OK;
}
