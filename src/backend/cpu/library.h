/* SPDX-License-Identifier: Apache-2.0
 *
 * Ops that a library runs better than the kernels in this tree: today matrix products
 * by the oneDNN module. A missing module is no error: everything then runs on the
 * portable kernels, and describe says so.
 *
 * Bind makes what the library needs for an op (and finds it again for an equal op);
 * the handle stays the library's and dies with it, after all programs that use it.
 */
#ifndef RFI_LIBRARY_H
#define RFI_LIBRARY_H

#include <stdbool.h>

#include "ops/call.h"

typedef struct rfi_cpu_library rfi_cpu_library;

rfr_status rfi_cpu_library_open(rfr_ctx *ctx, rfi_cpu_library **out);
void rfi_cpu_library_close(rfi_cpu_library *library); /* accepts NULL */

/* Sets *run, *workspace (bytes) and *handle (for call->library) when the library takes
 * this call; leaves *run NULL when the kernel table's entry is to be used. Reads
 * shapes, strides, attributes, threads, and whether data pointers are NULL. */
rfr_status rfi_cpu_library_bind(rfi_cpu_library *library, rfi_opcode code, const rfi_call *call, rfi_kernel_fn *run,
                                size_t *workspace, void **handle);

/* Of a product of groups that rfi_cpu_library_bind did not take: what was in the way; NULL of another op. */
const char *rfi_cpu_library_lacks(const rfi_cpu_library *library, rfi_opcode code, const rfi_call *call);

/* What a profile calls the library's kernels; those of groups are all of the module's own. */
#define RFI_LIBRARY_KERNEL "oneDNN"
#define RFI_GROUPS_KERNEL "AMX"
/* "oneDNN 2.6.3 (avx512_core_amx)", or why there is none. Part of what the bits depend on. */
const char *rfi_cpu_library_describe(const rfi_cpu_library *library);
/* Whether there is a library at all. */
bool rfi_cpu_library_loaded(const rfi_cpu_library *library);
/* Whether bf16 products have instructions of their own, so that bf16 is the faster choice. */
bool rfi_cpu_library_bf16_fast(const rfi_cpu_library *library);

#endif
