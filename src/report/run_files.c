/* SPDX-License-Identifier: Apache-2.0
 */
#include "report/run_files.h"

#include <stdlib.h>
#include <string.h>

#include "data/json_file.h"
#include "data/lines.h"
#include "train/config_yaml.h"

/* FOLDER/NAME, NULL if there is no such file. */
static rfr_status find(rfr_ctx *ctx, const char *folder, const char *name, char **out) {
  char kind;
  RFI_TRY(rfi_path_join(ctx, folder, name, out));
  const rfr_status s = rfi_path_kind(*out, &kind);
  if (s == RFR_OK && kind) return RFR_OK;
  rfi_free(ctx, *out);
  *out = NULL;
  return s;
}

/* *path and *out are NULL if there is no such file. */
static rfr_status load(rfr_ctx *ctx, const char *folder, const char *name, char **path, json_t **out) {
  *out = NULL;
  RFI_TRY(find(ctx, folder, name, path));
  if (!*path) return RFR_OK;
  const rfr_status s = rfi_json_load(ctx, *path, out);
  if (s == RFR_OK && json_is_object(*out)) return RFR_OK;
  if (s == RFR_OK) rfi_fail_at(RFI_E_JSON, *path, 0, "the file is not an object");
  rfi_free(ctx, *path);
  json_decref(*out);
  *path = NULL;
  *out = NULL;
  return s == RFR_OK ? RFR_INVALID : s;
}

/* ---- configuration ---- */

static rfr_status print_yaml(const rfi_yaml *y, rfi_string *out) {
  if (y->kind == RFI_YAML_SCALAR) return rfi_string_append(out, y->text, strlen(y->text));
  const bool map = y->kind == RFI_YAML_MAP;
  RFI_TRY(rfi_string_append(out, map ? "{" : "[", 1));
  for (const rfi_yaml *e = y->first; e; e = e->next) {
    if (e != y->first) RFI_TRY(rfi_string_append(out, ", ", 2));
    if (map) RFI_TRY(rfi_string_printf(out, "%s: ", e->key));
    RFI_TRY(print_yaml(e, out));
  }
  return rfi_string_append(out, map ? "}" : "]", 1);
}

static rfr_status put_key(rfi_inert *j, const rfi_yaml *y, const char *section, const json_t *sources) {
  char name[256];
  rfi_string value = {.ctx = j->text.ctx};
  snprintf(name, sizeof name, "%s%s%s", section ? section : "", section ? "." : "", y->key);
  const rfr_status s = print_yaml(y, &value);
  const char *source = json_string_value(json_object_get(sources, name));
  rfi_inert_begin(j, NULL, '[');
  rfi_inert_text(j, NULL, name);
  rfi_inert_text(j, NULL, value.data ? value.data : "");
  rfi_inert_text(j, NULL, source ? source : "");
  rfi_inert_end(j, ']');
  rfi_string_deinit(&value);
  return s;
}

static rfr_status put_config(rfi_inert *j, const rfi_yaml *top, const json_t *sources) {
  rfi_inert_begin(j, "config", '[');
  for (const rfi_yaml *y = top ? top->first : NULL; y && top->kind == RFI_YAML_MAP; y = y->next) {
    if (y->kind != RFI_YAML_MAP) RFI_TRY(put_key(j, y, NULL, sources));
    for (const rfi_yaml *e = y->kind == RFI_YAML_MAP ? y->first : NULL; e; e = e->next)
      RFI_TRY(put_key(j, e, y->key, sources));
  }
  rfi_inert_end(j, ']');
  return RFR_OK;
}

static void put_facts(rfi_inert *j, json_t *run) {
  const char *key;
  json_t *value;
  rfi_inert_begin(j, "facts", '[');
  json_object_foreach(run, key, value) {
    if (json_is_object(value) || json_is_array(value)) continue;
    rfi_inert_begin(j, NULL, '[');
    rfi_inert_text(j, NULL, key);
    rfi_inert_value(j, NULL, value);
    rfi_inert_end(j, ']');
  }
  rfi_inert_end(j, ']');
}

rfr_status rfi_run_files_config(rfr_ctx *ctx, const char *folder, rfi_inert *j) {
  char *path = NULL, *run_path = NULL, *text = NULL;
  json_t *run = NULL;
  rfi_arena *arena = NULL;
  rfi_yaml *top = NULL;
  size_t n = 0;
  rfr_status s = load(ctx, folder, "run.json", &run_path, &run);
  if (s == RFR_OK) s = find(ctx, folder, "config.yaml", &path);
  if (s == RFR_OK && path) s = rfi_file_read_limited(ctx, path, RFI_JSON_LIMIT, &text, &n);
  if (s == RFR_OK && path) s = rfi_arena_create(ctx, &arena);
  if (s == RFR_OK && path) s = rfi_yaml_parse(arena, path, text, n, &top);
  if (s == RFR_OK) s = put_config(j, top, json_object_get(run, "sources"));
  if (s == RFR_OK) put_facts(j, run);
  rfi_arena_destroy(arena);
  rfi_free(ctx, text);
  rfi_free(ctx, path);
  rfi_free(ctx, run_path);
  json_decref(run);
  return s;
}

/* ---- plan ---- */

typedef struct buffer {
  const char *name, *kind;
  int64_t bytes, offset, first, last;
} buffer;

static rfr_status read_buffer(const json_t *o, const char *path, buffer *b) {
  RFI_TRY(rfi_json_get_string(o, path, "name", true, &b->name));
  RFI_TRY(rfi_json_get_string(o, path, "kind", true, &b->kind));
  RFI_TRY(rfi_json_get_int(o, path, "bytes", true, 0, INT64_MAX, &b->bytes));
  RFI_TRY(rfi_json_get_int(o, path, "offset", true, 0, INT64_MAX, &b->offset));
  RFI_TRY(rfi_json_get_int(o, path, "first", true, 0, INT64_MAX, &b->first));
  return rfi_json_get_int(o, path, "last", true, b->first, INT64_MAX, &b->last);
}

static double area(const buffer *b) { return (double)b->bytes * (double)(b->last - b->first + 1); }

static int by_area(const void *x, const void *y) {
  const buffer *a = x, *b = y;
  if (area(a) != area(b)) return area(a) < area(b) ? 1 : -1;
  return a->offset < b->offset ? -1 : a->offset > b->offset;
}

static void put_buffers(rfi_inert *j, const buffer *b, int64_t n, int64_t most) {
  rfi_inert_integer(j, "buffers_in_all", n);
  rfi_inert_begin(j, "buffers", '[');
  for (int64_t i = 0; i < n && i < most; i++) {
    rfi_inert_begin(j, NULL, '[');
    rfi_inert_text(j, NULL, b[i].name);
    rfi_inert_text(j, NULL, b[i].kind);
    rfi_inert_integer(j, NULL, b[i].bytes);
    rfi_inert_integer(j, NULL, b[i].offset);
    rfi_inert_integer(j, NULL, b[i].first);
    rfi_inert_integer(j, NULL, b[i].last);
    rfi_inert_end(j, ']');
  }
  rfi_inert_end(j, ']');
}

static rfr_status put_plan(rfr_ctx *ctx, const json_t *plan, const char *path, int64_t most, rfi_inert *j) {
  const json_t *list = json_object_get(plan, "buffers"), *phases = json_object_get(plan, "phases");
  const int64_t n = (int64_t)json_array_size(list);
  int64_t planned, persistent, ops;
  buffer *b;
  RFI_TRY(rfi_json_get_int(plan, path, "planned_bytes", true, 0, INT64_MAX, &planned));
  RFI_TRY(rfi_json_get_int(plan, path, "persistent_bytes", true, 0, planned, &persistent));
  RFI_TRY(rfi_json_get_int(plan, path, "ops", true, 0, INT64_MAX, &ops));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof *b, &b));
  rfr_status s = RFR_OK;
  for (int64_t i = 0; s == RFR_OK && i < n; i++) s = read_buffer(json_array_get(list, (size_t)i), path, &b[i]);
  if (s == RFR_OK) {
    qsort(b, (size_t)n, sizeof *b, by_area);
    rfi_inert_begin(j, "plan", '{');
    rfi_inert_integer(j, "planned_bytes", planned);
    rfi_inert_integer(j, "persistent_bytes", persistent);
    rfi_inert_integer(j, "ops", ops);
    rfi_inert_begin(j, "phases", '['); /* [first op, phase], ... */
    for (size_t i = 0; i < json_array_size(phases); i++) {
      const json_t *phase = json_array_get(phases, i);
      rfi_inert_begin(j, NULL, '[');
      rfi_inert_value(j, NULL, json_array_get(phase, 0));
      rfi_inert_value(j, NULL, json_array_get(phase, 1));
      rfi_inert_end(j, ']');
    }
    rfi_inert_end(j, ']');
    put_buffers(j, b, n, most);
    rfi_inert_end(j, '}');
  }
  rfi_free(ctx, b);
  return s;
}

rfr_status rfi_run_files_plan(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j) {
  char *path;
  json_t *plan;
  RFI_TRY(load(ctx, folder, "plan.json", &path, &plan));
  const rfr_status s = plan ? put_plan(ctx, plan, path, most, j) : RFR_OK;
  rfi_free(ctx, path);
  json_decref(plan);
  return s;
}

/* ---- profile ---- */

static rfr_status put_op(const json_t *o, const char *path, rfi_inert *j) {
  const char *name, *kernel;
  double ms, flops, bytes, roofline = 0.0;
  RFI_TRY(rfi_json_get_string(o, path, "name", true, &name));
  RFI_TRY(rfi_json_get_string(o, path, "kernel", true, &kernel));
  RFI_TRY(rfi_json_get_real(o, path, "ms", true, &ms));
  RFI_TRY(rfi_json_get_real(o, path, "flops", true, &flops));
  RFI_TRY(rfi_json_get_real(o, path, "bytes", true, &bytes));
  RFI_TRY(rfi_json_get_real(o, path, "roofline", false, &roofline));
  rfi_inert_begin(j, NULL, '[');
  rfi_inert_text(j, NULL, name);
  rfi_inert_text(j, NULL, kernel);
  rfi_inert_number(j, NULL, ms);
  rfi_inert_number(j, NULL, flops);
  rfi_inert_number(j, NULL, bytes);
  rfi_inert_number(j, NULL, roofline);
  rfi_inert_end(j, ']');
  return RFR_OK;
}

static rfr_status put_profile(const json_t *profile, const char *path, int64_t most, rfi_inert *j) {
  const json_t *ceilings = json_object_get(profile, "ceilings"), *ops = json_object_get(profile, "ops");
  const char *device = "", *dtype = "";
  double ms, flops, stream;
  RFI_TRY(rfi_json_get_real(profile, path, "ms_per_step", true, &ms));
  RFI_TRY(rfi_json_get_string(profile, path, "device", false, &device));
  RFI_TRY(rfi_json_get_string(profile, path, "dtype", false, &dtype));
  RFI_TRY(rfi_json_get_real(ceilings, path, "flops_per_second", true, &flops));
  RFI_TRY(rfi_json_get_real(ceilings, path, "bytes_per_second", true, &stream));
  rfi_inert_begin(j, "profile", '{');
  rfi_inert_text(j, "device", device);
  rfi_inert_text(j, "dtype", dtype);
  rfi_inert_number(j, "ms_per_step", ms);
  rfi_inert_number(j, "flops_per_second", flops);
  rfi_inert_number(j, "bytes_per_second", stream);
  rfi_inert_integer(j, "ops_in_all", (int64_t)json_array_size(ops));
  rfi_inert_begin(j, "ops", '['); /* the longest first, as profile prints them */
  rfr_status s = RFR_OK;
  for (size_t i = 0; s == RFR_OK && i < json_array_size(ops) && (int64_t)i < most; i++)
    s = put_op(json_array_get(ops, i), path, j);
  rfi_inert_end(j, ']');
  rfi_inert_end(j, '}');
  return s;
}

rfr_status rfi_run_files_profile(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j) {
  char *path;
  json_t *profile;
  RFI_TRY(load(ctx, folder, "profile.json", &path, &profile));
  const rfr_status s = profile ? put_profile(profile, path, most, j) : RFR_OK;
  rfi_free(ctx, path);
  json_decref(profile);
  return s;
}

/* ---- samples ---- */

static rfr_status put_sample(const char *path, int64_t line, const char *text, size_t n, rfi_inert *j) {
  json_t *o;
  const char *prompt, *sample;
  int64_t step;
  rfr_status s = rfi_json_parse(path, text, n, &o);
  if (s == RFR_OK) s = rfi_json_get_int(o, path, "step", true, 0, INT64_MAX, &step);
  if (s == RFR_OK) s = rfi_json_get_string(o, path, "prompt", true, &prompt);
  if (s == RFR_OK) s = rfi_json_get_string(o, path, "text", true, &sample);
  if (s == RFR_OK) {
    rfi_inert_begin(j, NULL, '[');
    rfi_inert_integer(j, NULL, step);
    rfi_inert_text(j, NULL, prompt);
    rfi_inert_text(j, NULL, sample);
    rfi_inert_end(j, ']');
  } else {
    rfi_fail_prefix("line %lld: ", (long long)line);
  }
  json_decref(o);
  return s;
}

rfr_status rfi_run_files_samples(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j) {
  char *path;
  const char *text;
  size_t n;
  int64_t line, lines = 0;
  rfi_lines *file = NULL;
  RFI_TRY(find(ctx, folder, "samples.jsonl", &path));
  if (!path) return RFR_OK;
  rfr_status s = rfi_lines_open(ctx, path, &file);
  while (s == RFR_OK && (s = rfi_lines_next(file, &text, &n, &line)) == RFR_OK && text) lines = line;
  rfi_lines_close(file);
  file = NULL;
  if (s == RFR_OK) s = rfi_lines_open(ctx, path, &file);
  rfi_inert_begin(j, "samples", '[');
  while (s == RFR_OK && (s = rfi_lines_next(file, &text, &n, &line)) == RFR_OK && text) {
    /* evenly spaced; always includes the last one */
    const int64_t every = lines > most ? (lines + most - 1) / most : 1;
    if ((lines - line) % every == 0) s = put_sample(path, line, text, n, j);
  }
  rfi_inert_end(j, ']');
  rfi_lines_close(file);
  rfi_free(ctx, path);
  return s;
}
