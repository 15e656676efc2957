/* SPDX-License-Identifier: Apache-2.0
 *
 * Costs of a schedule's stages, from a profiler or a person. JSON: keys of an object apply to all stages, those in the
 * list "stages" to one stage each; a file with costs of a layer (layer_costs.c) has those of any number of stages. CSV:
 * a line of column names, then one row per stage; * in the column "stage" means all stages. A later value replaces an
 * earlier one. An unknown key is an error. rfr_schedule_simulate refuses a stage without a cost that its actions need.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "schedule/layer_costs.h"

static const struct key {
  const char *name;
  int op;        /* or -1: bytes */
  size_t offset; /* of bytes */
} keys[] = {
#define SECONDS(name, microbatch, what) {#name, RFR_ACTION_##name, 0},
    RFR_ACTIONS(SECONDS)
#undef SECONDS
        {"activation_bytes", -1, offsetof(rfr_stage_costs, activation_bytes)},
    {"wgrad_bytes", -1, offsetof(rfr_stage_costs, wgrad_bytes)},
    {"gradient_bytes", -1, offsetof(rfr_stage_costs, gradient_bytes)},
    {"weight_bytes", -1, offsetof(rfr_stage_costs, weight_bytes)}};
enum { N_KEYS = sizeof keys / sizeof keys[0], MOST_COLUMNS = N_KEYS + 1 };

static rfr_status unknown(const char *file, int64_t line, const char *word, size_t n) {
  return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, line,
                     "there is no key \"%.*s\"; keys are stage (stages), an action's op (F, I, W, B, OPT, UNSHARD, "
                     "RESHARD, REDUCE, SEND_F, RECV_F, SEND_B, RECV_B), activation_bytes, wgrad_bytes, gradient_bytes "
                     "and weight_bytes",
                     (int)(n < 40 ? n : 40), word);
}

static const struct key *find(const char *word, size_t n) {
  for (int i = 0; i < N_KEYS; i++)
    if (strlen(keys[i].name) == n && memcmp(keys[i].name, word, n) == 0) return &keys[i];
  return NULL;
}

static rfr_status store(const char *file, int64_t line, const struct key *key, double x, rfr_stage_costs *costs,
                        int n) {
  if (!(x >= 0 && x <= (key->op < 0 ? 0x1p53 : 1e30)) || (key->op < 0 && x != floor(x)))
    return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, line, "%s is %g; %s", key->name, x,
                       key->op < 0 ? "bytes must be a whole number, 0 or more" : "seconds must be 0 or more");
  for (int i = 0; i < n; i++) {
    if (key->op >= 0) costs[i].seconds[key->op] = x;
    else *(int64_t *)((char *)&costs[i] + key->offset) = (int64_t)x;
  }
  return RFR_OK;
}

/* ---- JSON ---- */

static rfr_status read_object(const char *file, const json_t *object, bool top, rfr_stage_costs *costs, int n) {
  const char *name;
  json_t *value;
  json_object_foreach((json_t *)object, name, value) {
    const struct key *key = find(name, strlen(name));
    if (top && (strcmp(name, "stages") == 0 || rfi_layer_costs_has_key(name))) continue;
    if (!key) return unknown(file, 0, name, strlen(name));
    if (!json_is_number(value)) return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "%s is not a number", name);
    RFI_TRY(store(file, 0, key, json_number_value(value), costs, n));
  }
  return RFR_OK;
}

static rfr_status read_json(const char *file, const json_t *root, int stages, rfr_stage_costs *costs) {
  if (!json_is_object(root)) return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "the costs are not an object");
  if (json_object_get(root, "layer")) {
    rfr_layer_costs layered;
    RFI_TRY(rfi_layer_costs_read(file, root, &layered));
    if (layered.layers < stages)
      return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "the costs are of %lld layers, but the schedule has %d stages",
                         (long long)layered.layers, stages);
    RFI_TRY(rfr_layer_costs_stages(&layered, layered.layers, stages, costs));
  }
  RFI_TRY(read_object(file, root, true, costs, stages));
  const json_t *list = json_object_get(root, "stages");
  if (!list) return RFR_OK;
  if (!json_is_array(list) || json_array_size(list) != (size_t)stages)
    return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "\"stages\" is not a list of %d objects, one for each stage",
                       stages);
  for (int i = 0; i < stages; i++) {
    const json_t *one = json_array_get(list, (size_t)i);
    if (!json_is_object(one)) return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "stage %d is not an object", i);
    RFI_TRY(read_object(file, one, false, &costs[i], 1));
  }
  return RFR_OK;
}

/* ---- CSV ---- */

/* The next cell of a line, without blanks around it; false after the last. */
static bool take_cell(const char **p, const char *end, const char **cell, size_t *n) {
  if (!*p) return false;
  const char *stop = memchr(*p, ',', (size_t)(end - *p)), *last = stop ? stop : end;
  *cell = *p;
  *p = stop ? stop + 1 : NULL;
  while (*cell < last && (**cell == ' ' || **cell == '\t')) (*cell)++;
  while (last > *cell && (last[-1] == ' ' || last[-1] == '\t' || last[-1] == '\r')) last--;
  *n = (size_t)(last - *cell);
  return true;
}

static bool read_number(const char *cell, size_t n, double *out) {
  char text[64], *end;
  if (n == 0 || n >= sizeof text) return false;
  memcpy(text, cell, n);
  text[n] = 0;
  if (strspn(text, "0123456789.eE+-") < n) return false;
  *out = rfi_strtod(text, &end);
  return *end == 0 && isfinite(*out);
}

typedef struct table {
  const char *file;
  int line, stages, n_columns;
  const struct key *column[MOST_COLUMNS]; /* NULL: the stage */
} table;

static rfr_status read_header(table *t, const char *p, const char *end) {
  const char *cell;
  size_t n;
  bool has_stage = false;
  while (take_cell(&p, end, &cell, &n)) {
    const bool is_stage = n == 5 && memcmp(cell, "stage", 5) == 0;
    const struct key *key = find(cell, n);
    bool twice = is_stage && has_stage;
    for (int i = 0; key && i < t->n_columns; i++) twice |= t->column[i] == key;
    if (!key && !is_stage) return unknown(t->file, t->line, cell, n);
    if (twice)
      return rfi_fail_at(RFI_E_SCHEDULE_PARSE, t->file, t->line, "the column %.*s is given twice", (int)n, cell);
    has_stage |= is_stage;
    t->column[t->n_columns++] = key;
  }
  return has_stage ? RFR_OK : rfi_fail_at(RFI_E_SCHEDULE_PARSE, t->file, t->line, "there is no column \"stage\"");
}

static rfr_status read_row(const table *t, const char *p, const char *end, rfr_stage_costs *costs) {
  const char *cell, *rest = p;
  size_t n;
  double x;
  int first = 0, count = t->stages, i = 0;
  for (; take_cell(&rest, end, &cell, &n); i++) {
    if (i >= t->n_columns || t->column[i] || (n == 1 && *cell == '*')) continue;
    if (!read_number(cell, n, &x) || x < 0 || x >= t->stages || x != floor(x))
      return rfi_fail_at(RFI_E_SCHEDULE_PARSE, t->file, t->line,
                         "there is no stage %.*s; stages are 0 to %d, or * for all", (int)(n < 40 ? n : 40), cell,
                         t->stages - 1);
    first = (int)x;
    count = 1;
  }
  if (i != t->n_columns)
    return rfi_fail_at(RFI_E_SCHEDULE_PARSE, t->file, t->line, "the row has %d cells, but there are %d columns", i,
                       t->n_columns);
  for (i = 0; take_cell(&p, end, &cell, &n); i++) {
    if (!t->column[i] || n == 0) continue;
    if (!read_number(cell, n, &x))
      return rfi_fail_at(RFI_E_SCHEDULE_PARSE, t->file, t->line, "%s: \"%.*s\" is not a number", t->column[i]->name,
                         (int)(n < 40 ? n : 40), cell);
    RFI_TRY(store(t->file, t->line, t->column[i], x, costs + first, count));
  }
  return RFR_OK;
}

static rfr_status read_csv(const char *file, const char *text, size_t n, int stages, rfr_stage_costs *costs) {
  table t = {.file = file, .stages = stages};
  for (const char *p = text, *end = text + n, *stop; p < end; p = stop + 1) {
    stop = memchr(p, '\n', (size_t)(end - p));
    if (!stop) stop = end;
    t.line++;
    const char *s = p;
    while (s < stop && (*s == ' ' || *s == '\t' || *s == '\r')) s++;
    if (s == stop || *s == '#') continue;
    if (t.n_columns == 0) RFI_TRY(read_header(&t, p, stop));
    else RFI_TRY(read_row(&t, p, stop, costs));
  }
  return t.n_columns ? RFR_OK : rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "there are no costs");
}

rfr_status rfr_schedule_costs_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, int stages,
                                    rfr_stage_costs *costs) {
  size_t blank = 0;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(text, "text"));
  RFI_TRY(rfi_check_handle(costs, "list of costs"));
  if (stages < 1) return rfi_fail(RFI_E_ARGUMENT, "costs of %d stages", stages);
  const char *file = name ? name : "";
  for (int i = 0; i < stages; i++) {
    costs[i] = (rfr_stage_costs){0};
    for (int op = 0; op < RFR_ACTION_COUNT; op++) costs[i].seconds[op] = -1;
  }
  while (blank < n && strchr(" \t\r\n", text[blank]) && text[blank]) blank++;
  if (blank == n || (text[blank] != '{' && text[blank] != '[')) return read_csv(file, text, n, stages, costs);
  json_t *root;
  RFI_TRY(rfi_json_parse(file, text, n, &root));
  const rfr_status status = read_json(file, root, stages, costs);
  json_decref(root);
  return status;
}
