/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives by copy engines. NCCL's kernels take multiprocessors and power from concurrent GEMMs; a copy engine takes
 * neither. NCCL runs an all-gather or all-to-all without a kernel if its communicator has the policy of zero
 * CTAs, all ranks are GPUs of one host that access each other's memory, and the operands lie in windows: memory of
 * ncclMemAlloc that all ranks have registered, at the same offset on every rank.
 *
 * NCCL does not report how it runs a collective. So the ranks capture both collectives when the communicator is
 * created, and use copies only if no rank finds a kernel in its graph. The memory and the second communicator
 * stay allocated until the first is destroyed, even without copies: a rank must not free memory between collectives
 * (nccl.c). NCCL_CTA_POLICY=0 turns copies off, and then there is no second communicator.
 *
 * The windows belong to a separate communicator. It runs only collectives of programs, and only if all ranks have
 * compared the operands, because a wrong offset would overwrite memory of another rank. All other collectives are
 * kernels of the first communicator.
 *
 * A rank waits for the other ranks before and after a copy. Small collectives, with less than RFI_LEAST_COPIED bytes in
 * a group, are faster as kernels: with copies a step of small.yaml takes 2.9 instead of 0.8 ms on two H200.
 *
 * These waits are on the GPU, where an abort cannot end them. If a wait is still in progress after an abort, the memory
 * of the programs and the communicator stay allocated (rfi_nccl_stuck).
 */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/nccl_comm.h"
#include "backend/cuda/node_type.h"

/* ---- memory ---- */

bool rfi_nccl_copies(const rfr_comm *comm) { return ((const gpu_comm *)comm)->has_copies; }

bool rfi_nccl_alloc(rfr_comm *comm, size_t bytes, void **out) {
  gpu_comm *c = (gpu_comm *)comm;
  rfi_block *b;
  *out = NULL;
  if (c->core->alloc(c->ctx, sizeof *b, (void **)&b) != RFR_OK) return false;
  if (c->f.MemAlloc(out, bytes) != 0) {
    c->core->free(c->ctx, b);
    *out = NULL;
    return false;
  }
  pthread_mutex_lock(&c->mutex);
  *b = (rfi_block){.next = c->block, .memory = *out, .n = bytes};
  c->block = b;
  pthread_mutex_unlock(&c->mutex);
  return true;
}

bool rfi_nccl_free(rfr_comm *comm, void *memory) {
  gpu_comm *c = (gpu_comm *)comm;
  pthread_mutex_lock(&c->mutex);
  rfi_block **at = &c->block;
  while (*at && (*at)->memory != memory) at = &(*at)->next;
  rfi_block *b = *at;
  if (b) *at = b->next;
  if (b && b->window && c->copies) c->f.CommWindowDeregister(c->copies, b->window);
  pthread_mutex_unlock(&c->mutex);
  if (!b) return false;
  c->f.MemFree(memory);
  c->core->free(c->ctx, b);
  return true;
}

static rfi_block *block_of(const gpu_comm *c, const void *data, size_t n) {
  rfi_block *b = c->block;
  while (b && !((const char *)data >= b->memory && n <= b->n && (size_t)((const char *)data - b->memory) <= b->n - n))
    b = b->next;
  return b;
}

/* ---- a collective ---- */

static size_t part_bytes(const rfi_collective *w) { return (size_t)(w->n * rfi_collective_element(w->dtype)); }
static size_t all_bytes(const gpu_comm *c, const rfi_collective *w) { return part_bytes(w) * (size_t)c->comm.size; }
static size_t sent_bytes(const gpu_comm *c, const rfi_collective *w) {
  return w->kind == RFI_ALL_GATHER ? part_bytes(w) : all_bytes(c, w);
}

int64_t rfi_copies_bytes(const gpu_comm *c, const rfi_collective *w) { return (int64_t)all_bytes(c, w); }

bool rfi_copies_take(const gpu_comm *c, const rfi_collective *w) {
  if (!c->copies || (w->kind != RFI_ALL_GATHER && w->kind != RFI_ALL_TO_ALL)) return false;
  const rfi_block *from = block_of(c, w->from, sent_bytes(c, w)), *to = block_of(c, w->to, all_bytes(c, w));
  return from && to && from->window && to->window;
}

int rfi_copies_enqueue(const gpu_comm *c, const rfi_collective *w, void *stream) {
  return w->kind == RFI_ALL_GATHER ? c->f.AllGather(w->from, w->to, part_bytes(w), NCCL_UINT8, c->copies, stream)
                                   : c->f.AlltoAll(w->from, w->to, part_bytes(w), NCCL_UINT8, c->copies, stream);
}

/* ---- windows ---- */

enum { MOST_BLOCKS = 16 };

/* The locations of the operands of some collectives, as a hash that ranks compare. It has the block of each operand,
 * numbered in the order of first use, and the operand's offset in the block. */
typedef struct places {
  uint64_t hash;
  int64_t n;
  rfi_block *block[MOST_BLOCKS];
} places;

static void hash_number(places *p, int64_t x) {
  for (int i = 0; i < 8; i++) p->hash = (p->hash ^ (uint64_t)(x >> 8 * i & 255)) * 1099511628211u; /* FNV-1a */
}

static bool add_operand(const gpu_comm *c, places *p, const void *data, size_t n) {
  rfi_block *b = block_of(c, data, n);
  int64_t i = 0;
  if (!b) return hash_number(p, -1), true;
  while (i < p->n && p->block[i] != b) i++;
  if (i == MOST_BLOCKS) return false;
  if (i == p->n) p->block[p->n++] = b, hash_number(p, (int64_t)b->n), hash_number(p, b->window != NULL);
  hash_number(p, i);
  hash_number(p, (const char *)data - b->memory);
  return true;
}

static rfr_status find_places(const gpu_comm *c, const rfi_collective *what, int n, places *p) {
  bool fits = true;
  *p = (places){.hash = 14695981039346656037u};
  for (int i = 0; i < n && fits; i++)
    fits = add_operand(c, p, what[i].from, sent_bytes(c, &what[i])) &&
           add_operand(c, p, what[i].to, all_bytes(c, &what[i]));
  return fits ? RFR_OK : c->core->fail(RFI_E_INTERNAL, "operands of collectives in more than %d blocks", MOST_BLOCKS);
}

static rfr_status compare(gpu_comm *c, const places *p) {
  uint64_t *all;
  RFI_TRY(c->core->alloc(c->ctx, sizeof *all * (size_t)c->comm.size, (void **)&all));
  rfr_status s = c->comm.table->exchange(&c->comm, &p->hash, sizeof p->hash, all);
  for (int r = 1; r < c->comm.size && s == RFR_OK; r++)
    if (all[r] != all[0])
      s = c->core->fail(RFI_E_DIST_MISMATCH,
                        "the offsets of operands of collectives differ between ranks 0 and %d, so copy engines cannot "
                        "be used: set NCCL_CTA_POLICY=0 on all ranks",
                        r);
  c->core->free(c->ctx, all);
  return s;
}

/* NCCL's call is collective: the comparison before it ensures that all ranks make it. The call waits for the other
 * ranks, so it does not lock the mutex: another thread can abort meanwhile. */
static rfr_status register_block(gpu_comm *c, rfi_block *b) {
  pthread_mutex_lock(&c->mutex);
  void *const copies = c->copies;
  pthread_mutex_unlock(&c->mutex);
  if (!copies) return rfi_nccl_aborted(c);
  if (b->window) return RFR_OK;
  const rfr_status s = rfi_nccl_register(c, copies, b);
  if (s != RFR_OK) c->comm.table->abort(&c->comm);
  return s;
}

rfr_status rfi_nccl_share(rfr_comm *comm, const rfi_collective *what, int n) {
  gpu_comm *c = (gpu_comm *)comm;
  places p;
  RFI_TRY(find_places(c, what, n, &p));
  RFI_TRY(compare(c, &p));
  for (int64_t i = 0; i < p.n; i++) RFI_TRY(register_block(c, p.block[i]));
  return RFR_OK;
}

/* ---- creation ---- */

enum { PART = 4096, TRIES = 2 };

/* Whether a rank can use copies; `id` is that of the second communicator, from rank 0. */
typedef struct offer {
  bool able;
  nccl_unique_id id;
} offer;

/* Both collectives, in memory of two times PART bytes for each rank. */
static int run_both(const gpu_comm *c, char *memory) {
  char *to = memory + PART * c->comm.size;
  const int e = c->f.AllGather(memory, to, PART, NCCL_UINT8, c->copies, c->stream);
  return e != 0 ? e : c->f.AlltoAll(memory, to, PART, NCCL_UINT8, c->copies, c->stream);
}

static rfr_status count_kernels(const gpu_comm *c, cudaGraph_t graph, int *n) {
  cudaGraphNode_t *nodes;
  size_t many = 0;
  *n = 0;
  RFI_TRY(rfi_cuda_check(cudaGraphGetNodes(graph, NULL, &many), "reading a graph"));
  RFI_TRY(c->core->alloc(c->ctx, sizeof *nodes * (many + 1), (void **)&nodes));
  rfr_status s = rfi_cuda_check(cudaGraphGetNodes(graph, nodes, &many), "reading a graph");
  for (size_t i = 0; i < many && s == RFR_OK; i++) {
    enum cudaGraphNodeType type;
    s = rfi_cuda_node_type(nodes[i], &type);
    if (s == RFR_OK) *n += type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeHost;
  }
  c->core->free(c->ctx, nodes);
  return s;
}

static rfr_status capture_both(const gpu_comm *c, char *memory, bool *good) {
  cudaGraph_t graph = NULL;
  int kernels;
  RFI_TRY(rfi_cuda_check(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal), "beginning a capture"));
  const int e = run_both(c, memory);
  rfr_status s = rfi_cuda_check(cudaStreamEndCapture(c->stream, &graph), "ending a capture");
  if (s == RFR_OK) s = rfi_nccl_check(c, e, "capturing copies");
  if (s == RFR_OK) s = count_kernels(c, graph, &kernels);
  if (s == RFR_OK) *good = kernels == 0;
  if (graph) cudaGraphDestroy(graph);
  return s;
}

/* The window is registered. Copies twice before the capture. The first copy connects the ranks, which must not happen
 * in a capture. The second is needed because NCCL numbers the waits of calls outside of captures, and all captured
 * calls have the first number. */
static rfr_status try_copies(gpu_comm *c, bool *good) {
  rfi_block *b = c->block;
  *good = false;
  RFI_TRY(rfi_cuda_check(cudaMemsetAsync(b->memory, 0, b->n, c->stream), "filling memory"));
  for (int i = 0; i < TRIES; i++) {
    RFI_TRY(rfi_nccl_check(c, run_both(c, b->memory), "trying copies"));
    RFI_TRY(rfi_nccl_wait(&c->comm, c->stream, "trying copies"));
  }
  return capture_both(c, b->memory, good);
}

static rfr_status agree(gpu_comm *c, const offer *mine, offer *all, bool *able) {
  RFI_TRY(c->comm.table->exchange(&c->comm, mine, sizeof *mine, all));
  *able = true;
  for (int r = 0; r < c->comm.size; r++) *able = *able && all[r].able;
  return RFR_OK;
}

static bool is_off(void) {
  const char *policy = getenv("NCCL_CTA_POLICY");
  return policy && strcmp(policy, "0") == 0;
}

static rfr_status open_copies(gpu_comm *c, offer *all) {
  const nccl_config config = {.size = sizeof config,
                              .magic = (unsigned)NCCL_MAGIC,
                              .version = 22800,
                              .blocking = NCCL_UNSET,
                              .cluster = NCCL_UNSET,
                              .least_ctas = NCCL_UNSET,
                              .most_ctas = NCCL_UNSET,
                              .split_share = NCCL_UNSET,
                              .traffic_class = NCCL_UNSET,
                              .collnet = NCCL_UNSET,
                              .cta_policy = NCCL_ZERO_CTAS,
                              .shrink_share = NCCL_UNSET,
                              .nvls_ctas = NCCL_UNSET,
                              .channels_per_peer = NCCL_UNSET,
                              .nvlink_schedule = NCCL_UNSET};
  offer mine = {.able = c->f.copies && !is_off()};
  void *memory;
  bool able;
  if (mine.able && c->comm.rank == 0) mine.able = c->f.GetUniqueId(&mine.id) == 0;
  RFI_TRY(agree(c, &mine, all, &able));
  if (!able) return RFR_OK;
  RFI_TRY(rfi_nccl_join(c, &all[0].id, c->comm.size, c->comm.rank, &config, &c->copies));
  /* each of these steps is collective, so a rank that has failed must not leave before the others know */
  mine.able = rfi_nccl_alloc(&c->comm, (size_t)(2 * PART * c->comm.size), &memory);
  RFI_TRY(agree(c, &mine, all, &able));
  if (!able) return RFR_OK;
  rfi_block *b = c->block;
  mine.able = rfi_nccl_register(c, c->copies, b) == RFR_OK && b->window != NULL;
  RFI_TRY(agree(c, &mine, all, &able));
  if (c->stuck) return rfi_nccl_late(c, "registering memory");
  if (!able) return RFR_OK;
  RFI_TRY(try_copies(c, &mine.able));
  return agree(c, &mine, all, &c->has_copies);
}

rfr_status rfi_copies_open(gpu_comm *c) {
  offer *all;
  if (c->comm.size == 1) return RFR_OK;
  RFI_TRY(c->core->alloc(c->ctx, sizeof *all * (size_t)c->comm.size, (void **)&all));
  const rfr_status s = open_copies(c, all);
  c->core->free(c->ctx, all);
  return s;
}

void rfi_copies_close(gpu_comm *c) {
  while (c->block) rfi_nccl_free(&c->comm, c->block->memory);
  if (c->copies) c->f.CommDestroy(c->copies);
}
