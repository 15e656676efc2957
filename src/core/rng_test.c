/* SPDX-License-Identifier: Apache-2.0
 *
 * Addressed random numbers: the published vectors, distinct addresses, plausible draws.
 */
#include "core/rng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* philox4x32, 10 rounds, from the known answers that the authors publish (Random123). */
static void test_known_answers(void **state) {
  (void)state;
  static const struct {
    rfi_u32x4 counter;
    uint32_t key[2];
    rfi_u32x4 answer;
  } cases[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {0xffffffff, 0xffffffff},
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const rfi_u32x4 got = rfi_philox(cases[i].counter, cases[i].key[0], cases[i].key[1]);
    for (int k = 0; k < 4; k++) assert_int_equal(got.v[k], cases[i].answer.v[k]);
  }
}

static int compare(const void *a, const void *b) { return memcmp(a, b, sizeof(rfi_u32x4)); }

/* Under one key Philox is a bijection of its counter: equal draws mean equal counters. */
static void assert_distinct(rfi_u32x4 *draws, size_t n) {
  qsort(draws, n, sizeof *draws, compare);
  for (size_t i = 1; i < n; i++)
    if (compare(&draws[i - 1], &draws[i]) == 0) fail_msg("two of %zu addresses draw the same", n);
}

static void test_addresses_are_distinct(void **state) {
  (void)state;
  /* Small numbers, each power of two, and the ends of the documented ranges. */
  static const uint64_t blocks[] = {0, 1, 2, 255, 256, 1u << 31, 1ull << 32, 1ull << 39, (1ull << 40) - 1};
  static const uint32_t sites[] = {0, 1, 2, 3, 255, 256, 1u << 16, 1u << 23, (1u << 24) - 1};
  static const uint32_t microbatches[] = {0, 1, 2, 7, 255, 1u << 15, (1u << 16) - 1};
  static const uint64_t steps[] = {0, 1, 2, 65536, 1ull << 31, 1ull << 32, 1ull << 47, (1ull << 48) - 1};
  enum { B = 9, S = 9, M = 7, T = 8 };
  static rfi_u32x4 draws[B * S * M * T];
  size_t n = 0;
  for (int b = 0; b < B; b++)
    for (int s = 0; s < S; s++)
      for (int m = 0; m < M; m++)
        for (int t = 0; t < T; t++) draws[n++] = rfi_draw4(42, blocks[b], sites[s], microbatches[m], steps[t]);
  assert_distinct(draws, n);
  n = 0; /* more microbatches, fewer steps */
  for (int m = 0; m < 40; m++)
    for (int t = 0; t < 4; t++) draws[n++] = rfi_draw4(42, 1, 1, (m < 20 ? 1u << m : 65535u + (uint32_t)m), steps[t]);
  assert_distinct(draws, n);

  /* A dense corner of the address space. */
  rfi_u32x4 *dense = malloc(32 * 16 * 8 * 32 * sizeof *dense);
  n = 0;
  for (uint64_t b = 0; b < 32; b++)
    for (uint32_t s = 0; s < 16; s++)
      for (uint32_t m = 0; m < 8; m++)
        for (uint64_t t = 0; t < 32; t++) dense[n++] = rfi_draw4(42, b, s, m, t);
  assert_distinct(dense, n);
  free(dense);
}

static void test_draws_are_pure(void **state) {
  (void)state;
  const rfi_u32x4 a = rfi_draw4(7, 5, 3, 2, 11);
  rfi_draw4(7, 6, 3, 2, 11);
  const rfi_u32x4 b = rfi_draw4(7, 5, 3, 2, 11);
  assert_memory_equal(&a, &b, sizeof a);
}

static void test_stream_keys(void **state) {
  (void)state;
  /* FNV-1a, 64 bits, from its authors' test suite. */
  assert_true(rfi_stream_id("") == 0xcbf29ce484222325u);
  assert_true(rfi_stream_id("a") == 0xaf63dc4c8601ec8cu);
  assert_true(rfi_stream_id("foobar") == 0x85944171f73967e8u);
  enum { N = 200 };
  static uint64_t keys[N * N];
  size_t n = 0;
  for (uint64_t seed = 0; seed < N; seed++)
    for (uint64_t stream = 0; stream < N; stream++) keys[n++] = rfi_stream_key(seed, stream);
  /* Neighbouring seeds and streams share no bits on average. */
  double flipped = 0;
  for (size_t i = 1; i < n; i++) flipped += __builtin_popcountll(keys[i] ^ keys[i - 1]);
  assert_true(fabs(flipped / (double)(n - 1) - 32) < 0.1);
  /* All keys differ: sorted by a simple radix sort on the full key. */
  static uint64_t other[N * N];
  for (int shift = 0; shift < 64; shift += 16) {
    static size_t start[65537];
    memset(start, 0, sizeof start);
    for (size_t i = 0; i < n; i++) start[(keys[i] >> shift & 0xFFFF) + 1]++;
    for (int k = 0; k < 65536; k++) start[k + 1] += start[k];
    for (size_t i = 0; i < n; i++) other[start[keys[i] >> shift & 0xFFFF]++] = keys[i];
    memcpy(keys, other, sizeof keys);
  }
  for (size_t i = 1; i < n; i++) assert_true(keys[i - 1] < keys[i]);
}

/* Deterministic, so a bound of five standard deviations can be tested. */
static void test_distribution(void **state) {
  (void)state;
  enum { BLOCKS = 1 << 17, N = 4 * BLOCKS };
  static int64_t bytes[4][256];
  static int64_t bits[32];
  double sum = 0, squares = 0, lagged = 0, last = 0.5;
  const uint64_t key = rfi_stream_key(1234, 5);
  for (uint64_t b = 0; b < BLOCKS; b++) {
    const rfi_u32x4 r = rfi_draw4(key, b, 9, 1, 77);
    for (int k = 0; k < 4; k++) {
      const double u = (r.v[k] + 0.5) / 4294967296.0;
      sum += u;
      squares += u * u;
      lagged += (u - 0.5) * (last - 0.5);
      last = u;
      for (int i = 0; i < 32; i++) bits[i] += r.v[k] >> i & 1;
      for (int i = 0; i < 4; i++) bytes[i][r.v[k] >> 8 * i & 255]++;
    }
  }
  assert_true(fabs(sum / N - 0.5) < 5 * sqrt(1.0 / 12 / N));
  assert_true(fabs(squares / N - 1.0 / 3) < 5 * sqrt(4.0 / 45 / N));
  assert_true(fabs(lagged / N) < 5 * (1.0 / 12) / sqrt(N));
  for (int i = 0; i < 32; i++) assert_true(fabs((double)bits[i] - N / 2.0) < 5 * sqrt(N / 4.0));
  for (int i = 0; i < 4; i++) {
    double chi = 0;
    for (int v = 0; v < 256; v++) {
      const double d = (double)bytes[i][v] - N / 256.0;
      chi += d * d / (N / 256.0);
    }
    assert_true(fabs(chi - 255) < 5 * sqrt(2.0 * 255)); /* chi squared, 255 degrees of freedom */
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_known_answers),  cmocka_unit_test(test_addresses_are_distinct),
      cmocka_unit_test(test_draws_are_pure), cmocka_unit_test(test_stream_keys),
      cmocka_unit_test(test_distribution),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
