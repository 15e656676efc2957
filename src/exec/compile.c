/* SPDX-License-Identifier: Apache-2.0
 *
 * Compile: passes, kernels, plan, arena, addresses; then answers about the result.
 * Everything that can fail fails here; after rfr_compile nothing asks the allocator.
 */
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "pass/branch.h"

rfr_compile_options rfr_compile_options_default(void) {
  return (rfr_compile_options){.size = sizeof(rfr_compile_options), .fuse = 1, .prune = 1, .keep_traces = 1};
}

/* ---- inputs, shared by name ---- */

static rfi_program_input *find_slot(const rfr_programs *p, const char *name) {
  int i = rfi_names_find(&p->names, name);
  return i < 0 ? NULL : &p->slot[i];
}

/* The host fills and reads what ring ops reach, while programs run. */
static void mark_rings(rfr_programs *p, const rfr_trace *t) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->outside || strcmp(op->def->family, "ring") != 0 || op->n_in == 0) continue;
    const rfi_value *ring = &t->values[t->values[op->in[0]].base];
    rfi_program_input *slot = ring->op < 0 ? find_slot(p, ring->name) : NULL;
    if (slot) slot->ring = true;
  }
}

static rfr_status add_inputs(rfr_programs *p, const rfi_program *g) {
  const rfr_trace *t = g->trace;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    rfi_program_input *slot = find_slot(p, x->name);
    if (slot) {
      if (memcmp(&slot->tensor.type, &x->type, sizeof x->type) != 0 || slot->tensor.role != (rfr_role)x->role)
        return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" has another type or role in program \"%s\" than before", x->name,
                        g->name);
      continue;
    }
    if (!rfi_arena_grow(p->strings, (void **)&p->slot, &p->cap_slots, p->n_slots + 1, sizeof *p->slot))
      return RFR_NO_MEMORY;
    const char *name = rfi_arena_strdup(p->strings, x->name);
    if (!name || !rfi_names_add(&p->names, p->strings, name, p->n_slots)) return RFR_NO_MEMORY;
    p->slot[p->n_slots++] = (rfi_program_input){
        .tensor = {.name = name, .role = (rfr_role)x->role, .type = x->type, .bytes = rfi_bytes(&x->type)}};
    p->persistent_bytes += rfi_storage_bytes(&x->type);
  }
  mark_rings(p, t);
  return RFR_OK;
}

/* ---- one program ---- */

static rfi_pass_options pass_options(rfr_programs *p) {
  return (rfi_pass_options){.fuse = p->options.fuse,
                            .prune = p->options.prune,
                            .loss_chunk = p->options.loss_chunk > 0 ? p->options.loss_chunk : p->backend->loss_chunk,
                            .recompute = p->options.recompute,
                            .workspace = rfi_pass_workspaces,
                            .user = p};
}

/* One op after the other. */
static rfr_status plan_line(rfi_program *g) { return rfi_plan_make(g->trace, g->workspace, NULL, &g->plan); }

static rfr_status bind_and_plan(rfr_programs *p, rfi_program *g) {
  rfi_stage *last = &g->pipeline.stage[RFI_STAGES - 1];
  g->trace = last->trace;
  RFI_TRY(rfi_select_program(p, g, &last->report));
  RFI_TRY(RFI_ALLOC(p->ctx, sizeof *g->workspace * (size_t)(g->trace->n_ops + 1), &g->workspace));
  for (int i = 0; i < g->n_bound; i++) g->workspace[g->bound[i].op] = g->bound[i].workspace;
  return plan_line(g);
}

static rfr_status compile_one(rfr_programs *p, rfi_program *g, const rfr_trace *recorded) {
  rfi_pass_options o = pass_options(p);
  const double start = rfi_now();
  RFI_TRY(rfi_pipeline_run(recorded, &o, &g->pipeline));
  g->trace = g->pipeline.stage[RFI_STAGES - 1].trace;
  RFI_TRY(add_inputs(p, g));
  RFI_TRY(bind_and_plan(p, g));
  g->compile_seconds = rfi_now() - start;
  return RFR_OK;
}

/* ---- the budget ---- */

static int64_t load_bytes(const rfi_program *g) {
  const rfr_trace *t = g->trace;
  int64_t bytes = 0;
  for (rfr_value v = 0; v < t->n_values; v++)
    if (t->values[v].base == v && t->values[v].op >= 0 && t->ops[t->values[v].op].phase == RFR_PHASE_LOAD)
      bytes += rfi_storage_bytes(&t->values[v].type);
  return bytes;
}

static int64_t all_persistent_bytes(const rfr_programs *p) {
  int64_t bytes = p->persistent_bytes;
  for (int i = 0; i < p->n; i++) bytes += load_bytes(&p->program[i]);
  return bytes;
}

/* Programs share the step-scoped part: each of those that do not fit beside the persistent
 * bytes recomputes as much as it must. One that cannot ends at its smallest plan. */
static rfr_status meet_budget(rfr_programs *p) {
  int64_t room = p->options.budget - all_persistent_bytes(p);
  rfi_pass_options o = pass_options(p);
  o.budget = room > 0 ? room : 1;
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (g->plan.bytes <= room) continue;
    rfi_free(p->ctx, g->bound);
    rfi_free(p->ctx, g->workspace);
    rfi_plan_deinit(&g->plan);
    g->bound = NULL;
    g->workspace = NULL;
    g->n_bound = g->n_load = 0;
    g->flops = g->recomputed_flops = 0;
    const double start = rfi_now();
    RFI_TRY(rfi_pipeline_redo(&g->pipeline, "recompute", &o));
    RFI_TRY(bind_and_plan(p, g));
    g->compile_seconds += rfi_now() - start;
  }
  return RFR_OK;
}

/* ---- the side branch ---- */

/* Bound ops learn where they run; aside NULL: all one after the other. */
static void set_side(rfi_program *g, const rfi_side_op *aside) {
  g->n_side_ops = 0;
  for (int i = 0; i < g->n_bound; i++) g->bound[i].forks = false;
  for (int i = 0, waiting = -1; i < g->n_bound; i++) {
    rfi_bound *b = &g->bound[i];
    b->waits = b->op == waiting;
    b->aside = aside && aside[b->op].until > 0;
    if (!b->aside) continue;
    g->n_side_ops++;
    waiting = aside[b->op].until; /* the same for all until then */
    int from = i;
    while (g->bound[from].op > aside[b->op].from) from--;
    g->bound[from].forks = true;
  }
}

static bool is_over_budget(const rfr_programs *p, int64_t step_bytes) {
  return p->options.budget > 0 && p->persistent_bytes + step_bytes > p->options.budget;
}

/* The plan with a side branch takes the place of the one without, where there is a branch and the budget has room. */
static rfr_status plan_branch(rfr_programs *p, rfi_program *g) {
  rfi_plan with = {0};
  rfi_side_op *aside;
  rfr_status s = rfi_branch(g->trace, g->workspace, &aside);
  if (s == RFR_OK && aside) s = rfi_plan_make(g->trace, g->workspace, aside, &with);
  if (s != RFR_OK || !aside) goto done;
  g->branch_bytes = with.bytes - g->plan.bytes;
  if (is_over_budget(p, with.bytes)) goto done;
  rfi_plan_deinit(&g->plan);
  g->plan = with;
  with = (rfi_plan){0};
  set_side(g, aside);
done:
  rfi_plan_deinit(&with);
  rfi_free(p->ctx, aside);
  return s;
}

/* The device has no room for the plans as they are: *fewer, they have become smaller. */
static rfr_status drop_branches(rfr_programs *p, bool *fewer) {
  *fewer = false;
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (g->n_side_ops == 0) continue;
    rfi_plan_deinit(&g->plan);
    set_side(g, NULL);
    RFI_TRY(plan_line(g));
    rfi_log(p->ctx, RFR_LOG_WARNING,
            "program \"%s\" is planned without its side branch, %lld bytes more than the device has left", g->name,
            (long long)g->branch_bytes);
    *fewer = true;
  }
  return RFR_OK;
}

static rfr_status report_branches(rfr_programs *p) {
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (g->n_side_ops == 0 && g->branch_bytes == 0) continue;
    RFI_TRY(rfi_report_line(&g->pipeline.stage[RFI_STAGES - 1].report, "side branch: %d ops, %+lld bytes%s",
                            g->n_side_ops, (long long)g->branch_bytes,
                            g->n_side_ops > 0                                    ? ""
                            : is_over_budget(p, g->plan.bytes + g->branch_bytes) ? ": more than the budget has left"
                                                                                 : ": more than the device has left"));
  }
  return RFR_OK;
}

/* ---- placing ---- */

static void place_inputs(rfr_programs *p) {
  p->persistent_bytes = 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int i = 0; i < p->n_slots; i++) {
      rfi_program_input *slot = &p->slot[i];
      if (slot->ring != (pass == 0)) continue;
      slot->offset = p->persistent_bytes;
      p->persistent_bytes += rfi_storage_bytes(&slot->tensor.type);
    }
    if (pass == 0) p->ring_bytes = p->persistent_bytes;
  }
}

/* Results of phase load live on, one place per program behind the inputs. */
static void place_loads(rfr_programs *p, rfi_program *g) {
  const rfr_trace *t = g->trace;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    g->offset[v] = -1;
    if (x->base != v) continue;
    if (x->op < 0) {
      g->offset[v] = find_slot(p, x->name)->offset;
    } else if (t->ops[x->op].phase == RFR_PHASE_LOAD) {
      g->offset[v] = p->persistent_bytes;
      p->persistent_bytes += rfi_storage_bytes(&x->type);
    }
  }
}

static rfr_status check_budget(const rfr_programs *p, bool demand) {
  if (p->options.budget <= 0 || p->total_bytes <= p->options.budget) return RFR_OK;
  return rfi_fail(RFI_E_PLAN_OVER_BUDGET,
                  "the plan needs %lld bytes, %s (%lld persistent, %lld for the step), the budget is %lld",
                  (long long)p->total_bytes,
                  demand ? "the smallest budget that works, with all recomputed that lowers the peak"
                  : p->options.recompute == RFR_RECOMPUTE_ALL ? "with all recomputed that lowers the peak"
                                                              : "with nothing recomputed: recompute auto may need less",
                  (long long)p->persistent_bytes, (long long)p->transient_bytes, (long long)p->options.budget);
}

/* The step's part is as large as the largest program's. */
static void share_step(rfr_programs *p, bool debug) {
  p->transient_bytes = 0;
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    const int64_t transient = debug ? rfi_debug_layout(g) : g->plan.bytes;
    if (transient > p->transient_bytes) p->transient_bytes = transient;
  }
  p->total_bytes = p->persistent_bytes + p->transient_bytes;
}

static rfr_status allocate_arena(rfr_programs *p) {
  const int64_t bytes = p->total_bytes - p->ring_bytes + p->backend->guard;
  return p->backend->alloc(p->device, RFI_MEMORY_ARENA, (size_t)bytes, (void **)&p->arena);
}

/* Side branches are given up before what fits without them is refused. */
static rfr_status allocate_arena_or_line(rfr_programs *p) {
  bool fewer;
  const rfr_status s = allocate_arena(p);
  if (s != RFR_NO_MEMORY) return s;
  RFI_TRY(drop_branches(p, &fewer));
  if (!fewer) return s;
  share_step(p, false);
  return allocate_arena(p);
}

/* A known pattern in the step's part, so that what is never touched shows; the rest starts as zeros. */
static rfr_status allocate_memory(rfr_programs *p) {
  const rfi_backend *b = p->backend;
  RFI_TRY(b->alloc(p->device, RFI_MEMORY_RING, (size_t)p->ring_bytes, (void **)&p->ring));
  RFI_TRY(allocate_arena_or_line(p));
  const size_t inputs = (size_t)(p->persistent_bytes - p->ring_bytes), step = (size_t)(p->transient_bytes + b->guard);
  RFI_TRY(b->fill(p->device, p->arena, 0, inputs));
  RFI_TRY(b->fill(p->device, p->arena + inputs, RFI_PATTERN, step));
  if (!p->options.debug) return RFR_OK;
  int most = 0;
  for (int i = 0; i < p->n; i++)
    if (p->program[i].plan.n > most) most = p->program[i].plan.n;
  RFI_TRY(b->alloc(p->device, RFI_MEMORY_RING, sizeof *p->watch * (size_t)rfi_debug_ranges(most), (void **)&p->watch));
  return b->host ? RFR_OK : rfi_alloc(p->ctx, RFI_WINDOW, (void **)&p->window);
}

static rfr_status allocate(rfr_programs *p) {
  bool demand = p->options.recompute == RFR_RECOMPUTE_AUTO && p->options.budget > 0;
  if (demand) RFI_TRY(meet_budget(p));
  place_inputs(p);
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    RFI_TRY(RFI_ALLOC(p->ctx, sizeof *g->offset * (size_t)(g->trace->n_values + 1), &g->offset));
    place_loads(p, g);
  }
  /* debugging looks at one op after the other */
  for (int i = 0; i < p->n && p->backend->branches && !p->options.debug; i++) RFI_TRY(plan_branch(p, &p->program[i]));
  share_step(p, false);
  RFI_TRY(check_budget(p, demand));
  if (p->options.debug) share_step(p, true); /* what is debugged is the program that fits, in more room */
  if (p->options.tune) RFI_TRY(rfi_tune(p)); /* measured while the device still has the arena's room */
  RFI_TRY(allocate_memory(p));
  RFI_TRY(report_branches(p));
  for (int i = 0; i < p->n_slots; i++) {
    p->slot[i].tensor.data = rfi_address(p, p->slot[i].offset);
    p->slot[i].tensor.host = p->slot[i].ring || p->backend->host;
  }
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    for (int k = 0; k < g->plan.n; k++)
      if (g->plan.buffer[k].value >= 0)
        g->offset[g->plan.buffer[k].value] = p->persistent_bytes + g->plan.buffer[k].offset;
    rfi_set_program_addresses(p, g);
  }
  return RFR_OK;
}

static rfr_status check_arguments(rfr_ctx *ctx, int n, const rfr_trace *const *traces, const rfr_compile_options *o) {
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (n < 1 || !traces) return rfi_fail(RFI_E_ARGUMENT, "%d programs, or no traces", n);
  for (int i = 0; i < n; i++)
    if (!traces[i]) return rfi_fail(RFI_E_ARGUMENT, "program %d of %d has no trace", i, n);
  if (!o) return RFR_OK;
  RFI_TRY(rfi_check_options("rfr_compile_options", o, o->size, sizeof *o));
  if (o->budget < 0 || o->loss_chunk < 0 || (unsigned)o->recompute > RFR_RECOMPUTE_AUTO)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_compile_options: budget %lld, loss_chunk %lld, recompute %d",
                    (long long)o->budget, (long long)o->loss_chunk, (int)o->recompute);
  if (o->choices && !o->tune) return rfi_fail(RFI_E_ARGUMENT, "rfr_compile_options: choices, but tune is off");
  for (int i = 0; o->choices && i < o->n_choices; i++)
    if (!o->choices[i].name || !o->choices[i].value)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_compile_options: choice %d has no name or no value", i);
  return RFR_OK;
}

rfr_status rfr_compile(rfr_ctx *ctx, int n, const rfr_trace *const *traces, const char *const *names,
                       const rfr_compile_options *options, rfr_programs **out) {
  rfr_status s;
  rfr_programs *p = NULL;
  *out = NULL;
  RFI_TRY(check_arguments(ctx, n, traces, options));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p, &p));
  p->ctx = ctx;
  p->options = rfr_compile_options_default();
  if (options) memcpy(&p->options, options, sizeof p->options);
  RFI_GOTO(rfi_arena_create(ctx, &p->strings));
  RFI_GOTO(rfi_backend_find(ctx, &p->backend));
  RFI_GOTO(p->backend->open(ctx, &p->device));
  RFI_GOTO(
      rfi_join_communicator(&(rfi_exec_target){.backend = p->backend, .device = p->device, .comm = p->options.comm}));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->program * (size_t)n, &p->program));
  p->n = n;
  for (int i = 0; i < n; i++) {
    p->program[i].name = rfi_arena_strdup(p->strings, names && names[i] ? names[i] : "program");
    if (!p->program[i].name) {
      s = RFR_NO_MEMORY;
      goto fail;
    }
    s = compile_one(p, &p->program[i], traces[i]);
    if (s != RFR_OK) {
      rfi_fail_prefix("program \"%s\": ", p->program[i].name);
      goto fail;
    }
  }
  RFI_GOTO(allocate(p));
  p->options.choices = NULL; /* the caller's */
  if (!p->options.keep_traces)
    for (int i = 0; i < n; i++)
      for (int k = 0; k < RFI_STAGES - 1; k++) {
        rfr_trace_destroy(p->program[i].pipeline.stage[k].trace);
        p->program[i].pipeline.stage[k].trace = NULL;
      }
  *out = p;
  return RFR_OK;
fail:
  rfr_programs_destroy(p);
  return s;
}

void rfr_programs_destroy(rfr_programs *p) {
  if (!p) return;
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (p->device) p->backend->graph_destroy(p->device, g->graph);
    rfi_free(p->ctx, g->bound);
    rfi_free(p->ctx, g->workspace);
    rfi_free(p->ctx, g->offset);
    rfi_plan_deinit(&g->plan);
    rfi_pipeline_deinit(&g->pipeline);
  }
  rfi_free(p->ctx, p->program);
  rfi_free(p->ctx, p->window);
  if (p->device) {
    p->backend->free(p->device, RFI_MEMORY_RING, p->watch);
    p->backend->free(p->device, RFI_MEMORY_ARENA, p->arena);
    p->backend->free(p->device, RFI_MEMORY_RING, p->ring);
    p->backend->close(p->device);
  }
  rfi_arena_destroy(p->strings);
  rfi_free(p->ctx, p);
}

/* ---- answers ---- */

rfr_status rfi_program_get(const rfr_programs *p, int i, rfi_program **out) {
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  if (i < 0 || i >= p->n) return rfi_fail(RFI_E_ARGUMENT, "program %d of %d", i, p->n);
  *out = &p->program[i];
  return RFR_OK;
}

rfr_status rfr_programs_tensor_at(const rfr_programs *p, int i, rfr_tensor *out) {
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  if (i < 0 || i >= p->n_slots) return rfi_fail(RFI_E_PROGRAM_NAME, "input %d of %d", i, p->n_slots);
  *out = p->slot[i].tensor;
  return RFR_OK;
}

rfr_status rfr_programs_tensor(const rfr_programs *p, const char *name, rfr_tensor *out) {
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  const rfi_program_input *slot = name ? find_slot(p, name) : NULL;
  if (!slot) return rfi_fail(RFI_E_PROGRAM_NAME, "no program has an input \"%s\"", name ? name : "");
  *out = slot->tensor;
  return RFR_OK;
}

rfr_status rfr_program_output(const rfr_programs *p, int program, const char *name, rfr_tensor *out) {
  rfi_program *g;
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_program_get(p, program, &g));
  if (!name) name = "";
  for (int i = 0; i < g->trace->n_outputs; i++) {
    if (strcmp(g->trace->outputs[i].name, name) != 0) continue;
    const rfi_value *v = &g->trace->values[g->trace->outputs[i].value];
    if (!rfi_is_dense(v)) return rfi_fail(RFI_E_PROGRAM_NAME, "output \"%s\" is a strided view; copy it first", name);
    *out = (rfr_tensor){.name = g->trace->outputs[i].name,
                        .type = v->type,
                        .data = rfi_address(p, g->offset[v->base]) + v->offset * rfr_dtype_bits(v->type.dtype) / 8,
                        .bytes = rfi_bytes(&v->type),
                        .host = p->backend->host};
    return RFR_OK;
  }
  return rfi_fail(RFI_E_PROGRAM_NAME, "program \"%s\" has no output \"%s\"", g->name, name);
}

rfr_status rfr_program_plan(const rfr_programs *p, int program, rfr_plan_summary *out) {
  rfi_program *g;
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_program_get(p, program, &g));
  *out = (rfr_plan_summary){p->total_bytes,      p->persistent_bytes,    g->plan.bytes,
                            g->plan.lower_bound, p->n_slots + g->plan.n, p->options.budget,
                            g->compile_seconds,  g->n_side_ops,          g->branch_bytes};
  return RFR_OK;
}

static const char *kind_of(const rfi_program *g, const rfi_buffer *b) {
  if (b->value == RFR_NONE) return "workspace";
  if (b->last >= g->trace->n_ops) return "output";
  const rfi_opr *op = &g->trace->ops[g->trace->values[b->value].op];
  if (op->clone_of >= 0) return "activation"; /* made again, in the backward's phase */
  switch (op->phase) {
    case RFR_PHASE_DGRAD:
    case RFR_PHASE_WGRAD: return "gradient";
    default: return "activation";
  }
}

rfr_status rfr_program_plan_buffer(const rfr_programs *p, int program, int i, rfr_plan_buffer *out) {
  rfi_program *g;
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_program_get(p, program, &g));
  if (i >= 0 && i < p->n_slots) {
    const rfr_tensor *t = &p->slot[i].tensor;
    bool weight = t->role == RFR_ROLE_TRAINABLE || t->role == RFR_ROLE_FROZEN;
    *out = (rfr_plan_buffer){t->name,  weight ? "weight" : t->role == RFR_ROLE_STATE ? "state" : "input",
                             t->bytes, p->slot[i].offset,
                             0,        g->trace->n_ops};
    return RFR_OK;
  }
  if (i < 0 || i >= p->n_slots + g->plan.n)
    return rfi_fail(RFI_E_ARGUMENT, "buffer %d of %d", i, p->n_slots + g->plan.n);
  const rfi_buffer *b = &g->plan.buffer[i - p->n_slots];
  const rfi_opr *op = &g->trace->ops[b->value >= 0 ? g->trace->values[b->value].op : b->first];
  const char *name = b->value >= 0 ? g->trace->values[b->value].name : "";
  *out = (rfr_plan_buffer){name[0] ? name : op->def->name,  kind_of(g, b), b->bytes,
                           p->persistent_bytes + b->offset, b->first,      b->last};
  return RFR_OK;
}

rfr_status rfr_program_op(const rfr_programs *p, int program, int i, rfr_plan_op *out) {
  rfi_program *g;
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_program_get(p, program, &g));
  if (i < 0 || i >= g->trace->n_ops) return rfi_fail(RFI_E_ARGUMENT, "op %d of %d", i, g->trace->n_ops);
  const rfi_opr *op = &g->trace->ops[i];
  *out = (rfr_plan_op){op->def->name, op->scope, op->reason, (rfr_phase)op->phase, op->microbatch, op->clone_of};
  return RFR_OK;
}

/* ---- what was written ---- */

enum { CHUNK = 1 << 20 };

/* How many of the bytes [offset, offset + bytes) still hold the pattern, whole lines of it; `chunk` has CHUNK bytes. */
static rfr_status count_untouched(const rfr_programs *p, int64_t offset, int64_t bytes, unsigned char *chunk,
                                  int64_t *untouched) {
  for (int64_t at = 0; at < bytes; at += CHUNK) {
    const int64_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
    RFI_TRY(p->backend->copy(p->device, chunk, rfi_address(p, offset + at), (size_t)n));
    for (int64_t i = 0; i < n; i += RFI_ALIGNMENT) {
      const int64_t line = n - i < RFI_ALIGNMENT ? n - i : RFI_ALIGNMENT;
      int64_t k = 0;
      while (k < line && chunk[i + k] == RFI_PATTERN) k++;
      if (k == line) *untouched += line;
    }
  }
  return RFR_OK;
}

int64_t rfr_programs_touched_bytes(const rfr_programs *p) {
  int64_t untouched = 0;
  void *chunk;
  if (rfi_check_handle(p, "rfr_programs") != RFR_OK || rfi_alloc(p->ctx, CHUNK, &chunk) != RFR_OK) return -1;
  const rfr_status s = count_untouched(p, p->persistent_bytes, p->transient_bytes, chunk, &untouched);
  rfi_free(p->ctx, chunk);
  return s == RFR_OK ? p->total_bytes - untouched : -1;
}

int64_t rfr_program_unwritten_bytes(const rfr_programs *p, int program) {
  int64_t untouched = 0;
  rfi_program *g;
  void *chunk;
  if (rfi_program_get(p, program, &g) != RFR_OK || rfi_alloc(p->ctx, CHUNK, &chunk) != RFR_OK) return -1;
  rfr_status s = RFR_OK;
  for (int i = 0; i < g->plan.n && s == RFR_OK; i++) {
    const rfi_buffer *b = &g->plan.buffer[i];
    if (b->value >= 0) s = count_untouched(p, p->persistent_bytes + b->offset, b->bytes, chunk, &untouched);
  }
  rfi_free(p->ctx, chunk);
  return s == RFR_OK ? untouched : -1;
}

rfr_status rfr_programs_check(const rfr_programs *p) {
  unsigned char *guard;
  int i = 0;
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  const int bytes = p->backend->guard;
  RFI_TRY(RFI_ALLOC(p->ctx, (size_t)bytes, &guard));
  rfr_status s = p->backend->copy(p->device, guard, rfi_address(p, p->total_bytes), (size_t)bytes);
  while (s == RFR_OK && i < bytes && guard[i] == RFI_PATTERN) i++;
  rfi_free(p->ctx, guard);
  if (s != RFR_OK || i == bytes) return s;
  return rfi_fail(RFI_E_DEBUG_OVERRUN, "byte %d behind the arena was written", i);
}

rfr_status rfr_programs_memory_use(const rfr_programs *p, rfr_memory_use *out) {
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  return p->backend->memory_use(p->device, out);
}

/* ---- traces and costs ---- */

static const rfi_stage *find_stage(const rfr_programs *p, int program, const char *pass) {
  rfi_program *g;
  if (rfi_program_get(p, program, &g) != RFR_OK || !pass) return NULL;
  for (int k = 0; k < RFI_STAGES; k++)
    if (strcmp(g->pipeline.stage[k].pass, pass) == 0) return &g->pipeline.stage[k];
  return NULL;
}

const rfr_trace *rfr_program_trace(const rfr_programs *p, int program, const char *pass) {
  const rfi_stage *stage = find_stage(p, program, pass);
  return stage ? stage->trace : NULL;
}

const char *rfr_program_report(const rfr_programs *p, int program, const char *pass) {
  const rfi_stage *stage = find_stage(p, program, pass);
  return stage ? stage->report.text.data ? stage->report.text.data : "" : NULL;
}

double rfr_program_flops(const rfr_programs *p, int program) {
  rfi_program *g;
  return rfi_program_get(p, program, &g) == RFR_OK ? g->flops : 0;
}

double rfr_program_recomputed_flops(const rfr_programs *p, int program) {
  rfi_program *g;
  return rfi_program_get(p, program, &g) == RFR_OK ? g->recomputed_flops : 0;
}

rfr_status rfr_program_frontier(rfr_programs *p, int program, rfr_frontier_point *points, int max, int *n) {
  rfi_program *g;
  int64_t others = 0;
  *n = 0;
  RFI_TRY(rfi_program_get(p, program, &g));
  const rfi_stage *stage = find_stage(p, program, "fuse");
  if (!stage || !stage->trace) return rfi_fail(RFI_E_ARGUMENT, "the traces of program \"%s\" were not kept", g->name);
  for (int i = 0; i < p->n; i++)
    if (i != program && p->program[i].plan.bytes > others) others = p->program[i].plan.bytes;
  rfi_pass_options o = pass_options(p);
  RFI_TRY(rfi_recompute_frontier(stage->trace, &o, points, max, n));
  for (int i = 0; i < *n; i++) {
    int64_t step = points[i].planned_bytes > others ? points[i].planned_bytes : others;
    points[i].planned_bytes = p->persistent_bytes + step;
  }
  return RFR_OK;
}
