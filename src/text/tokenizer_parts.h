/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of a tokenizer and their shared types. A part is immutable after its creation; a call changes only its
 * rfi_encoder, one per thread.
 */
#ifndef RFI_TOKENIZER_PARTS_H
#define RFI_TOKENIZER_PARTS_H

#include "text/tokenizer.h"
#include "text/unicode.h"
#include "text/work_divisor.h"

/* ---- texts between the stages ---- */

/* Valid UTF-8 with the origin of every byte: its offset in the caller's text. origin NULL: byte i comes from base +
 * i. */
typedef struct rfi_view {
  const char *s;
  size_t n;
  const uint32_t *origin;
  uint32_t base;
} rfi_view;
static inline uint32_t rfi_origin(const rfi_view *v, size_t i) {
  return v->origin ? v->origin[i] : v->base + (uint32_t)i;
}
static inline rfi_view rfi_view_part(const rfi_view *v, size_t begin, size_t end) {
  return (rfi_view){v->s + begin, end - begin, v->origin ? v->origin + begin : NULL, v->base + (uint32_t)begin};
}

/* A text that is being written. */
typedef struct rfi_text_buffer {
  char *s;
  uint32_t *origin;
  size_t n, capacity;
} rfi_text_buffer;

/* Bytes [begin, end) of a view. */
typedef struct rfi_piece {
  uint32_t begin, end;
} rfi_piece;
typedef struct rfi_pieces {
  rfi_piece *items;
  size_t n, capacity;
} rfi_pieces;

/* Grows an array of `size` bytes per item to at least `want` items; its first n are kept. */
rfr_status rfi_grow(rfr_ctx *ctx, void **array, size_t *capacity, size_t n, size_t want, size_t size);
/* Appends bytes that all come from `origin`. */
rfr_status rfi_text_buffer_put(rfr_ctx *ctx, rfi_text_buffer *b, const char *s, size_t n, uint32_t origin);
/* Appends part of a view with its origins. */
rfr_status rfi_text_buffer_copy(rfr_ctx *ctx, rfi_text_buffer *b, const rfi_view *v, size_t begin, size_t end);
static inline rfi_view rfi_text_buffer_view(const rfi_text_buffer *b) { return (rfi_view){b->s, b->n, b->origin, 0}; }
static inline rfr_status rfi_pieces_add(rfr_ctx *ctx, rfi_pieces *p, size_t begin, size_t end) {
  if (p->n == p->capacity) RFI_TRY(rfi_grow(ctx, (void **)&p->items, &p->capacity, p->n, p->n + 1, sizeof *p->items));
  p->items[p->n++] = (rfi_piece){(uint32_t)begin, (uint32_t)end};
  return RFR_OK;
}

/* ---- the vocabulary ---- */

typedef struct rfi_vocabulary {
  rfr_ctx *ctx;
  int64_t n;        /* one more than the largest id */
  char *text;       /* each token followed by a NUL */
  uint32_t *begin;  /* n + 1; token i is text[begin[i]] .. text[begin[i + 1] - 1) */
  uint8_t *is_used; /* n */
  uint8_t *is_mark; /* n; special tokens of more than one character: the model never makes them from text */
  int32_t *table;   /* hash table of ids, -1: empty; only tokens of the model */
  uint32_t mask;
  size_t longest; /* bytes of a token */
} rfi_vocabulary;
static inline rfi_bytes rfi_vocabulary_at(const rfi_vocabulary *v, int32_t id) {
  return (rfi_bytes){v->text + v->begin[id], v->begin[id + 1] - v->begin[id] - 1};
}
/* The model's id of a text, -1: none. */
int32_t rfi_vocabulary_find(const rfi_vocabulary *v, const char *s, size_t n);
/* The same; special tokens are ignored. */
static inline int32_t rfi_vocabulary_find_text(const rfi_vocabulary *v, const char *s, size_t n) {
  const int32_t id = rfi_vocabulary_find(v, s, n);
  return id >= 0 && v->is_mark[id] ? -1 : id;
}

/* Bytes as printable characters, as GPT-2 and its successors write them in their vocabularies. */
uint32_t rfi_byte_char(unsigned char byte);
int rfi_char_byte(uint32_t c); /* -1: the character stands for no byte */

/* ---- patterns ---- */

/* A regular expression of tokenizer.json in Oniguruma's syntax, run by PCRE2. The library's table expands classes. */
typedef struct rfi_pattern rfi_pattern;
/* `where`: the key path for errors. */
rfr_status rfi_pattern_create(rfr_ctx *ctx, const char *file, const char *where, rfi_bytes text, rfi_pattern **out);
/* A pattern that is a literal text. */
rfr_status rfi_pattern_create_literal(rfr_ctx *ctx, rfi_bytes text, rfi_pattern **out);
void rfi_pattern_destroy(rfr_ctx *ctx, rfi_pattern *p);

/* ---- the encoder's state ---- */

/* A part of a piece: a match of a pattern, or the text between two matches. */
typedef struct rfi_segment {
  uint32_t begin, end;
  bool is_match;
} rfi_segment;

typedef struct rfi_cache_entry {
  char key[15];
  uint8_t n; /* length of the key, 0: empty entry */
  int32_t ids[3];
  uint8_t count, begin[3];
} rfi_cache_entry;
enum { RFI_CACHE_BITS = 15 };

typedef struct rfi_symbol {
  int32_t id;
  uint32_t begin, end;
  int32_t next, previous; /* long pieces alone */
} rfi_symbol;
typedef struct rfi_candidate {
  uint32_t rank, position;
  int32_t id;
} rfi_candidate;

typedef struct rfi_encoder {
  rfr_ctx *ctx;
  rfr_tokens *parts; /* encoders of the threads of a parallel call */
  int n_parts;
  const void *owner; /* the tokenizer that the cache is for */
  rfi_cache_entry *cache;
  rfi_text_buffer repaired, normal[2], mapped[2];
  rfi_pieces pieces[2];
  rfi_segment *segments;
  size_t segments_capacity;
  rfi_symbol *symbols;
  size_t symbols_capacity;
  rfi_candidate *heap;
  size_t heap_capacity;
  void *paths; /* Unigram: the best path to each byte */
  size_t paths_capacity;
  rfi_string word; /* WordPiece: a word with its prefix */
  void *match;     /* PCRE2's match data */
  void *match_memory, *match_context, *jit_stack;
  void *points[2]; /* code points of normal forms */
  size_t points_capacity[2];
} rfi_encoder;

/* Appends a token; the caller has reserved the space. */
static inline void rfi_tokens_put(rfr_tokens *t, int32_t id, uint32_t begin) {
  t->ids[t->n] = id;
  t->begins[t->n++] = begin;
}
rfr_status rfi_tokens_grow(rfr_ctx *ctx, rfr_tokens *t, size_t more);
static inline rfr_status rfi_tokens_reserve(rfr_ctx *ctx, rfr_tokens *t, size_t more) {
  return t->capacity - t->n >= (int64_t)more ? RFR_OK : rfi_tokens_grow(ctx, t, more);
}

/* The next match in s[0, n) at or after `at`, as an iteration over all matches finds it: an empty match directly after
 * the last match, which ended at `last` (SIZE_MAX: none), is skipped. *begin is SIZE_MAX if there is no match. */
rfr_status rfi_pattern_next(const rfi_pattern *p, rfi_encoder *e, const char *s, size_t n, size_t at, size_t last,
                            size_t *begin, size_t *end);
void rfi_pattern_release(rfi_encoder *e);

/* ---- parts ---- */

/* Models append the tokens of one piece; `begin` of a token is relative to the piece. */
typedef struct rfi_bpe rfi_bpe;
/* `raw`: pieces are bytes of the text and the vocabulary is in printable characters. */
rfr_status rfi_bpe_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_vocabulary *v, bool raw,
                          rfi_bpe **out);
void rfi_bpe_destroy(rfr_ctx *ctx, rfi_bpe *m);
rfr_status rfi_bpe_encode(const rfi_bpe *m, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out);
/* Cuts pieces where no merge can cross the cut. The tokens are the same, and pieces that repeat are found in the
 * cache. */
rfr_status rfi_bpe_cut(const rfi_bpe *m, rfr_ctx *ctx, const char *s, const rfi_pieces *in, rfi_pieces *out);
bool rfi_bpe_cuts(const rfi_bpe *m);

typedef struct rfi_unigram rfi_unigram;
rfr_status rfi_unigram_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_vocabulary *v, rfi_unigram **out);
void rfi_unigram_destroy(rfr_ctx *ctx, rfi_unigram *m);
rfr_status rfi_unigram_encode(const rfi_unigram *m, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out);

typedef struct rfi_wordpiece rfi_wordpiece;
rfr_status rfi_wordpiece_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_vocabulary *v,
                                rfi_wordpiece **out);
void rfi_wordpiece_destroy(rfr_ctx *ctx, rfi_wordpiece *m);
rfr_status rfi_wordpiece_encode(const rfi_wordpiece *m, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out);

/* Normalizers. */
typedef struct rfi_normalizer rfi_normalizer;
rfr_status rfi_normalizer_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_unicode *categories,
                                 rfi_normalizer **out);
void rfi_normalizer_destroy(rfr_ctx *ctx, rfi_normalizer *p);
/* *v becomes the normalized text, which may be in the encoder's memory. */
rfr_status rfi_normalize(const rfi_normalizer *p, rfi_encoder *e, rfi_view *v);

/* Pre-tokenizers. */
typedef struct rfi_pretokenizer rfi_pretokenizer;
/* `is_raw`: the model reads bytes, so the last step, ByteLevel, writes no printable characters. */
rfr_status rfi_pretokenizer_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_unicode *categories,
                                   bool is_raw, rfi_pretokenizer **out);
void rfi_pretokenizer_destroy(rfr_ctx *ctx, rfi_pretokenizer *p);
/* Appends the printable characters of bytes [begin, end). */
rfr_status rfi_print_bytes(rfr_ctx *ctx, const rfi_view *v, size_t begin, size_t end, rfi_text_buffer *b);
/* Splits *v; *v and *pieces refer to the encoder's memory. */
rfr_status rfi_pretokenize(const rfi_pretokenizer *p, rfi_encoder *e, rfi_view *v, rfi_pieces **pieces);

/* The regular expression of a word pattern; a Split step with it uses the handwritten matcher. */
rfi_bytes rfi_word_pattern_text(rfr_word_pattern pattern);
/* *v becomes a text in the encoder's memory with U+FFFD for each maximal invalid part; its first `valid` bytes must be
 * valid. */
rfr_status rfi_repair(rfi_encoder *e, rfi_view *v, size_t valid);

/* The chain of decoders of a tokenizer; tokenizer_decode.c reads it. */
typedef struct rfi_decode_step {
  rfi_step_kind kind;
  char *pattern, *content; /* see rfi_step */
  size_t n_pattern, n_content;
  int64_t start, stop;
  bool cleanup, never_prepended;
} rfi_decode_step;
typedef struct rfi_decode_chain {
  rfi_decode_step steps[RFI_STEPS_LIMIT];
  int n;
} rfi_decode_chain;
rfr_status rfi_decode_chain_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, rfi_decode_chain **out);
void rfi_decode_chain_destroy(rfr_ctx *ctx, rfi_decode_chain *c); /* accepts NULL */
const rfi_decode_chain *rfi_tokenizer_chain(const rfr_tokenizer *tokenizer);
rfr_ctx *rfi_tokenizer_ctx(const rfr_tokenizer *tokenizer);

#endif
