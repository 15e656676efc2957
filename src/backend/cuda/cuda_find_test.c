/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages for other machines, over fakes of CUDA: no driver, one that is too old, one that shows no
 * GPU, a GPU that is too old, several GPUs; with and without libraries.
 */
#include "backend/cuda/cuda_error.c"
#include "backend/cuda/cuda_find.c"

#include "support/context.h"

/* ---- fakes ---- */

static struct {
  int driver, gpus, major;
  cudaError_t count;
  bool lt, nccl, nvtx;
} machine;
static const char *device;

cudaError_t cudaDriverGetVersion(int *version) { return *version = machine.driver, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13010, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return (void)stream, cudaSuccess; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorSystemNotReady ? "not ready" : "insufficient"; }
const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaGetDeviceCount(int *n) { return *n = machine.gpus, machine.count; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int ordinal) {
  assert_in_range(ordinal, 0, machine.gpus - 1);
  *value = a == cudaDevAttrComputeCapabilityMajor ? machine.major : 2;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int ordinal) {
  *p = (struct cudaDeviceProp){.major = machine.major, .minor = 2, .multiProcessorCount = 7};
  snprintf(p->name, sizeof p->name, "GPU %d", ordinal);
  return cudaSuccess;
}
static bool say(bool there, const char *what, char *text, size_t size) {
  snprintf(text, size, "%s%s", there ? "" : "no ", what);
  return there;
}
bool rfi_lt_describe(const rfi_cuda_host *core, char *text, size_t size) {
  return (void)core, say(machine.lt, "cuBLASLt 13.1.0", text, size);
}
bool rfi_nccl_describe(const rfi_cuda_host *core, char *text, size_t size) {
  return (void)core, say(machine.nccl, "NCCL 2.28.9", text, size);
}
bool rfi_ranges_built(void) { return machine.nvtx; }

static const char *device_of(const rfr_ctx *c) { return (void)c, device; }
static const rfi_cuda_host host = {.fail = rfi_fail, .device = device_of};

/* ---- tests ---- */

static void test_refused(void **state) {
  static const struct {
    int driver, gpus, major;
    cudaError_t count;
    const char *device, *says;
  } rows[] = {
      {0, 0, 0, cudaErrorInsufficientDriver, "cpu", "there is no NVIDIA driver; one for CUDA 13.0 or newer is needed"},
      {12040, 0, 0, cudaErrorInsufficientDriver, "cuda",
       "the NVIDIA driver is for CUDA 12.4, one for CUDA 13.0 or newer is needed"},
      {13000, 0, 0, cudaErrorNoDevice, "cuda", "shows none; CUDA_VISIBLE_DEVICES may hide them"},
      {13000, 0, 0, cudaErrorSystemNotReady, "cuda", "not ready (the driver is for CUDA 13.0)"},
      {13000, 2, 9, cudaSuccess, "cuda:2", "there is no device cuda:2; the machine has 2"},
      {13000, 2, 9, cudaSuccess, "cuda:4294967296", "; the machine has 2"},
      {13000, 2, 7, cudaSuccess, "cuda:1", "capability 8.0; cuda:1 has 7.2"},
      {13000, 2, 9, cudaSuccess, "cuda:x", "none of cuda, cuda:N, cuda:none"},
  };
  (void)state;
  rfi_cuda_errors_go_to(rfi_fail);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char text[256];
    machine.driver = rows[i].driver, machine.gpus = rows[i].gpus, machine.major = rows[i].major;
    machine.count = rows[i].count;
    device = rows[i].device;
    assert_int_not_equal(rfi_cuda_describe(&host, ctx, text, sizeof text), RFR_OK);
    if (!strstr(rfr_last_error()->message, rows[i].says))
      fail_msg("\"%s\" does not say %s", rfr_last_error()->message, rows[i].says);
  }
}

/* The context's own GPU is described, not the first. */
static void test_described(void **state) {
  static const char *const devices[] = {"cpu", "cuda", "cuda:1", "cuda:none"};
  static const char *const says[] = {"GPU 0, compute capability 9.2, 7 multi", "GPU 0, ", "GPU 1, ", "no GPU: plans"};
  char text[256];
  (void)state;
  machine.driver = 13000, machine.gpus = 2, machine.major = 9, machine.count = cudaSuccess;
  machine.lt = true, machine.nccl = false;
  for (int i = 0; i < 4; i++) {
    device = devices[i];
    OK(rfi_cuda_describe(&host, ctx, text, sizeof text));
    if (strncmp(text, says[i], strlen(says[i])) != 0) fail_msg("%s: %s", device, text);
  }
  device = "cuda";
  OK(rfi_cuda_describe(&host, ctx, text, sizeof text));
  assert_non_null(strstr(text, "driver for CUDA 13.0, cuBLASLt 13.1.0, no NCCL"));
}

/* Each piece is reported with its version, or as missing with the consequence. */
static void test_pieces(void **state) {
  static const char *const found[] = {"NVIDIA driver for CUDA 13.0", "cuBLASLt 13.1.0", "NCCL 2.28.9", "NVTX"};
  static const char *const costs[] = {"no GPU is used", "no GPU is used", "one GPU", "without their ops"};
  rfr_piece p;
  (void)state;
  for (int gone = -1; gone < 4; gone++) {
    machine.driver = gone == 0 ? 0 : 13000;
    machine.lt = gone != 1, machine.nccl = gone != 2, machine.nvtx = gone != 3;
    for (int i = 0; i < 4; i++) {
      OK(rfi_cuda_piece(&host, i, &p));
      assert_int_equal(p.missing, i == gone);
      assert_string_equal(p.found, i == gone ? "" : found[i]);
      assert_non_null(strstr(p.costs, costs[i]));
    }
    assert_int_equal(rfi_cuda_piece(&host, 4, &p), RFR_INVALID);
  }
  machine.driver = 12040; /* too old: reported as missing */
  OK(rfi_cuda_piece(&host, 0, &p));
  assert_string_equal(p.found, "NVIDIA driver for CUDA 12.4");
  assert_int_equal(p.missing, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_refused), rft_context_test(test_described),
                                     rft_context_test(test_pieces)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
