/* SPDX-License-Identifier: Apache-2.0
 *
 * Callables in the caller's stream and memory. Their inputs are written in the stream after a slow kernel, and their
 * outputs are copied in the stream, without a wait of the host in between: a call that ran too early, or overlapped
 * another call, would read or write other values. Captured and eager, in one stream, in two alternating streams and in
 * the legacy default stream, a step is bitwise equal to one in the graphs' own stream with waits around each call. The
 * same holds for a step whose inputs, outputs and their gradients are in fixed device memory, also after these, its
 * weight and main gradient have moved. It also holds for a step where each call gets other memory: device memory or
 * host memory, pinned or not, alternately.
 *
 *   stream_check
 */
#include <string.h>

#include <vector>

#include "calls.cuh"
#include "refrain/graphs.h"
#include "refrain/ops.h"

/* x has more bytes than the guard after the arena. */
enum { T = 4096, C = 256, N = T * C, MICROBATCHES = 3, STREAMS = 2, PAUSE = 20000000 };

static int wrong;

static void expect(const char *what, bool holds) {
  printf("%-64s %s\n", what, holds ? "ok" : "FAILED");
  fflush(stdout);
  wrong += !holds;
}

static __global__ void wait_a_while(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}

/* The caller's device memory, before and after the move: x, y, dy and dx, the weight and its gradient. */
struct memory {
  float *port[2][4], *w[2], *dw[2];
};

static float *room(size_t n) {
  float *p;
  cuda(cudaMalloc((void **)&p, n * sizeof *p));
  cuda(cudaMemset(p, 0xff, n * sizeof *p));
  return p;
}

static rfr_main_gradient main_gradient(float *data) {
  rfr_main_gradient m = rfr_main_gradient_default();
  m.parameter = "w", m.type = {RFR_F32, 2, {C, C}}, m.data = data, m.bytes = data ? C * C * sizeof(float) : 0;
  return m;
}

/* Creates the graphs, with the caller's memory or without. */
static rfr_graphs *make(rfr_ctx *ctx, int eager, const memory *own) {
  const int64_t flat[2] = {T, C}, square[2] = {C, C};
  rfr_trace *t;
  rfr_graphs *g;
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  ok(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, flat);
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, square);
  rfr_value y = rfr_linear(t, rfr_silu(t, x), w, RFR_NONE);
  rfr_output(t, "y", rfr_dropout(t, y, rfr_step_block(t), 0.25, 0));
  ok(rfr_trace_finish(t));
  void *address[4];
  for (int i = 0; i < 4; i++) address[i] = own ? own->port[0][i] : NULL;
  const rfr_callable_fixed fixed[4] = {
      {"x", 0, &address[0], 1}, {"y", 0, &address[1], 1}, {"y", 1, &address[2], 1}, {"x", 1, &address[3], 1}};
  const rfr_binding tensor = {"w", {RFR_F32, 2, {C, C}}, own ? own->w[0] : NULL};
  const rfr_main_gradient gradient = main_gradient(own ? own->dw[0] : NULL);
  c.trace = t;
  o.eager = eager;
  o.warmup_iterations = 1;
  if (own) {
    c.fixed = fixed, c.n_fixed = 4;
    o.tensors = &tensor, o.n_tensors = 1;
    o.gradients = &gradient, o.n_gradients = 1;
  }
  ok(rfr_graphs_create(ctx, &c, 1, &o, &g));
  rfr_trace_destroy(t);
  std::vector<float> first(C * C);
  for (int i = 0; i < C * C; i++) first[i] = (float)((i * 37) % 101 - 50) / 400;
  rfr_tensor to;
  ok(rfr_graphs_tensor(g, "w", &to));
  ok(rfr_graphs_write(g, &to, first.data()));
  return g;
}

struct step {
  float y[MICROBATCHES][N], dx[MICROBATCHES][N], dw[C * C];
};

/* The memory of each call, forward and backward alternating. Host memory already contains the inputs. */
struct places {
  const float *at[2 * MICROBATCHES];
  bool host[2 * MICROBATCHES], fixed;
};

static places both(const float *x, const float *dy) {
  places p = {};
  for (int call = 0; call < 2 * MICROBATCHES; call++) p.at[call] = call % 2 ? dy : x;
  p.fixed = x != dy;
  return p;
}

/* streams NULL: the graphs' own stream, and the host waits after each call. Inputs in device memory are written
 * first. */
static void run(rfr_graphs *g, const float *source, const places &p, const cudaStream_t *streams, step *out) {
  const rfr_type type = {RFR_F32, 2, {T, C}};
  const size_t bytes = N * sizeof(float);
  static const int64_t block[4] = {};
  rfr_tensor y, dx, dw;
  ok(rfr_graphs_set_stream(g, streams ? streams[0] : NULL));
  /* every run is the first step, so that masks are equal */
  const rfr_binding step = {"step", {RFR_I64, 1, {4}}, block};
  ok(rfr_graphs_begin_step(g, &step, 1));
  for (int call = 0; call < 2 * MICROBATCHES; call++) {
    const int m = call / 2, back = call % 2;
    const cudaStream_t s = streams ? streams[call % STREAMS] : 0;
    if (streams) ok(rfr_graphs_set_stream(g, s));
    if (streams) wait_a_while<<<1, 1, 0, s>>>(PAUSE);
    float *to = (float *)p.at[call];
    if (!p.host[call]) cuda(cudaMemcpyAsync(to, source + call * N, bytes, cudaMemcpyDefault, s));
    if (!streams) cuda(cudaDeviceSynchronize());
    const rfr_binding in = {NULL, type, to};
    if (back) ok(rfr_graphs_backward(g, 0, m, &in, 1, &dx, 1));
    else ok(rfr_graphs_forward(g, 0, m, &in, 1, &y, 1));
    if (!streams) ok(rfr_graphs_wait(g));
    cuda(cudaMemcpyAsync(back ? out->dx[m] : out->y[m], back ? dx.data : y.data, bytes, cudaMemcpyDefault, s));
    if (!p.host[call] && (!p.fixed || back))
      cuda(cudaMemsetAsync(to, 0xff, bytes, s)); /* fixed: it is read until the last gradient */
    if (!streams) cuda(cudaDeviceSynchronize());
  }
  ok(rfr_graphs_end_step(g));
  ok(rfr_graphs_gradient(g, "w", &dw));
  cuda(cudaMemcpyAsync(out->dw, dw.data, sizeof out->dw, cudaMemcpyDefault, streams ? streams[1] : 0));
  cuda(cudaDeviceSynchronize());
  ok(rfr_graphs_set_stream(g, NULL));
}

/* Moves all memory at once and then fills the old memory with NaN. */
static void move_all(rfr_graphs *g, const memory *own) {
  const size_t bytes = C * C * sizeof(float);
  const rfr_binding tensor = {"w", {RFR_F32, 2, {C, C}}, own->w[1]};
  const rfr_main_gradient gradient = main_gradient(own->dw[1]);
  cuda(cudaMemcpy(own->w[1], own->w[0], bytes, cudaMemcpyDefault));
  cuda(cudaMemset(own->w[0], 0xff, bytes));
  cuda(cudaMemset(own->dw[0], 0xff, bytes));
  void *address[4];
  for (int i = 0; i < 4; i++) {
    address[i] = own->port[1][i];
    cuda(cudaMemset(own->port[0][i], 0xff, N * sizeof(float)));
  }
  cuda(cudaDeviceSynchronize());
  const rfr_callable_moved fixed[4] = {{0, {"x", 0, &address[0], 1}},
                                       {0, {"y", 0, &address[1], 1}},
                                       {0, {"y", 1, &address[2], 1}},
                                       {0, {"x", 1, &address[3], 1}}};
  ok(rfr_graphs_rebind(g, &tensor, 1, &gradient, 1, fixed, 4));
}

static bool untouched(const float *p, size_t n) {
  std::vector<unsigned> bits(n);
  bool all = true;
  cuda(cudaMemcpy(bits.data(), p, n * sizeof *p, cudaMemcpyDefault));
  for (size_t i = 0; i < n; i++) all = all && bits[i] == 0xffffffffu;
  return all;
}

/* Each call gets other memory: device, host, and both alternating, which returns to the same address. */
static void run_from_others(rfr_graphs *g, const float *source, const cudaStream_t *streams, const step *plain,
                            step *now, bool eager) {
  const std::vector<float> pageable(source, source + 2 * MICROBATCHES * N);
  places device = {}, host = {}, turns = {};
  for (int call = 0; call < 2 * MICROBATCHES; call++) {
    const bool odd = call / 2 % 2;
    device.at[call] = room(N);
    host.at[call] = source + call * N;
    turns.at[call] = odd ? pageable.data() + call * N : device.at[call % 2];
    host.host[call] = true;
    turns.host[call] = odd;
  }
  const places *order[] = {&device, &host, &device, &turns};
  const char *what[] = {"other device memory at each call", "then host memory", "then device memory", "then by turns"};
  for (int i = 0; i < 4; i++) {
    char text[80];
    memset(now, 0xff, sizeof *now);
    run(g, source, *order[i], streams, now);
    snprintf(text, sizeof text, "%s, %s", eager ? "eager" : "captured", what[i]);
    expect(text, memcmp(plain, now, sizeof *now) == 0);
  }
  for (int call = 0; call < 2 * MICROBATCHES; call++) cuda(cudaFree((void *)device.at[call]));
}

static bool same(const step *a, const step *b) { return memcmp(a, b, sizeof *a) == 0; }

int main(void) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  cudaStream_t own, other;
  float *source, *x;
  step *results;
  o.device = "cuda";
  ok(rfr_ctx_create(&o, &ctx));
  cuda(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
  cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cuda(cudaMallocHost((void **)&source, 2 * MICROBATCHES * N * sizeof(float)));
  cuda(cudaMallocHost((void **)&results, 2 * sizeof *results));
  cuda(cudaMalloc((void **)&x, N * sizeof(float)));
  for (int i = 0; i < 2 * MICROBATCHES * N; i++) source[i] = (float)(rand() % 2001 - 1000) / 1000;
  const cudaStream_t one[STREAMS] = {own, own}, two[STREAMS] = {own, other},
                     legacy[STREAMS] = {cudaStreamLegacy, cudaStreamLegacy};
  step *plain = &results[0], *now = &results[1];
  for (int eager = 0; eager < 2; eager++) {
    rfr_graphs *g = make(ctx, eager, NULL);
    if (eager == 0) run(g, source, both(x, x), NULL, plain);
    memset(now, 0xff, sizeof *now);
    run(g, source, both(x, x), one, now);
    expect(eager ? "eager, in a stream" : "captured, in a stream", same(plain, now));
    memset(now, 0xff, sizeof *now);
    run(g, source, both(x, x), two, now);
    expect(eager ? "eager, in two streams by turns" : "captured, in two streams by turns", same(plain, now));
    memset(now, 0xff, sizeof *now);
    run(g, source, both(x, x), legacy, now);
    expect(eager ? "eager, in the legacy stream" : "captured, in the legacy stream", same(plain, now));
    memset(now, 0xff, sizeof *now);
    run(g, source, both(x, x), NULL, now);
    expect(eager ? "eager, in the graphs' own again" : "captured, in the graphs' own again", same(plain, now));
    run_from_others(g, source, two, plain, now, eager);
    rfr_graphs_destroy(g);
    memory own = {{}, {room(C * C), room(C * C)}, {room(C * C), room(C * C)}};
    for (int i = 0; i < 8; i++) own.port[i / 4][i % 4] = room(N);
    g = make(ctx, eager, &own);
    memset(now, 0xff, sizeof *now);
    run(g, source, both(own.port[0][0], own.port[0][2]), one, now);
    expect(eager ? "eager, in fixed memory" : "captured, in fixed memory", same(plain, now));
    move_all(g, &own);
    memset(now, 0xff, sizeof *now);
    run(g, source, both(own.port[1][0], own.port[1][2]), two, now);
    expect(eager ? "eager, weights and fixed memory have moved" : "captured, weights and fixed memory have moved",
           same(plain, now));
    bool left = untouched(own.w[0], C * C) && untouched(own.dw[0], C * C);
    for (int i = 0; i < 4; i++) left = left && untouched(own.port[0][i], N);
    expect(eager ? "eager, nothing is written where they were" : "captured, nothing is written where they were", left);
    rfr_graphs_destroy(g);
    for (int i = 0; i < 8; i++) cuda(cudaFree(own.port[i / 4][i % 4]));
    for (int i = 0; i < 2; i++) cuda(cudaFree(own.w[i])), cuda(cudaFree(own.dw[i]));
  }
  double norm = 0;
  for (int i = 0; i < C * C; i++) norm += (double)plain->dw[i] * plain->dw[i];
  expect("the gradient is a number, and none of zeros", norm > 0 && norm < 1e12);
  cuda(cudaFree(x));
  cuda(cudaFreeHost(source));
  cuda(cudaFreeHost(results));
  cuda(cudaStreamDestroy(own));
  cuda(cudaStreamDestroy(other));
  rfr_ctx_destroy(ctx);
  return wrong != 0;
}
