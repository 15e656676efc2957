/* SPDX-License-Identifier: Apache-2.0
 *
 * A schedule as text: its lanes, then a row for each rank. If every action takes a multiple of the shortest one's
 * time and the lanes fit, each action's name is printed to scale; otherwise each column has the letter of the action
 * at that time.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { WIDTH = 140 };

rfr_status schedule_run_make(const rfr_schedule *s, const rfr_stage_costs *costs, schedule_run *out) {
  *out = (schedule_run){.schedule = s};
  rfr_status status = rfr_schedule_get_info(s, &out->info);
  if (status != RFR_OK) return status;
  out->ranks = calloc((size_t)out->info.ranks, sizeof *out->ranks);
  out->start = calloc((size_t)out->info.n_actions, sizeof *out->start);
  out->end = calloc((size_t)out->info.n_actions, sizeof *out->end);
  if (!out->ranks || !out->start || !out->end) return RFR_NO_MEMORY;
  return rfr_schedule_simulate(s, costs, out->info.stages, &out->result, out->ranks, out->start, out->end);
}

void schedule_run_deinit(schedule_run *s) {
  free(s->ranks);
  free(s->start);
  free(s->end);
  *s = (schedule_run){0};
}

/* The time of one cell; 0: the names do not fit. *cell gets the width of a name. */
static double unit_of(const schedule_run *s, int *cell) {
  double unit = s->result.makespan;
  char text[RFR_ACTION_TEXT];
  *cell = 0;
  for (int r = 0, k = 0, n; r < s->info.ranks; r++) {
    const rfr_action *a = rfr_schedule_actions(s->schedule, r, &n);
    for (int i = 0; i < n; i++, k++) {
      const double length = s->end[k] - s->start[k];
      const int width = (int)strlen(rfr_action_print(a[i], text)) + 1;
      if (length <= 0) continue;
      if (length < unit) unit = length;
      if (width > *cell) *cell = width;
    }
  }
  if (unit <= 0 || s->result.makespan / unit * *cell > WIDTH) return 0;
  for (int k = 0; k < s->info.n_actions; k++)
    if (fabs(s->start[k] / unit - round(s->start[k] / unit)) > 1e-6 ||
        fabs(s->end[k] / unit - round(s->end[k] / unit)) > 1e-6)
      return 0;
  return unit;
}

/* Prints one lane; the rank's actions begin at number k. */
static void put_lane(const schedule_run *s, int r, int k, double unit, int cell, FILE *f) {
  char lane[WIDTH + RFR_ACTION_TEXT], text[RFR_ACTION_TEXT];
  int n, columns = unit > 0 ? (int)lround(s->result.makespan / unit) * cell : WIDTH;
  const rfr_action *a = rfr_schedule_actions(s->schedule, r, &n);
  memset(lane, '.', sizeof lane);
  if (s->result.makespan <= 0) columns = 0;
  const double per = unit > 0 ? unit / cell : s->result.makespan / columns;
  for (int i = 0; i < n; i++) {
    if (s->end[k + i] <= s->start[k + i]) continue;
    const int from = (int)ceil(s->start[k + i] / per - 0.5 - 1e-9), to = (int)ceil(s->end[k + i] / per - 0.5 - 1e-9);
    rfr_action_print(a[i], text);
    const char *letter = text + strspn(text, "0123456789");
    for (int c = from; c < to && c < columns; c++) lane[c] = unit > 0 ? ' ' : *letter;
    if (unit > 0) memcpy(lane + from, text, strlen(text));
  }
  while (columns > 0 && lane[columns - 1] == ' ') columns--;
  fprintf(f, "%4d  %.*s\n", r, columns, lane);
}

/* "8+8+4+4" */
static void put_slots(const schedule_run *s, int r, FILE *f) {
  int width = 0;
  for (int stage = 0, k = 0; stage < s->info.stages; stage++) {
    if (rfr_schedule_rank(s->schedule, stage) != r) continue;
    width += fprintf(f, "%s%d", k++ ? "+" : "", rfr_schedule_slots(s->schedule, stage));
  }
  fprintf(f, "%*s", width < 15 ? 15 - width : 0, "");
}

void schedule_run_table(const schedule_run *s, FILE *f) {
  int cell, k = 0;
  const double unit = unit_of(s, &cell);
  const rfr_schedule_result *all = &s->result;
  fprintf(f, "%d ranks, %d stages, %d microbatches, %d actions%s\n\n", s->info.ranks, s->info.stages,
          s->info.microbatches, s->info.n_actions, s->info.training ? "" : ", forward only");
  for (int r = 0, n; r < s->info.ranks; r++, k += n) {
    rfr_schedule_actions(s->schedule, r, &n);
    put_lane(s, r, k, unit, cell, f);
  }
  fprintf(f, "\nrank %12s %12s %7s  %-15s %6s %6s %16s %16s\n", "busy", "idle", "", "slots", "sum", "live",
          "peak bytes", "live bytes");
  for (int r = 0; r < s->info.ranks; r++) {
    const rfr_rank_result *q = &s->ranks[r];
    fprintf(f, "%4d %12.6g %12.6g %6.1f%%  ", r, q->busy, q->idle,
            all->makespan > 0 ? 100 * q->idle / all->makespan : 0.0);
    put_slots(s, r, f);
    fprintf(f, " %6d %6d %16lld %16lld\n", q->slots, q->live, (long long)q->slot_bytes, (long long)q->live_bytes);
  }
  fprintf(f, "\nmakespan %.6g, bubble %.1f%%\n", all->makespan, 100 * all->bubble);
  fprintf(f, "slots %d, each with one graph per layer and direction; one slot per microbatch would be %lld\n",
          all->slots, (long long)s->info.stages * s->info.microbatches);
  fprintf(f, "peak %lld bytes if each slot has its own storage; %lld live at once, ratio %.4f\n",
          (long long)all->slot_bytes, (long long)all->live_bytes,
          all->live_bytes > 0 ? (double)all->slot_bytes / (double)all->live_bytes : 1.0);
}
