/* SPDX-License-Identifier: Apache-2.0
 *
 * The effect of a choice of ops to recompute: memory, work, and the new trace.
 */
#ifndef RFI_RECOMPUTE_MODEL_H
#define RFI_RECOMPUTE_MODEL_H

#include <limits.h>

#include "pass/pass.h"

enum { RFI_NEVER = INT_MAX };

typedef struct rfi_choice_cost {
  bool possible;       /* false: a clone would read bytes already overwritten or released */
  int64_t peak;        /* most step-scoped bytes live at once, workspaces and other copies included */
  int64_t across;      /* bytes that live from one program to the next, per copy */
  double area;         /* bytes above the given level, summed over ops */
  double flops, bytes; /* of the clones */
  int clones;
} rfi_choice_cost;

/* The program of an op: forward, dgrad, wgrad. In a single program the backward is RFI_LATE. */
enum { RFI_EARLY, RFI_LATE, RFI_LATER, RFI_LATES = 2 };

/* An op may have one clone in RFI_LATE and one in RFI_LATER. The clone's number is op + n_ops * (late - RFI_LATE), that
 * of its result value + n_values * (late - RFI_LATE). */
typedef struct rfi_recompute_model {
  const rfr_trace *t;
  uint8_t *late;    /* per op; not RFI_EARLY: reads clones where they exist */
  bool *can;        /* per op: may be cloned */
  bool *gone;       /* per op: may not be cloned in RFI_LATER, its operands are released */
  rfr_value *root;  /* per value: the value that it is a view of, or itself */
  int *overwritten; /* per root: the op that makes the next version in its storage, or RFI_NEVER */
  bool *read_late;  /* per op: a late op reads a result */
  bool *read_later; /* per op: an op of RFI_LATER reads a result */
  int64_t *workspace;
  int64_t *bytes; /* per value: bytes of its own step-scoped storage, 0: none */
  bool *chosen;   /* per clone: the choice; an unread clone is not made. Without a clone of its own, RFI_LATER reads
                     RFI_LATE's clone, else the original */
  int lates;      /* 1 for a single program, else RFI_LATES */
  int copies;     /* copies of the bytes that live from one program to the next; 1 for a single program */
  bool delayed;   /* RFI_LATER may run long after RFI_LATE */
  int begins[RFI_LATES]; /* the first op of each, n_ops: none */
  /* Results of evaluate: */
  int *time;                     /* per clone: the op that it precedes; RFI_NEVER: no clone */
  int *first, *last;             /* per value: positions in the new order, -1: none */
  int *clone_first, *clone_last; /* per clone's result */
  int *start, *rank;             /* per op: clones before its first clone; per clone: its position among them */
  int64_t *live;
} rfi_recompute_model;

rfr_status rfi_recompute_model_init(rfi_recompute_model *m, const rfr_trace *t, const rfi_pass_options *o);
void rfi_recompute_model_deinit(rfi_recompute_model *m);
/* Linear in the trace; reads m->chosen. */
rfi_choice_cost rfi_recompute_evaluate(rfi_recompute_model *m, double level);
/* Writes the trace for m->chosen; report may be NULL. */
rfr_status rfi_recompute_apply(rfi_recompute_model *m, rfi_report *report, rfr_trace **out);

#endif
