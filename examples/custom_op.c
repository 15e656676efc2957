// SPDX-License-Identifier: Apache-2.0
// An op of your own, in one file: y = cap tanh(x / cap), a soft limit on logits. Registered, it is an op
// like the library's: it prints, differentiates, is planned, captured and replayed. Build with
//   cc custom_op.c $(pkg-config --cflags --libs refrain) -lm -Wl,-rpath,$(pkg-config --variable=libdir refrain)
#include <math.h>
#include <refrain/refrain.h>
#include <stdio.h>

// The shape rule: y has x's type. Its text becomes an error at the line that records the op.
static const char *shape(const rfr_infer *c) {
  if (c->in[0].dtype != RFR_F32) return "x must be f32";
  if (!(c->attr[0].f > 0)) return "cap must be positive";
  c->out[0] = c->in[0];
  return NULL;
}

// The gradient rule: dx = dy (1 - (y / cap)^2), in recorded ops. Unused ops are pruned later.
static void gradient(rfr_grad *g) {
  const double cap = g->attr[0].f;
  rfr_value y = g->out[0], dy = g->dy[0];
  if (!g->need[0]) return;
  rfr_value less = rfr_scale_at(g->t, g->at, rfr_mul_at(g->t, g->at, y, y), -1 / (cap * cap), RFR_NONE);
  g->dx[0] = rfr_add_at(g->t, g->at, dy, rfr_mul_at(g->t, g->at, dy, less));
}

// The kernel: without RFR_OP_ROWS or RFR_OP_ANY in the flags all operands are dense.
static rfr_status kernel(const rfr_call *c) {
  const float cap = (float)c->attr[0].f, *x = c->in[0].data;
  float *y = c->out[0].data;
  int64_t n = 1;
  for (int d = 0; d < c->in[0].type.rank; d++) n *= c->in[0].type.shape[d];
  for (int64_t i = 0; i < n; i++) y[i] = cap * tanhf(x[i] / cap);
  return RFR_OK;
}

static rfr_status register_softcap(rfr_ctx *ctx, const rfr_op **op) {
  rfr_op_desc d = rfr_op_desc_default();
  d.name = "mine.softcap"; // the dot separates it from the library's own
  d.operands = "x";
  d.results = "y";
  d.attributes = "cap:f";
  d.shape = shape;
  d.gradient = gradient;
  d.cpu = kernel;
  return rfr_op_register(ctx, &d, op);
}

static void print(const char *text, size_t n, void *file) { fwrite(text, 1, n, file); }

// Fits w in y = softcap(x wT) to what w = (2, -3) gives, the loss being the mean square.
static rfr_status record(rfr_ctx *ctx, const rfr_op *softcap, rfr_trace **out) {
  rfr_trace *t;
  rfr_status s = rfr_trace_create(ctx, out);
  if (s != RFR_OK) return s;
  t = *out;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){8, 2}));
  rfr_value y = rfr_input(t, "y", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){8, 1}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){1, 2}));
  rfr_value h = rfr_linear(t, x, w, RFR_NONE);
  rfr_attr cap = rfr_attr_float(4);
  rfr_value e = rfr_add(t, rfr_record(t, softcap, 1, &h, &cap, NULL), rfr_scale(t, y, -1, RFR_NONE));
  rfr_value loss = rfr_mean(t, rfr_mul(t, e, e), -1);
  rfr_value lr = rfr_fill(t, 0.4, RFR_F32, 1, ((int64_t[]){1}));
  rfr_sgd(t, w, rfr_gradient(t, loss, w, RFR_F32), RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
  rfr_output(t, "loss", loss);
  return rfr_trace_finish(t);
}

int main(void) {
  rfr_ctx *ctx = NULL;
  rfr_trace *t = NULL;
  rfr_programs *p = NULL;
  const rfr_op *softcap;
  rfr_tensor X, Y, W;
  if (rfr_ctx_create(NULL, &ctx) || register_softcap(ctx, &softcap) || record(ctx, softcap, &t) ||
      rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p) || rfr_programs_tensor(p, "x", &X) ||
      rfr_programs_tensor(p, "y", &Y) || rfr_programs_tensor(p, "w", &W) || rfr_program_capture(p, 0))
    return fprintf(stderr, "%s\n", rfr_last_error()->message), 1;
  rfr_trace_print(rfr_program_trace(p, 0, "lower"), NULL, print, stdout); // the op stands among the others
  float *x = X.data, *y = Y.data, *w = W.data;
  for (int i = 0; i < 8; i++) {
    x[2 * i] = (float)(i % 3) - 1;
    x[2 * i + 1] = (float)(i % 4) / 2 - 0.5f;
    y[i] = 4 * tanhf((2 * x[2 * i] - 3 * x[2 * i + 1]) / 4);
  }
  for (int i = 0; i < 300; i++) rfr_program_replay(p, 0, NULL, 0);
  printf("w = %.3f %.3f\n", w[0], w[1]);
  int good = fabsf(w[0] - 2) < 0.01f && fabsf(w[1] + 3) < 0.01f;
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
  return good ? 0 : 1;
}
