/* SPDX-License-Identifier: Apache-2.0
 *
 * GGUF files as models: each model of tests/data/gguf equals the folder of tests/models that it was made from
 * (tools/make_gguf_files.py), as a description and in the bits of its bf16 weights.
 */
#include "model/gguf_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/hf.h"
#include "model/weights.h"
#include "support/folder.h"

#define FILES RFT_SOURCE_DIR "/tests/data/gguf/"
#define MODELS RFT_SOURCE_DIR "/tests/models/"
#define OK(call) assert_ok(call, #call, __LINE__)

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

static void *read_weight(rfi_weights *w, const rfr_model_config *c, const rfr_parameter *p, size_t *bytes) {
  rfr_tensor x = {.name = p->name, .type = {.dtype = c->dtype, .rank = p->rank}};
  *bytes = (size_t)rfr_dtype_bits(c->dtype) / 8;
  for (int d = 0; d < p->rank; d++) {
    x.type.shape[d] = p->shape[d];
    *bytes *= (size_t)p->shape[d];
  }
  x.bytes = (int64_t)*bytes;
  x.data = malloc(*bytes);
  assert_non_null(x.data);
  OK(rfi_weights_read(w, c, &x));
  return x.data;
}

static void compare(rfr_ctx *ctx, const char *name) {
  char paths[2][512];
  rfr_model_config c[2];
  rfi_weights *w[2];
  rfr_parameter p;
  const char *left = NULL;
  snprintf(paths[0], sizeof paths[0], MODELS "%s", name);
  snprintf(paths[1], sizeof paths[1], FILES "%s.gguf", name);
  for (int i = 0; i < 2; i++) {
    c[i] = rfr_model_config_default(RFR_MODEL_LLAMA);
    c[i].dtype = RFR_BF16;
    OK(rfi_hf_read(ctx, paths[i], true, &c[i]));
    OK(rfr_model_config_check(&c[i]));
    OK(rfi_weights_open(ctx, paths[i], &w[i]));
  }
  /* Fields that GGUF does not have. */
  c[0].dropout = c[1].dropout;
  c[0].init_std = c[1].init_std;
  c[0].attention_scalar = c[1].attention_scalar;
  if (c[0].window == 0) memcpy(c[0].no_window, c[1].no_window, sizeof c[0].no_window); /* not in use */
  assert_memory_equal(&c[0], &c[1], sizeof c[0]);
  for (int i = 0; i < rfr_model_parameter_count(&c[0]); i++) {
    size_t bytes[2];
    OK(rfr_model_parameter(&c[0], i, &p));
    void *a = read_weight(w[0], &c[0], &p, &bytes[0]), *b = read_weight(w[1], &c[1], &p, &bytes[1]);
    if (bytes[0] != bytes[1] || memcmp(a, b, bytes[0]) != 0) fail_msg("%s: %s differs", name, p.name);
    free(a);
    free(b);
  }
  assert_int_equal(rfi_weights_left(w[1], &c[1], &left), 0);
  for (int i = 0; i < 2; i++) rfi_weights_close(w[i]);
}

static void equals_folder(void **state) {
  static const char *const names[] = {"llama",     "llama-shards", "mixtral", "qwen2",  "qwen3",
                                      "qwen2-moe", "qwen3-moe",    "gemma",   "gemma2", "gpt2"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) compare(((rft_folder *)*state)->ctx, names[i]);
}

/* The attention scale of Gemma 2 is not in the file: head_dim, as in llama.cpp. */
static void gemma2_scale(void **state) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  OK(rfi_hf_read(((rft_folder *)*state)->ctx, FILES "gemma2.gguf", true, &c));
  assert_true(c.attention_scalar == 10.0);
}

/* Finds the first occurrence of `from` in a file, and overwrites the bytes at offset `after` from its start with `to`.
 * The length of the file does not change. */
static void patch(char *data, size_t n, const char *from, size_t after, const void *to, size_t n_to) {
  const size_t length = strlen(from);
  for (size_t i = 0; i + length + after + n_to <= n; i++) {
    if (memcmp(data + i, from, length) != 0) continue;
    memcpy(data + i + after, to, n_to);
    return;
  }
  fail_msg("%s is not in the file", from);
}

static const struct {
  const char *model, *from;
  size_t after; /* bytes from the start of `from` to the patch */
  const char *to;
  size_t n;
  const char *says;
} refused[] = {
    {"llama", "general.architecture", 32, "lamma", 5, "general.architecture is lamma"},
    {"llama", "general.type", 24, "adapt", 5, "the file is not a model"},
    {"llama", "general.architecture", 8, "arkitecture", 11, "general.architecture is missing"},
    {"llama", "llama.context_length", 6, "kontext", 7, "llama.kontext_length is not known"},
    {"llama", "llama.vocab_size", 20, "\xff\0\0\0", 4, "llama.vocab_size is 255"},
    {"llama", "llama.rope.dimension_count", 30, "\x04\0\0\0", 4, "llama.rope.dimension_count is 4"},
    {"llama", "llama.attention.value_length", 32, "\x05\0\0\0", 4, "llama.attention.value_length is 5"},
    {"llama", "llama.attention.head_count", 30, "\0\0\0\0", 4, "num_attention_heads"},
    {"llama", "token_embd.weight", 0, "token_emdb", 10, "there is no tensor token_embd.weight"},
    {"llama-shards", "llama.rope.scaling.type", 35, "lunear", 6, "rope_type is lunear"},
    {"gemma2", "gemma2.attn_logit_softcapping", 33, "\0\0\x80\x7f", 4, "attn_logit_softcapping"},
    {"mixtral", "llama.expert_used_count", 27, "\x09\0\0\0", 4, "num_experts_per_tok"},
    {"qwen3-moe", "qwen3moe.expert_count", 25, "\0\0\0\0", 4, "qwen3moe.expert_count is 0"},
};

static void refuses(void **state) {
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    char path[512];
    rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
    size_t n;
    snprintf(path, sizeof path, "%s.gguf", refused[i].model);
    rft_folder from = {.ctx = f->ctx, .path = RFT_SOURCE_DIR "/tests/data/gguf"};
    char *data = rft_read(&from, path, &n);
    patch(data, n, refused[i].from, refused[i].after, refused[i].to, refused[i].n);
    rft_write(f, "m.gguf", data, n);
    free(data);
    const rfr_status s = rfi_hf_read(f->ctx, rft_path(f, "m.gguf"), true, &c);
    if (s == RFR_OK || !strstr(rfr_last_error()->message, refused[i].says))
      fail_msg("row %zu: %d %s", i, s, rfr_last_error()->message);
  }
}

/* A tensor of another shape, and a missing one. */
static void mismatches(void **state) {
  rft_folder *f = *state;
  rft_folder from = {.ctx = f->ctx, .path = RFT_SOURCE_DIR "/tests/data/gguf"};
  static const struct {
    const char *from, *to, *says;
  } rows[] = {
      {"blk.1.ffn_up.weight", "blk.1.ffn_op.weight", "there is no tensor for model.layers.1.mlp.up_proj.weight"},
      {"blk.1.attn_k.weight", "blk.3.attn_k.weight", "model.layers.1.self_attn.k_proj.weight"}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    rfi_weights *w;
    rfr_parameter p;
    size_t n;
    rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
    char *data = rft_read(&from, "qwen3.gguf", &n);
    patch(data, n, rows[i].from, 0, rows[i].to, strlen(rows[i].to));
    rft_write(f, "m.gguf", data, n);
    free(data);
    OK(rfi_hf_read(f->ctx, rft_path(f, "m.gguf"), true, &c));
    OK(rfi_weights_open(f->ctx, rft_path(f, "m.gguf"), &w));
    rfr_status s = RFR_OK;
    for (int k = 0; s == RFR_OK && rfr_model_parameter(&c, k, &p) == RFR_OK; k++) {
      rfr_tensor x = {.name = p.name, .type = {.dtype = RFR_F32, .rank = p.rank}, .bytes = 4};
      for (int d = 0; d < p.rank; d++) x.bytes *= x.type.shape[d] = p.shape[d];
      x.data = malloc((size_t)x.bytes);
      s = rfi_weights_read(w, &c, &x);
      free(x.data);
    }
    rfi_weights_close(w);
    assert_int_equal(s, RFR_MISMATCH);
    if (!strstr(rfr_last_error()->message, rows[i].says)) fail_msg("%s", rfr_last_error()->message);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(equals_folder), rft_folder_test(gemma2_scale),
                                     rft_folder_test(refuses), rft_folder_test(mismatches)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
