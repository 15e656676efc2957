// SPDX-License-Identifier: Apache-2.0
// Fully sharded training by two ranks, threads of this program, four ways: every rank holds all weights; each holds
// half of every weight, gathered by hooks around capture and by the loop around replay; gathered inside the graphs, by
// each call; and inside as actions of a schedule. The resulting weights are bitwise equal, the bytes of memory differ.
// Build with
//   cc fsdp.c -pthread $(pkg-config --cflags --libs refrain) -Wl,-rpath,$(pkg-config --variable=libdir refrain)
#include <pthread.h>
#include <refrain/refrain.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 2, LAYERS = 4, T = 32, C = 64, N = C * C, PART = N / RANKS, STEPS = 20 };
enum { WHOLE, AROUND, INSIDE, ACTIONS, WAYS };
static const rfr_type rows = {RFR_F32, 2, {T, C}}, square = {RFR_F32, 2, {C, C}};
static const char *const names[LAYERS] = {"w0", "w1", "w2", "w3"};

typedef struct rank {
  rfr_comm *comm;
  rfr_ctx *ctx;
  rfr_graphs *graphs;
  int number, way;
  float part[LAYERS][N];                     // its shards of the weights; all of them in the first way
  _Alignas(64) float weight[N], gradient[N]; // AROUND: the layer that runs; the same memory for all
  float x[T * C], dy[T * C], loss;
  rfr_graphs_memory memory;
  const char *failed;
} rank;

static float noise(unsigned seed, unsigned i) { // -1 .. 1
  unsigned z = seed * 2654435761u + i * 40503u;
  z = (z ^ z >> 15) * 2246822519u;
  return (float)(z >> 8) / 8388608.0f - 1;
}

static rfr_trace *layer(rfr_ctx *ctx, int i) { // y = x + gelu(x wT)
  rfr_trace *t;
  if (rfr_trace_create(ctx, &t)) return NULL;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, rows.shape);
  rfr_value w = rfr_input(t, names[i], RFR_ROLE_TRAINABLE, RFR_F32, 2, square.shape);
  rfr_output(t, "y", rfr_add(t, x, rfr_gelu(t, rfr_linear(t, x, w, RFR_NONE), 1)));
  rfr_trace_finish(t);
  return t;
}

// ---- gathered around the calls ----

static rfr_status gather(rank *r, int i) { return rfr_comm_all_gather(r->comm, r->part[i], r->weight, PART, RFR_F32); }
static rfr_status gather_hook(const rfr_hook_event *e, void *user) { return gather(user, e->callable); }

// ---- gathered by actions: each layer is a stage; the last is not dropped between its forward and its backward ----

static const char *const actions =
    "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2RESHARD 3UNSHARD 3F0 3B0 3RESHARD 3REDUCE "
    "2UNSHARD 2B0 2RESHARD 2REDUCE 1UNSHARD 1B0 1RESHARD 1REDUCE 0UNSHARD 0B0 0RESHARD 0REDUCE";

static rfr_status create(rank *r) {
  rfr_callable c[LAYERS];
  rfr_hooks hooks[LAYERS];
  rfr_binding tensors[LAYERS];
  rfr_main_gradient gradients[LAYERS];
  rfr_schedule *schedule = NULL;
  rfr_graphs_options o = rfr_graphs_options_default();
  const rfr_hook hook = {gather_hook, r};
  for (int i = 0; i < LAYERS; i++) {
    c[i] = rfr_callable_default();
    c[i].trace = layer(r->ctx, i);
    c[i].sharded = r->way >= INSIDE;
    hooks[i] = rfr_hooks_default();
    hooks[i].pre_forward = hooks[i].pre_backward = (rfr_hook_list){&hook, 1};
    tensors[i] = (rfr_binding){names[i], square, r->weight};
    gradients[i] = rfr_main_gradient_default();
    gradients[i].parameter = names[i], gradients[i].type = square, gradients[i].accumulate = 1;
    gradients[i].data = r->gradient, gradients[i].bytes = sizeof r->gradient;
  }
  if (r->way == AROUND) {
    o.hooks = hooks, o.n_hooks = LAYERS;
    o.tensors = tensors, o.n_tensors = LAYERS;
    o.gradients = gradients, o.n_gradients = LAYERS;
  }
  if (r->way >= INSIDE) o.comm = r->comm;
  if (r->way == ACTIONS && rfr_schedule_parse(r->ctx, "actions", actions, strlen(actions), &schedule))
    return RFR_INVALID;
  o.schedule = schedule;
  o.warmup_iterations = 1;
  rfr_status s = rfr_graphs_create(r->ctx, c, LAYERS, &o, &r->graphs);
  for (int i = 0; i < LAYERS; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
  rfr_schedule_destroy(schedule);
  r->memory.size = sizeof r->memory;
  return s ? s : rfr_graphs_get_memory(r->graphs, &r->memory);
}

static void update(float *w, const float *g, int n) { // elementwise, so a shard is updated like the full weight
  for (int i = 0; i < n; i++) w[i] -= 0.02f * g[i];
}

static rfr_status forward(rank *r, int i) {
  const rfr_binding x = {NULL, rows, r->x};
  rfr_tensor y;
  if (r->way == AROUND && gather(r, i)) return RFR_IO;
  rfr_status s = rfr_graphs_forward(r->graphs, i, 0, &x, 1, &y, 1);
  if (s == RFR_OK) memcpy(r->x, y.data, sizeof r->x);
  return s;
}

static rfr_status backward(rank *r, int i) {
  const rfr_binding dy = {NULL, rows, r->dy};
  rfr_tensor dx, g, w;
  if (r->way == AROUND && gather(r, i)) return RFR_IO;
  if (r->way == AROUND) memset(r->gradient, 0, sizeof r->gradient);
  rfr_status s = rfr_graphs_backward(r->graphs, i, 0, &dy, 1, &dx, 1);
  if (s == RFR_OK) memcpy(r->dy, dx.data, sizeof r->dy);
  if (s == RFR_OK && r->way == AROUND) {
    s = rfr_comm_reduce_scatter(r->comm, r->gradient, r->gradient + r->number * PART, PART, RFR_F32);
    update(r->part[i], r->gradient + r->number * PART, PART);
  } else if (s == RFR_OK) { // already reduced by the call, except in the first way
    if ((s = rfr_graphs_gradient(r->graphs, names[i], &g)) || (s = rfr_graphs_tensor(r->graphs, names[i], &w)))
      return s;
    if (r->way == WHOLE) s = rfr_comm_all_reduce(r->comm, g.data, g.data, N, RFR_F32);
    update(w.data, g.data, r->way == WHOLE ? N : PART);
    memcpy(r->part[i], w.data, (size_t)w.bytes);
  }
  return s;
}

static rfr_status train(rank *r) {
  rfr_tensor w;
  rfr_status s = create(r);
  for (int i = 0; i < LAYERS && r->way != AROUND && s == RFR_OK; i++) {
    s = rfr_graphs_tensor(r->graphs, names[i], &w);
    if (s == RFR_OK) memcpy(w.data, r->part[i], (size_t)w.bytes);
  }
  for (unsigned step = 0; step < STEPS && s == RFR_OK; step++) {
    s = rfr_graphs_begin_step(r->graphs, NULL, 0);
    for (unsigned i = 0; i < T * C; i++) r->x[i] = noise(1000 + 2 * (step % 4) + (unsigned)r->number, i);
    for (int i = 0; i < LAYERS && s == RFR_OK; i++) s = forward(r, i);
    r->loss = 0;
    for (unsigned i = 0; i < T * C; i++) { // half of the squared distance from a target
      const float e = r->x[i] - noise(2000 + 2 * (step % 4) + (unsigned)r->number, i);
      r->loss += 0.5f * e * e / (T * C);
      r->dy[i] = e / T;
    }
    for (int i = LAYERS - 1; i >= 0 && s == RFR_OK; i--) s = backward(r, i);
    if (s == RFR_OK) s = rfr_graphs_end_step(r->graphs);
  }
  return s;
}

static void *work(void *arg) {
  rank *r = arg;
  const int first = r->way == WHOLE ? 0 : r->number * PART, n = r->way == WHOLE ? N : PART;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  for (int i = 0; i < LAYERS; i++)
    for (int k = 0; k < n; k++) r->part[i][k] = 0.1f * noise((unsigned)i, (unsigned)(first + k));
  if (rfr_ctx_create(&o, &r->ctx) || train(r)) {
    r->failed = "failed";
    fprintf(stderr, "rank %d: %s\n", r->number, rfr_last_error()->message);
    rfr_comm_abort(r->comm); // the others must not wait for this one
  }
  rfr_graphs_destroy(r->graphs);
  rfr_ctx_destroy(r->ctx);
  return NULL;
}

int main(void) {
  static const char *const ways[WAYS] = {"all on every rank", "gathered around", "gathered inside",
                                         "gathered by actions"};
  static rank ranks[WAYS][RANKS];
  rfr_ctx *ctx;
  rfr_comm *comm[RANKS];
  if (rfr_ctx_create(NULL, &ctx)) return 1;
  for (int way = 0; way < WAYS; way++) {
    pthread_t thread[RANKS];
    if (rfr_comm_threads_create(ctx, RANKS, 60, comm)) return 1;
    for (int i = 0; i < RANKS; i++) {
      ranks[way][i] = (rank){.comm = comm[i], .number = i, .way = way};
      if (pthread_create(&thread[i], NULL, work, &ranks[way][i])) return 1;
    }
    for (int i = 0; i < RANKS; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < RANKS; i++) rfr_comm_destroy(comm[i]);
    const rank *r = &ranks[way][0];
    if (r->failed || ranks[way][1].failed) return 1;
    const long long ours =
        way == AROUND ? (long long)sizeof r->weight * 2 + (long long)sizeof(float) * LAYERS * PART : 0;
    printf("%-20s loss %.6f, planned %lld bytes (%lld resident, %lld gathered for a time), %lld of the caller's\n",
           ways[way], (double)r->loss, (long long)r->memory.planned_bytes - (long long)r->memory.scratch_bytes,
           (long long)r->memory.persistent_bytes, (long long)r->memory.window_bytes, ours);
    for (int i = 0; i < RANKS && way > WHOLE; i++) // bitwise equal to ranks with all weights
      for (int k = 0; k < LAYERS; k++)
        if (memcmp(ranks[way][i].part[k], ranks[WHOLE][0].part[k] + i * PART, sizeof(float) * PART))
          return puts("differ"), 1;
  }
  rfr_ctx_destroy(ctx);
}
