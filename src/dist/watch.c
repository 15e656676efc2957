/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that work at different speeds between two calls of a communicator. While a rank makes progress
 * (rfi_ctx_progress), a thread of it exchanges a heartbeat with the other ranks once per period. A call first exchanges
 * heartbeats until all ranks are in a call. So a rank waits only for heartbeats, with the timeout of the communicator.
 * A rank that makes progress never times out; the error names a rank that is stopped or makes no progress.
 *
 * A heartbeat is an exchange of one byte: whether the rank is in a call. All ranks see the same bytes, so they continue
 * with the call after the same heartbeat.
 */
#include "dist/watch.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "dist/comm.h"

enum { PERIOD_SECONDS = 1, MOST_RANKS = RFI_EXCHANGE_BYTES };

struct rfi_watch {
  rfr_ctx *ctx;
  rfr_comm *comm;
  pthread_t thread;
  pthread_mutex_t mutex; /* protects the communicator and the fields below */
  pthread_cond_t changed;
  bool ended, failed;
  char slug[48], message[512]; /* the first failure */
  char all[MOST_RANKS];
};

/* *together: all ranks are inside a call. */
static rfr_status exchange_heartbeat(rfi_watch *w, char in_call, bool *together) {
  rfr_comm *c = w->comm;
  const rfi_collective gather = {.kind = RFI_ALL_GATHER, .dtype = RFR_U8, .n = 1, .from = &in_call, .to = w->all};
  if (w->failed) return rfi_fail_slug(w->slug, "%s", w->message);
  const rfr_status s =
      c->table->exchange ? c->table->exchange(c, &in_call, 1, w->all) : c->table->run(c, &gather, NULL);
  if (s != RFR_OK) {
    w->failed = true;
    snprintf(w->slug, sizeof w->slug, "%s", rfr_last_error()->slug);
    snprintf(w->message, sizeof w->message, "%s", rfr_last_error()->message);
    return s;
  }
  *together = true;
  for (int r = 0; r < c->size; r++) *together = *together && w->all[r];
  return RFR_OK;
}

static void *watch(void *user) {
  rfi_watch *w = user;
  struct timespec at;
  bool together;
  pthread_mutex_lock(&w->mutex);
  for (int64_t before = -1; !w->ended && !w->failed;) {
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += PERIOD_SECONDS;
    while (!w->ended && pthread_cond_timedwait(&w->changed, &w->mutex, &at) != ETIMEDOUT) continue;
    const int64_t progress = rfi_ctx_progress(w->ctx);
    if (!w->ended && progress != before) exchange_heartbeat(w, 0, &together);
    before = progress;
  }
  pthread_mutex_unlock(&w->mutex);
  return NULL;
}

rfr_status rfi_watch_enter(rfi_watch *w) {
  rfr_status s = RFR_OK;
  if (!w) return RFR_OK;
  pthread_mutex_lock(&w->mutex);
  for (bool together = false; s == RFR_OK && !together;) s = exchange_heartbeat(w, 1, &together);
  if (s != RFR_OK) pthread_mutex_unlock(&w->mutex);
  return s;
}

void rfi_watch_leave(rfi_watch *w) {
  if (w) pthread_mutex_unlock(&w->mutex);
}

void rfi_watch_set_timeout(rfi_watch *w, rfr_comm *c, double timeout) {
  if (w) pthread_mutex_lock(&w->mutex);
  c->table->set_timeout(c, timeout);
  if (w) pthread_mutex_unlock(&w->mutex);
}

rfr_status rfi_comm_watch(rfr_ctx *ctx, rfr_comm *c) {
  pthread_condattr_t monotonic;
  rfi_watch *w;
  if (rfr_comm_size(c) < 2 || c->size > MOST_RANKS) return RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *w, &w));
  w->ctx = ctx;
  w->comm = c;
  pthread_mutex_init(&w->mutex, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&w->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  c->watch = w;
  if (pthread_create(&w->thread, NULL, watch, w) == 0) return RFR_OK;
  w->ended = true; /* no thread has to be joined */
  rfi_comm_unwatch(c);
  return rfi_fail(RFI_E_NO_MEMORY, "cannot create the thread that watches the other ranks");
}

rfr_status rfi_comm_unwatch(rfr_comm *c) {
  rfi_watch *w = c ? c->watch : NULL;
  if (!w) return RFR_OK;
  const bool runs = !w->ended; /* `ended` is set by this function only */
  const rfr_status s = runs ? rfi_watch_enter(w) : RFR_OK;
  if (s != RFR_OK) pthread_mutex_lock(&w->mutex);
  w->ended = true;
  pthread_cond_signal(&w->changed);
  if (runs) pthread_mutex_unlock(&w->mutex);
  if (runs) pthread_join(w->thread, NULL);
  c->watch = NULL;
  pthread_cond_destroy(&w->changed);
  pthread_mutex_destroy(&w->mutex);
  rfi_free(w->ctx, w);
  return s;
}
