/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of a training step over the ranks of a pipeline.
 *
 * The rank's list of actions is walked once per step. F, I, W and B are replays of callables. A SEND is a message to
 * the rank of the adjacent stage and does not wait. A RECV fills the memory of its microbatch's slot, which the
 * callable reads in place. On a GPU all of these are enqueued, and callables share the stream of the update's program:
 * the host waits for nothing. An output is sent from its slot, where it stays until the gradient for it has come. A
 * gradient is sent from a copy, which is waited for before it is written again. Adjacent stages on one rank pass their
 * tensors without a message. Every rank counts the targets of the whole step, so the loss has the divisor of one rank
 * with as many microbatches; dropout is addressed by microbatch and site, so its masks are those of that one rank.
 * Data-parallel ranks that have the same stages sum their gradients when the schedule is done.
 */
#include "train/stages.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "data/file.h"
#include "dist/comm.h"
#include "dist/group.h"
#include "exec/exec.h"
#include "ops/optim/loss_scale.h"
#include "pass/pass.h"
#include "schedule/schedule.h"

enum { MOST_PORTS = 4, STATES = 4 };

struct rfi_stages {
  rfr_ctx *ctx;
  rfi_step_spec spec;
  rfr_programs *update;
  rfr_comm *comm;
  rfr_schedule *schedule;
  rfr_graphs *graphs; /* NULL: plan_only */
  rfr_graphs_memory memory;
  int stages;
  int *callable;      /* first callable of each stage; -1: the stage is on another rank */
  rfr_tensor *y, *dx; /* per stage and microbatch of this rank */
  rfr_tensor losses;  /* a tensor of `update` */
  rfr_tensor scale;   /* the loss scale, in f16 */
  rfr_type activation;
  int64_t bytes;                    /* size of an activation */
  char ***received[2];              /* per stage: received inputs, received output gradients, by slot; NULL: none */
  rfr_tensor tied_first, tied_last; /* gradients; data NULL: not on this rank */
  void *stream;                     /* stream of the update's program; NULL: calls are synchronous */
  rfr_tensor copies;                /* copies of sent gradients */
  int64_t n_copies;                 /* number so far; message i is in copy i % RFI_SENT_COPIES */
  struct {
    int to;
    int64_t number; /* number, among the messages to that rank, of the last one sent from the copy; 0: none */
  } sent[RFI_SENT_COPIES];
  rfi_collective *sums; /* sums of this rank's gradients over the data-parallel ranks with the same stages */
  int n_sums;
};

void rfi_stages_memory(const rfi_stages *p, rfr_graphs_memory *out) { *out = p->memory; }

rfr_status rfi_pipeline_check(const rfi_step_spec *s) {
  const char *what = s->model.experts > 0 ? "experts" : s->preference ? "preferences" : NULL;
  return what ? rfi_fail(RFI_E_UNSUPPORTED, "a pipeline cannot train with %s", what) : RFR_OK;
}

static int data_ranks(const rfi_step_spec *s) { return s->ranks > 1 ? s->ranks : 1; }

/* ---- creation ---- */

/* Finds the parameter of the update's program that an input of a stage's trace names, or its gradient. */
static rfr_status find_parameter(const rfi_stages *p, const char *name, bool is_head, bool gradient, rfr_tensor *out) {
  char full[160];
  if (gradient) snprintf(full, sizeof full, "%s%s" RFI_SUFFIX_GRADIENT, name, is_head ? RFI_SUFFIX_HEAD : "");
  else snprintf(full, sizeof full, "%s", name);
  return rfr_programs_tensor(p->update, full, out);
}

/* Without memory, each tensor gets a unique fake address, because the callables compare addresses. */
static void *address_of(const rfr_tensor *x, int64_t *unused) {
  if (x->data) return x->data;
  *unused += (x->bytes + 63) / 64 * 64 + 64;
  return (void *)(uintptr_t)(*unused - (x->bytes + 63) / 64 * 64);
}

typedef struct bindings {
  rfr_binding *tensors;
  rfr_main_gradient *gradients;
  char (*names)[128];
  rfr_callable_fixed (*fixed)[2]; /* per callable */
  rfr_callable_link *links;       /* per callable */
  int n, n_gradients;
  bool scales;    /* a callable reads the scales of fp8_delayed */
  int64_t unused; /* the next fake address of a plan */
} bindings;

static rfr_status bind_parameter(const rfi_stages *p, int64_t layer, int i, bindings *b) {
  rfr_parameter parameter;
  rfr_tensor x;
  RFI_TRY(rfr_model_parameter(&p->spec.model, i, &parameter));
  const bool is_head = rfi_is_tied_head(&p->spec, layer, i);
  RFI_TRY(find_parameter(p, parameter.name, is_head, false, &x));
  char *name = b->names[b->n];
  snprintf(name, sizeof b->names[0], "%s%s", parameter.name, is_head ? RFI_SUFFIX_HEAD : "");
  b->tensors[b->n++] = (rfr_binding){name, x.type, address_of(&x, &b->unused)};
  if (rfi_step_rule(&p->spec, i).frozen) return RFR_OK;
  rfr_main_gradient *g = &b->gradients[b->n_gradients++];
  RFI_TRY(find_parameter(p, parameter.name, is_head, true, &x));
  *g = rfr_main_gradient_default();
  g->parameter = name;
  g->type = x.type;
  g->data = address_of(&x, &b->unused);
  g->bytes = x.bytes;
  return RFR_OK;
}

/* Places the inputs that a stage receives: slots of a tensor of the update's program, from *at on. Callable `c` reads
 * them in place; `to` has space for its entry. */
static rfr_status place_received(rfi_stages *p, int stage, bool gradient, int *at, bindings *b, rfr_callable *c,
                                 rfr_callable_fixed *to) {
  rfr_tensor x;
  const int slots = rfr_schedule_slots(p->schedule, stage);
  if (!rfi_stage_receives(&p->spec.pipeline, stage, gradient)) return RFR_OK;
  RFI_TRY(rfr_programs_tensor(p->update, gradient ? RFI_NAME_OUT_GRADIENTS : RFI_NAME_ACTIVATIONS, &x));
  RFI_TRY(RFI_ALLOC(p->ctx, sizeof(char *) * (size_t)slots, &p->received[gradient][stage]));
  for (int i = 0; i < slots; i++) {
    rfr_tensor slot = x;
    slot.bytes = p->bytes;
    if (x.data) slot.data = (char *)x.data + (*at + i) * p->bytes;
    p->received[gradient][stage][i] = address_of(&slot, &b->unused);
  }
  *at += slots;
  if (gradient && !rfi_stage_trains(&p->spec, stage)) return RFR_OK; /* received, but not read */
  to[c->n_fixed] =
      (rfr_callable_fixed){gradient ? "y" : "x", gradient, (void *const *)p->received[gradient][stage], slots};
  c->fixed = to;
  c->n_fixed++;
  return RFR_OK;
}

typedef struct drawn { /* counts over the previous layers, which address the random numbers of a layer */
  int64_t sites, linears;
} drawn;

static void add_drawn(drawn *d, const rfr_trace *t) {
  d->sites += rfr_trace_sites(t);
  d->linears += rfr_trace_linears(t);
}

/* Creates one callable per layer of a stage, each linked to the previous one. */
static rfr_status make_stage(rfi_stages *p, int stage, rfr_callable *c, rfr_trace **traces, bindings *b, drawn *before,
                             int *at, int *n) {
  int64_t first;
  const int64_t layers = rfi_stage_layers(&p->spec, stage, &first);
  const int begin = *n;
  p->callable[stage] = begin;
  for (int64_t layer = first; layer < first + layers; layer++, ++*n) {
    RFI_TRY(rfi_trace_layer(p->ctx, &p->spec, layer, &traces[*n]));
    c[*n] = rfr_callable_default();
    c[*n].trace = traces[*n];
    c[*n].first_site = before->sites;
    c[*n].first_linear = before->linears;
    add_drawn(before, traces[*n]);
    rfi_recipe_use use;
    RFI_TRY(rfi_recipe_use_of(traces[*n], &use));
    b->scales = b->scales || use.slots > 0;
    if (layer > first) {
      b->links[*n] = (rfr_callable_link){"x", *n - 1, "y"};
      c[*n].links = &b->links[*n];
      c[*n].n_links = 1;
    }
    for (int i = 0; i < rfr_model_parameter_count(&p->spec.model); i++)
      if (rfi_layer_reads(&p->spec, layer, i)) RFI_TRY(bind_parameter(p, layer, i, b));
  }
  RFI_TRY(place_received(p, stage, false, &at[0], b, &c[begin], b->fixed[begin]));
  return place_received(p, stage, true, &at[1], b, &c[*n - 1], b->fixed[*n - 1]);
}

/* Whether a layer needs the counts of sites or linears of the previous layers. */
static bool counts_drawn(const rfi_step_spec *s) {
  return rfi_pipeline_draws(s) || s->recipe.kind == RFR_RECIPE_FP8_DELAYED;
}

/* Counts the draws of a stage that is on another rank. */
static rfr_status count_drawn(const rfi_stages *p, int stage, drawn *d) {
  int64_t first;
  const int64_t layers = rfi_stage_layers(&p->spec, stage, &first);
  for (int64_t layer = first; layer < first + layers && counts_drawn(&p->spec); layer++) {
    rfr_trace *t;
    RFI_TRY(rfi_trace_layer(p->ctx, &p->spec, layer, &t));
    add_drawn(d, t);
    rfr_trace_destroy(t);
  }
  return RFR_OK;
}

/* Adds a state that the update advances when the step has ended. */
static rfr_status bind_state(const rfi_stages *p, const char *name, bindings *b) {
  rfr_tensor x;
  RFI_TRY(rfr_programs_tensor(p->update, name, &x));
  b->tensors[b->n++] = (rfr_binding){x.name, x.type, address_of(&x, &b->unused)};
  return RFR_OK;
}

static rfr_status make_callables(rfi_stages *p, rfr_callable *c, rfr_trace **traces, bindings *b, int *n) {
  drawn before = {0};
  int at[2] = {0, 0};
  *n = 0;
  for (int stage = 0; stage < p->stages; stage++) {
    p->callable[stage] = -1;
    const bool here = rfi_pipeline_rank(&p->spec.pipeline, stage) == p->spec.pipeline.rank;
    if (here) RFI_TRY(make_stage(p, stage, c, traces, b, &before, at, n));
    else RFI_TRY(count_drawn(p, stage, &before));
  }
  if (rfi_pipeline_draws(&p->spec)) RFI_TRY(bind_state(p, "step", b));
  static const char *const scaling[] = {RFR_RECIPE_HISTORY, RFR_RECIPE_SCALE, RFR_RECIPE_AMAX};
  for (int i = 0; i < STATES - 1 && b->scales; i++) RFI_TRY(bind_state(p, scaling[i], b));
  return RFR_OK;
}

static rfr_status make_graphs(rfi_stages *p, const rfi_stages_options *options) {
  rfr_status s;
  rfr_graphs_options o = rfr_graphs_options_default();
  bindings b = {0};
  rfr_callable *c = NULL;
  rfr_trace **traces = NULL;
  int n = 0;
  const size_t most = 2 * (size_t)rfr_model_parameter_count(&p->spec.model) + STATES,
               layers = (size_t)p->spec.model.layers;
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.tensors * most, &b.tensors));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.gradients * most, &b.gradients));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.names * most, &b.names));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.fixed * layers, &b.fixed));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *b.links * layers, &b.links));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof *c * layers, &c));
  RFI_GOTO(RFI_ALLOC(p->ctx, sizeof(rfr_trace *) * layers, &traces));
  RFI_GOTO(make_callables(p, c, traces, &b, &n));
  o.schedule = p->schedule;
  o.rank = p->spec.pipeline.rank;
  o.first_microbatch = (int)(p->spec.rank * p->spec.microbatches);
  o.fuse = options->fuse;
  o.eager = options->eager;
  o.debug = options->debug;
  o.recompute = options->recompute;
  o.budget = options->budget;
  o.step_memory = options->step_memory;
  o.tensors = b.tensors;
  o.n_tensors = b.n;
  o.gradients = b.gradients;
  o.n_gradients = b.n_gradients;
  p->memory.size = sizeof p->memory;
  if (options->plan_only) {
    s = rfi_graphs_plan(p->ctx, c, n, &o, &p->memory);
  } else {
    RFI_GOTO(rfr_graphs_create(p->ctx, c, n, &o, &p->graphs));
    s = rfr_graphs_get_memory(p->graphs, &p->memory);
  }
fail:
  for (int64_t i = 0; traces && i < p->spec.model.layers; i++) rfr_trace_destroy(traces[i]);
  rfi_free(p->ctx, traces);
  rfi_free(p->ctx, c);
  rfi_free(p->ctx, b.links);
  rfi_free(p->ctx, b.fixed);
  rfi_free(p->ctx, b.names);
  rfi_free(p->ctx, b.gradients);
  rfi_free(p->ctx, b.tensors);
  return s;
}

static rfr_status find_sums(rfi_stages *p) {
  rfr_tensor x;
  int n = 0;
  while (rfr_programs_tensor_at(p->update, n, &x) == RFR_OK) n++;
  RFI_TRY(RFI_ALLOC(p->ctx, sizeof *p->sums * (size_t)(n + 1), &p->sums));
  for (int i = 0; i < n; i++) {
    RFI_TRY(rfr_programs_tensor_at(p->update, i, &x));
    if (x.role != RFR_ROLE_INPUT || !rfi_ends_in(x.name, RFI_SUFFIX_GRADIENT)) continue;
    p->sums[p->n_sums++] = (rfi_collective){
        .kind = RFI_ALL_REDUCE, .dtype = x.type.dtype, .n = rfi_count(&x.type), .from = x.data, .to = x.data};
  }
  return RFR_OK;
}

/* Whether this rank sends gradients: a rank that receives an input sends the gradient of it. */
static bool sends_gradients(const rfi_stages *p) {
  for (int stage = 0; stage < p->stages; stage++)
    if (rfi_pipeline_rank(&p->spec.pipeline, stage) == p->spec.pipeline.rank &&
        rfi_stage_receives(&p->spec.pipeline, stage, false))
      return true;
  return false;
}

static rfr_status find_tensors(rfi_stages *p) {
  const int tied = rfi_pipeline_tied(&p->spec);
  rfr_parameter parameter;
  RFI_TRY(rfr_programs_tensor(p->update, RFI_NAME_LOSSES, &p->losses));
  if (p->spec.model.dtype == RFR_F16) RFI_TRY(rfr_programs_tensor(p->update, RFI_NAME_LOSS_SCALE, &p->scale));
  if (sends_gradients(p)) RFI_TRY(rfr_programs_tensor(p->update, RFI_NAME_SENT_GRADIENTS, &p->copies));
  RFI_TRY(find_sums(p));
  if (tied < 0 || !rfi_pipeline_owns(&p->spec, p->spec.pipeline.rank, tied)) return RFR_OK;
  RFI_TRY(rfr_model_parameter(&p->spec.model, tied, &parameter));
  RFI_TRY(find_parameter(p, parameter.name, false, true, &p->tied_first));
  return find_parameter(p, parameter.name, true, true, &p->tied_last);
}

/* The ranks of the pipeline before and after this one, cyclically. Rank 0 collects tensors to save from all ranks. */
static int list_peers(const rfi_stages *p, int peers[RFI_MOST_PEERS + 2]) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  int n = 0;
  for (int r = 0; r < part->ranks && n <= RFI_MOST_PEERS; r++) {
    const int distance = (r - part->rank + part->ranks) % part->ranks;
    if (distance == 1 || distance == part->ranks - 1 || (distance > 0 && (r == 0 || part->rank == 0)))
      peers[n++] = rfi_pipeline_peer(&p->spec, r);
  }
  return n;
}

/* Data-parallel ranks with the same stages have adjacent numbers. */
static int first_of_group(const rfi_stages *p) { return p->spec.pipeline.rank * p->spec.ranks; }

/* On a GPU, callables and messages are ordered after the work of the update's program. */
static rfr_status prepare_messages(rfi_stages *p) {
  int peers[RFI_MOST_PEERS + 2];
  p->stream = rfi_programs_stream(p->update);
  if (!p->stream) return RFR_OK;
  RFI_TRY(rfi_schedule_check_waits(p->schedule, RFI_SENT_COPIES));
  RFI_TRY(rfr_graphs_set_stream(p->graphs, p->stream));
  RFI_TRY(rfi_comm_connect(p->comm, peers, list_peers(p, peers)));
  return p->spec.ranks > 1 ? rfi_group_connect(p->comm, first_of_group(p), p->spec.ranks) : RFR_OK;
}

rfr_status rfi_stages_create(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_programs *update,
                             const rfi_stages_options *options, rfi_stages **out) {
  rfr_status s;
  rfi_stages *p = NULL;
  *out = NULL;
  RFI_TRY(rfi_pipeline_check(spec));
  const int ranks = spec->pipeline.ranks * data_ranks(spec), rank = rfi_pipeline_peer(spec, spec->pipeline.rank);
  if (rfr_comm_size(options->comm) != ranks || rfr_comm_rank(options->comm) != rank)
    return rfi_fail(RFI_E_DIST_COMM, "a pipeline's rank %d of %d with the communicator's rank %d of %d", rank, ranks,
                    rfr_comm_rank(options->comm), rfr_comm_size(options->comm));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *p, &p));
  *p = (rfi_stages){.ctx = ctx, .spec = *spec, .update = update, .comm = options->comm};
  p->stages = rfi_pipeline_stages(&spec->pipeline);
  p->activation = (rfr_type){.dtype = spec->model.dtype, .rank = 2, .shape = {spec->tokens, spec->model.hidden_size}};
  p->bytes = rfi_bytes(&p->activation);
  const size_t stages = (size_t)p->stages, k = (size_t)spec->microbatches;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->callable * stages, &p->callable));
  for (int i = 0; i < 2; i++) RFI_GOTO(RFI_ALLOC(ctx, sizeof(char **) * stages, &p->received[i]));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->y * stages * k, &p->y));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->dx * stages * k, &p->dx));
  RFI_GOTO(find_tensors(p));
  RFI_GOTO(rfi_pipeline_schedule(ctx, spec, &p->schedule));
  RFI_GOTO(make_graphs(p, options));
  if (p->graphs) RFI_GOTO(prepare_messages(p));
  *out = p;
  return RFR_OK;
fail:
  rfi_stages_destroy(p);
  return s;
}

void rfi_stages_destroy(rfi_stages *p) {
  if (!p) return;
  rfr_graphs_destroy(p->graphs);
  rfr_schedule_destroy(p->schedule);
  rfi_free(p->ctx, p->sums);
  rfi_free(p->ctx, p->dx);
  rfi_free(p->ctx, p->y);
  for (int i = 0; i < 2; i++) {
    for (int stage = 0; p->received[i] && stage < p->stages; stage++) rfi_free(p->ctx, p->received[i][stage]);
    rfi_free(p->ctx, p->received[i]);
  }
  rfi_free(p->ctx, p->callable);
  rfi_free(p->ctx, p);
}

void rfi_stages_messages(const rfi_stages *p, int64_t *bytes, int64_t *n) {
  int actions;
  const rfr_action *a = rfr_schedule_actions(p->schedule, p->spec.pipeline.rank, &actions);
  *bytes = p->bytes;
  *n = 0;
  for (int i = 0; i < actions; i++) *n += a[i].op == RFR_ACTION_SEND_F || a[i].op == RFR_ACTION_SEND_B;
}

/* ---- a step ---- */

/* 1 / the number of targets of the step, including the loss scale. With data-parallel ranks all ranks exchange their
 * counts here. */
static rfr_status inverse_count(const rfi_stages *p, const int32_t *targets, float *inv) {
  int64_t count = 0, *all;
  int32_t scale[2];
  for (int64_t i = 0; i < p->spec.microbatches * p->spec.tokens; i++)
    count += targets[i] != RFI_IGNORE && targets[i] >= 0;
  if (p->spec.ranks > 1) {
    RFI_TRY(rfi_comm_collect(p->ctx, p->comm, &count, sizeof count, (void **)&all));
    count = 0;
    for (int r = 0; r < p->spec.ranks; r++) count += all[r]; /* sums over the ranks of the first stage */
    rfi_free(p->ctx, all);
  }
  *inv = count ? (float)(1.0 / (double)count) : 0.0f;
  if (!p->scale.data) return RFR_OK;
  RFI_TRY(rfr_programs_read(p->update, &p->scale, scale));
  *inv = ldexpf(*inv, rfi_scale_exponent(scale));
  return RFR_OK;
}

static rfr_tensor *of(const rfi_stages *p, rfr_tensor *list, rfr_action a, int stage) {
  return &list[(int64_t)stage * p->spec.microbatches + a.microbatch];
}

/* The memory into which a stage receives a microbatch. */
static char *received(const rfi_stages *p, rfr_action a, bool gradient) {
  return p->received[gradient][a.stage][rfr_schedule_slot(p->schedule, a.stage, a.microbatch)];
}

/* The first callable of an action; `end`: one past the last callable of the stage. */
typedef struct place {
  int callable, first, end;
} place;

static rfr_status forward(rfi_stages *p, rfr_action a, place at, const rfi_stages_batch *batch, const float *inv) {
  const int64_t T = p->spec.tokens, row = a.microbatch * T;
  const rfr_type ids = {.dtype = RFR_I32, .rank = 1, .shape = {T}},
                 ends = {.dtype = RFR_I32, .rank = 1, .shape = {T + 1}},
                 scalar = {.dtype = RFR_F32, .rank = 1, .shape = {1}};
  rfr_tensor *y = of(p, p->y, a, a.stage);
  rfr_binding in[MOST_PORTS];
  int n = 0;
  if (at.callable > at.first) { /* "x" is linked */
  } else if (a.stage == 0) {
    in[n++] = (rfr_binding){RFI_NAME_TOKENS, ids, batch->tokens + row};
  } else {
    in[n++] = (rfr_binding){"x", p->activation,
                            p->received[0][a.stage] ? received(p, a, false) : of(p, p->y, a, a.stage - 1)->data};
  }
  in[n++] = (rfr_binding){RFI_NAME_OFFSETS, ends, batch->offsets + row + a.microbatch};
  const bool is_last = a.stage == p->stages - 1 && at.callable == at.end - 1;
  if (is_last) {
    in[n++] = (rfr_binding){RFI_NAME_TARGETS, ids, batch->targets + row};
    in[n++] = (rfr_binding){"inv", scalar, inv};
  }
  RFI_TRY(rfr_graphs_forward(p->graphs, at.callable, a.microbatch, in, n, y, 1));
  if (!is_last) return RFR_OK;
  float *loss = (float *)p->losses.data + p->spec.rank * p->spec.microbatches + a.microbatch;
  return p->graphs->m.backend->move(p->graphs->m.device, loss, y->data, sizeof *loss);
}

static rfr_status backward(rfi_stages *p, rfr_action a, place at) {
  static const float one = 1.0f;
  const rfr_type scalar = {.dtype = RFR_F32, .rank = 1, .shape = {1}};
  const bool is_end = at.callable == at.end - 1, is_last = is_end && a.stage == p->stages - 1;
  const int inputs = 1 + (at.callable == at.first) + 2 * is_last;
  rfr_tensor dx[MOST_PORTS] = {{0}};
  const rfr_binding dy = {NULL, is_last ? scalar : p->activation,
                          is_last                   ? (const void *)&one
                          : p->received[1][a.stage] ? received(p, a, true)
                                                    : of(p, p->dx, a, is_end ? a.stage + 1 : a.stage)->data};
  RFI_TRY(rfr_graphs_backward(p->graphs, at.callable, a.microbatch, &dy, is_end, dx, inputs));
  if (at.callable == at.first) *of(p, p->dx, a, a.stage) = dx[0];
  return RFR_OK;
}

/* Sends a copy, because the slot's next forward overwrites the gradient. If that forward waited for the message
 * instead, two ranks could wait for each other (interleaved). */
static rfr_status send_gradient(rfi_stages *p, rfr_action a, int to) {
  const int64_t i = p->n_copies++ % RFI_SENT_COPIES;
  char *copy = (char *)p->copies.data + i * p->bytes;
  if (p->sent[i].number > 0) RFI_TRY(rfi_comm_wait_sent(p->comm, p->sent[i].to, p->sent[i].number, p->stream));
  RFI_TRY(p->graphs->m.backend->move(p->graphs->m.device, copy, of(p, p->dx, a, a.stage)->data, (size_t)p->bytes));
  RFI_TRY(rfi_comm_send(p->comm, to, copy, p->bytes, p->stream));
  p->sent[i].to = to;
  p->sent[i].number = rfi_comm_sent(p->comm, to);
  return RFR_OK;
}

/* Makes the calls of an action; a callable without that part, such as a frozen layer, has no call. */
static rfr_status compute(rfi_stages *p, rfr_action a, const rfi_stages_batch *batch, const float *inv) {
  const int first = p->callable[a.stage];
  place at = {.first = first, .end = first + rfr_schedule_layers(p->schedule, a.stage)};
  for (rfr_action next;;) {
    RFI_TRY(rfr_graphs_expected(p->graphs, &next, &at.callable));
    if (next.op != a.op || next.stage != a.stage || next.microbatch != a.microbatch) return RFR_OK;
    if (a.op == RFR_ACTION_F) RFI_TRY(forward(p, a, at, batch, inv));
    else if (a.op == RFR_ACTION_W) RFI_TRY(rfr_graphs_wgrad(p->graphs, at.callable, a.microbatch));
    else RFI_TRY(backward(p, a, at));
  }
}

static rfr_status act(rfi_stages *p, rfr_action a, const rfi_stages_batch *batch, const float *inv) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  const int before = rfi_pipeline_peer(&p->spec, rfi_pipeline_rank(part, a.stage > 0 ? a.stage - 1 : 0)),
            after =
                rfi_pipeline_peer(&p->spec, rfi_pipeline_rank(part, a.stage + 1 < p->stages ? a.stage + 1 : a.stage));
  switch (a.op) {
    case RFR_ACTION_F:
    case RFR_ACTION_I:
    case RFR_ACTION_W:
    case RFR_ACTION_B: return compute(p, a, batch, inv);
    case RFR_ACTION_SEND_F: return rfi_comm_send(p->comm, after, of(p, p->y, a, a.stage)->data, p->bytes, p->stream);
    case RFR_ACTION_RECV_F: return rfi_comm_receive(p->comm, before, received(p, a, false), p->bytes, p->stream);
    case RFR_ACTION_SEND_B: return send_gradient(p, a, before);
    default: return rfi_comm_receive(p->comm, after, received(p, a, true), p->bytes, p->stream);
  }
}

/* The ranks of the first and the last stage exchange their gradients of a tied embedding; the update adds them. */
static rfr_status exchange_tied(const rfi_stages *p) {
  const rfi_pipeline_part *part = &p->spec.pipeline;
  const int first = rfi_pipeline_rank(part, 0), last = rfi_pipeline_rank(part, p->stages - 1);
  if (!p->tied_first.data || first == last) return RFR_OK;
  const bool is_first = part->rank == first;
  const int peer = rfi_pipeline_peer(&p->spec, is_first ? last : first);
  const rfr_tensor *own = is_first ? &p->tied_first : &p->tied_last, *other = is_first ? &p->tied_last : &p->tied_first;
  RFI_TRY(rfi_comm_send(p->comm, peer, own->data, own->bytes, p->stream));
  RFI_TRY(rfi_comm_receive(p->comm, peer, other->data, other->bytes, p->stream));
  /* the next step clears the gradient */
  return rfi_comm_wait_sent(p->comm, peer, rfi_comm_sent(p->comm, peer), p->stream);
}

/* Sums gradients over the data-parallel ranks with the same stages; a tied embedding has two gradients, one per stage,
 * which are summed separately. On a GPU all actions of the step precede the sums on the stream, and no action waits for
 * a sum, so ranks of two pipelines cannot wait for each other. */
static rfr_status reduce_gradients(const rfi_stages *p) {
  if (p->spec.ranks <= 1) return RFR_OK;
  return rfi_group_all_reduce(p->ctx, p->comm, first_of_group(p), p->spec.ranks, p->sums, p->n_sums, p->stream);
}

const rfr_action *rfi_stages_actions(const rfi_stages *p, int *n) {
  return rfr_schedule_actions(p->schedule, p->spec.pipeline.rank, n);
}

static rfr_status act_timed(rfi_stages *p, rfr_action a, const rfi_stages_batch *batch, const float *inv,
                            double *seconds) {
  RFI_TRY(rfr_graphs_wait(p->graphs));
  const double start = rfi_now();
  RFI_TRY(act(p, a, batch, inv));
  RFI_TRY(rfr_graphs_wait(p->graphs));
  *seconds = rfi_now() - start;
  return RFR_OK;
}

static rfr_status run_step(rfi_stages *p, const rfi_stages_batch *batch, double *seconds) {
  int n;
  float inv;
  const rfr_action *a = rfi_stages_actions(p, &n);
  RFI_TRY(inverse_count(p, batch->targets, &inv));
  RFI_TRY(p->graphs->m.backend->fill(p->graphs->m.device, p->losses.data, 0, (size_t)p->losses.bytes));
  RFI_TRY(rfr_graphs_begin_step(p->graphs, NULL, 0));
  for (int i = 0; i < n; i++) {
    const rfr_status s = seconds ? act_timed(p, a[i], batch, &inv, &seconds[i]) : act(p, a[i], batch, &inv);
    if (s == RFR_OK) continue;
    rfr_graphs_abort_step(p->graphs);
    return s;
  }
  RFI_TRY(rfr_graphs_end_step(p->graphs));
  RFI_TRY(reduce_gradients(p));
  return exchange_tied(p);
}

rfr_status rfi_stages_step(rfi_stages *p, const rfi_stages_batch *batch) { return run_step(p, batch, NULL); }

rfr_status rfi_stages_time(rfi_stages *p, const rfi_stages_batch *batch, double *seconds) {
  return run_step(p, batch, seconds);
}
