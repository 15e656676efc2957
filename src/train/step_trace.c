/* SPDX-License-Identifier: Apache-2.0
 *
 * Records the training step, the evaluation, and the two programs of text generation.
 *
 * The training step is one program: read the input rings; forward and loss of each microbatch; one gradient per trained
 * parameter, summed over microbatches by autodiff; learning rate, gradient norm, clipping, update, counts, metrics.
 * Losses are sums divided by the number of valid targets of the step, so that k microbatches give the result of one
 * batch; with preferences, by the number of its pairs. Over several ranks a step has the microbatches of all of them:
 * the targets are gathered and counted, gradients and reported sums are all-reduced, and the routing is gathered, so
 * that norm, skip and metrics are bitwise equal on every rank. In f16 the divisor also contains the loss scale, which
 * norm and update divide out. Everything that changes from step to step is in the step block, the loss scale and the
 * rings; the trace has no step number.
 */
#include "train/step_trace.h"

#include <stdio.h>

#include "base/base.h"
#include "nn/nn.h"
#include "ops/decode/cursor.h"
#include "ops/op_index.h"
#include "trace/trace.h"
#include "train/muon.h"
#include "train/stage_trace.h"

enum { SCALE_GROWS = 2000 }; /* the loss scale doubles after so many steps without overflow */
enum { LEAST_8BIT = 4096 };  /* minimum number of elements of an 8-bit moment, as in bitsandbytes */

/* This step's slot of a ring, number attempted mod R: its first k rows, (k, width). */
static rfr_value ring(rfr_trace *t, const rfi_step_spec *s, const char *name, rfr_dtype dtype, int64_t width,
                      rfr_value step) {
  const int64_t shape[3] = {s->slots, rfi_ring_microbatches(s), width};
  const rfr_value slot = rfr_ring_read(t, rfr_input(t, name, RFR_ROLE_INPUT, dtype, 3, shape), step);
  return shape[1] == s->microbatches ? slot : rfr_slice(t, slot, 0, 0, s->microbatches);
}

static int all_ranks(const rfi_step_spec *s) { return s->ranks > 1 ? s->ranks : 1; }
static bool has_ranks(const rfi_step_spec *s) { return s->ranks > 1; }

/* The number of this rank's first microbatch, counted over all ranks. */
static int64_t first_microbatch(const rfi_step_spec *s) { return s->rank * s->microbatches; }

/* 1 / the number of valid elements of a step, over all ranks. `all` (k, width): this rank's elements; row[m] is
 * microbatch m. */
static rfr_value count_valid(rfr_trace *t, const rfi_step_spec *s, rfr_value all, const rfr_value *row,
                             rfr_value *count) {
  if (!has_ranks(s)) return rfr_token_count(t, (int)s->microbatches, row, RFI_IGNORE, count);
  const int64_t n = s->ranks * s->microbatches * rfr_value_type(t, all).shape[1];
  rfr_value gathered = rfr_reshape(t, rfr_all_gather(t, all, s->ranks), 1, &n);
  return rfr_token_count(t, 1, &gathered, RFI_IGNORE, count);
}

/* Row m of (k, width), as (width). */
static rfr_value row(rfr_trace *t, rfr_value x, int64_t m) {
  const int64_t width = rfr_value_type(t, x).shape[1];
  return rfr_reshape(t, rfr_slice(t, x, 0, m, 1), 1, &width);
}

static rfr_value declare_like(rfr_trace *t, const char *name, const char *suffix, rfr_dtype dtype, rfr_value like) {
  char full[128];
  const rfr_type type = rfr_value_type(t, like);
  snprintf(full, sizeof full, "%s%s", name, suffix);
  return rfr_input(t, full, RFR_ROLE_STATE, dtype, type.rank, type.shape);
}

/* Declares a moment of AdamW. Only large moments have 8 bits: small tensors save little and are often norms. */
static rfr_value declare_moment(rfr_trace *t, const rfi_step_spec *s, const char *name, const char *suffix,
                                rfr_quant format, rfr_value w) {
  char full[128];
  const rfr_type type = rfr_value_type(t, w);
  if (s->state_dtype != RFR_U8) return declare_like(t, name, suffix, s->state_dtype, w);
  if (rfi_count(&type) < LEAST_8BIT) return declare_like(t, name, suffix, RFR_F32, w);
  const int64_t bytes = rfr_quant_bytes(format, type.rank, type.shape);
  snprintf(full, sizeof full, "%s%s", name, suffix);
  return rfr_input(t, full, RFR_ROLE_STATE, RFR_U8, 1, &bytes);
}

static rfr_value declare_parameter(rfr_trace *t, const rfi_step_spec *s, int i) {
  return rfi_declare_parameter(t, &s->model, i, rfi_step_rule(s, i).frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE);
}

static rfr_value declare_average(rfr_trace *t, const rfr_parameter *p) {
  char full[128];
  snprintf(full, sizeof full, "%s" RFI_SUFFIX_EMA, p->name);
  return rfr_input(t, full, RFR_ROLE_TRAINABLE, RFR_F32, p->rank, p->shape);
}

/* Parameter i for evaluations and samples: if there are averages, the average of a trained parameter. */
static rfr_value declare_evaluated(rfr_trace *t, const rfi_step_spec *s, int i) {
  rfr_parameter p;
  if (s->ema.decay == 0.0 || rfi_step_rule(s, i).frozen || rfr_model_parameter(&s->model, i, &p) != RFR_OK)
    return declare_parameter(t, s, i);
  const rfr_value average = declare_average(t, &p);
  const rfi_attr to = rfi_i(s->model.dtype);
  return s->model.dtype == RFR_F32 ? average : rfi_record(t, RFR_HERE, RFI_OP_ema_weight, 1, &average, &to, NULL);
}

static void declare_all_evaluated(rfr_trace *t, const rfi_step_spec *s, rfr_value *out) {
  for (int i = 0; i < rfr_model_parameter_count(&s->model); i++) out[i] = declare_evaluated(t, s, i);
}

typedef struct update {
  rfr_value lr, clip, skip, step;
} update;

static rfr_value learning_rate(rfr_trace *t, const rfi_step_spec *s, rfr_value step) {
  const int64_t three = 3;
  return rfr_lr_schedule_steps(
      t, step, s->timed ? rfr_input(t, RFI_NAME_LR_STEPS, RFR_ROLE_STATE, RFR_I64, 1, &three) : RFR_NONE, &s->lr);
}

/* `by_layer`: RFR_NONE without experts. */
static void write_metrics(rfr_trace *t, const rfi_step_spec *s, rfr_value step, const rfr_value metrics[RFI_METRIC_N],
                          rfr_value by_layer) {
  const int64_t shape[2] = {s->slots, rfi_metric_width(s)};
  rfr_value values[RFI_METRIC_N + 1];
  int columns = 0;
  for (int m = 0; m < RFI_METRIC_N; m++)
    if (rfi_metric_exists(s, (rfi_metric)m)) values[columns++] = metrics[m];
  if (by_layer != RFR_NONE) values[columns++] = by_layer;
  rfr_metrics_write(t, rfr_input(t, RFI_NAME_METRICS, RFR_ROLE_STATE, RFR_F64, 2, shape), step, columns, values);
}

/* Members are RFR_NONE without loss scaling. */
typedef struct scaling {
  rfr_value state, scale, inverse;
} scaling;

static scaling record_scaling(rfr_trace *t, const rfi_step_spec *s) {
  const int64_t two = 2;
  scaling x = {RFR_NONE, RFR_NONE, RFR_NONE};
  if (s->model.dtype != RFR_F16) return x;
  x.state = rfr_input(t, RFI_NAME_LOSS_SCALE, RFR_ROLE_STATE, RFR_I32, 1, &two);
  x.scale = rfr_loss_scale(t, x.state, &x.inverse);
  return x;
}

static rfr_value unscaled(rfr_trace *t, const scaling *scaling, rfr_value x) {
  return scaling->inverse == RFR_NONE ? x : rfr_mul(t, x, scaling->inverse);
}

/* The updated weight before rounding: the master weight if there is one. `w1`: result w1 of an update. */
static rfr_value unrounded(const rfr_trace *t, rfr_value w1) {
  const rfi_opr *op = w1 >= 0 ? &t->ops[t->values[w1].op] : NULL;
  return op && op->out[op->n_out - 1] >= 0 ? op->out[op->n_out - 1] : w1;
}

/* Updates a weight without momentum, or one whose direction is computed elsewhere. */
static rfr_value update_by_sgd(rfr_trace *t, const rfi_step_spec *s, const update *u, const rfi_param_rule *rule, int i,
                               rfr_value w, rfr_value g, rfr_value momentum, rfr_value master, rfr_value clip) {
  const double factor = s->sgd ? s->momentum : 0.0;
  if (s->stochastic)
    return rfr_sgd_stochastic(t, w, g, momentum, u->lr, clip, u->skip, u->step, factor, rule->weight_decay,
                              rule->lr_scale, i + 1);
  return rfr_sgd(t, w, g, momentum, master, u->lr, clip, u->skip, factor, rule->weight_decay, rule->lr_scale);
}

/* GEMMs run in bf16 unless the model is f32. The direction becomes the gradient of SGD without momentum. */
static rfr_value update_by_muon(rfr_trace *t, const rfi_step_spec *s, const update *u, const rfi_param_rule *rule,
                                int i, const char *name, rfr_value w, rfr_value g, rfr_value master) {
  const rfr_value in[4] = {g, declare_like(t, name, RFI_SUFFIX_MOMENTUM, s->state_dtype, w), u->clip, u->skip};
  const rfi_attr attr[2] = {rfi_f(s->muon_momentum), rfi_i(s->model.dtype == RFR_F32 ? RFR_F32 : RFR_BF16)};
  const rfr_value momentum = rfi_record(t, RFR_HERE, RFI_OP_muon_momentum, 4, in, attr, NULL);
  return update_by_sgd(t, s, u, rule, i, w, rfi_muon_direction(t, s, i, momentum), RFR_NONE, master, RFR_NONE);
}

/* Returns the updated weight. */
static rfr_value update_parameter(rfr_trace *t, const rfi_step_spec *s, const update *u, const rfi_param_rule *rule,
                                  int i, const char *name, rfr_value w, rfr_value g) {
  rfr_value master = s->master ? declare_like(t, name, RFI_SUFFIX_MASTER, RFR_F32, w) : RFR_NONE;
  if (s->sgd) {
    rfr_value momentum = s->momentum > 0.0 ? declare_like(t, name, RFI_SUFFIX_MOMENTUM, s->state_dtype, w) : RFR_NONE;
    return update_by_sgd(t, s, u, rule, i, w, g, momentum, master, u->clip);
  }
  if (rfi_is_muon(s, i)) return update_by_muon(t, s, u, rule, i, name, w, g, master);
  rfr_adamw_options o = s->adamw;
  o.lr_scale = rule->lr_scale;
  o.decay = rule->weight_decay;
  o.draws = s->stochastic ? i + 1 : 0;
  rfr_value m = declare_moment(t, s, name, RFI_SUFFIX_M, RFR_QUANT_DYNAMIC8, w);
  rfr_value v = declare_moment(t, s, name, RFI_SUFFIX_V, RFR_QUANT_DYNAMIC8U, w);
  return rfr_adamw(t, w, g, m, v, master, u->lr, u->clip, u->skip, u->step, &o);
}

/* Updates the averages after all weights, so that all ops of a kind share a launch. w[i]: the updated weight, or
 * RFR_NONE. */
static void update_averages(rfr_trace *t, const rfi_step_spec *s, const update *u, const rfr_value *w) {
  rfr_parameter p;
  for (int i = 0; i < rfr_model_parameter_count(&s->model) && s->ema.decay > 0.0; i++) {
    if (w[i] == RFR_NONE || rfr_model_parameter(&s->model, i, &p) != RFR_OK) continue;
    rfr_ema(t, declare_average(t, &p), unrounded(t, w[i]), u->skip, u->step, s->ema.decay, s->ema.start, s->ema.warmup);
  }
}

/* Per layer and microbatch: the number of rows of each expert, and a flag for invalid splits. */
typedef struct routing {
  rfr_value *splits, *bad;
  int n;
} routing;

/* Concatenates the routings of all microbatches and ranks, in order, to one value of each kind. */
static void gather_routing(rfr_trace *t, const rfi_step_spec *s, routing *routing) {
  const int64_t shape[2] = {(int64_t)routing->n * s->ranks, s->model.experts};
  if (!has_ranks(s) || routing->n == 0) return;
  routing->bad[0] = rfr_all_gather(t, rfr_concat(t, routing->n, routing->bad, 0), s->ranks);
  const rfr_value splits = rfr_all_gather(t, rfr_concat(t, routing->n, routing->splits, 0), s->ranks);
  routing->splits[0] = rfr_reshape(t, splits, 2, shape);
  routing->n = 1;
}

/* The reported sums over microbatches: with preferences all of these, otherwise only the loss. */
enum { LOSS, MARGIN, ACCURACY, REPORTS };

/* Sums the reports over all ranks. Returns the number of ranks that request a stop. */
static rfr_value reduce_reports(rfr_trace *t, const rfi_step_spec *s, rfr_value step, int n, rfr_value *reported) {
  const int64_t shape[2] = {s->slots, 1};
  rfr_value terms[REPORTS + 1];
  if (!has_ranks(s)) return RFR_NONE;
  for (int i = 0; i < n; i++) terms[i] = reported[i];
  terms[n] = rfr_ring_read(t, rfr_input(t, RFI_NAME_STOP, RFR_ROLE_INPUT, RFR_F32, 2, shape), step);
  rfr_value sums = rfr_all_reduce(t, rfr_concat(t, n + 1, terms, 0), s->ranks);
  for (int i = 0; i < n; i++) reported[i] = rfr_slice(t, sums, 0, i, 1);
  return rfr_slice(t, sums, 0, n, 1);
}

/* The norm of sharded gradients, from the squares of all ranks. */
static rfr_value norm_over_ranks(rfr_trace *t, int n, const rfr_value *g, int ranks, rfr_value zeros, rfr_value *skip) {
  const rfi_attr attr = rfi_i(ranks);
  rfr_value out[3];
  const rfr_value own = rfi_record(t, RFR_HERE, RFI_OP_grad_squares, n, g, NULL, NULL);
  const rfr_value in[2] = {zeros, rfr_all_gather(t, own, ranks)};
  rfi_record(t, RFR_HERE, RFI_OP_norm_of_squares, 2, in, &attr, out);
  *skip = out[1];
  return out[0];
}

static bool has_spread_experts(const rfi_step_spec *s) { return s->expert_ranks > 1; }

/* Whether each rank has different elements of parameter i, with gradients that include the rows of all ranks. */
static bool is_spread(const rfi_step_spec *s, int i) {
  rfr_parameter p;
  return has_spread_experts(s) && rfr_model_parameter(&s->model, i, &p) == RFR_OK && rfi_is_of_experts(p.name);
}

/* The norm of all gradients. With expert parallelism the ranks add their squares; the pass `shard` then replaces
 * gradients that all ranks have by parts. */
static rfr_value gradient_norm(rfr_trace *t, const rfi_step_spec *s, int n, const rfr_value *g, rfr_value zeros,
                               rfr_value *skip) {
  if (!has_spread_experts(s)) return rfr_grad_norm_zeros(t, n, g, zeros, skip);
  return norm_over_ranks(t, n, g, s->ranks, zeros, skip);
}

/* Records everything after the loss. `reported`: the loss without the loss scale. `g` has an element per parameter.
 * Replaces w by the updated weights. */
static void optimize(rfr_trace *t, const rfi_step_spec *s, rfr_value *w, int n, rfr_value *g, rfr_value loss,
                     const scaling *scaling, const rfr_value reported[REPORTS], rfr_value count, rfr_value stop,
                     const routing *routing, rfr_value step) {
  int trainable = 0;
  for (int i = 0; i < n; i++)
    if (!rfi_step_rule(s, i).frozen) g[trainable++] = rfr_gradient(t, loss, w[i], s->gradient_dtype);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_scope(t, "optimizer");
  for (int i = 0, k = 0; i < n && has_ranks(s); i++) {
    if (rfi_step_rule(s, i).frozen) continue;
    if (!is_spread(s, i)) g[k] = rfr_all_reduce(t, g[k], s->ranks);
    k++;
  }
  update u = {.step = step, .lr = learning_rate(t, s, step), .clip = RFR_NONE};
  const int64_t gradients = trainable;
  rfr_value zeros = rfr_input(t, RFI_NAME_ZERO_STEPS, RFR_ROLE_STATE, RFR_I32, 1, &gradients);
  rfr_value norm = unscaled(t, scaling, gradient_norm(t, s, trainable, g, zeros, &u.skip));
  rfr_value which = RFR_NONE, group = RFR_NONE;
  if (routing->n > 0) u.skip = rfr_skip_bad(t, u.skip, routing->n, routing->bad, &which, &group);
  u.clip = scaling->inverse;
  if (s->clip > 0.0) u.clip = unscaled(t, scaling, rfr_clip_scale(t, norm, s->clip));
  trainable = 0;
  for (int i = 0; i < n; i++) {
    const rfi_param_rule rule = rfi_step_rule(s, i);
    rfr_parameter p;
    const rfr_value old = w[i];
    w[i] = RFR_NONE;
    if (rule.frozen || rfr_model_parameter(&s->model, i, &p) != RFR_OK) continue;
    w[i] = update_parameter(t, s, &u, &rule, i, p.name, old, g[trainable++]);
  }
  update_averages(t, s, &u, w);
  rfr_value metrics[RFI_METRIC_N] = {[RFI_METRIC_LOSS] = reported[LOSS],
                                     [RFI_METRIC_NORM] = norm,
                                     [RFI_METRIC_LR] = u.lr,
                                     [RFI_METRIC_COUNT] = count,
                                     [RFI_METRIC_SKIP] = u.skip,
                                     [RFI_METRIC_BAD_ROUTING] = which,
                                     [RFI_METRIC_BAD_GROUP] = group,
                                     [RFI_METRIC_MARGIN] = reported[MARGIN],
                                     [RFI_METRIC_ACCURACY] = reported[ACCURACY],
                                     [RFI_METRIC_STOP] = stop};
  rfr_value by_layer = RFR_NONE;
  if (routing->n > 0)
    metrics[RFI_METRIC_MOST_LOAD] =
        rfr_moe_load(t, routing->n, routing->splits, rfi_metric_layers(s), &metrics[RFI_METRIC_LEAST_LOAD], &by_layer);
  write_metrics(t, s, step, metrics, by_layer);
  if (scaling->state != RFR_NONE) rfr_loss_scale_end(t, scaling->state, u.skip, SCALE_GROWS);
  rfr_step_end(t, step, u.skip);
}

/* The losses of a microbatch's answers, f32 (2P), in the order of its documents. */
static rfr_value answer_losses(rfr_trace *t, rfr_value scores, rfr_value targets, rfr_value offsets) {
  const int64_t pairs = rfi_most_pairs(rfr_value_type(t, targets).shape[0]);
  return rfr_segment_sum(t, rfr_token_loss(t, scores, targets, RFI_IGNORE), rfr_slice(t, offsets, 0, 0, 2 * pairs + 1));
}

/* The inputs of a loss over pairs; RFR_NONE without preferences. */
typedef struct preference {
  rfr_value pairs, reference; /* (k,P) */
} preference;

/* `inv`: 1 / number of pairs of the step. */
static preference record_preference(rfr_trace *t, const rfi_step_spec *s, rfr_value step, rfr_value *row_of_pairs,
                                    rfr_value *inv) {
  const int64_t P = rfi_most_pairs(s->tokens);
  preference p = {RFR_NONE, RFR_NONE};
  if (!s->preference) return p;
  p.pairs = ring(t, s, RFI_NAME_PAIRS, RFR_I32, P, step);
  p.reference = ring(t, s, RFI_NAME_REFERENCE, RFR_F32, P, step);
  for (int64_t m = 0; m < s->microbatches; m++) row_of_pairs[m] = row(t, p.pairs, m);
  *inv = count_valid(t, s, p.pairs, row_of_pairs, NULL);
  return p;
}

static void record_train(rfr_trace *t, const rfi_step_spec *s, rfr_value *values) {
  const int n = rfr_model_parameter_count(&s->model);
  const int64_t L = rfr_model_expert_layers(&s->model), routings = L * s->microbatches;
  rfr_value *w = values, *g = w + n, *logits = g + n, *index = logits + L, *targets = index + L;
  rfr_value *pairs = targets + s->microbatches, *splits = pairs + s->microbatches;
  routing routing = {splits, splits + routings, (int)routings};
  rfr_microbatch(t, -1);
  for (int i = 0; i < n; i++) w[i] = declare_parameter(t, s, i);
  rfr_value step = rfr_step_block(t);
  rfr_scope(t, "inputs");
  rfr_value all_tokens = ring(t, s, RFI_NAME_TOKENS, RFR_I32, s->tokens, step);       /* (k,T) */
  rfr_value all_targets = ring(t, s, RFI_NAME_TARGETS, RFR_I32, s->tokens, step);     /* (k,T) */
  rfr_value all_offsets = ring(t, s, RFI_NAME_OFFSETS, RFR_I32, s->tokens + 1, step); /* (k,T+1) */
  for (int64_t m = 0; m < s->microbatches; m++) targets[m] = row(t, all_targets, m);
  rfr_value count, inv = count_valid(t, s, all_targets, targets, &count);
  const preference preference = record_preference(t, s, step, pairs, &inv);
  const scaling scaling = record_scaling(t, s);
  if (scaling.scale != RFR_NONE) inv = rfr_mul(t, inv, scaling.scale);
  rfr_value sum[REPORTS], balance = RFR_NONE;
  const int reports = s->preference ? REPORTS : 1;
  rfr_recipe_begin(t, s->recipe.kind == RFR_RECIPE_NONE ? NULL : &s->recipe);
  for (int64_t m = 0; m < s->microbatches; m++) {
    rfr_microbatch(t, (int)(first_microbatch(s) + m)); /* masks depend on the microbatch number */
    rfr_scope(t, "inputs");
    rfr_value tokens = row(t, all_tokens, m), offsets = row(t, all_offsets, m);
    const rfr_experts experts = {
        .logits = logits, .index = index, .splits = routing.splits + m * L, .bad = routing.bad + m * L};
    if (s->checkpoint) rfr_set_recompute(t, RFR_POLICY_RECOMPUTE);
    rfr_value h = rfr_model_forward_experts(t, &s->model, w, tokens, offsets, step, &experts);
    rfr_set_recompute(t, RFR_POLICY_AUTO);
    rfr_value aux = rfr_model_routing_loss(t, &s->model, &experts, targets[m], RFI_IGNORE);
    rfr_value scores = rfr_model_logits(t, &s->model, w, h, s->logits_dtype);
    rfr_scope(t, "head");
    rfr_value part[REPORTS];
    if (s->preference)
      part[LOSS] = rfr_dpo_loss(t, answer_losses(t, scores, targets[m], offsets), row(t, preference.reference, m),
                                pairs[m], inv, s->beta, s->smoothing, &part[MARGIN], &part[ACCURACY]);
    else part[LOSS] = rfr_cross_entropy(t, scores, targets[m], inv, RFI_IGNORE);
    if (aux != RFR_NONE && scaling.scale != RFR_NONE)
      aux = rfr_mul(t, aux, scaling.scale); /* the other losses have it through inv */
    rfr_microbatch(t, -1);
    for (int i = 0; i < reports; i++) sum[i] = m == 0 ? part[i] : rfr_add(t, sum[i], part[i]);
    if (aux != RFR_NONE) balance = m == 0 ? aux : rfr_add(t, balance, aux);
  }
  rfr_recipe_end(t);
  rfr_value loss = sum[LOSS], reported[REPORTS] = {RFR_NONE, RFR_NONE, RFR_NONE};
  for (int i = 0; i < reports; i++) reported[i] = unscaled(t, &scaling, sum[i]);
  rfr_scope(t, "reports");
  const rfr_value stop = reduce_reports(t, s, step, reports, reported);
  rfr_value_set_name(t, reported[LOSS], "loss");
  if (balance != RFR_NONE) /* each microbatch has its own mean */
    loss = rfr_add(t, loss, rfr_scale(t, balance, 1.0 / (double)(all_ranks(s) * s->microbatches), RFR_NONE));
  gather_routing(t, s, &routing);
  optimize(t, s, w, n, g, loss, &scaling, reported, count, stop, &routing, step);
  rfr_output(t, "loss", reported[LOSS]);
}

/* ---- a rank of a pipeline ---- */

static rfr_value declare_gradient(rfr_trace *t, const rfi_step_spec *s, const char *name, const char *suffix,
                                  rfr_value w) {
  char full[160];
  const rfr_type type = rfr_value_type(t, w);
  snprintf(full, sizeof full, "%s%s" RFI_SUFFIX_GRADIENT, name, suffix);
  return rfr_input(t, full, RFR_ROLE_INPUT, s->gradient_dtype, type.rank, type.shape);
}

/* The number of all ranks: those of the pipeline, for each data-parallel rank. */
static int step_ranks(const rfi_step_spec *s) { return s->pipeline.ranks * all_ranks(s); }

/* The norm over the gradients of all ranks. `g` has an element for each trained parameter of the model; RFR_NONE counts
 * as 0 because another rank counts the parameter. So the order of the sum is that of one rank. */
static rfr_value pipeline_norm(rfr_trace *t, const rfi_step_spec *s, rfr_value *g, int n, rfr_value *skip) {
  const int64_t one = 1, gradients = n;
  const rfr_value zero = rfr_fill(t, 0.0, RFR_F32, 1, &one);
  for (int i = 0; i < n; i++)
    if (g[i] == RFR_NONE) g[i] = zero;
  const rfr_value zeros = rfr_input(t, RFI_NAME_ZERO_STEPS, RFR_ROLE_STATE, RFR_I32, 1, &gradients);
  return norm_over_ranks(t, n, g, step_ranks(s), zeros, skip);
}

/* The loss of the step. *stop: number of ranks that request a stop; *count: number of targets of the step, which the
 * ranks of the first stage count. */
static rfr_value pipeline_loss(rfr_trace *t, const rfi_step_spec *s, rfr_value step, rfr_value *stop,
                               rfr_value *count) {
  const int64_t k = all_ranks(s) * s->microbatches, shape[2] = {s->slots, 1}, one = 1;
  if (s->pipeline.rank > 0) *count = rfr_fill(t, 0.0, RFR_F32, 1, &one);
  rfr_value own[3] = {rfr_input(t, RFI_NAME_LOSSES, RFR_ROLE_INPUT, RFR_F32, 1, &k),
                      rfr_ring_read(t, rfr_input(t, RFI_NAME_STOP, RFR_ROLE_INPUT, RFR_F32, 2, shape), step), *count};
  rfr_value all = rfr_all_reduce(t, rfr_concat(t, 3, own, 0), step_ranks(s)), sum = rfr_slice(t, all, 0, 0, 1);
  for (int64_t m = 1; m < k; m++) sum = rfr_add(t, sum, rfr_slice(t, all, 0, m, 1));
  *stop = rfr_slice(t, all, 0, k, 1);
  *count = rfr_slice(t, all, 0, k + 1, 1);
  return sum;
}

/* Updates history and scales of fp8_delayed from the amaxes that the stages of all ranks have collected. */
static void update_scales(rfr_trace *t, const rfi_step_spec *s, rfr_value skip) {
  const rfr_recipe *r = &s->recipe;
  const int64_t S = s->pipeline.scales, history[2] = {r->history, S}, both[2] = {2, S};
  const rfi_attr attr[] = {rfi_i(r->margin), rfi_i(r->rule == RFR_AMAX_MOST_RECENT)};
  rfr_value in[4], out[2];
  if (S == 0) return;
  rfr_scope(t, "recipe");
  in[RFI_IN_scale_update_history] = rfr_input(t, RFR_RECIPE_HISTORY, RFR_ROLE_STATE, RFR_F32, 2, history);
  in[RFI_IN_scale_update_scale] = rfr_input(t, RFR_RECIPE_SCALE, RFR_ROLE_STATE, RFR_F32, 1, &S);
  in[RFI_IN_scale_update_skip] = skip;
  in[RFI_IN_scale_update_amax] =
      rfr_all_gather(t, rfr_input(t, RFR_RECIPE_AMAX, RFR_ROLE_INPUT, RFR_F32, 2, both), step_ranks(s));
  rfi_record(t, RFR_HERE, RFI_OP_scale_update, 4, in, attr, out);
}

static void record_update(rfr_trace *t, const rfi_step_spec *s, rfr_value *values) {
  const int n = rfr_model_parameter_count(&s->model), tied = rfi_pipeline_tied(s);
  const bool counts = s->rank == 0, counts_tied = rfi_pipeline_rank(&s->pipeline, 0) == s->pipeline.rank;
  const int64_t T = s->tokens, C = s->model.hidden_size;
  const rfi_pipeline_part *part = &s->pipeline;
  rfr_value *w = values, *g = w + n, *counted = g + n, count;
  int trainable = 0;
  rfr_parameter p;
  rfr_microbatch(t, -1);
  for (int i = 0; i < n; i++)
    if (rfi_pipeline_owns(s, s->pipeline.rank, i)) w[i] = declare_parameter(t, s, i);
  rfr_value step = rfr_step_block(t);
  rfr_scope(t, "inputs");
  ring(t, s, RFI_NAME_TOKENS, RFR_I32, s->tokens, step);
  rfr_value targets = ring(t, s, RFI_NAME_TARGETS, RFR_I32, s->tokens, step);
  ring(t, s, RFI_NAME_OFFSETS, RFR_I32, s->tokens + 1, step);
  if (part->activations > 0)
    rfr_input(t, RFI_NAME_ACTIVATIONS, RFR_ROLE_INPUT, s->model.dtype, 3, (int64_t[]){part->activations, T, C});
  if (part->gradients > 0)
    rfr_input(t, RFI_NAME_OUT_GRADIENTS, RFR_ROLE_INPUT, s->model.dtype, 3, (int64_t[]){part->gradients, T, C});
  if (part->activations > 0)
    rfr_input(t, RFI_NAME_SENT_GRADIENTS, RFR_ROLE_INPUT, s->model.dtype, 3, (int64_t[]){RFI_SENT_COPIES, T, C});
  rfr_token_count(t, 1, &targets, RFI_IGNORE, &count);
  const scaling scaling = record_scaling(t, s);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_scope(t, "optimizer");
  for (int i = 0; i < n; i++) {
    if (rfi_step_rule(s, i).frozen) continue;
    counted[trainable++] = RFR_NONE;
    if (!rfi_pipeline_owns(s, s->pipeline.rank, i) || rfr_model_parameter(&s->model, i, &p) != RFR_OK) continue;
    g[i] = declare_gradient(t, s, p.name, "", w[i]);
    if (i == tied) g[i] = rfr_add(t, g[i], declare_gradient(t, s, p.name, RFI_SUFFIX_HEAD, w[i]));
    if (counts && (i != tied || counts_tied)) counted[trainable - 1] = g[i];
  }
  update u = {.step = step, .lr = learning_rate(t, s, step), .clip = scaling.inverse};
  rfr_value norm = unscaled(t, &scaling, pipeline_norm(t, s, counted, trainable, &u.skip));
  if (s->clip > 0.0) u.clip = unscaled(t, &scaling, rfr_clip_scale(t, norm, s->clip));
  for (int i = 0; i < n; i++) {
    const rfi_param_rule rule = rfi_step_rule(s, i);
    const rfr_value old = w[i];
    w[i] = RFR_NONE;
    if (!rfi_pipeline_owns(s, s->pipeline.rank, i) || rule.frozen) continue;
    if (rfr_model_parameter(&s->model, i, &p) != RFR_OK) continue;
    w[i] = update_parameter(t, s, &u, &rule, i, p.name, old, g[i]);
  }
  update_averages(t, s, &u, w);
  rfr_value stop, loss = unscaled(t, &scaling, pipeline_loss(t, s, step, &stop, &count));
  rfr_value metrics[RFI_METRIC_N] = {[RFI_METRIC_LOSS] = loss,   [RFI_METRIC_NORM] = norm,   [RFI_METRIC_LR] = u.lr,
                                     [RFI_METRIC_COUNT] = count, [RFI_METRIC_SKIP] = u.skip, [RFI_METRIC_STOP] = stop};
  write_metrics(t, s, step, metrics, RFR_NONE);
  update_scales(t, s, u.skip);
  if (scaling.state != RFR_NONE) rfr_loss_scale_end(t, scaling.state, u.skip, SCALE_GROWS);
  rfr_step_end(t, step, u.skip);
  rfr_output(t, "loss", loss);
}

typedef struct windows { /* inputs of an evaluation */
  rfr_value tokens, targets, offsets;
} windows;

static windows declare_windows(rfr_trace *t, const rfi_step_spec *s) {
  const int64_t width = s->eval_tokens + 1;
  windows x;
  x.tokens = rfr_input(t, RFI_NAME_EVAL_TOKENS, RFR_ROLE_INPUT, RFR_I32, 1, &s->eval_tokens);
  x.targets = rfr_input(t, RFI_NAME_EVAL_TARGETS, RFR_ROLE_INPUT, RFR_I32, 1, &s->eval_tokens);
  x.offsets = rfr_input(t, RFI_NAME_EVAL_OFFSETS, RFR_ROLE_INPUT, RFR_I32, 1, &width);
  return x;
}

static void output_losses(rfr_trace *t, const rfi_step_spec *s, const rfr_value *w, rfr_value h, const windows *x) {
  const int64_t one = 1;
  rfr_value logits = rfr_model_logits(t, &s->model, w, h, RFR_F32);
  rfr_output(t, RFI_NAME_NLL,
             s->preference ? answer_losses(t, logits, x->targets, x->offsets)
                           : rfr_cross_entropy(t, logits, x->targets, rfr_fill(t, 1.0, RFR_F32, 1, &one), RFI_IGNORE));
}

static void record_evaluate(rfr_trace *t, const rfi_step_spec *s, rfr_value *w) {
  declare_all_evaluated(t, s, w);
  const windows x = declare_windows(t, s);
  output_losses(t, s, w, rfr_model_forward(t, &s->model, w, x.tokens, x.offsets, RFR_NONE), &x);
}

static void record_stage_evaluate(rfr_trace *t, const rfi_step_spec *s, int stage, rfr_value *w) {
  const int64_t shape[2] = {s->eval_tokens, s->model.hidden_size};
  int64_t first;
  const int64_t layers = rfi_stage_layers(s, stage, &first);
  for (int i = 0; i < rfr_model_parameter_count(&s->model); i++)
    w[i] = rfi_stage_reads(s, stage, i) ? declare_evaluated(t, s, i) : RFR_NONE;
  const windows x = declare_windows(t, s);
  const rfr_value in = stage > 0 ? rfr_input(t, RFI_NAME_EVAL_X, RFR_ROLE_INPUT, s->model.dtype, 2, shape) : x.tokens;
  const rfr_value h = rfi_model_layers(t, &s->model, w, in, x.offsets, RFR_NONE, first, first + layers);
  if (first + layers < s->model.layers) rfr_output(t, RFI_NAME_EVAL_Y, h);
  else output_losses(t, s, w, h, &x);
}

/* Processes the next `rows` tokens of each text and appends the token after them. */
static void record_generate(rfr_trace *t, const rfi_step_spec *s, rfr_value *w, int64_t rows) {
  const int64_t five = RFI_SAMPLING_N, texts = rfi_step_texts(s);
  const int64_t text_shape[2] = {texts, s->window + 1}, cursor_shape[2] = {texts, RFI_CURSOR_N};
  const int one = texts == 1;
  rfr_value positions, last;
  declare_all_evaluated(t, s, w);
  rfr_value text = rfr_input(t, RFI_NAME_TEXT, RFR_ROLE_STATE, RFR_I32, 2 - one, text_shape + one);
  rfr_value cursor = rfr_input(t, RFI_NAME_CURSOR, RFR_ROLE_STATE, RFR_I64, 2 - one, cursor_shape + one);
  rfr_value sampling = rfr_input(t, RFI_NAME_SAMPLING, RFR_ROLE_INPUT, RFR_F64, 1, &five);
  rfr_scope(t, "text");
  rfr_value tokens = rfr_text_read(t, text, cursor, rows, &positions, &last);
  rfr_value h = rfr_model_forward_cached(t, &s->model, w, tokens, positions, cursor, s->window);
  rfr_scope(t, "head");
  if (rows > 1) h = rfr_embedding(t, h, last); /* only the last row of each text needs logits */
  rfr_value logits = rfr_model_logits(t, &s->model, w, h, RFR_F32);
  rfr_scope(t, "text");
  text = rfr_text_append(t, text, logits, cursor, sampling, rows);
  rfr_text_end(t, cursor, text, rows);
  rfr_output(t, RFI_NAME_LOGITS, logits);
}

static void record_prefill(rfr_trace *t, const rfi_step_spec *s, rfr_value *w) {
  record_generate(t, s, w, rfi_prefill_rows(s));
}

static void record_decode(rfr_trace *t, const rfi_step_spec *s, rfr_value *w) { record_generate(t, s, w, 1); }

typedef void (*recording)(rfr_trace *, const rfi_step_spec *, rfr_value *);

/* `record` NULL: the evaluation of one stage. */
static rfr_status build(rfr_ctx *ctx, const rfi_step_spec *spec, recording record, int stage, rfr_trace **out) {
  rfr_status s;
  rfr_trace *t = NULL;
  rfr_value *values = NULL;
  rfi_step_spec own = *spec;
  *out = NULL;
  own.model.expert_ranks = spec->expert_ranks;
  own.model.expert_capacity = record == record_train ? spec->expert_capacity : 0;
  RFI_GOTO(rfr_model_config_check(&own.model));
  const size_t n = 3 * (size_t)rfr_model_parameter_count(&spec->model) + 2 * (size_t)spec->model.layers +
                   (size_t)spec->microbatches * (2 + 2 * (size_t)spec->model.layers);
  RFI_GOTO(RFI_ALLOC(ctx, n * sizeof *values, &values));
  RFI_GOTO(rfr_trace_create(ctx, &t));
  if (record) record(t, &own, values);
  else record_stage_evaluate(t, &own, stage, values);
  RFI_GOTO(rfr_trace_finish(t));
  *out = t;
  rfi_free(ctx, values);
  return RFR_OK;
fail:
  rfr_trace_destroy(t);
  rfi_free(ctx, values);
  return s;
}

rfr_status rfi_trace_train(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out) {
  rfi_step_spec own = *spec;
  *out = NULL;
  if (spec->pipeline.ranks <= 1) return build(ctx, spec, record_train, 0, out);
  RFI_TRY(rfi_pipeline_count_slots(ctx, &own));
  return build(ctx, &own, record_update, 0, out);
}

rfr_status rfi_trace_evaluate(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out) {
  return build(ctx, spec, record_evaluate, 0, out);
}

rfr_status rfi_trace_stage_evaluate(rfr_ctx *ctx, const rfi_step_spec *spec, int stage, rfr_trace **out) {
  return build(ctx, spec, NULL, stage, out);
}

rfr_status rfi_trace_prefill(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out) {
  return build(ctx, spec, record_prefill, 0, out);
}

rfr_status rfi_trace_decode(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_trace **out) {
  return build(ctx, spec, record_decode, 0, out);
}
