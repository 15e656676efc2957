/* SPDX-License-Identifier: Apache-2.0
 *
 * A tokenizer's description, and the constructor that all readers use. tokenizer_json.c fills a description from a
 * tokenizer.json; other formats fill one from their own metadata.
 *
 * A text goes through these stages, as in the Python package tokenizers, which defines the ids:
 *   added tokens that are not normalized -> normalizers -> added tokens that are normalized -> pre-tokenizers -> model
 *   -> tokens of the post-processor around them
 */
#ifndef RFI_TOKENIZER_H
#define RFI_TOKENIZER_H

#include "base/base.h"
#include "data/hash.h"
#include "refrain/text.h"

typedef enum rfi_token_model { RFI_BPE, RFI_UNIGRAM, RFI_WORDPIECE } rfi_token_model;

/* Text of n bytes; NUL bytes are allowed. text NULL: none. */
typedef struct rfi_bytes {
  const char *text;
  size_t n;
} rfi_bytes;

/* Kinds of steps. A step uses the fields named in its comment. */
typedef enum rfi_step_kind {
  /* normalizers */
  RFI_NORM_NFC,
  RFI_NORM_NFD,
  RFI_NORM_NFKC,
  RFI_NORM_NFKD,
  RFI_NORM_LOWERCASE,
  RFI_NORM_STRIP,         /* left, right: white space at the ends of the text */
  RFI_NORM_STRIP_ACCENTS, /* removes nonspacing marks */
  RFI_NORM_REPLACE,       /* pattern, is_regex, content */
  RFI_NORM_PREPEND,       /* content, before a text that is not empty */
  RFI_NORM_BERT,          /* clean, chinese, strip_accents, lowercase */
  RFI_NORM_BYTE_LEVEL,    /* as RFI_PRE_BYTE_LEVEL without pattern and prefix */
  RFI_NORM_NMT,           /* removes control characters; other white space becomes a space */
  RFI_NORM_PRECOMPILED,   /* content: a charsmap of sentencepiece */
  /* pre-tokenizers */
  RFI_PRE_SPLIT,       /* pattern, is_regex, behavior, invert */
  RFI_PRE_BYTE_LEVEL,  /* prefix: add a space; use_regex: split as GPT-2. Bytes become printable characters */
  RFI_PRE_METASPACE,   /* content: one character; scheme; split */
  RFI_PRE_DIGITS,      /* individual */
  RFI_PRE_PUNCTUATION, /* behavior */
  RFI_PRE_WHITESPACE,
  RFI_PRE_WHITESPACE_SPLIT,
  RFI_PRE_BERT,
  /* decoders */
  RFI_DEC_BYTE_LEVEL,
  RFI_DEC_BYTE_FALLBACK,
  RFI_DEC_FUSE,
  RFI_DEC_METASPACE, /* content, scheme */
  RFI_DEC_REPLACE,   /* pattern (never a regular expression), content */
  RFI_DEC_STRIP,     /* content: one character; start, stop */
  RFI_DEC_WORDPIECE, /* content: the prefix; cleanup */
  RFI_DEC_BPE        /* content: the suffix */
} rfi_step_kind;

typedef enum rfi_split_behavior {
  RFI_SPLIT_REMOVED,
  RFI_SPLIT_ISOLATED,
  RFI_SPLIT_MERGED_WITH_PREVIOUS,
  RFI_SPLIT_MERGED_WITH_NEXT,
  RFI_SPLIT_CONTIGUOUS
} rfi_split_behavior;

typedef enum rfi_prepend_scheme { RFI_PREPEND_NEVER, RFI_PREPEND_FIRST, RFI_PREPEND_ALWAYS } rfi_prepend_scheme;

typedef struct rfi_step {
  rfi_step_kind kind;
  const char *where; /* key path, for errors: "pre_tokenizer.pretokenizers[0]" */
  rfi_bytes pattern, content;
  bool is_regex, invert;
  rfi_split_behavior behavior;
  rfi_prepend_scheme scheme;
  bool left, right;
  bool clean, chinese, strip_accents, lowercase;
  bool prefix, use_regex, split, individual, cleanup;
  int64_t start, stop;
} rfi_step;

typedef struct rfi_added_token {
  rfi_bytes content;
  int32_t id;
  bool special, normalized, lstrip, rstrip, single_word;
} rfi_added_token;

typedef struct rfi_merge {
  rfi_bytes left, right;
} rfi_merge;

/* Everything is borrowed during rfi_tokenizer_create. Zeros are valid defaults, except for ids. */
typedef struct rfi_tokenizer_spec {
  const char *name; /* file, for errors */
  rfi_token_model model;
  const rfi_bytes *tokens; /* by id; text NULL: the model does not use the id (an added token may) */
  int64_t n_tokens;
  const double *scores;    /* Unigram: n_tokens log-probabilities */
  const rfi_merge *merges; /* BPE: by rank */
  int64_t n_merges;
  int32_t unknown; /* id, -1: none */
  bool fuse_unknown, byte_fallback, ignore_merges;
  rfi_bytes continuing_prefix, word_suffix; /* BPE and WordPiece; n 0: none */
  int64_t max_word;                         /* WordPiece: characters of a word that is not the unknown token */
  const rfi_added_token *added;
  int64_t n_added;
  const rfi_step *normalizers, *pre_tokenizers, *decoders;
  int n_normalizers, n_pre_tokenizers, n_decoders;
  const int32_t *before, *after; /* tokens that add_special adds around a text */
  int n_before, n_after;
  int32_t bos, eos;    /* -1: none */
  const int32_t *stop; /* ids that end a generated text; eos is added */
  int n_stop;
} rfi_tokenizer_spec;

enum {
  RFI_TOKENS_LIMIT = 1 << 24,      /* ids */
  RFI_TOKEN_BYTES_LIMIT = 1 << 16, /* of one token */
  RFI_STEPS_LIMIT = 64
};

/* Errors: tokenizer, tokenizer.unsupported, RFR_NO_MEMORY. */
rfr_status rfi_tokenizer_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, rfr_tokenizer **out);
/* Identifies everything in the description that affects ids: the key of token caches. */
rfi_hash rfi_tokenizer_hash(const rfr_tokenizer *tokenizer);

/* A tokenizer.json from memory; `name` is its file in errors. bos, eos and stop ids stay empty. */
rfr_status rfi_tokenizer_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_tokenizer **out);

#endif
