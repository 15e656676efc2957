/* SPDX-License-Identifier: Apache-2.0
 *
 * Text files as byte tokens: which files, which of them are held out, and which window
 * of bytes is sample i.
 *
 * A document is a file. Files come from patterns, in order of their paths' bytes; of
 * equal files one is kept; empty ones are left out. A file is held out by a hash of its
 * path as matched, so the split does not change when files are added, or with the order.
 *
 * Nothing is advanced. Sample i of the training split is window i mod W of epoch i / W,
 * and where that window lies is computed from (seed, epoch, i mod W): to resume is to go
 * on with i. In an epoch W = ceil(N / S) windows of S bytes tile the N training bytes as
 * a ring that starts at a place drawn per epoch, each window once, in a drawn order; so
 * every byte is an input at least once per epoch, and at most S - 1 are twice.
 *
 * The held-out split has its windows in order, W = ceil((M - 1) / S); every byte is
 * predicted exactly once, except the first of each document, which has nothing before
 * it. Bits per byte = sum of losses in nats / ln 2 / rfi_dataset_stats.validation_predicted.
 */
#ifndef RFI_DATASET_H
#define RFI_DATASET_H

#include "data/file.h"

enum { RFI_IGNORED_TARGET = -100 };

typedef enum rfi_split { RFI_TRAIN, RFI_VALIDATION } rfi_split;

typedef struct rfi_dataset_options {
  const char *root;                       /* what relative patterns start from; NULL: the working folder */
  double validation_fraction;             /* of the files, 0 <= f < 1, used when there are no patterns */
  const char *const *validation_patterns; /* files held out by name; they leave the training split */
  int n_validation_patterns;
  int sequence; /* S */
  int context;  /* C < S: what each held-out window but the first repeats of the one before it, without targets */
} rfi_dataset_options;

typedef struct rfi_dataset_stats {
  int files[2]; /* documents of each split */
  int64_t bytes[2];
  int duplicates;               /* files left out because an equal one is there */
  int empty;                    /* files without a byte */
  int64_t windows[2];           /* W: per epoch, and in the whole held-out split */
  int64_t validation_predicted; /* bytes that get a loss in one pass over the held-out split */
  rfi_hash hash;                /* of both splits: every document's split, length and bytes, in order */
} rfi_dataset_stats;

typedef struct rfi_dataset rfi_dataset;

/* Errors: data.empty names the pattern without a file, or says that too few bytes are left for one window. */
rfr_status rfi_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                            const rfi_dataset_options *options, rfi_dataset **out);
void rfi_dataset_close(rfi_dataset *ds); /* accepts NULL */

const rfi_dataset_stats *rfi_dataset_get_stats(const rfi_dataset *ds);
/* The i-th document of a split: path as matched and size. */
const char *rfi_dataset_document(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes);

/* Window `sample` of a split: S tokens, and the S bytes that follow each as targets.
 * A target is RFI_IGNORED_TARGET where the next byte belongs to another document.
 * doc_offsets[0 .. *n_docs) are the places in the window where a document begins, the
 * first always 0; it has room for S, because a document may be one byte. `seed` does not
 * matter for the held-out split, whose windows past the end are padding: tokens 0, no
 * targets. The last window's padding begins a document of its own. */
rfr_status rfi_dataset_window(const rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                              int32_t *targets, int32_t *doc_offsets, int *n_docs);

/* Where sample i of the training split begins in the concatenated training bytes. */
int64_t rfi_dataset_position(const rfi_dataset *ds, uint64_t seed, int64_t sample);
/* A permutation of 0 .. n-1, at `index`, in constant expected time. */
uint64_t rfi_permute(uint64_t index, uint64_t n, uint64_t key, uint64_t epoch);

#endif
