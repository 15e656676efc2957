/* SPDX-License-Identifier: Apache-2.0
 *
 * A run's inside, shared by the files of this folder.
 *
 * Where the truth lies. What decides the next step is on the device: the step block, the
 * weights, the moments. The host keeps three numbers beside it, all derived: `step`, the
 * steps whose metrics were seen; `launched`, those that were launched, which the block's
 * attempted count equals once they are done; and `filled`, one past the last step whose
 * inputs lie in the ring. A slot is filled again only after the metrics of the step that
 * read it were seen.
 */
#ifndef RFI_RUN_H
#define RFI_RUN_H

#include <stdarg.h>
#include <stdatomic.h>

#include "data/checkpoint.h"
#include "data/dataset.h"
#include "refrain/train.h"
#include "train/settings.h"

/* Elements of the step block. */
enum { RFI_STEP_ATTEMPTED, RFI_STEP_APPLIED, RFI_STEP_SEED, RFI_STEP_SKIPPED, RFI_STEP_N };

/* What the bits of a run depend on besides its configuration. */
typedef struct rfi_host_info {
  char matmul[96];
  bool matmul_library, bf16_fast;
} rfi_host_info;
rfr_status rfi_host_info_read(rfr_ctx *ctx, rfi_host_info *out);

typedef struct rfi_kept { /* the host's memory for a tensor on a device of its own */
  const void *data;
  void *host;
} rfi_kept;

struct rfr_run {
  rfr_ctx *ctx;
  rfr_run_options options;
  rfi_host_info machine;
  rfi_settings *settings; /* resolved */
  char *folder;           /* NULL: nothing is written */
  int log;                /* file descriptor, -1 */
  rfi_dataset *data;      /* NULL with no_data */
  rfr_programs *programs;
  int n_programs, bits[4];                             /* RFR_RUN_... of each program */
  rfr_tensor block, tokens, targets, offsets, metrics; /* training */
  rfr_tensor eval_tokens, eval_targets, eval_offsets;
  rfi_kept kept[4]; /* of the evaluation's three and the counts of zeros */
  int n_kept;
  int64_t step, steps, launched, filled;
  int skipped_in_row;
  bool ready;           /* the state has values */
  char checkpoint[512]; /* last written or loaded */
  char hash[33];        /* of the data */
  json_t *tuned;        /* what was chosen by measuring, name by name; NULL: nothing yet, or run.tune is off */
  atomic_int stop;
};

static inline bool rfi_stop_requested(rfr_run *run) { return atomic_load_explicit(&run->stop, memory_order_relaxed); }

/* Stamps an event and hands it to the log and the callback. */
void rfi_emit(rfr_run *run, rfr_event *e);
void rfi_warn(rfr_run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
rfr_status rfi_log_open(rfr_run *run, const char *path);

/* A tensor's bytes for the host: as they are (READ), or to be written whole (WRITE; the tensor
 * has them after close, unless so_far, which close returns, is an error). */
typedef enum rfi_host_access { RFI_HOST_READ, RFI_HOST_WRITE } rfi_host_access;
/* Memory for the copy, until forget. */
rfr_status rfi_host_keep(rfr_run *run, const rfr_tensor *x);
void rfi_host_forget(rfr_run *run);
rfr_status rfi_host_open(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void **out);
rfr_status rfi_host_close(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void *host, rfr_status so_far);

/* Rows of windows of a split into packed arrays; offsets has rows * sequence + 1
 * entries, the last ones repeating the end. Without data: random tokens. */
rfr_status rfi_fill_rows(rfr_run *run, rfi_split split, int64_t first, int64_t rows, int32_t *tokens, int32_t *targets,
                         int32_t *offsets);
/* There are a program for it and windows that are held out. */
bool rfi_run_evaluates(const rfr_run *run);
/* Over the first `windows` held-out windows, rounded up to whole batches; 0: all. */
rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out);
/* An error without a run, or when it was opened without one of the programs (bits). */
rfr_status rfi_run_check(const rfr_run *run, int programs);
/* Runs one of the programs (RFR_RUN_...) as the options say. */
rfr_status rfi_launch(rfr_run *run, int program);
/* Puts the inputs of step `step` into its slot. */
rfr_status rfi_fill_slot(rfr_run *run, int64_t step);
/* Fills the state now if opening left it for later (a plan needs none). */
rfr_status rfi_state_ready(rfr_run *run);
/* First values of weights, moments, masters and the step block. */
rfr_status rfi_state_init(rfr_run *run);
/* Weights (and, with `training`, everything that a resume needs) from a checkpoint. */
rfr_status rfi_state_load(rfr_run *run, const rfi_checkpoint *checkpoint, bool training);
/* Takes the choices of a tuned run from its checkpoint: what is compiled after makes these. */
rfr_status rfi_state_tuned(rfr_run *run, const rfi_checkpoint *checkpoint);
/* Writes a checkpoint of the present state; emits its event. */
rfr_status rfi_state_save(rfr_run *run);

#endif
