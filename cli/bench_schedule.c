/* SPDX-License-Identifier: Apache-2.0
 *
 * A pipeline of 64 stages and 512 microbatches: how long it takes to make and check it, to add
 * sends and receives, and to run it on paper with costs of each stage.
 */
#include <stdlib.h>

#include "bench.h"

enum { STAGES = 64, MICROBATCHES = 512, TIMES = 15 };

/* Seconds of making, of adding messages and of running, each by itself. */
static rfr_status once(cli *c, const rfr_stage_costs *costs, double *seconds, rfr_schedule_info *info) {
  rfr_schedule *s = NULL, *with = NULL;
  rfr_schedule_result result;
  rfr_rank_result ranks[STAGES];
  rfr_schedule_options o = rfr_schedule_options_default();
  o.kind = RFR_SCHEDULE_ZB_H1;
  o.ranks = STAGES;
  o.microbatches = MICROBATCHES;
  double at = cli_now();
  rfr_status status = rfr_schedule_generate(c->ctx, &o, &s);
  seconds[0] = cli_now() - at;
  at = cli_now();
  if (status == RFR_OK) status = rfr_schedule_add_communication(s, &with);
  seconds[1] = cli_now() - at;
  at = cli_now();
  if (status == RFR_OK) status = rfr_schedule_simulate(with, costs, STAGES, &result, ranks, NULL, NULL);
  seconds[2] = cli_now() - at;
  if (status == RFR_OK) status = rfr_schedule_get_info(with, info);
  rfr_schedule_destroy(with);
  rfr_schedule_destroy(s);
  return status;
}

rfr_status bench_schedule(cli *c) {
  rfr_stage_costs costs[STAGES];
  rfr_schedule_info info = {0};
  double seconds[3][TIMES], median[3];
  rfr_status s = RFR_OK;
  for (int i = 0; i < STAGES; i++) {
    costs[i] = rfr_stage_costs_default();
    costs[i].seconds[RFR_ACTION_SEND_F] = costs[i].seconds[RFR_ACTION_SEND_B] = 0.05;
    costs[i].activation_bytes = 100000 + i;
    costs[i].wgrad_bytes = costs[i].gradient_bytes = 1000;
  }
  for (int i = 0; i < TIMES && s == RFR_OK; i++) {
    double one[3];
    s = once(c, costs, one, &info);
    for (int k = 0; k < 3; k++) seconds[k][i] = one[k];
  }
  if (s != RFR_OK) return s;
  for (int k = 0; k < 3; k++) median[k] = 1e3 * cli_median(seconds[k], TIMES);
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "name", "schedule");
    json_int(&j, "actions", info.n_actions);
    json_double(&j, "make_ms", median[0]);
    json_double(&j, "communication_ms", median[1]);
    json_double(&j, "simulate_ms", median[2]);
    json_end(&j, '}');
    putchar('\n');
  } else {
    printf("schedule (zb-h1, %d stages x %d microbatches, %d actions with sends and receives)\n"
           "  made and checked in %.1f ms, with messages again in %.1f, run on paper in %.1f (medians of %d)\n",
           STAGES, MICROBATCHES, info.n_actions, median[0], median[1], median[2], TIMES);
  }
  return RFR_OK;
}
