/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks whether llama.cpp would compute a model as described. GGUF has no keys for some properties; llama.cpp derives
 * them from the architecture and the number of layers. If the model differs, its export is refused before anything is
 * written.
 *
 * Sources: hyperparameters and graphs of llama.cpp, src/models/ and src/llama-model.cpp.
 */
#include <math.h>
#include <string.h>

#include "model/gguf_model.h"

#define REFUSE(...) rfi_fail(RFI_E_MODEL_CONFIG, __VA_ARGS__)

enum { GEMMA3_PERIOD = 6, SMOLLM3_PERIOD = 4 };

static bool is(const char *architecture, const char *name) { return strcmp(architecture, name) == 0; }

static rfr_status check_layers(const rfr_model_config *c, const char *a, const char *type) {
  for (int64_t l = 0; l < c->layers; l++) {
    const bool wanted = (is(a, "gemma2") && l % 2 == 0) || (is(a, "gemma3") && (l + 1) % GEMMA3_PERIOD != 0);
    const bool all_rows = is(a, "phi3") && c->window >= c->max_positions;
    if (!all_rows && rfr_model_has_window(c, l) != wanted)
      return REFUSE("layer %lld: GGUF cannot store which layers of %s have a sliding window", (long long)l, type);
    if (c->type != RFR_MODEL_GPT2 && rfr_model_has_rope(c, l) != (!is(a, "smollm3") || (l + 1) % SMOLLM3_PERIOD != 0))
      return REFUSE("layer %lld: GGUF cannot store which layers of %s have no RoPE; llama.cpp takes every fourth",
                    (long long)l, type);
  }
  return RFR_OK;
}

static rfr_status check_experts(const rfr_model_config *c, const char *a, const char *type) {
  if (c->experts == 0) return RFR_OK;
  if (rfr_model_expert_layers(c) != c->layers)
    return REFUSE("a model with experts in only some layers cannot be written as GGUF");
  if (c->expert_norm != !is(a, "qwen2moe"))
    return REFUSE("norm_topk_prob %d cannot be written as GGUF for %s", c->expert_norm, type);
  return RFR_OK;
}

static rfr_status check_rope(const rfr_model_config *c, const char *a, const char *type) {
  const rfr_rope_extension *e = &c->rope_extension;
  const bool llama3 = c->rope_scaling.factor != 1.0 && c->rope_scaling.original > 0;
  if (llama3 && !is(a, "llama") && !is(a, "granite"))
    return REFUSE("rope_type llama3 cannot be written as GGUF for %s; llama.cpp does not read its factors", type);
  if (e->type == RFR_ROPE_LONGROPE && !is(a, "phi3"))
    return REFUSE("rope_type longrope cannot be written as GGUF for %s", type);
  if (e->type != RFR_ROPE_YARN) return RFR_OK;
  const double usual = e->factor <= 1.0 ? 1.0 : 0.1 * log(e->factor) + 1.0;
  if (is(a, "gemma3") || e->beta_fast != 32.0 || e->beta_slow != 1.0 || !e->truncate ||
      fabs(e->attention_factor - usual) > 1e-6)
    return REFUSE(
        "rope_type yarn cannot be written as GGUF for %s unless beta_fast is 32, beta_slow 1, truncate true and "
        "attention_factor the usual one",
        type);
  return RFR_OK;
}

static rfr_status check_gemma(const rfr_model_config *c, const char *a) {
  const bool three = is(a, "gemma3");
  if (!three && !is(a, "gemma2")) return RFR_OK;
  const double scalar =
      c->layers == (three ? 62 : 46) ? (double)(c->hidden_size / c->heads) : (double)c->head_dim; /* the 27B models */
  if (c->attention_scalar > 0.0 && c->attention_scalar != scalar)
    return REFUSE("query_pre_attn_scalar %g cannot be written as GGUF; llama.cpp computes with %g", c->attention_scalar,
                  scalar);
  if (three && c->local_theta != 10000.0)
    return REFUSE("rope_local_base_freq %g cannot be written as GGUF; llama.cpp computes with 10000", c->local_theta);
  if (three && c->logit_cap > 0.0)
    return REFUSE("final_logit_softcapping of gemma3_text cannot be written as GGUF; llama.cpp ignores it");
  return RFR_OK;
}

rfr_status rfi_gguf_limits(const rfr_model_config *c, const char *architecture, const char *type) {
  const bool biases = is(architecture, "llama") || is(architecture, "granite") || is(architecture, "gpt2");
  RFI_TRY(check_layers(c, architecture, type));
  RFI_TRY(check_experts(c, architecture, type));
  RFI_TRY(check_rope(c, architecture, type));
  RFI_TRY(check_gemma(c, architecture));
  if ((c->attention_bias || c->mlp_bias) && !biases)
    return REFUSE("%s of %s cannot be written as GGUF; llama.cpp has no such biases",
                  c->attention_bias ? "attention_bias" : "mlp_bias", type);
  if (c->tie_embeddings && is(architecture, "olmo2"))
    return REFUSE("tie_word_embeddings of olmo2 cannot be written as GGUF; llama.cpp needs an LM head");
  return RFR_OK;
}
