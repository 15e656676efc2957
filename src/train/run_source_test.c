/* SPDX-License-Identifier: Apache-2.0
 *
 * Data from a function of the program: bitwise equal to the same windows from files, a resume that continues at the
 * saved position, and errors of the function and of what it fills.
 */
#include <stdio.h>
#include <string.h>

#include "support/random.h"
#include "support/run.h"
#include "train/evaluate.h"

#define OWN "data: {train: [], sequence: 16}\n"
#define CONFIG(data) "refrain: 1\n" LLAMA SINGLE data TWO_BATCHES ADAM RUN

/* ---- bitwise equal to files ---- */

static int from_files(rfr_window *w, void *user) {
  int documents = 0;
  const rfi_split split = w->validation ? RFI_VALIDATION : RFI_TRAIN;
  const rfr_status s = rfi_dataset_window(user, split, 3, w->index, w->tokens, w->targets, w->documents, &documents);
  w->n_documents = documents;
  return s != RFR_OK;
}

static void same_bits(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record files = {0}, own = {0};
  rfr_run_options o = rft_run_options(&files);
  rfr_run *a = rft_run_open(ctx, CONFIG(DATA), NULL, &o);
  rfr_data_source source = rfr_data_source_default();
  rfr_evaluation from_a, from_b;
  rfr_run_info info;
  source.fill = from_files;
  source.user = a->data;
  source.validation_windows = rfi_dataset_get_stats(a->data)->windows[RFI_VALIDATION];
  o = rft_run_options(&own);
  o.data = &source;
  rfr_run *b = rft_run_open(ctx, CONFIG(OWN), NULL, &o);
  rft_run_steps(a, 12);
  rft_run_steps(b, 12);
  rft_assert_same_state(a, b);
  rft_assert_same_losses(&files, &own);
  assert_int_equal(rfr_run_evaluate(a, &from_a), RFR_OK);
  assert_int_equal(rfr_run_evaluate(b, &from_b), RFR_OK);
  assert_memory_equal(&from_a.loss, &from_b.loss, sizeof from_a.loss);
  assert_int_equal(from_a.tokens, from_b.tokens);
  assert_true(from_b.bits_per_byte == 0.0);
  rfr_run_get_info(b, &info);
  assert_int_equal(info.byte_tokens, 0);
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

/* ---- the windows of an evaluation ---- */

enum { HELD_OUT = 23 };

typedef struct asked {
  int64_t index[HELD_OUT];
  int n;
} asked;

static int record_held_out(rfr_window *w, void *user) {
  asked *a = user;
  if (w->validation && a->n < HELD_OUT) a->index[a->n++] = w->index;
  for (int64_t i = 0; i < w->sequence; i++) w->tokens[i] = (int32_t)(i + w->index) % 256;
  for (int64_t i = 1; i < w->sequence; i++) w->targets[i - 1] = w->tokens[i];
  return 0;
}

/* Three batches are taken from `all` at equal distances, with their windows in order; the last batch has one window
 * less. */
static void spreads(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  asked a = {0};
  rfr_data_source source = rfr_data_source_default();
  rfr_run_options o = rft_run_options(&r);
  rfr_evaluation e;
  source.fill = record_held_out;
  source.user = &a;
  source.validation_windows = HELD_OUT;
  o.data = &source;
  rfr_run *run = rft_run_open(ctx, CONFIG(OWN), NULL, &o);
  const int64_t rows = run->settings->eval_rows, all = (HELD_OUT + rows - 1) / rows;
  assert_true(rows > 1 && all > 4 && HELD_OUT % rows == rows - 1);
  a.n = 0;
  assert_int_equal(rfi_evaluate(run, 2 * rows + 1, &e), RFR_OK);
  assert_int_equal(e.windows, a.n);
  assert_int_equal(a.n, 3 * rows);
  for (int i = 0; i < a.n; i++) assert_int_equal(a.index[i], i / rows * all / 3 * rows + i % rows);
  a.n = 0;
  assert_int_equal(rfi_evaluate(run, 0, &e), RFR_OK);
  assert_int_equal(e.windows, HELD_OUT);
  assert_int_equal(a.n, HELD_OUT);
  for (int i = 0; i < a.n; i++) assert_int_equal(a.index[i], i);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* ---- a stream that continues at its position ---- */

typedef struct stream {
  int64_t next; /* index of the window */
  int fails_at; /* index of the window that fails once; -1: none */
  int64_t last; /* position after the previous window */
} stream;

static int from_stream(rfr_window *w, void *user) {
  stream *s = user;
  if (w->validation) return 1;
  if (w->index == 0) assert_int_equal(w->position, 0);
  else if (w->index == s->next) assert_true(w->position == s->last);
  if (w->index == s->fails_at) {
    s->fails_at = -1;
    snprintf(w->message, sizeof w->message, "the stream is asleep");
    return 7;
  }
  uint64_t x = (uint64_t)w->position + 1;
  for (int64_t i = 0; i < w->sequence; i++) {
    w->tokens[i] = (int32_t)rft_below(&x, 256);
    if (i > 0 && i != 5) w->targets[i - 1] = w->tokens[i];
  }
  w->documents[1] = 5;
  w->n_documents = 2;
  w->position = s->last = (int64_t)x;
  s->next = w->index + 1;
  return 0;
}

static rfr_run *open_stream(rfr_ctx *ctx, stream *s, const char *name, bool resume, rft_record *r) {
  rfr_data_source source = rfr_data_source_default();
  rfr_run_options o = rft_run_options(r);
  source.fill = from_stream;
  source.user = s;
  source.name = "stream";
  o.data = &source;
  o.resume = o.strict = resume;
  return rft_run_open(ctx, resume ? NULL : CONFIG(OWN), name, &o);
}

static void resumes(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  stream once = {.fails_at = -1}, first = {.fails_at = -1}, second = {.fails_at = -1};
  rfr_run *a = open_stream(ctx, &once, NULL, false, &r);
  rft_run_steps(a, 12);
  rfr_run *b = open_stream(ctx, &first, "stream", false, &r);
  rft_run_steps(b, 7);
  assert_int_equal(rfr_run_save(b), RFR_OK);
  rft_run_steps(b, 2);
  rfr_run_close(b);
  b = open_stream(ctx, &second, "stream", true, &r);
  assert_int_equal(r.warnings, 0);
  rft_run_steps(b, 5);
  rft_assert_same_state(a, b);
  assert_int_equal(second.next, once.next);
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

/* A failed step may be repeated: it requests the same windows from the same position. */
static void repeats(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0}, same = {0};
  stream good = {.fails_at = -1}, bad = {.fails_at = 35};
  rfr_run *a = open_stream(ctx, &good, NULL, false, &r), *b = open_stream(ctx, &bad, NULL, false, &same);
  rft_run_steps(a, 3);
  int failed = 0;
  for (int i = 0; i < 4 && b->step < 3; i++) {
    if (rfr_run_step(b) == RFR_OK) continue;
    failed++;
    assert_string_equal(rfr_last_error()->slug, "data.source");
    assert_non_null(strstr(rfr_last_error()->message, "training window 35: the program's function returned 7: "
                                                      "the stream is asleep"));
  }
  assert_int_equal(failed, 1);
  rft_assert_same_state(a, b);
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

/* ---- errors ---- */

static int wrong(rfr_window *w, void *user) {
  switch (*(const int *)user) {
    case 0: w->tokens[3] = 256; break;
    case 1: w->tokens[3] = -1; break;
    case 2: w->targets[15] = -5; break;
    case 3: w->targets[0] = 256; break;
    case 4: w->n_documents = 0; break;
    case 5: w->documents[0] = 1; break;
    case 6: w->n_documents = 2, w->documents[1] = 16; break;
    case 7: w->n_documents = 3, w->documents[1] = 4, w->documents[2] = 4; break;
    case 8: w->n_documents = 17; break;
    default: return 3;
  }
  return 0;
}

static void wrong_windows(void **state) {
  (void)state;
  static const char *const texts[] = {"token 3 is 256; the vocabulary has 256",
                                      "token 3 is -1",
                                      "target 15 is -5",
                                      "target 0 is 256",
                                      "0 documents",
                                      "the first at 1",
                                      "document 1 begins at 16",
                                      "document 2 begins at 4, after one at 4",
                                      "17 documents",
                                      "training window 0: the program's function returned 3"};
  for (int i = 0; i < 10; i++) {
    rfr_ctx *ctx = rft_run_ctx(1);
    rft_record r = {0};
    rfr_run_options o = rft_run_options(&r);
    rfr_data_source source = rfr_data_source_default();
    source.fill = wrong;
    source.user = &i;
    o.data = &source;
    rfr_run *run = rft_run_open(ctx, CONFIG(OWN), NULL, &o);
    assert_int_equal(rfr_run_step(run), RFR_INVALID);
    if (!strstr(rfr_last_error()->message, texts[i])) fail_msg("%d: %s", i, rfr_last_error()->message);
    rfr_run_close(run);
    rfr_ctx_destroy(ctx);
  }
}

static void refused(void **state) {
  (void)state;
  static const struct {
    const char *config;
    bool source;
    int64_t windows;
    const char *slug, *text;
  } rows[] = {{CONFIG(OWN), false, 0, "data.source", "the list is empty"},
              {CONFIG(DATA), true, 0, "data.source", "data.train has patterns, and the program gives data too"},
              {CONFIG(OWN), true, -1, "argument", "-1 windows of training"},
              {"refrain: 1\n" LLAMA OWN TWO_BATCHES ADAM "run: {epochs: 2}\n", true, 0, "data.source", "has no end"},
              {"refrain: 1\n" LLAMA OWN TWO_BATCHES ADAM "run: {epochs: 2}\n", true, 20, NULL, NULL}};
  stream s = {.fails_at = -1};
  rfr_ctx *ctx = rft_run_ctx(1);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    rft_record r = {0};
    rfr_run *run;
    rfr_run_options o = rft_run_options(&r);
    rfr_data_source source = rfr_data_source_default();
    source.fill = from_stream;
    source.user = &s;
    source.train_windows = rows[i].windows;
    if (rows[i].source) o.data = &source;
    o.config_folder = rft_run_root;
    const rfr_status status = rfr_run_open(ctx, rows[i].config, NULL, &o, &run);
    if (!rows[i].slug) {
      assert_int_equal(status, RFR_OK);
      assert_int_equal(run->steps, 5); /* 40 windows, 8 per step */
      assert_int_equal(rfr_run_train(run), RFR_OK);
      rfr_run_close(run);
      continue;
    }
    if (status == RFR_OK || strcmp(rfr_last_error()->slug, rows[i].slug) != 0 ||
        !strstr(rfr_last_error()->message, rows[i].text))
      fail_msg("%zu: %s", i, rfr_last_error()->message);
  }
  rfr_data_source source = rfr_data_source_default();
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  o.data = &source;
  assert_int_equal(rfr_run_open(ctx, CONFIG(OWN), NULL, &o, &run), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "fill is NULL"));
  source.size = 3;
  assert_int_equal(rfr_run_open(ctx, CONFIG(OWN), NULL, &o, &run), RFR_INVALID);
  rfr_ctx_destroy(ctx);
}

/* Each allocation of opening the data fails once. */
static void no_memory(void **state) {
  (void)state;
  stream s = {.fails_at = -1};
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_data_source source = rfr_data_source_default();
  rfr_ctx *ctx = rft_run_ctx(1);
  rfr_run *run = NULL;
  source.fill = from_stream;
  source.user = &s;
  o.data = &source;
  o.programs = 0; /* only the data is opened */
  for (int k = 1; !run; k++) {
    const int64_t blocks = rfr_ctx_get_stats(ctx).live_blocks;
    rfr_ctx_fail_alloc(ctx, k);
    const rfr_status status = rfr_run_open(ctx, CONFIG(OWN), NULL, &o, &run);
    rfr_ctx_fail_alloc(ctx, 0);
    if (status == RFR_OK) break;
    assert_int_equal(status, RFR_NO_MEMORY);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, blocks);
  }
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* A folder without a tokenizer: text files are refused, tokens of the program are accepted. */
static int token_299(rfr_window *w, void *user) {
  (void)user;
  for (int64_t i = 0; i < w->sequence; i++) w->tokens[i] = w->targets[i] = 299;
  return 0;
}

static void no_tokenizer(void **state) {
  (void)state;
  static const char text[] =
      "refrain: 1\nmodel: {model_type: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 16,\n"
      "        num_hidden_layers: 1, num_attention_heads: 2}\n" SINGLE OWN TWO_BATCHES ADAM RUN;
  char config[1000];
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_data_source source = rfr_data_source_default();
  source.fill = token_299;
  o.data = &source;
  rfr_run *run = rft_run_open(ctx, text, "300", &o);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  snprintf(config, sizeof config, "refrain: 1\nmodel: %s/step-000000\n" OWN TWO_BATCHES ADAM RUN,
           rft_run_folder("300"));
  run = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(run, 2);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits),     cmocka_unit_test(spreads),
                                     cmocka_unit_test(resumes),       cmocka_unit_test(repeats),
                                     cmocka_unit_test(wrong_windows), cmocka_unit_test(refused),
                                     cmocka_unit_test(no_memory),     cmocka_unit_test(no_tokenizer)};
  return cmocka_run_group_tests_name("data of the program", tests, rft_run_setup, rft_run_teardown);
}
