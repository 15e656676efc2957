/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench: the time of a replayed training step of a built-in configuration, in total and per op. Reports the
 * median of many steps, since other work on the machine distorts the mean.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "compile_time.h"
#include "op_times.h"

static rfr_status time_steps(rfr_run *run, int64_t steps, double *median, int *n) {
  enum { MOST = 4096 };
  double *seconds = malloc(MOST * sizeof *seconds);
  if (!seconds) return RFR_NO_MEMORY;
  rfr_status s = RFR_OK;
  const double warm = cli_now();
  do s = rfr_run_step(run);
  while (s == RFR_OK && cli_now() - warm < 1.0);
  const double start = cli_now();
  for (*n = 0; s == RFR_OK && *n < MOST;) {
    const double before = cli_now();
    s = rfr_run_step(run);
    seconds[(*n)++] = cli_now() - before;
    if (steps > 0 ? *n >= steps : cli_now() - start >= 5.0 && *n >= 5) break;
  }
  if (s == RFR_OK) *median = cli_median(seconds, *n);
  free(seconds);
  return s;
}

typedef struct result {
  const cli_builtin *what;
  double seconds; /* seconds of a step */
  int n;          /* number of timed steps */
  op_times times;
  cli_ceilings ceilings;
  op_row *kinds;
  int n_kinds;
} result;

/* Prints how a GPU's memory is used; prints nothing on the CPU. */
static void print_memory(rfr_run *run) {
  rfr_memory_use u;
  char a[5][32];
  if (rfr_programs_memory_use(rfr_run_programs(run), &u) != RFR_OK || u.taken == 0) return;
  const int64_t rest = u.taken - u.libraries - u.arena - u.kernels - u.graphs;
  printf("  device memory: arena %s, libraries %s, kernels %s, graphs %s, other %s\n", cli_bytes(a[0], u.arena),
         cli_bytes(a[1], u.libraries), cli_bytes(a[2], u.kernels), cli_bytes(a[3], u.graphs), cli_bytes(a[4], rest));
}

static void memory_json(json *j, rfr_run *run) {
  rfr_memory_use u;
  if (rfr_programs_memory_use(rfr_run_programs(run), &u) != RFR_OK || u.taken == 0) return;
  json_begin(j, "device_memory", '{');
  json_int(j, "libraries", u.libraries);
  json_int(j, "arena", u.arena);
  json_int(j, "kernels", u.kernels);
  json_int(j, "graphs", u.graphs);
  json_int(j, "taken", u.taken);
  json_end(j, '}');
}

static void print_json(cli *c, rfr_run *run, const result *r, const rfr_run_info *info, const rfr_plan_summary *sum) {
  char device[160];
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "name", r->what->name);
  json_text(&j, "device", cli_device(c, device));
  json_text(&j, "dtype", rfr_dtype_name(info->dtype));
  json_double(&j, "ms_per_step", 1e3 * r->seconds);
  json_double(&j, "tokens_per_second", (double)info->tokens_per_step / r->seconds);
  json_double(&j, "flops_per_step", info->flops_per_step);
  json_int(&j, "steps", r->n);
  json_int(&j, "planned_bytes", sum->planned_bytes);
  json_int(&j, "touched_bytes", rfr_programs_touched_bytes(rfr_run_programs(run)));
  json_int(&j, "transient_planned_bytes", sum->transient_planned_bytes);
  json_int(&j, "transient_lower_bound_bytes", sum->transient_lower_bound_bytes);
  memory_json(&j, run);
  const compile_time compiled = compile_time_of(run);
  compile_time_json(&j, &compiled);
  ceilings_json(&j, &r->ceilings);
  json_int(&j, "profiled_steps", r->times.steps);
  json_int(&j, "profiled_ops", r->times.n);
  op_rows_json(&j, "kinds", r->kinds, r->n_kinds, INT_MAX);
  json_end(&j, '}');
  putchar('\n');
}

static void print_result(cli *c, rfr_run *run, const result *r) {
  char device[160], a[32];
  rfr_run_info info;
  rfr_plan_summary sum = {0};
  rfr_run_get_info(run, &info);
  rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), &sum);
  if (c->json) {
    print_json(c, run, r, &info, &sum);
    return;
  }
  printf("%s (%s), %s, %s\n", r->what->name, r->what->what, rfr_dtype_name(info.dtype), cli_device(c, device));
  printf("  %.2f ms per step (median of %d), %.0f tokens/s, %.1f GFLOP/s, %s planned\n", 1e3 * r->seconds, r->n,
         (double)info.tokens_per_step / r->seconds, 1e-9 * info.flops_per_step / r->seconds,
         cli_bytes(a, sum.planned_bytes));
  print_memory(run);
  const compile_time compiled = compile_time_of(run);
  printf("  compiled in %.1f ms, %d ops, %.1f us each\n", compiled.ms, compiled.ops, compiled.us_per_op);
  ceilings_print(&r->ceilings);
  op_rows_print("op", r->kinds, r->n_kinds, INT_MAX);
  fflush(stdout);
}

static rfr_status bench(cli *c, const cli_builtin *b) {
  rfr_run *run = NULL;
  rfr_run_info info = {0};
  result r = {.what = b};
  rfr_status s = cli_open_timed(c, b, &run);
  if (s == RFR_OK) s = time_steps(run, c->steps, &r.seconds, &r.n);
  if (s == RFR_OK) s = op_times_take(run, NULL, c->steps, &r.times);
  if (s == RFR_OK) rfr_run_get_info(run, &info);
  if (s == RFR_OK) s = cli_ceilings_measure(c, info.dtype, r.times.op, r.times.n, &r.ceilings);
  if (s == RFR_OK) s = op_times_group(&r.times, BY_KIND, &r.ceilings, &r.kinds, &r.n_kinds);
  if (s == RFR_OK) print_result(c, run, &r);
  free(r.kinds);
  op_times_deinit(&r.times);
  rfr_run_close(run);
  return s;
}

rfr_status bench_dtype(const cli *c, rfr_dtype *out) {
  static const rfr_dtype dtypes[] = {RFR_F32, RFR_BF16, RFR_F16};
  rfr_machine m;
  const rfr_status s = rfr_machine_describe(c->ctx, &m);
  *out = m.best_dtype;
  if (s != RFR_OK || !c->dtype || strcmp(c->dtype, "auto") == 0) return s;
  for (int i = 0; i < 3; i++) {
    *out = dtypes[i];
    if (strcmp(c->dtype, rfr_dtype_name(dtypes[i])) == 0) return RFR_OK;
  }
  return RFR_INVALID; /* the option table allows no other type */
}

/* ---- the table of benchmarks ---- */

/* Options that a benchmark supports; benchmarks of configurations support all. */
enum { SET = 1, DTYPE = 2, EAGER = 4, STEPS = 8, THREADS = 16, DEVICE = 32 };

static const struct {
  const char *name;
  rfr_status (*run)(cli *c);
  bool large; /* runs only if it is named */
  int uses;
} others[] = {{"compile", bench_compile, false, SET | DTYPE | STEPS | THREADS | DEVICE},
              {"graphs", bench_graphs, false, DEVICE},
              {"replay", bench_replay, false, DEVICE},
              {"small", bench_small, false, DTYPE | THREADS | DEVICE},
              {"kernels", bench_kernels, true, DTYPE | THREADS | DEVICE}};
enum { N_OTHERS = sizeof others / sizeof others[0] };

bool bench_is_other(const char *name) {
  for (int i = 0; i < N_OTHERS; i++)
    if (strcmp(name, others[i].name) == 0) return true;
  return false;
}

/* Refuses options that the selected benchmarks do not use, and lists the benchmarks that do. */
static rfr_status check_options(const cli *c) {
  const int given = (c->sets.n > 0) * SET | (c->dtype != NULL) * DTYPE | c->eager * EAGER | (c->steps > 0) * STEPS |
                    (c->threads >= 0) * THREADS | (c->device != NULL) * DEVICE;
  static const char *const names[] = {"set", "dtype", "eager", "steps", "threads", "device"};
  char help[256] = "these use it:";
  int left = 0;
  for (int i = 0; i < N_OTHERS; i++)
    if (c->operand ? strcmp(c->operand, others[i].name) == 0 : !others[i].large) left |= given & ~others[i].uses;
  if (!left) return RFR_OK;
  int k = 0;
  while (!(left >> k & 1)) k++;
  const cli_builtin *b;
  for (int i = 0; (b = cli_builtin_at(i)); i++)
    snprintf(help + strlen(help), sizeof help - strlen(help), " %s,", b->name);
  for (int i = 0; i < N_OTHERS; i++)
    if (others[i].uses >> k & 1) snprintf(help + strlen(help), sizeof help - strlen(help), " %s,", others[i].name);
  help[strlen(help) - 1] = '\0';
  if (c->operand) return cli_usage(help, "refrain bench %s does not use --%s", c->operand, names[k]);
  return cli_usage(help, "not every benchmark uses --%s: name one", names[k]);
}

rfr_status cli_bench(cli *c) {
  rfr_status s = check_options(c);
  const cli_builtin *b;
  if (s != RFR_OK) return s;
  if (!c->operand && c->json)
    return cli_usage("refrain bench NAME --json", "--json prints one object: name a benchmark");
  bool found = false;
  for (int i = 0; s == RFR_OK && (b = cli_builtin_at(i)); i++) {
    if (c->operand ? strcmp(c->operand, b->name) != 0 : b->large) continue;
    found = true;
    s = bench(c, b);
  }
  for (int i = 0; s == RFR_OK && i < N_OTHERS; i++) {
    if (c->operand ? strcmp(c->operand, others[i].name) != 0 : others[i].large) continue;
    found = true;
    s = others[i].run(c);
  }
  if (found) return s;
  char help[256] = "choose from:";
  for (int i = 0; (b = cli_builtin_at(i)); i++)
    snprintf(help + strlen(help), sizeof help - strlen(help), " %s", b->name);
  for (int i = 0; i < N_OTHERS; i++) snprintf(help + strlen(help), sizeof help - strlen(help), " %s", others[i].name);
  return cli_usage(help, "there is no benchmark %s", c->operand);
}
