/* SPDX-License-Identifier: Apache-2.0
 *
 * Grids as lists of runs, refused grids with their place, the record in sweep.json, ranks, and what a resume accepts.
 */
#include "refrain/sweep.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "support/folder.h"

static const char base_text[] =
    "refrain: 1\nmodel: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}\n"
    "data: {train: [a.txt], validation: 10%, sequence: 8}\nbatch: {tokens: 8, microbatch: 1}\n"
    "optimizer: {lr: 1e-3}\nrun: {steps: 4}\n";

static void expect(rfr_status s, const char *what) {
  if (s != RFR_OK) fail_msg("%s: %s [%s]", what, rfr_last_error()->message, rfr_last_error()->slug);
}

static void write_text(rft_folder *f, const char *name, const char *text) { rft_write(f, name, text, strlen(text)); }

static rfr_status open_with(rft_folder *f, const char *grid, const rfr_sweep_options *o, rfr_sweep **out) {
  write_text(f, "grid.yaml", grid);
  return rfr_sweep_open(f->ctx, rft_path(f, "grid.yaml"), rft_path(f, "sweep"), o, out);
}

static rfr_sweep *open_ok(rft_folder *f, const char *grid, bool resume) {
  rfr_sweep_options o = rfr_sweep_options_default();
  rfr_sweep *s;
  o.resume = resume;
  expect(open_with(f, grid, &o, &s), grid);
  return s;
}

static void assert_refused(rfr_status s, const char *slug, const char *says) {
  assert_int_not_equal(s, RFR_OK);
  const rfr_error *e = rfr_last_error();
  if (strcmp(e->slug, slug) != 0 || !strstr(e->message, says))
    fail_msg("\"%s\" [%s], not \"%s\" [%s]", e->message, e->slug, says, slug);
  if (strncmp(says, "grid.yaml:", 10) == 0 && says[10] >= '1' && says[10] <= '9') {
    assert_int_equal(e->line, atoi(says + 10));
    assert_non_null(strstr(e->file, "grid.yaml"));
  }
}

/* ---- points ---- */

static void assert_sets(const rfr_sweep *s, const char *const *wanted, int n) {
  assert_int_equal(rfr_sweep_count(s), n);
  for (int i = 0; i < n; i++) {
    rfr_sweep_run r;
    char all[512] = "", name[16];
    expect(rfr_sweep_get(s, i, &r), "get");
    for (int k = 0; k < r.n_overrides; k++)
      snprintf(all + strlen(all), sizeof all - strlen(all), "%s;", r.overrides[k]);
    snprintf(name, sizeof name, "run-%03d", i + 1);
    assert_string_equal(all, wanted[i]);
    assert_string_equal(r.name, name);
    assert_string_equal(strrchr(r.folder, '/') + 1, name);
    assert_int_equal(r.state, RFR_SWEEP_WAITING);
    assert_true(isnan(r.loss));
  }
}

static void test_points(void **state) {
  rft_folder *f = *state;
  static const char *const wanted[] = {
      "run.steps=9;optimizer.lr=1e-3;data.train=[\"a.txt\"];run.seed=1;",
      "run.steps=9;optimizer.lr=1e-3;data.train=[\"a.txt\"];run.seed=2;",
      "run.steps=9;optimizer.lr=1e-3;data.train=[\"b*.txt\", \"c \\\"d\\\".txt\"];run.seed=1;",
      "run.steps=9;optimizer.lr=1e-3;data.train=[\"b*.txt\", \"c \\\"d\\\".txt\"];run.seed=2;",
      "run.steps=9;optimizer.lr=0.01;data.train=[\"a.txt\"];run.seed=1;",
      "run.steps=9;optimizer.lr=0.01;data.train=[\"a.txt\"];run.seed=2;",
      "run.steps=9;optimizer.lr=0.01;data.train=[\"b*.txt\", \"c \\\"d\\\".txt\"];run.seed=1;",
      "run.steps=9;optimizer.lr=0.01;data.train=[\"b*.txt\", \"c \\\"d\\\".txt\"];run.seed=2;",
      "run.steps=9;optimizer.name=muon;optimizer.groups=[{\"match\": \"*\", \"lr_scale\": \"2\"}];run.seed=1;",
      "run.steps=9;optimizer.name=muon;optimizer.groups=[{\"match\": \"*\", \"lr_scale\": \"2\"}];run.seed=2;",
  };
  static const char *const steps[] = {"run.steps=9"};
  rfr_sweep_options o = rfr_sweep_options_default();
  rfr_sweep *s;
  o.overrides = steps;
  o.n_overrides = 1;
  write_text(f, "base.yaml", base_text);
  expect(open_with(f,
                   "refrain: 1\nconfig: base.yaml\ngrid:\n  optimizer.lr: [1e-3, 0.01]\n"
                   "  data.train: [[a.txt], ['b*.txt', 'c \"d\".txt']]\nseeds: [1, 2]\n"
                   "runs:\n- {optimizer.name: muon, optimizer.groups: [{match: '*', lr_scale: 2}]}\n",
                   &o, &s),
         "open");
  assert_sets(s, wanted, sizeof wanted / sizeof *wanted);
  assert_string_equal(rfr_sweep_config(s), rft_path(f, "base.yaml"));
  rfr_sweep_close(s);
}

static void test_refused(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *grid, *slug, *says;
  } rows[] = {
      {"", "sweep.grid", "grid.yaml: the file needs the keys"},
      {"a: [", "config.syntax", "grid.yaml:"},
      {"config: base.yaml\nseeds: [1]\n", "sweep.grid", "refrain: 1 is needed"},
      {"refrain: 1\nseeds: [1]\n", "sweep.grid", "config: the path"},
      {"refrain: 1\nconfig: base.yaml\n", "sweep.grid", "there is no grid"},
      {"refrain: 1\nconfig: none.yaml\nseeds: [1]\n", "file.open", "none.yaml"},
      {"refrain: 1\nconfig: base.yaml\ngird: {}\n", "sweep.grid", "grid.yaml:3: unknown key \"gird\""},
      {"refrain: 1\nconfig: base.yaml\ngrid:\n  optimizer.rl: [1]\n", "config.key",
       "grid.yaml:4: unknown key \"optimizer.rl\"; did you mean \"optimizer.lr\"?"},
      {"refrain: 1\nconfig: base.yaml\ngrid:\n  optimiser.lr: [1]\n", "config.key", "grid.yaml:4: unknown key"},
      {"refrain: 1\nconfig: base.yaml\ngrid:\n  optimizer.lr: 1\n", "sweep.grid",
       "grid.yaml:4: optimizer.lr: a list of values is needed"},
      {"refrain: 1\nconfig: base.yaml\ngrid:\n  optimizer.lr: [1, x]\n", "config.value", "grid.yaml:4: run-002: "},
      {"refrain: 1\nconfig: base.yaml\nruns:\n- {optimizer.lr: 1}\n- {optimizer.lr: 1.0}\n", "sweep.grid",
       "grid.yaml:5: run-002 is the same run as run-001, of line 4"},
      {"refrain: 1\nconfig: base.yaml\ngrid: {run.seed: [1, 2]}\nseeds: [1]\n", "sweep.grid",
       "run.seed is given twice"},
      {"refrain: 1\nconfig: base.yaml\nruns: [1]\n", "sweep.grid", "grid.yaml:3: runs: a run is a map"},
      {"refrain: 1\nconfig: base.yaml\ngrid: {data.validation: [0%]}\n", "sweep.grid", "holds out no data"},
      {"refrain: 1\nconfig: base.yaml\ngrid: {run.steps: [1]}\n", "sweep.grid",
       "run.steps is in both the grid and --set"},
  };
  static const char *const steps[] = {"run.steps=9"};
  rfr_sweep_options o = rfr_sweep_options_default();
  o.overrides = steps;
  o.n_overrides = 1;
  write_text(f, "base.yaml", base_text);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_sweep *s;
    assert_refused(open_with(f, rows[i].grid, &o, &s), rows[i].slug, rows[i].says);
    assert_null(s);
  }
  char grid[4000] = "refrain: 1\nconfig: base.yaml\ngrid:\n  run.seed: [0";
  for (int i = 1; i < 400; i++) snprintf(grid + strlen(grid), 8, ",%d", i);
  strcat(grid, "]\n  optimizer.lr: [1, 2, 3]\n");
  rfr_sweep *s;
  assert_refused(open_with(f, grid, NULL, &s), "sweep.grid", "more than 1000 runs");
  write_text(f, "sweep/other", "x");
  assert_refused(open_with(f, "refrain: 1\nconfig: base.yaml\nseeds: [1]\n", NULL, &s), "sweep.exists", "is not empty");
}

/* ---- states ---- */

static void write_log(rft_folder *f, int i, double loss, double bits, const char *end) {
  char name[64], text[1024];
  snprintf(name, sizeof name, "sweep/run-%03d/config.yaml", i);
  write_text(f, name, "refrain: 1\n");
  snprintf(name, sizeof name, "sweep/run-%03d/log.jsonl", i);
  int n =
      snprintf(text, sizeof text,
               "{\"event\": \"start\", \"step\": 0, \"steps\": 4}\n{\"event\": \"metrics\", \"step\": 4, \"loss\": 3}\n"
               "{\"event\": \"evaluation\", \"step\": 2, \"loss\": 9}\n"
               "{\"event\": \"evaluation\", \"step\": 4, \"loss\": %g",
               loss);
  if (isfinite(bits)) n += snprintf(text + n, sizeof text - (size_t)n, ", \"bits_per_byte\": %g", bits);
  n += snprintf(text + n, sizeof text - (size_t)n, "}\n");
  if (end) snprintf(text + n, sizeof text - (size_t)n, "{\"event\": \"end\", \"step\": 4, \"message\": \"%s\"}\n", end);
  write_text(f, name, text);
}

static rfr_sweep_run run_at(const rfr_sweep *s, int i) {
  rfr_sweep_run r;
  expect(rfr_sweep_get(s, i, &r), "get");
  return r;
}

static const char five[] = "refrain: 1\nconfig: base.yaml\nseeds: [1, 2, 3, 4, 5]\n";

static void test_states(void **state) {
  rft_folder *f = *state;
  int best[5];
  write_text(f, "base.yaml", base_text);
  rfr_sweep *s = open_ok(f, five, false), *other;
  assert_refused(open_with(f, five, NULL, &other), "sweep.exists", "has a sweep already");
  rfr_sweep_options o = rfr_sweep_options_default();
  o.resume = 1;
  assert_refused(open_with(f, five, &o, &other), "run.busy", "another process has this sweep open");
  assert_int_equal(rfr_sweep_rank(s, best), 0);
  expect(rfr_sweep_set(s, 0, RFR_SWEEP_RUNNING, NULL), "set");
  write_log(f, 1, 2.5, NAN, "done");
  expect(rfr_sweep_set(s, 0, RFR_SWEEP_DONE, NULL), "set");
  write_log(f, 2, 1.5, 9, "done");
  expect(rfr_sweep_set(s, 1, RFR_SWEEP_DONE, ""), "set");
  write_log(f, 3, 0.5, 1, "run.diverged");
  expect(rfr_sweep_set(s, 2, RFR_SWEEP_FAILED, "no \"luck\"\xff"), "set");
  expect(rfr_sweep_set(s, 3, RFR_SWEEP_RUNNING, NULL), "set");
  expect(rfr_sweep_set(s, 4, RFR_SWEEP_RUNNING, NULL), "set");
  assert_int_equal(rfr_sweep_rank(s, best), 2);
  assert_int_equal(best[0], 1); /* by loss: one run has no bits per byte */
  assert_int_equal(best[1], 0);
  assert_true(run_at(s, 1).loss == 1.5 && run_at(s, 1).bits_per_byte == 9 && run_at(s, 1).step == 4);
  rfr_sweep_close(s);
  /* As after a crash: run 4 has ended since, run 5 has not begun. */
  write_log(f, 4, 1.25, 8, "done");
  s = open_ok(f, five, true);
  static const rfr_sweep_state states[] = {RFR_SWEEP_DONE, RFR_SWEEP_DONE, RFR_SWEEP_FAILED, RFR_SWEEP_DONE,
                                           RFR_SWEEP_WAITING};
  for (int i = 0; i < 5; i++) assert_int_equal(run_at(s, i).state, states[i]);
  assert_string_equal(run_at(s, 2).error, "no \"luck\"");
  assert_int_equal(run_at(s, 2).started, 1);
  assert_int_equal(run_at(s, 4).started, 0);
  rfr_sweep_close(s);
  rft_write(f, "sweep/run-005/log.jsonl", "", 0);
  rfr_sweep_close(open_ok(f, five, true));
  write_log(f, 5, 1.0, 9.5, NULL);
  s = open_ok(f, five, true);
  assert_int_equal(run_at(s, 4).state, RFR_SWEEP_WAITING); /* sweep.json has it so, and the run is continued */
  assert_int_equal(run_at(s, 4).started, 1);
  expect(rfr_sweep_set(s, 4, RFR_SWEEP_STOPPED, NULL), "set");
  write_log(f, 1, 2.5, 7, "done");
  rfr_sweep_close(s);
  s = open_ok(f, five, true);
  assert_int_equal(run_at(s, 4).state, RFR_SWEEP_STOPPED);
  assert_int_equal(rfr_sweep_rank(s, best), 3);
  assert_int_equal(best[0], 0); /* by bits per byte: all have it now */
  assert_int_equal(best[1], 3);
  assert_int_equal(best[2], 1);
  rfr_sweep_close(s);
}

/* Another grid or configuration is not continued. */
static void test_changed(void **state) {
  rft_folder *f = *state;
  static const char *const grids[] = {"refrain: 1\nconfig: base.yaml\nseeds: [1, 2]\n",
                                      "refrain: 1\nconfig: base.yaml\nseeds: [1, 2, 3, 4, 6]\n"};
  rfr_sweep_options o = rfr_sweep_options_default();
  rfr_sweep *s;
  o.resume = 1;
  write_text(f, "base.yaml", base_text);
  rfr_sweep_close(open_ok(f, five, true)); /* starts */
  assert_refused(open_with(f, grids[0], &o, &s), "sweep.changed", "the number of runs");
  assert_refused(open_with(f, grids[1], &o, &s), "sweep.changed", "grid.yaml:3: run-005: the list of values");
  s = open_ok(f, five, true);
  char *changed = malloc(sizeof base_text + 16);
  sprintf(changed, "%s# more\n", base_text);
  write_text(f, "base.yaml", changed);
  assert_refused(rfr_sweep_set(s, 0, RFR_SWEEP_RUNNING, NULL), "sweep.changed", "base.yaml");
  rfr_sweep_close(s);
  assert_refused(open_with(f, five, &o, &s), "sweep.changed", "base.yaml");
  write_text(f, "base.yaml", base_text);
  rft_write(f, "sweep/sweep.json", "{", 1);
  assert_refused(open_with(f, five, &o, &s), "json", "sweep.json");
  free(changed);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(test_points), rft_folder_test(test_refused),
                                     rft_folder_test(test_states), rft_folder_test(test_changed)};
  return cmocka_run_group_tests_name("sweep", tests, NULL, NULL);
}
