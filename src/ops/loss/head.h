/* SPDX-License-Identifier: Apache-2.0
 *
 * The GEMMs inside linear_cross_entropy and linear_token_loss, as calls of matmul: the kernel runs them, by a library
 * where kernel selection has found one, so that the LM head is as fast as any other GEMM.
 *
 * A chunk is the first, a middle one or the tail; those differ in rows and in whether dw is overwritten or added to. On
 * a GPU dw is two GEMMs, since a library is half as fast if the vocabulary is not a multiple of the tile. The workspace
 * has a loss per row, one chunk of logits and the GEMMs' workspaces. dlogits, in x's type, replace the logits that they
 * come from, row by row at the same addresses.
 */
#ifndef RFI_HEAD_H
#define RFI_HEAD_H

#include "ops/call.h"

/* Indices of operands. After the targets, linear_cross_entropy has inv_valid; the last two are the cotangent and
 * acc. */
enum { RFI_HEAD_X, RFI_HEAD_W, RFI_HEAD_TARGETS, RFI_HEAD_INV_VALID };
enum { RFI_HEAD_LOGITS, RFI_HEAD_DX, RFI_HEAD_DW, RFI_HEAD_DW_REST, RFI_HEAD_GEMMS }; /* the GEMMs of one chunk */
/* On a GPU, the row stride of logits is a multiple of this number of elements: full cache lines. With 50,272 columns
 * instead of 50,304, cuBLASLt did not offer the algorithms that hold two tiles (lt.c). */
enum { RFI_HEAD_ALIGNED = 64 };
enum { RFI_HEAD_TILE = 128 }; /* tile rows of dw */
/* The minimum rows per chunk on a GPU: with 1024, reading and writing dw takes as long as its GEMM. */
enum { RFI_HEAD_ROWS = 4096 };
enum { RFI_HEAD_FIRST, RFI_HEAD_MIDDLE, RFI_HEAD_TAIL, RFI_HEAD_CHUNKS };

/* How a library runs one GEMM; run is NULL if the matmul kernel runs it. call->library of linear_cross_entropy points
 * to [RFI_HEAD_CHUNKS][RFI_HEAD_GEMMS] of them, or is NULL. */
typedef struct rfi_head_library {
  rfi_kernel_fn run;
  size_t workspace;
  void *handle;
  const void *device; /* belongs to the backend */
} rfi_head_library;

typedef struct rfi_head_gemm {
  rfi_arg in[4], out[1];
  rfi_attr attr[3];
  rfi_call call; /* points into this struct: do not copy it */
  bool wanted;
} rfi_head_gemm;

typedef struct rfi_head {
  int64_t T, C, V, chunk;
  /* row stride of the logits; if it exceeds V, the rows of w are zero-padded, and so are those of dlogits */
  int64_t ld;
  int64_t tiled;         /* rows of dw in its first GEMM; the remaining rows, if any, are a second GEMM */
  size_t nll, logits, w; /* sizes of the workspace's first parts; w: size of a copy with ld rows, or 0 */
} rfi_head;

static inline bool rfi_is_head(rfi_opcode code) {
  return code == RFI_OP_linear_cross_entropy || code == RFI_OP_linear_token_loss;
}

/* Whether the call is linear_token_loss, which has a loss and a cotangent per row, and no inv_valid. */
static inline bool rfi_head_is_per_row(const rfi_call *c) { return c->n_in == 5; }
static inline const rfi_arg *rfi_head_dloss(const rfi_call *c) { return &c->in[c->n_in - 2]; }
static inline const rfi_arg *rfi_head_acc(const rfi_call *c) { return &c->in[c->n_in - 1]; }

/* Parts of the workspace begin at multiples of RFI_ALIGNMENT. */
static inline size_t rfi_head_round(size_t n) { return (n + 255) & ~(size_t)255; }

/* The row stride of logits is a multiple of `multiple`: a GPU's GEMMs need aligned rows, the CPU's need dense ones
 * (1). */
static inline rfi_head rfi_head_make(const rfi_call *c, int64_t multiple) {
  rfi_head h = {
      .T = c->in[RFI_HEAD_X].type.shape[0], .C = c->in[RFI_HEAD_X].type.shape[1], .V = c->in[RFI_HEAD_W].type.shape[0]};
  h.chunk = c->attr[1].i < h.T ? c->attr[1].i : h.T;
  h.nll = rfi_head_round((size_t)h.T * sizeof(double));
  h.ld = (h.V + multiple - 1) / multiple * multiple;
  h.tiled = multiple > 1 && h.V > RFI_HEAD_TILE ? h.V / RFI_HEAD_TILE * RFI_HEAD_TILE : h.V;
  h.logits = rfi_head_round((size_t)(h.chunk * h.ld) * (c->attr[3].i == RFR_F32 ? 4 : 2));
  if (h.ld > h.V) h.w = rfi_head_round((size_t)(h.ld * h.C) * (c->in[RFI_HEAD_X].type.dtype == RFR_F32 ? 4 : 2));
  return h;
}

/* The number of waves of dx's tiles, 128 x 256, on the 132 multiprocessors of a Hopper GPU. This is a constant, because
 * a plan must not depend on the device. */
static inline int64_t rfi_head_waves(int64_t rows, int64_t C) {
  enum { ROWS = 128, COLUMNS = 256, MULTIPROCESSORS = 132 };
  const int64_t tiles = (rows + ROWS - 1) / ROWS * ((C + COLUMNS - 1) / COLUMNS);
  return (tiles + MULTIPROCESSORS - 1) / MULTIPROCESSORS;
}

/* The rows per chunk on a GPU, for T rows of C columns. dx has few tiles with long sums, so its time is proportional to
 * the number of waves. If a chunk of up to 1.5 times the rows needs fewer waves in total, chooses the largest such
 * chunk, whose last wave is nearly full. */
static inline int64_t rfi_head_rows_at_once(int64_t T, int64_t C) {
  enum { STEP = 128, MOST = RFI_HEAD_ROWS + RFI_HEAD_ROWS / 2 };
  int64_t best = RFI_HEAD_ROWS, least = INT64_MAX;
  for (int64_t rows = RFI_HEAD_ROWS; rows <= MOST; rows += STEP) {
    const int64_t sum = T / rows * rfi_head_waves(rows, C) + rfi_head_waves(T % rows, C);
    if (sum < least || (sum == least && best > RFI_HEAD_ROWS)) best = rows, least = sum;
  }
  return best;
}

/* The number of rows in the chunk that starts at t, and the kind of that chunk. */
static inline int64_t rfi_head_rows(const rfi_head *h, int64_t t) { return h->T - t < h->chunk ? h->T - t : h->chunk; }
static inline int rfi_head_kind(const rfi_head *h, int64_t t) {
  if (t == 0) return RFI_HEAD_FIRST;
  return rfi_head_rows(h, t) < h->chunk ? RFI_HEAD_TAIL : RFI_HEAD_MIDDLE;
}
/* The first row of some chunk of that kind; -1 if there is none. */
static inline int64_t rfi_head_start(const rfi_head *h, int kind) {
  int64_t t = kind == RFI_HEAD_FIRST ? 0 : kind == RFI_HEAD_MIDDLE ? h->chunk : h->T - (h->chunk ? h->T % h->chunk : 0);
  return t < h->T && rfi_head_kind(h, t) == kind ? t : -1;
}

static inline rfi_arg rfi_head_matrix(void *data, rfr_dtype dtype, int64_t rows, int64_t cols, int64_t row_stride) {
  return (rfi_arg){data, {.dtype = dtype, .rank = 2, .shape = {rows, cols}}, {row_stride, 1}};
}

/* out = op(a) op(b), added to out if `add`. */
static inline void rfi_head_gemm_init(rfi_head_gemm *p, const rfi_call *c, const rfi_arg *a, bool ta, const rfi_arg *b,
                                      bool tb, const rfi_arg *out, bool add) {
  *p = (rfi_head_gemm){.in = {*a, *b, {.type.rank = -1}, {.type.rank = -1}}, .out = {*out}, .wanted = out->data};
  p->attr[0].i = ta;
  p->attr[1].i = tb;
  p->attr[2].i = out->type.dtype;
  if (add) p->in[3] = *out;
  p->call = (rfi_call){
      .n_in = 4, .n_out = 1, .in = p->in, .out = p->out, .attr = p->attr, .microbatch = -1, .threads = c->threads};
}

/* The GEMMs of the chunk that starts at row t, without workspaces. When kernels are selected there are no addresses
 * yet; then `logits` is any non-NULL pointer. */
static inline void rfi_head_gemms(const rfi_call *c, const rfi_head *h, int64_t t, void *logits,
                                  rfi_head_gemm out[RFI_HEAD_GEMMS]) {
  rfr_dtype dtype = c->in[RFI_HEAD_X].type.dtype;
  /* no function calls, because the CUDA module compiles this too */
  size_t begin = (size_t)(t * h->C) * (dtype == RFR_F32 ? 4 : 2);
  int64_t n = rfi_head_rows(h, t);
  void *dx = c->out[1].data ? (char *)c->out[1].data + begin : NULL;
  rfi_arg x = rfi_head_matrix((char *)c->in[RFI_HEAD_X].data + begin, dtype, n, h->C, h->C);
  void *rows = h->w ? (char *)logits + h->logits : c->in[RFI_HEAD_W].data;
  rfi_arg w = rfi_head_matrix(rows, dtype, h->ld, h->C, h->C);
  const rfr_dtype to = (rfr_dtype)c->attr[3].i;
  rfi_arg l = rfi_head_matrix(logits, to, n, h->ld, h->ld);
  int64_t stride = dtype == to ? h->ld : 2 * h->ld;
  rfi_arg dl = rfi_head_matrix(logits, dtype, n, h->ld, stride);
  rfi_arg dxs = rfi_head_matrix(dx, dtype, n, h->C, h->C);
  rfi_head_gemm_init(&out[RFI_HEAD_LOGITS], c, &x, false, &w, true, &l, false);
  rfi_head_gemm_init(&out[RFI_HEAD_DX], c, &dl, false, &w, false, &dxs, false);
  for (int i = 0; i < 2; i++) {
    const int64_t v = i == 0 ? 0 : h->tiled, rows_of_dw = i == 0 ? h->tiled : h->V - h->tiled;
    char *data = rows_of_dw > 0 ? c->out[2].data : NULL;
    rfi_arg part = rfi_head_matrix((char *)logits + v * (dtype == RFR_F32 ? 4 : 2), dtype, n, rows_of_dw, stride);
    rfi_arg dw = rfi_head_matrix(data ? data + v * h->C * 4 : NULL, RFR_F32, rows_of_dw, h->C, h->C);
    rfi_head_gemm_init(&out[RFI_HEAD_DW + i], c, &part, true, &x, false, &dw, t > 0 || rfi_head_acc(c)->data);
  }
}

#endif
