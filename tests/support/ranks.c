/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"

typedef struct seat {
  rft_rank_work work;
  void *rank;
  rfr_comm *comm;
  int number;
  char error[256]; /* "": no error */
} seat;

static void *run(void *arg) {
  seat *s = arg;
  rfr_ctx *own;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  rfr_status status = rfr_ctx_create(&o, &own);
  if (status == RFR_OK) status = s->work(s->rank, s->number, s->comm, own);
  if (status != RFR_OK) {
    snprintf(s->error, sizeof s->error, "%s", rfr_last_error()->message);
    if (s->comm) rfr_comm_abort(s->comm);
  }
  rfr_ctx_destroy(own);
  return NULL;
}

void rft_run_ranks(int n, void *array, size_t size, rft_rank_work work) {
  seat seats[RFT_MOST_RANKS] = {0};
  rfr_comm *comm[RFT_MOST_RANKS] = {NULL};
  pthread_t thread[RFT_MOST_RANKS];
  assert_in_range(n, 1, RFT_MOST_RANKS);
  if (n > 1) OK(rfr_comm_threads_create(ctx, n, 60, comm));
  for (int i = 0; i < n; i++) {
    seats[i] = (seat){.work = work, .rank = (char *)array + (size_t)i * size, .comm = comm[i], .number = i};
    assert_int_equal(pthread_create(&thread[i], NULL, run, &seats[i]), 0);
  }
  for (int i = 0; i < n; i++) pthread_join(thread[i], NULL);
  for (int i = 0; i < n; i++) rfr_comm_destroy(comm[i]);
  for (int i = 0; i < n; i++)
    if (seats[i].error[0]) fail_msg("rank %d of %d: %s", i, n, seats[i].error);
}

float rft_term(int rank, int64_t i) { return (float)((i * 37 + rank * 1009) % 1013) / 7.0f - 60.0f; }

void rft_put(rfr_dtype dtype, void *to, int64_t i, float x) {
  const uint32_t bits = rfr_float_to_bits(dtype, x);
  memcpy((char *)to + i * (rfr_dtype_bits(dtype) / 8), &bits, (size_t)rfr_dtype_bits(dtype) / 8);
}

void rft_put_sum(rfr_dtype dtype, void *to, int64_t at, int64_t i, int size) {
  float total = rfr_float_from_bits(dtype, rfr_float_to_bits(dtype, rft_term(0, i)));
  for (int r = 1; r < size; r++) total += rfr_float_from_bits(dtype, rfr_float_to_bits(dtype, rft_term(r, i)));
  rft_put(dtype, to, at, total);
}
