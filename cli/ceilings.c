/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine's ceilings, measured: the best rate of a large GEMM through the library in each type, and the best
 * memory rate, counting read and written bytes alike. Other work on the machine can only slow a try down, so the best
 * one counts.
 *
 * An op whose operands are still in a cache may exceed the memory ceiling.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cli.h"

enum { FIRST_SIDE = 256, LAST_SIDE = 8192 };
#define LONG_ENOUGH 1e-3 /* seconds: a GEMM of this length is not dominated by launch overhead */
#define PATIENCE 0.3     /* time limit in seconds for the tries of one kind, after the first two */

static rfr_status fill(rfr_programs *p, const rfr_tensor *x) {
  char *host = malloc((size_t)x->bytes);
  if (!host) return RFR_NO_MEMORY;
  uint32_t draw = 1;
  const int64_t size = rfr_dtype_bits(x->type.dtype) / 8;
  for (int64_t i = 0; i < x->bytes; i += size) {
    draw = draw * 1664525u + 1013904223u; /* random enough: power draw depends on the data */
    const float value = (float)(int32_t)draw * 0x1p-31f;
    const uint32_t bits = rfr_float_to_bits(x->type.dtype, value);
    if (size == 4) memcpy(host + i, &value, 4);
    else if (size == 2) memcpy(host + i, &(uint16_t){(uint16_t)bits}, 2);
    else host[i] = (char)bits;
  }
  rfr_status s = rfr_programs_write(p, x, host);
  free(host);
  return s;
}

/* The best rate of a program whose run does `work`. */
static rfr_status time_runs(rfr_programs *p, double work, double *rate) {
  rfr_tensor x;
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) s = fill(p, &x);
  const double begin = cli_now();
  for (int i = 0; s == RFR_OK && (i < 2 || cli_now() - begin < PATIENCE); i++) {
    const double start = cli_now();
    s = rfr_program_run(p, 0);
    if (s == RFR_OK) s = rfr_programs_wait(p);
    const double now = work / (cli_now() - start);
    if (i > 0 && now > *rate) *rate = now;
  }
  return s;
}

static rfr_status time_trace(rfr_ctx *ctx, rfr_trace *t, double work, double *rate) {
  const char *name = "peak";
  rfr_programs *p = NULL;
  rfr_status s = rfr_trace_finish(t);
  *rate = 0.0;
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, &name, NULL, &p);
  if (s == RFR_OK) s = time_runs(p, work, rate);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  return s;
}

static double product_flops(int64_t n) { return 2.0 * (double)n * (double)n * (double)n; }

/* A GEMM in FP8 multiplies scaled tensors. */
static bool is_fp8(rfr_dtype dtype) { return dtype == RFR_E4M3 || dtype == RFR_E5M2; }

static rfr_status time_product(rfr_ctx *ctx, rfr_dtype dtype, int64_t n, double *rate) {
  const int64_t shape[2] = {n, n}, one = 1;
  rfr_trace *t = NULL;
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, dtype, 2, shape);
  rfr_value w = rfr_input(t, "w", RFR_ROLE_INPUT, dtype, 2, shape);
  if (is_fp8(dtype)) {
    const rfr_value scale = rfr_input(t, "scale", RFR_ROLE_INPUT, RFR_F32, 1, &one);
    const rfr_scaled a = {x, scale, RFR_NONE}, b = {w, scale, RFR_NONE};
    rfr_output(t, "y", rfr_matmul_scaled(t, &a, &b, RFR_NONE, RFR_BF16));
  } else {
    rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
  }
  return time_trace(ctx, t, product_flops(n), rate);
}

/* Square GEMMs, each side twice the previous one, until a GEMM takes long enough. */
rfr_status cli_peak(rfr_ctx *ctx, rfr_dtype dtype, double *rate) {
  rfr_status s = RFR_OK;
  *rate = 0.0;
  for (int64_t n = FIRST_SIDE; s == RFR_OK && n <= LAST_SIDE; n *= 2) {
    double now;
    s = time_product(ctx, dtype, n, &now);
    if (now > *rate) *rate = now;
    if (product_flops(n) > LONG_ENOUGH * now) break;
  }
  return s;
}

/* ---- memory ---- */

enum { HUGE_PAGE = 2 << 20 };
enum { FILL, COPY, TRIAD, UPDATE, PASSES };

/* One pass over n floats, split evenly between threads: fill all with 0, copy a to b, write a + b / 2 to c, or add a
 * / 2 to c. The last one moves no uncounted bytes, while a plain write also reads the cache line that it writes. */
static void pass(int what, float *a, float *b, float *c, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; t++) {
    const int64_t first = n * t / threads, last = n * (t + 1) / threads;
    if (what == FILL) {
      memset(a + first, 0, (size_t)(last - first) * sizeof *a);
      memset(b + first, 0, (size_t)(last - first) * sizeof *b);
      memset(c + first, 0, (size_t)(last - first) * sizeof *c);
    } else if (what == COPY) {
      memcpy(b + first, a + first, (size_t)(last - first) * sizeof *a);
    } else if (what == TRIAD) {
      for (int64_t i = first; i < last; i++) c[i] = a[i] + 0.5f * b[i];
    } else {
      for (int64_t i = first; i < last; i++) c[i] += 0.5f * a[i];
    }
  }
}

/* On huge pages if possible, like the arena; otherwise page-table walks would lower the ceiling. */
static float *array(int64_t n) {
  float *x = aligned_alloc(HUGE_PAGE, (size_t)n * sizeof *x);
  if (x) madvise(x, (size_t)n * sizeof *x, MADV_HUGEPAGE);
  return x;
}

static rfr_status measure_stream(int threads, double *rate) {
  const int64_t n = 1 << 26; /* 256 MiB each, together more than any cache */
  float *a = array(n), *b = array(n), *c = array(n);
  rfr_status s = a && b && c ? RFR_OK : RFR_NO_MEMORY;
  *rate = 0.0;
  if (s == RFR_OK) pass(FILL, a, b, c, n, threads);
  const double begin = cli_now();
  for (int i = 0; s == RFR_OK && (i < PASSES - COPY || cli_now() - begin < PATIENCE); i++) {
    const int what = COPY + i % (PASSES - COPY);
    const double start = cli_now();
    pass(what, a, b, c, n, threads);
    const double now = (double)n * sizeof *a * (what == COPY ? 2 : 3) / (cli_now() - start);
    if (now > *rate) *rate = now;
  }
  free(a), free(b), free(c);
  return s == RFR_OK ? s : cli_fail(s, "free 768 MiB of memory", "the memory rate cannot be measured");
}

/* A GPU's memory rate: a copy of 1 GiB. */
static rfr_status measure_copy(rfr_ctx *ctx, double *rate) {
  const int64_t n = 1 << 28;
  rfr_trace *t = NULL;
  *rate = 0.0;
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_output(t, "y", rfr_copy(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, &n)));
  return time_trace(ctx, t, 8.0 * (double)n, rate);
}

/* The type whose peak applies to a type: both FP8 types share one, and a type without its own GEMMs counts as
 * f32. */
static rfr_dtype peak_type(rfr_dtype dtype) {
  if (is_fp8(dtype)) return RFR_E4M3;
  return dtype == RFR_BF16 || dtype == RFR_F16 ? dtype : RFR_F32;
}

static rfr_status need_peak(const cli *c, rfr_dtype dtype, cli_ceilings *out) {
  double *rate = &out->product[peak_type(dtype)];
  return *rate > 0 ? RFR_OK : cli_peak(c->ctx, peak_type(dtype), rate);
}

rfr_status cli_ceilings_measure(const cli *c, rfr_dtype dtype, const rfr_op_time *ops, int n, cli_ceilings *out) {
  rfr_machine m;
  *out = (cli_ceilings){.dtype = dtype};
  rfr_status s = rfr_machine_describe(c->ctx, &m);
  if (s == RFR_OK) s = need_peak(c, dtype, out);
  if (s == RFR_OK) s = need_peak(c, RFR_F32, out);
  for (int i = 0; i < n && s == RFR_OK; i++)
    if (ops[i].flops > 0) s = need_peak(c, ops[i].dtype, out);
  if (s == RFR_OK)
    s = strcmp(m.device, "cpu") != 0 ? measure_copy(c->ctx, &out->stream) : measure_stream(m.threads, &out->stream);
  return s;
}

double cli_ceilings_least(const cli_ceilings *c, const rfr_op_time *op) {
  const double product = op->flops > 0 ? op->flops / c->product[peak_type(op->dtype)] : 0.0;
  const double stream = op->bytes / c->stream;
  return product > stream ? product : stream;
}
