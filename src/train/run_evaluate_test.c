/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation by a run: windows with context, limits, progress.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "data/file.h"
#include "support/run.h"

/* A longer context predicts the same bytes from more of them (dataset_test lists which), so the bits per byte
 * differ. */
static void evaluation_context(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_evaluation e[2];
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "context", &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  const double bits = r.bits;
  rfr_run_close(run);
  for (int i = 0; i < 3; i++) {
    const char *const context = i == 0   ? "run.evaluate_context=0"
                                : i == 1 ? "run.evaluate_context=12"
                                         : "run.evaluate_context=16";
    o = rft_run_options(&r);
    o.programs = RFR_RUN_EVALUATE;
    o.overrides = &context, o.n_overrides = 1;
    if (i == 2) {
      assert_int_equal(rfr_run_open(ctx, NULL, rft_run_folder("context"), &o, &run), RFR_INVALID);
      assert_string_equal(rfr_last_error()->slug, "config.value");
      assert_non_null(strstr(rfr_last_error()->message, "run.evaluate_context: 16 tokens; it must be less"));
      break;
    }
    run = rft_run_open(ctx, NULL, "context", &o);
    assert_int_equal(rfr_run_evaluate(run, &e[i]), RFR_OK);
    rfr_run_close(run);
  }
  assert_int_equal(e[0].tokens, e[1].tokens);
  assert_true(e[0].bits_per_byte == bits);
  assert_true(e[1].bits_per_byte != e[0].bits_per_byte && fabs(e[1].bits_per_byte - e[0].bits_per_byte) < 0.2);
  rfr_ctx_destroy(ctx);
}

/* A short run evaluates a part of the held-out data and reports that; a stop request ends an evaluation. */
static void evaluation_limit(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_evaluation e;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 2, seed: 3}\n", NULL, &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(r.windows, 64);
  assert_true(r.windows_held_out > 64);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  assert_int_equal(e.windows, r.windows_held_out);
  assert_int_equal(e.windows_held_out, e.windows);
  rfr_run_request_stop(run);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_STOPPED);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

typedef struct progress_record {
  int n;
  int64_t windows, planned, held_out, step;
  double seconds;
  bool in_order;
} progress_record;

static void on_progress(const rfr_event *e, void *user) {
  progress_record *r = user;
  if (e->kind != RFR_EVENT_PROGRESS) return;
  r->in_order &= e->windows > r->windows && e->windows < e->windows_planned && e->seconds >= r->seconds + 0.2;
  r->n++;
  r->windows = e->windows, r->planned = e->windows_planned, r->held_out = e->windows_held_out;
  r->seconds = e->seconds, r->step = e->step;
}

/* An evaluation of more than 0.2 s reports its progress to the caller, at most once every 0.2 s, and not to the log. */
static void evaluation_progress(void **state) {
  (void)state;
  enum { MOST = 1 << 24 };
  static const char *const config =
      "refrain: 1\n" LLAMA TWO_BATCHES ADAM RUN
      "data: {train: [\"*.txt\"], validation: [\"*.held\"], tokenizer: bytes, sequence: 16}\n";
  rfr_ctx *ctx = rft_run_ctx(1);
  progress_record r;
  rfr_evaluation e = {0};
  char *held = malloc(MOST + 1), path[200], *log;
  size_t bytes = 1 << 13, n;
  assert_non_null(held);
  for (int i = 0; i < MOST; i++) held[i] = (char)('a' + i % 23);
  /* adds text until the evaluation takes a second on this machine */
  for (rfr_run *run; e.seconds < 1.0 && bytes < MOST; rfr_run_close(run)) {
    char name[32];
    bytes *= 4;
    held[bytes] = 0;
    rft_write_text("progress.held", held);
    held[bytes] = 'a';
    r = (progress_record){.in_order = true};
    rfr_run_options o = rfr_run_options_default();
    o.config_folder = rft_run_root;
    o.on_event = on_progress;
    o.event_user = &r;
    snprintf(name, sizeof name, "progress-%zu", bytes);
    run = rft_run_open(ctx, config, name, &o);
    rft_run_steps(run, 1);
    assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
    snprintf(path, sizeof path, "%s/log.jsonl", rft_run_folder(name));
  }
  free(held);
  assert_true(e.seconds >= 1.0);
  assert_true(r.n >= 1 && r.n <= (int)(e.seconds / 0.2));
  assert_true(r.in_order && r.seconds <= e.seconds);
  assert_int_equal(r.planned, e.windows);
  assert_int_equal(r.held_out, e.windows_held_out);
  assert_int_equal(r.step, 1);
  assert_int_equal(rfi_file_read(ctx, path, &log, &n), RFR_OK);
  assert_non_null(strstr(log, "\"event\": \"evaluation\""));
  assert_null(strstr(log, "\"event\": \"progress\""));
  rfi_free(ctx, log);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(evaluation_context),
      cmocka_unit_test(evaluation_limit),
      cmocka_unit_test(evaluation_progress),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
