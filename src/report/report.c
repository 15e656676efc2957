/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens a report and writes its page.
 *
 * The page is a fixed text around one block of JSON. Its policy allows only the script and the style sheet whose hashes
 * the build has computed, and only connections to the server of a followed page. So markup that enters the page through
 * a defect of ours has no effect.
 *
 * A page of several long runs must stay small: all curves together get a fixed number of points.
 */
#include "report/report.h"

#include <string.h>

#include "data/file.h"
#include "made/report_page.h"
#include "report/run_files.h"
#include "report/run_watched.h"
#include "report/thin.h"

enum {
  POINTS = 140000, /* points of all curves: about 1.6 MB */
  LEAST_POINTS = 200,
  MOST_POINTS = 4000,
  TIME_POINTS = 400,
  BUFFERS = 3000,  /* buffers of all plans */
  OPS = 1000,      /* rows of all profiles */
  CELLS = 60000,   /* cells of all heat maps */
  WATCHED = 60000, /* numbers of all watched values */
  MOST_COLUMNS = 400,
  EVENTS = 400, /* events of each run */
  SAMPLES = 60
};

/* ---- opening ---- */

static rfr_status copy(rfr_ctx *ctx, const char *text, size_t n, char **out) {
  RFI_TRY(RFI_ALLOC(ctx, n + 1, out));
  memcpy(*out, text, n);
  return RFR_OK;
}

/* "runs/first/" -> "first" */
static rfr_status name_run(rfr_ctx *ctx, const char *folder, char **out) {
  size_t end = strlen(folder), begin;
  while (end > 1 && folder[end - 1] == '/') end--;
  for (begin = end; begin > 0 && folder[begin - 1] != '/';) begin--;
  return begin == end ? copy(ctx, folder, end, out) : copy(ctx, folder + begin, end - begin, out);
}

static rfr_status name_apart(rfr_report *r) {
  bool equal[RFR_REPORT_RUNS] = {false};
  for (int i = 0; i < r->n; i++)
    for (int k = 0; k < r->n; k++) equal[i] |= k != i && strcmp(r->runs[i].name, r->runs[k].name) == 0;
  for (int i = 0; i < r->n; i++) {
    if (!equal[i]) continue;
    rfi_free(r->ctx, r->runs[i].name);
    r->runs[i].name = NULL;
    RFI_TRY(copy(r->ctx, r->runs[i].folder, strlen(r->runs[i].folder), &r->runs[i].name));
  }
  return RFR_OK;
}

rfr_status rfr_report_open(rfr_ctx *ctx, const char *const *runs, int n, rfr_report **out) {
  rfr_report *r;
  rfr_status s;
  RFI_TRY(RFI_CHECK_OUT(out, "result"));
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (n < 1 || n > RFR_REPORT_RUNS)
    return rfi_fail(RFI_E_ARGUMENT, "%d runs are given; a report has 1 to %d", n, RFR_REPORT_RUNS);
  RFI_TRY(rfi_check_handle(runs, "list of runs"));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *r, &r));
  r->ctx = ctx;
  for (int i = 0; i < n; i++) {
    RFI_GOTO(rfi_check_handle(runs[i], "folder of a run"));
    r->n = i + 1;
    RFI_GOTO(copy(ctx, runs[i], strlen(runs[i]), &r->runs[i].folder));
    RFI_GOTO(name_run(ctx, runs[i], &r->runs[i].name));
    RFI_GOTO(rfi_run_log_open(ctx, runs[i], &r->runs[i].log));
  }
  RFI_GOTO(name_apart(r));
  *out = r;
  return RFR_OK;
fail:
  rfr_report_close(r);
  return s;
}

rfr_status rfr_report_read(rfr_report *r, int *changed) {
  RFI_TRY(RFI_CHECK_OUT(changed, "result"));
  RFI_TRY(rfi_check_handle(r, "rfr_report"));
  for (int i = 0; i < r->n; i++) {
    const int64_t before = r->runs[i].log.offset;
    RFI_TRY(rfi_run_log_read(&r->runs[i].log));
    *changed |= r->runs[i].log.offset != before;
  }
  return RFR_OK;
}

int64_t rfr_report_bytes(const rfr_report *r) {
  int64_t bytes = 0;
  for (int i = 0; r && i < r->n; i++) bytes += r->runs[i].log.offset;
  return bytes;
}

void rfr_report_close(rfr_report *r) {
  if (!r) return;
  for (int i = 0; i < r->n; i++) {
    rfi_run_log_close(&r->runs[i].log);
    rfi_free(r->ctx, r->runs[i].folder);
    rfi_free(r->ctx, r->runs[i].name);
  }
  rfi_free(r->ctx, r);
}

/* ---- curves ---- */

/* Steps as differences, which take a third of the bytes. */
static void put_steps(rfi_inert *j, const rfi_log_rows *rows, const int64_t *at, int64_t n) {
  rfi_inert_begin(j, NULL, '[');
  for (int64_t i = 0; i < n; i++)
    rfi_inert_integer(j, NULL, rows->items[at[i]].step - (i > 0 ? rows->items[at[i - 1]].step : 0));
  rfi_inert_end(j, ']');
}

static void put_curve(rfi_inert *j, const rfi_log_rows *rows, rfi_series series, const int64_t *at, int64_t n) {
  if (n == 0) return;
  rfi_inert_begin(j, rfi_series_name(series), '[');
  put_steps(j, rows, at, n);
  rfi_inert_begin(j, NULL, '[');
  for (int64_t i = 0; i < n; i++) rfi_inert_number(j, NULL, rows->items[at[i]].value[series]);
  rfi_inert_end(j, ']');
  rfi_inert_end(j, ']');
}

static bool has_series(const rfi_log_rows *rows, int series) {
  for (int64_t i = 0; i < rows->n; i++)
    if (rows->items[i].value[series] == rows->items[i].value[series]) return true;
  return false;
}

static int64_t points_of_curve(const rfr_report *r) {
  int64_t curves = 0;
  for (int i = 0; i < r->n; i++)
    for (int s = 0; s < RFI_SERIES_N; s++) curves += has_series(&r->runs[i].log.rows, s);
  const int64_t each = POINTS / (curves > 0 ? curves : 1);
  return each > MOST_POINTS ? MOST_POINTS : each < LEAST_POINTS ? LEAST_POINTS : each;
}

static rfr_status put_curves(rfi_inert *j, const char *key, const rfi_log_rows *rows, int64_t most) {
  int64_t *at;
  RFI_TRY(RFI_ALLOC(j->text.ctx, (size_t)(most + 4) * sizeof *at, &at));
  rfi_inert_begin(j, key, '{');
  for (int s = 0; s < RFI_SERIES_N; s++) put_curve(j, rows, (rfi_series)s, at, rfi_thin(rows, (rfi_series)s, most, at));
  rfi_inert_end(j, '}');
  rfi_free(j->text.ctx, at);
  return RFR_OK;
}

/* "elapsed": [steps, seconds] at some steps; the page interpolates the times of other steps. */
static void put_elapsed(rfi_inert *j, const rfi_run_log *log) {
  const rfi_log_rows *rows = &log->rows;
  const int64_t every = rows->n > TIME_POINTS ? (rows->n + TIME_POINTS - 1) / TIME_POINTS : 1;
  if (log->written == 0.0) return;
  for (int column = 0; column < 2; column++) {
    rfi_inert_begin(j, column ? "elapsed" : "elapsed_step", '[');
    for (int64_t i = 0; i < rows->n; i++) {
      if (i % every != 0 && i != rows->n - 1) continue;
      if (column) rfi_inert_number(j, NULL, rows->items[i].elapsed);
      else rfi_inert_integer(j, NULL, rows->items[i].step);
    }
    rfi_inert_end(j, ']');
  }
}

/* ---- experts ---- */

/* "loads": per column the largest load of a layer over the steps of the column, in percent of the mean. */
static void put_loads(rfi_inert *j, const rfi_run_log *log, int64_t cells) {
  if (log->layers == 0) return;
  int64_t columns = cells / log->layers;
  if (columns > MOST_COLUMNS) columns = MOST_COLUMNS;
  if (columns < 20) columns = 20;
  if (columns > log->rows.n) columns = log->rows.n;
  rfi_inert_begin(j, "loads", '{');
  rfi_inert_begin(j, "steps", '['); /* the first of each column */
  for (int64_t c = 0; c < columns; c++) rfi_inert_integer(j, NULL, log->rows.items[c * log->rows.n / columns].step);
  rfi_inert_end(j, ']');
  rfi_inert_begin(j, "layers", '[');
  for (int l = 0; l < log->layers; l++) {
    rfi_inert_begin(j, NULL, '[');
    for (int64_t c = 0; c < columns; c++) {
      float most = -1.0f;
      for (int64_t i = c * log->rows.n / columns; i < (c + 1) * log->rows.n / columns; i++)
        if (log->loads[i * log->layers + l] > most) most = log->loads[i * log->layers + l];
      rfi_inert_integer(j, NULL, most < 0 ? -1 : (int64_t)(100.0f * most + 0.5f));
    }
    rfi_inert_end(j, ']');
  }
  rfi_inert_end(j, ']');
  rfi_inert_end(j, '}');
}

/* ---- events ---- */

static void put_events(rfi_inert *j, const rfi_run_log *log) {
  const int64_t from = log->n_events > EVENTS ? log->n_events - EVENTS : 0;
  rfi_inert_integer(j, "events_in_all", log->n_events);
  rfi_inert_begin(j, "events", '['); /* the last ones */
  for (int64_t i = from; i < log->n_events; i++) {
    const rfi_log_event *e = &log->events[i];
    rfi_inert_begin(j, NULL, '[');
    rfi_inert_integer(j, NULL, e->step);
    rfi_inert_number(j, NULL, e->elapsed);
    rfi_inert_text(j, NULL, e->kind);
    rfi_inert_text(j, NULL, e->text);
    rfi_inert_end(j, ']');
  }
  rfi_inert_end(j, ']');
}

/* ---- the page ---- */

static rfr_status put_run(rfi_inert *j, const rfr_report *r, const rfi_report_run *run, int64_t points) {
  const rfi_run_log *log = &run->log;
  const char *end = rfi_run_log_end(log);
  int64_t skipped = 0;
  for (int64_t i = 0; i < log->rows.n; i++) skipped += log->rows.items[i].skipped;
  rfi_inert_begin(j, NULL, '{');
  rfi_inert_text(j, "name", run->name);
  rfi_inert_text(j, "folder", run->folder);
  rfi_inert_text(j, "end", end ? end : "");
  rfi_inert_integer(j, "step", log->step);
  rfi_inert_integer(j, "steps", log->steps);
  rfi_inert_integer(j, "rows", log->rows.n);
  rfi_inert_integer(j, "skipped", skipped);
  rfi_inert_integer(j, "tokens", log->tokens);
  rfi_inert_number(j, "seconds", log->written > 0.0 ? log->elapsed : -1.0);
  put_elapsed(j, log);
  RFI_TRY(put_curves(j, "series", &log->rows, points));
  RFI_TRY(put_curves(j, "evaluations", &log->evaluations, points));
  put_loads(j, log, CELLS / r->n);
  put_events(j, log);
  RFI_TRY(rfi_run_files_config(r->ctx, run->folder, j));
  RFI_TRY(rfi_run_files_plan(r->ctx, run->folder, BUFFERS / r->n, j));
  RFI_TRY(rfi_run_files_profile(r->ctx, run->folder, OPS / r->n, j));
  RFI_TRY(rfi_run_files_samples(r->ctx, run->folder, SAMPLES, j));
  RFI_TRY(rfi_run_watched(r->ctx, run->folder, WATCHED / r->n, j));
  rfi_inert_end(j, '}');
  return j->status;
}

static rfr_status put_data(rfi_inert *j, const rfr_report *r, int follow) {
  const int64_t points = points_of_curve(r);
  rfi_inert_begin(j, NULL, '{');
  rfi_inert_text(j, "version", rfr_version());
  rfi_inert_integer(j, "follow", follow != 0);
  rfi_inert_integer(j, "bytes", rfr_report_bytes(r));
  rfi_inert_begin(j, "runs", '[');
  for (int i = 0; i < r->n; i++) RFI_TRY(put_run(j, r, &r->runs[i], points));
  rfi_inert_end(j, ']');
  rfi_inert_end(j, '}');
  return j->status;
}

rfr_status rfr_report_data(rfr_report *r, rfr_write_fn write, void *user) {
  RFI_TRY(rfi_check_handle(r, "rfr_report"));
  rfi_inert j = {.text = {.ctx = r->ctx}};
  const rfr_status s = put_data(&j, r, 1);
  if (s == RFR_OK) write(j.text.data, j.text.n, user);
  rfi_string_deinit(&j.text);
  return s;
}

static void write_text(rfr_write_fn write, void *user, const char *text) { write(text, strlen(text), user); }

rfr_status rfr_report_page(rfr_report *r, int follow, rfr_write_fn write, void *user) {
  RFI_TRY(rfi_check_handle(r, "rfr_report"));
  rfi_inert j = {.text = {.ctx = r->ctx}};
  const rfr_status s = put_data(&j, r, follow);
  if (s == RFR_OK) {
    write_text(write, user,
               "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
               "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; base-uri 'none'; "
               "form-action 'none'; script-src 'sha256-" RFI_REPORT_SCRIPT_HASH
               "'; style-src 'sha256-" RFI_REPORT_STYLE_HASH "'; ");
    write_text(write, user, follow ? "connect-src 'self'; img-src data:\">\n" : "img-src data:\">\n");
    write_text(write, user,
               "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
               "<meta name=\"generator\" content=\"refrain report\">\n"
               "<link rel=\"icon\" href=\"data:,\"><title>Refrain: report</title>\n<style>");
    write_text(write, user, rfi_report_style);
    write_text(write, user,
               "</style></head><body><noscript>This page draws its pictures with a script.</noscript>\n"
               "<script type=\"application/json\" id=\"data\">");
    write(j.text.data, j.text.n, user);
    write_text(write, user, "</script>\n<script>");
    write_text(write, user, rfi_report_script);
    write_text(write, user, "</script></body></html>\n");
  }
  rfi_string_deinit(&j.text);
  return s;
}
