/* SPDX-License-Identifier: Apache-2.0
 *
 * Training of byte-level BPE: counts of words in, merges out.
 *
 * Each merge joins the pair of adjacent tokens with the largest count over all words; of equal counts, the pair with
 * the smallest left id, then the smallest right id. The Python package tokenizers has the same rule, so the merges are
 * equal.
 */
#ifndef RFI_BPE_TRAIN_H
#define RFI_BPE_TRAIN_H

#include "text/word_table.h"

enum {
  RFI_TRAINED_TOKEN_BYTES = 1 << 14, /* maximum of a token */
  RFI_TEXT_SPECIALS = 4096           /* maximum of special tokens */
};

/* Ids: special tokens, then the 256 bytes in the order of their printable characters, then one for each merge whose
 * text is new. */
typedef struct rfi_trained_bpe {
  rfi_word_table tokens; /* the bytes of each token after the special ones, by id - n_special */
  struct rfi_trained_merge {
    uint32_t left, right;
  } * merges;
  size_t n_merges, merges_capacity;
  int64_t n_special;
  int64_t least; /* count of the last merge; 0: there was none */
} rfi_trained_bpe;

/* Stops at `vocab_size` ids, or when every pair has a count below min_frequency. No merge makes a text of `reserved`.
 * Starts from {0} with n_special; deinit also after an error. Errors: overflow (2^32 bytes of distinct words),
 * memory.alloc. */
rfr_status rfi_bpe_train(rfr_ctx *ctx, const rfi_word_table *words, const rfi_word_table *reserved, int64_t vocab_size,
                         int64_t min_frequency, rfi_trained_bpe *out);
void rfi_trained_bpe_deinit(rfr_ctx *ctx, rfi_trained_bpe *t);

/* A position after `from` where the text may be cut: with every pattern of rfr_word_pattern, the words of both parts
 * together are those of the text. n: there is none. */
size_t rfi_words_cut(const char *s, size_t n, size_t from);

#endif
