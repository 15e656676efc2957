/* SPDX-License-Identifier: Apache-2.0
 *
 * What a kernel sees: pointers, shapes, strides, attributes; declared in refrain/op.h, because
 * kernels from outside the tree see the same. Kernels know no traces.
 *
 * Kernel contract: no allocation, no synchronization with anything but its own
 * threads, no read of values that decide how much work is done (shapes alone do), no
 * write outside its results and its workspace, same bits for the same inputs and the
 * same number of threads. A kernel must handle empty tensors.
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
