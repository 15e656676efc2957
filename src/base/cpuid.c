/* SPDX-License-Identifier: Apache-2.0
 *
 * Features of this CPU, read with CPUID.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/base.h"

/* Kernels are compiled for all of x86-64-v3 or -v4, so every feature of a level is required, including those that
 * __builtin_cpu_supports does not know in all compilers. */
static unsigned levels_of_cpu(void) {
#if defined(__x86_64__) && RFI_ISAS > 1
  unsigned a, b, c1 = 0, c81 = 0, d;
  if (!__get_cpuid(1, &a, &b, &c1, &d) || !__get_cpuid(0x80000001, &a, &b, &c81, &d)) return 1;
  const bool f16c = (c1 & (1u << 29)) != 0, movbe = (c1 & (1u << 22)) != 0, lzcnt = (c81 & (1u << 5)) != 0;
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && f16c && movbe && lzcnt))
    return 1;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
    return 1 + 2;
  return 1 + 2 + 4;
#else
  return 1;
#endif
}

unsigned rfi_cpu_levels(void) { return levels_of_cpu() & RFI_ISAS; }

bool rfi_cpu_has_amx(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false; /* AMX-BF16, AMX-TILE */
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3; /* the operating system saves the tiles */
#else
  return false;
#endif
}
