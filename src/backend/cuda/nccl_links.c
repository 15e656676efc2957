/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages between two GPUs. NCCL runs the calls of a communicator one after another, and a send ends only when it is
 * received. So each direction of a pair is a link with its own communicator and stream: a message waits only for the
 * work of its rank that was enqueued before it, for earlier messages of its link, and for its receiver. A compute
 * stream waits for a message that it receives, and for one that it has sent only where the sent memory is written
 * again. rfi_schedule_check_waits verifies that these rules cause no deadlock among the ranks of a schedule.
 *
 * NCCL connects two ranks at their first message, and both calls wait for that; so each link sends one when it is made.
 *
 * The sums of a group of ranks have a separate communicator, and are enqueued on the caller's stream.
 */
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/nccl_comm.h"

#define CUDA(call, what) RFI_TRY(rfi_cuda_check(call, what))

/* A rank's peers, and the ids of the links to them. */
typedef struct invitation {
  int n, peer[RFI_MOST_PEERS];
  nccl_unique_id id[RFI_MOST_PEERS];
} invitation;
_Static_assert(sizeof(invitation) <= RFI_EXCHANGE_BYTES, "one exchange");

static int peer_index(const invitation *x, int rank) {
  int i = 0;
  while (i < x->n && x->peer[i] != rank) i++;
  return i < x->n ? i : -1;
}

/* ---- a message ---- */

static rfr_status transfer(gpu_comm *c, rfi_link *l, void *data, size_t n) {
  pthread_mutex_lock(&c->mutex);
  rfr_status s = RFR_OK;
  if (!c->nccl) s = rfi_nccl_aborted(c);
  else if (l->outgoing) s = rfi_nccl_check(c, c->f.Send(data, n, NCCL_UINT8, 1, l->nccl, l->stream), "a message");
  else s = rfi_nccl_check(c, c->f.Recv(data, n, NCCL_UINT8, 0, l->nccl, l->stream), "a message");
  pthread_mutex_unlock(&c->mutex);
  return s;
}

static rfr_status enqueue_message(gpu_comm *c, rfi_link *l, void *data, int64_t bytes, cudaStream_t stream) {
  CUDA(cudaEventRecord(l->ready, stream), "recording an event");
  CUDA(cudaStreamWaitEvent(l->stream, l->ready, 0), "waiting for an event");
  RFI_TRY(transfer(c, l, data, (size_t)bytes));
  cudaEvent_t done = l->done[l->n++ % RFI_LINK_MARKS];
  CUDA(cudaEventRecord(done, l->stream), "recording an event");
  return l->outgoing ? RFR_OK : rfi_cuda_check(cudaStreamWaitEvent(stream, done, 0), "waiting for an event");
}

/* A message from or to host memory; it goes through GPU memory and is synchronous. */
static rfr_status pass_host(gpu_comm *c, rfi_link *l, void *data, size_t n) {
  void *memory;
  CUDA(cudaMalloc(&memory, n), "allocating memory");
  rfr_status s = RFR_OK;
  if (l->outgoing) s = rfi_cuda_check(cudaMemcpy(memory, data, n, cudaMemcpyHostToDevice), "writing memory");
  if (s == RFR_OK) s = transfer(c, l, memory, n);
  if (s == RFR_OK) s = rfi_nccl_wait(&c->comm, l->stream, "a message");
  if (s == RFR_OK && !l->outgoing)
    s = rfi_cuda_check(cudaMemcpy(data, memory, n, cudaMemcpyDeviceToHost), "reading memory");
  cudaFree(memory);
  return s;
}

static rfi_link *find(const gpu_comm *c, int peer, bool outgoing) {
  for (int i = 0; i < c->n_links; i++)
    if (c->link[i].peer == peer && c->link[i].outgoing == outgoing) return &c->link[i];
  return NULL;
}

static rfr_status pass(rfr_comm *comm, int peer, bool outgoing, void *data, int64_t bytes, void *stream) {
  gpu_comm *c = (gpu_comm *)comm;
  rfi_link *l = find(c, peer, outgoing);
  int before;
  if (!l) return c->core->fail(RFI_E_INTERNAL, "ranks %d and %d are not connected", comm->rank, peer);
  CUDA(cudaGetDevice(&before), "asking for the current device");
  CUDA(cudaSetDevice(c->ordinal), "choosing the device");
  const rfr_status s = stream ? enqueue_message(c, l, data, bytes, stream) : pass_host(c, l, data, (size_t)bytes);
  cudaSetDevice(before);
  return s;
}

rfr_status rfi_links_send(rfr_comm *comm, int to, const void *data, int64_t bytes, void *stream) {
  return pass(comm, to, true, (void *)(uintptr_t)data, bytes, stream); /* a send does not write `data` */
}

rfr_status rfi_links_receive(rfr_comm *comm, int from, void *data, int64_t bytes, void *stream) {
  return pass(comm, from, false, data, bytes, stream);
}

int64_t rfi_links_sent(const rfr_comm *comm, int to) {
  const rfi_link *l = find((const gpu_comm *)comm, to, true);
  return l ? l->n : 0;
}

/* The event may have been reused by a later message, which is after it on the stream. */
rfr_status rfi_links_wait_sent(rfr_comm *comm, int to, int64_t number, void *stream) {
  const rfi_link *l = find((const gpu_comm *)comm, to, true);
  if (!l || number < 1) return RFR_OK;
  return rfi_cuda_check(cudaStreamWaitEvent(stream, l->done[(number - 1) % RFI_LINK_MARKS], 0), "waiting for an event");
}

/* ---- connecting ---- */

static rfr_status make_stream(rfi_link *l) {
  int least, most;
  CUDA(cudaDeviceGetStreamPriorityRange(&least, &most), "reading the device");
  CUDA(cudaStreamCreateWithPriority(&l->stream, cudaStreamNonBlocking, most), "making a stream");
  CUDA(cudaEventCreateWithFlags(&l->ready, cudaEventDisableTiming), "making an event");
  for (int i = 0; i < RFI_LINK_MARKS; i++)
    CUDA(cudaEventCreateWithFlags(&l->done[i], cudaEventDisableTiming), "making an event");
  return RFR_OK;
}

/* The link is listed as soon as it has its communicator, because an abort must end that. */
static rfr_status open_link(gpu_comm *c, int peer, bool outgoing, const nccl_unique_id *id, void *memory) {
  rfi_link *l = &c->link[c->n_links];
  *l = (rfi_link){.peer = peer, .outgoing = outgoing};
  RFI_TRY(rfi_nccl_join(c, id, 2, !outgoing, NULL, &l->nccl));
  pthread_mutex_lock(&c->mutex);
  c->n_links++;
  pthread_mutex_unlock(&c->mutex);
  RFI_TRY(make_stream(l));
  RFI_TRY(transfer(c, l, memory, 1));
  return rfi_nccl_wait(&c->comm, l->stream, "connecting two ranks");
}

/* All ranks open links in the same order, so that ranks do not wait for each other in a cycle. */
static rfr_status open_links(gpu_comm *c, const invitation *all, void *memory) {
  const int rank = c->comm.rank;
  for (int from = 0; from < c->comm.size; from++)
    for (int i = 0; i < all[from].n; i++) {
      const int to = all[from].peer[i];
      if (from == rank) RFI_TRY(open_link(c, to, true, &all[from].id[i], memory));
      else if (to == rank && peer_index(&all[rank], from) >= 0)
        RFI_TRY(open_link(c, from, false, &all[from].id[i], memory));
    }
  return RFR_OK;
}

/* Both ranks of a pair must have listed each other. */
static rfr_status check_pairs(const gpu_comm *c, const invitation *all) {
  for (int from = 0; from < c->comm.size; from++)
    for (int i = 0; i < all[from].n; i++)
      if (peer_index(&all[all[from].peer[i]], from) < 0)
        return c->core->fail(RFI_E_INTERNAL, "rank %d has messages with rank %d, but not vice versa", from,
                             all[from].peer[i]);
  return RFR_OK;
}

static rfr_status connect(gpu_comm *c, const int *peers, int n, invitation *all) {
  invitation own = {.n = n};
  void *memory;
  for (int i = 0; i < n; i++) {
    own.peer[i] = peers[i];
    RFI_TRY(rfi_nccl_check(c, c->f.GetUniqueId(&own.id[i]), "making an id"));
  }
  RFI_TRY(c->comm.table->exchange(&c->comm, &own, sizeof own, all));
  RFI_TRY(check_pairs(c, all));
  RFI_TRY(c->core->alloc(c->ctx, sizeof *c->link * (2 * (size_t)n + 1), (void **)&c->link)); /* and one for a group */
  CUDA(cudaMalloc(&memory, 16), "allocating memory");
  const rfr_status s = open_links(c, all, memory);
  cudaFree(memory);
  return s;
}

rfr_status rfi_links_connect(rfr_comm *comm, const int *peers, int n) {
  gpu_comm *c = (gpu_comm *)comm;
  invitation *all;
  int before;
  if (c->link) return RFR_OK;
  RFI_TRY(c->core->alloc(c->ctx, sizeof *all * (size_t)comm->size, (void **)&all));
  rfr_status s = rfi_cuda_check(cudaGetDevice(&before), "asking for the current device");
  if (s == RFR_OK) s = rfi_cuda_check(cudaSetDevice(c->ordinal), "choosing the device");
  if (s == RFR_OK) {
    s = connect(c, peers, n, all);
    cudaSetDevice(before);
  }
  c->core->free(c->ctx, all);
  return s;
}

/* ---- the sums of a group ---- */

rfr_status rfi_links_reduce_group(rfr_comm *comm, const rfi_collective *what, int n, void *stream) {
  gpu_comm *c = (gpu_comm *)comm;
  const rfi_link *group = find(c, RFI_LINK_GROUP, true);
  if (!group) return c->core->fail(RFI_E_INTERNAL, "rank %d has no group", comm->rank);
  return rfi_nccl_launch(c, group, what, n, stream);
}

/* Runs one sum, which connects the ranks, so that no step waits for the connection. */
static rfr_status try_group(gpu_comm *c, const rfi_link *group) {
  void *memory;
  CUDA(cudaMalloc(&memory, sizeof(float)), "allocating memory");
  const rfi_collective one = {.kind = RFI_ALL_REDUCE, .dtype = RFR_F32, .n = 1, .from = memory, .to = memory};
  rfr_status s = rfi_cuda_check(cudaMemsetAsync(memory, 0, sizeof(float), c->stream), "filling memory");
  if (s == RFR_OK) s = rfi_nccl_launch(c, group, &one, 1, c->stream);
  if (s == RFR_OK) s = rfi_nccl_wait(&c->comm, c->stream, "connecting a group");
  cudaFree(memory);
  return s;
}

/* connect has allocated a link for it. The id is that of the group's first rank. */
static rfr_status join_group(gpu_comm *c, int first, int size, nccl_unique_id *all) {
  rfi_link *l = &c->link[c->n_links];
  nccl_unique_id own;
  RFI_TRY(rfi_nccl_check(c, c->f.GetUniqueId(&own), "making an id"));
  RFI_TRY(c->comm.table->exchange(&c->comm, &own, sizeof own, all));
  *l = (rfi_link){.peer = RFI_LINK_GROUP, .outgoing = true};
  RFI_TRY(rfi_nccl_join(c, &all[first], size, c->comm.rank - first, NULL, &l->nccl));
  pthread_mutex_lock(&c->mutex);
  c->n_links++;
  pthread_mutex_unlock(&c->mutex);
  return try_group(c, l);
}

rfr_status rfi_links_connect_group(rfr_comm *comm, int first, int size) {
  gpu_comm *c = (gpu_comm *)comm;
  nccl_unique_id *all;
  int before;
  if (!c->link) return c->core->fail(RFI_E_INTERNAL, "a group of rank %d before its links", comm->rank);
  if (find(c, RFI_LINK_GROUP, true)) return RFR_OK;
  RFI_TRY(c->core->alloc(c->ctx, sizeof *all * (size_t)comm->size, (void **)&all));
  rfr_status s = rfi_cuda_check(cudaGetDevice(&before), "asking for the current device");
  if (s == RFR_OK) s = rfi_cuda_check(cudaSetDevice(c->ordinal), "choosing the device");
  if (s == RFR_OK) {
    s = join_group(c, first, size, all);
    cudaSetDevice(before);
  }
  c->core->free(c->ctx, all);
  return s;
}

void rfi_links_destroy(gpu_comm *c) {
  for (int i = 0; i < c->n_links; i++) {
    rfi_link *l = &c->link[i];
    for (int k = 0; k < RFI_LINK_MARKS; k++)
      if (l->done[k]) cudaEventDestroy(l->done[k]);
    if (l->ready) cudaEventDestroy(l->ready);
    if (l->stream) cudaStreamDestroy(l->stream);
  }
  c->core->free(c->ctx, c->link);
}
