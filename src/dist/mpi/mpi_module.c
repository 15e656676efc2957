/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages over MPI. Only point-to-point calls are used: if a collective does not return, nothing shows which rank is
 * missing.
 */
#include "dist/mpi/mpi_module.h"

#include <limits.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

enum { TAG = 1, MESSAGE_TAG = 2, SEND = 0, RECEIVE = 1 };

typedef struct link {
  MPI_Comm comm;
  bool started;               /* this module has started MPI */
  MPI_Request (*requests)[2]; /* per peer */
} link;

static char why[MPI_MAX_ERROR_STRING];

static const char *reason(int error) {
  int n = 0;
  if (error == MPI_SUCCESS) return NULL;
  if (MPI_Error_string(error, why, &n) != MPI_SUCCESS || n == 0) strcpy(why, "unknown error");
  return why;
}

/* Open MPI terminates a process that srun has started without PMIx, or without the PMI that it was built for. */
static bool lacks_pmi(void) {
#ifdef OPEN_MPI
  static const char *const names[] = {"PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_SIZE"};
  if (!getenv("SLURM_STEP_NUM_TASKS")) return false;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (getenv(names[i])) return false;
  return true;
#else
  return false;
#endif
}

static const char *start_mpi(bool *started) {
  int is = 0, was = 0, level;
  MPI_Finalized(&was);
  if (was) return "MPI has ended in this process and cannot start again";
  MPI_Initialized(&is);
  *started = !is;
  if (!is && lacks_pmi()) return "srun has started this process without PMIx; give srun --mpi=pmix";
  return is ? NULL : reason(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level));
}

static const char *open_link(void **out, int *rank, int *size) {
  bool started;
  *out = NULL;
  const char *wrong = start_mpi(&started);
  if (wrong) return wrong;
  link *l = calloc(1, sizeof *l);
  if (!l) return "no memory";
  l->started = started;
  l->comm = MPI_COMM_NULL;
  wrong = reason(MPI_Comm_dup(MPI_COMM_WORLD, &l->comm));
  if (!wrong) wrong = reason(MPI_Comm_set_errhandler(l->comm, MPI_ERRORS_RETURN));
  if (!wrong) wrong = reason(MPI_Comm_rank(l->comm, rank));
  if (!wrong) wrong = reason(MPI_Comm_size(l->comm, size));
  if (!wrong && !(l->requests = calloc((size_t)*size, sizeof *l->requests))) wrong = "no memory";
  if (wrong) {
    free(l);
    return wrong;
  }
  for (int r = 0; r < *size; r++) l->requests[r][SEND] = l->requests[r][RECEIVE] = MPI_REQUEST_NULL;
  *out = l;
  return NULL;
}

static const char *start(void *user, int peer, const void *to, size_t to_bytes, void *from, size_t from_bytes) {
  link *l = user;
  const char *wrong = to_bytes > INT_MAX || from_bytes > INT_MAX ? "the message is too long" : NULL;
  if (!wrong && from_bytes > 0)
    wrong = reason(MPI_Irecv(from, (int)from_bytes, MPI_BYTE, peer, TAG, l->comm, &l->requests[peer][RECEIVE]));
  if (!wrong && to_bytes > 0)
    wrong = reason(MPI_Isend(to, (int)to_bytes, MPI_BYTE, peer, TAG, l->comm, &l->requests[peer][SEND]));
  return wrong;
}

static const char *test(void *user, int peer, bool *done) {
  link *l = user;
  int all = 0;
  const int error = MPI_Testall(2, l->requests[peer], &all, MPI_STATUSES_IGNORE);
  *done = error == MPI_SUCCESS && all;
  return reason(error);
}

static const char *start_one(link *l, int peer, const void *from, void *to, size_t bytes, void **out) {
  MPI_Request *r = malloc(sizeof *r);
  *out = NULL;
  if (!r) return "no memory";
  const char *wrong = bytes > INT_MAX ? "the message is too long"
                      : from          ? reason(MPI_Isend(from, (int)bytes, MPI_BYTE, peer, MESSAGE_TAG, l->comm, r))
                                      : reason(MPI_Irecv(to, (int)bytes, MPI_BYTE, peer, MESSAGE_TAG, l->comm, r));
  if (wrong) free(r);
  else *out = r;
  return wrong;
}

static const char *send_one(void *user, int peer, const void *data, size_t bytes, void **request) {
  return start_one(user, peer, data, NULL, bytes, request);
}

static const char *receive_one(void *user, int peer, void *data, size_t bytes, void **request) {
  return start_one(user, peer, NULL, data, bytes, request);
}

static const char *test_one(void *user, void **request) {
  int done = 0;
  (void)user;
  const int error = MPI_Test(*request, &done, MPI_STATUS_IGNORE);
  if (error == MPI_SUCCESS && !done) return NULL;
  free(*request);
  *request = NULL;
  return reason(error);
}

static void close_link(void *user, bool all) {
  link *l = user;
  if (all) MPI_Comm_free(&l->comm);
  if (all && l->started) MPI_Finalize();
  if (!all) return; /* MPI may still write into the requests */
  free(l->requests);
  free(l);
}

__attribute__((visibility("default"))) const rfi_mpi_module *rfi_mpi_module_get(void);
const rfi_mpi_module *rfi_mpi_module_get(void) {
  static const rfi_mpi_module module = {RFI_MPI_ABI, open_link,   start,    test,
                                        send_one,    receive_one, test_one, close_link};
  return &module;
}
