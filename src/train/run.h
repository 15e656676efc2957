/* SPDX-License-Identifier: Apache-2.0
 *
 * The struct of a run. Each file of this folder that works on it has a header of its own, and includes point one way:
 *   settings, machine, dataset -> run.h -> events, host -> batch -> programs -> state -> evaluate -> reference
 *   -> loop -> run.c
 *
 * The device holds everything that decides the next step: the step block, the weights, the moments. The host keeps
 * three derived numbers: `step`, the steps whose metrics were read; `launched`, the steps that were launched, which
 * the block's attempted count reaches once they are done; and `filled`, one past the last step whose inputs lie in the
 * ring. A slot is filled again only after the metrics of the step that read it were read.
 */
#ifndef RFI_RUN_H
#define RFI_RUN_H

#include <jansson.h>
#include <stdatomic.h>

#include "data/dataset.h"
#include "data/hash.h"
#include "refrain/train.h"
#include "train/machine.h"
#include "train/run_clock.h"
#include "train/settings.h"
#include "train/stages.h"

/* Host memory that a run reuses for a tensor on a device with separate memory. */
typedef struct rfi_host_copy {
  const void *data; /* data of the tensor */
  void *host;
} rfi_host_copy;

struct rfr_run {
  rfr_ctx *ctx;
  rfr_run_options options;
  rfi_host_info machine;
  rfi_settings *settings; /* resolved */
  char *folder;           /* NULL: the run writes no files */
  int log;                /* descriptor of log.jsonl, which locks the folder; -1: not open */
  bool opening;           /* rfr_run_open has not returned and may still fail, so */
  rfi_string pending;     /* lines of the log are stored here until then */
  bool pending_lost;      /* a line was lost for lack of memory */
  int event_file;         /* descriptor of the session's event file; -1: not open */
  rfi_dataset *data;      /* NULL with no_data */
  bool own_data;          /* the program provides the data */
  int64_t *positions;     /* own_data: the position before step k, at k % (slots + 1) */
  rfr_programs *programs;
  double *stage_seconds, update_start; /* used by rfr_run_stage_costs; NULL: it is not running */
  rfi_stages *stages;                  /* NULL: no pipeline, the training program is the complete step */
  int n_programs;
  int bits[7 + RFI_RAMP_MOST]; /* RFR_RUN_... of each program; a pipeline's rank may have two evaluations, of its first
                                    and its second stage; each phase of a ramp has a training program, that of the last
                                    one is the first of them; 0: watched */
  int phases[RFI_RAMP_MOST + 1];                       /* the training program of each phase */
  int watched;                                         /* index of the training program that watches values; -1: none */
  bool watch_failed;                                   /* watch.jsonl cannot be written */
  rfr_tensor block, tokens, targets, offsets, metrics; /* inputs of training */
  rfr_tensor pairs, reference_ring;                    /* inputs of training on preferences */
  rfr_tensor lr_steps;                                 /* input of a run that is given in time */
  rfr_tensor stop_ring;                                /* input of training on several ranks */
  rfr_tensor eval_tokens, eval_targets, eval_offsets;
  rfr_tensor eval_x;       /* input of an evaluation stage that is not the first */
  float *reference[2];     /* reference value of each pair of a split, see rfr_dpo_loss_at; NULL: not computed */
  rfr_type *full;          /* if ranks have parts: the recorded type of each tensor; see parts.h */
  rfi_host_copy copies[4]; /* copies of the three evaluation inputs and of the zero counts */
  int n_copies;
  int64_t step, steps, launched, filled;
  double tokens_per_byte; /* mean over the targets of training: 1 if tokens are bytes */
  int64_t windows;        /* run.epochs: number of windows, after which there is padding; 0: no end */
  int skipped_in_row;
  bool skipped_for_routing;            /* the last skipped step had an invalid routing */
  double step_seconds, window_seconds; /* recent mean per step; mean of the last evaluation */
  rfi_run_clock clock;                 /* for a run that is given in time */
  bool ready;                          /* the state is initialized */
  char checkpoint[512];                /* folder that was last written or loaded */
  int64_t checkpoint_bytes;            /* size of all tensors of one checkpoint */
  char hash[33];                       /* hash of the data */
  rfi_hash base;                       /* hash of the base model, with an adapter */
  json_t *tuned;                       /* the tuned choices, by name; NULL: none yet, or run.tune is off */
  atomic_int stop;                     /* a stop was requested on this rank */
  bool met;                            /* rfi_handshake was called or must be skipped */
  bool refused;                        /* the ranks did not agree */
  /* over several ranks: the metrics of a step contain a stop request; all ranks see it at the same step */
  bool stop_agreed;
};

static inline bool rfi_stop_requested_here(rfr_run *run) {
  return atomic_load_explicit(&run->stop, memory_order_relaxed);
}
static inline bool rfi_stop_requested(rfr_run *run) {
  return run->settings->parallel.ranks > 1 ? run->stop_agreed : rfi_stop_requested_here(run);
}

#endif
