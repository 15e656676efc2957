/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers of shape rules and gradient rules. A failed check names the operand, its type and the expected type; the
 * caller adds the source line and the op.
 */
#include "ops/rule.h"

#include <stdio.h>
#include <string.h>

#include "core/rng.h"

/* ---- shape rules ---- */

const char *rfi_type_text(char buf[RFI_TYPE_TEXT], const rfr_type *t) {
  int n = snprintf(buf, RFI_TYPE_TEXT, "%s[", rfr_dtype_name(t->dtype));
  for (int d = 0; d < t->rank; d++)
    n += snprintf(buf + n, (size_t)(RFI_TYPE_TEXT - n), d ? ",%lld" : "%lld", (long long)t->shape[d]);
  snprintf(buf + n, (size_t)(RFI_TYPE_TEXT - n), "]");
  return buf;
}

static const char *operand(const rfi_infer *c, int i) {
  return c->def->operand[i < c->def->n_operands ? i : c->def->n_operands - 1];
}

rfr_status rfi_rule_float(const rfi_infer *c, int i) {
  rfr_dtype dtype = c->in[i].dtype;
  if (rfr_dtype_is_float(dtype) && rfr_dtype_bits(dtype) >= 16) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s, not f32, bf16 or f16", operand(c, i), rfr_dtype_name(dtype));
}

rfr_status rfi_rule_dtype(const rfi_infer *c, int i, rfr_dtype dtype) {
  if (c->in[i].dtype == dtype) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s, not %s", operand(c, i), rfr_dtype_name(c->in[i].dtype),
                  rfr_dtype_name(dtype));
}

rfr_status rfi_rule_rank(const rfi_infer *c, int i, int least, int most) {
  if (c->in[i].rank >= least && c->in[i].rank <= most) return RFR_OK;
  char text[RFI_TYPE_TEXT];
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s; its rank must be %d to %d", operand(c, i),
                  rfi_type_text(text, &c->in[i]), least, most);
}

rfr_status rfi_rule_vector(const rfi_infer *c, int i, int64_t n) {
  if (c->in[i].rank == 1 && c->in[i].shape[0] == n) return RFR_OK;
  char text[RFI_TYPE_TEXT];
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s; its shape must be [%lld]", operand(c, i),
                  rfi_type_text(text, &c->in[i]), (long long)n);
}

static bool same_shape(const rfr_type *a, const rfr_type *b) {
  if (a->rank != b->rank) return false;
  for (int d = 0; d < a->rank; d++)
    if (a->shape[d] != b->shape[d]) return false;
  return true;
}

rfr_status rfi_rule_same(const rfi_infer *c, int i, int j, bool dtype) {
  const rfr_type *a = &c->in[i], *b = &c->in[j];
  if (same_shape(a, b) && (!dtype || a->dtype == b->dtype)) return RFR_OK;
  char ta[RFI_TYPE_TEXT], tb[RFI_TYPE_TEXT];
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s, but %s is %s", operand(c, i), rfi_type_text(ta, a), operand(c, j),
                  rfi_type_text(tb, b));
}

rfr_status rfi_rule_type(const rfi_infer *c, int i, const rfr_type *want) {
  if (same_shape(&c->in[i], want) && c->in[i].dtype == want->dtype) return RFR_OK;
  char ta[RFI_TYPE_TEXT], tb[RFI_TYPE_TEXT];
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s; it must be %s", operand(c, i), rfi_type_text(ta, &c->in[i]),
                  rfi_type_text(tb, want));
}

rfr_status rfi_rule_axis(const rfi_infer *c, int i, int64_t axis) {
  if (axis >= 0 && axis < c->in[i].rank) return RFR_OK;
  char text[RFI_TYPE_TEXT];
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s and has no axis %lld", operand(c, i), rfi_type_text(text, &c->in[i]),
                  (long long)axis);
}

/* ---- gradient rules ---- */

void rfi_emit_begin(rfi_grad *g, int i) { rfr_set_phase(g->t, g->is_weight[i] ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD); }

rfr_value rfi_emit_cast(rfi_grad *g, rfr_value v, rfr_dtype to) {
  if (v == RFR_NONE || rfr_value_type(g->t, v).dtype == to) return v;
  rfi_attr attr = rfi_i(to);
  return rfi_emit(g, RFI_OP_cast, 1, &v, &attr);
}

rfr_dtype rfi_emit_dtype(const rfi_grad *g, int i) {
  if (!g->is_weight[i]) return rfr_value_type(g->t, g->op->in[i]).dtype;
  return g->sum ? g->sum[i] : RFR_F32;
}

void rfi_emit_end(rfi_grad *g, int i, rfr_value v) {
  g->dx[i] = rfi_emit_cast(g, v, rfi_emit_dtype(g, i));
  rfr_set_phase(g->t, RFR_PHASE_DGRAD);
}

int64_t rfi_stream_number(const rfr_trace *t, rfr_value state, int stream) {
  const size_t n = strlen(RFI_STREAM_PREFIX);
  const char *name = state < 0 || state >= t->n_values ? "" : t->values[state].name;
  return strncmp(name, RFI_STREAM_PREFIX, n) == 0 ? (int64_t)(rfi_stream_id(name + n) + (uint64_t)stream) : stream;
}
