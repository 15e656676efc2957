/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuses the GEMM of a frozen weight with the narrow GEMM of its adapter into one lora_matmul with one accumulator:
 *   forward   y = x WT + u BT, u = c x AT
 *   dgrad     dx = dy W + du A, du = c dy B
 * u must come from x: other sums of GEMMs are not fused, and their results stay bitwise equal. (sum + du A) + dy W
 * becomes sum + lora_matmul, which fuse_accumulate adds in place.
 *
 * A GEMM in FP8 cannot share its accumulator. There the narrow GEMM comes first and writes the result, and those in FP8
 * accumulate into it in their epilogues: (s1 + s2) + u A becomes (u A + s1) + s2, with s1 and s2 moved after u A. In
 * the other order the narrow GEMM would read and write the sum, which takes twice its time.
 *
 * Recompute can drop the result of this op. It cannot drop that of a GEMM into which another GEMM accumulates. A
 * backend without a kernel for lora_matmul gets the two GEMMs back after recompute (rfi_split_lora, in lower).
 */
#include "ops/op_index.h"
#include "pass/pass.h"

enum { MOST_INNER = 256 }; /* with a longer reduction the two GEMMs stay separate */

typedef struct fusion {
  rfr_value wide, narrow; /* results of the two GEMMs; RFR_NONE: the op is not fused */
  rfr_value rest;         /* the other terms of the sum; RFR_NONE: none */
} fusion;

static bool is_together(const rfi_opr *a, const rfi_opr *b) {
  return a->phase == b->phase && a->microbatch == b->microbatch;
}

/* The op that computes v, if it has this code and v has no reader besides op `reader`; otherwise NULL. */
static const rfi_opr *maker_of(const rfr_trace *t, const rfi_uses *uses, rfr_value v, const rfi_opr *reader,
                               rfi_opcode code) {
  const rfi_value *x = &t->values[v];
  if (x->op < 0 || x->base != v || uses[v].count != 1 || uses[v].output || (x->if_trained & RFI_READ_MORE)) return NULL;
  const rfi_opr *op = &t->ops[x->op];
  return op->def->code == code && is_together(op, reader) ? op : NULL;
}

static int64_t inner(const rfr_trace *t, const rfi_opr *op) { return t->values[op->in[0]].type.shape[1]; }

/* A GEMM of matrices that reads its first operand as it is stored and adds nothing but a bias. */
static bool is_plain(const rfr_trace *t, const rfi_opr *op) {
  return t->values[op->in[0]].type.rank == 2 && !op->attr[0].i && (op->n_in < 4 || op->in[3] < 0);
}

/* Whether u is c (x m) for a matrix m, with or without dropout of x, so that x w + u b is x (w + c m b). Also true if u
 * is a slice of columns of such a value, or a concatenation that contains one. */
static bool is_low_rank_of(const rfr_trace *t, rfr_value u, rfr_value x) {
  const rfi_opr *op = t->values[u].op < 0 ? NULL : &t->ops[t->values[u].op];
  if (op && op->def->code == RFI_OP_slice) return is_low_rank_of(t, op->in[0], x);
  for (int k = 0; op && op->def->code == RFI_OP_concat && k < op->n_in; k++)
    if (is_low_rank_of(t, op->in[k], x)) return true;
  if (op && op->def->code == RFI_OP_scale) op = t->values[op->in[0]].op < 0 ? NULL : &t->ops[t->values[op->in[0]].op];
  if (!op || op->def->code != RFI_OP_matmul) return false;
  const rfr_value from = op->in[0];
  const rfi_opr *dropout = t->values[from].op < 0 ? NULL : &t->ops[t->values[from].op];
  return from == x || (dropout && dropout->def->code == RFI_OP_dropout && dropout->in[0] == x);
}

/* Whether the results of two GEMMs that `reader` adds can share an accumulator; sets *f. */
static bool pair(const rfr_trace *t, const rfi_uses *uses, rfr_value a, rfr_value b, const rfi_opr *reader, fusion *f) {
  const rfi_opr *p = maker_of(t, uses, a, reader, RFI_OP_matmul), *q = maker_of(t, uses, b, reader, RFI_OP_matmul);
  if (!p || !q || !is_plain(t, p) || !is_plain(t, q) || p->attr[1].i != q->attr[1].i || p->attr[2].i != q->attr[2].i)
    return false;
  const bool swapped = inner(t, p) < inner(t, q);
  const rfi_opr *narrow = swapped ? p : q, *wide = swapped ? q : p;
  if (inner(t, narrow) > MOST_INNER || inner(t, narrow) >= inner(t, wide)) return false;
  if (narrow->n_in > 2 && narrow->in[2] >= 0) return false;
  if (!is_low_rank_of(t, narrow->in[0], wide->in[0])) return false;
  for (int k = 0; k < 2; k++) /* kernels multiply operands of one type */
    if (t->values[narrow->in[k]].type.dtype != t->values[wide->in[0]].type.dtype ||
        t->values[wide->in[1]].type.dtype != t->values[wide->in[0]].type.dtype)
      return false;
  *f = (fusion){swapped ? b : a, swapped ? a : b, RFR_NONE};
  return true;
}

static void find(const rfr_trace *t, const rfi_uses *uses, fusion *f, bool *gone) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *add = &t->ops[i];
    f[i] = (fusion){RFR_NONE, RFR_NONE, RFR_NONE};
    if (add->def->code != RFI_OP_add) continue;
    bool found = pair(t, uses, add->in[0], add->in[1], add, &f[i]);
    for (int k = 0; k < 2 && !found; k++) { /* (rest + p) + q */
      const rfi_opr *sum = maker_of(t, uses, add->in[k], add, RFI_OP_add);
      const int at = sum ? t->values[add->in[k]].op : -1;
      if (!sum || f[at].wide >= 0) continue;
      for (int j = 0; j < 2 && !found; j++) {
        /* the inner sum reads p, the outer sum reads q */
        found =
            maker_of(t, uses, sum->in[j], add, RFI_OP_matmul) && pair(t, uses, sum->in[j], add->in[1 - k], add, &f[i]);
        if (found) f[i].rest = sum->in[1 - j];
      }
      if (found) gone[at] = true;
    }
    if (!found) continue;
    gone[t->values[f[i].wide].op] = gone[t->values[f[i].narrow].op] = true;
  }
}

static rfr_status emit(rfi_rewrite *r, int i, const fusion *f, rfi_report *report) {
  const rfr_trace *t = r->from;
  const rfi_opr *add = &t->ops[i], *wide = &t->ops[t->values[f->wide].op], *narrow = &t->ops[t->values[f->narrow].op];
  const bool biased = wide->n_in > 2 && wide->in[2] >= 0;
  rfr_value in[5] = {r->map[wide->in[0]], r->map[wide->in[1]], r->map[narrow->in[0]], r->map[narrow->in[1]],
                     biased ? r->map[wide->in[2]] : RFR_NONE};
  const rfi_attr attr[2] = {wide->attr[1], wide->attr[2]};
  rfi_opr op = *wide;
  op.def = rfi_op_def_get(RFI_OP_lora_matmul);
  op.n_in = 5, op.in = in, op.attr = attr;
  op.reason = "fused: both GEMMs in one accumulator";
  RFI_TRY(rfi_report_line(report,
                          "fused: op %d %s%s%s and a GEMM over %lld in one accumulator: -%lld bytes; changes bits", i,
                          wide->def->name, wide->scope[0] ? " in " : "", wide->scope, (long long)inner(t, narrow),
                          (long long)rfi_bytes(&t->values[f->narrow].type)));
  if (f->rest < 0) return rfi_rewrite_as(r, i, &op, NULL);
  rfr_value sum[2] = {r->map[f->rest], RFR_NONE};
  rfi_opr outer = *add;
  RFI_TRY(rfi_rewrite_new(r, &op, NULL, &sum[1]));
  outer.in = sum;
  return rfi_rewrite_as(r, i, &outer, NULL);
}

rfr_status rfi_fuse_lora(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  (void)o;
  rfr_status s;
  rfi_rewrite r = {.from = in};
  rfi_uses *uses = NULL;
  fusion *f = NULL;
  bool *gone = NULL;
  *out = NULL;
  RFI_GOTO(rfi_count_uses(in, &uses));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *f * (size_t)(in->n_ops + 1), &f));
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &gone));
  find(in, uses, f, gone);
  RFI_GOTO(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    if (gone[i]) continue;
    if (f[i].wide < 0) RFI_GOTO(rfi_rewrite_op(&r, i, NULL));
    else RFI_GOTO(emit(&r, i, &f[i], report));
  }
  s = rfi_rewrite_end(&r, out);
  goto done;
fail:
  if (r.map) rfi_rewrite_abort(&r);
done:
  rfi_free(in->ctx, uses);
  rfi_free(in->ctx, f);
  rfi_free(in->ctx, gone);
  return s;
}

/* ---- FP8 ---- */

enum { MOST_TERMS = 12 };

/* the GEMMs of a sum, as op indices in the order of the sum */
typedef struct sum {
  int narrow[MOST_TERMS], scaled[MOST_TERMS], inner[MOST_TERMS]; /* inner: its add ops except the last */
  int n_narrow, n_scaled, n_inner;
} sum;

static bool note(int *ops, int *n, int op) {
  if (*n == MOST_TERMS) return false;
  ops[(*n)++] = op;
  return true;
}

/* Collects the terms of v, whose only reader is op `reader`; false if a term is neither a scaled nor a narrow GEMM. */
static bool find_terms(const rfr_trace *t, const rfi_uses *uses, rfr_value v, const rfi_opr *reader, sum *s) {
  const int at = t->values[v].op, acc = RFI_IN_matmul_scaled_acc;
  const rfi_opr *op = maker_of(t, uses, v, reader, RFI_OP_matmul_scaled);
  if (op) return !(acc < op->n_in && op->in[acc] >= 0) && note(s->scaled, &s->n_scaled, at);
  op = maker_of(t, uses, v, reader, RFI_OP_matmul);
  if (op)
    return is_plain(t, op) && inner(t, op) <= MOST_INNER && (op->n_in < 3 || op->in[2] < 0) &&
           note(s->narrow, &s->n_narrow, at);
  op = maker_of(t, uses, v, reader, RFI_OP_add);
  return op && note(s->inner, &s->n_inner, at) && find_terms(t, uses, op->in[0], op, s) &&
         find_terms(t, uses, op->in[1], op, s);
}

/* Whether op i is a sum of scaled and narrow GEMMs in which a scaled one precedes a narrow one. */
static bool match_sum(const rfr_trace *t, const rfi_uses *uses, int i, sum *s) {
  const rfi_opr *add = &t->ops[i];
  *s = (sum){.n_narrow = 0};
  if (add->def->code != RFI_OP_add || !find_terms(t, uses, add->in[0], add, s) ||
      !find_terms(t, uses, add->in[1], add, s))
    return false;
  for (int j = 0; j < s->n_scaled; j++)
    for (int k = 0; k < s->n_narrow; k++)
      if (s->scaled[j] < s->narrow[k]) return true;
  return false;
}

static void mark_sums(rfi_rewriter *w) {
  sum s;
  for (int i = w->to.from->n_ops - 1; i >= 0; i--) {
    if (w->skip[i] || !match_sum(w->to.from, w->uses, i, &s)) continue;
    for (int j = 0; j < s.n_scaled; j++) w->skip[s.scaled[j]] = true;
    for (int j = 0; j < s.n_inner; j++) w->skip[s.inner[j]] = true;
  }
}

static rfr_status visit_sum(rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *add = &t->ops[i];
  sum s;
  if (!match_sum(t, w->uses, i, &s)) return rfi_rewrite_op(&w->to, i, NULL);
  rfr_value terms[2];
  rfi_opr op = *add;
  op.in = terms;
  op.reason = "fused: narrow GEMMs first";
  for (int j = 0; j < s.n_narrow + s.n_scaled; j++) {
    const int term = j < s.n_narrow ? s.narrow[j] : s.scaled[j - s.n_narrow];
    if (j >= s.n_narrow) RFI_TRY(rfi_rewrite_op(&w->to, term, NULL));
    terms[j > 0] = w->to.map[t->ops[term].out[0]];
    if (j > 0 && j + 1 < s.n_narrow + s.n_scaled) RFI_TRY(rfi_rewrite_new(&w->to, &op, NULL, &terms[0]));
  }
  RFI_TRY(rfi_rewrite_as(&w->to, i, &op, NULL));
  return rfi_report_line(w->report, "fused: op %d add%s%s, %d scaled GEMMs after %d narrow ones; changes bits", i,
                         add->scope[0] ? " in " : "", add->scope, s.n_scaled, s.n_narrow);
}

rfr_status rfi_fuse_scaled_sums(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, o, report, mark_sums, visit_sum, out);
}

/* ---- lower ---- */

/* y = x op(w) + bias + acc, then y += u op(b) in place. */
static rfr_status split(rfi_rewrite *r, int i) {
  const rfi_opr *op = &r->from->ops[i];
  rfr_value in[6], first[4], second[4] = {RFR_NONE, RFR_NONE, RFR_NONE, RFR_NONE};
  const rfi_attr attr[3] = {rfi_i(0), op->attr[0], op->attr[1]};
  for (int k = 0; k < 6; k++) in[k] = k < op->n_in && op->in[k] >= 0 ? r->map[op->in[k]] : RFR_NONE;
  first[0] = in[0], first[1] = in[1], first[2] = in[4], first[3] = in[5];
  second[0] = in[2], second[1] = in[3];
  rfi_opr gemm = *op;
  gemm.def = rfi_op_def_get(RFI_OP_matmul);
  gemm.n_in = 4, gemm.in = first, gemm.attr = attr;
  if (op->clone_of >= 0) gemm.clone_of = r->op_map[op->clone_of] - 1; /* of the two replacement ops, the first */
  RFI_TRY(rfi_rewrite_new(r, &gemm, NULL, &second[3]));
  gemm.in = second;
  gemm.clone_of = op->clone_of;
  return rfi_rewrite_as(r, i, &gemm, NULL);
}

rfr_status rfi_split_lora(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  rfi_rewrite r;
  int n = 0;
  *out = NULL;
  RFI_TRY(rfi_rewrite_begin(in, &r));
  rfr_status s = RFR_OK;
  for (int i = 0; i < in->n_ops && s == RFR_OK; i++) {
    const bool fused = in->ops[i].def->code == RFI_OP_lora_matmul;
    n += fused;
    s = fused ? split(&r, i) : rfi_rewrite_op(&r, i, NULL);
  }
  if (s == RFR_OK && n > 0) s = rfi_report_line(report, "split: %d lora_matmul into two GEMMs each", n);
  if (s == RFR_OK) return rfi_rewrite_end(&r, out);
  rfi_rewrite_abort(&r);
  return s;
}
