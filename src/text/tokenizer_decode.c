/* SPDX-License-Identifier: Apache-2.0
 *
 * Decodes ids to text. Each decoder of the chain passes its tokens to the next one. After Fuse and ByteLevel, the rest
 * of the chain gets one token in several pieces. A piece has only complete characters, so every write is valid UTF-8.
 */
#include <string.h>

#include "text/tokenizer_parts.h"

/* ---- the chain ---- */

static rfr_status copy_text(rfr_ctx *ctx, rfi_bytes text, char **out, size_t *n) {
  RFI_TRY(RFI_ALLOC(ctx, text.n + 1, out));
  if (text.n) memcpy(*out, text.text, text.n);
  *n = text.n;
  return RFR_OK;
}

static bool is_one_char(rfi_bytes b) { return b.n > 0 && rfi_utf8_length(b.text, b.n) == (int)b.n; }

static rfr_status check_step(const rfi_tokenizer_spec *spec, const rfi_step *s, bool is_fused) {
  const rfi_step_kind k = s->kind;
  if ((k == RFI_DEC_METASPACE || k == RFI_DEC_STRIP) && !is_one_char(s->content))
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "%s: the content is not one character", s->where);
  if (!is_fused || k == RFI_DEC_FUSE) return RFR_OK;
  if (k == RFI_DEC_STRIP && s->stop == 0) return RFR_OK;
  if (k == RFI_DEC_REPLACE && is_one_char(s->pattern)) return RFR_OK;
  return rfi_fail_at(RFI_E_TOKENIZER_UNSUPPORTED, spec->name, 0,
                     "%s: after Fuse or ByteLevel, only Strip at the start and Replace of one character are supported",
                     s->where);
}

rfr_status rfi_decode_chain_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, rfi_decode_chain **out) {
  rfi_decode_chain *c = NULL;
  rfr_status s;
  bool is_fused = false;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *c, &c));
  for (int i = 0; i < spec->n_decoders; i++) {
    const rfi_step *x = &spec->decoders[i];
    rfi_decode_step *y = &c->steps[c->n++];
    *y = (rfi_decode_step){.kind = x->kind,
                           .start = x->start,
                           .stop = x->stop,
                           .cleanup = x->cleanup,
                           .never_prepended = x->scheme == RFI_PREPEND_NEVER};
    RFI_GOTO(check_step(spec, x, is_fused));
    is_fused |= x->kind == RFI_DEC_FUSE || x->kind == RFI_DEC_BYTE_LEVEL;
    RFI_GOTO(copy_text(ctx, x->pattern, &y->pattern, &y->n_pattern));
    RFI_GOTO(copy_text(ctx, x->content, &y->content, &y->n_content));
  }
  *out = c;
  return RFR_OK;
fail:
  rfi_decode_chain_destroy(ctx, c);
  return s;
}

void rfi_decode_chain_destroy(rfr_ctx *ctx, rfi_decode_chain *c) {
  if (!c) return;
  for (int i = 0; i < c->n; i++) {
    rfi_free(ctx, c->steps[i].pattern);
    rfi_free(ctx, c->steps[i].content);
  }
  rfi_free(ctx, c);
}

/* ---- decoding ---- */

/* State of a step. */
typedef struct state {
  rfi_string held, work; /* held: bytes that wait for the next token */
  int64_t count;         /* number of tokens so far */
  int64_t stripped;      /* characters removed at the start of a fused token; -1: another character came */
  bool has_held;
} state;

struct rfr_decoder {
  rfr_ctx *ctx;
  const rfr_tokenizer *tokenizer;
  const rfi_decode_chain *chain;
  bool keep_special;
  rfr_write_fn write;
  void *user;
  int64_t count;
  state states[RFI_STEPS_LIMIT];
};

static rfr_status step_add(rfr_decoder *d, int i, const char *s, size_t n);

static bool is_fused_at(const rfr_decoder *d, int i) {
  for (int k = 0; k < i; k++)
    if (d->chain->steps[k].kind == RFI_DEC_FUSE || d->chain->steps[k].kind == RFI_DEC_BYTE_LEVEL) return true;
  return false;
}

/* Gives `text` with each occurrence of `from` replaced to the string `out`. */
static rfr_status replace(rfi_string *out, const char *s, size_t n, const char *from, size_t n_from, const char *to,
                          size_t n_to) {
  out->n = 0;
  while (n > 0) {
    const char *at = n_from ? memmem(s, n, from, n_from) : NULL;
    const size_t before = at ? (size_t)(at - s) : n;
    RFI_TRY(rfi_string_append(out, s, before));
    if (!at) break;
    RFI_TRY(rfi_string_append(out, to, n_to));
    s += before + n_from;
    n -= before + n_from;
  }
  return RFR_OK;
}

/* The value of "<0xHH>" with exactly two digits; otherwise -1. */
static int fallback_byte(const char *s, size_t n) {
  static const char digits[] = "0123456789ABCDEFabcdef";
  if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>') return -1;
  int value = 0;
  for (int i = 3; i < 5; i++) {
    const char *at = s[i] ? strchr(digits, s[i]) : NULL;
    if (!at) return -1;
    const int digit = (int)(at - digits);
    value = 16 * value + (digit < 16 ? digit : digit - 6);
  }
  return value;
}

/* Consecutive byte tokens are decoded together: as text, or if that is not valid UTF-8 as one U+FFFD per byte, as
 * tokenizers does. */
static rfr_status flush_bytes(rfr_decoder *d, int i) {
  state *x = &d->states[i];
  const size_t n = x->held.n;
  x->held.n = 0;
  if (n == 0) return RFR_OK;
  if (rfi_utf8_valid(x->held.data, n) == n) return step_add(d, i + 1, x->held.data, n);
  for (size_t k = 0; k < n; k++) RFI_TRY(step_add(d, i + 1, "\xEF\xBF\xBD", 3));
  return RFR_OK;
}

/* Passes the complete characters of the kept bytes to the next step; at the end, replaces an incomplete one by
 * U+FFFD. */
static rfr_status flush_utf8(rfr_decoder *d, int i, bool at_end) {
  state *x = &d->states[i];
  const char *s = x->held.data;
  size_t k = 0, n = x->held.n;
  while (k < n) {
    const size_t valid = rfi_utf8_valid(s + k, n - k);
    if (valid > 0) RFI_TRY(step_add(d, i + 1, s + k, valid));
    k += valid;
    if (k == n) break;
    const int length = rfi_utf8_length(s + k, n - k);
    /* An invalid part that reaches the end may still become a character, unless its first byte begins none. */
    char first = s[k];
    const bool waits = (size_t)-length == n - k && (unsigned char)first >= 0xC2 && (unsigned char)first <= 0xF4;
    if (waits && !at_end) break;
    RFI_TRY(step_add(d, i + 1, "\xEF\xBF\xBD", 3));
    k += (size_t)-length;
  }
  if (k && k < n) memmove(x->held.data, s + k, n - k);
  x->held.n = n - k;
  return RFR_OK;
}

/* The bytes of a token; if one of its characters stands for no byte, the token's own text. */
static rfr_status add_byte_level(rfr_decoder *d, int i, const char *s, size_t n) {
  state *x = &d->states[i];
  bool is_bytes = true;
  x->work.n = 0;
  for (size_t k = 0; k < n && is_bytes;) {
    const int byte = rfi_char_byte(rfi_utf8_next(s, &k));
    const char c = (char)byte;
    is_bytes = byte >= 0;
    if (is_bytes) RFI_TRY(rfi_string_append(&x->work, &c, 1));
  }
  RFI_TRY(is_bytes ? rfi_string_append(&x->held, x->work.data ? x->work.data : "", x->work.n)
                   : rfi_string_append(&x->held, s, n));
  return flush_utf8(d, i, false);
}

/* Removes up to `start` and `stop` characters at the ends of a token. */
static rfr_status add_strip(rfr_decoder *d, int i, const char *s, size_t n) {
  const rfi_decode_step *t = &d->chain->steps[i];
  state *x = &d->states[i];
  const size_t width = t->n_content;
  int64_t cut = is_fused_at(d, i) ? x->stripped : 0;
  while (cut >= 0 && cut < t->start && n >= width && memcmp(s, t->content, width) == 0) s += width, n -= width, cut++;
  if (n > 0) cut = -1;
  x->stripped = cut;
  for (int64_t k = 0; k < t->stop && n >= width && memcmp(s + n - width, t->content, width) == 0; k++) n -= width;
  return step_add(d, i + 1, s, n);
}

static rfr_status add_metaspace(rfr_decoder *d, int i, const char *s, size_t n) {
  const rfi_decode_step *t = &d->chain->steps[i];
  state *x = &d->states[i];
  const bool removed = x->count++ == 0 && !t->never_prepended;
  RFI_TRY(replace(&x->work, s, n, t->content, t->n_content, " ", removed ? 0 : 1));
  return step_add(d, i + 1, x->work.data ? x->work.data : "", x->work.n);
}

static rfr_status add_wordpiece(rfr_decoder *d, int i, const char *s, size_t n) {
  static const char *const cleanups[][2] = {{" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
                                            {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
                                            {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  const rfi_decode_step *t = &d->chain->steps[i];
  state *x = &d->states[i];
  const bool continues = t->n_content <= n && memcmp(s, t->content, t->n_content) == 0;
  const bool is_first = x->count++ == 0;
  x->work.n = 0;
  if (!is_first && continues) s += t->n_content, n -= t->n_content;
  else if (!is_first) RFI_TRY(rfi_string_append(&x->work, " ", 1));
  RFI_TRY(rfi_string_append(&x->work, s, n));
  for (size_t k = 0; t->cleanup && k < sizeof cleanups / sizeof *cleanups; k++) {
    RFI_TRY(replace(&x->held, x->work.data ? x->work.data : "", x->work.n, cleanups[k][0], strlen(cleanups[k][0]),
                    cleanups[k][1], strlen(cleanups[k][1])));
    const rfi_string out = x->held;
    x->held = x->work;
    x->work = out;
  }
  return step_add(d, i + 1, x->work.data ? x->work.data : "", x->work.n);
}

/* The suffix becomes a blank, except in the last token; so a token is held until the next one arrives. */
static rfr_status flush_bpe(rfr_decoder *d, int i, bool is_last) {
  const rfi_decode_step *t = &d->chain->steps[i];
  state *x = &d->states[i];
  if (!x->has_held) return RFR_OK;
  x->has_held = false;
  RFI_TRY(replace(&x->work, x->held.data ? x->held.data : "", x->held.n, t->content, t->n_content, " ", !is_last));
  return step_add(d, i + 1, x->work.data ? x->work.data : "", x->work.n);
}

static rfr_status step_add(rfr_decoder *d, int i, const char *s, size_t n) {
  if (i == d->chain->n) {
    if (n && d->write) d->write(s, n, d->user);
    return RFR_OK;
  }
  const rfi_decode_step *t = &d->chain->steps[i];
  state *x = &d->states[i];
  switch (t->kind) {
    case RFI_DEC_BYTE_LEVEL: return add_byte_level(d, i, s, n);
    case RFI_DEC_BYTE_FALLBACK: {
      const int byte = fallback_byte(s, n);
      const char c = (char)byte;
      if (byte >= 0) return rfi_string_append(&x->held, &c, 1);
      RFI_TRY(flush_bytes(d, i));
      return step_add(d, i + 1, s, n);
    }
    case RFI_DEC_METASPACE: return add_metaspace(d, i, s, n);
    case RFI_DEC_REPLACE:
      RFI_TRY(replace(&x->work, s, n, t->pattern, t->n_pattern, t->content, t->n_content));
      return step_add(d, i + 1, x->work.data ? x->work.data : "", x->work.n);
    case RFI_DEC_STRIP: return add_strip(d, i, s, n);
    case RFI_DEC_WORDPIECE: return add_wordpiece(d, i, s, n);
    case RFI_DEC_BPE:
      RFI_TRY(flush_bpe(d, i, false));
      x->held.n = 0;
      x->has_held = true;
      return rfi_string_append(&x->held, s, n);
    default: return step_add(d, i + 1, s, n); /* Fuse */
  }
}

rfr_status rfr_decoder_create(const rfr_tokenizer *tokenizer, int keep_special, rfr_decoder **out) {
  if (!out) return rfi_fail(RFI_E_ARGUMENT, "rfr_decoder_create: out is NULL");
  *out = NULL;
  RFI_TRY(rfi_check_handle(tokenizer, "rfr_tokenizer"));
  rfr_ctx *ctx = rfi_tokenizer_ctx(tokenizer);
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  (*out)->ctx = ctx;
  (*out)->tokenizer = tokenizer;
  (*out)->chain = rfi_tokenizer_chain(tokenizer);
  (*out)->keep_special = keep_special != 0;
  for (int i = 0; i < RFI_STEPS_LIMIT; i++) (*out)->states[i].held.ctx = (*out)->states[i].work.ctx = ctx;
  return RFR_OK;
}

void rfr_decoder_destroy(rfr_decoder *d) {
  if (!d) return;
  for (int i = 0; i < RFI_STEPS_LIMIT; i++) {
    rfi_string_deinit(&d->states[i].held);
    rfi_string_deinit(&d->states[i].work);
  }
  rfi_free(d->ctx, d);
}

rfr_status rfr_decoder_add(rfr_decoder *d, int32_t id, rfr_write_fn write, void *user) {
  size_t n;
  RFI_TRY(rfi_check_handle(d, "rfr_decoder"));
  const char *text = rfr_tokenizer_token(d->tokenizer, id, &n);
  if (!text || (!d->keep_special && rfr_tokenizer_is_special(d->tokenizer, id))) return RFR_OK;
  d->write = write;
  d->user = user;
  if (d->chain->n == 0 && d->count > 0 && write) write(" ", 1, user);
  d->count++;
  return step_add(d, 0, text, n);
}

rfr_status rfr_decoder_end(rfr_decoder *d, rfr_write_fn write, void *user) {
  RFI_TRY(rfi_check_handle(d, "rfr_decoder"));
  d->write = write;
  d->user = user;
  for (int i = 0; i < d->chain->n; i++) {
    const rfi_step_kind kind = d->chain->steps[i].kind;
    if (kind == RFI_DEC_BYTE_FALLBACK) RFI_TRY(flush_bytes(d, i));
    if (kind == RFI_DEC_BYTE_LEVEL) RFI_TRY(flush_utf8(d, i, true));
    if (kind == RFI_DEC_BPE) RFI_TRY(flush_bpe(d, i, true));
  }
  for (int i = 0; i < d->chain->n; i++) {
    state *x = &d->states[i];
    x->held.n = 0;
    x->count = x->stripped = 0;
    x->has_held = false;
  }
  d->count = 0;
  return RFR_OK;
}
