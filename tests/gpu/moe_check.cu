/* SPDX-License-Identifier: Apache-2.0
 *
 * Routing, sorting and moving rows at the sizes of real layers, on a GPU, without the library:
 *
 *   cmake --build build/release --target moe_check && build/release/moe_check [check|time]
 *
 * Routing and sorting are compared with loops on the host: the choices, the sorted order and the resulting maps, value
 * by value, bitwise equal in 5 runs; for few and many experts, groups, and more than a warp's choices; with logits that
 * are equal, that differ in their last bits, and that are NaN or infinite. Weighted SwiGLU is compared with loops in
 * double, and must be bitwise equal for any strides of its operands. Times, also of the ops between the expert GEMMs,
 * are those of a graph of 20 calls that alternate between two sets of buffers. Rows count once where they are read, and
 * once where they are written. The exit code is 1 if any line says BAD.
 */
#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "backend/cuda/kernels.cuh"
#include "check.cuh"
#include "refrain/ops.h"

/* ---- values on the device ---- */

static size_t bytes_of(rfr_dtype dtype, const std::vector<int64_t> &shape) {
  int64_t n = rfi_element_bytes(dtype);
  for (int64_t d : shape) n *= d;
  return (size_t)n;
}

struct value : buffer {
  rfr_arg arg = {};
  value(rfr_dtype dtype, const std::vector<int64_t> &shape) : buffer(bytes_of(dtype, shape)) {
    int64_t n = 1;
    arg.type.dtype = dtype;
    arg.type.rank = (int)shape.size();
    for (int d = arg.type.rank - 1; d >= 0; d--) arg.type.shape[d] = shape[d], arg.stride[d] = n, n *= shape[d];
    arg.data = data;
  }
  template <typename T> std::vector<T> host() const {
    std::vector<T> x(bytes / sizeof(T));
    CUDA(cudaMemcpy(x.data(), data, bytes, cudaMemcpyDeviceToHost));
    return x;
  }
  template <typename T> void set(const std::vector<T> &x) {
    CUDA(cudaMemcpy(data, x.data(), bytes, cudaMemcpyHostToDevice));
  }
};

static cudaStream_t stream;
static rfi_cuda_info info;

struct call_of {
  const rfi_cuda_kernel *kernel;
  std::vector<rfr_arg> in, out;
  std::vector<rfr_attr> attr;
  buffer *workspace;
  rfr_call call = {};
  call_of(const rfi_cuda_kernel &kernel, std::vector<rfr_arg> in, std::vector<rfr_arg> out, std::vector<rfr_attr> attr)
      : kernel(&kernel), in(in), out(out), attr(attr) {
    call.n_in = (int)this->in.size(), call.n_out = (int)this->out.size();
    call.in = this->in.data(), call.out = this->out.data(), call.attr = this->attr.data();
    call.stream = stream, call.library = &info;
    workspace = new buffer(kernel.workspace ? kernel.workspace(&call) : 0);
    call.workspace = workspace->data;
  }
  call_of(const call_of &) = delete;
  ~call_of() { delete workspace; }
  void run() const { expect(kernel->run(&call) == RFR_OK, "status"); }
};

static rfr_attr integer(int64_t i) {
  rfr_attr a = {};
  a.i = i;
  return a;
}
static rfr_attr real(double f) {
  rfr_attr a = {};
  a.f = f;
  return a;
}

/* Seconds per run, measured over a graph of n runs. */
template <class RUN> static double time_of(const RUN &run, int n = 20) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t a, b;
  float best = 1e9f;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < n; i++) run(i % 2);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaEventCreate(&a));
  CUDA(cudaEventCreate(&b));
  for (int i = 0; i < 6; i++) {
    float ms;
    CUDA(cudaEventRecord(a, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(b, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaEventElapsedTime(&ms, a, b));
    if (i > 0) best = std::min(best, ms);
  }
  cudaEventDestroy(a), cudaEventDestroy(b), cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
  return best * 1e-3 / n;
}

/* ---- checks ---- */

struct shape {
  int64_t T;
  int E, k, score, groups, group_k;
};

static uint64_t state = 1;
static float draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(state >> 33) * 0x1p-30f - 1.0f;
}

/* Kinds of logits: multiples of 1/64; the same with other last bits; with NaN, infinities and both zeros among them;
 * all equal. */
enum form { COARSE, CLOSE, STRANGE, ALIKE, FORMS };
static const char *const forms[] = {"coarse", "close", "strange", "alike"};

static float logit_of(int form) {
  const float x = roundf(draw() * 512) / 64, other = draw();
  uint32_t bits;
  float y;
  if (form == ALIKE) return 0.5f;
  if (form == STRANGE && other > 0.4f)
    return other > 0.9f ? NAN : other > 0.8f ? INFINITY : other > 0.5f ? -INFINITY : -0.0f;
  memcpy(&bits, &x, 4);
  if (form == CLOSE) bits ^= (uint32_t)(fabsf(other) * 3);
  memcpy(&y, &bits, 4);
  return y;
}

static void check(const shape &s, int form) {
  const int64_t T = s.T, slots = T * s.k;
  printf("check %6lld tokens %5d experts top %2d score %d groups %d/%d, %s:", (long long)T, s.E, s.k, s.score,
         s.group_k, s.groups, forms[form]);
  value logits(RFR_F32, {T, s.E}), weight(RFR_F32, {T, s.k}), index(RFR_I32, {T, s.k});
  value splits(RFR_I32, {s.E}), order(RFR_I32, {slots}), place(RFR_I32, {T, s.k});
  std::vector<float> l((size_t)(T * s.E));
  for (float &x : l) x = logit_of(form);
  logits.set(l);
  call_of route(RFI_CUDA(moe_route), {logits.arg}, {weight.arg, index.arg},
                {integer(s.k), integer(s.score), integer(1), integer(s.groups), integer(s.group_k), real(1)});
  call_of sort(RFI_CUDA(moe_sort), {index.arg}, {splits.arg, order.arg, place.arg}, {integer(s.E)});
  std::vector<float> w;
  std::vector<int32_t> i, o, p, n;
  for (int run = 0; run < 5; run++) {
    route.run();
    sort.run();
    CUDA(cudaStreamSynchronize(stream));
    const auto w2 = weight.host<float>();
    const auto i2 = index.host<int32_t>(), o2 = order.host<int32_t>(), p2 = place.host<int32_t>();
    if (run) expect(!memcmp(w2.data(), w.data(), w.size() * 4) && i2 == i && o2 == o && p2 == p, "other bits");
    w = w2, i = i2, o = o2, p = p2;
  }
  n = splits.host<int32_t>();
  /* groups are compared by scores, which this check does not compute: it checks only the order of their choices */
  bool chosen = true, sums = true, sorted = true;
  std::vector<int> all(s.E);
  for (int64_t t = 0; t < T; t++) {
    const float *x = &l[(size_t)(t * s.E)];
    const auto better = [&](int a, int b) {
      if (x[a] != x[a] || x[b] != x[b]) return x[a] == x[a] || (x[b] != x[b] && a < b);
      return x[a] > x[b] || (x[a] == x[b] && a < b);
    };
    double sum = 0;
    for (int e = 0; e < s.E; e++) all[e] = e;
    if (s.groups == 1) std::partial_sort(all.begin(), all.begin() + s.k, all.end(), better);
    for (int j = 0; j < s.k; j++) {
      const int e = i[(size_t)(t * s.k + j)];
      chosen &= e >= 0 && e < s.E && (s.groups > 1 || e == all[j]);
      chosen &= j == 0 || s.groups == 1 || better(i[(size_t)(t * s.k + j - 1)], e);
      sum += w[(size_t)(t * s.k + j)];
    }
    sums &= form == STRANGE || fabs(sum - 1) < 1e-5;
  }
  std::vector<int32_t> by((size_t)slots);
  for (int64_t r = 0; r < slots; r++) by[(size_t)r] = (int32_t)r;
  std::stable_sort(by.begin(), by.end(), [&](int32_t a, int32_t b) { return i[(size_t)a] < i[(size_t)b]; });
  sorted &= by == o;
  for (int64_t r = 0; r < slots; r++) sorted &= p[(size_t)by[(size_t)r]] == r;
  std::vector<int32_t> counts(s.E);
  for (int32_t e : i) counts[e]++;
  expect(chosen, "chosen");
  expect(sums, "weights");
  expect(sorted, "order");
  expect(counts == n, "splits");
  for (const buffer *b :
       std::initializer_list<const buffer *>{&weight, &index, &splits, &order, &place, route.workspace, sort.workspace})
    expect(b->guard_intact(), "wrote past a value");
  printf(" done\n");
}

/* The I columns of x from column `at` on. */
static rfr_arg rows_of(const value &x, int64_t I, int64_t at) {
  rfr_arg a = x.arg;
  a.type.shape[1] = I;
  a.data = (char *)a.data + 2 * at;
  return a;
}

static float f32_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Weighted SwiGLU in bf16 with f32 weights: operands are dense, or slices of wider rows that are misaligned by one
 * element. */
static void check_weighted(int64_t rows, int64_t I) {
  printf("check %6lld rows of %lld, weighted:", (long long)rows, (long long)I);
  std::vector<float> dw;
  std::vector<uint16_t> d;
  for (int off = 0; off < 2; off++) {
    const int64_t wide = I + off;
    value gate(RFR_BF16, {rows, wide}), up(RFR_BF16, {rows, wide}), dy(RFR_BF16, {rows, wide}), weight(RFR_F32, {rows});
    value out(RFR_BF16, {rows, I}), packed(RFR_BF16, {rows, 2 * I}), dweight(RFR_F32, {rows});
    std::vector<uint16_t> x[3];
    std::vector<float> w((size_t)rows), got;
    const value *const of[] = {&gate, &up, &dy};
    state = 7;
    for (int k = 0; k < 3; k++) {
      x[k].resize((size_t)(rows * wide));
      for (int64_t i = 0; i < rows * I; i++) {
        const float v = 3 * draw();
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        x[k][(size_t)(i / I * wide + i % I + off)] = (uint16_t)(bits >> 16);
      }
      CUDA(cudaMemcpy(of[k]->data, x[k].data(), of[k]->bytes, cudaMemcpyHostToDevice));
    }
    for (float &v : w) v = draw();
    weight.set(w);
    const rfr_arg g = rows_of(gate, I, off), u = rows_of(up, I, off), r = rows_of(dy, I, off);
    call_of forward(RFI_CUDA(swiglu_weighted), {g, u, weight.arg}, {out.arg}, {integer(0)});
    call_of backward(RFI_CUDA(swiglu_weighted_bwd_packed), {r, g, u, weight.arg}, {dweight.arg, packed.arg},
                     {integer(0)});
    forward.run(), backward.run();
    CUDA(cudaStreamSynchronize(stream));
    const auto o = out.host<uint16_t>(), p = packed.host<uint16_t>();
    got = dweight.host<float>();
    double worst[3] = {0, 0, 0};
    for (int64_t i = 0; i < rows; i++) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < I; j++) {
        const size_t at = (size_t)(i * wide + j + off);
        const double a = f32_of(x[0][at]), b = f32_of(x[1][at]), c = f32_of(x[2][at]), s = 1 / (1 + exp(-a));
        const double want[3] = {a * s * b * w[(size_t)i], c * w[(size_t)i] * b * s * (1 + a * (1 - s)),
                                c * w[(size_t)i] * a * s};
        const double have[3] = {f32_of(o[(size_t)(i * I + j)]), f32_of(p[(size_t)(i * 2 * I + j)]),
                                f32_of(p[(size_t)(i * 2 * I + I + j)])};
        for (int k = 0; k < 3; k++) /* half an ulp of bf16, and the error of f32 */
          worst[k] = std::max(worst[k], fabs(have[k] - want[k]) / (fabs(want[k]) * (0x1p-8 * 1.001) + 1e-30));
        sum += c * a * s * b, size += fabs(c * a * s * b);
      }
      expect(fabs(got[(size_t)i] - sum) <= 4e-7 * size, "dweight");
    }
    expect(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 1, "y, dgate or dup");
    if (off) expect(got == dw && p == d, "other bits where it lies elsewhere");
    dw = got, d = p;
    for (const buffer *b : std::initializer_list<const buffer *>{&out, &packed, &dweight})
      expect(b->guard_intact(), "wrote past a value");
  }
  printf(" done\n");
}

/* ---- times ---- */

static void show(const char *what, double seconds, double bytes) {
  printf("  %-18s %8.2f us %8.2f TB/s\n", what, 1e6 * seconds, 1e-12 * bytes / seconds);
}

/* Between the two expert GEMMs: gate and up adjacent, in rows of 2 I. */
static void time_experts(int64_t rows, int64_t I) {
  value *packed[2], *d[2], *h[2], weight(RFR_F32, {rows}), dweight(RFR_F32, {rows});
  std::vector<call_of *> forward, backward, weighted, weighted_back;
  for (int i = 0; i < 2; i++) {
    packed[i] = new value(RFR_BF16, {rows, 2 * I});
    d[i] = new value(RFR_BF16, {rows, 2 * I});
    h[i] = new value(RFR_BF16, {rows, I});
    CUDA(cudaMemset(packed[i]->arg.data, 0x3C, packed[i]->bytes));
    CUDA(cudaMemset(h[i]->arg.data, 0x3C, h[i]->bytes));
    rfr_arg gate = packed[i]->arg, up;
    gate.type.shape[1] = I;
    up = gate;
    up.data = (char *)gate.data + 2 * I;
    forward.push_back(new call_of(RFI_CUDA(swiglu), {gate, up}, {h[i]->arg}, {integer(0)}));
    backward.push_back(new call_of(RFI_CUDA(swiglu_bwd_packed), {h[i]->arg, gate, up}, {d[i]->arg}, {integer(0)}));
    weighted.push_back(new call_of(RFI_CUDA(swiglu_weighted), {gate, up, weight.arg}, {h[i]->arg}, {integer(0)}));
    weighted_back.push_back(new call_of(RFI_CUDA(swiglu_weighted_bwd_packed), {h[i]->arg, gate, up, weight.arg},
                                        {dweight.arg, d[i]->arg}, {integer(0)}));
  }
  show("swiglu", time_of([&](int i) { forward[i]->run(); }), 6.0 * (double)rows * (double)I);
  show("swiglu_bwd_packed", time_of([&](int i) { backward[i]->run(); }), 10.0 * (double)rows * (double)I);
  show("swiglu_weighted", time_of([&](int i) { weighted[i]->run(); }), 6.0 * (double)rows * (double)I);
  show("its gradients", time_of([&](int i) { weighted_back[i]->run(); }), 10.0 * (double)rows * (double)I);
  for (int i = 0; i < 2; i++) {
    delete forward[i], delete backward[i], delete weighted[i], delete weighted_back[i];
    delete packed[i], delete d[i], delete h[i];
  }
}

/* Slots' weights to rows and back: rows with one column. */
static void time_row_weights(const value &weight, const value &order, const value &place) {
  const int64_t slots = order.arg.type.shape[0];
  value rows(RFR_F32, {slots, 1}), back(RFR_F32, {slots, 1});
  rfr_arg column = weight.arg, one = place.arg;
  const rfr_arg none = {};
  for (rfr_arg *a : {&column, &one}) a->type.shape[0] = slots, a->type.shape[1] = a->stride[0] = a->stride[1] = 1;
  call_of there(RFI_CUDA(moe_permute), {column, order.arg, one, none}, {rows.arg}, {integer(0)});
  call_of home(RFI_CUDA(moe_unpermute), {rows.arg, order.arg, one, none}, {back.arg}, {integer(0)});
  show("row weights", time_of([&](int) { there.run(); }), 12.0 * (double)slots);
  show("and back", time_of([&](int) { home.run(); }), 12.0 * (double)slots);
  CUDA(cudaStreamSynchronize(stream));
  expect(back.host<float>() == weight.host<float>(), "weights that went there and back");
}

static void time_layer(int64_t T, int E, int k, int64_t C, int64_t I) {
  const int64_t slots = T * k;
  value *logits[2], *x[2], *y[2], *out[2];
  value weight(RFR_F32, {T, k}), index(RFR_I32, {T, k}), dlogits(RFR_F32, {T, E}), dw(RFR_F32, {T, k});
  value splits(RFR_I32, {E}), order(RFR_I32, {slots}), place(RFR_I32, {T, k}), targets(RFR_I32, {T}),
      loss(RFR_F32, {1});
  value offsets(RFR_I32, {E + 1}), bad(RFR_I32, {1}), db(RFR_BF16, {E, C}), one(RFR_F32, {1});
  std::vector<float> l((size_t)(T * E));
  for (float &v : l) v = draw();
  for (int i = 0; i < 2; i++) {
    logits[i] = new value(RFR_F32, {T, E});
    logits[i]->set(l);
    x[i] = new value(RFR_BF16, {T, C});
    y[i] = new value(RFR_BF16, {slots, C});
    out[i] = new value(RFR_BF16, {T, C});
    CUDA(cudaMemset(x[i]->arg.data, 0x3C, x[i]->bytes));
  }
  CUDA(cudaMemset(targets.arg.data, 0, targets.bytes));
  CUDA(cudaMemset(one.arg.data, 0, one.bytes));
  std::vector<call_of *> route, permute, weighted, unpermute, dweight, lossf, lossb, routeb, dbias;
  const rfr_arg none = {};
  for (int i = 0; i < 2; i++) {
    route.push_back(new call_of(RFI_CUDA(moe_route), {logits[i]->arg}, {weight.arg, index.arg},
                                {integer(k), integer(0), integer(1), integer(1), integer(1), real(1)}));
    routeb.push_back(new call_of(RFI_CUDA(moe_route_bwd), {weight.arg, logits[i]->arg, index.arg}, {dlogits.arg},
                                 {integer(0), integer(1), real(1)}));
    permute.push_back(
        new call_of(RFI_CUDA(moe_permute), {x[i]->arg, order.arg, place.arg, none}, {y[i]->arg}, {integer(0)}));
    weighted.push_back(
        new call_of(RFI_CUDA(moe_permute), {x[i]->arg, order.arg, place.arg, weight.arg}, {y[i]->arg}, {integer(0)}));
    unpermute.push_back(new call_of(RFI_CUDA(moe_unpermute), {y[i]->arg, order.arg, place.arg, weight.arg},
                                    {out[i]->arg}, {integer(0)}));
    dweight.push_back(
        new call_of(RFI_CUDA(moe_unpermute_dw), {y[i]->arg, place.arg, x[i]->arg}, {dw.arg}, {integer(RFR_F32)}));
    lossf.push_back(new call_of(RFI_CUDA(moe_loss), {logits[i]->arg, index.arg, targets.arg}, {loss.arg},
                                {integer(0), real(0.01), real(0.001), integer(-100)}));
    lossb.push_back(new call_of(RFI_CUDA(moe_loss_bwd), {one.arg, logits[i]->arg, index.arg, targets.arg},
                                {dlogits.arg}, {integer(0), real(0.01), real(0.001), integer(-100)}));
    dbias.push_back(
        new call_of(RFI_CUDA(grouped_dbias), {y[i]->arg, offsets.arg, none, none}, {db.arg}, {integer(RFR_BF16)}));
  }
  call_of sort(RFI_CUDA(moe_sort), {index.arg}, {splits.arg, order.arg, place.arg}, {integer(E)});
  call_of to_offsets(RFI_CUDA(splits_to_offsets), {splits.arg}, {offsets.arg, bad.arg}, {integer(slots)});
  route[0]->run();
  sort.run();
  to_offsets.run();
  CUDA(cudaStreamSynchronize(stream));
  printf("time %lld tokens, %d experts, top %d, rows of %lld bf16\n", (long long)T, E, k, (long long)C);
  const double row = 2.0 * C, all = (double)T * row * (1 + k), table = 4.0 * T * E, maps = 4.0 * slots;
  show("route", time_of([&](int i) { route[i]->run(); }), table + 2 * maps);
  show("sort", time_of([&](int) { sort.run(); }), 3 * maps);
  show("route + sort", time_of([&](int i) { route[i]->run(), sort.run(); }), table + 5 * maps);
  show("splits_to_offsets", time_of([&](int) { to_offsets.run(); }), 8.0 * E);
  show("permute", time_of([&](int i) { permute[i]->run(); }), all);
  show("permute, weighted", time_of([&](int i) { weighted[i]->run(); }), all);
  show("unpermute", time_of([&](int i) { unpermute[i]->run(); }), all);
  show("unpermute_dw", time_of([&](int i) { dweight[i]->run(); }), all);
  time_row_weights(weight, order, place);
  show("route_bwd", time_of([&](int i) { routeb[i]->run(); }), 2 * table + 2 * maps);
  show("loss", time_of([&](int i) { lossf[i]->run(); }), table + maps);
  show("loss_bwd", time_of([&](int i) { lossb[i]->run(); }), 2 * table + maps);
  show("grouped_dbias", time_of([&](int i) { dbias[i]->run(); }), (double)slots * row);
  time_experts(slots, I);
  for (auto *list : {&route, &permute, &weighted, &unpermute, &dweight, &lossf, &lossb, &routeb, &dbias})
    for (call_of *c : *list) delete c;
  for (int i = 0; i < 2; i++) delete logits[i], delete x[i], delete y[i], delete out[i];
}

int main(int argc, char **argv) {
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  CUDA(cudaStreamCreate(&stream));
  info.sms = device.multiProcessorCount, info.major = device.major, info.minor = device.minor;
  printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  static const shape shapes[] = {{32768, 128, 8, 0, 1, 1}, {4099, 8, 2, 1, 1, 1},   {1021, 256, 8, 2, 8, 4},
                                 {509, 1000, 40, 0, 1, 1}, {257, 2000, 6, 2, 1, 1}, {67, 3000, 33, 0, 1, 1},
                                 {129, 512, 12, 1, 1, 1},  {2053, 60, 4, 0, 1, 1},  {300, 1536, 8, 0, 16, 4},
                                 {511, 1000, 10, 0, 1, 1}, {777, 200, 6, 0, 1, 1},  {130, 5, 5, 0, 1, 1}};
  if (argc < 2 || strcmp(argv[1], "check") == 0)
    for (const shape &s : shapes)
      for (int form = 0; form < (s.groups > 1 ? 1 : FORMS); form++) check(s, form);
  if (argc < 2 || strcmp(argv[1], "check") == 0)
    for (int64_t I : {768, 547, 1, 2048}) check_weighted(257, I);
  if (argc < 2 || strcmp(argv[1], "time") == 0) {
    time_layer(32768, 128, 8, 2048, 768);
    time_layer(32768, 8, 2, 4096, 14336);
    time_layer(16384, 256, 8, 7168, 2048);
  }
  printf(failures ? "BAD: %d failures\n" : "all good\n", failures);
  return failures > 0;
}
