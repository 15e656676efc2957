/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs of packed panels, for cases in which oneDNN is slow:
 *
 *   - bf16 with AMX. Results larger than the cache, mainly f32 results of wgrads, are not read before the optimizer. So
 *     they are written by non-temporal stores: a normal store first reads the line from memory.
 *   - f32, if the rows of B along N are at least a page long: addresses at multiples of 4 KiB map to the same cache
 *     sets, and oneDNN takes up to twice its usual time.
 *   - grouped bf16, because oneDNN needs the sizes of groups in advance.
 *
 * The smaller dimension of C is "fixed": its operand is packed completely and stays in the L2 cache. The larger one is
 * "moving": a thread packs a few panels of its operand at a time and multiplies them with all fixed panels. Results do
 * not depend on the assignment of panels to threads.
 *
 * One team of threads runs all passes of a GEMM, and of all groups. There is one barrier per pass, after the fixed
 * panels are packed. A thread that has finished a pass packs fixed panels of the next pass into the other of two
 * buffers.
 *
 * A panel has the elements that one block of C reads along K, in the order of reading. It is zero-padded in all three
 * dimensions, so the loop needs no tails. The size of a block depends on the instructions:
 *
 *   AMX, bf16          32 x 32. For each step of 32 along K, a panel of A has the upper 16 rows (1 KiB), then the lower
 *                      16; a panel of B has the left 16 columns, as 16 pairs of rows, then the right 16. The four loads
 *                      of a step overlap with four tile multiplications
 *   AVX512-BF16        panel_dot.h; only for groups, without AMX
 *   f32                panel_f32.h
 *
 * Invariants: one thread computes a block of C from the first step to the last. The passes over K depend only on K, and
 * so do the bits. AMX and AVX512-BF16 treat subnormal numbers as zero.
 */
#include "backend/onednn/panel_gemm.h"

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <omp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/onednn/panel_dot.h"

enum {
  PASS_K = 1024,          /* the part of K that is packed in one pass */
  GROUP_ROW_BYTES = 512,  /* bytes of a row of moving panels, if rows lie along M or N */
  FIXED_BYTES = 2 << 20,  /* maximum size of the fixed panels of a pass */
  MOVING_ROWS = 4096,     /* maximum, if sums are kept from pass to pass */
  STREAM_BYTES = 2 << 20, /* results of this size exceed an L2 cache */
  LEAST = 32,             /* minimum rows and columns of C */
  PAGE = 4096,
  LINE = 64,
};

typedef struct shadow shadow;

/* The parts that differ between bf16 and f32. */
typedef struct unit {
  int size;       /* bytes of an element */
  int64_t bm, bn; /* size of a block of C */
  int64_t step;   /* K is padded to a multiple of it */
  int64_t depth;  /* K of a moving panel that stays in the L1 cache while fixed panels are read */
  void (*pack_a)(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps);
  void (*pack_b)(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps);
  /* c (bm x bn) = from + A B over k steps; from NULL: zeros */
  void (*multiply)(int64_t k, const void *a, const void *b, const float *from, float *c, shadow *s);
} unit;

/* Element (i, k) of an operand, i along M or N, is at i*is + k*ks. */
typedef struct operand {
  int64_t rows, is, ks, block; /* rows of a panel */
  void (*pack)(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps);
} operand;

/* Scratch: the fixed panels, twice with several passes; per thread its moving panels and two complete blocks. With one
 * pass over K, also a row of blocks of C per thread; with several passes, all blocks of C. */
struct rfi_panel_gemm {
  rfi_module_gemm d;
  const unit *unit;
  operand fixed, moving;
  bool b_moves, streams;
  int64_t pass_k, fixed_rows, moving_rows, group;
  int passes; /* number of passes over K */
  size_t fixed_bytes, group_bytes, thread_bytes;
  size_t most_fixed, most_thread; /* the maximum over all runs, if a dimension varies */
  int places;                     /* number of buffers for fixed panels */
};
typedef rfi_panel_gemm gemm;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/* ---- results ---- */

/* Up to 16 elements of y: adds bias and the old value, then rounds once. */
static void finish16(const gemm *p, const void *bias, void *y, int64_t row, int64_t col, __m512 x) {
  const int64_t n = p->d.N - col, at = row * p->d.N + col;
  if (n <= 0) return;
  const __mmask16 in = n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1);
  if (p->d.bias == RFI_GEMM_F32) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(in, (const float *)bias + col));
  if (p->d.bias == RFI_GEMM_BF16) x = _mm512_add_ps(x, amx_widen(in, (const uint16_t *)bias + col));
  if (p->d.y == RFI_GEMM_F32) {
    float *to = (float *)y + at;
    if (p->d.accumulate) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(in, to));
    if (p->streams && ((uintptr_t)to & 63) == 0 && n >= 16) _mm512_stream_ps(to, x);
    else _mm512_mask_storeu_ps(to, in, x);
  } else {
    uint16_t *to = (uint16_t *)y + at;
    if (p->d.accumulate) x = _mm512_add_ps(x, amx_widen(in, to));
    _mm256_mask_storeu_epi16(to, in, (__m256i)_mm512_cvtneps_pbh(x));
  }
}

/* A complete block of C. Its rows are stored while the next block is multiplied, so that stores overlap with
 * arithmetic. */
struct shadow {
  const gemm *p;
  const void *bias;
  void *y;
  const float *c;         /* the next row of the block */
  int64_t row, col, left; /* position in y, and number of rows left */
};

static inline void finish_rows(shadow *s, int64_t n) {
  const int64_t width = s->p->unit->bn;
  for (; n > 0 && s->left > 0; n--, s->left--, s->row++, s->c += width)
    for (int64_t j = 0; j < width; j += 16) finish16(s->p, s->bias, s->y, s->row, s->col + j, _mm512_load_ps(s->c + j));
}

/* ---- units ---- */

static void amx_multiply(int64_t k, const void *a_panel, const void *b_panel, const float *from, float *c, shadow *s) {
  const uint16_t *a = a_panel, *b = b_panel, *end = a + k * AMX_BLOCK;
  const int row = AMX_BLOCK * 4;
  amx_reads_memory();
  if (from) {
    _tile_loadd(0, from, row);
    _tile_loadd(1, from + 16, row);
    _tile_loadd(2, from + 16 * AMX_BLOCK, row);
    _tile_loadd(3, from + 16 * AMX_BLOCK + 16, row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (; a < end; a += 2 * AMX_TILE, b += 2 * AMX_TILE) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + AMX_TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + AMX_TILE, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    finish_rows(s, 4);
  }
  _tile_stored(0, c, row);
  _tile_stored(1, c + 16, row);
  _tile_stored(2, c + 16 * AMX_BLOCK, row);
  _tile_stored(3, c + 16 * AMX_BLOCK + 16, row);
  amx_reads_memory();
}

static void f32_multiply(int64_t k, const void *a, const void *b, const float *from, float *c, shadow *s) {
  for (int i = 0; i < F32_A; i += F32_SLICE) {
    const float *sum = from ? from + i * F32_B : NULL;
    for (int64_t p = 0; p < k; p += F32_SUM, sum = c + i * F32_B)
      f32_slice(min64(k - p, F32_SUM), (const float *)a + p * F32_A + i, (const float *)b + p * F32_B, sum,
                c + i * F32_B);
    finish_rows(s, F32_SLICE);
  }
}

static void dot_multiply(int64_t k, const void *a, const void *b, const float *from, float *c, shadow *s) {
  for (int i = 0; i < F32_A; i += F32_SLICE) {
    dot_slice(k, (const uint32_t *)a + i, b, from ? from + i * F32_B : NULL, c + i * F32_B);
    finish_rows(s, F32_SLICE);
  }
}

enum { AMX_DEPTH = 256, DOT_DEPTH = 512, F32_DEPTH = 256 };
static const unit amx_unit = {.size = 2,
                              .bm = AMX_BLOCK,
                              .bn = AMX_BLOCK,
                              .step = AMX_STEP,
                              .depth = AMX_DEPTH,
                              .pack_a = amx_pack_a,
                              .pack_b = amx_pack_b,
                              .multiply = amx_multiply};
static const unit dot_unit = {.size = 2,
                              .bm = F32_A,
                              .bn = F32_B,
                              .step = DOT_STEP,
                              .depth = DOT_DEPTH,
                              .pack_a = dot_pack_a,
                              .pack_b = dot_pack_b,
                              .multiply = dot_multiply};
static const unit f32_unit = {.size = 4,
                              .bm = F32_A,
                              .bn = F32_B,
                              .step = F32_STEP,
                              .depth = F32_DEPTH,
                              .pack_a = f32_pack_a,
                              .pack_b = f32_pack_b,
                              .multiply = f32_multiply};

/* ---- a pass: some fixed rows, some moving rows, a part of K ---- */

typedef struct pass {
  const char *fixed, *moving; /* of this matrix of the batch */
  const void *bias;
  void *y;
  int64_t f0, fn, v0, vn, k0, k; /* first and count: fixed rows, moving rows, steps of K */
  bool first, last;              /* the first, the last pass over K */
  char *packed, *threads;
  float *sums; /* NULL: there is only one pass */
} pass;

static const char *at(const gemm *p, const operand *x, const char *from, int64_t row, int64_t k) {
  return from + (row * x->is + k * x->ks) * p->unit->size;
}

/* Prefetches the old values of the block at (row, col), to which finish16 adds. The hardware prefetcher does not follow
 * rows of y that are pages long. */
static void fetch_block(const gemm *p, const void *y, int64_t row, int64_t col) {
  const int64_t size = p->d.y == RFI_GEMM_F32 ? 4 : 2, bytes = min64(p->d.N - col, p->unit->bn) * size;
  const int64_t end = min64(p->d.M, row + p->unit->bm);
  for (; row < end; row++)
    for (int64_t b = 0; b < bytes; b += LINE)
      __builtin_prefetch((const char *)y + (row * p->d.N + col) * size + b, 1, 2);
}

/* Multiplies one group of panels, the moving rows from i on. Complete blocks alternate between two buffers, which stay
 * in the L1 cache. */
static void run_group(const gemm *p, const pass *w, int64_t i, char *own) {
  const int64_t mb = p->moving.block, fb = p->fixed.block, size = p->unit->size, block = p->unit->bm * p->unit->bn;
  const int64_t n = min64(w->vn - i, p->group * mb), deep = round_up(w->k, p->unit->step), panels = ceil_div(w->fn, fb);
  float *complete = (float *)(own + p->group_bytes);
  shadow s = {.p = p, .bias = w->bias, .y = w->y};
  p->moving.pack(own, at(p, &p->moving, w->moving, w->v0 + i, w->k0), n, w->k, p->moving.is, p->moving.ks);
  int turn = 0;
  for (int64_t v = 0; v < n; v += mb) {
    float *blocks = w->sums ? w->sums + (i + v) / mb * panels * block : complete + 2 * block;
    for (int64_t k = 0; k < deep; k += p->unit->depth)
      for (int64_t u = 0; u < panels; u++) {
        const char *x = own + (v * deep + k * mb) * size, *f = w->packed + (u * deep + k) * fb * size;
        const int64_t depth = min64(deep - k, p->unit->depth);
        const bool ready = w->last && k + depth == deep;
        float *c = blocks + u * block, *to = ready ? complete + (turn ^= 1) * block : c;
        p->unit->multiply(depth, p->b_moves ? f : x, p->b_moves ? x : f, w->first && k == 0 ? NULL : c, to, &s);
        if (!ready) continue;
        finish_rows(&s, s.left);
        s.c = to;
        s.row = p->b_moves ? w->f0 + u * fb : w->v0 + i + v;
        s.col = p->b_moves ? w->v0 + i + v : w->f0 + u * fb;
        s.left = min64(p->d.M - s.row, p->unit->bm);
        if (p->d.accumulate && u + 1 < panels) /* the next block */
          fetch_block(p, w->y, s.row + (p->b_moves ? fb : 0), s.col + (p->b_moves ? 0 : fb));
      }
  }
  finish_rows(&s, s.left);
}

/* Called by each thread of the team. */
static void run_pass(const gemm *p, const pass *w) {
  const int64_t fb = p->fixed.block, deep = round_up(w->k, p->unit->step), step = p->group * p->moving.block;
  char *own = w->threads + (size_t)omp_get_thread_num() * p->most_thread;
#pragma omp for schedule(static)
  for (int64_t u = 0; u < w->fn; u += fb)
    p->fixed.pack(w->packed + u * deep * p->unit->size, at(p, &p->fixed, w->fixed, w->f0 + u, w->k0),
                  min64(w->fn - u, fb), w->k, p->fixed.is, p->fixed.ks);
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t i = 0; i < w->vn; i += step) run_group(p, w, i, own);
}

/* ---- a GEMM ---- */

/* Called by each thread of the team; *turn counts its passes. */
static void run_matrix(const gemm *p, pass s, char *scratch, int *turn) {
  s.threads = scratch + (size_t)p->places * p->most_fixed;
  if (p->passes > 1) s.sums = (float *)(s.threads + (size_t)p->d.threads * p->most_thread);
  for (s.f0 = 0; s.f0 < p->fixed.rows; s.f0 += p->fixed_rows)
    for (s.v0 = 0; s.v0 < p->moving.rows; s.v0 += p->moving_rows)
      for (s.k0 = 0; s.k0 < p->d.K; s.k0 += p->pass_k) {
        s.packed = scratch + (size_t)((*turn)++ % p->places) * p->most_fixed;
        s.fn = min64(p->fixed.rows - s.f0, p->fixed_rows);
        s.vn = min64(p->moving.rows - s.v0, p->moving_rows);
        s.k = min64(p->d.K - s.k0, p->pass_k);
        s.first = s.k0 == 0;
        s.last = s.k0 + s.k == p->d.K;
        run_pass(p, &s);
      }
}

/* The number of panels per group that minimizes the idle time of threads at the end. */
static int64_t group_of(int64_t most, int64_t panels, int threads) {
  int64_t best = 1, least = INT64_MAX;
  for (int64_t g = most; g > 0; g--) {
    int64_t longest = ceil_div(ceil_div(panels, g), threads) * g;
    if (longest < least) best = g, least = longest;
  }
  return best;
}

/* Elements are adjacent along one dimension. */
static bool is_matrix(const int64_t stride[3]) { return stride[1] == 1 || stride[2] == 1; }

/* Why oneDNN is used instead; NULL: this file is faster. */
static const char *prefers_onednn(rfi_panel_isa isa, const rfi_module_gemm *d) {
  static const char best[] = "oneDNN is as fast";
  if (d->a != d->b || d->y == RFI_GEMM_F16 || d->bias == RFI_GEMM_F16) return "types are mixed";
  if (d->M < LEAST || d->N < LEAST) return "fewer than 32 rows or columns";
  if (!is_matrix(d->a_stride) || !is_matrix(d->b_stride)) return "an operand has neither dense rows nor dense columns";
  if (isa == RFI_PANEL_DOT && !d->varies) return best;
  if (d->a == RFI_GEMM_BF16) return NULL;
  if (d->varies) return "in f32, groups are bitwise equal to separate GEMMs";
  const bool wide = d->b_stride[2] == 1 && d->b_stride[1] * 4 >= PAGE;
  return d->a == RFI_GEMM_F32 && d->y == RFI_GEMM_F32 && d->bias != RFI_GEMM_BF16 && wide ? NULL : best;
}

static int64_t most_group(const gemm *p) {
  const int64_t row = p->moving.block * p->unit->size;
  return (GROUP_ROW_BYTES + row - 1) / row;
}

/* Chooses blocks, passes and buffer sizes from the dimensions. */
static void lay_out(gemm *p) {
  const rfi_module_gemm *d = &p->d;
  const operand a = {d->M, d->a_stride[1], d->a_stride[2], p->unit->bm, p->unit->pack_a};
  const operand b = {d->N, d->b_stride[2], d->b_stride[1], p->unit->bn, p->unit->pack_b};
  const int64_t size = p->unit->size;
  p->b_moves = d->N >= d->M;
  p->fixed = p->b_moves ? a : b;
  p->moving = p->b_moves ? b : a;
  p->streams = !d->accumulate && d->M * d->N * 4 >= STREAM_BYTES;
  const int64_t mb = p->moving.block, fb = p->fixed.block;
  p->pass_k = round_up(ceil_div(d->K, ceil_div(d->K, PASS_K)), p->unit->step);
  p->passes = (int)ceil_div(d->K, p->pass_k);
  p->fixed_rows = min64(round_up(p->fixed.rows, fb), FIXED_BYTES / (p->pass_k * size) / fb * fb);
  p->moving_rows = round_up(p->moving.rows, mb);
  if (p->passes > 1) p->moving_rows = min64(p->moving_rows, MOVING_ROWS / mb * mb);
  p->group = group_of(most_group(p), p->moving_rows / mb, d->threads);
  p->fixed_bytes = (size_t)(p->fixed_rows * p->pass_k * size);
  p->group_bytes = (size_t)(p->group * mb * p->pass_k * size);
  p->thread_bytes = p->group_bytes + (size_t)(2 * mb * fb * 4) + (p->passes > 1 ? 0 : (size_t)(p->fixed_rows * mb) * 4);
}

/* Buffer sizes of the layout; if M or K varies, the maximum over all runs. Returns the total size. */
static size_t size_buffers(gemm *p) {
  gemm x = *p;
  const int64_t M = p->d.M, size = p->unit->size, pass_k = min64(round_up(p->d.K, p->unit->step), PASS_K);
  size_t sums = p->passes > 1 ? (size_t)(p->fixed_rows * p->moving_rows) * 4 : 0;
  p->most_fixed = p->fixed_bytes;
  p->most_thread = p->thread_bytes;
  p->places = p->d.varies || p->passes > 1 || p->d.batch > 1 || p->fixed_rows < p->fixed.rows ? 2 : 1;
  for (int i = 0; i < 2 && p->d.varies; i++) { /* with up to N rows A is fixed, with more it moves */
    x.d.M = i == 0 && x.d.varies == RFI_MODULE_VARIES_M ? min64(M, x.d.N) : M;
    lay_out(&x);
    const int64_t mb = x.moving.block, fb = x.fixed.block, rows = round_up(x.fixed.rows, fb);
    const int64_t fixed = min64(rows * pass_k * size, FIXED_BYTES), group = most_group(&x) * mb * pass_k * size;
    const int64_t several =
        min64(rows, FIXED_BYTES / (PASS_K / 2 * size)); /* with several passes each one has more than half of PASS_K */
    const size_t thread = (size_t)(group + 2 * mb * fb * 4 + rows * mb * 4);
    const size_t more = x.passes > 1 ? (size_t)(several * x.moving_rows) * 4 : 0;
    if ((size_t)fixed > p->most_fixed) p->most_fixed = (size_t)fixed;
    if (thread > p->most_thread) p->most_thread = thread;
    if (more > sums) sums = more;
  }
  return (size_t)p->places * p->most_fixed + (size_t)p->d.threads * p->most_thread + sums;
}

rfi_gemm_status rfi_panel_create(rfi_panel_isa isa, const rfi_module_gemm *d, gemm **out, size_t *scratch,
                                 const char **why) {
  *out = NULL;
  *scratch = 0;
  *why = prefers_onednn(isa, d);
  if (*why) return RFI_GEMM_UNSUPPORTED;
  gemm *p = calloc(1, sizeof *p);
  if (!p) return RFI_GEMM_NO_MEMORY;
  p->d = *d;
  if (d->threads < 1) p->d.threads = 1;
  p->unit = d->a == RFI_GEMM_F32 ? &f32_unit : isa == RFI_PANEL_AMX ? &amx_unit : &dot_unit;
  lay_out(p);
  *scratch = size_buffers(p);
  *out = p;
  return RFI_GEMM_OK;
}

static void begin(const gemm *p) {
  if (p->unit == &amx_unit) amx_begin();
}
static void end(const gemm *p) {
  if (p->unit == &amx_unit) amx_end();
  else _mm_sfence();
}

void rfi_panel_execute(const gemm *p, const void *a, const void *b, const void *bias, void *y, void *scratch) {
  const int64_t size = p->d.M * p->d.N * (p->d.y == RFI_GEMM_F32 ? 4 : 2), from = p->unit->size;
#pragma omp parallel num_threads(p->d.threads) if (p->d.threads > 1)
  {
    int turn = 0;
    begin(p);
    for (int64_t z = 0; z < p->d.batch; z++) {
      const char *az = (const char *)a + z * p->d.a_stride[0] * from,
                 *bz = (const char *)b + z * p->d.b_stride[0] * from;
      const pass s = {
          .fixed = p->b_moves ? az : bz, .moving = p->b_moves ? bz : az, .bias = bias, .y = (char *)y + z * size};
      run_matrix(p, s, scratch, &turn);
    }
    end(p);
  }
}

void rfi_panel_execute_groups(const gemm *p, int64_t groups, rfi_gemm_group_fn group, const void *user, void *scratch) {
#pragma omp parallel num_threads(p->d.threads) if (p->d.threads > 1)
  {
    int turn = 0;
    begin(p);
    for (int64_t g = 0; g < groups; g++) {
      const rfi_gemm_group x = group(user, g);
      gemm own = *p; /* a copy with this group's dimension */
      if (x.n == 0) continue;
      if (own.d.varies == RFI_MODULE_VARIES_M) own.d.M = x.n;
      else own.d.K = x.n;
      lay_out(&own);
      run_matrix(&own, (pass){.fixed = own.b_moves ? x.a : x.b, .moving = own.b_moves ? x.b : x.a, .y = x.y}, scratch,
                 &turn);
    }
    end(p);
  }
}

void rfi_panel_destroy(gemm *p) { free(p); }

void rfi_panel_pack(void *to, const void *b, int64_t K, int64_t N, int64_t ks, int64_t ns, int threads) {
  enum { PART = 4 * RFI_PANEL_COLUMNS }; /* columns at a time: 512 bytes of a row */
  const int64_t deep = round_up(K, RFI_PANEL_ROWS);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < N; n += PART)
    dot_pack((uint16_t *)to + n * deep, RFI_PANEL_COLUMNS, (const uint16_t *)b + n * ns, min64(N - n, PART), K, ns, ks);
}

rfi_panel_isa rfi_panel_open(int amx, int bf16) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  if (amx && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) return RFI_PANEL_AMX;
  return bf16 ? RFI_PANEL_DOT : RFI_PANEL_NONE;
}

#else /* the compiler has no AMX, or the target is not x86-64 */

rfi_panel_isa rfi_panel_open(int amx, int bf16) {
  (void)amx, (void)bf16;
  return RFI_PANEL_NONE;
}
rfi_gemm_status rfi_panel_create(rfi_panel_isa isa, const rfi_module_gemm *d, rfi_panel_gemm **out, size_t *scratch,
                                 const char **why) {
  (void)isa, (void)d, (void)scratch;
  *out = NULL;
  *why = "neither AMX nor AVX512-BF16";
  return RFI_GEMM_UNSUPPORTED;
}
void rfi_panel_execute(const rfi_panel_gemm *p, const void *a, const void *b, const void *bias, void *y,
                       void *scratch) {
  (void)p, (void)a, (void)b, (void)bias, (void)y, (void)scratch;
}
void rfi_panel_execute_groups(const rfi_panel_gemm *p, int64_t groups, rfi_gemm_group_fn group, const void *user,
                              void *scratch) {
  (void)p, (void)groups, (void)group, (void)user, (void)scratch;
}
void rfi_panel_destroy(rfi_panel_gemm *p) { (void)p; }
void rfi_panel_pack(void *to, const void *b, int64_t K, int64_t N, int64_t ks, int64_t ns, int threads) {
  (void)to, (void)b, (void)K, (void)N, (void)ks, (void)ns, (void)threads;
}

#endif
