/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers of the shape rules and gradient rules of all families: checks whose message has both sides of a mismatch, and
 * recording for a gradient rule.
 */
#ifndef RFI_RULE_H
#define RFI_RULE_H

#include "base/base.h"
#include "trace/trace.h"

/* ---- shape rules ---- */

enum { RFI_TYPE_TEXT = 160 };
/* Writes "bf16[7,13]" into buf; returns buf. */
const char *rfi_type_text(char buf[RFI_TYPE_TEXT], const rfr_type *t);

static inline bool rfi_present(const rfi_infer *c, int i) { return i < c->n_in && c->in[i].rank >= 0; }
/* Operand i is a float of at least 16 bits. */
rfr_status rfi_rule_float(const rfi_infer *c, int i);
rfr_status rfi_rule_dtype(const rfi_infer *c, int i, rfr_dtype dtype);
rfr_status rfi_rule_rank(const rfi_infer *c, int i, int least, int most);
/* Operand i has rank 1 and n elements. */
rfr_status rfi_rule_vector(const rfi_infer *c, int i, int64_t n);
/* Operands i and j have the same shape; the same type too when `dtype`. */
rfr_status rfi_rule_same(const rfi_infer *c, int i, int j, bool dtype);
/* Operand i has exactly this type. */
rfr_status rfi_rule_type(const rfi_infer *c, int i, const rfr_type *want);
/* Operand i has a dimension `axis`. */
rfr_status rfi_rule_axis(const rfi_infer *c, int i, int64_t axis);

/* ---- gradient rules ---- */

/* Begins recording the gradient of operand i: sets the phase to wgrad if it is a weight. */
void rfi_emit_begin(rfi_grad *g, int i);
/* Records a cast unless v already has the type. */
rfr_value rfi_emit_cast(rfi_grad *g, rfr_value v, rfr_dtype to);
/* The type that operand i's gradient must have. */
rfr_dtype rfi_emit_dtype(const rfi_grad *g, int i);
/* Sets operand i's gradient to v, cast if needed; ends the recording that rfi_emit_begin began. */
void rfi_emit_end(rfi_grad *g, int i, rfr_value v);

static inline rfr_value rfi_emit(rfi_grad *g, rfi_opcode code, int n_in, const rfr_value *in, const rfi_attr *attr) {
  return rfi_record(g->t, g->at, code, n_in, in, attr, NULL);
}

/* ---- random numbers ---- */

/* The number of a stream of the random state `state`; for a named state it depends on the name. */
int64_t rfi_stream_number(const rfr_trace *t, rfr_value state, int stream);

#endif
