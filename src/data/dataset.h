/* SPDX-License-Identifier: Apache-2.0
 *
 * Data sets. This file has the interface of all of them, and text files: the files, the split, and the window of
 * tokens that is sample i. Tokens are bytes, or those of a tokenizer; the split is one of bytes. Files of tokens
 * (data/token_dataset.h) have the same windows.
 *
 * Files come from patterns, in the order of their paths' bytes. Of equal files one is kept; empty files are dropped; a
 * binary file is an error. A document is a file, or a run of blocks of a file. No window predicts across documents.
 *
 * Validation by a fraction f: a file is held out by a hash of its path, so the split does not change when files are
 * added. Where this leaves no text on one side (few files), blocks of text are held out instead. A block has 256 to
 * 65536 bytes, by the size of its file, and ends at a line. It is held out by a hash of its bytes, so equal blocks lie
 * in one split, and adding files moves no block.
 *
 * There is no cursor. Sample i of the training split is window i mod W of epoch i / W. Its position is computed from
 * (seed, epoch, i mod W): a resumed run continues with i. In an epoch W = ceil(N / S) windows of S tokens tile the N
 * training tokens as a ring that starts at a position drawn per epoch, each window once, in a drawn order. So every
 * token is an input at least once per epoch, and at most S - 1 tokens are inputs twice.
 *
 * The held-out split has its windows in order, W = ceil((M - 1) / S). Every token is predicted exactly once, except the
 * first of each document. Bits per byte = sum of losses in nats / ln 2 / bytes of the predicted tokens.
 */
#ifndef RFI_DATASET_H
#define RFI_DATASET_H

#include "data/file.h"
#include "data/token_table.h"

enum { RFI_IGNORED_TARGET = -100 };

typedef enum rfi_split { RFI_TRAIN, RFI_VALIDATION } rfi_split;

/* Bytes of a file that are a document. */
typedef struct rfi_extent {
  int64_t offset, size;
} rfi_extent;
/* Turns the documents of a file into the rows of an empty table. `file` is the hash of the file's bytes. Several
 * threads call it at once, each with its own file and table; after an error it is called again, with an empty table. */
typedef rfr_status (*rfi_dataset_encode_fn)(void *user, const char *path, rfi_hash file, const char *data,
                                            const rfi_extent *documents, int n, rfi_token_table *out);

typedef struct rfi_dataset_options {
  const char *root;                       /* what relative patterns start from; NULL: the working folder */
  double validation_fraction;             /* 0 <= f < 1; used when there are no validation patterns */
  const char *const *validation_patterns; /* files held out by name; they leave the training split */
  int n_validation_patterns;
  int sequence; /* S */
  int context; /* C < S: tokens of the window before that each held-out window but the first repeats, without targets */
  rfi_dataset_encode_fn encode; /* NULL: a byte is a token */
  void *encode_user;
} rfi_dataset_options;

typedef struct rfi_dataset_stats {
  int files[2];     /* with bytes in the split; the same file may be in both when blocks are held out */
  int documents[2]; /* of each split; rows, if the files have rows */
  int64_t bytes[2]; /* of text; of rows: that the tokens stand for */
  int64_t tokens[2];
  int64_t trained[2];           /* tokens that are targets */
  int64_t trained_bytes[2];     /* of text that they stand for */
  int64_t truncated, cut;       /* rows that were longer than a window and were cut; tokens that were cut off */
  int64_t dropped;              /* rows that were longer than a window and were dropped */
  int64_t untrained;            /* rows left out because they have no token to train */
  int64_t equal;                /* pairs left out because both answers are equal */
  int cached;                   /* files whose tokens came from the cache */
  bool rows;                    /* the files have rows */
  bool token_files;             /* the files have ids: bytes and trained_bytes are not those of text */
  int duplicates;               /* files dropped because an equal file is kept */
  int empty;                    /* files dropped because they are empty */
  int blocks, held_out_blocks;  /* 0: whole files are held out */
  int64_t windows[2];           /* W: per epoch, and in the whole held-out split */
  int64_t validation_predicted; /* tokens that get a loss in one pass over the held-out split */
  rfi_hash hash;                /* of both splits: every document's split, length and bytes, in order */
} rfi_dataset_stats;

typedef struct rfi_dataset rfi_dataset;

/* The calls that differ between kinds of data. `ds` is the data set whose calls these are. A data set without `window`
 * is a stream of documents, as text is. */
typedef struct rfi_dataset_calls {
  void (*close)(rfi_dataset *ds);
  const char *(*file)(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes);
  rfr_status (*window)(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                       int32_t *targets, int32_t *doc_offsets, int *n_docs);
  rfr_status (*windows)(rfi_dataset *ds, uint64_t seed, int64_t epochs, int64_t *out);
  int64_t (*window_bytes)(const rfi_dataset *ds, int64_t sample);
  /* Of a stream: where the document of token `at` of a split ends, and n tokens of one document. */
  int64_t (*document_end)(const rfi_dataset *ds, rfi_split split, int64_t at);
  rfr_status (*read)(rfi_dataset *ds, rfi_split split, int64_t at, int64_t n, int32_t *tokens);
} rfi_dataset_calls;

struct rfi_dataset {
  const rfi_dataset_calls *calls;
  rfi_dataset_stats stats;
  int sequence, context; /* of a stream */
};

/* Errors: data.empty (a pattern without a file, or too few bytes for one window), data.binary, data.held_out (a
 * fraction of text that is a single block), file.*. */
rfr_status rfi_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                            const rfi_dataset_options *options, rfi_dataset **out);
void rfi_dataset_close(rfi_dataset *ds); /* accepts NULL */

const rfi_dataset_stats *rfi_dataset_get_stats(const rfi_dataset *ds);
/* The i-th file with bytes in a split: path as matched, and size of the file. */
const char *rfi_dataset_file(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes);

/* Window `sample` of a split: S tokens, and for each the following byte as its target. A target is RFI_IGNORED_TARGET
 * if the next byte belongs to another document. doc_offsets[0 .. *n_docs) are the positions in the window where
 * documents begin, the first always 0; it needs S elements, because a document may be one byte. `seed` has no effect on
 * the held-out split, whose windows past the end are padding: tokens 0, no targets. Padding is a separate document. */
rfr_status rfi_dataset_window(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                              int32_t *targets, int32_t *doc_offsets, int *n_docs);
/* The windows of `epochs` epochs of the training split: of the whole epochs, and of a share of the next one, rounded
 * up. */
rfr_status rfi_dataset_windows(rfi_dataset *ds, uint64_t seed, double epochs, int64_t *out);
/* Bytes of text that the targets of a window of the held-out split stand for. */
int64_t rfi_dataset_window_bytes(const rfi_dataset *ds, int64_t sample);
/* Whether a hash is among the share `fraction` of all hashes that is held out. */
bool rfi_is_held_out(uint64_t hash, double fraction);
/* The files that match patterns, sorted by path. Errors: data.empty (a pattern without a file), file.*. */
rfr_status rfi_find_files(const char *root, const char *const *patterns, int n, rfi_paths *paths);

/* Errors: data.binary (the bytes are those of a binary file, or have a NUL). */
rfr_status rfi_check_text(const char *path, const char *data, size_t n);
/* For a stream, whose other statistics are set: counts its windows. `what` are its tokens in an error;
 * NULL: no training, so it may be empty. Errors: data.empty. */
rfr_status rfi_dataset_count_windows(rfi_dataset *ds, const char *what);
/* For a stream: the windows of `epochs` epochs. */
rfr_status rfi_stream_windows(rfi_dataset *ds, uint64_t seed, int64_t epochs, int64_t *out);
/* Checks sequence, context and validation_fraction. */
rfr_status rfi_dataset_check_options(const rfi_dataset_options *options);

/* For a stream: the position of sample i of the training split in the concatenated training tokens. */
int64_t rfi_dataset_position(const rfi_dataset *ds, uint64_t seed, int64_t sample);
/* A permutation of 0 .. n-1, at `index`, in constant expected time. */
uint64_t rfi_permute(uint64_t index, uint64_t n, uint64_t key, uint64_t epoch);

#endif
