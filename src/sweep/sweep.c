/* SPDX-License-Identifier: Apache-2.0
 *
 * A sweep: the points of a grid as runs, and sweep.json, which is rewritten with each change of a state.
 *
 * The folder of a run decides its state: after a crash, a run that was training is done if its log says so, otherwise
 * it is continued. The order of the runs, their overrides and the hash of the configuration must equal sweep.json's.
 */
#include "refrain/sweep.h"

#include <math.h>
#include <string.h>

#include "data/hash.h"
#include "data/json_file.h"
#include "report/run_log.h"
#include "sweep/grid.h"
#include "text/unicode.h"

enum { MOST_BYTES = 1 << 20, ERROR_BYTES = 1024 };

typedef struct run {
  char name[24];
  char *folder;
  const char **sets; /* common overrides, then those of the point */
  int n_sets;
  const rfi_point *point;
  rfi_hash hash; /* hash of the resolved configuration */
  rfr_sweep_state state;
  bool started;
  double loss, bits, seconds;
  int64_t step;
  char error[ERROR_BYTES];
} run;

struct rfr_sweep {
  rfr_ctx *ctx;
  rfi_arena *arena;
  char *folder, *path; /* FOLDER/sweep.json */
  const char *file;    /* hash of the grid */
  char *config, *config_folder;
  rfi_hash config_hash;
  rfi_grid grid;
  const char **common;
  int n_common;
  run *runs;
  int n;
  int lock;
};

rfr_sweep_options rfr_sweep_options_default(void) { return (rfr_sweep_options){.size = sizeof(rfr_sweep_options)}; }

static const char *const state_names[] = {"waiting", "running", "stopped", "failed", "done"};

/* ---- the configurations ---- */

/* A key must not be in both the grid and the common overrides. */
static rfr_status check_common(const rfr_sweep *s, const rfi_point *p) {
  for (int i = 0; i < s->n_common; i++)
    for (int k = 0; k < p->n; k++) {
      const char *path = rfi_config_path(p->keys[k]);
      const size_t n = strlen(path);
      if (strncmp(s->common[i], path, n) == 0 && s->common[i][n] == '=')
        return rfi_fail_at(RFI_E_SWEEP_GRID, s->file, p->line, "%s is in both the grid and --set", path);
    }
  return RFR_OK;
}

static rfr_status hash_config(rfr_sweep *s, const rfi_config *config, run *r) {
  rfi_string text = {.ctx = s->ctx};
  const rfr_status status = rfi_config_print(config, false, &text);
  if (status == RFR_OK) r->hash = rfi_hash_bytes(text.data, text.n);
  rfi_string_deinit(&text);
  return status;
}

static rfr_status check_config(rfr_sweep *s, run *r, const char *text, size_t n) {
  rfi_config *config;
  rfr_status status = rfi_config_read(s->ctx, s->config, text, n, s->config_folder, r->sets, r->n_sets, &config);
  if (status == RFR_NO_MEMORY) return status;
  if (status != RFR_OK) {
    rfi_fail_prefix("%s:%lld: %s: ", s->file, (long long)r->point->line, r->name);
    return rfr_last_error()->line > 0 ? status : rfi_fail_place(s->file, r->point->line); /* a value of the grid */
  }
  if (config->data_validation.percent <= 0 && config->data_validation.patterns.n == 0 && config->data_train.n > 0)
    status = rfi_fail_at(
        RFI_E_SWEEP_GRID, s->file, r->point->line,
        "%s holds out no data, and runs are ranked by their held-out loss; set data.validation, such as 5%%",
        s->config);
  if (status == RFR_OK) status = hash_config(s, config, r);
  rfi_config_destroy(config);
  return status;
}

static rfr_status check_duplicates(const rfr_sweep *s) {
  for (int i = 0; i < s->n; i++)
    for (int k = 0; k < i; k++)
      if (rfi_hash_equal(s->runs[i].hash, s->runs[k].hash))
        return rfi_fail_at(RFI_E_SWEEP_GRID, s->file, s->runs[i].point->line, "%s is the same run as %s, of line %lld",
                           s->runs[i].name, s->runs[k].name, (long long)s->runs[k].point->line);
  return RFR_OK;
}

static rfr_status read_config_text(const rfr_sweep *s, char **text, size_t *n) {
  return rfi_file_read_limited(s->ctx, s->config, MOST_BYTES, text, n);
}

static rfr_status make_run(rfr_sweep *s, int i) {
  run *r = &s->runs[i];
  const rfi_point *p = &s->grid.points[i];
  *r = (run){.point = p, .n_sets = s->n_common + p->n, .loss = NAN, .bits = NAN};
  rfi_snprintf(r->name, sizeof r->name, "run-%03d", i + 1);
  RFI_TRY(rfi_path_join(s->ctx, s->folder, r->name, &r->folder));
  r->sets = rfi_arena_alloc(s->arena, ((size_t)r->n_sets + 1) * sizeof *r->sets);
  if (!r->sets) return RFR_NO_MEMORY;
  for (int k = 0; k < s->n_common; k++) r->sets[k] = s->common[k];
  for (int k = 0; k < p->n; k++) r->sets[s->n_common + k] = p->sets[k];
  return check_common(s, p);
}

static rfr_status make_runs(rfr_sweep *s) {
  char *text;
  size_t n;
  RFI_TRY(read_config_text(s, &text, &n));
  s->config_hash = rfi_hash_bytes(text, n);
  rfr_status status = RFI_ALLOC(s->ctx, (size_t)s->grid.n * sizeof *s->runs, &s->runs);
  for (; s->n < s->grid.n && status == RFR_OK; s->n++) {
    status = make_run(s, s->n);
    if (status == RFR_OK) status = check_config(s, &s->runs[s->n], text, n);
  }
  rfi_free(s->ctx, text);
  return status == RFR_OK ? check_duplicates(s) : status;
}

/* ---- what a run has logged ---- */

static rfr_status has_file(const rfr_sweep *s, const run *r, const char *name, bool *has) {
  char *path, kind;
  RFI_TRY(rfi_path_join(s->ctx, r->folder, name, &path));
  const rfr_status status = rfi_path_kind(path, &kind);
  rfi_free(s->ctx, path);
  *has = status == RFR_OK && kind == 'f';
  return status;
}

/* *done: the log ends with the end of the training. A run without a log, or with an empty one, has no numbers. */
static rfr_status read_log(const rfr_sweep *s, run *r, bool *done) {
  rfi_run_log log = {0};
  bool has;
  *done = false;
  RFI_TRY(has_file(s, r, "config.yaml", &r->started));
  RFI_TRY(has_file(s, r, "log.jsonl", &has));
  if (!has) return RFR_OK;
  rfr_status status = rfi_run_log_open(s->ctx, r->folder, &log);
  if (status == RFR_OK) {
    const rfi_log_rows *e = &log.evaluations;
    const char *end = rfi_run_log_end(&log);
    r->loss = e->n > 0 ? e->items[e->n - 1].value[RFI_SERIES_loss] : (double)NAN;
    r->bits = e->n > 0 ? e->items[e->n - 1].value[RFI_SERIES_bits_per_byte] : (double)NAN;
    r->step = log.step;
    r->seconds = log.elapsed;
    *done = end && strcmp(end, "done") == 0;
  }
  if (status != RFR_OK && strcmp(rfr_last_error()->slug, "run.folder") == 0) status = RFR_OK; /* an empty log */
  rfi_run_log_close(&log);
  return status;
}

/* ---- sweep.json ---- */

static json_t *number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static json_t *run_json(const run *r) {
  json_t *sets = json_array();
  for (int k = 0; k < r->n_sets && sets; k++)
    if (json_array_append_new(sets, json_string(r->sets[k])) != 0) json_decref(sets), sets = NULL;
  json_t *o = json_pack("{s:s, s:o, s:s, s:I, s:f, s:o, s:o}", "name", r->name, "set", sets, "state",
                        state_names[r->state], "step", (json_int_t)r->step, "seconds", r->seconds, "loss",
                        number(r->loss), "bits_per_byte", number(r->bits));
  if (o && *r->error && json_object_set_new(o, "error", json_string(r->error)) != 0) json_decref(o), o = NULL;
  return o;
}

static rfr_status save(const rfr_sweep *s) {
  char hash[33];
  rfi_string text = {.ctx = s->ctx};
  json_t *runs = json_array();
  bool failed = !runs;
  for (int i = 0; i < s->n && !failed; i++) failed = json_array_append_new(runs, run_json(&s->runs[i])) != 0;
  json_t *root = failed ? NULL
                        : json_pack("{s:i, s:s, s:s, s:s, s:O}", "refrain_sweep", 1, "grid", s->file, "config",
                                    s->config, "config_hash", rfi_hash_format(hash, s->config_hash), "runs", runs);
  rfr_status status = root ? rfi_json_print(root, &text) : rfi_fail(RFI_E_NO_MEMORY, "writing %s", s->path);
  if (status == RFR_OK) status = rfi_file_write(s->ctx, s->path, text.data, text.n);
  json_decref(root);
  json_decref(runs);
  rfi_string_deinit(&text);
  return status;
}

static rfr_status changed(const rfr_sweep *s, int64_t line, const char *what, const char *name) {
  return rfi_fail_at(RFI_E_SWEEP_CHANGED, s->file, line, "%s%s%s is not the one that %s has", name ? name : "",
                     name ? ": " : "", what, s->path);
}

static bool same_sets(const run *r, const json_t *sets) {
  if (!json_is_array(sets) || json_array_size(sets) != (size_t)r->n_sets) return false;
  for (int k = 0; k < r->n_sets; k++) {
    const char *set = json_string_value(json_array_get(sets, (size_t)k));
    if (!set || strcmp(set, r->sets[k]) != 0) return false;
  }
  return true;
}

static rfr_status restore_run(rfr_sweep *s, run *r, const json_t *o) {
  const char *state = "", *error = "";
  bool done;
  int k = 0;
  if (!same_sets(r, json_object_get(o, "set"))) return changed(s, r->point->line, "the list of values", r->name);
  RFI_TRY(rfi_json_get_string(o, s->path, "state", true, &state));
  RFI_TRY(rfi_json_get_string(o, s->path, "error", false, &error));
  while (k < (int)(sizeof state_names / sizeof *state_names) && strcmp(state_names[k], state) != 0) k++;
  if (k == sizeof state_names / sizeof *state_names)
    return rfi_fail_at(RFI_E_JSON, s->path, 0, "%s: \"state\" is \"%.40s\"", r->name, state);
  r->state = (rfr_sweep_state)k;
  rfi_snprintf(r->error, sizeof r->error, "%s", error);
  RFI_TRY(read_log(s, r, &done));
  if (r->state == RFR_SWEEP_RUNNING || r->state == RFR_SWEEP_STOPPED)
    r->state = done ? RFR_SWEEP_DONE : r->started ? RFR_SWEEP_STOPPED : RFR_SWEEP_WAITING;
  if (r->state == RFR_SWEEP_DONE && !done) /* its folder was removed or started anew */
    r->state = r->started ? RFR_SWEEP_STOPPED : RFR_SWEEP_WAITING;
  return RFR_OK;
}

static rfr_status restore(rfr_sweep *s) {
  json_t *root;
  char hash[33];
  RFI_TRY(rfi_json_load(s->ctx, s->path, &root));
  const json_t *runs = json_object_get(root, "runs");
  const char *was = json_string_value(json_object_get(root, "config_hash"));
  rfr_status status = RFR_OK;
  if (!was || strcmp(was, rfi_hash_format(hash, s->config_hash)) != 0) status = changed(s, 0, s->config, NULL);
  else if (json_array_size(runs) != (size_t)s->n) status = changed(s, 0, "the number of runs", NULL);
  for (int i = 0; i < s->n && status == RFR_OK; i++)
    status = restore_run(s, &s->runs[i], json_array_get(runs, (size_t)i));
  json_decref(root);
  return status;
}

/* ---- the folder ---- */

static rfr_status open_folder(rfr_sweep *s, bool resume) {
  char *lock = NULL, kind, folder_kind;
  bool taken = false;
  RFI_TRY(rfi_path_kind(s->path, &kind));
  RFI_TRY(rfi_path_kind(s->folder, &folder_kind));
  if (kind && !resume) return rfi_fail_at(RFI_E_SWEEP_EXISTS, s->folder, 0, "has a sweep already");
  if (!kind && folder_kind) {
    rfi_paths names = {.ctx = s->ctx};
    rfr_status status = rfi_dir_list(s->folder, &names);
    const bool empty = names.n == 0 || (names.n == 1 && strcmp(names.items[0], "sweep.lock") == 0);
    rfi_paths_deinit(&names);
    if (status == RFR_OK && !empty)
      status = rfi_fail_at(RFI_E_SWEEP_EXISTS, s->folder, 0, "is not empty, and has no sweep.json");
    RFI_TRY(status);
  }
  RFI_TRY(rfi_dir_create(s->folder));
  RFI_TRY(rfi_path_join(s->ctx, s->folder, "sweep.lock", &lock));
  const rfr_status status = rfi_journal_open(lock, &s->lock, &taken);
  rfi_free(s->ctx, lock);
  RFI_TRY(status);
  if (taken) return rfi_fail_at(RFI_E_RUN_BUSY, s->folder, 0, "another process has this sweep open");
  if (kind) RFI_TRY(restore(s));
  return save(s);
}

/* ---- the calls ---- */

static rfr_status copy_common(rfr_sweep *s, const rfr_sweep_options *o) {
  s->common = rfi_arena_alloc(s->arena, ((size_t)o->n_overrides + 1) * sizeof *s->common);
  if (!s->common) return RFR_NO_MEMORY;
  for (; s->n_common < o->n_overrides; s->n_common++) {
    const char *text = o->overrides[s->n_common];
    if (!text) return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_open: override %d is NULL", s->n_common);
    if (rfi_utf8_valid(text, strlen(text)) != strlen(text))
      return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_open: override %d is not UTF-8", s->n_common);
    if (!(s->common[s->n_common] = rfi_arena_strdup(s->arena, text))) return RFR_NO_MEMORY;
  }
  return RFR_OK;
}

rfr_status rfr_sweep_open(rfr_ctx *ctx, const char *grid, const char *folder, const rfr_sweep_options *options,
                          rfr_sweep **out) {
  rfr_sweep_options o = rfr_sweep_options_default();
  rfr_sweep *sweep = NULL;
  char *text = NULL, *parent = NULL;
  size_t n;
  rfr_status s;
  if (!out) return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_open: out is NULL");
  *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!grid || !folder || !*folder) return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_open: grid or folder is NULL");
  if (options) {
    RFI_TRY(rfi_check_options("rfr_sweep_options", options, options->size, sizeof o));
    o = *options;
  }
  if (o.n_overrides < 0 || (o.n_overrides > 0 && !o.overrides))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_open: %d overrides", o.n_overrides);
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *sweep, &sweep));
  sweep->ctx = ctx;
  sweep->lock = -1;
  RFI_GOTO(rfi_arena_create(ctx, &sweep->arena));
  sweep->file = rfi_arena_strdup(sweep->arena, grid);
  if (!sweep->file) RFI_GOTO(RFR_NO_MEMORY);
  RFI_GOTO(rfi_path_join(ctx, "", folder, &sweep->folder));
  RFI_GOTO(rfi_path_join(ctx, folder, "sweep.json", &sweep->path));
  if (rfi_utf8_valid(grid, strlen(grid)) != strlen(grid)) /* sweep.json has it */
    RFI_GOTO(rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_open: the path \"%.200s\" is not UTF-8", grid));
  RFI_GOTO(copy_common(sweep, &o));
  RFI_GOTO(rfi_file_read_limited(ctx, grid, MOST_BYTES, &text, &n));
  RFI_GOTO(rfi_grid_read(ctx, sweep->arena, sweep->file, text, n, &sweep->grid));
  RFI_GOTO(rfi_path_parent(ctx, grid, &parent));
  RFI_GOTO(rfi_path_join(ctx, strcmp(parent, ".") == 0 ? "" : parent, sweep->grid.config, &sweep->config));
  RFI_GOTO(rfi_path_parent(ctx, sweep->config, &sweep->config_folder));
  RFI_GOTO(make_runs(sweep));
  RFI_GOTO(open_folder(sweep, o.resume));
  *out = sweep;
  sweep = NULL;
fail: /* also reached on success */
  rfi_free(ctx, text);
  rfi_free(ctx, parent);
  rfr_sweep_close(sweep);
  return s;
}

void rfr_sweep_close(rfr_sweep *s) {
  if (!s) return;
  rfr_ctx *ctx = s->ctx;
  rfi_journal_close(s->lock);
  for (int i = 0; i < s->grid.n && s->runs; i++) rfi_free(ctx, s->runs[i].folder);
  rfi_free(ctx, s->runs);
  rfi_free(ctx, s->folder);
  rfi_free(ctx, s->path);
  rfi_free(ctx, s->config);
  rfi_free(ctx, s->config_folder);
  rfi_arena_destroy(s->arena);
  rfi_free(ctx, s);
}

int rfr_sweep_count(const rfr_sweep *s) { return s ? s->n : 0; }
const char *rfr_sweep_config(const rfr_sweep *s) { return s ? s->config : NULL; }

rfr_status rfr_sweep_get(const rfr_sweep *s, int i, rfr_sweep_run *out) {
  RFI_TRY(rfi_check_handle(s, "rfr_sweep"));
  if (i < 0 || i >= s->n || !out) return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_get: no run %d of %d", i, s->n);
  const run *r = &s->runs[i];
  *out = (rfr_sweep_run){.name = r->name,
                         .folder = r->folder,
                         .overrides = r->sets,
                         .n_overrides = r->n_sets,
                         .n_common = s->n_common,
                         .state = r->state,
                         .started = r->started,
                         .loss = r->loss,
                         .bits_per_byte = r->bits,
                         .step = r->step,
                         .seconds = r->seconds,
                         .error = r->error};
  return RFR_OK;
}

/* The configuration of a run that starts must be the one that was checked. */
static rfr_status check_unchanged(const rfr_sweep *s) {
  char *text;
  size_t n;
  RFI_TRY(read_config_text(s, &text, &n));
  const bool same = rfi_hash_equal(rfi_hash_bytes(text, n), s->config_hash);
  rfi_free(s->ctx, text);
  return same ? RFR_OK : changed(s, 0, s->config, NULL);
}

rfr_status rfr_sweep_set(rfr_sweep *s, int i, rfr_sweep_state state, const char *error) {
  bool done;
  RFI_TRY(rfi_check_handle(s, "rfr_sweep"));
  if (i < 0 || i >= s->n || state < RFR_SWEEP_WAITING || state > RFR_SWEEP_DONE)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_sweep_set: no run %d of %d, or no state %d", i, s->n, (int)state);
  if (state == RFR_SWEEP_RUNNING && !s->runs[i].started) RFI_TRY(check_unchanged(s));
  RFI_TRY(read_log(s, &s->runs[i], &done));
  s->runs[i].state = state;
  rfi_snprintf(s->runs[i].error, sizeof s->runs[i].error, "%s", error ? error : "");
  s->runs[i].error[rfi_utf8_valid(s->runs[i].error, strlen(s->runs[i].error))] = 0;
  return save(s);
}

int rfr_sweep_rank(const rfr_sweep *s, int *out) {
  bool bits = true;
  int n = 0;
  for (int i = 0; s && out && i < s->n; i++) {
    if (s->runs[i].state != RFR_SWEEP_DONE || !isfinite(s->runs[i].loss)) continue;
    bits = bits && isfinite(s->runs[i].bits);
    out[n++] = i;
  }
  for (int i = 1; i < n; i++) /* insertion sort: equal runs stay in the order of the grid */
    for (int k = i; k > 0; k--) {
      const run *a = &s->runs[out[k - 1]], *b = &s->runs[out[k]];
      if (bits ? a->bits <= b->bits : a->loss <= b->loss) break;
      const int x = out[k];
      out[k] = out[k - 1];
      out[k - 1] = x;
    }
  return n;
}
