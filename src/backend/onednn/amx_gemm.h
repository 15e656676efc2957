/* SPDX-License-Identifier: Apache-2.0
 *
 * Products on the matrix unit that oneDNN has no fast way for; the same contract as the module's table.
 */
#ifndef RFI_AMX_GEMM_H
#define RFI_AMX_GEMM_H

#include "backend/cpu/gemm_module.h"

typedef struct rfi_amx_product rfi_amx_product;

/* Asks the operating system for the unit's registers; 0 when there are none to be had. */
int rfi_amx_open(void);
/* UNSUPPORTED: oneDNN does it as well or better. */
rfi_gemm_status rfi_amx_create(const rfi_gemm_desc *desc, rfi_amx_product **out, size_t *scratch);
void rfi_amx_execute(const rfi_amx_product *p, const void *a, const void *b, const void *bias, void *y, void *scratch);
void rfi_amx_destroy(rfi_amx_product *p); /* accepts NULL */

#endif
