/* SPDX-License-Identifier: Apache-2.0
 *
 * Sources: names and metadata keys of llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/constants.py; defaults that
 * the files leave out, of src/llama-model.cpp.
 */
#include "model/gguf_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "core/convert.h"
#include "model/hf.h"

/* ---- architectures ---- */

typedef struct architecture {
  const char *name, *model_type, *moe_type; /* moe_type: with expert_count; NULL: without experts */
  bool interleaved;                         /* rows of q and k */
  bool norm_plus_one;
  bool transposed; /* GEMM weights are Conv1D in the library */
  bool post_norms; /* norms after the branches */
} architecture;

static const architecture architectures[] = {{"llama", "llama", "mixtral", .interleaved = true},
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

static rfr_status find_architecture(const rfi_gguf *g, const architecture **out) {
  const char *text = "", *path = rfi_gguf_path(g);
  size_t n = 0;
  const rfi_gguf_value *v = rfi_gguf_key(g, "general.architecture"), *type = rfi_gguf_key(g, "general.type");
  if (!v) return rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0, "general.architecture is missing");
  if (type) RFI_TRY(rfi_gguf_string(g, type, &text, &n));
  if (type && (n != 5 || memcmp(text, "model", 5) != 0))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0, "general.type is %.*s; the file is not a model",
                       n < 100 ? (int)n : 100, text);
  RFI_TRY(rfi_gguf_string(g, v, &text, &n));
  for (size_t i = 0; i < sizeof architectures / sizeof architectures[0]; i++) {
    *out = &architectures[i];
    if (n == strlen((*out)->name) && memcmp(text, (*out)->name, n) == 0) return RFR_OK;
  }
  return rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0,
                     "general.architecture is %.*s; supported are llama, qwen2, qwen3, qwen2moe, qwen3moe, gemma, "
                     "gemma2, gemma3, phi3, olmo2, smollm3, granite and gpt2",
                     n < 100 ? (int)n : 100, text);
}

/* ---- metadata ---- */

typedef enum use { SIZE, REAL, CHECKED } use; /* CHECKED: read by name below */
typedef struct hyperparameter {
  const char *key, *field; /* of the GGUF file after "ARCHITECTURE.", and of config.json */
  use use;
} hyperparameter;

static const hyperparameter of_llama[] = {
    {"block_count", "num_hidden_layers", SIZE},
    {"context_length", "max_position_embeddings", SIZE},
    {"embedding_length", "hidden_size", SIZE},
    {"feed_forward_length", "intermediate_size", SIZE},
    {"attention.head_count", "num_attention_heads", SIZE},
    {"attention.head_count_kv", "num_key_value_heads", SIZE},
    {"attention.key_length", "head_dim", SIZE},
    {"attention.value_length", NULL, CHECKED},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps", REAL},
    {"attention.causal", NULL, CHECKED},
    {"attention.sliding_window", "sliding_window", SIZE},
    {"attn_logit_softcapping", "attn_logit_softcapping", REAL},
    {"final_logit_softcapping", "final_logit_softcapping", REAL},
    {"rope.freq_base", "rope_theta", REAL},
    {"rope.dimension_count", NULL, CHECKED},
    {"rope.scaling.type", NULL, CHECKED},
    {"rope.scaling.factor", NULL, CHECKED},
    {"rope.scaling.original_context_length", NULL, CHECKED},
    {"rope.scaling.finetuned", NULL, CHECKED},
    {"rope.scaling.attn_factor", NULL, CHECKED},
    {"logit_scale", "logits_scaling", REAL},
    {"residual_scale", "residual_multiplier", REAL},
    {"embedding_scale", "embedding_multiplier", REAL},
    {"attention.scale", "attention_multiplier", REAL},
    {"vocab_size", NULL, CHECKED},
    {"expert_count", NULL, CHECKED},
    {"expert_used_count", "num_experts_per_tok", SIZE},
    {"expert_feed_forward_length", "moe_intermediate_size", SIZE},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size", SIZE}};

static const hyperparameter of_gpt2[] = {
    {"block_count", "n_layer", SIZE},         {"context_length", "n_positions", SIZE},
    {"embedding_length", "n_embd", SIZE},     {"feed_forward_length", "n_inner", SIZE},
    {"attention.head_count", "n_head", SIZE}, {"attention.layer_norm_epsilon", "layer_norm_epsilon", REAL}};

#define FAIL(...) rfi_fail_at(RFI_E_MODEL_CONFIG, rfi_gguf_path(g), 0, __VA_ARGS__)

static const rfi_gguf_value *key_of(const rfi_gguf *g, const architecture *a, const char *key) {
  char name[128];
  snprintf(name, sizeof name, "%s.%s", a->name, key);
  return rfi_gguf_key(g, name);
}

/* A size; an array has one element for each layer, which must be equal. */
static rfr_status get_size(const rfi_gguf *g, const rfi_gguf_value *v, int64_t *out) {
  RFI_TRY(rfi_gguf_int(g, v, 0, out));
  for (int64_t i = 1; i < v->count; i++) {
    int64_t other;
    RFI_TRY(rfi_gguf_int(g, v, i, &other));
    if (other != *out) return FAIL("%s: different values for different layers are not supported", v->key);
  }
  return RFR_OK;
}

/* The files store f32; config.json has the shortest decimal that reads back equal, 1e-05 and not 9.999999747378752e-06.
 */
static double shortest(double x) {
  char text[32];
  double value = x;
  for (int digits = 6; digits <= 9; digits++) {
    rfi_snprintf(text, sizeof text, "%.*g", digits, x);
    value = rfi_strtod(text, NULL);
    if ((float)value == (float)x) return value;
  }
  return x;
}

static json_t *number(double x) {
  return x == floor(x) && fabs(x) < 1e15 ? json_integer((json_int_t)x) : json_real(shortest(x));
}

static rfr_status check_number(const rfi_gguf *g, const architecture *a, const char *key, int64_t wanted) {
  const rfi_gguf_value *v = key_of(g, a, key);
  int64_t value;
  if (!v) return RFR_OK;
  RFI_TRY(get_size(g, v, &value));
  if (value == wanted) return RFR_OK;
  return FAIL("%s is %" PRId64 "; only %" PRId64 " is supported in this model", v->key, value, wanted);
}

/* Every hyperparameter of the file must be known. */
static rfr_status read_keys(const rfi_gguf *g, const architecture *a, const hyperparameter *known, size_t n_known,
                            json_t *o) {
  const size_t prefix = strlen(a->name);
  for (int i = 0; i < rfi_gguf_key_count(g); i++) {
    const rfi_gguf_value *v = rfi_gguf_key_at(g, i);
    if (strcmp(v->key, "split.count") == 0) {
      int64_t parts;
      RFI_TRY(rfi_gguf_int(g, v, 0, &parts));
      if (parts > 1) return FAIL("split.count is %" PRId64 ": models in several files are not supported", parts);
    }
    if (strncmp(v->key, a->name, prefix) != 0 || v->key[prefix] != '.') continue;
    const hyperparameter *h = NULL;
    for (size_t k = 0; k < n_known && !h; k++)
      if (strcmp(v->key + prefix + 1, known[k].key) == 0) h = &known[k];
    if (!h)
      return FAIL("%.100s is not known; a hyperparameter that is ignored could change the model's results", v->key);
    int64_t size;
    double real;
    if (h->use == SIZE) {
      RFI_TRY(get_size(g, v, &size));
      RFI_TRY(rfi_json_set(o, h->field, json_integer(size)));
    } else if (h->use == REAL) {
      RFI_TRY(rfi_gguf_real(g, v, 0, &real));
      RFI_TRY(rfi_json_set(o, h->field, isfinite(real) ? number(real) : NULL));
    }
  }
  return RFR_OK;
}

static int64_t integer_of(const json_t *o, const char *field) {
  return (int64_t)json_integer_value(json_object_get(o, field));
}

/* Llama 3's factors for the frequencies of RoPE: Meta's reference code, apply_scaling. */
static double llama3_factor(double inverse_frequency, double factor, double low, double high, double original) {
  const double wave = 2.0 * 3.14159265358979323846 * inverse_frequency;
  if (wave < original / high) return 1.0;
  if (wave > original / low) return factor;
  const double smooth = (original / wave - low) / (high - low);
  return 1.0 / ((1.0 - smooth) / factor + smooth);
}

/* The converter stores the frequency factors of Llama 3 as a tensor and drops the four numbers that they come from.
 * The largest factor is `factor`; low 1 and high 4 are those of all published models, up to a common multiple of them
 * and the original length, which is a power of two. Lengths that give the same factors give the same model. */
static rfr_status read_rope_factors(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_tensor *t, json_t *o) {
  enum { LOW = 1, HIGH = 4, FIRST_LENGTH = 16, LAST_LENGTH = 1 << 24, MOST = 1 << 16 };
  const int64_t n = integer_of(o, "head_dim") / 2;
  const double theta = json_number_value(json_object_get(o, "rope_theta"));
  double factor = 1.0;
  float *x;
  if (t->elements != n || t->rank != 1 || n > MOST)
    return FAIL("%s does not have head_dim / 2 = %" PRId64 " elements", t->name, n);
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof *x, &x));
  rfr_status s = rfi_gguf_read(g, t, 0, 1, 0, RFR_F32, x);
  for (int64_t i = 0; s == RFR_OK && i < n; i++) factor = (double)x[i] > factor ? (double)x[i] : factor;
  int length = FIRST_LENGTH;
  for (bool same = false; s == RFR_OK && !same; length *= same ? 1 : 2) {
    if (length == LAST_LENGTH || !isfinite(factor))
      s = FAIL("%s does not have the factors of Llama 3's RoPE scaling, which are supported", t->name);
    same = true;
    for (int64_t i = 0; same && i < n; i++) {
      const double wanted = llama3_factor(pow(theta, (double)i / (double)n), factor, LOW, HIGH, length);
      same = fabs((double)x[i] - wanted) <= 1e-4 * wanted;
    }
  }
  rfi_free(ctx, x);
  RFI_TRY(s);
  if (factor == 1.0) return RFR_OK;
  return rfi_json_set(o, "rope_scaling",
                      json_pack("{s:s, s:o, s:f, s:f, s:i}", "rope_type", "llama3", "factor", number(factor),
                                "low_freq_factor", (double)LOW, "high_freq_factor", (double)HIGH,
                                "original_max_position_embeddings", length));
}

static rfr_status read_list(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_tensor *t, json_t *list) {
  float *x;
  if (t->rank != 1 || t->elements > RFR_MAX_FACTORS)
    return FAIL("%s is not a list of at most %d numbers", t->name, RFR_MAX_FACTORS);
  RFI_TRY(RFI_ALLOC(ctx, (size_t)t->elements * sizeof *x, &x));
  rfr_status s = rfi_gguf_read(g, t, 0, 1, 0, RFR_F32, x);
  for (int64_t i = 0; s == RFR_OK && i < t->elements; i++)
    if (!isfinite(x[i]) || json_array_append_new(list, number((double)x[i])) != 0)
      s = FAIL("%s has an element that is not a number", t->name);
  rfi_free(ctx, x);
  return s;
}

/* Phi-3's factors. An attention factor that the lengths give within f32 is left out: the reader of config.json computes
 * it. */
static rfr_status read_longrope(rfr_ctx *ctx, rfi_gguf *g, const architecture *a, json_t *o) {
  static const char *const tensors[] = {"rope_factors_short.weight", "rope_factors_long.weight"}, *const fields[] = {
                                                                                                      "short_factor",
                                                                                                      "long_factor"};
  const rfi_gguf_value *attention = key_of(g, a, "rope.scaling.attn_factor");
  const rfi_gguf_value *original = key_of(g, a, "rope.scaling.original_context_length");
  json_t *scaling = json_pack("{s:s}", "type", "longrope");
  double x = 0.0;
  int64_t length = 0;
  RFI_TRY(rfi_json_set(o, "rope_scaling", scaling));
  for (size_t i = 0; i < 2; i++) {
    const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, tensors[i]);
    json_t *list = json_array();
    RFI_TRY(rfi_json_set(scaling, fields[i], list));
    if (!t) return FAIL("there is no tensor %s", tensors[i]);
    RFI_TRY(read_list(ctx, g, t, list));
  }
  if (original) RFI_TRY(rfi_gguf_int(g, original, 0, &length));
  if (original) RFI_TRY(rfi_json_set(o, "original_max_position_embeddings", json_integer(length)));
  if (attention) RFI_TRY(rfi_gguf_real(g, attention, 0, &x));
  const double ratio = (double)integer_of(o, "max_position_embeddings") / (double)length;
  const double usual = ratio > 1.0 ? sqrt(1.0 + log(ratio) / log((double)length)) : 1.0;
  if (!attention || !isfinite(x) || fabs(x - usual) <= 1e-6 * usual) return RFR_OK;
  return rfi_json_set(scaling, "attention_factor", number(x));
}

/* Phi-3 rotates the first columns of a head. */
static rfr_status read_rotated(const rfi_gguf *g, const architecture *a, json_t *o) {
  const rfi_gguf_value *v = key_of(g, a, "rope.dimension_count");
  const int64_t head_dim = integer_of(o, "head_dim");
  int64_t rotated = head_dim;
  if (strcmp(a->name, "phi3") != 0) return check_number(g, a, "rope.dimension_count", head_dim);
  if (v) RFI_TRY(get_size(g, v, &rotated));
  if (rotated == head_dim) return RFR_OK;
  if (rotated < 2 || rotated > head_dim)
    return FAIL("%s is %" PRId64 "; a head has %" PRId64, v->key, rotated, head_dim);
  double part = (double)rotated / (double)head_dim;
  if ((int64_t)((double)head_dim * part) < rotated) part = nextafter(part, 1.0); /* its reader rounds down */
  return rfi_json_set(o, "partial_rotary_factor", json_real(part));
}

static rfr_status read_rope(rfr_ctx *ctx, rfi_gguf *g, const architecture *a, json_t *o) {
  const rfi_gguf_value *type = key_of(g, a, "rope.scaling.type"), *factor = key_of(g, a, "rope.scaling.factor");
  const rfi_gguf_value *original = key_of(g, a, "rope.scaling.original_context_length");
  const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, "rope_freqs.weight");
  const char *text = "none";
  size_t n = 4;
  if (!json_object_get(o, "rope_theta")) RFI_TRY(rfi_json_set(o, "rope_theta", json_integer(10000)));
  RFI_TRY(read_rotated(g, a, o));
  if (rfi_gguf_tensor_find(g, "rope_factors_long.weight")) {
    if (strcmp(a->name, "phi3") == 0) return read_longrope(ctx, g, a, o);
    return FAIL("rope_factors_long.weight (longrope) is not supported for this architecture");
  }
  if (t) return read_rope_factors(ctx, g, t, o);
  if (type) RFI_TRY(rfi_gguf_string(g, type, &text, &n));
  if (n == 4 && memcmp(text, "none", 4) == 0) return RFR_OK;
  /* Types that are not supported are refused by the reader of config.json. */
  json_t *scaling = json_object();
  RFI_TRY(rfi_json_set(o, "rope_scaling", scaling));
  RFI_TRY(rfi_json_set(scaling, "rope_type", json_stringn(text, n)));
  if (factor) {
    double x;
    RFI_TRY(rfi_gguf_real(g, factor, 0, &x));
    RFI_TRY(rfi_json_set(scaling, "factor", isfinite(x) ? number(x) : NULL));
  }
  if (!original) return RFR_OK;
  int64_t length;
  RFI_TRY(rfi_gguf_int(g, original, 0, &length));
  return rfi_json_set(scaling, "original_max_position_embeddings", json_integer(length));
}

/* The fields of all Llama-like models. */
static rfr_status read_llama(rfr_ctx *ctx, rfi_gguf *g, const architecture *a, bool moe, json_t *o) {
  RFI_TRY(read_keys(g, a, of_llama, sizeof of_llama / sizeof of_llama[0], o));
  const int64_t hidden = integer_of(o, "hidden_size"), heads = integer_of(o, "num_attention_heads");
  if (!json_object_get(o, "head_dim") && heads > 0) RFI_TRY(rfi_json_set(o, "head_dim", json_integer(hidden / heads)));
  if (!json_object_get(o, "num_key_value_heads")) RFI_TRY(rfi_json_set(o, "num_key_value_heads", json_integer(heads)));
  RFI_TRY(check_number(g, a, "attention.value_length", integer_of(o, "head_dim")));
  RFI_TRY(check_number(g, a, "attention.causal", 1));
  RFI_TRY(read_rope(ctx, g, a, o));
  const bool gemma = a->norm_plus_one;
  RFI_TRY(
      rfi_json_set(o, gemma ? "hidden_activation" : "hidden_act", json_string(gemma ? "gelu_pytorch_tanh" : "silu")));
  RFI_TRY(rfi_json_set(o, "attention_bias", json_boolean(rfi_gguf_tensor_find(g, "blk.0.attn_output.bias") != NULL)));
  RFI_TRY(rfi_json_set(o, "mlp_bias", json_boolean(rfi_gguf_tensor_find(g, "blk.0.ffn_up.bias") != NULL)));
  const bool gemma3 = strcmp(a->name, "gemma3") == 0;
  if (gemma && a->post_norms) {
    /* llama.cpp recognizes the 27B models, whose scale differs, by their number of layers. */
    const int64_t head_dim = integer_of(o, "head_dim"), largest = gemma3 ? 62 : 46;
    const int64_t scalar = integer_of(o, "num_hidden_layers") == largest && heads > 0 ? hidden / heads : head_dim;
    if (gemma3) RFI_TRY(rfi_json_set(o, "sliding_window_pattern", json_integer(6)));
    RFI_TRY(rfi_json_set(o, "query_pre_attn_scalar", json_integer(scalar)));
    if (!json_object_get(o, "sliding_window")) RFI_TRY(rfi_json_set(o, "sliding_window", json_integer(4096)));
  } else if (strcmp(a->name, "phi3") == 0) { /* 0: none */
    if (integer_of(o, "sliding_window") == 0) RFI_TRY(rfi_json_set(o, "sliding_window", json_null()));
  } else if (json_object_get(o, "sliding_window")) {
    return FAIL("%s.attention.sliding_window is not supported for this architecture", a->name);
  }
  if (!moe) return RFR_OK;
  const bool mixtral = a->model_type != NULL;
  int64_t experts = 0;
  RFI_TRY(get_size(g, key_of(g, a, "expert_count"), &experts));
  RFI_TRY(rfi_json_set(o, mixtral ? "num_local_experts" : "num_experts", json_integer(experts)));
  if (mixtral) return rfi_json_set(o, "sliding_window", json_null());
  return rfi_json_set(o, "norm_topk_prob", json_boolean(strcmp(a->name, "qwen3moe") == 0));
}

/* The type of the embedding, if no tensor is in blocks. */
static const char *dtype_of(const rfi_gguf *g) {
  const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, "token_embd.weight");
  for (int i = 0; i < rfi_gguf_tensor_count(g); i++)
    if (rfi_gguf_tensor_at(g, i)->format->elements > 1) return NULL;
  if (!t) return NULL;
  return t->format->dtype == RFR_BF16  ? "bfloat16"
         : t->format->dtype == RFR_F16 ? "float16"
         : t->format->dtype == RFR_F32 ? "float32"
                                       : NULL;
}

static rfr_status read_config(rfr_ctx *ctx, rfi_gguf *g, const architecture *a, json_t *o) {
  static const struct {
    const char *key, *field;
  } ids[] = {{"tokenizer.ggml.bos_token_id", "bos_token_id"},
             {"tokenizer.ggml.eos_token_id", "eos_token_id"},
             {"tokenizer.ggml.padding_token_id", "pad_token_id"}};
  const rfi_gguf_tensor *embedding = rfi_gguf_tensor_find(g, "token_embd.weight");
  const rfi_gguf_value *expert_count = key_of(g, a, "expert_count");
  int64_t experts = 0;
  if (expert_count) RFI_TRY(get_size(g, expert_count, &experts));
  const bool moe = experts > 0;
  if (!(moe ? a->moe_type : a->model_type))
    return FAIL("%s.expert_count is %" PRId64 ", which is not supported for this architecture", a->name, experts);
  if (!embedding || embedding->rank != 2) return FAIL("there is no tensor token_embd.weight with two dimensions");
  RFI_TRY(rfi_json_set(o, "model_type", json_string(moe ? a->moe_type : a->model_type)));
  if (a->transposed) RFI_TRY(read_keys(g, a, of_gpt2, sizeof of_gpt2 / sizeof of_gpt2[0], o));
  else RFI_TRY(read_llama(ctx, g, a, moe, o));
  RFI_TRY(check_number(g, a, "vocab_size", embedding->shape[0]));
  RFI_TRY(rfi_json_set(o, "vocab_size", json_integer(embedding->shape[0])));
  RFI_TRY(rfi_json_set(o, "tie_word_embeddings", json_boolean(!rfi_gguf_tensor_find(g, "output.weight"))));
  for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
    const rfi_gguf_value *v = rfi_gguf_key(g, ids[i].key);
    int64_t id;
    if (!v) continue;
    RFI_TRY(rfi_gguf_int(g, v, 0, &id));
    RFI_TRY(rfi_json_set(o, ids[i].field, json_integer(id)));
  }
  const char *dtype = dtype_of(g);
  return dtype ? rfi_json_set(o, "torch_dtype", json_string(dtype)) : RFR_OK;
}

rfr_status rfi_gguf_config(rfr_ctx *ctx, rfi_gguf *g, json_t **out) {
  const architecture *a;
  *out = NULL;
  RFI_TRY(find_architecture(g, &a));
  json_t *o = json_object();
  if (!o) return rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g));
  const rfr_status s = read_config(ctx, g, a, o);
  if (s == RFR_OK) *out = o;
  else json_decref(o);
  return s;
}

/* ---- tensors ---- */

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

/* A number of a name, and the text after it and a dot; -1: there is none. */
static int64_t number_at(const char **text) {
  int64_t x = 0;
  const char *p = *text;
  for (; *p >= '0' && *p <= '9' && x < INT32_MAX; p++) x = 10 * x + (*p - '0');
  if (p == *text || *p != '.') return -1;
  *text = p + 1;
  return x;
}

/* The name of the tensor that has a Hugging Face tensor; *expert: which part of the packed tensor, or -1. False: no
 * such name. g NULL: of a file to be written. */
static bool translate(const rfi_gguf *g, const architecture *a, const char *name, char *out, size_t size,
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

/* Whether the tensor has the model's shape with the experts as first dimension; dimensions of 1 are ignored. */
static bool has_shape(const rfi_gguf_tensor *t, int64_t experts, bool transposed, int rank, const int64_t *shape) {
  int64_t have[4], want[5];
  int n = 0, m = 0;
  for (int d = 0; d < t->rank; d++)
    if (t->shape[d] != 1) have[n++] = t->shape[d];
  if (experts > 1) want[m++] = experts;
  for (int d = 0; d < rank; d++)
    if (shape[d] != 1) want[m++] = shape[transposed ? rank - 1 - d : d];
  bool same = n == m;
  for (int d = 0; same && d < n; d++) same = have[d] == want[d];
  return same;
}

/* "[2, 3]" */
static void print_shape(char *text, size_t size, int rank, const int64_t *shape) {
  size_t n = (size_t)snprintf(text, size, "[");
  for (int d = 0; d < rank && n < size; d++)
    n += (size_t)snprintf(text + n, size - n, "%s%" PRId64, d ? ", " : "", shape[d]);
  if (n < size) snprintf(text + n, size - n, "]");
}

typedef enum change { NONE, MINUS_ONE, INTERLEAVED, TRANSPOSED } change;

/* Reads a tensor in full, changes it as f32, and converts it. For vectors, and matrices that must be transposed. */
static rfr_status read_changed(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_tensor *t, change how, int64_t head_dim,
                               rfr_dtype dtype, void *out) {
  const int64_t columns = t->shape[t->rank - 1], rows = t->elements / columns, size = rfr_dtype_bits(dtype) / 8;
  float *x, *changed = NULL;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)t->elements * sizeof *x, &x));
  rfr_status s = rfi_gguf_read(g, t, 0, rows, 0, RFR_F32, x);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (size_t)(how == TRANSPOSED ? rows : t->elements) * sizeof *x, &changed);
  for (int64_t i = 0; s == RFR_OK && how != TRANSPOSED && i < t->elements; i++) {
    const int64_t in_head = how == INTERLEAVED ? i % head_dim : 0;
    changed[how == INTERLEAVED ? i - in_head + in_head / 2 + in_head % 2 * (head_dim / 2) : i] =
        how == MINUS_ONE ? x[i] - 1.0f : x[i];
  }
  if (s == RFR_OK && how != TRANSPOSED) rfi_convert(dtype, out, RFR_F32, changed, t->elements);
  for (int64_t c = 0; s == RFR_OK && how == TRANSPOSED && c < columns; c++) {
    for (int64_t r = 0; r < rows; r++) changed[r] = x[r * columns + c];
    rfi_convert(dtype, (char *)out + c * rows * size, RFR_F32, changed, rows);
  }
  rfi_free(ctx, changed);
  rfi_free(ctx, x);
  return s;
}

static change change_of(const architecture *a, const char *name, int rank) {
  if (a->norm_plus_one && rfi_ends_in(name, "norm.weight")) return MINUS_ONE;
  if (a->interleaved && (strstr(name, ".q_proj.") || strstr(name, ".k_proj."))) return INTERLEAVED;
  if (a->transposed && rank == 2 && strstr(name, ".h.")) return TRANSPOSED;
  return NONE;
}

rfr_status rfi_gguf_parameter(rfr_ctx *ctx, rfi_gguf *g, const rfr_model_config *c, const char *name, int rank,
                              const int64_t *shape, rfr_dtype dtype, void *out, const rfi_gguf_tensor **from) {
  const architecture *a;
  char translated[160];
  int64_t expert;
  *from = NULL;
  RFI_TRY(find_architecture(g, &a));
  if (!translate(g, a, name, translated, sizeof translated, &expert)) return RFR_OK;
  const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, translated);
  if (!t) return RFR_OK;
  const change how = change_of(a, name, rank);
  if (!has_shape(t, expert >= 0 ? c->experts : 1, how == TRANSPOSED, rank, shape)) {
    char have[200], want[200];
    print_shape(have, sizeof have, t->rank, t->shape);
    print_shape(want, sizeof want, rank, shape);
    return rfi_fail_at(RFI_E_MODEL_WEIGHTS, rfi_gguf_path(g), 0, "tensor %s has shape %s; the metadata describe %s%s",
                       t->name, have, want,
                       expert >= 0         ? " for each expert"
                       : how == TRANSPOSED ? " transposed"
                                           : "");
  }
  *from = t;
  if (how == MINUS_ONE || how == TRANSPOSED || (how == INTERLEAVED && rank == 1))
    return read_changed(ctx, g, t, how, c->head_dim, dtype, out);
  const int64_t rows = rank == 2 ? shape[0] : 1;
  return rfi_gguf_read(g, t, expert > 0 ? expert * rows : 0, rows, how == INTERLEAVED ? c->head_dim : 0, dtype, out);
}

/* ---- writing ---- */

static const architecture *architecture_of(const char *model_type) {
  for (size_t i = 0; i < sizeof architectures / sizeof architectures[0]; i++) {
    const architecture *a = &architectures[i];
    if (a->model_type && strcmp(a->model_type, model_type) == 0) return a;
    if (a->moe_type && strcmp(a->moe_type, model_type) == 0) return a;
  }
  return NULL;
}

/* The architecture of a description; an error if llama.cpp would compute the model differently. */
static rfr_status writable(const rfr_model_config *c, const json_t *o, const architecture **out) {
  const char *type = json_string_value(json_object_get(o, "model_type"));
  *out = architecture_of(type ? type : "");
  if (!*out) return rfi_fail(RFI_E_MODEL_CONFIG, "models of type %s cannot be written as GGUF", type);
  return rfi_gguf_limits(c, (*out)->name, type);
}

static rfr_status architecture_for(const rfr_model_config *c, const architecture **a) {
  json_t *o = rfi_hf_config(c);
  if (!o) return rfi_fail(RFI_E_NO_MEMORY, "describing a model");
  const rfr_status s = writable(c, o, a);
  json_decref(o);
  return s;
}

static void put_keys(rfi_gguf_writer *w, const architecture *a, const json_t *o, const hyperparameter *rows, size_t n) {
  char key[128];
  for (size_t i = 0; i < n; i++) {
    const json_t *value = rows[i].field ? json_object_get(o, rows[i].field) : NULL;
    if (!json_is_number(value)) continue;
    snprintf(key, sizeof key, "%s.%s", a->name, rows[i].key);
    if (rows[i].use == SIZE) rfi_gguf_put_u32(w, key, (int64_t)json_integer_value(value));
    else rfi_gguf_put_f32(w, key, json_number_value(value));
  }
}

static void put_size(rfi_gguf_writer *w, const architecture *a, const char *name, int64_t x) {
  char key[128];
  snprintf(key, sizeof key, "%s.%s", a->name, name);
  rfi_gguf_put_u32(w, key, x);
}

static void put_real(rfi_gguf_writer *w, const architecture *a, const char *name, double x) {
  char key[128];
  snprintf(key, sizeof key, "%s.%s", a->name, name);
  rfi_gguf_put_f32(w, key, x);
}

static int64_t pairs_of(const rfr_model_config *c) { return (c->rotary_dim > 0 ? c->rotary_dim : c->head_dim) / 2; }

/* The tensors with frequency factors are written before the parameters. */
typedef struct factors {
  int n;
  const char *names[2];
} factors;
static factors factors_of(const rfr_model_config *c) {
  if (c->rope_extension.type == RFR_ROPE_LONGROPE)
    return (factors){2, {"rope_factors_long.weight", "rope_factors_short.weight"}};
  return (factors){c->rope_scaling.factor != 1.0 && c->rope_scaling.original > 0, {"rope_freqs.weight"}};
}

static void put_rope(rfi_gguf_writer *w, const architecture *a, const rfr_model_config *c) {
  const rfr_rope_extension *e = &c->rope_extension;
  const factors f = factors_of(c);
  const char *type = e->type == RFR_ROPE_YARN                    ? "yarn"
                     : e->type == RFR_ROPE_LONGROPE              ? "longrope"
                     : c->rope_scaling.factor != 1.0 && f.n == 0 ? "linear"
                                                                 : NULL;
  char key[128];
  snprintf(key, sizeof key, "%s.rope.scaling.type", a->name);
  if (type) rfi_gguf_put_text(w, key, type, strlen(type));
  if (type && e->type != RFR_ROPE_LONGROPE)
    put_real(w, a, "rope.scaling.factor", e->type == RFR_ROPE_YARN ? e->factor : c->rope_scaling.factor);
  if (e->type != RFR_ROPE_PLAIN) put_size(w, a, "rope.scaling.original_context_length", e->original);
  if (e->type == RFR_ROPE_LONGROPE) put_real(w, a, "rope.scaling.attn_factor", e->attention_factor);
  for (int i = 0; i < f.n; i++)
    rfi_gguf_put_tensor(w, f.names[i], rfi_block_format_named("F32"), 1, (int64_t[]){pairs_of(c)});
}

/* Numbers of general.file_type: enum llama_ftype of llama.h. */
static int file_type(const rfi_block_format *format) {
  static const struct {
    const char *name;
    int type;
  } types[] = {{"F32", 0}, {"F16", 1}, {"Q4_0", 2}, {"Q8_0", 7}, {"BF16", 32}};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (strcmp(types[i].name, format->name) == 0) return types[i].type;
  return 0;
}

/* One tensor of the file: `count` groups of `rows` rows of the parameter, the first at `first`, the next `step` rows
 * later. */
typedef struct part {
  char name[160];
  const rfi_block_format *format;
  int rank;
  int64_t shape[4];
  int64_t first, rows, step, count;
  change how;
} part;

/* A parameter is one tensor, or for gate_up_proj of experts two. */
static int parts_of(const rfr_model_config *c, const architecture *a, int parameter, const rfi_block_format *format,
                    part out[2]) {
  static const char *const plain[] = {"ffn_gate_inp", "position_embd"}, *const outer_names[] = {"token_embd",
                                                                                                "output."};
  rfr_parameter p;
  if (rfr_model_parameter(c, parameter, &p) != RFR_OK) return 0;
  rfr_type type = {.dtype = RFR_F32, .rank = p.rank};
  memcpy(type.shape, p.shape, sizeof p.shape);
  const bool experts = p.rank == 3;
  const int n = experts ? rfi_hf_pieces(p.name, &type) / (int)p.shape[0] : 1;
  for (int k = 0; k < n; k++) {
    part *t = &out[k];
    rfi_hf_tensor piece;
    int64_t expert;
    rfi_hf_piece(c, p.name, &type, k, &piece);
    *t = (part){.format = format, .how = change_of(a, piece.name, piece.rank)};
    if (!translate(NULL, a, piece.name, t->name, sizeof t->name, &expert)) return 0;
    if (experts) t->shape[t->rank++] = p.shape[0];
    for (int d = 0; d < piece.rank; d++) {
      const int64_t size = piece.shape[t->how == TRANSPOSED ? piece.rank - 1 - d : d];
      if (size != 1 || piece.rank == 1 || d == piece.rank - 1) t->shape[t->rank++] = size;
    }
    t->rows = piece.rank == 2 ? piece.shape[0] : 1;
    t->first = k * t->rows;
    t->step = n * t->rows;
    t->count = experts ? p.shape[0] : 1;
    bool f32 = t->rank == 1;
    for (size_t i = 0; i < 2; i++) {
      f32 |= strstr(t->name, plain[i]) != NULL;
      if (strncmp(t->name, outer_names[i], strlen(outer_names[i])) == 0 && strcmp(format->name, "Q4_0") == 0)
        t->format = rfi_block_format_named("Q8_0");
    }
    if (t->shape[t->rank - 1] % t->format->elements) t->format = rfi_block_format_named("BF16");
    if (f32) t->format = rfi_block_format_named("F32");
  }
  return n;
}

rfr_status rfi_gguf_put_model(rfi_gguf_writer *w, const rfr_model_config *c, const rfi_block_format *format) {
  const architecture *a = NULL;
  json_t *o = rfi_hf_config(c);
  if (!o) return rfi_fail(RFI_E_NO_MEMORY, "describing a model");
  rfr_status s = writable(c, o, &a);
  if (s == RFR_OK) {
    rfi_gguf_put_text(w, "general.architecture", a->name, strlen(a->name));
    rfi_gguf_put_text(w, "general.type", "model", 5);
    rfi_gguf_put_u32(w, "general.quantization_version", 2);
    rfi_gguf_put_u32(w, "general.file_type", file_type(format));
    if (a->transposed) put_keys(w, a, o, of_gpt2, sizeof of_gpt2 / sizeof of_gpt2[0]);
    else put_keys(w, a, o, of_llama, sizeof of_llama / sizeof of_llama[0]);
  }
  json_decref(o);
  RFI_TRY(s);
  if (!a->transposed) {
    put_size(w, a, "attention.value_length", c->head_dim);
    put_size(w, a, "rope.dimension_count", 2 * pairs_of(c));
    put_size(w, a, "vocab_size", c->vocab_size);
    if (c->experts > 0) put_size(w, a, "expert_count", c->experts);
  }
  put_rope(w, a, c);
  for (int i = 0; i < rfr_model_parameter_count(c); i++) {
    part parts[2];
    const int n = parts_of(c, a, i, format, parts);
    if (n == 0) {
      rfr_parameter p = {.name = ""};
      RFI_TRY(rfr_model_parameter(c, i, &p));
      return rfi_fail(RFI_E_MODEL_CONFIG, "%s cannot be written as GGUF", p.name);
    }
    for (int k = 0; k < n; k++) rfi_gguf_put_tensor(w, parts[k].name, parts[k].format, parts[k].rank, parts[k].shape);
  }
  return RFR_OK;
}

void rfi_gguf_interleave(const float *from, int64_t rows, int64_t width, int64_t head_dim, float *to) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t in_head = r % head_dim, half = head_dim / 2;
    memcpy(to + r * width, from + (r - in_head + in_head / 2 + in_head % 2 * half) * width, (size_t)width * sizeof *to);
  }
}

/* The rows of a part in the order of the file. */
static rfr_status write_part(rfr_ctx *ctx, rfi_gguf_writer *w, rfi_file *file, const rfr_model_config *c, const part *t,
                             int64_t width, float *values) {
  float *moved;
  if (t->how == MINUS_ONE)
    for (int64_t i = 0; i < width; i++) values[i] += 1.0f;
  if (t->how != INTERLEAVED && t->how != TRANSPOSED) return rfi_gguf_write_rows(w, file, values, t->rows);
  const int64_t rows = t->rank == 1 ? width : t->rows, n = t->rank == 1 ? 1 : width; /* a bias has rows of one */
  RFI_TRY(RFI_ALLOC(ctx, (size_t)(rows * n) * sizeof *moved, &moved));
  if (t->how == INTERLEAVED) {
    rfi_gguf_interleave(values, rows, n, c->head_dim, moved);
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t k = 0; k < n; k++) moved[k * rows + r] = values[r * n + k];
  }
  const rfr_status s = rfi_gguf_write_rows(w, file, moved, t->rank == 1 ? 1 : t->how == TRANSPOSED ? n : rows);
  rfi_free(ctx, moved);
  return s;
}

static rfr_status write_factors(rfr_ctx *ctx, rfi_gguf_writer *w, rfi_file *file, const rfr_model_config *c) {
  const rfr_rope_scaling *r = &c->rope_scaling;
  const rfr_rope_extension *e = &c->rope_extension;
  const int64_t n = pairs_of(c);
  const factors f = factors_of(c);
  rfr_status s = RFR_OK;
  float *x;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof *x, &x));
  for (int k = 0; s == RFR_OK && k < f.n; k++) {
    const double *listed = k == 0 ? e->long_factor : e->short_factor;
    for (int64_t i = 0; i < n; i++)
      x[i] = (float)(f.n == 2 ? listed[i]
                              : llama3_factor(pow(c->rope_theta, (double)i / (double)n), r->factor, r->low, r->high,
                                              (double)r->original));
    s = rfi_gguf_write_rows(w, file, x, 1);
  }
  rfi_free(ctx, x);
  return s;
}

rfr_status rfi_gguf_write_parameter(rfr_ctx *ctx, rfi_gguf_writer *w, rfi_file *file, const rfr_model_config *c, int i,
                                    float *values) {
  part parts[2];
  rfr_parameter p;
  const architecture *a;
  rfr_status s = RFR_OK;
  RFI_TRY(architecture_for(c, &a));
  if (i == 0) RFI_TRY(write_factors(ctx, w, file, c));
  RFI_TRY(rfr_model_parameter(c, i, &p));
  const int n = parts_of(c, a, i, rfi_block_format_named("F32"), parts); /* the writer knows the formats */
  const int64_t width = p.shape[p.rank - 1];
  for (int k = 0; s == RFR_OK && k < n; k++)
    for (int64_t e = 0; s == RFR_OK && e < parts[k].count; e++)
      s = write_part(ctx, w, file, c, &parts[k], width, values + (parts[k].first + e * parts[k].step) * width);
  return s;
}

/* ---- adapters ---- */

rfr_status rfi_gguf_put_adapter(rfi_gguf_writer *w, const rfr_model_config *c, double alpha) {
  const architecture *a;
  RFI_TRY(architecture_for(c, &a));
  rfi_gguf_put_text(w, "general.architecture", a->name, strlen(a->name));
  rfi_gguf_put_text(w, "general.type", "adapter", 7);
  rfi_gguf_put_text(w, "adapter.type", "lora", 4);
  rfi_gguf_put_f32(w, "adapter.lora.alpha", alpha);
  return RFR_OK;
}

bool rfi_gguf_matrix_name(const rfr_model_config *c, int parameter, char *out, size_t size, int64_t *head_dim) {
  const architecture *a;
  part parts[2];
  rfr_parameter p;
  if (rfr_model_parameter(c, parameter, &p) != RFR_OK || p.rank != 2 || architecture_for(c, &a) != RFR_OK) return false;
  if (parts_of(c, a, parameter, rfi_block_format_named("F32"), parts) != 1) return false;
  snprintf(out, size, "%s", parts[0].name);
  *head_dim = parts[0].how == INTERLEAVED ? c->head_dim : 0;
  return strncmp(out, "blk.", 4) == 0;
}
