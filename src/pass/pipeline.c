/* SPDX-License-Identifier: Apache-2.0
 *
 * The passes in their order. Every stage keeps its trace and report, so that any of them
 * can be printed and compared.
 */
#include "pass/pass.h"
#include "trace/live.h"

static const struct {
  const char *name;
  rfr_status (*run)(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
} passes[] = {
    {"autodiff", rfi_pass_autodiff},
    {"prune", rfi_pass_prune},
    {"fuse", rfi_pass_fuse},
    {"lower", rfi_pass_lower},
};
_Static_assert(sizeof passes / sizeof *passes + 1 == RFI_STAGES,
               "a stage for each pass and one for the recorded trace");

static rfr_status peak_of(const rfr_trace *t, int64_t *peak) {
  int64_t *live;
  RFI_TRY(rfi_live_bytes(t, &live));
  *peak = 0;
  for (int i = 0; i < t->n_ops; i++)
    if (live[i] > *peak) *peak = live[i];
  rfi_free(t->ctx, live);
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
  RFI_GOTO(peak_of(p->stage[0].trace, &p->stage[0].peak));
  for (; p->n < RFI_STAGES; p->n++) {
    rfi_stage *before = &p->stage[p->n - 1], *stage = &p->stage[p->n];
    stage->pass = passes[p->n - 1].name;
    RFI_GOTO(passes[p->n - 1].run(before->trace, o, &stage->report, &stage->trace));
    RFI_GOTO(peak_of(stage->trace, &stage->peak));
    RFI_GOTO(rfi_report_line(&stage->report, "%s: %d ops before, %d after; peak of live bytes %lld before, %lld after",
                             stage->pass, before->trace->n_ops, stage->trace->n_ops, (long long)before->peak,
                             (long long)stage->peak));
  }
  return RFR_OK;
fail:
  rfi_pipeline_deinit(p);
  return s;
}

void rfi_pipeline_deinit(rfi_pipeline *p) {
  for (int i = 0; i < RFI_STAGES; i++) {
    rfr_trace_destroy(p->stage[i].trace);
    if (p->stage[i].report.text.ctx) rfi_string_deinit(&p->stage[i].report.text);
    p->stage[i].trace = NULL;
  }
  p->n = 0;
}
