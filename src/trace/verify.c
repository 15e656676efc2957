/* SPDX-License-Identifier: Apache-2.0
 *
 * The invariants of a trace, checked after recording, after parsing and after each pass: types equal those of the shape
 * rules, operands precede their readers, no op reads an overwritten version of a storage, tokens form chains.
 */
#include <string.h>

#include "base/base.h"
#include "trace/trace.h"

#define MOST_BYTES ((int64_t)1 << 56)

static rfr_status check_types(const rfr_trace *t, const rfi_opr *op, int i) {
  rfr_type in[64], *types = in, out[RFI_MAX_NAMES];
  if (op->n_in > 64) RFI_TRY(RFI_ALLOC(t->ctx, sizeof *types * (size_t)op->n_in, &types));
  memset(out, 0, sizeof out);
  for (int k = 0; k < op->n_in; k++) types[k] = op->in[k] < 0 ? (rfr_type){.rank = -1} : t->values[op->in[k]].type;
  rfi_infer c = {op->def, op->n_in, types, op->attr, out};
  rfr_status s = op->def->infer(&c);
  if (types != in) rfi_free(t->ctx, types);
  RFI_TRY(s);
  for (int j = 0; j < op->n_out; j++) {
    if (op->out[j] < 0) continue;
    const rfi_value *y = &t->values[op->out[j]];
    if (memcmp(&out[j], &y->type, sizeof out[j]) != 0)
      return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s): type of result %s differs from the inferred one", i,
                      op->def->name, op->def->result[j]);
    rfi_value want = *y;
    want.base = op->out[j];
    want.offset = 0;
    rfi_dense_strides(&want);
    if (op->def->flags & RFI_VIEW) {
      want.base = t->values[op->in[0]].base;
      if (!rfi_view(op->def, &t->values[op->in[0]], op->attr, &want))
        return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s): no strides express this view", i, op->def->name);
    } else if (op->def->alias[j] >= 0 && op->in[op->def->alias[j]] >= 0) {
      const rfi_value *x = &t->values[op->in[op->def->alias[j]]];
      want.base = x->base;
      want.offset = x->offset;
      memcpy(want.stride, x->stride, sizeof want.stride);
    }
    if (want.base != y->base || want.offset != y->offset ||
        memcmp(want.stride, y->stride, sizeof *want.stride * (size_t)y->type.rank) != 0)
      return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s): storage of result %s differs from the inferred one", i,
                      op->def->name, op->def->result[j]);
  }
  return RFR_OK;
}

/* version[v]: the version of the storage that value v shows; latest[b]: the newest version of base b. */
static rfr_status check_versions(const rfr_trace *t, int *version, int *latest) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    for (int k = 0; k < op->n_in; k++) {
      rfr_value v = op->in[k];
      if (v < 0) continue;
      if (version[v] != latest[t->values[v].base])
        return rfi_fail_at(RFI_E_TRACE_STALE, op->at.file ? op->at.file : "", op->at.line,
                           "%s reads version %d of \"%s\", which version %d has overwritten", op->def->name, version[v],
                           t->values[t->values[v].base].name, latest[t->values[v].base]);
    }
    for (int j = 0; j < op->n_out; j++) {
      rfr_value v = op->out[j];
      if (v < 0) continue;
      rfr_value base = t->values[v].base;
      if (op->def->flags & RFI_VIEW) version[v] = version[op->in[0]];
      else if (base != v) version[v] = ++latest[base];
    }
  }
  for (int i = 0; i < t->n_outputs; i++) {
    rfr_value v = t->outputs[i].value;
    if (version[v] != latest[t->values[v].base])
      return rfi_fail(RFI_E_TRACE_STALE,
                      "output \"%s\" is a version that a later op has overwritten: output the newest version",
                      t->outputs[i].name);
  }
  return RFR_OK;
}

/* An update must write a full trainable or state input. Through a strided view it would write into a copy; values of
 * phase load, computed once from frozen weights, would become stale. */
static rfr_status check_updates(const rfr_trace *t, const rfi_opr *op) {
  if (!(op->def->flags & RFI_STATE)) return RFR_OK;
  for (int j = 0; j < op->n_out; j++) {
    int k = op->def->alias[j];
    if (k < 0 || k >= op->n_in || op->in[k] < 0) continue;
    const rfi_value *x = &t->values[op->in[k]], *owner = &t->values[x->base];
    bool full = memcmp(&x->type, &owner->type, sizeof x->type) == 0 && x->offset == 0 &&
                memcmp(x->stride, owner->stride, sizeof *x->stride * (size_t)x->type.rank) == 0;
    if (!full || owner->op >= 0 || owner->role == RFR_ROLE_FROZEN || owner->role == RFR_ROLE_CONST)
      return rfi_fail_at(RFI_E_TRACE_STATE, op->at.file ? op->at.file : "", op->at.line, "%s updates \"%s\", %s",
                         op->def->name, owner->name,
                         owner->op >= 0 ? "which is not an input"
                         : full         ? "which is frozen"
                                        : "through a view");
    for (int i = 0; i < k; i++)
      if (op->in[i] >= 0 && t->values[op->in[i]].base == x->base)
        return rfi_fail_at(RFI_E_TRACE_STATE, op->at.file ? op->at.file : "", op->at.line,
                           "%s updates \"%s\", which is also its operand %s", op->def->name, owner->name,
                           op->def->operand[i]);
  }
  return RFR_OK;
}

/* Ops of phase load run once, before all others: they may read only frozen inputs and constants, and no op with a
 * kernel may precede them. */
static rfr_status check_load(const rfr_trace *t, const rfi_opr *op, bool *others) {
  if (op->phase != RFR_PHASE_LOAD) {
    *others = *others || !(op->def->flags & RFI_VIEW);
    return RFR_OK;
  }
  bool fixed = !*others || (op->def->flags & RFI_VIEW);
  for (int k = 0; k < op->n_in && fixed; k++) {
    if (op->in[k] < 0) continue;
    const rfi_value *x = &t->values[t->values[op->in[k]].base];
    fixed = x->op < 0 ? x->role == RFR_ROLE_FROZEN || x->role == RFR_ROLE_CONST : t->ops[x->op].phase == RFR_PHASE_LOAD;
  }
  if (fixed) return RFR_OK;
  return rfi_fail_at(RFI_E_TRACE_STATE, op->at.file ? op->at.file : "", op->at.line,
                     "%s of phase load follows an op of another phase, or reads a value that changes", op->def->name);
}

/* Limits the bytes of all values: far below 63 bits, so that no partial sum overflows. */
static rfr_status check_bytes(const rfr_trace *t) {
  int64_t total = 0;
  for (rfr_value v = 0; v < t->n_values; v++) {
    if (t->values[v].base != v) continue;
    int64_t bytes = rfi_bytes(&t->values[v].type);
    if (bytes > MOST_BYTES || (total += bytes) > MOST_BYTES)
      return rfi_fail_at(RFI_E_OVERFLOW, t->values[v].at.file ? t->values[v].at.file : "", t->values[v].at.line,
                         "the values of the trace have more than 2^56 bytes");
  }
  return RFR_OK;
}

rfr_status rfr_trace_verify(const rfr_trace *t) {
  bool others = false;
  RFI_TRY(rfi_check_handle(t, "rfr_trace"));
  RFI_TRY(check_bytes(t));
  int32_t last[RFI_CHAINS] = {-1, -1};
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (!op->def->infer) return rfi_fail(RFI_E_UNSUPPORTED, "this build has no op %s", op->def->name);
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= t->n_values || (op->in[k] >= 0 && t->values[op->in[k]].op >= i))
        return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s) reads a later value", i, op->def->name);
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0 && (t->values[op->out[j]].op != i || t->values[op->out[j]].result != j))
        return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s): a result does not name its producer", i, op->def->name);
    RFI_TRY(check_types(t, op, i));
    RFI_TRY(check_updates(t, op));
    RFI_TRY(check_load(t, op, &others));
    const int chain = rfi_chain(op->def);
    if (op->token_in != (chain < 0 ? -1 : last[chain]))
      return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s) breaks the token chain", i, op->def->name);
    if (chain >= 0) last[chain] = i;
    if (op->label.recipe && (!rfi_takes_recipe(op->def) || op->label.linear < 0 ||
                             (op->label.recipe > t->n_recipes && op->label.recipe != RFI_RECIPE_KEEP)))
      return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s): bad recipe label", i, op->def->name);
    if (op->phase > RFR_PHASE_OPTIM || op->policy > RFR_POLICY_RECOMPUTE || op->clone_of >= i)
      return rfi_fail(RFI_E_TRACE_VERIFY, "op %d (%s): bad phase, policy or clone_of", i, op->def->name);
  }
  for (int i = 0; i < t->n_inputs; i++)
    if (t->values[t->inputs[i]].op >= 0 || t->values[t->inputs[i]].role == RFR_ROLE_NONE)
      return rfi_fail(RFI_E_TRACE_VERIFY, "input %d has a producer or no role", i);
  int *version;
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *version * 2 * (size_t)t->n_values, &version));
  rfr_status s = check_versions(t, version, version + t->n_values);
  rfi_free(t->ctx, version);
  return s;
}
