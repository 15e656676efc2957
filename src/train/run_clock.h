/* SPDX-License-Identifier: Apache-2.0
 *
 * The clock of a run that is given in time (run.time): when the learning rate decays, and which step is the last.
 *
 * The number of steps is not known when the run begins, and the machine's speed may change. So the warmup follows from
 * the first steps, and wsd's decay begins when its share of the time is left; then the last step is fixed from the
 * speed so far. While it decays, the last step moves only if the run would otherwise miss its time by more than
 * RFI_CLOCK_TOLERANCE; the rate stays continuous. Every decision is an element of lr_steps, which checkpoints hold. A
 * run that is resumed in its decay makes no more decisions, so that its results do not depend on a clock.
 *
 * This file reads no clock: callers pass seconds.
 */
#ifndef RFI_RUN_CLOCK_H
#define RFI_RUN_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

/* Elements of the state lr_steps: rfr_lr_schedule_steps_at. */
enum { RFI_LR_WARMUP, RFI_LR_DECAY, RFI_LR_END, RFI_LR_STEPS_N };
#define RFI_LR_LATER INT64_MAX
#define RFI_CLOCK_TOLERANCE 0.03 /* share of the run's time */

typedef struct rfi_clock_amount {
  double value; /* number of steps; or a share of the run, 0..1 */
  bool share;
} rfi_clock_amount;

typedef struct rfi_run_clock {
  double time; /* seconds of the run; 0: the run is given in steps and needs no clock */
  rfi_clock_amount warmup, decay;
  bool decays;    /* wsd schedule; otherwise the rate is constant after the warmup */
  double reserve; /* seconds of `time` that are reserved for the final evaluation */
  double used;    /* seconds used so far */
  bool decided;   /* the schedule is fixed */
  int64_t lr_steps[RFI_LR_STEPS_N];
  double left, steps_left; /* estimates: remaining seconds, remaining steps */
  double other, recent_steps, recent_seconds, early;
  int64_t steps;
} rfi_run_clock;

/* The part of lr_steps that a step has changed. */
typedef enum rfi_clock_change { RFI_CLOCK_SAME, RFI_CLOCK_WARMUP, RFI_CLOCK_DECAY, RFI_CLOCK_END } rfi_clock_change;

/* Sets lr_steps before the first step. */
void rfi_run_clock_init(rfi_run_clock *c);
/* lr_steps and `used` come from a checkpoint of step n. */
void rfi_run_clock_resume(rfi_run_clock *c, int64_t n);
/* A step took `seconds`; n steps are launched, so changes apply from the next one on. */
rfi_clock_change rfi_run_clock_step(rfi_run_clock *c, int64_t n, double seconds);
/* An evaluation or a checkpoint during the run took `seconds`. */
void rfi_run_clock_other(rfi_run_clock *c, double seconds);

#endif
