/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators of MPI: the program starts itself under mpirun. Values are bitwise equal to those of thread ranks. If a
 * rank makes another call, leaves, aborts, or is killed or stopped, every other rank gets an error that names it.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dist/comm.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/thin.h"

enum { MOST = 300007, GOOD = 0, BAD = 1 };

/* ---- a rank ---- */

static bool values(rfr_comm *c, rfr_dtype dtype, int64_t n, bool in_place) {
  const int size = rfr_comm_size(c), rank = rfr_comm_rank(c);
  const size_t each = (size_t)rfr_dtype_bits(dtype) / 8, part = (size_t)n * each, all = part * (size_t)size;
  char *from = calloc(1, all + 4), *to = calloc(1, all + 4), *want = calloc(1, all + 4);
  if (!from || !to || !want) abort();
  char *shard = in_place ? to + (size_t)rank * part : from;
  for (int64_t i = 0; i < n; i++) rft_put(dtype, shard, i, rft_term(rank, i));
  for (int64_t i = 0; i < n * size; i++) rft_put(dtype, want, i, rft_term((int)(i / (n ? n : 1)), i % (n ? n : 1)));
  bool good = rfr_comm_all_gather(c, shard, to, n, dtype) == RFR_OK && memcmp(to, want, all) == 0;
  for (int64_t i = 0; i < n * size; i++) rft_put(dtype, from, i, rft_term(rank, i));
  for (int64_t i = 0; i < n; i++) rft_put_sum(dtype, want, i, rank * n + i, size);
  char *result = in_place ? from + (size_t)rank * part : to;
  good = good && rfr_comm_reduce_scatter(c, from, result, n, dtype) == RFR_OK && memcmp(result, want, part) == 0;
  for (int64_t i = 0; i < n; i++) rft_put(dtype, from, i, rft_term(rank, i)), rft_put_sum(dtype, want, i, i, size);
  result = in_place ? from : to;
  good = good && rfr_comm_all_reduce(c, from, result, n, dtype) == RFR_OK && memcmp(result, want, part) == 0;
  for (int r = 0; r < size; r++)
    for (int64_t i = 0; i < n; i++) {
      rft_put(dtype, from, r * n + i, rft_term(rank, r * n + i));
      rft_put(dtype, want, r * n + i, rft_term(r, rank * n + i));
    }
  good = good && rfr_comm_all_to_all(c, from, to, n, dtype) == RFR_OK && memcmp(to, want, all) == 0;
  free(from), free(to), free(want);
  return good;
}

static bool all_values(rfr_comm *c) {
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  static const int64_t counts[] = {0, 1, 7, 5003, MOST};
  char mine[5] = "rank", *both = malloc((size_t)(5 * rfr_comm_size(c)));
  bool good = both != NULL;
  for (int t = 0; t < 3; t++)
    for (int k = 0; k < 5; k++)
      for (int in_place = 0; in_place < 2; in_place++) good = good && values(c, types[t], counts[k], in_place);
  mine[4] = (char)('0' + rfr_comm_rank(c));
  good = good && rfi_comm_exchange(c, mine, 5, both) == RFR_OK &&
         both[5 * rfr_comm_size(c) - 1] == '0' + rfr_comm_size(c) - 1;
  free(both);
  return good;
}

/* Every rank sends two messages to every other rank, and receives those of the last sender first. */
static bool messages(rfr_comm *c) {
  const int size = rfr_comm_size(c), rank = rfr_comm_rank(c);
  int32_t *x = calloc(MOST, sizeof *x);
  bool good = x != NULL;
  for (int to = 0; to < size; to++)
    for (int k = 0; k < 2 && to != rank; k++) {
      for (int i = 0; i < MOST; i++) x[i] = i + 7 * rank + 3 * to + k;
      good = good && rfi_comm_send(c, to, x, k == 0 ? MOST * 4 : 4, NULL) == RFR_OK;
    }
  for (int from = size - 1; from >= 0; from--)
    for (int k = 0; k < 2 && from != rank; k++) {
      good = good && rfi_comm_receive(c, from, x, k == 0 ? MOST * 4 : 4, NULL) == RFR_OK;
      for (int i = 0; i < (k == 0 ? MOST : 1); i++) good = good && x[i] == i + 7 * from + 3 * rank + k;
    }
  free(x);
  return good;
}

/* The last rank deviates from the others, whose error must contain `says`. */
static bool fails(rfr_comm *c, const char *how, const char *says) {
  const int size = rfr_comm_size(c);
  const bool last = rfr_comm_rank(c) == size - 1;
  float x[4] = {1, 2, 3, 4}, y[64];
  if (rfr_comm_all_reduce(c, x, y, 4, RFR_F32) != RFR_OK) return false;
  if (last && strcmp(how, "kill") == 0) raise(SIGKILL);
  if (last && strcmp(how, "stop") == 0) raise(SIGSTOP);
  if (last && strcmp(how, "abort") == 0) rfr_comm_abort(c);
  if (last && (strcmp(how, "abort") == 0 || strcmp(how, "leave") == 0)) return true;
  if (last && strcmp(how, "chain") == 0) raise(SIGSTOP);
  const rfr_status s = strcmp(how, "chain") == 0 ? rfi_comm_receive(c, rfr_comm_rank(c) + 1, x, sizeof x, NULL)
                                                 : rfr_comm_all_gather(c, x, y, last ? 2 : 4, RFR_F32);
  if (s == RFR_OK || !strstr(rfr_last_error()->message, says)) {
    printf("rank %d: %s\n", rfr_comm_rank(c), s == RFR_OK ? "no error" : rfr_last_error()->message);
    return false;
  }
  if (rfr_comm_rank(c) == 0) printf("reported: %s\n", rfr_last_error()->message);
  fflush(stdout);
  if (rfr_comm_rank(c) != 0 && !last) sleep(5); /* mpirun ends the job when a rank exits, so rank 0 must report first */
  return rfr_comm_all_reduce(c, x, y, 4, RFR_F32) != RFR_OK; /* later calls must fail too */
}

static int be_a_rank(const char *how, const char *says) {
  rfr_ctx *own;
  rfr_comm *c;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  const double timeout =
      /* in the other cases no rank waits until the timeout */
      strcmp(how, "stop") == 0 || strcmp(how, "chain") == 0 ? 4 : 60;
  if (rfr_ctx_create(&o, &own) != RFR_OK || rfr_comm_mpi_create(own, timeout, &c) != RFR_OK) {
    printf("%s\n", rfr_last_error()->message);
    return BAD;
  }
  const bool good = strcmp(how, "values") == 0 ? all_values(c) && messages(c) : fails(c, how, says);
  rfr_comm_destroy(c);
  if (strcmp(how, "values") == 0) rfr_ctx_destroy(own); /* otherwise messages may be in flight */
  return good ? GOOD : BAD;
}

/* ---- starting the ranks ---- */

static int start(const char *ranks, const char *how, const char *says, char *out, size_t size) {
  char command[1024];
  snprintf(command, sizeof command,
           "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe --bind-to none "
           "-n %s /proc/%d/exe %s '%s' 2>&1",
           ranks, (int)getpid(), how, says);
  FILE *f = popen(command, "r");
  assert_non_null(f);
  const size_t n = fread(out, 1, size - 1, f);
  out[n] = 0;
  const int status = pclose(f);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_values(void **state) {
  char out[4096];
  (void)state;
  for (int i = 0; i < 3; i++) {
    rft_find_leaks(i == 1);
    if (start((const char *[]){"1", "2", "4"}[i], "values", "", out, sizeof out) != GOOD) fail_msg("%s", out);
  }
}

static void test_failures(void **state) {
  static const struct {
    const char *how, *says;
  } rows[] = {{"differ", "rank 0 calls all_gather of 4 f32, rank 2 all_gather of 2 f32"},
              {"leave", "rank 2 has left the communicator"},
              {"abort", "rank 2 has aborted the communicator"},
              {"stop", "rank 2 did not arrive within 4 seconds"},
              {"chain", "rank 2 did not arrive within 4 seconds"}}; /* rank 0 waits for 1, which waits for 2 */
  char out[4096];
  (void)state;
  rft_find_leaks(false); /* messages may be in flight at the end */
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    start("3", rows[i].how, rows[i].says, out, sizeof out);
    if (!strstr(out, "reported: ") || strstr(out, "no error")) fail_msg("%s: %s", rows[i].how, out);
  }
  assert_int_not_equal(start("3", "kill", "", out, sizeof out), GOOD); /* the launcher ends the others */
}

static void test_arguments(void **state) {
  rfr_comm *c;
  (void)state;
  assert_int_equal(rfr_comm_mpi_create(NULL, 1, &c), RFR_INVALID);
  assert_int_equal(rfr_comm_mpi_create(ctx, -1, &c), RFR_INVALID);
  assert_int_equal(rfr_comm_mpi_create(ctx, 1, NULL), RFR_INVALID);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_values),
      rft_context_test(test_failures),
      rft_context_test(test_arguments),
  };
  if (argc == 3) return be_a_rank(argv[1], argv[2]);
  if (system("mpirun --version >/dev/null 2>&1") != 0) {
    puts("skipped: mpirun is missing (Debian: openmpi-bin)");
    return 77;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
