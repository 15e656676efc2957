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

/* The byte range of a document in its file. */
typedef struct rfi_extent {
  int64_t offset, size;
} rfi_extent;
/* Tokenizes the documents of a file into the rows of an empty table. `file` is the hash of the file's bytes. Several
 * threads call it at the same time, each with its own file and table; after an error it is called again with an empty
 * table. */
typedef rfr_status (*rfi_dataset_encode_fn)(void *user, const char *path, rfi_hash file, const char *data,
                                            const rfi_extent *documents, int n, rfi_token_table *out);

typedef struct rfi_dataset_options {
  const char *root;                       /* the folder of relative patterns; NULL: the working folder */
  double validation_fraction;             /* 0 <= f < 1; used when there are no validation patterns */
  const char *const *validation_patterns; /* files held out by name; they are removed from the training split */
  int n_validation_patterns;
  int sequence; /* S */
  /* C < S: each held-out window except the first begins with C tokens of the previous window, without targets */
  int context;
  rfi_dataset_encode_fn encode; /* NULL: a byte is a token */
  void *encode_user;
} rfi_dataset_options;

typedef struct rfi_dataset_stats {
  int files[2];     /* files with bytes in the split; a file may be in both if blocks are held out */
  int documents[2]; /* per split; rows count as documents */
  int64_t bytes[2]; /* bytes of text; of rows, the bytes that the tokens stand for */
  int64_t tokens[2];
  int64_t trained[2];           /* tokens that are targets */
  int64_t trained_bytes[2];     /* bytes of text that these stand for */
  int64_t truncated, cut;       /* rows longer than a window that were cut; tokens that were cut off */
  int64_t dropped;              /* rows longer than a window that were dropped */
  int64_t untrained;            /* rows left out because they have no token to train */
  int64_t equal;                /* pairs left out because both answers are equal */
  int cached;                   /* files whose tokens came from the cache */
  bool rows;                    /* the files have rows */
  bool token_files;             /* the files have ids: bytes and trained_bytes are not those of text */
  int duplicates;               /* files dropped because an equal file is kept */
  int empty;                    /* files dropped because they are empty */
  int blocks, held_out_blocks;  /* 0: entire files are held out */
  int64_t windows[2];           /* W: per epoch; in the entire held-out split */
  int64_t validation_predicted; /* tokens that get a loss in one pass over the held-out split */
  rfi_hash hash;                /* over both splits: split, length and bytes of every document, in order */
} rfi_dataset_stats;

typedef struct rfi_dataset rfi_dataset;

/* The functions that differ between kinds of data; `ds` is the data set. A data set without `window` is a stream of
 * documents, such as text. */
typedef struct rfi_dataset_calls {
  void (*close)(rfi_dataset *ds);
  const char *(*file)(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes);
  rfr_status (*window)(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                       int32_t *targets, int32_t *doc_offsets, int *n_docs);
  rfr_status (*windows)(rfi_dataset *ds, uint64_t seed, int64_t epochs, int64_t *out);
  int64_t (*window_bytes)(const rfi_dataset *ds, int64_t sample);
  /* For a stream: the end of the document with token `at` of a split, and n tokens of one document. */
  int64_t (*document_end)(const rfi_dataset *ds, rfi_split split, int64_t at);
  rfr_status (*read)(rfi_dataset *ds, rfi_split split, int64_t at, int64_t n, int32_t *tokens);
} rfi_dataset_calls;

struct rfi_dataset {
  const rfi_dataset_calls *calls;
  rfi_dataset_stats stats;
  int sequence, context; /* for a stream */
};

/* Errors: data.empty (a pattern without a file, or too few bytes for one window), data.binary, data.held_out (a
 * fraction of text that is a single block), file.*. */
rfr_status rfi_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                            const rfi_dataset_options *options, rfi_dataset **out);
void rfi_dataset_close(rfi_dataset *ds); /* accepts NULL */

const rfi_dataset_stats *rfi_dataset_get_stats(const rfi_dataset *ds);
/* The i-th file with bytes in a split: its path as matched, and its size. */
const char *rfi_dataset_file(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes);

/* Returns window `sample` of a split: S tokens, and for each the next token as its target, or RFI_IGNORED_TARGET if the
 * next token belongs to another document. doc_offsets[0 .. *n_docs) are the positions in the window where documents
 * begin, the first always 0; it needs S elements, because a document may have one token. `seed` has no effect on the
 * held-out split, whose windows past the end are padding: tokens 0, no targets. Padding is a separate document. */
rfr_status rfi_dataset_window(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                              int32_t *targets, int32_t *doc_offsets, int *n_docs);
/* The number of windows in `epochs` epochs of the training split: of full epochs, and of a fraction of the next one,
 * rounded up. */
rfr_status rfi_dataset_windows(rfi_dataset *ds, uint64_t seed, double epochs, int64_t *out);
/* Bytes of text that the targets of a window of the held-out split stand for. */
int64_t rfi_dataset_window_bytes(const rfi_dataset *ds, int64_t sample);
/* Whether a hash belongs to the fraction of hashes that is held out. */
bool rfi_is_held_out(uint64_t hash, double fraction);
/* Lists the files that match patterns, sorted by path. Errors: data.empty (a pattern without a file), file.*. */
rfr_status rfi_find_files(const char *root, const char *const *patterns, int n, rfi_paths *paths);

/* Errors: data.binary (a known binary format, or a NUL). */
rfr_status rfi_check_text(const char *path, const char *data, size_t n);
/* For a stream whose other statistics are set: counts its windows. `what`: the name of its tokens in an error; NULL:
 * the data set is not for training, so the split may be empty. Errors: data.empty. */
rfr_status rfi_dataset_count_windows(rfi_dataset *ds, const char *what);
/* For a stream: the number of windows in `epochs` epochs. */
rfr_status rfi_stream_windows(rfi_dataset *ds, uint64_t seed, int64_t epochs, int64_t *out);
/* Checks sequence, context and validation_fraction. */
rfr_status rfi_dataset_check_options(const rfi_dataset_options *options);

/* For a stream: the position of sample i of the training split in the concatenated training tokens. */
int64_t rfi_dataset_position(const rfi_dataset *ds, uint64_t seed, int64_t sample);
/* A permutation of 0 .. n-1, at `index`, in constant expected time. */
uint64_t rfi_permute(uint64_t index, uint64_t n, uint64_t key, uint64_t epoch);

#endif
