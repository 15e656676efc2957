/* SPDX-License-Identifier: Apache-2.0
 *
 * The differences of runs whose files are written here, against numbers that follow from them by hand.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "data/checkpoint.h"
#include "data/safetensors.h"
#include "refrain/report.h"
#include "support/folder.h"
#include "support/text.h"

#define OK(call) assert_int_equal(call, RFR_OK)

/* ---- runs ---- */

static const char log_a[] = "{\"event\": \"start\", \"step\": 0}\n"
                            "{\"event\": \"metrics\", \"step\": 1, \"loss\": 4, \"lr\": 0.5, \"grad_norm\": 2, "
                            "\"tokens\": 10, \"seconds\": 1, \"time\": 100}\n"
                            "{\"event\": \"metrics\", \"step\": 2, \"loss\": 3, \"lr\": 0.25, \"grad_norm\": 1}\n"
                            "{\"event\": \"metrics\", \"step\": 3, \"loss\": 3.5, \"lr\": 0.125, \"grad_norm\": 1.5}\n"
                            "{\"event\": \"evaluation\", \"step\": 3, \"loss\": 3.25}\n";
static const char log_b[] = "{\"event\": \"start\", \"step\": 0}\n"
                            "{\"event\": \"metrics\", \"step\": 1, \"loss\": 4, \"lr\": 0.5, \"grad_norm\": 2, "
                            "\"tokens\": 10, \"seconds\": 2, \"time\": 200}\n"
                            "{\"event\": \"metrics\", \"step\": 2, \"loss\": 3.5, \"lr\": 0.25, \"grad_norm\": 1}\n"
                            "{\"event\": \"metrics\", \"step\": 3, \"loss\": 2, \"lr\": 0.125, \"grad_norm\": null}\n"
                            "{\"event\": \"evaluation\", \"step\": 3, \"loss\": 3.25}\n"
                            "{\"event\": \"start\", \"step\": 3}\n" /* a resume of the finished run */
                            "{\"event\": \"evaluation\", \"step\": 3, \"loss\": 3.25}\n";
static const char config_a[] = "refrain: 1\noptimizer:\n  lr: 0.5\n  betas: [0.9, 0.95]\nrun:\n  steps: 3\n";
static const char run_a[] =
    "{\"device\": \"x\", \"layers\": 2, \"sources\": {\"optimizer.lr\": \"a.yaml:3\", \"run.steps\": \"default\"}}";

static void write_text(rft_folder *f, const char *run, const char *name, const char *content) {
  char path[64];
  snprintf(path, sizeof path, "%s/%s", run, name);
  rft_write(f, path, content, strlen(content));
}

static void write_run(rft_folder *f, const char *run, const char *log) {
  write_text(f, run, "log.jsonl", log);
  write_text(f, run, "config.yaml", config_a);
  write_text(f, run, "run.json", run_a);
}

typedef struct tensor {
  const char *name;
  rfr_dtype dtype;
  int64_t n;
  const void *data;
} tensor;

/* A checkpoint with tensors of one dimension in KIND.safetensors. */
static void write_checkpoint(rft_folder *f, const char *run, int64_t step, const char *kind, const tensor *t, int n) {
  rfi_safetensors_entry entries[8];
  rfi_checkpoint_writer *w;
  rfi_file *file;
  char name[64];
  for (int i = 0; i < n; i++)
    entries[i] = (rfi_safetensors_entry){.name = t[i].name, .dtype = t[i].dtype, .rank = 1, .shape = {t[i].n}};
  snprintf(name, sizeof name, "%s.safetensors", kind);
  OK(rfi_checkpoint_begin(f->ctx, NULL, rft_path(f, run), step, &w));
  OK(rfi_checkpoint_file(w, name, &file));
  OK(rfi_safetensors_write_header(f->ctx, file, entries, n, NULL, 0, NULL));
  for (int i = 0; i < n; i++) OK(rfi_file_append(file, t[i].data, (size_t)(t[i].n * rfr_dtype_bits(t[i].dtype) / 8)));
  OK(rfi_checkpoint_finish(w, RFR_OK));
}

/* ---- reading the result ---- */

static rfr_status diff(rft_folder *f, const char *a, const char *b, int json, int64_t most, rft_text *out,
                       int *different) {
  char first[1024];
  *out = (rft_text){0};
  strcpy(first, rft_path(f, a));
  return rfr_report_diff(f->ctx, first, rft_path(f, b), json, most, rft_text_add, out, different);
}

static json_t *object_of(rft_folder *f, const char *a, const char *b, int want) {
  rft_text t;
  json_error_t e;
  int different = 7;
  if (diff(f, a, b, 1, 0, &t, &different) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  json_t *v = json_loads(t.data, JSON_REJECT_DUPLICATES, &e);
  if (!v) fail_msg("%s in %s", e.text, t.data);
  assert_int_equal(different, want);
  assert_int_equal(json_is_true(json_object_get(v, "equal")), !want);
  free(t.data);
  return v;
}

static double number(const json_t *v) { return json_is_null(v) ? NAN : json_number_value(v); }
static const json_t *pair(const json_t *o, const char *key, size_t i) {
  return json_array_get(json_object_get(o, key), i);
}

/* The element of a list whose member "name" or "key" is `name`. */
static const json_t *named(const json_t *list, const char *name) {
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *o = json_array_get(list, i), *text = json_object_get(o, "name");
    if (strcmp(json_string_value(text ? text : json_object_get(o, "key")), name) == 0) return o;
  }
  fail_msg("no %s", name);
  return NULL;
}

/* ---- tests ---- */

static void equal(void **state) {
  rft_folder *f = *state;
  const float x[] = {1, 2, 3};
  const tensor t = {"w", RFR_F32, 3, x};
  write_run(f, "a", log_a);
  write_run(f, "b", log_a);
  json_t *v = object_of(f, "a", "b", 0);
  assert_true(json_is_null(json_object_get(v, "weights")));
  assert_int_equal(json_array_size(json_object_get(v, "config")), 0);
  assert_true(json_is_null(json_object_get(named(json_object_get(v, "curves"), "loss"), "first_step")));
  json_decref(v);
  write_checkpoint(f, "a", 3, "model", &t, 1);
  v = object_of(f, "a", "b", 1); /* one has weights */
  assert_true(json_is_null(pair(json_object_get(v, "weights"), "steps", 1)));
  json_decref(v);
  write_checkpoint(f, "b", 3, "model", &t, 1);
  v = object_of(f, "a", "b", 0);
  assert_int_equal(number(json_object_get(json_object_get(v, "weights"), "equal")), 1);
  json_decref(v);
  rft_text text;
  int different;
  OK(diff(f, "a", "b", 0, 9, &text, &different));
  assert_non_null(strstr(text.data, "configuration: equal\n"));
  assert_non_null(strstr(text.data, "\nthe runs are equal\n"));
  free(text.data);
}

static void curves(void **state) {
  rft_folder *f = *state;
  write_run(f, "a", log_a);
  write_run(f, "b", log_b);
  json_t *v = object_of(f, "a", "b", 1);
  const json_t *list = json_object_get(v, "curves"), *loss = named(list, "loss"), *norm = named(list, "grad_norm");
  assert_true(number(pair(loss, "last", 0)) == 3.5 && number(pair(loss, "last", 1)) == 2);
  assert_true(number(pair(loss, "best", 0)) == 3 && number(pair(loss, "best", 1)) == 2);
  assert_true(fabs(number(json_object_get(loss, "area")) - (0.5 + 1.5) / 3) < 1e-12);
  assert_int_equal(number(json_object_get(loss, "first_step")), 2);
  assert_true(number(pair(named(list, "lr"), "best", 0)) == 0.5);
  assert_true(json_is_null(json_object_get(named(list, "lr"), "first_step")));
  assert_true(json_is_null(json_object_get(named(list, "held-out loss"), "first_step")));
  assert_int_equal(number(json_object_get(norm, "first_step")), 3); /* a value that is not a number in one of them */
  assert_int_equal(number(pair(norm, "points", 1)), 2);
  const json_t *speed = named(list, "tokens_per_second");
  assert_int_equal(number(json_object_get(speed, "first_step")), 1);
  assert_true(json_is_false(json_object_get(speed, "counts")));
  json_decref(v);
  /* Steps missing in one run are differences, even if all common steps are equal; speed is not compared. */
  static const char start[] = "{\"event\": \"start\", \"step\": 0}\n"
                              "{\"event\": \"metrics\", \"step\": 1, \"loss\": 4, \"lr\": 0.5, \"grad_norm\": 2, "
                              "\"tokens\": 10, \"seconds\": 7}\n";
  write_run(f, "c", start);
  v = object_of(f, "a", "c", 1);
  loss = named(json_object_get(v, "curves"), "loss");
  assert_int_equal(number(json_object_get(loss, "first_step")), 2);
  assert_true(number(json_object_get(loss, "area")) == 0);
  assert_int_equal(number(pair(v, "steps", 0)), 3);
  assert_int_equal(number(pair(v, "steps", 1)), 1);
  json_decref(v);
  char other[512];
  snprintf(other, sizeof other, "%s", start);
  memcpy(strstr(other, "\"seconds\": 7"), "\"seconds\": 9", 12);
  write_run(f, "d", other);
  json_decref(object_of(f, "c", "d", 0));
}

static void configuration(void **state) {
  rft_folder *f = *state;
  write_run(f, "a", log_a);
  write_run(f, "b", log_a);
  write_text(f, "b", "config.yaml", "refrain: 1\nseed: 5\noptimizer:\n  lr: 0.25\n  betas: [0.9, 0.95]\n");
  write_text(
      f, "b", "run.json",
      "{\"device\": \"y\", \"layers\": 2, \"sources\": {\"optimizer.lr\": \"--set\", \"optimizer.betas\": \"x:1\"}}");
  json_t *v = object_of(f, "a", "b", 1);
  const json_t *list = json_object_get(v, "config"), *lr = named(list, "optimizer.lr"),
               *steps = named(list, "run.steps");
  assert_int_equal(json_array_size(list), 3); /* only another source is not a difference */
  assert_string_equal(json_string_value(pair(lr, "values", 0)), "0.5");
  assert_string_equal(json_string_value(pair(lr, "values", 1)), "0.25");
  assert_string_equal(json_string_value(pair(lr, "sources", 0)), "a.yaml:3");
  assert_string_equal(json_string_value(pair(lr, "sources", 1)), "--set");
  assert_string_equal(json_string_value(pair(steps, "values", 0)), "3");
  assert_true(json_is_null(pair(steps, "values", 1)));
  assert_true(json_is_null(pair(named(list, "seed"), "values", 0)));
  assert_int_equal(json_array_size(json_object_get(v, "facts")), 1);
  assert_string_equal(json_string_value(pair(named(json_object_get(v, "facts"), "device"), "values", 1)), "y");
  json_decref(v);
  write_text(f, "b", "config.yaml", config_a);
  json_decref(object_of(f, "a", "b", 0)); /* the machine is not compared */
}

static void weights(void **state) {
  rft_folder *f = *state;
  static const float w[] = {3, 4, 0}, other_w[] = {3, 4, 2.5f}, zero[] = {0, 0}, minus[] = {-0.0f, 0},
                     nan_w[] = {1, NAN}, nan_v[] = {2, NAN}, one[] = {1};
  static const uint16_t half[] = {0x3f80, 0x4000}; /* bf16: 1, 2 */
  static const float same_half[] = {1, 2};
  static const int32_t i[] = {1, 2}, j[] = {1, 3};
  const tensor a[] = {{"w", RFR_F32, 3, w},         {"zero", RFR_F32, 2, zero}, {"nan", RFR_F32, 2, nan_w},
                      {"half", RFR_BF16, 2, half},  {"int", RFR_I32, 2, i},     {"gone", RFR_F32, 1, one},
                      {"shape", RFR_F32, 2, nan_w}, {"same", RFR_F32, 2, nan_w}};
  const tensor b[] = {{"w", RFR_F32, 3, other_w},      {"zero", RFR_F32, 2, minus}, {"nan", RFR_F32, 2, nan_v},
                      {"half", RFR_F32, 2, same_half}, {"int", RFR_I32, 2, j},      {"new", RFR_F32, 1, one},
                      {"shape", RFR_F32, 3, w},        {"same", RFR_F32, 2, nan_w}};
  write_run(f, "a", log_a);
  write_run(f, "b", log_a);
  write_checkpoint(f, "a", 1, "model", b, 8); /* an older checkpoint is not read */
  write_checkpoint(f, "a", 3, "model", a, 8);
  write_checkpoint(f, "b", 3, "model", b, 8);
  json_t *v = object_of(f, "a", "b", 1);
  const json_t *o = json_object_get(v, "weights"), *list = json_object_get(o, "different");
  assert_int_equal(number(json_object_get(o, "equal")), 1);
  assert_int_equal(json_array_size(list), 6);
  assert_true(number(json_object_get(named(list, "w"), "max_abs")) == 2.5);
  assert_true(number(json_object_get(named(list, "w"), "relative")) == 0.5);
  assert_true(number(json_object_get(named(list, "zero"), "max_abs")) == 0); /* -0 has other bits */
  assert_true(number(json_object_get(named(list, "nan"), "max_abs")) == 1);
  assert_true(number(json_object_get(named(list, "half"), "max_abs")) == 0);
  assert_string_equal(json_string_value(pair(named(list, "half"), "dtypes", 0)), "BF16");
  assert_string_equal(json_string_value(pair(named(list, "half"), "dtypes", 1)), "F32");
  assert_true(json_is_null(json_object_get(named(list, "int"), "max_abs")));
  assert_true(json_is_null(json_object_get(named(list, "shape"), "max_abs")));
  assert_int_equal(number(json_array_get(pair(named(list, "shape"), "shapes", 1), 0)), 3);
  assert_string_equal(json_string_value(pair(o, "missing", 0)), "gone");
  assert_string_equal(json_string_value(pair(o, "extra", 0)), "new");
  json_decref(v);
  /* The text lists the largest differences first, and states how many are left out. */
  rft_text text;
  int different;
  OK(diff(f, "a", "b", 0, 4, &text, &different));
  assert_non_null(strstr(text.data, "weights: checkpoints of step 3 and 3, 1 tensors equal, 6 different\n"));
  assert_non_null(strstr(text.data, "\n  2.5          0.5          w\n"));
  assert_non_null(strstr(text.data, "shape [2] [3]\n"));
  assert_non_null(strstr(text.data, "  2 more tensors differ (--all)\n"));
  assert_non_null(strstr(text.data, "  only in a  gone\n"));
  assert_null(strstr(text.data, "half"));
  free(text.data);
  /* An adapter is compared too. */
  write_run(f, "c", log_a);
  write_run(f, "d", log_a);
  write_checkpoint(f, "c", 3, "adapter_model", &a[0], 1);
  write_checkpoint(f, "d", 3, "adapter_model", &b[0], 1);
  v = object_of(f, "c", "d", 1);
  assert_int_equal(json_array_size(json_object_get(json_object_get(v, "weights"), "different")), 1);
  json_decref(v);
}

/* A tensor with more elements than are read at once, of which one at the end differs. */
static void long_tensor(void **state) {
  rft_folder *f = *state;
  enum { N = 200000 };
  float *x = malloc(N * sizeof *x);
  for (int i = 0; i < N; i++) x[i] = 1;
  tensor t = {"long", RFR_F32, N, x};
  write_run(f, "a", log_a);
  write_run(f, "b", log_a);
  write_checkpoint(f, "a", 3, "model", &t, 1);
  write_checkpoint(f, "b", 3, "model", &t, 1);
  json_decref(object_of(f, "a", "b", 0));
  x[N - 1] = 3;
  write_checkpoint(f, "b", 4, "model", &t, 1);
  json_t *v = object_of(f, "a", "b", 1);
  const json_t *o = json_array_get(json_object_get(json_object_get(v, "weights"), "different"), 0);
  assert_true(number(json_object_get(o, "max_abs")) == 2);
  assert_true(fabs(number(json_object_get(o, "relative")) - 2 / sqrt(N)) < 1e-12);
  json_decref(v);
  free(x);
}

/* Control characters in a configuration must not reach a terminal. */
static void hostile(void **state) {
  rft_folder *f = *state;
  rft_text text;
  int different;
  write_run(f, "a", log_a);
  write_run(f, "b", log_a);
  write_text(f, "b", "config.yaml", "refrain: 1\nrun:\n  note: \"x\\e[2Jy\\n\"\n");
  write_text(f, "b", "run.json", "{\"sources\": {\"run.note\": \"\\u001b[31m\"}, \"\\u0007\": 3}");
  const rfr_status s = diff(f, "a", "b", 0, 9, &text, &different);
  if (s == RFR_OK) {
    for (size_t i = 0; i < text.n; i++) assert_true(text.data[i] == '\n' || (unsigned char)text.data[i] >= 0x20);
    free(text.data);
  }
  write_text(f, "b", "config.yaml", "refrain: [1");
  assert_int_not_equal(diff(f, "a", "b", 0, 9, &text, &different), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "config.syntax");
  assert_int_equal(different, 0);
  write_run(f, "b", "{\"event\": \n");
  assert_int_not_equal(diff(f, "a", "b", 0, 9, &text, &different), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "json");
}

static void faults(void **state) {
  rft_folder *f = *state;
  static const float w[] = {3, 4, 0}, v[] = {3, 4, 1};
  const tensor a = {"w", RFR_F32, 3, w}, b = {"w", RFR_F32, 3, v};
  write_run(f, "a", log_a);
  write_run(f, "b", log_b);
  write_checkpoint(f, "a", 3, "model", &a, 1);
  write_checkpoint(f, "b", 3, "model", &b, 1);
  for (int k = 1;; k++) {
    rft_text text;
    int different;
    rfr_ctx_fail_alloc(f->ctx, k);
    const rfr_status s = diff(f, "a", "b", k % 2, 9, &text, &different);
    rfr_ctx_fail_alloc(f->ctx, 0);
    free(text.data);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 2000);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(equal),       rft_folder_test(curves),  rft_folder_test(configuration), rft_folder_test(weights),
      rft_folder_test(long_tensor), rft_folder_test(hostile), rft_folder_test(faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
