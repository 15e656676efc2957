/* SPDX-License-Identifier: Apache-2.0
 *
 * How a pass writes its new trace: inputs first, then ops copied or replaced one by one, with a map from old values
 * to new ones. rfi_append infers all types and storage again.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "pass/pass.h"

rfr_status rfi_report_line(rfi_report *r, const char *format, ...) {
  char line[512];
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(line, sizeof line, format, args);
  va_end(args);
  r->decisions++;
  return rfi_string_printf(&r->text, "%s\n", line);
}

/* Consecutive ops usually share the file name. */
rfr_status rfi_rewrite_source(rfi_rewrite *r, rfr_source *at) {
  if (!at->file) return RFR_OK;
  if (!r->file || strcmp(r->file, at->file) != 0)
    if (!(r->file = rfi_arena_strdup(r->to->arena, at->file))) return RFR_NO_MEMORY;
  at->file = r->file;
  return RFR_OK;
}

rfr_status rfi_rewrite_input(rfi_rewrite *r, int i) {
  const rfi_value *x = &r->from->values[r->from->inputs[i]];
  rfr_source at = x->at;
  RFI_TRY(rfi_rewrite_source(r, &at));
  r->map[r->from->inputs[i]] =
      rfr_input_at(r->to, at, x->name, (rfr_role)x->role, x->type.dtype, x->type.rank, x->type.shape);
  return rfr_trace_status(r->to);
}

rfr_status rfi_rewrite_open(const rfr_trace *from, rfi_rewrite *r) {
  rfr_status s;
  *r = (rfi_rewrite){.from = from};
  RFI_GOTO(rfr_trace_create(from->ctx, &r->to));
  /* the new trace usually has about as many values and ops as the old one */
  if (!rfi_arena_grow(r->to->arena, (void **)&r->to->values, &r->to->cap_values, from->n_values,
                      sizeof *from->values) ||
      !rfi_arena_grow(r->to->arena, (void **)&r->to->ops, &r->to->cap_ops, from->n_ops, sizeof *from->ops)) {
    s = RFR_NO_MEMORY;
    goto fail;
  }
  RFI_GOTO(RFI_ALLOC(from->ctx, sizeof *r->map * (size_t)(from->n_values + 1), &r->map));
  for (int v = 0; v < from->n_values; v++) r->map[v] = RFR_NONE;
  RFI_GOTO(RFI_ALLOC(from->ctx, sizeof *r->op_map * (size_t)(from->n_ops + 1), &r->op_map));
  for (int i = 0; i < from->n_ops; i++) r->op_map[i] = -1;
  r->to->next_site = from->next_site;
  for (int i = 0; i < from->n_recipes; i++) {
    uint8_t same;
    RFI_GOTO(rfi_recipe_intern(r->to, &from->recipes[i], &same));
  }
  return RFR_OK;
fail:
  rfi_rewrite_abort(r);
  return s;
}

rfr_status rfi_rewrite_begin(const rfr_trace *from, rfi_rewrite *r) {
  rfr_status s;
  RFI_TRY(rfi_rewrite_open(from, r));
  for (int i = 0; i < from->n_inputs; i++) RFI_GOTO(rfi_rewrite_input(r, i));
  return RFR_OK;
fail:
  rfi_rewrite_abort(r);
  return s;
}

void rfi_rewrite_abort(rfi_rewrite *r) {
  rfr_trace_destroy(r->to);
  rfi_free(r->from->ctx, r->map);
  rfi_free(r->from->ctx, r->op_map);
  r->to = NULL;
  r->map = NULL;
  r->op_map = NULL;
}

/* Strings belong to the old trace; in a parsed trace, source locations do too. */
static rfr_status own_strings(rfi_rewrite *r, rfi_opr *op) {
  rfr_trace *t = r->to;
  RFI_TRY(rfi_rewrite_source(r, &op->at));
  if (strcmp(op->scope, t->scope) == 0) op->scope = t->scope;
  else if (!(op->scope = rfi_arena_strdup(t->arena, op->scope))) return RFR_NO_MEMORY;
  else t->scope = op->scope;
  if (op->reason[0] && !(op->reason = rfi_arena_strdup(t->arena, op->reason))) return RFR_NO_MEMORY;
  return RFR_OK;
}

rfr_status rfi_rewrite_new(rfi_rewrite *r, const rfi_opr *proto, const bool *dead, rfr_value *out) {
  rfi_opr op = *proto;
  RFI_TRY(own_strings(r, &op));
  return rfi_append(r->to, &op, dead, out);
}

void rfi_replace_value(rfi_rewrite *r, rfr_value old, rfr_value v) {
  const char *name = r->from->values[old].name;
  r->map[old] = v;
  if (name[0]) rfr_value_set_name(r->to, v, name);
}

rfr_status rfi_rewrite_as(rfi_rewrite *r, int i, const rfi_opr *proto, const bool *dead) {
  const rfi_opr *old = &r->from->ops[i];
  rfi_opr op = *proto;
  rfr_value out[RFI_MAX_NAMES];
  if (op.clone_of >= 0) op.clone_of = r->op_map[op.clone_of];
  RFI_TRY(rfi_rewrite_new(r, &op, dead, out));
  r->op_map[i] = r->to->n_ops - 1;
  for (int j = 0; j < old->n_out; j++) {
    if (old->out[j] < 0 || j >= op.def->n_results || out[j] < 0) continue;
    rfi_replace_value(r, old->out[j], out[j]);
  }
  return rfr_trace_status(r->to);
}

rfr_status rfi_rewrite_op(rfi_rewrite *r, int i, const bool *dead) {
  const rfi_opr *old = &r->from->ops[i];
  rfi_opr op = *old;
  bool gone[RFI_MAX_NAMES];
  rfr_value stack[32], *in = stack;
  if (old->n_in > 32) RFI_TRY(RFI_ALLOC(r->from->ctx, sizeof *in * (size_t)old->n_in, &in));
  for (int k = 0; k < old->n_in; k++) in[k] = old->in[k] < 0 ? RFR_NONE : r->map[old->in[k]];
  op.in = in;
  for (int j = 0; j < old->n_out; j++) gone[j] = old->out[j] < 0 || (dead && dead[j]);
  rfr_status s = rfi_rewrite_as(r, i, &op, gone);
  if (in != stack) rfi_free(r->from->ctx, in);
  return s;
}

rfr_status rfi_rewrite_end(rfi_rewrite *r, rfr_trace **out) {
  rfr_status s;
  for (rfr_value v = 0; v < r->from->n_values; v++)
    if (r->from->values[v].if_trained && r->map[v] >= 0)
      r->to->values[r->to->values[r->map[v]].base].if_trained |= r->from->values[v].if_trained;
  for (int i = 0; i < r->from->n_outputs; i++)
    rfr_output_at(r->to, (rfr_source){NULL, 0}, r->from->outputs[i].name, r->map[r->from->outputs[i].value]);
  RFI_GOTO(rfr_trace_finish(r->to));
  *out = r->to;
  r->to = NULL;
  rfi_rewrite_abort(r);
  return RFR_OK;
fail:
  rfi_rewrite_abort(r);
  return s;
}

rfr_status rfi_copy_trace(const rfr_trace *in, rfr_trace **out) {
  rfi_rewrite r;
  RFI_TRY(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    rfr_status s = rfi_rewrite_op(&r, i, NULL);
    if (s != RFR_OK) {
      rfi_rewrite_abort(&r);
      return s;
    }
  }
  return rfi_rewrite_end(&r, out);
}

bool rfi_same_layer(const rfi_opr *a, const rfi_opr *b) {
  const size_t n = strcspn(a->scope, ".");
  return strcspn(b->scope, ".") == n && memcmp(a->scope, b->scope, n) == 0;
}

rfr_status rfi_count_uses(const rfr_trace *t, rfi_uses **out) {
  rfi_uses *uses;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *uses * (size_t)(t->n_values + 1), &uses));
  for (int v = 0; v < t->n_values; v++) uses[v].last = -1;
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in; k++)
      if (t->ops[i].in[k] >= 0) {
        uses[t->ops[i].in[k]].count++;
        uses[t->ops[i].in[k]].last = i;
      }
  for (int i = 0; i < t->n_outputs; i++) {
    uses[t->outputs[i].value].count++;
    uses[t->outputs[i].value].output = 1;
  }
  *out = uses;
  return RFR_OK;
}

void rfi_reach(const rfr_trace *t, bool along_gradients, bool *reached) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    bool any = false;
    for (int k = 0; k < op->n_in; k++) any = any || (op->in[k] >= 0 && reached[op->in[k]]);
    if (along_gradients && op->def->flags & RFI_STOP) any = false;
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0)
        reached[op->out[j]] = any && (!along_gradients || rfr_dtype_is_float(t->values[op->out[j]].type.dtype));
  }
}

bool rfi_run_together(const rfi_opr *a, const rfi_opr *b) {
  return a->phase == b->phase && a->microbatch == b->microbatch && (a->clone_of < 0) == (b->clone_of < 0);
}

bool rfi_is_unread(const rfi_rewriter *w, rfr_value v) { return v < 0 || w->uses[v].count == 0; }

rfr_status rfi_rewrite_walk(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report,
                            void (*mark)(rfi_rewriter *w), rfr_status (*visit)(rfi_rewriter *w, int i),
                            rfr_trace **out) {
  rfr_status s;
  rfi_uses *uses = NULL;
  rfi_rewriter w = {.to = {.from = in}, .report = report, .o = o};
  *out = NULL;
  RFI_GOTO(rfi_count_uses(in, &uses));
  w.uses = uses;
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &w.skip));
  if (mark) mark(&w);
  RFI_GOTO(rfi_rewrite_begin(in, &w.to));
  for (int i = 0; i < in->n_ops; i++)
    if (!w.skip[i]) RFI_GOTO(visit(&w, i));
  s = rfi_rewrite_end(&w.to, out);
  goto done;
fail:
  if (w.to.map) rfi_rewrite_abort(&w.to);
done:
  rfi_free(in->ctx, uses);
  rfi_free(in->ctx, w.skip);
  return s;
}
