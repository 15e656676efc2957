/* SPDX-License-Identifier: Apache-2.0
 *
 * Names to numbers: a hash table in an arena. Looking a name up is O(1), so that traces of
 * thousands of inputs compile in linear time.
 */
#ifndef RFI_NAMES_H
#define RFI_NAMES_H

#include "base/arena.h"

typedef struct rfi_names {
  struct rfi_name {
    const char *name; /* borrowed; NULL: free */
    int id;
  } * slot;
  int n, capacity; /* a power of two, at most half full */
} rfi_names;

/* The number of a name; -1: unknown. */
int rfi_names_find(const rfi_names *names, const char *name);
/* Adds a new name; it must live as long as the arena. False: out of memory. */
bool rfi_names_add(rfi_names *names, rfi_arena *arena, const char *name, int id);

#endif
