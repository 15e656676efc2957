/* SPDX-License-Identifier: Apache-2.0
 *
 * A resumed run reads its configuration from its own folder, so the file in which a key was first set would be lost:
 * run.json of the earlier session has it.
 */
#include "train/describe.h"
#include "train/ramp.h"

#include <string.h>

#include "data/json_file.h"
#include "data/mixture.h"

/* ---- run.json ---- */

/* Reads the sources that the previous session wrote; NULL: there are none, or the file has another format. */
static rfr_status read_sources(rfr_run *run, const char *path, json_t **file, const json_t **sources) {
  char kind;
  *file = NULL;
  *sources = NULL;
  RFI_TRY(rfi_path_kind(path, &kind));
  if (kind != 'f') return RFR_OK;
  if (rfi_json_load(run->ctx, path, file) == RFR_NO_MEMORY) return RFR_NO_MEMORY;
  *sources = json_object_get(*file, "sources");
  return RFR_OK;
}

static json_t *source_text(const rfi_config_source *source) {
  char line[24] = "";
  if (source->line) rfi_snprintf(line, sizeof line, ":%lld", (long long)source->line);
  return json_sprintf("%s%s", source->from, line);
}

static rfr_status put_sources(rfr_run *run, json_t *o, const char *config_path, const json_t *earlier) {
  const rfi_config *c = run->settings->config;
  json_t *sources = json_object();
  RFI_TRY(rfi_json_set(o, "sources", sources));
  for (int i = 0; i < RFI_CFG_COUNT; i++) {
    const char *key = rfi_config_path((rfi_config_id)i);
    if (!rfi_config_is_used(c, (rfi_config_id)i)) continue;
    json_t *before = strcmp(c->source[i].from, config_path) == 0 ? json_object_get(earlier, key) : NULL;
    RFI_TRY(rfi_json_set(sources, key, before ? json_incref(before) : source_text(&c->source[i])));
  }
  return RFR_OK;
}

/* The sources of a mixture, with the tokens that the run takes from each. */
static rfr_status put_mixture(rfr_run *run, json_t *o) {
  const rfi_settings *s = run->settings;
  const int n = rfi_mixture_sources(run->data);
  int64_t *counts, total;
  if (n == 0) return RFR_OK;
  json_t *list = json_array();
  RFI_TRY(rfi_json_set(o, "data_sources", list));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)n * sizeof *counts, &counts));
  rfr_status status = rfi_mixture_counts(run->data, s->seed, rfi_ramp_windows(s, run->steps), counts, &total);
  for (int i = 0; i < n && status == RFR_OK; i++) {
    json_t *source = json_object();
    if (json_array_append_new(list, source) != 0) status = rfi_fail(RFI_E_NO_MEMORY, "the sources of a mixture");
    if (status == RFR_OK) status = rfi_json_set(source, "files", json_string(s->config->data_train.items[i]));
    if (status == RFR_OK) status = rfi_json_set(source, "tokens", json_integer(counts[i] * s->sequence));
  }
  rfi_free(run->ctx, counts);
  return status;
}

static rfr_status put_facts(rfr_run *run, json_t *o) {
  rfr_run_info info = {.size = sizeof info};
  rfr_machine m = {.size = sizeof m};
  rfr_run_get_info(run, &info);
  RFI_TRY(rfr_machine_describe(run->ctx, &m));
  RFI_TRY(rfi_json_set(o, "refrain", json_string(rfr_version())));
  RFI_TRY(rfi_json_set(o, "device", json_string(m.device)));
  RFI_TRY(rfi_json_set(o, "instruction_set", json_string(m.isa)));
  RFI_TRY(rfi_json_set(o, "threads", json_integer(m.threads)));
  RFI_TRY(rfi_json_set(o, "gemm_library", json_string(m.matmul)));
  RFI_TRY(rfi_json_set(o, "ranks", json_integer(info.ranks)));
  RFI_TRY(rfi_json_set(o, "dtype", json_string(rfr_dtype_name(info.dtype))));
  RFI_TRY(rfi_json_set(o, "parameters", json_integer(info.parameters)));
  RFI_TRY(rfi_json_set(o, "trainable_parameters", json_integer(info.trainable_parameters)));
  RFI_TRY(rfi_json_set(o, "layers", json_integer(info.layers)));
  RFI_TRY(rfi_json_set(o, "experts", json_integer(info.experts)));
  RFI_TRY(rfi_json_set(o, "tokens_per_step", json_integer(info.tokens_per_step)));
  RFI_TRY(rfi_json_set(o, "flops_per_step", json_real(info.flops_per_step)));
  RFI_TRY(rfi_json_set(o, "training_tokens", json_integer(info.train_tokens)));
  RFI_TRY(rfi_json_set(o, "held_out_tokens", json_integer(info.validation_tokens)));
  RFI_TRY(put_mixture(run, o));
  return rfi_json_set(o, "checkpoint_bytes", json_integer(info.checkpoint_bytes));
}

static rfr_status write_json(rfr_run *run, const char *path, const json_t *o) {
  rfi_string text = {.ctx = run->ctx};
  rfr_status s = rfi_json_print(o, &text);
  if (s == RFR_OK) s = rfi_file_write(run->ctx, path, text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

static rfr_status write_run(rfr_run *run, const char *config_path) {
  char *path = NULL;
  json_t *o = json_object(), *before = NULL;
  const json_t *sources;
  rfr_status s;
  RFI_GOTO(rfi_path_join(run->ctx, run->folder, "run.json", &path));
  RFI_GOTO(read_sources(run, path, &before, &sources));
  RFI_GOTO(put_facts(run, o));
  RFI_GOTO(put_sources(run, o, config_path, sources));
  s = write_json(run, path, o);
fail:
  json_decref(o);
  json_decref(before);
  rfi_free(run->ctx, path);
  return s;
}

/* ---- plan.json ---- */

/* [first op, "forward 0"] for each part of the step. */
static rfr_status put_phases(rfr_run *run, int program, int n_ops, json_t *o) {
  static const char *const names[] = {
#define PHASE_NAME(e, name) name,
      RFR_PHASES(PHASE_NAME)
#undef PHASE_NAME
  };
  json_t *list = json_array();
  rfr_plan_op op, before = {0};
  RFI_TRY(rfi_json_set(o, "phases", list));
  for (int i = 0; i < n_ops; i++) {
    RFI_TRY(rfr_program_op(run->programs, program, i, &op));
    if (i > 0 && op.phase == before.phase && op.microbatch == before.microbatch) continue;
    json_t *text = op.microbatch < 0 ? json_string(names[op.phase])
                                     : json_sprintf("%s of microbatch %d", names[op.phase], op.microbatch);
    if (json_array_append_new(list, json_pack("[io]", i, text)) != 0)
      return rfi_fail(RFI_E_NO_MEMORY, "out of memory while writing plan.json");
    before = op;
  }
  return RFR_OK;
}

static rfr_status put_buffers(rfr_run *run, int program, int n, json_t *o) {
  json_t *list = json_array();
  rfr_plan_buffer b;
  RFI_TRY(rfi_json_set(o, "buffers", list));
  for (int i = 0; i < n; i++) {
    RFI_TRY(rfr_program_plan_buffer(run->programs, program, i, &b));
    json_t *item = json_pack("{sssssIsIsisi}", "name", b.name, "kind", b.kind, "bytes", (json_int_t)b.bytes, "offset",
                             (json_int_t)b.offset, "first", b.first, "last", b.last);
    if (json_array_append_new(list, item) != 0)
      return rfi_fail(RFI_E_NO_MEMORY, "out of memory while writing plan.json");
  }
  return RFR_OK;
}

static rfr_status put_plan(rfr_run *run, int program, json_t *o) {
  rfr_plan_summary sum;
  RFI_TRY(rfr_program_plan(run->programs, program, &sum));
  const int n_ops = rfr_trace_op_count(rfr_program_trace(run->programs, program, "lower"));
  RFI_TRY(rfi_json_set(o, "planned_bytes", json_integer(sum.planned_bytes)));
  RFI_TRY(rfi_json_set(o, "persistent_bytes", json_integer(sum.persistent_bytes)));
  RFI_TRY(rfi_json_set(o, "ops", json_integer(n_ops)));
  RFI_TRY(put_phases(run, program, n_ops, o));
  return put_buffers(run, program, sum.n_buffers, o);
}

static rfr_status write_plan(rfr_run *run) {
  const int program = rfr_run_program_index(run, RFR_RUN_TRAIN);
  char *path = NULL;
  json_t *o = json_object();
  rfi_string text = {.ctx = run->ctx};
  rfr_status s;
  RFI_GOTO(rfi_path_join(run->ctx, run->folder, "plan.json", &path));
  RFI_GOTO(put_plan(run, program, o));
  RFI_GOTO(rfi_json_print_compact(o, &text));
  s = rfi_file_write(run->ctx, path, text.data, text.n);
fail:
  rfi_string_deinit(&text);
  json_decref(o);
  rfi_free(run->ctx, path);
  return s;
}

rfr_status rfi_run_write_description(rfr_run *run, const char *config_path) {
  RFI_TRY(write_run(run, config_path));
  return rfr_run_program_index(run, RFR_RUN_TRAIN) < 0 ? RFR_OK : write_plan(run);
}
