/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks whether a plan fits: its bytes by kind, the available bytes, and settings that need less, each with the bytes
 * of its own plan.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* The first number in a file after `prefix`; -1: none. */
static long long number_in(const char *path, const char *prefix) {
  FILE *f = fopen(path, "r");
  char line[128];
  long long n = -1;
  while (f && n < 0 && fgets(line, sizeof line, f))
    if (strncmp(line, prefix, strlen(prefix)) == 0 && sscanf(line + strlen(prefix), "%lld", &n) != 1) n = -1;
  if (f) fclose(f);
  return n;
}

/* Bytes that programs on the CPU may use: free memory, or the container's limit if that is lower. 0: unknown. */
static int64_t memory_available(void) {
  const long long kib = number_in("/proc/meminfo", "MemAvailable:"), most = number_in("/sys/fs/cgroup/memory.max", "");
  const int64_t available = kib > 0 ? kib * 1024 : 0;
  return most > 0 && (available == 0 || most < available) ? most : available;
}

static void find_limit(const cli *c, rfr_run *run, cli_fit *f) {
  rfr_machine m;
  rfr_memory_use use;
  f->is_budget = f->plan.budget > 0;
  if (f->is_budget) f->limit = f->plan.budget;
  else if (rfr_machine_describe(c->ctx, &m) == RFR_OK && strcmp(m.device, "cpu") == 0) f->limit = memory_available();
  /* it fails without a GPU */
  else if (rfr_programs_memory_use(rfr_run_programs(run), &use) == RFR_OK) f->limit = use.available;
  f->fits = f->limit == 0 || f->plan.planned_bytes <= f->limit;
}

/* In order of cost: only time; precision of states; fewer trained weights. */
static const cli_setting settings[] = {
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
enum { N_SETTINGS = sizeof settings / sizeof settings[0] };
_Static_assert(sizeof settings / sizeof settings[0] <= (size_t)CLI_FIT_SETTINGS,
               "cli_fit has an element for each setting");

/* Plans the configuration with the overrides of x, without a budget. false: it cannot be planned. */
static bool try_setting(cli *c, const char *text, int which, cli_setting *x) {
  enum { MORE = sizeof x->set / sizeof x->set[0] + 1 };
  const cli_list given = c->sets;
  rfr_run *run = NULL;
  rfr_plan_summary sum;
  c->sets = (cli_list){calloc((size_t)(given.n + MORE), sizeof *c->sets.items), given.n};
  if (!c->sets.items) return false;
  for (int i = 0; i < given.n; i++) c->sets.items[i] = given.items[i];
  for (int i = 0; x->set[i]; i++) c->sets.items[c->sets.n++] = x->set[i];
  c->sets.items[c->sets.n++] = "memory.budget=0B";
  rfr_status s = cli_open_config(c, text, which, false, NULL, &run);
  const int program = s == RFR_OK ? rfr_run_program_index(run, which) : -1;
  if (s == RFR_OK) s = rfr_program_plan(rfr_run_programs(run), program, &sum);
  if (s == RFR_OK) {
    const double extra = rfr_program_recomputed_flops(rfr_run_programs(run), program);
    const double all = rfr_program_flops(rfr_run_programs(run), program);
    x->bytes = sum.planned_bytes;
    x->extra_flops = all > extra ? extra / (all - extra) : 0;
  }
  rfr_run_close(run);
  free(c->sets.items);
  return s == RFR_OK;
}

/* Settings are planned in parallel, because the plan of a model with 70 billion parameters takes a tenth of a
 * second. */
typedef struct search {
  const cli *c;
  const char *text;
  int which;
  atomic_int next;
  cli_setting tried[N_SETTINGS];
  bool found[N_SETTINGS];
} search;

/* Plans settings until none is left. Each thread has its own context, because only one thread may use a context. */
static void *try_settings(void *user) {
  search *x = user;
  cli c = *x->c;
  rfr_ctx_options o = c.ctx_options;
  o.log = NULL;
  if (rfr_ctx_create(&o, &c.ctx) != RFR_OK) return NULL;
  for (int i; (i = atomic_fetch_add(&x->next, 1)) < N_SETTINGS;) {
    cli copy = c;
    x->found[i] = try_setting(&copy, x->text, x->which, &x->tried[i]);
  }
  rfr_ctx_destroy(c.ctx);
  return NULL;
}

static void find_settings(cli *c, const char *text, int which, cli_fit *f) {
  search x = {.c = c, .text = text, .which = which};
  rfr_machine machine = {0};
  pthread_t threads[N_SETTINGS];
  int n = 0;
  memcpy(x.tried, settings, sizeof x.tried);
  rfr_machine_describe(c->ctx, &machine);
  while (n + 1 < machine.threads && n + 1 < N_SETTINGS && pthread_create(&threads[n], NULL, try_settings, &x) == 0) n++;
  try_settings(&x);
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < N_SETTINGS; i++) {
    const cli_setting *w = &x.tried[i];
    bool is_new = x.found[i] && w->bytes < f->plan.planned_bytes;
    for (int k = 0; k < f->n_settings; k++) /* several settings together may not be better than one of them */
      is_new &= f->settings[k].bytes != w->bytes || !w->set[1];
    if (is_new) f->settings[f->n_settings++] = *w;
  }
}

rfr_status cli_fit_make(cli *c, const char *text, rfr_run *run, int which, cli_fit *out) {
  memset(out, 0, sizeof *out);
  rfr_status s = rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, which), &out->plan);
  if (s == RFR_OK) s = rfr_programs_memory(rfr_run_programs(run), &out->memory);
  if (s != RFR_OK) return s;
  find_limit(c, run, out);
  if (!out->fits) find_settings(c, text, which, out);
  return RFR_OK;
}

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

void cli_fit_print(const cli_fit *x, FILE *f) {
  char a[32], b[32];
#define ROW(field, name)   \
  if (x->memory.field > 0) \
    fprintf(f, "  %-36s %14lld bytes  %s\n", name, (long long)x->memory.field, cli_bytes(a, x->memory.field));
  MEMORY_ROWS(ROW)
#undef ROW
  if (x->limit > 0)
    fprintf(f, "%s %s of %s\n", x->fits ? "fits in" : "does NOT fit in", cli_bytes(b, x->limit),
            x->is_budget ? "memory.budget" : "available memory");
  if (x->n_settings > 0) fprintf(f, "\nsettings that need less (--set), each alone:\n%12s %12s\n", "saves", "leaves");
  for (int i = 0; i < x->n_settings; i++) {
    const cli_setting *w = &x->settings[i];
    fprintf(f, "%12s %12s  %s:", cli_bytes(a, x->plan.planned_bytes - w->bytes), cli_bytes(b, w->bytes), w->what);
    for (int k = 0; w->set[k]; k++) fprintf(f, " %s", w->set[k]);
    if (w->extra_flops > 0) fprintf(f, ", %.1f%% more FLOPs", 100 * w->extra_flops);
    fputs(w->bytes <= x->limit ? "; fits\n" : "\n", f);
  }
}

void cli_fit_json(const cli_fit *x, json *j) {
  json_begin(j, "memory", '{');
#define ROW(field, name) json_int(j, #field, x->memory.field);
  MEMORY_ROWS(ROW)
#undef ROW
  json_end(j, '}');
  if (x->limit > 0) json_int(j, x->is_budget ? "budget_bytes" : "available_bytes", x->limit);
  if (x->limit > 0) json_bool(j, "fits", x->fits);
  if (x->fits) return;
  json_begin(j, "settings", '[');
  for (int i = 0; i < x->n_settings; i++) {
    const cli_setting *w = &x->settings[i];
    json_begin(j, NULL, '{');
    json_text(j, "what", w->what);
    json_begin(j, "set", '[');
    for (int k = 0; w->set[k]; k++) json_text(j, NULL, w->set[k]);
    json_end(j, ']');
    json_int(j, "planned_bytes", w->bytes);
    json_double(j, "extra_flops_ratio", w->extra_flops);
    json_end(j, '}');
  }
  json_end(j, ']');
}

rfr_status cli_fit_fail(const cli_fit *x) {
  char message[256], a[32], b[32];
  snprintf(message, sizeof message, "the plan needs %lld bytes (%s), but %s %lld bytes (%s)",
           (long long)x->plan.planned_bytes, cli_bytes(a, x->plan.planned_bytes),
           x->is_budget ? "memory.budget is" : "the memory available here is", (long long)x->limit,
           cli_bytes(b, x->limit));
  cli_print_error(&(rfr_error){.status = RFR_NO_FIT,
                               .slug = "plan.over_budget",
                               .message = message,
                               .next = x->is_budget ? "raise memory.budget, or use settings that the plan lists"
                                                    : "use settings that the plan lists",
                               .file = ""});
  return RFR_NO_FIT;
}
