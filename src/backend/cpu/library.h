/* SPDX-License-Identifier: Apache-2.0
 *
 * Ops that a library runs faster than the kernels in this tree: GEMMs by the oneDNN
 * module. A missing module is not an error: all ops then run on the portable kernels, and
 * describe reports it.
 *
 * Selection creates a handle for an op, or finds that of an equal op. The library owns the
 * handle until it is closed, after all programs that use it.
 */
#ifndef RFI_LIBRARY_H
#define RFI_LIBRARY_H

#include <stdbool.h>

#include "ops/call.h"

typedef struct rfi_cpu_library rfi_cpu_library;

rfr_status rfi_cpu_library_open(rfr_ctx *ctx, rfi_cpu_library **out);
void rfi_cpu_library_close(rfi_cpu_library *library); /* accepts NULL */

/* Sets *run, *workspace (bytes) and *handle (for call->library) if the library supports this call; otherwise *run stays
 * NULL and the kernel table's entry is used. Reads shapes, strides, attributes, the number of threads, and whether data
 * pointers are NULL. */
rfr_status rfi_cpu_library_select(rfi_cpu_library *library, const rfi_op_def *def, const rfi_call *call,
                                  rfi_kernel_fn *run, size_t *workspace, void **handle);

/* Why rfi_cpu_library_select did not select a grouped GEMM; NULL for another op. */
const char *rfi_cpu_library_lacks(const rfi_cpu_library *library, const rfi_op_def *def, const rfi_call *call);

/* Names of the library's kernels in a profile. Grouped GEMMs run on the module's own kernels. */
#define RFI_LIBRARY_KERNEL "oneDNN"
#define RFI_GROUPS_KERNEL "panels"
/* "oneDNN 2.6.3 (avx512_core_amx)", or "none" and the reason. Results depend on it bitwise. */
const char *rfi_cpu_library_describe(const rfi_cpu_library *library);
/* Whether the library is loaded. */
bool rfi_cpu_library_loaded(const rfi_cpu_library *library);
/* Whether the CPU has instructions for bf16 GEMMs, so that bf16 is faster than f32. */
bool rfi_cpu_library_bf16_fast(const rfi_cpu_library *library);

#endif
