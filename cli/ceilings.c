/* SPDX-License-Identifier: Apache-2.0
 *
 * What the machine can do, measured: the best rate of a large matrix product through the
 * library, and the best rate of memory, read and written bytes counted alike. Other work
 * on the machine only ever slows a try down, so the best one stands.
 *
 * An op whose operands are still in a cache may well move more than memory's ceiling.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cli.h"

enum { PRODUCT = 1024, TRIES = 8 };

static void fill(rfr_tensor *x) {
  for (int64_t i = 0; i < x->bytes; i += x->type.dtype == RFR_F32 ? 4 : 2) {
    const float value = (float)(i % 7) - 3.0f;
    if (x->type.dtype == RFR_F32) memcpy((char *)x->data + i, &value, 4);
    else memcpy((char *)x->data + i, &(uint16_t){(uint16_t)rfr_float_to_bits(x->type.dtype, value)}, 2);
  }
}

static rfr_status time_product(rfr_programs *p, double *rate) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) fill(&x);
  const double begin = cli_now();
  for (int i = 0; i < TRIES || cli_now() - begin < 0.3; i++) {
    const double start = cli_now();
    rfr_status s = rfr_program_run(p, 0);
    if (s != RFR_OK) return s;
    const double now = 2.0 * PRODUCT * PRODUCT * PRODUCT / (cli_now() - start);
    if (i > 0 && now > *rate) *rate = now;
  }
  return RFR_OK;
}

rfr_status cli_peak(rfr_ctx *ctx, rfr_dtype dtype, double *rate) {
  const int64_t shape[2] = {PRODUCT, PRODUCT};
  const char *name = "peak";
  rfr_trace *t = NULL;
  rfr_programs *p = NULL;
  *rate = 0.0;
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, dtype, 2, shape);
  rfr_value w = rfr_input(t, "w", RFR_ROLE_INPUT, dtype, 2, shape);
  rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
  s = rfr_trace_finish(t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, &name, NULL, &p);
  if (s == RFR_OK) s = time_product(p, rate);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  return s;
}

/* ---- memory ---- */

enum { HUGE_PAGE = 2 << 20 };
enum { FILL, COPY, TRIAD, UPDATE, PASSES };

/* One pass over n floats, in equal shares: 0 written to all, a copied to b, a + b / 2 written to c, or a / 2
 * added onto c, which reads nothing but what it also counts (a plain write reads the line that it writes). */
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

/* On huge pages where there are any, as the arena is: else the ceiling would be that of the page tables. */
static float *array(int64_t n) {
  float *x = aligned_alloc(HUGE_PAGE, (size_t)n * sizeof *x);
  if (x) madvise(x, (size_t)n * sizeof *x, MADV_HUGEPAGE);
  return x;
}

static rfr_status measure_stream(int threads, double *rate) {
  const int64_t n = 1 << 26; /* 256 MiB each: all three are more than any cache holds for us */
  float *a = array(n), *b = array(n), *c = array(n);
  rfr_status s = a && b && c ? RFR_OK : RFR_NO_MEMORY;
  *rate = 0.0;
  if (s == RFR_OK) pass(FILL, a, b, c, n, threads);
  for (int i = 0; s == RFR_OK && i < 4 * (PASSES - COPY); i++) {
    const int what = COPY + i % (PASSES - COPY);
    const double start = cli_now();
    pass(what, a, b, c, n, threads);
    const double now = (double)n * sizeof *a * (what == COPY ? 2 : 3) / (cli_now() - start);
    if (now > *rate) *rate = now;
  }
  free(a), free(b), free(c);
  if (s != RFR_OK) cli_usage("free 768 MiB of memory", "the rate of memory cannot be measured");
  return s;
}

rfr_status cli_ceilings_measure(const cli *c, rfr_dtype dtype, cli_ceilings *out) {
  rfr_machine m;
  *out = (cli_ceilings){.dtype = dtype};
  rfr_status s = rfr_machine_describe(c->ctx, &m);
  if (s == RFR_OK) s = cli_peak(c->ctx, dtype, &out->product);
  if (s == RFR_OK) s = cli_peak(c->ctx, RFR_F32, &out->product_f32);
  if (s == RFR_OK) s = measure_stream(m.threads, &out->stream);
  return s;
}

double cli_ceilings_least(const cli_ceilings *c, const rfr_op_time *op) {
  const double product = op->flops / (op->dtype == c->dtype ? c->product : c->product_f32);
  const double stream = op->bytes / c->stream;
  return product > stream ? product : stream;
}
