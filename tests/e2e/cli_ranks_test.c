/* SPDX-License-Identifier: Apache-2.0
 *
 * `train --ranks N` on CPUs: mpirun starts the ranks. Compares each layout with one rank; tests stop and resume under
 * another number of ranks, and that errors are printed once. Leaks are looked for in one run of each kind: the cases of
 * a table share the code.
 */
#include <math.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>

#include "support/program.h"
#include "support/thin.h"

#define SETS "--set", "run.steps=8", "--set", "data.validation=20%"

static double loss_of_training(void) {
  json_t *v = rft_parsed();
  const double loss = json_number_value(json_object_get(v, "validation_loss"));
  assert_int_equal(rft_number(v, "step"), 8);
  json_decref(v);
  return loss;
}

static void layouts(void **state) {
  static const struct {
    const char *ranks, *shard, *folder;
  } rows[] = {{"2", "parallel.shard=none", "two"},
              {"2", "parallel.shard=optimizer", "two-optimizer"},
              {"4", "parallel.shard=full", "four-full"}};
  (void)state;
  rft_find_leaks(true);
  assert_int_equal(RUN("train", "small.yaml", "--out", "one", "--json", "--set", "batch.microbatch=1", SETS), 0);
  const double one = loss_of_training();
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (RUN("train", "small.yaml", "--ranks", rows[i].ranks, "--out", rows[i].folder, "--json", "--set",
            "batch.microbatch=1", "--set", rows[i].shard, SETS) != 0)
      fail_msg("%s ranks, %s: %s", rows[i].ranks, rows[i].shard, rft_err);
    rft_assert_says(rft_out, "\"ranks\": ");
    const double loss = loss_of_training();
    if (fabs(loss / one - 1) > 1e-6)
      fail_msg("%s ranks, %s: loss %.9g instead of %.9g", rows[i].ranks, rows[i].shard, loss, one);
  }
  assert_int_equal(RUN("train", "four-full", "--resume", "--ranks", "2", "--json", "--set", "run.steps=9"), 0);
  assert_int_equal(RUN("eval", "four-full"), 0);
}

/* Trains with every schedule of a pipeline, and with two data-parallel ranks; one rank continues in the folder. */
static void pipelines(void **state) {
  static const struct {
    const char *ranks, *schedule, *folder;
  } rows[] = {{"2", "parallel.schedule=gpipe", "gpipe"},
              {"2", "parallel.schedule=1f1b", "1f1b"},
              {"2", "parallel.schedule=interleaved", "interleaved"},
              {"2", "parallel.schedule=zb-h1", "zb-h1"},
              {"2", "parallel.schedule=zb-v", "zb-v"},
              {"4", "parallel.schedule=zb-h1", "two-by-two"}};
  (void)state;
#define FOUR "--set", "batch.microbatch=1", "--set", "model.num_hidden_layers=4", SETS
  assert_int_equal(RUN("train", "small.yaml", "--out", "one-of-four", "--json", FOUR), 0);
  const double one = loss_of_training();
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rft_find_leaks(i == 4 || i == 5);
    if (RUN("train", "small.yaml", "--ranks", rows[i].ranks, "--out", rows[i].folder, "--json", "--set",
            "parallel.pipeline=2", "--set", rows[i].schedule, FOUR) != 0)
      fail_msg("%s: %s", rows[i].folder, rft_err);
    const double loss = loss_of_training();
    if (!(fabs(loss / one - 1) <= 1e-6)) fail_msg("%s: loss %.9g instead of %.9g", rows[i].folder, loss, one);
  }
  assert_int_equal(RUN("eval", "zb-v"), 0);
  assert_int_equal(RUN("train", "two-by-two", "--resume", "--ranks", "2", "--set", "run.steps=9"), 0);
  assert_int_equal(RUN("train", "two-by-two", "--resume", "--set", "run.steps=10"), 0);
}

/* The measured times of a pipeline's stages, and the simulator's result for them. */
static void profile(void **state) {
  (void)state;
  rft_find_leaks(true);
#define STAGES "--set", "parallel.pipeline=2", "--set", "parallel.schedule=zb-v", "--set", "batch.microbatch=1"
  if (RUN("profile", "small.yaml", "--ranks", "2", "--steps", "2", "--json", "--write-costs", "stages.json", STAGES,
          "--set", "model.num_hidden_layers=4") != 0)
    fail_msg("%s", rft_err);
  json_t *v = rft_parsed();
  const json_t *stages = json_object_get(v, "stages");
  assert_int_equal(json_array_size(stages), 4);
  double busy[2] = {0, 0};
  for (size_t i = 0; i < 4; i++) {
    const json_t *stage = json_array_get(stages, i);
    const double f = json_number_value(json_object_get(stage, "F")), w = json_number_value(json_object_get(stage, "W")),
                 dgrad = json_number_value(json_object_get(stage, "I"));
    assert_true(f > 0 && dgrad > 0 && w > 0 && !json_object_get(stage, "B"));
    /* zb-v: stages 0 and 3 on one rank, 1 and 2 on the other */
    busy[i == 1 || i == 2] += (f + dgrad + w) * (double)rft_number(v, "microbatches");
  }
  const double simulated = json_number_value(json_object_get(v, "simulated_seconds")), most = fmax(busy[0], busy[1]),
               least = fmin(busy[0], busy[1]);
  assert_true(simulated >= most * (1 - 1e-6)); /* printed numbers are rounded */
  assert_true(fabs(json_number_value(json_object_get(v, "simulated_bubble")) - (1 - least / simulated)) < 1e-6);
  const double step = json_number_value(json_object_get(v, "seconds_per_step")),
               measured = fmax(0, step - json_number_value(json_object_get(v, "update_seconds"))),
               rounding = 1e-8 * (1 + step / least); /* of the printed numbers, whose difference is taken */
  assert_true(fabs(json_number_value(json_object_get(v, "bubble")) - fmax(0, 1 - least / measured)) < rounding);
  json_decref(v);
  assert_int_equal(RUN("schedule", "--kind", "zb-v", "--stages", "2", "--microbatches", "4", "--costs", "stages.json"),
                   0);
  assert_int_equal(RUN("profile", "small.yaml", "--ranks", "2", "--steps", "1", "--json"), 0);
  v = rft_parsed();
  assert_true(rft_number(v, "ranks") == 2 && json_number_value(json_object_get(v, "seconds_per_step")) > 0);
  json_decref(v);
  assert_int_equal(RUN("profile", "small.yaml", "--ranks", "2", "--write-costs", "none.json"), 2);
  rft_assert_says(rft_err, "set parallel.pipeline");
  assert_int_equal(RUN("profile", "small.yaml", "--ranks", "2", "--trace", "t.json", STAGES), 2);
#undef STAGES
}

/* Expert parallelism; one rank reads its checkpoint. */
static void experts(void **state) {
  static const char *const sets[] = {"batch.microbatch=1", "model.model_type=mixtral", "model.num_experts=4"};
  double loss[2];
  (void)state;
  rft_find_leaks(true);
  assert_int_equal(RUN("train", "small.yaml", "--out", "experts-one", "--json", "--set", sets[0], "--set", sets[1],
                       "--set", sets[2], SETS),
                   0);
  loss[0] = loss_of_training();
  if (RUN("train", "small.yaml", "--ranks", "2", "--out", "experts-two", "--json", "--set", "parallel.expert=2",
          "--set", sets[0], "--set", sets[1], "--set", sets[2], SETS) != 0)
    fail_msg("%s", rft_err);
  loss[1] = loss_of_training();
  if (fabs(loss[1] / loss[0] - 1) > 1e-6) fail_msg("loss %.9g instead of %.9g", loss[1], loss[0]);
  assert_int_equal(RUN("eval", "experts-two"), 0);
  assert_int_equal(RUN("export", "experts-two", "--to", "hf", "--out", "experts-hf"), 0);
}

/* An error that all ranks see is printed once. */
static void errors(void **state) {
  static const struct {
    const char *set, *says;
    int code;
  } rows[] = {{"batch.tokens=80", "which 4 ranks do not divide; give 64 or 128", 2},
              {"parallel.expert=2", "parallel.expert: 2", 2},
              {"parallel.pipeline=3", "parallel.pipeline: 3 does not divide the 4 ranks", 2},
              {"memory.budget=4KiB", "plan.over_budget", 3},
              {"data.train=none/*", "data.empty", 2}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rft_find_leaks(i == 0);
    const int code = RUN("train", "small.yaml", "--ranks", "4", "--out", "refused", "--set", "batch.microbatch=1",
                         "--set", rows[i].set);
    if (code != rows[i].code) fail_msg("%s: exit code %d: %s", rows[i].set, code, rft_err);
    rft_assert_says(rft_err, rows[i].says);
    const char *first = strstr(rft_err, "error: ");
    if (!first || strstr(first + 1, "error: ")) fail_msg("%s: %s", rows[i].set, rft_err);
  }
  assert_int_equal(RUN("train", "missing.yaml", "--ranks", "2"), 4);
  assert_int_equal(RUN("train", "small.yaml", "--ranks", "2", "--device", "cuda:1"), 2);
  rft_assert_says(rft_err, "rank r takes GPU r");
  setenv("WORLD_SIZE", "3", 1);
  setenv("RANK", "1", 1);
  assert_int_equal(RUN("train", "small.yaml", "--ranks", "2"), 2);
  rft_assert_says(rft_err, "torchrun has started 3 ranks");
  assert_int_equal(RUN("train", "small.yaml"), 2);
  rft_assert_says(rft_err, "MPI says 0 of 1");
  unsetenv("WORLD_SIZE");
  unsetenv("RANK");
}

/* Processes as srun starts them: without PMI, and with a shell in a step of one task. */
static void steps_of_slurm(void **state) {
  (void)state;
  rft_find_leaks(false);
  setenv("SLURM_STEP_NUM_TASKS", "2", 1);
  setenv("SLURM_PROCID", "0", 1);
  assert_int_equal(RUN("train", "small.yaml", "--out", "slurm"), 2);
  rft_assert_says(rft_err, "MPI cannot start: srun has started this process without PMIx; give srun --mpi=pmix");
  setenv("SLURM_STEP_NUM_TASKS", "1", 1);
  assert_int_equal(RUN("train", "small.yaml", "--ranks", "2", "--out", "slurm", "--json", "--set", "run.steps=2"), 0);
  rft_assert_says(rft_out, "\"ranks\": 2");
  unsetenv("SLURM_STEP_NUM_TASKS");
  unsetenv("SLURM_PROCID");
}

/* In JSON an error names the rank that printed it, and is still printed once. */
static void json_of_ranks(void **state) {
  (void)state;
  rft_find_leaks(false);
  assert_int_equal(RUN("train", "small.yaml", "--ranks", "4", "--out", "refused", "--json", "--set",
                       "batch.microbatch=1", "--set", "data.train=none/*"),
                   2);
  json_t *v = rft_parsed_error();
  assert_string_equal(json_string_value(json_object_get(v, "slug")), "data.empty");
  assert_in_range(rft_number(v, "rank"), 0, 3);
  json_decref(v);
  assert_int_equal(RUN("train", "small.yaml", "--out", "refused", "--json", "--set", "data.train=none/*"), 2);
  v = rft_parsed_error();
  assert_null(json_object_get(v, "rank"));
  json_decref(v);
  assert_int_equal(RUN("train", "small.yaml", "--ranks", "2", "--out", "warned", "--json", "--set", "run.steps=1",
                       "--set", "run.evaluate_every=0", "--set", "batch.microbatch=1", "--set", "data.sequence=16"),
                   0);
  v = rft_parsed();
  assert_int_equal(rft_number(v, "rank"), 0);
  assert_int_equal(rft_number(v, "ranks"), 2);
  json_decref(v);
}

/* Open MPI 5 wraps its message about a killed rank; a stand-in for mpirun prints such a message. */
static void wrapped_message(void **state) {
  static const char dashes[] = "------------------------------------------------------------";
  char script[512], path[4096];
  (void)state;
  snprintf(script, sizeof script,
           "#!/bin/sh\necho \"over [$OMPI_MCA_btl_tcp_if_include]\" >&2\n"
           "cat >&2 <<END\n%s\nprterun noticed that process rank 1 with PID 5617 on node vm exited on\n"
           "signal 9 (Killed).\n%s\nEND\nexit 137\n",
           dashes, dashes);
  rft_write_file("mpirun", script);
  assert_int_equal(chmod("mpirun", 0755), 0);
  snprintf(path, sizeof path, "%s", getenv("PATH"));
  snprintf(script, sizeof script, ".:/usr/bin:/bin");
  setenv("PATH", script, 1);
  const int code = RUN("train", "small.yaml", "--ranks", "2", "--out", "wrapped");
  rft_assert_says(rft_err, "over [lo]");
  rft_assert_says(rft_err, "rank 1 was killed by signal 9");
  assert_null(strstr(rft_err, "prterun"));
  setenv("OMPI_MCA_btl_tcp_if_exclude", "docker0", 1); /* Open MPI takes one of the two */
  RUN("train", "small.yaml", "--ranks", "2", "--out", "wrapped");
  unsetenv("OMPI_MCA_btl_tcp_if_exclude");
  setenv("PATH", path, 1);
  assert_int_not_equal(code, 0);
  rft_assert_says(rft_err, "over []");
}

static bool exists(const char *path) { return access(path, R_OK) == 0; }

/* SIGINT stops all ranks after the same step, with a checkpoint. */
static void stop(void **state) {
  (void)state;
  rft_find_leaks(true);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    execl(RFT_BINARY_DIR "/refrain", "refrain", "train", "small.yaml", "--ranks", "2", "--out", "stop", "--quiet",
          "--set", "run.steps=1000000", "--set", "run.checkpoint_every=20", (char *)NULL);
    _exit(127);
  }
  for (int i = 0; i < 3000 && !exists("stop/step-000020"); i++)
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  assert_true(exists("stop/step-000020"));
  assert_int_equal(kill(child, SIGINT), 0);
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 5);
  rft_slurp("stop/log.jsonl", rft_out, sizeof rft_out);
  rft_assert_says(rft_out, "\"message\": \"stopped\"");
}

/* A terminal that stops processes in the background which write to it. */
static void terminal(void **state) {
  int fd, status = -1;
  size_t n = 0;
  (void)state;
  const pid_t child = forkpty(&fd, NULL, NULL, NULL);
  assert_true(child >= 0);
  if (child == 0) {
    struct termios t;
    if (tcgetattr(0, &t) != 0) _exit(126);
    t.c_lflag |= TOSTOP;
    if (tcsetattr(0, TCSANOW, &t) != 0) _exit(126);
    execl(RFT_BINARY_DIR "/refrain", "refrain", "train", "small.yaml", "--ranks", "2", "--out", "terminal", "--set",
          "run.steps=2", (char *)NULL);
    _exit(127);
  }
  struct pollfd waits = {.fd = fd, .events = POLLIN};
  for (ssize_t got; poll(&waits, 1, 60000) == 1 && (got = read(fd, rft_out + n, sizeof rft_out - 1 - n)) > 0;)
    rft_out[n += (size_t)got] = '\0';
  if (poll(&waits, 1, 0) == 0) kill(child, SIGKILL);
  close(fd);
  assert_int_equal(waitpid(child, &status, 0), child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail_msg("status %x: %s", status, rft_out);
  rft_assert_says(rft_out, "2 of 2 steps");
}

/* SIGINT while mpirun or the ranks start, and twice: all processes end, and that is no failure of a rank. */
static void stop_early(void **state) {
  static const struct { int ms, signals; } rows[] = {{30, 1}, {60, 1}, {150, 1}, {300, 1}, {150, 2}, {600, 2}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (RFT_LEFT_OUT(i, 3)) continue;
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
      if (!freopen("stop-early.err", "w", stderr)) _exit(127);
      execl(RFT_BINARY_DIR "/refrain", "refrain", "train", "small.yaml", "--ranks", "2", "--out", "stop-early",
            "--quiet", "--set", "run.steps=1000000", (char *)NULL);
      _exit(127);
    }
    int status = 0;
    pid_t ended = 0;
    nanosleep(&(struct timespec){.tv_nsec = 1000000L * rows[i].ms}, NULL);
    for (int k = 0; k < rows[i].signals; k++, nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL))
      kill(child, SIGINT);
    for (int k = 0; k < 6000 && ended == 0; k++) {
      nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
      ended = waitpid(child, &status, WNOHANG);
    }
    if (ended == 0) kill(child, SIGKILL), waitpid(child, &status, 0);
    rft_slurp("stop-early.err", rft_err, sizeof rft_err);
    /* before launch.c has its handlers, the signal itself ends it */
    const bool stopped = WIFEXITED(status) ? WEXITSTATUS(status) == 5 : WTERMSIG(status) == SIGINT;
    if (!stopped || strstr(rft_err, "killed") || strstr(rft_err, "mpirun:"))
      fail_msg("%d signals after %d ms: status %x\n%s", rows[i].signals, rows[i].ms, status, rft_err);
    assert_false(exists("stop-early/failures.jsonl"));
    assert_int_equal(system("rm -rf stop-early"), 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(layouts),       cmocka_unit_test(pipelines),       cmocka_unit_test(profile),
      cmocka_unit_test(experts),       cmocka_unit_test(errors),          cmocka_unit_test(stop),
      cmocka_unit_test(json_of_ranks), cmocka_unit_test(wrapped_message), cmocka_unit_test(steps_of_slurm),
      cmocka_unit_test(stop_early),    cmocka_unit_test(terminal),
  };
  if (system("mpirun --version >/dev/null 2>&1") != 0) {
    puts("skipped: mpirun is missing (Debian: openmpi-bin)");
    return 77;
  }
  return cmocka_run_group_tests(tests, rft_program_set_up, rft_program_tear_down);
}
