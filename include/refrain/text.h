/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokenizers of published models: text to token ids and back. A tokenizer is immutable after it is opened; any number
 * of threads may use one at once, each with its own rfr_tokens and rfr_decoder.
 *
 *   rfr_tokenizer *tokenizer;
 *   rfr_tokens tokens = {0};
 *   if (rfr_tokenizer_open(ctx, "SmolLM2-135M-Instruct", &tokenizer) == RFR_OK &&
 *       rfr_tokenizer_encode(tokenizer, "Hello", 5, NULL, &tokens) == RFR_OK)
 *     for (int64_t i = 0; i < tokens.n; i++) printf("%d\n", (int)tokens.ids[i]);
 *   rfr_tokens_deinit(&tokens);
 *   rfr_tokenizer_destroy(tokenizer);
 *
 * No call may run during a capture.
 */
#ifndef REFRAIN_TEXT_H
#define REFRAIN_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "refrain/ctx.h"
#include "refrain/span.h"
#include "refrain/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_tokenizer rfr_tokenizer;

/* Reads a tokenizer. `path` is a tokenizer.json, a folder that has one, or a GGUF file with a vocabulary. The tokens
 * that begin and end a text come from the folder's tokenizer_config.json and generation_config.json. The ids equal
 * those of the Python package tokenizers. Entries for truncation and padding are ignored. Errors: tokenizer (a
 * field is not valid), tokenizer.unsupported (a component that would change tokens is not supported; the message has
 * its key path), json, file.*, RFR_NO_MEMORY. */
RFR_API rfr_status rfr_tokenizer_open(rfr_ctx *ctx, const char *path, rfr_tokenizer **out);
/* Accepts NULL. */
RFR_API void rfr_tokenizer_destroy(rfr_tokenizer *tokenizer);

typedef struct rfr_encode_options {
  size_t size;             /* sizeof (rfr_encode_options), so that the struct can grow */
  int add_special;         /* 1: add the tokens that the tokenizer adds around a text, such as BOS; 0: none (0) */
  const rfr_span *foreign; /* sorted, disjoint spans of bytes; no special token that overlaps one is matched. The text
                              is otherwise tokenized as one string */
  size_t n_foreign;
  int parallel; /* 1: a long text may use the context's threads, with the same result; not from a parallel region (0) */
} rfr_encode_options;
RFR_API rfr_encode_options rfr_encode_options_default(void);

/* The tokens of one text. Zero the struct before the first call; later calls reuse its memory. */
typedef struct rfr_tokens {
  int32_t *ids;     /* n ids */
  uint32_t *begins; /* n offsets: the first byte of the token in the text. A token that starts inside a character has
                       the offset of the character. An added token after the text has the length of the text */
  int64_t n;
  int64_t capacity;
  void *scratch; /* private */
} rfr_tokens;
/* Frees the memory and zeroes the struct. Call it before the tokenizer's context is destroyed: the memory belongs to
 * that context. */
RFR_API void rfr_tokens_deinit(rfr_tokens *tokens);

/* Tokenizes `n` bytes of text and replaces the tokens in `out`. In text that is not valid UTF-8, each maximal invalid
 * part is read as U+FFFD. `options` may be NULL. `out` caches pieces of text for one tokenizer; another tokenizer
 * clears the cache. Errors: RFR_INVALID (spans that are not sorted, text of 4 GiB or more), tokenizer (the text has a
 * character that the vocabulary lacks, and the tokenizer has no unknown token), RFR_NO_MEMORY. */
RFR_API rfr_status rfr_tokenizer_encode(const rfr_tokenizer *tokenizer, const char *text, size_t n,
                                        const rfr_encode_options *options, rfr_tokens *out);

/* One more than the largest id. */
RFR_API int64_t rfr_tokenizer_vocab_size(const rfr_tokenizer *tokenizer);
/* The token's text as the vocabulary has it, NUL-terminated; `n` gets its bytes and may be NULL. NULL for an id that is
 * not in use. It lives as long as the tokenizer. */
RFR_API const char *rfr_tokenizer_token(const rfr_tokenizer *tokenizer, int32_t id, size_t *n);
/* The id of a vocabulary entry or an added token; -1: there is none. */
RFR_API int32_t rfr_tokenizer_id(const rfr_tokenizer *tokenizer, const char *text, size_t n);
/* Whether the id is a special token. */
RFR_API int rfr_tokenizer_is_special(const rfr_tokenizer *tokenizer, int32_t id);
/* The token that begins a text, and the one that ends it; -1: none. */
RFR_API int32_t rfr_tokenizer_bos(const rfr_tokenizer *tokenizer);
RFR_API int32_t rfr_tokenizer_eos(const rfr_tokenizer *tokenizer);
/* The i-th id that ends a generated text, of those in generation_config.json and of rfr_tokenizer_eos; -1: past the
 * end. */
RFR_API int32_t rfr_tokenizer_stop(const rfr_tokenizer *tokenizer, int i);

/* Turns ids into text, one at a time. */
typedef struct rfr_decoder rfr_decoder;
/* `keep_special` 0: special tokens write nothing. The tokenizer must outlive the decoder. */
RFR_API rfr_status rfr_decoder_create(const rfr_tokenizer *tokenizer, int keep_special, rfr_decoder **out);
RFR_API void rfr_decoder_destroy(rfr_decoder *decoder); /* accepts NULL */
/* Adds a token and writes all complete characters, in valid UTF-8: invalid bytes become U+FFFD. Bytes of an incomplete
 * character are written with a later token. `write` may be called several times, or not at all.
 * An id that is not in use writes nothing. Errors: RFR_NO_MEMORY. */
RFR_API rfr_status rfr_decoder_add(rfr_decoder *decoder, int32_t id, rfr_write_fn write, void *user);
/* Writes the rest, and starts a new text. */
RFR_API rfr_status rfr_decoder_end(rfr_decoder *decoder, rfr_write_fn write, void *user);

/* Formats of token files (docs/data.md). */
typedef enum rfr_token_format {
  RFR_TOKENS_NANOGPT, /* ids alone */
  RFR_TOKENS_LLMC,    /* ids after a header of 1024 bytes */
  RFR_TOKENS_MEGATRON /* ids, and an index of documents in a second file */
} rfr_token_format;

/* Tokenizes files and writes their ids into the new file `out`, X.bin, and for Megatron X.idx. `paths` are n text
 * files, each a document, and files of text rows (.jsonl, .jsonl.gz, .jsonl.zst), each row a document. A document has
 * the ids with which a run trains on it: with the tokens that the tokenizer adds, and an end token. *documents and
 * *tokens count what was written; either may be NULL. On an error nothing is written. Errors: export.exists (one of the
 * outputs exists), data.tokens (the name of `out`, or more tokens than the format can count), data.binary, data.row,
 * data.compressed, data.empty (no document), tokenizer, file.*, RFR_NO_MEMORY. */
RFR_API rfr_status rfr_tokenizer_write_files(const rfr_tokenizer *tokenizer, const char *const *paths, int64_t n,
                                             rfr_token_format format, const char *out, int64_t *documents,
                                             int64_t *tokens);

/* How a text is split into words. No token is longer than a word. The patterns are those of the models. */
typedef enum rfr_word_pattern {
  RFR_WORDS_GPT2,   /* all digits of a number in one word */
  RFR_WORDS_LLAMA3, /* Llama 3 and cl100k: up to three digits in a word */
  RFR_WORDS_QWEN2   /* as Llama 3 with one digit in a word */
} rfr_word_pattern;

typedef struct rfr_tokenizer_train_options {
  size_t size;        /* sizeof (rfr_tokenizer_train_options) */
  int64_t vocab_size; /* ids: 256 bytes, the special tokens, and the merges (32768) */
  rfr_word_pattern pattern;
  const char *const *special; /* special tokens, which get the first ids; the first one ends a text. NULL: one,
                                 "<|endoftext|>" (NULL) */
  int64_t n_special;
  int64_t min_frequency; /* a pair that is less frequent is not merged, at least 1 (2) */
  int64_t max_bytes; /* bytes to train on: the first part of each file, in proportion to its size; 0: all text (0) */
  const char *chat_template; /* "chatml", or the path of a chat template that is written into the folder; NULL: none
                                (NULL) */
} rfr_tokenizer_train_options;
RFR_API rfr_tokenizer_train_options rfr_tokenizer_train_options_default(void);

/* Counts of a training. */
typedef struct rfr_tokenizer_training {
  int64_t vocab_size; /* less than asked for, if no pair has min_frequency any more */
  int64_t merges;
  int64_t least;        /* how often the pair of the last merge occurred; 0: there is no merge */
  int64_t files, bytes; /* bytes of text */
  int64_t words;        /* distinct ones */
} rfr_tokenizer_training;

/* Trains a byte-level BPE tokenizer and writes it into the new folder `out`: tokenizer.json, tokenizer_config.json with
 * the names of special tokens, and chat_template.jinja. If `out` ends in .json, only the tokenizer.json is written, to
 * this file. Other libraries that read these files give the same ids.
 *
 * `paths` are n files or patterns of files, as data.train has them, relative to the working folder: texts, and rows of
 * JSONL (.jsonl, .jsonl.gz, .jsonl.zst) in any form of docs/data.md. All texts of a row count. Invalid UTF-8 is read as
 * by rfr_tokenizer_encode. The most frequent pair is merged; if counts are equal, the one with the smaller left id,
 * then the smaller right id. So the result depends on the texts and options, not on threads or the order of files.
 *
 * The context's threads count words; call it outside parallel regions. `training` may be NULL. On an error nothing is
 * written. Errors: export.exists, argument (options), data.empty, data.binary, data.row, data.format, data.compressed,
 * overflow, template, file.*, RFR_NO_MEMORY (about 40 bytes for each byte of distinct words). */
RFR_API rfr_status rfr_tokenizer_train(rfr_ctx *ctx, const char *const *paths, int64_t n,
                                       const rfr_tokenizer_train_options *options, const char *out,
                                       rfr_tokenizer_training *training);

#ifdef __cplusplus
}
#endif
#endif
