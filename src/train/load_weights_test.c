/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading weights: tensors of many blocks have the same bytes and the same hash on any number of threads and on a
 * device with its own memory; values that are not finite are found in any block; a run that resumes reads the
 * weights of its checkpoint alone.
 */
#include "train/load_weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/backend.h"
#include "support/fault_backend.h"
#include "support/run.h"

/* The embedding has 75 MB: more than one staging buffer. */
#define BIG                                                                           \
  "{model_type: llama, vocab_size: 65600, hidden_size: 288, intermediate_size: 16,\n" \
  "        num_hidden_layers: 1, num_attention_heads: 2, tie_word_embeddings: true, init_std: 0.01}\n"
#define SMALL_STEP                                                                 \
  "data: {train: [\"*.txt\"], sequence: 16}\nbatch: {tokens: 16, microbatch: 1}\n" \
  "optimizer: {name: sgd, momentum: 0, lr: 1e-3}\nprecision: {dtype: f32}\nrun: {steps: 2, seed: 3}\n"
#define LORA "adapter: {type: lora, rank: 2, targets: [\"*.q_proj\"]}\n"

static const char *step_0(const char *name) {
  static char path[256];
  snprintf(path, sizeof path, "%s/step-000000", rft_run_folder(name));
  return path;
}

static void add_rounded(rfi_hash *sum, const rfr_tensor *x) {
  const int64_t n = x->bytes / 4;
  uint16_t *values = malloc((size_t)n * sizeof *values);
  assert_non_null(values);
  for (int64_t i = 0; i < n; i++) values[i] = (uint16_t)rfr_float_to_bits(RFR_BF16, ((const float *)x->data)[i]);
  rfi_hash_add_tensor(sum, x->name, RFR_BF16, values, (size_t)n * sizeof *values);
  free(values);
}

/* Saves the initial weights as a model folder; returns their hashes in f32 and in bf16. */
static void make_model(rfr_ctx *ctx, const char *name, rfi_hash *base, rfi_hash *rounded) {
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_tensor x;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\nmodel: " BIG SMALL_STEP, name, &o);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  *base = *rounded = (rfi_hash){0};
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == RFI_KIND_WEIGHT) {
      rfi_hash_add_tensor(base, x.name, (uint64_t)x.type.dtype, x.data, (size_t)x.bytes);
      add_rounded(rounded, &x);
    }
  rfr_run_close(run);
}

static rfr_run *open_adapter(rfr_ctx *ctx, const char *set, rfr_status want) {
  char config[1000];
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = NULL;
  o.config_folder = rft_run_root;
  o.programs = RFR_RUN_TRAIN;
  o.overrides = &set;
  o.n_overrides = set != NULL;
  o.eager = 1; /* the fake device of the tests has no memory that a captured run may read */
  snprintf(config, sizeof config, "refrain: 1\nmodel: %s\n" LORA SMALL_STEP, step_0("big"));
  if (rfr_run_open(ctx, config, NULL, &o, &run) != want) fail_msg("%s", rfr_last_error()->message);
  return run;
}

/* Writes a byte-level tokenizer for the model. */
static void write_tokenizer(const char *folder) {
  char path[300];
  int next = 0;
  snprintf(path, sizeof path, "%s/tokenizer.json", folder);
  FILE *f = fopen(path, "w");
  assert_non_null(f);
  fputs(
      "{\"version\": \"1.0\", \"added_tokens\": [], \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": "
      "false, \"use_regex\": false}, \"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", "
      "\"merges\": "
      "[], \"vocab\": {",
      f);
  for (int byte = 0; byte < 256; byte++) {
    const int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    fprintf(f, "%s\"\\u%04x\": %d", byte ? ", " : "", (unsigned)(printable ? byte : 256 + next++), byte);
  }
  fputs("}}}", f);
  assert_int_equal(fclose(f), 0);
}

static void compare_hash(rfr_run *run, rfi_hash base) {
  if (!rfi_hash_equal(run->base, base)) fail_msg("another hash");
  rfr_tensor x;
  rfi_hash held = {0};
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == RFI_KIND_BASE)
      rfi_hash_add_tensor(&held, x.name, (uint64_t)x.type.dtype, x.data, (size_t)x.bytes);
  assert_true(rfi_hash_equal(held, base));
}

/* Weights that are converted, or stored in another format: the hash is that of the values in the run's dtype. */
static rfi_hash hash_with(const char *set, int threads, bool device) {
  rfr_ctx *ctx = rft_run_ctx(threads);
  if (device) rft_backend = &rft_fault_backend;
  rfr_run *run = open_adapter(ctx, set, RFR_OK);
  const rfi_hash base = run->base;
  if (!strstr(set, "nf4")) compare_hash(run, base);
  rfr_run_close(run);
  rft_backend = NULL;
  rfr_ctx_destroy(ctx);
  return base;
}

static void same_everywhere(void **state) {
  (void)state;
  static const int threads[] = {1, 3, 3};
  rfi_hash base, rounded;
  rfr_ctx *ctx = rft_run_ctx(1);
  make_model(ctx, "big", &base, &rounded);
  write_tokenizer(step_0("big"));
  rfr_ctx_destroy(ctx);
  for (int i = 0; i < 3; i++) {
    ctx = rft_run_ctx(threads[i]);
    if (i == 2) rft_backend = &rft_fault_backend;
    rfr_run *run = open_adapter(ctx, NULL, RFR_OK);
    compare_hash(run, base); /* the fake device's memory is host memory */
    rfr_run_close(run);
    rft_backend = NULL;
    rfr_ctx_destroy(ctx);
  }
  assert_true(rfi_hash_equal(rounded, hash_with("precision.dtype=bf16", 1, false)));
  assert_true(rfi_hash_equal(rounded, hash_with("precision.dtype=bf16", 3, true)));
  assert_true(rfi_hash_equal(base, hash_with("adapter.base=nf4", 1, false)));
  assert_true(rfi_hash_equal(base, hash_with("adapter.base=nf4", 3, true)));
  assert_int_equal(rft_faults.blocks, 0);
}

/* Sets the last element of the file's first 60 MB to NaN: it is in the middle of a tensor. */
static void not_finite(void **state) {
  (void)state;
  char path[300], old[4];
  snprintf(path, sizeof path, "%s/model.safetensors", step_0("big"));
  FILE *f = fopen(path, "r+b");
  assert_non_null(f);
  uint64_t header;
  assert_int_equal(fread(&header, 8, 1, f), 1);
  const long at = (long)(8 + header) + 60000000;
  fseek(f, at, SEEK_SET);
  assert_int_equal(fread(old, 4, 1, f), 1);
  fseek(f, at, SEEK_SET);
  fwrite("\xff\xff\xff\xff", 4, 1, f);
  fflush(f);
  for (int threads = 1; threads <= 4; threads += 3) {
    rfr_ctx *ctx = rft_run_ctx(threads);
    assert_null(open_adapter(ctx, NULL, RFR_NUMERIC));
    assert_string_equal(rfr_last_error()->slug, "model.nonfinite");
    assert_non_null(strstr(rfr_last_error()->message, "embed_tokens.weight has elements that are NaN"));
    rfr_ctx_destroy(ctx);
  }
  fseek(f, at, SEEK_SET);
  fwrite(old, 4, 1, f);
  assert_int_equal(fclose(f), 0);
}

/* Full training from a folder: once there is a checkpoint, the folder's weights are not read. */
static void resume_reads_once(void **state) {
  (void)state;
  char config[1000], path[300];
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_ctx *ctx = rft_run_ctx(2);
  snprintf(config, sizeof config, "refrain: 1\nmodel: %s\n" SMALL_STEP, step_0("big"));
  o.config_folder = rft_run_root;
  rfr_run *run = rft_run_open(ctx, config, "tuned", &o), *again;
  rft_run_steps(run, 1);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  snprintf(path, sizeof path, "%s/model.safetensors", step_0("big"));
  assert_int_equal(unlink(path), 0);
  o.resume = 1;
  rft_run_steps(run, 1);
  rfr_tensor a, b;
  static const char name[] = "model.embed_tokens.weight";
  assert_int_equal(rfr_programs_tensor(run->programs, name, &a), RFR_OK);
  float *trained = malloc((size_t)a.bytes);
  assert_non_null(trained);
  memcpy(trained, a.data, (size_t)a.bytes);
  rfr_run_close(run);
  again = rft_run_open(ctx, NULL, "tuned", &o);
  rft_run_steps(again, 1);
  assert_int_equal(rfr_programs_tensor(again->programs, name, &b), RFR_OK);
  assert_memory_equal(trained, b.data, (size_t)b.bytes);
  rfr_run_close(again);
  free(trained);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(same_everywhere), cmocka_unit_test(not_finite),
                                     cmocka_unit_test(resume_reads_once)};
  return cmocka_run_group_tests_name("loading weights", tests, rft_run_setup, rft_run_teardown);
}
