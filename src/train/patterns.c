/* SPDX-License-Identifier: Apache-2.0
 *
 * Matches patterns with names.
 */
#include "train/patterns.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "model/hf.h"

static rfr_type type_of(const rfr_parameter *p) {
  rfr_type type = {.rank = p->rank};
  memcpy(type.shape, p->shape, sizeof p->shape);
  return type;
}

bool rfi_pattern_matches(const rfr_model_config *c, const char *glob, const rfr_parameter *p) {
  const rfr_type type = type_of(p);
  const int pieces = rfi_hf_pieces(p->name, &type);
  rfi_hf_tensor piece;
  if (rfr_name_matches(glob, p->name)) return true;
  for (int i = 0; i < pieces; i++) {
    rfi_hf_piece(c, p->name, &type, i, &piece);
    if (!rfr_name_matches(glob, piece.name)) return false;
  }
  return true;
}

void rfi_pattern_miss(const rfr_model_config *c, const char *glob, char *out, size_t size) {
  int nearest = INT_MAX;
  rfr_parameter p;
  for (int i = 0; i < rfr_model_parameter_count(c) && rfr_model_parameter(c, i, &p) == RFR_OK; i++) {
    const rfr_type type = type_of(&p);
    rfi_hf_tensor piece;
    for (int k = -1; k < rfi_hf_pieces(p.name, &type); k++) {
      if (k >= 0) rfi_hf_piece(c, p.name, &type, k, &piece);
      const char *name = k < 0 ? p.name : piece.name;
      const int d = rfi_glob_distance(glob, name);
      if (d >= nearest) continue;
      nearest = d;
      if (d > 0) snprintf(out, size, "the nearest is %s", name);
      else snprintf(out, size, "%s is a part of %s, which is trained as one parameter", name, p.name);
    }
  }
}
