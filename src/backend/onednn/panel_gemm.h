/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs that oneDNN runs slowly, for machines with AMX; the same contract as the module's table.
 */
#ifndef RFI_PANEL_GEMM_H
#define RFI_PANEL_GEMM_H

#include "backend/cpu/gemm_module.h"

typedef struct rfi_panel_product rfi_panel_product;

/* Requests AMX state from the operating system; 0 when it is refused. */
int rfi_panel_open(void);
/* UNSUPPORTED: oneDNN is as fast or faster; *why is the reason. */
rfi_gemm_status rfi_panel_create(const rfi_module_gemm *desc, rfi_panel_product **out, size_t *scratch,
                                 const char **why);
void rfi_panel_execute(const rfi_panel_product *p, const void *a, const void *b, const void *bias, void *y,
                       void *scratch);
void rfi_panel_execute_groups(const rfi_panel_product *p, int64_t groups, rfi_gemm_group_fn group, const void *user,
                              void *scratch);
void rfi_panel_destroy(rfi_panel_product *p); /* accepts NULL */

#endif
