/* SPDX-License-Identifier: Apache-2.0
 *
 * What checks of kernels alone share. A kernel asks rfi_cuda_check what a call to CUDA returned; here an error ends
 * the program, for nothing after it could be trusted. Device memory begins as 0xff, not a number in any type, and has
 * a guard behind its last byte.
 */
#ifndef RFI_CHECK_CUH
#define RFI_CHECK_CUH

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "backend/cuda/cuda.h"

static int failures;

extern "C" rfr_status rfi_cuda_check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return RFR_OK;
  printf("BAD: %s: %s (%s)\n", what, cudaGetErrorString(error), cudaGetErrorName(error));
  exit(1);
}
#define CUDA(call) rfi_cuda_check(call, #call)

static inline void expect(bool good, const char *what) {
  if (good) return;
  printf(" BAD(%s)", what);
  failures++;
}

enum { GUARD = 4096 };

struct buffer {
  char *data = NULL;
  size_t bytes;
  explicit buffer(size_t n) : bytes(n) {
    CUDA(cudaMalloc((void **)&data, bytes + GUARD));
    poison();
  }
  buffer(const buffer &) = delete;
  ~buffer() { cudaFree(data); }
  void poison() { CUDA(cudaMemset(data, 0xff, bytes + GUARD)); }
  bool guard_stands() const {
    std::vector<unsigned char> x(GUARD);
    CUDA(cudaMemcpy(x.data(), data + bytes, GUARD, cudaMemcpyDeviceToHost));
    return std::all_of(x.begin(), x.end(), [](unsigned char b) { return b == 0xff; });
  }
};

#endif
