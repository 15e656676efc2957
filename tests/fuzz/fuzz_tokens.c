/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files: the cache of the tokens of a data file. A file that is accepted has ids of the vocabulary and rows that
 * tile the tokens. The hash of the payload is repaired first, because random bytes never match it; a flag in the file's
 * unused field keeps it.
 */
#include <string.h>

#include "data/token_table.h"
#include "fuzz.h"

enum { VOCAB = 300, UNUSED = 8, PAYLOAD_HASH = 48, HEADER = 64, MOST = 1 << 16 };

static const rfi_hash key = {1, 2};

static volatile uint64_t sum; /* reads every value */

static void check(const rfi_token_table *t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t->rows; last = t->ends[i++]) {
    rft_fuzz_expect(t->ends[i] >= last && t->ends[i] <= t->tokens, "a row outside the tokens");
    sum += t->hashes[i] + (uint64_t)t->lines[i];
  }
  for (int64_t i = 0; i < t->tokens; i++) {
    rft_fuzz_expect(RFI_TOKEN_ID(t->ids[i]) < VOCAB, "an id outside the vocabulary");
    sum += t->widths[i];
  }
  rft_fuzz_expect(last == t->tokens, "tokens after the last row");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfi_token_table t = {.ctx = rft_fuzz_ctx()};
  char name[64], digits[33];
  uint8_t file[MOST];
  bool found;
  if (n > MOST) return 0;
  if (n) memcpy(file, data, n);
  if (n >= HEADER && file[UNUSED] == 0) {
    const rfi_hash payload = rfi_hash_bytes(file + HEADER, n - HEADER);
    memcpy(file + PAYLOAD_HASH, &payload, sizeof payload);
  }
  rfi_snprintf(name, sizeof name, "%s.tokens", rfi_hash_format(digits, key));
  rft_fuzz_put(name, file, n);
  const rfr_status s = rfi_token_table_load(&t, rft_fuzz_folder(), key, VOCAB, &found);
  rft_fuzz_status(s);
  if (s == RFR_OK && found) check(&t);
  rfi_token_table_deinit(&t);
  rft_fuzz_clean();
  return 0;
}
