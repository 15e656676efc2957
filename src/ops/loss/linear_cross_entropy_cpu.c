/* SPDX-License-Identifier: Apache-2.0
 *
 * The LM head and its loss in one op, forward and backward, without ever holding all logits:
 *
 *   for each chunk of rows:  logits  = x wT                      f32, in the workspace
 *                            lse, loss                           as cross_entropy does them
 *                            dlogits = (softmax - onehot) scale  in x's type, over the logits
 *                            dx      = dlogits w
 *                            dw     += dlogitsT x                f32
 *
 * The backward can run at once because d loss is an operand. dlogits take the logits'
 * place, row by row with the logits' row stride, so the workspace is one chunk of f32. The
 * products are the matmul kernel's; chunks follow each other, so dw is summed in row order
 * whatever the number of threads. Logits are not rounded to x's type: the op is closer to
 * the exact loss than linear and cross_entropy apart, and its bits differ from theirs.
 */
#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "ops/loss/ce_row.h"

enum { X, W, TARGETS, INV_VALID, DLOSS, ACC };

/* A matmul of this op's pieces. */
typedef struct product {
  rfi_arg in[4], out[1];
  rfi_attr attr[3];
  rfi_call call;
} product;

static rfi_arg matrix(void *data, rfr_dtype dtype, int64_t rows, int64_t cols, int64_t row_stride) {
  return (rfi_arg){data, {.dtype = dtype, .rank = 2, .shape = {rows, cols}}, {row_stride, 1}};
}

static void product_init(product *p, const rfi_call *c, rfi_arg a, bool ta, rfi_arg b, bool tb, rfi_arg y, bool add,
                         void *workspace) {
  *p = (product){.in = {a, b, {.type.rank = -1}, {.type.rank = -1}},
                 .out = {y},
                 .attr = {{.i = ta}, {.i = tb}, {.i = y.type.dtype}}};
  if (add) p->in[3] = y;
  p->call = (rfi_call){.n_in = 4,
                       .n_out = 1,
                       .in = p->in,
                       .out = p->out,
                       .attr = p->attr,
                       .microbatch = -1,
                       .workspace = workspace,
                       .threads = c->threads};
}

/* The workspace: a loss per row, a chunk of logits, what the products need. */
typedef struct parts {
  int64_t T, C, V, chunk;
  size_t nll, logits, total;
} parts;

static size_t round64(size_t n) { return (n + 63) & ~(size_t)63; }

/* The three products for the `n` rows from t; the first of them without, later ones with dw's sum so far. */
static void products_init(const rfi_call *c, const parts *p, int64_t t, int64_t n, product out[3]) {
  const rfi_arg *x = &c->in[X], *w = &c->in[W];
  rfr_dtype dtype = x->type.dtype;
  size_t size = (size_t)rfr_dtype_bits(dtype) / 8;
  char *base = c->workspace, *scratch = base ? base + p->nll + p->logits : NULL;
  void *logits = base ? base + p->nll : NULL;
  void *dx = c->out[1].data ? (char *)c->out[1].data + (size_t)(t * p->C) * size : NULL;
  rfi_arg xs = matrix(x->data ? (char *)x->data + (size_t)(t * p->C) * size : NULL, dtype, n, p->C, p->C);
  rfi_arg ws = matrix(w->data, dtype, p->V, p->C, p->C);
  rfi_arg ds = matrix(logits, dtype, n, p->V, dtype == RFR_F32 ? p->V : 2 * p->V);
  product_init(&out[0], c, xs, false, ws, true, matrix(logits, RFR_F32, n, p->V, p->V), false, scratch);
  product_init(&out[1], c, ds, false, ws, false, matrix(dx, dtype, n, p->C, p->C), false, scratch);
  product_init(&out[2], c, ds, true, xs, false, matrix(c->out[2].data, RFR_F32, p->V, p->C, p->C),
               t > 0 || c->in[ACC].data, scratch);
}

static size_t products_workspace(const rfi_call *c, const parts *p, int64_t t, int64_t n) {
  size_t most = 0;
  product products[3];
  if (n <= 0 || !RFI_CPU(matmul).workspace) return 0;
  products_init(c, p, t, n, products);
  for (int i = 0; i < 3; i++) {
    size_t bytes = RFI_CPU(matmul).workspace(&products[i].call);
    most = bytes > most ? bytes : most;
  }
  return most;
}

static parts parts_of(const rfi_call *c) {
  parts p = {.T = c->in[X].type.shape[0], .C = c->in[X].type.shape[1], .V = c->in[W].type.shape[0]};
  p.chunk = c->attr[1].i < p.T ? c->attr[1].i : p.T;
  p.nll = round64((size_t)p.T * sizeof(double));
  p.logits = round64((size_t)(p.chunk * p.V) * sizeof(float));
  return p;
}

static size_t workspace(const rfi_call *c) {
  parts p = parts_of(c);
  int64_t tail = p.chunk ? p.T % p.chunk : 0;
  size_t whole = products_workspace(c, &p, 0, p.chunk), rest = products_workspace(c, &p, p.T - tail, tail);
  return p.nll + p.logits + (whole > rest ? whole : rest);
}

/* One chunk, as rfi_parallel hands it to its parts: the call comes first. */
typedef struct chunk {
  rfi_call call;
  int64_t t; /* its first row */
  const parts *p;
  rfi_arg logits, dlogits;
} chunk;

static void rows(const rfi_call *call, int64_t begin, int64_t end, int part) {
  (void)part;
  const chunk *k = (const chunk *)call;
  const parts *p = k->p;
  bool backward = call->out[1].data || call->out[2].data;
  float scale = backward ? *(const float *)call->in[DLOSS].data * *(const float *)call->in[INV_VALID].data : 0;
  double *nll = call->workspace;
  for (int64_t i = begin; i < end; i++) {
    int32_t target = ((const int32_t *)call->in[TARGETS].data)[k->t + i];
    bool valid = rfi_ce_valid(target, call->attr[0].i, p->V);
    double lse = rfi_ce_lse(&k->logits, i * k->logits.stride[0], p->V);
    nll[k->t + i] = valid ? lse - rfi_read1(&k->logits, i * k->logits.stride[0] + target) : 0;
    if (backward)
      rfi_ce_backward(&k->logits, i * k->logits.stride[0], &k->dlogits, i * k->dlogits.stride[0], p->V, valid, target,
                      lse, scale);
  }
}

static rfr_status run(const rfi_call *c) {
  const parts p = parts_of(c);
  bool want_dx = c->out[1].data, want_dw = c->out[2].data;
  if ((want_dx || want_dw) && !c->in[DLOSS].data)
    return rfi_fail(RFI_E_INTERNAL, "linear_cross_entropy: gradients are wanted without dloss");
  if (p.T == 0 && want_dw && !c->in[ACC].data) memset(c->out[2].data, 0, (size_t)(p.V * p.C) * sizeof(float));
  for (int64_t t = 0; t < p.T; t += p.chunk) {
    int64_t n = p.T - t < p.chunk ? p.T - t : p.chunk;
    product products[3];
    products_init(c, &p, t, n, products);
    RFI_TRY(RFI_CPU(matmul).run(&products[0].call));
    chunk k = {*c, t, &p, products[0].out[0], products[1].in[0]};
    rfi_parallel(&k.call, n, 8 * p.V, rows);
    if (want_dx) RFI_TRY(RFI_CPU(matmul).run(&products[1].call));
    if (want_dw) RFI_TRY(RFI_CPU(matmul).run(&products[2].call));
  }
  const double *nll = c->workspace;
  double sum = 0;
  for (int64_t t = 0; t < p.T; t++) sum += nll[t];
  if (c->out[0].data) *(float *)c->out[0].data = (float)(sum * *(const float *)c->in[INV_VALID].data);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(linear_cross_entropy) = {run, workspace};
