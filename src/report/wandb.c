/* SPDX-License-Identifier: Apache-2.0
 *
 * A run as an offline run of Weights & Biases, from its log: FOLDER/offline-run-TIME-ID/run-ID.wandb. A log that has a
 * step twice, because the run was resumed, gives it once.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "data/file.h"
#include "data/hash.h"
#include "report/report.h"
#include "report/run_files.h"
#include "report/wandb_file.h"

enum { MOST_VALUES = 2 * RFI_SERIES_N + 4, NUMBER_BYTES = 32 };

typedef struct values {
  rfi_wandb_value items[MOST_VALUES];
  char keys[MOST_VALUES][48], numbers[MOST_VALUES][NUMBER_BYTES];
  size_t n;
} values;

/* A number that is not finite is left out. */
static void put(values *v, const char *group, const char *name, double x) {
  if (!isfinite(x) || v->n == MOST_VALUES) return;
  rfi_snprintf(v->keys[v->n], sizeof v->keys[0], "%s%s", group, name);
  rfi_format_double(v->numbers[v->n], x);
  v->items[v->n] = (rfi_wandb_value){v->keys[v->n], v->numbers[v->n]};
  v->n++;
}

static void put_row(values *v, const char *group, const rfi_log_row *row) {
  for (int i = 0; i < RFI_SERIES_N; i++) put(v, group, rfi_series_name((rfi_series)i), row->value[i]);
}

/* The client displays these as step and time. */
static void put_place(values *v, const rfi_log_row *row, double start) {
  put(v, "", "_step", (double)row->step);
  put(v, "", "_runtime", row->elapsed);
  put(v, "", "_timestamp", start + row->elapsed);
}

/* ---- configuration ---- */

/* A value of config.yaml: a number, or text. */
static json_t *value_of(const char *text) {
  char *end;
  const double x = rfi_strtod(text, &end);
  if (*text && !*end && isfinite(x)) return json_real(x);
  if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0) return json_boolean(*text == 't');
  return json_string(text);
}

static rfr_status read_config(rfr_ctx *ctx, const char *folder, json_t **out) {
  rfi_inert j = {.text = {.ctx = ctx}};
  json_t *rows = NULL, *config = json_object();
  *out = NULL;
  rfi_inert_begin(&j, NULL, '{');
  rfr_status s = rfi_run_files_config(ctx, folder, &j);
  rfi_inert_end(&j, '}');
  if (s == RFR_OK) s = j.status;
  if (s == RFR_OK) s = rfi_json_parse(folder, j.text.data, j.text.n, &rows);
  const json_t *list = json_object_get(rows, "config");
  for (size_t i = 0; i < json_array_size(list) && s == RFR_OK; i++) {
    const char *key = json_string_value(json_array_get(json_array_get(list, i), 0));
    const char *value = json_string_value(json_array_get(json_array_get(list, i), 1));
    if (key && value) s = rfi_json_set(config, key, value_of(value));
  }
  json_decref(rows);
  rfi_string_deinit(&j.text);
  if (s == RFR_OK && config) *out = config;
  else json_decref(config);
  return s == RFR_OK && !config ? rfi_fail(RFI_E_NO_MEMORY, "reading %s", folder) : s;
}

static rfr_status begin(rfi_wandb *w, rfr_ctx *ctx, const rfi_report_run *run, const char *id, double start) {
  rfi_string text = {.ctx = ctx};
  rfi_wandb_value *items = NULL;
  json_t *config, *value;
  const char *key;
  size_t n = 0;
  RFI_TRY(read_config(ctx, run->folder, &config));
  rfr_status s = RFI_ALLOC(ctx, (json_object_size(config) + 1) * sizeof *items, &items);
  size_t *begins = NULL;
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (json_object_size(config) + 1) * sizeof *begins, &begins);
  json_object_foreach(config, key, value) {
    char *json = json_dumps(value, JSON_ENCODE_ANY);
    if (s == RFR_OK && !json) s = rfi_fail(RFI_E_NO_MEMORY, "writing %s", run->folder);
    if (s == RFR_OK) begins[n] = text.n, items[n++].key = key;
    if (s == RFR_OK) s = rfi_string_append(&text, json, strlen(json) + 1);
    free(json);
  }
  for (size_t i = 0; i < n && s == RFR_OK; i++) items[i].json = text.data + begins[i];
  if (s == RFR_OK) rfi_wandb_begin(w, id, "refrain", run->name, start, items, n);
  rfi_free(ctx, items);
  rfi_free(ctx, begins);
  rfi_string_deinit(&text);
  json_decref(config);
  return s == RFR_OK ? w->status : s;
}

/* ---- the file ---- */

/* Adds rows and evaluations in the order of steps; both of one step form one record. */
static void put_steps(rfi_wandb *w, const rfi_run_log *log, double start) {
  static const rfi_log_row none = {.step = INT64_MAX};
  values last = {.n = 0};
  for (int64_t i = 0, k = 0; i < log->rows.n || k < log->evaluations.n;) {
    const rfi_log_row *row = i < log->rows.n ? &log->rows.items[i] : &none;
    const rfi_log_row *evaluation = k < log->evaluations.n ? &log->evaluations.items[k] : &none;
    const int64_t step = row->step < evaluation->step ? row->step : evaluation->step;
    values v;
    v.n = 0;
    put_place(&v, evaluation->step == step ? evaluation : row, start);
    if (row->step == step) put_row(&v, "train/", row), i++;
    if (evaluation->step == step) put_row(&v, "evaluation/", evaluation), k++;
    rfi_wandb_history(w, step, v.items, v.n);
  }
  put_place(&last, log->rows.n > 0 ? &log->rows.items[log->rows.n - 1] : &none, start);
  if (log->rows.n == 0) last.n = 0;
  if (log->rows.n > 0) put_row(&last, "train/", &log->rows.items[log->rows.n - 1]);
  if (log->evaluations.n > 0) put_row(&last, "evaluation/", &log->evaluations.items[log->evaluations.n - 1]);
  const char *end = rfi_run_log_end(log);
  rfi_wandb_end(w, last.items, last.n, log->elapsed, end && strcmp(end, "done") != 0 && strcmp(end, "stopped") != 0);
}

/* Eight digits that depend only on the run, so that a second upload replaces the first. */
static void name_file(const rfi_report_run *run, double start, char id[9], char when[32]) {
  char text[64];
  struct tm tm;
  const time_t seconds = (time_t)start;
  rfi_snprintf(text, sizeof text, "%.32s %.3f", run->name, start);
  rfi_snprintf(id, 9, "%08x", (unsigned)rfi_hash_bytes(text, strlen(text)).low);
  memset(&tm, 0, sizeof tm);
  gmtime_r(&seconds, &tm);
  strftime(when, 32, "%Y%m%d_%H%M%S", &tm);
}

static rfr_status write_file(rfr_ctx *ctx, const char *folder, const char *id, const char *when, const rfi_wandb *w) {
  char inner[96], name[32], *path = NULL, *file = NULL, kind;
  rfi_snprintf(inner, sizeof inner, "offline-run-%s-%s", when, id);
  rfi_snprintf(name, sizeof name, "run-%s.wandb", id);
  rfr_status s = rfi_path_join(ctx, folder, inner, &path);
  if (s == RFR_OK) s = rfi_path_join(ctx, path, name, &file);
  if (s == RFR_OK) s = rfi_path_kind(file, &kind);
  if (s == RFR_OK && kind) s = rfi_fail(RFI_E_EXPORT_EXISTS, "%s exists", file);
  if (s == RFR_OK) s = rfi_dir_create(path);
  if (s == RFR_OK) s = rfi_file_write(ctx, file, w->text.data, w->text.n);
  rfi_free(ctx, path);
  rfi_free(ctx, file);
  return s;
}

rfr_status rfr_report_wandb(rfr_report *r, int i, const char *folder) {
  RFI_TRY(rfi_check_handle(r, "rfr_report"));
  if (i < 0 || i >= r->n || !folder || !*folder)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_report_wandb: no run %d of %d, or no folder", i, r->n);
  const rfi_report_run *run = &r->runs[i];
  const double start = run->log.written > run->log.elapsed ? run->log.written - run->log.elapsed : 0.0;
  rfi_wandb w = {.text = {.ctx = r->ctx}};
  char id[9], when[32];
  name_file(run, start, id, when);
  rfr_status s = begin(&w, r->ctx, run, id, start);
  if (s == RFR_OK) put_steps(&w, &run->log, start);
  if (s == RFR_OK) s = w.status;
  if (s == RFR_OK) s = write_file(r->ctx, folder, id, when, &w);
  rfi_wandb_deinit(&w);
  return s;
}
