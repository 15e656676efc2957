/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that are threads of one process. A collective has four steps: publish the own call, wait at a barrier, read the
 * other ranks' memory, wait at a second barrier. The last rank to arrive at the first barrier compares the calls, so
 * all ranks get the same status.
 *
 * Only the first barrier can fail. After it, a rank reads the memory of ranks that wait at the second barrier. A rank
 * waits for nothing between the two barriers, so every rank reaches the second one. No rank leaves while another one
 * reads its memory, even if a rank aborts meanwhile.
 *
 * Messages between two ranks are copied into a list of the receiver, so a sender never waits.
 *
 * Each element is summed over the ranks in rank order (sum.c).
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "dist/comm.h"

enum { WHY = 160 }; /* length of a failure message */

typedef struct message {
  struct message *next;
  int from;
  int64_t bytes;
  max_align_t data[];
} message;

typedef struct end {
  rfr_comm comm; /* must be first */
  struct group *group;
  message *messages; /* not received yet, in the order of sending */
  rfi_collective call;
  bool arrived; /* has arrived at the current barrier */
} end;

typedef struct group {
  rfr_ctx *ctx;
  /* protects the fields below. A rank's `call` does not change between the first and the last barrier, so it is read
   * without the mutex */
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int size, ends, arrived;
  uint64_t generation;
  double timeout;
  bool broken, differ; /* permanent; `why` is the reason */
  char why[WHY];
  end end[];
} group;

/* ---- barriers ---- */

static __attribute__((format(printf, 2, 3))) void break_up(group *g, const char *format, ...) {
  va_list args;
  if (g->broken) return;
  va_start(args, format);
  rfi_vsnprintf(g->why, sizeof g->why, format, args);
  va_end(args);
  g->broken = true;
  pthread_cond_broadcast(&g->changed);
}

static void compare(group *g) {
  const rfi_collective *a = &g->end[0].call;
  for (int r = 1; r < g->size && !g->broken; r++) {
    const rfi_collective *b = &g->end[r].call;
    if (a->kind == b->kind && a->dtype == b->dtype && a->n == b->n) continue;
    break_up(g, "rank 0 calls %s of %lld %s, rank %d %s of %lld %s", rfi_collective_name(a->kind), (long long)a->n,
             rfr_dtype_name(a->dtype), r, rfi_collective_name(b->kind), (long long)b->n, rfr_dtype_name(b->dtype));
    g->differ = true;
  }
}

static void wait_or_fail(end *e, uint64_t generation, const struct timespec *until) {
  group *g = e->group;
  while (g->generation == generation && !g->broken) {
    if (g->timeout <= 0) pthread_cond_wait(&g->changed, &g->mutex);
    else if (pthread_cond_timedwait(&g->changed, &g->mutex, until) == ETIMEDOUT && g->generation == generation) {
      int late = 0;
      while (g->end[late].arrived) late++;
      break_up(g, "rank %d did not arrive within %g seconds", late, g->timeout);
    }
  }
}

static void release_barrier(group *g) {
  for (int r = 0; r < g->size; r++) g->end[r].arrived = false;
  g->arrived = 0;
  g->generation++;
  pthread_cond_broadcast(&g->changed);
}

/* The deadline of a wait that starts now; the caller holds the mutex. */
static struct timespec deadline(const group *g) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += (time_t)g->timeout;
  until.tv_nsec += (long)(1e9 * (g->timeout - floor(g->timeout)));
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  return until;
}

/* The first barrier of a call: returns when all ranks have made the same call. */
static rfr_status match_calls(end *e, const rfi_collective *call) {
  group *g = e->group;
  pthread_mutex_lock(&g->mutex);
  const struct timespec until = deadline(g);
  const uint64_t generation = g->generation;
  if (!g->broken) {
    e->call = *call;
    e->arrived = true;
    if (++g->arrived == g->size) {
      compare(g);
      release_barrier(g);
    } else {
      wait_or_fail(e, generation, &until);
    }
  }
  const bool matched = g->generation != generation && !g->differ;
  rfr_status s = matched ? RFR_OK : rfi_fail(g->differ ? RFI_E_DIST_MISMATCH : RFI_E_DIST_PEER, "%s", g->why);
  pthread_mutex_unlock(&g->mutex);
  return s;
}

/* A later barrier of a call, which every rank reaches. */
static void wait_at_barrier(end *e) {
  group *g = e->group;
  pthread_mutex_lock(&g->mutex);
  const uint64_t generation = g->generation;
  if (++g->arrived == g->size) release_barrier(g);
  while (g->generation == generation) pthread_cond_wait(&g->changed, &g->mutex);
  pthread_mutex_unlock(&g->mutex);
}

/* ---- collectives ---- */

static const char *at(const void *base, int64_t element, rfr_dtype dtype) {
  return (const char *)base + element * rfi_collective_element(dtype);
}

static void copy(void *to, const void *from, int64_t n, rfr_dtype dtype) {
  if (n > 0 && to != from) memcpy(to, from, (size_t)(n * rfi_collective_element(dtype)));
}

/* The addends of a sum, one per rank. */
typedef struct terms {
  const group *g;
  int64_t first;
  rfr_dtype dtype;
} terms;

static const void *term(const void *user, int r) {
  const terms *t = user;
  return at(t->g->end[r].call.from, t->first, t->dtype);
}

/* Sums elements [first, first + n) of all ranks' `from`; the sources may overlap the destination. */
static void sum(const group *g, int64_t first, int64_t n, rfr_dtype dtype, char *to) {
  rfi_collective_sum(dtype, g->size, term, &(terms){g, first, dtype}, n, to);
}

static void all_reduce(end *e) {
  group *g = e->group;
  const rfi_collective *c = &e->call;
  const int64_t own = rfi_collective_begin(c->n, e->comm.rank, g->size),
                next = rfi_collective_begin(c->n, e->comm.rank + 1, g->size);
  sum(g, own, next - own, c->dtype, (char *)at(c->to, own, c->dtype));
  wait_at_barrier(e);
  for (int r = 0; r < g->size; r++) {
    const int64_t first = rfi_collective_begin(c->n, r, g->size), last = rfi_collective_begin(c->n, r + 1, g->size);
    copy((char *)at(c->to, first, c->dtype), at(g->end[r].call.to, first, c->dtype), last - first, c->dtype);
  }
}

static rfr_status run(rfr_comm *comm, const rfi_collective *what, void *stream) {
  end *e = (end *)comm;
  const group *g = e->group;
  (void)stream;
  RFI_TRY(match_calls(e, what));
  if (what->kind == RFI_ALL_GATHER)
    for (int r = 0; r < g->size; r++)
      copy((char *)at(what->to, r * what->n, what->dtype), g->end[r].call.from, what->n, what->dtype);
  else if (what->kind == RFI_ALL_TO_ALL)
    for (int r = 0; r < g->size; r++)
      copy((char *)at(what->to, r * what->n, what->dtype), at(g->end[r].call.from, comm->rank * what->n, what->dtype),
           rfi_collective_received(what, r), what->dtype);
  else if (what->kind == RFI_REDUCE_SCATTER) sum(g, comm->rank * what->n, what->n, what->dtype, what->to);
  else all_reduce(e);
  wait_at_barrier(e);
  return RFR_OK;
}

/* ---- messages ---- */

static rfr_status send(rfr_comm *comm, int to, const void *data, int64_t bytes, void *stream) {
  (void)stream;
  end *e = (end *)comm, *peer = &e->group->end[to];
  group *g = e->group;
  message *m = NULL, **last = &peer->messages;
  pthread_mutex_lock(&g->mutex);
  rfr_status s =
      g->broken ? rfi_fail(RFI_E_DIST_PEER, "%s", g->why) : rfi_alloc(g->ctx, sizeof *m + (size_t)bytes, (void **)&m);
  if (s == RFR_OK) {
    *m = (message){.from = comm->rank, .bytes = bytes};
    memcpy(m->data, data, (size_t)bytes);
    while (*last) last = &(*last)->next;
    *last = m;
    pthread_cond_broadcast(&g->changed);
  }
  pthread_mutex_unlock(&g->mutex);
  return s;
}

static message **find_message(end *e, int from) {
  message **m = &e->messages;
  while (*m && (*m)->from != from) m = &(*m)->next;
  return m;
}

static rfr_status receive(rfr_comm *comm, int from, void *data, int64_t bytes, void *stream) {
  (void)stream;
  end *e = (end *)comm;
  group *g = e->group;
  message **m;
  rfr_status s = RFR_OK;
  pthread_mutex_lock(&g->mutex);
  const struct timespec until = deadline(g);
  while (!*(m = find_message(e, from)) && !g->broken) {
    if (g->timeout <= 0) pthread_cond_wait(&g->changed, &g->mutex);
    else if (pthread_cond_timedwait(&g->changed, &g->mutex, &until) == ETIMEDOUT && !*find_message(e, from))
      break_up(g, "rank %d has sent no message to rank %d within %g seconds", from, comm->rank, g->timeout);
  }
  message *got = *m;
  if (!got) {
    s = rfi_fail(RFI_E_DIST_PEER, "%s", g->why);
  } else if (got->bytes != bytes) {
    break_up(g, "rank %d sends %lld bytes, rank %d expects %lld", from, (long long)got->bytes, comm->rank,
             (long long)bytes);
    s = rfi_fail(RFI_E_DIST_MISMATCH, "%s", g->why);
  } else {
    memcpy(data, got->data, (size_t)bytes);
    *m = got->next;
    rfi_free(g->ctx, got);
  }
  pthread_mutex_unlock(&g->mutex);
  return s;
}

static void drop_messages(end *e) {
  for (message *next, *m = e->messages; m; m = next) {
    next = m->next;
    rfi_free(e->group->ctx, m);
  }
}

/* ---- joining and leaving ---- */

static void abort_all(rfr_comm *comm) {
  group *g = ((end *)comm)->group;
  pthread_mutex_lock(&g->mutex);
  break_up(g, "rank %d has aborted the communicator", comm->rank);
  pthread_mutex_unlock(&g->mutex);
}

static void destroy(rfr_comm *comm) {
  group *g = ((end *)comm)->group;
  pthread_mutex_lock(&g->mutex);
  const bool last = --g->ends == 0;
  break_up(g, "rank %d has left the communicator", comm->rank);
  pthread_mutex_unlock(&g->mutex);
  if (!last) return;
  pthread_cond_destroy(&g->changed);
  pthread_mutex_destroy(&g->mutex);
  for (int r = 0; r < g->size; r++) drop_messages(&g->end[r]);
  rfi_free(g->ctx, g);
}

/* The timeout belongs to the group, so it applies to all its ranks. */
static void set_timeout(rfr_comm *comm, double timeout) {
  group *g = ((end *)comm)->group;
  pthread_mutex_lock(&g->mutex);
  g->timeout = timeout;
  pthread_mutex_unlock(&g->mutex);
}

static const rfi_comm_table table = {.name = "threads",
                                     .host = true,
                                     .run = run,
                                     .abort = abort_all,
                                     .destroy = destroy,
                                     .set_timeout = set_timeout,
                                     .send = send,
                                     .receive = receive};

rfr_status rfr_comm_threads_create(rfr_ctx *ctx, int size, double timeout, rfr_comm **out) {
  enum { MOST = 4096 };
  pthread_condattr_t monotonic;
  group *g;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (size < 1 || size > MOST || !(timeout >= 0) || timeout > 1e9 || !out)
    return rfi_fail(RFI_E_ARGUMENT,
                    "size is %d (allowed: 1 to %d), the timeout is %g seconds (allowed: 0 to 1e9), or out is NULL",
                    size, MOST, timeout);
  for (int r = 0; r < size; r++) out[r] = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *g + sizeof *g->end * (size_t)size, &g));
  g->ctx = ctx;
  g->size = g->ends = size;
  g->timeout = timeout;
  pthread_mutex_init(&g->mutex, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&g->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  for (int r = 0; r < size; r++) {
    g->end[r] = (end){.comm = {.table = &table, .rank = r, .size = size}, .group = g};
    out[r] = &g->end[r].comm;
  }
  return RFR_OK;
}
