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
  int64_t n; /* elements of one rank's part; all_to_all sends one part to each rank and receives one from each */
  const void *from;
  void *to;
  /* Only for an all_to_all in host memory: the elements that are sent to, and received from, each rank; the rest of
   * `to` stays unchanged. NULL: n for every rank. */
  const int64_t *sent, *received;
} rfi_collective;

/* The least bytes, summed over all ranks, of a collective or group that copy engines run (nccl_copies.c). */
enum { RFI_LEAST_COPIED = 1 << 20 };

typedef struct rfi_comm_table {
  const char *name;
  bool host; /* buffers are in host memory */
  /* Any byte-addressable type can be moved; f32, bf16 and f16 can be summed. `stream` NULL: the call blocks until it
   * is done. */
  rfr_status (*run)(rfr_comm *c, const rfi_collective *what, void *stream);
  /* n independent collectives in one launch on a stream; NULL for host memory. */
  rfr_status (*run_all)(rfr_comm *c, const rfi_collective *what, int n, void *stream);
  void (*abort)(rfr_comm *c);
  void (*destroy)(rfr_comm *c);
  /* See rfi_comm_exchange; NULL: all_gather is used instead, which is possible in host memory. */
  rfr_status (*exchange)(rfr_comm *c, const void *mine, int64_t bytes, void *all);
  void (*set_timeout)(rfr_comm *c, double timeout);
  /* See rfi_comm_send. */
  rfr_status (*send)(rfr_comm *c, int to, const void *data, int64_t bytes, void *stream);
  rfr_status (*receive)(rfr_comm *c, int from, void *data, int64_t bytes, void *stream);
  /* See rfi_comm_connect. This function and the next two are NULL if messages are copied and need no connection. */
  rfr_status (*connect)(rfr_comm *c, const int *peers, int n);
  int64_t (*sent)(const rfr_comm *c, int to);
  rfr_status (*wait_sent)(rfr_comm *c, int to, int64_t number, void *stream);
  /* See group.h; both are NULL if group sums are built from messages. */
  rfr_status (*connect_group)(rfr_comm *c, int first, int size);
  rfr_status (*reduce_group)(rfr_comm *c, const rfi_collective *what, int n, void *stream);
} rfi_comm_table;

struct rfr_comm { /* the first member of the struct of every implementation */
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
/* For a byte-addressable type; the CUDA module has no rfr_dtype_bits. */
static inline int64_t rfi_collective_element(rfr_dtype dtype) {
  static const unsigned char bits[] = {
#define BITS(e, name, bits, st) bits,
      RFR_DTYPES(BITS)
#undef BITS
  };
  return bits[dtype] / 8;
}
/* For n elements over `size` ranks: rank r sums elements [begin(r), begin(r + 1)). */
static inline int64_t rfi_collective_begin(int64_t n, int r, int size) { return n / size * r + n % size * r / size; }
static inline bool rfi_collective_sums(rfr_dtype dtype) {
  return dtype == RFR_F32 || dtype == RFR_BF16 || dtype == RFR_F16;
}

/* Sums in rank order, in f32, and rounds once. term(user, r) returns the n elements of rank r, which may overlap
 * `to`. */
void rfi_collective_sum(rfr_dtype dtype, int terms, const void *(*term)(const void *user, int r), const void *user,
                        int64_t n, void *to);
/* `all` gets the bytes of every rank in rank order, in host memory; at most RFI_EXCHANGE_BYTES per rank. */
enum { RFI_EXCHANGE_BYTES = 4096 };
rfr_status rfi_comm_exchange(rfr_comm *c, const void *mine, int64_t bytes, void *all);
/* The same into allocated memory; free it with rfi_free. Returns NULL after an error. */
rfr_status rfi_comm_collect(rfr_ctx *ctx, rfr_comm *c, const void *mine, int64_t bytes, void **all);
/* Point-to-point messages. Messages from one rank to another arrive in the order of sending; the receiver must expect
 * the number of bytes that was sent.
 *
 * `stream` NULL: the data is in host memory. It is copied, so the sender does not wait for the receiver.
 *
 * With a stream, the data is in GPU memory, and both ranks wait for each other: the transfer starts after the work that
 * is on the sender's stream at the call, and after the receiver's call. Later work on the receiver's stream waits for
 * the transfer. Later work on the sender's stream does not wait, so the data must stay unchanged until
 * rfi_comm_wait_sent, which makes later work wait for the first `number` messages to rank `to`. rfi_comm_sent returns
 * the number of messages so far. Errors: argument; dist.peer; dist.mismatch. */
rfr_status rfi_comm_send(rfr_comm *c, int to, const void *data, int64_t bytes, void *stream);
rfr_status rfi_comm_receive(rfr_comm *c, int from, void *data, int64_t bytes, void *stream);
int64_t rfi_comm_sent(const rfr_comm *c, int to);
rfr_status rfi_comm_wait_sent(rfr_comm *c, int to, int64_t number, void *stream);
/* Must precede messages between GPUs. All ranks call it together, each with its peers, at most RFI_MOST_PEERS. A second
 * call has no effect. */
enum { RFI_MOST_PEERS = 30 };
rfr_status rfi_comm_connect(rfr_comm *c, const int *peers, int n);
/* Sends rank 0's id to every rank, over TCP at the launch's address. */
rfr_status rfi_launch_share(const rfr_launch *launch, void *id, double timeout);

#endif
