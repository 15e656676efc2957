/* SPDX-License-Identifier: Apache-2.0
 *
 * Step-scoped memory that several programs and graphs use in turn (rfr_step_memory). Its users are executors, which
 * have their regions from RFI_REGION_SLOT on in it. It has the bytes of the largest user, is allocated when the first
 * user needs addresses, and freed with the last one. One user has it at a time; the results of the others are invalid.
 */
#ifndef RFI_STEP_MEMORY_H
#define RFI_STEP_MEMORY_H

#include "exec/unit.h"

struct rfr_step_memory {
  rfr_ctx *ctx;
  int64_t least, bytes; /* asked for at creation; of the largest user */
  unsigned char *data;  /* NULL: not allocated */
  int users;
  bool destroyed;             /* by the caller, while it has users */
  const rfi_executor *holder; /* the user whose results it has; NULL: none */
  bool busy;                  /* a step of the holder, if there is one, has begun */
};

/* Adds the executor to the users; NULL: it has step memory of its own. Errors: argument. */
rfr_status rfi_step_memory_enter(rfr_step_memory *s, rfi_executor *m);
/* Asks for the bytes that are planned. Errors: plan.over_budget, if the memory is allocated with fewer. */
rfr_status rfi_step_memory_reserve(const rfi_executor *m);
rfr_status rfi_step_memory_allocate(const rfi_executor *m);
/* The executor uses the memory from here on; `busy`: until it is released, no other one may. Errors: memory.in_use. */
rfr_status rfi_step_memory_take(const rfi_executor *m, bool busy);
void rfi_step_memory_release(const rfi_executor *m);
/* The executor's results are still there: no other user came since. */
bool rfi_step_memory_holds(const rfi_executor *m);
/* Whether bytes lie in the memory. */
bool rfi_step_memory_has(const rfr_step_memory *s, const void *data, int64_t bytes);
void rfi_step_memory_leave(rfi_executor *m);

#endif
