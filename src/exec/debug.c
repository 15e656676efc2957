/* SPDX-License-Identifier: Apache-2.0
 *
 * The careful runner. Every storage has bytes of its own between guards; what is not
 * live holds poison (all bits set: NaN as a float, -1 as an integer). After each op the
 * guards and all poison must be as they were, and each float result must be finite; the
 * first op that breaks a rule is named with its layer.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "core/convert.h"
#include "exec/exec.h"

int64_t rfi_debug_layout(rfi_plan *plan) {
  int64_t at = RFI_GUARD;
  for (int i = 0; i < plan->n; i++) {
    plan->buffer[i].offset = at;
    at += plan->buffer[i].bytes + RFI_GUARD;
  }
  return at;
}

static bool holds(const unsigned char *p, int64_t n, unsigned char byte) {
  return n <= 0 || (p[0] == byte && memcmp(p, p + 1, (size_t)n - 1) == 0);
}

static rfr_status fail_op(rfi_error error, const rfi_program *g, int op, const char *what, const char *name) {
  const rfi_opr *o = &g->trace->ops[op];
  return rfi_fail_at(error, o->at.file ? o->at.file : "", o->at.line, "op %d %s%s%s (%s): %s %s", op, o->def->name,
                     o->scope[0] ? " in " : "", o->scope, g->name, what, name);
}

/* The step's memory as the host sees it: itself, or a copy of what the device has now. */
static rfr_status look(rfr_programs *p, const unsigned char **base) {
  unsigned char *step = rfi_address(p, p->persistent_bytes);
  *base = p->shadow ? p->shadow : step;
  return p->shadow ? p->backend->copy(p->device, p->shadow, step, (size_t)p->transient_bytes + RFI_GUARD) : RFR_OK;
}

/* The place of the first value that is NaN or infinite, -1 if all are finite. */
static int64_t first_nonfinite(const rfi_arg *a, const void *data) {
  int64_t n = rfi_count(&a->type);
  float chunk[256];
  int size = rfr_dtype_bits(a->type.dtype) / 8;
  if (a->type.dtype == RFR_F64) {
    for (int64_t i = 0; i < n; i++)
      if (!isfinite(((const double *)data)[i])) return i;
    return -1;
  }
  for (int64_t i = 0; i < n; i += 256) {
    int64_t m = n - i < 256 ? n - i : 256;
    rfi_convert(RFR_F32, chunk, a->type.dtype, (const char *)data + i * size, m);
    for (int64_t k = 0; k < m; k++)
      if (!isfinite(chunk[k])) return i + k;
  }
  return -1;
}

static const char *buffer_name(const rfi_program *g, const rfi_buffer *b) {
  if (b->value == RFR_NONE) return "a workspace";
  const char *name = g->trace->values[b->value].name;
  return name[0] ? name : "an unnamed value";
}

static rfr_status check_results(rfr_programs *p, rfi_program *g, const rfi_bound *b, const unsigned char *base) {
  const unsigned char *step = rfi_address(p, p->persistent_bytes);
  const rfi_opr *op = &g->trace->ops[b->op];
  for (int j = 0; j < op->n_out; j++) {
    if (op->out[j] < 0 || !rfr_dtype_is_float(b->call.out[j].type.dtype)) continue;
    /* lse of a row outside every document is -inf by definition; gradients that are not
     * finite are what grad_norm looks for, and the step skips them by itself */
    if (op->def->code == RFI_OP_attention && j == 1) continue;
    const unsigned char *data = b->call.out[j].data;
    const bool state = data < step || data >= step + p->transient_bytes;
    if (state && !p->backend->host) continue; /* not in the copy; what writes states checks the step first */
    int64_t at = first_nonfinite(&b->call.out[j], base + (data - step));
    if (at < 0) continue;
    const char *name = g->trace->values[op->out[j]].name;
    fail_op(RFI_E_NONFINITE, g, b->op, "not finite: result", op->def->result[j]);
    return rfi_fail_prefix("%s[%lld]: ", name[0] ? name : "value", (long long)at);
  }
  return RFR_OK;
}

static rfr_status check_memory(rfr_programs *p, rfi_program *g, const rfi_bound *b, const unsigned char *base) {
  for (int i = 0; i < g->plan.n; i++) {
    const rfi_buffer *x = &g->plan.buffer[i];
    if (!holds(base + x->offset + x->bytes, RFI_GUARD, RFI_PATTERN))
      return fail_op(RFI_E_DEBUG_OVERRUN, g, b->op, "wrote behind", buffer_name(g, x));
    bool live = x->first <= b->op && b->op <= x->last;
    if (!live && !holds(base + x->offset, x->bytes, RFI_POISON))
      return fail_op(RFI_E_DEBUG_OVERRUN, g, b->op, "wrote into what is not live,", buffer_name(g, x));
  }
  if (!holds(base, RFI_GUARD, RFI_PATTERN) || !holds(base + p->transient_bytes, RFI_GUARD, RFI_PATTERN))
    return fail_op(RFI_E_DEBUG_OVERRUN, g, b->op, "wrote outside", "the step's memory");
  return RFR_OK;
}

rfr_status rfi_debug_run(rfr_programs *p, rfi_program *g, int first, int last) {
  const rfi_backend *device = p->backend;
  unsigned char *step = rfi_address(p, p->persistent_bytes);
  const unsigned char *base;
  RFI_TRY(device->fill(p->device, step, RFI_PATTERN, (size_t)p->transient_bytes));
  for (int i = 0; i < g->plan.n; i++)
    RFI_TRY(device->fill(p->device, step + g->plan.buffer[i].offset, RFI_POISON, (size_t)g->plan.buffer[i].bytes));
  for (int i = first; i < last; i++) {
    rfi_bound *b = &g->bound[i];
    RFI_TRY(device->run(p->device, b, 1));
    RFI_TRY(look(p, &base));
    RFI_TRY(check_results(p, g, b, base));
    RFI_TRY(check_memory(p, g, b, base));
    for (int k = 0; k < g->plan.n; k++) {
      const rfi_buffer *x = &g->plan.buffer[k];
      if (x->last == b->op) RFI_TRY(device->fill(p->device, step + x->offset, RFI_POISON, (size_t)x->bytes));
    }
  }
  return RFR_OK;
}
