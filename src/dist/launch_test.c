/* SPDX-License-Identifier: Apache-2.0
 *
 * The variables of launchers, and NCCL's id over TCP between threads.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dist/comm.h"
#include "support/context.h"

static const char *const names[] = {"OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "WORLD_SIZE",
                                    "RANK",
                                    "LOCAL_RANK",
                                    "PMI_SIZE",
                                    "PMI_RANK",
                                    "SLURM_STEP_NUM_TASKS",
                                    "SLURM_PROCID",
                                    "SLURM_LOCALID",
                                    "MASTER_ADDR",
                                    "MASTER_PORT"};

static void set(const char *assignments) {
  char text[256], *save = NULL;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
  snprintf(text, sizeof text, "%s", assignments);
  for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
    char *equals = strchr(word, '=');
    *equals = 0;
    setenv(word, equals + 1, 1);
  }
}

static void test_variables(void **state) {
  static const struct {
    const char *set, *launcher;
    int rank, ranks, local, port;
  } rows[] = {
      {"", "", 0, 1, 0, 0},
      {"RANK=3", "", 0, 1, 0, 0}, /* other programs also set RANK */
      {"OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1", "Open MPI", 3, 4, 1, 0},
      {"WORLD_SIZE=8 RANK=5 LOCAL_RANK=1 MASTER_ADDR=localhost MASTER_PORT=29500", "torchrun", 5, 8, 1, 29500},
      {"PMI_SIZE=2 PMI_RANK=1", "PMI", 1, 2, 1, 0},
      {"SLURM_STEP_NUM_TASKS=16 SLURM_PROCID=9 SLURM_LOCALID=1", "Slurm", 9, 16, 1, 0},
  };
  static const struct {
    const char *set, *says;
  } wrong[] = {{"WORLD_SIZE=2", "RANK is not set"},
               {"WORLD_SIZE=two RANK=0", "WORLD_SIZE is two"},
               {"WORLD_SIZE=2 RANK=2", "RANK is 2; it must be a number from 0 to 1"},
               {"WORLD_SIZE=2 RANK=1 MASTER_ADDR=here", "MASTER_PORT is not set"}};
  rfr_launch l;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    set(rows[i].set);
    OK(rfr_launch_read(&l));
    assert_string_equal(l.launcher, rows[i].launcher);
    assert_int_equal(l.rank, rows[i].rank);
    assert_int_equal(l.ranks, rows[i].ranks);
    assert_int_equal(l.local_rank, rows[i].local);
    assert_int_equal(l.port, rows[i].port);
  }
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    set(wrong[i].set);
    assert_int_equal(rfr_launch_read(&l), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "dist.launch");
    if (!strstr(rfr_last_error()->message, wrong[i].says)) fail_msg("%s", rfr_last_error()->message);
  }
  set("");
}

typedef struct peer {
  rfr_launch launch;
  char id[RFR_NCCL_ID_BYTES], message[256];
  rfr_status status;
} peer;

static void *share(void *arg) {
  peer *p = arg;
  p->status = rfi_launch_share(&p->launch, p->id, 3);
  if (p->status != RFR_OK) snprintf(p->message, sizeof p->message, "%s", rfr_last_error()->message);
  return NULL;
}

static void share_all(int n, peer *peers, int ranks_of_last) {
  pthread_t thread[8];
  const int port = 20000 + (int)getpid() % 20000;
  for (int r = 0; r < n; r++) {
    peers[r] = (peer){.launch = {.size = sizeof(rfr_launch), .rank = r, .ranks = n, .port = port}};
    strcpy(peers[r].launch.address, "127.0.0.1");
    if (r == n - 1) peers[r].launch.ranks = ranks_of_last;
  }
  memset(peers[0].id, 'x', sizeof peers[0].id);
  for (int r = n - 1; r >= 0; r--) pthread_create(&thread[r], NULL, share, &peers[r]); /* rank 0 joins last */
  for (int r = 0; r < n; r++) pthread_join(thread[r], NULL);
}

static void test_share(void **state) {
  peer peers[4];
  (void)state;
  share_all(4, peers, 4);
  for (int r = 0; r < 4; r++) {
    if (peers[r].status != RFR_OK) fail_msg("rank %d: %s", r, peers[r].message);
    assert_memory_equal(peers[r].id, peers[0].id, sizeof peers[0].id);
  }
  share_all(2, peers, 3);
  assert_string_equal(peers[0].message, "rank 1 was started as one of 3 ranks, rank 0 as one of 2");
  assert_non_null(strstr(peers[1].message, "refused rank 1 of 3"));
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_variables), rft_context_test(test_share)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
