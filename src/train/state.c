/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a run: initial values, and loading checkpoints, which state_save.c writes.
 *
 * A checkpoint has every tensor that the programs declare as trainable, frozen or state, except the metrics ring and
 * the text that is being generated: weights under their Hugging Face names in model.safetensors, the others (moments,
 * master weights) in optimizer.safetensors, the step block in state.json. The attempted count is the position in the
 * data. So a resumed run has the same bytes in the same places as one that was not interrupted.
 *
 * A run with an adapter saves the adapter instead of the weights (state_adapter.c), and in state.json the hash of the
 * base model: a sum over its tensors of the hashes of name, type and bytes, as the programs hold them. Every load of
 * such a checkpoint loads the base first and compares the hash.
 *
 * Weights that are not finite are never saved and never loaded: such a checkpoint cannot be trained or sampled from,
 * and would replace a good one.
 */
#include "train/state.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "data/hash.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "exec/exec.h"
#include "model/hf.h"
#include "nn/adapter.h"
#include "ops/quant/formats.h"
#include "train/events.h"
#include "train/host.h"
#include "train/load_weights.h"
#include "train/parts.h"
#include "train/run_programs.h"
#include "train/state_adapter.h"
#include "train/state_check.h"
#include "train/state_json.h"

#define ONE_RANK "1 rank" /* the layout of checkpoints that do not store one */

/* Widens a weight to its master weight, exactly. */
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

/* Initializes master weights: with the unrounded initial values, or exactly with the loaded weights. */
static rfr_status start_masters(rfr_run *run, bool loaded) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int n = rfr_model_parameter_count(c);
  if (!run->settings->spec.master || rfr_run_program_index(run, RFR_RUN_TRAIN) < 0) return RFR_OK;
  for (int i = 0; i < n; i++) {
    rfr_parameter p;
    rfr_tensor w, master;
    char name[128];
    if (!rfi_is_here(run, i)) continue;
    RFI_TRY(rfr_model_parameter(c, i, &p));
    RFI_TRY(rfi_run_tensor(run, p.name, &w));
    if (w.role != RFR_ROLE_TRAINABLE) continue;
    snprintf(name, sizeof name, "%s" RFI_SUFFIX_MASTER, p.name);
    RFI_TRY(rfi_run_tensor(run, name, &master));
    RFI_TRY(loaded ? widen(run, &w, &master) : rfi_fill_weight(run, &p, &master));
  }
  return RFR_OK;
}

/* Initializes averages with the weights, unrounded if there are master weights. */
static rfr_status start_average(rfr_run *run, const rfr_tensor *w) {
  rfr_tensor from = *w, average;
  char name[128];
  void *weight, *to;
  snprintf(name, sizeof name, "%s" RFI_SUFFIX_EMA, w->name);
  RFI_TRY(rfi_run_tensor(run, name, &average));
  if (run->settings->spec.master) {
    snprintf(name, sizeof name, "%s" RFI_SUFFIX_MASTER, w->name);
    RFI_TRY(rfi_run_tensor(run, name, &from));
  }
  if (from.type.dtype != RFR_F32) return widen(run, &from, &average);
  RFI_TRY(rfi_host_open(run, &from, RFI_HOST_READ, &weight));
  rfr_status s = rfi_host_open(run, &average, RFI_HOST_WRITE, &to);
  if (s == RFR_OK) memcpy(to, weight, (size_t)average.bytes);
  if (s == RFR_OK) s = rfi_host_close(run, &average, RFI_HOST_WRITE, to, s);
  return rfi_host_close(run, &from, RFI_HOST_READ, weight, s);
}

static rfr_status start_averages(rfr_run *run) {
  const rfi_step_spec *spec = &run->settings->spec;
  rfr_parameter p;
  rfr_tensor w;
  if (spec->ema.decay == 0.0 || rfr_run_program_index(run, RFR_RUN_TRAIN) < 0) return RFR_OK;
  for (int i = 0; i < rfr_model_parameter_count(&spec->model); i++) {
    if (!rfi_is_here(run, i) || rfi_step_rule(spec, i).frozen) continue;
    RFI_TRY(rfr_model_parameter(&spec->model, i, &p));
    RFI_TRY(rfi_run_tensor(run, p.name, &w));
    RFI_TRY(start_average(run, &w));
  }
  return RFR_OK;
}

/* ---- the optimizer ---- */

/* Reads only the bytes of this rank's part. */
static rfr_status load_part(rfr_run *run, rfi_safetensors *st, const rfi_stored *stored, const rfr_tensor *x,
                            const char **wrong) {
  const int64_t size = rfr_dtype_bits(x->type.dtype) / 8;
  rfi_part_range range[RFI_PART_RANGES];
  rfr_tensor own;
  rfr_status s;
  int n;
  char *values;
  RFI_TRY(rfi_part_ranges(run, x, &own, range, &n));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)own.bytes, &values));
  RFI_GOTO(rfi_part_clear(run, &own, values));
  for (int i = 0; i < n; i++)
    RFI_GOTO(rfi_safetensors_read_range(st, stored, x->type.dtype, values + range[i].own, range[i].at / size,
                                        range[i].bytes / size));
  *wrong = rfi_part_wrong(&own, values);
  s = rfr_programs_write(run->programs, &own, values);
fail:
  rfi_free(run->ctx, values);
  return s;
}

static rfr_status load_full(rfr_run *run, rfi_safetensors *st, const rfi_stored *stored, const rfr_tensor *x,
                            const char **wrong) {
  void *host;
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_WRITE, &host));
  const rfr_status s = rfi_safetensors_read_as(st, stored, x->type.dtype, host, stored->elements);
  if (s == RFR_OK) *wrong = rfi_state_wrong(run, x, host);
  return rfi_host_close(run, x, RFI_HOST_WRITE, host, s);
}

/* `stored` NULL: the file lacks the tensor. */
static rfr_status load_tensor(rfr_run *run, rfi_safetensors *st, const rfi_stored *stored, const char *path,
                              const rfr_tensor *x) {
  const char *wrong = NULL;
  bool same = stored && stored->rank == x->type.rank;
  for (int d = 0; same && d < x->type.rank; d++) same = stored->shape[d] == x->type.shape[d];
  if (!same)
    return rfi_fail_at(RFI_E_RESUME_MISMATCH, path, 0,
                       stored ? "%s has another shape than the configuration's" : "there is no tensor %s in it",
                       x->name);
  RFI_TRY(rfi_is_part(run, x) ? load_part(run, st, stored, x, &wrong) : load_full(run, st, stored, x, &wrong));
  return wrong ? rfi_fail_at(RFI_E_CHECKPOINT, path, 0, "%s has %s", x->name, wrong) : RFR_OK;
}

/* Loads the optimizer states from one file, or from the files of the ranks that saved the checkpoint. */
static rfr_status load_optimizer(rfr_run *run, const rfi_checkpoint *checkpoint) {
  rfr_status s;
  rfi_safetensors *st;
  rfr_tensor x;
  char *path = NULL;
  RFI_TRY(rfi_safetensors_open_parts(run->ctx, checkpoint->folder, "optimizer", &st));
  if (!st) {
    RFI_TRY(rfi_checkpoint_path(checkpoint, "optimizer.safetensors", &path));
    RFI_GOTO(rfi_safetensors_open(run->ctx, path, &st));
  }
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == RFI_KIND_OPTIMIZER)
      RFI_GOTO(load_tensor(run, st, rfi_safetensors_find(st, x.name), path ? path : checkpoint->folder, &x));
  s = RFR_OK;
fail:
  rfi_safetensors_close(st);
  rfi_free(run->ctx, path);
  return s;
}

/* Replaces the weights by their averages, for reading. A weight without an average was not trained. */
static rfr_status load_averages(rfr_run *run, const char *folder) {
  rfr_status s = RFR_OK;
  rfi_safetensors *st;
  rfr_tensor x;
  RFI_TRY(rfi_averages_open(run->ctx, folder, &st));
  for (int i = 0; s == RFR_OK && rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    const rfi_stored *stored = x.role == RFR_ROLE_TRAINABLE ? rfi_averages_find(st, x.name) : NULL;
    if (stored) s = load_tensor(run, st, stored, folder, &x);
  }
  rfi_safetensors_close(st);
  return s;
}

rfr_status rfi_state_set_lr_steps(rfr_run *run) {
  return rfr_programs_write(run->programs, &run->lr_steps, run->clock.lr_steps);
}

/* A scale of fp8_delayed is 1 until its first amax. */
static rfr_status start_scales(rfr_run *run) {
  rfr_tensor x;
  float *ones;
  if (run->settings->spec.recipe.kind != RFR_RECIPE_FP8_DELAYED || !run->block.data) return RFR_OK;
  RFI_TRY(rfi_run_tensor(run, RFR_RECIPE_SCALE, &x));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)x.bytes, &ones));
  for (int64_t i = 0; i < x.bytes / (int64_t)sizeof *ones; i++) ones[i] = 1.0f;
  const rfr_status s = rfr_programs_write(run->programs, &x, ones);
  rfi_free(run->ctx, ones);
  return s;
}

/* Initializes new programs: tensors that are not written here are zeros. If the run resumes, the checkpoint has
 * everything except the base of an adapter. */
static rfr_status init_state(rfr_run *run, bool resumes) {
  if (!resumes || run->settings->adapter) RFI_TRY(rfi_load_weights(run, run->settings->weights));
  if (resumes) return RFR_OK;
  if (run->settings->adapter) RFI_TRY(rfi_adapter_state_start(run, run->settings->adapter_from, false));
  else RFI_TRY(start_masters(run, run->settings->weights != NULL));
  RFI_TRY(start_averages(run));
  const int64_t block[RFI_STEP_N] = {[RFI_STEP_SEED] = (int64_t)run->settings->seed};
  if (run->block.data) RFI_TRY(rfr_programs_write(run->programs, &run->block, block));
  rfi_run_clock_init(&run->clock);
  if (run->lr_steps.data) RFI_TRY(rfi_state_set_lr_steps(run));
  RFI_TRY(start_scales(run));
  run->step = run->launched = run->filled = 0;
  run->skipped_in_row = 0;
  return RFR_OK;
}

rfr_status rfi_state_prepare(rfr_run *run, bool resumes) {
  if (run->ready) return RFR_OK;
  if (run->options.plan_only) return rfi_fail(RFI_E_PROGRAM_PLAN_ONLY, "the run was opened with plan_only");
  RFI_TRY(init_state(run, resumes));
  RFI_TRY(rfr_programs_load(run->programs));
  if (!run->options.eager && !run->options.debug)
    for (int i = 0; i < run->n_programs; i++) RFI_TRY(rfr_program_capture(run->programs, i));
  RFI_TRY(rfi_programs_agree(run->programs));
  run->ready = true;
  return RFR_OK;
}

/* ---- loading ---- */

/* Describes how a step is distributed over ranks, because another layout sums gradients in another order. */
static void describe_layout(const rfi_parallel *p, char *text, size_t size) {
  if (p->ranks == 1) snprintf(text, size, "%s", ONE_RANK);
  else if (p->pipeline > 1)
    snprintf(text, size, "%d ranks, pipeline %d, %s", p->ranks, p->pipeline, rfr_schedule_kind_name(p->schedule));
  else
    snprintf(text, size, "%d ranks, %s%s", p->ranks, p->expert > 1 ? "experts spread, shard " : "shard ",
             rfr_shard_name(p->shard));
}

rfr_status rfi_state_describe(rfr_run *run, rfi_state_json *out) {
  *out = (rfi_state_json){0};
  RFI_TRY(rfr_programs_read(run->programs, &run->block, out->block));
  RFI_TRY(rfi_settings_signature(run->settings, &out->configuration));
  out->seconds = run->clock.time > 0.0 ? run->clock.used : 0.0; /* a run given in steps has no clock */
  char layout[64];
  describe_layout(&run->settings->parallel, layout, sizeof layout);
  out->environment =
      json_pack("{s:s, s:s, s:s, s:i, s:s, s:s, s:s}", "refrain", rfr_version(), "backend", rfi_ctx_backend(run->ctx),
                "isa", rfi_ctx_isa(run->ctx), "threads", rfi_ctx_threads(run->ctx), "matmul", run->machine.matmul,
                "data", run->hash, "layout", layout);
  out->skipped_in_row = run->skipped_in_row;
  out->skipped_for_routing = run->skipped_in_row > 0 && run->skipped_for_routing;
  if (run->own_data) out->position = run->positions[run->step % (run->settings->spec.slots + 1)];
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
    return rfi_fail_at(RFI_E_RESUME_MISMATCH, file, 0, "%s was %s and is %s: results would not be bitwise the same",
                       key, theirs, mine);
  rfi_run_warn(run, "resuming with another %s: it was %s and is %s; the bits may differ from an uninterrupted run", key,
               theirs, mine);
  return RFR_OK;
}

/* Calls `report` for each key whose value differs or is missing, until a call returns an error. */
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

/* Compares keys of the checkpoint that are not used in this run, such as optimizer.ema if it is 0 now. A model folder
 * replaces the keys of model.*. */
static rfr_status compare_unused(rfr_run *run, const char *file, const json_t *theirs, const json_t *mine) {
  rfr_status s = RFR_OK;
  for (int id = 0; s == RFR_OK && id < RFI_CFG_COUNT; id++) {
    const char *key = rfi_config_path((rfi_config_id)id);
    const json_t *other = json_object_get(theirs, key);
    char a[160];
    if (!rfi_config_resume_compares((rfi_config_id)id) || !other || json_object_get(mine, key)) continue;
    if (strncmp(key, "model.", 6) == 0) continue;
    rfi_string text = {.ctx = run->ctx};
    s = rfi_config_print_value(run->settings->config, (rfi_config_id)id, &text);
    if (s == RFR_OK)
      s = rfi_fail_at(RFI_E_RESUME_MISMATCH, file, 0, "%s is %s in the checkpoint and \"%.160s\" in the configuration",
                      key, rfi_json_brief(other, a, sizeof a), text.data);
    rfi_string_deinit(&text);
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
  if (run->settings->adapter) RFI_GOTO(rfi_adapter_state_check_base(run, path, &theirs));
  RFI_GOTO(rfi_state_describe(run, &mine));
  RFI_GOTO(compare(run, path, theirs.configuration, mine.configuration, other_configuration));
  const json_t *was = json_object_get(theirs.configuration, "preference.beta");
  if (was && !run->settings->spec.preference)
    RFI_GOTO(
        rfi_fail_at(RFI_E_RESUME_MISMATCH, path, 0, "data.format was preference in the checkpoint and is not now"));
  RFI_GOTO(compare_unused(run, path, theirs.configuration, mine.configuration));
  if (!json_object_get(theirs.environment, "layout"))
    RFI_GOTO(rfi_json_set(theirs.environment, "layout", json_string(ONE_RANK)));
  RFI_GOTO(compare(run, path, theirs.environment, mine.environment, other_environment));
  RFI_GOTO(rfr_programs_write(run->programs, &run->block, theirs.block));
  run->step = run->launched = run->filled = step;
  if (run->own_data) run->positions[step % (run->settings->spec.slots + 1)] = theirs.position;
  run->skipped_in_row = (int)theirs.skipped_in_row;
  run->skipped_for_routing = theirs.skipped_for_routing;
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

/* For a run that is opened for reading. A resume compares all keys. */
static rfr_status check_adapter(const rfr_run *run, const rfi_checkpoint *checkpoint) {
  char *path;
  rfi_state_json theirs;
  RFI_TRY(rfi_checkpoint_path(checkpoint, "state.json", &path));
  rfr_status s = read_state(run, path, &theirs);
  if (s == RFR_OK) s = rfi_adapter_state_check_base(run, path, &theirs);
  if (s == RFR_OK) s = rfi_adapter_state_check_keys(run, path, &theirs);
  rfi_state_json_deinit(&theirs);
  rfi_free(run->ctx, path);
  return s;
}

rfr_status rfi_state_load(rfr_run *run, const rfi_checkpoint *checkpoint, bool training) {
  rfr_status s;
  char *path = NULL;
  snprintf(run->checkpoint, sizeof run->checkpoint, "%s", checkpoint->folder);
  /* rfi_state_prepare has already loaded the base of an adapter. */
  if (!training) {
    run->step = checkpoint->step;
    if (run->settings->adapter) RFI_TRY(check_adapter(run, checkpoint));
    RFI_TRY(run->settings->adapter ? rfi_adapter_state_start(run, checkpoint->folder, false)
                                   : rfi_load_weights(run, checkpoint->folder));
    return run->options.ema ? load_averages(run, checkpoint->folder) : RFR_OK;
  }
  /* Configuration first, because its error names a key, while errors of tensors have only shapes. */
  RFI_TRY(rfi_checkpoint_path(checkpoint, "state.json", &path));
  RFI_GOTO(load_state_json(run, path, checkpoint->step));
  rfi_free(run->ctx, path);
  path = NULL;
  RFI_GOTO(run->settings->adapter ? rfi_adapter_state_start(run, checkpoint->folder, true)
                                  : rfi_load_weights(run, checkpoint->folder));
  RFI_GOTO(load_optimizer(run, checkpoint));
  if (run->lr_steps.data) {
    RFI_GOTO(rfr_programs_read(run->programs, &run->lr_steps, run->clock.lr_steps));
    rfi_run_clock_resume(&run->clock, run->step);
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, path);
  return s;
}
