/* SPDX-License-Identifier: Apache-2.0
 *
 * What a kernel sees: pointers, shapes, strides, attributes. Kernels know no traces.
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

typedef struct rfi_arg {
  void *data; /* NULL: absent operand (rank -1) or dead result (typed all the same) */
  rfr_type type;
  int64_t stride[RFR_MAX_RANK]; /* elements */
} rfi_arg;

typedef struct rfi_call {
  int n_in, n_out;
  const rfi_arg *in;
  const rfi_arg *out; /* out[j].data == in[k].data where the result is the next version of operand k */
  const rfi_attr *attr;
  int32_t microbatch; /* for addressed random numbers; -1 counts as 0 */
  void *workspace;    /* 64-byte aligned, what the kernel's workspace rule asked for */
  int threads;        /* how many threads a parallel region may use; part of the bits */
  void *library;      /* what the library hook made at bind, e.g. a matmul primitive; or NULL */
} rfi_call;

typedef rfr_status (*rfi_kernel_fn)(const rfi_call *call);
/* Bytes of workspace; called at bind and when planning with data pointers that are only
 * NULL or not NULL. */
typedef size_t (*rfi_workspace_fn)(const rfi_call *call);

typedef struct rfi_kernel {
  rfi_kernel_fn run;
  rfi_workspace_fn workspace; /* NULL: none */
} rfi_kernel;

#endif
