/* SPDX-License-Identifier: Apache-2.0
 *
 * The rest of a model folder: ids of special tokens, unknown fields, and the files that a checkpoint copies.
 */
#include <string.h>

#include "base/base.h"
#include "data/gguf.h"
#include "data/json_file.h"
#include "model/hf.h"
#include "model/hf_families.h"
#include "model/source.h"
#include "text/gguf_tokenizer.h"
#include "text/model_file.h"

/* router_aux_loss_coef, if the folder has it but does not use it. NULL when out of memory. */
static json_t *unused_loss_of(const json_t *o) {
  static const char key[] = "router_aux_loss_coef";
  json_t *unused = json_object(), *factor = json_object_get(o, key);
  if (!unused || !json_is_number(factor) || json_is_true(json_object_get(o, "output_router_logits"))) return unused;
  if (json_object_set(unused, key, factor) == 0) return unused;
  json_decref(unused);
  return NULL;
}

/* The ids of special tokens in an object. A null is kept, because the library's defaults are numbers. NULL when out of
 * memory. */
static json_t *ids_of(const json_t *o) {
  static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
  json_t *ids = json_object();
  int wrong = ids == NULL;
  for (size_t i = 0; i < sizeof keys / sizeof keys[0] && !wrong; i++) {
    json_t *value = json_object_get(o, keys[i]);
    if (json_is_integer(value) || json_is_array(value) || json_is_null(value))
      wrong = json_object_set(ids, keys[i], value);
  }
  if (!wrong) return ids;
  json_decref(ids);
  return NULL;
}

/* Version 5 of the library writes "dtype", version 4 "torch_dtype". */
static rfr_dtype dtype_of(const json_t *o) {
  static const rfr_dtype dtypes[] = {RFR_F32, RFR_BF16, RFR_F16};
  const char *name = json_string_value(json_object_get(o, "dtype"));
  if (!name) name = json_string_value(json_object_get(o, "torch_dtype"));
  for (size_t i = 0; name && i < sizeof dtypes / sizeof dtypes[0]; i++)
    if (strcmp(name, rfi_hf_dtype_name(dtypes[i])) == 0) return dtypes[i];
  return RFR_DTYPE_COUNT;
}

#define FILE_NAME(name) name,
static const char *const file_names[RFI_HF_N_FILES] = {RFI_HF_FILES(FILE_NAME)};
#undef FILE_NAME

/* The files stay in memory for all checkpoints; the largest published tokenizer.json has about 35 MB. */
enum { KEPT_FILE_LIMIT = 256 << 20 };

/* The files of a folder; for a GGUF file, those of the corresponding folder. */
static rfr_status read_files(rfr_ctx *ctx, const char *model, rfi_hf_notes *out) {
  static const char *const tokenizers[] = {"tokenizer.json", "tokenizer.model", "vocab.json",
                                           "vocab.txt",      "merges.txt",      "spiece.model"};
  rfi_gguf *g = NULL;
  bool is_gguf;
  RFI_TRY(rfi_gguf_is(ctx, model, &is_gguf));
  if (is_gguf) RFI_TRY(rfi_gguf_open(ctx, model, &g));
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && i < RFI_HF_N_FILES; i++) {
    if (g) s = rfi_gguf_text_file(ctx, g, file_names[i], &out->files[i].data, &out->files[i].n);
    else s = rfi_model_file(ctx, model, file_names[i], KEPT_FILE_LIMIT, &out->files[i].data, &out->files[i].n);
    for (size_t k = 0; out->files[i].data && !out->tokenizer && k < sizeof tokenizers / sizeof tokenizers[0]; k++)
      if (strcmp(file_names[i], tokenizers[k]) == 0) out->tokenizer = file_names[i];
  }
  rfi_gguf_close(g);
  return s;
}

rfr_status rfi_hf_notes_read(rfr_ctx *ctx, const char *folder, rfi_hf_notes *out) {
  rfr_status s;
  char *path = NULL;
  json_t *o = NULL;
  *out = (rfi_hf_notes){.ctx = ctx};
  RFI_GOTO(rfi_source_config(ctx, folder, &path, &o));
  out->dtype = dtype_of(o);
  out->ids = ids_of(o);
  out->unused_loss = unused_loss_of(o);
  out->unknown = json_array();
  const int wrong = rfi_hf_unknown_fields(o, out->unknown);
  if (wrong || !out->ids || !out->unused_loss || !out->unknown) RFI_GOTO(rfi_fail(RFI_E_NO_MEMORY, "reading %s", path));
  RFI_GOTO(read_files(ctx, folder, out));
fail:
  if (s != RFR_OK) rfi_hf_notes_deinit(out);
  json_decref(o);
  rfi_free(ctx, path);
  return s;
}

/* The ids as in config.json: one number, or a list. NULL when out of memory. */
static json_t *ids_of_tokenizer(const rfr_tokenizer *tokenizer) {
  json_t *ids = json_object(), *ends = json_array();
  const int32_t bos = rfr_tokenizer_bos(tokenizer);
  int wrong = !ids || !ends;
  for (int i = 0; rfr_tokenizer_stop(tokenizer, i) >= 0 && !wrong; i++)
    wrong = json_array_append_new(ends, json_integer(rfr_tokenizer_stop(tokenizer, i)));
  if (!wrong && bos >= 0) wrong = json_object_set_new(ids, "bos_token_id", json_integer(bos));
  if (!wrong && json_array_size(ends) > 0)
    wrong = json_object_set(ids, "eos_token_id", json_array_size(ends) == 1 ? json_array_get(ends, 0) : ends);
  json_decref(ends);
  if (!wrong) return ids;
  json_decref(ids);
  return NULL;
}

rfr_status rfi_hf_notes_read_tokenizer(rfr_ctx *ctx, const char *path, const rfr_tokenizer *tokenizer,
                                       rfi_hf_notes *out) {
  bool is_model;
  *out = (rfi_hf_notes){.ctx = ctx, .dtype = RFR_DTYPE_COUNT};
  rfr_status s = rfi_model_has_files(ctx, path, &is_model);
  if (s == RFR_OK && is_model) s = read_files(ctx, path, out);
  for (int i = 0; i < RFI_HF_N_FILES && s == RFR_OK; i++) {
    if (!is_model && strcmp(file_names[i], "tokenizer.json") == 0)
      s = rfi_file_read_limited(ctx, path, KEPT_FILE_LIMIT, &out->files[i].data, &out->files[i].n);
    if (strcmp(file_names[i], "generation_config.json") != 0) continue;
    rfi_free(ctx, out->files[i].data);
    out->files[i].data = NULL;
    out->files[i].n = 0;
  }
  out->ids = ids_of_tokenizer(tokenizer);
  if (s == RFR_OK && !out->ids) s = rfi_fail(RFI_E_NO_MEMORY, "reading %s", path);
  if (s != RFR_OK) rfi_hf_notes_deinit(out);
  return s;
}

const char *rfi_hf_notes_file(const rfi_hf_notes *notes, const char *name, size_t *n) {
  *n = 0;
  for (int i = 0; i < RFI_HF_N_FILES; i++) {
    if (strcmp(file_names[i], name) != 0) continue;
    *n = notes->files[i].n;
    return notes->files[i].data;
  }
  return NULL;
}

void rfi_hf_notes_deinit(rfi_hf_notes *notes) {
  json_decref(notes->ids);
  json_decref(notes->unused_loss);
  json_decref(notes->unknown);
  for (int i = 0; i < RFI_HF_N_FILES; i++) rfi_free(notes->ctx, notes->files[i].data);
  *notes = (rfi_hf_notes){0};
}

/* ---- writing a checkpoint ---- */

/* Sets the fields in o and returns o. Out of memory: releases o, returns NULL. */
static json_t *with(json_t *o, json_t *fields) {
  if (!o || !fields || json_object_update(o, fields) == 0) return o;
  json_decref(o);
  return NULL;
}

json_t *rfi_hf_config_with(const rfr_model_config *c, const rfi_hf_notes *notes) {
  json_t *o = with(rfi_hf_config(c), notes->ids);
  return c->balance_loss > 0.0 ? o : with(o, notes->unused_loss);
}

static json_t *generation_config(const rfr_model_config *c, const rfi_hf_notes *notes) {
  json_t *o = json_pack("{s:b, s:f, s:I, s:n, s:n}", "do_sample", 1, "temperature", 0.8, "max_length",
                        (json_int_t)c->max_positions, "bos_token_id", "eos_token_id");
  return with(o, notes->ids);
}

static rfr_status add_json(rfr_ctx *ctx, rfi_checkpoint_writer *w, const char *name, json_t *value) {
  rfi_string text = {.ctx = ctx};
  if (!value) return rfi_fail(RFI_E_NO_MEMORY, "building %s", name);
  rfr_status s = rfi_json_print(value, &text);
  json_decref(value);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, name, text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

rfr_status rfi_hf_save_files(const rfi_hf_notes *notes, rfi_checkpoint_writer *w) {
  for (int i = 0; i < RFI_HF_N_FILES; i++)
    if (notes->files[i].data) RFI_TRY(rfi_checkpoint_add(w, file_names[i], notes->files[i].data, notes->files[i].n));
  return RFR_OK;
}

rfr_status rfi_hf_save(rfr_ctx *ctx, const rfr_model_config *c, const rfi_hf_notes *notes, rfi_checkpoint_writer *w) {
  RFI_TRY(add_json(ctx, w, "config.json", rfi_hf_config_with(c, notes)));
  RFI_TRY(rfi_hf_save_files(notes, w));
  if (notes->files[0].data) return RFR_OK; /* generation_config.json */
  return add_json(ctx, w, "generation_config.json", generation_config(c, notes));
}
