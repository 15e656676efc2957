/* SPDX-License-Identifier: Apache-2.0
 *
 * Two ranks, threads of this program, each with its own GPU and a communicator over NCCL: dist_check [STEPS]
 *
 * Collectives alone give the right values, which for two ranks are exact. Layers with sharded parameters are trained in
 * three ways: gathered around the calls (hooks at capture, the loop at replay), inside the graphs by each call, and
 * inside as actions of a schedule. They end with bitwise the weights of one GPU that has the full parameters and adds
 * both ranks' microbatches, in f32 and bf16. A missing rank ends the other's wait after the timeout. Prints the memory
 * of each plan and the cost of gathering.
 *
 * Before that, each rank is a process: NCCL frees a communicator only after its graphs. A waiting rank with live graphs
 * gets an error from its timeout, from an abort by another thread, and when no rank joins; and it can leave.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <refrain/refrain.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 2, T = 96, C = 200, HIDDEN = 501, LAYERS = 3, PARAMETERS = 3, MOST = C * HIDDEN + 1 };
enum { ALONE, AROUND, INSIDE, ACTIONS, WAYS };
static const int64_t sizes[PARAMETERS] = {C, HIDDEN *C, C *HIDDEN};
static const char *const kinds[PARAMETERS] = {"norm", "up", "down"};
static const char *const ways[WAYS] = {"one GPU", "around", "inside", "actions"};
static int steps = 4;
static double timeout = 20;
static rfr_dtype dtype;
static unsigned char id[RFR_NCCL_ID_BYTES];

typedef struct rank {
  int number, way, fuse;
  rfr_ctx *ctx;
  rfr_comm *comm;
  rfr_graphs *graphs;
  rfr_graphs_memory memory;
  bool failed;
  double seconds;
  void *part[LAYERS][PARAMETERS], *gathered[PARAMETERS], *gradient[PARAMETERS], *part_gradient; /* AROUND: on the GPU */
  float momentum[LAYERS][PARAMETERS][MOST];
  unsigned char x[T * C * 4], dy[T * C * 4];
  unsigned char weights[LAYERS][PARAMETERS][MOST * 4];
} rank;

#define TRY(call)                                                                               \
  do {                                                                                          \
    if ((call) != RFR_OK) {                                                                     \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, rfr_last_error()->message); \
      return RFR_INTERNAL;                                                                      \
    }                                                                                           \
  } while (0)
#define CUDA(call)                                                                           \
  do {                                                                                       \
    const cudaError_t e_ = (call);                                                           \
    if (e_ != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
      return RFR_INTERNAL;                                                                   \
    }                                                                                        \
  } while (0)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float noise(int64_t seed, int64_t i) {
  const uint32_t z = (uint32_t)(seed * 2654435761u + i * 40503u + 12345u);
  return (float)((z ^ z >> 13) * 2246822519u >> 8) / 8388608.0f - 1.0f;
}

static size_t element(void) { return (size_t)rfr_dtype_bits(dtype) / 8; }
static void put(void *to, int64_t i, float x) {
  const uint32_t bits = rfr_float_to_bits(dtype, x);
  memcpy((char *)to + (size_t)i * element(), &bits, element());
}
static float get(const void *from, int64_t i) {
  uint32_t bits = 0;
  memcpy(&bits, (const char *)from + (size_t)i * element(), element());
  return rfr_float_from_bits(dtype, bits);
}

static int64_t part_size(int k) { return (sizes[k] + RANKS - 1) / RANKS; }
static const char *name_of(int layer, int k, char name[16]) {
  snprintf(name, 16, "%s%d", kinds[k], layer);
  return name;
}
static rfr_type type_of(int k) {
  rfr_type type = {dtype, k == 0 ? 1 : 2, {C}};
  if (k > 0) type.shape[0] = k == 1 ? HIDDEN : C, type.shape[1] = k == 1 ? C : HIDDEN;
  return type;
}
static rfr_type activation(void) { return (rfr_type){dtype, 2, {T, C}}; }

static rfr_trace *layer_trace(rfr_ctx *ctx, int layer) {
  rfr_trace *t;
  rfr_value w[PARAMETERS];
  char name[16];
  if (rfr_trace_create(ctx, &t) != RFR_OK) return NULL;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, dtype, 2, ((int64_t[]){T, C}));
  for (int k = 0; k < PARAMETERS; k++) {
    const rfr_type type = type_of(k);
    w[k] = rfr_input(t, name_of(layer, k, name), RFR_ROLE_TRAINABLE, dtype, type.rank, type.shape);
  }
  rfr_value h = rfr_gelu(t, rfr_linear(t, rfr_rmsnorm(t, x, w[0], 1e-5), w[1], RFR_NONE), 1);
  rfr_output(t, "y", rfr_add(t, x, rfr_linear(t, h, w[2], RFR_NONE)));
  rfr_trace_finish(t);
  return t;
}

static float first_weight(int layer, int k, int64_t i) {
  return i >= sizes[k] ? 0 : (k == 0 ? 1.0f : 0.0f) + 0.05f * noise(100 + layer * 10 + k, i);
}

/* Updates w by g element by element, on the host. */
static void update(void *w, float *momentum, const float *g, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    momentum[i] = 0.9f * momentum[i] + g[i];
    put(w, i, get(w, i) - 0.05f * momentum[i]);
  }
}

/* ---- three ways to gather ---- */

static const char *const actions = "0UNSHARD 0F0 1UNSHARD 0RESHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 2RESHARD 2REDUCE "
                                   "1UNSHARD 1B0 1REDUCE 1RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE";

static rfr_status gather(rank *r, int layer) {
  for (int k = 0; k < PARAMETERS; k++)
    TRY(rfr_comm_all_gather(r->comm, r->part[layer][k], r->gathered[k], part_size(k), dtype));
  return RFR_OK;
}
static rfr_status drop(rank *r) {
  for (int k = 0; k < PARAMETERS; k++) CUDA(cudaMemset(r->gathered[k], 0xFF, (size_t)part_size(k) * RANKS * element()));
  CUDA(cudaDeviceSynchronize());
  return RFR_OK;
}
static rfr_status gather_hook(const rfr_hook_event *e, void *user) { return gather(user, e->callable); }
static rfr_status drop_hook(const rfr_hook_event *e, void *user) {
  (void)e;
  return drop(user);
}

static rfr_status device_memory(rank *r) {
  for (int k = 0; k < PARAMETERS; k++) {
    const size_t n = (size_t)part_size(k);
    CUDA(cudaMalloc(&r->gathered[k], n * RANKS * element()));
    CUDA(cudaMalloc(&r->gradient[k], n * RANKS * sizeof(float)));
    CUDA(cudaMemset(r->gradient[k], 0, n * RANKS * sizeof(float)));
    for (int l = 0; l < LAYERS; l++) {
      CUDA(cudaMalloc(&r->part[l][k], n * element()));
      CUDA(cudaMemcpy(r->part[l][k], r->weights[l][k], n * element(), cudaMemcpyHostToDevice));
    }
  }
  CUDA(cudaMalloc(&r->part_gradient, MOST * sizeof(float)));
  CUDA(cudaDeviceSynchronize());
  return RFR_OK;
}

static rfr_status create(rank *r) {
  rfr_callable c[LAYERS];
  rfr_hooks hooks[LAYERS];
  rfr_binding tensors[LAYERS * PARAMETERS];
  rfr_main_gradient gradients[LAYERS * PARAMETERS];
  char names[LAYERS * PARAMETERS][16];
  rfr_schedule *schedule = NULL;
  rfr_graphs_options o = rfr_graphs_options_default();
  const rfr_hook before = {gather_hook, r}, after = {drop_hook, r};
  o.fuse = r->fuse;
  o.warmup_iterations = 1;
  if (r->way == AROUND) TRY(device_memory(r));
  for (int i = 0; i < LAYERS; i++) {
    c[i] = rfr_callable_default();
    c[i].trace = layer_trace(r->ctx, i);
    c[i].sharded = r->way >= INSIDE;
    hooks[i] = rfr_hooks_default();
    hooks[i].pre_forward = hooks[i].pre_backward = (rfr_hook_list){&before, 1};
    hooks[i].post_forward = hooks[i].post_wgrad = (rfr_hook_list){&after, 1};
    for (int k = 0; k < PARAMETERS; k++) {
      const char *name = name_of(i, k, names[i * PARAMETERS + k]);
      tensors[i * PARAMETERS + k] = (rfr_binding){name, type_of(k), r->gathered[k]};
      rfr_main_gradient *main = &gradients[i * PARAMETERS + k];
      *main = rfr_main_gradient_default();
      main->parameter = name, main->type = type_of(k), main->data = r->gradient[k], main->accumulate = 1;
      main->type.dtype = RFR_F32, main->bytes = (int64_t)sizeof(float);
      for (int d = 0; d < main->type.rank; d++) main->bytes *= main->type.shape[d];
    }
  }
  if (r->way == AROUND) {
    o.hooks = hooks, o.n_hooks = LAYERS;
    o.tensors = tensors, o.n_tensors = LAYERS * PARAMETERS;
    o.gradients = gradients, o.n_gradients = LAYERS * PARAMETERS;
  }
  if (r->way >= INSIDE) o.comm = r->comm;
  if (r->way == ACTIONS) TRY(rfr_schedule_parse(r->ctx, "actions", actions, strlen(actions), &schedule));
  o.schedule = schedule;
  TRY(rfr_graphs_create(r->ctx, c, LAYERS, &o, &r->graphs));
  for (int i = 0; i < LAYERS; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
  rfr_schedule_destroy(schedule);
  r->memory.size = sizeof r->memory;
  TRY(rfr_graphs_get_memory(r->graphs, &r->memory));
  return RFR_OK;
}

static rfr_status write_weights(rank *r) {
  char name[16];
  rfr_tensor w;
  for (int l = 0; l < LAYERS && r->way != AROUND; l++)
    for (int k = 0; k < PARAMETERS; k++) {
      TRY(rfr_graphs_tensor(r->graphs, name_of(l, k, name), &w));
      TRY(rfr_graphs_write(r->graphs, &w, r->weights[l][k]));
    }
  return RFR_OK;
}

static rfr_status forward(rank *r, int l, int m) {
  const rfr_binding x = {NULL, activation(), r->x};
  rfr_tensor y;
  if (r->way == AROUND) TRY(gather(r, l));
  TRY(rfr_graphs_forward(r->graphs, l, m, &x, 1, &y, 1));
  TRY(rfr_graphs_read(r->graphs, &y, r->x));
  return r->way == AROUND ? drop(r) : RFR_OK;
}

/* AROUND: reduces the layer's gradients to this rank's shard, and updates its weights. */
static rfr_status reduce(rank *r, int l) {
  static _Thread_local float g[MOST];
  for (int k = 0; k < PARAMETERS; k++) {
    const int64_t n = part_size(k);
    TRY(rfr_comm_reduce_scatter(r->comm, r->gradient[k], r->part_gradient, n, RFR_F32));
    CUDA(cudaMemcpy(g, r->part_gradient, (size_t)n * sizeof *g, cudaMemcpyDeviceToHost));
    update(r->weights[l][k], r->momentum[l][k], g, n);
    CUDA(cudaMemcpy(r->part[l][k], r->weights[l][k], (size_t)n * element(), cudaMemcpyHostToDevice));
  }
  CUDA(cudaDeviceSynchronize());
  return RFR_OK;
}

static rfr_status backward(rank *r, int l, int m) {
  const rfr_binding dy = {NULL, activation(), r->dy};
  rfr_tensor dx;
  if (r->way == AROUND) {
    TRY(gather(r, l));
    for (int k = 0; k < PARAMETERS; k++)
      CUDA(cudaMemset(r->gradient[k], 0, (size_t)part_size(k) * RANKS * sizeof(float)));
    CUDA(cudaDeviceSynchronize());
  }
  TRY(rfr_graphs_backward(r->graphs, l, m, &dy, 1, &dx, 1));
  TRY(rfr_graphs_read(r->graphs, &dx, r->dy));
  if (r->way != AROUND) return RFR_OK;
  TRY(reduce(r, l));
  return drop(r);
}

static rfr_status step(rank *r, int number) {
  static _Thread_local float g[MOST];
  char name[16];
  rfr_tensor w, grad;
  TRY(rfr_graphs_begin_step(r->graphs, NULL, 0));
  for (int m = 0; m < (r->way == ALONE ? RANKS : 1); m++) {
    const int of = r->way == ALONE ? m : r->number;
    for (int i = 0; i < T * C; i++) put(r->x, i, noise(number * 16 + of, i));
    for (int l = 0; l < LAYERS; l++) TRY(forward(r, l, m));
    for (int i = 0; i < T * C; i++) put(r->dy, i, 0.02f * (get(r->x, i) - noise(number * 16 + of + 7777, i)));
    for (int l = LAYERS - 1; l >= 0; l--) TRY(backward(r, l, m));
  }
  TRY(rfr_graphs_end_step(r->graphs));
  for (int l = 0; l < LAYERS && r->way != AROUND; l++)
    for (int k = 0; k < PARAMETERS; k++) {
      TRY(rfr_graphs_tensor(r->graphs, name_of(l, k, name), &w));
      TRY(rfr_graphs_gradient(r->graphs, name, &grad));
      TRY(rfr_graphs_read(r->graphs, &grad, g));
      update(r->weights[l][k], r->momentum[l][k], g, r->way == ALONE ? sizes[k] : part_size(k));
      TRY(rfr_graphs_write(r->graphs, &w, r->weights[l][k]));
    }
  return RFR_OK;
}

/* ---- collectives by themselves ---- */

static rfr_status check_collectives(rank *r) {
  enum { N = 100003 };
  static _Thread_local unsigned char host[N * RANKS * 4], back[N * RANKS * 4];
  void *from, *to;
  CUDA(cudaMalloc(&from, sizeof host));
  CUDA(cudaMalloc(&to, sizeof host));
  for (int64_t i = 0; i < (int64_t)N * RANKS; i++) put(host, i, noise(900 + r->number, i));
  CUDA(cudaMemcpy(from, host, sizeof host, cudaMemcpyHostToDevice));
  CUDA(cudaDeviceSynchronize());
  int64_t wrong = 0;
  TRY(rfr_comm_all_gather(r->comm, from, to, N, dtype));
  CUDA(cudaMemcpy(back, to, sizeof back, cudaMemcpyDeviceToHost));
  for (int64_t i = 0; i < (int64_t)N * RANKS; i++) {
    put(host, 0, noise(900 + i / N, i % N));
    wrong += get(back, i) != get(host, 0);
  }
  for (int kind = 0; kind < 2; kind++) {
    if (kind == 0) TRY(rfr_comm_reduce_scatter(r->comm, from, to, N, dtype));
    else TRY(rfr_comm_all_reduce(r->comm, from, to, (int64_t)N * RANKS, dtype));
    CUDA(cudaMemcpy(back, to, sizeof back, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < (kind == 0 ? N : (int64_t)N * RANKS); i++) {
      const int64_t at = kind == 0 ? r->number * (int64_t)N + i : i;
      put(host, 0, noise(900, at)), put(host, 1, noise(901, at));
      put(host, 0, get(host, 0) + get(host, 1));
      wrong += get(back, i) != get(host, 0);
    }
  }
  cudaFree(from), cudaFree(to);
  if (wrong > 0) fprintf(stderr, "rank %d: %lld elements of collectives are wrong\n", r->number, (long long)wrong);
  return wrong > 0 ? RFR_INTERNAL : RFR_OK;
}

static rfr_status time_collectives(rank *r) {
  enum { MIB = 1 << 20, TIMES = 20 };
  for (int64_t mib = 1; mib <= 256; mib *= 16) {
    void *from, *to;
    CUDA(cudaMalloc(&from, (size_t)mib * MIB));
    CUDA(cudaMalloc(&to, (size_t)mib * MIB * RANKS));
    TRY(rfr_comm_all_gather(r->comm, from, to, mib * MIB, RFR_U8));
    const double start = now();
    for (int i = 0; i < TIMES; i++) TRY(rfr_comm_all_gather(r->comm, from, to, mib * MIB, RFR_U8));
    const double each = (now() - start) / TIMES;
    if (r->number == 0)
      printf("all_gather of %lld MiB a rank: %.1f us, %.1f GB/s from each\n", (long long)mib, 1e6 * each,
             (double)mib * MIB / each * 1e-9);
    cudaFree(from), cudaFree(to);
  }
  return RFR_OK;
}

/* ---- ranks ---- */

static rfr_status work(rank *r, bool alone) {
  char device[16];
  rfr_ctx_options o = rfr_ctx_options_default();
  snprintf(device, sizeof device, "cuda:%d", r->number);
  o.device = device;
  CUDA(cudaSetDevice(r->number));
  TRY(rfr_ctx_create(&o, &r->ctx));
  if (!alone) TRY(rfr_comm_nccl_create(r->ctx, id, RANKS, r->number, timeout, &r->comm));
  if (r->way == AROUND) TRY(check_collectives(r));
  for (int l = 0; l < LAYERS; l++)
    for (int k = 0; k < PARAMETERS; k++) {
      const int64_t n = alone ? sizes[k] : part_size(k), first = alone ? 0 : r->number * n;
      for (int64_t i = 0; i < n; i++) put(r->weights[l][k], i, first_weight(l, k, first + i));
    }
  TRY(create(r));
  TRY(write_weights(r));
  const double start = now();
  for (int i = 0; i < steps; i++) TRY(step(r, i));
  r->seconds = (now() - start) / steps;
  if (r->way == INSIDE && dtype == RFR_BF16) TRY(time_collectives(r));
  return RFR_OK;
}

static void leave(rank *r) {
  /* destroyed before the parameters and the communicator with which they were captured */
  rfr_graphs_destroy(r->graphs);
  rfr_comm_destroy(r->comm);
  for (int k = 0; k < PARAMETERS; k++) {
    cudaFree(r->gathered[k]), cudaFree(r->gradient[k]);
    for (int l = 0; l < LAYERS; l++) cudaFree(r->part[l][k]);
  }
  cudaFree(r->part_gradient);
  rfr_ctx_destroy(r->ctx);
}

static void *run(void *arg) {
  rank *r = arg;
  if (work(r, false) != RFR_OK) r->failed = true, rfr_comm_abort(r->comm);
  leave(r);
  return NULL;
}

static bool run_ranks(rank *ranks, int way, int fuse) {
  pthread_t thread[RANKS];
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = "cuda:0";
  if (rfr_ctx_create(&o, &ctx) != RFR_OK || rfr_comm_nccl_id(ctx, id) != RFR_OK) {
    fprintf(stderr, "%s\n", rfr_last_error()->message);
    return false;
  }
  rfr_ctx_destroy(ctx);
  for (int i = 0; i < RANKS; i++) {
    memset(&ranks[i], 0, sizeof ranks[i]);
    ranks[i].number = i, ranks[i].way = way, ranks[i].fuse = fuse;
    if (pthread_create(&thread[i], NULL, run, &ranks[i]) != 0) abort();
  }
  for (int i = 0; i < RANKS; i++) pthread_join(thread[i], NULL);
  return !ranks[0].failed && !ranks[1].failed;
}

static int64_t differing(const rank *one, const rank *ranks) {
  int64_t n = 0;
  for (int l = 0; l < LAYERS; l++)
    for (int k = 0; k < PARAMETERS; k++)
      for (int64_t i = 0; i < sizes[k]; i++) {
        const rank *r = &ranks[i / part_size(k)];
        n += memcmp(one->weights[l][k] + (size_t)i * element(),
                    r->weights[l][k] + (size_t)(i % part_size(k)) * element(), element()) != 0;
      }
  return n;
}

static void report(const char *what, const rank *r, int64_t differ, const char *from) {
  printf("%-4s fuse %d %-8s %9lld planned, %9lld stay, %9lld windows, %.2f ms per step (host copies included)",
         rfr_dtype_name(dtype), r->fuse, what, (long long)r->memory.planned_bytes,
         (long long)r->memory.persistent_bytes, (long long)r->memory.window_bytes, 1e3 * r->seconds);
  if (from) printf(", %lld weights differ from %s", (long long)differ, from);
  printf("\n");
  fflush(stdout);
}

/* ---- a missing rank ---- */

/* Launches a program's collective, and waits for it. */
static bool program_reports(rank *r) {
  rfr_programs *p = NULL;
  rfr_trace *t;
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = r->comm;
  if (rfr_trace_create(r->ctx, &t) != RFR_OK) return false;
  rfr_output(t, "y", rfr_all_reduce(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){1000})), RANKS));
  rfr_status s = rfr_compile(r->ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  if (s == RFR_OK && r->number == 0) s = rfr_program_replay(p, 0, NULL, 0);
  const bool launched = s == RFR_OK;
  if (r->number == 1) sleep(4); /* rank 1 never arrives */
  if (launched && r->number == 0) s = rfr_programs_wait(p);
  if (r->number == 0) printf("a program that waits for a rank that does not come: %s\n", rfr_last_error()->message);
  rfr_programs_destroy(p);
  return launched && (r->number == 1 || s == RFR_IO);
}

static void *aborts(void *arg) {
  rank *r = arg;
  char device[16];
  rfr_ctx_options o = rfr_ctx_options_default();
  void *memory = NULL;
  snprintf(device, sizeof device, "cuda:%d", r->number);
  o.device = device;
  cudaSetDevice(r->number);
  cudaMalloc(&memory, 1 << 20);
  r->failed = rfr_ctx_create(&o, &r->ctx) != RFR_OK ||
              rfr_comm_nccl_create(r->ctx, id, RANKS, r->number, 2, &r->comm) != RFR_OK;
  if (!r->failed && r->way == INSIDE) r->failed = !program_reports(r);
  else if (!r->failed && r->number == 1) sleep(4); /* rank 1 never arrives */
  else if (!r->failed) r->failed = rfr_comm_all_reduce(r->comm, memory, memory, 1000, RFR_F32) != RFR_IO;
  if (r->number == 0 && r->way != INSIDE) printf("a rank that does not come: %s\n", rfr_last_error()->message);
  rfr_comm_abort(r->comm);
  rfr_comm_destroy(r->comm);
  cudaFree(memory);
  rfr_ctx_destroy(r->ctx);
  return NULL;
}

static bool check_late(rank *ranks, int way) {
  pthread_t thread[RANKS];
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = "cuda:0";
  if (rfr_ctx_create(&o, &ctx) != RFR_OK || rfr_comm_nccl_id(ctx, id) != RFR_OK) return false;
  rfr_ctx_destroy(ctx);
  for (int i = 0; i < RANKS; i++) {
    memset(&ranks[i], 0, sizeof ranks[i]);
    ranks[i].number = i, ranks[i].way = way;
    if (pthread_create(&thread[i], NULL, aborts, &ranks[i]) != 0) abort();
  }
  for (int i = 0; i < RANKS; i++) pthread_join(thread[i], NULL);
  return !ranks[0].failed && !ranks[1].failed;
}

/* ---- ranks as processes ---- */

enum { LATE, ABORTED, ABSENT, CASES };
static const char *const cases[CASES] = {"graphs, and a rank that does not come", "graphs, and an abort from a thread",
                                         "a rank that does not join"};

static void *abort_soon(void *arg) {
  rank *r = arg;
  sleep(1);
  rfr_comm_abort(r->comm);
  return NULL;
}

static bool is_reported(rfr_status s) { return s != RFR_OK && strcmp(rfr_last_error()->slug, "dist.peer") == 0; }

/* The second step, in which rank 1 does not take part, and a third one, in which nothing may be launched. */
static bool step_alone(rank *r, int how) {
  pthread_t thread;
  if (how == ABORTED && pthread_create(&thread, NULL, abort_soon, r) != 0) return false;
  const bool reported = is_reported(step(r, 1));
  if (how == ABORTED) pthread_join(thread, NULL);
  return reported && step(r, 2) != RFR_OK;
}

static bool meet_and_part(rank *r, int how) {
  dtype = RFR_F32, steps = 1;
  timeout = how == ABORTED ? 0 : 8;
  if (how == ABSENT && r->number == 1) return true;
  const rfr_status s = work(r, false);
  if (how == ABSENT) return is_reported(s);
  if (s != RFR_OK) return false;
  if (r->number == 0) return step_alone(r, how);
  sleep(how == LATE ? 11 : 4);
  return true;
}

/* Rank 0's process creates the id and sends it to the others. */
static bool share_id(const rank *r, const int channel[2]) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = "cuda:0";
  if (r->number > 0) return read(channel[0], id, sizeof id) == sizeof id;
  if (rfr_ctx_create(&o, &ctx) != RFR_OK || rfr_comm_nccl_id(ctx, id) != RFR_OK) return false;
  rfr_ctx_destroy(ctx);
  return write(channel[1], id, sizeof id) == sizeof id;
}

static int process(rank *r, int how, const int channel[2]) {
  enum { MOST_SECONDS = 60 }; /* a hang must end the process */
  alarm(MOST_SECONDS);
  r->way = INSIDE;
  bool well = share_id(r, channel) && meet_and_part(r, how);
  if (r->number == 0) printf("%s: %s\n", cases[how], rfr_last_error()->message);
  rfr_comm_abort(r->comm);
  leave(r);
  fflush(stdout);
  return well ? 0 : 1;
}

/* Must run before this process calls CUDA, because CUDA does not survive a fork. */
static bool check_processes(rank *ranks, int how) {
  int channel[2], status;
  pid_t child[RANKS];
  bool well = true;
  if (pipe(channel) != 0) return false;
  fflush(stdout);
  for (int i = 0; i < RANKS; i++) {
    memset(&ranks[i], 0, sizeof ranks[i]);
    ranks[i].number = i;
    child[i] = fork();
    if (child[i] == 0) _exit(process(&ranks[i], how, channel));
  }
  for (int i = 0; i < RANKS; i++)
    well &= child[i] > 0 && waitpid(child[i], &status, 0) == child[i] && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  close(channel[0]), close(channel[1]);
  printf("processes, %s: %s\n", cases[how], well ? "well" : "FAILED");
  return well;
}

int main(int argc, char **argv) {
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16};
  static rank one, ranks[WAYS][RANKS];
  int bad = 0;
  if (argc > 1) steps = atoi(argv[1]);
  for (int how = LATE; how < CASES; how++) bad += !check_processes(ranks[AROUND], how);
  for (int k = 0; k < 4; k++) {
    dtype = types[k / 2];
    const int fuse = k % 2;
    memset(&one, 0, sizeof one);
    one.way = ALONE, one.fuse = fuse;
    const bool worked = work(&one, true) == RFR_OK;
    leave(&one);
    if (!worked) return 1;
    report(ways[ALONE], &one, 0, NULL);
    for (int way = AROUND; way <= ACTIONS; way++) {
      if (!run_ranks(ranks[way], way, fuse)) return 1;
      /* with fuse, GEMMs accumulate into the existing gradient: in the order of each rank, not of one GPU */
      const int64_t differ = differing(&one, ranks[way]);
      report(ways[way], &ranks[way][0], differ, ways[ALONE]);
      bad += differ > 0 && !fuse;
    }
    int64_t differ = 0;
    for (int r = 0; r < RANKS; r++)
      for (int way = INSIDE; way <= ACTIONS; way++)
        differ += memcmp(ranks[AROUND][r].weights, ranks[way][r].weights, sizeof one.weights) != 0;
    printf("%-4s fuse %d around, inside and actions %s\n", rfr_dtype_name(dtype), fuse,
           differ ? "DIFFER" : "are equal");
    bad += differ > 0;
  }
  bad += !check_late(ranks[AROUND], AROUND);
  bad += !check_late(ranks[AROUND], INSIDE);
  printf("%s\n", bad ? "FAILED" : "all is well");
  return bad > 0;
}
