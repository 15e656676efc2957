/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs of the portable kernel and of the library against a GEMM in double, for all
 * transpositions, views, bias, acc, batches. Each runs twice, and both results must be bitwise equal;
 * scratch has the reported size and a guard after it. Without the module only the portable
 * kernel is tested, and that the missing module is not an error.
 */
#include "backend/cpu/library.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "support/random.h"

enum { GUARD = 256, PATTERN = 0xa5 };

typedef struct shape {
  int64_t batch, M, N, K;
  int ta, tb, bias, acc, pad; /* pad: extra elements between rows of a and b */
  rfr_dtype in, out;
} shape;

typedef struct buffer {
  rfi_arg arg;
  int64_t bytes;
  double *wide; /* dense */
} buffer;

static size_t width(rfr_dtype d) { return d == RFR_F32 ? 4 : 2; }
static double get(const void *p, rfr_dtype d, int64_t i) {
  return d == RFR_F32 ? (double)((const float *)p)[i] : (double)rfr_float_from_bits(d, ((const uint16_t *)p)[i]);
}
static void put(void *p, rfr_dtype d, int64_t i, double x) {
  if (d == RFR_F32) ((float *)p)[i] = (float)x;
  else ((uint16_t *)p)[i] = (uint16_t)rfr_float_to_bits(d, (float)x);
}

static buffer make(rfr_dtype dtype, int rank, int64_t batch, int64_t rows, int64_t cols, int pad, uint64_t *seed) {
  buffer b = {.arg = {.type = {.dtype = dtype, .rank = rank}}};
  int64_t ld = cols + pad, n = batch * rows * cols;
  const int64_t shape[3] = {batch, rows, cols}, stride[3] = {rows * ld, ld, 1};
  for (int d = 0; d < rank; d++) {
    b.arg.type.shape[d] = shape[3 - rank + d];
    b.arg.stride[d] = stride[3 - rank + d];
  }
  b.bytes = batch * rows * ld * (int64_t)width(dtype);
  b.arg.data = aligned_alloc(64, (size_t)(b.bytes + 63) / 64 * 64 + 64);
  b.wide = calloc((size_t)n + 1, sizeof(double));
  assert_non_null(b.arg.data);
  assert_non_null(b.wide);
  memset(b.arg.data, 0x3f, (size_t)b.bytes);
  for (int64_t z = 0, e = 0; z < batch; z++)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j++, e++) {
        int64_t at = (z * rows + i) * ld + j;
        put(b.arg.data, dtype, at, rft_uniform(seed));
        b.wide[e] = get(b.arg.data, dtype, at);
      }
  return b;
}
static void drop(buffer *b) {
  free(b->arg.data);
  free(b->wide);
}

/* Runs twice from the same initial y and leaves the result there. */
static void run_twice(rfi_kernel_fn run, rfi_call *call, size_t scratch, const void *y0, int64_t y_bytes) {
  /* Aligned to 64 bytes and no more. */
  unsigned char *space = aligned_alloc(4096, (64 + scratch + GUARD + 4095) / 4096 * 4096), *work = space + 64;
  void *first = malloc((size_t)y_bytes + 1);
  assert_non_null(space);
  assert_non_null(first);
  call->workspace = work;
  for (int k = 0; k < 2; k++) {
    memset(work, k ? 0xff : 0, scratch); /* old contents must not matter; the second time they are NaN */
    memset(work + scratch, PATTERN, GUARD);
    memcpy(call->out[0].data, y0, (size_t)y_bytes);
    assert_int_equal(run(call), RFR_OK);
    for (int i = 0; i < GUARD; i++) assert_int_equal(work[scratch + (size_t)i], PATTERN);
    if (k == 0) memcpy(first, call->out[0].data, (size_t)y_bytes);
  }
  assert_memory_equal(first, call->out[0].data, (size_t)y_bytes);
  free(first);
  free(space);
}

static void check(rfi_cpu_library *library, const char *isa, const shape *s, int *taken) {
  uint64_t seed = (uint64_t)(s->M * 31 + s->N * 7 + s->K);
  int r = s->batch > 0 ? 3 : 2;
  int64_t batch = s->batch > 0 ? s->batch : 1, MN = s->M * s->N;
  buffer a = make(s->in, r, batch, s->ta ? s->K : s->M, s->ta ? s->M : s->K, s->pad, &seed);
  buffer b = make(s->in, r, batch, s->tb ? s->N : s->K, s->tb ? s->K : s->N, s->pad, &seed);
  buffer bias = make(s->in, 1, 1, 1, s->N, 0, &seed), y = make(s->out, r, batch, s->M, s->N, 0, &seed);
  rfi_arg in[4] = {a.arg, b.arg, bias.arg, y.arg};
  if (!s->bias) memset(&in[2], 0, sizeof in[2]);
  if (!s->acc) memset(&in[3], 0, sizeof in[3]);
  rfi_attr attr[3] = {rfi_i(s->ta), rfi_i(s->tb), rfi_i(s->out)};
  rfi_call call = {.n_in = 4, .n_out = 1, .in = in, .out = &y.arg, .attr = attr, .microbatch = -1, .threads = 2};
  void *y0 = malloc((size_t)y.bytes + 1);
  assert_non_null(y0);
  memcpy(y0, y.arg.data, (size_t)y.bytes);

  const rfi_kernel *kernel = rfi_cpu_kernel(isa, RFI_OP_matmul);
  rfi_kernel_fn runs[2] = {kernel->run, NULL};
  size_t scratch[2] = {kernel->workspace(&call), 0};
  assert_int_equal(
      rfi_cpu_library_select(library, rfi_op_def_get(RFI_OP_matmul), &call, &runs[1], &scratch[1], &call.library),
      RFR_OK);
  if (runs[1]) { /* an equal GEMM gets the same handle */
    rfi_kernel_fn run = NULL;
    size_t bytes = 0;
    void *handle = NULL;
    assert_int_equal(rfi_cpu_library_select(library, rfi_op_def_get(RFI_OP_matmul), &call, &run, &bytes, &handle),
                     RFR_OK);
    assert_ptr_equal(handle, call.library);
    assert_int_equal(bytes, scratch[1]);
    ++*taken;
  }
  double unit = s->out == RFR_F32 ? 0x1p-23 : 0x1p-8;
  for (int k = 0; k < 2; k++) {
    if (!runs[k]) continue;
    run_twice(runs[k], &call, scratch[k], y0, y.bytes);
    for (int64_t e = 0; e < batch * MN; e++) {
      int64_t z = e / MN, i = e % MN / s->N, j = e % s->N;
      double sum = s->bias ? bias.wide[j] : 0, size = 1;
      const double *za = a.wide + z * s->M * s->K, *zb = b.wide + z * s->N * s->K;
      for (int64_t p = 0; p < s->K; p++) {
        double x = za[s->ta ? p * s->M + i : i * s->K + p] * zb[s->tb ? j * s->K + p : p * s->N + j];
        sum += x;
        size += fabs(x);
      }
      if (s->acc) sum += y.wide[e];
      double got = get(y.arg.data, s->out, e), allowed = size * 0x1p-21 + fabs(sum) * unit;
      if (!(fabs(got - sum) <= allowed))
        fail_msg("%s %lldx%lldx%lldx%lld ta=%d tb=%d element %lld: %g, not %g", k ? "library" : "portable",
                 (long long)s->batch, (long long)s->M, (long long)s->N, (long long)s->K, s->ta, s->tb, (long long)e,
                 got, sum);
    }
  }
  free(y0);
  drop(&a), drop(&b), drop(&bias), drop(&y);
}

static rfr_ctx *open_ctx(const char *isa, int use) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.isa = isa;
  o.module_path = RFT_BINARY_DIR;
  o.use_onednn = use;
  return rfr_ctx_create(&o, &ctx) == RFR_OK ? ctx : NULL; /* the CPU may lack this instruction set */
}

static void products(void **state) {
  (void)state;
  static const char *const isas[] = {"v2", "v3", "v4"};
  static const int64_t sizes[][3] = {{1, 1, 1},      {5, 7, 3},     {13, 31, 17}, {64, 48, 33}, {1, 129, 70},
                                     {67, 1, 29},    {300, 41, 19}, {23, 290, 5}, {9, 11, 530}, {40, 24, 1},
                                     {96, 160, 128}, {0, 3, 4},     {3, 0, 4},    {3, 4, 0}};
  for (size_t v = 0; v < sizeof isas / sizeof isas[0]; v++) {
    rfr_ctx *ctx = open_ctx(isas[v], 1);
    if (!ctx) continue;
    rfi_cpu_library *library;
    assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
    int taken = 0, variant = 0;
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
      for (int t = 0; t < 4; t++)
        for (int d = 0; d < 3; d++, variant++) {
          shape s = {.batch = variant % 3 == 2 ? 3 : 0, .M = sizes[k][0], .N = sizes[k][1], .K = sizes[k][2]};
          s.ta = t & 1, s.tb = t >> 1, s.bias = variant % 2, s.acc = variant / 2 % 2, s.pad = variant % 5 == 0 ? 6 : 0;
          s.in = d ? RFR_BF16 : RFR_F32;
          s.out = d == 2 ? RFR_BF16 : RFR_F32;
          check(library, isas[v], &s, &taken);
        }
    if (strncmp(rfi_cpu_library_describe(library), "none", 4) != 0) assert_true(taken > 0);
    else assert_int_equal(taken, 0);
    print_message("%s: %s, %d of %d products\n", isas[v], rfi_cpu_library_describe(library), taken, variant);
    rfi_cpu_library_close(library);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
    rfr_ctx_destroy(ctx);
  }
}

/* Matrices of one row or column with gaps between the elements; oneDNN 3.7 reads some of them as dense. */
static void vectors(void **state) {
  static const int64_t sizes[][3] = {{1, 9, 4}, {9, 1, 4}, {1, 1, 70}, {9, 70, 1}};
  (void)state;
  rfr_ctx *ctx = open_ctx(NULL, 1);
  rfi_cpu_library *library;
  assert_non_null(ctx);
  assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
    for (int t = 0; t < 16; t++) {
      int taken = 0;
      const shape s = {.batch = t & 8 ? 3 : 0,
                       .M = sizes[k][0],
                       .N = sizes[k][1],
                       .K = sizes[k][2],
                       .ta = t & 1,
                       .tb = t >> 1 & 1,
                       .acc = t & 4,
                       .pad = 1,
                       .in = RFR_BF16,
                       .out = RFR_F32};
      check(library, "v2", &s, &taken);
    }
  rfi_cpu_library_close(library);
  rfr_ctx_destroy(ctx);
}

/* Sizes larger than the blocks of a GEMM, and results larger than a cache. */
static void large(void **state) {
  (void)state;
  static const int64_t sizes[][3] = {{1090, 1060, 40}, {33, 4130, 1030}, {70, 64, 2100}};
  rfr_ctx *ctx = open_ctx(NULL, 1);
  assert_non_null(ctx);
  rfi_cpu_library *library;
  assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
  int taken = 0;
  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
    for (int v = (int)k; v < 4; v += (int)k + 1) {
      shape s = {.M = sizes[k][0], .N = sizes[k][1], .K = sizes[k][2], .in = RFR_BF16};
      s.ta = v & 1, s.tb = v >> 1, s.bias = v == 2, s.acc = v == 3, s.pad = v == 1 ? 6 : 0;
      s.out = v == 1 ? RFR_BF16 : RFR_F32;
      check(library, rfi_ctx_isa(ctx), &s, &taken);
    }
  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
    for (int ta = 0; ta < (k == 1 ? 1 : 2); ta++) { /* f32 with rows longer than a page */
      shape s = {.M = sizes[k][0], .N = sizes[k][1], .K = sizes[k][2], .in = RFR_F32, .out = RFR_F32};
      s.ta = ta, s.bias = ta == 0, s.acc = ta, s.pad = 1030;
      check(library, rfi_ctx_isa(ctx), &s, &taken);
    }
  rfi_cpu_library_close(library);
  rfr_ctx_destroy(ctx);
}

/* From 1024 rows on B is packed once, with AVX512-BF16 and without AMX. The bits are those of fewer rows. */
static void packed(void **state) {
  (void)state;
  enum { M = 1100, FEW = 700, N = 200, K = 90, COPY = 256 * 96 * 2 };
  rfr_ctx *ctx = open_ctx(NULL, 1);
  assert_non_null(ctx);
  rfi_cpu_library *library;
  assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
  const bool packs = strstr(rfi_cpu_library_describe(library), " + own groups");
  for (int tb = 0; packs && tb < 2; tb++) {
    uint64_t seed = 5;
    buffer a = make(RFR_BF16, 2, 1, M, K, 0, &seed), y[2];
    buffer b = make(RFR_BF16, 2, 1, tb ? N : K, tb ? K : N, 0, &seed);
    size_t scratch[2];
    for (int i = 0; i < 2; i++) {
      y[i] = make(RFR_F32, 2, 1, i ? FEW : M, N, 0, &seed);
      const rfi_arg none = {.type = {.rank = -1}};
      rfi_arg in[4] = {a.arg, b.arg, none, none};
      in[0].type.shape[0] = i ? FEW : M;
      const rfi_attr attr[3] = {rfi_i(0), rfi_i(tb), rfi_i(RFR_F32)};
      rfi_call call = {.n_in = 4, .n_out = 1, .in = in, .out = &y[i].arg, .attr = attr, .microbatch = -1, .threads = 2};
      rfi_kernel_fn run;
      assert_int_equal(
          rfi_cpu_library_select(library, rfi_op_def_get(RFI_OP_matmul), &call, &run, &scratch[i], &call.library),
          RFR_OK);
      assert_non_null(run);
      run_twice(run, &call, scratch[i], y[i].arg.data, y[i].bytes);
    }
    assert_true(scratch[0] >= COPY);
    assert_true(scratch[1] < scratch[0]);
    assert_memory_equal(y[0].arg.data, y[1].arg.data, (size_t)y[1].bytes);
    drop(&a), drop(&b), drop(&y[0]), drop(&y[1]);
  }
  rfi_cpu_library_close(library);
  rfr_ctx_destroy(ctx);
}

/* Compares grouped GEMMs of the library with the portable kernel, which other tests compare with separate GEMMs. Rows
 * outside all groups are NaN and must not matter. Two runs are bitwise equal and stay within the reported scratch. */
static void groups(void **state) {
  (void)state;
  enum { G = 4 };
  static const struct {
    int64_t R, N, K;
    int32_t at[G + 1];
  } cases[] = {{200, 70, 96, {0, 1, 1, 130, 190}},
               {1500, 33, 40, {0, 1200, 1210, 1499, 1500}},
               {64, 1100, 1300, {0, 64, 64, 64, 64}},
               {300, 48, 2100, {0, 33, 65, 165, 299}},
               {40, 64, 32, {0, 0, 0, 0, 0}}};
  rfr_ctx *ctx = open_ctx(NULL, 1);
  assert_non_null(ctx);
  rfi_cpu_library *library;
  assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
  int taken = 0;
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++)
    for (int v = 0; v < 6; v++) { /* forward, dgrad, forward with separate weights; wgrad, accumulated, in bf16 */
      const int64_t R = cases[k].R, N = cases[k].N, K = cases[k].K;
      uint64_t seed = k * 8 + (uint64_t)v;
      int32_t at[G + 1];
      memcpy(at, cases[k].at, sizeof at);
      const rfr_dtype to = v == 3 || v == 4 ? RFR_F32 : RFR_BF16;
      buffer x = make(RFR_BF16, 2, 1, R, v == 1 ? N : K, v == 2 ? 6 : 0, &seed);
      buffer w = make(RFR_BF16, 3, G, N, K, 0, &seed), dy = make(RFR_BF16, 2, 1, R, N, 0, &seed);
      buffer y = v < 3 ? make(to, 2, 1, R, v == 1 ? K : N, 0, &seed) : make(to, 3, G, N, K, 0, &seed);
      for (int64_t r = at[G]; r < R; r++) {
        memset((uint16_t *)x.arg.data + r * x.arg.stride[0], 0xff, (size_t)x.arg.type.shape[1] * 2);
        memset((uint16_t *)dy.arg.data + r * N, 0xff, (size_t)N * 2);
      }
      const rfi_arg offsets = {at, {.dtype = RFR_I32, .rank = 1, .shape = {G + 1}}, {1}}, none = {.type = {.rank = -1}};
      rfi_arg in[5 + G] = {x.arg, w.arg, offsets, none, none};
      if (v >= 3) in[0] = dy.arg, in[1] = x.arg;
      if (v == 4) in[3] = y.arg;
      if (v == 2) in[1] = none;
      for (int g = 0; g < G; g++)
        in[5 + g] =
            (rfi_arg){(uint16_t *)w.arg.data + g * N * K, {.dtype = RFR_BF16, .rank = 2, .shape = {N, K}}, {K, 1}};
      const rfi_attr attr[2] = {rfi_i(v >= 3 ? (int64_t)to : v != 1), rfi_i(to)};
      rfi_call call = {.n_in = v == 2  ? 5 + G
                               : v < 3 ? 3
                                       : 4,
                       .n_out = 1,
                       .in = in,
                       .out = &y.arg,
                       .attr = attr,
                       .threads = 2};
      const rfi_opcode code = v < 3 ? RFI_OP_grouped_matmul : RFI_OP_grouped_wgrad;
      void *y0 = malloc((size_t)y.bytes), *want = malloc((size_t)y.bytes);
      assert_true(y0 && want);
      memcpy(y0, y.arg.data, (size_t)y.bytes);
      const rfi_kernel *kernel = rfi_cpu_kernel(rfi_ctx_isa(ctx), code);
      run_twice(kernel->run, &call, kernel->workspace(&call), y0, y.bytes);
      memcpy(want, y.arg.data, (size_t)y.bytes);
      rfi_kernel_fn fn;
      size_t bytes;
      assert_int_equal(rfi_cpu_library_select(library, rfi_op_def_get(code), &call, &fn, &bytes, &call.library),
                       RFR_OK);
      if (fn) {
        run_twice(fn, &call, bytes, y0, y.bytes);
        taken++;
        const double sums = 3 * sqrt((double)(v < 3 ? v == 1 ? N : K : R)); /* magnitude of a sum */
        for (int64_t e = 0; e < y.bytes / (int64_t)width(to); e++) {
          const double a = get(y.arg.data, to, e), b = get(want, to, e);
          const double unit = to == RFR_F32 ? 0x1p-18 : 0x1p-7; /* bf16 results may be adjacent values */
          if (!(fabs(a - b) <= sums * 0x1p-16 + unit * fabs(b)))
            fail_msg("case %zu, %d: element %lld is %g, not %g", k, v, (long long)e, a, b);
        }
      }
      free(y0), free(want);
      drop(&x), drop(&w), drop(&dy), drop(&y);
    }
  const char *library_is = rfi_cpu_library_describe(library);
  print_message("%s: %d of the grouped GEMMs\n", library_is, taken);
  const bool own = strncmp(library_is, "none", 4) != 0 && strstr(library_is, " + own ");
  assert_int_equal(taken, own ? 6 * 5 : 0);
  rfi_cpu_library_close(library);
  rfr_ctx_destroy(ctx);
}

/* The library must not get operands with stride 0. */
static void repeated(void **state) {
  (void)state;
  rfr_ctx *ctx = open_ctx(NULL, 1);
  assert_non_null(ctx);
  rfi_cpu_library *library;
  assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
  uint64_t seed = 5;
  buffer a = make(RFR_F32, 2, 1, 6, 8, 0, &seed), b = make(RFR_F32, 2, 1, 8, 7, 0, &seed);
  buffer y = make(RFR_F32, 2, 1, 6, 7, 0, &seed);
  for (int k = 0; k < 2; k++) {
    rfi_arg in[2] = {a.arg, b.arg};
    in[k].stride[0] = 0;
    rfi_attr attr[3] = {rfi_i(0), rfi_i(0), rfi_i(RFR_F32)};
    rfi_call call = {.n_in = 2, .n_out = 1, .in = in, .out = &y.arg, .attr = attr, .threads = 1};
    rfi_kernel_fn run;
    size_t bytes;
    void *handle;
    assert_int_equal(rfi_cpu_library_select(library, rfi_op_def_get(RFI_OP_matmul), &call, &run, &bytes, &handle),
                     RFR_OK);
    assert_null(run);
    assert_null(handle);
  }
  drop(&a), drop(&b), drop(&y);
  rfi_cpu_library_close(library);
  rfr_ctx_destroy(ctx);
}

/* No module, or the module turned off: no error, and no GEMM is taken. */
static void without(void **state) {
  (void)state;
  rfr_ctx *ctx = open_ctx(NULL, 0);
  assert_non_null(ctx);
  for (int k = 0; k < 2; k++) {
    rfi_cpu_library *library;
    assert_int_equal(rfi_cpu_library_open(ctx, &library), RFR_OK);
    assert_int_equal(strncmp(rfi_cpu_library_describe(library), "none", 4), 0);
    assert_false(rfi_cpu_library_bf16_fast(library));
    int taken = 0;
    shape s = {.M = 4, .N = 5, .K = 6, .in = RFR_F32, .out = RFR_F32};
    check(library, rfi_ctx_isa(ctx), &s, &taken);
    assert_int_equal(taken, 0);
    rfi_cpu_library_close(library);
    rfr_ctx_destroy(ctx);
    if (k == 1) break;
    rfr_ctx_options o = rfr_ctx_options_default();
    o.module_path = RFT_SOURCE_DIR;
    o.use_onednn = 1;
    assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  }
  rfi_cpu_library_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(products), cmocka_unit_test(vectors), cmocka_unit_test(large),
                                     cmocka_unit_test(packed),   cmocka_unit_test(groups),  cmocka_unit_test(repeated),
                                     cmocka_unit_test(without)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
