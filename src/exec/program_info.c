/* SPDX-License-Identifier: Apache-2.0
 *
 * Queries of compiled programs: tensors, plan, memory by kind, traces, costs. Nothing runs here.
 */
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"

/* ---- programs and tensors ---- */

rfr_status rfi_check_allocated(const rfr_programs *p, const char *call) {
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  return p->options.plan_only ? rfi_fail(RFI_E_PROGRAM_PLAN_ONLY, "%s: compiled with plan_only, without memory", call)
                              : RFR_OK;
}

rfr_status rfi_program_get_allocated(const rfr_programs *p, int i, const char *call, rfi_program **out) {
  RFI_TRY(rfi_check_allocated(p, call));
  return rfi_program_get(p, i, out);
}

rfr_status rfi_program_get(const rfr_programs *p, int i, rfi_program **out) {
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  if (i < 0 || i >= p->n) return rfi_fail(RFI_E_ARGUMENT, "program %d of %d", i, p->n);
  *out = &p->program[i];
  return RFR_OK;
}

rfr_status rfr_programs_tensor_at(const rfr_programs *p, int i, rfr_tensor *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_tensor"));
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  if (i < 0 || i >= p->m.store.n) return rfi_fail(RFI_E_PROGRAM_NAME, "input %d of %d", i, p->m.store.n);
  *out = p->m.store.named[i].tensor;
  return RFR_OK;
}

rfr_status rfr_programs_tensor(const rfr_programs *p, const char *name, rfr_tensor *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_tensor"));
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  const rfi_named *input = rfi_storage_find(&p->m.store, name);
  if (!input) return rfi_fail(RFI_E_PROGRAM_NAME, "no program has an input \"%s\"", name ? name : "");
  *out = input->tensor;
  return RFR_OK;
}

bool rfi_program_output_at(const rfr_programs *p, int program, int k, rfr_tensor *out) {
  const rfi_program *g = &p->program[program];
  const rfi_value *v = &g->u.trace->values[g->u.trace->outputs[k].value];
  if (!rfi_is_dense(v)) return false;
  *out = (rfr_tensor){.name = g->u.trace->outputs[k].name,
                      .type = v->type,
                      .bytes = rfi_bytes(&v->type),
                      .host = p->m.backend->host && !p->options.plan_only};
  if (p->attached) out->data = rfi_unit_address(&p->m, &g->u, 0, g->u.trace->outputs[k].value);
  return true;
}

rfr_status rfr_program_output(const rfr_programs *p, int program, const char *name, rfr_tensor *out) {
  rfi_program *g;
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_tensor"));
  RFI_TRY(rfi_program_get(p, program, &g));
  if (!name) name = "";
  for (int k = 0; k < g->u.trace->n_outputs; k++) {
    if (strcmp(g->u.trace->outputs[k].name, name) != 0) continue;
    if (rfi_program_output_at(p, program, k, out)) return RFR_OK;
    return rfi_fail(RFI_E_PROGRAM_NAME, "output \"%s\" is a strided view; record rfr_copy of it", name);
  }
  return rfi_fail(RFI_E_PROGRAM_NAME, "program \"%s\" has no output \"%s\"", g->u.name, name);
}

/* Finds result k of phase load of all programs; returns the number of such results. Each program has its own, and its
 * load ops come first. */
static int find_loaded(const rfr_programs *p, int k, const rfi_exec_unit **unit, rfr_value *value) {
  int n = 0;
  for (int i = 0; i < p->n; i++) {
    const rfi_exec_unit *u = &p->program[i].u;
    const rfi_value *x = u->trace->values;
    const int ops = u->start[RFI_PART_F];
    for (rfr_value v = 0; ops > 0 && v < u->trace->n_values && x[v].op < ops; v++) {
      if (x[v].op < 0 || x[v].base != v) continue;
      if (n++ == k) *unit = u, *value = v;
    }
  }
  return n;
}

rfr_status rfr_program_plan(const rfr_programs *p, int program, rfr_plan_summary *out) {
  rfi_program *g;
  const rfi_exec_unit *unit;
  rfr_value value;
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_plan_summary"));
  RFI_TRY(rfi_program_get(p, program, &g));
  *out = (rfr_plan_summary){rfi_layout_at(&p->m.layout, RFI_REGIONS),
                            rfi_layout_at(&p->m.layout, RFI_REGION_SLOT),
                            g->plan.bytes,
                            g->plan.lower_bound,
                            p->m.store.n + find_loaded(p, -1, &unit, &value) + g->plan.n,
                            p->options.budget,
                            g->compile_seconds,
                            g->n_side_ops,
                            g->branch_bytes};
  return RFR_OK;
}

typedef enum memory_kind { OUTPUT, ACTIVATION, GRADIENT, WORKSPACE, N_MEMORY_KINDS } memory_kind;

/* Fused ops of the forward, such as the LM head with its loss, also compute gradients. ops.def names those results
 * "dx", "dw". */
static bool is_gradient(const rfi_opr *op, int result) {
  if (op->clone_of >= 0) return false; /* recomputed in a phase of the backward */
  if (op->phase == RFR_PHASE_DGRAD || op->phase == RFR_PHASE_WGRAD) return true;
  return !op->def->outside && op->def->result[result][0] == 'd';
}

static memory_kind kind_of(const rfi_program *g, const rfi_buffer *b) {
  if (b->value == RFR_NONE) return WORKSPACE;
  if (b->last >= g->u.trace->n_ops) return OUTPUT;
  const rfi_value *v = &g->u.trace->values[b->value];
  return is_gradient(&g->u.trace->ops[v->op], v->result) ? GRADIENT : ACTIVATION;
}

/* The input of the trace that result j of an op updates; NULL: none. */
static const rfi_value *updated_by(const rfr_trace *t, const rfi_opr *op, int j) {
  const int k = op->def->alias[j];
  const rfi_value *x = k >= 0 && op->in[k] >= 0 ? &t->values[t->values[op->in[k]].base] : NULL;
  return x && x->op < 0 ? x : NULL;
}

/* Averages of weights (rfr_ema) have the role of a parameter, because they are sharded like one. */
static bool is_average(const rfr_programs *p, const rfr_tensor *x) {
  if (x->role != RFR_ROLE_TRAINABLE) return false;
  for (int k = 0; k < p->n; k++) {
    const rfr_trace *t = p->program[k].u.trace;
    for (int i = 0; i < t->n_ops; i++) {
      const rfi_value *v = t->ops[i].def->code == RFI_OP_ema ? updated_by(t, &t->ops[i], 0) : NULL;
      if (v && strcmp(v->name, x->name) == 0) return true;
    }
  }
  return false;
}

rfr_status rfr_program_plan_buffer(const rfr_programs *p, int program, int i, rfr_plan_buffer *out) {
  rfi_program *g;
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_plan_buffer"));
  RFI_TRY(rfi_program_get(p, program, &g));
  if (i >= 0 && i < p->m.store.n) {
    const rfi_named *x = &p->m.store.named[i];
    const rfr_tensor *t = &x->tensor;
    const bool state = t->role == RFR_ROLE_STATE || is_average(p, t);
    *out = (rfr_plan_buffer){t->name,  state ? "state" : rfi_is_parameter(t->role) ? "weight" : "input",
                             t->bytes, rfi_layout_at(&p->m.layout, x->region) + x->offset,
                             0,        g->u.trace->n_ops};
    return RFR_OK;
  }
  const rfi_exec_unit *unit = NULL;
  rfr_value value = RFR_NONE;
  const int before = p->m.store.n + find_loaded(p, i - p->m.store.n, &unit, &value);
  if (i < 0 || i >= before + g->plan.n) return rfi_fail(RFI_E_ARGUMENT, "buffer %d of %d", i, before + g->plan.n);
  if (unit) {
    const rfi_value *all = unit->trace->values, *x = &all[value];
    const rfi_opr *op = &unit->trace->ops[x->op];
    const char *from = op->n_in > 0 && op->in[0] >= 0 ? all[all[op->in[0]].base].name : "";
    *out = (rfr_plan_buffer){x->name[0] ? x->name
                             : from[0]  ? from
                                        : op->def->name,
                             "load",
                             rfi_storage_bytes(&x->type),
                             rfi_layout_at(&p->m.layout, RFI_REGION_PERSISTENT) + unit->place[value].offset,
                             0,
                             g->u.trace->n_ops};
    return RFR_OK;
  }
  const rfi_buffer *b = &g->plan.buffer[i - before];
  const rfi_opr *op = &g->u.trace->ops[b->value >= 0 ? g->u.trace->values[b->value].op : b->first];
  const char *name = b->value >= 0 ? g->u.trace->values[b->value].name : "";
  static const char *const kinds[N_MEMORY_KINDS] = {"output", "activation", "gradient", "workspace"};
  *out = (rfr_plan_buffer){name[0] ? name : op->def->name,
                           kinds[kind_of(g, b)],
                           b->bytes,
                           rfi_layout_at(&p->m.layout, RFI_REGION_SLOT) + b->offset,
                           b->first,
                           b->last};
  return RFR_OK;
}

/* Marks the states that ops update together with a parameter: moments, master weights, averages. */
static void mark_optimizer(const rfr_programs *p, const rfr_trace *t, bool *optimizer) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    bool updates = op->def->code == RFI_OP_muon_momentum; /* the parameter is updated by a later op */
    for (int j = 0; j < op->n_out && op->def->flags & RFI_STATE; j++) {
      const rfi_value *x = updated_by(t, op, j);
      updates = updates || (x && x->role == RFR_ROLE_TRAINABLE);
    }
    for (int j = 0; updates && j < op->n_out; j++) {
      const rfi_value *x = updated_by(t, op, j);
      if (x && (x->role == RFR_ROLE_STATE || op->def->code == RFI_OP_ema))
        optimizer[rfi_names_find(&p->m.store.names, x->name)] = true;
    }
  }
}

static rfr_status count_persistent(const rfr_programs *p, rfr_memory *out) {
  bool *optimizer;
  int64_t inputs = 0;
  RFI_TRY(RFI_ALLOC(p->m.ctx, sizeof *optimizer * (size_t)(p->m.store.n + 1), &optimizer));
  for (int i = 0; i < p->n; i++) mark_optimizer(p, p->program[i].u.trace, optimizer);
  for (int i = 0; i < p->m.store.n; i++) {
    const rfr_role role = p->m.store.named[i].tensor.role;
    const int64_t bytes = rfi_storage_bytes(&p->m.store.named[i].tensor.type);
    const bool weight = rfi_is_parameter(role), state = role == RFR_ROLE_STATE;
    *(optimizer[i] ? &out->optimizer : weight ? &out->weights : state ? &out->states : &out->inputs) += bytes;
    inputs += bytes;
  }
  out->loaded = rfi_layout_at(&p->m.layout, RFI_REGION_SLOT) - inputs;
  rfi_free(p->m.ctx, optimizer);
  return RFR_OK;
}

/* The op at which the plan has the most live bytes. */
static rfr_status find_peak(const rfi_program *g, int *op) {
  const int n = g->u.trace->n_ops + 2;
  int64_t *change, live = 0, most = -1;
  RFI_TRY(RFI_ALLOC(g->u.trace->ctx, sizeof *change * (size_t)n, &change));
  for (int i = 0; i < g->plan.n; i++) {
    change[g->plan.buffer[i].first] += g->plan.buffer[i].bytes;
    change[g->plan.buffer[i].last + 1] -= g->plan.buffer[i].bytes;
  }
  for (int i = 0; i < n; i++) {
    live += change[i];
    if (live > most) most = live, *op = i;
  }
  rfi_free(g->u.trace->ctx, change);
  return RFR_OK;
}

rfr_status rfr_programs_memory(const rfr_programs *p, rfr_memory *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_memory"));
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  int64_t *const kinds[N_MEMORY_KINDS] = {&out->outputs, &out->activations, &out->gradients, &out->workspaces};
  out->total = rfi_layout_at(&p->m.layout, RFI_REGIONS);
  out->unused = out->total - rfi_layout_at(&p->m.layout, RFI_REGION_SLOT);
  for (int i = 1; i < p->n; i++)
    if (p->program[i].plan.bytes > p->program[out->peak_program].plan.bytes) out->peak_program = i;
  const rfi_program *g = &p->program[out->peak_program];
  RFI_TRY(count_persistent(p, out));
  RFI_TRY(find_peak(g, &out->peak_op));
  for (int i = 0; i < g->plan.n; i++) {
    const rfi_buffer *b = &g->plan.buffer[i];
    if (b->first > out->peak_op || b->last < out->peak_op) continue;
    *kinds[kind_of(g, b)] += b->bytes;
    out->unused -= b->bytes;
  }
  return RFR_OK;
}

/* Volume of a ring algorithm over N ranks: every rank passes on N - 1 parts; an all_reduce reduces and gathers parts of
 * 1 / N. */
static int64_t sent_by(const rfr_trace *t, const rfi_opr *op) {
  const int at = rfi_attr_find(op->def, "ranks");
  if (op->def->outside || !(op->def->flags & RFI_COLLECTIVE) || at < 0 || op->n_in < 1) return 0;
  const int64_t ranks = op->attr[at].i, bytes = rfi_bytes(&t->values[op->in[0]].type);
  switch (op->def->code) {
    case RFI_OP_all_gather: return (ranks - 1) * bytes;
    case RFI_OP_all_reduce: return 2 * (ranks - 1) * (bytes / ranks);
    default: return (ranks - 1) * (bytes / ranks);
  }
}

rfr_status rfr_program_op(const rfr_programs *p, int program, int i, rfr_plan_op *out) {
  rfi_program *g;
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_plan_op"));
  RFI_TRY(rfi_program_get(p, program, &g));
  if (i < 0 || i >= g->u.trace->n_ops) return rfi_fail(RFI_E_ARGUMENT, "op %d of %d", i, g->u.trace->n_ops);
  const rfi_opr *op = &g->u.trace->ops[i];
  *out =
      (rfr_plan_op){op->def->name,          op->scope, op->reason, (rfr_phase)op->phase, op->microbatch, op->clone_of,
                    sent_by(g->u.trace, op)};
  return RFR_OK;
}

/* ---- touched bytes ---- */

enum { CHUNK = 1 << 20 };

/* Adds the number of bytes of a buffer in cache lines that still have the pattern. `chunk` has CHUNK bytes. */
static rfr_status add_untouched(const rfr_programs *p, const rfi_buffer *b, unsigned char *chunk, int64_t *untouched) {
  for (int64_t at = 0; at < b->bytes; at += CHUNK) {
    const int64_t n = b->bytes - at < CHUNK ? b->bytes - at : CHUNK;
    const unsigned char *from = rfi_address(&p->m.layout, RFI_REGION_SLOT, b->offset + at);
    RFI_TRY(p->m.backend->copy(p->m.device, chunk, from, (size_t)n));
    for (int64_t i = 0; i < n; i += RFI_ALIGNMENT) {
      const int64_t line = n - i < RFI_ALIGNMENT ? n - i : RFI_ALIGNMENT;
      int64_t k = 0;
      while (k < line && chunk[i + k] == RFI_PATTERN) k++;
      if (k == line) *untouched += line;
    }
  }
  return RFR_OK;
}

/* The number of such bytes in all buffers with a value; -1: an error. */
static int64_t count_untouched(const rfr_programs *p, const rfi_buffer *b, int n) {
  unsigned char *chunk;
  int64_t untouched = 0;
  rfr_status s = RFI_ALLOC(p->m.ctx, CHUNK, &chunk);
  for (int i = 0; i < n && s == RFR_OK; i++)
    if (b[i].value >= 0) s = add_untouched(p, &b[i], chunk, &untouched);
  rfi_free(p->m.ctx, chunk);
  return s == RFR_OK ? untouched : -1;
}

/* Check for calls that read step-scoped bytes. */
static rfr_status check_attached(const rfr_programs *p, const char *call) {
  RFI_TRY(rfi_check_allocated(p, call));
  if (p->attached) return RFR_OK;
  return rfi_fail(RFI_E_PROGRAM_ORDER, "%s: the step memory is attached when a program is first run or captured", call);
}

int64_t rfr_programs_touched_bytes(const rfr_programs *p) {
  if (check_attached(p, "rfr_programs_touched_bytes") != RFR_OK) return -1;
  const int64_t all = rfi_layout_at(&p->m.layout, RFI_REGIONS);
  const rfi_buffer step = {.bytes = all - rfi_layout_at(&p->m.layout, RFI_REGION_SLOT)};
  const int64_t untouched = count_untouched(p, &step, 1);
  return untouched < 0 ? -1 : all - untouched;
}

int64_t rfr_program_unwritten_bytes(const rfr_programs *p, int program) {
  rfi_program *g;
  if (check_attached(p, "rfr_program_unwritten_bytes") != RFR_OK || rfi_program_get(p, program, &g) != RFR_OK)
    return -1;
  return count_untouched(p, g->plan.buffer, g->plan.n);
}

rfr_status rfr_programs_check(const rfr_programs *p) {
  unsigned char *guard;
  int i = 0;
  RFI_TRY(check_attached(p, "rfr_programs_check"));
  const int bytes = p->m.backend->guard;
  RFI_TRY(RFI_ALLOC(p->m.ctx, (size_t)bytes, &guard));
  rfr_status s = p->m.backend->copy(p->m.device, guard, rfi_address(&p->m.layout, RFI_REGIONS, 0), (size_t)bytes);
  while (s == RFR_OK && i < bytes && guard[i] == RFI_PATTERN) i++;
  rfi_free(p->m.ctx, guard);
  if (s != RFR_OK || i == bytes) return s;
  return rfi_fail(RFI_E_DEBUG_OVERRUN, "byte %d after the arena was written", i);
}

rfr_status rfr_programs_memory_use(const rfr_programs *p, rfr_memory_use *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_memory_use"));
  RFI_TRY(rfi_check_handle(p, "rfr_programs"));
  return p->m.backend->memory_use(p->m.device, out);
}

/* ---- traces and costs ---- */

static const rfi_stage *find_stage(const rfr_programs *p, int program, const char *pass) {
  rfi_program *g;
  return rfi_program_get(p, program, &g) == RFR_OK ? rfi_unit_stage(&g->u, pass) : NULL;
}

const rfr_trace *rfr_program_trace(const rfr_programs *p, int program, const char *pass) {
  const rfi_stage *stage = find_stage(p, program, pass);
  return stage ? stage->trace : NULL;
}

const char *rfr_program_report(const rfr_programs *p, int program, const char *pass) {
  return rfi_stage_report(find_stage(p, program, pass));
}

double rfr_program_flops(const rfr_programs *p, int program) {
  rfi_program *g;
  return rfi_program_get(p, program, &g) == RFR_OK ? g->u.flops : 0;
}

double rfr_program_recomputed_flops(const rfr_programs *p, int program) {
  rfi_program *g;
  return rfi_program_get(p, program, &g) == RFR_OK ? g->u.recomputed_flops : 0;
}

rfr_status rfr_program_frontier(rfr_programs *p, int program, rfr_frontier_point *points, int max, int *n) {
  rfi_program *g;
  int64_t others = 0;
  RFI_TRY(RFI_CHECK_OUT(n, "int"));
  RFI_TRY(rfi_check_handle(points, "rfr_frontier_point"));
  RFI_TRY(rfi_program_get(p, program, &g));
  const rfi_stage *stage = find_stage(p, program, "fuse");
  if (!stage || !stage->trace) return rfi_fail(RFI_E_ARGUMENT, "the traces of program \"%s\" were not kept", g->u.name);
  for (int i = 0; i < p->n; i++)
    if (i != program && p->program[i].plan.bytes > others) others = p->program[i].plan.bytes;
  if (max < 2) return rfi_fail(RFI_E_ARGUMENT, "max is %d; it must be at least 2", max);
  rfi_frontier *l;
  RFI_TRY(rfi_program_frontier(p, g, &l));
  const rfi_levels levels = rfi_frontier_levels(l);
  int last;
  rfr_status s = rfi_find_smallest(&levels, 0, &last);
  if (s == RFR_OK) s = rfi_frontier_points(l, last, points, max, n);
  rfi_frontier_destroy(l);
  RFI_TRY(s);
  for (int i = 0; i < *n; i++) {
    int64_t step = points[i].planned_bytes > others ? points[i].planned_bytes : others;
    points[i].planned_bytes = rfi_layout_at(&p->m.layout, RFI_REGION_SLOT) + step;
  }
  return RFR_OK;
}
