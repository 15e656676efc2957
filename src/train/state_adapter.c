/* SPDX-License-Identifier: Apache-2.0
 *
 * The adapter of a run in a checkpoint: a folder that the PEFT library reads, with f32 values where the run has master
 * weights. The 16-bit weights are always the rounded master weights, so they are not stored: a load rounds again.
 */
#include "train/state_adapter.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "dist/comm.h"
#include "model/peft.h"
#include "nn/adapter.h"
#include "ops/quant/formats.h"
#include "trace/trace.h"
#include "train/host.h"
#include "train/parts.h"
#include "train/state.h"

/* Finds the master weight of a trained parameter; *found is false if it has none. */
static rfr_status find_master(const rfr_run *run, const rfr_tensor *w, rfr_tensor *out, bool *found) {
  char name[128];
  *found =
      run->settings->spec.master && w->role == RFR_ROLE_TRAINABLE && rfr_run_program_index(run, RFR_RUN_TRAIN) >= 0;
  if (!*found) return RFR_OK;
  snprintf(name, sizeof name, "%s" RFI_SUFFIX_MASTER, w->name);
  return rfi_run_tensor(run, name, out);
}

bool rfi_adapter_state_stores(const rfr_run *run, const rfr_tensor *x) {
  rfr_tensor master;
  bool found;
  if (!rfi_adapter_has_name(x->name)) return false;
  if (x->role == RFR_ROLE_STATE) return rfi_ends_in(x->name, RFI_SUFFIX_MASTER);
  if (x->role != RFR_ROLE_TRAINABLE && x->role != RFR_ROLE_FROZEN) return false; /* a gradient of a pipeline */
  return find_master(run, x, &master, &found) == RFR_OK && !found;
}

/* ---- loading ---- */

/* Writes f32 values to a tensor, rounded to its type. */
static rfr_status write_rounded(rfr_run *run, const rfr_tensor *x, const float *values) {
  void *host;
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_WRITE, &host));
  if (x->type.dtype == RFR_F32) memcpy(host, values, (size_t)x->bytes);
  for (int64_t i = 0; x->type.dtype != RFR_F32 && i < x->bytes / 2; i++)
    ((uint16_t *)host)[i] = (uint16_t)rfr_float_to_bits(x->type.dtype, values[i]);
  return rfi_host_close(run, x, RFI_HOST_WRITE, host, RFR_OK);
}

/* The initial magnitudes of DoRA: the norms of the base weight's rows. */
static rfr_status first_magnitude(rfr_run *run, const rfi_adapter_target *target, float *values) {
  const rfr_model_config *c = &run->settings->spec.model;
  rfr_parameter p;
  rfr_tensor w;
  void *host;
  RFI_TRY(rfr_model_parameter(c, target->parameter, &p));
  RFI_TRY(rfi_run_tensor(run, p.name, &w));
  float *decoded = NULL;
  int64_t n = 1;
  for (int d = 0; d < p.rank; d++) n *= p.shape[d];
  if (p.format != RFR_QUANT_NONE) RFI_TRY(RFI_ALLOC(run->ctx, sizeof *decoded * (size_t)n, &decoded));
  rfr_status s = rfi_host_open(run, &w, RFI_HOST_READ, &host);
  if (s == RFR_OK) {
    if (decoded) { /* in the dtype that the step uses */
      rfi_quant_decode(p.format, p.rank, p.shape, host, decoded);
      for (int64_t i = 0; c->dtype != RFR_F32 && i < n; i++)
        decoded[i] = rfr_float_from_bits(c->dtype, rfr_float_to_bits(c->dtype, decoded[i]));
    }
    rfi_adapter_magnitude(c, target, decoded ? RFR_F32 : w.type.dtype, decoded ? decoded : host, values);
    s = rfi_host_close(run, &w, RFI_HOST_READ, host, RFR_OK);
  }
  rfi_free(run->ctx, decoded);
  return s;
}

/* Loads parameter i and its master weights, unrounded, from the folder; NULL: initializes them. */
static rfr_status start_parameter(rfr_run *run, int i, rfi_peft *from, bool resumes) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int threads = rfi_ctx_threads(run->ctx);
  rfr_status s;
  rfr_parameter p;
  rfr_tensor w, master;
  rfi_adapter_part part;
  bool has_master;
  float *values = NULL;
  const rfi_adapter_target *target = rfi_adapter_owner(c, i, &part);
  RFI_TRY(rfr_model_parameter(c, i, &p));
  RFI_TRY(rfi_run_tensor(run, p.name, &w));
  RFI_TRY(find_master(run, &w, &master, &has_master));
  if (resumes && has_master) RFI_TRY(rfi_peft_check_f32(from, c, i));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)(w.bytes * 32 / rfr_dtype_bits(w.type.dtype)), &values));
  if (from) RFI_GOTO(rfi_peft_read(from, c, i, values));
  else if (part == RFI_ADAPTER_MAGNITUDE) RFI_GOTO(first_magnitude(run, target, values));
  else RFI_GOTO(rfr_parameter_fill(&p, run->settings->seed, RFR_F32, threads, values));
  RFI_GOTO(write_rounded(run, &w, values));
  if (has_master) RFI_GOTO(write_rounded(run, &master, values));
  s = RFR_OK;
fail:
  rfi_free(run->ctx, values);
  return s;
}

rfr_status rfi_adapter_state_start(rfr_run *run, const char *folder, bool resumes) {
  const rfr_model_config *c = &run->settings->spec.model;
  rfr_status s = RFR_OK;
  rfi_peft *from = NULL;
  if (folder) RFI_TRY(rfi_peft_open(run->ctx, folder, &from));
  for (int i = c->adapter->base_count; s == RFR_OK && i < rfr_model_parameter_count(c); i++)
    if (rfi_is_here(run, i)) s = start_parameter(run, i, from, resumes);
  rfi_peft_close(from);
  return s;
}

rfr_status rfi_adapter_state_check_base(const rfr_run *run, const char *path, const rfi_state_json *theirs) {
  char mine[33];
  const char *was = json_string_value(json_object_get(theirs->configuration, "precision.dtype"));
  const char *now = rfr_dtype_name(run->settings->spec.model.dtype);
  if (was && strcmp(was, now) != 0)
    return rfi_fail_at(
        RFI_E_RESUME_MISMATCH, path, 0,
        "precision.dtype is %.20s in the checkpoint and %s in the configuration; the adapter was trained "
        "on the base in %.20s",
        was, now, was);
  const char *hash = json_string_value(json_object_get(theirs->base, "hash"));
  const char *model = json_string_value(json_object_get(theirs->base, "model"));
  if (!hash || !model)
    return rfi_fail_at(RFI_E_CHECKPOINT, path, 0, "\"base\" does not name the model that the adapter was trained on");
  if (strcmp(hash, rfi_hash_format(mine, run->base)) == 0) return RFR_OK;
  return rfi_fail_at(RFI_E_ADAPTER_BASE, path, 0,
                     "the adapter was trained on the model %.200s with hash %.32s; the model %.200s has hash %s",
                     *model ? model : "(from the seed)", hash,
                     run->settings->weights ? run->settings->weights : "(from the seed)", mine);
}

rfr_status rfi_adapter_state_check_keys(const rfr_run *run, const char *path, const rfi_state_json *theirs) {
  json_t *mine, *value;
  const char *key;
  rfr_status s = RFR_OK;
  RFI_TRY(rfi_settings_signature(run->settings, &mine));
  json_object_foreach(mine, key, value) {
    const json_t *other = json_object_get(theirs->configuration, key);
    char a[160], b[160];
    if (strncmp(key, "adapter.", 8) != 0 || (other && json_equal(value, other))) continue;
    s = rfi_fail_at(RFI_E_RESUME_MISMATCH, path, 0,
                    "%s is %s in the checkpoint and %s in the configuration: with another value the adapter computes "
                    "another function",
                    key, other ? rfi_json_brief(other, b, sizeof b) : "missing", rfi_json_brief(value, a, sizeof a));
    break;
  }
  json_decref(mine);
  return s;
}

/* ---- saving ---- */

/* Writes a parameter of the adapter to `copy`, in PEFT's element order. */
static rfr_status copy_parameter(rfr_run *run, int i, const rfr_tensor *x, void *copy) {
  rfi_adapter_part part;
  void *host;
  (void)rfi_adapter_owner(&run->settings->spec.model, i, &part);
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_READ, &host));
  rfi_peft_order(&x->type, part == RFI_ADAPTER_B, true, rfr_dtype_bits(x->type.dtype) / 8, host, copy);
  return rfi_host_close(run, x, RFI_HOST_READ, host, rfi_state_check_finite(run, x, host));
}

/* The type in which a checkpoint stores parameter i, which another rank of the pipeline has. */
static rfr_status describe_stored(const rfr_run *run, int i, rfr_tensor *out) {
  const rfi_step_spec *s = &run->settings->spec;
  rfr_parameter p;
  RFI_TRY(rfr_model_parameter(&s->model, i, &p));
  *out = (rfr_tensor){.type = {.dtype = s->master ? RFR_F32 : s->model.dtype, .rank = p.rank}};
  for (int d = 0; d < p.rank; d++) out->type.shape[d] = p.shape[d];
  out->bytes = rfi_bytes(&out->type);
  return RFR_OK;
}

/* The tensor that a checkpoint stores for parameter i: the parameter, or its master weight. */
static rfr_status find_stored(const rfr_run *run, int i, rfr_tensor *out) {
  rfr_parameter p;
  rfr_tensor w;
  bool found;
  if (!rfi_is_here(run, i)) return describe_stored(run, i, out);
  RFI_TRY(rfr_model_parameter(&run->settings->spec.model, i, &p));
  RFI_TRY(rfi_run_tensor(run, p.name, &w));
  RFI_TRY(find_master(run, &w, out, &found));
  if (!found) *out = w;
  return RFR_OK;
}

/* Sends parameter i to rank 0, from the first rank of the pipeline that has it. */
static rfr_status send_copy(rfr_run *run, int i, void *copy, int64_t bytes) {
  const rfi_step_spec *s = &run->settings->spec;
  int owner = 0;
  if (run->settings->parallel.pipeline <= 1 || s->rank > 0) return RFR_OK;
  while (!rfi_pipeline_owns(s, owner, i)) owner++;
  const int from = rfi_pipeline_peer(s, owner);
  if (from == 0) return RFR_OK;
  if (s->pipeline.rank == 0) return rfi_comm_receive(run->options.comm, from, copy, bytes, NULL);
  return s->pipeline.rank == owner ? rfi_comm_send(run->options.comm, 0, copy, bytes, NULL) : RFR_OK;
}

/* Collects all parameters, one after another; all ranks call it together. */
static rfr_status collect(rfr_run *run, rfi_safetensors_entry *entries, char (*names)[RFI_PEFT_NAME], char **values,
                          int64_t *bytes) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int first = c->adapter->base_count, n = c->adapter->count;
  rfr_status found = RFR_OK;
  rfr_tensor x;
  rfr_type type;
  for (int i = 0; i < n; i++) {
    RFI_TRY(find_stored(run, first + i, &x));
    rfi_peft_tensor(c, first + i, names[i], &type);
    entries[i] = (rfi_safetensors_entry){.name = names[i], .dtype = x.type.dtype, .rank = type.rank};
    for (int d = 0; d < type.rank; d++) entries[i].shape[d] = type.shape[d];
    *bytes += x.bytes;
  }
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)*bytes + 1, values));
  char *to = *values;
  for (int i = 0; i < n; i++, to += x.bytes) {
    RFI_TRY(find_stored(run, first + i, &x));
    const rfr_status s = rfi_is_here(run, first + i) ? copy_parameter(run, first + i, &x, to) : RFR_OK;
    if (found == RFR_OK) found = s; /* after an error too, all ranks make the same calls */
    RFI_TRY(send_copy(run, first + i, to, x.bytes));
  }
  return found;
}

static rfr_status save_weights(rfr_run *run, rfi_checkpoint_writer *w) {
  const size_t n = (size_t)run->settings->spec.model.adapter->count;
  rfr_status s;
  rfi_file *file;
  int64_t bytes = 0;
  rfi_safetensors_entry *entries = NULL;
  char(*names)[RFI_PEFT_NAME] = NULL, *values = NULL;
  RFI_TRY(RFI_ALLOC(run->ctx, n * sizeof *entries, &entries));
  RFI_GOTO(RFI_ALLOC(run->ctx, n * sizeof *names, &names));
  RFI_GOTO(collect(run, entries, names, &values, &bytes));
  if (run->settings->parallel.rank > 0) goto fail;
  RFI_GOTO(rfi_checkpoint_file(w, RFI_PEFT_WEIGHTS, &file));
  RFI_GOTO(rfi_safetensors_write_header(run->ctx, file, entries, (int)n, NULL, 0, NULL));
  s = rfi_file_append(file, values, (size_t)bytes);
fail:
  rfi_free(run->ctx, entries);
  rfi_free(run->ctx, names);
  rfi_free(run->ctx, values);
  return s;
}

static rfr_status save_config(rfr_run *run, rfi_checkpoint_writer *w) {
  rfi_string text = {.ctx = run->ctx};
  json_t *o = rfi_peft_config(&run->settings->spec.model, run->settings->weights ? run->settings->weights : "");
  rfr_status s = o ? rfi_json_print(o, &text) : rfi_fail(RFI_E_NO_MEMORY, "building " RFI_PEFT_CONFIG);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, RFI_PEFT_CONFIG, text.data, text.n);
  json_decref(o);
  rfi_string_deinit(&text);
  return s;
}

rfr_status rfi_adapter_state_save(rfr_run *run, rfi_checkpoint_writer *w) {
  RFI_TRY(save_weights(run, w));
  return run->settings->parallel.rank == 0 ? save_config(run, w) : RFR_OK;
}
