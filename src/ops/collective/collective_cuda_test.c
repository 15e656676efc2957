/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of the exchanges and sums of reduce-scatters by copy engines, without a GPU: collective_cuda.c with a
 * substituted communicator and sum.
 */
#include "ops/collective/collective_cuda.c"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 2, N = 4, CALLS = 3 };
static char done[256]; /* what ran: e and the numbers of the exchanges, s and the number of the sum */
/* one array, so that parts can overlap inputs and other parts */
static float memory[2 * CALLS][RANKS * N], result[CALLS][N];
static float (*const input)[RANKS * N] = memory, (*const parts)[RANKS * N] = memory + CALLS;

static rfr_status exchange(rfr_comm *comm, const rfi_collective *what, int n, void *stream) {
  (void)comm, (void)stream;
  strcat(done, " e");
  for (int i = 0; i < n; i++) {
    assert_int_equal(what[i].n, N);
    snprintf(done + strlen(done), 8, "%d", (int)(((const float *)what[i].from - input[0]) / (RANKS * N)));
  }
  return RFR_OK;
}
rfr_status rfi_collective_sum_cuda(rfr_dtype dtype, int ranks, const void *from, int64_t n, void *to, void *stream) {
  (void)dtype, (void)from, (void)stream;
  assert_int_equal(ranks, RANKS);
  assert_int_equal(n, N);
  snprintf(done + strlen(done), 8, " s%d", (int)(((float *)to - result[0]) / N));
  return RFR_OK;
}
rfr_status rfi_cuda_check(cudaError_t e, const char *what) {
  (void)e, (void)what;
  return RFR_OK;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)to, (void)from, (void)n, (void)kind, (void)stream;
  return cudaSuccess;
}

/* The workspace of call i begins at row place[i] of parts; -1: its result is not needed. Without `place` NCCL's kernels
 * run, and the result of call 1 is where the input of call 0 is. */
static void check(const double place[CALLS], const char *expected) {
  static const rfi_comm_table table = {.run_all = exchange};
  rfr_comm comm = {.table = &table, .size = RANKS};
  const rfr_attr ranks = {.i = RANKS};
  rfr_arg in[CALLS], out[CALLS];
  rfr_call call[CALLS];
  const rfr_call *calls[CALLS];
  for (int i = 0; i < CALLS; i++) {
    const double at = place ? place[i] : 0;
    in[i] = (rfr_arg){.data = input[i], .type = {.dtype = RFR_F32, .rank = 1, .shape = {RANKS * N}}};
    float *const to = at == -1 ? NULL : place || i != 1 ? result[i] : input[0];
    out[i] = (rfr_arg){.data = to, .type = {.dtype = RFR_F32, .rank = 1, .shape = {N}}};
    call[i] = (rfr_call){.n_in = 1,
                         .n_out = 1,
                         .in = &in[i],
                         .out = &out[i],
                         .attr = &ranks,
                         .library = &comm,
                         .workspace = place ? parts[0] + (int)((at == -1 ? i : at) * RANKS * N) : NULL};
    calls[i] = &call[i];
  }
  done[0] = 0;
  assert_int_equal(RFI_CUDA(reduce_scatter).run_all(calls, CALLS), RFR_OK);
  assert_string_equal(done, expected);
}

static void test_order(void **state) {
  (void)state;
  check((double[]){0, 1, 2}, " e012 s0 s1 s2");
  /* a plan without a side stream: ops share a workspace, or a workspace is where an earlier input was */
  check((double[]){0, 0, 1}, " e0 s0 e12 s1 s2");
  check((double[]){1, 0, 1}, " e01 s0 s1 e2 s2");
  check((double[]){0, 0.75, 2}, " e0 s0 e12 s1 s2");
  check((double[]){0, -CALLS, 2}, " e0 s0 e12 s1 s2");
  check((double[]){0, -1, 2}, " e0 s0 e2 s2");
  check(NULL, " e0 e12");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_order)};
  return cmocka_run_group_tests_name("collective_cuda", tests, NULL, NULL);
}
