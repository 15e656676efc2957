/* SPDX-License-Identifier: Apache-2.0
 *
 * Records the forward of a pipeline's layers. The embedding is in the first stage, the last norm, the LM head and the
 * loss are in the last one, which has fewer layers where the head costs as much as some; the others are split evenly. A
 * head that is tied to the embedding is a separately named parameter there, so that each of the two stages has a
 * gradient for it.
 */
#include "train/stage_trace.h"

#include <stdio.h>

#include "base/base.h"
#include "nn/nn.h"
#include "pass/pass.h"
#include "pass/recipe_rules.h"

/* ---- placement of layers and parameters ---- */

/* Cost per token: matrix elements of the first layer, plus attention over half a window; matrix elements of the
 * head. */
static void count_costs(const rfi_step_spec *s, double *layer, double *head) {
  const rfr_model_config *c = &s->model;
  *layer = (double)(c->heads * c->head_dim * (c->longest > 0 ? c->longest : s->tokens));
  *head = (double)(c->vocab_size * c->hidden_size);
  for (int i = 0; i < rfr_model_parameter_count(c); i++) {
    rfr_parameter p;
    if (rfi_parameter_layer(c, i) > 0) break;
    if (rfi_parameter_layer(c, i) == 0 && rfr_model_parameter(c, i, &p) == RFR_OK && p.rank == 2)
      *layer += (double)(p.shape[0] * p.shape[1]);
  }
}

/* The number of layers of the last stage, which also has the head: it minimizes the time of the longest stage. */
static int64_t last_layers(const rfi_step_spec *s, int stages) {
  const int64_t L = s->model.layers, most = L / stages;
  int64_t best = most;
  double layer, head, least = 0;
  count_costs(s, &layer, &head);
  for (int64_t n = most; n >= 1; n--) {
    const double others = (double)((L - n + stages - 2) / (stages - 1)) * layer, last = (double)n * layer + head,
                 longest = last > others ? last : others;
    if (n < most && longest >= least) continue;
    least = longest;
    best = n;
  }
  return best;
}

int64_t rfi_stage_layers(const rfi_step_spec *s, int stage, int64_t *first) {
  const int stages = rfi_pipeline_stages(&s->pipeline);
  const int64_t L = s->model.layers;
  int64_t last = stages < 2 ? L : s->pipeline.last_layers;
  if (last == 0) last = last_layers(s, stages);
  if (stage < stages - 1) return rfr_stage_layers(L - last, stages - 1, stage, first);
  if (first) *first = L - last;
  return last;
}

static bool has_tied(const rfi_step_spec *s, int i) {
  return s->model.tie_embeddings && i == rfi_parameter_index(&s->model, RFI_PARAM_TOKENS, 0);
}

bool rfi_is_tied_head(const rfi_step_spec *s, int64_t layer, int i) {
  return layer > 0 && layer == s->model.layers - 1 && has_tied(s, i);
}

int rfi_pipeline_tied(const rfi_step_spec *s) {
  const int i = rfi_parameter_index(&s->model, RFI_PARAM_TOKENS, 0);
  return has_tied(s, i) && !rfi_step_rule(s, i).frozen ? i : -1;
}

bool rfi_layer_reads(const rfi_step_spec *s, int64_t layer, int i) {
  const int64_t of = rfi_parameter_layer(&s->model, i), last = s->model.layers - 1;
  if (of < 0) return layer == 0 || (layer == last && has_tied(s, i));
  return of > last ? layer == last : layer == of;
}

bool rfi_stage_reads(const rfi_step_spec *s, int stage, int i) {
  int64_t first;
  const int64_t n = rfi_stage_layers(s, stage, &first);
  const int64_t last = s->model.layers - 1, of = rfi_parameter_layer(&s->model, i),
                layer = of < 0      ? 0
                        : of > last ? last
                                    : of;
  return (layer >= first && layer < first + n) || (first + n > last && rfi_layer_reads(s, last, i));
}

bool rfi_pipeline_owns(const rfi_step_spec *s, int rank, int i) {
  for (int stage = 0; stage < rfi_pipeline_stages(&s->pipeline); stage++)
    if (rfi_pipeline_rank(&s->pipeline, stage) == rank && rfi_stage_reads(s, stage, i)) return true;
  return false;
}

bool rfi_stage_trains(const rfi_step_spec *s, int stage) {
  if (stage > 0) return true;
  for (int i = 0; i < rfr_model_parameter_count(&s->model); i++)
    if (!rfi_step_rule(s, i).frozen && rfi_stage_reads(s, stage, i)) return true;
  return false;
}

/* ---- the schedule ---- */

static rfr_status set_layers(rfr_ctx *ctx, const rfi_step_spec *s, rfr_schedule *schedule) {
  const int stages = rfi_pipeline_stages(&s->pipeline);
  int *layers;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *layers * (size_t)stages, &layers));
  for (int i = 0; i < stages; i++) layers[i] = (int)rfi_stage_layers(s, i, NULL);
  const rfr_status status = rfr_schedule_set_layers(schedule, layers, stages);
  rfi_free(ctx, layers);
  return status;
}

rfr_status rfi_pipeline_schedule(rfr_ctx *ctx, const rfi_step_spec *s, rfr_schedule **out) {
  const rfi_pipeline_part *part = &s->pipeline;
  rfr_schedule *plain;
  rfr_schedule_options o = rfr_schedule_options_default();
  *out = NULL;
  o.kind = part->schedule;
  o.ranks = part->ranks;
  o.microbatches = (int)s->microbatches;
  RFI_TRY(rfr_schedule_generate(ctx, &o, &plain));
  rfr_status status = rfr_schedule_add_communication(plain, out);
  rfr_schedule_destroy(plain);
  for (int stage = 0; status == RFR_OK && stage < rfi_pipeline_stages(part); stage++)
    if (rfr_schedule_rank(*out, stage) != rfi_pipeline_rank(part, stage))
      status =
          rfi_fail(RFI_E_INTERNAL, "stage %d of the schedule is on rank %d", stage, rfr_schedule_rank(*out, stage));
  if (status == RFR_OK) status = set_layers(ctx, s, *out);
  if (status == RFR_OK) return RFR_OK;
  rfr_schedule_destroy(*out);
  *out = NULL;
  return status;
}

bool rfi_stage_receives(const rfi_pipeline_part *p, int stage, bool gradient) {
  const int other = gradient ? stage + 1 : stage - 1;
  return other >= 0 && other < rfi_pipeline_stages(p) && rfi_pipeline_rank(p, other) != rfi_pipeline_rank(p, stage);
}

/* Maps the slots of fp8_delayed to the numbers that one rank would use: slots of a layer follow those of earlier
 * layers. */
static rfr_status count_scales(rfr_ctx *ctx, const rfi_step_spec *s, int *out) {
  int64_t linears = 0;
  *out = 0;
  if (s->recipe.kind != RFR_RECIPE_FP8_DELAYED) return RFR_OK;
  for (int64_t layer = 0; layer < s->model.layers; layer++) {
    rfi_recipe_use use;
    rfr_trace *t;
    RFI_TRY(rfi_trace_layer(ctx, s, layer, &t));
    const rfr_status status = rfi_recipe_use_of(t, &use);
    if (status == RFR_OK && use.slots > 0) *out = (int)(RFI_OPERANDS * linears) + use.slots;
    linears += rfr_trace_linears(t);
    rfr_trace_destroy(t);
    RFI_TRY(status);
  }
  return RFR_OK;
}

rfr_status rfi_pipeline_count_slots(rfr_ctx *ctx, rfi_step_spec *s) {
  rfi_pipeline_part *p = &s->pipeline;
  rfr_schedule *schedule;
  RFI_TRY(rfi_pipeline_schedule(ctx, s, &schedule));
  p->activations = p->gradients = 0;
  const rfr_status counted = count_scales(ctx, s, &p->scales);
  for (int stage = 0; stage < rfi_pipeline_stages(p); stage++) {
    if (rfi_pipeline_rank(p, stage) != p->rank) continue;
    if (rfi_stage_receives(p, stage, false)) p->activations += rfr_schedule_slots(schedule, stage);
    if (rfi_stage_receives(p, stage, true)) p->gradients += rfr_schedule_slots(schedule, stage);
  }
  rfr_schedule_destroy(schedule);
  return counted;
}

/* ---- the trace ---- */

static rfr_value declare(rfr_trace *t, const rfi_step_spec *s, int i, bool is_head) {
  rfr_parameter p;
  char name[128];
  const rfr_role role = rfi_step_rule(s, i).frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE;
  if (!is_head || rfr_model_parameter(&s->model, i, &p) != RFR_OK) return rfi_declare_parameter(t, &s->model, i, role);
  snprintf(name, sizeof name, "%s" RFI_SUFFIX_HEAD, p.name);
  return rfr_input(t, name, role, s->model.dtype, p.rank, p.shape);
}

bool rfi_pipeline_draws(const rfi_step_spec *s) {
  const rfr_model_config *c = &s->model;
  return c->dropout > 0.0 || (c->adapter && c->adapter->dropout > 0.0) || s->recipe.kind == RFR_RECIPE_NVFP4;
}

static void record(rfr_trace *t, const rfi_step_spec *s, int64_t layer, rfr_value *w) {
  const bool is_first = layer == 0, is_last = layer == s->model.layers - 1;
  const int64_t shape[2] = {s->tokens, s->model.hidden_size}, width = s->tokens + 1, one = 1;
  for (int i = 0; i < rfr_model_parameter_count(&s->model); i++)
    w[i] = rfi_layer_reads(s, layer, i) ? declare(t, s, i, rfi_is_tied_head(s, layer, i)) : RFR_NONE;
  rfr_value x = is_first ? rfr_input(t, RFI_NAME_TOKENS, RFR_ROLE_INPUT, RFR_I32, 1, shape)
                         : rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, s->model.dtype, 2, shape);
  rfr_value offsets = rfr_input(t, RFI_NAME_OFFSETS, RFR_ROLE_INPUT, RFR_I32, 1, &width);
  if (s->checkpoint) rfr_set_recompute(t, RFR_POLICY_RECOMPUTE);
  rfr_recipe_begin(t, s->recipe.kind == RFR_RECIPE_NONE ? NULL : &s->recipe);
  rfr_value y = rfi_model_layers(t, &s->model, w, x, offsets, rfi_pipeline_draws(s) ? rfr_step_block(t) : RFR_NONE,
                                 layer, layer + 1);
  rfr_set_recompute(t, RFR_POLICY_AUTO);
  if (!is_last) {
    rfr_recipe_end(t);
    rfr_output(t, "y", y);
    return;
  }
  rfr_value targets = rfr_input(t, RFI_NAME_TARGETS, RFR_ROLE_INPUT, RFR_I32, 1, shape);
  rfr_value inv = rfr_input(t, "inv", RFR_ROLE_INPUT, RFR_F32, 1, &one);
  rfr_value logits = rfr_model_logits(t, &s->model, w, y, s->logits_dtype);
  rfr_recipe_end(t);
  rfr_scope(t, "head");
  rfr_output(t, "loss", rfr_cross_entropy(t, logits, targets, inv, RFI_IGNORE));
}

rfr_status rfi_trace_layer(rfr_ctx *ctx, const rfi_step_spec *s, int64_t layer, rfr_trace **out) {
  rfr_status status;
  rfr_trace *t = NULL;
  rfr_value *w = NULL;
  *out = NULL;
  RFI_TRY(rfr_model_config_check(&s->model));
  status = RFI_ALLOC(ctx, sizeof *w * ((size_t)rfr_model_parameter_count(&s->model) + 1), &w);
  if (status == RFR_OK) status = rfr_trace_create(ctx, &t);
  if (status == RFR_OK) record(t, s, layer, w);
  if (status == RFR_OK) status = rfr_trace_finish(t);
  rfi_free(ctx, w);
  if (status != RFR_OK) rfr_trace_destroy(t);
  else *out = t;
  return status;
}
