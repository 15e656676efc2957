/* SPDX-License-Identifier: Apache-2.0
 *
 * Algorithms are measured once: a tuned run stores its choices, a resume makes the same choices and
 * measures nothing, or is refused with the one that it cannot make, before anything is written.
 * The device is that of support/fault_backend; tools/gpu-check tests a GPU's library.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "refrain/ops.h"
#include "refrain/train.h"
#include "support/backend.h"
#include "support/context.h"
#include "support/fault_backend.h"
#include "support/folder.h"

#define CONFIG(run)                                                                                                   \
  "refrain: 1\n"                                                                                                      \
  "model: {model_type: llama, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2}\n" \
  "data: {train: [\"text/*.txt\"], sequence: 8}\n"                                                                    \
  "batch: {tokens: 32, microbatch: 2}\n"                                                                              \
  "optimizer: {lr: 1e-2}\n"                                                                                           \
  "precision: {dtype: f32}\n" run
static const char in_steps[] = CONFIG("run: {steps: 4, tune: true}\n");
static const char in_time[] = CONFIG("schedule: {name: wsd}\nrun: {time: 600s, tune: true}\n");
static const char *config = in_steps;

/* ---- runs ---- */

static int warnings;
static void count_warnings(const rfr_event *e, void *user) {
  (void)user;
  warnings += e->kind == RFR_EVENT_WARNING && strstr(e->message, "run.tune") != NULL;
}

/* Opens the run in the folder, trains `steps` steps and saves. */
static rfr_status train(rft_folder *f, const char *set, int steps) {
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = f->path;
  o.resume = 1;
  o.overrides = &set;
  o.n_overrides = set != NULL;
  o.on_event = count_warnings;
  warnings = 0;
  rfr_status s = rfr_run_open(f->ctx, config, rft_path(f, "run"), &o, &run);
  for (int i = 0; s == RFR_OK && i < steps; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rfr_run_save(run);
  rfr_run_close(run);
  return s;
}

static void assert_refused(rfr_status s, const char *slug, const char *message) {
  assert_int_equal(s, RFR_MISMATCH);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, message)) fail_msg("%s", rfr_last_error()->message);
  assert_true(rft_faults.devices == 0 && rft_faults.blocks == 0);
}

static void begin(rft_folder *f) {
  rft_faults = (rft_fault){0};
  rft_backend = &rft_fault_backend;
  rft_write_texts(f);
}

static void stored(void **state) {
  rft_folder *f = *state;
  begin(f);
  assert_int_equal(train(f, NULL, 2), RFR_OK);
  assert_int_equal(rft_faults.measured, 1);
  size_t n;
  char *text = rft_read(f, "run/step-000002/state.json", &n);
  const char *tuned = strstr(text, "\"tuned\"");
  assert_non_null(tuned);
  assert_non_null(strstr(tuned, "\"a product\""));
  assert_non_null(strstr(tuned, "\"quick\""));
  assert_non_null(strstr(tuned, "\"version 0\""));
  free(text);
  assert_int_equal(train(f, NULL, 2), RFR_OK);
  assert_int_equal(rft_faults.measured, 1);
  assert_int_equal(warnings, 0);
  text = rft_read(f, "run/step-000004/state.json", &n);
  assert_non_null(strstr(text, "\"quick\""));
  free(text);
}

/* Time for tuning does not count for run.time, and a resume makes the stored choices. */
static void given_in_time(void **state) {
  rft_folder *f = *state;
  begin(f);
  config = in_time;
  for (int i = 1; i <= 2; i++) {
    assert_int_equal(train(f, NULL, 2), RFR_OK);
    assert_int_equal(rft_faults.measured, 1);
    assert_int_equal(warnings, 0);
  }
  size_t n;
  char *text = rft_read(f, "run/step-000004/state.json", &n);
  assert_non_null(strstr(text, "\"quick\""));
  assert_non_null(strstr(text, "\"seconds\""));
  free(text);
  config = in_steps;
}

static void refused(void **state) {
  rft_folder *f = *state;
  begin(f);
  assert_int_equal(train(f, NULL, 2), RFR_OK);
  rft_faults.version = 2;
  assert_refused(train(f, NULL, 2), "tune.stored", "\"library\" is \"version 0\", here it is \"version 1\"");
  assert_non_null(strstr(rfr_last_error()->next, "start a new run from the weights"));
  rft_faults.version = 1;
  assert_refused(train(f, NULL, 2), "tune.stored", "no choice is stored for \"another product\"");
  rft_faults.version = 0;
  assert_refused(train(f, "run.tune=false", 2), "resume.mismatch", "run.tune is \"true\" in the checkpoint");
  assert_int_equal(rft_faults.measured, 1);
  assert_int_equal(train(f, NULL, 2), RFR_OK);
}

static void not_tuned_before(void **state) {
  rft_folder *f = *state;
  begin(f);
  assert_int_equal(train(f, "run.tune=false", 2), RFR_OK);
  assert_int_equal(rft_faults.calls[RFT_ENTRY_choose], 0);
  assert_refused(train(f, NULL, 2), "tune.stored", "has no stored choices");
  assert_int_equal(train(f, "run.tune=false", 2), RFR_OK);
}

static void for_reading(void **state) {
  rft_folder *f = *state;
  begin(f);
  assert_int_equal(train(f, NULL, 1), RFR_OK);
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = f->path;
  o.programs = RFR_RUN_GENERATE;
  rft_faults.version = 2;
  assert_int_equal(rfr_run_open(f->ctx, NULL, rft_path(f, "run"), &o, &run), RFR_OK);
  assert_int_equal(rft_faults.measured, 1);
  rfr_run_close(run);
}

/* On the CPU there are no choices: the checkpoint records that, and a resume reads it. */
static void on_the_cpu(void **state) {
  rft_folder *f = *state;
  begin(f);
  rft_backend = NULL;
  assert_int_equal(train(f, NULL, 2), RFR_OK);
  assert_int_equal(warnings, 1);
  assert_int_equal(train(f, NULL, 1), RFR_OK);
  rft_backend = &rft_fault_backend;
  assert_refused(train(f, NULL, 1), "tune.stored", "no choice is stored for \"library\"");
}

/* ---- programs ---- */

static rfr_status compile(const rfr_choice *choices, int n, rfr_programs **out) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){3, 4});
  rfr_output(t, "y", rfr_add(t, x, x));
  rfr_compile_options o = rfr_compile_options_default();
  o.tune = n >= 0;
  o.choices = choices;
  o.n_choices = n;
  const rfr_status s = rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, &o, out);
  rfr_trace_destroy(t);
  return s;
}

static void choices(void **state) {
  (void)state;
  rfr_programs *p;
  rfr_choice c;
  rft_faults = (rft_fault){0};
  rft_backend = &rft_fault_backend;
  OK(compile(NULL, 0, &p));
  OK(rfr_programs_choice_at(p, 0, &c));
  assert_string_equal(c.name, "library");
  OK(rfr_programs_choice_at(p, 1, &c));
  assert_string_equal(c.name, "a product");
  assert_string_equal(c.value, "quick");
  assert_int_equal(rfr_programs_choice_at(p, 2, &c), RFR_INVALID);
  rfr_programs_destroy(p);

  rfr_choice given[] = {{"of nothing", "x"}, {"a product", "slow"}, {"library", "version 0"}};
  OK(compile(given, 3, &p));
  OK(rfr_programs_choice_at(p, 1, &c));
  assert_string_equal(c.value, "slow");
  assert_int_equal(rfr_programs_choice_at(p, 2, &c), RFR_INVALID);
  rfr_programs_destroy(p);
  given[1].value = "spoilt";
  assert_refused(compile(given, 3, &p), "tune.stored", "\"a product\" is \"spoilt\", here it is \"unavailable\"");
  assert_null(p);
  assert_refused(compile(given + 1, 1, &p), "tune.stored", "no choice is stored for \"library\"");
  given[1].value = NULL;
  assert_int_equal(compile(given, 3, &p), RFR_INVALID);
  assert_int_equal(compile(given, -1, &p), RFR_INVALID);
  assert_int_equal(rft_faults.measured, 1);
  rft_backend = NULL;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(stored),        rft_folder_test(refused),     rft_folder_test(not_tuned_before),
      rft_folder_test(given_in_time), rft_folder_test(for_reading), rft_folder_test(on_the_cpu),
      rft_context_test(choices),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
