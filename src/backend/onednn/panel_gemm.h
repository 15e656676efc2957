/* SPDX-License-Identifier: Apache-2.0
 *
 * Products that oneDNN has no fast way for, on machines with AMX; the same contract as the module's table.
 */
#ifndef RFI_PANEL_GEMM_H
#define RFI_PANEL_GEMM_H

#include "backend/cpu/gemm_module.h"

typedef struct rfi_panel_product rfi_panel_product;

/* Asks the operating system for the unit's registers; 0 when there are none to be had. */
int rfi_panel_open(void);
/* UNSUPPORTED: oneDNN does it as well or better, or *why. */
rfi_gemm_status rfi_panel_create(const rfi_gemm_desc *desc, rfi_panel_product **out, size_t *scratch, const char **why);
void rfi_panel_execute(const rfi_panel_product *p, const void *a, const void *b, const void *bias, void *y,
                       void *scratch);
void rfi_panel_execute_groups(const rfi_panel_product *p, int64_t groups, rfi_gemm_group_fn group, const void *user,
                              void *scratch);
void rfi_panel_destroy(rfi_panel_product *p); /* accepts NULL */

#endif
