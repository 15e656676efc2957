/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA backend: a main stream and a side stream, one arena, and a captured graph per program,
 * which is launched into the caller's stream if one is set. An eager run and a capture enqueue the
 * same kernels by the same calls. A graph's copies are its first nodes and get their sources at each
 * launch, because a copy between two launches costs the host more.
 *
 * Device "cuda:none" plans for an H200 without one: kernels are selected and their workspaces are
 * known, memory has invalid addresses, and running is refused.
 */
#include <stdio.h>
#include <string.h>

#include "backend/cuda/cuda_find.h"
#include "backend/cuda/cuda_module.h"
#include "backend/cuda/cuda_select.h"
#include "backend/cuda/graph_fill.h"
#include "backend/cuda/lt.h"
#include "backend/cuda/nccl.h"
#include "backend/cuda/ranges.h"
#include "backend/cuda/table.h"
#include "backend/cuda/units.h"
#include "ops/collective/collective.h"
#include "ops/loss/head.h"

__attribute__((visibility("default"))) const rfi_cuda_module *rfi_cuda_module_get(const rfi_cuda_host *host);
__attribute__((visibility("default"))) const char rfi_cuda_module_built[] = RFI_BUILT;

static const rfi_cuda_host *core; /* set once, before any other call; the same for every context */

enum { MOST_AT_ONCE = 1024, GUARD = 2 << 20, MARKS = 64 };

#define CUDA(call, what) RFI_TRY(rfi_cuda_check(call, what))

struct rfi_device {
  rfi_cuda_info info; /* must be first: kernels read it through call->library */
  rfr_ctx *ctx;
  cudaStream_t stream, side; /* main and side stream */
  cudaStream_t exchange;     /* the side stream of a program with collectives */
  cudaStream_t at;           /* target of launches, copies and fills: `stream`, or the caller's */
  cudaEvent_t start, end;    /* of a timed op */
  cudaEvent_t fork, join;    /* of the side stream */
  cudaEvent_t mark[MARKS];   /* recorded after op n of the side stream: element n % MARKS */
  int marked[MARKS];         /* per mark: the last op of its launch */
  int64_t free_at_open;
  rfr_memory_use use;            /* `taken` is not set */
  rfi_lt *lt;                    /* NULL without a device */
  rfr_comm *comm;                /* for collective ops, or NULL */
  bool copies;                   /* its ranks exchange memory by copy engines */
  rfi_ranges ranges;             /* for a profiler */
  double busy_since;             /* with `comm`: time of the first poll that found the stream busy; 0: none */
  int failed;                    /* the op whose enqueueing failed; -1: none */
  int64_t side_launches, joined; /* graphs launched on the side stream; those that `at` waits for */
};

typedef struct node_copy { /* a copy node of a graph; the source must be device memory */
  cudaGraphNode_t node;
  void *to;
  size_t n;
  const void *from; /* the node's current source; NULL: unknown */
  bool enabled;
} node_copy;

struct rfi_graph {
  cudaGraphExec_t exec;
  cudaGraph_t graph; /* owns the nodes of the copies; NULL: there are no copies */
  int n_copies;
  node_copy copies[];
};

/* Makes the device current. Call leave() afterwards, also after an error: it restores the caller's device. */
static rfr_status enter(const rfi_device *d, int *before) {
  if (d->info.ordinal < 0)
    return core->fail(RFI_E_BACKEND_MISSING, "device cuda:none is for plans only; nothing runs on it");
  CUDA(cudaGetDevice(before), "asking for the current device");
  return *before == d->info.ordinal ? RFR_OK : rfi_cuda_check(cudaSetDevice(d->info.ordinal), "choosing the device");
}

static rfr_status leave(const rfi_device *d, int before, rfr_status s) {
  if (before != d->info.ordinal) cudaSetDevice(before);
  return s;
}

/* Free bytes of the device; 0: unknown. */
static int64_t free_bytes(void) {
  size_t n = 0, total;
  return cudaMemGetInfo(&n, &total) == cudaSuccess ? (int64_t)n : 0;
}

/* ---- opening ---- */

/* Whether the device waits for a rank that has failed. Then nothing is freed: CUDA would wait too. */
static bool is_stuck(const rfi_device *d) {
  return d->comm && d->info.ordinal >= 0 && (rfi_nccl_stuck(d->comm, d->at) || rfi_nccl_stuck(d->comm, d->stream));
}

static void device_close(rfi_device *d) {
  int before;
  if (!d) return;
  if (d->info.ordinal >= 0 && !is_stuck(d) && enter(d, &before) == RFR_OK) {
    rfi_lt_close(d->lt);
    rfi_ranges_close(&d->ranges);
    if (d->start) cudaEventDestroy(d->start);
    if (d->end) cudaEventDestroy(d->end);
    if (d->fork) cudaEventDestroy(d->fork);
    if (d->join) cudaEventDestroy(d->join);
    for (int i = 0; i < MARKS; i++)
      if (d->mark[i]) cudaEventDestroy(d->mark[i]);
    if (d->side) cudaStreamDestroy(d->side);
    if (d->exchange) cudaStreamDestroy(d->exchange);
    if (d->stream) cudaStreamDestroy(d->stream);
    leave(d, before, RFR_OK);
  }
  core->free(d->ctx, d);
}

/* The side stream has the lowest priority: its small ops use the multiprocessors that the main stream leaves idle. A
 * collective has few blocks and waits for other ranks, so its blocks get priority over those of a GEMM. In captured
 * graphs these priorities have no effect. */
static rfr_status make_streams(rfi_device *d) {
  int least, most;
  /* a higher priority is a smaller number */
  CUDA(cudaDeviceGetStreamPriorityRange(&least, &most), "reading the device");
  const int next = most < least ? most + 1 : most;
  CUDA(cudaStreamCreateWithPriority(&d->stream, cudaStreamNonBlocking, next), "making a stream");
  CUDA(cudaStreamCreateWithPriority(&d->side, cudaStreamNonBlocking, least), "making a stream");
  return rfi_cuda_check(cudaStreamCreateWithPriority(&d->exchange, cudaStreamNonBlocking, most), "making a stream");
}

static rfr_status make_handles(rfi_device *d) {
  if (d->info.ordinal < 0) return RFR_OK;
  d->free_at_open = free_bytes();
  RFI_TRY(make_streams(d));
  CUDA(cudaEventCreateWithFlags(&d->fork, cudaEventDisableTiming), "making an event");
  CUDA(cudaEventCreateWithFlags(&d->join, cudaEventDisableTiming), "making an event");
  for (int i = 0; i < MARKS; i++)
    CUDA(cudaEventCreateWithFlags(&d->mark[i], cudaEventDisableTiming), "making an event");
  CUDA(cudaEventCreate(&d->start), "making an event");
  CUDA(cudaEventCreate(&d->end), "making an event");
  d->at = d->stream;
  rfi_ranges_open(&d->ranges);
  return rfi_lt_open(core, d->ctx, &d->info, &d->lt);
}

static rfr_status device_open(rfr_ctx *ctx, rfi_device **out) {
  int ordinal, before;
  rfi_cuda_info info;
  rfi_device *d = NULL;
  *out = NULL;
  RFI_TRY(rfi_cuda_parse_device(core, core->device(ctx), &ordinal));
  RFI_TRY(rfi_cuda_find(core, ordinal, core->portable(ctx), &info));
  RFI_TRY(core->alloc(ctx, sizeof *d, (void **)&d));
  d->info = info;
  d->ctx = ctx;
  rfr_status s = RFR_OK;
  if (ordinal >= 0) {
    s = enter(d, &before);
    if (s == RFR_OK) s = leave(d, before, make_handles(d));
  }
  if (s == RFR_OK) *out = d;
  else device_close(d);
  return s;
}

static rfr_status device_join(rfi_device *d, rfr_comm *comm, bool shares) {
  if (d->info.ordinal >= 0) RFI_TRY(rfi_nccl_fits(comm, d->info.ordinal));
  d->copies = d->info.ordinal >= 0 && shares && rfi_nccl_copies(comm);
  d->comm = comm;
  return RFR_OK;
}

/* The operands that other ranks access. A reduce-scatter receives into its workspace (collective_cuda.c). */
static bool shared_operands(const rfi_bound *b, rfi_collective *out) {
  if (!(b->recorded->def->flags & RFI_COLLECTIVE) || b->recorded->attr[0].i < 2) return false;
  switch (b->recorded->def->code) {
    case RFI_OP_all_gather: *out = rfi_collective_of(&b->call, RFI_ALL_GATHER); return true;
    case RFI_OP_reduce_scatter: *out = rfi_collective_parts(&b->call); return true;
    case RFI_OP_all_to_all:
    case RFI_OP_all_to_all_rows: *out = rfi_collective_of(&b->call, RFI_ALL_TO_ALL); return true;
    default: return false;
  }
}

static rfr_status share(rfi_device *d, const rfi_bound *bound, int n) {
  rfi_collective *what;
  int many = 0, before;
  if (!d->copies) return RFR_OK;
  RFI_TRY(core->alloc(d->ctx, sizeof *what * (size_t)(n + 1), (void **)&what));
  for (int i = 0; i < n; i++) many += shared_operands(&bound[i], &what[many]);
  rfr_status s = enter(d, &before);
  if (s == RFR_OK) s = leave(d, before, many > 0 ? rfi_nccl_share(d->comm, what, many) : RFR_OK);
  core->free(d->ctx, what);
  return s;
}

/* ---- memory ---- */

static rfr_status memory_alloc(rfi_device *d, rfi_memory kind, size_t bytes, void **out) {
  int before;
  *out = NULL;
  if (bytes == 0) bytes = 1;
  if (d->info.ordinal < 0) {
    /* an invalid address, used only for arithmetic */
    *out = (void *)((uintptr_t)(kind == RFI_MEMORY_RING ? 1 : 2) << 44);
    return RFR_OK;
  }
  RFI_TRY(enter(d, &before));
  const int64_t had = free_bytes();
  cudaError_t e;
  if (kind == RFI_MEMORY_RING) e = cudaHostAlloc(out, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  else if (d->copies && kind == RFI_MEMORY_ARENA)
    e = rfi_nccl_alloc(d->comm, bytes, out) ? cudaSuccess : cudaErrorMemoryAllocation;
  else e = cudaMalloc(out, bytes);
  if (kind != RFI_MEMORY_RING) {
    if (d->use.arena == 0) d->use.libraries = d->free_at_open - had; /* until now only kernels were selected */
    d->use.arena += had - free_bytes();                              /* step memory is a separate allocation */
  }
  if (e == cudaSuccess && kind == RFI_MEMORY_RING) memset(*out, 0, bytes);
  rfr_status s = RFR_OK;
  if (e == cudaErrorMemoryAllocation) {
    size_t free_bytes = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total);
    s = core->fail(RFI_E_NO_MEMORY, "the plan needs %zu bytes of cuda:%d, which has %zu free of %zu", bytes,
                   d->info.ordinal, free_bytes, total);
  } else {
    s = rfi_cuda_check(e, "allocating memory");
  }
  return leave(d, before, s);
}

static void memory_free(rfi_device *d, rfi_memory kind, void *memory) {
  int before;
  if (!memory || d->info.ordinal < 0 || is_stuck(d) || enter(d, &before) != RFR_OK) return;
  if (kind == RFI_MEMORY_RING) cudaFreeHost(memory);
  else if (!d->copies || kind != RFI_MEMORY_ARENA || !rfi_nccl_free(d->comm, memory)) cudaFree(memory);
  leave(d, before, RFR_OK);
}

static rfr_status memory_fill(rfi_device *d, void *to, unsigned char byte, size_t n) {
  int before;
  if (d->info.ordinal < 0 || n == 0) return RFR_OK;
  d->busy_since = 0;
  RFI_TRY(enter(d, &before));
  return leave(d, before, rfi_cuda_check(cudaMemsetAsync(to, byte, n, d->at), "filling memory"));
}

static rfr_status synchronize(rfi_device *d) {
  if (d->comm) return rfi_nccl_wait(d->comm, d->at, "waiting for the device");
  return rfi_cuda_check(cudaStreamSynchronize(d->at), "waiting for the device");
}

/* A copy between host and device may block without a timeout, so synchronize with the communicator's timeout first. */
static rfr_status copy(rfi_device *d, void *to, const void *from, size_t n) {
  if (d->comm) RFI_TRY(synchronize(d));
  CUDA(cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, d->at), "copying");
  return synchronize(d);
}

static rfr_status memory_copy(rfi_device *d, void *to, const void *from, size_t n) {
  int before;
  RFI_TRY(enter(d, &before));
  return leave(d, before, copy(d, to, from, n));
}

static rfr_status memory_move(rfi_device *d, void *to, const void *from, size_t n) {
  int before;
  if (n == 0) return RFR_OK;
  d->busy_since = 0;
  RFI_TRY(enter(d, &before));
  return leave(d, before, rfi_cuda_check(cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, d->at), "copying"));
}

/* Memory of another GPU does not count as reachable, even with peer access. Host memory is reachable if it is
 * pinned. */
static bool memory_reaches(const rfi_device *d, const void *memory) {
  struct cudaPointerAttributes a;
  int before, pageable = 0;
  if (d->info.ordinal < 0 || enter(d, &before) != RFR_OK) return true;
  const cudaError_t e = cudaPointerGetAttributes(&a, memory);
  cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, d->info.ordinal);
  cudaGetLastError();
  leave(d, before, RFR_OK);
  if (e != cudaSuccess || a.type == cudaMemoryTypeUnregistered) return e != cudaSuccess || pageable;
  return a.type == cudaMemoryTypeDevice ? a.device == d->info.ordinal : a.devicePointer == memory;
}

static rfr_status inspect(rfi_device *d, rfi_range *ranges, int n) {
  RFI_TRY(rfi_cuda_inspect(ranges, n, d->at));
  return synchronize(d);
}

static rfr_status memory_inspect(rfi_device *d, rfi_range *ranges, int n) {
  int before;
  RFI_TRY(enter(d, &before));
  return leave(d, before, inspect(d, ranges, n));
}

static rfr_status memory_use(rfi_device *d, rfr_memory_use *out) {
  int before;
  RFI_TRY(enter(d, &before));
  *out = d->use;
  out->available = free_bytes();
  out->taken = d->free_at_open - out->available;
  return leave(d, before, RFR_OK);
}

/* ---- kernels ---- */

static rfr_status select_kernel(rfi_device *d, const rfi_opr *op, rfi_arena *memory, rfi_bound *b) {
  const rfi_selector from = {core, d->lt, d, d->stream, d->copies};
  return rfi_cuda_select(&from, op, memory, b);
}

/* ---- choices ---- */

/* Device and library come first, because the other choices are valid only for them. */
static const char *choice(rfi_device *d, int i) {
  static const char *const names[] = {"device", "library"};
  if (d->info.ordinal < 0) return NULL;
  return i < 2 ? names[i] : rfi_lt_choice(d->lt, i - 2);
}

static rfr_status make_choice(rfi_device *d, int i, const char *stored, char value[RFI_CHOICE]) {
  struct cudaDeviceProp p;
  value[0] = '\0';
  if (i > 1) return rfi_lt_choose(d->lt, i - 2, d->stream, stored, value);
  if (i == 1) {
    rfi_lt_describe(core, value, RFI_CHOICE);
    return RFR_OK;
  }
  CUDA(cudaGetDeviceProperties(&p, d->info.ordinal), "reading the device");
  snprintf(value, RFI_CHOICE, "%s, %d multiprocessors", p.name, p.multiProcessorCount);
  return RFR_OK;
}

static rfr_status choose(rfi_device *d, int i, const char *stored, char value[RFI_CHOICE]) {
  int before;
  RFI_TRY(enter(d, &before));
  return leave(d, before, make_choice(d, i, stored, value));
}

/* ---- running ---- */

/* Whether op b follows on the stream of op a without waiting for another stream. */
static bool follows(const rfi_bound *a, const rfi_bound *b) {
  return (a->side != 0) == (b->side != 0) && !b->waits && !b->forks;
}

/* Whether the op reads a result of one of the calls. */
static bool reads_result(const rfr_call *op, const rfr_call *const *calls, int n) {
  bool found = false;
  for (int i = 0; i < n; i++)
    for (int k = 0; k < op->n_in; k++)
      for (int j = 0; j < calls[i]->n_out; j++) found |= op->in[k].data && op->in[k].data == calls[i]->out[j].data;
  return found;
}

/* The number of leading ops that use this kernel and do not read each other's results. */
static int alike(const rfi_bound *bound, int n, const rfi_cuda_kernel *kernel, const rfr_call *calls[MOST_AT_ONCE]) {
  int i = 0;
  for (; i < n && i < MOST_AT_ONCE && bound[i].run == kernel->run && (i == 0 || follows(bound, &bound[i])); i++) {
    if (bound[i].side && reads_result(&bound[i].call, calls, i)) break;
    calls[i] = &bound[i].call;
  }
  return i;
}

/* The kernel whose launch bound[0] shares with the ops after it; NULL: none. *many gets the number of ops. */
static const rfi_cuda_kernel *shared_launch(const rfi_bound *bound, int n, int *many,
                                            const rfr_call *calls[MOST_AT_ONCE]) {
  const rfi_cuda_kernel *const kernels[] = {&RFI_CUDA(adamw), &RFI_CUDA(sgd), &RFI_CUDA(all_gather),
                                            &RFI_CUDA(reduce_scatter)};
  for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++)
    if ((*many = alike(bound, n, kernels[k], calls)) > 0) return kernels[k];
  *many = 1;
  return NULL;
}

/* Enqueues bound[0], and the ops after it that share its launch, on a stream; *many gets the number of ops. */
static rfr_status enqueue_next(const rfi_bound *bound, int n, cudaStream_t stream, int *many) {
  const rfr_call *calls[MOST_AT_ONCE];
  rfr_call first = bound->call;
  first.stream = stream;
  const rfi_cuda_kernel *const kernel = shared_launch(bound, n, many, calls);
  calls[0] = &first;
  return kernel ? kernel->run_all(calls, *many) : bound->run(&first);
}

/* Orders later work of stream `then` after the present work of `first`. */
static rfr_status order_after(rfi_device *d, cudaStream_t first, cudaStream_t then) {
  if (first == then) return RFR_OK;
  CUDA(cudaEventRecord(d->join, first), "recording an event");
  return rfi_cuda_check(cudaStreamWaitEvent(then, d->join, 0), "waiting for an event");
}

/* State of the side stream during enqueueing. */
typedef struct branch {
  cudaStream_t stream;
  int first, last; /* numbers of the first and the last side-stream op enqueued so far; 0: none */
  int waited;      /* the main stream has waited for side-stream ops up to this number */
  bool forked;     /* the fork event was recorded */
  bool synced;     /* the side stream has waited for the last fork event */
} branch;

static rfr_status fork_branch(rfi_device *d, branch *x) {
  x->forked = true;
  x->synced = false;
  return rfi_cuda_check(cudaEventRecord(d->fork, d->stream), "recording an event");
}

static rfr_status enqueue_side(rfi_device *d, const rfi_bound *bound, int n, branch *x, int *many) {
  if (!x->forked) RFI_TRY(fork_branch(d, x)); /* an earlier call enqueued the forking op */
  if (!x->synced) CUDA(cudaStreamWaitEvent(x->stream, d->fork, 0), "waiting for an event");
  x->synced = true;
  if (x->first == 0) x->first = bound->side;
  RFI_TRY(enqueue_next(bound, n, x->stream, many));
  x->last = bound[*many - 1].side;
  for (int i = 0; i < *many; i++) {
    CUDA(cudaEventRecord(d->mark[bound[i].side % MARKS], x->stream), "recording an event");
    d->marked[bound[i].side % MARKS] = x->last;
  }
  return RFR_OK;
}

/* Orders later work of the main stream after op `number` of the side stream and the other ops of its launch. A later op
 * of the side stream may have reused the event; to wait for that op is correct too. */
static rfr_status wait_for_side(rfi_device *d, int number, branch *x) {
  if (number > x->last) number = x->last;
  if (number <= x->waited || number < x->first || x->first == 0) return RFR_OK; /* an earlier call enqueued it */
  x->waited = d->marked[number % MARKS];
  return rfi_cuda_check(cudaStreamWaitEvent(d->stream, d->mark[number % MARKS], 0), "waiting for an event");
}

/* Converts the status s of a registered op's launcher to an error; a launch error that it did not report becomes its
 * error too. */
static rfr_status check_outside(const rfi_opr *op, rfr_status s) {
  if (s != RFR_OK) return core->outside_failed(op, s);
  return rfi_cuda_check(cudaGetLastError(), op->def->name);
}

/* Enqueues one op, or several ops that share a launch. */
static rfr_status enqueue_op(rfi_device *d, const rfi_bound *bound, int n, branch *x, int *many) {
  *many = 1;
  rfi_ranges_begin(&d->ranges, bound->recorded);
  rfr_status s = bound->side ? enqueue_side(d, bound, n, x, many) : enqueue_next(bound, n, d->stream, many);
  if (bound->recorded->def->outside) s = check_outside(bound->recorded, s);
  rfi_ranges_end(&d->ranges);
  return s;
}

/* The side stream of a program has either small ops of the backward or collectives. */
static const rfi_bound *first_side_op(const rfi_bound *bound, int n) {
  int i = 0;
  while (i < n && !bound[i].side) i++;
  return i < n ? &bound[i] : NULL;
}

static bool is_collective(const rfi_bound *side) { return side->recorded->def->flags & RFI_COLLECTIVE; }

/* Enqueues op i and the other ops of its launch. `units` NULL: the order is not checked. */
static rfr_status enqueue_at(rfi_device *d, const rfi_bound *bound, int i, int n, rfi_units *units, branch *x,
                             int *many) {
  const rfi_bound *b = &bound[i];
  if (b->waits) RFI_TRY(wait_for_side(d, b->waits, x));
  const rfr_status s = enqueue_op(d, b, n - i, x, many);
  if (s != RFR_OK) d->failed = i;
  RFI_TRY(s);
  return units ? rfi_units_note(units, b->side ? x->stream : d->stream, i, *many) : RFR_OK;
}

/* If collectives begin at op i, the next op of the main stream, unless it waits for one of them; else i. This op is
 * enqueued before the collectives: of two nodes that can start, CUDA starts the one first that was added to the graph
 * first. In the other order the main stream waited for several of the collectives on two H200. */
static int ahead(const rfi_bound *bound, int i, int n) {
  int main = i;
  while (main < n && bound[main].side && is_collective(&bound[main])) main++;
  return main < n && bound[main].waits < bound[i].side ? main : i;
}

static rfr_status enqueue_all(rfi_device *d, const rfi_bound *bound, int n, rfi_units *units, branch *x) {
  for (int i = 0, many; i < n; i += many) {
    const int first = ahead(bound, i, n);
    int after; /* ops of the launch of op `first` */
    if (bound[i].forks) RFI_TRY(fork_branch(d, x));
    RFI_TRY(enqueue_at(d, bound, first, n, units, x, &after));
    for (; i < first; i += many) RFI_TRY(enqueue_at(d, bound, i, first, units, x, &many));
    many = after;
  }
  return RFR_OK;
}

/* Joins the side stream at the end, also after an error, so that waiting for the main stream waits for both. */
static rfr_status enqueue(rfi_device *d, const rfi_bound *bound, int n, rfi_units *units) {
  const rfi_bound *side = first_side_op(bound, n);
  branch x = {.stream = side && is_collective(side) ? d->exchange : d->side};
  const rfr_status s = enqueue_all(d, bound, n, units, &x);
  const rfr_status joined = x.last > x.waited ? order_after(d, x.stream, d->stream) : RFR_OK;
  rfi_ranges_end_layer(&d->ranges);
  return s == RFR_OK ? joined : s;
}

/* Check before enqueueing: fails if the communicator was aborted. */
static rfr_status begin(rfi_device *d) {
  d->busy_since = 0;
  d->failed = -1;
  return d->comm ? rfi_nccl_alive(d->comm) : RFR_OK;
}

static rfr_status run(rfi_device *d, const rfi_bound *bound, int n) {
  int before;
  RFI_TRY(begin(d));
  RFI_TRY(enter(d, &before));
  const int64_t had = free_bytes();
  rfr_status s = order_after(d, d->at, d->stream); /* kernels use the main stream */
  if (s == RFR_OK) s = enqueue(d, bound, n, NULL);
  const rfr_status joined = order_after(d, d->stream, d->at);
  d->use.kernels += had - free_bytes();
  return leave(d, before, s == RFR_OK ? joined : s);
}

static rfr_status run_between_events(rfi_device *d, const rfi_bound *bound, int n, double *seconds) {
  float ms = 0;
  CUDA(cudaEventRecord(d->start, d->stream), "recording an event");
  RFI_TRY(enqueue(d, bound, n, NULL));
  CUDA(cudaEventRecord(d->end, d->stream), "recording an event");
  if (d->comm) RFI_TRY(rfi_nccl_wait(d->comm, d->stream, "waiting for the device"));
  CUDA(cudaEventSynchronize(d->end), "waiting for the device");
  CUDA(cudaEventElapsedTime(&ms, d->start, d->end), "reading a time");
  *seconds = 1e-3 * ms;
  return RFR_OK;
}

static rfr_status run_timed(rfi_device *d, const rfi_bound *bound, int n, int *many, double *seconds) {
  const rfr_call *calls[MOST_AT_ONCE];
  int before;
  *seconds = 0;
  RFI_TRY(begin(d));
  RFI_TRY(enter(d, &before));
  shared_launch(bound, n, many, calls);
  return leave(d, before, run_between_events(d, bound, *many, seconds));
}

/* Captures the copies in order. Each launch sets source and size. As a placeholder, the source is the memory after the
 * destination in the same allocation; the guard makes it long enough. */
static rfr_status capture_copies(rfi_device *d, rfi_graph *to, rfi_units *units) {
  for (int i = 0; i < to->n_copies; i++) {
    node_copy *c = &to->copies[i];
    const size_t some = c->n < GUARD ? c->n : GUARD;
    enum cudaStreamCaptureStatus status;
    const cudaGraphNode_t *ends;
    const cudaGraphEdgeData *data;
    size_t n_ends;
    CUDA(cudaMemcpyAsync(c->to, (const char *)c->to + some, some, cudaMemcpyDeviceToDevice, d->stream), "copying");
    CUDA(cudaStreamGetCaptureInfo(d->stream, &status, NULL, NULL, &ends, &data, &n_ends), "reading a graph");
    if (status != cudaStreamCaptureStatusActive || n_ends != 1)
      return core->fail(RFI_E_CUDA, "a copy was captured as %zu nodes", n_ends);
    c->node = ends[0];
    c->enabled = true;
  }
  return units && to->n_copies > 0 ? rfi_units_note(units, d->stream, 0, 0) : RFR_OK;
}

static rfr_status instantiate(rfi_device *d, const rfi_bound *bound, int n, rfi_units *units, rfi_graph *to) {
  cudaGraph_t graph = NULL;
  const int64_t had = free_bytes();
  CUDA(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  rfr_status s = capture_copies(d, to, units);
  if (s == RFR_OK) s = enqueue(d, bound, n, units);
  cudaError_t e = cudaStreamEndCapture(d->stream, &graph); /* must also end the capture after an error */
  const int64_t captured = free_bytes();
  if (s == RFR_OK) s = rfi_cuda_check(e, "ending a capture");
  if (s == RFR_OK && units) s = rfi_units_check(core, d->ctx, units, graph, bound);
  if (s == RFR_OK) s = rfi_cuda_fill_by_kernels(core, d->ctx, graph);
  if (s == RFR_OK) s = rfi_cuda_check(cudaGraphInstantiate(&to->exec, graph, 0), "making a graph");
  if (s == RFR_OK) s = rfi_cuda_check(cudaGraphUpload(to->exec, d->stream), "uploading a graph");
  if (s == RFR_OK) s = order_after(d, d->stream, d->at);
  if (to->n_copies > 0) to->graph = graph;
  else if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
  d->use.kernels += had - captured;
  d->use.graphs += captured - free_bytes();
  return s;
}

static void graph_destroy(rfi_device *d, rfi_graph *graph) {
  int before;
  if (!graph) return;
  if ((graph->exec || graph->graph) && !is_stuck(d) && enter(d, &before) == RFR_OK) {
    if (graph->exec) cudaGraphExecDestroy(graph->exec);
    if (graph->graph) cudaGraphDestroy(graph->graph);
    leave(d, before, RFR_OK);
  }
  core->free(d->ctx, graph);
}

static rfr_status make_graph(rfi_device *d, const rfi_copy *copies, int n, rfi_graph **out) {
  RFI_TRY(core->alloc(d->ctx, sizeof **out + sizeof(node_copy) * (size_t)n, (void **)out));
  (*out)->n_copies = n;
  for (int i = 0; i < n; i++) (*out)->copies[i] = (node_copy){.to = copies[i].to, .n = copies[i].n};
  return RFR_OK;
}

static rfr_status capture(rfi_device *d, const rfi_copy *copies, int n_copies, const rfi_bound *bound, int n,
                          rfi_graph **out) {
  int before;
  rfi_graph *graph = NULL;
  rfi_units units;
  *out = NULL;
  d->failed = -1;
  RFI_TRY(enter(d, &before));
  /* NCCL adds nodes of its own, so the order is not checked in graphs with collectives */
  const rfi_bound *side = first_side_op(bound, n);
  const bool branches = side && !is_collective(side);
  rfr_status s = rfi_units_init(core, d->ctx, branches ? n + 1 : 0, &units); /* one more unit for the copies */
  if (s == RFR_OK) s = make_graph(d, copies, n_copies, &graph);
  if (s == RFR_OK) s = instantiate(d, bound, n, branches ? &units : NULL, graph);
  rfi_units_deinit(core, d->ctx, &units);
  if (s == RFR_OK) *out = graph;
  else graph_destroy(d, graph);
  return leave(d, before, s);
}

static int failed(const rfi_device *d) { return d->failed; }

/* Whether a graph can copy from it: memory of this device. */
static bool is_on_device(const rfi_device *d, const void *p) {
  struct cudaPointerAttributes a;
  if (cudaPointerGetAttributes(&a, p) == cudaSuccess)
    return a.type == cudaMemoryTypeDevice && a.device == d->info.ordinal;
  cudaGetLastError();
  return false;
}

static rfr_status enable(rfi_graph *graph, node_copy *c, bool enabled) {
  if (c->enabled == enabled) return RFR_OK;
  CUDA(cudaGraphNodeSetEnabled(graph->exec, c->node, enabled), "changing a graph");
  c->enabled = enabled;
  return RFR_OK;
}

/* Returns false if the node cannot have this source. The next call reports a sticky error. */
static bool set_source(rfi_graph *graph, node_copy *c, const void *from) {
  if (c->from == from) return true;
  const cudaError_t e =
      cudaGraphExecMemcpyNodeSetParams1D(graph->exec, c->node, c->to, from, c->n, cudaMemcpyDeviceToDevice);
  c->from = e == cudaSuccess ? from : NULL;
  if (e != cudaSuccess) cudaGetLastError();
  return e == cudaSuccess;
}

/* Memory of this device is copied by the graph. Other sources are copied before the launch, and the node is
 * disabled. */
static rfr_status give(rfi_device *d, rfi_graph *graph, node_copy *c, const void *from) {
  const bool in_place = from == c->to, by_node = !in_place && is_on_device(d, from);
  RFI_TRY(enable(graph, c, by_node));
  if (in_place || (by_node && set_source(graph, c, from))) return RFR_OK;
  RFI_TRY(enable(graph, c, false));
  return rfi_cuda_check(cudaMemcpyAsync(c->to, from, c->n, cudaMemcpyDefault, d->at), "copying");
}

static rfr_status launch_on(rfi_device *d, rfi_graph *graph, cudaStream_t stream) {
  rfi_ranges_begin_named(&d->ranges, "replay");
  const cudaError_t e = cudaGraphLaunch(graph->exec, stream);
  rfi_ranges_end(&d->ranges);
  return rfi_cuda_check(e, "launching a graph");
}

static rfr_status launch_from(rfi_device *d, rfi_graph *graph, const void *const *from) {
  for (int i = 0; i < graph->n_copies; i++) RFI_TRY(give(d, graph, &graph->copies[i], from[i]));
  return launch_on(d, graph, d->at);
}

static rfr_status launch(rfi_device *d, rfi_graph *graph, const void *const *from) {
  int before;
  RFI_TRY(begin(d));
  RFI_TRY(enter(d, &before));
  return leave(d, before, launch_from(d, graph, from));
}

/* ---- graphs on the side stream ---- */

static rfr_status enqueue_graph_side(rfi_device *d, rfi_graph *graph) {
  CUDA(cudaEventRecord(d->fork, d->at), "recording an event");
  CUDA(cudaStreamWaitEvent(d->side, d->fork, 0), "waiting for an event");
  RFI_TRY(launch_on(d, graph, d->side));
  return rfi_cuda_check(cudaEventRecord(d->mark[d->side_launches++ % MARKS], d->side), "recording an event");
}

static rfr_status launch_side(rfi_device *d, rfi_graph *graph) {
  int before;
  RFI_TRY(begin(d));
  RFI_TRY(enter(d, &before));
  return leave(d, before, enqueue_graph_side(d, graph));
}

/* A later graph may have reused the event; to wait for that graph is correct too. */
static rfr_status join(rfi_device *d, int but) {
  const int64_t number = d->side_launches - but;
  if (number <= d->joined) return RFR_OK;
  CUDA(cudaStreamWaitEvent(d->at, d->mark[(number - 1) % MARKS], 0), "waiting for an event");
  d->joined = number;
  return RFR_OK;
}

static rfr_status join_side(rfi_device *d, int but) {
  int before;
  RFI_TRY(enter(d, &before));
  return leave(d, before, join(d, but));
}

static rfr_status wait(rfi_device *d) {
  int before;
  if (d->info.ordinal < 0) return RFR_OK;
  RFI_TRY(enter(d, &before));
  const rfr_status s = join(d, 0);
  return leave(d, before, s == RFR_OK ? synchronize(d) : s);
}

static rfr_status set_stream(rfi_device *d, void *stream) {
  int before;
  const cudaStream_t to = stream ? (cudaStream_t)stream : d->stream;
  RFI_TRY(enter(d, &before));
  const rfr_status s = order_after(d, d->at, to);
  if (s == RFR_OK) d->at = to;
  return leave(d, before, s);
}

static void *stream(const rfi_device *d) { return d->at; }

static rfr_status poll(rfi_device *d, bool *idle) {
  *idle = true;
  if (d->info.ordinal < 0) return RFR_OK;
  RFI_TRY(join(d, 0));
  cudaError_t e = cudaStreamQuery(d->at);
  *idle = e == cudaSuccess;
  if (e != cudaErrorNotReady) RFI_TRY(rfi_cuda_check(e, "asking the device"));
  return d->comm ? rfi_nccl_poll(d->comm, *idle, &d->busy_since) : RFR_OK;
}

/* ---- the module ---- */

static rfr_status describe(rfr_ctx *ctx, char *text, size_t size) { return rfi_cuda_describe(core, ctx, text, size); }
static rfr_status piece(int i, rfr_piece *out) { return rfi_cuda_piece(core, i, out); }
static rfr_status nccl_id(void *id) { return rfi_nccl_id(core, id); }

static rfr_status nccl_create(rfr_ctx *ctx, const void *id, int size, int rank, double timeout, rfr_comm **out) {
  rfi_cuda_info info;
  int ordinal;
  RFI_TRY(rfi_cuda_parse_device(core, core->device(ctx), &ordinal));
  if (ordinal < 0) return core->fail(RFI_E_BACKEND_MISSING, "device cuda:none is for plans only; nothing runs on it");
  RFI_TRY(rfi_cuda_find(core, ordinal, false, &info));
  return rfi_nccl_create(core, ctx, ordinal, id, size, rank, timeout, out);
}

static const rfi_backend backend = {
    .name = "CUDA",
    .host = false,
    .branches = true,
    .guard = GUARD,
    .lora = true,
    .gelu_bwd = true,
    .dx_sum = true,
    .loss_chunk = RFI_HEAD_ROWS,
    .loss_rows = rfi_head_rows_at_once,
    .open = device_open,
    .join = device_join,
    .share = share,
    .close = device_close,
    .alloc = memory_alloc,
    .free = memory_free,
    .fill = memory_fill,
    .copy = memory_copy,
    .move = memory_move,
    .reaches = memory_reaches,
    .inspect = memory_inspect,
    .memory_use = memory_use,
    .select = select_kernel,
    .choice = choice,
    .choose = choose,
    .run = run,
    .run_timed = run_timed,
    .capture = capture,
    .launch = launch,
    .launch_side = launch_side,
    .join_side = join_side,
    .failed = failed,
    .graph_destroy = graph_destroy,
    .wait = wait,
    .set_stream = set_stream,
    .stream = stream,
    .poll = poll,
};

const rfi_cuda_module *rfi_cuda_module_get(const rfi_cuda_host *host) {
  static const rfi_cuda_module module = {&backend, describe, piece, nccl_id, nccl_create};
  core = host;
  rfi_cuda_errors_go_to(host->fail);
  return &module;
}
