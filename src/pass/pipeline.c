/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the passes in order. Every stage keeps its trace and report for printing and comparison.
 */
#include <string.h>

#include "pass/watch_values.h"
#include "trace/live.h"

static const struct {
  const char *name;
  rfr_status (*run)(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
} passes[] = {
#define PASS_ROW(name) {#name, rfi_pass_##name},
    RFR_PASSES(PASS_ROW)
#undef PASS_ROW
};
_Static_assert(sizeof passes / sizeof *passes + 1 == RFI_STAGES,
               "a stage for each pass and one for the recorded trace");

/* Names the values after autodiff; adds the ops that watch them after the last pass. */
static rfr_status watch(const rfi_pass_options *o, rfi_pipeline *p, rfi_stage *stage) {
  if (!o->watch) return RFR_OK;
  if (strcmp(stage->pass, "autodiff") == 0) return rfi_watch_name(stage->trace);
  if (p->n + 1 < RFI_STAGES) return RFR_OK;
  rfr_trace *last = stage->trace;
  const rfr_status s =
      rfi_watch_values(p->stage[1].trace, last, o->watch, &stage->report, &stage->trace, &p->watched, &p->n_watched);
  rfr_trace_destroy(last);
  return s;
}

static rfr_status run_passes(const rfi_pass_options *o, rfi_pipeline *p) {
  for (; p->n < RFI_STAGES; p->n++) {
    rfi_stage *before = &p->stage[p->n - 1], *stage = &p->stage[p->n];
    stage->pass = passes[p->n - 1].name;
    RFI_TRY(passes[p->n - 1].run(before->trace, o, &stage->report, &stage->trace));
    RFI_TRY(watch(o, p, stage));
    RFI_TRY(rfi_live_peak(stage->trace, &stage->peak));
    RFI_TRY(rfi_report_line(&stage->report, "%s: %d ops before, %d after; peak of live bytes %lld before, %lld after",
                            stage->pass, before->trace->n_ops, stage->trace->n_ops, (long long)before->peak,
                            (long long)stage->peak));
  }
  return RFR_OK;
}

rfr_status rfi_pipeline_run(const rfr_trace *recorded, const rfi_pass_options *o, rfi_pipeline *p) {
  rfr_status s;
  *p = (rfi_pipeline){.ctx = recorded->ctx};
  for (int i = 0; i < RFI_STAGES; i++) p->stage[i].report.text.ctx = recorded->ctx;
  RFI_TRY(rfr_trace_status(recorded));
  p->stage[0].pass = "record";
  p->n = 1;
  RFI_GOTO(rfi_copy_trace(recorded, &p->stage[0].trace));
  RFI_GOTO(rfi_live_peak(p->stage[0].trace, &p->stage[0].peak));
  RFI_GOTO(run_passes(o, p));
  return RFR_OK;
fail:
  rfi_pipeline_deinit(p);
  return s;
}

rfr_status rfi_pipeline_redo(rfi_pipeline *p, const char *pass, const rfi_pass_options *o) {
  int first = 1;
  while (first < p->n && strcmp(p->stage[first].pass, pass) != 0) first++;
  for (int i = first; i < p->n; i++) {
    rfi_stage *stage = &p->stage[i];
    rfr_trace_destroy(stage->trace);
    rfi_string_deinit(&stage->report.text);
    *stage = (rfi_stage){.report = {.text = {.ctx = p->ctx}}};
  }
  p->n = first;
  return run_passes(o, p);
}

void rfi_pipeline_deinit(rfi_pipeline *p) {
  for (int i = 0; i < RFI_STAGES; i++) {
    rfr_trace_destroy(p->stage[i].trace);
    if (p->stage[i].report.text.ctx) rfi_string_deinit(&p->stage[i].report.text);
    p->stage[i].trace = NULL;
  }
  p->n = 0;
}
