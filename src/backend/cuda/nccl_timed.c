/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls of NCCL that wait for the other ranks and have no timeout: initializing a communicator and registering memory.
 * A separate thread makes the call. After the timeout this thread is abandoned.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/nccl_comm.h"

/* The data of a call. The thread or its waiter frees it, whichever ends last. */
typedef struct timed {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  rfi_nccl_functions f;
  int ordinal;
  bool done, left; /* the thread is done; the waiter has timed out */
  cudaError_t device;
  int error;  /* NCCL's error */
  void *nccl; /* the communicator: the result, or an argument */
  /* initializing */
  nccl_unique_id id;
  const nccl_config *config; /* NULL: `settings` is not used */
  nccl_config settings;
  int size, rank;
  /* registering */
  void *memory; /* NULL: the call initializes */
  size_t bytes;
  void *window; /* result */
} timed;

static void timed_destroy(timed *t) {
  pthread_cond_destroy(&t->changed);
  pthread_mutex_destroy(&t->mutex);
  free(t);
}

static int initialize(const rfi_nccl_functions *f, void **out, int size, const nccl_unique_id *id, int rank,
                      const nccl_config *config) {
  return config ? f->CommInitRankConfig(out, size, *id, rank, config) : f->CommInitRank(out, size, *id, rank);
}

static int timed_run(timed *t) {
  if (t->memory) return t->f.CommWindowRegister(t->nccl, t->memory, t->bytes, &t->window, NCCL_SYMMETRIC);
  return initialize(&t->f, &t->nccl, t->size, &t->id, t->rank, t->config);
}

static void *make_call(void *arg) {
  timed *t = arg;
  const cudaError_t device = cudaSetDevice(t->ordinal);
  const int error = device == cudaSuccess ? timed_run(t) : 0;
  pthread_mutex_lock(&t->mutex);
  t->device = device, t->error = error;
  t->done = true;
  const bool left = t->left;
  pthread_cond_signal(&t->changed);
  pthread_mutex_unlock(&t->mutex);
  if (!left) return NULL;
  if (error == 0 && !t->memory && t->nccl) t->f.CommAbort(t->nccl);
  timed_destroy(t);
  return NULL;
}

static timed *timed_create(const gpu_comm *c) {
  pthread_condattr_t monotonic;
  timed *t = malloc(sizeof *t); /* not allocated from the context, which may be destroyed earlier */
  if (!t) return NULL;
  *t = (timed){.f = c->f, .ordinal = c->ordinal};
  pthread_mutex_init(&t->mutex, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&t->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  return t;
}

/* Waits for the thread; false after the timeout: then the thread owns `t`. */
static bool came_back(timed *t, double seconds) {
  enum { MOST_SECONDS = 1000000000 };
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  const double end =
      (double)until.tv_sec + 1e-9 * (double)until.tv_nsec + (seconds < MOST_SECONDS ? seconds : MOST_SECONDS);
  until = (struct timespec){(time_t)end, (long)(1e9 * (end - (double)(time_t)end))};
  pthread_mutex_lock(&t->mutex);
  while (!t->done && pthread_cond_timedwait(&t->changed, &t->mutex, &until) != ETIMEDOUT) continue;
  const bool done = t->done;
  t->left = !done;
  pthread_mutex_unlock(&t->mutex);
  return done;
}

/* Makes the call of `t` (NULL: out of memory). `t` remains valid only if the status is RFR_OK. */
static rfr_status call_in_time(gpu_comm *c, timed *t, const char *what) {
  pthread_t thread;
  if (!t) return c->core->fail(RFI_E_NO_MEMORY, "%s", what);
  if (pthread_create(&thread, NULL, make_call, t) != 0) {
    timed_destroy(t);
    return c->core->fail(RFI_E_CUDA, "NCCL, %s: no thread can be made", what);
  }
  const bool registers = t->memory != NULL;
  if (!came_back(t, c->timeout)) {
    pthread_detach(thread);
    c->stuck = c->stuck || registers;
    return rfi_nccl_late(c, what);
  }
  pthread_join(thread, NULL);
  rfr_status s = rfi_cuda_check(t->device, "choosing the device");
  if (s == RFR_OK) s = rfi_nccl_check(c, t->error, what);
  if (s != RFR_OK) timed_destroy(t);
  return s;
}

rfr_status rfi_nccl_join(gpu_comm *c, const nccl_unique_id *id, int size, int rank, const nccl_config *config,
                         void **out) {
  static const char what[] = "joining the communicator";
  *out = NULL;
  if (c->timeout <= 0) return rfi_nccl_check(c, initialize(&c->f, out, size, id, rank, config), what);
  timed *t = timed_create(c);
  if (t) {
    t->id = *id, t->size = size, t->rank = rank;
    if (config) t->settings = *config, t->config = &t->settings;
  }
  RFI_TRY(call_in_time(c, t, what));
  *out = t->nccl;
  timed_destroy(t);
  return RFR_OK;
}

rfr_status rfi_nccl_register(gpu_comm *c, void *copies, rfi_block *b) {
  static const char what[] = "registering memory";
  if (c->timeout <= 0)
    return rfi_nccl_check(c, c->f.CommWindowRegister(copies, b->memory, b->n, &b->window, NCCL_SYMMETRIC), what);
  timed *t = timed_create(c);
  if (t) t->nccl = copies, t->memory = b->memory, t->bytes = b->n;
  rfr_status s = call_in_time(c, t, what);
  if (s == RFR_OK) b->window = t->window, timed_destroy(t);
  return s;
}
