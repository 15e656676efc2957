/* SPDX-License-Identifier: Apache-2.0
 *
 * Model descriptions: defaults, checks, names; and the initial values of parameters.
 *
 * An initial value is a pure function of (seed, name, element): neither the order of parameters nor the number of
 * threads changes it. Normal numbers are sums of four uniform 16-bit integers from the counter-based generator, scaled
 * once. This avoids log and cos, whose last bit differs between C libraries, and ends the tails at 3.46 standard
 * deviations, as truncated initializations do.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "core/rng.h"
#include "nn/adapter.h"

static const char *const type_names[] = {
    [RFR_MODEL_LLAMA] = "llama",     [RFR_MODEL_GPT2] = "gpt2",     [RFR_MODEL_GEMMA] = "gemma",
    [RFR_MODEL_GEMMA2] = "gemma2",   [RFR_MODEL_GEMMA3] = "gemma3", [RFR_MODEL_OLMO2] = "olmo2",
    [RFR_MODEL_SMOLLM3] = "smollm3", [RFR_MODEL_PHI3] = "phi3",     [RFR_MODEL_GRANITE] = "granite"};
enum { TYPES = sizeof type_names / sizeof type_names[0] };

const char *rfr_model_type_name(rfr_model_type type) {
  return type_names[(unsigned)type < TYPES ? type : RFR_MODEL_LLAMA];
}

rfr_model_config rfr_model_config_default(rfr_model_type type) {
  rfr_model_config c = {.size = sizeof c,
                        .type = type,
                        .vocab_size = 256,
                        .hidden_size = 256,
                        .intermediate_size = 1024,
                        .layers = 4,
                        .heads = 4,
                        .kv_heads = 4,
                        .head_dim = 64,
                        .max_positions = 1024,
                        .norm_eps = 1e-5,
                        .rope_theta = 10000.0,
                        .rope_scaling = {.factor = 1.0},
                        .init_std = 0.02,
                        .dtype = RFR_F32};
  /* three matrices: 8/3 C, rounded up to a multiple of 64 */
  if (type != RFR_MODEL_GPT2 && !rfi_is_gemma(&c)) c.intermediate_size = 704;
  if (type == RFR_MODEL_GPT2) c.tie_embeddings = 1;
  if (rfi_is_gemma(&c)) {
    c.tie_embeddings = 1;
    c.norm_eps = 1e-6;
  }
  if (type == RFR_MODEL_GEMMA2) { /* its published caps, and a window in every second layer */
    c.attention_cap = 50.0;
    c.logit_cap = 30.0;
    c.window = 512;
    for (size_t i = 0; i < sizeof c.no_window / sizeof c.no_window[0]; i++) c.no_window[i] = 0xAAAAAAAAAAAAAAAAu;
  }
  if (type == RFR_MODEL_GEMMA3) { /* a window in five of six layers */
    c.rope_theta = 1e6;
    c.local_theta = 1e4;
    c.window = 512;
    for (int64_t l = 5; l < RFR_MAX_LAYERS; l += 6) c.no_window[l / 64] |= (uint64_t)1 << (l % 64);
  }
  if (type == RFR_MODEL_GEMMA3 || type == RFR_MODEL_OLMO2) c.qk_norm = 1;
  for (int64_t l = 3; type == RFR_MODEL_SMOLLM3 && l < RFR_MAX_LAYERS; l += 4)
    c.no_rope[l / 64] |= (uint64_t)1 << (l % 64);
  return c;
}

static rfr_status check_experts(const rfr_model_config *c) {
  const bool any =
      c->experts_per_token || c->expert_size || c->shared_size || c->balance_loss != 0.0 || c->z_loss != 0.0;
  for (size_t i = 0; i < sizeof c->mlp_only / sizeof *c->mlp_only && c->experts == 0; i++)
    if (c->mlp_only[i] != 0)
      return rfi_fail(RFI_E_MODEL_CONFIG, "mlp_only_layers and decoder_sparse_step need a model with experts");
  if (c->experts == 0 && !any) return RFR_OK;
  if (c->experts == 0 && (c->balance_loss != 0.0 || c->z_loss != 0.0))
    return rfi_fail(RFI_E_MODEL_CONFIG, "router_aux_loss_coef and router_z_loss_coef need a model with experts");
  if (c->experts < 1 || c->experts > RFI_MOST_EXPERTS || c->experts_per_token < 1 || c->experts_per_token > c->experts)
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "num_experts is %lld and num_experts_per_tok is %lld; both must be at least 1, and "
                    "num_experts_per_tok at most num_experts",
                    (long long)c->experts, (long long)c->experts_per_token);
  if (c->expert_ranks > 1 && c->experts % c->expert_ranks != 0)
    return rfi_fail(RFI_E_MODEL_CONFIG, "num_experts is %lld, which %d ranks do not divide", (long long)c->experts,
                    c->expert_ranks);
  if (c->expert_size < 1 || c->expert_size > RFI_MOST_INNER || c->shared_size < 0 || c->shared_size > RFI_MOST_INNER)
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "moe_intermediate_size is %lld and shared_expert_intermediate_size is %lld; the first must be 1 to "
                    "16777216, the second 0 to 16777216",
                    (long long)c->expert_size, (long long)c->shared_size);
  if (c->type != RFR_MODEL_LLAMA || c->mlp_bias || c->attention_bias)
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "experts need a model of Mixtral's or Qwen's form, without attention_bias and mlp_bias; this is %s",
                    rfr_model_type_name(c->type));
  if ((c->shared_size > 0) != (c->qkv_bias != 0))
    return rfi_fail(RFI_E_MODEL_CONFIG, "a shared expert (shared_expert_intermediate_size) and biases on q, k and v "
                                        "need each other: both are Qwen2-MoE's");
  if (!c->expert_norm && !c->qkv_bias && !c->qk_norm)
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "norm_topk_prob must be true in a Mixtral model: its routing weights are normalized");
  const int64_t with = rfr_model_expert_layers(c);
  if (with == 0 || (with < c->layers && !c->qkv_bias && !c->qk_norm))
    return rfi_fail(
        RFI_E_MODEL_CONFIG,
        "%lld of %lld layers have experts (mlp_only_layers, decoder_sparse_step); at least one must, and in a Mixtral "
        "model all",
        (long long)with, (long long)c->layers);
  for (int64_t l = 0; c->window > 0 && !c->qkv_bias && !c->qk_norm && l < c->layers; l++)
    if (!rfr_model_has_window(c, l))
      return rfi_fail(RFI_E_MODEL_CONFIG, "layer %lld has no sliding window; in a Mixtral model all layers have it",
                      (long long)l);
  if (!(c->balance_loss >= 0.0) || !(c->z_loss >= 0.0) || !isfinite(c->balance_loss) || !isfinite(c->z_loss))
    return rfi_fail(RFI_E_MODEL_CONFIG, "router_aux_loss_coef and router_z_loss_coef must not be negative");
  return RFR_OK;
}

static bool is_positive(double x) { return x > 0.0 && isfinite(x); }

static rfr_status check_rope(const rfr_model_config *c) {
  const rfr_rope_extension *e = &c->rope_extension;
  if (c->rotary_dim != 0 && (!rfi_is_packed(c) || c->rotary_dim < 2 || c->rotary_dim > c->head_dim ||
                             c->rotary_dim % 2 != 0 || c->rotary_dim > 2 * RFR_MAX_LIST))
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "partial_rotary_factor rotates %lld of %lld columns of a head; the number must be even, 2 to %d, "
                    "and only phi3 may have it",
                    (long long)c->rotary_dim, (long long)c->head_dim, 2 * RFR_MAX_LIST);
  if (e->type == RFR_ROPE_PLAIN) return RFR_OK;
  const int64_t pairs = (c->rotary_dim > 0 ? c->rotary_dim : c->head_dim) / 2,
                most = e->type == RFR_ROPE_YARN ? RFR_MAX_LIST : RFR_MAX_FACTORS;
  if ((e->type != RFR_ROPE_YARN && e->type != RFR_ROPE_LONGROPE) || c->type == RFR_MODEL_GPT2 ||
      c->rope_scaling.factor != 1.0)
    return rfi_fail(RFI_E_MODEL_CONFIG, "rope_extension: unknown type %d, an additional scaling, or a gpt2 model",
                    (int)e->type);
  if (pairs > most)
    return rfi_fail(RFI_E_MODEL_CONFIG, "rope_scaling: %lld frequencies; at most %lld are supported", (long long)pairs,
                    (long long)most);
  if (e->original < 1 || !is_positive(e->attention_factor))
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "rope_scaling: original_max_position_embeddings is %lld and attention_factor %g; both must be "
                    "positive",
                    (long long)e->original, e->attention_factor);
  if (e->type == RFR_ROPE_YARN &&
      (!is_positive(e->factor) || !is_positive(e->beta_fast) || !is_positive(e->beta_slow) || !(c->rope_theta > 1.0)))
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "rope_scaling: factor is %g, beta_fast %g and beta_slow %g; they must be positive, and rope_theta "
                    "above 1",
                    e->factor, e->beta_fast, e->beta_slow);
  for (int64_t d = 0; e->type == RFR_ROPE_LONGROPE && d < pairs; d++)
    if (!is_positive(e->short_factor[d]) || !is_positive(e->long_factor[d]))
      return rfi_fail(RFI_E_MODEL_CONFIG,
                      "rope_scaling: short_factor[%lld] is %g and long_factor[%lld] is %g; they must be positive",
                      (long long)d, e->short_factor[d], (long long)d, e->long_factor[d]);
  double frequency[RFR_MAX_LIST], scale;
  for (int k = 0; k < 2; k++)
    for (int i = rfi_rope_frequencies(c, k ? INT64_MAX : 1, frequency, &scale) - 1; i >= 0; i--)
      if (!isfinite(frequency[i]))
        return rfi_fail(RFI_E_MODEL_CONFIG, "rope_scaling: the frequency of pair %d is not finite", i);
  return RFR_OK;
}

/* Fields that only some model types have. */
static rfr_status check_form(const rfr_model_config *c) {
  const bool gpt2 = c->type == RFR_MODEL_GPT2, gemma3 = c->type == RFR_MODEL_GEMMA3,
             capped = c->type == RFR_MODEL_GEMMA2 || gemma3, llama = c->type == RFR_MODEL_LLAMA;
  const bool windows = llama || capped || c->type == RFR_MODEL_SMOLLM3 || c->type == RFR_MODEL_PHI3;
  if (c->window > 0 && (!windows || (llama && ((!c->qk_norm && c->attention_bias) || c->mlp_bias))))
    return rfi_fail(
        RFI_E_MODEL_CONFIG,
        "sliding_window is not supported for gpt2, gemma, olmo2 and granite; for llama not with mlp_bias, nor with "
        "attention_bias unless the model has q/k norms");
  if (rfi_is_gemma(c) && (!c->tie_embeddings || c->qkv_bias || c->mlp_bias))
    return rfi_fail(RFI_E_MODEL_CONFIG, "%s needs tied embeddings and has no qkv_bias or mlp_bias",
                    rfr_model_type_name(c->type));
  if (!llama && (c->qk_norm != 0) != (gemma3 || c->type == RFR_MODEL_OLMO2))
    return rfi_fail(RFI_E_MODEL_CONFIG, "%s: gemma3 and olmo2 have q/k norms, and no other type but llama may",
                    rfr_model_type_name(c->type));
  if ((!llama && c->qkv_bias) || (c->type == RFR_MODEL_OLMO2 && c->mlp_bias) ||
      (rfi_is_packed(c) && (c->attention_bias || c->mlp_bias)))
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "%s has no biases on q, k and v alone; olmo2 has none in the MLP, and phi3 none at all",
                    rfr_model_type_name(c->type));
  RFI_TRY(check_rope(c));
  const struct {
    const char *name;
    double value;
    bool may;
  } factors[] = {{"query_pre_attn_scalar", c->attention_scalar, capped},
                 {"attn_logit_softcapping", c->attention_cap, c->type == RFR_MODEL_GEMMA2},
                 {"final_logit_softcapping", c->logit_cap, capped},
                 {"rope_local_base_freq", c->local_theta, gemma3},
                 {"attention_multiplier", c->attention_multiplier, c->type == RFR_MODEL_GRANITE},
                 {"embedding_multiplier", c->embedding_multiplier, c->type == RFR_MODEL_GRANITE},
                 {"residual_multiplier", c->residual_multiplier, c->type == RFR_MODEL_GRANITE},
                 {"logits_scaling", c->logits_scaling, c->type == RFR_MODEL_GRANITE}};
  for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
    if (!(factors[i].value >= 0.0) || !isfinite(factors[i].value))
      return rfi_fail(RFI_E_MODEL_CONFIG, "%s is %g; it must not be negative", factors[i].name, factors[i].value);
    if (factors[i].value > 0.0 && !factors[i].may)
      return rfi_fail(RFI_E_MODEL_CONFIG, "%s has no %s", rfr_model_type_name(c->type), factors[i].name);
  }
  for (int64_t l = 0; !gpt2 && c->type != RFR_MODEL_SMOLLM3 && l < c->layers; l++)
    if (!rfr_model_has_rope(c, l))
      return rfi_fail(RFI_E_MODEL_CONFIG, "layer %lld has no RoPE; only smollm3 has such layers", (long long)l);
  return RFR_OK;
}

rfr_status rfr_model_config_check(const rfr_model_config *c) {
  if (c->size != sizeof *c) return rfi_fail(RFI_E_ARGUMENT, "rfr_model_config: size %zu", c->size);
  if ((unsigned)c->type >= TYPES) return rfi_fail(RFI_E_MODEL_CONFIG, "unknown model type %d", (int)c->type);
  const struct {
    const char *name;
    int64_t value, most;
  } sizes[] = {{"vocab_size", c->vocab_size, INT32_MAX},
               {"hidden_size", c->hidden_size, RFI_MOST_WIDTH},
               {"intermediate_size", c->intermediate_size, RFI_MOST_INNER},
               {"num_hidden_layers", c->layers, RFR_MAX_LAYERS},
               {"num_attention_heads", c->heads, RFI_MOST_HEADS},
               {"num_key_value_heads", c->kv_heads, RFI_MOST_HEADS},
               {"head_dim", c->head_dim, RFI_MOST_HEADS},
               {"max_position_embeddings", c->max_positions, INT32_MAX}};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    if (sizes[i].value < 1 || sizes[i].value > sizes[i].most)
      return rfi_fail(RFI_E_MODEL_CONFIG, "%s is %lld; it must be 1 to %lld", sizes[i].name, (long long)sizes[i].value,
                      (long long)sizes[i].most);
  if (c->heads % c->kv_heads != 0)
    return rfi_fail(RFI_E_MODEL_CONFIG, "num_key_value_heads %lld does not divide num_attention_heads %lld",
                    (long long)c->kv_heads, (long long)c->heads);
  if (c->heads * c->head_dim > RFI_MOST_INNER)
    return rfi_fail(RFI_E_MODEL_CONFIG, "num_attention_heads %lld x head_dim %lld is more than %d", (long long)c->heads,
                    (long long)c->head_dim, RFI_MOST_INNER);
  RFI_TRY(check_experts(c));
  if (c->experts * c->layers > RFI_MOST_EXPERTS_IN_ALL)
    return rfi_fail(RFI_E_MODEL_CONFIG, "num_experts %lld x num_hidden_layers %lld is more than %d",
                    (long long)c->experts, (long long)c->layers, RFI_MOST_EXPERTS_IN_ALL);
  if (rfi_model_elements(c) > RFI_MOST_ELEMENTS)
    return rfi_fail(RFI_E_MODEL_CONFIG, "the model has %.3g parameters; at most %.3g are supported",
                    rfi_model_elements(c), RFI_MOST_ELEMENTS);
  if (c->type == RFR_MODEL_GPT2 && (c->heads * c->head_dim != c->hidden_size || c->kv_heads != c->heads))
    return rfi_fail(
        RFI_E_MODEL_CONFIG,
        "gpt2: hidden_size %lld must be num_attention_heads %lld x head_dim %lld, with as many key and value heads",
        (long long)c->hidden_size, (long long)c->heads, (long long)c->head_dim);
  if (c->type != RFR_MODEL_GPT2 && c->head_dim % 2 != 0)
    return rfi_fail(RFI_E_MODEL_CONFIG, "%s: head_dim %lld is odd; RoPE rotates pairs", rfr_model_type_name(c->type),
                    (long long)c->head_dim);
  const rfr_rope_scaling *r = &c->rope_scaling;
  if (!(r->factor > 0.0) || r->original < 0 || (r->original > 0 && !(r->low > 0.0 && r->high > r->low)))
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "rope_scaling: factor must be positive, and low_freq_factor between 0 and high_freq_factor");
  if (c->window < 0 || c->window > INT32_MAX || c->longest < 0)
    return rfi_fail(RFI_E_MODEL_CONFIG, "sliding_window %lld or longest %lld is out of range", (long long)c->window,
                    (long long)c->longest);
  RFI_TRY(check_form(c));
  if (c->type == RFR_MODEL_GPT2 && (c->qkv_bias || c->qk_norm || r->factor != 1.0))
    return rfi_fail(RFI_E_MODEL_CONFIG, "gpt2 has no qkv_bias, q/k norm or rope_scaling");
  if ((c->qkv_bias && (c->qk_norm || c->attention_bias)) || (c->mlp_bias && (c->qkv_bias || c->qk_norm)))
    return rfi_fail(RFI_E_MODEL_CONFIG,
                    "only one of qkv_bias, q/k norm and mlp_bias may be set, and qkv_bias not with attention_bias");
  if (!(c->dropout >= 0.0 && c->dropout < 1.0))
    return rfi_fail(RFI_E_MODEL_CONFIG, "dropout %g is outside [0, 1)", c->dropout);
  if (!(c->norm_eps > 0.0) || !(c->rope_theta > 0.0) || !(c->init_std >= 0.0))
    return rfi_fail(RFI_E_MODEL_CONFIG, "norm_eps and rope_theta must be positive, and init_std not negative");
  if (c->base_format > RFR_QUANT_FP8)
    return rfi_fail(RFI_E_MODEL_CONFIG, "base_format is %d; weights can be stored in nf4, int8 and fp8",
                    (int)c->base_format);
  if (c->dtype != RFR_F32 && c->dtype != RFR_BF16 && c->dtype != RFR_F16)
    return rfi_fail(RFI_E_MODEL_CONFIG, "dtype %s is not supported for parameters; use f32, bf16 or f16",
                    rfr_dtype_name(c->dtype));
  if (c->adapter && c->adapter->base_count + c->adapter->count != rfr_model_parameter_count(c))
    return rfi_fail(RFI_E_MODEL_CONFIG, "the adapter was made for another model: it has %d parameters, not %d",
                    c->adapter->base_count, rfr_model_parameter_count(c) - c->adapter->count);
  return RFR_OK;
}

int rfr_model_has_window(const rfr_model_config *c, int64_t layer) {
  return c->window > 0 && layer >= 0 && layer < RFR_MAX_LAYERS && !(c->no_window[layer / 64] >> (layer % 64) & 1);
}

int rfr_model_has_rope(const rfr_model_config *c, int64_t layer) {
  return c->type != RFR_MODEL_GPT2 && layer >= 0 && layer < RFR_MAX_LAYERS &&
         !(c->no_rope[layer / 64] >> (layer % 64) & 1);
}

int rfr_model_has_experts(const rfr_model_config *c, int64_t layer) {
  return c->experts > 0 && layer >= 0 && layer < RFR_MAX_LAYERS && !(c->mlp_only[layer / 64] >> (layer % 64) & 1);
}

int64_t rfr_model_expert_layers(const rfr_model_config *c) {
  int64_t n = 0;
  for (int64_t l = 0; l < c->layers; l++) n += rfr_model_has_experts(c, l);
  return n;
}

/* FNV-1a. The name selects the random stream of a parameter. */
static uint64_t name_hash(const char *s) {
  uint64_t h = 0xCBF29CE484222325u;
  for (; *s; s++) h = (h ^ (unsigned char)*s) * 0x100000001B3u;
  return h;
}

static void store(rfr_dtype dtype, void *data, int64_t i, float x) {
  if (dtype == RFR_F32) ((float *)data)[i] = x;
  else ((uint16_t *)data)[i] = (uint16_t)rfr_float_to_bits(dtype, x);
}

static float normal(uint32_t a, uint32_t b, float scale) {
  int32_t sum = (int32_t)((a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16)) - 2 * 65535;
  return (float)sum * scale;
}

/* Uniform between -bound and bound: the midpoints of 2^24 equal intervals, which are exact in f32. */
static float centred(uint32_t a, float bound) { return ((float)(a >> 8) + 0.5f - 8388608.0f) * 0x1p-23f * bound; }

enum { MANY = 1 << 14 }; /* with fewer numbers, threads are slower */

rfr_status rfr_parameter_fill(const rfr_parameter *p, uint64_t seed, rfr_dtype dtype, int threads, void *data) {
  if (dtype != RFR_F32 && dtype != RFR_BF16 && dtype != RFR_F16)
    return rfi_fail(RFI_E_ARGUMENT, "%s: initial values of dtype %s; use f32, bf16 or f16", p->name,
                    rfr_dtype_name(dtype));
  if (threads < 1 || threads > RFI_MAX_THREADS)
    return rfi_fail(RFI_E_ARGUMENT, "%s: %d threads, not 1 to %d", p->name, threads, RFI_MAX_THREADS);
  int64_t n = 1;
  for (int d = 0; d < p->rank; d++) n *= p->shape[d];
  if (p->init != RFR_INIT_NORMAL && p->init != RFR_INIT_UNIFORM) {
    for (int64_t i = 0; i < n; i++) store(dtype, data, i, p->init == RFR_INIT_ONES ? 1.0f : 0.0f);
    return RFR_OK;
  }
  /* A uniform integer below 65536 has variance (65536^2 - 1) / 12; the sum of four has four times that. */
  const bool uniform = p->init == RFR_INIT_UNIFORM;
  const float scale = (float)(uniform ? p->std * sqrt(3.0) : p->std / sqrt((65536.0 * 65536.0 - 1.0) / 3.0));
  const uint64_t key = rfi_stream_key(seed, name_hash(p->name));
  if (n >= MANY) RFI_TRY(rfi_check_fork(threads));
#pragma omp parallel for num_threads(threads) if (n >= MANY)
  for (int64_t i = 0; i < n; i += 2) {
    rfi_u32x4 r = rfi_draw4(key, (uint64_t)(i / 2), 0, 0, 0);
    store(dtype, data, i, uniform ? centred(r.v[0], scale) : normal(r.v[0], r.v[1], scale));
    if (i + 1 < n) store(dtype, data, i + 1, uniform ? centred(r.v[2], scale) : normal(r.v[2], r.v[3], scale));
  }
  return RFR_OK;
}
