/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of slices (fuse). A grouped wgrad computes the gradients of separate expert weights as one packed result. A part
 * is one element of its first dimension: a slice and a reshape that have no other reader.
 *
 * If every part of one result is added to the same part of another, as over microbatches, the packed results are added
 * instead, and each sum is a part of that sum. Exact. The one add left can become an in-place GEMM (accumulate).
 *
 * If each part is accumulated into a separate value, as into the main gradients of separate weights, the wgrad is split
 * into one op per group. Each can accumulate in place, and the gradients of all groups never exist at once. Exact.
 */
#include <string.h>

#include "pass/pass.h"

typedef struct part {
  rfr_value full; /* the packed value; RFR_NONE: not a part */
  int64_t at;
  bool summed; /* v is a part of a sum that has replaced `full` */
} part;

typedef struct parts {
  const rfi_uses *uses;
  part *sum;       /* per add: the part that it adds, of the later one of the two packed values */
  part *onto;      /* per packed value: the value to whose parts its parts are added */
  int64_t *count;  /* per packed value: number of its parts that are added */
  rfr_value *made; /* per packed value: the sum, in the new trace */
} parts;

static bool read_once(const parts *p, rfr_value v) { return p->uses[v].count == 1 && !p->uses[v].output; }

/* Finds the packed value of which v is a part, through views. */
static part seen(const rfr_trace *t, const parts *p, rfr_value v) {
  const part none = {.full = RFR_NONE};
  const int view = t->values[v].op;
  if (view < 0 || t->ops[view].def->code != RFI_OP_reshape || !read_once(p, v)) return none;
  const rfr_value one = t->ops[view].in[0];
  const int slice = t->values[one].op;
  if (slice < 0 || t->ops[slice].def->code != RFI_OP_slice || !read_once(p, one)) return none;
  const rfi_opr *op = &t->ops[slice];
  return op->attr[0].i == 0 && op->attr[2].i == 1 ? (part){op->in[0], op->attr[1].i, false} : none;
}

static part part_of(const rfr_trace *t, const parts *p, rfr_value v) {
  const int op = t->values[v].op;
  return op >= 0 && p->sum[op].full >= 0 ? p->sum[op] : seen(t, p, v);
}

/* Whether v is the result of an op that could accumulate into another value. */
static bool could_accumulate(const rfr_trace *t, rfr_value v) {
  const rfi_opr *op = t->values[v].op < 0 ? NULL : &t->ops[t->values[v].op];
  const int acc = op ? op->def->alias[t->values[v].result] : -1;
  return acc >= 0 && (acc >= op->n_in || op->in[acc] < 0) && t->values[v].base == v;
}

static void match(const rfr_trace *t, parts *p, int i) {
  const rfi_opr *op = &t->ops[i];
  for (int k = 0; k < 2 && op->def->code == RFI_OP_add && p->sum[i].full < 0; k++) {
    const part have = part_of(t, p, op->in[k]), more = seen(t, p, op->in[1 - k]);
    if (have.full < 0 || more.full < 0 || have.at != more.at || t->values[have.full].op >= t->values[more.full].op)
      continue;
    part *onto = &p->onto[more.full];
    if (onto->full >= 0 ? onto->full != have.full || onto->summed != have.summed : !could_accumulate(t, more.full))
      continue;
    if (memcmp(&t->values[have.full].type, &t->values[more.full].type, sizeof(rfr_type)) != 0) continue;
    *onto = have;
    p->count[more.full]++;
    p->sum[i] = (part){more.full, more.at, true};
  }
}

/* Whether all parts of v are added to parts of one other value. */
static bool is_full(const rfr_trace *t, const parts *p, rfr_value v) {
  for (; p->onto[v].full >= 0; v = p->onto[v].full) {
    const int64_t n = t->values[v].type.shape[0];
    if (p->count[v] != n || p->uses[v].count != n) return false;
    if (!p->onto[v].summed) return true;
  }
  return false;
}

static void skip_views(const rfr_trace *t, const parts *p, rfr_value v, bool *skip, bool on) {
  if (seen(t, p, v).full < 0) return;
  skip[t->values[v].op] = on;
  skip[t->values[t->ops[t->values[v].op].in[0]].op] = on;
}

/* Replaces the add at op i by a part of the packed sum; for the first part, also records the packed sum. */
static rfr_status emit(rfi_rewrite *r, parts *p, int i, rfi_report *report) {
  const rfr_trace *t = r->from;
  const rfi_opr *op = &t->ops[i];
  const part sum = p->sum[i], onto = p->onto[sum.full];
  const rfi_opr *view = &t->ops[t->values[op->in[seen(t, p, op->in[0]).full != sum.full]].op];
  const rfi_opr *slice = &t->ops[t->values[view->in[0]].op];
  rfi_opr next = *op;
  rfr_value v;
  if (p->made[sum.full] < 0) {
    rfr_value in[2] = {onto.summed ? p->made[onto.full] : r->map[onto.full], r->map[sum.full]};
    next.in = in;
    RFI_TRY(rfi_rewrite_new(r, &next, NULL, &p->made[sum.full]));
    RFI_TRY(rfi_report_line(report, "fused: %lld slices of op %d %s%s%s added as one; exact",
                            (long long)p->count[sum.full], t->values[sum.full].op,
                            t->ops[t->values[sum.full].op].def->name, op->scope[0] ? " in " : "", op->scope));
  }
  /* the packed sum is itself added as a whole */
  if (read_once(p, op->out[0]) && p->sum[p->uses[op->out[0]].last].full >= 0) return RFR_OK;
  v = p->made[sum.full];
  const rfi_opr *const views[2] = {slice, view};
  for (int k = 0; k < 2; k++) {
    rfr_value in = v;
    next = *op;
    next.def = views[k]->def, next.attr = views[k]->attr;
    next.n_in = 1, next.in = &in;
    RFI_TRY(rfi_rewrite_new(r, &next, NULL, &v));
  }
  r->map[op->out[0]] = v;
  const char *name = t->values[op->out[0]].name;
  if (name[0]) rfr_value_set_name(r->to, v, name);
  return rfr_trace_status(r->to);
}

rfr_status rfi_fuse_parts(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  rfr_status s;
  rfi_rewrite r = {.from = in};
  rfi_uses *uses = NULL;
  parts p = {NULL};
  bool *skip = NULL;
  (void)o;
  *out = NULL;
  RFI_GOTO(rfi_count_uses(in, &uses));
  p.uses = uses;
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *p.sum * (size_t)(in->n_ops + 1), &p.sum));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *p.onto * (size_t)(in->n_values + 1), &p.onto));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *p.count * (size_t)(in->n_values + 1), &p.count));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *p.made * (size_t)(in->n_values + 1), &p.made));
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &skip));
  for (int i = 0; i < in->n_ops; i++) p.sum[i].full = RFR_NONE;
  for (int v = 0; v < in->n_values; v++) p.onto[v].full = p.made[v] = RFR_NONE;
  for (int i = 0; i < in->n_ops; i++) match(in, &p, i);
  for (int i = 0; i < in->n_ops; i++) {
    if (p.sum[i].full >= 0 && !is_full(in, &p, p.sum[i].full)) p.sum[i].full = RFR_NONE;
    for (int k = 0; k < 2 && p.sum[i].full >= 0; k++) skip_views(in, &p, in->ops[i].in[k], skip, true);
  }
  RFI_GOTO(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    if (p.sum[i].full >= 0) RFI_GOTO(emit(&r, &p, i, report));
    else if (!skip[i]) RFI_GOTO(rfi_rewrite_op(&r, i, NULL));
  }
  s = rfi_rewrite_end(&r, out);
  goto done;
fail:
  if (r.map) rfi_rewrite_abort(&r);
done:
  rfi_free(in->ctx, uses);
  rfi_free(in->ctx, p.sum);
  rfi_free(in->ctx, p.onto);
  rfi_free(in->ctx, p.count);
  rfi_free(in->ctx, p.made);
  rfi_free(in->ctx, skip);
  return s;
}

/* ---- parts accumulated into separate values ---- */

enum { OFFSETS = 2, ACC };

/* The grouped wgrad of which op i accumulates part number *at; -1: none. */
static int own_part(const rfi_rewriter *w, int i, int64_t *at) {
  const rfr_trace *t = w->to.from;
  const parts p = {.uses = w->uses};
  if (t->ops[i].def->code != RFI_OP_accumulate) return -1;
  const part x = seen(t, &p, t->ops[i].in[0]);
  if (x.full < 0 || t->values[x.full].op < 0) return -1;
  *at = x.at;
  const rfi_opr *op = &t->ops[t->values[x.full].op];
  return op->def->code == RFI_OP_grouped_wgrad && (op->n_in <= ACC || op->in[ACC] < 0) ? t->values[x.full].op : -1;
}

/* Skips grouped wgrads whose parts are all accumulated into separate values, and the views of the parts. */
static void mark_own(rfi_rewriter *w) {
  const rfr_trace *t = w->to.from;
  const parts p = {.uses = w->uses};
  int64_t at;
  for (int i = 0; i < t->n_ops; i++) {
    const int gemm = own_part(w, i, &at);
    if (gemm < 0) continue;
    w->skip[gemm] = !w->uses[t->ops[gemm].out[0]].output;
    skip_views(t, &p, t->ops[i].in[0], w->skip, true);
  }
  for (int i = 0; i < t->n_ops; i++) /* it has another reader */
    for (int k = 0; k < t->ops[i].n_in && !w->skip[i]; k++)
      if (t->ops[i].in[k] >= 0 && t->values[t->ops[i].in[k]].op >= 0 &&
          t->ops[t->values[t->ops[i].in[k]].op].def->code == RFI_OP_grouped_wgrad)
        w->skip[t->values[t->ops[i].in[k]].op] = false;
  for (int i = 0; i < t->n_ops; i++) {
    const int gemm = own_part(w, i, &at);
    if (gemm >= 0 && !w->skip[gemm]) skip_views(t, &p, t->ops[i].in[0], w->skip, false);
  }
}

static rfr_status emit_view(rfi_rewriter *w, const rfi_opr *like, rfi_opcode code, rfr_value in, const rfi_attr *attr,
                            rfr_value *out) {
  rfi_opr view = *like;
  view.def = rfi_op_def_get(code);
  view.n_in = 1, view.in = &in, view.attr = attr, view.reason = "";
  return rfi_rewrite_new(&w->to, &view, NULL, out);
}

static rfr_status visit_own(rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  int64_t at;
  const int gemm = own_part(w, i, &at);
  if (gemm < 0 || !w->skip[gemm]) return rfi_rewrite_op(&w->to, i, NULL);
  const rfi_opr *op = &t->ops[i], *wgrad = &t->ops[gemm];
  const rfr_type *type = &t->values[op->out[0]].type;
  const rfi_attr slice[3] = {rfi_i(0), rfi_i(at), rfi_i(2)};
  rfi_attr one = rfi_i(0), flat = rfi_i(0);
  one.s = (rfi_shape){.rank = 3, .dim = {1, type->shape[0], type->shape[1]}};
  flat.s = (rfi_shape){.rank = 2, .dim = {type->shape[0], type->shape[1]}};
  rfr_value in[OFFSETS + 1], made, sum[2];
  for (int k = 0; k < OFFSETS; k++) in[k] = w->to.map[wgrad->in[k]];
  RFI_TRY(emit_view(w, op, RFI_OP_slice, w->to.map[wgrad->in[OFFSETS]], slice, &in[OFFSETS]));
  RFI_TRY(emit_view(w, op, RFI_OP_reshape, w->to.map[op->in[1]], &one, &sum[1]));
  rfi_opr own = *op;
  own.def = wgrad->def, own.attr = wgrad->attr, own.n_in = OFFSETS + 1, own.in = in;
  RFI_TRY(rfi_rewrite_new(&w->to, &own, NULL, &sum[0]));
  own = *op, own.in = sum;
  RFI_TRY(rfi_rewrite_new(&w->to, &own, NULL, &made));
  RFI_TRY(emit_view(w, op, RFI_OP_reshape, made, &flat, &w->to.map[op->out[0]]));
  if (t->values[op->out[0]].name[0]) rfr_value_set_name(w->to.to, w->to.map[op->out[0]], t->values[op->out[0]].name);
  if (at > 0) return rfr_trace_status(w->to.to);
  return rfi_report_line(w->report, "fused: op %d %s%s%s split by group, in place: -%lld bytes; exact", gemm,
                         wgrad->def->name, wgrad->scope[0] ? " in " : "", wgrad->scope,
                         (long long)rfi_bytes(&t->values[wgrad->out[0]].type));
}

rfr_status rfi_fuse_own_parts(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, o, report, mark_own, visit_own, out);
}
