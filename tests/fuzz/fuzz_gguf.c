/* SPDX-License-Identifier: Apache-2.0
 *
 * GGUF: the keys and tensors of a file that opens are inside it and can be read; its model is a valid description
 * or an error, and so are the files of its vocabulary.
 */
#include "data/gguf.h"

#include "fuzz.h"
#include "model/gguf_model.h"
#include "model/hf.h"
#include "text/gguf_tokenizer.h"

static void read_key(const rfi_gguf *g, const rfi_gguf_value *v) {
  rft_fuzz_expect(v->count >= 0 && rfi_gguf_key(g, v->key) == v, "a key finds another value");
  if (v->kind == RFI_GGUF_STRING) {
    size_t cursor = 0, n, sum = 0;
    const char *text;
    for (int64_t i = 0; i < v->count; i++) {
      rft_fuzz_expect(rfi_gguf_next_string(g, v, &cursor, &text, &n) == RFR_OK, "a string cannot be read");
      for (size_t k = 0; k < n; k++) sum += (size_t)text[k];
    }
    rft_fuzz_expect(rfi_gguf_next_string(g, v, &cursor, &text, &n) != RFR_OK || sum == 1, "too much was read");
    return;
  }
  double x;
  for (int64_t i = 0; i < v->count; i++) rft_fuzz_status(rfi_gguf_real(g, v, i, &x));
  rft_fuzz_expect(rfi_gguf_real(g, v, v->count, &x) != RFR_OK, "too much was read");
}

static void read_tensor(rfi_gguf *g, const rfi_gguf_tensor *t, size_t n) {
  void *data = NULL;
  const int64_t rows = t->elements / t->shape[t->rank - 1];
  rft_fuzz_expect(t->bytes > 0 && t->offset >= 0 && t->offset + t->bytes <= (int64_t)n, "a tensor outside the file");
  rft_fuzz_expect(rfi_gguf_tensor_find(g, t->name) == t, "a name finds another tensor");
  if (RFI_ALLOC(rft_fuzz_ctx(), (size_t)t->elements * 4, &data) != RFR_OK) return;
  rft_fuzz_status(rfi_gguf_read(g, t, 0, rows, rows % 4 ? 0 : 4, RFR_F32, data));
  rft_fuzz_status(rfi_gguf_read(g, t, rows / 2, rows - rows / 2, 0, RFR_BF16, data));
  rfi_free(rft_fuzz_ctx(), data);
}

static void read_files(const rfi_gguf *g) {
  static const char *const names[] = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"};
  for (int i = 0; i < 3; i++) {
    char *text;
    size_t n;
    rft_fuzz_status(rfi_gguf_text_file(rft_fuzz_ctx(), g, names[i], &text, &n));
    rfi_free(rft_fuzz_ctx(), text);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfi_gguf *g;
  json_t *config;
  const char *path = rft_fuzz_file(data, n);
  rfr_status s = rfi_gguf_open(rft_fuzz_ctx(), path, &g);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    for (int i = 0; i < rfi_gguf_key_count(g); i++) read_key(g, rfi_gguf_key_at(g, i));
    for (int i = 0; i < rfi_gguf_tensor_count(g); i++) read_tensor(g, rfi_gguf_tensor_at(g, i), n);
    read_files(g);
    s = rfi_gguf_config(rft_fuzz_ctx(), g, &config);
    rft_fuzz_status(s);
    json_decref(config);
    rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
    s = rfi_hf_read(rft_fuzz_ctx(), path, true, &c);
    rft_fuzz_status(s);
    rft_fuzz_expect(s != RFR_OK || rfr_model_config_check(&c) == RFR_OK, "a description that is not valid");
  }
  rfi_gguf_close(g);
  rft_fuzz_clean();
  return 0;
}
