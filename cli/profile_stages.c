/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain profile --ranks: the time of a step of all ranks, for a pipeline compared with the simulated time. The costs
 * of a stage are measured with a wait around each action; then the schedule is simulated with them. The rest of the
 * step, after the simulated time and the update, is the cost of messages and of launches.
 */
#include "profile_stages.h"

#include <stdlib.h>

enum { WARM_STEPS = 3, STEPS = 8 };

typedef struct stage_times {
  rfr_run_pipeline pipeline;
  rfr_stage_costs *costs; /* per stage */
  rfr_rank_result *ranks;
  rfr_schedule *schedule;
  rfr_schedule_result simulated;
  double step, update;
} stage_times;

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The median time of a step. */
static rfr_status time_steps(rfr_run *run, int64_t steps, double *out) {
  double *seconds = calloc((size_t)steps, sizeof *seconds);
  rfr_status s = seconds ? RFR_OK : RFR_NO_MEMORY;
  for (int64_t i = -WARM_STEPS; s == RFR_OK && i < steps; i++) {
    const double start = cli_now();
    s = rfr_run_step(run);
    if (i >= 0) seconds[i] = cli_now() - start;
  }
  if (s == RFR_OK) qsort(seconds, (size_t)steps, sizeof *seconds, compare);
  if (s == RFR_OK) *out = seconds[steps / 2];
  free(seconds);
  return s;
}

static rfr_status simulate(cli *c, stage_times *t) {
  rfr_schedule_options o = rfr_schedule_options_default();
  o.kind = t->pipeline.schedule;
  o.ranks = t->pipeline.ranks;
  o.microbatches = (int)t->pipeline.microbatches;
  const rfr_status s = rfr_schedule_generate(c->ctx, &o, &t->schedule);
  if (s != RFR_OK) return s;
  return rfr_schedule_simulate(t->schedule, t->costs, t->pipeline.stages, &t->simulated, t->ranks, NULL, NULL);
}

/* The largest idle fraction of a rank in the measured time of the schedule. On a busy machine the update may take
 * longer than the entire step did at another time; the fraction is then 0. */
static double measured_bubble(const stage_times *t) {
  const double schedule = t->step > t->update ? t->step - t->update : 0;
  double most = 0;
  for (int r = 0; r < t->pipeline.ranks; r++) {
    const double idle = 1 - t->ranks[r].busy / schedule;
    if (idle > most) most = idle;
  }
  return most;
}

/* ---- output ---- */

static const struct {
  rfr_action_op op;
  const char *name;
} columns[] = {{RFR_ACTION_F, "F"}, {RFR_ACTION_I, "I"}, {RFR_ACTION_W, "W"}, {RFR_ACTION_B, "B"}};
enum { COLUMNS = sizeof columns / sizeof *columns };

static void put_stages(json *j, const stage_times *t) {
  json_begin(j, "stages", '[');
  for (int i = 0; i < t->pipeline.stages; i++) {
    json_begin(j, NULL, '{');
    for (int k = 0; k < COLUMNS; k++)
      if (t->costs[i].seconds[columns[k].op] >= 0) json_double(j, columns[k].name, t->costs[i].seconds[columns[k].op]);
    json_end(j, '}');
  }
  json_end(j, ']');
}

static rfr_status write_stages(const char *path, const stage_times *t) {
  FILE *f = fopen(path, "wb");
  if (!f) return cli_cannot_write(path);
  json j = {.f = f};
  json_begin(&j, NULL, '{');
  put_stages(&j, t);
  json_end(&j, '}');
  fputc('\n', f);
  const bool failed = ferror(f);
  return fclose(f) != 0 || failed ? cli_cannot_write(path) : RFR_OK;
}

static void print_json(const stage_times *t) {
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "schedule", rfr_schedule_kind_name(t->pipeline.schedule));
  json_int(&j, "ranks", t->pipeline.ranks);
  json_int(&j, "microbatches", t->pipeline.microbatches);
  json_double(&j, "seconds_per_step", t->step);
  json_double(&j, "update_seconds", t->update);
  json_double(&j, "bubble", measured_bubble(t));
  json_double(&j, "simulated_seconds", t->simulated.makespan);
  json_double(&j, "simulated_bubble", t->simulated.bubble);
  put_stages(&j, t);
  json_end(&j, '}');
  putchar('\n');
}

static void print_table(const stage_times *t) {
  printf("%s over %d ranks, %lld microbatches, %lld bytes a message\n", rfr_schedule_kind_name(t->pipeline.schedule),
         t->pipeline.ranks, (long long)t->pipeline.microbatches, (long long)t->pipeline.message_bytes);
  printf("  step       %9.2f ms, %.2f ms of them in the update\n", 1e3 * t->step, 1e3 * t->update);
  printf("  schedule   %9.2f ms, bubble %.1f %%\n", 1e3 * (t->step - t->update), 100 * measured_bubble(t));
  printf("  simulated  %9.2f ms, bubble %.1f %%\n\nstage   rank", 1e3 * t->simulated.makespan,
         100 * t->simulated.bubble);
  for (int k = 0; k < COLUMNS; k++) printf("  %7s ms", columns[k].name);
  for (int i = 0; i < t->pipeline.stages; i++) {
    printf("\n%5d  %5d", i, rfr_schedule_rank(t->schedule, i));
    for (int k = 0; k < COLUMNS; k++) {
      const double seconds = t->costs[i].seconds[columns[k].op];
      if (seconds < 0) printf("  %10s", "");
      else printf("  %10.3f", 1e3 * seconds);
    }
  }
  putchar('\n');
}

/* Without a pipeline: the step of all ranks. */
static rfr_status profile_step(cli *c, rfr_run *run, int64_t steps) {
  double seconds;
  rfr_run_info info = {.size = sizeof info};
  json j = {.f = stdout};
  if (c->write_costs)
    return cli_usage("set parallel.pipeline, or profile one rank", "ranks without stages have no costs");
  const rfr_status s = time_steps(run, steps, &seconds);
  if (s != RFR_OK || c->launch.rank > 0) return s;
  rfr_run_get_info(run, &info);
  if (c->json) {
    json_begin(&j, NULL, '{');
    json_int(&j, "ranks", info.ranks);
    json_double(&j, "seconds_per_step", seconds);
    json_int(&j, "tokens_per_step", info.tokens_per_step);
    json_end(&j, '}');
    putchar('\n');
  } else {
    printf("%d rank%s: step %.2f ms of %lld tokens, %.0f tokens/s\n", info.ranks, info.ranks == 1 ? "" : "s",
           1e3 * seconds, (long long)info.tokens_per_step, (double)info.tokens_per_step / seconds);
  }
  return RFR_OK;
}

rfr_status cli_profile_stages(cli *c, rfr_run *run) {
  stage_times t = {0};
  const int64_t steps = c->steps > 0 ? c->steps : STEPS;
  rfr_run_get_pipeline(run, &t.pipeline);
  if (t.pipeline.ranks <= 1) return profile_step(c, run, steps);
  t.costs = calloc((size_t)t.pipeline.stages, sizeof *t.costs);
  t.ranks = calloc((size_t)t.pipeline.ranks, sizeof *t.ranks);
  rfr_status s = t.costs && t.ranks ? time_steps(run, steps, &t.step) : RFR_NO_MEMORY;
  if (s == RFR_OK) s = rfr_run_stage_costs(run, t.costs, &t.update);
  if (s == RFR_OK) s = simulate(c, &t);
  if (s == RFR_OK && c->launch.rank == 0 && c->write_costs) s = write_stages(c->write_costs, &t);
  if (s == RFR_OK && c->launch.rank == 0) c->json ? print_json(&t) : print_table(&t);
  rfr_schedule_destroy(t.schedule);
  free(t.ranks);
  free(t.costs);
  return s;
}
