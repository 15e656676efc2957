// SPDX-License-Identifier: Apache-2.0
//
// An op of your own with a CUDA launcher: y = cap tanh(x / cap), a soft limit on logits. The op is recorded,
// differentiated, planned, captured and replayed like the library's own. custom_op.c has the same op for the CPU.
// Build and run on a machine with a GPU:
//   nvcc -std=c++17 custom_op_cuda.cu $(pkg-config --cflags --libs refrain)
//   LD_LIBRARY_PATH=$(pkg-config --variable=libdir refrain) ./a.out
#include <cmath>
#include <cstdio>
#include <cuda_runtime.h>
#include <refrain/refrain.h>

// The shape rule: y has x's type. Its text becomes an error at the line that records the op.
static const char *shape(const rfr_infer *c) {
  if (c->in[0].dtype != RFR_F32) return "x must be f32";
  if (!(c->attr[0].f > 0)) return "cap must be positive";
  c->out[0] = c->in[0];
  return NULL;
}

// The gradient rule: dx = dy (1 - (y / cap)^2), in recorded ops.
static void gradient(rfr_grad *g) {
  const double cap = g->attr[0].f;
  const rfr_value y = g->out[0], dy = g->dy[0];
  if (!g->need[0]) return;
  const rfr_value less = rfr_scale_at(g->t, g->at, rfr_mul_at(g->t, g->at, y, y), -1 / (cap * cap), RFR_NONE);
  g->dx[0] = rfr_add_at(g->t, g->at, dy, rfr_mul_at(g->t, g->at, dy, less));
}

static __global__ void softcap(const float *x, float *y, int64_t n, float cap) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = cap * tanhf(x[i] / cap);
}

// The launcher: pointers are of the device, work goes into c->stream. It is called once more while the program is
// captured, so it neither allocates nor waits, and the grid follows from shapes alone.
static rfr_status launch(const rfr_call *c) {
  int64_t n = 1;
  for (int d = 0; d < c->in[0].type.rank; d++) n *= c->in[0].type.shape[d];
  if (n == 0) return RFR_OK;
  softcap<<<(unsigned)((n + 255) / 256), 256, 0, (cudaStream_t)c->stream>>>(
      (const float *)c->in[0].data, (float *)c->out[0].data, n, (float)c->attr[0].f);
  return cudaGetLastError() == cudaSuccess ? RFR_OK : RFR_IO;
}

static rfr_status register_softcap(rfr_ctx *ctx, const rfr_op **op) {
  rfr_op_desc d = rfr_op_desc_default();
  d.name = "mine.softcap";
  d.operands = "x";
  d.results = "y";
  d.attributes = "cap:f";
  d.shape = shape;
  d.gradient = gradient;
  d.cuda = launch;
  return rfr_op_register(ctx, &d, op);
}

// Fits w in y = softcap(x wT) to what w = (2, -3) gives; the loss is the mean square.
static rfr_status record(rfr_ctx *ctx, const rfr_op *op, rfr_trace **out) {
  const int64_t rows[] = {8, 2}, column[] = {8, 1}, row[] = {1, 2}, one[] = {1};
  const rfr_status s = rfr_trace_create(ctx, out);
  if (s != RFR_OK) return s;
  rfr_trace *t = *out;
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, rows);
  const rfr_value y = rfr_input(t, "y", RFR_ROLE_INPUT, RFR_F32, 2, column);
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, row);
  const rfr_value h = rfr_linear(t, x, w, RFR_NONE);
  const rfr_attr cap = rfr_attr_float(4);
  const rfr_value e = rfr_add(t, rfr_record(t, op, 1, &h, &cap, NULL), rfr_scale(t, y, -1, RFR_NONE));
  const rfr_value loss = rfr_mean(t, rfr_mul(t, e, e), -1);
  const rfr_value lr = rfr_fill(t, 0.4, RFR_F32, 1, one);
  rfr_sgd(t, w, rfr_gradient(t, loss, w, RFR_F32), RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
  rfr_output(t, "loss", loss);
  return rfr_trace_finish(t);
}

int main() {
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *ctx = NULL;
  rfr_trace *t = NULL;
  rfr_programs *p = NULL;
  const rfr_op *op;
  rfr_tensor X, Y, W;
  float x[16], y[8], w[2] = {0, 0};
  for (int i = 0; i < 8; i++) {
    x[2 * i] = (float)(i % 3) - 1;
    x[2 * i + 1] = (float)(i % 4) / 2 - 0.5f;
    y[i] = 4 * tanhf((2 * x[2 * i] - 3 * x[2 * i + 1]) / 4);
  }
  o.device = "cuda";
  bool good = !rfr_ctx_create(&o, &ctx) && !register_softcap(ctx, &op) && !record(ctx, op, &t) &&
              !rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p) && !rfr_programs_tensor(p, "x", &X) &&
              !rfr_programs_tensor(p, "y", &Y) && !rfr_programs_tensor(p, "w", &W) && !rfr_programs_write(p, &X, x) &&
              !rfr_programs_write(p, &Y, y) && !rfr_programs_write(p, &W, w) && !rfr_program_capture(p, 0);
  for (int i = 0; i < 300 && good; i++) good = !rfr_program_replay(p, 0, NULL, 0);
  good = good && !rfr_programs_read(p, &W, w); // waits
  if (good) printf("w = %.3f %.3f\n", w[0], w[1]);
  else fprintf(stderr, "%s\n", rfr_last_error()->message);
  good = good && fabsf(w[0] - 2) < 0.01f && fabsf(w[1] + 3) < 0.01f;
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
  return good ? 0 : 1;
}
