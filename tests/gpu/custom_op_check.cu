/* SPDX-License-Identifier: Apache-2.0
 *
 * A registered op with a CUDA launcher: eager, captured and debugged runs are bitwise equal to the library's op, its
 * workspace lies inside the plan, its launch errors name it, and callables run it too.
 *
 *   custom_op_check
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/refrain.h"

enum { ROWS = 700, COLS = 129, N = ROWS * COLS };

static int wrong;

static bool expect(const char *what, bool holds) {
  printf("%-52s %s\n", what, holds ? "ok" : "FAILED");
  if (!holds) printf("    %s: %s\n", rfr_last_error()->slug, rfr_last_error()->message);
  fflush(stdout);
  wrong += !holds;
  return holds;
}

/* ---- mine.sum: y = a + b, through the workspace ---- */

static const char *sum_shape(const rfr_infer *c) {
  c->out[0] = c->in[0];
  return NULL;
}

static void sum_gradient(rfr_grad *g) {
  for (int k = 0; k < 2; k++)
    if (g->need[k]) g->dx[k] = g->dy[0];
}

static __global__ void put(const float *a, float *to, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = a[i];
}

static __global__ void add(const float *a, const float *b, float *y, int64_t n) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a[i] + b[i];
}

static int64_t count(const rfr_arg *x) {
  int64_t n = 1;
  for (int d = 0; d < x->type.rank; d++) n *= x->type.shape[d];
  return n;
}

static size_t sum_workspace(const rfr_call *c) { return (size_t)count(&c->in[0]) * sizeof(float); }

static int calls;    /* of the launcher */
static int too_wide; /* 1: launch with more threads than a block may have */

static rfr_status sum_launch(const rfr_call *c) {
  const int64_t n = count(&c->in[0]);
  const unsigned blocks = (unsigned)((n + 255) / 256);
  const cudaStream_t stream = (cudaStream_t)c->stream;
  calls++;
  if (c->library || ((uintptr_t)c->workspace & 63)) return RFR_INVALID;
  put<<<blocks, too_wide ? 4096 : 256, 0, stream>>>((const float *)c->in[0].data, (float *)c->workspace, n);
  if (cudaGetLastError() != cudaSuccess) return RFR_IO;
  add<<<blocks, 256, 0, stream>>>((const float *)c->workspace, (const float *)c->in[1].data, (float *)c->out[0].data,
                                  n);
  return cudaGetLastError() == cudaSuccess ? RFR_OK : RFR_IO;
}

static rfr_status register_sum(rfr_ctx *ctx, const char *name, bool launcher, const rfr_op **op) {
  rfr_op_desc d = rfr_op_desc_default();
  d.name = name;
  d.operands = "a b";
  d.shape = sum_shape;
  d.gradient = sum_gradient;
  d.cuda = launcher ? sum_launch : NULL;
  d.cuda_workspace = sum_workspace;
  return rfr_op_register(ctx, &d, op);
}

/* y = gelu(a) + b, and the gradient of the sum of its squares with respect to a; op NULL: the library's own sum. */
static rfr_trace *record(rfr_ctx *ctx, const rfr_op *op) {
  const int64_t shape[] = {ROWS, COLS};
  rfr_trace *t;
  if (rfr_trace_create(ctx, &t) != RFR_OK) return NULL;
  const rfr_value a = rfr_input(t, "a", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, shape);
  const rfr_value b = rfr_input(t, "b", RFR_ROLE_INPUT, RFR_F32, 2, shape);
  const rfr_value h[] = {rfr_gelu(t, a, 1), b};
  rfr_scope(t, "layer1");
  const rfr_value y = op ? rfr_record(t, op, 2, h, NULL, NULL) : rfr_add(t, h[0], h[1]);
  rfr_scope(t, "");
  rfr_output(t, "y", y);
  rfr_output(t, "da", rfr_gradient(t, rfr_sum(t, rfr_mul(t, y, y), -1), a, RFR_F32));
  if (rfr_trace_finish(t) == RFR_OK) return t;
  rfr_trace_destroy(t);
  return NULL;
}

typedef struct results {
  float y[N], da[N];
} results;

/* how: 0 eager, 1 captured, 2 debugged */
static rfr_status run(rfr_ctx *ctx, const rfr_trace *t, int how, results *out) {
  static float a[N], b[N];
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p = NULL;
  rfr_tensor x;
  o.debug = how == 2;
  for (int i = 0; i < N; i++) a[i] = (float)(i % 97) / 31 - 1.5f, b[i] = (float)(i % 89) / 17 - 2;
  rfr_status s = rfr_compile(ctx, 1, &t, NULL, &o, &p);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "a", &x);
  if (s == RFR_OK) s = rfr_programs_write(p, &x, a);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "b", &x);
  if (s == RFR_OK) s = rfr_programs_write(p, &x, b);
  if (s == RFR_OK && how == 1) s = rfr_program_capture(p, 0);
  if (s == RFR_OK) s = how == 1 ? rfr_program_replay(p, 0, NULL, 0) : rfr_program_run(p, 0);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "y", &x);
  if (s == RFR_OK) s = rfr_programs_read(p, &x, out->y);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "da", &x);
  if (s == RFR_OK) s = rfr_programs_read(p, &x, out->da);
  if (s == RFR_OK) s = rfr_programs_check(p);
  rfr_programs_destroy(p);
  return s;
}

/* An inference callable with the op: eager and captured calls return the same y. */
static rfr_status call(rfr_ctx *ctx, const rfr_op *op, const results *wanted) {
  static float out[N];
  const int64_t shape[] = {ROWS, COLS};
  rfr_trace *t;
  rfr_graphs *g = NULL;
  rfr_tensor y;
  rfr_callable c = rfr_callable_default();
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  const rfr_value a = rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 2, shape);
  const rfr_value ab[] = {rfr_fill(t, 0, RFR_F32, 2, shape), a};
  rfr_output(t, "y", rfr_record(t, op, 2, ab, NULL, NULL));
  s = rfr_trace_finish(t);
  c.trace = t;
  c.inference = 1;
  rfr_binding in;
  memset(&in, 0, sizeof in);
  in.type.dtype = RFR_F32, in.type.rank = 2, in.type.shape[0] = ROWS, in.type.shape[1] = COLS, in.data = wanted->y;
  if (s == RFR_OK) s = rfr_graphs_create(ctx, &c, 1, NULL, &g);
  if (s == RFR_OK) s = rfr_graphs_begin_step(g, NULL, 0);
  if (s == RFR_OK) s = rfr_graphs_forward(g, 0, 0, &in, 1, &y, 1);
  if (s == RFR_OK) s = rfr_graphs_read(g, &y, out);
  if (s == RFR_OK) s = rfr_graphs_end_step(g);
  if (s == RFR_OK && memcmp(out, wanted->y, sizeof out) != 0) s = RFR_NUMERIC;
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
  return s;
}

int main() {
  static const char *const how_names[] = {"eager: the bits of the library's op", "captured: the same",
                                          "debugged: the same"};
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *ctx;
  const rfr_op *op, *bare;
  results *ours = (results *)malloc(sizeof *ours), *theirs = (results *)malloc(sizeof *theirs);
  o.device = "cuda";
  if (!ours || !theirs || !expect("a context", rfr_ctx_create(&o, &ctx) == RFR_OK)) return 1;
  if (!expect("registration", register_sum(ctx, "mine.sum", true, &op) == RFR_OK &&
                                  register_sum(ctx, "mine.bare", false, &bare) == RFR_OK))
    return 1;
  rfr_trace *t = record(ctx, op), *u = record(ctx, NULL), *v = record(ctx, bare);
  if (!expect("traces", t && u && v)) return 1;
  if (!expect("the library's op runs", run(ctx, u, 0, theirs) == RFR_OK)) return 1;
  for (int how = 0; how < 3; how++) {
    memset(ours, 0, sizeof *ours);
    calls = 0;
    expect(how_names[how], run(ctx, t, how, ours) == RFR_OK && memcmp(ours, theirs, sizeof *ours) == 0 && calls == 1);
  }
  expect("a callable runs it", call(ctx, op, theirs) == RFR_OK);
  expect("without a launcher: bind.no_kernel",
         run(ctx, v, 0, ours) == RFR_UNSUPPORTED && strcmp(rfr_last_error()->slug, "bind.no_kernel") == 0);
  too_wide = 1;
  expect("a failed launch names op and layer", run(ctx, t, 0, ours) == RFR_IO &&
                                                   strcmp(rfr_last_error()->slug, "op.kernel") == 0 &&
                                                   strstr(rfr_last_error()->message, "mine.sum in layer1"));
  expect("a failed launch ends a capture",
         run(ctx, t, 1, ours) == RFR_IO && strcmp(rfr_last_error()->slug, "op.kernel") == 0);
  too_wide = 0;
  expect("the device works afterwards", run(ctx, t, 1, ours) == RFR_OK && memcmp(ours, theirs, sizeof *ours) == 0);
  rfr_trace_destroy(t);
  rfr_trace_destroy(u);
  rfr_trace_destroy(v);
  rfr_ctx_destroy(ctx);
  free(ours);
  free(theirs);
  return wrong != 0;
}
