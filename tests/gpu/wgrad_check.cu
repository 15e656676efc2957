/* SPDX-License-Identifier: Apache-2.0
 *
 * W on a side stream (rfr_graphs_options.wgrad_side_stream). Transformer blocks of several widths, one callable each,
 * run under several schedules, with W in order and on the side stream. Main gradients and input gradients are bitwise
 * equal in every step, and the times of a step are printed: medians of rounds in which both sets take turns.
 *
 *   wgrad_check [SECONDS [WIDTH]]     for the times of each row, default 0.4; of one width, default all
 */
#include <string.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "calls.cuh"
#include "refrain/graphs.h"
#include "refrain/ops.h"

enum { WEIGHTS = 8, MOST_MICROBATCHES = 8, POOL = 4096 * 4096 };

static int wrong;

static double now() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct size {
  const char *name;
  int tokens, width, layers;
};

struct row {
  const char *name, *schedule; /* order list of one rank; NULL: a microbatch at a time */
  rfr_schedule_kind kind;      /* ranks > 0: rank 0 of a generated one */
  int ranks;
};

static const char *const weights[WEIGHTS] = {"n1", "q", "k", "v", "o", "n2", "up", "down"};

static const char *weight_name(int layer, int i, char text[32]) {
  snprintf(text, 32, "l%d.%s", layer, weights[i]);
  return text;
}

static rfr_value weight(rfr_trace *t, int layer, int i, int64_t a, int64_t b) {
  char text[32];
  const int64_t shape[2] = {a, b};
  return rfr_input(t, weight_name(layer, i, text), RFR_ROLE_TRAINABLE, RFR_BF16, b > 0 ? 2 : 1, shape);
}

static rfr_trace *block(rfr_ctx *ctx, const size *z, int layer) {
  const int64_t C = z->width, T = z->tokens, flat[2] = {T, C}, heads[3] = {T, C / 64, 64}, two[1] = {2};
  rfr_attention_options causal = {};
  causal.causal = 1;
  rfr_trace *t;
  ok(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_BF16, 2, flat);
  rfr_value documents = rfr_input(t, "documents", RFR_ROLE_CONST, RFR_I32, 1, two), y[3];
  rfr_value h = rfr_rmsnorm(t, x, weight(t, layer, 0, C, 0), 1e-5);
  for (int i = 0; i < 3; i++)
    y[i] = rfr_reshape(t, rfr_linear(t, h, weight(t, layer, 1 + i, C, C), RFR_NONE), 3, heads);
  h = rfr_reshape(t, rfr_attention(t, y[0], y[1], y[2], documents, &causal), 2, flat);
  x = rfr_add(t, x, rfr_linear(t, h, weight(t, layer, 4, C, C), RFR_NONE));
  h = rfr_rmsnorm(t, x, weight(t, layer, 5, C, 0), 1e-5);
  h = rfr_gelu(t, rfr_linear(t, h, weight(t, layer, 6, 4 * C, C), RFR_NONE), 1);
  rfr_output(t, "y", rfr_add(t, x, rfr_linear(t, h, weight(t, layer, 7, C, 4 * C), RFR_NONE)));
  ok(rfr_trace_finish(t));
  return t;
}

static rfr_schedule *schedule_of(rfr_ctx *ctx, const row *r, int layers) {
  rfr_schedule *s = NULL;
  if (r->ranks > 0) {
    rfr_schedule_options o = rfr_schedule_options_default();
    o.kind = r->kind, o.ranks = r->ranks, o.microbatches = MOST_MICROBATCHES, o.chunks = 1;
    ok(rfr_schedule_generate(ctx, &o, &s));
    std::vector<int> all((size_t)r->ranks, layers);
    ok(rfr_schedule_set_layers(s, all.data(), r->ranks));
  } else if (r->schedule) {
    ok(rfr_schedule_parse(ctx, "check", r->schedule, strlen(r->schedule), &s));
    ok(rfr_schedule_set_layers(s, &layers, 1));
  }
  return s;
}

static void fill(std::vector<uint16_t> &v, uint64_t seed, float by) {
  for (size_t i = 0; i < v.size(); i++) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    const float f = by * ((float)(int)((seed >> 40) % 2001 - 1000) / 1000);
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    v[i] = (uint16_t)(bits >> 16);
  }
}

/* Random values of up to POOL elements, repeated, and scaled by 2^-k. */
static std::vector<uint16_t> values(size_t n, int from, int k) {
  static std::vector<uint16_t> pool;
  if (pool.empty()) pool.resize(POOL), fill(pool, 1, 1);
  std::vector<uint16_t> v(n);
  for (size_t i = 0; i < n; i++) {
    const uint16_t x = pool[(i + (size_t)from) % POOL];
    v[i] = (x & 0x7f80) > k << 7 ? (uint16_t)(x - (k << 7)) : 0;
  }
  return v;
}

static rfr_graphs *make(rfr_ctx *ctx, const size *z, const rfr_schedule *s, int side_stream, int64_t *bytes) {
  std::vector<rfr_callable> c((size_t)z->layers, rfr_callable_default());
  std::vector<rfr_callable_link> link((size_t)z->layers);
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  for (int i = 0; i < z->layers; i++) {
    c[i].trace = block(ctx, z, i);
    link[i] = {"x", i - 1, "y"};
    if (i > 0) c[i].links = &link[i], c[i].n_links = 1;
  }
  o.schedule = s;
  o.wgrad_side_stream = side_stream;
  o.warmup_iterations = 1;
  ok(rfr_graphs_create(ctx, c.data(), z->layers, &o, &g));
  for (int i = 0; i < z->layers; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
  for (int l = 0; l < z->layers; l++)
    for (int i = 0; i < WEIGHTS; i++) {
      char text[32];
      rfr_tensor x;
      ok(rfr_graphs_tensor(g, weight_name(l, i, text), &x));
      const std::vector<uint16_t> v = values((size_t)x.bytes / 2, 1000 * (l * WEIGHTS + i), x.type.rank == 1 ? 0 : 5);
      ok(rfr_graphs_write(g, &x, v.data()));
    }
  rfr_graphs_memory m = {};
  m.size = sizeof m;
  ok(rfr_graphs_get_memory(g, &m));
  *bytes = m.planned_bytes;
  return g;
}

/* x and dy of each microbatch, in device memory */
struct data {
  uint16_t *x[MOST_MICROBATCHES], *dy[MOST_MICROBATCHES];
};

/* One step; dx[m] gets the input gradient, unless dx is NULL. */
static void step(rfr_graphs *g, const size *z, const rfr_schedule *s, const data *d, void **dx) {
  const rfr_type type = {RFR_BF16, 2, {z->tokens, z->width}};
  const int last = z->layers - 1;
  ok(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < (s ? 1 : MOST_MICROBATCHES);) {
    rfr_action a;
    rfr_tensor y;
    int k;
    ok(rfr_graphs_expected(g, &a, &k));
    if (a.op < 0) break;
    if (a.op == RFR_ACTION_F) {
      const rfr_binding x = {NULL, type, d->x[a.microbatch]};
      ok(rfr_graphs_forward(g, k, a.microbatch, &x, k == 0, &y, 1));
    } else if (a.op == RFR_ACTION_W) {
      ok(rfr_graphs_wgrad(g, k, a.microbatch));
    } else {
      const rfr_binding dy = {NULL, type, d->dy[a.microbatch]};
      ok(rfr_graphs_backward(g, k, a.microbatch, &dy, k == last, &y, k == 0));
      if (dx && k == 0) ok(rfr_graphs_read(g, &y, dx[a.microbatch]));
      m += !s && k == 0;
    }
  }
  ok(rfr_graphs_end_step(g));
}

static uint64_t hash(uint64_t h, const void *data, size_t n) {
  const uint32_t *w = (const uint32_t *)data;
  for (size_t i = 0; i < n / 4; i++) h = (h ^ w[i]) * 1099511628211ull;
  return h;
}

/* A hash of all main gradients and of the input gradients. */
static uint64_t results(rfr_graphs *g, const size *z, const rfr_schedule *s, const data *d, bool in_between) {
  const size_t n = (size_t)z->tokens * z->width * 2;
  std::vector<std::vector<char>> dx(MOST_MICROBATCHES, std::vector<char>(n));
  void *at[MOST_MICROBATCHES];
  for (int m = 0; m < MOST_MICROBATCHES; m++) at[m] = dx[m].data();
  step(g, z, s, d, in_between ? at : NULL);
  uint64_t h = 14695981039346656037ull;
  for (int m = 0; m < MOST_MICROBATCHES && in_between; m++) h = hash(h, at[m], n);
  for (int l = 0; l < z->layers; l++)
    for (int i = 0; i < WEIGHTS; i++) {
      char text[32];
      rfr_tensor x;
      ok(rfr_graphs_gradient(g, weight_name(l, i, text), &x));
      std::vector<char> v((size_t)x.bytes);
      ok(rfr_graphs_read(g, &x, v.data()));
      h = hash(h, v.data(), v.size());
      double norm = 0;
      for (size_t k = 0; k < v.size(); k += 4096) norm += std::abs((double)*(float *)&v[k]);
      if (!(norm > 0 && norm < 1e30)) printf("FAILED: the gradient of %s has norm %g\n", text, norm), wrong++;
    }
  return h;
}

static double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/* Seconds per step, of `n` steps in a row. */
static double timed(rfr_graphs *g, const size *z, const rfr_schedule *s, const data *d, int n) {
  const double start = now();
  for (int i = 0; i < n; i++) step(g, z, s, d, NULL);
  ok(rfr_graphs_wait(g));
  return (now() - start) / n;
}

static void check(rfr_ctx *ctx, const size *z, const row *r, const data *d, double seconds, bool print) {
  rfr_schedule *s = schedule_of(ctx, r, z->layers);
  int64_t bytes[2];
  rfr_graphs *g[2] = {make(ctx, z, s, 0, &bytes[0]), make(ctx, z, s, 1, &bytes[1])};
  const int32_t documents[2] = {0, z->tokens};
  for (int k = 0; k < 2; k++) {
    rfr_tensor x;
    ok(rfr_graphs_tensor(g[k], "documents", &x));
    ok(rfr_graphs_write(g[k], &x, documents));
  }
  bool same = true;
  for (int k = 0; k < (z->width > 2048 ? 2 : 4); k++)
    same = same && results(g[0], z, s, d, k % 2) == results(g[1], z, s, d, k % 2);
  wrong += !same;
  for (double until = now() + 0.3; now() < until;) timed(g[0], z, s, d, 1);
  const double once = timed(g[0], z, s, d, 2);
  const int n = std::max(1, (int)(0.03 / once));
  std::vector<double> t[2], ratio;
  for (double until = now() + seconds; now() < until || ratio.size() < 5;) {
    for (int k = 0; k < 2; k++) t[k].push_back(timed(g[k], z, s, d, n));
    ratio.push_back(t[1].back() / t[0].back());
    for (int k = 1; k >= 0; k--) t[k].push_back(timed(g[k], z, s, d, n)); /* the other order */
    const size_t last = t[0].size() - 1;
    ratio.push_back(t[1][last] / t[0][last]);
  }
  printf("%-8s %-8s %s  in order %9.1f us  side stream %9.1f us  ratio %.4f (%.4f .. %.4f)  bytes %.1f -> %.1f MB\n",
         z->name, r->name, same ? "equal " : "DIFFER", 1e6 * median(t[0]), 1e6 * median(t[1]), median(ratio),
         *std::min_element(ratio.begin(), ratio.end()), *std::max_element(ratio.begin(), ratio.end()),
         1e-6 * (double)bytes[0], 1e-6 * (double)bytes[1]);
  if (print) printf("callable 1:\n%s", rfr_graphs_report(g[1], 1, "wgrad"));
  fflush(stdout);
  for (int k = 0; k < 2; k++) rfr_graphs_destroy(g[k]);
  rfr_schedule_destroy(s);
}

int main(int argc, char **argv) {
  static const size sizes[] = {{"256", 256, 256, 6},
                               {"512", 512, 512, 6},
                               {"1024", 1024, 1024, 6},
                               {"2048", 2048, 2048, 4},
                               {"4096", 4096, 4096, 2}};
  static const row rows[] = {
      {"none", NULL, RFR_SCHEDULE_1F1B, 0},
      {"B", "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0F4 0B4 0F5 0B5 0F6 0B6 0F7 0B7\n", RFR_SCHEDULE_1F1B, 0},
      {"1f1b", NULL, RFR_SCHEDULE_1F1B, 2},
      {"I W",
       "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2 0F3 0I3 0W3 0F4 0I4 0W4 0F5 0I5 0W5 0F6 0I6 0W6 "
       "0F7 0I7 0W7\n",
       RFR_SCHEDULE_1F1B, 0},
      {"zb-h1", NULL, RFR_SCHEDULE_ZB_H1, 2}};
  const double seconds = argc > 1 ? atof(argv[1]) : 0.4;
  const int width = argc > 2 ? atoi(argv[2]) : 0;
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  data d;
  o.device = "cuda";
  ok(rfr_ctx_create(&o, &ctx));
  std::vector<uint16_t> host(POOL);
  for (int m = 0; m < MOST_MICROBATCHES; m++)
    for (int k = 0; k < 2; k++) {
      uint16_t **p = k ? &d.dy[m] : &d.x[m];
      fill(host, (uint64_t)(1000 + 2 * m + k), k ? 0.01f : 1);
      cuda(cudaMalloc((void **)p, host.size() * 2));
      cuda(cudaMemcpy(*p, host.data(), host.size() * 2, cudaMemcpyDefault));
    }
  for (const size &z : sizes)
    for (const row &r : rows) {
      const bool large = z.width > 2048;
      if (width > 0 && z.width != width) continue;
      if (!large || r.ranks > 0 || !r.schedule) check(ctx, &z, &r, &d, large ? 4 * seconds : seconds, &z == sizes);
    }
  rfr_ctx_destroy(ctx);
  return wrong != 0;
}
