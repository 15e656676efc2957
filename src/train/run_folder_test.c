/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder of a run: two starts in one folder, folders without a configuration or checkpoints, logs, free space, what
 * a killed run has left.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "data/file.h"
#include "support/run.h"

#define CONFIG "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN

typedef struct rival {
  rfr_ctx *ctx;
  int opened;
  int64_t bytes; /* size of its config.yaml */
} rival;

/* While the first run compiles, a second run in the same folder trains and ends. */
static void start_rival(const rfr_event *e, void *user) {
  rival *r = user;
  rft_record record = {0};
  rfr_run_options o = rft_run_options(&record);
  if (e->kind != RFR_EVENT_COMPILE || r->opened++) return;
  rfr_run *run = rft_run_open(r->ctx, CONFIG, "rival", &o);
  rft_run_steps(run, 2);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
}

static void two_starts_in_one_folder(void **state) {
  (void)state;
  rival r = {.ctx = rft_run_ctx(1)};
  rft_record record = {0};
  rfr_run_options o = rft_run_options(&record);
  rfr_run *run;
  rfr_run_info info;
  o.on_event = start_rival, o.event_user = &r;
  assert_int_equal(rfr_run_open(r.ctx, CONFIG, rft_run_folder("rival"), &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.exists");
  assert_null(run);
  o = rft_run_options(&record);
  o.resume = 1;
  run = rft_run_open(r.ctx, NULL, "rival", &o); /* the files of the second run are intact */
  rfr_run_get_info(run, &info);
  assert_int_equal(info.step, 2);
  rfr_run_close(run);
  rfr_ctx_destroy(r.ctx);
}

/* A folder without a checkpoint yet also counts as a run. */
static void configuration_without_checkpoints(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "started", &o);
  rfr_run_close(run);
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("started"), &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.exists");
  assert_non_null(strstr(rfr_last_error()->message, "holds a run already"));
  rfr_ctx_destroy(ctx);
}

/* Checkpoints whose config.yaml is lost are not overwritten; --resume uses them. */
static void checkpoints_without_configuration(void **state) {
  (void)state;
  char path[160];
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "lost", &o);
  rfr_run_info info;
  rft_run_steps(run, 3);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  snprintf(path, sizeof path, "%s/config.yaml", rft_run_folder("lost"));
  assert_int_equal(unlink(path), 0);
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("lost"), &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.exists");
  assert_non_null(strstr(rfr_last_error()->message, "holds checkpoints, but no config.yaml"));
  o.resume = 1;
  run = rft_run_open(ctx, CONFIG, "lost", &o);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.step, 3);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The configuration in the folder resumes the run from any working folder, and a stop message names the folder. */
static void resume_from_other_folder(void **state) {
  (void)state;
  char here[4096];
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "elsewhere", &o);
  r.stop_at_5 = run;
  assert_int_equal(rfr_run_train(run), RFR_STOPPED);
  assert_non_null(strstr(rfr_last_error()->message, "stopped after step 5 of 50; resume from "));
  assert_non_null(strstr(rfr_last_error()->message, rft_run_folder("elsewhere")));
  rfr_run_close(run);
  r.stop_at_5 = NULL;
  assert_non_null(getcwd(here, sizeof here));
  assert_int_equal(chdir("/"), 0);
  o = rft_run_options(&r);
  o.config_folder = NULL;
  o.resume = 1;
  run = rft_run_open(ctx, NULL, "elsewhere", &o);
  assert_int_equal(chdir(here), 0);
  rft_run_steps(run, 1);
  assert_int_equal(r.last, 6);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void odd_logs(void **state) {
  (void)state;
  char path[160], target[160];
  struct stat st;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(rfi_dir_create(rft_run_folder("odd")), RFR_OK);
    snprintf(path, sizeof path, "%s/log.jsonl", rft_run_folder("odd"));
    snprintf(target, sizeof target, "%s/target", rft_run_root);
    assert_int_equal(i == 0 ? mkfifo(path, 0600) : symlink(target, path), 0);
    assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("odd"), &o, &run), RFR_IO);
    assert_string_equal(rfr_last_error()->slug, "file.write");
    assert_int_not_equal(stat(target, &st), 0); /* symbolic links are not followed */
    assert_int_equal(unlink(path), 0);
  }
  rfr_ctx_destroy(ctx);
}

/* Missing space is found before anything is compiled, and the folder is not created. */
static void no_space(void **state) {
  (void)state;
  char kind, path[200];
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, NULL, &o);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  rfr_run_close(run);
  assert_true(info.checkpoint_bytes > 3 * 4 * info.parameters - 1);
  rfi_io_fault full = {.space = info.checkpoint_bytes - 1};
  rfi_io_set_fault(&full);
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("full-disk"), &o, &run), RFR_IO);
  rfi_io_set_fault(NULL);
  assert_string_equal(rfr_last_error()->slug, "file.space");
  assert_non_null(strstr(rfr_last_error()->message, "are free"));
  assert_int_equal(rfi_path_kind(rft_run_folder("full-disk"), &kind), RFR_OK);
  assert_int_equal(kind, 0);
  /* run.keep = 2: the third checkpoint is complete before the first is deleted. */
  static const char *const every[] = {"run.steps=9", "run.checkpoint_every=3"};
  o.overrides = every, o.n_overrides = 2;
  full.space = 3 * info.checkpoint_bytes - 1;
  rfi_io_set_fault(&full);
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("full-disk"), &o, &run), RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.space");
  full.space++;
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("full-disk"), &o, &run), RFR_OK);
  rfi_io_set_fault(NULL);
  rfr_run_close(run);
  o.overrides = NULL, o.n_overrides = 0;
  /* A huge configuration file is not read into memory. */
  snprintf(path, sizeof path, "%s/config.yaml", rft_run_folder("full-disk"));
  assert_int_equal(truncate(path, (16 << 20) + 1), 0);
  o.resume = true;
  assert_int_equal(rfr_run_open(ctx, NULL, rft_run_folder("full-disk"), &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "file.size");
  o.resume = false;
  r.compiles = 0;
  char below[200];
  rft_write_text("a-file", "x");
  snprintf(below, sizeof below, "%s/a-file/run", rft_run_root);
  assert_int_equal(rfr_run_open(ctx, CONFIG, below, &o, &run), RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.write");
  assert_int_equal(r.compiles, 0);
  /* A resumed run checks the space too. */
  run = rft_run_open(ctx, CONFIG, "full-later", &o);
  rft_run_steps(run, 1);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  o.resume = 1;
  full.space = info.checkpoint_bytes - 1;
  rfi_io_set_fault(&full);
  const rfr_status resumed = rfr_run_open(ctx, NULL, rft_run_folder("full-later"), &o, &run);
  rfi_io_set_fault(NULL);
  assert_int_equal(resumed, RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.space");
  rfr_ctx_destroy(ctx);
}

/* A limit on file sizes (ulimit -f) gives an error and does not kill the process. */
static void file_size_limit(void **state) {
  (void)state;
  struct rlimit before, small;
  sigset_t pending;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "limit", &o);
  rft_run_steps(run, 1);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  small = before;
  small.rlim_cur = 20000;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
  const rfr_status s = rfr_run_save(run);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  assert_int_equal(s, RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "file.write");
  assert_non_null(strstr(rfr_last_error()->message, "File too large"));
  assert_int_equal(sigpending(&pending), 0);
  assert_false(sigismember(&pending, SIGXFSZ));
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* ---- a refused start, and leftovers of a killed run ---- */

static void write_file(const char *name, const char *text) {
  char folder[200], path[260];
  snprintf(folder, sizeof folder, "%s/%s", rft_run_folder("killed"), name);
  assert_int_equal(rfi_dir_create(folder), RFR_OK);
  snprintf(path, sizeof path, "%s/model.safetensors", folder);
  FILE *f = fopen(path, "w");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

static void read_log(char *out, size_t size) {
  char path[200];
  snprintf(path, sizeof path, "%s/log.jsonl", rft_run_folder("killed"));
  FILE *f = fopen(path, "r");
  assert_non_null(f);
  out[fread(out, 1, size - 1, f)] = 0;
  fclose(f);
}

/* Starts a process that has ended, and one that runs until its pipe is closed. */
static pid_t start_process(int ends[2]) {
  assert_int_equal(pipe(ends), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    char x;
    close(ends[1]);
    _exit(read(ends[0], &x, 1) < 0);
  }
  close(ends[0]);
  return pid;
}

static void end_process(pid_t pid, int end) {
  int status;
  close(end);
  assert_int_equal(waitpid(pid, &status, 0), pid);
}

/* A refused resume logs and removes nothing. An accepted one removes leftovers of ended processes and reports that. */
static void leftovers(void **state) {
  static const char *const refused[][2] = {{"optimizer.lr=1e-4", "resume.mismatch"},
                                           {"memory.budget=4KiB", "plan.over_budget"},
                                           {"data.train=none/*", "data.empty"}};
  static char before[1 << 14], after[1 << 14];
  char dead[40], live[40], own[40];
  int ends[2];
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "killed", &o);
  rfr_run_info info;
  rft_run_steps(run, 3);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_get_info(run, &info);
  rfr_run_close(run);
  const pid_t killed = start_process(ends);
  end_process(killed, ends[1]);
  const pid_t works = start_process(ends);
  snprintf(dead, sizeof dead, "step-000004.tmp-%d", (int)killed);
  snprintf(live, sizeof live, "step-000005.tmp-%d", (int)works);
  snprintf(own, sizeof own, "step-000006.tmp-%d", (int)getpid()); /* an ended process that had our process id */
  write_file(dead, "half");
  write_file(live, "of another process");
  write_file(own, "almost");
  write_file("step-000007.tmp-notes", "of the user");
  read_log(before, sizeof before);
  o.resume = 1;
  r.warnings = 0;
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    o.overrides = refused[i], o.n_overrides = 1;
    assert_int_not_equal(rfr_run_open(ctx, NULL, rft_run_folder("killed"), &o, &run), RFR_OK);
    assert_string_equal(rfr_last_error()->slug, refused[i][1]);
    read_log(after, sizeof after);
    assert_string_equal(after, before);
    assert_true(rft_run_has("killed", dead) && rft_run_has("killed", own));
  }
  o.overrides = NULL, o.n_overrides = 0;
  rfi_io_fault full = {.space = info.checkpoint_bytes - 11}; /* space of leftovers counts as free */
  for (int more = 0; more < 2; more++) {
    rfi_io_set_fault(&full);
    const rfr_status s = rfr_run_open(ctx, NULL, rft_run_folder("killed"), &o, &run);
    rfi_io_set_fault(NULL);
    assert_int_equal(s, more ? RFR_OK : RFR_IO);
    full.space++;
  }
  rfr_run_close(run);
  end_process(works, ends[1]);
  assert_int_equal(r.warnings, 1);
  assert_true(!rft_run_has("killed", dead) && !rft_run_has("killed", own));
  assert_true(rft_run_has("killed", live) && rft_run_has("killed", "step-000007.tmp-notes"));
  read_log(after, sizeof after);
  assert_memory_equal(after, before, strlen(before));
  char says[160];
  snprintf(says, sizeof says, "removed 2 unfinished checkpoints of a process that was killed, 10 bytes: %s, ...", dead);
  if (!strstr(after + strlen(before), says)) fail_msg("%s", after + strlen(before));
  const char *compile = strstr(after + strlen(before), "\"event\": \"compile\"");
  const char *started = strstr(after + strlen(before), "\"event\": \"start\"");
  assert_true(compile && started && compile < started);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_starts_in_one_folder),
      cmocka_unit_test(configuration_without_checkpoints),
      cmocka_unit_test(checkpoints_without_configuration),
      cmocka_unit_test(resume_from_other_folder),
      cmocka_unit_test(odd_logs),
      cmocka_unit_test(no_space),
      cmocka_unit_test(file_size_limit),
      cmocka_unit_test(leftovers),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
