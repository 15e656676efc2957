/* SPDX-License-Identifier: Apache-2.0
 *
 * The arguments of a kernel: pointers, shapes, strides, attributes. They are declared in refrain/op.h, because kernels
 * from outside the tree receive the same. A kernel does not see the trace.
 *
 * Kernel contract: no allocation; no synchronization except among its own threads; the amount of work and its split
 * depend on shapes only, not on values; no write outside its results and its workspace; bitwise equal results for equal
 * inputs and the same number of threads. A kernel must handle empty tensors.
 */
#ifndef RFI_CALL_H
#define RFI_CALL_H

#include <stddef.h>

#include "refrain/dtype.h"
#include "trace/trace.h"

typedef rfr_arg rfi_arg;
typedef rfr_call rfi_call;
typedef rfr_kernel_fn rfi_kernel_fn;
typedef rfr_workspace_fn rfi_workspace_fn;

#endif
