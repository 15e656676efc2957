/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain sweep as a user runs it: ranks, a run that fails, a stop and its continuation, and what is refused.
 */
#include <signal.h>
#include <sys/stat.h>

#include "support/program.h"

static const char grid[] =
    "refrain: 1\nconfig: small.yaml\ngrid:\n  optimizer.lr: [1e-9, 3e-3]\n"
    "  data.validation: [20%]\n  run.steps: [20]\nruns:\n- {data.train: [none*], data.validation: 5%}\n";

static const json_t *run_of(const json_t *v, int i) { return json_array_get(json_object_get(v, "runs"), (size_t)i); }

static const char *text_of(const json_t *o, const char *key) { return json_string_value(json_object_get(o, key)); }

static void sweeps(void **state) {
  (void)state;
  rft_write_file("grid.yaml", grid);
  assert_int_equal(RUN("sweep", "grid.yaml", "--out", "s", "--jobs", "2", "--json", "--threads", "1"), 1);
  json_t *v = rft_parsed();
  assert_int_equal(json_array_size(json_object_get(v, "runs")), 3);
  assert_int_equal(json_array_size(json_object_get(v, "best")), 2);
  assert_string_equal(json_string_value(json_array_get(json_object_get(v, "best"), 0)), "run-002");
  assert_string_equal(text_of(run_of(v, 0), "state"), "done");
  assert_string_equal(text_of(run_of(v, 2), "state"), "failed");
  rft_assert_says(text_of(run_of(v, 2), "error"), "matches no file");
  assert_int_equal(rft_number(run_of(v, 1), "step"), 20);
  assert_true(json_real_value(json_object_get(run_of(v, 1), "loss")) <
              json_real_value(json_object_get(run_of(v, 0), "loss")));
  json_decref(v);
  /* Each run has a run folder. */
  assert_int_equal(RUN("diff", "s/run-001", "s/run-002"), 1);
  rft_assert_says(rft_out, "optimizer.lr");
  assert_int_equal(RUN("sweep", "grid.yaml", "--out", "s"), 2);
  rft_assert_says(rft_err, "has a sweep already");
  /* Finished runs are not trained a second time; the failed one is retried. */
  struct stat before, after;
  assert_int_equal(stat("s/run-001/log.jsonl", &before), 0);
  assert_int_equal(RUN("sweep", "grid.yaml", "--out", "s", "--resume", "--report", "best.html"), 1);
  assert_int_equal(stat("s/run-001/log.jsonl", &after), 0);
  assert_int_equal(before.st_size, after.st_size);
  rft_assert_says(rft_err, "run-003  failed: ");
  assert_null(strstr(rft_err, "run-001  starts"));
  rft_assert_says(rft_out, "   1  run-002   done");
  rft_assert_says(rft_out, "      run-003   failed");
  rft_assert_says(rft_out, "to compare: refrain report s/run-002 s/run-001");
  assert_int_equal(stat("best.html", &after), 0);
  assert_true(after.st_size > 10000);
}

/* A stop makes the run write a checkpoint; --resume continues it, bitwise equal to an uninterrupted run. */
static void stops(void **state) {
  (void)state;
  static const char *const arguments[] = {"sweep", "long.yaml", "--out",           "l", "--threads",
                                          "1",     "--set",     "run.log_every=7", NULL};
  struct stat st;
  static char a[65536], b[65536];
  rft_write_file("long.yaml", "refrain: 1\nconfig: small.yaml\ngrid: {data.validation: [20%], run.steps: [300], "
                              "optimizer.lr: [1e-3, 2e-3]}\n");
  const pid_t child = START(arguments);
  for (int i = 0; i < 6000 && !strstr(a, "\"metrics\""); i++) {
    usleep(5000);
    if (stat("l/run-001/log.jsonl", &st) == 0) rft_slurp("l/run-001/log.jsonl", a, sizeof a);
  }
  kill(child, SIGTERM);
  assert_int_equal(rft_finish(child), 5);
  rft_assert_says(rft_err, "run-001  stopped");
  rft_assert_says(rft_err, "refrain sweep long.yaml --out l --resume --set run.log_every=7\n");
  assert_int_not_equal(stat("l/run-002", &st), 0);
  assert_int_equal(RUN("sweep", "long.yaml", "--out", "l", "--resume", "--threads", "1", "--set", "run.log_every=7"),
                   0);
  rft_assert_says(rft_err, "run-001  continues");
  rft_assert_says(rft_err, "run-002  starts  data.validation=20%  run.steps=300  optimizer.lr=2e-3");
  assert_int_equal(RUN("train", "small.yaml", "--out", "alone", "--threads", "1", "--set", "data.validation=20%",
                       "--set", "run.steps=300", "--set", "optimizer.lr=1e-3"),
                   0);
  memset(a, 0, sizeof a), memset(b, 0, sizeof b);
  rft_slurp("l/run-001/step-000300/model.safetensors", a, sizeof a);
  rft_slurp("alone/step-000300/model.safetensors", b, sizeof b);
  assert_memory_equal(a, b, sizeof a);
  rft_write_file("long.yaml", "refrain: 1\nconfig: small.yaml\ngrid: {data.validation: [20%], run.steps: [300], "
                              "optimizer.lr: [1e-3, 4e-3]}\n");
  assert_int_equal(RUN("sweep", "long.yaml", "--out", "l", "--resume", "--set", "run.log_every=7"), 2);
  rft_assert_says(rft_err, "run-002: the list of values");
}

static void refuses(void **state) {
  (void)state;
  rft_write_file("bad.yaml", "refrain: 1\nconfig: small.yaml\ngrid:\n  optimizer.rl: [1]\n");
  assert_int_equal(RUN("sweep", "bad.yaml"), 2);
  rft_assert_says(rft_err, "bad.yaml:4: unknown key \"optimizer.rl\"");
  assert_int_equal(access("sweeps", F_OK), -1);
  /* a parent that ignores SIGCHLD, and a folder of a sweep that could not write its first record */
  assert_int_equal(mkdir("empty", 0777), 0);
  rft_write_file("empty/sweep.lock", "");
  rft_write_file("one.yaml", "refrain: 1\nconfig: small.yaml\ngrid: {data.validation: [20%], run.steps: [2]}\n");
  assert_int_equal(system("timeout -s KILL 100 env --ignore-signal=CHLD " RFT_BINARY_DIR
                          "/refrain sweep one.yaml --out empty --threads 1 --quiet"),
                   0);
  assert_int_equal(RUN("sweep", "one\xff.yaml"), 2);
  rft_assert_says(rft_err, "is not UTF-8");
  static char name[4500]; /* too long for the system; the default folder is longer */
  memset(name, 'a', sizeof name - 1);
  assert_int_equal(RUN("sweep", name), 4);
  assert_int_equal(RUN("sweep", "grid.yaml", "--jobs", "0"), 2);
  assert_int_equal(RUN("sweep", "grid.yaml", "--jobs", "2", "--device", "cuda"), 2);
  rft_assert_says(rft_err, "the runs would share one GPU");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(sweeps), cmocka_unit_test(stops), cmocka_unit_test(refuses)};
  return cmocka_run_group_tests(tests, rft_program_set_up, rft_program_tear_down);
}
