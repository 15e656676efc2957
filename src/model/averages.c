/* SPDX-License-Identifier: Apache-2.0
 *
 * The averaged weights of a checkpoint; see averages.h.
 */
#include "model/averages.h"

#include <math.h>
#include <string.h>

#include "base/base.h"

rfr_status rfi_averages_open(rfr_ctx *ctx, const char *folder, rfi_safetensors **out) {
  char *path = NULL, kind = 0;
  *out = NULL;
  RFI_TRY(rfi_safetensors_open_parts(ctx, folder, "optimizer", out));
  rfr_status s = RFR_OK;
  if (!*out) s = rfi_path_join(ctx, folder, "optimizer.safetensors", &path);
  if (path) s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind) s = rfi_safetensors_open(ctx, path, out);
  rfi_free(ctx, path);
  bool any = false;
  for (int i = 0; s == RFR_OK && *out && i < rfi_safetensors_count(*out) && !any; i++)
    any = rfi_ends_in(rfi_safetensors_at(*out, i)->name, RFI_SUFFIX_EMA);
  if (s == RFR_OK && !any)
    s = rfi_fail(RFI_E_RUN_EMA, "%s has no averaged weights: it is not a checkpoint of a run with optimizer.ema",
                 folder);
  if (s == RFR_OK) return RFR_OK;
  rfi_safetensors_close(*out);
  *out = NULL;
  return s;
}

const rfi_stored *rfi_averages_find(const rfi_safetensors *st, const char *name) {
  char full[160];
  rfi_snprintf(full, sizeof full, "%s" RFI_SUFFIX_EMA, name);
  return rfi_safetensors_find(st, full);
}

rfr_status rfi_averages_read(rfi_safetensors *st, const char *folder, const char *name, int64_t n, float *values,
                             bool *found) {
  const rfi_stored *stored = rfi_averages_find(st, name);
  *found = stored != NULL;
  if (!stored) return RFR_OK;
  if (stored->elements != n)
    return rfi_fail_at(RFI_E_CHECKPOINT, folder, 0, "%s has %lld elements, the model's weight %lld", stored->name,
                       (long long)stored->elements, (long long)n);
  RFI_TRY(rfi_safetensors_read_as(st, stored, RFR_F32, values, n));
  for (int64_t i = 0; i < n; i++)
    if (!isfinite(values[i]))
      return rfi_fail_at(RFI_E_CHECKPOINT, folder, 0, "%s has NaN or infinite values", stored->name);
  return RFR_OK;
}
