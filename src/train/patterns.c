/* SPDX-License-Identifier: Apache-2.0
 *
 * Matches patterns with names. The nearest name needs the fewest insertions, deletions and replacements of characters
 * to match the pattern; characters that * matches cost nothing.
 */
#include "train/patterns.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

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

static int least(int a, int b) { return a < b ? a : b; }

/* cost[j]: edit distance of the pattern up to here to the first j characters of the name. */
static int distance(const char *glob, const char *name) {
  enum { NAME = sizeof((rfi_hf_tensor *)0)->name };
  const int n = least((int)strlen(name), NAME - 1);
  int cost[NAME];
  for (int j = 0; j <= n; j++) cost[j] = j;
  for (; *glob; glob++) {
    int before = cost[0]; /* distance without the last character of both */
    cost[0] += *glob != '*';
    for (int j = 1; j <= n; j++) {
      const int was = cost[j];
      if (*glob == '*') cost[j] = least(was, cost[j - 1]);
      else cost[j] = least(before + (*glob != '?' && *glob != name[j - 1]), 1 + least(was, cost[j - 1]));
      before = was;
    }
  }
  return cost[n];
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
      const int d = distance(glob, name);
      if (d >= nearest) continue;
      nearest = d;
      if (d > 0) snprintf(out, size, "the nearest is %s", name);
      else snprintf(out, size, "%s is a part of %s, which is trained as one parameter", name, p.name);
    }
  }
}
