/* SPDX-License-Identifier: Apache-2.0
 *
 * The checked runner. Every value has separate bytes between guards; workspaces share one place,
 * since one op runs at a time. Dead buffers are filled with poison (all bits set: NaN as a float,
 * -1 as an integer). After each op the backend checks, on the device, that guards and poison are
 * unchanged, and each float result must be finite. The first op that breaks a rule is named with
 * its layer. Each op is waited for, so an asynchronous error names its op too.
 */
#include <math.h>

#include "base/base.h"
#include "core/convert.h"
#include "exec/exec.h"

static bool is_workspace(const rfi_buffer *b) { return b->value == RFR_NONE; }

static int64_t most_workspace(const rfi_plan *plan) {
  int64_t most = 0;
  for (int i = 0; i < plan->n; i++)
    if (is_workspace(&plan->buffer[i]) && plan->buffer[i].bytes > most) most = plan->buffer[i].bytes;
  return most;
}

/* Bytes of a buffer without the planner's alignment. */
static int64_t exact_bytes(const rfi_program *g, const rfi_buffer *b) {
  if (!is_workspace(b)) return rfi_bytes(&g->u.trace->values[b->value].type);
  int i = 0;
  while (g->u.bound[i].op != b->first) i++;
  return g->u.bound[i].workspace;
}

int64_t rfi_debug_layout(rfi_program *g) {
  const int64_t workspace = RFI_GUARD;
  for (int i = 0; i < g->plan.n; i++) g->plan.buffer[i].bytes = exact_bytes(g, &g->plan.buffer[i]);
  int64_t at = workspace + rfi_align(most_workspace(&g->plan)) + RFI_GUARD;
  for (int i = 0; i < g->plan.n; i++) {
    rfi_buffer *b = &g->plan.buffer[i];
    b->offset = is_workspace(b) ? workspace : at;
    if (!is_workspace(b)) at += rfi_align(b->bytes) + RFI_GUARD;
  }
  return at;
}

static rfr_status fail_op(rfi_error error, const rfi_program *g, int op, const char *what, const char *name) {
  const rfi_opr *o = &g->u.trace->ops[op];
  return rfi_fail_at(error, o->at.file ? o->at.file : "", o->at.line, "op %d %s%s%s (%s): %s %s", op, o->def->name,
                     o->scope[0] ? " in " : "", o->scope, g->u.name, what, name);
}

rfr_status rfi_name_op(rfr_status s, const rfr_trace *t, const char *name, int op) {
  const rfi_opr *o = &t->ops[op];
  if (s == RFR_OK) return s;
  return rfi_fail_prefix("op %d %s%s%s (%s): ", op, o->def->name, o->scope[0] ? " in " : "", o->scope, name);
}

/* ---- results ---- */

/* Index of the first NaN or infinity of n elements, n if all are finite. */
static int64_t first_nonfinite(rfr_dtype dtype, const void *data, int64_t n) {
  float chunk[256];
  const int size = rfr_dtype_bits(dtype) / 8;
  if (dtype == RFR_F64) {
    for (int64_t i = 0; i < n; i++)
      if (!isfinite(((const double *)data)[i])) return i;
    return n;
  }
  for (int64_t i = 0; i < n; i += 256) {
    int64_t m = n - i < 256 ? n - i : 256;
    rfi_convert(RFR_F32, chunk, dtype, (const char *)data + i * size, m);
    for (int64_t k = 0; k < m; k++)
      if (!isfinite(chunk[k])) return i + k;
  }
  return n;
}

/* The same for a result on any device. */
static rfr_status find_nonfinite(rfr_programs *p, const rfi_arg *y, int64_t *at) {
  const int64_t n = rfi_count(&y->type), size = rfr_dtype_bits(y->type.dtype) / 8, most = RFI_WINDOW / size;
  *at = 0;
  if (!p->window) *at = first_nonfinite(y->type.dtype, y->data, n);
  while (*at < n && p->window) {
    const int64_t m = n - *at < most ? n - *at : most;
    RFI_TRY(p->m.backend->copy(p->m.device, p->window, (const char *)y->data + *at * size, (size_t)(m * size)));
    const int64_t finite = first_nonfinite(y->type.dtype, p->window, m);
    *at += finite;
    if (finite < m) break;
  }
  return RFR_OK;
}

static rfr_status check_results(rfr_programs *p, rfi_program *g, const rfi_bound *b) {
  const rfi_opr *op = &g->u.trace->ops[b->op];
  for (int j = 0; j < op->n_out; j++) {
    const rfi_arg *y = &b->call.out[j];
    int64_t at;
    if (op->out[j] < 0 || !rfr_dtype_is_float(y->type.dtype)) continue;
    if (op->def->infinite[j]) continue;
    RFI_TRY(rfi_name_op(find_nonfinite(p, y, &at), g->u.trace, g->u.name, b->op));
    if (at == rfi_count(&y->type)) continue;
    const char *name = g->u.trace->values[op->out[j]].name;
    fail_op(RFI_E_NONFINITE, g, b->op, "not finite: result", op->def->result[j]);
    return rfi_fail_prefix("%s[%lld]: ", name[0] ? name : "value", (long long)at);
  }
  return RFR_OK;
}

/* ---- memory ---- */

/* The checked ranges: a guard per buffer, a dead-buffer fill per buffer, then the ranges below. */
enum { FIRST_GUARD, LAST_GUARD, REST_OF_WORKSPACE, WORKSPACE_GUARD, OTHER_RANGES };
int rfi_debug_ranges(int n) { return 2 * n + OTHER_RANGES; }

static rfi_range guard(const unsigned char *at) { return (rfi_range){at, RFI_GUARD, RFI_PATTERN, 0}; }
static rfi_range poison(const unsigned char *at, int64_t bytes) { return (rfi_range){at, bytes, RFI_POISON, 0}; }

/* Lists the ranges that op `op` must not write. */
static void watch(rfr_programs *p, const rfi_plan *plan, int op) {
  const unsigned char *step = rfi_address(&p->m.layout, RFI_REGION_SLOT, 0), *shared = step + RFI_GUARD;
  const int64_t most = most_workspace(plan);
  int64_t used = 0; /* bytes of the workspace of `op` */
  for (int i = 0; i < plan->n; i++) {
    const rfi_buffer *b = &plan->buffer[i];
    const bool live = b->first <= op && op <= b->last, shares = is_workspace(b);
    if (shares && live) used = b->bytes;
    p->watch[2 * i] = shares ? (rfi_range){0} : guard(step + b->offset + b->bytes);
    p->watch[2 * i + 1] = shares || live ? (rfi_range){0} : poison(step + b->offset, b->bytes);
  }
  rfi_range *others = p->watch + 2 * plan->n;
  others[FIRST_GUARD] = guard(step);
  others[LAST_GUARD] = guard(step + p->m.layout.bytes[RFI_REGION_SLOT]);
  others[REST_OF_WORKSPACE] = poison(shared + used, most - used);
  others[WORKSPACE_GUARD] = guard(shared + most);
}

static rfr_status check_memory(rfr_programs *p, rfi_program *g, int op) {
  const int n = g->plan.n, ranges = rfi_debug_ranges(n);
  int i = 0;
  watch(p, &g->plan, op);
  RFI_TRY(rfi_name_op(p->m.backend->inspect(p->m.device, p->watch, ranges), g->u.trace, g->u.name, op));
  while (i < ranges && !p->watch[i].broken) i++;
  if (i == ranges) return RFR_OK;
  if (i >= 2 * n)
    return fail_op(RFI_E_DEBUG_OVERRUN, g, op, "wrote",
                   i < 2 * n + REST_OF_WORKSPACE ? "outside the step-scoped memory" : "past the end of a workspace");
  const char *name = g->u.trace->values[g->plan.buffer[i / 2].value].name;
  return fail_op(RFI_E_DEBUG_OVERRUN, g, op, i % 2 ? "wrote into the dead buffer of" : "wrote past the end of",
                 name[0] ? name : "an unnamed value");
}

rfr_status rfi_debug_begin(rfr_programs *p, const rfi_program *g) {
  const rfi_backend *device = p->m.backend;
  unsigned char *step = rfi_address(&p->m.layout, RFI_REGION_SLOT, 0);
  RFI_TRY(device->fill(p->m.device, step, RFI_PATTERN, (size_t)p->m.layout.bytes[RFI_REGION_SLOT] + RFI_GUARD));
  for (int i = 0; i < g->plan.n; i++)
    RFI_TRY(device->fill(p->m.device, step + g->plan.buffer[i].offset, RFI_POISON, (size_t)g->plan.buffer[i].bytes));
  return RFR_OK;
}

rfr_status rfi_debug_run(rfr_programs *p, rfi_program *g, int from, int end) {
  const rfi_backend *device = p->m.backend;
  unsigned char *step = rfi_address(&p->m.layout, RFI_REGION_SLOT, 0);
  for (int i = from; i < end; i++) {
    rfi_bound *b = &g->u.bound[i];
    RFI_TRY(rfi_name_op(device->run(p->m.device, b, 1), g->u.trace, g->u.name, b->op));
    RFI_TRY(check_results(p, g, b));
    RFI_TRY(check_memory(p, g, b->op));
    for (int k = 0; k < g->plan.n; k++) {
      const rfi_buffer *x = &g->plan.buffer[k];
      if (x->last == b->op) RFI_TRY(device->fill(p->m.device, step + x->offset, RFI_POISON, (size_t)x->bytes));
    }
  }
  return RFR_OK;
}
