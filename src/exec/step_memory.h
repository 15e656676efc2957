/* SPDX-License-Identifier: Apache-2.0
 *
 * Step-scoped memory that several programs and graphs use one at a time (rfr_step_memory). Its users are executors;
 * their regions from RFI_REGION_SLOT on are in this memory. It has the bytes of the largest user. It is allocated when
 * the first user needs addresses, and freed with the last user. While one user has it, the results of the others are
 * invalid.
 */
#ifndef RFI_STEP_MEMORY_H
#define RFI_STEP_MEMORY_H

#include "exec/unit.h"

struct rfr_step_memory {
  rfr_ctx *ctx;
  int64_t least, bytes; /* requested at creation; needed by the largest user */
  unsigned char *data;  /* NULL: not allocated */
  int users;
  bool destroyed;             /* by the caller, while it has users */
  const rfi_executor *holder; /* the user whose results are in the memory; NULL: none */
  bool busy;                  /* the holder has begun a step and not ended it */
};

/* Adds the executor to the users; NULL: the executor has no shared step memory. Errors: argument. */
rfr_status rfi_step_memory_enter(rfr_step_memory *s, rfi_executor *m);
/* Requests the planned bytes. Errors: plan.over_budget, if less memory is already allocated. */
rfr_status rfi_step_memory_reserve(const rfi_executor *m);
rfr_status rfi_step_memory_allocate(const rfi_executor *m);
/* The executor becomes the holder. `busy`: no other user may take the memory until it is released. Errors:
 * memory.in_use. */
rfr_status rfi_step_memory_take(const rfi_executor *m, bool busy);
void rfi_step_memory_release(const rfi_executor *m);
/* Whether the executor's results are still valid: no other user has taken the memory. */
bool rfi_step_memory_holds(const rfi_executor *m);
/* Whether the bytes lie in the memory. */
bool rfi_step_memory_has(const rfr_step_memory *s, const void *data, int64_t bytes);
void rfi_step_memory_leave(rfi_executor *m);

#endif
