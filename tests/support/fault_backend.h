/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend whose k-th call fails: the CPU's table with a counter for each entry. The library sees
 * a separate device (`host` is false), so every byte is copied, and plans have side streams. An error
 * may be sticky, like one that kills a GPU's context: every later call then fails with backend.dead.
 * It has choices for tuning, of which "quick" is the fastest. Open devices, allocations and graphs
 * are counted.
 */
#ifndef RFT_FAULT_BACKEND_H
#define RFT_FAULT_BACKEND_H

#include "backend/backend.h"

#define RFT_ENTRIES(X) \
  X(open)              \
  X(alloc)             \
  X(fill)              \
  X(copy) X(move) X(inspect) X(memory_use) X(select) X(choose) X(run) X(run_timed) X(capture) X(launch) X(wait) X(poll)
typedef enum rft_entry {
#define RFT_ENTRY_ENUM(name) RFT_ENTRY_##name,
  RFT_ENTRIES(RFT_ENTRY_ENUM)
#undef RFT_ENTRY_ENUM
      RFT_ENTRY_N
} rft_entry;

typedef struct rft_fault {
  rft_entry entry; /* the table entry whose k-th call fails; k 0: none fails */
  int64_t k;
  bool sticky;
  int64_t cap;      /* maximum bytes of arenas; 0: no limit */
  const void *away; /* memory that does not count as the device's */
  int version;      /* it reports version / 2; 0: one GEMM has choices, else two have */
  /* counters */
  int64_t calls[RFT_ENTRY_N];
  bool failed, dead;
  int devices, blocks, graphs;
  int measured; /* number of choices made by measurement */
  int64_t arena_bytes, most_arena_bytes;
  const void *const *from; /* the sources of the last launch's copies */
} rft_fault;

extern rft_fault rft_faults; /* global: one test program, one thread */
extern const rfi_backend rft_fault_backend;
const char *rft_entry_name(rft_entry entry);

#endif
