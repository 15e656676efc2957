/* SPDX-License-Identifier: Apache-2.0
 *
 * Profiled steps, their medians, and tables of them. Medians are taken per op, so one disturbed step changes nothing.
 * The trace for a viewer is the step of median total time, unchanged.
 */
#include "op_times.h"

#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double cli_median(double *x, int n) {
  qsort(x, (size_t)n, sizeof *x, ascending);
  return x[n / 2];
}

/* ---- measuring ---- */

static double sum_of(const op_times *t, int step) {
  double sum = 0;
  for (int i = 0; i < t->n; i++) sum += t->all[(size_t)step * (size_t)t->n + (size_t)i].seconds;
  return sum;
}

static rfr_status take_medians(op_times *t) {
  double *x = malloc((size_t)t->steps * sizeof *x);
  if (!x) return RFR_NO_MEMORY;
  for (int i = 0; i < t->n; i++) {
    const rfr_op_time *first = &t->all[i];
    t->op[i] = *first;
    for (int s = 0; s < t->steps; s++) x[s] = first[(size_t)s * (size_t)t->n].start;
    t->op[i].start = cli_median(x, t->steps);
    for (int s = 0; s < t->steps; s++) x[s] = first[(size_t)s * (size_t)t->n].seconds;
    t->op[i].seconds = cli_median(x, t->steps);
  }
  for (int s = 0; s < t->steps; s++) x[s] = sum_of(t, s);
  t->seconds = cli_median(x, t->steps);
  for (int s = 0; s < t->steps; s++)
    if (sum_of(t, s) == t->seconds) t->middle = s;
  free(x);
  return RFR_OK;
}

/* One profiled step of a run, or one profiled execution of program 0 where there is no run. */
static rfr_status profile_once(rfr_run *run, rfr_programs *p, rfr_op_time *times, int max, int *n) {
  return run ? rfr_run_profile(run, times, max, n) : rfr_program_profile(p, 0, times, max, n);
}

rfr_status op_times_take(rfr_run *run, rfr_programs *p, int64_t steps, op_times *t) {
  enum { MOST = 1000 };
  const int program = run ? rfr_run_program_index(run, RFR_RUN_TRAIN) : 0;
  memset(t, 0, sizeof *t);
  rfr_status s = profile_once(run, p, NULL, 0, &t->n);
  if (s != RFR_OK) return s;
  const size_t n = (size_t)t->n + 1, most = steps > 0 && steps < MOST ? (size_t)steps : MOST;
  t->all = malloc(most * n * sizeof *t->all); /* only the pages in use are touched */
  t->op = calloc(n, sizeof *t->op);
  t->what = calloc(n, sizeof *t->what);
  if (!t->all || !t->op || !t->what) return RFR_NO_MEMORY;
  s = run ? rfr_run_step(run) : rfr_program_run(p, 0); /* warm-up; in a run it also initializes the state */
  const double start = cli_now();
  while (s == RFR_OK && t->steps < (int)most && (steps > 0 || t->steps < 5 || cli_now() - start < 2.0)) {
    s = profile_once(run, p, t->all + (size_t)t->steps * (size_t)t->n, t->n, &t->n);
    t->steps++;
  }
  for (int i = 0; s == RFR_OK && i < t->n; i++)
    s = rfr_program_op(run ? rfr_run_programs(run) : p, program, t->all[i].op, &t->what[i]);
  return s == RFR_OK ? take_medians(t) : s;
}

void op_times_deinit(op_times *t) {
  free(t->all);
  free(t->op);
  free(t->what);
  memset(t, 0, sizeof *t);
}

/* ---- rows ---- */

static void name_of(const op_times *t, int i, op_group group, char *out, size_t size) {
  static const char *const phases[] = {
#define X(e, name) name,
      RFR_PHASES(X)
#undef X
  };
  const rfr_plan_op *op = &t->what[i];
  switch (group) {
    case BY_KIND: snprintf(out, size, "%s", op->name); break;
    case BY_PHASE: snprintf(out, size, "%s", phases[op->phase]); break;
    case BY_LAYER: snprintf(out, size, "%.*s", (int)strcspn(op->scope, "."), *op->scope ? op->scope : "-"); break;
    default:
      snprintf(out, size, "%d %s%s%s, %s", t->op[i].op, op->name, *op->scope ? " " : "", op->scope, phases[op->phase]);
      break;
  }
}

static int by_time(const void *a, const void *b) {
  const op_row *x = a, *y = b;
  if (x->seconds != y->seconds) return x->seconds < y->seconds ? 1 : -1;
  return strcmp(x->name, y->name);
}

rfr_status op_times_group(const op_times *t, op_group group, const cli_ceilings *ceilings, op_row **out, int *n) {
  op_row *rows = calloc((size_t)t->n + 1, sizeof *rows);
  *n = 0;
  *out = rows;
  if (!rows) return RFR_NO_MEMORY;
  for (int i = 0; i < t->n; i++) {
    char name[sizeof rows->name];
    int k = group == BY_OP ? *n : 0;
    name_of(t, i, group, name, sizeof name);
    /* two kernels of one kind get two rows, to show which one is slow */
    while (k < *n &&
           (strcmp(rows[k].name, name) != 0 || (group == BY_KIND && strcmp(rows[k].kernel, t->op[i].kernel) != 0)))
      k++;
    op_row *r = &rows[k];
    if (k == *n) {
      memcpy(r->name, name, sizeof name);
      r->kernel = t->op[i].kernel;
      ++*n;
    }
    if (strcmp(r->kernel, t->op[i].kernel) != 0) r->kernel = "";
    r->calls++;
    r->seconds += t->op[i].seconds;
    r->flops += t->op[i].flops;
    r->bytes += t->op[i].bytes;
    r->least += cli_ceilings_least(ceilings, &t->op[i]);
  }
  if (group != BY_PHASE) qsort(rows, (size_t)*n, sizeof *rows, by_time);
  return RFR_OK;
}

static void add_row(op_row *sum, const op_row *r) {
  sum->calls += r->calls;
  sum->seconds += r->seconds;
  sum->flops += r->flops;
  sum->bytes += r->bytes;
  sum->least += r->least;
}

static void print_row(const op_row *r, double all) {
  printf("  %-42s %-7s %6d %10.3f %6.1f%% %9.1f %8.2f %8.0f%%\n", r->name, r->kernel, r->calls, 1e3 * r->seconds,
         all > 0 ? 100 * r->seconds / all : 0.0, r->seconds > 0 ? 1e-9 * r->flops / r->seconds : 0.0,
         r->seconds > 0 ? 1e-9 * r->bytes / r->seconds : 0.0, r->seconds > 0 ? 100 * r->least / r->seconds : 0.0);
}

void op_rows_print(const char *heading, const op_row *rows, int n, int most) {
  op_row sum = {.name = "all", .kernel = ""}, rest = {.kernel = ""};
  for (int i = 0; i < n; i++) add_row(&sum, &rows[i]);
  printf("  %-42s %-7s %6s %10s %7s %9s %8s %9s\n", heading, "kernel", "calls", "ms", "share", "GFLOP/s", "GB/s",
         "roofline");
  for (int i = 0; i < n; i++) {
    if (i < most) print_row(&rows[i], sum.seconds);
    else add_row(&rest, &rows[i]);
  }
  snprintf(rest.name, sizeof rest.name, "%d more", n - most);
  if (n > most) print_row(&rest, sum.seconds);
  print_row(&sum, sum.seconds);
}

void op_rows_json(json *j, const char *key, const op_row *rows, int n, int most) {
  double all = 0;
  for (int i = 0; i < n; i++) all += rows[i].seconds;
  json_begin(j, key, '[');
  for (int i = 0; i < n && i < most; i++) {
    const op_row *r = &rows[i];
    json_begin(j, NULL, '{');
    json_text(j, "name", r->name);
    json_text(j, "kernel", r->kernel);
    json_int(j, "calls", r->calls);
    json_double(j, "ms", 1e3 * r->seconds);
    json_double(j, "share", all > 0 ? r->seconds / all : 0.0);
    json_double(j, "flops", r->flops);
    json_double(j, "bytes", r->bytes);
    json_double(j, "roofline", r->seconds > 0 ? r->least / r->seconds : 0.0);
    json_end(j, '}');
  }
  json_end(j, ']');
}

/* ---- ceilings ---- */

void ceilings_print(const cli_ceilings *c) {
  printf("  ceilings, measured now:");
  for (int t = 0; t < RFR_DTYPE_COUNT; t++)
    if (t != RFR_F32 && c->product[t] > 0)
      printf(" %.0f GFLOP/s in %s,", 1e-9 * c->product[t], rfr_dtype_name((rfr_dtype)t));
  printf(
      " %.0f GFLOP/s in f32, %.1f GB/s read and written\n"
      "  roofline: the least time, max(FLOPs / ceiling, bytes / ceiling), of the time; more than 100%%: from a cache\n",
      1e-9 * c->product[RFR_F32], 1e-9 * c->stream);
}

void ceilings_json(json *j, const cli_ceilings *c) {
  json_begin(j, "ceilings", '{');
  json_text(j, "dtype", rfr_dtype_name(c->dtype));
  json_double(j, "flops_per_second", c->product[c->dtype]);
  json_double(j, "flops_per_second_f32", c->product[RFR_F32]);
  if (c->product[RFR_E4M3] > 0) json_double(j, "flops_per_second_fp8", c->product[RFR_E4M3]);
  json_double(j, "bytes_per_second", c->stream);
  json_end(j, '}');
}
