/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of bf16 matrices on the matrix unit (AMX), for what oneDNN is slow at:
 *
 *   - results in f32, the gradients of weights before all. They are larger than what is multiplied
 *     and not read again before the optimizer, so those larger than a cache are written past it:
 *     a line that is stored the usual way is first read from memory.
 *   - rows that do not lie close together, such as the gradients of logits.
 *
 * The smaller of the two dimensions of C is "fixed": its operand is packed whole and stays in the L2
 * cache. The larger one is "moving": a thread packs a few panels of its operand at a time and
 * multiplies them with all that is fixed. Which thread takes which panels decides no bits.
 *
 * A panel is what one 32 x 32 block of C reads along K, in the order in which it reads it: for each
 * step of 32, of A the upper 16 rows (1 KiB), then the lower; of B the left 16 columns, as 16 pairs
 * of rows, then the right. Outside the matrix it is zero, in all three dimensions, so tails cost
 * nothing in the loop, whose four loads a step stand in the shadow of four products.
 *
 * Invariants: a thread owns a block of C from first to last step; K is cut by K alone, so the bits
 * depend on K and on nothing else. The unit takes subnormal numbers for zero.
 */
#include "backend/onednn/amx_gemm.h"

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <omp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/onednn/amx_pack.h"

enum {
  PASS_K = 1024,      /* K of a pass: what is packed at a time */
  DEPTH = 512,        /* K of a panel that stays in the L1 cache while the fixed ones pass by */
  GROUP = 8,          /* moving panels: 512 bytes of a row where rows lie along M or N */
  FIXED_ROWS = 1024,  /* at most, at a time */
  MOVING_ROWS = 4096, /* at most, where sums are kept from pass to pass */
  BLOCK_FLOATS = AMX_BLOCK * AMX_BLOCK,
  STREAM_BYTES = 2 << 20, /* results that no L2 cache holds */
};

/* Element (i, k) of an operand, i along M or N, is at i*is + k*ks. */
typedef struct operand {
  int64_t rows, is, ks;
  amx_pack_fn *pack;
} operand;

/* Scratch: the fixed panels; for each thread its moving panels and, when there is one pass, a
 * row of blocks of C; the blocks of all of C when there are several. */
struct rfi_amx_product {
  rfi_gemm_desc d;
  operand fixed, moving;
  bool b_moves, streams;
  int64_t pass_k, fixed_rows, moving_rows, group;
  int passes;
  size_t fixed_bytes, group_bytes, thread_bytes;
};
typedef rfi_amx_product product;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/* ---- a block ---- */

/* c (32 x 32) = or += A B over k, a multiple of 32. */
static void multiply(int64_t k, const uint16_t *a, const uint16_t *b, float *c, bool add) {
  const uint16_t *end = a + k * AMX_BLOCK;
  const int row = AMX_BLOCK * 4;
  amx_reads_memory();
  if (add) {
    _tile_loadd(0, c, row);
    _tile_loadd(1, c + 16, row);
    _tile_loadd(2, c + 16 * AMX_BLOCK, row);
    _tile_loadd(3, c + 16 * AMX_BLOCK + 16, row);
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
  }
  _tile_stored(0, c, row);
  _tile_stored(1, c + 16, row);
  _tile_stored(2, c + 16 * AMX_BLOCK, row);
  _tile_stored(3, c + 16 * AMX_BLOCK + 16, row);
  amx_reads_memory();
}

/* 16 elements of y, or fewer: bias and what is there are added, then one rounding. */
static void finish16(const product *p, const void *bias, void *y, int64_t row, int64_t col, __m512 x) {
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

static void finish(const product *p, const void *bias, void *y, int64_t row, int64_t col, const float *c) {
  const int64_t m = min64(p->d.M - row, AMX_BLOCK);
  for (int64_t i = 0; i < m; i++)
    for (int h = 0; h < 2; h++)
      finish16(p, bias, y, row + i, col + 16 * h, _mm512_loadu_ps(c + i * AMX_BLOCK + 16 * h));
}

/* ---- a pass: some fixed rows, some moving rows, a part of K ---- */

typedef struct pass {
  const uint16_t *fixed, *moving; /* of this matrix of the batch */
  const void *bias;
  void *y;
  int64_t f0, fn, v0, vn, k0, k; /* rows, rows, steps: first, how many */
  bool first, last;              /* over K */
  uint16_t *packed;
  char *threads;
  float *sums; /* NULL when this is the only pass */
} pass;

static void pack(const operand *x, uint16_t *to, const uint16_t *from, int64_t row, int64_t rows, const pass *s) {
  x->pack(to, from + row * x->is + s->k0 * x->ks, rows, s->k, x->is, x->ks);
}

/* The moving rows from i on, as many as a group has. */
static void run_group(const product *p, const pass *s, int64_t i, char *own) {
  const int64_t n = min64(s->vn - i, p->group * AMX_BLOCK), deep = round_up(s->k, AMX_STEP);
  const int64_t panels = ceil_div(s->fn, AMX_BLOCK);
  uint16_t *group = (uint16_t *)own;
  pack(&p->moving, group, s->moving, s->v0 + i, n, s);
  for (int64_t v = 0; v < n; v += AMX_BLOCK) {
    float *blocks = s->sums ? s->sums + (i + v) / AMX_BLOCK * panels * BLOCK_FLOATS : (float *)(own + p->group_bytes);
    for (int64_t k = 0; k < deep; k += DEPTH)
      for (int64_t u = 0; u < panels; u++) {
        const uint16_t *x = group + v * deep + k * AMX_BLOCK, *f = s->packed + (u * deep + k) * AMX_BLOCK;
        const int64_t depth = min64(deep - k, DEPTH), at = s->v0 + i + v, fixed_at = s->f0 + u * AMX_BLOCK;
        float *c = blocks + u * BLOCK_FLOATS;
        multiply(depth, p->b_moves ? f : x, p->b_moves ? x : f, c, !s->first || k > 0);
        if (s->last && k + depth == deep)
          finish(p, s->bias, s->y, p->b_moves ? fixed_at : at, p->b_moves ? at : fixed_at, c);
      }
  }
}

static void run_pass(const product *p, const pass *s) {
  const int64_t panels = ceil_div(s->fn, AMX_BLOCK), deep = round_up(s->k, AMX_STEP), step = p->group * AMX_BLOCK;
#pragma omp parallel num_threads(p->d.threads) if (p->d.threads > 1)
  {
    char *own = s->threads + (size_t)omp_get_thread_num() * p->thread_bytes;
    amx_begin();
#pragma omp for schedule(static)
    for (int64_t u = 0; u < panels; u++)
      pack(&p->fixed, s->packed + u * deep * AMX_BLOCK, s->fixed, s->f0 + u * AMX_BLOCK,
           min64(s->fn - u * AMX_BLOCK, AMX_BLOCK), s);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < s->vn; i += step) run_group(p, s, i, own);
    amx_end();
  }
}

/* ---- a product ---- */

static void run_matrix(const product *p, pass s, char *scratch) {
  s.packed = (uint16_t *)scratch;
  s.threads = scratch + p->fixed_bytes;
  if (p->passes > 1) s.sums = (float *)(s.threads + (size_t)p->d.threads * p->thread_bytes);
  for (s.f0 = 0; s.f0 < p->fixed.rows; s.f0 += p->fixed_rows)
    for (s.v0 = 0; s.v0 < p->moving.rows; s.v0 += p->moving_rows)
      for (s.k0 = 0; s.k0 < p->d.K; s.k0 += p->pass_k) {
        s.fn = min64(p->fixed.rows - s.f0, p->fixed_rows);
        s.vn = min64(p->moving.rows - s.v0, p->moving_rows);
        s.k = min64(p->d.K - s.k0, p->pass_k);
        s.first = s.k0 == 0;
        s.last = s.k0 + s.k == p->d.K;
        run_pass(p, &s);
      }
}

void rfi_amx_execute(const product *p, const void *a, const void *b, const void *bias, void *y, void *scratch) {
  const int64_t size = p->d.M * p->d.N * (p->d.y == RFI_GEMM_F32 ? 4 : 2);
  for (int64_t z = 0; z < p->d.batch; z++) {
    const uint16_t *az = (const uint16_t *)a + z * p->d.a_stride[0], *bz = (const uint16_t *)b + z * p->d.b_stride[0];
    const pass s = {
        .fixed = p->b_moves ? az : bz, .moving = p->b_moves ? bz : az, .bias = bias, .y = (char *)y + z * size};
    run_matrix(p, s, scratch);
  }
}

/* As many panels as leave no thread idle for long at the end. */
static int64_t group_of(int64_t panels, int threads) {
  int64_t best = 1, least = INT64_MAX;
  for (int64_t g = GROUP; g > 0; g--) {
    int64_t longest = ceil_div(ceil_div(panels, g), threads) * g;
    if (longest < least) best = g, least = longest;
  }
  return best;
}

/* Rows lie along one dimension; `apart` when they are longer than that dimension. */
static bool is_matrix(int64_t rows, int64_t cols, const int64_t stride[3], bool *apart) {
  *apart |= stride[2] == 1 ? stride[1] > cols : stride[2] > rows;
  return stride[1] == 1 || stride[2] == 1;
}

static bool pays(const rfi_gemm_desc *d) {
  bool apart = false;
  if (d->a != RFI_GEMM_BF16 || d->b != RFI_GEMM_BF16 || d->y == RFI_GEMM_F16 || d->bias == RFI_GEMM_F16 ||
      !is_matrix(d->M, d->K, d->a_stride, &apart) || !is_matrix(d->K, d->N, d->b_stride, &apart))
    return false;
  return d->M >= AMX_BLOCK && d->N >= AMX_BLOCK && (apart || d->y == RFI_GEMM_F32);
}

rfi_gemm_status rfi_amx_create(const rfi_gemm_desc *d, product **out, size_t *scratch) {
  *out = NULL;
  *scratch = 0;
  if (!pays(d)) return RFI_GEMM_UNSUPPORTED;
  product *p = calloc(1, sizeof *p);
  if (!p) return RFI_GEMM_NO_MEMORY;
  const operand a = {d->M, d->a_stride[1], d->a_stride[2], amx_pack_a};
  const operand b = {d->N, d->b_stride[2], d->b_stride[1], amx_pack_b};
  p->d = *d;
  if (d->threads < 1) p->d.threads = 1;
  p->b_moves = d->N >= d->M;
  p->fixed = p->b_moves ? a : b;
  p->moving = p->b_moves ? b : a;
  p->streams = !d->accumulate && d->M * d->N * 4 >= STREAM_BYTES;
  p->pass_k = round_up(ceil_div(d->K, ceil_div(d->K, PASS_K)), AMX_STEP);
  p->passes = (int)ceil_div(d->K, p->pass_k);
  p->fixed_rows = min64(round_up(p->fixed.rows, AMX_BLOCK), FIXED_ROWS);
  p->moving_rows = round_up(p->moving.rows, AMX_BLOCK);
  if (p->passes > 1) p->moving_rows = min64(p->moving_rows, MOVING_ROWS);
  p->group = group_of(p->moving_rows / AMX_BLOCK, p->d.threads);
  p->fixed_bytes = (size_t)(p->fixed_rows * p->pass_k) * 2;
  p->group_bytes = (size_t)(p->group * AMX_BLOCK * p->pass_k) * 2;
  p->thread_bytes = p->group_bytes + (p->passes > 1 ? 0 : (size_t)(p->fixed_rows * AMX_BLOCK) * 4);
  *scratch = p->fixed_bytes + (size_t)p->d.threads * p->thread_bytes;
  if (p->passes > 1) *scratch += (size_t)(p->fixed_rows * p->moving_rows) * 4;
  *out = p;
  return RFI_GEMM_OK;
}

void rfi_amx_destroy(product *p) { free(p); }

int rfi_amx_open(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else /* the compiler does not know the unit, or the machine is another */

int rfi_amx_open(void) { return 0; }
rfi_gemm_status rfi_amx_create(const rfi_gemm_desc *d, rfi_amx_product **out, size_t *scratch) {
  (void)d, (void)scratch;
  *out = NULL;
  return RFI_GEMM_UNSUPPORTED;
}
void rfi_amx_execute(const rfi_amx_product *p, const void *a, const void *b, const void *bias, void *y, void *scratch) {
  (void)p, (void)a, (void)b, (void)bias, (void)y, (void)scratch;
}
void rfi_amx_destroy(rfi_amx_product *p) { (void)p; }

#endif
