/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench kernels: memory-bound kernels, one at a time. Each op is called on at least 512 MB, alternating between
 * several sets of buffers, so that none is in a cache. The rate counts every input and output byte once; it is printed
 * next to the copy rate of this machine. bench/peers/peers_gpu.py times the same shapes. On a GPU also the GEMMs in
 * FP8, whose rate is in FLOPs.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "refrain/op.h"
#include "refrain/ops.h"

enum { T = 32768, C = 4096, ROWS = 8192, V = 50304, N = 64 << 20, HEADS = 32, D = 128, SETS = 2 };
enum { MOST_OPERANDS = 12, MOST_ROUNDS = 200 };
#define PATIENCE 0.5 /* time limit in seconds for the rounds of one op, after the first five */

/* Operands: a type (t: the one under test, f: f32, p: f32 and positive, e: e4m3, i: i32, s: the step block, _: absent)
 * and dimensions by the names above (R: ROWS, H: HEADS, S: blocks of 128 in ROWS); a ! marks an operand that is written
 * in place. */
typedef struct kernel {
  const char *op, *operands;
  rfr_attr attr[6];
  const char *of;  /* suffix of the name, if an op has two rows */
  unsigned unused; /* bit mask of results that are not computed */
  bool gemm;       /* only on a GPU */
} kernel;

static const kernel kernels[] = {
    {"layernorm", "tTC tC tC", {{{.f = 1e-5}}}},
    {"layernorm_bwd", "tTC tTC tC fT fT", {{{0}}}},
    {"rmsnorm", "tTC tC", {{{.f = 1e-5}}}},
    {"rmsnorm_bwd", "tTC tTC tC fT", {{{0}}}},
    {"add_rmsnorm", "tTC tTC tC", {{{.f = 1e-5}}}},
    {"gelu", "tTC", {{{.i = 1}}}},
    {"gelu_bwd", "tTC tTC", {{{.i = 1}}}},
    {"swiglu", "tTC tTC", {{{0}}}},
    {"swiglu_bwd", "tTC tTC tTC", {{{0}}}},
    {"rmsnorm", "tTHD tD", {{{.f = 1e-5}}}, " of heads"},
    {"rmsnorm_bwd", "tTHD tTHD tD fTH", {{{0}}}, " of heads"},
    {"rope", "tTHD iT", {{{.f = 1e4}}, {{0}}, {{.f = 1}}}},
    {"cross_entropy", "tRV iR f1", {{{.i = -100}}}},
    {"cross_entropy_bwd", "f1 tRV iR fR f1", {{{.i = -100}}}},
    {"quantize", "tTC p1", {{{.i = RFR_E4M3}}}, ", scale given", 0x30},
    {"quantize", "tTC", {{{.i = RFR_E4M3}}}, NULL, 0x70},
    {"quantize", "tTC", {{{.i = RFR_E4M3}}, {{.i = RFR_SCALING_ROW128}}}, ", row128", 0x70},
    {"add_rmsnorm_quantize", "tTC tTC tC p1", {{{.f = 1e-5}}, {{.i = RFR_E4M3}}}, NULL, 0x2},
    {"swiglu_quantize", "tTC tTC p1", {{{.i = RFR_E4M3}}}, NULL, 0x1},
    {"swiglu_bwd_quantize", "tTC tTC tTC p1 p1", {{{.i = RFR_E5M2}}}, NULL, 0x3},
    {"matmul_scaled", "eRR eRR p1 p1", {{{.i = RFR_BF16}}}, NULL, 0, true},
    {"matmul_scaled", "eRR eRR pRS pSS", {{{.i = RFR_BF16}}}, ", blocks", 0, true},
    {"adamw", "fN! fN fN! pN! _ f1 _ _ s", {{{.f = 0.9}}, {{.f = 0.95}}, {{.f = 1e-8}}, {{.f = 0.1}}, {{.f = 1}}}},
};
enum { N_KERNELS = sizeof kernels / sizeof kernels[0] };

typedef struct result {
  double seconds, bytes, flops;
  const char *kernel; /* NULL: not measured */
} result;

/* ---- recording ---- */

static int64_t size_of(char dimension) {
  switch (dimension) {
    case 'T': return T;
    case 'C': return C;
    case 'R': return ROWS;
    case 'V': return V;
    case 'N': return N;
    case 'H': return HEADS;
    case 'D': return D;
    case 'S': return ROWS / 128;
    default: return 1;
  }
}

static rfr_value record_operand(rfr_trace *t, const char *spec, const char *name, rfr_dtype dtype, rfr_value step) {
  int64_t shape[3];
  int rank = 0;
  if (spec[0] == '_') return RFR_NONE;
  if (spec[0] == 's') return step;
  const char *at = spec + 1;
  for (; *at && *at != ' ' && *at != '!'; at++) shape[rank++] = size_of(*at);
  const rfr_dtype type = spec[0] == 't' ? dtype : spec[0] == 'i' ? RFR_I32 : spec[0] == 'e' ? RFR_E4M3 : RFR_F32;
  return rfr_input(t, name, *at == '!' ? RFR_ROLE_STATE : RFR_ROLE_INPUT, type, rank, shape);
}

static void record_call(rfr_trace *t, const rfr_op *op, const kernel *k, int set, rfr_dtype dtype, rfr_value step) {
  rfr_value in[MOST_OPERANDS], out[MOST_OPERANDS];
  int n = 0;
  for (const char *at = k->operands; *at; at += strspn(at, " "), n++) {
    char name[16];
    snprintf(name, sizeof name, "%c%d.%d", at[0], n, set);
    in[n] = record_operand(t, at, name, dtype, step);
    at += strcspn(at, " ");
  }
  for (int j = 0; j < MOST_OPERANDS; j++) out[j] = RFR_NONE;
  rfr_record(t, op, n, in, k->attr, out);
  for (int j = 0; j < MOST_OPERANDS && !strchr(k->operands, '!'); j++) {
    char name[16];
    snprintf(name, sizeof name, "y%d.%d", j, set);
    if (out[j] >= 0 && !(k->unused >> j & 1)) rfr_output(t, name, out[j]);
  }
}

static rfr_status make(rfr_ctx *ctx, const kernel *k, rfr_dtype dtype, rfr_programs **out) {
  rfr_trace *t = NULL;
  const rfr_op *op = rfr_op_find(ctx, k->op);
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  const rfr_value step = strchr(k->operands, 's') ? rfr_step_block(t) : RFR_NONE;
  for (int set = 0; set < SETS; set++) record_call(t, op, k, set, dtype, step);
  s = rfr_trace_finish(t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, &k->op, NULL, out);
  rfr_trace_destroy(t);
  return s;
}

/* ---- measuring ---- */

/* Random floats; one MiB of them is repeated, since drawing a gigabyte would take too long. */
static rfr_status fill(rfr_programs *p, const rfr_tensor *x) {
  enum { PIECE = 1 << 20 };
  char *host = malloc(PIECE);
  if (!host) return RFR_NO_MEMORY;
  const int size = rfr_dtype_bits(x->type.dtype) / 8;
  uint32_t draw = 1;
  for (int64_t i = 0; i < PIECE; i += size) {
    draw = draw * 1664525u + 1013904223u;
    float value = (float)(int32_t)draw * 0x1p-31f;
    if (x->name[0] == 'p' && value < 0) value = -value;
    const uint32_t bits = rfr_float_to_bits(x->type.dtype, value);
    memcpy(host + i, &bits, (size_t)size); /* little endian */
  }
  rfr_status s = RFR_OK;
  for (int64_t at = 0; at < x->bytes && s == RFR_OK; at += PIECE) {
    rfr_tensor part = *x;
    part.data = (char *)x->data + at;
    part.bytes = x->bytes - at < PIECE ? x->bytes - at : PIECE;
    s = rfr_programs_write(p, &part, host);
  }
  free(host);
  return s;
}

static rfr_status measure(rfr_programs *p, result *r) {
  double seconds[MOST_ROUNDS * SETS];
  rfr_op_time times[SETS];
  rfr_tensor x;
  int n = 0, ops = 0;
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (rfr_dtype_is_float(x.type.dtype)) s = fill(p, &x);
  if (s == RFR_OK) s = rfr_program_run(p, 0);
  const double begin = cli_now();
  for (int i = 0; s == RFR_OK && i < MOST_ROUNDS && (i < 5 || cli_now() - begin < PATIENCE); i++) {
    s = rfr_program_profile(p, 0, times, SETS, &ops);
    for (int k = 0; k < ops && s == RFR_OK; k++) seconds[n++] = times[k].seconds;
  }
  if (s == RFR_OK) *r = (result){cli_median(seconds, n), times[0].bytes, times[0].flops, times[0].kernel};
  return s;
}

static void name_of(const kernel *k, char name[32]) { snprintf(name, 32, "%s%s", k->op, k->of ? k->of : ""); }

static void print(cli *c, rfr_dtype dtype, const result *results, double ceiling) {
  char device[160];
  cli_device(c, device);
  if (!c->json) {
    printf("kernels, %s, %s; copying moves %.0f GB/s\n", rfr_dtype_name(dtype), device, 1e-9 * ceiling);
    printf("  %-22s %-8s %8s %10s %8s %8s\n", "op", "kernel", "MB", "ms", "GB/s", "of copy");
    for (int i = 0; i < N_KERNELS; i++) {
      const result *r = &results[i];
      const double rate = r->bytes / r->seconds;
      char name[32];
      if (!r->kernel) continue;
      name_of(&kernels[i], name);
      printf("  %-22s %-8s %8.0f %10.3f", name, r->kernel, 1e-6 * r->bytes, 1e3 * r->seconds);
      if (kernels[i].gemm) printf(" %8.0f TFLOP/s\n", 1e-12 * r->flops / r->seconds);
      else printf(" %8.0f %7.0f%%\n", 1e-9 * rate, 100 * rate / ceiling);
    }
    return;
  }
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "name", "kernels");
  json_text(&j, "device", device);
  json_text(&j, "dtype", rfr_dtype_name(dtype));
  json_double(&j, "copy_bytes_per_second", ceiling);
  json_begin(&j, "kernels", '[');
  for (int i = 0; i < N_KERNELS; i++) {
    char name[32];
    if (!results[i].kernel) continue;
    json_begin(&j, NULL, '{');
    name_of(&kernels[i], name);
    json_text(&j, "name", name);
    json_text(&j, "kernel", results[i].kernel);
    json_double(&j, "bytes", results[i].bytes);
    json_double(&j, "ms", 1e3 * results[i].seconds);
    json_double(&j, "bytes_per_second", results[i].bytes / results[i].seconds);
    if (kernels[i].gemm) json_double(&j, "flops_per_second", results[i].flops / results[i].seconds);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
}

rfr_status bench_kernels(cli *c) {
  result results[N_KERNELS] = {{0}};
  rfr_machine machine;
  cli_ceilings ceilings;
  rfr_dtype dtype;
  rfr_status s = bench_dtype(c, &dtype);
  if (s == RFR_OK) s = rfr_machine_describe(c->ctx, &machine);
  for (int i = 0; i < N_KERNELS && s == RFR_OK; i++) {
    rfr_programs *p = NULL;
    if (kernels[i].gemm && strcmp(machine.device, "cpu") == 0) continue;
    s = make(c->ctx, &kernels[i], dtype, &p);
    if (s == RFR_OK) s = measure(p, &results[i]);
    rfr_programs_destroy(p);
  }
  if (s == RFR_OK) s = cli_ceilings_measure(c, dtype, NULL, 0, &ceilings);
  if (s == RFR_OK) print(c, dtype, results, ceilings.stream);
  return s;
}
