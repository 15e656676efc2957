/* SPDX-License-Identifier: Apache-2.0 */
#include "train/state_check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ops/quant/formats.h"
#include "refrain/recipe.h"
#include "trace/trace.h"
#include "train/load_weights.h"
#include "train/parts.h"
#include "train/step_trace.h"

/* `positive`: the scales of fp8_delayed are divisors and must not be 0. Block scales and the amax history may be 0. */
static const char *wrong_scales(const float *x, int64_t n, bool positive) {
  for (int64_t i = 0; i < n; i++)
    if (!isfinite(x[i]) || x[i] < 0 || (positive && x[i] == 0))
      return positive ? "a scale that is not a positive number" : "a scale that is negative, NaN or infinite";
  return NULL;
}

/* Describes what is wrong in the block scales of an 8-bit moment, which follow its codes; NULL: nothing. */
static const char *wrong_moment(const rfr_run *run, const rfr_tensor *x, const void *values) {
  const char *suffix = rfi_ends_in(x->name, RFI_SUFFIX_V) ? RFI_SUFFIX_V : RFI_SUFFIX_M;
  char name[128];
  rfr_tensor w;
  snprintf(name, sizeof name, "%.*s", (int)(strlen(x->name) - strlen(suffix)), x->name);
  if (rfi_run_tensor(run, name, &w) != RFR_OK) return "no weight";
  const rfi_quant_layout l = rfi_quant_layout_for(RFR_QUANT_DYNAMIC8, w.type.rank, w.type.shape);
  return wrong_scales((const float *)((const char *)values + l.scales_at), l.scales, false);
}

const char *rfi_part_wrong(const rfr_tensor *own, const void *values) {
  if (own->type.dtype != RFR_U8 || own->role != RFR_ROLE_STATE)
    return rfi_values_finite(own->type.dtype, values, own->bytes) ? NULL : "elements that are NaN or infinite";
  const int64_t blocks = own->bytes / (RFI_DYNAMIC_BLOCK + 4); /* blocks with codes and a scale */
  return wrong_scales((const float *)((const char *)values + blocks * RFI_DYNAMIC_BLOCK), blocks, false);
}

const char *rfi_state_wrong(const rfr_run *run, const rfr_tensor *x, const void *values) {
  if (x->type.dtype == RFR_U8 && x->role == RFR_ROLE_STATE) return wrong_moment(run, x, values);
  if (strcmp(x->name, RFR_RECIPE_SCALE) == 0) return wrong_scales(values, x->bytes / 4, true);
  if (strcmp(x->name, RFR_RECIPE_HISTORY) == 0) return wrong_scales(values, x->bytes / 4, false);
  return rfi_values_finite(x->type.dtype, values, x->bytes) ? NULL : "elements that are NaN or infinite";
}
