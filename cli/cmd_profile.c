/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain profile: the time of every op of a training step, on random tokens. The tables show medians over the steps.
 * --trace writes the step of median total time in the trace event format that Perfetto and Chrome open: one lane per
 * phase, times in microseconds. --write-costs writes the costs of a layer for schedules and plans.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "op_times.h"
#include "profile_stages.h"

enum { TOP = 20 };
/* A line says so if a median step takes this many times the sum of the medians of the ops. */
static const double DISTURBED = 1.25;

static const char *const phases[] = {
#define X(e, name) name,
    RFR_PHASES(X)
#undef X
};

/* ---- the trace ---- */

static void put_lane(json *j, int lane, const char *name) {
  json_begin(j, NULL, '{');
  json_text(j, "name", "thread_name");
  json_text(j, "ph", "M");
  json_int(j, "pid", 1);
  json_int(j, "tid", lane);
  json_begin(j, "args", '{');
  json_text(j, "name", name);
  json_end(j, '}');
  json_end(j, '}');
}

/* The caller adds the arguments of the event, and ends them and it. */
static void begin_event(json *j, const char *name, int lane, double start, double seconds) {
  json_begin(j, NULL, '{');
  json_text(j, "name", name);
  json_text(j, "ph", "X");
  json_int(j, "pid", 1);
  json_int(j, "tid", lane);
  json_double(j, "ts", 1e6 * start);
  json_double(j, "dur", 1e6 * seconds);
  json_begin(j, "args", '{');
}

static void put_trace(FILE *f, const op_times *t, const char *name) {
  json j = {.f = f};
  const rfr_op_time *op = t->all + (size_t)t->middle * (size_t)t->n, *last = &op[t->n - 1];
  json_begin(&j, NULL, '{');
  json_text(&j, "displayTimeUnit", "ms");
  json_begin(&j, "traceEvents", '[');
  put_lane(&j, 0, "step");
  for (int i = 0; i < (int)(sizeof phases / sizeof *phases); i++) put_lane(&j, 1 + i, phases[i]);
  begin_event(&j, name, 0, 0, last->start + last->seconds);
  json_int(&j, "step", t->middle + 1);
  json_end(&j, '}');
  json_end(&j, '}');
  for (int i = 0; i < t->n; i++) {
    fputc('\n', f);
    begin_event(&j, t->what[i].name, 1 + (int)t->what[i].phase, op[i].start, op[i].seconds);
    json_int(&j, "op", op[i].op);
    json_text(&j, "layer", t->what[i].scope);
    json_int(&j, "microbatch", t->what[i].microbatch);
    json_text(&j, "kernel", op[i].kernel);
    json_double(&j, "bytes", op[i].bytes);
    json_double(&j, "flops", op[i].flops);
    json_end(&j, '}');
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  fputc('\n', f);
}

static rfr_status write_trace(const cli *c, const op_times *t) {
  FILE *f = fopen(c->trace, "wb");
  bool good = f != NULL;
  if (good) put_trace(f, t, c->operand);
  if (good && ferror(f)) good = false;
  if (f && fclose(f) != 0) good = false;
  return good ? RFR_OK : cli_cannot_write(c->trace);
}

/* ---- the tables ---- */

static rfr_status print_tables(const cli *c, const op_times *t, const cli_ceilings *ceilings, const char *dtype) {
  static const struct {
    op_group group;
    const char *heading, *key;
    int most;
  } tables[] = {{BY_OP, "op", "ops", TOP},
                {BY_KIND, "kind", "kinds", INT_MAX},
                {BY_LAYER, "layer", "layers", INT_MAX},
                {BY_PHASE, "phase", "phases", INT_MAX}};
  char device[160];
  json j = {.f = stdout};
  rfr_status s = RFR_OK;
  if (c->json) {
    json_begin(&j, NULL, '{');
    json_text(&j, "name", c->operand);
    json_text(&j, "device", cli_device(c, device));
    json_text(&j, "dtype", dtype);
    json_double(&j, "ms_per_step", 1e3 * t->seconds);
    json_int(&j, "profiled_steps", t->steps);
    json_int(&j, "profiled_ops", t->n);
    ceilings_json(&j, ceilings);
  } else {
    printf("%s, %s, %s\n  %.2f ms in %d ops (median of %d steps)\n", c->operand, dtype, cli_device(c, device),
           1e3 * t->seconds, t->n, t->steps);
    double sum = 0;
    for (int i = 0; i < t->n; i++) sum += t->op[i].seconds;
    if (t->seconds > DISTURBED * sum)
      printf("  the ops' own medians, below, sum to %.2f ms: other programs disturbed the steps\n", 1e3 * sum);
    ceilings_print(ceilings);
  }
  for (size_t i = 0; s == RFR_OK && i < sizeof tables / sizeof *tables; i++) {
    op_row *rows;
    int n;
    s = op_times_group(t, tables[i].group, ceilings, &rows, &n);
    if (s == RFR_OK && c->json) op_rows_json(&j, tables[i].key, rows, n, INT_MAX);
    else if (s == RFR_OK) putchar('\n'), op_rows_print(tables[i].heading, rows, n, tables[i].most);
    free(rows);
  }
  if (c->json) json_end(&j, '}'), putchar('\n');
  return s;
}

static rfr_status refuse(const char *name) {
  char help[256] = "give a configuration, or one of small";
  const cli_builtin *b;
  for (int i = 0; (b = cli_builtin_at(i)); i++)
    snprintf(help + strlen(help), sizeof help - strlen(help), ", %s", b->name);
  return cli_usage(help, "the benchmark %s has no step to profile; refrain bench %s times it", name, name);
}

/* `small`: one layer, without a run. */
static rfr_status profile_small(cli *c, op_times *t, rfr_dtype *dtype, rfr_programs **p) {
  if (c->write_costs) return cli_usage("give a configuration", "small is one layer without ends: it has no costs");
  if (c->sets.n > 0) return cli_usage("give a configuration", "small has no configuration that --set could change");
  const rfr_status s = bench_small_open(c, dtype, p);
  return s == RFR_OK ? op_times_take(NULL, *p, c->steps, t) : s;
}

static rfr_status profile_config(cli *c, op_times *t, rfr_dtype *dtype, rfr_run **run) {
  char *text = NULL;
  rfr_run_info info = {.size = sizeof info};
  const cli_builtin *known = cli_builtin_find(c->operand);
  rfr_status s = known ? RFR_OK : cli_read_config(c, &text);
  const cli_builtin file = {c->operand, "", text};
  if (s == RFR_OK) s = cli_open_timed(c, known ? known : &file, run);
  if (s == RFR_OK) s = op_times_take(*run, NULL, c->steps, t);
  if (s == RFR_OK) rfr_run_get_info(*run, &info);
  *dtype = info.dtype;
  free(text);
  return s;
}

/* Prints the step of all ranks, and the stages of a pipeline, instead of ops. */
static rfr_status profile_ranks(cli *c) {
  char *text = NULL;
  rfr_run *run = NULL;
  const cli_builtin *known = cli_builtin_find(c->operand);
  if (c->trace) return cli_usage("give --write-costs FILE, or one rank", "--trace has the ops of one rank");
  rfr_status s = known ? RFR_OK : cli_read_config(c, &text);
  const cli_builtin file = {c->operand, "", text};
  if (s == RFR_OK) s = cli_open_timed(c, known ? known : &file, &run);
  if (s == RFR_OK) s = cli_profile_stages(c, run);
  rfr_run_close(run);
  free(text);
  return s;
}

rfr_status cli_profile(cli *c) {
  rfr_run *run = NULL;
  rfr_programs *p = NULL;
  rfr_dtype dtype = RFR_F32;
  op_times t = {0};
  cli_ceilings ceilings;
  rfr_status s;
  if (c->ranks > 0 || cli_has_ranks(c)) return profile_ranks(c);
  if (strcmp(c->operand, "small") == 0) s = profile_small(c, &t, &dtype, &p);
  else if (bench_is_other(c->operand)) s = refuse(c->operand);
  else s = profile_config(c, &t, &dtype, &run);
  if (s == RFR_OK && c->trace) s = write_trace(c, &t);
  if (s == RFR_OK && c->write_costs) s = write_costs(c->write_costs, &t, run);
  if (s == RFR_OK) s = cli_ceilings_measure(c, dtype, t.op, t.n, &ceilings);
  if (s == RFR_OK) s = print_tables(c, &t, &ceilings, rfr_dtype_name(dtype));
  op_times_deinit(&t);
  rfr_programs_destroy(p);
  rfr_run_close(run);
  return s;
}
