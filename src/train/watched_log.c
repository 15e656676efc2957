/* SPDX-License-Identifier: Apache-2.0
 *
 * The entry of a step is read right after its metrics: the device writes it before the next step can replace it, which
 * the host launches later than `slots` steps.
 */
#include "train/watched_log.h"

#include "base/base.h"
#include "base/json.h"
#include "train/events.h"

/* The watched program completes its entry before or after it writes the metrics, so both may be in flight. */
static rfr_status read_values(rfr_run *run, rfr_watched *out, int n) {
  for (int idle = 0;;) {
    const rfr_status s = rfr_programs_watched(run->programs, run->step - 1, 0, &out[0]);
    if (s == RFR_OK) break;
    if (idle) return s;
    RFI_TRY(rfr_programs_poll(run->programs, &idle));
  }
  for (int i = 1; i < n; i++) RFI_TRY(rfr_programs_watched(run->programs, run->step - 1, i, &out[i]));
  return RFR_OK;
}

rfr_status rfi_watched_emit(rfr_run *run) {
  int n = 0;
  rfr_watched *values;
  while (rfr_programs_watched_name(run->programs, n)) n++;
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)(n + 1) * sizeof *values, &values));
  const rfr_status s = read_values(run, values, n);
  if (s == RFR_OK)
    rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_WATCH, .step = run->step, .watched = values, .values = n});
  rfi_free(run->ctx, values);
  return s;
}

static rfr_status put_value(json_t *o, const rfr_watched *w) {
  json_t *list = json_pack("[IIIfffff]", (json_int_t)w->elements, (json_int_t)w->nans, (json_int_t)w->infs, w->mean,
                           w->rms, w->largest, w->smallest, w->zeros);
  return rfi_json_set(o, w->name, list);
}

static rfr_status print_line(const rfr_event *e, double time, rfi_string *out) {
  json_t *o = json_object(), *values = NULL;
  rfr_status s = rfi_json_set(o, "step", json_integer(e->step));
  if (s == RFR_OK) s = rfi_json_set(o, "time", json_real(time));
  if (s == RFR_OK) s = rfi_json_set(o, "values", values = json_object());
  for (int64_t i = 0; i < e->values && s == RFR_OK; i++) s = put_value(values, &e->watched[i]);
  if (s == RFR_OK) s = rfi_json_print_compact(o, out);
  if (s == RFR_OK) s = rfi_string_append(out, "\n", 1);
  json_decref(o);
  return s;
}

void rfi_watched_write(rfr_run *run, const rfr_event *e, double time) {
  rfi_string line = {.ctx = run->ctx};
  char wrong[256];
  if (run->watch_failed) return;
  if (print_line(e, time, &line) != RFR_OK) snprintf(wrong, sizeof wrong, "%s", rfr_last_error()->message);
  else if (rfi_run_append(run, "watch.jsonl", line.data, line.n, wrong)) wrong[0] = '\0';
  rfi_string_deinit(&line);
  if (!wrong[0]) return;
  run->watch_failed = true;
  rfi_run_warn(run, "watch.jsonl cannot be written (%s); the run continues without it", wrong);
}
