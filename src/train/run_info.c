/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of a run: data, model, progress.
 */
#include <string.h>

#include "base/base.h"
#include "data/mixture.h"
#include "nn/adapter.h"
#include "nn/nn.h"
#include "text/row_dataset.h"
#include "train/ramp.h"
#include "train/state.h"
#include "train/state_json.h"

/* FLOPs of one step as models are usually counted: two per token and element of a matrix that multiplies it, twice that
 * for the gradients, and attention over half of each window. The compiled program counts attention over packed windows
 * as if they were one window. */
static double step_flops(const rfr_model_config *c, int64_t sequence, int64_t tokens) {
  double weights = (double)(c->vocab_size * c->hidden_size);
  for (int i = 0; i < rfr_model_parameter_count(c); i++) {
    rfr_parameter p;
    if (rfr_model_parameter(c, i, &p) != RFR_OK || p.rank < 2) continue;
    if (i == rfi_parameter_index(c, RFI_PARAM_TOKENS, 0) || i == rfi_parameter_index(c, RFI_PARAM_POSITIONS, 0) ||
        i == rfi_parameter_index(c, RFI_PARAM_HEAD, 0))
      continue; /* embeddings need no FLOPs; the head is counted, tied or not */
    const double each = (double)(p.shape[p.rank - 2] * p.shape[p.rank - 1]);
    weights += p.rank > 2 ? each * (double)c->experts_per_token : each;
  }
  return (double)tokens * (6.0 * weights + 6.0 * (double)(c->layers * c->heads * c->head_dim * sequence));
}

rfr_status rfr_run_phase_at(const rfr_run *run, int i, rfr_run_phase *out) {
  RFI_TRY(rfi_check_handle(run, "rfr_run"));
  RFI_TRY(rfi_check_handle(out, "rfr_run_phase"));
  const rfi_settings *s = run->settings;
  *out = (rfr_run_phase){.size = sizeof *out, .program = -1};
  if (i < 0 || i > s->n_ramp) return rfi_fail(RFI_E_ARGUMENT, "phase %d of %d", i, s->n_ramp + 1);
  out->until = i < s->n_ramp ? s->ramp[i].until : 0;
  out->tokens = rfi_ramp_tokens(s, i);
  out->sequence = rfi_ramp_sequence(s, i);
  if (rfr_run_program_index(run, RFR_RUN_TRAIN) >= 0) out->program = run->phases[i];
  return RFR_OK;
}

void rfr_run_get_info(const rfr_run *run, rfr_run_info *out) {
  *out = (rfr_run_info){.size = sizeof *out};
  if (!run) return;
  const rfi_settings *s = run->settings;
  *out = (rfr_run_info){.size = sizeof *out,
                        .step = run->step,
                        .steps = run->steps,
                        .dtype = s->spec.model.dtype,
                        .max_positions = s->spec.model.max_positions,
                        .window = s->sequence,
                        .vocab_size = s->spec.model.vocab_size,
                        .model = s->weights ? s->weights : "",
                        .tokens_per_step = rfi_step_windows(s) * s->sequence,
                        .experts = s->spec.model.experts,
                        .expert_layers = rfr_model_expert_layers(&s->spec.model),
                        .expert_rows = s->spec.tokens * s->spec.model.experts_per_token,
                        .preference = s->spec.preference,
                        .layers = s->spec.model.layers,
                        .ranks = s->parallel.ranks,
                        .shard = s->parallel.shard,
                        .byte_tokens = !s->spec.preference && rfi_settings_has_byte_tokens(s) && !s->tokenizer,
                        .data_hash = run->hash,
                        .checkpoint = run->checkpoint,
                        .time = run->clock.time,
                        .steps_estimated = run->clock.time > 0.0 && run->clock.lr_steps[RFI_LR_END] == RFI_LR_LATER,
                        .checkpoint_bytes = run->checkpoint_bytes};
  int64_t block[RFI_STEP_N];
  if (run->block.data && rfr_programs_read(run->programs, &run->block, block) == RFR_OK)
    out->skipped = block[RFI_STEP_SKIPPED];
  out->flops_per_step = step_flops(&s->spec.model, s->sequence, out->tokens_per_step);
  if (run->data) {
    const rfi_dataset_stats *d = rfi_dataset_get_stats(run->data);
    out->train_files = d->files[RFI_TRAIN];
    out->train_bytes = d->bytes[RFI_TRAIN];
    out->validation_files = d->files[RFI_VALIDATION];
    out->validation_bytes = d->bytes[RFI_VALIDATION];
    out->train_tokens = d->tokens[RFI_TRAIN];
    out->validation_tokens = d->tokens[RFI_VALIDATION];
    out->train_rows = d->rows ? d->documents[RFI_TRAIN] : 0;
    out->validation_rows = d->rows ? d->documents[RFI_VALIDATION] : 0;
    out->train_windows = d->windows[RFI_TRAIN];
    out->trained_tokens = d->trained[RFI_TRAIN];
    out->truncated_rows = d->truncated;
    out->cut_tokens = d->cut;
    out->dropped_rows = d->dropped;
    out->untrained_rows = d->untrained;
    out->equal_rows = d->equal;
    out->cached_files = d->cached;
    out->duplicate_files = d->duplicates;
    out->empty_files = d->empty;
    out->byte_tokens = !s->spec.preference && !run->own_data && !d->token_files && (!s->tokenizer || !d->rows);
    if (s->epochs > 0) out->epochs = s->epochs;
    else if (d->rows && d->windows[RFI_TRAIN] > 0)
      out->epochs = (double)rfi_ramp_windows(s, out->steps) / (double)d->windows[RFI_TRAIN];
    else if (out->train_tokens > 0)
      out->epochs = (double)rfi_ramp_windows(s, out->steps) * (double)s->sequence / (double)out->train_tokens;
  }
  for (int i = 0; i < rfr_model_parameter_count(&s->spec.model); i++) {
    rfr_parameter p;
    if (rfr_model_parameter(&s->spec.model, i, &p) != RFR_OK) continue;
    int64_t n = 1;
    for (int d = 0; d < p.rank; d++) n *= p.shape[d];
    if (rfi_adapter_has_name(p.name)) out->adapter_parameters += n;
    else out->parameters += n;
    if (strstr(p.name, ".mlp.experts.")) out->expert_bytes += n * rfr_dtype_bits(s->spec.model.dtype) / 8;
    if (!rfi_step_rule(&s->spec, i).frozen) out->trainable_parameters += n;
  }
  if (out->expert_layers > 0) out->expert_bytes /= out->expert_layers; /* all layers have the same size */
}

void rfr_run_get_pipeline(const rfr_run *run, rfr_run_pipeline *out) {
  *out = (rfr_run_pipeline){.size = sizeof *out, .ranks = 1};
  if (!run || !run->stages) return;
  const rfi_pipeline_part *p = &run->settings->spec.pipeline;
  rfr_graphs_memory m;
  rfi_stages_memory(run->stages, &m);
  *out = (rfr_run_pipeline){.size = sizeof *out,
                            .ranks = p->ranks,
                            .rank = p->rank,
                            .stages = rfi_pipeline_stages(p),
                            .schedule = p->schedule,
                            .microbatches = run->settings->spec.microbatches,
                            .planned_bytes = m.planned_bytes - m.step_memory_bytes,
                            .slot_bytes = m.slot_bytes,
                            .slots = m.slots,
                            .shared_bytes = m.shared_bytes,
                            .recomputed_flops = m.recomputed_flops,
                            .last_layers = rfi_stage_layers(&run->settings->spec, rfi_pipeline_stages(p) - 1, NULL)};
  rfi_stages_messages(run->stages, &out->message_bytes, &out->messages);
}

typedef struct sample {
  rfr_sample_fn write;
  void *user;
  int trained;
} sample;

static void write_sample(const char *text, size_t n, void *user) {
  const sample *s = user;
  s->write(text, n, s->trained, s->user);
}

rfr_status rfr_run_data_row(const rfr_run *run, int64_t row, rfr_sample_fn write, void *user) {
  RFI_TRY(rfi_check_handle(run, "rfr_run"));
  sample s = {.write = write, .user = user};
  int64_t n;
  rfr_decoder *decoder = NULL;
  rfr_status status = RFR_OK;
  if (!run->data || !rfi_dataset_get_stats(run->data)->rows)
    return rfi_fail(RFI_E_ARGUMENT, "the run has no data with rows");
  int64_t row_of_source = row;
  const rfi_dataset *source = rfi_mixture_document(run->data, &row_of_source);
  const uint32_t *ids = rfi_row_dataset_row(source, RFI_TRAIN, row_of_source, &n);
  if (!ids)
    return rfi_fail(RFI_E_ARGUMENT, "row %lld of %d", (long long)row,
                    rfi_dataset_get_stats(run->data)->documents[RFI_TRAIN]);
  if (run->settings->tokenizer) RFI_TRY(rfr_decoder_create(run->settings->tokenizer, 1, &decoder));
  for (int64_t i = 0; i < n && status == RFR_OK; i++) {
    const char byte = (char)RFI_TOKEN_ID(ids[i]);
    s.trained = (ids[i] & RFI_TOKEN_TRAINED) != 0;
    if (decoder) status = rfr_decoder_add(decoder, RFI_TOKEN_ID(ids[i]), write_sample, &s);
    else write_sample(&byte, 1, &s);
  }
  if (decoder && status == RFR_OK) status = rfr_decoder_end(decoder, write_sample, &s);
  rfr_decoder_destroy(decoder);
  return status;
}

const char *rfr_run_data_file(const rfr_run *run, int validation, int64_t i) {
  const rfi_split split = validation ? RFI_VALIDATION : RFI_TRAIN;
  if (!run || !run->data || i < 0 || i >= rfi_dataset_get_stats(run->data)->files[split]) return NULL;
  return rfi_dataset_file(run->data, split, (int)i, NULL);
}

const rfr_tokenizer *rfr_run_tokenizer(const rfr_run *run) { return run ? run->settings->tokenizer : NULL; }

const rfr_chat_template *rfr_run_template(const rfr_run *run) { return run ? run->settings->chat : NULL; }
