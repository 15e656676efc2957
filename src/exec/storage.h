/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that programs, or callables, share by name: parameters, states, constants, inputs of programs, main gradients.
 * It is in a region of the layout, or belongs to the caller.
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

typedef struct rfi_named {
  rfr_tensor tensor; /* its data is set once it is allocated */
  rfi_region region; /* ring, persistent, or window: an unreduced gradient, valid between two REDUCEs */
  int64_t offset;    /* in the region; -1: the caller's memory, or not placed */
  int64_t scratch;   /* offset of the scratch copy that warm-up uses if the tensor is written */
  bool written;      /* a callable writes it */
  int writer;        /* the callable whose part `writer_part` writes this state; -1: none */
  rfi_part writer_part;
  bool accumulate; /* the main gradient is not cleared when a step begins */
  int parameter;   /* of a main gradient: the index of its parameter; else -1 */
  int gradient;    /* of a parameter: the index of its main gradient; -1: none */
} rfi_named;

typedef struct rfi_storage {
  rfi_named *named;
  rfi_names names;
  int n, capacity;
} rfi_storage;

/* NULL: the name does not exist, or name is NULL. */
rfi_named *rfi_storage_find(const rfi_storage *s, const char *name);
/* Adds an input of a unit. *fresh: the new, persistent entry; NULL: the name exists already. Errors: program.state if
 * it exists with another type or role; `kind` and `unit` are for the message. */
rfr_status rfi_storage_add(rfi_storage *s, rfi_arena *a, const rfi_value *x, const char *kind, const char *unit,
                           rfi_named **fresh);
/* Assigns offsets in a region to the tensors that are not the caller's. */
void rfi_storage_place(rfi_storage *s, rfi_layout *l, rfi_region region);
/* Sets the addresses of placed tensors. */
void rfi_storage_attach(rfi_storage *s, const rfi_layout *l, bool host);

#endif
