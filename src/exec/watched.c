/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of watched values, from the sums in the watch ring. The sequence number of an entry is read before the
 * sums and a second time after them, all with acquire order. So sums of a later step are never mistaken for those of
 * this step.
 */
#include <math.h>

#include "base/base.h"
#include "exec/exec.h"
#include "ops/ring/watch_sums.h"

static const rfi_pipeline *pipeline_of(const rfr_programs *p) {
  return p && p->watched.n > 0 ? &p->program[p->watched_program].u.pipeline : NULL;
}

const char *rfr_programs_watched_name(const rfr_programs *p, int i) {
  const rfi_pipeline *line = pipeline_of(p);
  return line && i >= 0 && i < line->n_watched ? line->watched[i] : NULL;
}

static bool has_step(const double *entry, int64_t step) {
  double sequence;
  __atomic_load(entry, &sequence, __ATOMIC_ACQUIRE);
  return sequence == (double)(step + 1);
}

rfr_status rfr_programs_watched(const rfr_programs *p, int64_t step, int i, rfr_watched *out) {
  RFI_TRY(rfi_check_allocated(p, "rfr_programs_watched"));
  RFI_TRY(rfi_check_handle(out, "rfr_watched"));
  *out = (rfr_watched){.name = rfr_programs_watched_name(p, i)};
  if (!out->name || step < 0)
    return rfi_fail(RFI_E_ARGUMENT, "there is no watched value %d in step %lld", i, (long long)step);
  const rfi_named *ring = rfi_storage_find(&p->m.store, RFI_WATCH_NAME);
  const int64_t rows = ring->tensor.type.shape[1];
  const double *entry = (const double *)ring->tensor.data + step % p->watched.slots * rows * RFI_WATCH_SUMS;
  const bool before = has_step(entry, step);
  double row[RFI_WATCH_SUMS];
  for (int k = 0; k < RFI_WATCH_SUMS; k++)
    __atomic_load(entry + (1 + i) * RFI_WATCH_SUMS + k, &row[k], __ATOMIC_ACQUIRE);
  const double n = row[RFI_WATCH_COUNT], counted = n - row[RFI_WATCH_NANS] - row[RFI_WATCH_INFS];
  out->elements = (int64_t)n;
  out->nans = (int64_t)row[RFI_WATCH_NANS];
  out->infs = (int64_t)row[RFI_WATCH_INFS];
  out->mean = counted > 0 ? row[RFI_WATCH_SUM] / counted : 0;
  out->rms = counted > 0 ? sqrt(row[RFI_WATCH_SQUARES] / counted) : 0;
  out->largest = row[RFI_WATCH_MAX];
  out->smallest = row[RFI_WATCH_LEAST];
  out->zeros = n > 0 ? row[RFI_WATCH_ZEROS] / n : 0;
  if (before && has_step(entry, step)) return RFR_OK;
  return rfi_fail(RFI_E_PROGRAM_ORDER,
                  "step %lld has no statistics: it has not ended, or a later step has replaced them", (long long)step);
}
