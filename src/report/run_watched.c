/* SPDX-License-Identifier: Apache-2.0
 *
 * The file is read twice: for the steps of its lines, then for the lines that are shown, which are spread evenly. The
 * last one is always shown.
 */
#include "report/run_watched.h"

#include "base/json.h"
#include "data/json_file.h"
#include "data/lines.h"

enum { MOST_COLUMNS = 200, LEAST_COLUMNS = 12, NUMBERS = 8 };

/* The shown statistics, by their index in a value's list (watched_log.h). */
static const struct {
  const char *key;
  int at;
} shown[] = {{"rms", 4}, {"largest", 5}, {"smallest", 6}, {"mean", 3}, {"zeros", 7}, {"nans", 1}, {"infs", 2}};
enum { SHOWN = sizeof shown / sizeof shown[0] };

typedef struct watched {
  rfr_ctx *ctx;
  char *path;
  int64_t *line, *step; /* steps of the lines that count */
  int64_t n, capacity;
  json_t **value; /* the object `values` of each shown line */
  int64_t *at;    /* the step of each */
  int64_t columns, names;
  json_t **kept; /* the parsed lines */
} watched;

static rfr_status parse(const char *path, const char *text, size_t n, int64_t line, json_t **out, int64_t *step) {
  rfr_status s = rfi_json_parse(path, text, n, out);
  if (s == RFR_OK) s = rfi_json_get_int(*out, path, "step", true, 0, INT64_MAX, step);
  if (s == RFR_OK && !json_is_object(json_object_get(*out, "values")))
    s = rfi_fail_at(RFI_E_JSON, path, 0, "\"values\" is not an object");
  if (s != RFR_OK) rfi_fail_prefix("line %lld: ", (long long)line);
  return s;
}

static rfr_status add_line(watched *w, int64_t line, int64_t step) {
  while (w->n > 0 && w->step[w->n - 1] >= step) w->n--; /* written by a session that has lost these steps */
  if (w->n == w->capacity) {
    const int64_t capacity = w->capacity ? 2 * w->capacity : 64;
    int64_t *lines;
    RFI_TRY(RFI_ALLOC(w->ctx, 2 * (size_t)capacity * sizeof *lines, &lines));
    for (int64_t i = 0; i < w->n; i++) lines[i] = w->line[i], lines[capacity + i] = w->step[i];
    rfi_free(w->ctx, w->line);
    w->line = lines, w->step = lines + capacity, w->capacity = capacity;
  }
  w->line[w->n] = line;
  w->step[w->n++] = step;
  return RFR_OK;
}

static rfr_status read_steps(watched *w) {
  rfi_lines *file;
  const char *text;
  size_t n;
  int64_t line, step;
  RFI_TRY(rfi_lines_open(w->ctx, w->path, &file));
  rfr_status s = RFR_OK;
  while (s == RFR_OK && (s = rfi_lines_next(file, &text, &n, &line)) == RFR_OK && text) {
    json_t *o = NULL;
    s = parse(w->path, text, n, line, &o, &step);
    if (s == RFR_OK) s = add_line(w, line, step);
    if (s == RFR_OK) w->names = (int64_t)json_object_size(json_object_get(o, "values"));
    json_decref(o);
  }
  rfi_lines_close(file);
  return s;
}

/* The i-th shown line, counted from the end, so that the last one is shown. */
static int64_t line_of(const watched *w, int64_t column) {
  return w->n - 1 - (w->columns - 1 - column) * w->n / w->columns;
}

static rfr_status read_shown(watched *w) {
  rfi_lines *file;
  const char *text;
  size_t n;
  int64_t line, column = 0;
  RFI_TRY(RFI_ALLOC(w->ctx, (size_t)(w->columns + 1) * sizeof *w->value, &w->value));
  RFI_TRY(RFI_ALLOC(w->ctx, (size_t)(w->columns + 1) * sizeof *w->kept, &w->kept));
  RFI_TRY(RFI_ALLOC(w->ctx, (size_t)(w->columns + 1) * sizeof *w->at, &w->at));
  RFI_TRY(rfi_lines_open(w->ctx, w->path, &file));
  rfr_status s = RFR_OK;
  while (s == RFR_OK && column < w->columns && (s = rfi_lines_next(file, &text, &n, &line)) == RFR_OK && text) {
    if (line != w->line[line_of(w, column)]) continue;
    s = parse(w->path, text, n, line, &w->kept[column], &w->at[column]);
    w->value[column] = json_object_get(w->kept[column], "values");
    column++;
  }
  rfi_lines_close(file);
  w->columns = s == RFR_OK ? column : 0;
  return s;
}

static void put_statistic(const watched *w, int k, int64_t names, rfi_inert *j) {
  const char *name;
  json_t *unused;
  int64_t i = 0;
  rfi_inert_begin(j, shown[k].key, '[');
  json_object_foreach(w->value[w->columns - 1], name, unused) {
    if (i++ == names) break;
    rfi_inert_begin(j, NULL, '[');
    for (int64_t c = 0; c < w->columns; c++) {
      const json_t *list = json_object_get(w->value[c], name), *x = json_array_get(list, (size_t)shown[k].at);
      rfi_inert_value(j, NULL, json_is_number(x) ? x : NULL);
    }
    rfi_inert_end(j, ']');
  }
  rfi_inert_end(j, ']');
}

static void put(const watched *w, int64_t names, rfi_inert *j) {
  const char *name;
  json_t *unused;
  int64_t i = 0;
  rfi_inert_begin(j, "watched", '{');
  rfi_inert_integer(j, "names_in_all", w->names);
  rfi_inert_begin(j, "steps", '[');
  for (int64_t c = 0; c < w->columns; c++) rfi_inert_integer(j, NULL, w->at[c]);
  rfi_inert_end(j, ']');
  rfi_inert_begin(j, "names", '[');
  json_object_foreach(w->value[w->columns - 1], name, unused) {
    if (i++ == names) break;
    rfi_inert_text(j, NULL, name);
  }
  rfi_inert_end(j, ']');
  for (int k = 0; k < SHOWN; k++) put_statistic(w, k, names, j);
  rfi_inert_end(j, '}');
}

rfr_status rfi_run_watched(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j) {
  char kind;
  watched w = {.ctx = ctx};
  rfr_status s;
  RFI_TRY(rfi_path_join(ctx, folder, "watch.jsonl", &w.path));
  RFI_GOTO(rfi_path_kind(w.path, &kind));
  if (kind) RFI_GOTO(read_steps(&w));
  if (w.n == 0 || w.names == 0) goto fail;
  int64_t names = most / SHOWN / LEAST_COLUMNS;
  if (names > w.names) names = w.names;
  w.columns = most / SHOWN / (names > 0 ? names : 1);
  if (w.columns > MOST_COLUMNS) w.columns = MOST_COLUMNS;
  if (w.columns > w.n) w.columns = w.n;
  RFI_GOTO(read_shown(&w));
  if (w.columns > 0) put(&w, names, j);
fail:
  for (int64_t c = 0; w.kept && c <= w.columns; c++) json_decref(w.kept[c]);
  rfi_free(ctx, w.value);
  rfi_free(ctx, w.kept);
  rfi_free(ctx, w.at);
  rfi_free(ctx, w.line);
  rfi_free(ctx, w.path);
  return s;
}
