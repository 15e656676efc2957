/* SPDX-License-Identifier: Apache-2.0
 *
 * Sources: names and metadata keys of llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
 */
#include "model/gguf_names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"

static const rfi_gguf_architecture architectures[] = {
    {"llama", "llama", "mixtral", .interleaved = true},
    {"qwen2", "qwen2", NULL},
    {"qwen3", "qwen3", NULL},
    {"qwen2moe", NULL, "qwen2_moe"},
    {"qwen3moe", NULL, "qwen3_moe"},
    {"gemma", "gemma", NULL, .norm_plus_one = true},
    {"gemma2", "gemma2", NULL, .norm_plus_one = true, .post_norms = true},
    {"gemma3", "gemma3_text", NULL, .norm_plus_one = true, .post_norms = true},
    {"phi3", "phi3", NULL},
    {"olmo2", "olmo2", NULL, .post_norms = true},
    {"smollm3", "smollm3", NULL, .interleaved = true},
    {"granite", "granite", NULL, .interleaved = true},
    {"gpt2", "gpt2", NULL, .transposed = true}};

const rfi_gguf_architecture *rfi_gguf_architecture_at(size_t i) {
  return i < sizeof architectures / sizeof architectures[0] ? &architectures[i] : NULL;
}

static const rfi_gguf_hyperparameter of_llama[] = {
    {"block_count", "num_hidden_layers", RFI_GGUF_SIZE},
    {"context_length", "max_position_embeddings", RFI_GGUF_SIZE},
    {"embedding_length", "hidden_size", RFI_GGUF_SIZE},
    {"feed_forward_length", "intermediate_size", RFI_GGUF_SIZE},
    {"attention.head_count", "num_attention_heads", RFI_GGUF_SIZE},
    {"attention.head_count_kv", "num_key_value_heads", RFI_GGUF_SIZE},
    {"attention.key_length", "head_dim", RFI_GGUF_SIZE},
    {"attention.value_length", NULL, RFI_GGUF_CHECKED},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps", RFI_GGUF_REAL},
    {"attention.causal", NULL, RFI_GGUF_CHECKED},
    {"attention.sliding_window", "sliding_window", RFI_GGUF_SIZE},
    {"attn_logit_softcapping", "attn_logit_softcapping", RFI_GGUF_REAL},
    {"final_logit_softcapping", "final_logit_softcapping", RFI_GGUF_REAL},
    {"rope.freq_base", "rope_theta", RFI_GGUF_REAL},
    {"rope.dimension_count", NULL, RFI_GGUF_CHECKED},
    {"rope.scaling.type", NULL, RFI_GGUF_CHECKED},
    {"rope.scaling.factor", NULL, RFI_GGUF_CHECKED},
    {"rope.scaling.original_context_length", NULL, RFI_GGUF_CHECKED},
    {"rope.scaling.finetuned", NULL, RFI_GGUF_CHECKED},
    {"rope.scaling.attn_factor", NULL, RFI_GGUF_CHECKED},
    {"logit_scale", "logits_scaling", RFI_GGUF_REAL},
    {"residual_scale", "residual_multiplier", RFI_GGUF_REAL},
    {"embedding_scale", "embedding_multiplier", RFI_GGUF_REAL},
    {"attention.scale", "attention_multiplier", RFI_GGUF_REAL},
    {"vocab_size", NULL, RFI_GGUF_CHECKED},
    {"expert_count", NULL, RFI_GGUF_CHECKED},
    {"expert_used_count", "num_experts_per_tok", RFI_GGUF_SIZE},
    {"expert_feed_forward_length", "moe_intermediate_size", RFI_GGUF_SIZE},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size", RFI_GGUF_SIZE}};

static const rfi_gguf_hyperparameter of_gpt2[] = {
    {"block_count", "n_layer", RFI_GGUF_SIZE},
    {"context_length", "n_positions", RFI_GGUF_SIZE},
    {"embedding_length", "n_embd", RFI_GGUF_SIZE},
    {"feed_forward_length", "n_inner", RFI_GGUF_SIZE},
    {"attention.head_count", "n_head", RFI_GGUF_SIZE},
    {"attention.layer_norm_epsilon", "layer_norm_epsilon", RFI_GGUF_REAL}};

const rfi_gguf_hyperparameter *rfi_gguf_hyperparameters(const rfi_gguf_architecture *a, size_t *n) {
  *n = a->transposed ? sizeof of_gpt2 / sizeof of_gpt2[0] : sizeof of_llama / sizeof of_llama[0];
  return a->transposed ? of_gpt2 : of_llama;
}

rfi_gguf_change rfi_gguf_change_of(const rfi_gguf_architecture *a, const char *name, int rank) {
  if (a->norm_plus_one && rfi_ends_in(name, "norm.weight")) return RFI_GGUF_MINUS_ONE;
  if (a->interleaved && (strstr(name, ".q_proj.") || strstr(name, ".k_proj."))) return RFI_GGUF_INTERLEAVED;
  if (a->transposed && rank == 2 && strstr(name, ".h.")) return RFI_GGUF_TRANSPOSED;
  return RFI_GGUF_AS_IS;
}

/* Modules without ".weight" or ".bias". Those of a layer lack "model.layers.N." and "blk.N.". */
typedef struct module {
  const char *hf, *gguf;
} module;
static const module outer[] = {
    {"model.embed_tokens", "token_embd"}, {"model.norm", "output_norm"},        {"lm_head", "output"},
    {"transformer.wte", "token_embd"},    {"transformer.wpe", "position_embd"}, {"transformer.ln_f", "output_norm"}};
static const module inner[] = {{"input_layernorm", "attn_norm"},
                               {"self_attn.q_proj", "attn_q"},
                               {"self_attn.k_proj", "attn_k"},
                               {"self_attn.v_proj", "attn_v"},
                               {"self_attn.o_proj", "attn_output"},
                               {"self_attn.qkv_proj", "attn_qkv"},
                               {"self_attn.q_norm", "attn_q_norm"},
                               {"self_attn.k_norm", "attn_k_norm"},
                               {"post_attention_layernorm", "ffn_norm"},
                               {"mlp.gate_proj", "ffn_gate"},
                               {"mlp.up_proj", "ffn_up"},
                               {"mlp.gate_up_proj", "ffn_up"},
                               {"mlp.down_proj", "ffn_down"},
                               {"mlp.gate", "ffn_gate_inp"},
                               {"block_sparse_moe.gate", "ffn_gate_inp"},
                               {"mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
                               {"mlp.shared_expert.up_proj", "ffn_up_shexp"},
                               {"mlp.shared_expert.down_proj", "ffn_down_shexp"},
                               {"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
                               {"ln_1", "attn_norm"},
                               {"attn.c_attn", "attn_qkv"},
                               {"attn.c_proj", "attn_output"},
                               {"ln_2", "ffn_norm"},
                               {"mlp.c_fc", "ffn_up"},
                               {"mlp.c_proj", "ffn_down"}};
/* Of architectures with norms after the branches; these rows come first. */
static const module inner_post_norms[] = {{"post_attention_layernorm", "post_attention_norm"},
                                          {"pre_feedforward_layernorm", "ffn_norm"},
                                          {"post_feedforward_layernorm", "post_ffw_norm"}};
static const module of_expert[] = {{"gate_proj", "ffn_gate"}, {"up_proj", "ffn_up"}, {"down_proj", "ffn_down"},
                                   {"w1", "ffn_gate"},        {"w3", "ffn_up"},      {"w2", "ffn_down"}};

static const char *find_module(const module *rows, size_t n, const char *name, size_t length) {
  for (size_t i = 0; i < n; i++)
    if (strlen(rows[i].hf) == length && strncmp(rows[i].hf, name, length) == 0) return rows[i].gguf;
  return NULL;
}
#define FIND(rows, name, length) find_module(rows, sizeof rows / sizeof rows[0], name, length)

/* A number in a name, followed by a dot; *rest: the text after the dot. -1: there is none. */
static int64_t number_at(const char **text) {
  int64_t x = 0;
  const char *p = *text;
  for (; *p >= '0' && *p <= '9' && x < INT32_MAX; p++) x = 10 * x + (*p - '0');
  if (p == *text || *p != '.') return -1;
  *text = p + 1;
  return x;
}

bool rfi_gguf_translate(const rfi_gguf *g, const rfi_gguf_architecture *a, const char *name, char *out, size_t size,
                        int64_t *expert) {
  static const char *const layers[] = {"model.layers.", "transformer.h."}, *const experts[] = {
                                                                               "mlp.experts.",
                                                                               "block_sparse_moe.experts."};
  const char *suffix = strrchr(name, '.'), *found = NULL;
  *expert = -1;
  if (!suffix || (strcmp(suffix, ".weight") != 0 && strcmp(suffix, ".bias") != 0)) return false;
  if ((found = FIND(outer, name, (size_t)(suffix - name)))) {
    snprintf(out, size, "%s%s", found, suffix);
    return true;
  }
  for (size_t i = 0; i < 2; i++) {
    if (strncmp(name, layers[i], strlen(layers[i])) != 0) continue;
    const char *rest = name + strlen(layers[i]);
    const int64_t layer = number_at(&rest);
    if (layer < 0 || rest > suffix) return false;
    for (size_t k = 0; k < 2; k++) {
      if (strncmp(rest, experts[k], strlen(experts[k])) != 0) continue;
      const char *part = rest + strlen(experts[k]);
      *expert = number_at(&part);
      if (*expert < 0 || part > suffix || !(found = FIND(of_expert, part, (size_t)(suffix - part)))) return false;
      /* Old files have one tensor for each expert. */
      snprintf(out, size, "blk.%" PRId64 ".%s.%" PRId64 "%s", layer, found, *expert, suffix);
      if (g && rfi_gguf_tensor_find(g, out)) *expert = -1;
      else snprintf(out, size, "blk.%" PRId64 ".%s_exps%s", layer, found, suffix);
      return true;
    }
    const size_t length = (size_t)(suffix - rest);
    if (a->post_norms) found = FIND(inner_post_norms, rest, length);
    if (!found) found = FIND(inner, rest, length);
    if (!found) return false;
    snprintf(out, size, "blk.%" PRId64 ".%s%s", layer, found, suffix);
    return true;
  }
  return false;
}

double rfi_gguf_llama3_factor(double inverse_frequency, double factor, double low, double high, double original) {
  const double wave = 2.0 * 3.14159265358979323846 * inverse_frequency;
  if (wave < original / high) return 1.0;
  if (wave > original / low) return factor;
  const double smooth = (original / wave - low) / (high - low);
  return 1.0 / ((1.0 - smooth) / factor + smooth);
}
