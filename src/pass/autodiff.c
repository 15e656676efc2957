/* SPDX-License-Identifier: Apache-2.0
 *
 * Autodiff: replaces every `gradient(loss, w)` by the ops that compute it.
 *
 * Two linear sweeps select the values of the backward: a value is *influenced* if an input whose gradient is
 * requested reaches it, and *needed* if it reaches the loss. Only values that are both get a cotangent, and a
 * gradient rule computes the gradients of those operands only. A frozen weight is not requested: neither its
 * gradient nor the values that the forward would save for it exist. A second differentiation with all frozen inputs
 * requested shows the difference (frozen.c).
 *
 * The loss is a sum over microbatches. The backward of a microbatch follows its forward directly, so that its
 * activations die before the next microbatch starts, and weight gradients add up in ascending microbatch order. This
 * needs the cotangent of each microbatch's loss in advance: it is a constant, found by walking the additions and
 * constant factors up to the total first. A loss that couples microbatches in any other way is refused.
 */
#include <string.h>

#include "pass/frozen.h"

enum { ALL = -2 }; /* all microbatches, and the ops that run once per step */

typedef struct autodiff {
  rfi_rewrite r;
  bool everything;                    /* also differentiate with respect to frozen inputs, where gradient rules exist */
  bool *influenced, *needed, *weight; /* per value of the old trace */
  rfr_value *cotangent;               /* per old value, a value of the new trace */
  rfr_dtype *sum;                     /* per old value: the type in which a weight's gradients are summed */
  double *seed;                       /* per old value: constant cotangent of a loss root */
  bool *linear;                       /* per op: an op of the sum that forms the loss */
  rfr_value loss;                     /* RFR_NONE: no gradient is requested; then every output counts as a loss */
} autodiff;

static bool is_float(const rfr_trace *t, rfr_value v) { return rfr_dtype_is_float(t->values[v].type.dtype); }

static rfr_status fail_op(rfi_error error, const rfi_opr *op, const char *what, const char *name) {
  return rfi_fail_at(error, op->at.file ? op->at.file : "", op->at.line, "%s%s\"%s\"%s%s", what, what[0] ? " " : "",
                     name, op->scope[0] ? ", in " : "", op->scope);
}

/* ---- requested gradients ---- */

/* A gradient requested in 16 bits is summed in 16 bits, which halves its memory. */
static rfr_dtype sum_of(rfr_dtype requested) {
  return requested == RFR_BF16 || requested == RFR_F16 ? requested : RFR_F32;
}

static rfr_status find_requested(autodiff *a, const rfr_trace *t) {
  bool any = false, narrow = true; /* every gradient is requested in 16 bits */
  for (int v = 0; v < t->n_values; v++) a->sum[v] = RFR_F32;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->code != RFI_OP_gradient) continue;
    const rfi_value *w = &t->values[op->in[1]], *loss = &t->values[op->in[0]];
    if (w->op >= 0 || (w->role != RFR_ROLE_TRAINABLE && w->role != RFR_ROLE_INPUT_GRAD))
      return fail_op(RFI_E_GRAD_ROLE, op, "only inputs with role trainable or input_grad have gradients; requested of",
                     w->name);
    if (a->loss >= 0 && a->loss != op->in[0])
      return fail_op(RFI_E_GRAD_COUPLED, op,
                     "a trace has one loss, add several before; a second loss is differentiated for", w->name);
    a->loss = op->in[0];
    if (loss->type.dtype != RFR_F32 || rfi_count(&loss->type) != 1)
      return fail_op(RFI_E_TRACE_SHAPE, op, "the loss must be one f32 element; gradient of", w->name);
    const rfr_dtype sum = sum_of((rfr_dtype)op->attr[0].i);
    a->sum[op->in[1]] = a->influenced[op->in[1]] && a->sum[op->in[1]] != sum ? RFR_F32 : sum;
    a->influenced[op->in[1]] = true;
    any = true, narrow = narrow && sum != RFR_F32;
  }
  for (int i = 0; i < t->n_inputs && a->everything; i++) {
    const rfr_value v = t->inputs[i];
    if (!rfi_is_frozen_float(t, v)) continue;
    a->influenced[v] = true;
    if (any && narrow) a->sum[v] = sum_of(t->values[v].type.dtype);
  }
  return RFR_OK;
}

/* Whether an op takes part in the backward. */
static bool counts(const autodiff *a, const rfi_opr *op) {
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] >= 0 && a->needed[op->out[j]] && a->influenced[op->out[j]]) return true;
  return false;
}

/* Float operands that no rule differentiates. A weight that reaches the loss only through them counts as unreached. */
static bool is_given(const rfi_opr *op, int k) { return k < op->def->n_operands && op->def->given[k]; }

static rfr_status sweep(autodiff *a, const rfr_trace *t) {
  for (int v = 0; v < t->n_values; v++)
    a->weight[v] = t->values[v].op < 0 &&
                   (t->values[v].role == RFR_ROLE_TRAINABLE || (a->everything && t->values[v].role == RFR_ROLE_FROZEN));
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    bool any = false;
    for (int k = 0; k < op->n_in; k++) any = any || (op->in[k] >= 0 && a->influenced[op->in[k]]);
    if (op->def->flags & RFI_STOP) any = false;
    if (a->everything && !op->def->grad) any = false;
    for (int j = 0; j < op->n_out; j++) {
      if (op->out[j] < 0) continue;
      a->influenced[op->out[j]] = any && is_float(t, op->out[j]);
      a->weight[op->out[j]] =
          op->n_in > 0 && op->in[0] >= 0 && a->weight[op->in[0]] && (op->def->flags & (RFI_VIEW | RFI_FORM));
    }
  }
  if (a->loss >= 0) a->seed[a->loss] = 1;
  for (int i = 0; i < t->n_outputs && a->loss < 0; i++) a->seed[t->outputs[i].value] = 1;
  for (int v = 0; v < t->n_values; v++) a->needed[v] = a->seed[v] != 0;
  for (int i = t->n_ops - 1; i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    if (!counts(a, op)) continue;
    if (!op->def->grad)
      return fail_op(RFI_E_GRAD_NO_RULE, op, "an op on the gradient path has no gradient rule:", op->def->name);
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= 0 && !is_given(op, k)) a->needed[op->in[k]] = true;
  }
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->code == RFI_OP_gradient && !a->needed[op->in[1]])
      return fail_op(RFI_E_GRAD_UNREACHED, op, "no gradient path leads to the loss from", t->values[op->in[1]].name);
  }
  return RFR_OK;
}

/* Finds the terms of the sum that forms the loss; a value with a seed is a root. A term with another reader has no
 * constant cotangent, so its op is differentiated like any other. */
static void find_roots(autodiff *a, const rfr_trace *t, bool *elsewhere) {
  for (int i = t->n_ops - 1; i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    bool add = op->def->code == RFI_OP_add;
    bool scale = op->def->code == RFI_OP_scale && op->in[1] < 0;
    double seed = op->n_out == 1 && op->out[0] >= 0 ? a->seed[op->out[0]] : 0;
    if ((!add && !scale) || seed == 0 || elsewhere[op->out[0]]) {
      for (int k = 0; k < op->n_in && counts(a, op); k++)
        if (op->in[k] >= 0) elsewhere[op->in[k]] = true;
      continue;
    }
    a->linear[i] = true;
    a->seed[op->out[0]] = 0;
    a->seed[op->in[0]] += scale ? seed * op->attr[0].f : seed;
    if (add) a->seed[op->in[1]] += seed;
  }
}

/* ---- the backward of one op ---- */

/* The state into which a cotangent is accumulated; NULL: none. */
static const rfi_value *state_of(const rfr_trace *t, rfr_value cotangent) {
  if (cotangent < 0) return NULL;
  const rfi_value *owner = &t->values[t->values[cotangent].base];
  return owner->op < 0 && owner->role == RFR_ROLE_STATE ? owner : NULL;
}

/* Adds a contribution to the cotangent of old value v. */
static rfr_status contribute(autodiff *a, rfr_value v, rfr_value dx, rfr_source at) {
  rfr_trace *t = a->r.to;
  rfr_value have = a->cotangent[v];
  if (dx == RFR_NONE) return rfr_trace_status(t);
  if (have == RFR_NONE) {
    a->cotangent[v] = dx;
    return RFR_OK;
  }
  if (t->values[dx].type.dtype != t->values[have].type.dtype) dx = rfr_cast_at(t, at, dx, t->values[have].type.dtype);
  a->cotangent[v] = state_of(t, have) ? rfi_record(t, at, RFI_OP_accumulate, 2, (rfr_value[]){dx, have}, NULL, NULL)
                                      : rfr_add_at(t, at, have, dx);
  return rfr_trace_status(t);
}

/* Dynamically sized: a grouped GEMM with separate weights has one operand per weight. */
typedef struct operands {
  rfr_value *in, *dx;
  bool *need, *weight;
  rfr_dtype *sum;
} operands;

static rfr_status backward_into(autodiff *a, int i, const operands *o) {
  const rfr_trace *from = a->r.from;
  rfr_trace *t = a->r.to;
  const rfi_opr *op = &from->ops[i];
  rfr_value out[RFI_MAX_NAMES], dy[RFI_MAX_NAMES];
  bool any_need = false;
  for (int j = 0; j < op->n_out; j++) {
    out[j] = op->out[j] < 0 ? RFR_NONE : a->r.map[op->out[j]];
    dy[j] = op->out[j] < 0 ? RFR_NONE : a->cotangent[op->out[j]];
  }
  for (int k = 0; k < op->n_in; k++) {
    o->in[k] = op->in[k] < 0 ? RFR_NONE : a->r.map[op->in[k]];
    o->dx[k] = RFR_NONE;
    o->weight[k] = op->in[k] >= 0 && a->weight[op->in[k]];
    o->sum[k] = op->in[k] < 0 ? RFR_F32 : a->sum[op->in[k]];
    o->need[k] = op->in[k] >= 0 && a->influenced[op->in[k]] && a->needed[op->in[k]] && is_float(from, op->in[k]);
    any_need = any_need || o->need[k];
  }
  if (!any_need) return RFR_OK;
  rfi_opr mapped = *op;
  mapped.in = o->in;
  mapped.out = out;
  rfr_scope(t, op->scope);
  rfr_microbatch(t, op->microbatch);
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  rfi_grad g = {.t = t,
                .op = &mapped,
                .need = o->need,
                .dy = dy,
                .dx = o->dx,
                .is_weight = o->weight,
                .sum = o->sum,
                .at = op->at};
  t->inherits = true, t->inherited = op->label;
  const rfr_status recorded = op->def->grad(&g);
  t->inherits = false;
  RFI_TRY(recorded);
  RFI_TRY(rfr_trace_status(t));
  for (int k = 0; k < op->n_in; k++) {
    if (!o->need[k]) continue;
    rfr_set_phase(t, o->weight[k] ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD);
    RFI_TRY(contribute(a, op->in[k], o->dx[k], op->at));
  }
  return RFR_OK;
}

static rfr_status backward_op(autodiff *a, int i) {
  enum { FEW = 32 };
  const rfi_opr *op = &a->r.from->ops[i];
  rfr_value values[2 * FEW], *more = values;
  rfr_dtype types[FEW], *more_types = types;
  bool flags[2 * FEW], *more_flags = flags, any_dy = false;
  rfr_status s;
  if (a->linear[i] || !op->def->grad) return RFR_OK;
  for (int j = 0; j < op->n_out; j++) any_dy = any_dy || (op->out[j] >= 0 && a->cotangent[op->out[j]] >= 0);
  if (!any_dy) return RFR_OK;
  const size_t n = (size_t)op->n_in;
  if (n > FEW) {
    RFI_TRY(RFI_ALLOC(a->r.from->ctx, 2 * n * sizeof *more, &more));
    RFI_GOTO(RFI_ALLOC(a->r.from->ctx, 2 * n * sizeof *more_flags, &more_flags));
    RFI_GOTO(RFI_ALLOC(a->r.from->ctx, n * sizeof *more_types, &more_types));
  }
  s = backward_into(a, i, &(operands){more, more + n, more_flags, more_flags + n, more_types});
fail:
  if (more_types != types) rfi_free(a->r.from->ctx, more_types);
  if (more != values) rfi_free(a->r.from->ctx, more);
  if (more_flags != flags) rfi_free(a->r.from->ctx, more_flags);
  return s;
}

/* Sets the constant cotangents of the roots of a microbatch. */
static rfr_status seed_roots(autodiff *a, int microbatch) {
  const rfr_trace *from = a->r.from;
  rfr_trace *t = a->r.to;
  for (rfr_value v = 0; v < from->n_values; v++) {
    if (a->seed[v] == 0 || !a->influenced[v]) continue;
    const rfi_value *x = &from->values[v];
    const rfi_opr *op = x->op < 0 ? NULL : &from->ops[x->op]; /* NULL: the term is an input */
    int of = op ? op->microbatch : -1;
    if (microbatch != ALL && of != microbatch) continue;
    rfr_scope(t, op ? op->scope : "");
    rfr_microbatch(t, of);
    rfr_set_phase(t, a->weight[v] ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD);
    rfr_source at = op ? op->at : x->at;
    RFI_TRY(contribute(a, v, rfr_fill_at(t, at, a->seed[v], x->type.dtype, x->type.rank, x->type.shape), at));
  }
  return RFR_OK;
}

static rfr_status backward_of(autodiff *a, int microbatch, int end) {
  RFI_TRY(seed_roots(a, microbatch));
  for (int i = end - 1; i >= 0; i--)
    if (microbatch == ALL || a->r.from->ops[i].microbatch == microbatch) RFI_TRY(backward_op(a, i));
  return RFR_OK;
}

static rfr_status finish_gradient(autodiff *a, const rfi_opr *op) {
  rfr_trace *t = a->r.to;
  const rfi_value *w = &a->r.from->values[op->in[1]];
  rfr_value g = a->cotangent[op->in[1]];
  rfr_dtype to = (rfr_dtype)op->attr[0].i;
  rfr_scope(t, op->scope);
  rfr_microbatch(t, -1);
  rfr_set_phase(t, RFR_PHASE_WGRAD);
  /* on the gradient path, but every rule returned zero */
  if (g == RFR_NONE) g = rfr_fill_at(t, op->at, 0, to, w->type.rank, w->type.shape);
  else if (t->values[g].type.dtype != to) g = rfr_cast_at(t, op->at, g, to);
  if (g >= 0 && t->values[g].op >= 0) {
    char *name = rfi_arena_printf(t->arena, "d_%s", w->name);
    if (!name) return RFR_NO_MEMORY;
    t->values[g].name = name;
  }
  a->r.map[op->out[0]] = g;
  return rfr_trace_status(t);
}

/* A gradient that is accumulated into a state starts its sum with that state. */
static rfr_status begin_accumulating(autodiff *a, const rfr_trace *t) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->code != RFI_OP_gradient || op->n_in < 3 || op->in[2] < 0) continue;
    const rfi_value *onto = &t->values[op->in[2]];
    if (onto->op >= 0 || onto->role != RFR_ROLE_STATE)
      return fail_op(RFI_E_GRAD_ROLE, op, "the destination must be an input with role state; gradient of",
                     t->values[op->in[1]].name);
    a->cotangent[op->in[1]] = a->r.map[op->in[2]];
    a->sum[op->in[1]] = onto->type.dtype;
  }
  return RFR_OK;
}

/* ---- the backward of a trace ---- */

/* Refuses a loss that is not a sum over microbatches. Ops on the gradient path must be recorded in ascending
 * microbatch order, after those of no microbatch, and must not read a value of another microbatch, whose backward has
 * already run. */
static rfr_status check_segments(const autodiff *a, const rfr_trace *t) {
  int current = -1;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (a->linear[i] || !counts(a, op)) continue;
    if (op->microbatch < current)
      return fail_op(
          RFI_E_GRAD_COUPLED, op,
          "microbatches on the gradient path must be recorded in ascending order; out of order:", op->def->name);
    current = op->microbatch;
    for (int k = 0; k < op->n_in; k++) {
      rfr_value v = op->in[k];
      if (v < 0 || !a->needed[v] || !a->influenced[v] || t->values[v].op < 0) continue;
      int of = t->ops[t->values[v].op].microbatch;
      if (of >= 0 && of != current)
        return fail_op(RFI_E_GRAD_COUPLED, op,
                       "an op on the gradient path reads a value of another microbatch:", op->def->name);
    }
  }
  return RFR_OK;
}

static rfr_status walk(autodiff *a, const rfr_trace *t) {
  int first_gradient = t->n_ops, microbatches = 0, least = RFI_MAX_MICROBATCH;
  for (int i = t->n_ops - 1; i >= 0; i--) {
    if (t->ops[i].def->code == RFI_OP_gradient) first_gradient = i;
    if (t->ops[i].microbatch >= microbatches) microbatches = t->ops[i].microbatch + 1;
    if (t->ops[i].microbatch >= 0 && t->ops[i].microbatch < least) least = t->ops[i].microbatch;
  }
  bool segments = microbatches > least + 1 && /* the microbatches of a rank do not begin with 0 */
                  first_gradient < t->n_ops;
  if (segments) RFI_TRY(check_segments(a, t));
  int *last; /* last op of each microbatch before the first gradient */
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *last * (size_t)(microbatches + 1), &last));
  for (int i = 0; i < first_gradient; i++)
    if (t->ops[i].microbatch >= 0) last[t->ops[i].microbatch] = i;
  rfr_status s = RFR_OK;
  for (int i = 0; i < t->n_ops && s == RFR_OK; i++) {
    const rfi_opr *op = &t->ops[i];
    if (i == first_gradient) s = backward_of(a, segments ? -1 : ALL, first_gradient);
    if (s != RFR_OK) break;
    s = op->def->code == RFI_OP_gradient ? finish_gradient(a, op) : rfi_rewrite_op(&a->r, i, NULL);
    if (s == RFR_OK && segments && i < first_gradient && op->microbatch >= 0 && last[op->microbatch] == i)
      s = backward_of(a, op->microbatch, i + 1);
  }
  rfi_free(t->ctx, last);
  return s == RFR_OK && a->loss < 0 && a->everything ? backward_of(a, ALL, t->n_ops) : s;
}

/* Everything except the end of the new trace. */
static rfr_status differentiate(autodiff *a, const rfr_trace *in) {
  size_t n = (size_t)in->n_values + 1;
  a->loss = RFR_NONE;
  RFI_TRY(rfi_rewrite_begin(in, &a->r));
  RFI_TRY(RFI_ALLOC(in->ctx, n, &a->influenced));
  RFI_TRY(RFI_ALLOC(in->ctx, n, &a->needed));
  RFI_TRY(RFI_ALLOC(in->ctx, n, &a->weight));
  RFI_TRY(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &a->linear));
  RFI_TRY(RFI_ALLOC(in->ctx, n * sizeof *a->seed, &a->seed));
  RFI_TRY(RFI_ALLOC(in->ctx, n * sizeof *a->cotangent, &a->cotangent));
  RFI_TRY(RFI_ALLOC(in->ctx, n * sizeof *a->sum, &a->sum));
  for (int v = 0; v < in->n_values; v++) a->cotangent[v] = RFR_NONE;
  RFI_TRY(find_requested(a, in));
  if (a->loss >= 0 || a->everything) RFI_TRY(sweep(a, in));
  if (a->loss >= 0) {
    bool *elsewhere;
    RFI_TRY(RFI_ALLOC(in->ctx, n, &elsewhere));
    find_roots(a, in, elsewhere);
    rfi_free(in->ctx, elsewhere);
    RFI_TRY(begin_accumulating(a, in));
  }
  return walk(a, in);
}

static void deinit(autodiff *a, rfr_ctx *ctx) {
  if (a->r.map) rfi_rewrite_abort(&a->r);
  rfi_free(ctx, a->influenced);
  rfi_free(ctx, a->needed);
  rfi_free(ctx, a->weight);
  rfi_free(ctx, a->linear);
  rfi_free(ctx, a->seed);
  rfi_free(ctx, a->cotangent);
  rfi_free(ctx, a->sum);
}

/* Differentiates a second time as if every frozen input were trained, for the fusions that depend on it and for the
 * report. If a rule fails, no fusion that changes results is allowed. If the trace `trains`, it is a part of a program
 * with gradients, also if it has none itself. */
static rfr_status compare_trained(const autodiff *a, const rfr_trace *in, bool trains, rfi_report *report) {
  autodiff full = {.everything = true};
  bool any = false;
  for (int i = 0; i < in->n_inputs; i++) any = any || rfi_is_frozen_float(in, in->inputs[i]);
  if (a->loss < 0) RFI_TRY(rfi_report_line(report, "no gradient is requested: no backward"));
  if (!any || (a->loss < 0 && !trains)) return RFR_OK;
  rfr_status s = differentiate(&full, in);
  if (s == RFR_OK) {
    s = rfi_mark_reads(&a->r, &full.r, full.cotangent);
    if (s == RFR_OK) s = rfi_report_pruned(&a->r, &full.r, full.cotangent, full.sum, report);
  } else if (s != RFR_NO_MEMORY) {
    for (rfr_value v = 0; v < a->r.to->n_values; v++) a->r.to->values[v].if_trained = RFI_READ_MORE | RFI_READ_LATER;
    s = rfi_report_line(report, "pruned: unknown amount: %s", rfr_last_error()->message);
  }
  deinit(&full, in->ctx);
  return s;
}

rfr_status rfi_pass_autodiff(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  autodiff a = {.everything = false};
  *out = NULL;
  rfr_status s = differentiate(&a, in);
  if (s == RFR_OK) s = compare_trained(&a, in, o->trains, report);
  if (s == RFR_OK) s = rfi_rewrite_end(&a.r, out);
  deinit(&a, in->ctx);
  return s;
}
