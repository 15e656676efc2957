/* SPDX-License-Identifier: Apache-2.0
 *
 * A GGUF file, or the shards of a folder: opens each shard once and looks a tensor up in all of them. Only the file
 * names of the index are used; the headers of the shards list their tensors, so that a stale index does no harm. A name
 * in two shards is an error. The files of the ranks of a checkpoint are one shard.
 */
#include "model/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "data/file.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "model/gguf_model.h"
#include "model/hf.h"
#include "model/quantized.h"

struct rfi_weights {
  rfr_ctx *ctx;
  char *path;     /* path of the single file, or of the index */
  rfi_gguf *gguf; /* NULL: a folder */
  bool *gguf_was_read;
  char **names;
  rfi_safetensors **shards;
  bool **was_read; /* per tensor of each shard */
  int n;
};

static bool is_plain(const char *name) {
  return *name && !strchr(name, '/') && !strchr(name, '\\') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

/* Adds w->shards[w->n], which has been opened. */
static rfr_status add_shard(rfi_weights *w, const char *name) {
  const int at = w->n++;
  RFI_TRY(RFI_ALLOC(w->ctx, (size_t)rfi_safetensors_count(w->shards[at]) + 1, &w->was_read[at]));
  RFI_TRY(RFI_ALLOC(w->ctx, strlen(name) + 1, &w->names[at]));
  memcpy(w->names[at], name, strlen(name) + 1);
  return RFR_OK;
}

static rfr_status open_shard(rfi_weights *w, const char *folder, const char *name) {
  char *path = NULL;
  for (int i = 0; i < w->n; i++)
    if (strcmp(w->names[i], name) == 0) return RFR_OK;
  RFI_TRY(rfi_path_join(w->ctx, folder, name, &path));
  rfr_status s = rfi_safetensors_open(w->ctx, path, &w->shards[w->n]);
  rfi_free(w->ctx, path);
  RFI_TRY(s);
  return add_shard(w, name);
}

static rfr_status allocate_shards(rfi_weights *w, size_t n) {
  RFI_TRY(RFI_ALLOC(w->ctx, (n + 1) * sizeof *w->shards, &w->shards));
  RFI_TRY(RFI_ALLOC(w->ctx, (n + 1) * sizeof *w->was_read, &w->was_read));
  return RFI_ALLOC(w->ctx, (n + 1) * sizeof *w->names, &w->names);
}

static rfr_status open_index(rfi_weights *w, const char *folder, const json_t *index) {
  json_t *map = json_object_get(index, "weight_map"), *value;
  const char *tensor;
  if (!json_is_object(map)) return rfi_fail_at(RFI_E_SAFETENSORS, w->path, 0, "the index has no object \"weight_map\"");
  RFI_TRY(allocate_shards(w, json_object_size(map)));
  json_object_foreach(map, tensor, value) {
    const char *name = json_string_value(value);
    if (!name || json_string_length(value) != strlen(name) || !is_plain(name))
      return rfi_fail_at(RFI_E_SAFETENSORS, w->path, 0,
                         "weight_map: the file of \"%.200s\" is not a file name of this folder", tensor);
    RFI_TRY(open_shard(w, folder, name));
  }
  return RFR_OK;
}

static rfr_status open_gguf(rfr_ctx *ctx, const char *path, rfi_weights **out) {
  rfr_status s;
  rfi_weights *w = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *w, &w));
  w->ctx = ctx;
  RFI_GOTO(rfi_gguf_open(ctx, path, &w->gguf));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)rfi_gguf_tensor_count(w->gguf) + 1, &w->gguf_was_read));
  *out = w;
  w = NULL;
fail:
  rfi_weights_close(w);
  return s;
}

rfr_status rfi_weights_open(rfr_ctx *ctx, const char *model, rfi_weights **out) {
  rfr_status s;
  rfi_weights *w = NULL;
  bool gguf;
  json_t *index = NULL;
  char *index_path = NULL;
  char kind, index_kind = 0;
  static const char one[] = "model.safetensors";
  *out = NULL;
  RFI_TRY(rfi_gguf_is(ctx, model, &gguf));
  if (gguf) return open_gguf(ctx, model, out);
  RFI_TRY(RFI_ALLOC(ctx, sizeof *w, &w));
  w->ctx = ctx;
  RFI_GOTO(rfi_path_join(ctx, model, one, &w->path));
  RFI_GOTO(rfi_path_kind(w->path, &kind));
  if (!kind) {
    RFI_GOTO(rfi_path_join(ctx, model, "model.safetensors.index.json", &index_path));
    RFI_GOTO(rfi_path_kind(index_path, &index_kind));
  }
  if (index_kind) {
    rfi_free(ctx, w->path);
    w->path = index_path;
    index_path = NULL;
    RFI_GOTO(rfi_json_load(ctx, w->path, &index));
    RFI_GOTO(open_index(w, model, index));
  } else {
    RFI_GOTO(allocate_shards(w, 1));
    if (!kind) RFI_GOTO(rfi_safetensors_open_parts(ctx, model, "model", &w->shards[0]));
    if (w->shards[0]) RFI_GOTO(add_shard(w, "the files of the ranks"));
    else RFI_GOTO(open_shard(w, model, one));
  }
  *out = w;
  w = NULL;
fail:
  rfi_free(ctx, index_path);
  json_decref(index);
  rfi_weights_close(w);
  return s;
}

void rfi_weights_close(rfi_weights *w) {
  if (!w) return;
  for (int i = 0; i < w->n; i++) {
    rfi_safetensors_close(w->shards[i]);
    rfi_free(w->ctx, w->was_read[i]);
    rfi_free(w->ctx, w->names[i]);
  }
  rfi_gguf_close(w->gguf);
  rfi_free(w->ctx, w->gguf_was_read);
  rfi_free(w->ctx, w->was_read);
  rfi_free(w->ctx, w->shards);
  rfi_free(w->ctx, w->names);
  rfi_free(w->ctx, w->path);
  rfi_free(w->ctx, w);
}

static rfr_status find(rfi_weights *w, const char *name, int *shard, const rfi_stored **stored) {
  *stored = NULL;
  for (int i = 0; i < w->n; i++) {
    const rfi_stored *found = rfi_safetensors_find(w->shards[i], name);
    if (!found) continue;
    if (*stored)
      return rfi_fail_at(RFI_E_SAFETENSORS, w->path, 0, "tensor %s is in %s and in %s", name, w->names[*shard],
                         w->names[i]);
    *stored = found;
    *shard = i;
  }
  return RFR_OK;
}

/* "[2, 3]" */
static void print_shape(char *text, size_t size, int rank, const int64_t *shape) {
  size_t n = (size_t)snprintf(text, size, "[");
  for (int d = 0; d < rank && n < size; d++)
    n += (size_t)snprintf(text + n, size - n, "%s%" PRId64, d ? ", " : "", shape[d]);
  if (n < size) snprintf(text + n, size - n, "]");
}

static rfr_status find_outer(rfi_weights *w, const char *name, int *shard, const rfi_stored **stored) {
  static const char *const outer[] = {"", "transformer.", "model."};
  *stored = NULL;
  for (size_t i = 0; i < sizeof outer / sizeof outer[0] && !*stored; i++)
    if (strncmp(name, outer[i], strlen(outer[i])) == 0) RFI_TRY(find(w, name + strlen(outer[i]), shard, stored));
  return RFR_OK;
}

/* For rfi_quantized_read; every tensor that it finds counts as read. */
static rfr_status find_part(void *user, const char *name, rfi_safetensors **file, const rfi_stored **stored) {
  rfi_weights *w = user;
  int shard = 0;
  RFI_TRY(find_outer(w, name, &shard, stored));
  if (!*stored) return RFR_OK;
  *file = w->shards[shard];
  w->was_read[shard][*stored - rfi_safetensors_at(*file, 0)] = true;
  return RFR_OK;
}

static rfr_status find_tensor(rfi_weights *w, const char *name, int *shard, const rfi_stored **stored) {
  RFI_TRY(find_outer(w, name, shard, stored));
  return *stored ? RFR_OK : rfi_fail_at(RFI_E_MODEL_WEIGHTS, w->path, 0, "there is no tensor %s", name);
}

/* The types of codes that rfi_quantized_read decodes. */
static bool has_codes(const rfi_stored *stored) { return stored->dtype == RFR_E4M3 || stored->dtype == RFR_U8; }

/* Compares the shape, and marks the tensor as read. */
static rfr_status take_stored(rfi_weights *w, int shard, const rfi_stored *stored, const char *name, int rank,
                              const int64_t *shape) {
  bool same = stored->rank == rank;
  for (int d = 0; same && d < rank; d++) same = stored->shape[d] == shape[d];
  if (!same) {
    char have[200], want[200];
    print_shape(have, sizeof have, stored->rank, stored->shape);
    print_shape(want, sizeof want, rank, shape);
    return rfi_fail_at(RFI_E_MODEL_WEIGHTS, w->path, 0, "tensor %s has shape %s; config.json describes %s", name, have,
                       want);
  }
  w->was_read[shard][stored - rfi_safetensors_at(w->shards[shard], 0)] = true;
  return RFR_OK;
}

static rfr_status read_tensor(rfi_weights *w, const rfr_model_config *c, const char *name, int rank,
                              const int64_t *shape, rfr_dtype dtype, void *data) {
  const rfi_stored *stored;
  int shard = 0;
  if (w->gguf) {
    const rfi_gguf_tensor *from;
    RFI_TRY(rfi_gguf_parameter(w->ctx, w->gguf, c, name, rank, shape, dtype, data, &from));
    if (!from) return rfi_fail_at(RFI_E_MODEL_WEIGHTS, rfi_gguf_path(w->gguf), 0, "there is no tensor for %s", name);
    w->gguf_was_read[from - rfi_gguf_tensor_at(w->gguf, 0)] = true;
    return RFR_OK;
  }
  RFI_TRY(find_tensor(w, name, &shard, &stored));
  if (has_codes(stored)) {
    const rfi_tensor_files files = {w->ctx, w, find_part};
    bool done;
    RFI_TRY(rfi_quantized_read(&files, w->path, name, rank, shape, dtype, data, &done));
    if (done) return RFR_OK;
  }
  RFI_TRY(take_stored(w, shard, stored, name, rank, shape));
  return rfi_safetensors_read_as(w->shards[shard], stored, dtype, data, stored->elements);
}

/* The stored tensors of a parameter: itself, or its pieces. */
static rfr_status count_pieces(rfi_weights *w, const rfr_tensor *x, int *n) {
  const rfi_stored *packed;
  int shard = 0;
  RFI_TRY(find_outer(w, x->name, &shard, &packed));
  *n = packed ? 0 : rfi_hf_pieces(x->name, &x->type);
  return RFR_OK;
}

static void piece_of(const rfr_model_config *c, const rfr_tensor *x, int pieces, int i, rfi_hf_tensor *out) {
  if (pieces > 0) {
    rfi_hf_piece(c, x->name, &x->type, i, out);
    return;
  }
  *out = (rfi_hf_tensor){.rank = x->type.rank};
  snprintf(out->name, sizeof out->name, "%s", x->name);
  memcpy(out->shape, x->type.shape, sizeof out->shape);
}

rfr_status rfi_weights_find_range(rfi_weights *w, const rfr_model_config *c, const rfr_tensor *x,
                                  rfi_weight_range *out) {
  rfr_status s = RFR_OK;
  bool codes = false;
  int pieces;
  *out = (rfi_weight_range){0};
  if (w->gguf) return RFR_OK;
  RFI_TRY(count_pieces(w, x, &pieces));
  const int n = pieces > 0 ? pieces : 1;
  RFI_TRY(RFI_ALLOC(w->ctx, (size_t)n * sizeof *out->pieces, &out->pieces));
  for (int i = 0; i < n && s == RFR_OK && !codes; i++) {
    const rfi_stored *stored;
    rfi_hf_tensor piece;
    int shard = 0;
    piece_of(c, x, pieces, i, &piece);
    s = find_tensor(w, piece.name, &shard, &stored);
    codes = s == RFR_OK && has_codes(stored);
    if (s == RFR_OK && !codes) s = take_stored(w, shard, stored, piece.name, piece.rank, piece.shape);
    if (s == RFR_OK) out->pieces[i] = (rfi_weight_piece){w->shards[shard], stored};
  }
  if (s == RFR_OK && !codes) {
    out->n = n;
    return RFR_OK;
  }
  rfi_free(w->ctx, out->pieces);
  out->pieces = NULL;
  return s;
}

rfr_status rfi_weight_range_read(const rfi_weight_range *from, rfr_dtype dtype, void *data, int64_t first, int64_t n) {
  const int64_t each = from->pieces[0].stored->elements, size = rfr_dtype_bits(dtype) / 8;
  for (int64_t done = 0; done < n;) {
    const rfi_weight_piece *p = &from->pieces[(first + done) / each];
    const int64_t at = (first + done) % each, some = each - at < n - done ? each - at : n - done;
    RFI_TRY(rfi_safetensors_read_range(p->file, p->stored, dtype, (char *)data + done * size, at, some));
    done += some;
  }
  return RFR_OK;
}

rfr_status rfi_weights_read(rfi_weights *w, const rfr_model_config *c, const rfr_tensor *x) {
  int pieces;
  RFI_TRY(count_pieces(w, x, &pieces));
  if (pieces == 0) return read_tensor(w, c, x->name, x->type.rank, x->type.shape, x->type.dtype, x->data);
  for (int i = 0; i < pieces; i++) {
    rfi_hf_tensor piece;
    rfi_hf_piece(c, x->name, &x->type, i, &piece);
    RFI_TRY(read_tensor(w, c, piece.name, piece.rank, piece.shape, x->type.dtype,
                        (char *)x->data + i * (x->bytes / pieces)));
  }
  return RFR_OK;
}

int64_t rfi_weights_left(const rfi_weights *w, const rfr_model_config *c, const char **name) {
  int64_t left = 0;
  for (int i = 0; w->gguf && i < rfi_gguf_tensor_count(w->gguf); i++) {
    const char *tensor = rfi_gguf_tensor_at(w->gguf, i)->name;
    if (w->gguf_was_read[i] || strcmp(tensor, "rope_freqs.weight") == 0) continue;
    if (left++ == 0) *name = tensor;
  }
  for (int i = 0; i < w->n; i++)
    for (int k = 0; k < rfi_safetensors_count(w->shards[i]); k++) {
      const char *tensor = rfi_safetensors_at(w->shards[i], k)->name;
      const bool buffer = rfi_ends_in(tensor, ".attn.bias") || rfi_ends_in(tensor, ".attn.masked_bias") ||
                          rfi_ends_in(tensor, ".rotary_emb.inv_freq") ||
                          (c->tie_embeddings && rfi_ends_in(tensor, "lm_head.weight"));
      if (w->was_read[i][k] || buffer) continue;
      if (left++ == 0) *name = tensor;
    }
  return left;
}
