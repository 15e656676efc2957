/* SPDX-License-Identifier: Apache-2.0
 *
 * The page's data against the folders that it is made of: extremes survive thinning, a resumed run has no step twice,
 * hostile texts stay inside their strings, damaged files are refused with their place.
 */
#include "refrain/report.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "report/run_log.h"
#include "report/thin.h"
#include "support/folder.h"

typedef struct text {
  char *data;
  size_t n, capacity;
} text;

static void collect(const char *piece, size_t n, void *user) {
  text *t = user;
  if (t->n + n + 1 > t->capacity) t->data = realloc(t->data, t->capacity = 2 * (t->n + n + 1));
  assert_non_null(t->data);
  memcpy(t->data + t->n, piece, n);
  t->n += n;
  t->data[t->n] = 0;
}

static int count(const char *s, const char *what) {
  int n = 0;
  for (; (s = strstr(s, what)); s++) n++;
  return n;
}

static rfr_status open_all(rft_folder *f, int n, const char *const *names, rfr_report **out) {
  const char *paths[RFR_REPORT_RUNS];
  char copies[RFR_REPORT_RUNS][1024];
  for (int i = 0; i < n; i++) paths[i] = strcpy(copies[i], rft_path(f, names[i]));
  return rfr_report_open(f->ctx, paths, n, out);
}

static void write_all(rft_folder *f, int n, const char *const *names, bool page, text *out) {
  rfr_report *r;
  *out = (text){0};
  assert_int_equal(open_all(f, n, names, &r), RFR_OK);
  assert_int_equal(page ? rfr_report_page(r, 0, collect, out) : rfr_report_data(r, collect, out), RFR_OK);
  rfr_report_close(r);
}

static json_t *data_of(rft_folder *f, const char *name) {
  text t;
  json_error_t e;
  write_all(f, 1, &name, false, &t);
  json_t *all = json_loadb(t.data, t.n, JSON_REJECT_DUPLICATES, &e);
  if (!all) fail_msg("%s in %s", e.text, t.data);
  free(t.data);
  json_t *run = json_incref(json_array_get(json_object_get(all, "runs"), 0));
  json_decref(all);
  return run;
}

static void write_text(rft_folder *f, const char *name, const char *content) {
  rft_write(f, name, content, strlen(content));
}

/* ---- thinning ---- */

static double wave(int64_t i) { return i == 4321 ? 99.0 : i == 7777 ? -5.0 : sin(0.01 * (double)i); }

static void test_thinned_curves(void **state) {
  (void)state;
  enum { N = 20000 };
  rfi_log_row *items = calloc(N, sizeof *items);
  const rfi_log_rows rows = {.items = items, .n = N};
  static const int64_t most[] = {N, 1000, 100, 4, 1};
  int64_t *at = malloc((N + 4) * sizeof *at);
  for (int64_t i = 0; i < N; i++) items[i].value[RFI_SERIES_loss] = i % 3 == 2 ? NAN : wave(i);
  for (size_t k = 0; k < sizeof most / sizeof *most; k++) {
    const int64_t n = rfi_thin(&rows, RFI_SERIES_loss, most[k], at);
    bool high = false, low = false;
    if (n > (most[k] > 4 ? most[k] : 4)) fail_msg("%lld points of %lld", (long long)n, (long long)most[k]);
    for (int64_t i = 0; i < n; i++) {
      assert_true(i == 0 || at[i] > at[i - 1]);
      assert_false(isnan(items[at[i]].value[RFI_SERIES_loss]));
      high |= at[i] == 4321;
      low |= at[i] == 7777;
    }
    assert_true(high && low);
    assert_int_equal(at[0], 0);
    assert_int_equal(at[n - 1], N - 1); /* 19999 = 1 mod 3 */
  }
  assert_int_equal(rfi_thin(&rows, RFI_SERIES_lr, 100, at), 50); /* a constant: two points of each bucket */
  for (int64_t i = 0; i < N; i++) items[i].value[RFI_SERIES_lr] = NAN;
  assert_int_equal(rfi_thin(&rows, RFI_SERIES_lr, 100, at), 0);
  free(items);
  free(at);
}

/* ---- the log ---- */

static const char start_line[] = "{\"event\": \"start\", \"step\": 0}\n";
static const char log_text[] =
    "{\"event\": \"start\", \"step\": 0, \"steps\": 8, \"time\": 1000}\n"
    "{\"event\": \"metrics\", \"step\": 1, \"time\": 1001, \"loss\": 4, \"tokens\": 64, \"seconds\": 0.5}\n"
    "{\"event\": \"metrics\", \"step\": 2, \"time\": 1002, \"loss\": 3, \"tokens\": 64, \"skipped\": 1}\n"
    "{\"event\": \"checkpoint\", \"step\": 2, \"time\": 1002.5, \"message\": \"step-000002\"}\n"
    "{\"event\": \"metrics\", \"step\": 3, \"time\": 1003, \"loss\": 9}\n"
    "{\"event\": \"evaluation\", \"step\": 3, \"time\": 1003, \"loss\": 8}\n"
    "{\"event\": \"start\", \"step\": 2, \"time\": 5000}\n"
    "{\"event\": \"metrics\", \"step\": 3, \"time\": 5002, \"loss\": null}\n"
    "{\"event\": \"metrics\", \"step\": 4, \"time\": 5003, \"loss\": 2}\n"
    "{\"event\": \"end\", \"step\": 4, \"time\": 5003, \"message\": \"stopped\"}\n";

/* The run was killed after step 3 and resumed from step 2, 4,000 seconds later. */
static void test_resumed(void **state) {
  rft_folder *f = *state;
  rfi_run_log log;
  write_text(f, "run/log.jsonl", log_text);
  assert_int_equal(rfi_run_log_open(f->ctx, rft_path(f, "run"), &log), RFR_OK);
  static const int64_t steps[] = {1, 2, 3, 4};
  static const double seconds[] = {1, 2, 4, 5};
  assert_int_equal(log.rows.n, 4);
  for (int i = 0; i < 4; i++) {
    assert_int_equal(log.rows.items[i].step, steps[i]);
    assert_true(log.rows.items[i].elapsed == seconds[i]);
  }
  assert_true(log.rows.items[0].value[RFI_SERIES_tokens_per_second] == 128.0);
  assert_true(isnan(log.rows.items[2].value[RFI_SERIES_loss])); /* the later line counts, and null is not a number */
  assert_true(log.rows.items[1].skipped && !log.rows.items[3].skipped);
  assert_int_equal(log.evaluations.n, 0); /* the resumed run has lost its step */
  assert_int_equal(log.step, 4);
  assert_int_equal(log.steps, 8);
  assert_string_equal(rfi_run_log_end(&log), "stopped");
  rfi_run_log_close(&log);
}

/* An incomplete last line is skipped; the next reading adds it. */
static void test_growing(void **state) {
  rft_folder *f = *state;
  rfi_run_log log;
  const size_t n = strlen(log_text);
  for (size_t cut = 70; cut < n; cut += 13) {
    rft_write(f, "run/log.jsonl", log_text, cut);
    assert_int_equal(rfi_run_log_open(f->ctx, rft_path(f, "run"), &log), RFR_OK);
    rft_write(f, "run/log.jsonl", log_text, n);
    assert_int_equal(rfi_run_log_read(&log), RFR_OK);
    assert_int_equal(log.rows.n, 4);
    assert_int_equal(log.line, 10);
    assert_string_equal(rfi_run_log_end(&log), "stopped");
    rft_write(f, "run/log.jsonl", log_text, 80);
    assert_int_equal(rfi_run_log_read(&log), RFR_IO);
    assert_non_null(strstr(rfr_last_error()->message, "became shorter"));
    rfi_run_log_close(&log);
  }
}

/* ---- files of the folder ---- */

static void refused(rft_folder *f, const char *file, const char *content, const char *slug, const char *says) {
  const char *name = "bad";
  text t = {0};
  rfr_report *r = NULL;
  write_text(f, "bad/log.jsonl", log_text);
  write_text(f, rft_path(f, file) + strlen(f->path) + 1, content);
  rfr_status s = open_all(f, 1, &name, &r);
  if (s == RFR_OK) s = rfr_report_page(r, 0, collect, &t);
  if (s == RFR_OK) fail_msg("%s is accepted: %s", file, content);
  assert_int_equal(t.n, 0); /* a page is complete or absent */
  if (strcmp(rfr_last_error()->slug, slug) != 0 || !strstr(rfr_last_error()->message, says))
    fail_msg("%s: [%s] %s", file, rfr_last_error()->slug, rfr_last_error()->message);
  rfr_report_close(r);
  assert_int_equal(remove(rft_path(f, file)), 0);
}

static void test_refused(void **state) {
  rft_folder *f = *state;
  rfr_report *r;
  const char *none = "none";
  refused(f, "bad/log.jsonl", "", "run.folder", "the log is empty");
  refused(f, "bad/log.jsonl", "{\"event\": \"start\", \"step\": 0}\n{\"event\": \n", "json", "log.jsonl:2: ");
  refused(f, "bad/log.jsonl", "{\"event\": \"start\", \"step\": 0}\n{\"step\": 1}\n", "json", "line 2: ");
  refused(f, "bad/log.jsonl", "{\"event\": \"start\", \"step\": -1}\n", "json", "\"step\" is -1");
  refused(f, "bad/log.jsonl", "[1]\n", "json", "line 1: ");
  refused(f, "bad/config.yaml", "a: [1\n", "config.syntax", "bad/config.yaml");
  refused(f, "bad/run.json", "{\"a\": 1", "json", "bad/run.json");
  refused(f, "bad/plan.json", "[]", "json", "bad/plan.json");
  refused(f, "bad/plan.json", "{\"planned_bytes\": 64, \"persistent_bytes\": 65, \"ops\": 1}", "json",
          "persistent_bytes");
  refused(f, "bad/plan.json",
          "{\"planned_bytes\": 64, \"persistent_bytes\": 0, \"ops\": 1, \"buffers\": [{\"name\": \"x\", \"kind\": "
          "\"weight\", \"bytes\": 1, \"offset\": 0, \"first\": 3, \"last\": 2}]}",
          "json", "\"last\" is 2");
  refused(f, "bad/profile.json", "{\"ms_per_step\": 1}", "json", "bad/profile.json");
  refused(f, "bad/samples.jsonl", "{\"step\": 1, \"prompt\": \"a\", \"text\": \"b\"}\n{\"step\": 1}\n", "json",
          "line 2: ");
  write_text(f, "bad/samples.jsonl", "");
  refused(f, "bad/watch.jsonl", "{\"step\": 1, \"values\": {}}\n{\"step\": 2}\n", "json", "line 2: ");
  refused(f, "bad/watch.jsonl", "{\"values\": {}}\n", "json", "\"step\"");
  assert_int_equal(open_all(f, 1, &none, &r), RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.open");
  assert_null(r);
  write_text(f, "file", "");
  write_text(f, "empty/other", "");
  assert_int_equal(open_all(f, 1, (const char *const[]){"file"}, &r), RFR_INVALID);
  assert_int_equal(open_all(f, 1, (const char *const[]){"empty"}, &r), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "empty has no log.jsonl"));
  assert_int_equal(rfr_report_open(f->ctx, NULL, 0, &r), RFR_INVALID);
  assert_int_equal(rfr_report_open(f->ctx, NULL, RFR_REPORT_RUNS + 1, &r), RFR_INVALID);
}

static const char *item(const json_t *list, size_t i, size_t k) {
  return json_string_value(json_array_get(json_array_get(list, i), k));
}

static double cell(const json_t *watched, const char *statistic, size_t row, size_t column) {
  const json_t *x = json_array_get(json_array_get(json_object_get(watched, statistic), row), column);
  return json_is_null(x) ? -1 : json_number_value(x);
}

/* Two sessions wrote step 4, and step 7 is lost; the names are those of the last line. */
static void test_watched(void **state) {
  rft_folder *f = *state;
  write_text(f, "run/log.jsonl", log_text);
  write_text(
      f, "run/watch.jsonl",
      "{\"step\": 1, \"values\": {\"a\": [9, 1, 2, 0.5, 0.25, 3, 0.125, 0], \"old\": [1, 0, 0, 1, 1, 1, 1, 1]}}\n"
      "{\"step\": 4, \"values\": {\"a\": [9, 0, 0, 7, 7, 7, 7, 7]}}\n"
      "{\"step\": 7, \"values\": {\"a\": [9, 0, 0, 7, 7, 7, 7, 7]}}\n"
      "{\"step\": 4, \"values\": {\"a\": [9, 0, 0, 0.75, 8, 7, 7, 0.5], \"<b>\": [4, 0, 0, 1, 2, 3, 4, 0]}}\n");
  json_t *run = data_of(f, "run");
  const json_t *w = json_object_get(run, "watched"), *names = json_object_get(w, "names");
  assert_int_equal(json_array_size(json_object_get(w, "steps")), 2);
  assert_int_equal(json_integer_value(json_array_get(json_object_get(w, "steps"), 1)), 4);
  assert_int_equal(json_array_size(names), 2);
  assert_string_equal(json_string_value(json_array_get(names, 1)), "<b>");
  assert_true(cell(w, "rms", 0, 0) == 0.25 && cell(w, "rms", 0, 1) == 8 && cell(w, "rms", 1, 0) == -1);
  assert_true(cell(w, "mean", 0, 1) == 0.75 && cell(w, "zeros", 0, 1) == 0.5 && cell(w, "smallest", 1, 1) == 4);
  assert_true(cell(w, "nans", 0, 0) == 1 && cell(w, "infs", 0, 0) == 2 && cell(w, "largest", 0, 0) == 3);
  json_decref(run);
  /* Many values and steps: evenly spread, the last step among them. */
  FILE *out = fopen(rft_path(f, "run/watch.jsonl"), "w");
  assert_non_null(out);
  for (int step = 1; step <= 90; step++) {
    fprintf(out, "{\"step\": %d, \"values\": {", step);
    for (int i = 0; i < 900; i++) fprintf(out, "%s\"v%d\": [1, 0, 0, 0, %d, 0, 0, 0]", i ? ", " : "", i, step);
    fprintf(out, "}}\n");
  }
  fclose(out);
  run = data_of(f, "run");
  w = json_object_get(run, "watched");
  const size_t columns = json_array_size(json_object_get(w, "steps"));
  assert_int_equal(columns, 12);
  assert_int_equal(json_integer_value(json_object_get(w, "names_in_all")), 900);
  assert_int_equal(json_array_size(json_object_get(w, "names")), 714); /* 60,000 numbers */
  assert_true(cell(w, "rms", 713, columns - 1) == 90 && cell(w, "rms", 0, 0) <= 8);
  json_decref(run);
}

static void test_files(void **state) {
  rft_folder *f = *state;
  write_text(f, "run/log.jsonl", log_text);
  write_text(f, "run/config.yaml", "refrain: 1\ndata:\n  train: [\"a b\", c]\n  sequence: 64\n");
  write_text(f, "run/run.json", "{\"device\": \"cpu\", \"layers\": 3, \"sources\": {\"data.sequence\": \"--set\"}}");
  write_text(
      f, "run/plan.json",
      "{\"planned_bytes\": 100, \"persistent_bytes\": 40, \"ops\": 9, \"phases\": [[0, \"forward\"]], \"buffers\": ["
      "{\"name\": \"w\", \"kind\": \"weight\", \"bytes\": 40, \"offset\": 0, \"first\": 0, \"last\": 8},"
      "{\"name\": \"x\", \"kind\": \"activation\", \"bytes\": 60, \"offset\": 40, \"first\": 1, \"last\": 8}]}");
  write_text(
      f, "run/profile.json",
      "{\"ms_per_step\": 1.5, \"device\": \"d\", \"dtype\": \"f32\", \"ceilings\": {\"flops_per_second\": 1e9, "
      "\"bytes_per_second\": 2e9}, \"ops\": [{\"name\": \"1 matmul\", \"kernel\": \"v4\", \"ms\": 1, \"flops\": 10, "
      "\"bytes\": 20, \"roofline\": 0.5}]}");
  write_text(f, "run/samples.jsonl", "{\"step\": 5, \"prompt\": \"a\", \"text\": \"b\\nc\"}\n");
  json_t *run = data_of(f, "run");
  const json_t *config = json_object_get(run, "config"), *samples = json_object_get(run, "samples");
  assert_string_equal(json_string_value(json_object_get(run, "name")), "run");
  assert_int_equal(json_array_size(config), 3);
  assert_string_equal(item(config, 1, 0), "data.train");
  assert_string_equal(item(config, 1, 1), "[a b, c]");
  assert_string_equal(item(config, 2, 2), "--set");
  assert_int_equal(json_array_size(json_object_get(run, "facts")), 2);
  const json_t *buffers = json_object_get(json_object_get(run, "plan"), "buffers");
  assert_string_equal(item(buffers, 0, 0), "x"); /* the larger area first */
  assert_int_equal(json_array_size(buffers), 2);
  assert_string_equal(item(json_object_get(json_object_get(run, "profile"), "ops"), 0, 0), "1 matmul");
  assert_string_equal(item(samples, 0, 2), "b\nc");
  const json_t *loss = json_object_get(json_object_get(run, "series"), "loss"); /* steps as differences */
  assert_int_equal(json_array_size(json_array_get(loss, 0)), 3);
  assert_int_equal(json_integer_value(json_array_get(json_array_get(loss, 0), 2)), 2);
  assert_int_equal(json_integer_value(json_object_get(run, "skipped")), 1);
  json_decref(run);
}

/* The load of each layer, the largest of a column's steps. */
static void test_loads(void **state) {
  rft_folder *f = *state;
  text t = {0};
  char line[160];
  collect(start_line, strlen(start_line), &t);
  for (int i = 1; i <= 1000; i++) {
    snprintf(line, sizeof line, "{\"event\": \"metrics\", \"step\": %d, \"layer_loads\": [1.25, %s]}\n", i,
             i == 499 ? "7.5" : "2");
    collect(line, strlen(line), &t);
  }
  write_text(f, "run/log.jsonl", t.data);
  free(t.data);
  json_t *run = data_of(f, "run");
  const json_t *loads = json_object_get(run, "loads"), *layers = json_object_get(loads, "layers");
  const size_t columns = json_array_size(json_object_get(loads, "steps"));
  assert_true(columns > 100 && columns <= 400);
  assert_int_equal(json_array_size(layers), 2);
  int high = 0;
  for (size_t c = 0; c < columns; c++) {
    assert_int_equal(json_integer_value(json_array_get(json_array_get(layers, 0), c)), 125);
    high += json_integer_value(json_array_get(json_array_get(layers, 1), c)) == 750;
  }
  assert_int_equal(high, 1);
  json_decref(run);
}

/* ---- the page ---- */

static void test_hostile(void **state) {
  rft_folder *f = *state;
  static const char *const names[] = {"a</script><script>alert(1)</script>", "b\"'><img src=x onerror=alert(2)>&amp;",
                                      "c\xff\xc0\xaf\xed\xa0\x80<!--"};
  for (int i = 0; i < 3; i++) {
    char path[200];
    snprintf(path, sizeof path, "%s/log.jsonl", names[i]);
    for (char *s = path; *s; s++)
      if (s[0] == '<' && s[1] == '/') s[1] = '\\'; /* the folder does not exist */
    write_text(f, path, "{\"event\": \"warning\", \"step\": 0, \"message\": \"</script><!-- \\u2028\"}\n");
  }
  text t;
  const char *const folders[] = {"a<\\script><script>alert(1)<\\script>", names[1], names[2]};
  write_all(f, 3, folders, true, &t);
  assert_int_equal(count(t.data, "<script"), 2);
  assert_int_equal(count(t.data, "</script"), 2);
  assert_int_equal(count(t.data, "<img"), 0);
  assert_int_equal(count(t.data, "<!--"), 0);
  assert_int_equal(count(t.data, "alert(2)"), 2); /* name and folder, as text */
  assert_int_equal(count(t.data, "\\ufffd"), 2 * 6);
  assert_non_null(strstr(t.data, "default-src 'none'"));
  assert_null(strstr(t.data, "connect-src"));
  assert_int_equal(count(t.data, "http:"), 1); /* the namespace of SVG */
  const char *from = strstr(t.data, "id=\"data\">") + 10, *to = strstr(from, "</script>");
  json_t *v = json_loadb(from, (size_t)(to - from), 0, NULL);
  assert_non_null(v);
  json_decref(v);
  free(t.data);
}

static void test_large(void **state) {
  rft_folder *f = *state;
  enum { RUNS = 5, STEPS = 100000 };
  static const char *const names[RUNS] = {"r0", "r1", "r2", "r3", "r4"};
  char line[400];
  for (int r = 0; r < RUNS; r++) {
    text t = {0};
    collect(start_line, strlen(start_line), &t);
    for (int i = 1; i <= STEPS; i++) {
      const double x = 2 + 8 / sqrt(i) + 0.01 * ((i * 7919 + r) % 100);
      snprintf(line, sizeof line,
               "{\"event\": \"metrics\", \"step\": %d, \"time\": %.3f, \"loss\": %.15g, \"bits_per_byte\": %.15g, "
               "\"tokens\": "
               "524288, \"grad_norm\": %.15g, \"lr\": %.15g, \"skipped\": 0, \"most_load\": %.6g, \"least_load\": 0.5, "
               "\"resident_bytes\": %d, \"seconds\": %.9f, \"layer_loads\": [1,2,3,4,5,6,7,8]}\n",
               i, 1e9 + 0.1 * i, i == 77777 ? 12.5 : x, 1.44 * x, x / 3, 1e-3 / i, 1 + x / 9, 1000000 + i * 4096,
               x / 20);
      collect(line, strlen(line), &t);
    }
    snprintf(line, sizeof line, "%s/log.jsonl", names[r]);
    rft_write(f, line, t.data, t.n);
    free(t.data);
  }
  text t;
  write_all(f, RUNS, names, true, &t);
  if (t.n > 3000000) fail_msg("the page has %zu bytes", t.n);
  assert_int_equal(count(t.data, ",12.5,"), RUNS); /* the extreme of each run */
  free(t.data);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_thinned_curves), rft_folder_test(test_resumed), rft_folder_test(test_growing),
      rft_folder_test(test_files),          rft_folder_test(test_watched), rft_folder_test(test_refused),
      rft_folder_test(test_hostile),        rft_folder_test(test_loads),   rft_folder_test(test_large),
  };
  return cmocka_run_group_tests_name("report", tests, NULL, NULL);
}
