/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators of GPUs without a GPU: nccl.c over fakes of CUDA and NCCL. The fake NCCL frees a communicator when it
 * is aborted, but only after the graphs that were captured with it are destroyed, and ends the program when it is
 * called with a freed one. A hang shows as a timeout of the test.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>

static void *stand_in_symbol(const char *name);
#define dlopen(name, how) ((void *)(name))
#define dlsym(object, name) ((void)(object), stand_in_symbol(name))
#include "backend/cuda/nccl.c"
#undef CUDA
#include "backend/cuda/nccl_links.c"
#define compare compare_places
#include "backend/cuda/nccl_copies.c"
#include "backend/cuda/nccl_timed.c"
#undef compare

#include "dist/group.h"
#include "support/context.h"

/* ---- fakes ---- */

enum { MOST_COMMS = 1000 };
typedef struct nccl_comm {
  atomic_int alive;
} nccl_comm;
static nccl_comm comms[MOST_COMMS]; /* each is used only once */
static atomic_int made;
/* number of missing ranks; of aborts; NCCL's asynchronous error */
static atomic_int absent, graphs, begun, ended, fault;
static atomic_int depth, grouped, refused; /* number of open groups; of collectives inside; of the call that fails */
enum { MOST_EVENTS = 1000 };
static char events[MOST_EVENTS];
static int n_events;
static struct {
  cudaStream_t stream;
  cudaEvent_t event;
} recorded, awaited;    /* arguments of the last call */
static char urgent;     /* its address stands for the stream of each link */
static atomic_int sent; /* number of NCCL's sends and receives */
static struct {
  void *comm, *stream;
  int n, depth; /* number of sums so far; open groups at the last one */
} reduced;
static void (*on_gather)(const void *from, void *to, size_t n);
static atomic_int busy;     /* the stream is busy until an abort begins */
static atomic_int waits;    /* or longer: a copy waits for another rank */
static int version = 22900; /* NCCL's */
static int node_type;       /* of the nodes of captured collectives */
static int copied;          /* number of calls of ncclAlltoAll */
static atomic_int windows;  /* number of registered windows */
static void *gathered;      /* the communicator of the last all-gather */
static int policy;          /* of the last communicator with a configuration */

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **memory, size_t n) {
  *memory = malloc(n);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *memory) {
  free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
  (void)kind;
  memcpy(to, from, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)stream;
  return cudaMemcpy(to, from, n, kind);
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t n, cudaStream_t stream) {
  (void)stream;
  memset(to, byte, n);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
  (void)flags;
  *stream = (cudaStream_t)&busy;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
  *least = 0, *most = -1;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
  (void)flags, (void)priority;
  *stream = (cudaStream_t)&urgent;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  (void)flags;
  *event = (cudaEvent_t)&events[n_events++ % MOST_EVENTS];
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  recorded.stream = stream, recorded.event = event;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  (void)flags;
  awaited.stream = stream, awaited.event = event;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  (void)event;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  (void)stream, (void)mode;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  (void)stream;
  *graph = (cudaGraph_t)&urgent;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
  (void)graph;
  for (size_t i = 0; nodes && i < *n; i++) nodes[i] = (cudaGraphNode_t)&node_type;
  *n = 3;
  return cudaSuccess;
}
rfr_status rfi_cuda_node_type(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
  (void)node;
  *type = (enum cudaGraphNodeType)node_type;
  return RFR_OK;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  (void)graph;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)stream;
  return busy || waits ? cudaErrorNotReady : cudaSuccess;
}
rfr_status rfi_cuda_check(cudaError_t e, const char *what) {
  return e == cudaSuccess ? RFR_OK : rfi_fail(RFI_E_CUDA, "%s", what);
}

static int use(void *comm) {
  nccl_comm *c = comm;
  if (!c->alive) abort();
  usleep(100);
  if (!c->alive) abort();
  return 0;
}
static int get_version(int *out) {
  *out = version;
  return 0;
}
static int get_unique_id(nccl_unique_id *id) {
  memset(id, 1, sizeof *id);
  return 0;
}
static int init_rank(void **comm, int size, nccl_unique_id id, int rank) {
  (void)size, (void)id, (void)rank;
  while (absent) usleep(100);
  if (made == MOST_COMMS) abort();
  nccl_comm *c = &comms[made++];
  c->alive = 1;
  *comm = c;
  return 0;
}
static int init_rank_config(void **comm, int size, nccl_unique_id id, int rank, const nccl_config *config) {
  policy = config->cta_policy;
  return init_rank(comm, size, id, rank);
}
static int get_async_error(void *comm, int *error) {
  *error = fault;
  return use(comm);
}
static int comm_abort(void *comm) {
  nccl_comm *c = comm;
  busy = 0;
  begun++;
  while (graphs) usleep(100);
  c->alive = 0;
  ended++;
  return 0;
}
static int comm_destroy(void *comm) {
  nccl_comm *c = comm;
  use(comm);
  c->alive = 0;
  return 0;
}
static const char *error_string(int error) { return error ? "a fault" : "none"; }
/* The other rank sends the same. */
static void same_bytes(const void *from, void *to, size_t n) {
  for (int r = 1; r >= 0; r--) memmove((char *)to + (size_t)r * n, from, n);
}
static int gather(const void *from, void *to, size_t n, int type, void *comm, void *stream) {
  (void)type, (void)stream;
  gathered = comm;
  if (depth && ++grouped == refused) return 1;
  if (on_gather) on_gather(from, to, n);
  else same_bytes(from, to, n);
  return use(comm);
}
static int reduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
  (void)from, (void)to, (void)n, (void)type, (void)op;
  reduced.comm = comm, reduced.stream = stream, reduced.depth = depth, reduced.n++;
  return use(comm);
}

static int send_part(const void *from, size_t n, int type, int peer, void *comm, void *stream) {
  (void)from, (void)n, (void)type, (void)peer, (void)stream;
  sent++;
  return use(comm);
}
static int receive_part(void *to, size_t n, int type, int peer, void *comm, void *stream) {
  return send_part(to, n, type, peer, comm, stream);
}
static int all_to_all_at_once(const void *from, void *to, size_t n, int type, void *comm, void *stream) {
  (void)from, (void)to, (void)n, (void)type, (void)stream;
  copied++;
  return use(comm);
}
static int mem_alloc(void **memory, size_t n) {
  *memory = malloc(n);
  return *memory ? 0 : 1;
}
static int mem_free(void *memory) {
  free(memory);
  return 0;
}
static int window_register(void *comm, void *memory, size_t n, void **window, int flags) {
  (void)n;
  while (absent) usleep(100);
  *window = memory;
  windows += flags == NCCL_SYMMETRIC;
  return use(comm);
}
static int window_deregister(void *comm, void *window) {
  (void)window;
  windows--;
  return use(comm);
}
static int group_start(void) {
  depth++;
  return 0;
}
static int group_end(void) {
  depth--;
  return 0;
}

static void *stand_in_symbol(const char *name) {
  static const rfi_nccl_functions all = {get_version, get_unique_id, init_rank,        get_async_error,
                                         comm_abort,  comm_destroy,  error_string,     gather,
                                         reduce,      reduce,        send_part,        receive_part,
                                         group_start, group_end,     init_rank_config, all_to_all_at_once,
                                         mem_alloc,   mem_free,      window_register,  window_deregister};
#define SYMBOL(result, function, arguments)        \
  if (strcmp(name, "nccl" #function) == 0) {       \
    void *symbol;                                  \
    memcpy(&symbol, &all.function, sizeof symbol); \
    return symbol;                                 \
  }
  FUNCTIONS(SYMBOL)
  COPY_FUNCTIONS(SYMBOL)
#undef SYMBOL
  return NULL;
}

/* ---- tests ---- */

static const rfi_cuda_host host = {.fail = rfi_fail, .alloc = rfi_alloc, .free = rfi_free};
static const double SHORT = 0.05;

static rfr_status make(double timeout, rfr_comm **c) {
  unsigned char bytes[RFR_NCCL_ID_BYTES];
  absent = graphs = begun = ended = fault = busy = 0;
  OK(rfi_nccl_id(&host, bytes));
  return rfi_nccl_create(&host, ctx, 0, bytes, 2, 0, timeout, c);
}

static rfr_status call(rfr_comm *c, void *stream) {
  float x[4];
  return c->table->run(c, &(rfi_collective){.kind = RFI_ALL_REDUCE, .dtype = RFR_F32, .n = 4, .from = x, .to = x},
                       stream);
}

static void is_peer(rfr_status s, const char *says) {
  assert_int_equal(s, RFR_IO);
  assert_string_equal(rfr_last_error()->slug, "dist.peer");
  if (!strstr(rfr_last_error()->message, says)) fail_msg("\"%s\" does not say %s", rfr_last_error()->message, says);
}

/* With a timeout, which initializes on another thread, and without. */
static void test_good(void **state) {
  rfr_comm *c;
  double since = 0;
  (void)state;
  for (int timeout = 0; timeout <= 60; timeout += 60) {
    OK(make(timeout, &c));
    OK(call(c, NULL));
    OK(call(c, &busy));
    OK(rfi_nccl_wait(c, (cudaStream_t)&busy, "waiting"));
    OK(rfi_nccl_poll(c, true, &since));
    OK(rfi_nccl_poll(c, false, &since));
    OK(rfi_nccl_alive(c));
    OK(rfi_nccl_fits(c, 0));
    assert_int_equal(rfi_nccl_fits(c, 1), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "dist.communicator");
    rfr_comm_destroy(c);
    assert_int_equal(begun, 0);
  }
}

/* Collectives in one launch. A group is ended even after an error, and none begins after an abort. */
static void test_group(void **state) {
  rfr_comm *c;
  float x[4];
  rfi_collective three[3];
  (void)state;
  for (int i = 0; i < 3; i++) three[i] = (rfi_collective){RFI_ALL_GATHER, RFR_F32, 2, x, x};
  OK(make(0, &c));
  grouped = refused = 0;
  OK(c->table->run_all(c, three, 3, &busy));
  assert_int_equal(grouped, 3);
  assert_int_equal(depth, 0);
  refused = 5;
  is_peer(c->table->run_all(c, three, 3, &busy), "a fault");
  assert_int_equal(grouped, 5);
  assert_int_equal(depth, 0);
  rfr_comm_abort(c);
  is_peer(c->table->run_all(c, three, 3, &busy), "was aborted");
  assert_int_equal(grouped, 5);
  rfr_comm_destroy(c);
}

/* The thread that gets the error also destroys the graphs, for which NCCL's abort waits. */
static void test_late_with_graphs(void **state) {
  rfr_comm *c;
  double since = 0;
  (void)state;
  OK(make(SHORT, &c));
  graphs = busy = 1;
  is_peer(call(c, NULL), "rank 0 of 2 waited 0.05 s for the others");
  is_peer(call(c, &busy), "aborted");
  is_peer(rfi_nccl_alive(c), "aborted");
  is_peer(rfi_nccl_wait(c, (cudaStream_t)&busy, "waiting"), "aborted");
  is_peer(rfi_nccl_poll(c, true, &since), "aborted");
  assert_int_equal(ended, 0);
  graphs = 0;
  rfr_comm_destroy(c);
  assert_int_equal(ended, 1);
}

static void test_poll(void **state) {
  rfr_comm *c;
  double since = 0;
  rfr_status s;
  (void)state;
  OK(make(SHORT, &c));
  while ((s = rfi_nccl_poll(c, false, &since)) == RFR_OK) usleep(100);
  is_peer(s, "waited 0.05 s");
  rfr_comm_destroy(c);
  assert_int_equal(ended, 1);
  OK(make(0, &c));
  fault = 6;
  is_peer(rfi_nccl_poll(c, false, &since), "a fault");
  is_peer(rfi_nccl_poll(c, false, &since), "aborted");
  rfr_comm_destroy(c);
  assert_int_equal(ended, 1);
}

/* The peers of rank 1: rank 0, or none. */
static int peers_of_other;
static void other_rank(const void *from, void *to, size_t n) {
  const invitation other = {.n = peers_of_other};
  if (n != sizeof other) return;
  memcpy(to, from, n);
  memcpy((char *)to + n, &other, n);
}

static void test_messages(void **state) {
  enum { BYTES = 8 };
  int many[RFI_MOST_PEERS + 1] = {1};
  rfr_comm *c;
  char x[BYTES] = "message";
  (void)state;
  OK(make(0, &c));
  assert_int_equal(rfi_comm_send(c, 1, x, BYTES, &busy), RFR_INTERNAL);
  assert_int_equal(rfi_comm_connect(c, many, RFI_MOST_PEERS + 1), RFR_UNSUPPORTED);
  on_gather = other_rank;
  peers_of_other = 0;
  assert_int_equal(rfi_comm_connect(c, many, 1), RFR_INTERNAL); /* only one of the two expects messages */
  peers_of_other = 1;
  const int before = made;
  OK(rfi_comm_connect(c, many, 1));
  OK(rfi_comm_connect(c, many, 1));
  assert_int_equal(made - before, 2); /* one for each direction */
  assert_int_equal(rfi_comm_sent(c, 1), 0);
  for (int i = 1; i <= RFI_LINK_MARKS + 2; i++) {
    OK(rfi_comm_send(c, 1, x, BYTES, &busy));
    assert_int_equal(rfi_comm_sent(c, 1), i);
    /* the message waits for the stream's present work; the stream continues */
    assert_ptr_equal(awaited.stream, &urgent);
    assert_ptr_equal(recorded.stream, &urgent);
    const cudaEvent_t done = recorded.event;
    if (i > 1) OK(rfi_comm_wait_sent(c, 1, i - 1, &busy));
    if (i > 1) assert_ptr_not_equal(awaited.event, done);
    OK(rfi_comm_wait_sent(c, 1, i, &busy));
    assert_ptr_equal(awaited.stream, &busy);
    assert_ptr_equal(awaited.event, done);
  }
  OK(rfi_comm_receive(c, 1, x, BYTES, &busy));
  assert_ptr_equal(awaited.stream, &busy); /* the stream waits for the received message */
  assert_ptr_equal(awaited.event, recorded.event);
  assert_int_equal(rfi_comm_sent(c, 1), RFI_LINK_MARKS + 2);
  sent = 0;
  OK(rfi_comm_send(c, 1, x, BYTES, NULL));
  OK(rfi_comm_receive(c, 1, x, BYTES, NULL));
  assert_int_equal(sent, 2);
  assert_int_equal(rfi_comm_send(c, 0, x, BYTES, &busy), RFR_INVALID);
  rfr_comm_abort(c);
  is_peer(rfi_comm_send(c, 1, x, BYTES, &busy), "aborted");
  is_peer(rfi_comm_receive(c, 1, x, BYTES, NULL), "aborted");
  rfr_comm_destroy(c);
  assert_int_equal(ended, 3);
  on_gather = NULL;
}

/* The sums of a group are one launch on the caller's stream, with a separate communicator. */
static void test_sums_of_group(void **state) {
  int peer = 1;
  rfr_comm *c;
  float x[4], y[2];
  const rfi_collective two[] = {{.kind = RFI_ALL_REDUCE, .dtype = RFR_F32, .n = 4, .from = x, .to = x},
                                {.kind = RFI_ALL_REDUCE, .dtype = RFR_BF16, .n = 4, .from = y, .to = y}};
  (void)state;
  OK(make(0, &c));
  assert_int_equal(rfi_group_connect(c, 0, 2), RFR_INTERNAL); /* refused before the links are connected */
  assert_int_equal(rfi_group_all_reduce(ctx, c, 0, 2, two, 2, &busy), RFR_INTERNAL);
  on_gather = other_rank;
  peers_of_other = 1;
  OK(rfi_comm_connect(c, &peer, 1));
  on_gather = same_bytes;
  const int before = made;
  OK(rfi_group_connect(c, 0, 2));
  OK(rfi_group_connect(c, 0, 2));
  assert_int_equal(made - before, 1);
  void *group = reduced.comm; /* the communicator of the sum that connects the ranks */
  assert_ptr_equal(group, &comms[before]);
  reduced.n = 0;
  OK(rfi_group_all_reduce(ctx, c, 0, 2, two, 2, &urgent));
  assert_int_equal(reduced.n, 2);
  assert_int_equal(reduced.depth, 1);
  assert_int_equal(depth, 0);
  assert_ptr_equal(reduced.comm, group);
  assert_ptr_equal(reduced.stream, &urgent);
  OK(call(c, &busy));
  assert_ptr_not_equal(reduced.comm, group);
  OK(rfi_comm_send(c, 1, x, sizeof x, &busy)); /* links are found as before */
  rfr_comm_abort(c);
  is_peer(rfi_group_all_reduce(ctx, c, 0, 2, two, 2, &busy), "aborted");
  rfr_comm_destroy(c);
  assert_int_equal(ended, 4); /* the communicator of all ranks, two links, the group */
  on_gather = NULL;
}

/* ---- copies ---- */

/* The other rank sends the same bytes; the last byte of its hash may differ. */
static int differs;
static void other_copies(const void *from, void *to, size_t n) {
  same_bytes(from, to, n);
  if (n == sizeof(uint64_t) && differs) ((char *)to)[2 * n - 1] ^= 1;
}

static rfr_status make_copies(double timeout, rfr_comm **c) {
  node_type = cudaGraphNodeTypeMemcpy;
  on_gather = other_copies;
  differs = copied = windows = waits = 0;
  return make(timeout, c);
}

/* Copies need NCCL 2.28, no NCCL_CTA_POLICY=0, and graphs without kernels on all ranks. The second communicator and its
 * memory are freed with the first, not earlier, because the other rank may be a thread of this process. */
static void test_copies_are_found(void **state) {
  enum { OLD, OFF, KERNELS, COPIES, WAITS, ROUNDS };
  enum { MEMORY_OPERATIONS = 12 }; /* a node type of the driver that the runtime does not know */
  rfr_comm *c;
  (void)state;
  for (int round = 0; round < ROUNDS; round++) {
    const bool tried = round >= KERNELS;
    on_gather = other_copies;
    version = round == OLD ? 22708 : 22803;
    node_type = round == KERNELS  ? cudaGraphNodeTypeKernel
                : round == COPIES ? cudaGraphNodeTypeMemcpy
                                  : MEMORY_OPERATIONS;
    policy = windows = 0;
    if (round == OFF) setenv("NCCL_CTA_POLICY", "0", 1);
    const int before = made;
    OK(make(0, &c));
    unsetenv("NCCL_CTA_POLICY");
    assert_int_equal(rfi_nccl_copies(c), round >= COPIES);
    assert_int_equal(policy, tried ? NCCL_ZERO_CTAS : 0);
    assert_int_equal(made - before, tried ? 2 : 1);
    assert_int_equal(windows, tried);
    rfr_comm_destroy(c);
    assert_int_equal(windows, 0);
    for (int i = before; i < made; i++) assert_int_equal(comms[i].alive, 0);
  }
  version = 22900;
  on_gather = NULL;
}

/* Only collectives of a program, which has its own stream, are copies, and only in registered memory. */
static void test_copies(void **state) {
  enum { N = RFI_LEAST_COPIED / 4 / 2, SMALL = N / 2 };
  static float outside[2 * N];
  rfr_comm *c;
  void *memory, *more;
  (void)state;
  OK(make_copies(0, &c));
  assert_true(rfi_nccl_alloc(c, 4 * N * sizeof(float), &memory));
  assert_true(rfi_nccl_alloc(c, 4 * N * sizeof(float), &more));
  float *const x = memory;
  const rfi_collective gather_op = {RFI_ALL_GATHER, RFR_F32, N, x, x + N, NULL, NULL};
  const rfi_collective exchange_op = {RFI_ALL_TO_ALL, RFR_F32, N, x, x + 2 * N, NULL, NULL};
  const rfi_collective past_end = {RFI_ALL_TO_ALL, RFR_F32, N, x, x + 3 * N, NULL, NULL};
  const rfi_collective other = {RFI_ALL_GATHER, RFR_F32, N, x, outside, NULL, NULL};
  const rfi_collective small = {RFI_ALL_GATHER, RFR_F32, SMALL, x, x + N, NULL, NULL};
  void *const copies = &comms[made - 1], *const whole = &comms[made - 2];
  copied = 0;
  OK(c->table->run(c, &gather_op, &urgent)); /* not shared yet */
  assert_ptr_equal(gathered, whole);
  OK(rfi_nccl_share(c, (rfi_collective[]){gather_op, exchange_op, other}, 3));
  assert_int_equal(windows, 2); /* one is from the creation; `more` has no operand */
  OK(rfi_nccl_share(c, &gather_op, 1));
  assert_int_equal(windows, 2);
  OK(c->table->run(c, &gather_op, &urgent));
  assert_ptr_equal(gathered, copies);
  OK(c->table->run_all(c, (rfi_collective[]){gather_op, gather_op}, 2, &urgent));
  assert_ptr_equal(gathered, copies);
  OK(c->table->run(c, &small, &urgent));
  assert_ptr_equal(gathered, whole);
  OK(c->table->run_all(c, (rfi_collective[]){small, small}, 2, &urgent)); /* together they are large */
  assert_ptr_equal(gathered, copies);
  OK(c->table->run(c, &other, &urgent));
  assert_ptr_equal(gathered, whole);
  OK(c->table->run(c, &gather_op, NULL));
  assert_ptr_equal(gathered, whole);
  OK(c->table->run(c, &past_end, &urgent));
  assert_int_equal(copied, 0);
  OK(c->table->run(c, &exchange_op, &urgent));
  assert_int_equal(copied, 1);
  differs = 1;
  assert_int_not_equal(rfi_nccl_share(c, &exchange_op, 1), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "dist.mismatch");
  assert_false(rfi_nccl_free(c, outside));
  assert_true(rfi_nccl_free(c, more));
  assert_int_equal(windows, 2);
  assert_true(rfi_nccl_free(c, memory));
  assert_int_equal(windows, 1);
  rfr_comm_destroy(c);
  assert_int_equal(windows, 0);
  assert_int_equal(((nccl_comm *)copies)->alive, 0);
  on_gather = NULL;
}

/* A copy that waits for a failed rank never ends. The host's waits then end with an error, and nothing is freed. */
static void test_stuck(void **state) {
  rfr_comm *c;
  (void)state;
  OK(make_copies(SHORT, &c));
  assert_false(rfi_nccl_stuck(c, (cudaStream_t)&busy));
  busy = waits = 1;
  is_peer(rfi_nccl_wait(c, (cudaStream_t)&busy, "waiting"), "waited 0.05 s");
  is_peer(rfi_nccl_wait(c, (cudaStream_t)&busy, "waiting"), "aborted");
  assert_true(rfi_nccl_stuck(c, (cudaStream_t)&busy));
  while (!ended) usleep(100);
  gpu_comm *g = (gpu_comm *)c;
  assert_null(g->copies);
  assert_int_equal(comms[made - 1].alive, 1);
  rfr_comm_destroy(c); /* leaves it allocated */
  assert_true(g->stuck);
  waits = 0;
  g->stuck = false;
  g->ending = NULL; /* its thread was detached */
  rfr_comm_destroy(c);
  OK(make_copies(0, &c)); /* without a wait, everything is freed */
  busy = 1;
  rfr_comm_abort(c);
  assert_false(rfi_nccl_stuck(c, (cudaStream_t)&busy));
  rfr_comm_destroy(c);
  on_gather = NULL;
}

/* NCCL's registration of memory waits for a failed rank: after the timeout the call fails, and nothing is freed. */
static void test_late_registration(void **state) {
  enum { N = RFI_LEAST_COPIED / 4 / 2 };
  rfr_comm *c;
  void *memory;
  (void)state;
  OK(make_copies(SHORT, &c));
  assert_true(rfi_nccl_alloc(c, 3 * N * sizeof(float), &memory));
  const rfi_collective gather_op = {RFI_ALL_GATHER, RFR_F32, N, memory, (float *)memory + N, NULL, NULL};
  begun = ended = 0;
  absent = 1;
  is_peer(rfi_nccl_share(c, &gather_op, 1), "registering memory: rank 0 of 2 waited 0.05 s");
  gpu_comm *g = (gpu_comm *)c;
  assert_true(g->stuck && !g->copies && rfi_nccl_stuck(c, NULL));
  while (!ended) usleep(100);
  const int registered = windows;
  rfr_comm_destroy(c); /* leaves it allocated */
  absent = 0;
  while (windows == registered) usleep(100);
  g->stuck = false;
  g->ending = NULL; /* its thread was detached */
  rfr_comm_destroy(c);
  on_gather = NULL;
}

static void *calls(void *arg) {
  double since = 0;
  while (call(arg, &busy) == RFR_OK && rfi_nccl_poll(arg, false, &since) == RFR_OK) continue;
  return NULL;
}

static void test_aborts(void **state) {
  enum { TIMES = 100, THREADS = 3 };
  pthread_t thread[THREADS];
  rfr_comm *c;
  (void)state;
  for (int k = 0; k < TIMES; k++) {
    OK(make(0, &c));
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&thread[i], NULL, calls, c), 0);
    usleep((unsigned)k * 10);
    rfr_comm_abort(c);
    rfr_comm_abort(c);
    for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
    rfr_comm_destroy(c);
    assert_int_equal(begun, 1);
    assert_int_equal(ended, 1);
  }
}

static void test_absent_ranks(void **state) {
  unsigned char bytes[RFR_NCCL_ID_BYTES] = {0};
  rfr_comm *c = NULL;
  (void)state;
  begun = ended = 0;
  absent = 1;
  is_peer(rfi_nccl_create(&host, ctx, 0, bytes, 2, 0, SHORT, &c), "joining the communicator: rank 0 of 2 waited");
  assert_null(c);
  absent = 0;
  while (!ended) usleep(100); /* the abandoned thread frees its entry when its call returns */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_good),     rft_context_test(test_group),         rft_context_test(test_late_with_graphs),
      rft_context_test(test_poll),     rft_context_test(test_aborts),        rft_context_test(test_absent_ranks),
      rft_context_test(test_messages), rft_context_test(test_sums_of_group), rft_context_test(test_copies_are_found),
      rft_context_test(test_copies),   rft_context_test(test_stuck),         rft_context_test(test_late_registration),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
