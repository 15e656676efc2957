/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs on rows: epochs and their last step, packed and unpacked losses, resume in the middle of an epoch, the limits of
 * mixtures, the kinds of files.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/run.h"

#define ROWS "data: {train: [\"*.jsonl\"], tokenizer: bytes, sequence: 32}\n"
#define EPOCHS "run: {epochs: 2.5, seed: 3, log_every: 1, evaluate_windows: 0}\n"
#define CONFIG "refrain: 1\n" LLAMA SINGLE ROWS TWO_BATCHES ADAM EPOCHS

static void write_rows(const char *name, int first, int n) {
  char *text = malloc((size_t)n * 96 + 1), *at = text;
  for (int i = first; i < first + n; i++)
    at += sprintf(at, "{\"prompt\": \"%d+1=\", \"completion\": \"%d%.*s\"}\n", i, i + 1, i * 5 % 17,
                  "..................");
  rft_write_text(name, text);
  free(text);
}

typedef struct totals {
  rft_record record;
  int64_t targets;
} totals;

static void count_targets(const rfr_event *e, void *user) {
  totals *t = user;
  if (e->kind == RFR_EVENT_METRICS) t->targets += e->tokens;
  const rfr_run_options o = rft_run_options(&t->record);
  o.on_event(e, &t->record);
}

static rfr_run_options options_of(totals *t) {
  rfr_run_options o = rft_run_options(&t->record);
  o.on_event = count_targets;
  o.event_user = t;
  return o;
}

static void add_piece(const char *text, size_t n, int trained, void *user) {
  char(*pieces)[64] = user;
  strncat(pieces[trained], text, n);
}

/* Each trained token is a target exactly once per epoch; the last step is padded. */
static void epochs(void **state) {
  (void)state;
  write_rows("a.jsonl", 0, 65);
  rfr_ctx *ctx = rft_run_ctx(2);
  totals t = {0};
  rfr_run_options o = options_of(&t);
  const char *sets[] = {"run.epochs=3"};
  o.overrides = sets;
  o.n_overrides = 1;
  rfr_run *run = rft_run_open(ctx, CONFIG, NULL, &o);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  assert_int_equal(info.train_rows, 65);
  assert_true(info.epochs == 3);
  assert_int_equal(info.steps, (3 * info.train_windows + 3) / 4);
  assert_true(3 * info.train_windows % 4 != 0);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(t.targets, 3 * info.trained_tokens);
  char pieces[2][64] = {"", ""};
  assert_int_equal(rfr_run_data_row(run, 2, add_piece, pieces), RFR_OK);
  assert_string_equal(pieces[0], "2+1=");
  assert_string_equal(pieces[1], "3..........");
  assert_int_equal(rfr_run_data_row(run, 65, add_piece, pieces), RFR_INVALID);
  rfr_run_close(run);
  /* Two sources with the same rows. */
  const char *mixture[] = {"run.steps=3", "data.train=[a.jsonl, a.jsonl]", "data.shares=[1, 2]"};
  o.overrides = mixture;
  o.n_overrides = 3;
  run = rft_run_open(ctx, CONFIG, NULL, &o);
  pieces[0][0] = pieces[1][0] = 0;
  assert_int_equal(rfr_run_data_row(run, 65 + 2, add_piece, pieces), RFR_OK);
  assert_string_equal(pieces[0], "2+1=");
  assert_int_equal(rfr_run_data_row(run, 130, add_piece, pieces), RFR_INVALID);
  rfr_run_close(run);
  o.overrides = sets;
  o.n_overrides = 1;
  /* The data fills less than one step. */
  sets[0] = "run.epochs=0.01";
  t = (totals){0};
  run = rft_run_open(ctx, CONFIG, NULL, &o);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.steps, 1);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_true(t.targets > 0 && t.targets < info.trained_tokens / 8);
  rfr_run_close(run);
  /* Plain text supports epochs too. */
  o.overrides = (const char *[]){"data.train=*.txt", "run.epochs=2"};
  o.n_overrides = 2;
  run = rft_run_open(ctx, CONFIG, NULL, &o);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.train_rows, 0);
  assert_int_equal(info.steps, (2 * info.train_windows + 3) / 4);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static rfr_evaluation evaluate(rfr_ctx *ctx, const char *packing) {
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  o.overrides = (const char *[]){"data.train=a.jsonl", "data.validation=[b.jsonl]", packing};
  o.n_overrides = 3;
  rfr_run *run = rft_run_open(ctx, CONFIG, NULL, &o);
  rfr_evaluation e;
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  rfr_run_close(run);
  return e;
}

/* Rows in one window do not attend to each other, and their positions begin at 0. */
static void packed_losses(void **state) {
  (void)state;
  write_rows("a.jsonl", 0, 10);
  write_rows("b.jsonl", 100, 80);
  rfr_ctx *ctx = rft_run_ctx(2);
  const rfr_evaluation packed = evaluate(ctx, "data.packing=true"), single = evaluate(ctx, "data.packing=false");
  assert_int_equal(single.windows, 80);
  assert_true(packed.windows < 60);
  assert_int_equal(packed.tokens, single.tokens);
  assert_int_equal(packed.bytes, single.bytes);
  assert_true(fabs(packed.loss / single.loss - 1) < 1e-6);
  rfr_ctx_destroy(ctx);
}

/* A run that resumes in the middle of its second epoch is bitwise equal to an uninterrupted one. */
static void resumed(void **state) {
  (void)state;
  write_rows("a.jsonl", 0, 60);
  write_rows("c.jsonl", 60, 21);
  rfr_ctx *ctx = rft_run_ctx(2);
  for (int weighted = 0; weighted < 2; weighted++) {
    const char *sets[] = {"data.train=[a.jsonl, c.jsonl]", weighted ? "data.weights=[1, 0.3]" : "data.weights=[]"};
    rft_record straight = {0}, stopped = {0};
    rfr_run_options o = rft_run_options(&straight);
    o.overrides = sets;
    o.n_overrides = 2;
    rfr_run *a = rft_run_open(ctx, CONFIG, NULL, &o);
    rfr_run_info info;
    rfr_run_get_info(a, &info);
    rft_run_steps(a, (int)info.steps);
    o = rft_run_options(&stopped);
    o.overrides = sets;
    o.n_overrides = 2;
    const char *folder = weighted ? "rows-weighted" : "rows";
    rfr_run *b = rft_run_open(ctx, CONFIG, folder, &o);
    const int first = (int)(3 * info.train_windows / 2 / 4);
    rft_run_steps(b, first);
    assert_int_equal(rfr_run_save(b), RFR_OK);
    rfr_run_close(b);
    o.resume = o.strict = 1;
    b = rft_run_open(ctx, CONFIG, folder, &o);
    rft_run_steps(b, (int)info.steps - first);
    rft_assert_same_losses(&straight, &stopped);
    rft_assert_same_state(a, b);
    rfr_run_close(a);
    rfr_run_close(b);
  }
  /* Other rows, and another packing, count as other data. */
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  o.resume = o.strict = 1;
  o.overrides = (const char *[]){"data.train=[a.jsonl, c.jsonl]", "data.packing=false"};
  o.n_overrides = 2;
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("rows"), &o, &run), RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "data"));
  o.overrides = (const char *[]){"data.train=a.jsonl"};
  o.n_overrides = 1;
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("rows"), &o, &run), RFR_MISMATCH);
  /* A resume with more epochs is a warning. */
  o.overrides = (const char *[]){"data.train=[a.jsonl, c.jsonl]", "run.epochs=4"};
  o.n_overrides = 2;
  run = rft_run_open(ctx, CONFIG, "rows", &o);
  assert_int_equal(r.warnings, 1);
  rfr_run_close(run);
  o.overrides = (const char *[]){"data.train=[a.jsonl, c.jsonl]", "run.steps=40"};
  assert_int_equal(rfr_run_open(ctx, CONFIG, rft_run_folder("rows"), &o, &run), RFR_MISMATCH);
  rfr_ctx_destroy(ctx);
}

static void kinds(void **state) {
  (void)state;
  write_rows("a.jsonl", 0, 60);
  rft_write_text("plain.text", "{\"prompt\": \"a\", \"completion\": \"bc\"}\n");
  rft_write_text("tiny.text", "ab");
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  static const struct {
    const char *sets[4], *slug, *message;
  } cases[] = {
      {{"data.train=[a.jsonl, plain.text]"}, "config.value", "a.jsonl has rows and plain.text is text"},
      {{"data.weights=[1, 2]"}, "config.value", "data.weights: 2 numbers for 1 patterns"},
      {{"data.weights=[0]"}, "config.value", "data.weights: 0 is not a number greater than 0"},
      {{"data.train=*.txt", "data.weights=[1]"}, "config.value", "only files of rows have weights"},
      {{"data.train=[\"*.txt\", tiny.text]", "data.shares=[1, 1]", "run.epochs=0", "run.steps=1"},
       "data.empty",
       "data.shares: tiny.text: there are 2 bytes to train on"},
      {{"data.format=chat"}, "data.row", "messages: the key is missing"},
      {{"data.format=preference"}, "data.row", "chosen"},
      {{"data.loss=assistant", "data.truncate=refuse"}, NULL, NULL},
      {{"data.train=plain.text", "data.format=completion"}, NULL, NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    o.overrides = cases[i].sets;
    for (o.n_overrides = 1; o.n_overrides < 4 && cases[i].sets[o.n_overrides];) o.n_overrides++;
    const rfr_status s = rfr_run_open(ctx, CONFIG, NULL, &o, &run);
    if (s == RFR_OK) rfr_run_close(run);
    if (!cases[i].slug) {
      assert_int_equal(s, RFR_OK);
      continue;
    }
    assert_int_not_equal(s, RFR_OK);
    assert_string_equal(rfr_last_error()->slug, cases[i].slug);
    if (!strstr(rfr_last_error()->message, cases[i].message))
      fail_msg("%s: not \"%s\"", rfr_last_error()->message, cases[i].message);
  }
  rfr_ctx_destroy(ctx);
}

/* Finds the maximum number of steps of a mixture with limits: the number that the error suggests must be right. */
static void max_steps_of_mixture(void **state) {
  static const char shares[] = "data.shares=[1, 1]", files[] = "data.train=[a.jsonl, c.jsonl]";
  char steps[32] = "run.steps=900";
  const char *sets[] = {files, shares, "data.max_epochs=[2, 1]", "run.epochs=0", steps, "batch.tokens=128"};
  (void)state;
  write_rows("a.jsonl", 0, 60);
  write_rows("c.jsonl", 60, 40);
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  long long in = 0, most = 0;
  o.overrides = sets, o.n_overrides = 6;
  assert_int_equal(rfr_run_open(ctx, CONFIG, NULL, &o, &run), RFR_INVALID);
  const char *says = strstr(rfr_last_error()->message, "data.max_epochs: ");
  if (!says || sscanf(says,
                      "data.max_epochs: all sources are used up in step %lld of 900; raise data.max_epochs of a "
                      "source, or set run.steps to %lld or less",
                      &in, &most) != 2)
    fail_msg("%s", rfr_last_error()->message);
  assert_true(most > 1 && in == most + 1);
  for (int more = 0; more < 2; more++) {
    snprintf(steps, sizeof steps, "run.steps=%lld", most + more);
    const rfr_status s = rfr_run_open(ctx, CONFIG, NULL, &o, &run);
    assert_int_equal(s, more ? RFR_INVALID : RFR_OK);
    rfr_run_close(run);
  }
  sets[5] = "batch.tokens=12800"; /* one step needs more tokens than there are */
  assert_int_equal(rfr_run_open(ctx, CONFIG, NULL, &o, &run), RFR_INVALID);
  says = strstr(rfr_last_error()->message, "and the first step takes 400; raise data.max_epochs of a source, or lower");
  if (!says) fail_msg("%s", rfr_last_error()->message);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(epochs),  cmocka_unit_test(packed_losses),
      cmocka_unit_test(resumed), cmocka_unit_test(max_steps_of_mixture),
      cmocka_unit_test(kinds),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
