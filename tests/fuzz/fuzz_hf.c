/* SPDX-License-Identifier: Apache-2.0
 *
 * A model folder: config.json, and after lines "----" model.safetensors.index.json and generation_config.json. The
 * config is a valid description or an error. A description is written as JSON that reads back equal; its parameters can
 * be listed and their sizes added without overflow. The index opens only files of the folder; one is there, "a", with
 * the tensor "x".
 */
#include <string.h>

#include "base/json.h"
#include "fuzz.h"
#include "model/hf.h"
#include "model/weights.h"

static bool read_model(const char *folder, rfr_model_config *c) {
  *c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfi_hf_notes notes;
  rfr_status s = rfi_hf_notes_read(rft_fuzz_ctx(), folder, &notes);
  rft_fuzz_status(s);
  rfi_hf_notes_deinit(&notes);
  s = rfi_hf_read(rft_fuzz_ctx(), folder, true, c);
  rft_fuzz_status(s);
  if (s != RFR_OK) return false;
  s = rfr_model_config_check(c);
  rft_fuzz_status(s);
  return s == RFR_OK;
}

/* Total bytes of all parameters with f32 states. If there are many parameters, only the first and the last are
 * listed. */
static void add_sizes(const rfr_model_config *c) {
  const int n = rfr_model_parameter_count(c);
  int64_t bytes = 0;
  rfr_parameter p;
  for (int i = 0; i < n; i += i < 40 || n - i < 40 ? 1 : n / 16 + 1) {
    int64_t elements = 16;
    rft_fuzz_expect(rfr_model_parameter(c, i, &p) == RFR_OK, "a parameter is missing");
    for (int d = 0; d < p.rank; d++)
      rft_fuzz_expect(p.shape[d] > 0 && !__builtin_mul_overflow(elements, p.shape[d], &elements), "a size overflows");
    rft_fuzz_expect(!__builtin_add_overflow(bytes, elements, &bytes), "the sum of sizes overflows");
  }
}

static bool same_rope(const rfr_model_config *a, const rfr_model_config *b) {
  bool same = a->rope_scaling.factor == b->rope_scaling.factor && a->rope_extension.type == b->rope_extension.type &&
              a->rope_extension.attention_factor == b->rope_extension.attention_factor;
  for (int64_t l = 0; l < a->layers; l++) same = same && rfr_model_has_rope(a, l) == rfr_model_has_rope(b, l);
  return same;
}

static void read_index(const char *folder) {
  static const char shard[] =
      "\x38\0\0\0\0\0\0\0{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}        .";
  rfi_weights *w;
  rft_fuzz_put("a", shard, 8 + 0x38 + 1);
  const rfr_status s = rfi_weights_open(rft_fuzz_ctx(), folder, &w);
  rft_fuzz_status(s);
  rfi_weights_close(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  static const char *const names[] = {"config.json", "model.safetensors.index.json", "generation_config.json"};
  rfr_model_config c, again;
  const char *folder = rft_fuzz_folder(), *text = n ? (const char *)data : "", *part;
  size_t n_part;
  for (int i = 0; i < 3; i++) {
    const bool given = rft_fuzz_part(&text, &n, &part, &n_part);
    rft_fuzz_put(names[i], given ? part : NULL, given ? n_part : 0);
    if (given && i == 1) read_index(folder);
  }
  if (read_model(folder, &c)) {
    add_sizes(&c);
    rfi_string printed = {.ctx = rft_fuzz_ctx()};
    json_t *written = rfi_hf_config(&c);
    rft_fuzz_expect(written && rfi_json_print(written, &printed) == RFR_OK, "it is not written");
    rft_fuzz_put("config.json", printed.data, printed.n);
    rft_fuzz_expect(read_model(folder, &again), "what was written is refused");
    rft_fuzz_expect(c.type == again.type && c.vocab_size == again.vocab_size && c.hidden_size == again.hidden_size &&
                        c.layers == again.layers && c.heads == again.heads && c.kv_heads == again.kv_heads &&
                        c.head_dim == again.head_dim && c.intermediate_size == again.intermediate_size &&
                        c.norm_eps == again.norm_eps && c.rope_theta == again.rope_theta &&
                        c.tie_embeddings == again.tie_embeddings && c.attention_bias == again.attention_bias &&
                        c.logit_cap == again.logit_cap && c.attention_cap == again.attention_cap &&
                        c.window == again.window && c.rotary_dim == again.rotary_dim &&
                        c.local_theta == again.local_theta && c.qk_norm == again.qk_norm && same_rope(&c, &again),
                    "it changed by writing");
    json_t *rewritten = rfi_hf_config(&again);
    rft_fuzz_expect(json_equal(written, rewritten), "what was written twice differs");
    json_decref(rewritten);
    json_decref(written);
    rfi_string_deinit(&printed);
  }
  rft_fuzz_clean();
  return 0;
}
