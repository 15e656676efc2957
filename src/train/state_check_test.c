/* SPDX-License-Identifier: Apache-2.0
 *
 * Values that no step can produce: a state with one is not saved, and a checkpoint with one is not resumed, even if its
 * manifest has the hash of the changed file.
 */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/checkpoint.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "support/run.h"

#define WIDE                                                                                   \
  "model: {model_type: llama, hidden_size: 64, intermediate_size: 72, num_hidden_layers: 1,\n" \
  "        num_attention_heads: 4}\n"
#define U8 "refrain: 1\n" WIDE SINGLE DATA TWO_BATCHES "optimizer: {lr: 3e-3, state_dtype: u8}\n" RUN
#define DELAYED "refrain: 1\n" WIDE "precision: {dtype: f32, recipe: fp8_delayed, keep: []}\n" DATA TWO_BATCHES ADAM RUN
#define EMBEDDING "model.embed_tokens.weight.exp_avg"
enum { EMBEDDING_SCALES = 256 * 64, LAST = -4 };

/* Sets the f32 at byte `at` of a tensor (from its end, if negative) to x. */
typedef struct damage {
  const char *config, *tensor, *message;
  int at;
  float x;
} damage;

static const damage damages[] = {
    {U8, EMBEDDING, "negative, NaN or infinite", EMBEDDING_SCALES, NAN},
    {U8, EMBEDDING, "negative, NaN or infinite", LAST, -1e-3f},
    {U8, EMBEDDING "_sq", "negative, NaN or infinite", LAST, INFINITY},
    {U8, "model.norm.weight.exp_avg", "elements that are NaN or infinite", 0, NAN},
    {DELAYED, "recipe.scale", "not a positive number", 0, 0},
    {DELAYED, "recipe.scale", "not a positive number", LAST, NAN},
    {DELAYED, "recipe.history", "negative, NaN or infinite", 0, -1},
    {DELAYED, "recipe.history", "negative, NaN or infinite", LAST, INFINITY},
};
enum { DAMAGES = sizeof damages / sizeof *damages };

static void refused_save(rfr_run *run, const damage *d) {
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), d->tensor, &x), RFR_OK);
  float *at = (float *)((char *)x.data + (d->at < 0 ? x.bytes + d->at : d->at));
  const float kept = *at;
  *at = d->x;
  assert_int_equal(rfr_run_save(run), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "run.diverged");
  assert_non_null(strstr(rfr_last_error()->message, d->tensor));
  assert_non_null(strstr(rfr_last_error()->message, d->message));
  *at = kept;
}

static void patch(rfr_ctx *ctx, const char *path, const damage *d) {
  rfi_safetensors *st;
  assert_int_equal(rfi_safetensors_open(ctx, path, &st), RFR_OK);
  const rfi_stored *x = rfi_safetensors_find(st, d->tensor);
  assert_non_null(x);
  const int64_t at = x->offset + (d->at < 0 ? x->bytes + d->at : d->at);
  rfi_safetensors_close(st);
  const int fd = open(path, O_WRONLY);
  assert_int_equal(pwrite(fd, &d->x, 4, at), 4);
  close(fd);
}

/* Updates the hash of the file in the manifest. */
static void rehash(rfr_ctx *ctx, const char *folder, const char *name) {
  char path[1024], text[33];
  int64_t size;
  rfi_hash hash;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  assert_int_equal(rfi_file_hash(ctx, path, &size, &hash), RFR_OK);
  snprintf(path, sizeof path, "%s/MANIFEST.json", folder);
  json_t *manifest = json_load_file(path, 0, NULL);
  assert_non_null(manifest);
  json_t *entry = json_object_get(json_object_get(manifest, "files"), name);
  assert_int_equal(json_object_set_new(entry, "xxh3_128", json_string(rfi_hash_format(text, hash))), 0);
  assert_int_equal(json_dump_file(manifest, path, JSON_INDENT(2)), 0);
  json_decref(manifest);
}

static void test_damages(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  for (int i = 0; i < DAMAGES; i++) {
    const damage *d = &damages[i];
    rft_record r = {0};
    rfr_run_options o = rft_run_options(&r);
    char name[32], folder[512], path[1024];
    snprintf(name, sizeof name, "damaged-%d", i);
    rfr_run *run = rft_run_open(ctx, d->config, name, &o);
    rft_run_steps(run, 2);
    refused_save(run, d);
    assert_int_equal(rfr_run_save(run), RFR_OK);
    rfr_run_close(run);
    snprintf(folder, sizeof folder, "%s/step-000002", rft_run_folder(name));
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    patch(ctx, path, d);
    rehash(ctx, folder, "optimizer.safetensors");
    o.resume = 1;
    assert_int_not_equal(rfr_run_open(ctx, d->config, rft_run_folder(name), &o, &run), RFR_OK);
    const rfr_error *e = rfr_last_error();
    if (strcmp(e->slug, "checkpoint") != 0 || !strstr(e->message, d->tensor) || !strstr(e->message, d->message))
      fail_msg("%s: %s [%s]", d->tensor, e->message, e->slug);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_damages)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
