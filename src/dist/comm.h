/* SPDX-License-Identifier: Apache-2.0
 *
 * The implementation interface of communicators: a rank, a size, and a table of functions. Kernels of collective ops
 * enqueue on their stream; a call without a stream returns when it is done.
 */
#ifndef RFI_COMM_H
#define RFI_COMM_H

#include <stdbool.h>
#include <stdint.h>

#include "refrain/dist.h"

typedef enum rfi_collective_kind {
  RFI_ALL_GATHER,
  RFI_REDUCE_SCATTER,
  RFI_ALL_REDUCE,
  RFI_ALL_TO_ALL
} rfi_collective_kind;

typedef struct rfi_collective {
  rfi_collective_kind kind;
  rfr_dtype dtype;
  int64_t n; /* elements of one rank's part; all_to_all sends and receives one part for each rank */
  const void *from;
  void *to;
  /* Of an all_to_all between ranks with memory of the host: elements of each rank's part that are sent and received;
   * the rest of `to` stays as it is. NULL: n */
  const int64_t *sent, *received;
} rfi_collective;

typedef struct rfi_comm_table {
  const char *name;
  bool host; /* the memory is on the host */
  /* All types have whole bytes; sums are of f32, bf16 or f16. `stream` NULL: the call waits until it is done. */
  rfr_status (*run)(rfr_comm *c, const rfi_collective *what, void *stream);
  /* n collectives of which none reads another's result, by one launch on a stream; NULL for memory of the host. */
  rfr_status (*run_all)(rfr_comm *c, const rfi_collective *what, int n, void *stream);
  void (*abort)(rfr_comm *c);
  void (*destroy)(rfr_comm *c);
  /* See rfi_comm_exchange; NULL: all_gather does it, since the memory is on the host. */
  rfr_status (*exchange)(rfr_comm *c, const void *mine, int64_t bytes, void *all);
  void (*set_timeout)(rfr_comm *c, double timeout);
  /* See rfi_comm_send. */
  rfr_status (*send)(rfr_comm *c, int to, const void *data, int64_t bytes, void *stream);
  rfr_status (*receive)(rfr_comm *c, int from, void *data, int64_t bytes, void *stream);
  /* See rfi_comm_connect; NULL, as the next two: messages are copied, between any two ranks. */
  rfr_status (*connect)(rfr_comm *c, const int *peers, int n);
  int64_t (*sent)(const rfr_comm *c, int to);
  rfr_status (*wait_sent)(rfr_comm *c, int to, int64_t number, void *stream);
  /* See group.h; NULL, both: sums are made of messages. */
  rfr_status (*connect_group)(rfr_comm *c, int first, int size);
  rfr_status (*reduce_group)(rfr_comm *c, const rfi_collective *what, int n, void *stream);
} rfi_comm_table;

struct rfr_comm { /* the first member of each kind's struct */
  const rfi_comm_table *table;
  int rank, size;
  struct rfi_watch *watch; /* NULL: not watched (watch.h) */
};

static inline int64_t rfi_collective_sent(const rfi_collective *c, int rank) { return c->sent ? c->sent[rank] : c->n; }
static inline int64_t rfi_collective_received(const rfi_collective *c, int rank) {
  return c->received ? c->received[rank] : c->n;
}
static inline const char *rfi_collective_name(rfi_collective_kind kind) {
  static const char *const names[] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"};
  return names[kind];
}
/* For a type of whole bytes; the CUDA module has no rfr_dtype_bits. */
static inline int64_t rfi_collective_element(rfr_dtype dtype) {
  static const unsigned char bits[] = {
#define BITS(e, name, bits, st) bits,
      RFR_DTYPES(BITS)
#undef BITS
  };
  return bits[dtype] / 8;
}
/* Rank r of `size` sums elements [begin(r), begin(r + 1)) of n. */
static inline int64_t rfi_collective_begin(int64_t n, int r, int size) { return n / size * r + n % size * r / size; }
static inline bool rfi_collective_sums(rfr_dtype dtype) {
  return dtype == RFR_F32 || dtype == RFR_BF16 || dtype == RFR_F16;
}

/* In rank order, in f32, rounded once. term(user, r): where the n elements of rank r begin; they may overlap `to`. */
void rfi_collective_sum(rfr_dtype dtype, int terms, const void *(*term)(const void *user, int r), const void *user,
                        int64_t n, void *to);
/* `all` gets the bytes of every rank, rank 0's first, in memory of the host; at most RFI_EXCHANGE_BYTES of each. */
enum { RFI_EXCHANGE_BYTES = 4096 };
rfr_status rfi_comm_exchange(rfr_comm *c, const void *mine, int64_t bytes, void *all);
/* The same, into memory that it allocates; free with rfi_free. NULL after an error. */
rfr_status rfi_comm_collect(rfr_ctx *ctx, rfr_comm *c, const void *mine, int64_t bytes, void **all);
/* Messages between two ranks. Those from one rank to another arrive in the order in which they were sent; the receiver
 * must expect the sent number of bytes.
 *
 * `stream` NULL: memory of the host. The data is copied, so the sender does not wait for the receiver; only between
 * GPUs both wait for each other. With a stream of a GPU: memory of the GPU. A message begins after the work that the
 * stream has when the call is made, and when its receiver has asked for it. Later work of the receiver's stream waits
 * for the message. Later work of the sender's stream does not, and the data must stay unchanged:
 * rfi_comm_wait_sent makes later work wait for the first `number` messages to rank `to`; rfi_comm_sent counts them.
 * Errors: argument; dist.peer; dist.mismatch. */
rfr_status rfi_comm_send(rfr_comm *c, int to, const void *data, int64_t bytes, void *stream);
rfr_status rfi_comm_receive(rfr_comm *c, int from, void *data, int64_t bytes, void *stream);
int64_t rfi_comm_sent(const rfr_comm *c, int to);
rfr_status rfi_comm_wait_sent(rfr_comm *c, int to, int64_t number, void *stream);
/* Before messages between GPUs: all ranks call it at the same time, each with the ranks that it exchanges messages
 * with, at most RFI_MOST_PEERS. Without effect a second time. */
enum { RFI_MOST_PEERS = 30 };
rfr_status rfi_comm_connect(rfr_comm *c, const int *peers, int n);
/* Rank 0's id on every rank, over TCP at the launch's address. */
rfr_status rfi_launch_share(const rfr_launch *launch, void *id, double timeout);

#endif
