/* SPDX-License-Identifier: Apache-2.0
 *
 * The speed is the mean over a window of recent time, so that a load that comes and goes in shorter periods averages
 * out. Evaluations and checkpoints are not part of it: they add their mean per step.
 */
#include "train/run_clock.h"

#include <math.h>

enum { WARMUP_SAMPLES = 10 }; /* the warmup is estimated from at least so many steps after the first */
#define WARMUP_TIME 0.01      /* and from at least this share of the run's time */
#define WARMUP_TOLERANCE 0.05 /* smaller changes of the estimate are ignored */
#define WINDOW 0.12           /* the mean speed covers this share of the run's time */
#define LONGEST (INT64_C(1) << 50)

void rfi_run_clock_init(rfi_run_clock *c) {
  c->used = c->other = c->recent_steps = c->recent_seconds = c->left = c->steps_left = c->early = 0.0;
  c->steps = 0;
  c->decided = false;
  c->lr_steps[RFI_LR_WARMUP] = c->warmup.share ? (c->warmup.value > 0.0 ? 1000 : 0) : (int64_t)c->warmup.value;
  c->lr_steps[RFI_LR_DECAY] = c->lr_steps[RFI_LR_END] = RFI_LR_LATER;
}

void rfi_run_clock_resume(rfi_run_clock *c, int64_t n) {
  c->decided = c->lr_steps[RFI_LR_END] != RFI_LR_LATER;
  c->left = fmax(c->time - c->reserve - c->used, 0.0);
  c->steps_left = c->decided ? (double)(c->lr_steps[RFI_LR_END] - n) : 1.0;
}

/* Mean seconds per step, including its share of evaluations and checkpoints. */
static double seconds_per_step(const rfi_run_clock *c) {
  return c->recent_seconds / c->recent_steps + c->other / (double)c->steps;
}

static int64_t rounded(double steps) { return (int64_t)fmin(fmax(steps + 0.5, 0.0), (double)LONGEST); }

/* Moves the end of the decay to step `end`. The rate continues from its value at step n on a straight line to the
 * minimum; lr_steps stores where that line would have begun. */
static void move_end(rfi_run_clock *c, int64_t n, int64_t end) {
  const double begin = (double)c->lr_steps[RFI_LR_DECAY], old = (double)c->lr_steps[RFI_LR_END];
  const double done = ((double)n - begin) / (old - begin);
  c->lr_steps[RFI_LR_DECAY] = (int64_t)floor(((double)n - done * (double)end) / (1.0 - done));
  c->lr_steps[RFI_LR_END] = end;
}

/* Uses the mean of the early steps, without the first one, which touches its memory for the first time. A single step
 * does not show the speed: on a device steps are launched ahead, and the metrics of several arrive at once. */
static rfi_clock_change set_warmup(rfi_run_clock *c, int64_t n, double seconds) {
  const int64_t samples = c->steps - 1, old = c->lr_steps[RFI_LR_WARMUP];
  const bool enough = samples > WARMUP_SAMPLES, long_enough = c->early >= WARMUP_TIME * c->time;
  if (!c->warmup.share || samples < 1 || (enough && long_enough)) return RFI_CLOCK_SAME;
  c->early += seconds;
  if (!enough && c->early < WARMUP_TIME * c->time) return RFI_CLOCK_SAME;
  const double each = fmax(c->early / (double)samples, 1e-9);
  const int64_t warmup = rounded(c->warmup.value * ((double)n + c->left / each));
  if (fabs((double)(warmup - old)) <= WARMUP_TOLERANCE * (double)old) return RFI_CLOCK_SAME;
  c->lr_steps[RFI_LR_WARMUP] = warmup;
  return RFI_CLOCK_WARMUP;
}

rfi_clock_change rfi_run_clock_step(rfi_run_clock *c, int64_t n, double seconds) {
  const double keep = exp(-seconds / (WINDOW * c->time));
  c->used += seconds;
  c->recent_steps = c->recent_steps * keep + 1.0;
  c->recent_seconds = c->recent_seconds * keep + seconds;
  c->steps++;
  const double total = c->time - c->reserve, each = fmax(seconds_per_step(c), 1e-9);
  const double left = fmax(total - c->used, 0.0), steps_left = left / each;
  int64_t *const s = c->lr_steps;
  rfi_clock_change change = RFI_CLOCK_SAME;
  if (s[RFI_LR_END] == RFI_LR_LATER) {
    c->left = left;
    c->steps_left = steps_left;
    change = set_warmup(c, n, seconds);
    if (c->decays && (c->decay.share ? left <= c->decay.value * total : steps_left <= c->decay.value)) {
      s[RFI_LR_DECAY] = n;
      s[RFI_LR_END] = n + rounded(steps_left);
      change = RFI_CLOCK_DECAY;
    } else if (steps_left < 0.5) {
      s[RFI_LR_DECAY] = s[RFI_LR_END] = n;
      change = RFI_CLOCK_END;
    }
  } else if (c->decays && !c->decided && n < s[RFI_LR_END]) {
    const double late = (double)(s[RFI_LR_END] - n) * each - (total - c->used);
    const int64_t end = n + (rounded(steps_left) > 0 ? rounded(steps_left) : 1);
    if (fabs(late) > RFI_CLOCK_TOLERANCE * c->time && end != s[RFI_LR_END]) {
      move_end(c, n, end);
      change = RFI_CLOCK_END;
    }
  }
  if (s[RFI_LR_END] != RFI_LR_LATER) {
    c->steps_left = fmax((double)(s[RFI_LR_END] - n), 0.0);
    c->left = c->steps_left * each;
  }
  return change;
}

void rfi_run_clock_other(rfi_run_clock *c, double seconds) {
  c->used += seconds;
  c->other += seconds;
}
