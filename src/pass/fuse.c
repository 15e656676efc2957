/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuse: these rewrites in this order, and those of adapters (fuse_lora.c).
 *
 *  loss head   logits = x wT (softcapped or not), cross_entropy(logits), its gradient (cast or not) and the two GEMMs
 *              of that gradient become one op that processes the rows in chunks, so that the full logits never exist.
 *              The op computes dx and dw in the same loop, because a joint trace has the cotangent of the loss in
 *              advance. Not exact: dw is summed chunk by chunk, and the gradient of f32 logits stays f32 or is rounded
 *              as the kernel needs it. The cotangent of token_loss is known only after the loss of all rows: its head
 *              becomes two ops, and the second one recomputes the logits.
 *  slices      the gradient of a packed tensor, a sum of pads that tile an axis, becomes one concat. Exact, except that
 *              a zero keeps its sign.
 *  packed      where one op computes all operands of such a concat (dq, dk and dv of attention, dgate and dup of
 *              SwiGLU), it writes them into the packed tensor. Exact.
 *  norms       the gradients of a norm and the add of the residual gradient become one op (fuse_norm.c). Exact.
 *  gelu        a dgrad and the gradient of GELU after it become one GEMM, where the backend has it (fuse_gelu.c).
 *              Not exact.
 *  parts       sums of all slices of two results become one sum; a grouped wgrad whose slices are accumulated into
 *              separate gradients is split by group (fuse_parts.c). Exact.
 *  accumulate  add(g, gemm) or accumulate(gemm, g) becomes a GEMM that accumulates into g in place: the weight
 *              gradient of a microbatch, or the second branch of a residual stream. Not exact: a 16-bit sum is rounded
 *              once instead of twice, an f32 sum has another order. Exact for a reduction in f32. Decided as if every
 *              frozen input were trained (rfi_mark_reads), so that freezing weights does not change results.
 */
#include <string.h>

#include "pass/pass.h"

/* ---- loss head ---- */

typedef struct head {
  int logits, softcap, loss, bwd, softcap_bwd, cast, dx, dw; /* op indices; -1: absent */
} head;

static bool reads(const rfi_opr *op, rfr_value v) {
  for (int n = 0; n < op->n_in; n++)
    if (op->in[n] == v) return true;
  return false;
}

static bool is_matmul(const rfi_opr *op, int ta, int tb) {
  return op->def->code == RFI_OP_matmul && op->attr[0].i == ta && op->attr[1].i == tb && op->in[2] < 0 && op->in[3] < 0;
}

static bool is_per_row(const rfi_opr *loss) { return loss->def->code == RFI_OP_token_loss; }

/* Finds the loss head of the cross-entropy or token_loss at op i; false if it cannot be fused. */
static bool match_head(const rfr_trace *t, const rfi_uses *uses, int i, head *h) {
  const rfi_opr *ce = &t->ops[i];
  if ((ce->def->code != RFI_OP_cross_entropy && !is_per_row(ce)) || ce->out[0] < 0) return false;
  const rfi_opcode backward = is_per_row(ce) ? RFI_OP_token_loss_bwd : RFI_OP_cross_entropy_bwd;
  rfr_value logits = ce->in[0]; /* logits: input of the loss; `made`: result of the GEMM */
  const int above = t->values[logits].op;
  const bool capped = above >= 0 && t->ops[above].def->code == RFI_OP_softcap;
  rfr_value made = capped ? t->ops[above].in[0] : logits;
  *h = (head){t->values[made].op, capped ? above : -1, i, -1, -1, -1, -1, -1};
  if (capped && (uses[made].count != 1 || uses[made].output)) return false;
  if (h->logits < 0 || uses[logits].output || !is_matmul(&t->ops[h->logits], 0, 1)) return false;
  const rfi_opr *gemm = &t->ops[h->logits];
  if (t->values[gemm->in[0]].type.rank != 2) return false;
  if (!capped && gemm->attr[2].i != RFR_F32 && gemm->attr[2].i != t->values[gemm->in[0]].type.dtype) return false;
  /* a strided x or w would need a copy, so such heads are not fused */
  if (!rfi_is_dense(&t->values[gemm->in[0]]) || !rfi_is_dense(&t->values[gemm->in[1]])) return false;
  for (int k = above + 1; k <= uses[logits].last; k++) {
    const rfi_opr *op = &t->ops[k];
    if (k == i || !reads(op, logits)) continue;
    if (op->def->code == backward && h->bwd < 0) h->bwd = k;
    else if (op->def->code == RFI_OP_softcap_bwd && capped && h->softcap_bwd < 0) h->softcap_bwd = k;
    else return false;
  }
  if (h->bwd < 0) return h->softcap_bwd < 0 && (ce->out[1] < 0 || uses[ce->out[1]].count == 0);
  const rfi_opr *bwd = &t->ops[h->bwd];
  if (ce->out[1] < 0 || uses[ce->out[1]].count != 1 || bwd->in[3] != ce->out[1]) return false;
  /* the cotangent of a summed loss must be a constant, because the fused op computes gradients in the forward */
  int seed = t->values[bwd->in[0]].op;
  if (!is_per_row(ce) && (seed < 0 || t->ops[seed].def->code != RFI_OP_fill)) return false;
  rfr_value d = bwd->out[0];
  if (capped) {
    if (h->softcap_bwd < 0 || t->ops[h->softcap_bwd].in[0] != d || uses[d].output || uses[d].count != 1) return false;
    d = t->ops[h->softcap_bwd].out[0];
  }
  if (uses[d].count == 1 && !uses[d].output && t->ops[uses[d].last].def->code == RFI_OP_cast) {
    h->cast = uses[d].last;
    d = t->ops[h->cast].out[0];
  }
  if (uses[d].output || uses[d].count > 2) return false;
  for (int k = t->values[d].op + 1; k <= uses[d].last; k++) {
    const rfi_opr *op = &t->ops[k];
    if (!reads(op, d)) continue;
    if (is_matmul(op, 0, 0) && op->in[0] == d && op->in[1] == gemm->in[1] && h->dx < 0) h->dx = k;
    else if (is_matmul(op, 1, 0) && op->in[0] == d && op->in[1] == gemm->in[0] && h->dw < 0) h->dw = k;
    else return false;
  }
  /* the fused op has fixed result types, so dw is cast afterwards if needed */
  if (h->dx >= 0 && t->values[t->ops[h->dx].out[0]].type.dtype != t->values[gemm->in[0]].type.dtype) return false;
  return true;
}

/* The fused op computes dw in f32. */
static rfr_status map_dw(rfi_rewrite *r, const rfi_opr *dw, rfr_value made) {
  const rfr_dtype to = r->from->values[dw->out[0]].type.dtype;
  const rfi_attr attr = rfi_i(to);
  rfi_opr cast = *dw;
  cast.def = rfi_op_def_get(RFI_OP_cast), cast.n_in = 1, cast.in = &made, cast.attr = &attr;
  r->map[dw->out[0]] = made;
  return to == RFR_F32 ? RFR_OK : rfi_rewrite_new(r, &cast, NULL, &r->map[dw->out[0]]);
}

/* Appends the head of a cross-entropy as one op; of token_loss, its forward, or with `dloss` its gradients. */
static rfr_status append_head(rfi_rewrite *r, const head *h, int64_t chunk, rfr_value dloss, rfr_phase phase) {
  const rfr_trace *t = r->from;
  const rfi_opr *ce = &t->ops[h->loss], *gemm = &t->ops[h->logits];
  const bool per_row = is_per_row(ce), grads = dloss != RFR_NONE;
  rfr_value out[RFI_MAX_NAMES], in[6];
  int n = 0;
  in[n++] = r->map[gemm->in[0]];
  in[n++] = r->map[gemm->in[1]];
  in[n++] = r->map[ce->in[1]];
  if (!per_row) in[n++] = r->map[ce->in[2]];
  in[n++] = dloss;
  in[n++] = RFR_NONE;
  const bool dead[3] = {per_row && grads, !grads || h->dx < 0, !grads || h->dw < 0};
  rfi_opr op = *ce;
  op.def = rfi_op_def_get(per_row ? RFI_OP_linear_token_loss : RFI_OP_linear_cross_entropy);
  op.n_in = n;
  op.in = in;
  op.phase = phase;
  const bool capped = h->softcap >= 0;
  rfi_attr attr[] = {ce->attr[0], rfi_i(chunk), capped ? t->ops[h->softcap].attr[0] : rfi_f(0),
                     capped ? rfi_i(RFR_F32) : gemm->attr[2]};
  op.attr = attr;
  op.reason = !per_row ? "fused: GEMM + cross-entropy + gradients, logits in chunks"
              : grads  ? "fused: GEMM + gradients of token_loss, logits in chunks"
                       : "fused: GEMM + token_loss, logits in chunks";
  RFI_TRY(rfi_append(r->to, &op, dead, out));
  if (!dead[0]) r->map[ce->out[0]] = out[0];
  if (!dead[1]) r->map[t->ops[h->dx].out[0]] = out[1];
  return dead[2] ? RFR_OK : map_dw(r, &t->ops[h->dw], out[2]);
}

static rfr_status emit_head(rfi_rewrite *r, const head *h, int64_t chunk, rfi_report *report) {
  const rfr_trace *t = r->from;
  const rfi_opr *ce = &t->ops[h->loss];
  rfr_value dloss = RFR_NONE;
  if (!is_per_row(ce) && (h->dx >= 0 || h->dw >= 0)) {
    rfr_value old = t->ops[h->bwd].in[0];
    if (r->map[old] == RFR_NONE) RFI_TRY(rfi_rewrite_op(r, t->values[old].op, NULL));
    dloss = r->map[old];
  }
  RFI_TRY(append_head(r, h, chunk, dloss, (rfr_phase)ce->phase));
  return rfi_report_line(
      report, "fused: loss head of op %d%s%s, %lld rows of%s logits at a time: -%lld bytes; changes bits", h->loss,
      ce->scope[0] ? " in " : "", ce->scope, (long long)chunk, h->softcap < 0 ? "" : " softcapped",
      (long long)rfi_bytes(&t->values[ce->in[0]].type) * (h->bwd >= 0 ? 2 : 1) * (h->softcap < 0 ? 1 : 2));
}

/* Rows of logits per chunk of a head. */
static int64_t rows_at_once(const rfi_rewriter *w, const head *h) {
  const rfr_trace *t = w->to.from;
  const rfr_type *x = &t->values[t->ops[h->logits].in[0]].type;
  return w->o->loss_rows ? w->o->loss_rows(x->shape[0], x->shape[1]) : w->o->loss_chunk;
}

/* Puts the fused op in the place of the loss. */
static void mark_heads(rfi_rewriter *w) {
  head h;
  for (int i = 0; i < w->to.from->n_ops; i++) {
    if (!match_head(w->to.from, w->uses, i, &h)) continue;
    w->skip[h.logits] = true;
    if (h.softcap >= 0) w->skip[h.softcap] = true;
  }
}

static rfr_status visit_head(rfi_rewriter *w, int i) {
  const rfi_opr *op = &w->to.from->ops[i];
  head h;
  const int forward = op->def->code == RFI_OP_token_loss_bwd ? w->to.from->values[op->in[3]].op : -1;
  if (forward >= 0 && match_head(w->to.from, w->uses, forward, &h) && h.bwd == i)
    return append_head(&w->to, &h, rows_at_once(w, &h), w->to.map[op->in[0]], (rfr_phase)op->phase);
  if (match_head(w->to.from, w->uses, i, &h)) {
    if (h.bwd >= 0 && !is_per_row(op)) w->skip[h.bwd] = true;
    if (h.softcap_bwd >= 0) w->skip[h.softcap_bwd] = true;
    if (h.cast >= 0) w->skip[h.cast] = true;
    if (h.dx >= 0) w->skip[h.dx] = true;
    if (h.dw >= 0) w->skip[h.dw] = true;
    return emit_head(&w->to, &h, rows_at_once(w, &h), w->report);
  }
  /* recorded already, before a fused head */
  if (op->def->code == RFI_OP_fill && w->to.map[op->out[0]] >= 0) return RFR_OK;
  return rfi_rewrite_op(&w->to, i, NULL);
}

/* ---- slices ---- */

/* A sum of pads that tile an axis. */
typedef struct tiles {
  int n, op[RFI_MAX_NAMES]; /* the pads */
  int64_t filled;           /* of the axis */
} tiles;

static bool overlap(const rfi_opr *a, const rfi_opr *b, const rfr_trace *t) {
  int64_t axis = a->attr[0].i, na = t->values[a->in[0]].type.shape[axis], nb = t->values[b->in[0]].type.shape[axis];
  return a->attr[1].i < b->attr[1].i + nb && b->attr[1].i < a->attr[1].i + na;
}

/* Adds the producer of v, a pad or a sum of pads, to the tiles; they are sorted by start. */
static bool find_tiles(const rfr_trace *t, const rfi_uses *uses, rfr_value v, int depth, tiles *s) {
  const rfi_opr *op = t->values[v].op < 0 ? NULL : &t->ops[t->values[v].op];
  if (!op || depth == RFI_MAX_NAMES || uses[v].count != 1 || uses[v].output) return false;
  if (op->def->code == RFI_OP_add)
    return find_tiles(t, uses, op->in[0], depth + 1, s) && find_tiles(t, uses, op->in[1], depth + 1, s);
  if (op->def->code != RFI_OP_pad || s->n == RFI_MAX_NAMES) return false;
  int at = s->n;
  for (int i = 0; i < s->n; i++) {
    const rfi_opr *other = &t->ops[s->op[i]];
    if (other->attr[0].i != op->attr[0].i || overlap(op, other, t)) return false;
    if (op->attr[1].i < other->attr[1].i && at == s->n) at = i;
  }
  memmove(s->op + at + 1, s->op + at, sizeof *s->op * (size_t)(s->n - at));
  s->op[at] = t->values[v].op;
  s->n++;
  s->filled += t->values[op->in[0]].type.shape[op->attr[0].i];
  return true;
}

static bool match_slices(const rfr_trace *t, const rfi_uses *uses, int i, tiles *s) {
  const rfi_opr *op = &t->ops[i];
  *s = (tiles){.n = 0};
  if (op->def->code != RFI_OP_add) return false;
  if (!find_tiles(t, uses, op->in[0], 0, s) || !find_tiles(t, uses, op->in[1], 0, s)) return false;
  return s->filled == t->values[op->out[0]].type.shape[t->ops[s->op[0]].attr[0].i];
}

/* Marks the operands of the sum at op i. */
static void skip_sum(const rfr_trace *t, int i, bool *skip) {
  for (int k = 0; k < 2 && t->ops[i].def->code == RFI_OP_add; k++) {
    int maker = t->values[t->ops[i].in[k]].op;
    skip[maker] = true;
    skip_sum(t, maker, skip);
  }
}

static void mark_slices(rfi_rewriter *w) {
  const rfr_trace *t = w->to.from;
  tiles found;
  for (int i = t->n_ops - 1; i >= 0; i--)
    if (!w->skip[i] && match_slices(t, w->uses, i, &found)) skip_sum(t, i, w->skip);
}

static rfr_status visit_slices(rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *op = &t->ops[i];
  tiles found;
  if (!match_slices(t, w->uses, i, &found)) return rfi_rewrite_op(&w->to, i, NULL);
  rfr_value operands[RFI_MAX_NAMES];
  rfi_opr fused = *op;
  for (int k = 0; k < found.n; k++) operands[k] = w->to.map[t->ops[found.op[k]].in[0]];
  fused.def = rfi_op_def_get(RFI_OP_concat);
  fused.n_in = found.n;
  fused.in = operands;
  fused.attr = t->ops[found.op[0]].attr; /* the axis, which is the first attribute of both ops */
  fused.reason = "fused: concat of slice gradients";
  RFI_TRY(rfi_rewrite_as(&w->to, i, &fused, NULL));
  return rfi_report_line(w->report,
                         "fused: op %d add%s%s, concat of %d slice gradients: -%lld bytes; exact except for the "
                         "sign of zeros",
                         i, op->scope[0] ? " in " : "", op->scope, found.n,
                         (long long)rfi_bytes(&t->values[op->out[0]].type) * (2 * found.n - 2));
}

static rfr_status fuse_slices(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, o, report, mark_slices, visit_slices, out);
}

/* ---- packed ---- */

static const struct {
  rfi_opcode plain, packed;
  int first, parts, rank; /* results first .. first + parts - 1 have this rank and are packed along dimension 1 */
  const char *reason;
} packs[] = {
    {RFI_OP_attention_bwd, RFI_OP_attention_bwd_packed, 0, 3, 3, "fused: dq, dk and dv packed"},
    {RFI_OP_swiglu_bwd, RFI_OP_swiglu_bwd_packed, 0, 2, 2, "fused: dgate and dup packed"},
    {RFI_OP_swiglu_weighted_bwd, RFI_OP_swiglu_weighted_bwd_packed, 1, 2, 2, "fused: dgate and dup packed"},
};

/* The concat along columns whose operand k is the k-th packed result of op i, directly or reshaped to a matrix. The
 * concat must be the only reader. -1: none. *view: the reshape, or -1. */
static int part_of(const rfi_rewriter *w, int i, int k, int row, int *view) {
  const rfr_trace *t = w->to.from;
  rfr_value v = t->ops[i].out[packs[row].first + k];
  if (v < 0 || w->uses[v].count != 1 || w->uses[v].output || t->values[v].type.rank != packs[row].rank) return -1;
  const int64_t rows = t->values[v].type.shape[0];
  *view = t->ops[w->uses[v].last].def->code == RFI_OP_reshape ? w->uses[v].last : -1;
  if (*view >= 0) v = t->ops[*view].out[0];
  if (t->values[v].type.rank != 2 || t->values[v].type.shape[0] != rows) return -1;
  if (w->uses[v].count != 1 || w->uses[v].output) return -1;
  const rfi_opr *concat = &t->ops[w->uses[v].last];
  return concat->def->code == RFI_OP_concat && concat->n_in == packs[row].parts && concat->attr[0].i == 1 &&
                 concat->in[k] == v
             ? w->uses[v].last
             : -1;
}

/* The concat of the gradients of op i; -1: none. *row: index into packs. */
static int match_packed(const rfi_rewriter *w, int i, int *row, int views[RFI_MAX_NAMES]) {
  int concat = -1;
  for (*row = 0; *row < (int)(sizeof packs / sizeof *packs); ++*row) {
    if (w->to.from->ops[i].def->code != packs[*row].plain) continue;
    concat = part_of(w, i, 0, *row, &views[0]);
    for (int k = 1; k < packs[*row].parts && concat >= 0; k++)
      if (part_of(w, i, k, *row, &views[k]) != concat) concat = -1;
    break;
  }
  return concat;
}

static rfr_status visit_packed(rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  int row, views[RFI_MAX_NAMES];
  const int concat = match_packed(w, i, &row, views);
  if (concat < 0) return rfi_rewrite_op(&w->to, i, NULL);
  const rfi_opr *op = &t->ops[i], *joined = &t->ops[concat];
  rfr_value in[RFI_MAX_NAMES], all;
  rfi_opr packed = *op, view = *joined;
  for (int k = 0; k < op->n_in; k++) in[k] = op->in[k] < 0 ? RFR_NONE : w->to.map[op->in[k]];
  packed.def = rfi_op_def_get(packs[row].packed);
  packed.in = in;
  packed.reason = packs[row].reason;
  bool dead[RFI_MAX_NAMES] = {false};
  for (int j = 0; j < packs[row].first; j++) dead[j] = op->out[j] < 0;
  RFI_TRY(rfi_rewrite_as(&w->to, i, &packed, dead));
  all = w->to.map[op->out[packs[row].first]];
  const rfr_type *rows = &t->values[joined->out[0]].type;
  if (w->to.to->values[all].type.rank == 2) {
    w->to.map[joined->out[0]] = all;
  } else {
    rfi_attr shape = rfi_i(0);
    shape.s = (rfi_shape){.rank = 2, .dim = {rows->shape[0], rows->shape[1]}};
    view.def = rfi_op_def_get(RFI_OP_reshape);
    view.n_in = 1;
    view.in = &all;
    view.attr = &shape;
    view.reason = "";
    RFI_TRY(rfi_rewrite_as(&w->to, concat, &view, NULL));
  }
  for (int k = 0; k < packs[row].parts; k++)
    if (views[k] >= 0) w->skip[views[k]] = true;
  w->skip[concat] = true;
  return rfi_report_line(w->report, "fused: op %d %s%s%s writes packed gradients: -%lld bytes; exact", i, op->def->name,
                         op->scope[0] ? " in " : "", op->scope, (long long)rfi_bytes(rows));
}

static rfr_status fuse_packed(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, o, report, NULL, visit_packed, out);
}

/* ---- accumulate ---- */

/* The optional operand into which this result is accumulated; -1: none. */
static int acc_operand(const rfi_op_def *def, int result) {
  int k = def->alias[result];
  return k >= 0 && strncmp(def->operand[k], "acc", 3) == 0 ? k : -1;
}

/* Readers of each storage, in op order: reader[start[b]] up to start[b + 1] read base b. */
typedef struct readers {
  int *start;
  struct reader {
    int op;
    rfr_value value;
  } * reader;
} readers;

static rfr_status find_readers(const rfr_trace *t, readers *r) {
  size_t n = 0;
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *r->start * (size_t)(t->n_values + 2), &r->start));
  int *next = r->start + 1; /* holds counts first, then the next free index, finally the end */
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in; k++)
      if (t->ops[i].in[k] >= 0) {
        next[t->values[t->ops[i].in[k]].base + 1]++;
        n++;
      }
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *r->reader * (n + 1), &r->reader));
  for (int b = 0; b < t->n_values; b++) next[b + 1] += next[b];
  for (int i = 0; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      rfr_value v = t->ops[i].in[k];
      if (v >= 0) r->reader[next[t->values[v].base]++] = (struct reader){i, v};
    }
  return RFR_OK;
}

/* Whether the GEMM that computes `gemm` may accumulate into g in place, and so replace op `add`. */
static bool can_accumulate(const rfr_trace *t, const rfi_uses *uses, const readers *r, const rfr_value *onto,
                           rfr_value g, rfr_value gemm, int add) {
  const rfi_value *p = &t->values[gemm], *a = &t->values[g];
  const bool in_place = t->ops[add].def->code == RFI_OP_accumulate; /* later readers of g's memory read the sum */
  if (p->if_trained & RFI_READ_MORE || (!in_place && t->values[a->base].if_trained & RFI_READ_LATER)) return false;
  if (p->op < 0 || (a->op < 0 && !in_place) || a->op >= p->op || p->base != gemm || uses[gemm].count != 1 ||
      uses[gemm].output)
    return false;
  const rfi_opr *op = &t->ops[p->op];
  int acc = acc_operand(op->def, p->result);
  if (acc < 0 || (acc < op->n_in && op->in[acc] >= 0) || onto[gemm] >= 0) return false;
  if (memcmp(&p->type, &a->type, sizeof p->type) != 0) return false;
  if (op->def->code == RFI_OP_matmul && op->in[2] >= 0) return false;
  if (op->def->code == RFI_OP_lora_matmul && op->in[4] >= 0) return false;
  /* g must own dense memory that nothing reads from the GEMM on, because the GEMM overwrites it; the GEMM itself must
   * not read it either */
  if (uses[g].output || !rfi_is_dense(a)) return false;
  if (in_place) {
    for (int k = r->start[a->base]; k < r->start[a->base + 1]; k++)
      if (r->reader[k].op >= p->op && r->reader[k].op < add) return false;
    return true;
  }
  if (t->ops[a->op].def->flags & (RFI_VIEW | RFI_STATE)) return false;
  if (t->ops[a->op].phase == RFR_PHASE_LOAD || t->ops[a->op].def->code == RFI_OP_fill) return false;
  for (int i = 0; i < t->n_outputs; i++)
    if (t->values[t->outputs[i].value].base == a->base) return false; /* the output shows a view of g after the run */
  for (int k = r->start[a->base]; k < r->start[a->base + 1]; k++) {
    int i = r->reader[k].op;
    if (i > a->op && ((i >= p->op && i != add) || r->reader[k].value != g)) return false;
  }
  return true;
}

static rfr_status fuse_accumulate(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  (void)o;
  rfr_status s;
  rfi_rewrite r = {.from = in};
  rfi_uses *uses = NULL;
  readers read = {NULL, NULL};
  rfr_value *onto = NULL;  /* per result: the value into which it is accumulated, or RFR_NONE */
  rfr_value *moved = NULL; /* per add: the GEMM result that replaces its result, or RFR_NONE */
  *out = NULL;
  RFI_GOTO(rfi_count_uses(in, &uses));
  RFI_GOTO(find_readers(in, &read));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *onto * (size_t)(in->n_values + 1), &onto));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *moved * (size_t)(in->n_ops + 1), &moved));
  for (int v = 0; v < in->n_values; v++) onto[v] = RFR_NONE;
  for (int i = 0; i < in->n_ops; i++) moved[i] = RFR_NONE;
  for (int i = 0; i < in->n_ops; i++) {
    const rfi_opr *op = &in->ops[i];
    const bool in_place = op->def->code == RFI_OP_accumulate;
    if (op->def->code != RFI_OP_add && !in_place) continue;
    for (int k = in_place; k < 2 && moved[i] < 0; k++) {
      rfr_value g = op->in[k], gemm = op->in[1 - k];
      if (!can_accumulate(in, uses, &read, onto, g, gemm, i)) continue;
      moved[i] = gemm;
      onto[gemm] = g;
    }
  }
  RFI_GOTO(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    const rfi_opr *op = &in->ops[i];
    if (moved[i] >= 0) {
      r.map[op->out[0]] = r.map[moved[i]];
      const char *name = in->values[op->out[0]].name;
      if (name[0]) rfr_value_set_name(r.to, r.map[moved[i]], name);
      continue;
    }
    bool adds = false, dead[RFI_MAX_NAMES];
    for (int j = 0; j < op->n_out; j++) {
      dead[j] = op->out[j] < 0;
      adds = adds || (op->out[j] >= 0 && onto[op->out[j]] >= 0);
    }
    if (!adds) {
      RFI_GOTO(rfi_rewrite_op(&r, i, NULL));
      continue;
    }
    rfi_opr fused = *op;
    rfr_value operands[16];
    for (int k = 0; k < op->n_in; k++) operands[k] = op->in[k] < 0 ? RFR_NONE : r.map[op->in[k]];
    for (int j = 0; j < op->n_out; j++) {
      rfr_value g = op->out[j] < 0 ? RFR_NONE : onto[op->out[j]];
      if (g < 0) continue;
      operands[acc_operand(op->def, j)] = r.map[g];
      bool exact = op->def->code == RFI_OP_sum && in->values[g].type.dtype == RFR_F32;
      RFI_GOTO(rfi_report_line(report, "fused: op %d %s%s%s accumulates in place: -%lld bytes%s", i, op->def->name,
                               op->scope[0] ? " in " : "", op->scope, (long long)rfi_bytes(&in->values[g].type),
                               exact ? "; exact" : "; changes bits"));
    }
    fused.in = operands;
    fused.reason = "fused: accumulates in place";
    RFI_GOTO(rfi_rewrite_as(&r, i, &fused, dead));
  }
  s = rfi_rewrite_end(&r, out);
  goto done;
fail:
  if (r.map) rfi_rewrite_abort(&r);
done:
  rfi_free(in->ctx, uses);
  rfi_free(in->ctx, read.start);
  rfi_free(in->ctx, read.reader);
  rfi_free(in->ctx, onto);
  rfi_free(in->ctx, moved);
  return s;
}

rfr_status rfi_pass_fuse(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  static rfr_status (*const rewrites[])(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report,
                                        rfr_trace **out) = {fuse_slices,   fuse_packed,          rfi_fuse_norms,
                                                            rfi_fuse_gelu, rfi_fuse_parts,       rfi_fuse_own_parts,
                                                            rfi_fuse_lora, rfi_fuse_scaled_sums, fuse_accumulate};
  rfr_trace *t;
  *out = NULL;
  if (!o->fuse) {
    RFI_TRY(rfi_report_line(report, "nothing: the pass is off"));
    return rfi_split_dequantize(in, report, out);
  }
  RFI_TRY(rfi_rewrite_walk(in, o, report, mark_heads, visit_head, &t));
  for (size_t i = 0; i < sizeof rewrites / sizeof *rewrites; i++) {
    rfr_trace *before = t;
    rfr_status s = rewrites[i](before, o, report, &t);
    rfr_trace_destroy(before);
    RFI_TRY(s);
  }
  rfr_status s = rfi_split_dequantize(t, report, out);
  rfr_trace_destroy(t);
  return s;
}
