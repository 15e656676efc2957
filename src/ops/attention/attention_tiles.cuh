/* SPDX-License-Identifier: Apache-2.0
 *
 * Code shared by the tensor-core attention kernels of all architectures: the mask, the softmax of fragments, the
 * cutting of rows into pieces of one document each, and the launch parameters.
 *
 * In a warp, a GEMM's result has the layout of C in mma_sm80.cuh, 16 rows at a time; so it has in each warp of a
 * warpgroup.
 */
#ifndef RFI_ATTENTION_TILES_CUH
#define RFI_ATTENTION_TILES_CUH

#include "backend/cuda/mma_sm80.cuh"

enum { CUTTERS = 1024, STATS_THREADS = 128, STATS_ROWS = STATS_THREADS / 8 };

static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

typedef struct matrix { /* (T, heads, D), D dense */
  const void *data;
  int64_t row, head;
} matrix;

/* Rows first ... last - 1 for a block, of a document of rows from ... end - 1. Rows before `from` attend to nothing. */
typedef struct __align__(16) piece {
  int first, last, from, end;
}
piece;

typedef struct problem {
  matrix q, k, v, dy;
  const piece *pieces;
  const int *count; /* number of pieces, on the device */
  int reverse;      /* process the last pieces first: with a causal mask they are the longest */
  float *lse;
  float2 *stats;                   /* (H, T): lse in units of log2 e, delta */
  int T, H, Hk, D, causal, window; /* 0: no window */
  /* probabilities are 2^(factor x), where x is the dot product of q and k, or cap tanh(bend x) */
  float scale, factor, bend, cap;
  void *out[3]; /* o; dq, dk, dv, heads adjacent; NULL: not computed */
  int64_t row[3];
  float *sums;      /* (H, T, 64 or 128): sums of dq, until all keys have been added */
  unsigned *turns;  /* (H, T): at a tile's first row, how many blocks have added to its sums */
  unsigned *ticket; /* number of items (a piece and a head) taken so far */
} problem;

/* ---- which rows attend to which keys ---- */

static __device__ __forceinline__ int first_key(const problem &p, int from, int t) {
  return p.window ? max(from, t + 1 - p.window) : from;
}
static __device__ __forceinline__ int end_key(const problem &p, const piece &w, int t) {
  return t < w.from ? w.from : p.causal ? t + 1 : w.end;
}
static __device__ __forceinline__ bool sees(const problem &p, const piece &w, int t, int s) {
  return s >= first_key(p, w.from, t) && s < end_key(p, w, t);
}

/* Whether some row of t0 ... t1 - 1 attends to some key of s0 ... s1 - 1. Conservative: may be true when none does. */
static __device__ __forceinline__ bool any_sees(const problem &p, const piece &w, int t0, int t1, int s0, int s1) {
  return t1 > w.from && s0 < (p.causal ? t1 : w.end) && s1 > first_key(p, w.from, t0);
}
static __device__ __forceinline__ bool all_see(const problem &p, const piece &w, int t0, int t1, int s0, int s1) {
  return t0 >= w.from && s0 >= first_key(p, w.from, t1 - 1) && s1 <= (p.causal ? t0 + 1 : w.end);
}

/* ---- scores ---- */

/* tanh within 2e-7 of the value. */
static __device__ __forceinline__ float bent(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + rfi_exp2(x * (2 * LOG2E)));
}

template <int M, int N> __device__ __forceinline__ void bend(const problem &p, float (&c)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][n][e] = p.cap * bent(p.bend * c[m][n][e]);
}

/* The running maximum and sum of a thread's rows. Each thread sums its own columns; the sums are combined at the
 * end. */
template <int M> struct softmax { float max[M / 16][2], sum[M / 16][2]; };

/* Maximum over the four lanes that share a row. */
static __device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Scores become 2^(factor (score - max)); earlier sums must be multiplied by `shrink`. Returns whether all factors are
 * 1 or the sums they multiply are 0. */
template <int M, int N>
__device__ __forceinline__ bool soften(const problem &p, float (&s)[M / 16][N / 8][4], softmax<M> &x,
                                       float (&shrink)[M / 16][2]) {
  bool same = true;
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = x.max[m][half];
#pragma unroll
      for (int n = 0; n < N / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = quad_max(top);
      const float base = top == -INFINITY ? 0.0f : top * p.factor; /* -inf: the row has attended to no key yet */
      shrink[m][half] = rfi_exp2(fmaf(x.max[m][half], p.factor, -base));
      same = same && top == x.max[m][half];
      x.max[m][half] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[m][n][e] = rfi_exp2(fmaf(s[m][n][e], p.factor, -base));
          sum += s[m][n][e];
        }
      x.sum[m][half] = fmaf(x.sum[m][half], shrink[m][half], sum);
    }
  return __all_sync(0xffffffffu, same);
}
template <int M, int D>
__device__ __forceinline__ void shrink_rows(float (&acc)[M / 16][D / 8][4], const float (&by)[M / 16][2]) {
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] *= by[m][e / 2];
}

/* Multiplies by the slope of the cap. */
template <int M, int N>
__device__ __forceinline__ void slope(const problem &p, float (&ds)[M][N][4], const float (&s)[M][N][4]) {
  const float inverse = 1.0f / p.cap;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) ds[m][n][e] *= 1.0f - s[m][n][e] * inverse * (s[m][n][e] * inverse);
}

/* Gets a block's next piece, for each of `heads`; false: none is left. Documents determine the number of pieces, shapes
 * the grid, which suffices for few documents. With many documents, a block processes several pieces. */
static __device__ __forceinline__ bool next_piece(const problem &p, int heads, unsigned *at, piece *w, int *head) {
  const unsigned i = *at / (unsigned)heads, count = (unsigned)*p.count;
  if (i >= count) return false;
  *w = p.pieces[p.reverse ? count - 1 - i : i];
  *head = (int)(*at % (unsigned)heads);
  *at += gridDim.x;
  return true;
}

/* Computes lse in units of log2 e, and delta = do o times `sign`: eight threads per row, one block for rows of one
 * head. */
template <typename T>
static __global__ void __launch_bounds__(STATS_THREADS) attention_stats(const problem p, const matrix o, float sign) {
  const int64_t h = blockIdx.x % (unsigned)p.H, t = blockIdx.x / (unsigned)p.H * STATS_ROWS + threadIdx.x / 8;
  const bool inside = t < p.T;
  const int64_t row = inside ? t : 0, at = h * p.T + row;
  const T *a = (const T *)p.dy.data + row * p.dy.row + h * p.dy.head, *b = (const T *)o.data + row * o.row + h * o.head;
  const float lse = p.lse[at];
  float sum = 0;
#pragma unroll 2
  for (int d = (int)(threadIdx.x & 7) * 8; d < p.D; d += 64) {
    const rfi_pack<T, 8> x = *(const rfi_pack<T, 8> *)(a + d), y = *(const rfi_pack<T, 8> *)(b + d);
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(rfi_widen(x.x[e]), rfi_widen(y.x[e]), sum);
  }
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (inside && (threadIdx.x & 7) == 0) p.stats[at] = make_float2(lse * LOG2E, sign * sum);
}

/* ---- dividing the rows into pieces ---- */

typedef struct table {
  piece *pieces;
  int *count;   /* number of pieces, followed by the ticket counter */
  int rows;     /* rows per piece */
  int together; /* documents whose pieces alternate: their first pieces, then their second pieces, and so on */
} table;

/* Inclusive running maximum or sum over a block of 1024. `part` may be reused afterwards. */
template <bool SUM> static __device__ __forceinline__ int running(int x, int *part) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x = SUM ? x + other : max(x, other);
  }
  if (lane == 31) part[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; i++) x = SUM ? x + part[i] : max(x, part[i]);
  __syncthreads();
  return x;
}

/* Returns the index of piece number i, of document d, if the pieces of `together` documents alternate. counts[j]: pieces
 * before document j. */
static __device__ __forceinline__ int place_of(const int *counts, int i, int d, int together) {
  const int start = d / together * together, end = min(start + together, CUTTERS), level = i - counts[d];
  int place = counts[start];
  for (int j = start; j < end; j++) {
    const int n = counts[j + 1] - counts[j];
    place += min(n, level) + (j < d && n > level);
  }
  return place;
}

/* One block per table. It stops as soon as all rows are assigned, because offsets often has as many entries as there
 * may be documents. A document is all rows since the end of the previous one, so that every row is in a document. The
 * rows after the last document form another one, which has no keys. */
static __global__ void __launch_bounds__(CUTTERS)
    attention_pieces(const int32_t *offsets, int n, int T, const table a, const table b) {
  /* of 1024 documents; index 0: the previous document */
  __shared__ int part[32], ends[CUTTERS + 1], counts[CUTTERS + 1];
  const table x = blockIdx.x == 0 ? a : b;
  const int me = threadIdx.x;
  int owned = 0, pieces = 0; /* rows and pieces so far */
  for (int d0 = 0; d0 < n && owned < T; d0 += CUTTERS) {
    const int d = d0 + me, end = running<false>(max(d < n ? min(offsets[d + 1], T) : 0, owned), part);
    if (me == 0) ends[0] = owned, counts[0] = 0;
    ends[me + 1] = end;
    __syncthreads();
    counts[me + 1] = running<true>((end - ends[me] + x.rows - 1) / x.rows, part);
    __syncthreads();
    for (int i = me; i < counts[CUTTERS]; i += CUTTERS) {
      int low = 0, high = CUTTERS - 1; /* the first document with more than i pieces up to its end */
      while (low < high) {
        const int middle = (low + high) / 2;
        if (counts[middle + 1] > i) high = middle;
        else low = middle + 1;
      }
      const int first = ends[low] + (i - counts[low]) * x.rows, last = ends[low + 1];
      x.pieces[pieces + place_of(counts, i, low, x.together)] =
          piece{first, min(first + x.rows, last), min(max(offsets[d0 + low], ends[low]), last), last};
    }
    owned = ends[CUTTERS];
    pieces += counts[CUTTERS];
    __syncthreads();
  }
  const int rest = (T - owned + x.rows - 1) / x.rows;
  for (int i = me; i < rest; i += CUTTERS) {
    const int first = owned + i * x.rows;
    x.pieces[pieces + i] = piece{first, min(first + x.rows, T), T, T};
  }
  if (me == 0) x.count[0] = pieces + rest, x.count[1] = 0;
}

/* ---- launching ---- */

enum { BLOCK_TABLES = 2 };

/* Offsets in the workspace; must be equal when the workspace is sized and when the kernel runs. */
typedef struct layout {
  size_t count[BLOCK_TABLES], pieces[BLOCK_TABLES], stats, sums, turns, bytes;
  int rows[BLOCK_TABLES], most[BLOCK_TABLES];
  int together; /* of the tables */
} layout;

static inline size_t reserve(size_t *bytes, int64_t n) {
  const size_t at = *bytes;
  *bytes += ((size_t)n + 255) / 256 * 256;
  return at;
}

/* `first` is q's operand, `offsets` the operand of document offsets. rows[i]: rows per piece of table i, of
 * `tables`. */
static inline layout layout_of(const rfr_call *call, int first, int offsets, const int rows[BLOCK_TABLES], int tables) {
  const int64_t T = call->in[first].type.shape[0], H = call->in[first].type.shape[1];
  const int64_t n = call->in[offsets].type.shape[0] - 1, owners = n + 1 < T ? n + 1 : T;
  layout l = {};
  l.together = 1;
  for (int i = 0; i < tables; i++) {
    l.rows[i] = rows[i];
    l.most[i] = (int)((T + owners * (rows[i] - 1)) / rows[i]);
    l.count[i] = reserve(&l.bytes, 2 * sizeof(int));
    l.pieces[i] = reserve(&l.bytes, (int64_t)sizeof(piece) * l.most[i]);
  }
  l.stats = reserve(&l.bytes, first > 0 ? 8 * T * H : 0);
  return l;
}

static inline problem problem_of(const rfr_call *call, int first) {
  const rfr_arg *q = &call->in[first];
  const float scale = (float)call->attr[0].f, cap = (float)call->attr[3].f;
  problem p = {};
  p.q = matrix{q[0].data, q[0].stride[0], q[0].stride[1]};
  p.k = matrix{q[1].data, q[1].stride[0], q[1].stride[1]};
  p.v = matrix{q[2].data, q[2].stride[0], q[2].stride[1]};
  p.T = (int)q->type.shape[0];
  p.H = (int)q->type.shape[1];
  p.Hk = (int)q[1].type.shape[1];
  p.D = (int)q->type.shape[2];
  p.causal = (int)call->attr[1].i;
  p.window = call->attr[2].i < p.T ? (int)call->attr[2].i : 0; /* a window of at least T rows has no effect */
  p.scale = scale;
  p.cap = cap * LOG2E;
  p.bend = cap != 0 ? scale / cap : 0;
  p.factor = cap != 0 ? 1 : scale * LOG2E;
  return p;
}

/* Fills the tables of pieces on the device. */
static inline void cut_rows(const rfr_call *call, const problem *p, const layout *l, int offsets, int tables) {
  char *at = (char *)call->workspace;
  const int n = (int)call->in[offsets].type.shape[0] - 1;
  const int32_t *documents = (const int32_t *)call->in[offsets].data;
  table x[BLOCK_TABLES] = {};
  for (int i = 0; i < tables; i++)
    x[i] = table{(piece *)(at + l->pieces[i]), (int *)(at + l->count[i]), l->rows[i], l->together};
  attention_pieces<<<(unsigned)tables, CUTTERS, 0, rfi_stream(call)>>>(documents, n, p->T, x[0], x[1]);
}

static inline rfr_status allow(const void *kernel, int bytes) {
  return rfi_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                        "raising the shared memory limit");
}

typedef void (*kernel_fn)(problem);
static inline rfr_status launch(const rfr_call *call, kernel_fn kernel, const problem *given, const layout *l,
                                int which, int heads, int threads, int bytes) {
  enum { DOCUMENTS = 256 }; /* with this many documents the grid covers all pieces */
  const int full = (given->T + l->rows[which] - 1) / l->rows[which] + DOCUMENTS, most = l->most[which];
  problem p = *given;
  p.pieces = (const piece *)((char *)call->workspace + l->pieces[which]);
  p.count = (const int *)((char *)call->workspace + l->count[which]);
  p.reverse = which == 0;
  const rfr_status s = allow((const void *)kernel, bytes);
  if (s != RFR_OK) return s;
  kernel<<<(unsigned)((most < full ? most : full) * heads), (unsigned)threads, (size_t)bytes, rfi_stream(call)>>>(p);
  return RFR_OK;
}

typedef rfr_status (*launch_fn)(const rfr_call *call, const problem *p, const layout *l);

/* The forward; `bf16` and `f16` are the launchers for each type. */
static inline rfr_status run_forward(const rfr_call *call, const layout *l, launch_fn bf16, launch_fn f16) {
  problem p = problem_of(call, 0);
  p.out[0] = call->out[0].data;
  p.row[0] = call->out[0].stride[0];
  p.lse = (float *)call->out[1].data;
  if (p.T == 0 || p.H == 0) return RFR_OK;
  cut_rows(call, &p, l, 3, 1);
  const rfr_status s = (call->in[0].type.dtype == RFR_BF16 ? bf16 : f16)(call, &p, l);
  return s == RFR_OK ? rfi_cuda_launched("attention") : s;
}

static inline problem backward_problem_of(const rfr_call *call) {
  const rfr_arg *dy = &call->in[0];
  problem p = problem_of(call, 1);
  p.dy = matrix{dy->data, dy->stride[0], dy->stride[1]};
  p.lse = (float *)call->in[5].data;
  for (int i = 0; i < 3; i++) {
    p.out[i] = call->out[i].data;
    p.row[i] = call->out[i].stride[0];
  }
  return p;
}

/* The backward, with `tables` tables of pieces; `sign`: the sign of delta in the statistics. */
static inline rfr_status run_backward(const rfr_call *call, const layout *l, int tables, float sign, launch_fn bf16,
                                      launch_fn f16) {
  const rfr_arg *out = &call->in[4];
  const bool is_bf16 = call->in[1].type.dtype == RFR_BF16;
  const matrix o = {out->data, out->stride[0], out->stride[1]};
  problem p = backward_problem_of(call);
  p.stats = (float2 *)((char *)call->workspace + l->stats);
  if (p.T == 0 || p.H == 0) return RFR_OK;
  cut_rows(call, &p, l, 6, tables);
  const unsigned grid = (unsigned)(rfi_blocks(p.T, STATS_ROWS) * p.H);
  if (is_bf16) attention_stats<rfi_bf16><<<grid, STATS_THREADS, 0, rfi_stream(call)>>>(p, o, sign);
  else attention_stats<rfi_f16><<<grid, STATS_THREADS, 0, rfi_stream(call)>>>(p, o, sign);
  const rfr_status s = (is_bf16 ? bf16 : f16)(call, &p, l);
  return s == RFR_OK ? rfi_cuda_launched("attention_bwd") : s;
}

/* Requires rows that are multiples of 16 bytes, a positive scale (so that the largest dot product is the largest
 * score), and indices that do not overflow even by a tile. */
static inline int takes_of(const rfr_call *call, int first, int64_t most_d) {
  const rfr_arg *q = &call->in[first];
  const int64_t D = q->type.shape[2];
  if (q->type.dtype != RFR_BF16 && q->type.dtype != RFR_F16) return 0;
  if (D % 8 != 0 || D < 8 || D > most_d || !((float)call->attr[0].f > 0)) return 0;
  for (int i = 0; i < call->n_in; i++) {
    const rfr_arg *x = &call->in[i];
    const int r = x->type.rank;
    if (r == 3 && (x->stride[2] != 1 || x->stride[0] % 8 != 0 || x->stride[1] % 8 != 0)) return 0;
    if (r < 3 && x->type.shape[r - 1] > 1 && x->stride[r - 1] != 1) return 0; /* lse, offsets: dense */
    if (r == 2 && x->type.shape[0] > 1 && x->stride[0] != x->type.shape[1]) return 0;
  }
  return q->type.shape[0] < 1 << 30 && q->type.shape[0] * q->type.shape[1] < 1 << 30;
}
#endif
