/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators of GPUs, one GPU per rank. A collective of a program is enqueued on the program's stream, also in a
 * capture; a collective that the caller calls has a separate stream and is waited for.
 *
 * NCCL decides the order of additions: with two ranks every order gives bitwise equal results; with more ranks sums are
 * equal within rounding, and bitwise equal in every run with the same library, machine and sizes.
 *
 * The ranks may be threads of one process. Then a call that frees GPU memory waits for the work of all GPUs of the
 * process, and that work may wait for the calling rank. To avoid this deadlock, no rank frees GPU memory between two
 * collectives that follow each other closely.
 *
 * NCCL connects ranks at the first use. Every collective is run once when the communicator is created, so that no
 * capture is the first use.
 *
 * An abort ends a communicator for every later call. NCCL frees it, so no call may be inside NCCL at that moment; a
 * mutex ensures this. NCCL also waits for the graphs that were captured with it, which this thread may have to destroy,
 * so the abort runs on a separate thread. NCCL's work on the GPU ends when the abort begins.
 */
#include "backend/cuda/nccl_comm.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/cuda/cuda.h"

enum { LEAST_VERSION = 21800, LEAST_FOR_COPIES = 22800, LEAST_OF_NEXT = 30000 };

/* ---- loading ---- */

static void *load(void) {
  static const char *const names[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"};
  void *object =
      dlopen(names[0], RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL); /* the copy that the program has already loaded, if any */
  for (size_t i = 0; !object && i < sizeof names / sizeof *names; i++)
    object = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  return object;
}

typedef struct symbol {
  const char *name;
  void *slot; /* gets the address */
} symbol;
#define ROW(result, name, arguments) {"nccl" #name, &f->name},

/* Returns the first name that the library does not have; NULL: all were found. */
static const char *find_symbols(void *object, const symbol *rows, size_t n) {
  for (size_t i = 0; i < n; i++) {
    void *address = dlsym(object, rows[i].name);
    if (!address) return rows[i].name;
    memcpy(rows[i].slot, &address, sizeof address);
  }
  return NULL;
}

/* Sets f->copies if the library has all functions for copy engines. */
static void load_copy_functions(void *object, rfi_nccl_functions *f, int version) {
  const symbol rows[] = {COPY_FUNCTIONS(ROW)};
  f->copies = version >= LEAST_FOR_COPIES && !find_symbols(object, rows, sizeof rows / sizeof *rows);
}

static rfr_status load_functions(const rfi_cuda_host *core, rfi_nccl_functions *f, int *version) {
  const symbol rows[] = {FUNCTIONS(ROW)};
  void *object = load();
  if (!object) {
    const char *why = dlerror();
    return core->fail(RFI_E_BACKEND_MISSING, "libnccl.so.2 cannot be loaded: %s", why ? why : "not found");
  }
  const char *missing = find_symbols(object, rows, sizeof rows / sizeof *rows);
  if (missing) return core->fail(RFI_E_BACKEND_MISSING, "libnccl.so.2 has no %s", missing);
  *version = 0;
  if (f->GetVersion(version) != 0 || *version < LEAST_VERSION || *version >= LEAST_OF_NEXT)
    return core->fail(RFI_E_BACKEND_MISSING, "libnccl.so.2 is NCCL %d.%d.%d, but 2.18 or newer, below 3, is needed",
                      *version / 10000, *version / 100 % 100, *version % 100);
  load_copy_functions(object, f, *version);
  return RFR_OK;
}

#undef ROW

bool rfi_nccl_describe(const rfi_cuda_host *core, char *text, size_t size) {
  rfi_nccl_functions f;
  int version;
  const bool found = load_functions(core, &f, &version) == RFR_OK;
  if (found) snprintf(text, size, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  else snprintf(text, size, "no NCCL");
  return found;
}

/* ---- running ---- */

rfr_status rfi_nccl_check(const gpu_comm *c, int e, const char *what) {
  if (e == 0 || e == NCCL_IN_PROGRESS) return RFR_OK;
  return c->core->fail(RFI_E_DIST_PEER, "NCCL, %s, rank %d of %d: %s", what, c->comm.rank, c->comm.size,
                       c->f.GetErrorString(e));
}

static int type_of(rfr_dtype dtype) {
  return dtype == RFR_F32 ? NCCL_FLOAT32 : dtype == RFR_BF16 ? NCCL_BFLOAT16 : NCCL_FLOAT16;
}

rfr_status rfi_nccl_aborted(const gpu_comm *c) {
  return c->core->fail(RFI_E_DIST_PEER, "rank %d's handle of the communicator was aborted", c->comm.rank);
}

/* One launch for all parts. The NCCL group is ended even after an error. */
static int all_to_all(const gpu_comm *c, void *nccl, const rfi_collective *w, void *stream) {
  const size_t bytes = (size_t)w->n * (size_t)rfi_collective_element(w->dtype);
  int e = c->f.GroupStart();
  if (e != 0) return e;
  for (int r = 0; r < c->comm.size && e == 0; r++) {
    e = c->f.Send((const char *)w->from + (size_t)r * bytes, bytes, NCCL_UINT8, r, nccl, stream);
    if (e == 0) e = c->f.Recv((char *)w->to + (size_t)r * bytes, bytes, NCCL_UINT8, r, nccl, stream);
  }
  const int ended = c->f.GroupEnd();
  return e != 0 ? e : ended;
}

/* `nccl`: c's communicator or that of its group. `large`: large enough to be a copy. */
static rfr_status enqueue_locked(const gpu_comm *c, void *nccl, const rfi_collective *w, bool large, void *stream) {
  const char *name = rfi_collective_name(w->kind);
  const size_t n = (size_t)w->n;
  if (!c->nccl) return rfi_nccl_aborted(c);
  if (n == 0) return RFR_OK;
  /* the ranks compare the collectives of programs only, so a collective outside of them is never a copy */
  if (large && nccl == c->nccl && stream != c->stream && rfi_copies_take(c, w))
    return rfi_nccl_check(c, rfi_copies_enqueue(c, w, stream), name);
  switch (w->kind) {
    case RFI_ALL_GATHER:
      return rfi_nccl_check(
          c, c->f.AllGather(w->from, w->to, n * (size_t)rfi_collective_element(w->dtype), NCCL_UINT8, nccl, stream),
          name);
    case RFI_REDUCE_SCATTER:
      return rfi_nccl_check(c, c->f.ReduceScatter(w->from, w->to, n, type_of(w->dtype), NCCL_SUM, nccl, stream), name);
    case RFI_ALL_TO_ALL: return rfi_nccl_check(c, all_to_all(c, nccl, w, stream), name);
    default:
      return rfi_nccl_check(c, c->f.AllReduce(w->from, w->to, n, type_of(w->dtype), NCCL_SUM, nccl, stream), name);
  }
}

static rfr_status enqueue(gpu_comm *c, const rfi_collective *w, void *stream) {
  pthread_mutex_lock(&c->mutex);
  const rfr_status s = enqueue_locked(c, c->nccl, w, rfi_copies_bytes(c, w) >= RFI_LEAST_COPIED, stream);
  pthread_mutex_unlock(&c->mutex);
  return s;
}

static bool lives(gpu_comm *c) {
  pthread_mutex_lock(&c->mutex);
  const bool yes = c->nccl != NULL;
  pthread_mutex_unlock(&c->mutex);
  return yes;
}

/* Must not call a CUDA function first: another thread may block inside one until the GPU's work has ended. */
static void *end_comm(void *arg) {
  gpu_comm *c = arg;
  /* links first: no graph uses their communicators */
  for (int i = 0; i < c->n_links; i++) c->f.CommAbort(c->link[i].nccl);
  c->f.CommAbort(c->ending);
  return NULL;
}

/* A second call does nothing. */
static void abort_comm(rfr_comm *comm) {
  gpu_comm *c = (gpu_comm *)comm;
  pthread_mutex_lock(&c->mutex);
  void *nccl = c->nccl;
  c->nccl = NULL;
  c->copies = NULL; /* never freed: NCCL cannot end a copy that waits for another rank */
  if (nccl) {
    c->ending = nccl;
    if (pthread_create(&c->ender, NULL, end_comm, c) != 0) {
      end_comm(c);
      c->ending = NULL;
    }
  }
  pthread_mutex_unlock(&c->mutex);
}

/* NCCL's asynchronous error; 0: none. After an abort there is none: work on the stream ends soon. */
static rfr_status async_error(gpu_comm *c, const char *what, int *error) {
  rfr_status s = RFR_OK;
  *error = 0;
  pthread_mutex_lock(&c->mutex);
  if (c->nccl) s = rfi_nccl_check(c, c->f.CommGetAsyncError(c->nccl, error), what);
  if (c->copies && s == RFR_OK && *error == 0) s = rfi_nccl_check(c, c->f.CommGetAsyncError(c->copies, error), what);
  for (int i = 0; c->nccl && i < c->n_links && s == RFR_OK && *error == 0; i++)
    s = rfi_nccl_check(c, c->f.CommGetAsyncError(c->link[i].nccl, error), what);
  pthread_mutex_unlock(&c->mutex);
  return s;
}

rfr_status rfi_nccl_late(const gpu_comm *c, const char *what) {
  return c->core->fail(RFI_E_DIST_PEER, "NCCL, %s: rank %d of %d waited %g s for the others", what, c->comm.rank,
                       c->comm.size, c->timeout);
}

static rfr_status look(gpu_comm *c, const char *what, double waited) {
  int error;
  RFI_TRY(async_error(c, what, &error));
  if (error != 0 && error != NCCL_IN_PROGRESS) {
    abort_comm(&c->comm);
    return rfi_nccl_check(c, error, what);
  }
  if (!lives(c)) return c->has_copies && waited > RFI_ENDING_SECONDS ? rfi_nccl_aborted(c) : RFR_OK;
  if (c->timeout <= 0 || waited <= c->timeout) return RFR_OK;
  abort_comm(&c->comm);
  return rfi_nccl_late(c, what);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

rfr_status rfi_nccl_fits(const rfr_comm *comm, int ordinal) {
  const gpu_comm *c = (const gpu_comm *)comm;
  if (c->ordinal == ordinal) return RFR_OK;
  return c->core->fail(RFI_E_DIST_COMM, "a program on cuda:%d has a communicator of cuda:%d", ordinal, c->ordinal);
}

rfr_status rfi_nccl_alive(rfr_comm *comm) {
  gpu_comm *c = (gpu_comm *)comm;
  return lives(c) ? RFR_OK : rfi_nccl_aborted(c);
}

bool rfi_nccl_stuck(rfr_comm *comm, cudaStream_t stream) {
  gpu_comm *c = (gpu_comm *)comm;
  if (c->stuck || !c->has_copies || lives(c)) return c->stuck;
  const double since = now();
  while (cudaStreamQuery(stream) == cudaErrorNotReady && !c->stuck) {
    usleep(1000);
    c->stuck = now() - since > RFI_ENDING_SECONDS;
  }
  return c->stuck;
}

/* Polls, because CUDA's own waits do not return when a peer has failed. */
rfr_status rfi_nccl_wait(rfr_comm *comm, cudaStream_t stream, const char *what) {
  enum { SPINS = 2000, PAUSE_US = 20 };
  gpu_comm *c = (gpu_comm *)comm;
  double since = 0;
  cudaError_t e;
  for (int i = 0; (e = cudaStreamQuery(stream)) == cudaErrorNotReady; i++) {
    if (i == 0) since = now();
    if (i < SPINS) continue;
    RFI_TRY(look(c, what, now() - since));
    usleep(PAUSE_US);
  }
  RFI_TRY(rfi_cuda_check(e, what));
  return rfi_nccl_alive(comm);
}

rfr_status rfi_nccl_poll(rfr_comm *comm, bool idle, double *since) {
  gpu_comm *c = (gpu_comm *)comm;
  RFI_TRY(rfi_nccl_alive(comm));
  if (idle) return RFR_OK;
  if (*since <= 0) *since = now();
  return look(c, "asking the device", now() - *since);
}

/* The NCCL group is ended even after an error. */
rfr_status rfi_nccl_launch(gpu_comm *c, const rfi_link *group, const rfi_collective *what, int n, void *stream) {
  pthread_mutex_lock(&c->mutex);
  rfr_status s = c->nccl ? rfi_nccl_check(c, c->f.GroupStart(), "a group") : rfi_nccl_aborted(c);
  const bool started = s == RFR_OK;
  int64_t bytes = 0;
  for (int i = 0; i < n; i++) bytes += rfi_copies_bytes(c, &what[i]);
  for (int i = 0; i < n && s == RFR_OK; i++)
    s = enqueue_locked(c, group ? group->nccl : c->nccl, &what[i], bytes >= RFI_LEAST_COPIED, stream);
  const int ended = started ? c->f.GroupEnd() : 0;
  if (s == RFR_OK) s = rfi_nccl_check(c, ended, "a group");
  pthread_mutex_unlock(&c->mutex);
  return s;
}

static rfr_status run_all(rfr_comm *comm, const rfi_collective *what, int n, void *stream) {
  return rfi_nccl_launch((gpu_comm *)comm, NULL, what, n, stream);
}

static rfr_status run(rfr_comm *comm, const rfi_collective *what, void *stream) {
  gpu_comm *c = (gpu_comm *)comm;
  int before;
  if (stream) return enqueue(c, what, stream);
  RFI_TRY(rfi_cuda_check(cudaGetDevice(&before), "asking for the current device"));
  RFI_TRY(rfi_cuda_check(cudaSetDevice(c->ordinal), "choosing the device"));
  rfr_status s = enqueue(c, what, c->stream);
  if (s == RFR_OK) s = rfi_nccl_wait(comm, c->stream, rfi_collective_name(what->kind));
  cudaSetDevice(before);
  return s;
}

/* ---- creation and destruction ---- */

static void destroy(rfr_comm *comm) {
  gpu_comm *c = (gpu_comm *)comm;
  int before;
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  cudaSetDevice(c->ordinal);
  if (c->stuck) { /* NCCL's abort does not return either: its thread keeps the handle */
    if (c->ending) pthread_detach(c->ender);
    if (known) cudaSetDevice(before);
    return;
  }
  rfi_copies_close(c);
  for (int i = 0; c->nccl && i < c->n_links; i++) c->f.CommDestroy(c->link[i].nccl);
  if (c->nccl) c->f.CommDestroy(c->nccl);
  if (c->ending) pthread_join(c->ender, NULL);
  rfi_links_destroy(c);
  pthread_mutex_destroy(&c->mutex);
  cudaFree(c->room);
  if (c->stream) cudaStreamDestroy(c->stream);
  if (known) cudaSetDevice(before);
  c->core->free(c->ctx, c);
}

/* Goes through GPU memory. A run calls it a few times, between steps. */
static rfr_status exchange(rfr_comm *comm, const void *mine, int64_t bytes, void *all) {
  gpu_comm *c = (gpu_comm *)comm;
  char *memory;
  int before;
  const size_t n = (size_t)bytes;
  RFI_TRY(rfi_cuda_check(cudaGetDevice(&before), "asking for the current device"));
  RFI_TRY(rfi_cuda_check(cudaSetDevice(c->ordinal), "choosing the device"));
  const bool fits = n * ((size_t)comm->size + 1) <= RFI_ROOM;
  rfr_status s = RFR_OK;
  if (fits) memory = c->room;
  else s = rfi_cuda_check(cudaMalloc((void **)&memory, n * ((size_t)comm->size + 1)), "allocating memory");
  if (s == RFR_OK) {
    const rfi_collective what = {.kind = RFI_ALL_GATHER, .dtype = RFR_U8, .n = bytes, .from = memory, .to = memory + n};
    s = rfi_cuda_check(cudaMemcpyAsync(memory, mine, n, cudaMemcpyHostToDevice, c->stream), "writing memory");
    if (s == RFR_OK) s = enqueue(c, &what, c->stream);
    if (s == RFR_OK) s = rfi_nccl_wait(comm, c->stream, "exchanging bytes");
    if (s == RFR_OK)
      s = rfi_cuda_check(cudaMemcpy(all, memory + n, n * (size_t)comm->size, cudaMemcpyDeviceToHost), "reading memory");
    /* After an error a copy may wait for another rank, and freeing would wait too. */
    if (!fits && (s == RFR_OK || !c->has_copies)) cudaFree(memory);
  }
  cudaSetDevice(before);
  return s;
}

static void set_timeout(rfr_comm *comm, double timeout) { ((gpu_comm *)comm)->timeout = timeout; }

static const rfi_comm_table table = {.name = "NCCL",
                                     .run = run,
                                     .run_all = run_all,
                                     .abort = abort_comm,
                                     .destroy = destroy,
                                     .exchange = exchange,
                                     .set_timeout = set_timeout,
                                     .send = rfi_links_send,
                                     .receive = rfi_links_receive,
                                     .connect = rfi_links_connect,
                                     .sent = rfi_links_sent,
                                     .wait_sent = rfi_links_wait_sent,
                                     .connect_group = rfi_links_connect_group,
                                     .reduce_group = rfi_links_reduce_group};

static rfr_status connect_ranks(gpu_comm *c) {
  enum { N = 64 };
  const size_t all = sizeof(float) * N * (size_t)c->comm.size, bytes = 2 * all > RFI_ROOM ? 2 * all : RFI_ROOM;
  RFI_TRY(rfi_cuda_check(cudaMalloc((void **)&c->room, bytes), "allocating memory"));
  RFI_TRY(rfi_cuda_check(cudaMemsetAsync(c->room, 0, bytes, c->stream), "filling memory"));
  for (int kind = RFI_ALL_GATHER; kind <= RFI_ALL_TO_ALL; kind++) {
    const rfi_collective what = {
        .kind = (rfi_collective_kind)kind, .dtype = RFR_F32, .n = N, .from = c->room, .to = c->room + all};
    RFI_TRY(enqueue(c, &what, c->stream));
    RFI_TRY(rfi_nccl_wait(&c->comm, c->stream, "connecting the ranks"));
  }
  return RFR_OK;
}

static rfr_status join(gpu_comm *c, const void *id) {
  nccl_unique_id unique;
  memcpy(&unique, id, sizeof unique);
  RFI_TRY(rfi_cuda_check(cudaSetDevice(c->ordinal), "choosing the device"));
  RFI_TRY(rfi_cuda_check(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "making a stream"));
  RFI_TRY(
      rfi_nccl_join(c, &unique, c->comm.size, c->comm.rank, NULL, &c->nccl)); /* no mutex: no other thread uses c yet */
  RFI_TRY(connect_ranks(c));
  return rfi_copies_open(c);
}

rfr_status rfi_nccl_id(const rfi_cuda_host *core, void *id) {
  rfi_nccl_functions f;
  nccl_unique_id unique;
  int version;
  RFI_TRY(load_functions(core, &f, &version));
  const int e = f.GetUniqueId(&unique);
  if (e != 0) return core->fail(RFI_E_CUDA, "NCCL cannot create an id: %s", f.GetErrorString(e));
  memcpy(id, &unique, sizeof unique);
  return RFR_OK;
}

rfr_status rfi_nccl_create(const rfi_cuda_host *core, rfr_ctx *ctx, int ordinal, const void *id, int size, int rank,
                           double timeout, rfr_comm **out) {
  gpu_comm *c;
  int version, before;
  RFI_TRY(core->alloc(ctx, sizeof *c, (void **)&c));
  *c = (gpu_comm){.comm = {.table = &table, .rank = rank, .size = size},
                  .core = core,
                  .ctx = ctx,
                  .ordinal = ordinal,
                  .timeout = timeout};
  rfr_status s = load_functions(core, &c->f, &version);
  if (s != RFR_OK) {
    core->free(ctx, c);
    return s;
  }
  pthread_mutex_init(&c->mutex, NULL);
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  s = join(c, id);
  if (known) cudaSetDevice(before);
  if (s == RFR_OK) *out = &c->comm;
  else {
    c->has_copies = c->copies != NULL; /* one may wait for another rank */
    abort_comm(&c->comm);
    rfi_nccl_stuck(&c->comm, c->stream);
    destroy(&c->comm);
  }
  return s;
}
