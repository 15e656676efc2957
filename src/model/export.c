/* SPDX-License-Identifier: Apache-2.0
 *
 * Exports: the weights are read one parameter at a time as f32, merged with the adapter's, and written in the order of
 * the model's parameters. The adapter of a run is merged only into the base that it was trained on, and where the run
 * quantized the base (adapter.base), into the quantized weights: the result computes what the run computes.
 */
#include <stdio.h>
#include <string.h>

#include "core/convert.h"
#include "data/checkpoint.h"
#include "data/gguf_write.h"
#include "data/hash.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "model/averages.h"
#include "model/gguf_model.h"
#include "model/hf.h"
#include "model/peft.h"
#include "model/source.h"
#include "model/weights.h"
#include "nn/adapter.h"
#include "ops/quant/formats.h"
#include "refrain/model.h"
#include "text/gguf_tokenizer.h"

#define SHARD_BYTES 5000000000
enum { CHUNK = 1 << 20 }; /* elements per conversion */

typedef struct exporter {
  rfr_ctx *ctx;
  char *base, *folder; /* folder of the weights; folder of the adapter, or NULL */
  rfi_hf_notes notes;
  rfr_model_config c; /* dtype: that of the result */
  rfi_weights *weights;
  rfi_safetensors *averages; /* averages that replace trained weights; NULL: none */
  rfi_peft *peft;
  rfr_adapter *adapter;
  rfr_model_config run; /* for an adapter of a run: dtype and format of the base in that run */
} exporter;

rfr_export_options rfr_export_options_default(void) {
  return (rfr_export_options){.size = sizeof(rfr_export_options), .format = "hf"};
}

/* ---- reading ---- */

/* Finds the weights and the adapter of a MODEL: a run's newest checkpoint; for an adapter, also its base model. */
static rfr_status find_model(exporter *e, const char *model) {
  char *path = NULL, kind = 0;
  rfi_checkpoint *checkpoint = NULL;
  json_t *config = NULL;
  const char *base = NULL;
  bool gguf;
  RFI_TRY(rfi_gguf_is(e->ctx, model, &gguf));
  if (gguf) return rfi_path_join(e->ctx, "", model, &e->base);
  rfr_status s = rfi_path_join(e->ctx, model, "config.yaml", &path);
  if (s == RFR_OK) s = rfi_path_kind(path, &kind);
  rfi_free(e->ctx, path);
  path = NULL;
  if (s == RFR_OK && kind) {
    s = rfi_checkpoint_latest(e->ctx, NULL, model, &checkpoint, NULL);
    if (s == RFR_OK && !checkpoint) s = rfi_fail(RFI_E_RUN_FOLDER, "%s: the run has no checkpoint yet", model);
  }
  if (s == RFR_OK) s = rfi_path_join(e->ctx, "", checkpoint ? checkpoint->folder : model, &e->base);
  rfi_checkpoint_close(checkpoint);
  if (s == RFR_OK) s = rfi_path_join(e->ctx, e->base, RFI_PEFT_CONFIG, &path);
  if (s == RFR_OK) s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind) {
    s = rfi_json_load(e->ctx, path, &config);
    if (s == RFR_OK && json_is_null(json_object_get(config, "base_model_name_or_path")))
      s = rfi_fail(
          RFI_E_ADAPTER_BASE,
          "%s: the base of the adapter has the random weights of run.seed and is not stored in a folder: train a base "
          "without adapter.type, export it, and train the adapter with this folder as model",
          model);
    if (s == RFR_OK) s = rfi_json_get_string(config, path, "base_model_name_or_path", true, &base);
    e->folder = e->base;
    e->base = NULL;
    if (s == RFR_OK) s = rfi_path_join(e->ctx, "", base, &e->base);
  }
  json_decref(config);
  rfi_free(e->ctx, path);
  return s;
}

static int64_t elements_of(const rfr_parameter *p) {
  int64_t n = 1;
  for (int d = 0; d < p->rank; d++) n *= p->shape[d];
  return n;
}

static rfr_type type_of(const rfr_parameter *p, rfr_dtype dtype) {
  rfr_type type = {.dtype = dtype, .rank = p->rank};
  memcpy(type.shape, p->shape, sizeof p->shape);
  return type;
}

/* The hash that train/load_weights.c computes of the base of an adapter. */
static rfr_status hash_base(exporter *e, char hash[33]) {
  rfi_hash sum = {0};
  for (int i = 0; i < e->adapter->base_count; i++) {
    rfr_parameter p;
    rfr_tensor x;
    RFI_TRY(rfr_model_parameter(&e->c, i, &p));
    x = (rfr_tensor){.name = p.name, .type = type_of(&p, e->run.dtype)};
    x.bytes = elements_of(&p) * rfr_dtype_bits(e->run.dtype) / 8;
    RFI_TRY(RFI_ALLOC(e->ctx, (size_t)x.bytes, &x.data));
    const rfr_status s = rfi_weights_read(e->weights, &e->run, &x);
    if (s == RFR_OK) rfi_hash_add_tensor(&sum, p.name, (uint64_t)e->run.dtype, x.data, (size_t)x.bytes);
    rfi_free(e->ctx, x.data);
    RFI_TRY(s);
  }
  rfi_hash_format(hash, sum);
  return RFR_OK;
}

/* If the adapter belongs to a run, reads how the run stored the base, and checks that the base is the same. */
static rfr_status check_base(exporter *e) {
  char *path = NULL, kind, mine[33];
  json_t *state = NULL;
  RFI_TRY(rfi_path_join(e->ctx, e->folder, "state.json", &path));
  rfr_status s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind) s = rfi_json_load(e->ctx, path, &state);
  if (s == RFR_OK && state) {
    const json_t *keys = json_object_get(state, "configuration");
    const char *hash = json_string_value(json_object_get(json_object_get(state, "base"), "hash"));
    const char *dtype = json_string_value(json_object_get(keys, "precision.dtype"));
    const char *base = json_string_value(json_object_get(keys, "adapter.base"));
    e->run = e->c;
    e->run.dtype = dtype ? rfr_dtype_parse(dtype) : RFR_DTYPE_COUNT;
    for (int q = RFR_QUANT_NONE + 1; base && q < RFR_QUANT_COUNT; q++)
      if (strcmp(base, rfr_quant_name((rfr_quant)q)) == 0) e->run.base_format = (rfr_quant)q;
    if (!hash || e->run.dtype == RFR_DTYPE_COUNT)
      s = rfi_fail_at(RFI_E_CHECKPOINT, path, 0, "\"base\" or \"precision.dtype\" is missing");
    if (s == RFR_OK) s = hash_base(e, mine);
    if (s == RFR_OK && strcmp(hash, mine) != 0)
      s = rfi_fail_at(RFI_E_ADAPTER_BASE, path, 0,
                      "the adapter was trained on a model with hash %.32s; the model %.200s has hash %s", hash, e->base,
                      mine);
  }
  json_decref(state);
  rfi_free(e->ctx, path);
  return s;
}

/* The values of a weight that the run quantized, as it computes with them. */
static rfr_status read_quantized(exporter *e, const rfr_parameter *p, rfr_quant format, float *values) {
  const int64_t n = elements_of(p);
  rfr_tensor x = {.name = p->name, .type = type_of(p, e->run.dtype), .bytes = n * rfr_dtype_bits(e->run.dtype) / 8};
  void *packed = NULL;
  RFI_TRY(RFI_ALLOC(e->ctx, (size_t)x.bytes, &x.data));
  rfr_status s = RFI_ALLOC(e->ctx, (size_t)rfr_quant_bytes(format, p->rank, p->shape), &packed);
  if (s == RFR_OK) s = rfi_weights_read(e->weights, &e->run, &x);
  if (s == RFR_OK)
    s = rfr_quant_encode(e->ctx, format, p->rank, p->shape, e->run.dtype, x.data, rfi_ctx_threads(e->ctx), packed);
  if (s == RFR_OK) rfi_quant_decode(format, p->rank, p->shape, packed, values);
  if (s == RFR_OK && e->run.dtype != RFR_F32) {
    rfi_convert(e->run.dtype, x.data, RFR_F32, values, n);
    rfi_convert(RFR_F32, values, e->run.dtype, x.data, n);
  }
  rfi_free(e->ctx, packed);
  rfi_free(e->ctx, x.data);
  return s;
}

static rfr_status open_model(exporter *e, const char *model, rfr_dtype dtype, bool ema) {
  RFI_TRY(find_model(e, model));
  e->c.dtype = RFR_F32;
  RFI_TRY(rfi_hf_read(e->ctx, e->base, false, &e->c));
  RFI_TRY(rfi_hf_notes_read(e->ctx, e->base, &e->notes));
  e->c.dtype = dtype != RFR_DTYPE_COUNT ? dtype : e->notes.dtype != RFR_DTYPE_COUNT ? e->notes.dtype : RFR_BF16;
  RFI_TRY(rfi_weights_open(e->ctx, e->base, &e->weights));
  if (ema) RFI_TRY(rfi_averages_open(e->ctx, e->folder ? e->folder : e->base, &e->averages));
  if (!e->folder) return RFR_OK;
  RFI_TRY(rfi_peft_open(e->ctx, e->folder, &e->peft));
  return rfi_peft_adapter(e->peft, &e->c, 0.0, &e->adapter);
}

static void close_model(exporter *e) {
  rfr_adapter_destroy(e->adapter);
  rfi_peft_close(e->peft);
  rfi_weights_close(e->weights);
  rfi_safetensors_close(e->averages);
  rfi_hf_notes_deinit(&e->notes);
  rfi_free(e->ctx, e->base);
  rfi_free(e->ctx, e->folder);
}

/* The average of a parameter, which replaces the trained values; *found false: it has none. */
static rfr_status read_average(exporter *e, const rfr_parameter *p, float *values, bool *found) {
  *found = false;
  if (!e->averages) return RFR_OK;
  return rfi_averages_read(e->averages, e->folder ? e->folder : e->base, p->name, elements_of(p), values, found);
}

/* Parameter i of the adapter, as f32; `with`: the model with the adapter. Free with rfi_free. */
static rfr_status read_adapter(exporter *e, const rfr_model_config *with, int i, rfr_parameter *p, float **out) {
  bool averaged;
  RFI_TRY(rfr_model_parameter(with, i, p));
  RFI_TRY(RFI_ALLOC(e->ctx, (size_t)elements_of(p) * sizeof **out, out));
  RFI_TRY(read_average(e, p, *out, &averaged));
  return averaged ? RFR_OK : rfi_peft_read(e->peft, with, i, *out);
}

/* Merges the adapter of a parameter into its values. */
static rfr_status merge(exporter *e, const rfi_adapter_target *target, float *values) {
  float *parts[3] = {NULL};
  rfr_status s = RFR_OK;
  rfr_model_config with = e->c;
  with.adapter = e->adapter;
  for (int k = 0; s == RFR_OK && k < 2 + (e->adapter->dora != 0); k++) {
    rfr_parameter p;
    s = read_adapter(e, &with, target->first + k, &p, &parts[k]);
  }
  if (s == RFR_OK) rfi_adapter_merge(&e->c, target, parts[0], parts[1], parts[2], rfi_ctx_threads(e->ctx), values);
  for (int k = 0; k < 3; k++) rfi_free(e->ctx, parts[k]);
  return s;
}

/* The values of parameter i; free with rfi_free. */
static rfr_status read_values(exporter *e, int i, float **out) {
  rfr_parameter p;
  RFI_TRY(rfr_model_parameter(&e->c, i, &p));
  RFI_TRY(RFI_ALLOC(e->ctx, (size_t)elements_of(&p) * sizeof **out, out));
  const rfr_tensor x = {.name = p.name, .type = type_of(&p, RFR_F32), .bytes = 4 * elements_of(&p), .data = *out};
  rfr_parameter held = {.format = RFR_QUANT_NONE};
  if (e->run.base_format != RFR_QUANT_NONE) RFI_TRY(rfr_model_parameter(&e->run, i, &held));
  bool averaged;
  rfr_status s = read_average(e, &p, *out, &averaged);
  if (s == RFR_OK && !averaged)
    s = held.format == RFR_QUANT_NONE ? rfi_weights_read(e->weights, &e->c, &x)
                                      : read_quantized(e, &p, held.format, *out);
  const rfi_adapter_target *target = e->adapter ? rfi_adapter_find(e->adapter, i) : NULL;
  if (s == RFR_OK && target) s = merge(e, target, *out);
  return s;
}

static rfr_status check_space(const char *out, int64_t bytes) {
  int64_t space;
  RFI_TRY(rfi_dir_space(out, &space));
  if (bytes <= space) return RFR_OK;
  return rfi_fail_at(RFI_E_FILE_SPACE, out, 0, "%lld bytes are needed; %lld are free", (long long)bytes,
                     (long long)space);
}

/* ---- folders ---- */

/* Parameters [first, end) of one file. */
typedef struct shard {
  int first, end;
  char name[64];
} shard;

static rfr_status plan_shards(exporter *e, shard **out, int *n, int64_t *bytes) {
  const int count = rfr_model_parameter_count(&e->c);
  const int64_t size = rfr_dtype_bits(e->c.dtype) / 8;
  int64_t in_shard = 0;
  RFI_TRY(RFI_ALLOC(e->ctx, ((size_t)count + 1) * sizeof **out, out));
  *n = 1;
  *bytes = 0;
  for (int i = 0; i < count; i++) {
    rfr_parameter p;
    RFI_TRY(rfr_model_parameter(&e->c, i, &p));
    const int64_t own = elements_of(&p) * size;
    if (in_shard > 0 && in_shard + own > SHARD_BYTES) {
      (*out)[(*n)++].first = i;
      in_shard = 0;
    }
    in_shard += own;
    *bytes += own;
    (*out)[*n - 1].end = i + 1;
  }
  for (int k = 0; k < *n; k++) {
    if (*n == 1) snprintf((*out)[k].name, sizeof(*out)[k].name, "model.safetensors");
    else snprintf((*out)[k].name, sizeof(*out)[k].name, "model-%05d-of-%05d.safetensors", k + 1, *n);
  }
  return RFR_OK;
}

static rfr_status write_shard_header(exporter *e, const shard *k, rfi_file *file, json_t *map) {
  rfi_safetensors_entry *entries = NULL;
  rfi_hf_tensor *names = NULL;
  rfr_parameter p;
  rfr_status s = RFR_OK;
  int total = 0, n = 0;
  for (int i = k->first; i < k->end; i++) {
    RFI_TRY(rfr_model_parameter(&e->c, i, &p));
    const rfr_type type = type_of(&p, e->c.dtype);
    total += rfi_hf_pieces(p.name, &type);
  }
  s = RFI_ALLOC(e->ctx, ((size_t)total + 1) * sizeof *entries, &entries);
  if (s == RFR_OK) s = RFI_ALLOC(e->ctx, ((size_t)total + 1) * sizeof *names, &names);
  for (int i = k->first; s == RFR_OK && i < k->end; i++) {
    s = rfr_model_parameter(&e->c, i, &p);
    const rfr_type type = type_of(&p, e->c.dtype);
    for (int j = 0; s == RFR_OK && j < rfi_hf_pieces(p.name, &type); j++, n++) {
      rfi_hf_piece(&e->c, p.name, &type, j, &names[n]);
      entries[n] = (rfi_safetensors_entry){.name = names[n].name, .dtype = e->c.dtype, .rank = names[n].rank};
      memcpy(entries[n].shape, names[n].shape, sizeof names[n].shape);
      s = rfi_json_set(map, names[n].name, json_string(k->name));
    }
  }
  if (s == RFR_OK) s = rfi_safetensors_write_header(e->ctx, file, entries, n, NULL, 0, NULL);
  rfi_free(e->ctx, names);
  rfi_free(e->ctx, entries);
  return s;
}

static rfr_status write_converted(exporter *e, rfi_file *file, const float *values, int64_t n) {
  const int64_t size = rfr_dtype_bits(e->c.dtype) / 8;
  char *chunk;
  if (e->c.dtype == RFR_F32) return rfi_file_append(file, values, (size_t)n * 4);
  RFI_TRY(RFI_ALLOC(e->ctx, CHUNK * (size_t)size, &chunk));
  rfr_status s = RFR_OK;
  for (int64_t i = 0; s == RFR_OK && i < n; i += CHUNK) {
    const int64_t k = n - i < CHUNK ? n - i : CHUNK;
    rfi_convert(e->c.dtype, chunk, RFR_F32, values + i, k);
    s = rfi_file_append(file, chunk, (size_t)(k * size));
  }
  rfi_free(e->ctx, chunk);
  return s;
}

static rfr_status write_weights(exporter *e, rfi_checkpoint_writer *w, const shard *shards, int n, json_t *map) {
  for (int k = 0; k < n; k++) {
    rfi_file *file;
    RFI_TRY(rfi_checkpoint_file(w, shards[k].name, &file));
    RFI_TRY(write_shard_header(e, &shards[k], file, map));
    for (int i = shards[k].first; i < shards[k].end; i++) {
      rfr_parameter p;
      float *values = NULL;
      rfr_status s = rfr_model_parameter(&e->c, i, &p);
      if (s == RFR_OK) s = read_values(e, i, &values);
      if (s == RFR_OK) s = write_converted(e, file, values, elements_of(&p));
      rfi_free(e->ctx, values);
      RFI_TRY(s);
    }
  }
  return RFR_OK;
}

static rfr_status write_index(exporter *e, rfi_checkpoint_writer *w, json_t *map, int64_t bytes) {
  rfi_string text = {.ctx = e->ctx};
  json_t *index = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)bytes, "weight_map", map);
  rfr_status s = index ? rfi_json_print(index, &text) : rfi_fail(RFI_E_NO_MEMORY, "building the index");
  json_decref(index);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, "model.safetensors.index.json", text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

static rfr_status export_hf(exporter *e, const char *out) {
  rfr_status s;
  rfi_checkpoint_writer *w = NULL;
  shard *shards = NULL;
  json_t *map = json_object();
  int n;
  int64_t bytes;
  RFI_GOTO(plan_shards(e, &shards, &n, &bytes));
  RFI_GOTO(check_space(out, bytes));
  RFI_GOTO(rfi_checkpoint_begin_folder(e->ctx, out, &w));
  RFI_GOTO(rfi_hf_save(e->ctx, &e->c, &e->notes, w));
  RFI_GOTO(write_weights(e, w, shards, n, map));
  if (n > 1) RFI_GOTO(write_index(e, w, map, bytes));
fail:
  if (w) s = rfi_checkpoint_finish(w, s);
  json_decref(map);
  rfi_free(e->ctx, shards);
  return s;
}

/* ---- GGUF ---- */

/* *out NULL: there is no such file. Integers of tokenizer_config.json are read as reals, because model_max_length may
 * have 31 digits. */
static rfr_status parse_file(const rfi_hf_notes *notes, const char *name, json_t **out) {
  size_t n;
  const char *data = rfi_hf_notes_file(notes, name, &n);
  if (!data) return RFR_OK;
  return strcmp(name, "tokenizer_config.json") == 0 ? rfi_json_parse_reals(name, data, n, out)
                                                    : rfi_json_parse(name, data, n, out);
}

/* Without a tokenizer, the file states that it has no vocabulary. */
static rfr_status put_vocabulary(exporter *e, rfi_gguf_writer *w) {
  json_t *tokenizer = NULL, *config = NULL, *generation = NULL;
  rfr_status s = parse_file(&e->notes, "tokenizer.json", &tokenizer);
  if (s == RFR_OK && !tokenizer && e->notes.tokenizer)
    s = rfi_fail(RFI_E_UNSUPPORTED, "the tokenizer of %s is %s; GGUF files are made from tokenizer.json", e->base,
                 e->notes.tokenizer);
  if (s == RFR_OK) s = parse_file(&e->notes, "tokenizer_config.json", &config);
  if (s == RFR_OK) s = parse_file(&e->notes, "generation_config.json", &generation);
  if (s == RFR_OK && tokenizer) {
    rfi_gguf_text_files from = {"tokenizer.json", tokenizer, config, generation ? generation : e->notes.ids, NULL, 0};
    from.chat_template = rfi_hf_notes_file(&e->notes, "chat_template.jinja", &from.n_template);
    s = rfi_gguf_put_text_files(e->ctx, w, &from, e->c.vocab_size);
  } else if (s == RFR_OK) {
    rfi_gguf_put_text(w, "tokenizer.ggml.model", "no_vocab", 8);
  }
  json_decref(tokenizer);
  json_decref(config);
  json_decref(generation);
  return s;
}

typedef rfr_status (*write_tensors)(exporter *e, rfi_gguf_writer *w, rfi_file *file);

static rfr_status write_model(exporter *e, rfi_gguf_writer *w, rfi_file *file) {
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && i < rfr_model_parameter_count(&e->c); i++) {
    float *values = NULL;
    s = read_values(e, i, &values);
    if (s == RFR_OK) s = rfi_gguf_write_parameter(e->ctx, w, file, &e->c, i, values);
    rfi_free(e->ctx, values);
  }
  return s;
}

static rfr_status write_temporary(exporter *e, rfi_gguf_writer *w, const char *temporary, write_tensors write) {
  rfi_file *file;
  RFI_TRY(rfi_file_create(e->ctx, temporary, &file));
  rfr_status s = rfi_gguf_write_header(w, file);
  if (s == RFR_OK) s = write(e, w, file);
  if (s == RFR_OK) return rfi_file_finish(file, NULL);
  rfi_file_close(file);
  return s;
}

/* Writes a file with the writer's keys and tensors. */
static rfr_status write_gguf(exporter *e, rfi_gguf_writer *w, const char *out, write_tensors write) {
  rfr_status s;
  char *temporary = NULL, *parent = NULL;
  RFI_GOTO(rfi_path_parent(e->ctx, out, &parent));
  RFI_GOTO(rfi_dir_create(parent));
  RFI_GOTO(check_space(parent, rfi_gguf_writer_bytes(w)));
  RFI_GOTO(rfi_path_temporary(e->ctx, out, &temporary));
  RFI_GOTO(rfi_tree_remove(e->ctx, temporary)); /* left by a dead process that had our process id */
  s = write_temporary(e, w, temporary, write);
  if (s == RFR_OK) s = rfi_file_rename(e->ctx, temporary, out);
  if (s != RFR_OK) rfi_tree_discard(temporary);
fail:
  rfi_free(e->ctx, temporary);
  rfi_free(e->ctx, parent);
  return s;
}

static rfr_status export_gguf(exporter *e, const char *out, const rfi_block_format *format) {
  rfi_gguf_writer *w;
  RFI_TRY(rfi_gguf_writer_create(e->ctx, &w));
  rfr_status s = rfi_gguf_put_model(w, &e->c, format);
  if (s == RFR_OK) s = put_vocabulary(e, w);
  if (s == RFR_OK) s = write_gguf(e, w, out, write_model);
  rfi_gguf_writer_destroy(w);
  return s;
}

/* ---- GGUF adapters ---- */

/* A or B of a target, as f32. */
static rfr_status read_part(exporter *e, const rfi_adapter_target *target, int part, rfr_parameter *p, float **out) {
  rfr_model_config with = e->c;
  with.adapter = e->adapter;
  return read_adapter(e, &with, target->first + part, p, out);
}

/* The file has one alpha for all targets, because llama.cpp scales by alpha / rank. */
static rfr_status put_adapter(exporter *e, rfi_gguf_writer *w) {
  const rfi_block_format *f32 = rfi_block_format_named("F32");
  double alpha = 0.0;
  if (e->adapter->dora)
    return rfi_fail(RFI_E_UNSUPPORTED, "GGUF adapters do not support DoRA; format gguf merges the adapter");
  for (int i = 0; i < e->adapter->n; i++) {
    const rfi_adapter_target *t = &e->adapter->targets[i];
    const double own = t->scale * (double)t->rank;
    if (i > 0 && own != alpha)
      return rfi_fail(RFI_E_UNSUPPORTED, "a GGUF adapter has one alpha; the targets have %g and %g", alpha, own);
    alpha = own;
  }
  RFI_TRY(rfi_gguf_put_adapter(w, &e->c, alpha));
  for (int i = 0; i < e->adapter->n; i++) {
    const rfi_adapter_target *t = &e->adapter->targets[i];
    char base[128], name[160];
    int64_t head_dim;
    rfr_parameter p;
    rfr_model_config with = e->c;
    with.adapter = e->adapter;
    RFI_TRY(rfr_model_parameter(&e->c, t->parameter, &p));
    if (!rfi_gguf_matrix_name(&e->c, t->parameter, base, sizeof base, &head_dim))
      return rfi_fail(RFI_E_UNSUPPORTED, "an adapter on %s cannot be written as a GGUF adapter; format gguf merges it",
                      p.name);
    for (int k = 0; k < 2; k++) {
      RFI_TRY(rfr_model_parameter(&with, t->first + k, &p));
      rfi_snprintf(name, sizeof name, "%s.lora_%c", base, "ab"[k]);
      rfi_gguf_put_tensor(w, name, f32, p.rank, p.shape);
    }
  }
  return RFR_OK;
}

/* The order of B's rows is that of the weight. */
static rfr_status write_adapter(exporter *e, rfi_gguf_writer *w, rfi_file *file) {
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && i < 2 * e->adapter->n; i++) {
    const rfi_adapter_target *t = &e->adapter->targets[i / 2];
    char name[128];
    int64_t head_dim = 0;
    rfr_parameter p;
    float *values = NULL, *moved = NULL;
    s = read_part(e, t, i % 2, &p, &values);
    rfi_gguf_matrix_name(&e->c, t->parameter, name, sizeof name, &head_dim);
    const bool move = i % 2 && head_dim > 0;
    if (s == RFR_OK && move) s = RFI_ALLOC(e->ctx, (size_t)elements_of(&p) * sizeof *moved, &moved);
    if (s == RFR_OK && move) rfi_gguf_interleave(values, p.shape[0], p.shape[1], head_dim, moved);
    if (s == RFR_OK) s = rfi_gguf_write_rows(w, file, move ? moved : values, p.shape[0]);
    rfi_free(e->ctx, moved);
    rfi_free(e->ctx, values);
  }
  return s;
}

static rfr_status need_adapter(const exporter *e) {
  return e->folder ? RFR_OK : rfi_fail(RFI_E_ARGUMENT, "%s has no adapter; export it as hf or gguf", e->base);
}

static rfr_status export_gguf_lora(exporter *e, const char *out) {
  rfi_gguf_writer *w;
  RFI_TRY(need_adapter(e));
  RFI_TRY(rfi_gguf_writer_create(e->ctx, &w));
  rfr_status s = put_adapter(e, w);
  if (s == RFR_OK) s = write_gguf(e, w, out, write_adapter);
  rfi_gguf_writer_destroy(w);
  return s;
}

/* ---- adapters ---- */

/* Copies a file of the adapter. */
static rfr_status copy_file(exporter *e, rfi_checkpoint_writer *w, const char *name) {
  char *path = NULL, *data = NULL;
  size_t n;
  rfr_status s = rfi_path_join(e->ctx, e->folder, name, &path);
  if (s == RFR_OK) s = rfi_file_read(e->ctx, path, &data, &n);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, name, data, n);
  rfi_free(e->ctx, data);
  rfi_free(e->ctx, path);
  return s;
}

static rfr_status append_average(exporter *e, const rfr_model_config *with, int i, rfi_file *file) {
  rfr_parameter p;
  float *values = NULL, *ordered = NULL;
  rfr_status s = read_adapter(e, with, i, &p, &values);
  if (s == RFR_OK) s = RFI_ALLOC(e->ctx, (size_t)elements_of(&p) * sizeof *ordered, &ordered);
  if (s == RFR_OK) {
    const rfr_type type = type_of(&p, RFR_F32);
    rfi_adapter_part part;
    (void)rfi_adapter_owner(with, i, &part);
    rfi_peft_order(&type, part == RFI_ADAPTER_B, true, sizeof *values, values, ordered);
    s = rfi_file_append(file, ordered, (size_t)elements_of(&p) * sizeof *ordered);
  }
  rfi_free(e->ctx, values);
  rfi_free(e->ctx, ordered);
  return s;
}

/* Writes the adapter's averages as its weights, in f32. */
static rfr_status write_averages(exporter *e, rfi_checkpoint_writer *w) {
  rfr_model_config with = e->c;
  with.adapter = e->adapter;
  const int first = e->adapter->base_count, n = e->adapter->count;
  rfr_status s;
  rfi_file *file;
  rfi_safetensors_entry *entries = NULL;
  char(*names)[RFI_PEFT_NAME] = NULL;
  RFI_TRY(RFI_ALLOC(e->ctx, (size_t)n * sizeof *entries, &entries));
  RFI_GOTO(RFI_ALLOC(e->ctx, (size_t)n * sizeof *names, &names));
  for (int i = 0; i < n; i++) {
    rfr_type type;
    rfi_peft_tensor(&with, first + i, names[i], &type);
    entries[i] = (rfi_safetensors_entry){.name = names[i], .dtype = RFR_F32, .rank = type.rank};
    memcpy(entries[i].shape, type.shape, (size_t)type.rank * sizeof *type.shape);
  }
  RFI_GOTO(rfi_checkpoint_file(w, RFI_PEFT_WEIGHTS, &file));
  RFI_GOTO(rfi_safetensors_write_header(e->ctx, file, entries, n, NULL, 0, NULL));
  for (int i = 0; i < n; i++) RFI_GOTO(append_average(e, &with, first + i, file));
fail:
  rfi_free(e->ctx, entries);
  rfi_free(e->ctx, names);
  return s;
}

/* The adapter's two files and the tokenizer of its base. */
static rfr_status export_peft(exporter *e, const char *out) {
  rfi_checkpoint_writer *w;
  RFI_TRY(need_adapter(e));
  RFI_TRY(rfi_checkpoint_begin_folder(e->ctx, out, &w));
  rfr_status s = copy_file(e, w, RFI_PEFT_CONFIG);
  if (s == RFR_OK) s = e->averages ? write_averages(e, w) : copy_file(e, w, RFI_PEFT_WEIGHTS);
  if (s == RFR_OK) s = rfi_hf_save_files(&e->notes, w);
  return rfi_checkpoint_finish(w, s);
}

rfr_status rfr_export(rfr_ctx *ctx, const char *model, const char *out, const rfr_export_options *options) {
  exporter e = {.ctx = ctx};
  char kind;
  rfr_export_options o = rfr_export_options_default();
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!model || !out) return rfi_fail(RFI_E_ARGUMENT, "the path of a model and of the output are needed");
  if (options) {
    RFI_TRY(rfi_check_options("rfr_export_options", options, options->size, sizeof o));
    o = *options;
  }
  static const char *const formats[] = {"hf", "gguf", "peft", "gguf-lora"};
  enum { HF, GGUF, PEFT, GGUF_LORA, N };
  int which = 0;
  while (which < N && (!o.format || strcmp(o.format, formats[which]) != 0)) which++;
  if (which == N)
    return rfi_fail(RFI_E_ARGUMENT, "the format \"%s\" is none of hf, gguf, peft and gguf-lora",
                    o.format ? o.format : "");
  const rfi_block_format *format = o.dtype ? rfi_block_format_named(o.dtype) : NULL;
  if (o.dtype && (which >= PEFT || !format || !format->encode || (which != GGUF && format->dtype == RFR_DTYPE_COUNT)))
    return rfi_fail(RFI_E_ARGUMENT, "the type \"%s\" cannot be written as %s", o.dtype, o.format);
  RFI_TRY(rfi_path_kind(out, &kind));
  if (kind) return rfi_fail(RFI_E_EXPORT_EXISTS, "%s exists; nothing was written", out);
  rfr_status s = open_model(&e, model, format ? format->dtype : RFR_DTYPE_COUNT, o.ema != 0);
  if (s == RFR_OK && e.folder && which < PEFT) s = check_base(&e);
  if (s == RFR_OK && !format) format = rfi_block_format_named(rfr_dtype_name(e.c.dtype));
  if (s == RFR_OK)
    s = which == GGUF        ? export_gguf(&e, out, format)
        : which == GGUF_LORA ? export_gguf_lora(&e, out)
        : which == PEFT      ? export_peft(&e, out)
                             : export_hf(&e, out);
  close_model(&e);
  return s;
}
