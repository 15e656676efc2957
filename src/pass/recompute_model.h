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
  bool possible; /* false: a clone would read memory that is already overwritten or released */
  /* maximum of step-scoped live bytes, including workspaces and the values of other microbatches in flight */
  int64_t peak;
  int64_t across;      /* bytes that live from one program to the next, per copy */
  double near;         /* live bytes, summed over the ops near the peak */
  double flops, bytes; /* work of the clones */
  int clones;          /* ops in the new trace */
  int recomputed;      /* clones, and ops whose result an op of the backward recomputes */
} rfi_choice_cost;

/* The program of an op: forward, dgrad, wgrad. In a single program the backward is RFI_LATE. */
enum { RFI_EARLY, RFI_LATE, RFI_LATER, RFI_LATES = 2 };

/* Recomputing by an op of the backward (recompute_bwd.c): op numbers, or -1. */
typedef struct rfi_by_bwd {
  int bwd;    /* of a forward op: the op of the backward that can recompute its result */
  int source; /* of that op: the forward op */
  int first;  /* of that op: the first op that moves after it; itself: none */
  int after;  /* of an op that moves: the forward op, whose result it reads */
} rfi_by_bwd;

/* An op may have one clone in RFI_LATE and one in RFI_LATER. The number of a clone is op + n_ops * (late - RFI_LATE);
 * the number of its result is value + n_values * (late - RFI_LATE). */
typedef struct rfi_recompute_model {
  const rfr_trace *t;
  uint8_t *late;    /* per op: its program; unless RFI_EARLY, the op reads clones where they exist */
  bool *can;        /* per op: may be cloned */
  bool *gone;       /* per op: may not be cloned in RFI_LATER, because its operands are released by then */
  rfr_value *root;  /* per value: the value that it is a view of, or itself */
  int *overwritten; /* per root: the op that writes the next version into its storage, or RFI_NEVER */
  bool *read_late;  /* per op: a result is read in RFI_LATE or RFI_LATER */
  bool *read_later; /* per op: a result is read in RFI_LATER */
  int64_t *workspace;
  int64_t *bytes;    /* per value: bytes of its step-scoped storage; 0: it owns none */
  int64_t *gathered; /* per op: bytes of the parameters that are gathered once more for its clone */
  /* per clone: whether it is chosen; a clone without readers is not recorded. Without a separate clone, RFI_LATER
   * reads RFI_LATE's clone, else the original */
  bool *chosen;
  rfi_by_bwd *by; /* per op */
  int lates;      /* 1 for a single program, else RFI_LATES */
  /* microbatches in flight: copies of the bytes that live from one program to the next; 1 for a single program */
  int copies;
  bool separate_wgrad;   /* RFI_LATER may run long after RFI_LATE */
  int begins[RFI_LATES]; /* first op of each late program; n_ops: none */
  bool *near;            /* per op: it is near the peak; set by rfi_recompute_mark_near */
  /* Results of evaluate: */
  bool *early;                   /* per op: its result is needed before by->bwd, so a clone recomputes it */
  int *order, *place;            /* the op at each place, after ops have moved as by[] says; the place of each op */
  int *time;                     /* per clone: the place of the op that it directly precedes; RFI_NEVER: not recorded */
  int *first, *last;             /* per value: positions in the new order; -1: none */
  int *clone_first, *clone_last; /* per result of a clone */
  /* per place: number of clones before its first clone; per clone: its index among the clones of that place */
  int *start, *rank;
  int64_t *live;
} rfi_recompute_model;

rfr_status rfi_recompute_model_init(rfi_recompute_model *m, const rfr_trace *t, const rfi_pass_options *o);
/* Fills m->by. */
void rfi_find_by_bwd(rfi_recompute_model *m);
void rfi_recompute_model_deinit(rfi_recompute_model *m);
/* Linear in the length of the trace; reads m->chosen and m->near. */
rfi_choice_cost rfi_recompute_evaluate(rfi_recompute_model *m);
/* Marks in m->near the ops during which more than `level` bytes are live under the choice last evaluated. */
void rfi_recompute_mark_near(rfi_recompute_model *m, double level);
/* Records the trace for m->chosen; report may be NULL. */
rfr_status rfi_recompute_apply(rfi_recompute_model *m, rfi_report *report, rfr_trace **out);

#endif
