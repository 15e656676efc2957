/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs that oneDNN runs slowly or not at all; the same contract as the module's table. With AMX, those that
 * panel_gemm.c lists; with AVX512-BF16 alone, groups of bf16.
 */
#ifndef RFI_PANEL_GEMM_H
#define RFI_PANEL_GEMM_H

#include "backend/cpu/gemm_module.h"

typedef struct rfi_panel_gemm rfi_panel_gemm;

typedef enum rfi_panel_isa { RFI_PANEL_NONE, RFI_PANEL_DOT, RFI_PANEL_AMX } rfi_panel_isa;

/* Detects the CPU's instructions. Requests AMX state from the operating system, which may refuse it. */
rfi_panel_isa rfi_panel_open(int amx, int bf16);
/* UNSUPPORTED: oneDNN is as fast or faster; *why is the reason. */
rfi_gemm_status rfi_panel_create(rfi_panel_isa isa, const rfi_module_gemm *desc, rfi_panel_gemm **out, size_t *scratch,
                                 const char **why);
void rfi_panel_execute(const rfi_panel_gemm *p, const void *a, const void *b, const void *bias, void *y, void *scratch);
void rfi_panel_execute_groups(const rfi_panel_gemm *p, int64_t groups, rfi_gemm_group_fn group, const void *user,
                              void *scratch);
void rfi_panel_destroy(rfi_panel_gemm *p); /* accepts NULL */

/* Packs op(b) (K, N) of bf16, element (k, n) at k*ks + n*ns with one stride of 1, for AVX512-BF16: blocks of 64
 * columns, each with pairs of rows interleaved. N is padded to a multiple of 64, K of 32, with zeros. oneDNN calls this
 * layout BA16a64b2a. */
enum { RFI_PANEL_COLUMNS = 64, RFI_PANEL_ROWS = 32 };
void rfi_panel_pack(void *to, const void *b, int64_t K, int64_t N, int64_t ks, int64_t ns, int threads);

#endif
