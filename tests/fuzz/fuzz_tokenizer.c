/* SPDX-License-Identifier: Apache-2.0
 *
 * A tokenizer.json, and after its first NUL byte a text; without one, a sample. The text is tokenized, with and without
 * a foreign span, and the ids are decoded. Ids are in the vocabulary, offsets in the text, the decoded text is UTF-8,
 * and no special token lies in a foreign span.
 */
#include <string.h>

#include "fuzz.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

static const char sample[] = "I'll  <|x|> a\xCC\x81\xE4\xB8\xAD\n\n12\xF0\x9F\x98\x80 \xFF\xE2\x96\x81 <s>b";

static void check_text(const char *text, size_t n, void *user) {
  (void)user;
  rft_fuzz_expect(rfi_utf8_valid(text, n) == n, "decoded text that is not UTF-8");
}

static void check(const rfr_tokenizer *k, const char *text, size_t n) {
  rfr_tokens tokens = {0};
  rfr_decoder *decoder;
  const rfr_span span = {n / 3, n - n / 4};
  rfr_encode_options o = rfr_encode_options_default();
  for (int pass = 0; pass < 3; pass++) {
    o.add_special = pass == 1;
    o.foreign = &span;
    o.n_foreign = pass == 2;
    const rfr_status s = rfr_tokenizer_encode(k, text, n, &o, &tokens);
    rft_fuzz_status(s);
    if (s != RFR_OK) tokens.n = 0;
    for (int64_t i = 0; i < tokens.n; i++) {
      rft_fuzz_expect(rfr_tokenizer_token(k, tokens.ids[i], NULL) != NULL, "an id that is not in use");
      rft_fuzz_expect(tokens.begins[i] <= n, "an offset past the text");
    }
    rft_fuzz_expect(rfr_decoder_create(k, pass == 1, &decoder) == RFR_OK, "no decoder");
    for (int64_t i = 0; i < tokens.n; i++)
      rft_fuzz_expect(rfr_decoder_add(decoder, tokens.ids[i], check_text, NULL) == RFR_OK, "not decoded");
    rft_fuzz_expect(rfr_decoder_end(decoder, check_text, NULL) == RFR_OK, "no end");
    rfr_decoder_destroy(decoder);
  }
  rfr_tokens_deinit(&tokens);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfr_tokenizer *k;
  const uint8_t *end = n ? memchr(data, 0, n) : NULL;
  const size_t length = end ? (size_t)(end - data) : n;
  const rfr_status s = rfi_tokenizer_parse(rft_fuzz_ctx(), "tokenizer.json", (const char *)data, length, &k);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    if (end) check(k, (const char *)end + 1, n - length - 1);
    else check(k, sample, sizeof sample - 1);
  }
  rfr_tokenizer_destroy(k);
  rft_fuzz_clean();
  return 0;
}
