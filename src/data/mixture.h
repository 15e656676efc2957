/* SPDX-License-Identifier: Apache-2.0
 *
 * A data set that samples its windows from several others, by shares.
 *
 * Window i of training belongs to the source with the most credit: each window gives every source its share as credit,
 * and takes 1 from the one that is drawn. The counts of a source are therefore within a few windows of its share in
 * every prefix of the run. The first credits are drawn from the seed. Credits are integers, so the draw is the same on
 * every machine, for any number of ranks, and after a resume: it is computed again from window 0, in a few nanoseconds
 * a window. A source whose epochs are used up is no longer drawn, and the others keep their ratios.
 *
 * The held-out windows are those of the sources, one source after the other.
 */
#ifndef RFI_MIXTURE_H
#define RFI_MIXTURE_H

#include "data/dataset.h"

typedef struct rfi_mixture_source {
  rfi_dataset *data; /* owned by the mixture */
  double share;      /* > 0, relative to the sum of all */
  double epochs;     /* maximum number of epochs; INFINITY: no limit */
} rfi_mixture_source;

/* Copies the sources and takes ownership of their data sets, even if it fails. All must have windows of the same
 * length. `held_out`: the held-out windows are those of the first source, because all have the same. Errors:
 * argument. */
rfr_status rfi_mixture_open(rfr_ctx *ctx, const rfi_mixture_source *sources, int n, bool held_out, rfi_dataset **out);
/* The number of sources; 0: `ds` is not a mixture. */
int rfi_mixture_sources(const rfi_dataset *ds);
/* The source of a training document, or row, of the mixture; *document becomes its index in that source. Returns `ds`
 * itself if it is not a mixture. */
const rfi_dataset *rfi_mixture_document(const rfi_dataset *ds, int64_t *document);
/* counts[i]: windows of source i among the first `windows` of training, fewer if the sources have fewer; their sum in
 * *total. */
rfr_status rfi_mixture_counts(rfi_dataset *ds, uint64_t seed, int64_t windows, int64_t *counts, int64_t *total);

#endif
