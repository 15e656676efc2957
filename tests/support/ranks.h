/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks of a test: threads of this process, each with a separate context and communicator.
 */
#ifndef RFT_RANKS_H
#define RFT_RANKS_H

#include <stddef.h>

#include "base/base.h"

/* The work of rank `number`; `rank` is its element of the caller's array; comm is NULL if there is only one rank. */
typedef rfr_status (*rft_rank_work)(void *rank, int number, rfr_comm *comm, rfr_ctx *own);

enum { RFT_MOST_RANKS = 8 };

/* Runs `work` for elements 0 to n - 1 of an array, each of `size` bytes. An error of a rank fails the test; the others
 * are aborted. */
void rft_run_ranks(int n, void *array, size_t size, rft_rank_work work);

/* Operands of collectives: element i of a rank; writes x to element i of `to`; compares element `at` of `to` with the
 * sum of all ranks' elements i, added in rank order in f32. */
float rft_term(int rank, int64_t i);
void rft_put(rfr_dtype dtype, void *to, int64_t i, float x);
void rft_put_sum(rfr_dtype dtype, void *to, int64_t at, int64_t i, int size);

#endif
