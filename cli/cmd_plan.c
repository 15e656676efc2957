/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain plan: every buffer of a program, the peak, the bytes of each kind, and whether they fit. Nothing is
 * allocated. A plan that does not fit also lists settings that need less, each with the bytes of its own plan.
 * Buffers whose names differ only in numbers ("layers.3", "layers.4") share a line unless --all is given. --frontier
 * prints memory against recomputation, --svg draws the plan, --values prints what can be watched.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct group {
  char name[160];
  const char *kind;
  int64_t bytes, most;
  int count, first, last;
} group;

/* Replaces numbers: "layers.12.mlp" becomes "layers.*.mlp". */
static void without_numbers(const char *name, char *out, size_t size) {
  size_t n = 0;
  for (const char *s = name; *s && n + 2 < size;) {
    if (isdigit((unsigned char)*s)) {
      while (isdigit((unsigned char)*s)) s++;
      out[n++] = '*';
    } else {
      out[n++] = *s++;
    }
  }
  out[n] = '\0';
}

static rfr_status collect(const rfr_programs *p, int program, const rfr_plan_summary *sum, bool all, group *groups,
                          int *n_groups) {
  int n = 0;
  for (int i = 0; i < sum->n_buffers; i++) {
    rfr_plan_buffer b;
    char name[sizeof groups->name];
    rfr_status s = rfr_program_plan_buffer(p, program, i, &b);
    if (s != RFR_OK) return s;
    if (all) snprintf(name, sizeof name, "%s", b.name);
    else without_numbers(b.name, name, sizeof name);
    int k = all ? n : 0;
    while (k < n && (strcmp(groups[k].name, name) != 0 || strcmp(groups[k].kind, b.kind) != 0)) k++;
    if (k == n) {
      groups[n++] = (group){.kind = b.kind, .first = b.first, .last = b.last};
      memcpy(groups[k].name, name, sizeof name);
    }
    groups[k].bytes += b.bytes;
    groups[k].count++;
    if (b.bytes > groups[k].most) groups[k].most = b.bytes;
    if (b.first < groups[k].first) groups[k].first = b.first;
    if (b.last > groups[k].last) groups[k].last = b.last;
  }
  *n_groups = n;
  return RFR_OK;
}

/* ---- output ---- */

static void print_summary(const rfr_plan_summary *sum) {
  char a[32];
  const double ratio = sum->transient_lower_bound_bytes > 0
                           ? (double)sum->transient_planned_bytes / (double)sum->transient_lower_bound_bytes
                           : 1.0;
  printf("\npeak         %14lld bytes  %s\n", (long long)sum->planned_bytes, cli_bytes(a, sum->planned_bytes));
  printf("  persistent %14lld bytes  weights, states, inputs, results of phase load\n",
         (long long)sum->persistent_bytes);
  printf("  step       %14lld bytes  lower bound %lld, ratio %.4f\n", (long long)sum->transient_planned_bytes,
         (long long)sum->transient_lower_bound_bytes, ratio);
  if (sum->branch_ops > 0)
    printf("  branch     %14lld bytes  of the step, for %d ops on the side stream\n", (long long)sum->branch_bytes,
           sum->branch_ops);
  else if (sum->branch_bytes > 0)
    printf("  branch     %14d bytes  none: %lld would be more than the %s has left\n", 0, (long long)sum->branch_bytes,
           sum->budget > 0 && sum->planned_bytes + sum->branch_bytes > sum->budget ? "budget" : "device");
  puts("of these, at the peak:");
}

/* Prints the sizes of a ramp: each is a program, and the step's memory is that of the largest. */
static void print_phases(const rfr_run *run) {
  rfr_run_phase x;
  rfr_plan_summary sum;
  char a[32];
  if (rfr_run_phase_at(run, 1, &x) != RFR_OK) return;
  puts("\nphases of batch.ramp, which share the arena:");
  for (int i = 0; rfr_run_phase_at(run, i, &x) == RFR_OK; i++) {
    char steps[40] = "then";
    if (rfr_program_plan(rfr_run_programs((rfr_run *)run), x.program, &sum) != RFR_OK) return;
    if (x.until > 0) snprintf(steps, sizeof steps, "until step %lld", (long long)x.until);
    printf("  %-22s %10lld tokens per step, sequences of %lld, %14lld bytes for the step  %s\n", steps,
           (long long)x.tokens, (long long)x.sequence, (long long)sum.transient_planned_bytes,
           cli_bytes(a, sum.transient_planned_bytes));
  }
}

static void print_phases_json(const rfr_run *run, json *j) {
  rfr_run_phase x;
  rfr_plan_summary sum;
  if (rfr_run_phase_at(run, 1, &x) != RFR_OK) return;
  json_begin(j, "phases", '[');
  for (int i = 0; rfr_run_phase_at(run, i, &x) == RFR_OK; i++) {
    if (rfr_program_plan(rfr_run_programs((rfr_run *)run), x.program, &sum) != RFR_OK) break;
    json_begin(j, NULL, '{');
    json_int(j, "until", x.until);
    json_int(j, "tokens", x.tokens);
    json_int(j, "sequence", x.sequence);
    json_int(j, "transient_planned_bytes", sum.transient_planned_bytes);
    json_end(j, '}');
  }
  json_end(j, ']');
}

static rfr_status print_json(const rfr_run *run, const rfr_programs *p, int program, const cli_fit *fit) {
  const rfr_plan_summary *sum = &fit->plan;
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_int(&j, "planned_bytes", sum->planned_bytes);
  json_int(&j, "persistent_bytes", sum->persistent_bytes);
  json_int(&j, "transient_planned_bytes", sum->transient_planned_bytes);
  json_int(&j, "transient_lower_bound_bytes", sum->transient_lower_bound_bytes);
  json_int(&j, "branch_ops", sum->branch_ops);
  json_int(&j, "branch_bytes", sum->branch_bytes);
  cli_fit_json(fit, &j);
  print_phases_json(run, &j);
  json_begin(&j, "buffers", '[');
  for (int i = 0; i < sum->n_buffers; i++) {
    rfr_plan_buffer b;
    rfr_status s = rfr_program_plan_buffer(p, program, i, &b);
    if (s != RFR_OK) return s;
    json_begin(&j, NULL, '{');
    json_text(&j, "name", b.name);
    json_text(&j, "kind", b.kind);
    json_int(&j, "bytes", b.bytes);
    json_int(&j, "offset", b.offset);
    json_int(&j, "first", b.first);
    json_int(&j, "last", b.last);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
  return RFR_OK;
}

static void print_experts(const rfr_run *run) {
  rfr_run_info info;
  char a[32];
  rfr_run_get_info(run, &info);
  if (info.experts == 0) return;
  printf("experts      %14lld in a layer  layers %lld, each with weights of %lld bytes, %s, and %lld rows of a "
         "microbatch, for any routing\n",
         (long long)info.experts, (long long)info.expert_layers, (long long)info.expert_bytes,
         cli_bytes(a, info.expert_bytes), (long long)info.expert_rows);
}

static void print_watched(const rfr_programs *p) {
  rfr_tensor ring;
  char a[32];
  int n = 0;
  while (rfr_programs_watched_name(p, n)) n++;
  if (n == 0 || rfr_programs_tensor(p, "watch", &ring) != RFR_OK) return;
  printf("watched      %14d values  their statistics are %s; a second program of the step has the ops for them\n", n,
         cli_bytes(a, ring.bytes));
}

/* Prints the names for run.watch, one per line. */
static rfr_status print_values(const cli *c, const rfr_programs *p) {
  json j = {.f = stdout};
  const char *name;
  if (c->json) json_begin(&j, NULL, '{'), json_begin(&j, "values", '[');
  for (int i = 0; (name = rfr_programs_watched_name(p, i)); i++) {
    if (c->json) json_text(&j, NULL, name);
    else puts(name);
  }
  if (c->json) json_end(&j, ']'), json_end(&j, '}'), putchar('\n');
  return RFR_OK;
}

static rfr_status print_table(cli *c, const rfr_programs *p, int program, const rfr_plan_summary *sum) {
  int n = 0;
  group *groups = calloc((size_t)sum->n_buffers + 1, sizeof *groups);
  if (!groups) return RFR_NO_MEMORY;
  const rfr_status s = collect(p, program, sum, c->all, groups, &n);
  if (s == RFR_OK) printf("%14s %5s  %-10s %13s  %s\n", "bytes", "count", "kind", "ops", "buffer");
  for (int i = 0; s == RFR_OK && i < n; i++) {
    char ops[32] = "always";
    if (groups[i].first >= 0) snprintf(ops, sizeof ops, "%d-%d", groups[i].first, groups[i].last);
    printf("%14lld %5d  %-10s %13s  %s\n", (long long)groups[i].bytes, groups[i].count, groups[i].kind, ops,
           groups[i].name);
  }
  free(groups);
  return s;
}

static rfr_status print_plan(cli *c, const char *text, rfr_run *run, int which) {
  const rfr_programs *p = rfr_run_programs(run);
  const int program = rfr_run_program_index(run, which);
  cli_fit fit;
  rfr_status s = cli_fit_make(c, text, run, which, &fit);
  if (s != RFR_OK) return s;
  if (c->json) {
    s = print_json(run, p, program, &fit);
  } else {
    s = print_table(c, p, program, &fit.plan);
    if (s == RFR_OK) print_summary(&fit.plan), cli_fit_print(&fit, stdout), print_experts(run), print_phases(run);
    if (s == RFR_OK) print_watched(p);
  }
  fflush(stdout);
  return s == RFR_OK && !fit.fits ? cli_fit_fail(&fit) : s;
}

/* Prints the effect of memory.recompute: auto for budgets between the largest plan and the smallest. */
static rfr_status print_frontier(cli *c, rfr_programs *p, int program) {
  enum { MOST = 20 };
  rfr_frontier_point point[MOST];
  int n = 0;
  rfr_status s = rfr_program_frontier(p, program, point, MOST, &n);
  if (s != RFR_OK) return s;
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_begin(&j, "frontier", '[');
    for (int i = 0; i < n; i++) {
      json_begin(&j, NULL, '{');
      json_int(&j, "planned_bytes", point[i].planned_bytes);
      json_double(&j, "extra_flops", point[i].extra_flops);
      json_double(&j, "extra_bytes", point[i].extra_bytes);
      json_int(&j, "recomputed_ops", point[i].recomputed);
      json_end(&j, '}');
    }
    json_end(&j, ']');
    json_end(&j, '}');
    putchar('\n');
    return RFR_OK;
  }
  cli_frontier_table(p, program, point, n, stdout);
  printf("\nmemory.recompute: auto with memory.budget between the first and the last takes the cheapest level that "
         "fits\n");
  return RFR_OK;
}

static rfr_status draw(cli *c, const rfr_programs *p, int program) {
  FILE *f = strcmp(c->svg, "-") == 0 ? stdout : fopen(c->svg, "wb");
  rfr_status s = f ? cli_plan_svg(p, program, c->operand, f) : RFR_IO;
  bool failed = f && (fflush(f) != 0 || ferror(f));
  if (f && f != stdout && fclose(f) != 0) failed = true;
  if (s != RFR_OK && f) return s;
  if (s != RFR_OK || failed) return cli_cannot_write(c->svg);
  if (f != stdout && !c->quiet) printf("%s written\n", c->svg);
  return RFR_OK;
}

/* Refuses several forms of output. JSON has every buffer, or every point of the frontier. */
static rfr_status check_options(const cli *c) {
  if (c->values && (c->svg || c->all || c->frontier || c->ranks > 0 || c->program))
    return cli_usage("omit the other one", "--values prints names of the training step alone");
  if (c->svg && (c->json || c->frontier || c->all))
    return cli_usage("omit one of them", "--svg, --json, --frontier and --all are different forms of output");
  if (c->all && (c->json || c->frontier))
    return cli_usage("omit --all", "--all is for the table of buffers; --json prints all buffers, --frontier none");
  if (c->ranks > 0 && (c->svg || c->all || c->frontier || c->program))
    return cli_usage("omit one of them",
                     "--ranks plans training steps; --svg, --all, --frontier and --program show one rank");
  if (c->ranks == 0 && (c->costs || c->link > 0))
    return cli_usage("give --ranks", "--costs and --link are for --ranks");
  return RFR_OK;
}

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

rfr_status cli_plan(cli *c) {
  char *text = NULL;
  rfr_run *run = NULL;
  int which = RFR_RUN_TRAIN;
  rfr_status s = check_options(c);
  if (s == RFR_OK) s = cli_program(c, &which);
  if (s == RFR_OK) s = cli_read_config(c, &text);
  if (s == RFR_OK && c->ranks > 0) {
    s = cli_plan_ranks(c, text, stdout);
    free(text);
    return s;
  }
  /* there is space, because --values was an argument */
  if (s == RFR_OK && c->values) c->sets.items[c->sets.n++] = "run.watch=[\"*\"]";
  if (s == RFR_OK) s = cli_open_config(c, text, which, c->frontier, warn, &run);
  if (s == RFR_OK && c->frontier) s = print_frontier(c, rfr_run_programs(run), rfr_run_program_index(run, which));
  else if (s == RFR_OK && c->values) s = print_values(c, rfr_run_programs(run));
  else if (s == RFR_OK && c->svg) s = draw(c, rfr_run_programs(run), rfr_run_program_index(run, which));
  else if (s == RFR_OK) s = print_plan(c, text, run, which);
  rfr_run_close(run);
  free(text);
  return s;
}
