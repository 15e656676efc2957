/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators of threads: the placement of data, and sums in rank order, compared bitwise, also in place. If a rank
 * aborts, leaves, makes another call or does not arrive, every other rank gets an error. If a rank hangs, the test
 * times out.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dist/comm.h"
#include "dist/watch.h"
#include "support/context.h"
#include "support/ranks.h"

enum { MOST_RANKS = 5, MOST = 5003 };

typedef struct rank {
  rfr_comm *comm;
  int number, size;
  void (*work)(struct rank *r);
  rfr_status status;
  char slug[32], message[256];
  const void *job;
} rank;

static void *run_rank(void *arg) {
  rank *r = arg;
  r->work(r);
  if (r->status == RFR_OK) return NULL;
  strncpy(r->slug, rfr_last_error()->slug, sizeof r->slug - 1);
  strncpy(r->message, rfr_last_error()->message, sizeof r->message - 1);
  return NULL;
}

/* Runs each rank on its own thread, then destroys the communicators. */
static void run_ranks(int size, double timeout, void (*work)(rank *r), const void *job, rank ranks[MOST_RANKS]) {
  rfr_comm *comm[MOST_RANKS];
  pthread_t thread[MOST_RANKS];
  OK(rfr_comm_threads_create(ctx, size, timeout, comm));
  for (int i = 0; i < size; i++) {
    ranks[i] = (rank){.comm = comm[i], .number = i, .size = size, .work = work, .job = job};
    assert_int_equal(pthread_create(&thread[i], NULL, run_rank, &ranks[i]), 0);
  }
  for (int i = 0; i < size; i++) pthread_join(thread[i], NULL);
  for (int i = 0; i < size; i++) rfr_comm_destroy(ranks[i].comm);
}

/* ---- values ---- */

typedef struct values_job {
  int64_t n;
  rfr_dtype dtype;
  bool in_place;
} values_job;

static rfr_status expect(const void *a, const void *b, size_t bytes) {
  return bytes == 0 || memcmp(a, b, bytes) == 0 ? RFR_OK : RFR_INTERNAL;
}

static void values(rank *r) {
  const values_job *j = r->job;
  const size_t each = (size_t)rfr_dtype_bits(j->dtype) / 8, part = (size_t)j->n * each, all = part * (size_t)r->size;
  char *from = calloc(1, all + 4), *to = calloc(1, all + 4), *want = calloc(1, all + 4);
  if (!from || !to || !want) abort();
  const size_t own = (size_t)r->number * part;
  /* all_gather */
  char *shard = j->in_place ? to + own : from;
  for (int64_t i = 0; i < j->n; i++) rft_put(j->dtype, shard, i, rft_term(r->number, i));
  for (int64_t i = 0; i < j->n * r->size; i++) rft_put(j->dtype, want, i, rft_term((int)(i / j->n), i % j->n));
  r->status = rfr_comm_all_gather(r->comm, shard, to, j->n, j->dtype);
  if (r->status == RFR_OK) r->status = expect(to, want, all);
  /* reduce_scatter */
  for (int64_t i = 0; i < j->n * r->size; i++) rft_put(j->dtype, from, i, rft_term(r->number, i));
  for (int64_t i = 0; i < j->n; i++) rft_put_sum(j->dtype, want, i, r->number * j->n + i, r->size);
  char *result = j->in_place ? from + own : to;
  if (r->status == RFR_OK) r->status = rfr_comm_reduce_scatter(r->comm, from, result, j->n, j->dtype);
  if (r->status == RFR_OK) r->status = expect(result, want, part);
  /* all_reduce */
  for (int64_t i = 0; i < j->n; i++) rft_put(j->dtype, from, i, rft_term(r->number, i));
  for (int64_t i = 0; i < j->n; i++) rft_put_sum(j->dtype, want, i, i, r->size);
  result = j->in_place ? from : to;
  if (r->status == RFR_OK) r->status = rfr_comm_all_reduce(r->comm, from, result, j->n, j->dtype);
  if (r->status == RFR_OK) r->status = expect(result, want, part);
  /* all_to_all */
  for (int64_t i = 0; i < j->n * r->size; i++) rft_put(j->dtype, from, i, rft_term(r->number, i));
  for (int64_t i = 0; i < j->n * r->size; i++)
    rft_put(j->dtype, want, i, rft_term((int)(i / j->n), r->number * j->n + i % j->n));
  if (r->status == RFR_OK) r->status = rfr_comm_all_to_all(r->comm, from, to, j->n, j->dtype);
  if (r->status == RFR_OK) r->status = expect(to, want, all);
  free(from), free(to), free(want);
}

static void test_values(void **state) {
  (void)state;
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  static const int64_t counts[] = {0, 1, 7, MOST};
  rank ranks[MOST_RANKS];
  for (int size = 1; size <= MOST_RANKS; size++)
    for (int k = 0; k < 24; k++) {
      const values_job j = {counts[k % 4], types[k / 4 % 3], k >= 12};
      run_ranks(size, 0, values, &j, ranks);
      for (int r = 0; r < size; r++)
        if (ranks[r].status != RFR_OK)
          fail_msg("size %d, n %lld, type %d: %s", size, (long long)j.n, (int)j.dtype, ranks[r].message);
    }
}

/* Other types are moved unchanged; calls may follow each other at once, with memory that changes between them. */
static void moves(rank *r) {
  int64_t all[MOST_RANKS];
  for (int64_t i = 0; i < 300 && r->status == RFR_OK; i++) {
    const int64_t own = i * 10 + r->number;
    r->status = rfr_comm_all_gather(r->comm, &own, all, 1, RFR_I64);
    for (int k = 0; k < r->size; k++)
      if (r->status == RFR_OK && all[k] != i * 10 + k) r->status = RFR_INTERNAL;
  }
}

static void test_many_calls(void **state) {
  rank ranks[MOST_RANKS];
  (void)state;
  run_ranks(3, 0, moves, NULL, ranks);
  for (int r = 0; r < 3; r++) assert_int_equal(ranks[r].status, RFR_OK);
}

/* ---- failures ---- */

enum { ABORTS, LEAVES, DIFFERS, LATE };

static void part_ways(rank *r) {
  const int how = *(const int *)r->job;
  float x[4] = {1, 2, 3, 4}, y[4 * MOST_RANKS];
  r->status = rfr_comm_all_reduce(r->comm, x, y, 4, RFR_F32);
  if (r->status != RFR_OK) return;
  if (r->number == 1 && how == ABORTS) rfr_comm_abort(r->comm);
  if (r->number == 1 && how == LEAVES) {
    rfr_comm_destroy(r->comm);
    r->comm = NULL;
    return;
  }
  if (r->number == 1 && how == LATE) {
    usleep(400000);
    r->status = rfr_comm_all_gather(r->comm, x, y, 4, RFR_F32);
    return;
  }
  r->status = rfr_comm_all_gather(r->comm, x, y, r->number == 1 && how == DIFFERS ? 2 : 4, RFR_F32);
  if (r->status == RFR_OK) return;
  r->status = rfr_comm_all_reduce(r->comm, x, y, 4, RFR_F32); /* later calls fail as well */
}

static void test_failures(void **state) {
  static const char *const says[] = {"rank 1 has aborted", "rank 1 has left",
                                     "rank 0 calls all_gather of 4 f32, rank 1 all_gather of 2 f32",
                                     "rank 1 did not arrive within 0.1 seconds"};
  rank ranks[MOST_RANKS];
  (void)state;
  for (int how = ABORTS; how <= LATE; how++) {
    run_ranks(3, how == LATE ? 0.1 : 0, part_ways, &how, ranks);
    for (int r = 0; r < 3; r++) {
      if (r == 1 && how == LEAVES) continue;
      assert_int_equal(ranks[r].status, how == DIFFERS ? RFR_MISMATCH : RFR_IO);
      assert_string_equal(ranks[r].slug, how == DIFFERS ? "dist.mismatch" : "dist.peer");
      assert_non_null(strstr(ranks[r].message, says[how]));
    }
  }
}

/* ---- ranks that work between two calls ---- */

/* Rank 1 works for longer than the timeout, or hangs, before the others' next call. */
static void work_for_long(rank *r) {
  const bool works = *(const bool *)r->job;
  float x[4] = {1, 2, 3, 4}, y[4 * MOST_RANKS];
  rfr_ctx *own;
  OK(rfr_ctx_create(NULL, &own));
  r->status = rfi_comm_watch(own, r->comm);
  if (r->status == RFR_OK && r->number == 1)
    for (int i = 0; i < 100; i++) {
      usleep(50000);
      if (works) rfi_ctx_advance(own);
    }
  if (r->status == RFR_OK) r->status = rfr_comm_all_gather(r->comm, x, y, 4, RFR_F32);
  const rfr_status left = rfi_comm_unwatch(r->comm);
  if (r->status == RFR_OK) r->status = left;
  if (r->status == RFR_OK) r->status = rfr_comm_all_gather(r->comm, x, y, 4, RFR_F32);
  rfr_ctx_destroy(own);
}

static void test_watch(void **state) {
  rank ranks[MOST_RANKS];
  (void)state;
  for (int works = 1; works >= 0; works--) {
    const bool job = works;
    run_ranks(3, 3, work_for_long, &job, ranks);
    for (int r = 0; r < 3; r++) {
      assert_int_equal(ranks[r].status, works ? RFR_OK : RFR_IO);
      if (!works) assert_non_null(strstr(ranks[r].message, "rank 1 did not arrive within 3 seconds"));
    }
  }
}

/* ---- the end ---- */

/* All ranks have finished their work; then rank 1 hangs. */
static void leave(rank *r) {
  rfr_ctx *own;
  OK(rfr_ctx_create(NULL, &own));
  if (*(const bool *)r->job && r->number == 1) usleep(400000);
  r->status = rfr_launch_leave(own, r->comm);
  r->comm = NULL;
  rfr_ctx_destroy(own);
}

static void test_rank_leaves(void **state) {
  rank ranks[MOST_RANKS];
  (void)state;
  for (int late = 0; late <= 1; late++) {
    const bool job = late;
    run_ranks(3, late ? 0.1 : 0, leave, &job, ranks);
    for (int r = 0; r < 3; r++) {
      assert_int_equal(ranks[r].status, late ? RFR_IO : RFR_OK);
      if (late) assert_non_null(strstr(ranks[r].message, "rank 1 did not arrive within 0.1 seconds"));
    }
  }
}

/* ---- messages ---- */

/* Every rank sends three messages to every other rank, and receives those of the last sender first. */
static void exchange_messages(rank *r) {
  int64_t x[3][50] = {{0}};
  for (int to = 0; to < r->size; to++)
    for (int k = 0; k < 3 && to != r->number && r->status == RFR_OK; k++) {
      for (int i = 0; i < 50; i++) x[k][i] = 1000 * r->number + 100 * to + 10 * k + i;
      r->status = rfi_comm_send(r->comm, to, x[k], 8 * (40 + k), NULL);
      memset(x[k], 0, sizeof x[k]); /* it was copied */
    }
  for (int from = r->size - 1; from >= 0; from--)
    for (int k = 0; k < 3 && from != r->number && r->status == RFR_OK; k++) {
      r->status = rfi_comm_receive(r->comm, from, x[0], 8 * (40 + k), NULL);
      for (int i = 0; i < 40 + k && r->status == RFR_OK; i++)
        if (x[0][i] != 1000 * from + 100 * r->number + 10 * k + i) r->status = RFR_INTERNAL;
    }
  if (r->status == RFR_OK) r->status = rfr_comm_all_gather(r->comm, x[0], x[1], 1, RFR_U8);
}

/* Rank 1 makes another call than rank 0 expects, and sends a message that is never received. */
static void fail_message(rank *r) {
  const char *how = r->job;
  char x[8] = "12345";
  if (r->number == 0) {
    r->status = rfi_comm_receive(r->comm, 1, x, 5, NULL);
    return;
  }
  if (strcmp(how, "size") == 0) r->status = rfi_comm_send(r->comm, 0, x, 4, NULL);
  if (strcmp(how, "abort") == 0) rfr_comm_abort(r->comm);
  if (strcmp(how, "late") == 0) usleep(1500000);
}

static void test_messages(void **state) {
  static const struct {
    const char *how, *slug, *message;
  } rows[] = {{"size", "dist.mismatch", "rank 1 sends 4 bytes, rank 0 expects 5"},
              {"abort", "dist.peer", "rank 1 has aborted the communicator"},
              {"late", "dist.peer", "rank 1 has sent no message to rank 0 within 1 seconds"}};
  rank ranks[MOST_RANKS];
  rfr_comm *c[2];
  (void)state;
  for (int size = 2; size <= MOST_RANKS; size++) {
    run_ranks(size, 20, exchange_messages, NULL, ranks);
    for (int i = 0; i < size; i++)
      if (ranks[i].status != RFR_OK) fail_msg("rank %d: %s", i, ranks[i].message);
  }
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    run_ranks(2, 1, fail_message, rows[i].how, ranks);
    assert_string_equal(ranks[0].slug, rows[i].slug);
    if (!strstr(ranks[0].message, rows[i].message)) fail_msg("%s: %s", rows[i].how, ranks[0].message);
  }
  OK(rfr_comm_threads_create(ctx, 2, 1, c));
  assert_int_equal(rfi_comm_send(c[0], 0, "x", 1, NULL), RFR_INVALID);
  assert_int_equal(rfi_comm_send(c[0], 2, "x", 1, NULL), RFR_INVALID);
  assert_int_equal(rfi_comm_receive(c[0], 1, ranks, 0, NULL), RFR_INVALID);
  OK(rfi_comm_send(c[0], 1, "x", 1, NULL)); /* freed with the communicator */
  rfr_comm_destroy(c[0]);
  rfr_comm_destroy(c[1]);
}

static void test_arguments(void **state) {
  rfr_comm *c[2];
  float x[2] = {1, 2}, y[2];
  (void)state;
  assert_int_equal(rfr_comm_threads_create(ctx, 0, 0, c), RFR_INVALID);
  assert_int_equal(rfr_comm_threads_create(ctx, 2, -1, c), RFR_INVALID);
  assert_int_equal(rfr_comm_threads_create(NULL, 2, 0, c), RFR_INVALID);
  rfr_ctx_fail_alloc(ctx, 1);
  assert_int_equal(rfr_comm_threads_create(ctx, 1, 0, c), RFR_NO_MEMORY);
  assert_null(c[0]);
  OK(rfr_comm_threads_create(ctx, 1, 0, c));
  assert_int_equal(rfr_comm_size(c[0]), 1);
  assert_int_equal(rfr_comm_rank(c[0]), 0);
  assert_int_equal(rfr_comm_size(NULL), 0);
  assert_int_equal(rfr_comm_rank(NULL), -1);
  assert_int_equal(rfr_comm_all_reduce(NULL, x, y, 2, RFR_F32), RFR_INVALID);
  assert_int_equal(rfr_comm_all_reduce(c[0], x, y, -1, RFR_F32), RFR_INVALID);
  assert_int_equal(rfr_comm_all_reduce(c[0], x, NULL, 2, RFR_F32), RFR_INVALID);
  assert_int_equal(rfr_comm_all_reduce(c[0], x, y, 2, RFR_I32), RFR_INVALID);
  assert_int_equal(rfr_comm_all_gather(c[0], x, y, 2, RFR_E2M1), RFR_INVALID);
  assert_int_equal(rfr_comm_all_gather(c[0], x, y, 2, RFR_DTYPE_COUNT), RFR_INVALID);
  assert_int_equal(rfr_comm_all_gather(c[0], x, y, INT64_MAX / 8, RFR_F64), RFR_INVALID);
  OK(rfr_comm_all_gather(c[0], x, y, 2, RFR_I32));
  assert_memory_equal(x, y, sizeof x);
  rfr_comm_destroy(c[0]);
  rfr_comm_destroy(NULL);
  rfr_comm_abort(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_values),    rft_context_test(test_many_calls),  rft_context_test(test_failures),
      rft_context_test(test_watch),     rft_context_test(test_rank_leaves), rft_context_test(test_messages),
      rft_context_test(test_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
