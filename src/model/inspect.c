/* SPDX-License-Identifier: Apache-2.0
 *
 * rfr_inspect: the facts are collected as one JSON object, which is printed as such or as text.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "data/file.h"
#include "data/gguf.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "model/hf.h"
#include "model/peft.h"
#include "refrain/model.h"

typedef struct report {
  rfr_ctx *ctx;
  json_t *root, *tensors;
  int64_t bytes, elements;
} report;

static rfr_status put(json_t *o, const char *key, json_t *value) { return rfi_json_set(o, key, value); }

static rfr_status put_tensor(report *r, const char *name, const char *type, int rank, const int64_t *shape,
                             int64_t elements, int64_t bytes) {
  json_t *dims = json_array();
  int wrong = 0;
  for (int d = 0; d < rank; d++) wrong |= json_array_append_new(dims, json_integer(shape[d]));
  wrong |= json_array_append_new(r->tensors, json_pack("{s:s, s:s, s:o, s:I}", "name", name, "type", type, "shape",
                                                       dims, "bytes", (json_int_t)bytes));
  r->bytes += bytes;
  r->elements += elements;
  return wrong ? rfi_fail(RFI_E_NO_MEMORY, "listing tensors") : RFR_OK;
}

static rfr_status put_safetensors(report *r, const char *path) {
  rfi_safetensors *st;
  RFI_TRY(rfi_safetensors_open(r->ctx, path, &st));
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && i < rfi_safetensors_count(st); i++) {
    const rfi_stored *t = rfi_safetensors_at(st, i);
    s = put_tensor(r, t->name, t->dtype_name, t->rank, t->shape, t->elements, t->bytes);
  }
  rfi_safetensors_close(st);
  return s;
}

/* The model's description, or the reason why it cannot be loaded. Errors of the file system and of memory are returned,
 * and so is the error that the folder is a run. */
static rfr_status put_model(report *r, const char *path) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfi_hf_notes notes = {0};
  rfr_status s = rfi_hf_read(r->ctx, path, false, &c);
  if (s == RFR_OK) s = rfi_hf_notes_read(r->ctx, path, &notes);
  /* the folder is not a model, and the error names one */
  if (s != RFR_OK && strcmp(rfr_last_error()->slug, "run.folder") == 0) return s;
  if (s == RFR_INVALID || s == RFR_UNSUPPORTED || s == RFR_MISMATCH)
    return put(r->root, "not_supported", json_string(rfr_last_error()->message));
  if (s == RFR_OK) {
    int64_t parameters = 0;
    rfr_parameter p;
    c.dtype = notes.dtype != RFR_DTYPE_COUNT ? notes.dtype : RFR_BF16;
    for (int i = 0; rfr_model_parameter(&c, i, &p) == RFR_OK; i++) {
      int64_t n = 1;
      for (int d = 0; d < p.rank; d++) n *= p.shape[d];
      parameters += n;
    }
    size_t n_template, n_config;
    const char *template = rfi_hf_notes_file(&notes, "chat_template.jinja", &n_template);
    const char *config = rfi_hf_notes_file(&notes, "tokenizer_config.json", &n_config);
    const bool chat = template || (config && strstr(config, "\"chat_template\""));
    s = put(r->root, "model", rfi_hf_config_with(&c, &notes));
    if (s == RFR_OK) s = put(r->root, "parameters", json_integer(parameters));
    if (s == RFR_OK) s = put(r->root, "tokenizer", notes.tokenizer ? json_string(notes.tokenizer) : json_null());
    if (s == RFR_OK) s = put(r->root, "chat_template", json_boolean(chat));
    if (s == RFR_OK) s = put(r->root, "unknown_fields", json_incref(notes.unknown));
  }
  rfi_hf_notes_deinit(&notes);
  return s;
}

/* ---- kinds ---- */

/* A value of the metadata; for a list, its length. */
static rfr_status metadata_of(const rfi_gguf *g, const rfi_gguf_value *v, json_t **out) {
  char text[64];
  *out = NULL;
  if (v->is_array) {
    snprintf(text, sizeof text, "list of %" PRId64, v->count);
    *out = json_string(text);
  } else if (v->kind == RFI_GGUF_STRING) {
    const char *string;
    size_t n;
    RFI_TRY(rfi_gguf_string(g, v, &string, &n));
    *out = memchr(string, 0, n) ? NULL : json_stringn(string, n);
    if (!*out) *out = json_string("(not text)");
  } else if (v->kind == RFI_GGUF_F32 || v->kind == RFI_GGUF_F64) {
    double x;
    RFI_TRY(rfi_gguf_real(g, v, 0, &x));
    *out = json_real(x);
    if (!*out) *out = json_string("not finite");
  } else {
    int64_t x;
    RFI_TRY(rfi_gguf_int(g, v, 0, &x));
    *out = v->kind == RFI_GGUF_BOOL ? json_boolean(x != 0) : json_integer(x);
  }
  return *out ? RFR_OK : rfi_fail(RFI_E_NO_MEMORY, "listing metadata");
}

static rfr_status inspect_gguf(report *r, const char *path) {
  rfi_gguf *g;
  json_t *metadata = json_object();
  RFI_TRY(put(r->root, "kind", json_string("GGUF file")));
  RFI_TRY(put(r->root, "metadata", metadata));
  RFI_TRY(rfi_gguf_open(r->ctx, path, &g));
  rfr_status s = put(r->root, "version", json_integer(rfi_gguf_version(g)));
  for (int i = 0; s == RFR_OK && i < rfi_gguf_key_count(g); i++) {
    const rfi_gguf_value *v = rfi_gguf_key_at(g, i);
    json_t *value;
    s = metadata_of(g, v, &value);
    if (s == RFR_OK) s = put(metadata, v->key, value);
  }
  for (int i = 0; s == RFR_OK && i < rfi_gguf_tensor_count(g); i++) {
    const rfi_gguf_tensor *t = rfi_gguf_tensor_at(g, i);
    s = put_tensor(r, t->name, t->format->name, t->rank, t->shape, t->elements, t->bytes);
  }
  rfi_gguf_close(g);
  return s == RFR_OK ? put_model(r, path) : s;
}

/* The tensors of all safetensors files of a folder. */
static rfr_status put_files(report *r, const char *folder) {
  rfi_paths names = {.ctx = r->ctx};
  rfr_status s = rfi_dir_list(folder, &names);
  for (int i = 0; s == RFR_OK && i < names.n; i++) {
    char *path = NULL;
    if (!rfi_match("*model*.safetensors", names.items[i])) continue;
    s = rfi_path_join(r->ctx, folder, names.items[i], &path);
    if (s == RFR_OK) s = put_safetensors(r, path);
    rfi_free(r->ctx, path);
  }
  rfi_paths_deinit(&names);
  return s;
}

static rfr_status has_file(report *r, const char *folder, const char *name, char **path, char *kind) {
  RFI_TRY(rfi_path_join(r->ctx, folder, name, path));
  return rfi_path_kind(*path, kind);
}

/* Lists the commands that accept an adapter. */
static rfr_status put_use(report *r, const char *folder, const json_t *config) {
  const char *base = json_string_value(json_object_get(config, "base_model_name_or_path"));
  rfi_string text = {.ctx = r->ctx};
  if (!base || !*base) base = "MODEL";
  rfr_status s = rfi_string_printf(&text,
                                   "refrain chat %s chats with it; to train it further: refrain finetune %s DATA --set "
                                   "adapter.from=%s; to merge it into its base: refrain export %s --to hf --out FOLDER",
                                   folder, base, folder, folder);
  if (s == RFR_OK) s = put(r->root, "use", json_string(text.data));
  rfi_string_deinit(&text);
  return s;
}

static rfr_status inspect_folder(report *r, const char *folder) {
  char *path = NULL, kind = 0;
  json_t *config = NULL;
  rfr_status s = has_file(r, folder, RFI_PEFT_CONFIG, &path, &kind);
  if (s == RFR_OK && kind) {
    s = put(r->root, "kind", json_string("adapter"));
    if (s == RFR_OK) s = rfi_json_load(r->ctx, path, &config);
    if (s == RFR_OK) s = put(r->root, "adapter", config);
    if (s == RFR_OK) s = put_use(r, folder, config);
  } else if (s == RFR_OK) {
    s = put(r->root, "kind", json_string("Hugging Face folder"));
    if (s == RFR_OK) s = put_model(r, folder);
  }
  rfi_free(r->ctx, path);
  return s == RFR_OK ? put_files(r, folder) : s;
}

static rfr_status collect(report *r, const char *path) {
  char kind;
  bool gguf;
  RFI_TRY(put(r->root, "path", json_string(path)));
  RFI_TRY(rfi_path_kind(path, &kind));
  RFI_TRY(rfi_gguf_is(r->ctx, path, &gguf));
  if (gguf) RFI_TRY(inspect_gguf(r, path));
  else if (kind == 'd' || kind == 'l') RFI_TRY(inspect_folder(r, path));
  else {
    RFI_TRY(put(r->root, "kind", json_string("safetensors file")));
    RFI_TRY(put_safetensors(r, path));
  }
  RFI_TRY(put(r->root, "elements", json_integer(r->elements)));
  RFI_TRY(put(r->root, "bytes", json_integer(r->bytes)));
  return put(r->root, "tensors", json_incref(r->tensors));
}

/* ---- text ---- */

/* Foreign text must not move the cursor of a terminal. */
static rfr_status print_clean(rfi_string *out, const char *text) {
  for (const char *p = text; *p; p++) {
    const unsigned char c = (unsigned char)*p;
    if (c == '\n') RFI_TRY(rfi_string_append(out, "\\n", 2));
    else RFI_TRY(rfi_string_append(out, c < 0x20 || c == 0x7f ? "?" : p, 1));
  }
  return RFR_OK;
}

/* Lines of "key: value", objects indented. */
static rfr_status print_object(rfi_string *out, const json_t *o, int indent) {
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)o, key, value) {
    if (strcmp(key, "tensors") == 0) continue;
    RFI_TRY(rfi_string_printf(out, "%*s", indent, ""));
    RFI_TRY(print_clean(out, key));
    if (json_is_object(value)) {
      RFI_TRY(rfi_string_append(out, ":\n", 2));
      RFI_TRY(print_object(out, value, indent + 2));
      continue;
    }
    rfi_string text = {.ctx = out->ctx};
    rfr_status s = json_is_string(value) ? rfi_string_append(&text, json_string_value(value), json_string_length(value))
                                         : rfi_json_print_compact(value, &text);
    if (s == RFR_OK) s = rfi_string_append(out, ": ", 2);
    if (s == RFR_OK && text.data) s = print_clean(out, text.data);
    if (s == RFR_OK) s = rfi_string_append(out, "\n", 1);
    rfi_string_deinit(&text);
    RFI_TRY(s);
  }
  return RFR_OK;
}

static rfr_status print_tensors(rfi_string *out, const json_t *tensors) {
  size_t i;
  json_t *t;
  RFI_TRY(rfi_string_printf(out, "%zu tensors:\n%14s  %-6s  %-20s  name\n", json_array_size(tensors), "bytes", "type",
                            "shape"));
  json_array_foreach((json_t *)tensors, i, t) {
    char shape[128];
    RFI_TRY(rfi_string_printf(out, "%14lld  %-6s  %-20s  ", (long long)json_integer_value(json_object_get(t, "bytes")),
                              json_string_value(json_object_get(t, "type")),
                              rfi_json_brief(json_object_get(t, "shape"), shape, sizeof shape)));
    RFI_TRY(print_clean(out, json_string_value(json_object_get(t, "name"))));
    RFI_TRY(rfi_string_append(out, "\n", 1));
  }
  return RFR_OK;
}

rfr_status rfr_inspect(rfr_ctx *ctx, const char *path, int json, rfr_write_fn write, void *user) {
  rfi_string out = {.ctx = ctx};
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!path || !write) return rfi_fail(RFI_E_ARGUMENT, "a path and a function that takes the text are needed");
  report r = {.ctx = ctx, .root = json_object(), .tensors = json_array()};
  rfr_status s = r.root && r.tensors ? collect(&r, path) : rfi_fail(RFI_E_NO_MEMORY, "inspecting %s", path);
  if (s == RFR_OK && json) s = rfi_json_print(r.root, &out);
  if (s == RFR_OK && !json) s = print_object(&out, r.root, 0);
  if (s == RFR_OK && !json) s = print_tensors(&out, r.tensors);
  if (s == RFR_OK) write(out.data, out.n, user);
  json_decref(r.root);
  json_decref(r.tensors);
  rfi_string_deinit(&out);
  return s;
}
