/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators: ranks that make the same collective calls in the same order, each on its own data. A rank has one
 * handle, an rfr_comm, and uses it on one thread at a time: in rfr_compile_options.comm or rfr_graphs_options.comm for
 * collective ops, or in the calls below, between runs.
 *
 * With a timeout, a call that waits longer for another rank fails with dist.peer. A thread rank that cannot continue
 * calls rfr_comm_abort or destroys its handle; the calls of the other ranks then fail at once with dist.peer, which
 * names it. NCCL does not notify the other ranks: without a timeout they wait forever. After such an error, recreate
 * the communicator and the programs and graphs that use it.
 *
 *   rfr_comm *ends[2];
 *   rfr_comm_threads_create(ctx, 2, 0, ends);
 *   // thread r, with a separate context:
 *   rfr_comm_all_gather(ends[r], shard, all, n, RFR_F32);     // all: 2 n elements, rank 0's first
 *   rfr_comm_destroy(ends[r]);
 */
#ifndef REFRAIN_DIST_H
#define REFRAIN_DIST_H

#include "refrain/ctx.h"
#include "refrain/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_comm rfr_comm; /* one rank's handle */

/* Creates the handles of `size` ranks that are threads of this process, into out[size]; for host memory. Sums are
 * computed in rank order, in f32, and rounded once: bitwise the same on every rank and in every run. `timeout`: seconds
 * that a rank waits for another; 0: no limit. `ctx` owns their memory and runs nothing. Errors: argument,
 * memory.alloc. */
RFR_API rfr_status rfr_comm_threads_create(rfr_ctx *ctx, int size, double timeout, rfr_comm **out);
/* Creates the NCCL id of a new communicator, RFR_NCCL_ID_BYTES bytes. One rank calls this and sends the id to all
 * others. Errors: backend.missing, which names the missing library, which may be NCCL. */
enum { RFR_NCCL_ID_BYTES = 128 };
RFR_API rfr_status rfr_comm_nccl_id(rfr_ctx *ctx, void *id);
/* Creates this rank's handle of that communicator, on the context's GPU, for memory of that GPU. Every rank calls this
 * at the same time, in its own process or thread and with its own GPU, and waits for the others. Programs may be
 * captured with it. Sums over two ranks do not depend on the order; sums over more ranks are in NCCL's order,
 * but those of large reduce-scatters by copy engines in rank order (docs/distributed.md).
 * `timeout`: seconds of a wait, 0: no limit. It applies to joining, to calls made here, and to waits for a device whose
 * programs or graphs use this communicator, including their other work. For polls, it counts from the first poll that
 * finds the device busy with the latest work. rfr_comm_abort ends only the waits of this rank; those of the others end
 * at their timeouts. Destroy programs and graphs first: rfr_comm_destroy waits until they are destroyed, also after an
 * abort. All ranks of a machine destroy their handles at the same time. Errors: argument, backend.missing, dist.peer,
 * cuda. */
RFR_API rfr_status rfr_comm_nccl_create(rfr_ctx *ctx, const void *id, int size, int rank, double timeout,
                                        rfr_comm **out);
/* Creates this rank's handle of the communicator of all processes of an MPI job, for host memory; initializes MPI
 * unless the program has done so. Sums are bitwise those of rfr_comm_threads_create. Every rank calls this at the same
 * time. `timeout`: seconds that a call waits for another rank, 0: no limit; the error names the ranks that did not
 * arrive. All ranks destroy their handles at the same time, which finalizes MPI if this function initialized it; MPI
 * cannot be initialized again in the same process. Errors: argument, backend.missing, dist.launch if MPI cannot
 * start. */
RFR_API rfr_status rfr_comm_mpi_create(rfr_ctx *ctx, double timeout, rfr_comm **out);
/* Destroys a handle; accepts NULL. First destroy everything that uses it. With thread ranks, later calls on the other
 * handles fail with dist.peer. */
RFR_API void rfr_comm_destroy(rfr_comm *c);
/* Ends all current and later calls with dist.peer: with thread ranks those of all ranks, over NCCL only those of this
 * rank. Any thread may call it; accepts NULL. */
RFR_API void rfr_comm_abort(rfr_comm *c);

/* Seconds that later calls on this handle wait for another rank; 0: no limit. */
RFR_API rfr_status rfr_comm_set_timeout(rfr_comm *c, double timeout);

/* ---- ranks started by a launcher ---- */

/* This process as the environment describes it, from mpirun of Open MPI, srun, torchrun, and others that set RANK and
 * WORLD_SIZE, or PMI's variables. */
typedef struct rfr_launch {
  size_t size;
  const char *launcher; /* "": this process has no launcher */
  int rank, ranks;      /* 0 of 1 without a launcher */
  int local_rank;       /* among the ranks of this host */
  char address[256];    /* MASTER_ADDR and MASTER_PORT: of rank 0; "": not given */
  int port;
} rfr_launch;
/* Reads the environment. Errors: dist.launch, which names the variable. */
RFR_API rfr_status rfr_launch_read(rfr_launch *out);
/* Creates this rank's handle of the communicator of all processes that the launcher started: MPI for a context of the
 * CPU, NCCL for one of a GPU. Rank 0 sends the NCCL id over TCP and listens at the address, port `port` + 1; without an
 * address the id is sent over MPI. Errors: dist.launch; those of rfr_comm_mpi_create and rfr_comm_nccl_create. */
RFR_API rfr_status rfr_launch_join(rfr_ctx *ctx, const rfr_launch *launch, double timeout, rfr_comm **out);
/* The end of a rank that has done its work: waits until all ranks are here, then destroys comm, also after an error;
 * accepts NULL. A rank that ends with an error calls rfr_comm_destroy instead. Errors: dist.peer, which names a rank
 * that did not arrive; memory.alloc. */
RFR_API rfr_status rfr_launch_leave(rfr_ctx *ctx, rfr_comm *comm);

RFR_API int rfr_comm_size(const rfr_comm *c); /* 0 for NULL */
RFR_API int rfr_comm_rank(const rfr_comm *c); /* -1 for NULL */

/* Collective calls; they return when they are done. n counts the elements of one rank's part. `from` and `to` have n
 * elements; the larger one has n per rank, rank 0's first. `from` may be this rank's part of `to`, or `to` this rank's
 * part of `from`. Sums support f32, bf16 and f16; all_gather supports any type of whole bytes. Errors: argument,
 * dist.peer; dist.mismatch, on all ranks, if the ranks' calls differ. */
RFR_API rfr_status rfr_comm_all_gather(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype);
/* `to` gets this rank's part of the sum of all ranks' `from`. */
RFR_API rfr_status rfr_comm_reduce_scatter(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype);
/* Both have n elements, and may be the same memory. */
RFR_API rfr_status rfr_comm_all_reduce(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype);
/* Both have n elements per rank and are different memory: part r of `to` is this rank's part of rank r's `from`. Any
 * type of whole bytes. */
RFR_API rfr_status rfr_comm_all_to_all(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
