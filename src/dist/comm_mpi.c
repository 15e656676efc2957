/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that are processes of an MPI job, for host memory. A collective has two phases. First every rank sends the
 * description of its call to every other rank and compares all descriptions, so all ranks get the same status. Then
 * data are exchanged in chunks. Each chunk is complete before the next one starts, so the staging memory is small and
 * operations in place are safe.
 *
 * A message between two ranks is copied. Its size is sent first, then its bytes in pieces; a later call frees the copy.
 *
 * Messages are polled against a deadline. A rank whose message is missing at the deadline is named. Only time in which
 * this process polls counts, so a job that is suspended and continued does not fail.
 */
#include <dlfcn.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "dist/comm.h"
#include "dist/mpi/mpi_module.h"

enum { CHUNK = 1 << 18, WHY = 200 };            /* staged bytes per rank; length of a failure message */
enum { LEAVES = -1, ABORTS = -2, MISSES = -3 }; /* further values of header.kind, besides rfi_collective_kind */

typedef struct header {
  int32_t kind, dtype;
  int64_t n, number;
} header;

/* A message that MPI may still read. */
typedef struct outgoing {
  struct outgoing *next;
  int64_t bytes; /* the size, sent before the data */
  int n;
  void **requests; /* n requests, for the size and for each piece; NULL: completed */
  char *data;
} outgoing;

typedef struct mpi_comm {
  rfr_comm comm; /* must be first */
  rfr_ctx *ctx;
  const rfi_mpi_module *mpi;
  void *link;
  double timeout;
  int64_t calls;
  atomic_bool aborted;
  bool broken, differ; /* permanent; `why` is the reason */
  char why[WHY];
  header *headers; /* per rank */
  bool *waits;     /* per rank: a transfer with it is in flight */
  char *staging;   /* CHUNK bytes per rank */
  outgoing *outgoing;
  /* receives the size of a message; in the struct, because MPI may write it after a receive was abandoned */
  int64_t incoming;
  struct mpi_comm *kept_before;
} mpi_comm;

/* Communicators that were destroyed while transfers were open. MPI may still write into their memory, so it stays
 * allocated until the process ends; the list makes it reachable for leak checkers. One thread of a process calls
 * MPI. */
static mpi_comm *kept;

/* ---- failures ---- */

static __attribute__((format(printf, 2, 3))) rfr_status break_up(mpi_comm *c, const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (!c->broken) rfi_vsnprintf(c->why, sizeof c->why, format, args);
  va_end(args);
  c->broken = true;
  return rfi_fail(c->differ ? RFI_E_DIST_MISMATCH : RFI_E_DIST_PEER, "%s", c->why);
}

static rfr_status check(mpi_comm *c, int peer, const char *wrong) {
  return wrong ? break_up(c, "MPI, rank %d with rank %d: %s", c->comm.rank, peer, wrong) : RFR_OK;
}

static rfr_status late(mpi_comm *c) {
  char ranks[96] = "";
  size_t n = 0;
  int count = 0;
  for (int r = 0; r < c->comm.size; r++) {
    if (!c->waits[r]) continue;
    if (n < sizeof ranks - 16) n += (size_t)snprintf(ranks + n, sizeof ranks - n, "%s%d", count ? ", " : "", r);
    count++;
  }
  return break_up(c, "rank%s %s did not arrive within %g seconds", count == 1 ? "" : "s", ranks, c->timeout);
}

/* ---- messages ---- */

static rfr_status start(mpi_comm *c, int peer, const void *to, int64_t to_bytes, void *from, int64_t from_bytes) {
  c->waits[peer] = true;
  return check(c, peer, c->mpi->start(c->link, peer, to, (size_t)to_bytes, from, (size_t)from_bytes));
}

/* A polling wait. Ranks may share cores, so it spins only briefly. */
typedef struct poll_wait {
  int64_t polls;
  double waited, before;
} poll_wait;

/* Call between two polls. *late: the timeout plus `more` seconds has passed. */
static rfr_status pause_poll(mpi_comm *c, poll_wait *p, double more, bool *late) {
  enum { SPINS = 200, YIELDS = 2000, PAUSE_US = 50 };
  *late = false;
  if (atomic_load(&c->aborted)) return break_up(c, "rank %d has aborted the communicator", c->comm.rank);
  if (p->polls == 0) p->before = rfi_now();
  if (p->polls++ < SPINS) return RFR_OK;
  const double at = rfi_now();
  p->waited += fmin(at - p->before, 0.1);
  p->before = at;
  *late = c->timeout > 0 && p->waited > c->timeout + more;
  if (p->polls < YIELDS) sched_yield();
  else usleep(PAUSE_US);
  return RFR_OK;
}

/* Waits until all transfers in flight have completed. A rank that misses several peers waits longer: if those peers
 * wait for one other rank, they time out first and report that rank. `more`: seconds in addition to the timeout. */
static rfr_status wait_for_all(mpi_comm *c, double more) {
  const double for_several = 3;
  poll_wait p = {0};
  for (bool is_late = false;;) {
    int missing = 0;
    for (int r = 0; r < c->comm.size; r++) {
      bool done = true;
      if (!c->waits[r]) continue;
      RFI_TRY(check(c, r, c->mpi->test(c->link, r, &done)));
      c->waits[r] = !done;
      missing += !done;
    }
    if (missing == 0) return RFR_OK;
    if (is_late) return late(c);
    RFI_TRY(pause_poll(c, &p, more + (missing > 1 ? for_several : 0), &is_late));
  }
}

/* ---- calls ---- */

static rfr_status differ(mpi_comm *c, int r) {
  const header *a = &c->headers[0], *b = &c->headers[r];
  c->differ = true;
  if (a->number != b->number)
    return break_up(c, "rank 0 makes its call %lld, rank %d its call %lld", (long long)a->number, r,
                    (long long)b->number);
  return break_up(c, "rank 0 calls %s of %lld %s, rank %d %s of %lld %s",
                  rfi_collective_name((rfi_collective_kind)a->kind), (long long)a->n,
                  rfr_dtype_name((rfr_dtype)a->dtype), r, rfi_collective_name((rfi_collective_kind)b->kind),
                  (long long)b->n, rfr_dtype_name((rfr_dtype)b->dtype));
}

static rfr_status send_header(mpi_comm *c, int kind, const rfi_collective *w) {
  header *own = &c->headers[c->comm.rank];
  *own = (header){.kind = kind, .number = c->calls++};
  if (w) own->dtype = (int32_t)w->dtype, own->n = w->n;
  for (int r = 0; r < c->comm.size; r++)
    if (r != c->comm.rank) RFI_TRY(start(c, r, own, sizeof *own, &c->headers[r], sizeof *own));
  return RFR_OK;
}

/* Returns when all ranks have made the same call. */
static rfr_status match_calls(mpi_comm *c, const rfi_collective *w) {
  RFI_TRY(send_header(c, w ? (int)w->kind : LEAVES, w));
  RFI_TRY(wait_for_all(c, 0));
  const header *first = &c->headers[0];
  for (int r = 0; r < c->comm.size; r++) {
    const header *h = &c->headers[r];
    if (h->kind == ABORTS) return break_up(c, "rank %d has aborted the communicator", r);
    if (h->kind == LEAVES && w) return break_up(c, "rank %d has left the communicator", r);
    if (h->kind == MISSES) return break_up(c, "rank %d waits for a message that was not sent", r);
  }
  for (int r = 1; r < c->comm.size; r++) {
    const header *h = &c->headers[r];
    if (h->kind != first->kind || h->dtype != first->dtype || h->n != first->n || h->number != first->number)
      return differ(c, r);
  }
  return RFR_OK;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static rfr_status all_gather(mpi_comm *c, const rfi_collective *w) {
  const int64_t bytes = w->n * rfi_collective_element(w->dtype);
  char *own = (char *)w->to + c->comm.rank * bytes;
  if (own != w->from) memcpy(own, w->from, (size_t)bytes);
  for (int64_t done = 0; done < bytes; done += CHUNK) {
    const int64_t m = least(bytes - done, CHUNK);
    for (int r = 0; r < c->comm.size; r++)
      if (r != c->comm.rank) RFI_TRY(start(c, r, own + done, m, (char *)w->to + r * bytes + done, m));
    RFI_TRY(wait_for_all(c, 0));
  }
  return RFR_OK;
}

static int64_t chunk(int64_t bytes, int64_t done) { return bytes > done ? least(bytes - done, CHUNK) : 0; }

/* `from` and `to` must not overlap. Both ranks of a pair know both sizes, so both skip a pair that is done. */
static rfr_status all_to_all(mpi_comm *c, const rfi_collective *w) {
  const int64_t each = rfi_collective_element(w->dtype), bytes = w->n * each;
  const char *from = w->from;
  char *to = w->to;
  const int own = c->comm.rank;
  memcpy(to + own * bytes, from + own * bytes, (size_t)(rfi_collective_received(w, own) * each));
  for (int64_t done = 0; done < bytes; done += CHUNK) {
    for (int r = 0; r < c->comm.size; r++) {
      const int64_t out = chunk(rfi_collective_sent(w, r) * each, done);
      const int64_t in = chunk(rfi_collective_received(w, r) * each, done);
      if (r != own && (out > 0 || in > 0))
        RFI_TRY(start(c, r, from + r * bytes + done, out, to + r * bytes + done, in));
    }
    RFI_TRY(wait_for_all(c, 0));
  }
  return RFR_OK;
}

/* The addends of a sum: this rank's data, and the other ranks' data in staging memory. */
typedef struct terms {
  const mpi_comm *c;
  const char *own;
} terms;

static const void *term(const void *user, int r) {
  const terms *t = user;
  return r == t->c->comm.rank ? t->own : t->c->staging + (int64_t)r * CHUNK;
}

/* Sends to each rank its part of x and sums this rank's part into `to`. Part r has count(r) elements from first(r)
 * on. */
static rfr_status reduce_parts(mpi_comm *c, const char *x, rfr_dtype dtype, int64_t (*first)(const void *, int),
                               int64_t (*count)(const void *, int), const void *user, char *to) {
  const int64_t each = rfi_collective_element(dtype), own = count(user, c->comm.rank);
  for (int r = 0; r < c->comm.size; r++)
    if (r != c->comm.rank)
      RFI_TRY(
          start(c, r, x + first(user, r) * each, count(user, r) * each, c->staging + (int64_t)r * CHUNK, own * each));
  RFI_TRY(wait_for_all(c, 0));
  rfi_collective_sum(dtype, c->comm.size, term, &(terms){c, x + first(user, c->comm.rank) * each}, own, to);
  return RFR_OK;
}

/* A chunk of a reduce_scatter: `m` of the n elements of each rank. */
typedef struct slab {
  int64_t n, done, m;
  int size;
} slab;
static int64_t slab_first(const void *user, int r) { return r * ((const slab *)user)->n + ((const slab *)user)->done; }
static int64_t slab_count(const void *user, int r) {
  (void)r;
  return ((const slab *)user)->m;
}

static rfr_status reduce_scatter(mpi_comm *c, const rfi_collective *w) {
  const int64_t each = rfi_collective_element(w->dtype), most = CHUNK / each;
  for (slab s = {.n = w->n}; s.done < w->n; s.done += most) {
    s.m = least(w->n - s.done, most);
    RFI_TRY(reduce_parts(c, w->from, w->dtype, slab_first, slab_count, &s, (char *)w->to + s.done * each));
  }
  return RFR_OK;
}

/* A chunk of an all_reduce: elements [done, done + m), of which each rank sums one part. */
static int64_t part_first(const void *user, int r) {
  const slab *s = user;
  return s->done + rfi_collective_begin(s->m, r, s->size);
}
static int64_t part_count(const void *user, int r) { return part_first(user, r + 1) - part_first(user, r); }

static rfr_status all_reduce(mpi_comm *c, const rfi_collective *w) {
  const int64_t each = rfi_collective_element(w->dtype), most = CHUNK / each * c->comm.size;
  const int rank = c->comm.rank;
  char *to = w->to;
  for (slab s = {.size = c->comm.size}; s.done < w->n; s.done += most) {
    s.m = least(w->n - s.done, most);
    char *own = to + part_first(&s, rank) * each;
    RFI_TRY(reduce_parts(c, w->from, w->dtype, part_first, part_count, &s, own));
    for (int r = 0; r < s.size; r++)
      if (r != rank)
        RFI_TRY(start(c, r, own, part_count(&s, rank) * each, to + part_first(&s, r) * each, part_count(&s, r) * each));
    RFI_TRY(wait_for_all(c, 0));
  }
  return RFR_OK;
}

static rfr_status check_alive(mpi_comm *c) {
  if (c->broken) return break_up(c, "%s", c->why);
  if (atomic_load(&c->aborted)) return break_up(c, "rank %d has aborted the communicator", c->comm.rank);
  return RFR_OK;
}

static rfr_status run(rfr_comm *comm, const rfi_collective *w, void *stream) {
  mpi_comm *c = (mpi_comm *)comm;
  (void)stream;
  RFI_TRY(check_alive(c));
  RFI_TRY(match_calls(c, w));
  if (w->n == 0) return RFR_OK;
  switch (w->kind) {
    case RFI_ALL_GATHER: return all_gather(c, w);
    case RFI_REDUCE_SCATTER: return reduce_scatter(c, w);
    case RFI_ALL_REDUCE: return all_reduce(c, w);
    case RFI_ALL_TO_ALL: return all_to_all(c, w);
  }
  return rfi_fail(RFI_E_INTERNAL, "collective %d", (int)w->kind);
}

/* ---- messages between two ranks ---- */

enum { PIECE = 1 << 30 };

static void free_outgoing(mpi_comm *c, outgoing *m) {
  rfi_free(c->ctx, m->data);
  rfi_free(c->ctx, m->requests);
  rfi_free(c->ctx, m);
}

/* Frees messages that have completed. */
static rfr_status free_completed(mpi_comm *c) {
  for (outgoing **at = &c->outgoing; *at;) {
    outgoing *m = *at;
    bool all = true;
    for (int i = 0; i < m->n; i++) {
      if (m->requests[i]) RFI_TRY(check(c, c->comm.rank, c->mpi->test_one(c->link, &m->requests[i])));
      all = all && !m->requests[i];
    }
    if (all) *at = m->next, free_outgoing(c, m);
    else at = &m->next;
  }
  return RFR_OK;
}

static rfr_status send(rfr_comm *comm, int to, const void *data, int64_t bytes, void *stream) {
  (void)stream;
  mpi_comm *c = (mpi_comm *)comm;
  rfr_status s;
  outgoing *m = NULL;
  const size_t pieces = (size_t)((bytes + PIECE - 1) / PIECE);
  RFI_TRY(check_alive(c));
  RFI_TRY(free_completed(c));
  RFI_TRY(RFI_ALLOC(c->ctx, sizeof *m, &m));
  *m = (outgoing){.bytes = bytes};
  RFI_GOTO(RFI_ALLOC(c->ctx, sizeof *m->requests * (pieces + 1), &m->requests));
  RFI_GOTO(rfi_alloc(c->ctx, (size_t)bytes, (void **)&m->data));
  memcpy(m->data, data, (size_t)bytes);
  m->next = c->outgoing;
  c->outgoing = m; /* from here on MPI may read it */
  RFI_TRY(check(c, to, c->mpi->send(c->link, to, &m->bytes, sizeof m->bytes, &m->requests[m->n++])));
  for (int64_t done = 0; done < bytes; done += PIECE)
    RFI_TRY(check(c, to,
                  c->mpi->send(c->link, to, m->data + done, (size_t)least(bytes - done, PIECE), &m->requests[m->n++])));
  return RFR_OK;
fail:
  free_outgoing(c, m);
  return s;
}

/* A message is late; its sender may itself be waiting for another rank. All waiting ranks exchange headers here, so
 * that the error names the rank that does not respond. */
static rfr_status report_late(mpi_comm *c, int from) {
  const double grace = 3;
  if (c->timeout > grace) {
    RFI_TRY(send_header(c, MISSES, NULL));
    RFI_TRY(wait_for_all(c, grace - c->timeout));
  }
  return break_up(c, "rank %d has sent no message to rank %d within %g seconds", from, c->comm.rank, c->timeout);
}

static rfr_status receive_piece(mpi_comm *c, int from, void *data, int64_t bytes) {
  poll_wait p = {0};
  void *request;
  RFI_TRY(check(c, from, c->mpi->receive(c->link, from, data, (size_t)bytes, &request)));
  for (bool is_late = false;;) {
    RFI_TRY(check(c, from, c->mpi->test_one(c->link, &request)));
    if (!request) return free_completed(c);
    if (is_late) return report_late(c, from);
    RFI_TRY(pause_poll(c, &p, 0, &is_late));
  }
}

static rfr_status receive(rfr_comm *comm, int from, void *data, int64_t bytes, void *stream) {
  (void)stream;
  mpi_comm *c = (mpi_comm *)comm;
  int64_t sent;
  RFI_TRY(check_alive(c));
  RFI_TRY(receive_piece(c, from, &c->incoming, sizeof c->incoming));
  sent = c->incoming;
  if (sent != bytes) {
    c->differ = true;
    return break_up(c, "rank %d sends %lld bytes, rank %d expects %lld", from, (long long)sent, comm->rank,
                    (long long)bytes);
  }
  for (int64_t done = 0; done < bytes; done += PIECE)
    RFI_TRY(receive_piece(c, from, (char *)data + done, least(bytes - done, PIECE)));
  return RFR_OK;
}

/* ---- joining and leaving ---- */

static void abort_calls(rfr_comm *comm) { atomic_store(&((mpi_comm *)comm)->aborted, true); }

/* Notifies the other ranks of an abort, if this rank's last call has completed. */
static void notify(mpi_comm *c) {
  if (c->broken) return;
  atomic_store(&c->aborted, false);
  c->timeout = 1.0;
  if (send_header(c, ABORTS, NULL) == RFR_OK) wait_for_all(c, 0);
}

static void destroy(rfr_comm *comm) {
  mpi_comm *c = (mpi_comm *)comm;
  if (!c) return;
  bool all = false;
  if (c->link && atomic_load(&c->aborted)) notify(c);
  else if (c->link && !c->broken) all = match_calls(c, NULL) == RFR_OK && free_completed(c) == RFR_OK && !c->outgoing;
  if (c->link) c->mpi->close(c->link, all);
  if (c->link && !all) {
    c->kept_before = kept;
    kept = c;
    return;
  }
  rfi_free(c->ctx, c->headers);
  rfi_free(c->ctx, c->waits);
  rfi_free(c->ctx, c->staging);
  rfi_free(c->ctx, c);
}

static void set_timeout(rfr_comm *comm, double timeout) { ((mpi_comm *)comm)->timeout = timeout; }

static const rfi_comm_table table = {.name = "MPI",
                                     .host = true,
                                     .run = run,
                                     .abort = abort_calls,
                                     .destroy = destroy,
                                     .set_timeout = set_timeout,
                                     .send = send,
                                     .receive = receive};

static rfr_status load(rfr_ctx *ctx, const rfi_mpi_module **out) {
  char path[PATH_MAX];
  void *object;
  *out = NULL;
  RFI_TRY(
      rfi_module_open(ctx, "librefrain_mpi.so", "MPI module", " (Debian: openmpi-bin, libopenmpi-dev)", path, &object));
  rfi_mpi_entry entry = NULL;
  void *symbol = dlsym(object, RFI_MPI_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  *out = entry ? entry() : NULL;
  if (*out && (*out)->abi == RFI_MPI_ABI) return RFR_OK;
  return rfi_fail(RFI_E_BACKEND_BUILD, "%s is of another build", path);
}

rfr_status rfr_comm_mpi_create(rfr_ctx *ctx, double timeout, rfr_comm **out) {
  const rfi_mpi_module *mpi;
  rfr_status s;
  mpi_comm *c = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!(timeout >= 0) || timeout > 1e9 || !out)
    return rfi_fail(RFI_E_ARGUMENT, "the timeout is %g seconds (allowed: 0 to 1e9), or out is NULL", timeout);
  *out = NULL;
  RFI_TRY(load(ctx, &mpi));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *c, &c));
  *c = (mpi_comm){.comm = {.table = &table}, .ctx = ctx, .mpi = mpi, .timeout = timeout};
  const char *wrong = mpi->open(&c->link, &c->comm.rank, &c->comm.size);
  if (wrong) RFI_GOTO(rfi_fail(RFI_E_DIST_LAUNCH, "MPI cannot start: %s", wrong));
  const size_t size = (size_t)c->comm.size;
  RFI_GOTO(RFI_ALLOC(ctx, size * sizeof *c->headers, &c->headers));
  RFI_GOTO(RFI_ALLOC(ctx, size * sizeof *c->waits, &c->waits));
  RFI_GOTO(rfi_alloc(ctx, size * CHUNK, (void **)&c->staging));
  *out = &c->comm;
  return RFR_OK;
fail:
  if (c->link) mpi->close(c->link, false);
  c->link = NULL;
  destroy(&c->comm);
  return s;
}
