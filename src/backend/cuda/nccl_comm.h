/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a rank's handle of a communicator, for nccl.c and nccl_links.c.
 */
#ifndef RFI_NCCL_COMM_H
#define RFI_NCCL_COMM_H

#include <pthread.h>

#include "backend/cuda/nccl.h"
#include "dist/comm.h"

/* Declarations of the functions below from nccl.h, unchanged since 2.10. */
enum { RFI_LINK_MARKS = 64 };

typedef struct nccl_unique_id {
  char internal[RFR_NCCL_ID_BYTES];
} nccl_unique_id;
enum { NCCL_UINT8 = 1, NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_BFLOAT16 = 9, NCCL_SUM = 0, NCCL_IN_PROGRESS = 7 };

#define FUNCTIONS(X)                                                                                        \
  X(int, GetVersion, (int *version))                                                                        \
  X(int, GetUniqueId, (nccl_unique_id * id))                                                                \
  X(int, CommInitRank, (void **comm, int size, nccl_unique_id id, int rank))                                \
  X(int, CommGetAsyncError, (void *comm, int *error))                                                       \
  X(int, CommAbort, (void *comm))                                                                           \
  X(int, CommDestroy, (void *comm))                                                                         \
  X(const char *, GetErrorString, (int error))                                                              \
  X(int, AllGather, (const void *from, void *to, size_t n, int type, void *comm, void *stream))             \
  X(int, ReduceScatter, (const void *from, void *to, size_t n, int type, int op, void *comm, void *stream)) \
  X(int, AllReduce, (const void *from, void *to, size_t n, int type, int op, void *comm, void *stream))     \
  X(int, Send, (const void *from, size_t n, int type, int peer, void *comm, void *stream))                  \
  X(int, Recv, (void *to, size_t n, int type, int peer, void *comm, void *stream))                          \
  X(int, GroupStart, (void))                                                                                \
  X(int, GroupEnd, (void))

typedef struct rfi_nccl_functions {
#define MEMBER(result, name, arguments) result(*name) arguments;
  FUNCTIONS(MEMBER)
#undef MEMBER
} rfi_nccl_functions;

/* The messages from one rank to another. Each link has a communicator and a stream of its own, so that messages of
 * different links do not wait for each other. Or the sums of a group of ranks (RFI_LINK_GROUP), which run on the
 * caller's stream. */
enum { RFI_LINK_GROUP = -1 };
typedef struct rfi_link {
  int peer; /* RFI_LINK_GROUP: a group, no peer */
  bool outgoing;
  void *nccl; /* communicator of two ranks (rank 0 sends, rank 1 receives), or of the group */
  cudaStream_t stream;
  cudaEvent_t ready;                /* recorded after the work that the next message waits for */
  cudaEvent_t done[RFI_LINK_MARKS]; /* recorded after message n: element n % RFI_LINK_MARKS */
  int64_t n;                        /* number of messages so far */
} rfi_link;

typedef struct gpu_comm {
  rfr_comm comm; /* first */
  const rfi_cuda_host *core;
  rfr_ctx *ctx;
  rfi_nccl_functions f;
  int ordinal;
  double timeout;
  cudaStream_t stream;
  pthread_mutex_t mutex; /* protects calls into NCCL with `nccl`, and the fields below */
  void *nccl;            /* NULL after an abort */
  void *ending;          /* the value of `nccl` before the abort; NULL: `ender` was not started */
  pthread_t ender;
  rfi_link *link;
  int n_links;
} gpu_comm;

/* nccl.c. Converts an error of NCCL to dist.peer. */
rfr_status rfi_nccl_check(const gpu_comm *c, int e, const char *what);
rfr_status rfi_nccl_aborted(const gpu_comm *c);
/* Initializes a communicator of `size` ranks, within the timeout. */
rfr_status rfi_nccl_join(gpu_comm *c, const nccl_unique_id *id, int size, int rank, void **out);
/* n independent collectives of all ranks, or of a group, in one launch. */
rfr_status rfi_nccl_launch(gpu_comm *c, const rfi_link *group, const rfi_collective *what, int n, void *stream);

/* nccl_links.c: functions of the table, see rfi_comm_send. */
rfr_status rfi_links_connect(rfr_comm *comm, const int *peers, int n);
rfr_status rfi_links_send(rfr_comm *comm, int to, const void *data, int64_t bytes, void *stream);
rfr_status rfi_links_receive(rfr_comm *comm, int from, void *data, int64_t bytes, void *stream);
int64_t rfi_links_sent(const rfr_comm *comm, int to);
rfr_status rfi_links_wait_sent(rfr_comm *comm, int to, int64_t number, void *stream);
rfr_status rfi_links_connect_group(rfr_comm *comm, int first, int size);
rfr_status rfi_links_reduce_group(rfr_comm *comm, const rfi_collective *what, int n, void *stream);
void rfi_links_destroy(gpu_comm *c); /* does not destroy their NCCL communicators */

#endif
