/* SPDX-License-Identifier: Apache-2.0
 *
 * Differences of configurations and curves; the public function. Values of a log are compared as they were logged.
 */
#include "report/diff.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "refrain/report.h"
#include "report/inert.h"
#include "report/report.h"
#include "report/run_files.h"

json_t *rfi_diff_real(double x) { return isfinite(x) ? json_real(x) : json_null(); }

rfr_status rfi_diff_set_pair(json_t *object, const char *key, json_t *a, json_t *b) {
  json_t *pair = json_array();
  bool failed = json_array_append_new(pair, a ? a : json_null()) != 0;
  failed = json_array_append_new(pair, b ? b : json_null()) != 0 || failed;
  if (failed) {
    json_decref(pair);
    pair = NULL;
  }
  return rfi_json_set(object, key, pair);
}

/* Appends an object to a list, taking the reference. */
static rfr_status append(json_t *list, json_t *item) {
  return json_array_append_new(list, item) == 0 ? RFR_OK
                                                : rfi_fail(RFI_E_NO_MEMORY, "out of memory while comparing two runs");
}

/* ---- configuration ---- */

/* A run's configuration as the report has it. */
static rfr_status read_config(rfr_ctx *ctx, const char *folder, json_t **out) {
  rfi_inert j = {.text = {.ctx = ctx}};
  *out = NULL;
  rfi_inert_begin(&j, NULL, '{');
  rfr_status s = rfi_run_files_config(ctx, folder, &j);
  rfi_inert_end(&j, '}');
  if (s == RFR_OK) s = j.status;
  if (s == RFR_OK) s = rfi_json_parse(folder, j.text.data, j.text.n, out);
  rfi_string_deinit(&j.text);
  return s;
}

/* The row of `list` with this name; NULL: none. */
static const json_t *find_row(const json_t *list, const char *name) {
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *row = json_array_get(list, i);
    if (strcmp(json_string_value(json_array_get(row, 0)), name) == 0) return row;
  }
  return NULL;
}

static json_t *at(const json_t *row, size_t i) { return json_incref(json_array_get(row, i)); }

/* Lists the rows [name, value, source] that differ; without `sources`, rows [name, value]. Keeps the order of both
 * lists. */
static rfr_status diff_rows(const json_t *const lists[2], const char *name_key, bool sources, json_t *out) {
  for (int side = 0; side < 2; side++)
    for (size_t i = 0; i < json_array_size(lists[side]); i++) {
      const json_t *row = json_array_get(lists[side], i);
      const char *name = json_string_value(json_array_get(row, 0));
      const json_t *other = find_row(lists[!side], name), *a = side ? other : row, *b = side ? row : other;
      if (other && (side == 1 || json_equal(json_array_get(a, 1), json_array_get(b, 1)))) continue;
      json_t *item = json_object();
      rfr_status s = rfi_json_set(item, name_key, json_string(name));
      if (s == RFR_OK) s = rfi_diff_set_pair(item, "values", at(a, 1), at(b, 1));
      if (s == RFR_OK && sources) s = rfi_diff_set_pair(item, "sources", at(a, 2), at(b, 2));
      if (s == RFR_OK) s = append(out, json_incref(item));
      json_decref(item);
      RFI_TRY(s);
    }
  return RFR_OK;
}

rfr_status rfi_diff_config(rfr_ctx *ctx, const char *const folders[2], json_t *out, bool *different) {
  json_t *read[2] = {NULL, NULL}, *config = json_array(), *facts = json_array();
  rfr_status s = rfi_json_set(out, "config", config);
  if (s == RFR_OK) s = rfi_json_set(out, "facts", facts);
  else json_decref(facts);
  for (int i = 0; i < 2 && s == RFR_OK; i++) s = read_config(ctx, folders[i], &read[i]);
  const json_t *const configs[2] = {json_object_get(read[0], "config"), json_object_get(read[1], "config")};
  const json_t *const all_facts[2] = {json_object_get(read[0], "facts"), json_object_get(read[1], "facts")};
  if (s == RFR_OK) s = diff_rows(configs, "key", true, config);
  if (s == RFR_OK) s = diff_rows(all_facts, "name", false, facts);
  if (s == RFR_OK) *different |= json_array_size(config) > 0;
  json_decref(read[0]);
  json_decref(read[1]);
  return s;
}

/* ---- curves ---- */

typedef struct curve {
  const char *name;
  rfi_series series;
  bool held_out, most; /* held_out: of the evaluations; most: the best value is the largest */
  bool counts;         /* a difference means that the runs differ */
} curve;

static const curve curves[] = {
    {"loss", RFI_SERIES_loss, false, false, true},
    {"held-out loss", RFI_SERIES_loss, true, false, true},
    {"lr", RFI_SERIES_lr, false, true, true},
    {"grad_norm", RFI_SERIES_grad_norm, false, false, true},
    {"margin", RFI_SERIES_margin, false, true, true},
    {"accuracy", RFI_SERIES_accuracy, false, true, true},
    {"tokens_per_second", RFI_SERIES_tokens_per_second, false, true, false},
};

typedef struct comparison {
  int64_t points[2];       /* number of values that are numbers */
  double last[2], best[2]; /* NaN: none */
  double area;             /* sum of the distances at `common` steps */
  int64_t common, first;   /* number of steps with a value in both; the first step that differs, -1: none */
} comparison;

static void take(comparison *c, const curve *k, int side, double x) {
  if (isnan(x)) return;
  c->points[side]++;
  c->last[side] = x;
  if (isnan(c->best[side]) || (k->most ? x > c->best[side] : x < c->best[side])) c->best[side] = x;
}

/* Steps ascend in both logs. A step that is missing in one log, and a value that is missing in one step, are
 * differences. */
static comparison compare(const rfi_run_log *const logs[2], const curve *k) {
  const rfi_log_rows *rows[2];
  comparison c = {.last = {NAN, NAN}, .best = {NAN, NAN}, .first = -1};
  int64_t i[2] = {0, 0};
  for (int side = 0; side < 2; side++) rows[side] = k->held_out ? &logs[side]->evaluations : &logs[side]->rows;
  while (i[0] < rows[0]->n || i[1] < rows[1]->n) {
    int64_t step = INT64_MAX;
    double x[2] = {NAN, NAN};
    for (int side = 0; side < 2; side++)
      if (i[side] < rows[side]->n && rows[side]->items[i[side]].step < step) step = rows[side]->items[i[side]].step;
    for (int side = 0; side < 2; side++)
      if (i[side] < rows[side]->n && rows[side]->items[i[side]].step == step) {
        x[side] = rows[side]->items[i[side]++].value[k->series];
        take(&c, k, side, x[side]);
      }
    if (!isnan(x[0]) && !isnan(x[1])) c.area += fabs(x[0] - x[1]), c.common++;
    if (c.first < 0 && (isnan(x[0]) != isnan(x[1]) || x[0] < x[1] || x[0] > x[1])) c.first = step;
  }
  return c;
}

static rfr_status put_curve(const curve *k, const comparison *c, json_t *list) {
  json_t *o = json_object();
  rfr_status s = rfi_json_set(o, "name", json_string(k->name));
  if (s == RFR_OK) s = rfi_diff_set_pair(o, "points", json_integer(c->points[0]), json_integer(c->points[1]));
  if (s == RFR_OK) s = rfi_diff_set_pair(o, "last", rfi_diff_real(c->last[0]), rfi_diff_real(c->last[1]));
  if (s == RFR_OK) s = rfi_diff_set_pair(o, "best", rfi_diff_real(c->best[0]), rfi_diff_real(c->best[1]));
  if (s == RFR_OK) s = rfi_json_set(o, "area", rfi_diff_real(c->common ? c->area / (double)c->common : NAN));
  if (s == RFR_OK) s = rfi_json_set(o, "first_step", c->first < 0 ? json_null() : json_integer(c->first));
  if (s == RFR_OK) s = rfi_json_set(o, "counts", json_boolean(k->counts));
  if (s == RFR_OK) s = append(list, json_incref(o));
  json_decref(o);
  return s;
}

rfr_status rfi_diff_curves(const rfi_run_log *const logs[2], json_t *out, bool *different) {
  json_t *list = json_array();
  RFI_TRY(rfi_json_set(out, "curves", list));
  RFI_TRY(rfi_diff_set_pair(out, "steps", json_integer(logs[0]->step), json_integer(logs[1]->step)));
  *different |= logs[0]->step != logs[1]->step;
  for (size_t i = 0; i < sizeof curves / sizeof *curves; i++) {
    const comparison c = compare(logs, &curves[i]);
    if (c.points[0] + c.points[1] == 0) continue;
    RFI_TRY(put_curve(&curves[i], &c, list));
    *different |= curves[i].counts && c.first >= 0;
  }
  return RFR_OK;
}

/* ---- both runs ---- */

static rfr_status diff_runs(const rfr_report *r, const char *const folders[2], json_t *out, bool *different) {
  const rfi_run_log *const logs[2] = {&r->runs[0].log, &r->runs[1].log};
  RFI_TRY(rfi_diff_set_pair(out, "runs", json_string(r->runs[0].name), json_string(r->runs[1].name)));
  RFI_TRY(rfi_json_set(out, "equal", json_false())); /* added first for the order of the text; set below */
  RFI_TRY(rfi_diff_config(r->ctx, folders, out, different));
  RFI_TRY(rfi_diff_curves(logs, out, different));
  RFI_TRY(rfi_diff_weights(r->ctx, folders, out, different));
  return rfi_json_set(out, "equal", json_boolean(!*different));
}

rfr_status rfr_report_diff(rfr_ctx *ctx, const char *first, const char *second, int json, int64_t tensors,
                           rfr_write_fn write, void *user, int *different) {
  const char *const folders[2] = {first, second};
  rfr_report *r = NULL;
  bool is_different = false;
  RFI_TRY(RFI_CHECK_OUT(different, "result"));
  RFI_TRY(rfr_report_open(ctx, folders, 2, &r));
  rfi_string text = {.ctx = ctx};
  json_t *out = json_object();
  rfr_status s = diff_runs(r, folders, out, &is_different);
  if (s == RFR_OK) s = json ? rfi_json_print(out, &text) : rfi_diff_print(out, tensors, &text);
  if (s == RFR_OK) write(text.data, text.n, user);
  if (s == RFR_OK) *different = is_different;
  json_decref(out);
  rfi_string_deinit(&text);
  rfr_report_close(r);
  return s;
}
