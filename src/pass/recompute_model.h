/* SPDX-License-Identifier: Apache-2.0
 *
 * What a choice of ops to recompute does to a trace: memory, work, and the trace itself.
 */
#ifndef RFI_RECOMPUTE_MODEL_H
#define RFI_RECOMPUTE_MODEL_H

#include <limits.h>

#include "ops/cost.h"
#include "pass/pass.h"

enum { RFI_NEVER = INT_MAX };

typedef struct rfi_choice_cost {
  bool possible;       /* false: a clone would read what was overwritten by then, or gone */
  int64_t peak;        /* most step-scoped bytes live at once, workspaces included, and what other copies hold */
  int64_t held;        /* bytes of that which live from one program to the next, in one copy */
  double area;         /* bytes above the given level, summed over the ops that run there */
  double flops, bytes; /* of the clones */
  int clones;
} rfi_choice_cost;

/* Which program of its own an op is of; where all are one program, its backward is RFI_LATE. */
enum { RFI_EARLY, RFI_LATE, RFI_LATER, RFI_LATES = 2 };

/* What an op may have in RFI_LATE, and once more in RFI_LATER: a clone has the number op + n_ops * (late - RFI_LATE),
 * a clone's result value + n_values * (late - RFI_LATE). */
typedef struct rfi_recompute_model {
  const rfr_trace *t;
  uint8_t *late;    /* per op: not RFI_EARLY: of the backward, reads clones where there are any */
  bool *can;        /* per op: may be cloned, */
  bool *gone;       /* but not in RFI_LATER, where what it reads is gone */
  rfr_value *root;  /* per value: the value it is a view of, itself if none */
  int *overwritten; /* per root: the op that makes the next version in its storage, or RFI_NEVER */
  bool *read_late;  /* per op: a result is read by a late op, */
  bool *read_later; /* by one of RFI_LATER */
  int64_t *workspace;
  int64_t *bytes; /* per value: step-scoped storage of its own, 0: none */
  rfi_cost *cost; /* per op */
  bool *chosen;   /* per clone: the choice; one that nobody needs is not made. Without one of its own, RFI_LATER keeps
                     RFI_LATE's, else the original */
  int lates;      /* 1 where all are one program, else RFI_LATES */
  int copies;     /* so many times there are bytes for what lives from one program to the next; 1 where all are one */
  bool delayed;   /* what lives from RFI_LATE to RFI_LATER does so for long */
  int begins[RFI_LATES]; /* the first op of each, n_ops if there is none */
  /* What evaluate finds for the choice: */
  int *time;                     /* per clone: it stands before this op; RFI_NEVER: no clone */
  int *first, *last;             /* per value: positions in the new order, -1 */
  int *clone_first, *clone_last; /* per clone's result */
  int *start, *rank;             /* per op: clones before its first clone; per clone: where it stands */
  int64_t *live;
} rfi_recompute_model;

rfr_status rfi_recompute_model_init(rfi_recompute_model *m, const rfr_trace *t, const rfi_pass_options *o);
void rfi_recompute_model_deinit(rfi_recompute_model *m);
/* Linear in the trace; reads m->chosen. */
rfi_choice_cost rfi_recompute_evaluate(rfi_recompute_model *m, double level);
/* Writes the trace that m->chosen means; report may be NULL. */
rfr_status rfi_recompute_apply(rfi_recompute_model *m, rfi_report *report, rfr_trace **out);

#endif
