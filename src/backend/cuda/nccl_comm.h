/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a rank's handle of a communicator, for nccl.c, nccl_links.c and nccl_copies.c.
 */
#ifndef RFI_NCCL_COMM_H
#define RFI_NCCL_COMM_H

#include <limits.h>
#include <pthread.h>

#include "backend/cuda/nccl.h"
#include "dist/comm.h"

/* Declarations of the functions below from nccl.h, unchanged since 2.10. */
enum { RFI_LINK_MARKS = 64 };
enum { RFI_ENDING_SECONDS = 2 }; /* the work of an aborted communicator ends earlier, unless it is a copy */

typedef struct nccl_unique_id {
  char internal[RFR_NCCL_ID_BYTES];
} nccl_unique_id;
enum { NCCL_UINT8 = 1, NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_BFLOAT16 = 9, NCCL_SUM = 0, NCCL_IN_PROGRESS = 7 };

/* ncclConfig_t of 2.28; later versions accept it. Members that are not set have the value NCCL_UNSET. */
enum { NCCL_MAGIC = (int)0xcafebeef, NCCL_UNSET = INT_MIN, NCCL_ZERO_CTAS = 2, NCCL_SYMMETRIC = 1 };
typedef struct nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking, cluster, least_ctas, most_ctas;
  const char *net;
  int split_share, traffic_class;
  const char *name;
  int collnet, cta_policy, shrink_share, nvls_ctas, channels_per_peer, nvlink_schedule;
} nccl_config;

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

/* For copy engines, from 2.28 on. */
#define COPY_FUNCTIONS(X)                                                                                     \
  X(int, CommInitRankConfig, (void **comm, int size, nccl_unique_id id, int rank, const nccl_config *config)) \
  X(int, AlltoAll, (const void *from, void *to, size_t n, int type, void *comm, void *stream))                \
  X(int, MemAlloc, (void **memory, size_t n))                                                                 \
  X(int, MemFree, (void *memory))                                                                             \
  X(int, CommWindowRegister, (void *comm, void *memory, size_t n, void **window, int flags))                  \
  X(int, CommWindowDeregister, (void *comm, void *window))

typedef struct rfi_nccl_functions {
#define MEMBER(result, name, arguments) result(*name) arguments;
  FUNCTIONS(MEMBER)
  COPY_FUNCTIONS(MEMBER)
#undef MEMBER
  bool copies; /* the library has COPY_FUNCTIONS */
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

/* Memory that the copy engines of other ranks can access once it has a window. */
typedef struct rfi_block {
  struct rfi_block *next;
  char *memory;
  size_t n;
  void *window; /* NULL: not registered yet */
} rfi_block;

enum { RFI_ROOM = 1 << 16 }; /* bytes for connecting the ranks and for exchanges */

typedef struct gpu_comm {
  rfr_comm comm; /* first */
  const rfi_cuda_host *core;
  rfr_ctx *ctx;
  rfi_nccl_functions f;
  int ordinal;
  double timeout;
  cudaStream_t stream;
  char *room;            /* GPU memory, kept: freeing memory waits for all GPUs of the process */
  pthread_mutex_t mutex; /* protects calls into NCCL with `nccl`, and the fields below */
  void *nccl;            /* NULL after an abort */
  void *ending;          /* the value of `nccl` before the abort; NULL: `ender` was not started */
  pthread_t ender;
  rfi_link *link;
  int n_links;
  void *copies;    /* communicator of collectives that are copies (nccl_copies.c); NULL: none, or after an abort */
  bool has_copies; /* collectives of `copies` run without a kernel */
  bool stuck;      /* the GPU or NCCL waits for another rank and cannot be stopped */
  rfi_block *block;
} gpu_comm;

/* nccl.c. Converts an error of NCCL to dist.peer. */
rfr_status rfi_nccl_check(const gpu_comm *c, int e, const char *what);
rfr_status rfi_nccl_aborted(const gpu_comm *c);
rfr_status rfi_nccl_late(const gpu_comm *c, const char *what); /* dist.peer: the timeout has passed */
/* n independent collectives of all ranks, or of a group, in one launch. */
rfr_status rfi_nccl_launch(gpu_comm *c, const rfi_link *group, const rfi_collective *what, int n, void *stream);

/* nccl_timed.c: both calls return within the timeout, if it is above 0. */
/* Initializes a communicator of `size` ranks. `config` NULL: with the default configuration. */
rfr_status rfi_nccl_join(gpu_comm *c, const nccl_unique_id *id, int size, int rank, const nccl_config *config,
                         void **out);
/* Registers a block with the communicator `copies`. After the timeout NCCL may still use the block, so `stuck` is
 * set. */
rfr_status rfi_nccl_register(gpu_comm *c, void *copies, rfi_block *b);

/* nccl_copies.c. Sets `copies` if NCCL can run an all-gather and an all-to-all of all ranks without a kernel. All ranks
 * call it together. A machine without copies is not an error. */
rfr_status rfi_copies_open(gpu_comm *c);
/* Whether a collective is a copy: its operands have windows. */
bool rfi_copies_take(const gpu_comm *c, const rfi_collective *w);
int64_t rfi_copies_bytes(const gpu_comm *c, const rfi_collective *w); /* of all ranks */
int rfi_copies_enqueue(const gpu_comm *c, const rfi_collective *w, void *stream);
void rfi_copies_close(gpu_comm *c);

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
