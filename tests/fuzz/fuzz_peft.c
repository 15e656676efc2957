/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads adapter_config.json next to the tensors of a valid adapter: the result is an adapter of the model or an error.
 * Our description of the adapter is accepted again, with the same targets.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "data/file.h"
#include "fuzz.h"
#include "model/hf.h"
#include "model/peft.h"
#include "nn/adapter.h"

#define MODELS RFT_SOURCE_DIR "/tests/models/"

/* Links the tensors into the folder, once. */
static const char *prepare(void) {
  static bool linked;
  const char *folder = rft_fuzz_folder(RFI_PEFT_CONFIG);
  char link[600];
  snprintf(link, sizeof link, "%s/" RFI_PEFT_WEIGHTS, folder);
  if (!linked) rft_fuzz_expect(symlink(MODELS "adapters/llama-lora/" RFI_PEFT_WEIGHTS, link) == 0, "no link");
  linked = true;
  return folder;
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  static rfr_model_config c;
  rfr_adapter *a, *again;
  if (c.size == 0) {
    c = rfr_model_config_default(RFR_MODEL_LLAMA);
    rft_fuzz_expect(rfi_hf_read(rft_fuzz_ctx(), MODELS "llama", false, &c) == RFR_OK, "no model");
  }
  const char *folder = prepare();
  rft_fuzz_file(data, n);
  if (read_adapter(folder, &c, &a)) {
    rfi_string text = {.ctx = rft_fuzz_ctx()};
    rfr_model_config with = c;
    with.adapter = a;
    json_t *written = rfi_peft_config(&with, "");
    rft_fuzz_expect(written && rfi_json_print(written, &text) == RFR_OK, "it is not written");
    rft_fuzz_file((const uint8_t *)text.data, text.n);
    rft_fuzz_expect(read_adapter(folder, &c, &again), "what was written is refused");
    rft_fuzz_expect(a->n == again->n && a->rslora == again->rslora && a->dora == again->dora, "it changed by writing");
    for (int i = 0; i < a->n; i++)
      rft_fuzz_expect(memcmp(&a->targets[i], &again->targets[i], sizeof a->targets[i]) == 0, "a target changed");
    json_decref(written);
    rfi_string_deinit(&text);
    rfr_adapter_destroy(again);
  }
  rfr_adapter_destroy(a);
  rft_fuzz_clean();
  return 0;
}
