/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds the GPU and the libraries that GPUs need. The runtime's errors do not distinguish a missing
 * driver, one that is too old, and one without visible GPUs, so the versions are queried.
 */
#include "backend/cuda/cuda_find.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/lt.h"
#include "backend/cuda/nccl.h"
#include "backend/cuda/ranges.h"

rfr_status rfi_cuda_parse_device(const rfi_cuda_host *core, const char *text, int *ordinal) {
  char *end;
  *ordinal = 0;
  if (strcmp(text, "cuda") == 0) return RFR_OK;
  if (strcmp(text, "cuda:none") == 0) {
    *ordinal = -1;
    return RFR_OK;
  }
  const char *digits = strncmp(text, "cuda:", 5) == 0 ? text + 5 : "";
  const long n = strtol(digits, &end, 10);
  *ordinal = n > INT_MAX ? INT_MAX : (int)n;
  if (end == digits || *end || n < 0)
    return core->fail(RFI_E_ARGUMENT, "device \"%s\" is none of cuda, cuda:N, cuda:none", text);
  return RFR_OK;
}

/* CUDA versions, 1000 x major + 10 x minor: the driver's (0: no driver) and the required one. */
static int driver_version(int *wanted) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaGetLastError();
  *wanted = runtime / 1000 * 1000; /* any driver of the same major version works */
  return driver;
}

static rfr_status none_usable(const rfi_cuda_host *core, cudaError_t e) {
  static const char no[] = "no NVIDIA GPU can be used here";
  int wanted, driver = driver_version(&wanted);
  if (driver == 0)
    return core->fail(RFI_E_BACKEND_MISSING, "%s: there is no NVIDIA driver; one for CUDA %d.0 or newer is needed", no,
                      wanted / 1000);
  if (driver < wanted)
    return core->fail(RFI_E_BACKEND_MISSING,
                      "%s: the NVIDIA driver is for CUDA %d.%d, one for CUDA %d.0 or newer is needed", no,
                      driver / 1000, driver % 1000 / 10, wanted / 1000);
  return core->fail(RFI_E_BACKEND_MISSING, "%s: %s (the driver is for CUDA %d.%d)", no,
                    e == cudaSuccess || e == cudaErrorNoDevice
                        ? "the NVIDIA driver shows none; CUDA_VISIBLE_DEVICES may hide them"
                        : cudaGetErrorString(e),
                    driver / 1000, driver % 1000 / 10);
}

rfr_status rfi_cuda_find(const rfi_cuda_host *core, int ordinal, bool portable, rfi_cuda_info *info) {
  static const char what[] = "reading the device";
  int n = 0;
  *info = (rfi_cuda_info){ordinal, 132, 9, 0, portable};
  if (ordinal < 0) return RFR_OK;
  const cudaError_t e = cudaGetDeviceCount(&n);
  if (e != cudaSuccess || n == 0) {
    cudaGetLastError();
    return none_usable(core, e);
  }
  if (ordinal >= n)
    return core->fail(RFI_E_BACKEND_MISSING, "there is no device cuda:%d; the machine has %d", ordinal, n);
  RFI_TRY(rfi_cuda_check(cudaDeviceGetAttribute(&info->sms, cudaDevAttrMultiProcessorCount, ordinal), what));
  RFI_TRY(rfi_cuda_check(cudaDeviceGetAttribute(&info->major, cudaDevAttrComputeCapabilityMajor, ordinal), what));
  RFI_TRY(rfi_cuda_check(cudaDeviceGetAttribute(&info->minor, cudaDevAttrComputeCapabilityMinor, ordinal), what));
  if (info->major < 8)
    return core->fail(RFI_E_BACKEND_MISSING, "the kernels need compute capability 8.0; cuda:%d has %d.%d", ordinal,
                      info->major, info->minor);
  return RFR_OK;
}

rfr_status rfi_cuda_describe(const rfi_cuda_host *core, rfr_ctx *ctx, char *text, size_t size) {
  struct cudaDeviceProp p;
  rfi_cuda_info info;
  int ordinal = 0, wanted;
  text[0] = '\0';
  if (strcmp(core->device(ctx), "cpu") != 0) RFI_TRY(rfi_cuda_parse_device(core, core->device(ctx), &ordinal));
  RFI_TRY(rfi_cuda_find(core, ordinal, false, &info));
  if (ordinal < 0) {
    snprintf(text, size, "no GPU: plans alone are made, for an H200");
    return RFR_OK;
  }
  RFI_TRY(rfi_cuda_check(cudaGetDeviceProperties(&p, ordinal), "reading the device"));
  char lt[64], nccl[64];
  rfi_lt_describe(core, lt, sizeof lt);
  rfi_nccl_describe(core, nccl, sizeof nccl);
  const int driver = driver_version(&wanted);
  snprintf(text, size, "%s, compute capability %d.%d, %d multiprocessors, %.0f GiB, driver for CUDA %d.%d, %s, %s",
           p.name, p.major, p.minor, p.multiProcessorCount, (double)p.totalGlobalMem / (1 << 30), driver / 1000,
           driver % 1000 / 10, lt, nccl);
  return RFR_OK;
}

static void find_driver(rfr_piece *out) {
  int wanted, driver = driver_version(&wanted);
  if (driver > 0)
    snprintf(out->found, sizeof out->found, "NVIDIA driver for CUDA %d.%d", driver / 1000, driver % 1000 / 10);
  out->missing = driver < wanted;
}

rfr_status rfi_cuda_piece(const rfi_cuda_host *core, int i, rfr_piece *out) {
  enum { DRIVER, LT, NCCL, NVTX, PIECES };
  static const rfr_piece pieces[PIECES] = {
      [DRIVER] = {"NVIDIA driver", "no GPU is used; plans for one (cuda:none) are made all the same", "", 0},
      [LT] = {"cuBLASLt 13", "no GPU is used, because it runs most GEMMs; it is libcublas of CUDA 13", "", 0},
      [NCCL] = {"NCCL", "a run has one GPU: ranks that are GPUs are refused; it is libnccl2, 2.18 or newer", "", 0},
      [NVTX] = {"NVTX",
                "profilers show kernels without their ops and layers; its headers were not there when the "
                "module was built",
                "", 0},
  };
  if (i < 0 || i >= PIECES) return core->fail(RFI_E_ARGUMENT, "there is no component %d", i);
  *out = pieces[i];
  if (i == DRIVER) find_driver(out);
  if (i == LT) out->missing = !rfi_lt_describe(core, out->found, sizeof out->found);
  if (i == NCCL) out->missing = !rfi_nccl_describe(core, out->found, sizeof out->found);
  if (i == NVTX) out->missing = !rfi_ranges_built();
  if (i == NVTX) snprintf(out->found, sizeof out->found, "NVTX");
  if (i != DRIVER && out->missing) out->found[0] = '\0';
  return RFR_OK;
}
