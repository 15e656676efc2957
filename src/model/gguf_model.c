/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads models in GGUF files. Source of the defaults that the files leave out: llama.cpp's src/llama-model.cpp.
 */
#include "model/gguf_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "core/convert.h"
#include "model/gguf_names.h"
#include "model/hf.h"

/* ---- metadata ---- */

static rfr_status find_architecture(const rfi_gguf *g, const rfi_gguf_architecture **out) {
  const char *text = "", *path = rfi_gguf_path(g);
  size_t n = 0;
  const rfi_gguf_value *v = rfi_gguf_key(g, "general.architecture"), *type = rfi_gguf_key(g, "general.type");
  if (!v) return rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0, "general.architecture is missing");
  if (type) RFI_TRY(rfi_gguf_string(g, type, &text, &n));
  if (type && (n != 5 || memcmp(text, "model", 5) != 0))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0, "general.type is %.*s; the file is not a model",
                       n < 100 ? (int)n : 100, text);
  RFI_TRY(rfi_gguf_string(g, v, &text, &n));
  for (size_t i = 0; (*out = rfi_gguf_architecture_at(i)) != NULL; i++)
    if (n == strlen((*out)->name) && memcmp(text, (*out)->name, n) == 0) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0,
                     "general.architecture is %.*s; supported are llama, qwen2, qwen3, qwen2moe, qwen3moe, gemma, "
                     "gemma2, gemma3, phi3, olmo2, smollm3, granite and gpt2",
                     n < 100 ? (int)n : 100, text);
}

#define FAIL(...) rfi_fail_at(RFI_E_MODEL_CONFIG, rfi_gguf_path(g), 0, __VA_ARGS__)

static const rfi_gguf_value *key_of(const rfi_gguf *g, const rfi_gguf_architecture *a, const char *key) {
  char name[128];
  snprintf(name, sizeof name, "%s.%s", a->name, key);
  return rfi_gguf_key(g, name);
}

/* A size; if it is an array, it has one element per layer, and all must be equal. */
static rfr_status get_size(const rfi_gguf *g, const rfi_gguf_value *v, int64_t *out) {
  RFI_TRY(rfi_gguf_int(g, v, 0, out));
  for (int64_t i = 1; i < v->count; i++) {
    int64_t other;
    RFI_TRY(rfi_gguf_int(g, v, i, &other));
    if (other != *out) return FAIL("%s: different values for different layers are not supported", v->key);
  }
  return RFR_OK;
}

/* The files store f32; config.json gets the shortest decimal that reads back equal: 1e-05, not
 * 9.999999747378752e-06. */
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

static rfr_status check_number(const rfi_gguf *g, const rfi_gguf_architecture *a, const char *key, int64_t wanted) {
  const rfi_gguf_value *v = key_of(g, a, key);
  int64_t value;
  if (!v) return RFR_OK;
  RFI_TRY(get_size(g, v, &value));
  if (value == wanted) return RFR_OK;
  return FAIL("%s is %" PRId64 "; only %" PRId64 " is supported in this model", v->key, value, wanted);
}

/* Every hyperparameter of the file must be known. */
static rfr_status read_keys(const rfi_gguf *g, const rfi_gguf_architecture *a, json_t *o) {
  const size_t prefix = strlen(a->name);
  size_t n_known;
  const rfi_gguf_hyperparameter *known = rfi_gguf_hyperparameters(a, &n_known);
  for (int i = 0; i < rfi_gguf_key_count(g); i++) {
    const rfi_gguf_value *v = rfi_gguf_key_at(g, i);
    if (strcmp(v->key, "split.count") == 0) {
      int64_t parts;
      RFI_TRY(rfi_gguf_int(g, v, 0, &parts));
      if (parts > 1) return FAIL("split.count is %" PRId64 ": models in several files are not supported", parts);
    }
    if (strncmp(v->key, a->name, prefix) != 0 || v->key[prefix] != '.') continue;
    const rfi_gguf_hyperparameter *h = NULL;
    for (size_t k = 0; k < n_known && !h; k++)
      if (strcmp(v->key + prefix + 1, known[k].key) == 0) h = &known[k];
    if (!h)
      return FAIL("%.100s is not known; a hyperparameter that is ignored could change the model's results", v->key);
    int64_t size;
    double real;
    if (h->use == RFI_GGUF_SIZE) {
      RFI_TRY(get_size(g, v, &size));
      RFI_TRY(rfi_json_set(o, h->field, json_integer(size)));
    } else if (h->use == RFI_GGUF_REAL) {
      RFI_TRY(rfi_gguf_real(g, v, 0, &real));
      RFI_TRY(rfi_json_set(o, h->field, isfinite(real) ? number(real) : NULL));
    }
  }
  return RFR_OK;
}

static int64_t integer_of(const json_t *o, const char *field) {
  return (int64_t)json_integer_value(json_object_get(o, field));
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
      const double wanted = rfi_gguf_llama3_factor(pow(theta, (double)i / (double)n), factor, LOW, HIGH, length);
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

/* Reads Phi-3's factors. An attention factor that equals the one derived from the lengths, up to f32, is left out: the
 * reader of config.json computes it. */
static rfr_status read_longrope(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_architecture *a, json_t *o) {
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
static rfr_status read_rotated(const rfi_gguf *g, const rfi_gguf_architecture *a, json_t *o) {
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

static rfr_status read_rope(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_architecture *a, json_t *o) {
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
static rfr_status read_llama(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_architecture *a, bool moe, json_t *o) {
  RFI_TRY(read_keys(g, a, o));
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

static rfr_status read_config(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_architecture *a, json_t *o) {
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
  if (a->transposed) RFI_TRY(read_keys(g, a, o));
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
  const rfi_gguf_architecture *a;
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

/* Whether the tensor has the model's shape with the experts as the first dimension; dimensions of 1 are ignored. */
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

/* Reads a complete tensor, changes it as f32, and converts it. Used for vectors, and for matrices that must be
 * transposed. */
static rfr_status read_changed(rfr_ctx *ctx, rfi_gguf *g, const rfi_gguf_tensor *t, rfi_gguf_change how,
                               int64_t head_dim, rfr_dtype dtype, void *out) {
  const int64_t columns = t->shape[t->rank - 1], rows = t->elements / columns, size = rfr_dtype_bits(dtype) / 8;
  float *x, *changed = NULL;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)t->elements * sizeof *x, &x));
  rfr_status s = rfi_gguf_read(g, t, 0, rows, 0, RFR_F32, x);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (size_t)(how == RFI_GGUF_TRANSPOSED ? rows : t->elements) * sizeof *x, &changed);
  for (int64_t i = 0; s == RFR_OK && how != RFI_GGUF_TRANSPOSED && i < t->elements; i++) {
    const int64_t in_head = how == RFI_GGUF_INTERLEAVED ? i % head_dim : 0;
    changed[how == RFI_GGUF_INTERLEAVED ? i - in_head + in_head / 2 + in_head % 2 * (head_dim / 2) : i] =
        how == RFI_GGUF_MINUS_ONE ? x[i] - 1.0f : x[i];
  }
  if (s == RFR_OK && how != RFI_GGUF_TRANSPOSED) rfi_convert(dtype, out, RFR_F32, changed, t->elements);
  for (int64_t c = 0; s == RFR_OK && how == RFI_GGUF_TRANSPOSED && c < columns; c++) {
    for (int64_t r = 0; r < rows; r++) changed[r] = x[r * columns + c];
    rfi_convert(dtype, (char *)out + c * rows * size, RFR_F32, changed, rows);
  }
  rfi_free(ctx, changed);
  rfi_free(ctx, x);
  return s;
}

rfr_status rfi_gguf_parameter(rfr_ctx *ctx, rfi_gguf *g, const rfr_model_config *c, const char *name, int rank,
                              const int64_t *shape, rfr_dtype dtype, void *out, const rfi_gguf_tensor **from) {
  const rfi_gguf_architecture *a;
  char translated[160];
  int64_t expert;
  *from = NULL;
  RFI_TRY(find_architecture(g, &a));
  if (!rfi_gguf_translate(g, a, name, translated, sizeof translated, &expert)) return RFR_OK;
  const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, translated);
  if (!t) return RFR_OK;
  const rfi_gguf_change how = rfi_gguf_change_of(a, name, rank);
  if (!has_shape(t, expert >= 0 ? c->experts : 1, how == RFI_GGUF_TRANSPOSED, rank, shape)) {
    char have[200], want[200];
    print_shape(have, sizeof have, t->rank, t->shape);
    print_shape(want, sizeof want, rank, shape);
    return rfi_fail_at(RFI_E_MODEL_WEIGHTS, rfi_gguf_path(g), 0, "tensor %s has shape %s; the metadata describe %s%s",
                       t->name, have, want,
                       expert >= 0                  ? " for each expert"
                       : how == RFI_GGUF_TRANSPOSED ? " transposed"
                                                    : "");
  }
  *from = t;
  if (how == RFI_GGUF_MINUS_ONE || how == RFI_GGUF_TRANSPOSED || (how == RFI_GGUF_INTERLEAVED && rank == 1))
    return read_changed(ctx, g, t, how, c->head_dim, dtype, out);
  const int64_t rows = rank == 2 ? shape[0] : 1;
  return rfi_gguf_read(g, t, expert > 0 ? expert * rows : 0, rows, how == RFI_GGUF_INTERLEAVED ? c->head_dim : 0, dtype,
                       out);
}
