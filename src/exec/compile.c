/* SPDX-License-Identifier: Apache-2.0
 *
 * Compile: passes, kernels, plan, budget, arena, addresses. All memory of the programs is
 * allocated here; running and replaying allocate nothing from the context.
 */
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "exec/step_memory.h"
#include "pass/branch.h"

rfr_compile_options rfr_compile_options_default(void) {
  return (rfr_compile_options){.size = sizeof(rfr_compile_options), .fuse = 1, .prune = 1, .keep_traces = 1};
}

rfr_watch_options rfr_watch_options_default(void) {
  return (rfr_watch_options){.size = sizeof(rfr_watch_options), .slots = 1};
}

/* ---- inputs, shared by name ---- */

/* The inputs of ring ops, which the host accesses while programs run. This includes rings whose ops were removed by
 * passes, and the watch ring, which a pass adds. */
static void mark_rings(rfr_programs *p, const rfr_trace *t) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->outside || strcmp(op->def->family, "ring") != 0 || op->n_in == 0) continue;
    const rfi_value *ring = &t->values[t->values[op->in[0]].base];
    rfi_named *input = ring->op < 0 ? rfi_storage_find(&p->m.store, ring->name) : NULL;
    if (input) input->region = RFI_REGION_RING;
  }
}

static rfr_status add_inputs(rfr_programs *p, const rfi_program *g, const rfr_trace *recorded) {
  const rfr_trace *t = g->u.trace;
  rfi_named *fresh;
  for (int i = 0; i < t->n_inputs; i++)
    RFI_TRY(rfi_storage_add(&p->m.store, p->m.strings, &t->values[t->inputs[i]], "program", g->u.name, &fresh));
  mark_rings(p, recorded);
  mark_rings(p, t);
  return RFR_OK;
}

/* ---- one program ---- */

/* The pass options that follow from the compile options. */
static rfi_pass_options pass_options(rfr_programs *p, const rfi_program *g) {
  rfi_pass_options o = rfi_executor_pass_options(&p->m);
  o.fuse = p->options.fuse;
  o.prune = p->options.prune;
  if (p->options.loss_chunk > 0) o.loss_chunk = p->options.loss_chunk, o.loss_rows = NULL;
  o.shard = p->options.shard;
  o.ranks = rfr_comm_size(p->options.comm);
  o.rank = rfr_comm_rank(p->options.comm);
  o.sharded = o.shard == RFR_SHARD_FULL && o.ranks > 1;
  o.recompute = p->options.recompute;
  if (p->watched.n > 0 && g == &p->program[p->watched_program]) o.watch = &p->watched;
  return o;
}

/* The plan without a side stream. */
static rfr_status plan_serial(rfi_program *g) { return rfi_plan_make(g->u.trace, g->workspace, NULL, &g->plan); }

static rfr_status select_and_plan(rfr_programs *p, rfi_program *g) {
  rfi_stage *last = &g->u.pipeline.stage[RFI_STAGES - 1];
  g->u.trace = last->trace;
  rfi_unit_set_step(&g->u);
  RFI_TRY(rfi_unit_select(&p->m, &g->u, p->m.strings, &last->report));
  g->workspace = rfi_arena_alloc(p->m.strings, sizeof *g->workspace * (size_t)(g->u.trace->n_ops + 1));
  if (!g->workspace) return RFR_NO_MEMORY;
  for (int i = 0; i < g->u.n_bound; i++) g->workspace[g->u.bound[i].op] = g->u.bound[i].workspace;
  return plan_serial(g);
}

static rfr_status compile_one(rfr_programs *p, rfi_program *g, const char *name, const rfr_trace *recorded) {
  rfi_pass_options o = pass_options(p, g);
  const double start = rfi_now();
  if (!(g->u.name = rfi_arena_strdup(p->m.strings, name ? name : "program"))) return RFR_NO_MEMORY;
  rfr_status s = rfi_pipeline_run(recorded, &o, &g->u.pipeline);
  g->u.trace = g->u.pipeline.stage[RFI_STAGES - 1].trace;
  if (s == RFR_OK) s = add_inputs(p, g, recorded);
  if (s == RFR_OK) s = select_and_plan(p, g);
  g->compile_seconds = rfi_now() - start;
  return s == RFR_OK ? s : rfi_fail_prefix("program \"%s\": ", g->u.name);
}

/* ---- persistent memory ---- */

/* Places inputs and results of phase load; each program has its own. */
static rfr_status place_persistent(rfr_programs *p) {
  rfi_layout_clear(&p->m.layout);
  rfi_storage_place(&p->m.store, &p->m.layout, RFI_REGION_RING);
  rfi_storage_place(&p->m.store, &p->m.layout, RFI_REGION_PERSISTENT);
  for (int i = 0; i < p->n; i++) {
    rfi_exec_unit *u = &p->program[i].u;
    RFI_TRY(rfi_unit_place(&p->m, u, p->m.strings, u->start[RFI_PART_F]));
  }
  return RFR_OK;
}

/* ---- the budget ---- */

/* Other recompute levels may leave other values to watch. */
static void resize_watch(rfr_programs *p, const rfi_program *g) {
  const int i = rfi_names_find(&g->u.trace->input_names, RFI_WATCH_NAME);
  if (i < 0 || p->watched.n == 0 || g != &p->program[p->watched_program]) return;
  rfr_tensor *ring = &rfi_storage_find(&p->m.store, RFI_WATCH_NAME)->tensor;
  ring->type = g->u.trace->values[g->u.trace->inputs[i]].type;
  ring->bytes = rfi_bytes(&ring->type);
}

static rfr_status plan_again(rfr_programs *p, rfi_program *g, const rfi_pass_options *o) {
  const double start = rfi_now();
  rfi_plan_deinit(&g->plan);
  RFI_TRY(rfi_pipeline_redo(&g->u.pipeline, "recompute", o));
  RFI_TRY(select_and_plan(p, g));
  resize_watch(p, g);
  g->compile_seconds += rfi_now() - start;
  return RFR_OK;
}

static rfr_status plan_level(void *frontier, int level, int64_t enough, int64_t *bytes) {
  rfr_frontier_point point;
  RFI_TRY(rfi_frontier_plan(frontier, level, enough, &point));
  *bytes = point.planned_bytes;
  return RFR_OK;
}

rfi_levels rfi_frontier_levels(rfi_frontier *l) {
  return (rfi_levels){rfi_frontier_marked(l), rfi_frontier_top(l), plan_level, l};
}

rfr_status rfi_program_frontier(rfr_programs *p, const rfi_program *g, rfi_frontier **out) {
  const rfi_pass_options o = pass_options(p, g);
  return rfi_frontier_create(rfi_unit_stage(&g->u, "fuse")->trace, &o, false, out);
}

/* Replans a program at the first recompute level that fits in `room`, or with its smallest plan. */
static rfr_status recompute(rfr_programs *p, rfi_program *g, int64_t room) {
  rfi_pass_options o = pass_options(p, g);
  RFI_TRY(rfi_program_frontier(p, g, &o.frontier));
  const rfi_levels levels = rfi_frontier_levels(o.frontier);
  rfr_status s = rfi_find_level(&levels, rfi_frontier_first(o.frontier, room), room, &o.level);
  if (s == RFR_OK) s = plan_again(p, g, &o);
  rfi_frontier_destroy(o.frontier);
  RFI_TRY(s);
  return rfi_report_line(&g->u.pipeline.stage[RFI_STAGES - 3].report,
                         "%s: %lld bytes planned for the step, %lld allowed",
                         g->plan.bytes <= room ? "fits" : "does not fit, no further choice frees memory",
                         (long long)g->plan.bytes, (long long)room);
}

/* Programs share the step-scoped part: each may use the budget less the persistent part. */
static rfr_status meet_budget(rfr_programs *p) {
  RFI_TRY(place_persistent(p));
  const int64_t room = p->options.budget - rfi_layout_at(&p->m.layout, RFI_REGION_SLOT);
  for (int i = 0; i < p->n; i++)
    if (p->program[i].plan.bytes > room) RFI_TRY(recompute(p, &p->program[i], room));
  return RFR_OK;
}

/* ---- the side stream ---- */

/* Marks the bound ops of the side stream; side NULL: all ops run on one stream. */
static void set_side(rfi_program *g, const rfi_side_op *side) {
  g->n_side_ops = 0;
  for (int i = 0; i < g->u.n_bound; i++) {
    g->u.bound[i].forks = false;
    g->u.bound[i].side = g->u.bound[i].waits = 0;
  }
  for (int i = 0; side && i < g->u.n_bound; i++) {
    rfi_bound *b = &g->u.bound[i];
    if (side[b->op].until == 0) continue;
    b->side = ++g->n_side_ops;
    int from = i, until = i + 1;
    while (until < g->u.n_bound && g->u.bound[until].op < side[b->op].until) until++;
    if (until < g->u.n_bound) g->u.bound[until].waits = b->side;
    while (g->u.bound[from].op > side[b->op].from) from--;
    while (from > 0 && g->u.bound[from - 1].side) from--; /* side ops in a row need only one fork */
    g->u.bound[from].forks = true;
  }
}

static bool is_over_budget(const rfr_programs *p, int64_t step_bytes) {
  return p->options.budget > 0 && rfi_layout_at(&p->m.layout, RFI_REGION_SLOT) + step_bytes > p->options.budget;
}

/* Replaces the serial plan by one with a side stream, if the trace has ops for it and the budget allows it. */
static rfr_status plan_branch(rfr_programs *p, rfi_program *g) {
  rfi_plan with = {0};
  rfi_side_op *side;
  rfr_status s = rfi_branch(g->u.trace, g->workspace, &side);
  if (s == RFR_OK && side) s = rfi_plan_make(g->u.trace, g->workspace, side, &with);
  if (s != RFR_OK || !side) goto done;
  g->branch_bytes = with.bytes - g->plan.bytes;
  if (is_over_budget(p, with.bytes)) goto done;
  rfi_plan_deinit(&g->plan);
  g->plan = with;
  with = (rfi_plan){0};
  set_side(g, side);
done:
  rfi_plan_deinit(&with);
  rfi_free(p->m.ctx, side);
  return s;
}

/* Replans without side streams after an allocation failed; *fewer: a plan has changed. */
static rfr_status drop_branches(rfr_programs *p, bool *fewer) {
  *fewer = false;
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (g->n_side_ops == 0) continue;
    rfi_plan_deinit(&g->plan);
    set_side(g, NULL);
    RFI_TRY(plan_serial(g));
    rfi_log(p->m.ctx, RFR_LOG_WARNING,
            "program \"%s\" runs without a side stream: the %lld bytes for it exceed the device's free memory",
            g->u.name, (long long)g->branch_bytes);
    *fewer = true;
  }
  return RFR_OK;
}

static rfr_status report_branches(rfr_programs *p) {
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    if (g->n_side_ops == 0 && g->branch_bytes == 0) continue;
    RFI_TRY(rfi_report_line(&g->u.pipeline.stage[RFI_STAGES - 1].report, "side stream: %d ops, %+lld bytes%s",
                            g->n_side_ops, (long long)g->branch_bytes,
                            g->n_side_ops > 0 ? ""
                            : is_over_budget(p, g->plan.bytes + g->branch_bytes)
                                ? ": exceeds the budget"
                                : ": exceeds the device's free memory"));
  }
  return RFR_OK;
}

/* ---- offsets and memory ---- */

/* The step-scoped part is shared, so it has the size of the largest program. */
static void share_step(rfr_programs *p, bool debug) {
  int64_t *most = &p->m.layout.bytes[RFI_REGION_SLOT];
  *most = 0;
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    const int64_t bytes = debug ? rfi_debug_layout(g) : g->plan.bytes;
    if (bytes > *most) *most = bytes;
  }
}

/* If allocation fails, retries once without side streams. Untouched step-scoped bytes keep the fill pattern. */
static rfr_status allocate_arena_or_serial(rfr_programs *p) {
  bool fewer;
  const rfr_status s = rfi_layout_allocate(&p->m.layout, p->m.backend, p->m.device, RFI_PATTERN);
  if (s != RFR_NO_MEMORY || p->m.layout.step) return s;
  RFI_TRY(drop_branches(p, &fewer));
  if (!fewer) return s;
  share_step(p, false);
  return rfi_layout_allocate(&p->m.layout, p->m.backend, p->m.device, RFI_PATTERN);
}

static rfr_status allocate_memory(rfr_programs *p) {
  const rfi_backend *b = p->m.backend;
  RFI_TRY(allocate_arena_or_serial(p));
  if (!p->options.debug) return RFR_OK;
  int most = 0;
  for (int i = 0; i < p->n; i++)
    if (p->program[i].plan.n > most) most = p->program[i].plan.n;
  RFI_TRY(
      b->alloc(p->m.device, RFI_MEMORY_RING, sizeof *p->watch * (size_t)rfi_debug_ranges(most), (void **)&p->watch));
  return b->host ? RFR_OK : rfi_alloc(p->m.ctx, RFI_WINDOW, (void **)&p->window);
}

static rfr_status plan_programs(rfr_programs *p) {
  bool demand = p->options.recompute == RFR_RECOMPUTE_AUTO && p->options.budget > 0;
  if (demand) RFI_TRY(meet_budget(p));
  RFI_TRY(place_persistent(p));
  /* debugging runs one op at a time; hooks stop between ops */
  const bool branches = p->m.backend->branches && !p->options.debug;
  for (int i = 0; i < p->n && branches; i++)
    if (!rfi_program_has_hooks(p, &p->program[i])) RFI_TRY(plan_branch(p, &p->program[i]));
  share_step(p, false);
  if (!p->options.plan_only)
    RFI_TRY(rfi_layout_check_budget(&p->m.layout, p->options.budget, p->options.recompute, false));
  /* the budget applies to the program without the debug mode's extra bytes */
  if (p->options.debug) share_step(p, true);
  return rfi_step_memory_reserve(&p->m);
}

/* Copies the plan's offsets. */
static void place_step(rfi_program *g) {
  for (int i = 0, k = 0; i < g->plan.n; i++) {
    const rfi_buffer *b = &g->plan.buffer[i];
    if (b->value != RFR_NONE) {
      g->u.place[b->value] = (rfi_location){.region = RFI_REGION_SLOT, .offset = b->offset};
      continue;
    }
    while (g->u.bound[k].op != b->first) k++; /* workspaces and bound ops are both sorted by op */
    g->u.workspace_at[k] = b->offset;
  }
}

rfr_status rfi_programs_attach(rfr_programs *p) {
  if (p->attached) return RFR_OK;
  RFI_TRY(rfi_step_memory_allocate(&p->m));
  for (int i = 0; i < p->n; i++) rfi_unit_set_addresses(&p->m, &p->program[i].u);
  p->attached = true;
  return RFR_OK;
}

/* Allocates memory and sets the addresses in it. Addresses in step memory are set later, because graphs that are
 * created later may need more of it. */
static rfr_status allocate(rfr_programs *p) {
  if (p->options.tune) RFI_TRY(rfi_tune(p)); /* tuning needs device memory, so it precedes the arena */
  RFI_TRY(allocate_memory(p));
  rfi_storage_attach(&p->m.store, &p->m.layout, p->m.backend->host);
  for (int i = 0; i < p->n; i++) {
    rfi_program *g = &p->program[i];
    place_step(g);
    RFI_TRY(rfi_unit_instantiate(&p->m, &g->u, 1));
  }
  return p->m.layout.step ? RFR_OK : rfi_programs_attach(p);
}

/* Whether running the trace can be observed: it has an output, or an op with an effect. */
static bool has_result(const rfr_trace *t) {
  bool found = t->n_outputs > 0;
  for (int i = 0; i < t->n_ops && !found; i++) found = t->ops[i].def->flags & (RFI_STATE | RFI_HOST);
  return found;
}

static rfr_status check_trace(const rfr_ctx *ctx, int i, int n, const rfr_trace *t) {
  if (!t) return rfi_fail(RFI_E_ARGUMENT, "the trace of program %d of %d is NULL", i, n);
  if (t->ctx != ctx)
    return rfi_fail(RFI_E_ARGUMENT, "the trace of program %d belongs to another context: record it in this one", i);
  const rfr_status s = rfr_trace_status(t);
  if (s != RFR_OK) return rfi_fail_prefix("the trace of program %d is unfinished: ", i), s;
  if (has_result(t)) return RFR_OK;
  return rfi_fail(RFI_E_ARGUMENT,
                  "the trace of program %d is unfinished: no output and no op with an effect; call rfr_output", i);
}

static rfr_status check_watch(const rfr_watch_options *w, int programs) {
  if (!w) return RFR_OK;
  RFI_TRY(rfi_check_options("rfr_watch_options", w, w->size, sizeof *w));
  if (!rfi_is_list(w->patterns, w->n) || w->program < 0 || w->program >= programs || w->slots < 1)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_watch_options: n %d, program %d of %d or slots %lld is out of range", w->n,
                    w->program, programs, (long long)w->slots);
  for (int i = 0; i < w->n; i++)
    if (!w->patterns[i]) return rfi_fail(RFI_E_ARGUMENT, "rfr_watch_options: pattern %d is NULL", i);
  return RFR_OK;
}

static rfr_status check_arguments(rfr_ctx *ctx, int n, const rfr_trace *const *traces, const rfr_compile_options *o) {
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (n < 1 || !traces)
    return rfi_fail(RFI_E_ARGUMENT, "n is %d; it must be at least 1, and traces must not be NULL", n);
  for (int i = 0; i < n; i++) RFI_TRY(check_trace(ctx, i, n, traces[i]));
  if (!o) return RFR_OK;
  RFI_TRY(rfi_check_options("rfr_compile_options", o, o->size, sizeof *o));
  if (o->budget < 0 || o->loss_chunk < 0 || (unsigned)o->recompute > RFR_RECOMPUTE_AUTO ||
      (unsigned)o->shard > RFR_SHARD_FULL)
    return rfi_fail(RFI_E_ARGUMENT,
                    "rfr_compile_options: budget %lld, loss_chunk %lld, recompute %d or shard %d is out of range",
                    (long long)o->budget, (long long)o->loss_chunk, (int)o->recompute, (int)o->shard);
  RFI_TRY(check_watch(o->watch, n));
  RFI_TRY(rfi_check_hooks(o->hooks, o->n_hooks, n, "rfr_compile_options", "programs"));
  if (o->choices && !o->tune) return rfi_fail(RFI_E_ARGUMENT, "rfr_compile_options: choices are given, but tune is 0");
  for (int i = 0; o->choices && i < o->n_choices; i++)
    if (!o->choices[i].name || !o->choices[i].value)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_compile_options: choice %d has no name or no value", i);
  return RFR_OK;
}

const char *rfr_shard_name(rfr_shard shard) {
  static const char *const names[] = {"none", "optimizer", "full"};
  return (unsigned)shard < sizeof names / sizeof *names ? names[shard] : NULL;
}

rfr_status rfr_compile(rfr_ctx *ctx, int n, const rfr_trace *const *traces, const char *const *names,
                       const rfr_compile_options *options, rfr_programs **out) {
  rfr_status s;
  rfr_programs *p = NULL;
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_programs *"));
  RFI_TRY(check_arguments(ctx, n, traces, options));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p, &p));
  p->options = rfr_compile_options_default();
  if (options) memcpy(&p->options, options, sizeof p->options);
  if (p->options.watch) {
    p->watched = (rfi_watch){p->options.watch->patterns, p->options.watch->n, p->options.watch->slots};
    p->watched_program = p->options.watch->program;
  }
  RFI_GOTO(rfi_executor_open(&p->m, ctx, p->options.comm, true, p->options.step_memory));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p->program * (size_t)n, &p->program));
  p->n = n;
  RFI_GOTO(rfi_programs_copy_hooks(p, p->options.hooks));
  for (int i = 0; i < n; i++) RFI_GOTO(compile_one(p, &p->program[i], names ? names[i] : NULL, traces[i]));
  RFI_GOTO(plan_programs(p));
  for (int i = 0; i < n; i++) RFI_GOTO(rfi_program_place_hooks(p, &p->program[i]));
  if (!p->options.plan_only) RFI_GOTO(allocate(p));
  RFI_GOTO(report_branches(p));
  p->options.choices = NULL; /* owned by the caller */
  p->options.watch = NULL;
  p->options.hooks = NULL;
  p->watched.patterns = NULL;
  if (!p->options.keep_traces)
    for (int i = 0; i < n; i++)
      for (int k = 0; k < RFI_STAGES - 1; k++) {
        rfr_trace_destroy(p->program[i].u.pipeline.stage[k].trace);
        p->program[i].u.pipeline.stage[k].trace = NULL;
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
    rfi_unit_deinit(&p->m, &g->u);
    rfi_plan_deinit(&g->plan);
  }
  rfi_free(p->m.ctx, p->program);
  rfi_free(p->m.ctx, p->window);
  if (p->m.device) p->m.backend->free(p->m.device, RFI_MEMORY_RING, p->watch);
  rfi_executor_close(&p->m);
  rfi_free(p->m.ctx, p);
}
