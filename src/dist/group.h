/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over some of the ranks of a communicator, made of messages: every rank of a pipeline has peers of its own to
 * reduce with.
 */
#ifndef RFI_GROUP_H
#define RFI_GROUP_H

#include "dist/comm.h"

/* x[0..n) of ranks [first, first + size), which call this together, each has their sum: in rank order, in f32, rounded
 * once, so with the same bits on each. The memory is on the host. Errors: those of rfi_comm_send and rfi_comm_receive;
 * no_memory. */
rfr_status rfi_group_all_reduce(rfr_ctx *ctx, rfr_comm *c, int first, int size, rfr_dtype dtype, void *x, int64_t n);

#endif
