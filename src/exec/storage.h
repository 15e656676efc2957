/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that programs, or callables, share by name: parameters, states, constants, inputs of programs, main gradients.
 * It is ours, in a region of the layout, or the caller's.
 */
#ifndef RFI_STORAGE_H
#define RFI_STORAGE_H

#include "exec/layout.h"
#include "refrain/program.h"

/* Parts of a unit (unit.h). */
typedef enum rfi_part {
  RFI_PART_LOAD,
  RFI_PART_SETUP,
  RFI_PART_F,
  RFI_PART_I,
  RFI_PART_W,
  RFI_PART_REDUCE,
  RFI_PARTS
} rfi_part;

static inline bool rfi_is_parameter(int role) { return role == RFR_ROLE_TRAINABLE || role == RFR_ROLE_FROZEN; }

typedef struct rfi_named {
  rfr_tensor tensor; /* with data, once it is allocated */
  rfi_region region; /* rings, persistent, or windows: an unreduced gradient, valid between two REDUCEs */
  int64_t offset;    /* in the region; -1: the caller's memory, or not placed */
  int64_t scratch;   /* in scratch memory, which warm-up uses if it is written */
  bool written;      /* by some callable */
  int writer;        /* of a state: the callable that writes it in a part; -1 */
  rfi_part writer_part;
  bool accumulate; /* a main gradient that is kept when a step begins */
  int parameter;   /* of a main gradient: its parameter; else -1 */
  int gradient;    /* of a parameter: its main gradient; -1 */
} rfi_named;

typedef struct rfi_storage {
  rfi_named *named;
  rfi_names names;
  int n, capacity;
} rfi_storage;

/* NULL: there is no such name, or name is NULL. */
rfi_named *rfi_storage_find(const rfi_storage *s, const char *name);
/* Adds an input of a unit. *fresh: the new entry, persistent; NULL: it exists. Errors: program.state if it exists with
 * another type or role; `kind` and `unit` are for the message. */
rfr_status rfi_storage_add(rfi_storage *s, rfi_arena *a, const rfi_value *x, const char *kind, const char *unit,
                           rfi_named **fresh);
/* Places what is ours in a region. */
void rfi_storage_place(rfi_storage *s, rfi_layout *l, rfi_region region);
/* Sets the addresses of what is placed. */
void rfi_storage_attach(rfi_storage *s, const rfi_layout *l, bool host);

#endif
