/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes models and adapters to GGUF files: gguf_model.h.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "model/gguf_model.h"
#include "model/gguf_names.h"
#include "model/hf.h"

static const rfi_gguf_architecture *architecture_of(const char *model_type) {
  const rfi_gguf_architecture *a;
  for (size_t i = 0; (a = rfi_gguf_architecture_at(i)) != NULL; i++)
    if ((a->model_type && strcmp(a->model_type, model_type) == 0) ||
        (a->moe_type && strcmp(a->moe_type, model_type) == 0))
      return a;
  return NULL;
}

/* The architecture of a description; an error if llama.cpp would compute the model differently. */
static rfr_status writable(const rfr_model_config *c, const json_t *o, const rfi_gguf_architecture **out) {
  const char *type = json_string_value(json_object_get(o, "model_type"));
  *out = architecture_of(type ? type : "");
  if (!*out) return rfi_fail(RFI_E_MODEL_CONFIG, "models of type %s cannot be written as GGUF", type);
  return rfi_gguf_limits(c, (*out)->name, type);
}

static rfr_status architecture_for(const rfr_model_config *c, const rfi_gguf_architecture **a) {
  json_t *o = rfi_hf_config(c);
  if (!o) return rfi_fail(RFI_E_NO_MEMORY, "describing a model");
  const rfr_status s = writable(c, o, a);
  json_decref(o);
  return s;
}

static void put_keys(rfi_gguf_writer *w, const rfi_gguf_architecture *a, const json_t *o) {
  char key[128];
  size_t n;
  const rfi_gguf_hyperparameter *rows = rfi_gguf_hyperparameters(a, &n);
  for (size_t i = 0; i < n; i++) {
    const json_t *value = rows[i].field ? json_object_get(o, rows[i].field) : NULL;
    if (!json_is_number(value)) continue;
    snprintf(key, sizeof key, "%s.%s", a->name, rows[i].key);
    if (rows[i].use == RFI_GGUF_SIZE) rfi_gguf_put_u32(w, key, (int64_t)json_integer_value(value));
    else rfi_gguf_put_f32(w, key, json_number_value(value));
  }
}

static void put_size(rfi_gguf_writer *w, const rfi_gguf_architecture *a, const char *name, int64_t x) {
  char key[128];
  snprintf(key, sizeof key, "%s.%s", a->name, name);
  rfi_gguf_put_u32(w, key, x);
}

static void put_real(rfi_gguf_writer *w, const rfi_gguf_architecture *a, const char *name, double x) {
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

static void put_rope(rfi_gguf_writer *w, const rfi_gguf_architecture *a, const rfr_model_config *c) {
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

/* One tensor of the file: `count` groups of `rows` rows of the parameter; the first group begins at `first`, the next
 * `step` rows later. */
typedef struct part {
  char name[160];
  const rfi_block_format *format;
  int rank;
  int64_t shape[4];
  int64_t first, rows, step, count;
  rfi_gguf_change how;
} part;

/* A parameter is one tensor, or for gate_up_proj of experts two. */
static int parts_of(const rfr_model_config *c, const rfi_gguf_architecture *a, int parameter,
                    const rfi_block_format *format, part out[2]) {
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
    *t = (part){.format = format, .how = rfi_gguf_change_of(a, piece.name, piece.rank)};
    if (!rfi_gguf_translate(NULL, a, piece.name, t->name, sizeof t->name, &expert)) return 0;
    if (experts) t->shape[t->rank++] = p.shape[0];
    for (int d = 0; d < piece.rank; d++) {
      const int64_t size = piece.shape[t->how == RFI_GGUF_TRANSPOSED ? piece.rank - 1 - d : d];
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
  const rfi_gguf_architecture *a = NULL;
  json_t *o = rfi_hf_config(c);
  if (!o) return rfi_fail(RFI_E_NO_MEMORY, "describing a model");
  rfr_status s = writable(c, o, &a);
  if (s == RFR_OK) {
    rfi_gguf_put_text(w, "general.architecture", a->name, strlen(a->name));
    rfi_gguf_put_text(w, "general.type", "model", 5);
    rfi_gguf_put_u32(w, "general.quantization_version", 2);
    rfi_gguf_put_u32(w, "general.file_type", file_type(format));
    put_keys(w, a, o);
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
  if (t->how == RFI_GGUF_MINUS_ONE)
    for (int64_t i = 0; i < width; i++) values[i] += 1.0f;
  if (t->how != RFI_GGUF_INTERLEAVED && t->how != RFI_GGUF_TRANSPOSED)
    return rfi_gguf_write_rows(w, file, values, t->rows);
  /* a bias counts as rows of one element */
  const int64_t rows = t->rank == 1 ? width : t->rows, n = t->rank == 1 ? 1 : width;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)(rows * n) * sizeof *moved, &moved));
  if (t->how == RFI_GGUF_INTERLEAVED) {
    rfi_gguf_interleave(values, rows, n, c->head_dim, moved);
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t k = 0; k < n; k++) moved[k * rows + r] = values[r * n + k];
  }
  const rfr_status s = rfi_gguf_write_rows(w, file, moved, t->rank == 1 ? 1 : t->how == RFI_GGUF_TRANSPOSED ? n : rows);
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
                              : rfi_gguf_llama3_factor(pow(c->rope_theta, (double)i / (double)n), r->factor, r->low,
                                                       r->high, (double)r->original));
    s = rfi_gguf_write_rows(w, file, x, 1);
  }
  rfi_free(ctx, x);
  return s;
}

rfr_status rfi_gguf_write_parameter(rfr_ctx *ctx, rfi_gguf_writer *w, rfi_file *file, const rfr_model_config *c, int i,
                                    float *values) {
  part parts[2];
  rfr_parameter p;
  const rfi_gguf_architecture *a;
  rfr_status s = RFR_OK;
  RFI_TRY(architecture_for(c, &a));
  if (i == 0) RFI_TRY(write_factors(ctx, w, file, c));
  RFI_TRY(rfr_model_parameter(c, i, &p));
  const int n = parts_of(c, a, i, rfi_block_format_named("F32"), parts); /* the writer supports the formats */
  const int64_t width = p.shape[p.rank - 1];
  for (int k = 0; s == RFR_OK && k < n; k++)
    for (int64_t e = 0; s == RFR_OK && e < parts[k].count; e++)
      s = write_part(ctx, w, file, c, &parts[k], width, values + (parts[k].first + e * parts[k].step) * width);
  return s;
}

/* ---- adapters ---- */

rfr_status rfi_gguf_put_adapter(rfi_gguf_writer *w, const rfr_model_config *c, double alpha) {
  const rfi_gguf_architecture *a;
  RFI_TRY(architecture_for(c, &a));
  rfi_gguf_put_text(w, "general.architecture", a->name, strlen(a->name));
  rfi_gguf_put_text(w, "general.type", "adapter", 7);
  rfi_gguf_put_text(w, "adapter.type", "lora", 4);
  rfi_gguf_put_f32(w, "adapter.lora.alpha", alpha);
  return RFR_OK;
}

bool rfi_gguf_matrix_name(const rfr_model_config *c, int parameter, char *out, size_t size, int64_t *head_dim) {
  const rfi_gguf_architecture *a;
  part parts[2];
  rfr_parameter p;
  if (rfr_model_parameter(c, parameter, &p) != RFR_OK || p.rank != 2 || architecture_for(c, &a) != RFR_OK) return false;
  if (parts_of(c, a, parameter, rfi_block_format_named("F32"), parts) != 1) return false;
  snprintf(out, size, "%s", parts[0].name);
  *head_dim = parts[0].how == RFI_GGUF_INTERLEAVED ? c->head_dim : 0;
  return strncmp(out, "blk.", 4) == 0;
}
