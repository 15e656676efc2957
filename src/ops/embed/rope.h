/* SPDX-License-Identifier: Apache-2.0
 *
 * The angle per position of a head's pairs, for the rope kernels of all devices.
 */
#ifndef RFI_ROPE_H
#define RFI_ROPE_H

#include <math.h>

#include "ops/call.h"

/* The frequency of pair d of a head of D columns, from rope's attributes. With scaling, a frequency that makes at least
 * `high` turns over the original length stays, one that makes at most `low` turns is divided by the factor; those
 * between are interpolated in proportion to the turns. */
static inline double rfi_rope_frequency(const rfr_attr *attr, int64_t d, int64_t D) {
  double plain = pow(attr[0].f, -2.0 * (double)d / (double)D), factor = attr[2].f;
  double low = attr[3].f, high = attr[4].f, kept = 0;
  if (attr[5].i > 0) kept = ((double)attr[5].i * plain / (2 * M_PI) - low) / (high - low);
  kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
  return factor == 1 ? plain : plain * (kept + (1 - kept) / factor);
}

/* The rotation that an op describes. */
typedef struct rfi_rotation {
  int64_t pairs; /* (d, d + pairs) for d below; further columns are copied */
  bool inverse;
  float scale;
  const rfr_attr *attr;
  const double *table; /* frequencies of rope_table, or NULL */
  int64_t D;
} rfi_rotation;
static inline rfi_rotation rfi_rope_rotation(const rfr_call *c) {
  rfi_rotation r = {c->in[0].type.shape[2] / 2, c->attr[1].i != 0, 1.0f, c->attr, NULL, c->in[0].type.shape[2]};
  return r;
}
static inline rfi_rotation rfi_rope_table_rotation(const rfr_call *c) {
  rfi_rotation r = {c->attr[2].l.n, c->attr[0].i != 0, (float)c->attr[1].f,
                    c->attr,        c->attr[2].l.x,    c->in[0].type.shape[2]};
  return r;
}
static inline double rfi_rotation_frequency(const rfi_rotation *r, int64_t d) {
  return r->table ? r->table[d] : rfi_rope_frequency(r->attr, d, r->D);
}

#endif
