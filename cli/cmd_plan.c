/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain plan: every buffer of a program, the peak, the bytes of each kind, and whether they fit. Nothing is
 * allocated. A plan that does not fit also lists settings that need less, each with the bytes of its own plan.
 * Buffers whose names differ only in numbers ("layers.3", "layers.4") share a line unless --all is given. --frontier
 * prints the trades of memory against recomputing, --svg draws the plan.
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

/* "layers.12.mlp" becomes "layers.*.mlp". */
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

/* The first number in a file after `prefix`, -1: none. */
static long long number_in(const char *path, const char *prefix) {
  FILE *f = fopen(path, "r");
  char line[128];
  long long n = -1;
  while (f && n < 0 && fgets(line, sizeof line, f))
    if (strncmp(line, prefix, strlen(prefix)) == 0 && sscanf(line + strlen(prefix), "%lld", &n) != 1) n = -1;
  if (f) fclose(f);
  return n;
}

/* Bytes that the CPU's programs may take: free memory, or the container's limit if that is less. 0: unknown. */
static int64_t memory_available(void) {
  const long long kib = number_in("/proc/meminfo", "MemAvailable:"), most = number_in("/sys/fs/cgroup/memory.max", "");
  const int64_t available = kib > 0 ? kib * 1024 : 0;
  return most > 0 && (available == 0 || most < available) ? most : available;
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

/* ---- fitting ---- */

/* The bytes that a plan may have: the budget of the configuration, or the machine's memory. */
typedef struct limit {
  int64_t bytes; /* 0: no limit is known */
  bool is_budget;
} limit;

static limit find_limit(const cli *c, const rfr_plan_summary *sum) {
  rfr_machine m;
  if (sum->budget > 0) return (limit){sum->budget, true};
  const bool on_cpu = rfr_machine_describe(c->ctx, &m) == RFR_OK && strcmp(m.device, "cpu") == 0;
  return (limit){on_cpu ? memory_available() : 0, false};
}

/* A setting that may need less memory. */
typedef struct way {
  const char *what, *set[6]; /* --set, up to a NULL */
  int64_t bytes;             /* of its plan */
  double extra_flops;        /* added by recomputing, as a ratio of the step's */
} way;

/* Those that cost least come first: time alone, precision of states, weights that are not trained. */
static const way ways[] = {
    {"recompute activations", {"memory.recompute=all"}},
    {"one window in a microbatch", {"batch.microbatch=1"}},
    {"optimizer moments in bf16", {"optimizer.state_dtype=bf16"}},
    {"gradients in the type of the weights", {"optimizer.gradient_dtype=model"}},
    {"no f32 master weights", {"optimizer.master_weights=false"}},
    {"MLP weights frozen", {"optimizer.frozen=[\"*mlp*\"]"}},
    {"all of these but frozen weights",
     {"memory.recompute=all", "batch.microbatch=1", "optimizer.state_dtype=bf16", "optimizer.gradient_dtype=model",
      "optimizer.master_weights=false"}},
};
enum { N_WAYS = sizeof ways / sizeof ways[0] };

/* Plans the configuration with the settings of w, without a budget. false: it has no such plan. */
static bool try_way(cli *c, const char *text, int which, way *w) {
  enum { MORE = sizeof w->set / sizeof w->set[0] + 1 };
  const char **sets = calloc((size_t)(c->n_sets + MORE), sizeof *sets), **given = c->sets;
  const int n_given = c->n_sets;
  rfr_run *run = NULL;
  rfr_plan_summary sum;
  if (!sets) return false;
  for (int i = 0; i < n_given; i++) sets[i] = given[i];
  for (int i = 0; w->set[i]; i++) sets[c->n_sets++] = w->set[i];
  sets[c->n_sets++] = "memory.budget=0B";
  c->sets = sets;
  rfr_status s = cli_open_config(c, text, which, false, NULL, &run);
  const int program = s == RFR_OK ? rfr_run_program_index(run, which) : -1;
  if (s == RFR_OK) s = rfr_program_plan(rfr_run_programs(run), program, &sum);
  if (s == RFR_OK) {
    const double extra = rfr_program_recomputed_flops(rfr_run_programs(run), program);
    const double all = rfr_program_flops(rfr_run_programs(run), program);
    w->bytes = sum.planned_bytes;
    w->extra_flops = all > extra ? extra / (all - extra) : 0;
  }
  rfr_run_close(run);
  c->sets = given;
  c->n_sets = n_given;
  free(sets);
  return s == RFR_OK;
}

/* Fills `out` with the ways that need less than `bytes`; their number. */
static int find_ways(cli *c, const char *text, int which, int64_t bytes, way out[N_WAYS]) {
  int n = 0;
  for (int i = 0; i < N_WAYS; i++) {
    out[n] = ways[i];
    if (!try_way(c, text, which, &out[n]) || out[n].bytes >= bytes) continue;
    bool is_new = true; /* several settings together may be no better than one of them */
    for (int k = 0; k < n; k++) is_new &= out[k].bytes != out[n].bytes || !out[n].set[1];
    n += is_new;
  }
  return n;
}

static void print_ways(const way *w, int n, int64_t bytes, const limit *l) {
  char saves[32], leaves[32];
  if (n > 0) printf("\nsettings that need less (--set), each alone:\n%12s %12s\n", "saves", "leaves");
  for (int i = 0; i < n; i++) {
    printf("%12s %12s  %s:", cli_bytes(saves, bytes - w[i].bytes), cli_bytes(leaves, w[i].bytes), w[i].what);
    for (int k = 0; w[i].set[k]; k++) printf(" %s", w[i].set[k]);
    if (w[i].extra_flops > 0) printf(", %.1f%% more FLOPs", 100 * w[i].extra_flops);
    puts(w[i].bytes <= l->bytes ? "; fits" : "");
  }
}

static rfr_status fail_to_fit(const rfr_plan_summary *sum, const limit *l) {
  char message[256], a[32], b[32];
  snprintf(message, sizeof message, "the plan needs %lld bytes (%s), but %s %lld bytes (%s)",
           (long long)sum->planned_bytes, cli_bytes(a, sum->planned_bytes),
           l->is_budget ? "memory.budget is" : "the memory available here is", (long long)l->bytes,
           cli_bytes(b, l->bytes));
  cli_print_error(&(rfr_error){.status = RFR_NO_FIT,
                               .slug = "plan.over_budget",
                               .message = message,
                               .next = l->is_budget ? "raise memory.budget, or use settings that the plan lists"
                                                    : "use settings that the plan lists",
                               .file = ""});
  return RFR_NO_FIT;
}

/* ---- output ---- */

/*  X(field, name) of rfr_memory, in the order of the table */
#define MEMORY_ROWS(X)                                \
  X(weights, "weights")                               \
  X(optimizer, "optimizer states and master weights") \
  X(gradients, "gradients")                           \
  X(activations, "activations")                       \
  X(workspaces, "workspaces")                         \
  X(inputs, "inputs")                                 \
  X(states, "other states")                           \
  X(loaded, "results of phase load")                  \
  X(outputs, "outputs")                               \
  X(unused, "unused")

static void print_memory(const rfr_memory *m) {
  char text[32];
#define ROW(field, name) \
  if (m->field > 0) printf("  %-36s %14lld bytes  %s\n", name, (long long)m->field, cli_bytes(text, m->field));
  MEMORY_ROWS(ROW)
#undef ROW
}

static void print_summary(const rfr_plan_summary *sum, const rfr_memory *m, const limit *l) {
  char a[32], b[32];
  const double ratio = sum->transient_lower_bound_bytes > 0
                           ? (double)sum->transient_planned_bytes / (double)sum->transient_lower_bound_bytes
                           : 1.0;
  printf("\npeak         %14lld bytes  %s\n", (long long)sum->planned_bytes, cli_bytes(a, sum->planned_bytes));
  printf("  persistent %14lld bytes  weights, optimizer states, inputs, outputs\n", (long long)sum->persistent_bytes);
  printf("  step       %14lld bytes  lower bound %lld, ratio %.4f\n", (long long)sum->transient_planned_bytes,
         (long long)sum->transient_lower_bound_bytes, ratio);
  if (sum->branch_ops > 0)
    printf("  branch     %14lld bytes  of the step, for %d ops on the side stream\n", (long long)sum->branch_bytes,
           sum->branch_ops);
  else if (sum->branch_bytes > 0)
    printf("  branch     %14d bytes  none: %lld would be more than the %s has left\n", 0, (long long)sum->branch_bytes,
           sum->budget > 0 && sum->planned_bytes + sum->branch_bytes > sum->budget ? "budget" : "device");
  printf("of these, at the peak:\n");
  print_memory(m);
  if (l->bytes > 0)
    printf("%s %s of %s\n", sum->planned_bytes <= l->bytes ? "fits in" : "does NOT fit in", cli_bytes(b, l->bytes),
           l->is_budget ? "memory.budget" : "available memory");
}

static rfr_status print_json(const rfr_programs *p, int program, const rfr_plan_summary *sum, const rfr_memory *m,
                             const limit *l, const way *w, int n_ways) {
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_int(&j, "planned_bytes", sum->planned_bytes);
  json_int(&j, "persistent_bytes", sum->persistent_bytes);
  json_int(&j, "transient_planned_bytes", sum->transient_planned_bytes);
  json_int(&j, "transient_lower_bound_bytes", sum->transient_lower_bound_bytes);
  json_int(&j, "branch_ops", sum->branch_ops);
  json_int(&j, "branch_bytes", sum->branch_bytes);
  json_begin(&j, "memory", '{');
#define ROW(field, name) json_int(&j, #field, m->field);
  MEMORY_ROWS(ROW)
#undef ROW
  json_end(&j, '}');
  if (l->bytes > 0) json_int(&j, l->is_budget ? "budget_bytes" : "available_bytes", l->bytes);
  if (l->bytes > 0) json_bool(&j, "fits", sum->planned_bytes <= l->bytes);
  if (l->bytes > 0 && sum->planned_bytes > l->bytes) {
    json_begin(&j, "settings", '[');
    for (int i = 0; i < n_ways; i++) {
      json_begin(&j, NULL, '{');
      json_text(&j, "what", w[i].what);
      json_begin(&j, "set", '[');
      for (int k = 0; w[i].set[k]; k++) json_text(&j, NULL, w[i].set[k]);
      json_end(&j, ']');
      json_int(&j, "planned_bytes", w[i].bytes);
      json_double(&j, "extra_flops_ratio", w[i].extra_flops);
      json_end(&j, '}');
    }
    json_end(&j, ']');
  }
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
         "microbatch, whatever the routing\n",
         (long long)info.experts, (long long)info.expert_layers, (long long)info.expert_bytes,
         cli_bytes(a, info.expert_bytes), (long long)info.expert_rows);
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

static rfr_status print_plan(cli *c, const char *text, const rfr_run *run, int which) {
  const rfr_programs *p = rfr_run_programs((rfr_run *)run);
  const int program = rfr_run_program_index(run, which);
  rfr_plan_summary sum;
  rfr_memory memory;
  way found[N_WAYS];
  int n = 0;
  rfr_status s = rfr_program_plan(p, program, &sum);
  if (s == RFR_OK) s = rfr_programs_memory(p, &memory);
  if (s != RFR_OK) return s;
  const limit l = find_limit(c, &sum);
  const bool fits = l.bytes == 0 || sum.planned_bytes <= l.bytes;
  if (!fits) n = find_ways(c, text, which, sum.planned_bytes, found);
  if (c->json) {
    s = print_json(p, program, &sum, &memory, &l, found, n);
  } else {
    s = print_table(c, p, program, &sum);
    if (s == RFR_OK) print_summary(&sum, &memory, &l), print_experts(run);
    if (s == RFR_OK && !fits) print_ways(found, n, sum.planned_bytes, &l);
  }
  fflush(stdout);
  return s == RFR_OK && !fits ? fail_to_fit(&sum, &l) : s;
}

/* The effect of memory.recompute: auto for budgets between the largest plan and the smallest. */
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
  return s == RFR_OK && !failed ? RFR_OK : cli_cannot_write(c->svg);
}

/* The forms of output exclude each other. JSON has every buffer, or every point of the frontier. */
static rfr_status check_options(const cli *c) {
  if (c->svg && (c->json || c->frontier || c->all))
    return cli_usage("omit one of them", "--svg, --json, --frontier and --all are different forms of output");
  if (c->all && (c->json || c->frontier))
    return cli_usage("omit --all", "--all is for the table of buffers; --json prints all buffers, --frontier none");
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
  if (s == RFR_OK) s = cli_open_config(c, text, which, c->frontier, warn, &run);
  if (s == RFR_OK && c->frontier) s = print_frontier(c, rfr_run_programs(run), rfr_run_program_index(run, which));
  else if (s == RFR_OK && c->svg) s = draw(c, rfr_run_programs(run), rfr_run_program_index(run, which));
  else if (s == RFR_OK) s = print_plan(c, text, run, which);
  rfr_run_close(run);
  free(text);
  return s;
}
