/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel table of an instruction set. The context decides which set is used. RFI_ISAS are the sets of this build,
 * as bits: 1 is v2, 2 is v3, 4 is v4.
 */
#include "backend/cpu/cpu.h"

#include <string.h>

#define TABLE(isa) extern const rfi_kernel *const rfi_cpu_table_##isa[RFI_OP_COUNT];
TABLE(v2)
TABLE(v3)
TABLE(v4)
#undef TABLE

const rfi_kernel *rfi_cpu_kernel(const char *isa, rfi_opcode code) {
#if RFI_ISAS & 4
  if (strcmp(isa, "v4") == 0) return rfi_cpu_table_v4[code];
#endif
#if RFI_ISAS & 2
  if (strcmp(isa, "v3") == 0) return rfi_cpu_table_v3[code];
#endif
#if RFI_ISAS & 1
  if (strcmp(isa, "v2") == 0) return rfi_cpu_table_v2[code];
#endif
  return NULL;
}
