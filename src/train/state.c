/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a run: initial values, and checkpoints.
 *
 * A checkpoint has every tensor that the programs declare as trainable, frozen or state, except the metrics ring and
 * the text that is being generated: weights under their Hugging Face names in model.safetensors, the others (moments,
 * master weights) in optimizer.safetensors, the step block in state.json. The attempted count is the position in the
 * data. So a resumed run has the same bytes in the same places as one that was not interrupted.
 *
 * A run with an adapter saves the adapter instead of the weights, as a folder that the PEFT library reads, and in
 * state.json the hash of the base model: a sum over its tensors of the hashes of name, type and bytes, as the programs
 * hold them. Every load of such a checkpoint loads the base first and compares the hash.
 *
 * Weights that are not finite are never saved and never loaded: such a checkpoint cannot be trained or sampled from,
 * and would push a good one out.
 */
#include "train/state.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "data/hash.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "model/hf.h"
#include "model/peft.h"
#include "model/weights.h"
#include "nn/adapter.h"
#include "ops/quant/formats.h"
#include "train/events.h"
#include "train/host.h"
#include "train/run_programs.h"
#include "train/state_json.h"

/* WEIGHT: in a run with an adapter, only the adapter's; the others are BASE. */
typedef enum kind { WEIGHT, BASE, OPTIMIZER, OTHER } kind;

/* Not saved: the metrics ring, and a text with its caches. */
static bool is_transient(const char *name) {
  return strcmp(name, RFI_NAME_METRICS) == 0 || strcmp(name, RFI_NAME_TEXT) == 0 ||
         strcmp(name, RFI_NAME_CURSOR) == 0 || strncmp(name, "cache.", 6) == 0;
}

static kind kind_of(const rfr_run *run, const rfr_tensor *x) {
  if (x->role == RFR_ROLE_TRAINABLE || x->role == RFR_ROLE_FROZEN)
    return run->settings->adapter && !rfi_adapter_has_name(x->name) ? BASE : WEIGHT;
  if (x->role != RFR_ROLE_STATE || strcmp(x->name, "step") == 0 || is_transient(x->name)) return OTHER;
  return OPTIMIZER;
}

/* Adds a tensor of the base to its hash, in any order. */
static rfr_status hash_base(rfr_run *run, const rfr_tensor *x, const void *host) {
  rfi_hasher *hasher;
  if (kind_of(run, x) != BASE) return RFR_OK;
  RFI_TRY(rfi_hasher_create(run->ctx, &hasher));
  rfi_hasher_add(hasher, x->name, strlen(x->name) + 1);
  rfi_hasher_add_u64(hasher, (uint64_t)x->type.dtype);
  rfi_hasher_add(hasher, host, (size_t)x->bytes);
  const rfi_hash hash = rfi_hasher_result(hasher);
  rfi_hasher_destroy(hasher);
  run->base.low += hash.low;
  run->base.high += hash.high;
  return RFR_OK;
}

/* A weight that is being written: its values, in the tensor's own memory or, if the tensor is quantized, in a copy. */
typedef struct writing {
  rfr_tensor x; /* with the type of the values */
  rfr_quant format;
  void *host; /* of the tensor */
} writing;

static rfr_status find_parameter(const rfr_model_config *c, const char *name, rfr_parameter *p) {
  const int n = rfr_model_parameter_count(c);
  for (int i = 0; i < n; i++) {
    RFI_TRY(rfr_model_parameter(c, i, p));
    if (strcmp(p->name, name) == 0) return RFR_OK;
  }
  return rfi_fail(RFI_E_INTERNAL, "%s is not a parameter", name);
}

static rfr_status begin_weight(rfr_run *run, const rfr_tensor *x, writing *w) {
  const rfr_model_config *c = &run->settings->spec.model;
  *w = (writing){.x = *x};
  if (x->type.dtype == RFR_U8) {
    rfr_parameter p;
    RFI_TRY(find_parameter(c, x->name, &p));
    w->format = p.format;
    w->x.type = (rfr_type){.dtype = c->dtype, .rank = p.rank};
    w->x.bytes = rfr_dtype_bits(c->dtype) / 8;
    for (int d = 0; d < p.rank; d++) w->x.bytes *= w->x.type.shape[d] = p.shape[d];
    RFI_TRY(RFI_ALLOC(run->ctx, (size_t)w->x.bytes, &w->x.data));
  }
  const rfr_status s = rfi_host_open(run, x, RFI_HOST_WRITE, &w->host);
  if (w->format == RFR_QUANT_NONE) w->x.data = w->host;
  else if (s != RFR_OK) rfi_free(run->ctx, w->x.data);
  return s;
}

/* `s`: the status of the writes. */
static rfr_status end_weight(rfr_run *run, const rfr_tensor *x, writing *w, rfr_status s) {
  const rfr_type *type = &w->x.type;
  if (s == RFR_OK) s = hash_base(run, &w->x, w->x.data);
  if (w->format != RFR_QUANT_NONE) {
    if (s == RFR_OK)
      s = rfr_quant_encode(run->ctx, w->format, type->rank, type->shape, type->dtype, w->x.data,
                           rfi_ctx_threads(run->ctx), w->host);
    rfi_free(run->ctx, w->x.data);
  }
  return rfi_host_close(run, x, RFI_HOST_WRITE, w->host, s);
}

static rfr_status fill(rfr_run *run, const rfr_parameter *p, const rfr_tensor *x) {
  writing w;
  RFI_TRY(begin_weight(run, x, &w));
  const int threads = rfi_ctx_threads(run->ctx);
  const rfr_status s = rfr_parameter_fill(p, run->settings->seed, w.x.type.dtype, threads, w.x.data);
  return end_weight(run, x, &w, s);
}

/* master = w, exactly */
static rfr_status widen(rfr_run *run, const rfr_tensor *w, const rfr_tensor *master) {
  void *from, *to;
  RFI_TRY(rfi_host_open(run, w, RFI_HOST_READ, &from));
  rfr_status s = rfi_host_open(run, master, RFI_HOST_WRITE, &to);
  if (s == RFR_OK) {
    for (int64_t k = 0; k < master->bytes / 4; k++)
      ((float *)to)[k] = rfr_float_from_bits(w->type.dtype, ((const uint16_t *)from)[k]);
    s = rfi_host_close(run, master, RFI_HOST_WRITE, to, s);
  }
  return rfi_host_close(run, w, RFI_HOST_READ, from, s);
}

static rfr_status start_weights(rfr_run *run) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int n = c->adapter ? c->adapter->base_count : rfr_model_parameter_count(c);
  for (int i = 0; i < n; i++) {
    rfr_parameter p;
    rfr_tensor w;
    RFI_TRY(rfr_model_parameter(c, i, &p));
    RFI_TRY(rfr_programs_tensor(run->programs, p.name, &w));
    RFI_TRY(fill(run, &p, &w));
  }
  return RFR_OK;
}

/* Master weights: the unrounded first values, or the loaded weights, exactly. */
static rfr_status start_masters(rfr_run *run, bool loaded) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int n = rfr_model_parameter_count(c);
  if (!run->settings->spec.master || rfr_run_program_index(run, RFR_RUN_TRAIN) < 0) return RFR_OK;
  for (int i = 0; i < n; i++) {
    rfr_parameter p;
    rfr_tensor w, master;
    char name[128];
    RFI_TRY(rfr_model_parameter(c, i, &p));
    RFI_TRY(rfr_programs_tensor(run->programs, p.name, &w));
    if (w.role != RFR_ROLE_TRAINABLE) continue;
    snprintf(name, sizeof name, "%s" RFI_SUFFIX_MASTER, p.name);
    RFI_TRY(rfr_programs_tensor(run->programs, name, &master));
    RFI_TRY(loaded ? widen(run, &w, &master) : fill(run, &p, &master));
  }
  return RFR_OK;
}

/* ---- the adapter ---- */

/* Writes f32 values to a tensor, rounded to its type. */
static rfr_status write_rounded(rfr_run *run, const rfr_tensor *x, const float *values) {
  void *host;
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_WRITE, &host));
  if (x->type.dtype == RFR_F32) memcpy(host, values, (size_t)x->bytes);
  for (int64_t i = 0; x->type.dtype != RFR_F32 && i < x->bytes / 2; i++)
    ((uint16_t *)host)[i] = (uint16_t)rfr_float_to_bits(x->type.dtype, values[i]);
  return rfi_host_close(run, x, RFI_HOST_WRITE, host, RFR_OK);
}

/* The first magnitudes of DoRA: the norms of the base weight's rows. */
static rfr_status first_magnitude(rfr_run *run, const rfi_adapter_target *target, float *values) {
  const rfr_model_config *c = &run->settings->spec.model;
  rfr_parameter p;
  rfr_tensor w;
  void *host;
  RFI_TRY(rfr_model_parameter(c, target->parameter, &p));
  RFI_TRY(rfr_programs_tensor(run->programs, p.name, &w));
  float *decoded = NULL;
  int64_t n = 1;
  for (int d = 0; d < p.rank; d++) n *= p.shape[d];
  if (p.format != RFR_QUANT_NONE) RFI_TRY(RFI_ALLOC(run->ctx, sizeof *decoded * (size_t)n, &decoded));
  rfr_status s = rfi_host_open(run, &w, RFI_HOST_READ, &host);
  if (s == RFR_OK) {
    if (decoded) { /* in the dtype in which the step sees the weight */
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

/* One parameter of the adapter, and its master weights without rounding: from the folder (NULL: none), or its first
 * values. */
static rfr_status start_adapter_parameter(rfr_run *run, int i, rfi_peft *from) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int threads = rfi_ctx_threads(run->ctx);
  rfr_status s;
  rfr_parameter p;
  rfr_tensor w, master;
  rfi_adapter_part part;
  float *values = NULL;
  char name[128];
  const rfi_adapter_target *target = rfi_adapter_owner(c, i, &part);
  RFI_TRY(rfr_model_parameter(c, i, &p));
  RFI_TRY(rfr_programs_tensor(run->programs, p.name, &w));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)(w.bytes * 32 / rfr_dtype_bits(w.type.dtype)), &values));
  if (from) RFI_GOTO(rfi_peft_read(from, c, i, values));
  else if (part == RFI_ADAPTER_MAGNITUDE) RFI_GOTO(first_magnitude(run, target, values));
  else RFI_GOTO(rfr_parameter_fill(&p, run->settings->seed, RFR_F32, threads, values));
  RFI_GOTO(write_rounded(run, &w, values));
  snprintf(name, sizeof name, "%s" RFI_SUFFIX_MASTER, p.name);
  if (run->settings->spec.master && w.role == RFR_ROLE_TRAINABLE && rfr_run_program_index(run, RFR_RUN_TRAIN) >= 0) {
    RFI_GOTO(rfr_programs_tensor(run->programs, name, &master));
    RFI_GOTO(write_rounded(run, &master, values));
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, values);
  return s;
}

/* folder NULL: the first values. */
static rfr_status start_adapter(rfr_run *run, const char *folder) {
  const rfr_model_config *c = &run->settings->spec.model;
  rfr_status s = RFR_OK;
  rfi_peft *from = NULL;
  if (folder) RFI_TRY(rfi_peft_open(run->ctx, folder, &from));
  for (int i = c->adapter->base_count; s == RFR_OK && i < rfr_model_parameter_count(c); i++)
    s = start_adapter_parameter(run, i, from);
  rfi_peft_close(from);
  return s;
}

/* ---- the optimizer ---- */

static rfr_status load_optimizer(rfr_run *run, const char *path) {
  rfr_status s;
  rfi_safetensors *st = NULL;
  rfr_tensor x;
  RFI_TRY(rfi_safetensors_open(run->ctx, path, &st));
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++) {
    if (kind_of(run, &x) != OPTIMIZER) continue;
    const rfi_stored *stored = rfi_safetensors_find(st, x.name);
    bool same = stored && stored->rank == x.type.rank;
    for (int d = 0; same && d < x.type.rank; d++) same = stored->shape[d] == x.type.shape[d];
    if (!same) {
      s = rfi_fail_at(RFI_E_RESUME_MISMATCH, path, 0,
                      stored ? "%s has another shape than the configuration's" : "there is no tensor %s in it", x.name);
      goto fail;
    }
    void *host;
    RFI_GOTO(rfi_host_open(run, &x, RFI_HOST_WRITE, &host));
    s = rfi_safetensors_read_as(st, stored, x.type.dtype, host, stored->elements);
    RFI_GOTO(rfi_host_close(run, &x, RFI_HOST_WRITE, host, s));
  }
  s = RFR_OK;
fail:
  rfi_safetensors_close(st);
  return s;
}

/* All exponent bits set is NaN or infinite. */
static bool is_finite(const rfr_tensor *x, const void *host) {
  const int64_t n = x->bytes * 8 / rfr_dtype_bits(x->type.dtype);
  bool finite = true;
  if (x->type.dtype == RFR_F32) {
    for (int64_t i = 0; i < n; i++) finite &= (((const uint32_t *)host)[i] & 0x7F800000u) != 0x7F800000u;
  } else if (x->type.dtype == RFR_BF16 || x->type.dtype == RFR_F16) {
    const uint16_t exponent = x->type.dtype == RFR_BF16 ? 0x7F80 : 0x7C00;
    for (int64_t i = 0; i < n; i++) finite &= (((const uint16_t *)host)[i] & exponent) != exponent;
  }
  return finite;
}

static rfr_status read_weight(rfr_run *run, const char *folder, rfi_weights *w, const rfr_tensor *x) {
  writing to;
  RFI_TRY(begin_weight(run, x, &to));
  rfr_status s = rfi_weights_read(w, &run->settings->spec.model, &to.x);
  if (s == RFR_OK && !is_finite(&to.x, to.x.data))
    s = rfi_fail_at(RFI_E_MODEL_NONFINITE, folder, 0, "%s has elements that are NaN or infinite", x->name);
  return end_weight(run, x, &to, s);
}

static rfr_status load_folder(rfr_run *run, const char *folder) {
  rfi_weights *w = NULL;
  rfr_tensor x;
  const char *name = NULL;
  RFI_TRY(rfi_weights_open(run->ctx, folder, &w));
  rfr_status s = RFR_OK;
  const kind which = run->settings->adapter ? BASE : WEIGHT;
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++)
    if (kind_of(run, &x) == which) s = read_weight(run, folder, w, &x);
  const int64_t left = s == RFR_OK ? rfi_weights_left(w, &run->settings->spec.model, &name) : 0;
  if (left > 0)
    rfi_run_warn(run, "%.200s: %lld tensors do not belong to the model and are ignored, as %.100s", folder,
                 (long long)left, name);
  rfi_weights_close(w);
  return s;
}

/* The weights of the model that the configuration names: without an adapter all weights, otherwise the base. */
static rfr_status load_model(rfr_run *run) {
  run->base = (rfi_hash){0};
  return run->settings->weights ? load_folder(run, run->settings->weights) : start_weights(run);
}

rfr_status rfi_state_set_lr_steps(rfr_run *run) {
  return rfr_programs_write(run->programs, &run->lr_steps, run->clock.lr_steps);
}

/* A scale of fp8_delayed is 1 until its first amax. */
static rfr_status start_scales(rfr_run *run) {
  rfr_tensor x;
  float *ones;
  if (run->settings->spec.recipe.kind != RFR_RECIPE_FP8_DELAYED || !run->block.data) return RFR_OK;
  RFI_TRY(rfr_programs_tensor(run->programs, RFR_RECIPE_SCALE, &x));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)x.bytes, &ones));
  for (int64_t i = 0; i < x.bytes / (int64_t)sizeof *ones; i++) ones[i] = 1.0f;
  const rfr_status s = rfr_programs_write(run->programs, &x, ones);
  rfi_free(run->ctx, ones);
  return s;
}

/* Of programs that are new: tensors that are not written here are zeros. */
static rfr_status init_state(rfr_run *run) {
  RFI_TRY(load_model(run));
  if (run->settings->adapter) RFI_TRY(start_adapter(run, run->settings->adapter_from));
  else RFI_TRY(start_masters(run, run->settings->weights != NULL));
  const int64_t block[RFI_STEP_N] = {[RFI_STEP_SEED] = (int64_t)run->settings->seed};
  if (run->block.data) RFI_TRY(rfr_programs_write(run->programs, &run->block, block));
  rfi_run_clock_init(&run->clock);
  if (run->lr_steps.data) RFI_TRY(rfi_state_set_lr_steps(run));
  RFI_TRY(start_scales(run));
  run->step = run->launched = run->filled = 0;
  run->skipped_in_row = 0;
  return RFR_OK;
}

rfr_status rfi_state_prepare(rfr_run *run) {
  if (run->ready) return RFR_OK;
  if (run->options.plan_only) return rfi_fail(RFI_E_PROGRAM_PLAN_ONLY, "the run was opened with plan_only");
  RFI_TRY(init_state(run));
  RFI_TRY(rfr_programs_load(run->programs));
  if (!run->options.eager && !run->options.debug)
    for (int i = 0; i < run->n_programs; i++) RFI_TRY(rfr_program_capture(run->programs, i));
  run->ready = true;
  return RFR_OK;
}

/* ---- loading ---- */

/* The present state.json: the position of the run, and what a resume must agree with. */
static rfr_status own_state(rfr_run *run, rfi_state_json *out) {
  *out = (rfi_state_json){0};
  RFI_TRY(rfr_programs_read(run->programs, &run->block, out->block));
  RFI_TRY(rfi_settings_signature(run->settings, &out->configuration));
  out->seconds = run->clock.time > 0.0 ? run->clock.used : 0.0; /* a run given in steps has no clock */
  out->environment = json_pack("{s:s, s:s, s:s, s:i, s:s, s:s}", "refrain", rfr_version(), "backend",
                               rfi_ctx_device(run->ctx), "isa", rfi_ctx_isa(run->ctx), "threads",
                               rfi_ctx_threads(run->ctx), "matmul", run->machine.matmul, "data", run->hash);
  out->tuned = json_incref(run->tuned);
  if (run->settings->adapter) {
    char hash[33];
    const char *folder = run->settings->weights;
    out->base = json_pack("{s:s, s:s}", "model", folder ? folder : "", "hash", rfi_hash_format(hash, run->base));
  }
  if (out->environment && (out->base || !run->settings->adapter)) return RFR_OK;
  rfi_state_json_deinit(out);
  return rfi_fail(RFI_E_NO_MEMORY, "describing the machine");
}

typedef rfr_status (*on_difference)(rfr_run *run, const char *file, const char *key, const char *theirs,
                                    const char *mine);

static rfr_status other_configuration(rfr_run *run, const char *file, const char *key, const char *theirs,
                                      const char *mine) {
  if (strcmp(key, "run.epochs") == 0 && strcmp(theirs, "missing") != 0) {
    rfi_run_warn(run, "%s: the run was planned for %s epochs, now %s: its learning rate changes", file, theirs, mine);
    return RFR_OK;
  }
  if (strcmp(key, "run.steps") != 0)
    return rfi_fail_at(RFI_E_RESUME_MISMATCH, file, 0, "%s is %s in the checkpoint and %s in the configuration", key,
                       theirs, mine);
  if (strcmp(mine, "\"0\"") == 0)
    return rfi_fail_at(RFI_E_RESUME_MISMATCH, file, 0,
                       "the run was started with run.steps and cannot be resumed with run.%s",
                       run->clock.time > 0.0 ? "time" : "epochs");
  if (strcmp(theirs, "\"0\"") == 0)
    return rfi_fail_at(RFI_E_RESUME_MISMATCH, file, 0,
                       "the run was started with run.epochs or run.time and cannot be resumed with run.steps");
  rfi_run_warn(run, "%s: the run was planned for %s steps, now %s: its learning rate changes", file, theirs, mine);
  return RFR_OK;
}

static rfr_status other_environment(rfr_run *run, const char *file, const char *key, const char *theirs,
                                    const char *mine) {
  if (run->options.strict)
    return rfi_fail_at(RFI_E_RESUME_MISMATCH, file, 0, "%s was %s and is %s: the bits would differ", key, theirs, mine);
  rfi_run_warn(run, "resuming with another %s: it was %s and is %s; the bits may differ from an uninterrupted run", key,
               theirs, mine);
  return RFR_OK;
}

/* Calls `report` for each name whose value differs or is missing, until one of them is an error. */
static rfr_status compare(rfr_run *run, const char *file, const json_t *theirs, json_t *mine, on_difference report) {
  const char *key;
  json_t *value;
  rfr_status s = RFR_OK;
  json_object_foreach(mine, key, value) {
    const json_t *other = json_object_get(theirs, key);
    if (other && json_equal(value, other)) continue;
    char a[160], b[160];
    s = report(run, file, key, other ? rfi_json_brief(other, b, sizeof b) : "missing",
               rfi_json_brief(value, a, sizeof a));
    if (s != RFR_OK) break;
  }
  return s;
}

static rfr_status read_state(const rfr_run *run, const char *path, rfi_state_json *out) {
  char *text;
  size_t n;
  *out = (rfi_state_json){0};
  RFI_TRY(rfi_file_read_limited(run->ctx, path, RFI_JSON_LIMIT, &text, &n));
  rfr_status s = rfi_state_json_parse(path, text, n, out);
  rfi_free(run->ctx, text);
  return s;
}

/* The base that was loaded must be the one that the checkpoint's adapter was trained on. */
static rfr_status check_base(const rfr_run *run, const char *path, const rfi_state_json *theirs) {
  char mine[33];
  if (!run->settings->adapter) return RFR_OK;
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

static rfr_status load_state_json(rfr_run *run, const char *path, int64_t step) {
  rfr_status s;
  rfi_state_json theirs, mine = {0};
  RFI_TRY(read_state(run, path, &theirs));
  if (theirs.block[RFI_STEP_ATTEMPTED] != step)
    RFI_GOTO(rfi_fail_at(RFI_E_CHECKPOINT, path, 0, "is of step %lld, but the manifest is of step %lld",
                         (long long)theirs.block[RFI_STEP_ATTEMPTED], (long long)step));
  if (theirs.block[RFI_STEP_SEED] != (int64_t)run->settings->seed)
    RFI_GOTO(rfi_fail_at(RFI_E_RESUME_MISMATCH, path, 0, "step_block has seed %lld, but run.seed is %lld",
                         (long long)theirs.block[RFI_STEP_SEED], (long long)run->settings->seed));
  RFI_GOTO(check_base(run, path, &theirs));
  RFI_GOTO(own_state(run, &mine));
  RFI_GOTO(compare(run, path, theirs.configuration, mine.configuration, other_configuration));
  RFI_GOTO(compare(run, path, theirs.environment, mine.environment, other_environment));
  RFI_GOTO(rfr_programs_write(run->programs, &run->block, theirs.block));
  run->step = run->launched = run->filled = step;
  run->clock.used = theirs.seconds;
  s = RFR_OK;
fail:
  rfi_state_json_deinit(&theirs);
  rfi_state_json_deinit(&mine);
  return s;
}

rfr_status rfi_state_load_tuned(rfr_run *run, const rfi_checkpoint *checkpoint) {
  char *path;
  rfi_state_json theirs;
  RFI_TRY(rfi_checkpoint_path(checkpoint, "state.json", &path));
  rfr_status s = read_state(run, path, &theirs);
  if (s == RFR_OK && !theirs.tuned)
    s = rfi_fail_at(RFI_E_TUNE_STORED, path, 0, "has no stored choices: the run did not use run.tune");
  run->tuned = json_incref(theirs.tuned);
  rfi_state_json_deinit(&theirs);
  rfi_free(run->ctx, path);
  return s;
}

static rfr_status check_base_of(const rfr_run *run, const rfi_checkpoint *checkpoint) {
  char *path;
  rfi_state_json theirs;
  RFI_TRY(rfi_checkpoint_path(checkpoint, "state.json", &path));
  rfr_status s = read_state(run, path, &theirs);
  if (s == RFR_OK) s = check_base(run, path, &theirs);
  rfi_state_json_deinit(&theirs);
  rfi_free(run->ctx, path);
  return s;
}

rfr_status rfi_state_load(rfr_run *run, const rfi_checkpoint *checkpoint, bool training) {
  rfr_status s;
  char *path = NULL;
  snprintf(run->checkpoint, sizeof run->checkpoint, "%s", checkpoint->folder);
  /* rfi_state_prepare has loaded the base of an adapter. */
  if (!training) {
    run->step = checkpoint->step;
    if (!run->settings->adapter) return load_folder(run, checkpoint->folder);
    RFI_TRY(check_base_of(run, checkpoint));
    return start_adapter(run, checkpoint->folder);
  }
  /* The configuration first: its message names a key, those of tensors only a shape. */
  RFI_TRY(rfi_checkpoint_path(checkpoint, "state.json", &path));
  RFI_GOTO(load_state_json(run, path, checkpoint->step));
  rfi_free(run->ctx, path);
  path = NULL;
  RFI_GOTO(run->settings->adapter ? start_adapter(run, checkpoint->folder) : load_folder(run, checkpoint->folder));
  RFI_GOTO(rfi_checkpoint_path(checkpoint, "optimizer.safetensors", &path));
  RFI_GOTO(load_optimizer(run, path));
  if (run->lr_steps.data) {
    RFI_GOTO(rfr_programs_read(run->programs, &run->lr_steps, run->clock.lr_steps));
    rfi_run_clock_resume(&run->clock, run->step);
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, path);
  return s;
}

/* ---- saving ---- */

/* A folder has the weights of each expert as a tensor of its own, in the order that they have here. */
static int pieces_of(const rfr_tensor *x, kind which) { return which == WEIGHT ? rfi_hf_pieces(x->name, &x->type) : 1; }

static rfr_status check_finite(const rfr_run *run, const rfr_tensor *x, const void *host) {
  if (is_finite(x, host)) return RFR_OK;
  return rfi_fail(RFI_E_RUN_DIVERGED,
                  "step %lld: %s has elements that are NaN or infinite: no checkpoint is written%s%s",
                  (long long)run->step, x->name, *run->checkpoint ? "; the last good one is " : "", run->checkpoint);
}

static rfr_status save_tensors(rfr_run *run, rfi_checkpoint_writer *w, const char *name, kind which) {
  rfr_status s;
  rfi_file *file;
  rfr_tensor x;
  int n = 0, total = 0, pieces = 0;
  rfi_safetensors_entry *entries = NULL;
  rfi_hf_tensor *names = NULL;
  for (; rfr_programs_tensor_at(run->programs, total, &x) == RFR_OK; total++)
    if (kind_of(run, &x) == which) pieces += pieces_of(&x, which);
  RFI_TRY(RFI_ALLOC(run->ctx, ((size_t)pieces + 1) * sizeof *entries, &entries));
  RFI_GOTO(RFI_ALLOC(run->ctx, ((size_t)pieces + 1) * sizeof *names, &names));
  for (int i = 0; i < total; i++) {
    RFI_GOTO(rfr_programs_tensor_at(run->programs, i, &x));
    for (int k = 0; kind_of(run, &x) == which && k < pieces_of(&x, which); k++, n++) {
      entries[n] = (rfi_safetensors_entry){.name = x.name, .dtype = x.type.dtype, .rank = x.type.rank};
      for (int d = 0; d < x.type.rank; d++) entries[n].shape[d] = x.type.shape[d];
      if (which != WEIGHT) continue;
      rfi_hf_piece(&run->settings->spec.model, x.name, &x.type, k, &names[n]);
      entries[n].name = names[n].name;
      entries[n].rank = names[n].rank;
      for (int d = 0; d < names[n].rank; d++) entries[n].shape[d] = names[n].shape[d];
    }
  }
  RFI_GOTO(rfi_checkpoint_file(w, name, &file));
  RFI_GOTO(rfi_safetensors_write_header(run->ctx, file, entries, n, NULL, 0, NULL));
  for (int i = 0; i < total; i++) {
    RFI_GOTO(rfr_programs_tensor_at(run->programs, i, &x));
    if (kind_of(run, &x) != which) continue;
    void *host;
    RFI_GOTO(rfi_host_open(run, &x, RFI_HOST_READ, &host));
    s = which == WEIGHT ? check_finite(run, &x, host) : RFR_OK;
    if (s == RFR_OK) s = rfi_file_append(file, host, (size_t)x.bytes);
    RFI_GOTO(rfi_host_close(run, &x, RFI_HOST_READ, host, s));
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, entries);
  rfi_free(run->ctx, names);
  return s;
}

/* One parameter of the adapter, in PEFT's order of elements. */
static rfr_status append_adapter_parameter(rfr_run *run, int i, rfi_file *file) {
  const rfr_model_config *c = &run->settings->spec.model;
  rfr_parameter p;
  rfr_tensor x;
  rfi_adapter_part part;
  void *host, *copy;
  (void)rfi_adapter_owner(c, i, &part);
  RFI_TRY(rfr_model_parameter(c, i, &p));
  RFI_TRY(rfr_programs_tensor(run->programs, p.name, &x));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)x.bytes, &copy));
  rfr_status s = rfi_host_open(run, &x, RFI_HOST_READ, &host);
  if (s == RFR_OK) {
    rfi_peft_order(&x.type, part == RFI_ADAPTER_B, true, rfr_dtype_bits(x.type.dtype) / 8, host, copy);
    s = check_finite(run, &x, host);
    if (s == RFR_OK) s = rfi_file_append(file, copy, (size_t)x.bytes);
    s = rfi_host_close(run, &x, RFI_HOST_READ, host, s);
  }
  rfi_free(run->ctx, copy);
  return s;
}

static rfr_status save_adapter(rfr_run *run, rfi_checkpoint_writer *w) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int first = c->adapter->base_count, n = c->adapter->count;
  rfr_status s;
  rfi_file *file;
  rfi_safetensors_entry *entries = NULL;
  char(*names)[RFI_PEFT_NAME] = NULL;
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)n * sizeof *entries, &entries));
  RFI_GOTO(RFI_ALLOC(run->ctx, (size_t)n * sizeof *names, &names));
  for (int i = 0; i < n; i++) {
    rfr_type type;
    rfi_peft_tensor(c, first + i, names[i], &type);
    entries[i] = (rfi_safetensors_entry){.name = names[i], .dtype = type.dtype, .rank = type.rank};
    for (int d = 0; d < type.rank; d++) entries[i].shape[d] = type.shape[d];
  }
  RFI_GOTO(rfi_checkpoint_file(w, RFI_PEFT_WEIGHTS, &file));
  RFI_GOTO(rfi_safetensors_write_header(run->ctx, file, entries, n, NULL, 0, NULL));
  for (int i = 0; i < n; i++) RFI_GOTO(append_adapter_parameter(run, first + i, file));
  s = RFR_OK;
fail:
  rfi_free(run->ctx, entries);
  rfi_free(run->ctx, names);
  return s;
}

static rfr_status add_peft_config(rfr_run *run, rfi_checkpoint_writer *w) {
  rfi_string text = {.ctx = run->ctx};
  json_t *o = rfi_peft_config(&run->settings->spec.model, run->settings->weights ? run->settings->weights : "");
  rfr_status s = o ? rfi_json_print(o, &text) : rfi_fail(RFI_E_NO_MEMORY, "building " RFI_PEFT_CONFIG);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, RFI_PEFT_CONFIG, text.data, text.n);
  json_decref(o);
  rfi_string_deinit(&text);
  return s;
}

static rfr_status add_state(rfr_run *run, rfi_checkpoint_writer *w) {
  rfi_state_json state;
  rfi_string text = {.ctx = run->ctx};
  RFI_TRY(own_state(run, &state));
  rfr_status s = rfi_state_json_print(&state, &text);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, "state.json", text.data, text.n);
  rfi_string_deinit(&text);
  rfi_state_json_deinit(&state);
  return s;
}

int64_t rfi_state_bytes(const rfr_run *run) {
  int64_t bytes = 0;
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++)
    if (kind_of(run, &x) == WEIGHT || kind_of(run, &x) == OPTIMIZER) bytes += x.bytes;
  return bytes;
}

rfr_status rfi_state_save(rfr_run *run) {
  rfr_status s;
  rfi_checkpoint_writer *w = NULL;
  const rfr_model_config *model = &run->settings->spec.model;
  const rfi_hf_notes *notes = &run->settings->notes;
  if (!run->folder) return rfi_fail(RFI_E_ARGUMENT, "the run was opened without a folder");
  if (!run->block.data) return rfi_fail(RFI_E_ARGUMENT, "the run was opened for reading");
  RFI_TRY(rfi_state_prepare(run));
  const double start = rfi_now();
  RFI_TRY(rfi_checkpoint_begin(run->ctx, run->folder, run->step, &w));
  if (run->settings->adapter) RFI_GOTO(add_peft_config(run, w));
  else RFI_GOTO(rfi_hf_save(run->ctx, model, notes, w));
  RFI_GOTO(run->settings->adapter ? save_adapter(run, w) : save_tensors(run, w, "model.safetensors", WEIGHT));
  RFI_GOTO(save_tensors(run, w, "optimizer.safetensors", OPTIMIZER));
  RFI_GOTO(add_state(run, w));
  RFI_TRY(rfi_checkpoint_commit(w));
  snprintf(run->checkpoint, sizeof run->checkpoint, "%s/step-%06lld", run->folder, (long long)run->step);
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_CHECKPOINT,
                                 .step = run->step,
                                 .message = run->checkpoint,
                                 .seconds = rfi_now() - start});
  return rfi_checkpoint_retain(run->ctx, run->folder, run->settings->keep);
fail:
  rfi_checkpoint_abort(w);
  return s;
}

rfr_status rfr_run_save(rfr_run *run) {
  RFI_TRY(rfi_check_handle(run, "rfr_run"));
  return rfi_state_save(run);
}
