/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of a training step over the ranks of a pipeline.
 *
 * The rank's list of actions is walked once per step. F, I, W and B are replays of callables. A SEND is a message to
 * the rank of the neighbouring stage and does not wait. A RECV fills the one buffer of its direction, because the
 * action that reads it follows at once. Stages that are neighbours on one rank pass their tensors without a message.
 * Every rank counts the targets of the whole step, so the loss has the divisor of one rank with as many microbatches;
 * dropout is addressed by microbatch and site, so its masks are those of that one rank.
 */
#include "train/pipeline.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "dist/comm.h"

enum { MOST_PORTS = 4 };

struct rfi_pipeline {
  rfr_ctx *ctx;
  rfi_step_spec spec;
  rfr_programs *update;
  rfr_comm *comm;
  rfr_schedule *schedule;
  rfr_graphs *graphs;
  int stages;
  int *callable;                           /* of each stage; -1: on another rank */
  rfr_tensor *y, *dx;                      /* of each stage and microbatch of this rank */
  rfr_tensor activation, gradient, losses; /* of `update` */
  rfr_tensor tied_first, tied_last;        /* gradients; data NULL: there are none on this rank */
  float *loss;                             /* of each microbatch */
};

const rfr_graphs *rfi_pipeline_graphs(const rfi_pipeline *p) { return p->graphs; }

rfr_status rfi_pipeline_check(const rfi_step_spec *s) {
  const char *what = s->model.experts > 0                ? "experts"
                     : s->preference                     ? "preferences"
                     : s->model.dtype == RFR_F16         ? "f16"
                     : s->recipe.kind != RFR_RECIPE_NONE ? "a precision recipe"
                                                         : NULL;
  const int stages = rfi_pipeline_stages(&s->pipeline);
  if (what) return rfi_fail(RFI_E_UNSUPPORTED, "a pipeline cannot train with %s", what);
  if (s->model.layers < stages)
    return rfi_fail(RFI_E_ARGUMENT, "%lld layers in %d stages of a pipeline (%s over %d ranks)",
                    (long long)s->model.layers, stages, rfr_schedule_kind_name(s->pipeline.schedule),
                    s->pipeline.ranks);
  return RFR_OK;
}

/* ---- creation ---- */

static rfr_status make_schedule(rfi_pipeline *p) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  rfr_schedule *plain;
  rfr_schedule_options o = rfr_schedule_options_default();
  o.kind = part->schedule;
  o.ranks = part->ranks;
  o.microbatches = (int)p->spec.microbatches;
  RFI_TRY(rfr_schedule_generate(p->ctx, &o, &plain));
  const rfr_status s = rfr_schedule_add_communication(plain, &p->schedule);
  rfr_schedule_destroy(plain);
  for (int stage = 0; s == RFR_OK && stage < p->stages; stage++)
    if (rfr_schedule_rank(p->schedule, stage) != rfi_pipeline_rank(part, stage))
      return rfi_fail(RFI_E_INTERNAL, "stage %d of the schedule is on rank %d", stage,
                      rfr_schedule_rank(p->schedule, stage));
  return s;
}

/* The parameter that an input of a stage's trace names, or the gradient of it, in the update's program. */
static rfr_status find_parameter(const rfi_pipeline *p, const char *name, bool is_head, bool gradient,
                                 rfr_tensor *out) {
  char full[160];
  if (gradient) snprintf(full, sizeof full, "%s%s" RFI_SUFFIX_GRADIENT, name, is_head ? RFI_SUFFIX_HEAD : "");
  else snprintf(full, sizeof full, "%s", name);
  return rfr_programs_tensor(p->update, full, out);
}

typedef struct bindings {
  rfr_binding *tensors;
  rfr_main_gradient *gradients;
  char (*names)[128];
  int n, n_gradients;
} bindings;

static rfr_status bind_parameter(const rfi_pipeline *p, int stage, int i, bindings *b) {
  rfr_parameter parameter;
  rfr_tensor x;
  RFI_TRY(rfr_model_parameter(&p->spec.model, i, &parameter));
  const bool is_head = stage > 0 && stage == p->stages - 1 && rfi_stage_reads(&p->spec, 0, i);
  RFI_TRY(find_parameter(p, parameter.name, is_head, false, &x));
  char *name = b->names[b->n];
  snprintf(name, sizeof b->names[0], "%s%s", parameter.name, is_head ? RFI_SUFFIX_HEAD : "");
  b->tensors[b->n++] = (rfr_binding){name, x.type, x.data};
  if (rfi_step_rule(&p->spec, i).frozen) return RFR_OK;
  rfr_main_gradient *g = &b->gradients[b->n_gradients++];
  RFI_TRY(find_parameter(p, parameter.name, is_head, true, &x));
  *g = rfr_main_gradient_default();
  g->parameter = name;
  g->type = x.type;
  g->data = x.data;
  g->bytes = x.bytes;
  return RFR_OK;
}

static rfr_status make_callables(rfi_pipeline *p, rfr_callable *c, rfr_trace **traces, bindings *b, int *n) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  int64_t sites = 0;
  bool drops = false;
  *n = 0;
  for (int stage = 0; stage < p->stages; stage++) {
    rfr_trace *t;
    RFI_TRY(rfi_trace_stage(p->ctx, &p->spec, stage, &t));
    const int64_t first = sites;
    sites += rfr_trace_sites(t);
    p->callable[stage] = -1;
    if (rfi_pipeline_rank(part, stage) != part->rank) {
      rfr_trace_destroy(t);
      continue;
    }
    traces[*n] = t;
    drops = drops || sites > first;
    c[*n] = rfr_callable_default();
    c[*n].trace = t;
    c[*n].first_site = first;
    p->callable[stage] = (*n)++;
    for (int i = 0; i < rfr_model_parameter_count(&p->spec.model); i++)
      if (rfi_stage_reads(&p->spec, stage, i)) RFI_TRY(bind_parameter(p, stage, i, b));
  }
  rfr_tensor block;
  if (!drops) return RFR_OK;
  RFI_TRY(rfr_programs_tensor(p->update, "step", &block));
  b->tensors[b->n++] = (rfr_binding){"step", block.type, block.data};
  return RFR_OK;
}

static rfr_status make_graphs(rfi_pipeline *p, const rfi_pipeline_options *options) {
  rfr_status s;
  rfr_graphs_options o = rfr_graphs_options_default();
  bindings b = {0};
  rfr_callable *c = NULL;
  rfr_trace **traces = NULL;
  int n = 0;
  const size_t most = 2 * (size_t)rfr_model_parameter_count(&p->spec.model) + 2, stages = (size_t)p->stages;
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.tensors * most, &b.tensors));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.gradients * most, &b.gradients));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.names * most, &b.names));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *c * stages, &c));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof(rfr_trace *) * stages, &traces));
  RFI_GOTO(make_callables(p, c, traces, &b, &n));
  o.schedule = p->schedule;
  o.rank = p->spec.pipeline.rank;
  o.fuse = options->fuse;
  o.eager = options->eager;
  o.debug = options->debug;
  o.recompute = options->recompute;
  o.budget = options->budget;
  o.tensors = b.tensors;
  o.n_tensors = b.n;
  o.gradients = b.gradients;
  o.n_gradients = b.n_gradients;
  s = rfr_graphs_create(p->ctx, c, n, &o, &p->graphs);
fail:
  for (int i = 0; traces && i < p->stages; i++) rfr_trace_destroy(traces[i]);
  rfi_free(p->ctx, traces);
  rfi_free(p->ctx, c);
  rfi_free(p->ctx, b.names);
  rfi_free(p->ctx, b.gradients);
  rfi_free(p->ctx, b.tensors);
  return s;
}

static rfr_status find_tensors(rfi_pipeline *p) {
  const int tied = rfi_pipeline_tied(&p->spec);
  rfr_parameter parameter;
  RFI_TRY(rfr_programs_tensor(p->update, RFI_NAME_ACTIVATION, &p->activation));
  RFI_TRY(rfr_programs_tensor(p->update, RFI_NAME_OUT_GRADIENT, &p->gradient));
  RFI_TRY(rfr_programs_tensor(p->update, RFI_NAME_LOSSES, &p->losses));
  if (tied < 0 || !rfi_pipeline_owns(&p->spec, p->spec.pipeline.rank, tied)) return RFR_OK;
  RFI_TRY(rfr_model_parameter(&p->spec.model, tied, &parameter));
  RFI_TRY(find_parameter(p, parameter.name, false, true, &p->tied_first));
  return find_parameter(p, parameter.name, true, true, &p->tied_last);
}

rfr_status rfi_pipeline_create(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_programs *update,
                               const rfi_pipeline_options *options, rfi_pipeline **out) {
  rfr_status s;
  rfi_pipeline *p = NULL;
  *out = NULL;
  RFI_TRY(rfi_pipeline_check(spec));
  if (rfr_comm_size(options->comm) != spec->pipeline.ranks || rfr_comm_rank(options->comm) != spec->pipeline.rank)
    return rfi_fail(RFI_E_DIST_COMM, "a pipeline's rank %d of %d with the communicator's rank %d of %d",
                    spec->pipeline.rank, spec->pipeline.ranks, rfr_comm_rank(options->comm),
                    rfr_comm_size(options->comm));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *p, &p));
  *p = (rfi_pipeline){.ctx = ctx, .spec = *spec, .update = update, .comm = options->comm};
  p->stages = rfi_pipeline_stages(&spec->pipeline);
  const size_t stages = (size_t)p->stages, k = (size_t)spec->microbatches;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->callable * stages, &p->callable));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->y * stages * k, &p->y));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->dx * stages * k, &p->dx));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->loss * k, &p->loss));
  RFI_GOTO(find_tensors(p));
  RFI_GOTO(make_schedule(p));
  RFI_GOTO(make_graphs(p, options));
  *out = p;
  return RFR_OK;
fail:
  rfi_pipeline_destroy(p);
  return s;
}

void rfi_pipeline_destroy(rfi_pipeline *p) {
  if (!p) return;
  rfr_graphs_destroy(p->graphs);
  rfr_schedule_destroy(p->schedule);
  rfi_free(p->ctx, p->loss);
  rfi_free(p->ctx, p->dx);
  rfi_free(p->ctx, p->y);
  rfi_free(p->ctx, p->callable);
  rfi_free(p->ctx, p);
}

/* ---- a step ---- */

static float inverse_count(const rfi_pipeline *p, const int32_t *targets) {
  int64_t count = 0;
  for (int64_t i = 0; i < p->spec.microbatches * p->spec.tokens; i++)
    count += targets[i] != RFI_IGNORE && targets[i] >= 0;
  return count ? (float)(1.0 / (double)count) : 0.0f;
}

static rfr_tensor *of(const rfi_pipeline *p, rfr_tensor *list, rfr_action a, int stage) {
  return &list[(int64_t)stage * p->spec.microbatches + a.microbatch];
}

static bool is_here(const rfi_pipeline *p, int stage) { return p->callable[stage] >= 0; }

static rfr_status forward(rfi_pipeline *p, rfr_action a, const rfi_pipeline_batch *batch, const float *inv) {
  const int64_t T = p->spec.tokens, at = a.microbatch * T;
  const rfr_type ids = {.dtype = RFR_I32, .rank = 1, .shape = {T}},
                 ends = {.dtype = RFR_I32, .rank = 1, .shape = {T + 1}},
                 scalar = {.dtype = RFR_F32, .rank = 1, .shape = {1}};
  rfr_tensor *y = of(p, p->y, a, a.stage);
  rfr_binding in[MOST_PORTS];
  int n = 0;
  if (a.stage == 0) in[n++] = (rfr_binding){RFI_NAME_TOKENS, ids, batch->tokens + at};
  else
    in[n++] = (rfr_binding){"x", p->activation.type,
                            is_here(p, a.stage - 1) ? of(p, p->y, a, a.stage - 1)->data : p->activation.data};
  in[n++] = (rfr_binding){RFI_NAME_OFFSETS, ends, batch->offsets + at + a.microbatch};
  if (a.stage == p->stages - 1) {
    in[n++] = (rfr_binding){RFI_NAME_TARGETS, ids, batch->targets + at};
    in[n++] = (rfr_binding){"inv", scalar, inv};
  }
  RFI_TRY(rfr_graphs_forward(p->graphs, p->callable[a.stage], a.microbatch, in, n, y, 1));
  if (a.stage < p->stages - 1) return RFR_OK;
  return rfr_graphs_read(p->graphs, y, &p->loss[a.microbatch]);
}

static rfr_status backward(rfi_pipeline *p, rfr_action a) {
  static const float one = 1.0f;
  const int next = a.stage + 1, callable = p->callable[a.stage];
  const rfr_type scalar = {.dtype = RFR_F32, .rank = 1, .shape = {1}};
  const bool is_last = next == p->stages;
  rfr_tensor dx[MOST_PORTS] = {{0}};
  if (rfr_graphs_ops(p->graphs, callable, RFR_ACTION_I) + rfr_graphs_ops(p->graphs, callable, RFR_ACTION_W) == 0)
    return RFR_OK; /* all of the first stage is frozen */
  const rfr_binding dy = {NULL, is_last ? scalar : p->gradient.type,
                          is_last            ? (const void *)&one
                          : is_here(p, next) ? of(p, p->dx, a, next)->data
                                             : p->gradient.data};
  RFI_TRY(rfr_graphs_backward(p->graphs, callable, a.microbatch, &dy, 1, dx, is_last ? MOST_PORTS : 2));
  *of(p, p->dx, a, a.stage) = dx[0];
  return RFR_OK;
}

static rfr_status act(rfi_pipeline *p, rfr_action a, const rfi_pipeline_batch *batch, const float *inv) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  const int before = rfi_pipeline_rank(part, a.stage > 0 ? a.stage - 1 : 0),
            after = rfi_pipeline_rank(part, a.stage + 1 < p->stages ? a.stage + 1 : a.stage);
  switch (a.op) {
    case RFR_ACTION_F: return forward(p, a, batch, inv);
    case RFR_ACTION_I:
    case RFR_ACTION_B: return backward(p, a);
    case RFR_ACTION_W:
      if (rfr_graphs_ops(p->graphs, p->callable[a.stage], RFR_ACTION_W) == 0) return RFR_OK;
      return rfr_graphs_wgrad(p->graphs, p->callable[a.stage], a.microbatch);
    case RFR_ACTION_SEND_F: return rfi_comm_send(p->comm, after, of(p, p->y, a, a.stage)->data, p->activation.bytes);
    case RFR_ACTION_RECV_F: return rfi_comm_receive(p->comm, before, p->activation.data, p->activation.bytes);
    case RFR_ACTION_SEND_B: return rfi_comm_send(p->comm, before, of(p, p->dx, a, a.stage)->data, p->gradient.bytes);
    default: return rfi_comm_receive(p->comm, after, p->gradient.data, p->gradient.bytes);
  }
}

/* The ranks of the first and the last stage exchange the two gradients of a tied embedding; the update adds them. */
static rfr_status exchange_tied(const rfi_pipeline *p) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  const int first = rfi_pipeline_rank(part, 0), last = rfi_pipeline_rank(part, p->stages - 1);
  if (!p->tied_first.data || first == last) return RFR_OK;
  const bool is_first = part->rank == first;
  const rfr_tensor *own = is_first ? &p->tied_first : &p->tied_last, *other = is_first ? &p->tied_last : &p->tied_first;
  RFI_TRY(rfi_comm_send(p->comm, is_first ? last : first, own->data, own->bytes));
  return rfi_comm_receive(p->comm, is_first ? last : first, other->data, other->bytes);
}

rfr_status rfi_pipeline_step(rfi_pipeline *p, const rfi_pipeline_batch *batch) {
  int n;
  const float inv = inverse_count(p, batch->targets);
  const rfr_action *a = rfr_schedule_actions(p->schedule, p->spec.pipeline.rank, &n);
  memset(p->loss, 0, sizeof *p->loss * (size_t)p->spec.microbatches);
  RFI_TRY(rfr_graphs_begin_step(p->graphs, NULL, 0));
  for (int i = 0; i < n; i++) {
    const rfr_status s = act(p, a[i], batch, &inv);
    if (s == RFR_OK) continue;
    rfr_graphs_abort_step(p->graphs);
    return s;
  }
  RFI_TRY(rfr_graphs_end_step(p->graphs));
  RFI_TRY(rfr_graphs_wait(p->graphs));
  RFI_TRY(exchange_tied(p));
  return rfr_programs_write(p->update, &p->losses, p->loss);
}
