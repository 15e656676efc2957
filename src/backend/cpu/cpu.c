/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel table of an instruction set. The context decides which set is used.
 */
#include "backend/cpu/cpu.h"

#include <string.h>

#define TABLE(isa) extern const rfi_kernel *const rfi_cpu_table_##isa[RFI_OP_COUNT];
TABLE(v2)
#if RFI_ISA_COUNT > 1
TABLE(v3)
TABLE(v4)
#endif
#undef TABLE

const rfi_kernel *rfi_cpu_kernel(const char *isa, rfi_opcode code) {
#if RFI_ISA_COUNT > 1
  if (strcmp(isa, "v4") == 0) return rfi_cpu_table_v4[code];
  if (strcmp(isa, "v3") == 0) return rfi_cpu_table_v3[code];
#endif
  return strcmp(isa, "v2") == 0 ? rfi_cpu_table_v2[code] : NULL;
}
