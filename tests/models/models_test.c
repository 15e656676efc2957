/* SPDX-License-Identifier: Apache-2.0
 *
 * Compares logits, gradients, the aux loss and greedy text of the model folders with the transformers library's results
 * in f32. Then the weights: names without the outer module, packed experts, and indexes that leave the folder.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "model/hf.h"
#include "model/weights.h"
#include "ops/decode/cursor.h"
#include "support/model_folder.h"
#include "train/step_trace.h"

static const double tolerance = 1e-5;

typedef struct reference {
  rfi_safetensors *file;
  rfr_programs *programs;
} reference;

/* The largest difference between an output and the library's result `name`. */
static double difference(reference *r, const char *output, const char *name) {
  rfr_tensor got;
  double worst = 0, largest = 0;
  OK(rfr_program_output(r->programs, 0, output, &got));
  const rfi_stored *stored = rfi_safetensors_find(r->file, name);
  if (!stored) fail_msg("no %s in the reference", name);
  assert_int_equal(stored->bytes, got.bytes);
  float *want = malloc((size_t)stored->bytes);
  OK(rfi_safetensors_read_as(r->file, stored, RFR_F32, want, stored->elements));
  for (int64_t i = 0; i < stored->elements; i++) {
    double d = fabs((double)((float *)got.data)[i] - (double)want[i]);
    if (!(d <= worst)) worst = d; /* also fails for NaN */
    largest = fmax(largest, fabs((double)want[i]));
  }
  free(want);
  if (!(largest > 10 * tolerance)) fail_msg("%s: %g at most; nothing to compare", name, largest);
  if (!(worst <= tolerance)) fail_msg("%s differs by %g", name, worst);
  return worst;
}

static void read_i32(reference *r, const char *name) {
  rfr_tensor x;
  OK(rfr_programs_tensor(r->programs, name, &x));
  const rfi_stored *stored = rfi_safetensors_find(r->file, name);
  assert_non_null(stored);
  OK(rfi_safetensors_read(r->file, stored, x.data, (size_t)x.bytes));
}

static void one_reference(rfr_ctx *ctx, const char *model) {
  char folder[512], path[600];
  reference r;
  rfr_tensor offsets;
  rfr_parameter p;
  rfr_model_config c = {.dtype = RFR_F32};
  snprintf(folder, sizeof folder, RFT_MODELS "%s", model);
  snprintf(path, sizeof path, "%s/reference.safetensors", folder);
  OK(rfi_hf_read(ctx, folder, true, &c));
  OK(rfi_safetensors_open(ctx, path, &r.file));
  const rfi_stored *tokens = rfi_safetensors_find(r.file, "tokens");
  assert_non_null(tokens);
  c.balance_loss = c.experts > 0;
  r.programs = rft_model_compile(ctx, &c, tokens->elements);
  OK(rft_model_load(ctx, r.programs, &c, folder));
  read_i32(&r, "tokens");
  read_i32(&r, "targets");
  OK(rfr_programs_tensor(r.programs, "offsets", &offsets));
  memcpy(offsets.data, (int32_t[]){0, (int32_t)tokens->elements}, 2 * sizeof(int32_t));
  OK(rfr_programs_load(r.programs));
  OK(rfr_program_run(r.programs, 0));
  difference(&r, "loss", "loss");
  double logits = difference(&r, "logits", "logits"), gradients = 0;
  for (int i = 0; rfr_model_parameter(&c, i, &p) == RFR_OK; i++) {
    char name[128];
    snprintf(name, sizeof name, "d_%s", p.name);
    gradients = fmax(gradients, difference(&r, name, name));
  }
  if (c.experts > 0) difference(&r, "balance", "balance");
  print_message("%-12s logits within %.1e, gradients within %.1e\n", model, logits, gradients);
  /* all tensors except tokens, targets, logits, loss, greedy and balance are gradients: both train the same
   * parameters */
  assert_int_equal(rfi_safetensors_count(r.file), 5 + (c.experts > 0) + rfr_model_parameter_count(&c));
  rfr_programs_destroy(r.programs);
  rfi_safetensors_close(r.file);
}

static void references(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < RFT_N_MODELS; i++) one_reference(f->ctx, rft_models[i]);
}

/* Routers with equal logits: each expert has probability 1/E and each token goes to the first k experts. For any number
 * of layers and ignored tokens, the losses are k and (log E)^2 times their factors. */
static void even_routing(void **state) {
  rft_folder *f = *state;
  static const int32_t targets[6] = {3, -100, 7, 1, -100, 2};
  rfr_model_config c = {.dtype = RFR_F32};
  rfr_tensor x;
  OK(rfi_hf_read(f->ctx, RFT_MODELS "qwen3-mixed", true, &c));
  assert_true(rfr_model_expert_layers(&c) == 2 && c.experts_per_token == 2);
  c.balance_loss = 0.5;
  c.z_loss = 0.25;
  rfr_programs *p = rft_model_compile(f->ctx, &c, 6);
  OK(rft_model_load(f->ctx, p, &c, RFT_MODELS "qwen3-mixed"));
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (strstr(x.name, ".mlp.gate.weight")) memset(x.data, 0, (size_t)x.bytes);
  OK(rfr_programs_tensor(p, "targets", &x));
  memcpy(x.data, targets, sizeof targets);
  OK(rfr_programs_tensor(p, "tokens", &x));
  memset(x.data, 0, sizeof targets);
  OK(rfr_programs_tensor(p, "offsets", &x));
  memcpy(x.data, (int32_t[]){0, 6}, 2 * sizeof(int32_t));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "balance", &x));
  const double want = 0.5 * 2 + 0.25 * log(5) * log(5), got = (double)*(float *)x.data;
  if (!(fabs(got - want) <= 1e-6)) fail_msg("%.9g, not %.9g", got, want);
  rfr_programs_destroy(p);
}

static void one_text(rfr_ctx *ctx, const char *model) {
  enum { PROMPT = 8, LENGTH = 32 };
  char folder[512], path[600];
  rfi_safetensors *file;
  rfr_trace *t[2];
  rfr_programs *p;
  rfr_tensor text, cursor;
  int32_t want[LENGTH];
  rfi_step_spec spec = {.model = {.dtype = RFR_F32}, .window = LENGTH - 1, .microbatches = 1};
  snprintf(folder, sizeof folder, RFT_MODELS "%s", model);
  snprintf(path, sizeof path, "%s/reference.safetensors", folder);
  OK(rfi_hf_read(ctx, folder, true, &spec.model));
  OK(rfi_safetensors_open(ctx, path, &file));
  const rfi_stored *greedy = rfi_safetensors_find(file, "greedy");
  assert_true(greedy && greedy->elements == LENGTH);
  OK(rfi_safetensors_read(file, greedy, want, sizeof want));
  OK(rfi_trace_prefill(ctx, &spec, &t[0]));
  OK(rfi_trace_decode(ctx, &spec, &t[1]));
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)t, NULL, NULL, &p));
  OK(rft_model_load(ctx, p, &spec.model, folder));
  OK(rfr_programs_load(p));
  OK(rfr_programs_tensor(p, RFI_NAME_TEXT, &text)); /* temperature is 0 */
  OK(rfr_programs_tensor(p, RFI_NAME_CURSOR, &cursor));
  memcpy(text.data, want, PROMPT * sizeof *want);
  ((int64_t *)cursor.data)[RFI_CURSOR_KNOWN] = PROMPT;
  for (int i = 0; i < LENGTH - PROMPT; i++) OK(rfr_program_run(p, i > 0));
  assert_memory_equal(text.data, want, sizeof want);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  rfr_programs_destroy(p);
  rfi_safetensors_close(file);
}

static void greedy_texts(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < RFT_N_MODELS; i++) one_text(f->ctx, rft_models[i]);
}

/* The same file without the outer module in the tensor names; blanks keep the length of the header. */
static void base_names(void **state) {
  rft_folder *f = *state;
  static const char *const cases[][2] = {{"gpt2", "\"transformer."}, {"qwen2", "\"model."}};
  for (int i = 0; i < 2; i++) {
    size_t n, cut = strlen(cases[i][1]) - 1;
    char *data = rft_model_file(cases[i][0], "model.safetensors", &n), *end = data + 8;
    uint64_t header;
    memcpy(&header, data, 8);
    end += header;
    int found = 0;
    for (char *at = data + 8; at + cut < end; at++) {
      if (memcmp(at, cases[i][1], cut + 1) != 0) continue;
      memmove(at + 1, at + 1 + cut, (size_t)(end - (at + 1 + cut)));
      memset(end - cut, ' ', cut);
      found++;
    }
    assert_true(found > 10);
    rft_write(f, "model.safetensors", data, n);
    free(data);
    rfr_model_config c;
    rfr_tensor x, y;
    OK(rft_model_read(f, rft_model_config(cases[i][0]), &c));
    rfr_programs *p = rft_model_compile(f->ctx, &c, 8), *q = rft_model_compile(f->ctx, &c, 8);
    char folder[512];
    snprintf(folder, sizeof folder, RFT_MODELS "%s", cases[i][0]);
    OK(rft_model_load(f->ctx, p, &c, f->path));
    OK(rft_model_load(f->ctx, q, &c, folder));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++) {
      OK(rfr_programs_tensor(q, x.name, &y));
      if (x.role == RFR_ROLE_TRAINABLE) assert_memory_equal(x.data, y.data, (size_t)x.bytes);
    }
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
  }
}

/* A folder with packed experts gives the same weights. A folder without an expert is refused by its name. */
static void packed_experts(void **state) {
  rft_folder *f = *state;
  static const char *const cases[] = {"mixtral", "qwen3-moe"};
  for (int i = 0; i < 2; i++) {
    rfr_model_config c;
    rfr_tensor x, y;
    char folder[512], path[600];
    rfi_file *file;
    rfi_safetensors_entry entries[RFT_MOST];
    int n = 0;
    OK(rft_model_read(f, rft_model_config(cases[i]), &c));
    rfr_programs *p = rft_model_compile(f->ctx, &c, 8), *q = rft_model_compile(f->ctx, &c, 8);
    snprintf(folder, sizeof folder, RFT_MODELS "%s", cases[i]);
    snprintf(path, sizeof path, "%s/model.safetensors", f->path);
    OK(rft_model_load(f->ctx, p, &c, folder));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++) {
      if (x.role != RFR_ROLE_TRAINABLE) continue;
      entries[n] = (rfi_safetensors_entry){.name = x.name, .dtype = x.type.dtype, .rank = x.type.rank};
      for (int d = 0; d < x.type.rank; d++) entries[n].shape[d] = x.type.shape[d];
      n++;
    }
    remove(path);
    OK(rfi_file_create(f->ctx, path, &file));
    OK(rfi_safetensors_write_header(f->ctx, file, entries, n, NULL, 0, NULL));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++)
      if (x.role == RFR_ROLE_TRAINABLE) OK(rfi_file_append(file, x.data, (size_t)x.bytes));
    rfi_file_close(file);
    OK(rft_model_load(f->ctx, q, &c, f->path));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++) {
      OK(rfr_programs_tensor(q, x.name, &y));
      if (x.role == RFR_ROLE_TRAINABLE) assert_memory_equal(x.data, y.data, (size_t)x.bytes);
    }
    rfr_programs_destroy(q);
    c.experts++;
    q = rft_model_compile(f->ctx, &c, 8);
    assert_int_equal(rft_model_load(f->ctx, q, &c, folder), RFR_MISMATCH);
    assert_non_null(strstr(rfr_last_error()->message, i ? "mlp.gate.weight has shape [6, 16]" : "has shape [5, 16]"));
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
  }
}

static void indexes(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *text, *message;
  } cases[] = {
      {"{\"weight_map\": {\"a\": \"../x.safetensors\"}}", "the file of \"a\" is not a file name of this folder"},
      {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "the file of \"a\""},
      {"{\"weight_map\": {\"a\": \"..\"}}", "the file of \"a\""},
      {"{\"weight_map\": {\"a\": \"\"}}", "the file of \"a\""},
      {"{\"weight_map\": {\"a\": 3}}", "the file of \"a\""},
      {"{\"weight_map\": [\"one.safetensors\"]}", "has no object"},
      {"{}", "has no object"},
      {"{\"weight_map\": {\"a\": \"missing.safetensors\"}}", "missing.safetensors"},
      {"{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"two.safetensors\"}}", "in one.safetensors and in two"},
      {"{\"weight_map\": {}}", "there is no tensor"},
      {"{\"weight_map\": {\"x\": \"one.safetensors\"}}", NULL}, /* the index is stale, but the files have everything */
  };
  size_t n;
  char *data = rft_model_file("gpt2", "model.safetensors", &n);
  rft_write(f, "one.safetensors", data, n);
  rft_write(f, "two.safetensors", data, n);
  free(data);
  rfr_model_config c;
  OK(rft_model_read(f, rft_model_config("gpt2"), &c));
  rfr_programs *p = rft_model_compile(f->ctx, &c, 8);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rft_write(f, "model.safetensors.index.json", cases[i].text, strlen(cases[i].text));
    rft_expect(rft_model_load(f->ctx, p, &c, f->path), cases[i].message, "index", cases[i].text);
  }
  rfr_programs_destroy(p);
  /* the message has both shapes */
  c.intermediate_size = 48;
  p = rft_model_compile(f->ctx, &c, 8);
  assert_int_equal(rft_model_load(f->ctx, p, &c, f->path), RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "has shape [16, 64]; config.json describes [16, 48]"));
  rfr_programs_destroy(p);
}

/* The logits of tokens 3, 10, 17, ... in a model folder, one per line, for tools/check_transformers.py. */
static int print_logits(const char *folder) {
  enum { TOKENS = 24 };
  rfr_ctx *ctx = NULL;
  rfr_programs *p = NULL;
  rfr_model_config c = {.dtype = RFR_F32};
  rfr_tensor x;
  rfr_status s = rfr_ctx_create(NULL, &ctx);
  if (s == RFR_OK) s = rfi_hf_read(ctx, folder, true, &c);
  if (s == RFR_OK) p = rft_model_compile(ctx, &c, TOKENS);
  if (s == RFR_OK) s = rft_model_load(ctx, p, &c, folder);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "offsets", &x);
  if (s == RFR_OK) ((int32_t *)x.data)[0] = 0, ((int32_t *)x.data)[1] = TOKENS;
  if (s == RFR_OK) s = rfr_programs_tensor(p, "targets", &x);
  if (s == RFR_OK) memset(x.data, 0, (size_t)x.bytes);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "tokens", &x);
  for (int i = 0; s == RFR_OK && i < TOKENS; i++) ((int32_t *)x.data)[i] = (int32_t)((3 + 7 * i) % c.vocab_size);
  if (s == RFR_OK) s = rfr_programs_load(p);
  if (s == RFR_OK) s = rfr_program_run(p, 0);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "logits", &x);
  for (int64_t i = 0; s == RFR_OK && i < x.bytes / 4; i++) printf("%.9g\n", (double)((float *)x.data)[i]);
  if (s != RFR_OK) fprintf(stderr, "%s\n", rfr_last_error()->message);
  rfr_programs_destroy(p);
  rfr_ctx_destroy(ctx);
  return s != RFR_OK;
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "--logits") == 0) return print_logits(argv[2]);
  const struct CMUnitTest tests[] = {
      rft_folder_test(references), rft_folder_test(greedy_texts),   rft_folder_test(even_routing),
      rft_folder_test(base_names), rft_folder_test(packed_experts), rft_folder_test(indexes),
  };
  return cmocka_run_group_tests_name("models", tests, NULL, NULL);
}
