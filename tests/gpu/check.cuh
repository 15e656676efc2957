/* SPDX-License-Identifier: Apache-2.0
 *
 * Code shared by the checks of kernels without the library. Kernels pass CUDA's return codes to rfi_cuda_check; here an
 * error ends the program. Device memory is initially filled with 0xff, which is NaN in every float type, and has a
 * guard after its last byte.
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
  bool guard_intact() const {
    std::vector<unsigned char> x(GUARD);
    CUDA(cudaMemcpy(x.data(), data + bytes, GUARD, cudaMemcpyDeviceToHost));
    return std::all_of(x.begin(), x.end(), [](unsigned char b) { return b == 0xff; });
  }
};

#endif
