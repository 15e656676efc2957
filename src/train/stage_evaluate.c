/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank runs the programs of its stages in order. A rank that has sent a batch begins with the next one, so the
 * batches of an evaluation fill the pipeline; an exchange of the caller bounds how far the first rank is ahead.
 */
#include "train/stage_evaluate.h"

#include "base/base.h"
#include "dist/comm.h"
#include "exec/exec.h"
#include "train/run_programs.h"

static int rank_of(const rfr_run *run, int stage) { return rfi_pipeline_rank(&run->settings->spec.pipeline, stage); }

/* Gets the input of a stage; `y` is the output of the previous stage, if this rank has it. */
static rfr_status take_input(rfr_run *run, int stage, const rfr_tensor *y) {
  const rfi_step_spec *s = &run->settings->spec;
  const rfr_tensor *x = &run->eval_x;
  if (rank_of(run, stage - 1) == s->pipeline.rank) return rfr_programs_write(run->programs, x, y->data);
  return rfi_comm_receive(run->options.comm, rfi_pipeline_peer(s, rank_of(run, stage - 1)), x->data, x->bytes,
                          rfi_programs_stream(run->programs));
}

/* Waits for the message, because the program's next launch overwrites the output. */
static rfr_status send_output(rfr_run *run, int to, const rfr_tensor *y) {
  rfr_comm *comm = run->options.comm;
  void *stream = rfi_programs_stream(run->programs);
  RFI_TRY(rfi_comm_send(comm, to, y->data, y->bytes, stream));
  return rfi_comm_wait_sent(comm, to, rfi_comm_sent(comm, to), stream);
}

rfr_status rfi_stages_evaluate(rfr_run *run, float *loss) {
  const rfi_step_spec *s = &run->settings->spec;
  const int last = rfi_pipeline_stages(&s->pipeline) - 1;
  int program = rfr_run_program_index(run, RFR_RUN_EVALUATE);
  rfr_tensor y = {0};
  *loss = 0;
  for (int stage = 0; stage <= last; stage++) {
    if (rank_of(run, stage) != s->pipeline.rank) continue;
    if (stage > 0) RFI_TRY(take_input(run, stage, &y));
    RFI_TRY(rfi_launch_at(run, program));
    RFI_TRY(rfr_program_output(run->programs, program++, stage < last ? RFI_NAME_EVAL_Y : RFI_NAME_NLL, &y));
    if (stage == last) return rfr_programs_read(run->programs, &y, loss);
    if (rank_of(run, stage + 1) != s->pipeline.rank)
      RFI_TRY(send_output(run, rfi_pipeline_peer(s, rank_of(run, stage + 1)), &y));
  }
  return RFR_OK;
}
