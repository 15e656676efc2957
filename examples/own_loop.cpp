// SPDX-License-Identifier: Apache-2.0
//
// A training loop in C++ with graphed callables: two linked layers, two microbatches in flight. Inputs and output
// gradients are in fixed memory, one buffer per slot, so nothing is copied. The loop asks for the next call, so it does
// not depend on the schedule. Handles are destroyed in reverse order of creation; statuses become exceptions.
#include <cstdio>
#include <memory>
#include <refrain/graphs.h>
#include <refrain/ops.h>
#include <stdexcept>
#include <string>

enum { T = 32, C = 16, N = T * C, LAYERS = 2, SLOTS = 2, STEPS = 60 };

static void check(rfr_status status) {
  if (status != RFR_OK) throw std::runtime_error(rfr_last_error()->message);
}

template <auto destroy> struct Destroy {
  template <typename Handle> void operator()(Handle *h) const { destroy(h); }
};
using Context = std::unique_ptr<rfr_ctx, Destroy<rfr_ctx_destroy>>;
using Trace = std::unique_ptr<rfr_trace, Destroy<rfr_trace_destroy>>;
using Schedule = std::unique_ptr<rfr_schedule, Destroy<rfr_schedule_destroy>>;
using Graphs = std::unique_ptr<rfr_graphs, Destroy<rfr_graphs_destroy>>;

struct alignas(64) Slot { // on a GPU this would be device memory
  float x[N], dy[N];
};

static std::string weight(int layer) { return "layer" + std::to_string(layer) + ".weight"; }

static Trace layer(rfr_ctx *ctx, int i) { // y = x w^T
  const int64_t rows[] = {T, C}, square[] = {C, C};
  rfr_trace *t = nullptr;
  check(rfr_trace_create(ctx, &t));
  Trace owner(t);
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, rows);
  rfr_value w = rfr_input(t, weight(i).c_str(), RFR_ROLE_TRAINABLE, RFR_F32, 2, square);
  rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
  check(rfr_trace_finish(t));
  return owner;
}

static Graphs graphs(rfr_ctx *ctx, const rfr_schedule *schedule, Slot *slot) {
  const rfr_callable_link link = {"x", 0, "y"};
  void *const xs[SLOTS] = {slot[0].x, slot[1].x}, *const dys[SLOTS] = {slot[0].dy, slot[1].dy};
  const rfr_callable_fixed x = {"x", 0, xs, SLOTS}, dy = {"y", 1, dys, SLOTS};
  const Trace first = layer(ctx, 0), last = layer(ctx, 1);
  rfr_callable c[LAYERS] = {rfr_callable_default(), rfr_callable_default()};
  c[0].trace = first.get(), c[0].fixed = &x, c[0].n_fixed = 1;
  c[1].trace = last.get(), c[1].fixed = &dy, c[1].n_fixed = 1, c[1].links = &link, c[1].n_links = 1;
  rfr_graphs_options o = rfr_graphs_options_default();
  o.schedule = schedule;
  rfr_graphs *g = nullptr;
  check(rfr_graphs_create(ctx, c, LAYERS, &o, &g)); // traces, lists and schedule are not needed any more
  return Graphs(g);
}

static float noise(unsigned i) { // -1 .. 1
  i = (i ^ i >> 16) * 0x45d9f3bu;
  i = (i ^ i >> 16) * 0x45d9f3bu;
  return static_cast<float>((i ^ i >> 16) & 0xffff) / 32768 - 1;
}

// The target is the reversed input; the loss is half the squared error over the rows of a microbatch.
static double forward(rfr_graphs *g, int callable, int microbatch, Slot *slot) {
  const rfr_type type = {RFR_F32, 2, {T, C}};
  const rfr_binding x = {nullptr, type, slot->x};
  rfr_tensor y;
  double loss = 0;
  if (callable == 0)
    for (int i = 0; i < N; i++) slot->x[i] = noise(microbatch * N + i);
  check(rfr_graphs_forward(g, callable, microbatch, &x, callable == 0, &y, 1));
  if (callable < LAYERS - 1) return 0;
  for (int i = 0; i < N; i++) {
    const float missing = static_cast<const float *>(y.data)[i] - slot->x[i / C * C + C - 1 - i % C];
    slot->dy[i] = missing / T;
    loss += 0.5 * missing * missing / T;
  }
  return loss;
}

static void backward(rfr_graphs *g, int callable, int microbatch, Slot *slot) {
  const rfr_type type = {RFR_F32, 2, {T, C}};
  const rfr_binding dy = {nullptr, type, slot->dy};
  const int last = callable == LAYERS - 1, first = callable == 0; // linked tensors are neither passed nor returned
  rfr_tensor dx;
  check(rfr_graphs_backward(g, callable, microbatch, &dy, last, &dx, first));
}

static double step(rfr_graphs *g, const rfr_schedule *schedule, Slot *slots) {
  rfr_action a;
  int callable;
  double loss = 0;
  check(rfr_graphs_begin_step(g, nullptr, 0));
  for (check(rfr_graphs_expected(g, &a, &callable)); a.op >= 0; check(rfr_graphs_expected(g, &a, &callable))) {
    Slot *slot = &slots[rfr_schedule_slot(schedule, a.stage, a.microbatch)];
    if (a.op == RFR_ACTION_F) loss += forward(g, callable, a.microbatch, slot);
    else backward(g, callable, a.microbatch, slot); // B: weight gradients too
  }
  check(rfr_graphs_end_step(g));
  return loss;
}

static void descend(rfr_graphs *g, float rate) {
  for (int layer = 0; layer < LAYERS; layer++) {
    rfr_tensor w, dw;
    check(rfr_graphs_tensor(g, weight(layer).c_str(), &w));
    check(rfr_graphs_gradient(g, weight(layer).c_str(), &dw));
    for (int i = 0; i < C * C; i++) static_cast<float *>(w.data)[i] -= rate * static_cast<float *>(dw.data)[i];
  }
}

int main() try {
  static const char text[] = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3";
  static Slot slots[SLOTS];
  const int layers = LAYERS;
  rfr_ctx *c = nullptr;
  check(rfr_ctx_create(nullptr, &c));
  Context ctx(c);
  rfr_schedule *s = nullptr;
  check(rfr_schedule_parse(ctx.get(), "own loop", text, sizeof text - 1, &s));
  Schedule schedule(s);
  check(rfr_schedule_set_layers(s, &layers, 1));
  Graphs g = graphs(ctx.get(), s, slots);
  for (int layer = 0; layer < LAYERS; layer++) {
    float first[C * C];
    rfr_tensor w;
    for (int i = 0; i < C * C; i++) first[i] = 0.4f * noise(10000 * (layer + 1) + i);
    check(rfr_graphs_tensor(g.get(), weight(layer).c_str(), &w));
    check(rfr_graphs_write(g.get(), &w, first));
  }
  double begin = 0, end = 0;
  for (int i = 0; i < STEPS; i++) {
    end = step(g.get(), s, slots);
    if (i == 0) begin = end;
    descend(g.get(), 0.1f);
  }
  std::printf("loss %.3f, after %d steps %.5f\n", begin, STEPS, end);
  return end < 0.05 * begin ? 0 : 1;
} catch (const std::exception &e) { return std::fprintf(stderr, "%s\n", e.what()), 1; }
