/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder of a run: two starts in one folder, folders without a configuration or checkpoints, logs, free space.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "data/file.h"
#include "support/run.h"

#define CONFIG "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN

typedef struct rival {
  rfr_ctx *ctx;
  int opened;
  int64_t bytes; /* of its config.yaml */
} rival;

/* While the first run compiles, another one in the same folder trains and ends. */
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
  run = rft_run_open(r.ctx, NULL, "rival", &o); /* what the other one wrote is there */
  rfr_run_get_info(run, &info);
  assert_int_equal(info.step, 2);
  rfr_run_close(run);
  rfr_ctx_destroy(r.ctx);
}

/* A run that wrote no checkpoint yet is one too. */
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

/* Checkpoints whose config.yaml is lost are not overwritten; --resume takes them. */
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

/* The folder's own configuration resumes the run from any working folder, and a stop names the folder. */
static void resume_from_elsewhere(void **state) {
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
    assert_int_not_equal(stat(target, &st), 0); /* a link is not followed */
    assert_int_equal(unlink(path), 0);
  }
  rfr_ctx_destroy(ctx);
}

/* Found before anything is compiled, and the folder is not created. */
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
  /* A configuration of any size is not read into memory. */
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
  /* A resumed run needs space too. */
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

/* A limit on file sizes (ulimit -f) is an error, not the end of the process. */
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_starts_in_one_folder),
      cmocka_unit_test(configuration_without_checkpoints),
      cmocka_unit_test(checkpoints_without_configuration),
      cmocka_unit_test(resume_from_elsewhere),
      cmocka_unit_test(odd_logs),
      cmocka_unit_test(no_space),
      cmocka_unit_test(file_size_limit),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
