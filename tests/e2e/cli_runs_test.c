/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs as a user starts, stops, resumes and reads them; terminals, signals, closed streams.
 */
#include <fcntl.h>
#include <math.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "support/program.h"

/* Runs `train` with standard error on a terminal of the given width; its text goes to `out`. */
static void run_at_terminal(const char *term, const char *folder, int columns) {
  const struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
  int fd;
  size_t n = 0;
  const pid_t child = forkpty(&fd, NULL, NULL, &size);
  assert_true(child >= 0);
  if (child == 0) {
    setenv("TERM", term, 1);
    execl(RFT_BINARY_DIR "/refrain", "refrain", "train", "small.yaml", "--out", folder, "--set", "run.steps=3000",
          "--set", "run.evaluate_every=1000", (char *)NULL);
    _exit(127);
  }
  /* EIO when the child has ended */
  for (ssize_t got; (got = read(fd, rft_out + n, sizeof rft_out - 1 - n)) > 0;) n += (size_t)got;
  rft_out[n] = '\0';
  close(fd);
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* On a terminal the progress line fits the width, whatever that is; a dumb terminal gets no escapes. */
static void progress_fits(void **state) {
  (void)state;
  static const int widths[] = {120, 80, 40, 20};
  for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
    char folder[16];
    int rewritten = 0;
    snprintf(folder, sizeof folder, "tty%d", widths[i]);
    run_at_terminal("xterm", folder, widths[i]);
    for (const char *s = rft_out; (s = strstr(s, "\rstep ")); s++) {
      const size_t length = strcspn(s + 1, "\r\n\033");
      if ((int)length >= widths[i]) fail_msg("%zu columns of %d: %.*s", length, widths[i], (int)length, s + 1);
      assert_int_equal(strncmp(s + 1 + length, "\033[K", 3), 0); /* clears the rest of a longer previous line */
      rewritten++;
    }
    assert_true(rewritten >= 2);
  }
  run_at_terminal("dumb", "dumb", 80);
  assert_null(strchr(rft_out, '\033'));
  assert_null(strstr(rft_out, "\rstep"));
  rft_assert_says(rft_out, "step 1/3000");
}

/* If a standard stream is closed, a file of the run must not get its descriptor. */
static void closed_streams(void **state) {
  (void)state;
  const char *const arguments[] = {"train", "small.yaml", "--out", "closed", NULL};
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    const char *argv[8] = {RFT_BINARY_DIR "/refrain"};
    for (int i = 0; arguments[i]; i++) argv[i + 1] = arguments[i];
    close(STDIN_FILENO);
    close(STDOUT_FILENO);
    close(STDERR_FILENO);
    execv(argv[0], (char *const *)argv);
    _exit(127);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status)); /* output that cannot be written gives exit code 4 */
  rft_slurp("closed/log.jsonl", rft_out, sizeof rft_out);
  for (const char *line = rft_out; *line; line += strcspn(line, "\n") + 1)
    if (*line != '{') fail_msg("not a log entry: %.80s", line);
}

/* A mixture of experts: its plan, its load during training, and text from the trained model. */
static void experts(void **state) {
  (void)state;
  static const char *const sets[] = {"model.model_type=mixtral", "model.num_experts=4", "run.steps=3"};
#define SETS "--set", sets[0], "--set", sets[1], "--set", sets[2]
  assert_int_equal(RUN("plan", "small.yaml", SETS), 0);
  rft_assert_says(rft_out, "experts                   4 in a layer  layers 1, each with weights of 24576 bytes");
  rft_assert_says(rft_out, "64 rows of a microbatch, for any routing");
  rft_assert_says(rft_out, "model.layers.*.mlp.experts.gate_up_proj");
  assert_int_equal(RUN("train", "small.yaml", "--out", "experts", SETS), 0);
  rft_assert_says(rft_err, "  experts ");
  assert_int_equal(RUN("generate", "experts", "--prompt", "1 and", "--tokens", "5"), 0);
  assert_int_equal(RUN("check", "small.yaml", "--set", "model.num_experts=4"), 2);
  rft_assert_says(rft_err, "model_type mixtral and qwen3_moe have");
#undef SETS
}

/* A ramp in the plan and in training; averaged weights in every command that reads a run. */
static void ramp_and_averages(void **state) {
  (void)state;
  static const char *const sets[] = {"optimizer.ema=0.9", "batch.ramp=[{until: 2, sequence: 4}]", "run.steps=6",
                                     "optimizer.lr=0.05"};
#define SETS "--set", sets[0], "--set", sets[1], "--set", sets[2], "--set", sets[3]
  assert_int_equal(RUN("plan", "small.yaml", SETS), 0);
  rft_assert_says(rft_out, "phases of batch.ramp, which share the arena:\n  until step 2 ");
  rft_assert_says(rft_out, "tokens per step, sequences of 4, ");
  assert_int_equal(RUN("plan", "small.yaml", SETS, "--json"), 0);
  json_t *v = rft_parsed();
  const json_t *phases = json_object_get(v, "phases");
  assert_int_equal(json_array_size(phases), 2);
  assert_int_equal(rft_number(json_array_get(phases, 0), "until"), 2);
  assert_int_equal(rft_number(json_array_get(phases, 0), "sequence"), 4);
  json_decref(v);
  assert_int_equal(RUN("train", "small.yaml", "--out", "averaged", SETS), 0);
  rft_assert_says(rft_err, "; ramp: ");
  rft_assert_says(rft_err, "from step 3 on: ");
  double loss[2];
  for (int i = 0; i < 2; i++) {
    assert_int_equal(i ? RUN("eval", "averaged", "--json", "--ema") : RUN("eval", "averaged", "--json"), 0);
    v = rft_parsed();
    loss[i] = json_number_value(json_object_get(v, "loss"));
    json_decref(v);
  }
  assert_true(loss[0] != loss[1]);
  assert_int_equal(RUN("generate", "averaged", "--prompt", "1 and", "--tokens", "5", "--ema"), 0);
  assert_int_equal(RUN("export", "averaged", "--to", "hf", "--out", "averages", "--ema"), 0);
  assert_int_equal(RUN("generate", "averages", "--prompt", "1 and", "--tokens", "5", "--ema"), 2);
  rft_assert_says(rft_err, "[run.ema]");
#undef SETS
}

static void train_and_use(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--json", "--quiet"), 0);
  json_t *v = rft_parsed();
  assert_string_equal(json_string_value(json_object_get(v, "folder")), "runs/small");
  assert_int_equal(rft_number(v, "step"), 20);
  /* a library need not touch all bytes of its scratch */
  assert_true(rft_number(v, "touched_bytes") <= rft_number(v, "planned_bytes"));
  assert_true((double)rft_number(v, "touched_bytes") > 0.99 * (double)rft_number(v, "planned_bytes"));
  /* small.yaml: q, k, v, o of 16 x 16; gate, up, down of 32 x 16; head of 256 x 16; attention over half of 16 tokens */
  const double each = 6.0 * (4 * 16 * 16 + 3 * 32 * 16 + 256 * 16) + 6.0 * 16 * 16;
  const double tokens = json_number_value(json_object_get(v, "tokens_per_second"));
  assert_true(tokens > 0.0);
  assert_true(fabs(json_number_value(json_object_get(v, "flops_per_second")) / tokens - each) < 1e-6 * each);
  const double bits = json_number_value(json_object_get(v, "validation_bits_per_byte"));
  json_decref(v);
  assert_string_equal(rft_err, "");
  assert_int_equal(RUN("check", "small.yaml", "--threads", "99999"), 2); /* too many threads are an error */
  rft_assert_says(rft_err, "threads");
  rft_assert_says(rft_err, "help: refrain check --help explains the options");
  assert_int_equal(RUN("train", "small.yaml"), 2);
  rft_assert_says(rft_err, "run.exists");
  rft_assert_says(rft_err, "help: continue it with `refrain train FOLDER --resume`");
  assert_int_equal(RUN("eval", "runs/small", "--json"), 0);
  v = rft_parsed();
  assert_true(json_number_value(json_object_get(v, "bits_per_byte")) == bits);
  json_decref(v);
  assert_int_equal(RUN("eval", "runs/small"), 0);
  assert_int_equal(strncmp(rft_out, "validation: ", 12), 0);
  rft_assert_says(rft_out, " bits per byte\n");
  assert_int_equal(RUN("eval", "runs/small", "--set", "data.validation=0%"), 2);
  rft_assert_says(rft_err,
                  "error: data.validation holds out nothing to evaluate on: 0 of 10 files, 0 bytes [data.held_out]");
  rft_assert_says(rft_err, "help: set data.validation to a percentage");
  /* A checkpoint is a model folder that generates the same text as the run. */
  assert_int_equal(RUN("generate", "runs/small/step-000020", "--prompt", "1 and ", "--tokens", "8", "--json"), 0);
  v = rft_parsed();
  char text[64];
  snprintf(text, sizeof text, "%s", json_string_value(json_object_get(v, "text")));
  json_decref(v);
  assert_int_equal(RUN("generate", "runs/small", "--prompt", "1 and ", "--tokens", "8", "--json"), 0);
  v = rft_parsed();
  assert_string_equal(json_string_value(json_object_get(v, "text")), text);
  json_decref(v);
  assert_int_equal(RUN("eval", "runs/small/step-000020"), 2);
  rft_assert_says(rft_err, "data.validation");
  assert_int_equal(RUN("eval", "runs/small/step-000020", "--set", "data.validation=[text/1.txt]", "--json"), 0);
  v = rft_parsed();
  assert_true(rft_number(v, "tokens") > 100);
  json_decref(v);
  assert_int_equal(RUN("generate", "text"), 4);
  assert_int_equal(RUN("generate", "runs/small", "--prompt", "1 and ", "--tokens", "8"), 0);
  assert_int_equal(strncmp(rft_out, "1 and ", 6), 0);
  assert_int_equal(strlen(rft_out), 6 + 8 + 1);
  rft_assert_says(rft_err, "prompt of 6 bytes in ");
  rft_assert_says(rft_err, " tokens/s\n");
  assert_int_equal(RUN("generate", "runs/small", "--tokens", "40", "--json"), 0); /* longer than the window */
  v = rft_parsed();
  assert_int_equal(rft_number(v, "tokens"), 40);
  assert_true(json_number_value(json_object_get(v, "tokens_per_second")) > 0);
  json_decref(v);
  /* a resume with another model is refused */
  assert_int_equal(RUN("train", "small.yaml", "--resume", "--set", "model.hidden_size=32"), 2);
  rft_assert_says(rft_err, "resume.mismatch");
  /* a resume with more steps is accepted */
  assert_int_equal(RUN("train", "small.yaml", "--resume", "--set", "run.steps=25"), 0);
  rft_assert_says(rft_out, "25 of 25 steps");
  rft_assert_says(rft_err, "step 25/25");
}

static void wait_for(const char *path, const char *what) {
  for (int i = 0; i < 2000; i++) {
    nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    if (access(path, F_OK) != 0) continue;
    rft_slurp(path, rft_out, sizeof rft_out);
    if (strstr(rft_out, what)) return;
  }
  fail_msg("%s never says %s", path, what);
}

/* Splits the command that the program printed after "to continue: " at spaces. */
static void read_command(char *text, const char **c) {
  char *at = strstr(text, "to continue: refrain ");
  if (!at) fail_msg("no command to continue with in:\n%s", text);
  at += strlen("to continue: refrain ");
  at[strcspn(at, "\n")] = '\0';
  for (char *word = strtok(at, " "); word; word = strtok(NULL, " ")) *c++ = word;
  *c = NULL;
}

static void interrupted(void **state) {
  (void)state;
  const char *const arguments[] = {"train", "small.yaml",         "--out", "long", "--threads", "1",
                                   "--set", "run.steps=10000000", NULL};
  pid_t child = START(arguments);
  wait_for("long/log.jsonl", "\"metrics\"");
  kill(child, SIGINT);
  assert_int_equal(rft_finish(child), 5);
  rft_assert_says(rft_err, "stopped after step");
  rft_assert_says(rft_err, "to continue: refrain train long --resume --threads 1\n");
  assert_int_equal(RUN("generate", "long", "--tokens", "1"), 0); /* a checkpoint exists */
  /* The printed command continues the run; the other options are in the run's configuration. */
  child = START(((const char *const[]){"train", "long", "--resume", "--threads", "1", NULL}));
  wait_for("err", "loss ");
  kill(child, SIGINT);
  assert_int_equal(rft_finish(child), 5);
  const char *command[12];
  read_command(rft_err, command);
  assert_string_equal(command[1], "long");
}

/* A run can be named by its folder, and by its configuration file. */
static void resume_by_folder(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--out", "again", "--set", "run.steps=4"), 0);
  assert_int_equal(RUN("train", "again"), 2);
  rft_assert_says(rft_err, "again is a run");
  rft_assert_says(rft_err, "--resume continues it");
  assert_int_equal(RUN("train", "again/config.yaml"), 2);
  rft_assert_says(rft_err, "again is a run");
  assert_int_equal(RUN("train", "again/", "--resume", "--set", "run.steps=6"), 0);
  rft_assert_says(rft_out, "6 of 6 steps");
  assert_int_equal(RUN("train", "again/config.yaml", "--resume", "--set", "run.steps=8"), 0);
  rft_assert_says(rft_out, "8 of 8 steps");
  rft_assert_says(rft_out, "again/step-000008");
  assert_int_equal(access("runs/config", F_OK), -1);
  assert_int_equal(RUN("train", "again", "--resume", "--out", "other"), 2);
  rft_assert_says(rft_err, "--out is for a new run");
  assert_int_equal(RUN("train", "again", "--resume", "--set", "run.steps=3"), 0);
  assert_null(strstr(rft_out, "8 of 3"));
  assert_int_equal(RUN("plan", "again"), 0);
  FILE *f = fopen("again/config.yaml", "ab"); /* text after a NUL is not ignored */
  assert_non_null(f);
  assert_int_equal(fwrite("\0more", 1, 5, f), 5);
  fclose(f);
  static const char *const commands[] = {"eval", "generate", "plan", "check"};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(RUN(commands[i], "again"), 2);
    rft_assert_says(rft_err, "NUL byte");
  }
  assert_int_equal(RUN("train", "again", "--resume"), 2);
  rft_assert_says(rft_err, "NUL byte");
  rft_slurp("again/config.yaml", rft_out, sizeof rft_out); /* reads only up to the NUL */
  rft_write_file("again/config.yaml", rft_out);
  assert_int_equal(RUN("check", "again"), 0);
  rft_assert_says(rft_out, "again/config.yaml:");
  assert_int_equal(RUN("plan", "again/step-000008"), 0); /* a checkpoint is a model folder */
  assert_int_equal(RUN("train", "again/step-000008"), 2);
  rft_assert_says(rft_err, "write a configuration with `model: again/step-000008`");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(progress_fits), cmocka_unit_test(closed_streams),    cmocka_unit_test(resume_by_folder),
      cmocka_unit_test(experts),       cmocka_unit_test(ramp_and_averages), cmocka_unit_test(train_and_use),
      cmocka_unit_test(interrupted),
  };
  return cmocka_run_group_tests(tests, rft_program_set_up, rft_program_tear_down);
}
