/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs that are given in time, on simulated clocks: they end on time under loads that come and go, the rate falls from
 * its peak to its minimum without a jump, and a run that is resumed in its decay follows what was decided.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "train/run_clock.h"

/* A simulated machine. A step that begins at second t takes 30 ms, or longer while there is a load. */
typedef struct machine {
  double slower, period, share; /* a load makes steps `slower` times slower, for `share` of each period */
  double from;                  /* second at which the load starts */
} machine;

static double step_seconds(const machine *m, double t) {
  const bool load = t >= m->from && fmod(t - m->from, m->period) < m->share * m->period;
  return 0.03 * (load ? m->slower : 1.0);
}

/* The rate of step n, with peak 1 and minimum 0, as lr_schedule computes it. */
static double rate(const int64_t *s, int64_t n) {
  if (n < s[RFI_LR_WARMUP]) return (double)(n + 1) / (double)s[RFI_LR_WARMUP];
  if (n >= s[RFI_LR_END]) return 0.0;
  if (n < s[RFI_LR_DECAY]) return 1.0;
  return 1.0 - (double)(n - s[RFI_LR_DECAY]) / (double)(s[RFI_LR_END] - s[RFI_LR_DECAY]);
}

static rfi_run_clock clock_of(double time) {
  rfi_run_clock c = {.time = time, .reserve = 6.0, .warmup = {0.04, true}, .decay = {0.3, true}, .decays = true};
  rfi_run_clock_init(&c);
  return c;
}

/* The total seconds of the run, with a final evaluation of 6 s. */
static double simulate(const machine *m, rfi_run_clock *c, int64_t *steps) {
  double t = 0.0, last = 0.0;
  int64_t n = 0;
  do {
    const double now = rate(c->lr_steps, n), seconds = step_seconds(m, t);
    if (n > 20) assert_true(fabs(now - last) < 0.2); /* no jump */
    last = now;
    t += seconds;
    rfi_run_clock_step(c, ++n, seconds);
    if (n % 500 == 0) {
      t += 1.0;
      rfi_run_clock_other(c, 1.0);
    }
  } while (n < c->lr_steps[RFI_LR_END]);
  assert_true(n == c->lr_steps[RFI_LR_END]);
  assert_true(!c->decays || last < 0.1); /* the rate decayed */
  if (steps) *steps = n;
  return t + 6.0;
}

static void ends_on_time(void **state) {
  static const machine machines[] = {
      {1, 10, 0.5, 0},      /* no load */
      {2, 7, 0.5, 0},       /* a periodic load */
      {2, 40, 0.5, 0},      /* with a longer period */
      {3, 30, 0.6, 20},     /* a heavier load */
      {2, 1e9, 1, 80},      /* a load that begins in the decay and stays */
      {2, 1e9, 85e-9, 0},   /* a load that ends in the decay */
      {2.5, 25, 0.3, 100},  /* at the very end */
      {20, 60, 0.005, 0.0}, /* single slow steps */
  };
  (void)state;
  for (size_t i = 0; i < sizeof machines / sizeof machines[0]; i++) {
    rfi_run_clock c = clock_of(120);
    const double t = simulate(&machines[i], &c, NULL);
    print_message("machine %zu: %.1f s\n", i, t);
    if (fabs(t - 120.0) > 12.0) fail_msg("machine %zu: %.1f s", i, t);
    c = clock_of(120);
    c.decays = false;
    assert_true(fabs(simulate(&machines[i], &c, NULL) - 120.0) < 2.0);
  }
}

/* The decay takes its share of the time, including evaluations. Here half of the time is spent on them: the last step
 * that was planned when the decay began stays the last. */
static void decay_as_planned(void **state) {
  (void)state;
  for (int every = 50; every <= 10000; every += 9950) {
    rfi_run_clock c = clock_of(120);
    double t = 0.0, begin = 0.0;
    int64_t n = 0, planned = 0;
    do {
      t += 0.03;
      if (rfi_run_clock_step(&c, ++n, 0.03) == RFI_CLOCK_DECAY) begin = t, planned = c.lr_steps[RFI_LR_END];
      if (n % every == 0) {
        t += 1.5;
        rfi_run_clock_other(&c, 1.5);
      }
    } while (n < c.lr_steps[RFI_LR_END]);
    assert_int_equal(n, planned);
    assert_true(fabs(t - 114.0) < 2.0);
    assert_true(fabs(t - begin - 0.3 * 114.0) < 3.0);
  }
}

static void decay_in_steps(void **state) {
  static const machine idle = {1, 10, 0.5, 0};
  (void)state;
  rfi_run_clock c = clock_of(120);
  int64_t steps;
  c.decay = (rfi_clock_amount){500, false};
  c.warmup = (rfi_clock_amount){30, false};
  rfi_run_clock_init(&c);
  simulate(&idle, &c, &steps);
  assert_int_equal(c.lr_steps[RFI_LR_WARMUP], 30);
  assert_in_range(steps - c.lr_steps[RFI_LR_DECAY], 450, 550);
}

/* The warmup is a share of the run, however long the first step took. */
static void warmup(void **state) {
  static const machine slow_start = {40, 1e9, 1e-10, 0};
  (void)state;
  rfi_run_clock c = clock_of(120);
  int64_t steps;
  simulate(&slow_start, &c, &steps);
  assert_in_range(c.lr_steps[RFI_LR_WARMUP], steps * 2 / 100, steps * 6 / 100);
}

/* A device with steps of 1 ms runs up to `slots` steps ahead, so the metrics of several are read at once. */
static void warmup_of_launched_ahead(void **state) {
  (void)state;
  for (int slots = 2; slots <= 64; slots *= 2) {
    rfi_run_clock c = clock_of(120);
    int64_t n = 0;
    for (; c.lr_steps[RFI_LR_END] == RFI_LR_LATER; n++)
      rfi_run_clock_step(&c, n + slots, n == 0 ? 0.5 : n % slots == 0 ? 1e-3 * slots - 1e-5 * (slots - 1) : 1e-5);
    const int64_t steps = n * 10 / 7; /* the decay is 30 % */
    if (c.lr_steps[RFI_LR_WARMUP] < steps * 3 / 100 || c.lr_steps[RFI_LR_WARMUP] > steps * 5 / 100)
      fail_msg("%d slots: a warmup of %lld of %lld steps", slots, (long long)c.lr_steps[RFI_LR_WARMUP],
               (long long)steps);
  }
}

static void resumed_in_the_decay(void **state) {
  (void)state;
  rfi_run_clock c = clock_of(120);
  int64_t n = 0;
  for (; c.lr_steps[RFI_LR_END] == RFI_LR_LATER; n++) rfi_run_clock_step(&c, n + 1, 0.03);
  const int64_t decay = c.lr_steps[RFI_LR_DECAY], end = c.lr_steps[RFI_LR_END];
  assert_int_equal(decay, n);
  rfi_run_clock_resume(&c, n);
  assert_true(fabs(c.left - (120.0 - 6.0 - c.used)) < 1e-9);
  for (; n < end; n++) assert_int_equal(rfi_run_clock_step(&c, n + 1, 0.5), RFI_CLOCK_SAME);
  assert_int_equal(c.lr_steps[RFI_LR_DECAY], decay);
  assert_int_equal(c.lr_steps[RFI_LR_END], end);
}

/* A single step takes longer than the run may take. */
static void too_little_time(void **state) {
  (void)state;
  rfi_run_clock c = clock_of(1);
  c.reserve = 0.5;
  rfi_run_clock_step(&c, 1, 3.0);
  assert_true(c.lr_steps[RFI_LR_END] <= 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(ends_on_time),
                                     cmocka_unit_test(decay_as_planned),
                                     cmocka_unit_test(decay_in_steps),
                                     cmocka_unit_test(warmup),
                                     cmocka_unit_test(warmup_of_launched_ahead),
                                     cmocka_unit_test(resumed_in_the_decay),
                                     cmocka_unit_test(too_little_time)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
