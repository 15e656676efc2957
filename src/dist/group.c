/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum over a group is a reduce-scatter and a gather: rank i of the group sums part i of all ranks and sends the
 * sum. So a rank sends and receives fewer bytes than two tensors have, for any size of the group. A message does not
 * wait for its receiver, so no order of calls can block. Chunks limit the memory of messages in flight.
 */
#include "dist/group.h"

#include "base/base.h"
#include "dist/watch.h"

enum { CHUNK = 1 << 22 }; /* elements */

typedef struct group {
  rfr_comm *comm;
  int first, size, own;
  rfr_dtype dtype;
  int64_t each; /* bytes per element */
  char *parts;  /* received parts: CHUNK / size + 1 elements for each other rank */
  int64_t room;
} group;

/* Part r of a chunk is elements [begin(r), begin(r + 1)). */
static int64_t begin(const group *g, int64_t n, int r) { return rfi_collective_begin(n, r, g->size); }

typedef struct terms {
  const group *g;
  const char *own;
} terms;

static const void *term(const void *user, int r) {
  const terms *t = user;
  return r == t->g->own ? t->own : t->g->parts + r * t->g->room;
}

static rfr_status send(const group *g, const char *x, int64_t n, int part, int to) {
  const int64_t at = begin(g, n, part), bytes = (begin(g, n, part + 1) - at) * g->each;
  return bytes > 0 ? rfi_comm_send(g->comm, g->first + to, x + at * g->each, bytes, NULL) : RFR_OK;
}

static rfr_status receive(const group *g, char *to, int64_t n, int part, int from) {
  const int64_t bytes = (begin(g, n, part + 1) - begin(g, n, part)) * g->each;
  return bytes > 0 ? rfi_comm_receive(g->comm, g->first + from, to, bytes, NULL) : RFR_OK;
}

static rfr_status reduce(const group *g, char *x, int64_t n) {
  char *own = x + begin(g, n, g->own) * g->each;
  for (int r = 0; r < g->size; r++)
    if (r != g->own) RFI_TRY(send(g, x, n, r, r));
  for (int r = 0; r < g->size; r++)
    if (r != g->own) RFI_TRY(receive(g, g->parts + r * g->room, n, g->own, r));
  rfi_collective_sum(g->dtype, g->size, term, &(terms){g, own}, begin(g, n, g->own + 1) - begin(g, n, g->own), own);
  for (int r = 0; r < g->size; r++)
    if (r != g->own) RFI_TRY(send(g, x, n, g->own, r));
  for (int r = 0; r < g->size; r++)
    if (r != g->own) RFI_TRY(receive(g, x + begin(g, n, r) * g->each, n, r, r));
  return RFR_OK;
}

static rfr_status sum_by_messages(rfr_ctx *ctx, rfr_comm *c, int first, int size, const rfi_collective *what) {
  const int64_t n = what->n;
  group g = {c, first, size, rfr_comm_rank(c) - first, what->dtype, rfi_collective_element(what->dtype), NULL, 0};
  rfr_status s = RFR_OK;
  g.room = ((n < CHUNK ? n : CHUNK) / size + 1) * g.each;
  RFI_TRY(rfi_alloc(ctx, (size_t)(g.room * size), (void **)&g.parts));
  for (int64_t at = 0; at < n && s == RFR_OK; at += CHUNK)
    s = reduce(&g, (char *)what->to + at * g.each, n - at < CHUNK ? n - at : CHUNK);
  rfi_free(ctx, g.parts);
  return s;
}

rfr_status rfi_group_connect(rfr_comm *c, int first, int size) {
  if (!c->table->connect_group) return RFR_OK;
  RFI_TRY(rfi_watch_enter(c->watch));
  const rfr_status s = c->table->connect_group(c, first, size);
  rfi_watch_leave(c->watch);
  return s;
}

rfr_status rfi_group_all_reduce(rfr_ctx *ctx, rfr_comm *c, int first, int size, const rfi_collective *what, int n,
                                void *stream) {
  if (c->table->reduce_group) return c->table->reduce_group(c, what, n, stream);
  for (int i = 0; i < n; i++) RFI_TRY(sum_by_messages(ctx, c, first, size, &what[i]));
  return RFR_OK;
}
