/* SPDX-License-Identifier: Apache-2.0
 *
 * Callables in the caller's stream. What they read is written there behind a kernel that takes its time, and what they
 * gave is copied away there, with no wait of the host in between: so a call that ran too early, or beside its
 * neighbours, would read or give something else. Captured and eager, in a stream, in two by turns and in the legacy
 * default stream, a step has the bits of one in the graphs' own stream with waits around each call.
 *
 *   stream_check
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "refrain/graphs.h"
#include "refrain/ops.h"

enum { T = 256, C = 256, N = T * C, MICROBATCHES = 3, STREAMS = 2, PAUSE = 20000000 };

static int wrong;

static void expect(const char *what, bool holds) {
  printf("%-64s %s\n", what, holds ? "ok" : "FAILED");
  fflush(stdout);
  wrong += !holds;
}

static void ok(rfr_status s) {
  if (s == RFR_OK) return;
  printf("FAILED: %s: %s\n", rfr_last_error()->slug, rfr_last_error()->message);
  exit(1);
}

static void cuda(cudaError_t e) {
  if (e == cudaSuccess) return;
  printf("FAILED: %s\n", cudaGetErrorString(e));
  exit(1);
}

static __global__ void wait_a_while(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}

static rfr_graphs *make(rfr_ctx *ctx, int eager) {
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
  c.trace = t;
  o.eager = eager;
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

/* streams NULL: the graphs' own, and the host waits. */
static void run(rfr_graphs *g, const float *source, float *x, const cudaStream_t *streams, step *out) {
  const rfr_type type = {RFR_F32, 2, {T, C}};
  const size_t bytes = N * sizeof(float);
  rfr_tensor y, dx, dw;
  ok(rfr_graphs_set_stream(g, streams ? streams[0] : NULL));
  ok(rfr_graphs_begin_step(g, NULL, 0));
  for (int call = 0; call < 2 * MICROBATCHES; call++) {
    const int m = call / 2, back = call % 2;
    const cudaStream_t s = streams ? streams[call % STREAMS] : 0;
    if (streams) ok(rfr_graphs_set_stream(g, s));
    if (streams) wait_a_while<<<1, 1, 0, s>>>(PAUSE);
    cuda(cudaMemcpyAsync(x, source + call * N, bytes, cudaMemcpyDefault, s));
    if (!streams) cuda(cudaDeviceSynchronize());
    const rfr_binding in = {NULL, type, x};
    if (back) ok(rfr_graphs_backward(g, 0, m, &in, 1, &dx, 1));
    else ok(rfr_graphs_forward(g, 0, m, &in, 1, &y, 1));
    if (!streams) ok(rfr_graphs_wait(g));
    cuda(cudaMemcpyAsync(back ? out->dx[m] : out->y[m], back ? dx.data : y.data, bytes, cudaMemcpyDefault, s));
    cuda(cudaMemsetAsync(x, 0xff, bytes, s));
    if (!streams) cuda(cudaDeviceSynchronize());
  }
  ok(rfr_graphs_end_step(g));
  ok(rfr_graphs_gradient(g, "w", &dw));
  cuda(cudaMemcpyAsync(out->dw, dw.data, sizeof out->dw, cudaMemcpyDefault, streams ? streams[1] : 0));
  cuda(cudaDeviceSynchronize());
  ok(rfr_graphs_set_stream(g, NULL));
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
    rfr_graphs *g = make(ctx, eager);
    if (eager == 0) run(g, source, x, NULL, plain);
    memset(now, 0xff, sizeof *now);
    run(g, source, x, one, now);
    expect(eager ? "eager, in a stream" : "captured, in a stream", same(plain, now));
    memset(now, 0xff, sizeof *now);
    run(g, source, x, two, now);
    expect(eager ? "eager, in two streams by turns" : "captured, in two streams by turns", same(plain, now));
    memset(now, 0xff, sizeof *now);
    run(g, source, x, legacy, now);
    expect(eager ? "eager, in the legacy stream" : "captured, in the legacy stream", same(plain, now));
    memset(now, 0xff, sizeof *now);
    run(g, source, x, NULL, now);
    expect(eager ? "eager, in the graphs' own again" : "captured, in the graphs' own again", same(plain, now));
    rfr_graphs_destroy(g);
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
