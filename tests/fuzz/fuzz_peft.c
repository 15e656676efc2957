/* SPDX-License-Identifier: Apache-2.0
 *
 * A folder of an adapter: adapter_config.json, and after a line "----" the header of adapter_model.safetensors, whose
 * offsets are set here and whose tensors are zeros. It is read for a model with and one without experts: the result is
 * an adapter of the model or an error. Our description of the adapter is accepted again, with the same targets.
 */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "container.h"
#include "fuzz.h"
#include "model/hf.h"
#include "model/peft.h"
#include "nn/adapter.h"

static const char *const models[] = {
    "{\"model_type\": \"llama\", \"hidden_size\": 4, \"num_attention_heads\": 2, \"num_key_value_heads\": 1,"
    "\"num_hidden_layers\": 1, \"intermediate_size\": 6, \"vocab_size\": 8, \"max_position_embeddings\": 8}",
    "{\"model_type\": \"mixtral\", \"hidden_size\": 4, \"num_attention_heads\": 2, \"num_key_value_heads\": 1,"
    "\"num_hidden_layers\": 1, \"intermediate_size\": 6, \"vocab_size\": 8, \"max_position_embeddings\": 8,"
    "\"num_local_experts\": 2, \"num_experts_per_tok\": 1, \"sliding_window\": null}"};
enum { MODELS = sizeof models / sizeof *models, MOST = 1 << 22 };

static void put_weights(const char *text, size_t n) {
  static uint8_t file[MOST];
  if (n > MOST / 2) n = MOST / 2;
  memcpy(file + 8, text, n);
  rft_fuzz_put(RFI_PEFT_WEIGHTS, file, rft_safetensors_seal(file, n, MOST));
}

static bool read_adapter(const char *folder, const rfr_model_config *c, rfr_adapter **a) {
  rfi_peft *p;
  *a = NULL;
  rfr_status s = rfi_peft_open(rft_fuzz_ctx(), folder, &p);
  rft_fuzz_status(s);
  if (s == RFR_OK) s = rfi_peft_adapter(p, c, 0.0, a);
  rft_fuzz_status(s);
  rfi_peft_close(p);
  return s == RFR_OK;
}

static void read_for(const rfr_model_config *c, const char *folder) {
  rfr_adapter *a, *again;
  if (read_adapter(folder, c, &a)) {
    rfi_string text = {.ctx = rft_fuzz_ctx()};
    rfr_model_config with = *c;
    with.adapter = a;
    json_t *written = rfi_peft_config(&with, "");
    rft_fuzz_expect(written && rfi_json_print(written, &text) == RFR_OK, "it is not written");
    rft_fuzz_put(RFI_PEFT_CONFIG, text.data, text.n);
    rft_fuzz_expect(read_adapter(folder, c, &again), "what was written is refused");
    rft_fuzz_expect(a->n == again->n && a->rslora == again->rslora && a->dora == again->dora, "it changed by writing");
    for (int i = 0; i < a->n; i++)
      rft_fuzz_expect(memcmp(&a->targets[i], &again->targets[i], sizeof a->targets[i]) == 0, "a target changed");
    json_decref(written);
    rfi_string_deinit(&text);
    rfr_adapter_destroy(again);
  }
  rfr_adapter_destroy(a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  static rfr_model_config configs[MODELS];
  const char *folder = rft_fuzz_folder(), *text = n ? (const char *)data : "", *config, *header = "";
  size_t n_config, n_header = 0;
  for (int i = 0; i < MODELS && configs[i].size == 0; i++) {
    configs[i] = rfr_model_config_default(RFR_MODEL_LLAMA);
    rft_fuzz_put("config.json", models[i], strlen(models[i]));
    rft_fuzz_expect(rfi_hf_read(rft_fuzz_ctx(), folder, false, &configs[i]) == RFR_OK, "no model");
  }
  rft_fuzz_part(&text, &n, &config, &n_config);
  rft_fuzz_part(&text, &n, &header, &n_header);
  put_weights(header, n_header);
  for (int i = 0; i < MODELS; i++) {
    rft_fuzz_put(RFI_PEFT_CONFIG, config, n_config);
    read_for(&configs[i], folder);
  }
  rft_fuzz_clean();
  return 0;
}
