/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads log.jsonl. A last line without a line feed is still being written and is left for the next call. Every other
 * line must be an object with an event and a step: a damaged log is an error with its line, because a curve with holes
 * that nothing reports would be worse.
 */
#include "report/run_log.h"

#include <math.h>
#include <string.h>

#include "data/json_file.h"

const char *rfi_series_name(rfi_series s) {
  static const char *const names[] = {
#define SERIES_NAME(name) #name,
      RFI_SERIES(SERIES_NAME)
#undef SERIES_NAME
  };
  return names[s];
}

/* ---- growing ---- */

static rfr_status grow(rfr_ctx *ctx, void **items, int64_t *capacity, int64_t n, size_t each) {
  if (n < *capacity) return RFR_OK;
  const int64_t more = *capacity ? 2 * *capacity : 256;
  void *fresh;
  RFI_TRY(rfi_alloc(ctx, (size_t)more * each, &fresh));
  if (n > 0) memcpy(fresh, *items, (size_t)n * each);
  rfi_free(ctx, *items);
  *items = fresh;
  *capacity = more;
  return RFR_OK;
}

static rfr_status copy_text(rfr_ctx *ctx, const char *text, char **out) {
  RFI_TRY(RFI_ALLOC(ctx, strlen(text) + 1, out));
  strcpy(*out, text);
  return RFR_OK;
}

/* ---- one line ---- */

static double number(const json_t *o, const char *key) {
  const json_t *v = json_object_get(o, key);
  return json_is_number(v) ? json_number_value(v) : NAN;
}

static const char *text(const json_t *o, const char *key) {
  const char *s = json_string_value(json_object_get(o, key));
  return s ? s : "";
}

static rfr_status add_loads(rfi_run_log *log, const json_t *layers) {
  const int n = (int)json_array_size(layers);
  if (n == 0 && log->layers == 0) return RFR_OK;
  if (log->layers == 0) { /* earlier rows have none */
    log->layers = n;
    log->loads_capacity = 0;
  }
  const int64_t need = log->rows.n * log->layers;
  while (need > log->loads_capacity) {
    const int64_t had = log->loads_capacity;
    RFI_TRY(grow(log->ctx, (void **)&log->loads, &log->loads_capacity, had, sizeof *log->loads));
    for (int64_t i = had; i < log->loads_capacity; i++) log->loads[i] = NAN;
  }
  float *row = log->loads + (log->rows.n - 1) * log->layers;
  for (int l = 0; l < log->layers; l++) {
    const json_t *v = json_array_get(layers, (size_t)l);
    row[l] = json_is_number(v) ? (float)json_number_value(v) : NAN;
  }
  return RFR_OK;
}

/* Tokens per second since an earlier row that is at least a tenth of a second older. On a GPU steps are launched ahead,
 * so the time of a single step may be only that of reading its numbers. */
static double speed_of(rfi_run_log *log, const json_t *o, int64_t step) {
  const double tokens = number(o, "tokens"), seconds = number(o, "seconds"), time = number(o, "time");
  const double passed = time - log->paced_time, steps = (double)(step - log->paced_step);
  const bool first = !(log->paced_time > 0.0);
  if (!first && passed < 0.1) return NAN;
  log->paced_step = step;
  log->paced_time = time > 0.0 ? time : 0.0;
  if (!first) return tokens * steps / passed;
  return seconds > 0.0 ? tokens / seconds : NAN;
}

static rfr_status add_row(rfi_run_log *log, rfi_log_rows *rows, const json_t *o, int64_t step) {
  RFI_TRY(grow(log->ctx, (void **)&rows->items, &rows->capacity, rows->n, sizeof *rows->items));
  rfi_log_row *row = &rows->items[rows->n++];
  row->step = step;
  row->elapsed = log->elapsed;
  row->skipped = number(o, "skipped") > 0;
  for (int s = 0; s < RFI_SERIES_N; s++) row->value[s] = number(o, rfi_series_name((rfi_series)s));
  const double tokens = number(o, "tokens");
  if (rows != &log->rows) return RFR_OK;
  row->value[RFI_SERIES_tokens_per_second] = speed_of(log, o, step);
  if (tokens > 0) log->tokens = (int64_t)tokens;
  return add_loads(log, json_object_get(o, "layer_loads"));
}

static rfr_status add_event(rfi_run_log *log, const char *kind, const char *message, int64_t step) {
  RFI_TRY(grow(log->ctx, (void **)&log->events, &log->events_capacity, log->n_events, sizeof *log->events));
  rfi_log_event *e = &log->events[log->n_events];
  *e = (rfi_log_event){.step = step, .elapsed = log->elapsed};
  RFI_TRY(copy_text(log->ctx, kind, &e->kind));
  log->n_events++;
  return copy_text(log->ctx, message, &e->text);
}

/* A session begins after `step` steps. Rows with later steps come from an earlier session that has lost these steps. */
static void begin_session(rfi_run_log *log, int64_t step, double time) {
  rfi_log_rows *r = &log->rows, *e = &log->evaluations;
  while (r->n > 0 && r->items[r->n - 1].step > step) r->n--;
  while (e->n > 0 && e->items[e->n - 1].step > step) e->n--;
  log->elapsed = r->n > 0 ? r->items[r->n - 1].elapsed : 0.0;
  log->since = time;
  log->last = log->elapsed;
}

static void pass_time(rfi_run_log *log, double time) {
  if (!(time > 0.0)) return;
  log->written = time;
  if (log->since > 0.0 && time > log->since) log->elapsed = log->last + (time - log->since);
}

static rfr_status take_line(rfi_run_log *log, const json_t *o) {
  int64_t step;
  const char *kind;
  RFI_TRY(rfi_json_get_string(o, log->path, "event", true, &kind));
  RFI_TRY(rfi_json_get_int(o, log->path, "step", true, 0, INT64_MAX, &step));
  const double time = number(o, "time"), steps = number(o, "steps");
  const bool starts = strcmp(kind, "start") == 0;
  if (starts) begin_session(log, step, time > 0.0 ? time : 0.0);
  /* Lines before a start have no step. If the session is then refused, the run's step does not change. */
  if (strcmp(kind, "compile") != 0) pass_time(log, time);
  else if (time > 0.0) log->written = time;
  if (starts || step > log->step) log->step = step;
  if (steps > 0) log->steps = (int64_t)steps;
  if (strcmp(kind, "metrics") == 0) return add_row(log, &log->rows, o, step);
  log->paced_time = 0.0; /* the time of this event does not count steps */
  if (strcmp(kind, "evaluation") == 0) {
    rfi_log_rows *e = &log->evaluations; /* a resume of a finished run evaluates its last step again */
    if (e->n > 0 && e->items[e->n - 1].step == step) e->n--;
    return add_row(log, e, o, step);
  }
  return add_event(log, kind, text(o, "message"), step);
}

/* ---- the file ---- */

static rfr_status take_text(rfi_run_log *log, const char *text, size_t n) {
  for (size_t at = 0; at < n;) {
    const char *end = memchr(text + at, '\n', n - at);
    if (!end) break;
    const size_t length = (size_t)(end - (text + at));
    json_error_t error;
    json_t *o = json_loadb(text + at, length, JSON_REJECT_DUPLICATES, &error);
    log->line++;
    if (!o && (json_error_code(&error) == json_error_out_of_memory || !error.text[0]))
      return rfi_fail(RFI_E_NO_MEMORY, "out of memory while reading %s", log->path);
    if (!o) return rfi_fail_at(RFI_E_JSON, log->path, log->line, "column %d: %s", error.column, error.text);
    const rfr_status s = take_line(log, o);
    json_decref(o);
    if (s != RFR_OK) return rfi_fail_prefix("line %lld: ", (long long)log->line);
    at += length + 1;
    log->offset += (int64_t)length + 1;
  }
  return RFR_OK;
}

rfr_status rfi_run_log_read(rfi_run_log *log) {
  enum { PIECE = 4 << 20 };
  rfi_file *file;
  char *piece = NULL;
  RFI_TRY(rfi_file_open(log->ctx, log->path, &file));
  rfr_status s = RFR_OK;
  int64_t size = rfi_file_size(file), before = -1;
  if (size < log->offset)
    s = rfi_fail_at(RFI_E_FILE_READ, log->path, 0, "the file became shorter: it had %lld bytes, now %lld",
                    (long long)log->offset, (long long)size);
  if (s == RFR_OK) s = RFI_ALLOC(log->ctx, PIECE, &piece);
  while (s == RFR_OK && log->offset < size && log->offset != before) {
    const size_t n = size - log->offset < PIECE ? (size_t)(size - log->offset) : PIECE;
    before = log->offset;
    s = rfi_file_read_at(file, piece, n, log->offset);
    if (s == RFR_OK) s = take_text(log, piece, n);
  }
  rfi_free(log->ctx, piece);
  rfi_file_close(file);
  return s;
}

rfr_status rfi_run_log_open(rfr_ctx *ctx, const char *folder, rfi_run_log *out) {
  char kind;
  memset(out, 0, sizeof *out);
  out->ctx = ctx;
  RFI_TRY(rfi_path_kind(folder, &kind));
  if (!kind) return rfi_fail_at(RFI_E_FILE_OPEN, folder, 0, "no such folder");
  if (kind != 'd' && kind != 'l') return rfi_fail(RFI_E_RUN_FOLDER, "%s is a file", folder);
  RFI_TRY(rfi_path_join(ctx, folder, "log.jsonl", &out->path));
  RFI_TRY(rfi_path_kind(out->path, &kind));
  if (!kind) return rfi_fail(RFI_E_RUN_FOLDER, "%s has no log.jsonl", folder);
  RFI_TRY(rfi_run_log_read(out));
  if (out->line == 0) return rfi_fail_at(RFI_E_RUN_FOLDER, out->path, 0, "the log is empty");
  return RFR_OK;
}

void rfi_run_log_close(rfi_run_log *log) {
  if (!log->ctx) return;
  for (int64_t i = 0; i < log->n_events; i++) {
    rfi_free(log->ctx, log->events[i].kind);
    rfi_free(log->ctx, log->events[i].text);
  }
  rfi_free(log->ctx, log->events);
  rfi_free(log->ctx, log->rows.items);
  rfi_free(log->ctx, log->evaluations.items);
  rfi_free(log->ctx, log->loads);
  rfi_free(log->ctx, log->path);
  memset(log, 0, sizeof *log);
}

const char *rfi_run_log_end(const rfi_run_log *log) {
  const char *end = NULL;
  for (int64_t i = 0; i < log->n_events; i++) {
    if (strcmp(log->events[i].kind, "start") == 0) end = NULL;
    if (strcmp(log->events[i].kind, "end") == 0) end = log->events[i].text;
  }
  return end;
}
