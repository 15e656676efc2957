/* SPDX-License-Identifier: Apache-2.0
 *
 * Samples during training: their steps, their text, and that they change neither the weights nor the losses.
 */
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "refrain/train.h"
#include "support/folder.h"

static char warning[512];
static void on_event(const rfr_event *e, void *user) {
  (void)user;
  if (e->kind == RFR_EVENT_WARNING) snprintf(warning, sizeof warning, "%s", e->message);
}

/* Opens a run with additional keys of the section run. */
static rfr_status open_run(rft_folder *f, const char *folder, const char *keys, bool resume, rfr_run **out) {
  char text[2048];
  snprintf(text, sizeof text,
           "refrain: 1\n"
           "model: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
           "num_attention_heads: 2}\n"
           "data: {train: [\"text/*.txt\"], sequence: 16, root: \"%s\"}\n"
           "batch: {tokens: 64, microbatch: 2}\noptimizer: {lr: 1e-2}\nprecision: {dtype: f32}\n"
           "run: {seed: 5%s}\n",
           f->path, keys);
  rfr_run_options o = rfr_run_options_default();
  o.resume = resume;
  o.on_event = on_event;
  return rfr_run_open(f->ctx, text, rft_path(f, folder), &o, out);
}

static void train(rft_folder *f, const char *folder, const char *keys, bool resume) {
  rfr_run *run;
  warning[0] = 0;
  if (open_run(f, folder, keys, resume, &run) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  if (rfr_run_train(run) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  rfr_run_close(run);
}

/* Checks number and steps of the samples; each text must be valid and not empty. */
static int read_samples(rft_folder *f, const char *name, int64_t steps[16]) {
  size_t n;
  char *text = rft_read(f, name, &n);
  int count = 0;
  for (const char *line = text; *line; line += strcspn(line, "\n") + 1, count++) {
    json_t *v = json_loadb(line, strcspn(line, "\n"), JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(v);
    steps[count] = json_integer_value(json_object_get(v, "step"));
    assert_string_equal(json_string_value(json_object_get(v, "prompt")), "ab");
    const char *s = json_string_value(json_object_get(v, "text"));
    size_t characters = 0;
    for (; *s; s++) characters += (*s & 0xC0) != 0x80;
    assert_true(characters > 4 && characters <= 24); /* a character of several bytes counts once */
    json_decref(v);
  }
  free(text);
  return count;
}

static void compare(rft_folder *f, const char *a, const char *b) {
  size_t n, m;
  char *x = rft_read(f, a, &n), *y = rft_read(f, b, &m);
  assert_int_equal(n, m);
  assert_memory_equal(x, y, n);
  free(x);
  free(y);
}

static void test_samples(void **state) {
  rft_folder *f = *state;
  int64_t steps[16];
  rft_write_texts(f);
  train(f, "plain", ", steps: 9", false);
  train(f, "with", ", steps: 9, sample_every: 4, sample_prompt: ab, sample_tokens: 24", false);
  assert_string_equal(warning, "");
  assert_int_equal(read_samples(f, "with/samples.jsonl", steps), 2);
  assert_true(steps[0] == 4 && steps[1] == 8);
  compare(f, "plain/step-000009/model.safetensors", "with/step-000009/model.safetensors");
  compare(f, "plain/step-000009/optimizer.safetensors", "with/step-000009/optimizer.safetensors");
  train(f, "with", ", steps: 12, sample_every: 3, sample_prompt: ab, sample_tokens: 24", true);
  assert_int_equal(read_samples(f, "with/samples.jsonl", steps), 3);
  assert_int_equal(steps[2], 12);
}

static void test_refused(void **state) {
  rft_folder *f = *state;
  rfr_run *run;
  rft_write_texts(f);
  assert_int_equal(open_run(f, "bad", ", steps: 9, sample_every: 4, sample_prompt: \"\"", false, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "config.value");
  assert_non_null(strstr(rfr_last_error()->message, ":7: run.sample_prompt has no token"));
  assert_null(run);
  /* A file that cannot be written: one warning, and the run continues. */
  rft_write(f, "full/samples.jsonl/x", "", 0);
  train(f, "full", ", steps: 9, sample_every: 2", false);
  assert_non_null(strstr(warning, "samples.jsonl cannot be written ("));
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(test_samples), rft_folder_test(test_refused)};
  return cmocka_run_group_tests_name("samples", tests, NULL, NULL);
}
