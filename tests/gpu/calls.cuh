/* SPDX-License-Identifier: Apache-2.0
 *
 * Code shared by the checks that call the library and CUDA: an error ends the program.
 */
#ifndef RFI_CALLS_CUH
#define RFI_CALLS_CUH

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "refrain/status.h"

static void ok(rfr_status s) {
  if (s == RFR_OK) return;
  printf("FAILED: %s: %s\n", rfr_last_error()->slug, rfr_last_error()->message);
  exit(1);
}

static void cuda(cudaError_t e) {
  if (e == cudaSuccess) return;
  printf("FAILED: %s\n", cudaGetErrorString(e));
  exit(1);
}

#endif
