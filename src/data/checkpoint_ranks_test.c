/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints that several ranks write together: the files of all ranks in one manifest, and the failure of every
 * system call of every rank, which all ranks report and which costs the new checkpoint alone. Checkpoints that they
 * open together: the share of each rank, damage that one of them finds.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/checkpoint.h"
#include "support/context.h"
#include "support/folder.h"
#include "support/ranks.h"

enum { RANKS = 3 };

typedef struct job {
  char run[256];
  int step, fail_at, error; /* fault of this rank's system calls */
  bool sticky;
  rfr_status early; /* error before writing */
  /* results */
  rfr_status status;
  char slug[64], message[512];
  int64_t calls;
} job;

static rfr_status save(const job *j, int number, rfr_comm *comm, rfr_ctx *own) {
  rfi_checkpoint_writer *w;
  char name[64], text[64];
  RFI_TRY(rfi_checkpoint_begin(own, comm, j->run, j->step, &w));
  const int n = snprintf(text, sizeof text, "rank %d of step %d", number, j->step);
  snprintf(name, sizeof name, "model-rank-%04d", number);
  rfr_status s = j->early ? rfi_fail(RFI_E_RUN_DIVERGED, "rank %d has NaN", number) : RFR_OK;
  if (s == RFR_OK) s = rfi_checkpoint_add(w, name, text, (size_t)n);
  if (s == RFR_OK && number == 0) s = rfi_checkpoint_add(w, "state.json", "{}", 2);
  return rfi_checkpoint_finish(w, s);
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rfi_io_fault fault = {.fail_at = j->fail_at, .error = j->error, .sticky = j->sticky};
  if (j->fail_at) rfi_io_set_fault(&fault);
  j->status = save(j, number, comm, own);
  rfi_io_set_fault(NULL);
  j->calls = fault.calls;
  snprintf(j->slug, sizeof j->slug, "%s", rfr_last_error()->slug);
  snprintf(j->message, sizeof j->message, "%s", rfr_last_error()->message);
  return RFR_OK; /* the status is in the job */
}

static void start(job *jobs, rft_folder *f, int step) {
  memset(jobs, 0, RANKS * sizeof *jobs);
  for (int r = 0; r < RANKS; r++) {
    jobs[r].step = step;
    snprintf(jobs[r].run, sizeof jobs[r].run, "%s", rft_path(f, "run"));
  }
}

static int newest(rft_folder *f) {
  rfi_checkpoint *c;
  int skipped;
  assert_int_equal(rfi_checkpoint_latest(f->ctx, NULL, rft_path(f, "run"), &c, &skipped), RFR_OK);
  assert_int_equal(skipped, 0);
  const int step = c ? (int)c->step : -1;
  if (c) assert_int_equal(c->files.n, RANKS + 1);
  rfi_checkpoint_close(c);
  return step;
}

static void expect_no_leftovers(rft_folder *f) {
  rfi_paths names = {.ctx = f->ctx};
  assert_int_equal(rfi_dir_list(rft_path(f, "run"), &names), RFR_OK);
  for (int i = 0; i < names.n; i++) assert_null(strstr(names.items[i], ".tmp"));
  rfi_paths_deinit(&names);
}

static void cycle(void **state) {
  rft_folder *f = *state;
  job jobs[RANKS];
  for (int step = 1; step <= 2; step++) {
    start(jobs, f, step);
    rft_run_ranks(RANKS, jobs, sizeof *jobs, work);
    for (int r = 0; r < RANKS; r++) assert_int_equal(jobs[r].status, RFR_OK);
    assert_int_equal(newest(f), step);
  }
}

/* All ranks must have the error of one of them. */
static void expect_same_error(const job *jobs, int from) {
  char prefix[32];
  snprintf(prefix, sizeof prefix, "rank %d: ", from);
  for (int r = 0; r < RANKS; r++) {
    assert_int_equal(jobs[r].status, jobs[from].status);
    assert_string_equal(jobs[r].slug, jobs[from].slug);
    assert_string_equal(jobs[r].message, jobs[from].message);
    assert_memory_equal(jobs[r].message, prefix, strlen(prefix));
  }
}

static void every_fault(void **state) {
  rft_folder *f = *state;
  job jobs[RANKS];
  start(jobs, f, 1);
  rft_run_ranks(RANKS, jobs, sizeof *jobs, work);
  for (int r = 0; r < RANKS; r++)
    for (int sticky = 0; sticky < 2; sticky++)
      for (int k = 1;; k++) {
        start(jobs, f, 2);
        jobs[r].fail_at = k, jobs[r].error = ENOSPC, jobs[r].sticky = sticky;
        rft_run_ranks(RANKS, jobs, sizeof *jobs, work);
        if (jobs[r].calls < k) break;
        if (jobs[r].status != RFR_OK) {
          if (strcmp(jobs[r].slug, "file.open") != 0) assert_string_equal(jobs[r].slug, "file.write");
          expect_same_error(jobs, r);
        }
        const int step = newest(f);
        assert_true(step == 2 || (step == 1 && jobs[r].status != RFR_OK));
        expect_no_leftovers(f);
        assert_int_equal(rfi_tree_remove(f->ctx, rft_path(f, "run/step-000002")), RFR_OK);
        assert_in_range(k, 1, 200);
      }
}

/* A rank that finds NaN. */
static void refused(void **state) {
  rft_folder *f = *state;
  job jobs[RANKS];
  start(jobs, f, 1);
  rft_run_ranks(RANKS, jobs, sizeof *jobs, work);
  for (int r = 0; r < RANKS; r++) {
    start(jobs, f, 2);
    jobs[r].early = RFR_NUMERIC;
    rft_run_ranks(RANKS, jobs, sizeof *jobs, work);
    assert_string_equal(jobs[r].slug, "run.diverged");
    expect_same_error(jobs, r);
    assert_int_equal(newest(f), 1);
  }
}

/* ---- reading ---- */

typedef struct reader {
  char run[256];
  /* results */
  rfr_status status;
  int step, skipped, files;
  char slug[64], message[512];
  int64_t calls; /* reads of one byte, and some others */
} reader;

static rfr_status read_latest(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  reader *j = rank;
  rfi_checkpoint *c;
  rfi_io_fault fault = {.max_transfer = 1};
  (void)number;
  rfi_io_set_fault(&fault);
  j->status = rfi_checkpoint_latest(own, comm, j->run, &c, &j->skipped);
  rfi_io_set_fault(NULL);
  j->calls = fault.calls;
  j->step = c ? (int)c->step : -1;
  j->files = c ? c->files.n : 0;
  snprintf(j->slug, sizeof j->slug, "%s", rfr_last_error()->slug);
  snprintf(j->message, sizeof j->message, "%s", rfr_last_error()->message);
  rfi_checkpoint_close(c);
  return RFR_OK; /* the status is in the reader */
}

static void read_all(int ranks, reader *readers, rft_folder *f, const char *run) {
  memset(readers, 0, (size_t)ranks * sizeof *readers);
  for (int r = 0; r < ranks; r++) snprintf(readers[r].run, sizeof readers[r].run, "%s", rft_path(f, run));
  rft_run_ranks(ranks, readers, sizeof *readers, read_latest);
}

static void save_step(rft_folder *f, int step) {
  enum { BYTES = 3000 };
  static char zeros[BYTES];
  char name[64];
  rfi_checkpoint_writer *w;
  assert_int_equal(rfi_checkpoint_begin(f->ctx, NULL, rft_path(f, "run"), step, &w), RFR_OK);
  rfr_status s = rfi_checkpoint_add(w, "state.json", "{}", 2);
  for (int i = 0; i < 2 * RANKS && s == RFR_OK; i++) {
    snprintf(name, sizeof name, "part-%d.safetensors", i);
    s = rfi_checkpoint_add(w, name, zeros, BYTES);
  }
  assert_int_equal(rfi_checkpoint_finish(w, s), RFR_OK);
}

/* Each rank reads its share of the bytes. If one rank finds damage, all use the same older checkpoint, or all fail. */
static void shares(void **state) {
  rft_folder *f = *state;
  reader all[RANKS], one;
  char name[64];
  save_step(f, 1);
  save_step(f, 2);
  read_all(1, &one, f, "run");
  read_all(RANKS, all, f, "run");
  assert_int_equal(one.step, 2);
  assert_in_range(one.calls, 18000, 20000);
  for (int r = 0; r < RANKS; r++) {
    assert_int_equal(all[r].status, RFR_OK);
    assert_int_equal(all[r].step, 2);
    assert_int_equal(all[r].skipped, 0);
    assert_int_equal(all[r].files, 2 * RANKS + 1);
    assert_in_range(all[r].calls, 6000, 8000); /* a third of the files, and the complete manifest */
  }
  for (int i = 0; i < 2 * RANKS; i++) {
    snprintf(name, sizeof name, "run/step-000002/part-%d.safetensors", i);
    rft_write(f, name, i % 2 ? "shorter" : "", i % 2 ? 7 : 0);
    read_all(RANKS, all, f, "run");
    for (int r = 0; r < RANKS; r++) {
      assert_int_equal(all[r].step, 1);
      assert_int_equal(all[r].skipped, 1);
      assert_string_equal(all[r].message, all[0].message);
      if (!strstr(all[r].message, name)) fail_msg("%s: %s", name, all[r].message);
    }
    save_step(f, 2);
  }
  rft_write(f, "run/step-000001/part-1.safetensors", "x", 1);
  rft_write(f, "run/step-000002/part-4.safetensors", "x", 1);
  read_all(RANKS, all, f, "run");
  for (int r = 0; r < RANKS; r++) {
    assert_int_equal(all[r].status, RFR_INVALID);
    assert_string_equal(all[r].slug, "checkpoint");
    assert_string_equal(all[r].message, all[0].message);
    assert_non_null(strstr(all[r].message, "2 checkpoints, none is complete; the oldest: rank "));
  }
}

/* One rank reads another folder. */
static void other_folder(void **state) {
  rft_folder *f = *state;
  reader all[RANKS];
  save_step(f, 1);
  memset(all, 0, sizeof all);
  for (int r = 0; r < RANKS; r++) snprintf(all[r].run, sizeof all[r].run, "%s", rft_path(f, r == 2 ? "none" : "run"));
  rft_run_ranks(RANKS, all, sizeof *all, read_latest);
  for (int r = 0; r < RANKS; r++) {
    assert_string_equal(all[r].slug, "dist.run");
    assert_non_null(strstr(all[r].message, "is step 1 for rank 0, and step -1 for rank 2 (-1: none)"));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(cycle),  rft_folder_test(every_fault),  rft_folder_test(refused),
      rft_folder_test(shares), rft_folder_test(other_folder),
  };
  return cmocka_run_group_tests(tests, rft_context_setup, rft_context_teardown);
}
