/* SPDX-License-Identifier: Apache-2.0
 *
 * Addressed random numbers: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel
 * random numbers: as easy as 1, 2, 3", SC 2011). Nothing is advanced: a draw is a pure
 * function of its address, so a replay, a recompute and a resume draw the same.
 */
#ifndef RFI_RNG_H
#define RFI_RNG_H

#include <stdint.h>

#ifdef __CUDACC__ /* the same draws on both sides */
#define RFI_BOTH_SIDES __host__ __device__
#else
#define RFI_BOTH_SIDES
#endif

typedef struct rfi_u32x4 {
  uint32_t v[4];
} rfi_u32x4;

RFI_BOTH_SIDES static inline rfi_u32x4 rfi_philox(rfi_u32x4 counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.v[0], c1 = counter.v[1], c2 = counter.v[2], c3 = counter.v[3];
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ key0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const rfi_u32x4 drawn = {{c0, c1, c2, c3}};
  return drawn;
}

/* Key of a stream: the seed mixed with the stream's number (splitmix64's finalizer). */
RFI_BOTH_SIDES static inline uint64_t rfi_stream_key(uint64_t seed, uint64_t stream) {
  uint64_t z = seed + (stream + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* Number of a named stream: FNV-1a (Fowler, Noll, Vo), 64 bits, of the name's bytes. */
static inline uint64_t rfi_stream_id(const char *name) {
  uint64_t h = 0xCBF29CE484222325u;
  for (; *name != '\0'; name++) h = (h ^ (unsigned char)*name) * 0x100000001B3u;
  return h;
}

/* Prefix of the inputs that hold the states of named streams; a stream's name has at most RFI_STREAM_NAME bytes. */
#define RFI_STREAM_PREFIX "rng."
enum { RFI_STREAM_NAME = 100 };

enum { RFI_MOST_SITES = 1 << 24 };

/* Four draws for elements 4*block .. 4*block+3 of a site, microbatch and step. Two addresses are different counters as
 * long as block < 2^40, site < RFI_MOST_SITES, microbatch < 2^16 and step < 2^48, or microbatch < 2^20 and
 * step < 2^32. */
RFI_BOTH_SIDES static inline rfi_u32x4 rfi_draw4(uint64_t key, uint64_t block, uint32_t site, uint32_t microbatch,
                                                 uint64_t step) {
  rfi_u32x4 c = {{(uint32_t)block, (uint32_t)(block >> 32) ^ (site << 8),
                  (microbatch << 16 | microbatch >> 16) ^ (uint32_t)(step >> 32), (uint32_t)step}};
  return rfi_philox(c, (uint32_t)key, (uint32_t)(key >> 32));
}

#endif
