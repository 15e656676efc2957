/* SPDX-License-Identifier: Apache-2.0
 *
 * JSONL files as a data set: rows become tokens, and rows are packed into windows.
 *
 * The files, their order and equal files are as for text (data/dataset.h). Each file has a weight w: an epoch has each
 * row of the file floor(w) times, and a share w - floor(w) of its rows once more. The share of an epoch starts where
 * that of the previous epoch ended, so over many epochs all rows occur equally often. A validation fraction holds out
 * rows by a hash of their bytes: equal rows are in one split, and a row stays in its split when files are added.
 *
 * An epoch has all rows in a random order of (seed, epoch), packed into windows (text/packing.h) in a random order.
 * Sample i is a window of its epoch; (seed, i) is enough to resume. Without packing, a window is one row. A row is a
 * document: no token attends to another row, and positions start at 0 in each row. The rest of a window is padding
 * without targets.
 *
 * A preference row is two documents, the chosen answer and then the rejected one, always in one window. There,
 * padding belongs to the last document of its window, so that documents 2p and 2p + 1 of a batch of windows are pair
 * p. If a pair is longer than a window, its longer answer is cut first.
 *
 * A row longer than a window is cut to its first tokens, dropped, or refused. A row without a token to train is left
 * out.
 */
#ifndef RFI_ROW_DATASET_H
#define RFI_ROW_DATASET_H

#include "data/dataset.h"
#include "text/row_encoder.h"
#include "text/token_cache.h"

typedef enum rfi_row_truncate { RFI_ROW_CUT, RFI_ROW_DROP, RFI_ROW_REFUSE } rfi_row_truncate;

typedef struct rfi_row_dataset_options {
  const char *root; /* the folder of relative patterns; NULL: the working folder */
  const char *const *patterns;
  /* weight of each pattern, > 0; a file has the weight of the first pattern that matches; NULL: 1 */
  const double *weights;
  int n_patterns;             /* 0: only the rows of validation_patterns are held out */
  double validation_fraction; /* as rfi_dataset_options */
  const char *const *validation_patterns;
  int n_validation_patterns;
  int sequence;
  bool packing;
  rfi_row_truncate truncate;
  /* form of all files; RFI_ROW_FORM_COUNT: detected from the first row of each file, never a preference */
  rfi_row_form form;
  rfi_token_cache *cache; /* used only during the call */
} rfi_row_dataset_options;

/* The encoder must be valid during the call. Errors: data.row, data.format, data.compressed, data.long, data.untrained,
 * data.empty, data.held_out, template.*, chat.*, tokenizer, file.*. */
rfr_status rfi_row_dataset_open(const rfi_row_encoder *encoder, const rfi_row_dataset_options *options,
                                rfi_dataset **out);
/* Row i of a split, in the order of the files: *n ids with RFI_TOKEN_TRAINED; NULL past the end. `ds` must be a row
 * data set. */
const uint32_t *rfi_row_dataset_row(const rfi_dataset *ds, rfi_split split, int64_t i, int64_t *n);

/* For preferences, which need the numbers of the rows in a window and a pass with each row once: returns window
 * `sample` of a split like rfi_dataset_window, or with `once` the window of a pass with all rows of the split in the
 * order of the files. `rows` gets the numbers of its rows, at most one per RFI_PAIR_TOKENS tokens. */
rfr_status rfi_row_dataset_window(rfi_dataset *ds, rfi_split split, bool once, uint64_t seed, int64_t sample,
                                  int32_t *tokens, int32_t *targets, int32_t *doc_offsets, int *n_docs, int32_t *rows,
                                  int *n_rows);
/* The number of windows of the pass with each row of a split once. */
rfr_status rfi_row_dataset_windows_once(rfi_dataset *ds, rfi_split split, int64_t *out);

#endif
