/* SPDX-License-Identifier: Apache-2.0
 */
#include "train/tensorboard.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "base/base.h"
#include "data/file.h"
#include "train/event_file.h"
#include "train/events.h"

static void end_file(rfr_run *run, const char *why) {
  rfi_journal_close(run->event_file);
  run->event_file = -1;
  rfi_run_warn(run, "the event file cannot be written (%s); the run continues without it", why);
}

static void append(rfr_run *run, const uint8_t *record, size_t n) {
  const char *wrong = rfi_journal_append(run->event_file, (const char *)record, n);
  if (wrong) end_file(run, wrong);
}

/* TensorBoard reads the files of a folder in lexical order, so the name begins with the time. */
static void open_file(rfr_run *run, const rfr_event *e, double time) {
  char name[96], *path;
  uint8_t record[RFI_EVENT_BYTES];
  bool taken = false;
  rfi_snprintf(name, sizeof name, "events.out.tfevents.%010lld.%d", (long long)time, (int)getpid());
  rfr_status s = rfi_path_join(run->ctx, run->folder, name, &path);
  if (s == RFR_OK) {
    s = rfi_journal_open(path, &run->event_file, &taken);
    rfi_free(run->ctx, path);
  }
  if (s != RFR_OK || taken) {
    end_file(run, taken ? "another process has it open" : rfr_last_error()->message);
    return;
  }
  append(run, record, rfi_event_version(time, record));
  if (run->event_file >= 0) append(run, record, rfi_event_session(time, e->step + 1, record));
}

static void put_metrics(rfr_run *run, const rfr_event *e, double time) {
  const double none = NAN, experts = e->most_load > 0.0 ? 0.0 : none;
  const bool preference = run->settings->spec.preference;
  const rfi_scalar scalars[] = {
      {"train/loss", e->loss},
      {"train/bits_per_byte", preference ? none : e->bits_per_byte},
      {"train/margin", preference ? e->margin : none},
      {"train/accuracy", preference ? e->accuracy : none},
      {"train/lr", e->lr},
      {"train/grad_norm", e->grad_norm},
      {"train/tokens_per_second", e->seconds > 0.0 ? (double)e->tokens / e->seconds : none},
      {"train/skipped", e->skipped},
      {"experts/most_load", experts + e->most_load},
      {"experts/least_load", experts + e->least_load},
  };
  uint8_t record[RFI_EVENT_BYTES];
  append(run, record, rfi_event_scalars(time, e->step, scalars, sizeof scalars / sizeof scalars[0], record));
}

static void put_evaluation(rfr_run *run, const rfr_event *e, double time) {
  const bool preference = run->settings->spec.preference;
  const rfi_scalar scalars[] = {
      {"evaluation/loss", e->loss},
      {preference ? "evaluation/margin" : "evaluation/bits_per_byte", preference ? e->margin : e->bits_per_byte},
      {"evaluation/accuracy", preference ? e->accuracy : (double)NAN},
  };
  uint8_t record[RFI_EVENT_BYTES];
  append(run, record, rfi_event_scalars(time, e->step, scalars, sizeof scalars / sizeof scalars[0], record));
}

/* "watch_rms/NAME" and so on: a group per statistic. */
static void put_watched(rfr_run *run, const rfr_event *e, double time) {
  for (int64_t i = 0; i < e->values && run->event_file >= 0; i++) {
    const rfr_watched *w = &e->watched[i];
    char tag[4][RFI_EVENT_TAG + 1];
    const char *const groups[] = {"mean", "rms", "largest", "zeros"};
    const double values[] = {w->mean, w->rms, w->largest, w->zeros};
    rfi_scalar scalars[4];
    for (int k = 0; k < 4; k++) {
      snprintf(tag[k], sizeof tag[k], "watch_%s/%s", groups[k], w->name);
      scalars[k] = (rfi_scalar){tag[k], values[k]};
    }
    uint8_t record[RFI_EVENT_BYTES];
    append(run, record, rfi_event_scalars(time, e->step, scalars, 4, record));
  }
}

void rfi_tensorboard_event(rfr_run *run, const rfr_event *e, double time) {
  if (e->kind == RFR_EVENT_START && run->settings->tensorboard) open_file(run, e, time);
  if (run->event_file < 0) return;
  if (e->kind == RFR_EVENT_METRICS) put_metrics(run, e, time);
  if (e->kind == RFR_EVENT_EVALUATION) put_evaluation(run, e, time);
  if (e->kind == RFR_EVENT_WATCH) put_watched(run, e, time);
}
