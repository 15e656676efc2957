/* SPDX-License-Identifier: Apache-2.0
 *
 * Selects the W's that run on a side stream, and the calls that wait for them. Within a step only the next W of the
 * same main gradient needs the result of a W, so F and I of other callables and microbatches can run at the same time.
 *
 *   rfi_graphs_choose_side_stream  runs before the plan; selects the callables whose W may run there, from their ops
 *                                  and storage
 *   graph_memory.c                 plans separate scratch memory for these W's, and extends the lifetimes of the values
 *                                  that they read. If this exceeds the budget, all W's run in order
 *   rfi_graphs_order_side_stream   runs when addresses are known; selects the calls that wait
 *   graph_step.c                   launches W's and waits
 *
 * Two calls conflict if they access the same byte and one of them writes it. The first call after a W that conflicts
 * with it waits for it. Conflicts follow from the addresses that the kernels get, so results are correct for any plan:
 * if a plan frees memory earlier, a call waits earlier. W's run one after the other in the order of the calls, so that
 * each main gradient is the same sum as in one stream.
 *
 * A W that completes a main gradient runs in order, because the caller may read it after the call.
 */
#include <stdlib.h>

#include "base/base.h"
#include "callable/graphed.h"

/* ---- which callables ---- */

/* Why this op must run in order; NULL: no reason. */
static const char *op_defect(const rfi_opr *op) {
  if (op->def->outside) return "an op of W is not built in";
  if (op->def->flags & RFI_HOST) return "an op of W uses the host";
  return op->def->flags & RFI_COLLECTIVE && op->attr[0].i > 1 ? "W has collectives" : NULL;
}

/* Whether the value is an input gradient that is returned to the caller, who may change it after the call. */
static bool is_returned(const rfi_callable *c, rfr_value owner) {
  for (const rfi_port *p = c->in; p < c->in + c->n_in; p++)
    if (p->grad.value >= 0 && !p->link && c->u.trace->values[p->grad.value].base == owner) return true;
  return false;
}

/* The caller may write its own memory between calls. A part that reads a value which W writes would have to wait. */
static const char *use_defect(const rfr_graphs *g, const rfi_callable *c, const rfi_use *u) {
  const rfi_location *x = &c->u.place[u->owner];
  if (x->region == RFI_FIXED) return "W uses fixed memory of the caller";
  if (x->region == RFI_NAMED && !u->result && g->m.store.named[x->offset].tensor.data)
    return "W reads memory of the caller";
  if (is_returned(c, u->owner)) return "W uses an input gradient, which the caller may change";
  return u->result && x->region != RFI_REGION_SHARED && x->region != RFI_NAMED ? "W writes a value of another part"
                                                                               : NULL;
}

/* The caller may add to a main gradient in its memory that a step does not clear. */
static bool adds_for_caller(const rfi_named *gradient) { return gradient->accumulate && gradient->tensor.data; }

static const char *defect(const rfr_graphs *g, const rfi_callable *c) {
  const char *why = NULL;
  if (!rfi_has(&c->u, RFI_PART_W)) return "there is no W";
  if (c->sharded || c->gathered) return "its parameters are valid only within calls";
  for (int i = 0; i < c->n_gradients && !why; i++)
    if (adds_for_caller(&g->m.store.named[c->gradients[i]]))
      why = "the caller may add to its main gradients between calls";
  for (int i = c->u.start[RFI_PART_W]; i < c->u.start[RFI_PART_W + 1] && !why; i++)
    why = op_defect(&c->u.trace->ops[i]);
  for (rfi_use u = {0}; !why && rfi_next_use(c, &u);)
    if (u.part == RFI_PART_W) why = use_defect(g, c, &u);
  return why;
}

void rfi_graphs_choose_side_stream(rfr_graphs *g, bool fits) {
  const char *all = !g->options.wgrad_side_stream ? "rfr_graphs_options.wgrad_side_stream is 0"
                    : !g->m.backend->launch_side  ? "the device has one stream"
                    : g->n == 1 && g->n_stages == 1 && g->stage->slots == 1 ? "no call can run at the same time"
                    : g->options.debug                                      ? "debug mode fills memory between calls"
                    : !fits                                                 ? "too little memory for its scratch"
                                                                            : NULL;
  g->has_side_stream = false;
  for (rfi_callable *c = g->callable; c < g->callable + g->n; c++) {
    c->in_order = all ? all : defect(g, c);
    g->has_side_stream = g->has_side_stream || !c->in_order;
  }
}

/* ---- the bytes of a part ---- */

typedef struct span {
  uintptr_t from, to;
} span;

typedef struct spans { /* ascending and disjoint once merged */
  span *at;
  int n;
} spans;

typedef struct access { /* what a part accesses in a slot, and what it writes of it */
  spans all, written;
} access;

static void add(spans *s, const void *data, int64_t bytes) {
  const uintptr_t from = (uintptr_t)data;
  if (data && bytes > 0) s->at[s->n++] = (span){from, from + (uintptr_t)bytes};
}

static void add_access(access *a, const void *data, int64_t bytes, bool writes) {
  add(&a->all, data, bytes);
  if (writes) add(&a->written, data, bytes);
}

static int by_start(const void *a, const void *b) {
  const span *x = a, *y = b;
  return (x->from > y->from) - (x->from < y->from);
}

static void merge(spans *s) {
  int n = 0;
  qsort(s->at, (size_t)s->n, sizeof *s->at, by_start);
  for (int i = 0; i < s->n; i++)
    if (n == 0 || s->at[i].from > s->at[n - 1].to) s->at[n++] = s->at[i];
    else if (s->at[i].to > s->at[n - 1].to) s->at[n - 1].to = s->at[i].to;
  s->n = n;
}

static bool overlap(const spans *a, const spans *b) {
  for (int i = 0, k = 0; i < a->n && k < b->n;) {
    if (a->at[i].from < b->at[k].to && b->at[k].from < a->at[i].to) return true;
    if (a->at[i].to < b->at[k].to) i++;
    else k++;
  }
  return false;
}

static bool conflict(const access *a, const access *b) {
  return overlap(&a->all, &b->written) || overlap(&a->written, &b->all);
}

/* Operands and results count with their whole storage. F and I also write the caller's data into their ports, and F the
 * microbatch number. */
static void list_access(const rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, access *a) {
  const rfi_exec_unit *unit = &c->u;
  const rfi_ports taken = rfi_ports_taken(c, part);
  for (rfi_use u = {0}; rfi_next_use(c, &u);)
    if (u.part == part)
      add_access(a, rfi_unit_address(&g->m, unit, slot, u.owner), rfi_storage_bytes(&unit->trace->values[u.owner].type),
                 u.result);
  for (int i = unit->first[part]; i < unit->first[part + 1]; i++)
    add_access(a, unit->instance[slot].bound[i].call.workspace, unit->bound[i].workspace, true);
  for (const rfi_port *p = taken.port; p < taken.port + taken.n; p++) {
    const rfr_tensor x = rfi_port_tensor(g, slot, p, taken.grad);
    if (!p->link) add_access(a, x.data, x.bytes, true);
  }
  if (part == RFI_PART_F && c->microbatch >= 0)
    add_access(a, rfi_unit_address(&g->m, unit, slot, c->microbatch), (int64_t)sizeof(int32_t), true);
  merge(&a->all);
  merge(&a->written);
}

enum { TIMED = RFI_PART_W - RFI_PART_F + 1 }; /* the parts that calls run: F, I and W */

typedef struct accesses {
  rfi_arena *arena;
  access **of; /* per callable: TIMED per slot */
} accesses;

static const access *access_of(const accesses *x, const rfi_step_call *call, rfi_part part) {
  return &x->of[call->of->u.index][call->slot * TIMED + (int)part - RFI_PART_F];
}

static rfr_status list_accesses(const rfr_graphs *g, accesses *x) {
  if (!(x->of = rfi_arena_alloc(x->arena, sizeof(access *) * (size_t)g->n))) return RFR_NO_MEMORY;
  for (int i = 0; i < g->n; i++) {
    const rfi_callable *c = &g->callable[i];
    size_t most = (size_t)(c->u.n_bound + c->n_in + c->n_out + 1);
    for (rfi_use u = {0}; rfi_next_use(c, &u);) most++;
    if (!(x->of[i] = rfi_arena_alloc(x->arena, sizeof(access) * (size_t)(c->u.slots * TIMED)))) return RFR_NO_MEMORY;
    for (int k = 0; k < c->u.slots * TIMED; k++) {
      access *a = &x->of[i][k];
      a->all.at = rfi_arena_alloc(x->arena, sizeof(span) * most);
      a->written.at = rfi_arena_alloc(x->arena, sizeof(span) * most);
      if (!a->all.at || !a->written.at) return RFR_NO_MEMORY;
      list_access(g, c, k / TIMED, (rfi_part)(RFI_PART_F + k % TIMED), a);
    }
  }
  return RFR_OK;
}

/* ---- which calls wait ---- */

/* Without a schedule the caller may read main gradients only between microbatches, where the main stream waits for all
 * W's. */
static bool completes(const rfi_calls *c, int i) { return !c->endless && c->completes[i + 1] >= 0; }

/* Whether a call runs a part on the main stream: F or I, then W unless that is on the side stream. */
static bool runs_in_order(const rfi_step_call *call, rfi_part part) {
  return rfi_call_runs(call, part) && !(part == RFI_PART_W && call->number > 0);
}

/* The first part after call i that conflicts with its W. *call: the call of that part; the number of calls, if there is
 * none. *concurrent: the number of parts between the two, which may run at the same time as the W. */
static rfi_part first_conflict(const accesses *x, const rfi_calls *c, int i, int *call, int *concurrent) {
  const access *w = access_of(x, &c->call[i], RFI_PART_W);
  *concurrent = 0;
  for (*call = i + 1; *call < c->n; ++*call)
    for (int part = RFI_PART_F; part <= RFI_PART_W; part++) {
      if (!runs_in_order(&c->call[*call], (rfi_part)part)) continue;
      if (conflict(access_of(x, &c->call[*call], (rfi_part)part), w)) return (rfi_part)part;
      ++*concurrent;
    }
  return RFI_PARTS;
}

/* From the last W to the first, because the choice for a W depends on the streams of later W's. If no part could run at
 * the same time, a W runs in order, because a change of streams takes a few microseconds. */
static void choose_calls(const accesses *x, rfi_calls *c) {
  int concurrent, conflicting;
  for (int i = c->n - 1; i >= 0; i--) {
    rfi_step_call *call = &c->call[i];
    if (!rfi_call_runs(call, RFI_PART_W) || call->of->in_order || completes(c, i)) continue;
    first_conflict(x, c, i, &conflicting, &concurrent);
    call->number = concurrent > 0;
  }
}

static void order(const accesses *x, rfi_calls *c) {
  int n = 0, concurrent, conflicting;
  choose_calls(x, c);
  for (int i = 0; i < c->n; i++) {
    if (c->call[i].number == 0) continue;
    c->call[i].number = ++n;
    const rfi_part part = first_conflict(x, c, i, &conflicting, &concurrent);
    /* numbers ascend, so a part waits for the last W that it conflicts with */
    if (conflicting < c->n) *(part == RFI_PART_W ? &c->call[conflicting].wgrad_waits : &c->call[conflicting].waits) = n;
  }
}

/* After an error all W's run in order. Graphs with `eager` have the same plan, but no captured graphs to launch. */
rfr_status rfi_graphs_order_side_stream(const rfr_graphs *g, rfi_calls *c) {
  accesses x = {0};
  for (int i = 0; i < c->n; i++) c->call[i].number = c->call[i].waits = c->call[i].wgrad_waits = 0;
  if (!g->has_side_stream || g->options.eager) return RFR_OK;
  RFI_TRY(rfi_arena_create(g->m.ctx, &x.arena));
  const rfr_status s = list_accesses(g, &x);
  if (s == RFR_OK) order(&x, c);
  rfi_arena_destroy(x.arena);
  return s;
}

/* ---- execution ---- */

rfr_status rfi_graphs_wait_side_stream(rfr_graphs *g, int number) {
  if (number <= g->waited) return RFR_OK;
  RFI_TRY(g->m.backend->join_side(g->m.device, g->launched - number));
  g->waited = number;
  return RFR_OK;
}

rfr_status rfi_graphs_join_side_stream(rfr_graphs *g) {
  RFI_TRY(rfi_graphs_wait_side_stream(g, g->launched));
  g->launched = g->waited = 0;
  return RFR_OK;
}

rfr_status rfi_graphs_run_wgrad(rfr_graphs *g, const rfi_step_call *call) {
  RFI_TRY(rfi_graphs_wait_side_stream(g, call->wgrad_waits));
  if (call->number == 0) return rfi_graphs_run(g, call->of, call->slot, RFI_PART_W, false);
  g->launched = call->number;
  return g->m.backend->launch_side(g->m.device, call->of->u.instance[call->slot].graph[RFI_PART_W]);
}

/* ---- the report ---- */

static rfr_status report_call(const rfi_calls *c, int i, rfi_report *r) {
  const rfi_step_call *w = &c->call[i];
  int k = i + 1;
  if (w->number == 0)
    return rfi_report_line(r, "microbatch %d: in order: %s", w->microbatch,
                           completes(c, i) ? "completes a main gradient" : "no later call can run at the same time");
  while (k < c->n && c->call[k].waits < w->number && c->call[k].wgrad_waits < w->number) k++;
  if (k == c->n) return rfi_report_line(r, "microbatch %d: side stream, no later call waits for it", w->microbatch);
  return rfi_report_line(r, "microbatch %d: side stream, until %s of callable \"%s\", microbatch %d", w->microbatch,
                         c->call[k].waits < w->number ? "wgrad" : rfi_call_text(c->call[k].op), c->call[k].of->u.name,
                         c->call[k].microbatch);
}

static rfr_status report(const rfr_graphs *g, const rfi_callable *c, rfi_report *r) {
  if (c->in_order) return rfi_report_line(r, "in order: %s", c->in_order);
  if (g->options.eager) return rfi_report_line(r, "in order: nothing is captured");
  for (int i = 0; i < g->calls.n; i++)
    if (g->calls.call[i].of == c && rfi_call_runs(&g->calls.call[i], RFI_PART_W)) RFI_TRY(report_call(&g->calls, i, r));
  return RFR_OK;
}

const char *rfi_graphs_report_side_stream(const rfr_graphs *g, int callable) {
  rfi_callable *c = &g->callable[callable];
  if (c->report.text.ctx) rfi_string_deinit(&c->report.text);
  c->report = (rfi_report){.text.ctx = g->m.ctx};
  return report(g, c, &c->report) == RFR_OK ? c->report.text.data : NULL;
}
