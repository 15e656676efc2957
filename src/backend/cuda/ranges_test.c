/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranges without a profiler, and with a fake one that NVTX's headers load like a real one: by its entry, which fills
 * their tables.
 */
#include "backend/cuda/ranges.c"

#include "support/context.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
static bool listens;
static char seen[1000]; /* the names of pushed ranges, in brackets */

static nvtxDomainHandle_t create(const char *name) {
  assert_string_equal(name, "refrain");
  return (nvtxDomainHandle_t)seen;
}
static void destroy(nvtxDomainHandle_t domain) { assert_ptr_equal(domain, seen); }
static int range_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) {
  assert_ptr_equal(domain, seen);
  assert_int_equal(a->messageType, NVTX_MESSAGE_TYPE_ASCII);
  snprintf(seen + strlen(seen), sizeof seen - strlen(seen), "[%s", a->message.ascii);
  return 0;
}
static int range_pop(nvtxDomainHandle_t domain) {
  assert_ptr_equal(domain, seen);
  strcat(seen, "]");
  return 0;
}

static int inject(NvtxGetExportTableFunc_t get) {
  const NvtxExportTableCallbacks *table = get(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable functions;
  unsigned int n;
  if (!listens) return 0;
  assert_true(table && table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &n));
  *functions[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
  *functions[NVTX_CBID_CORE2_DomainDestroy] = (NvtxFunctionPointer)destroy;
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)range_push;
  *functions[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)range_pop;
  return 1;
}
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = inject;

/* Ops of a small step: two in a layer, one in the next, one of another phase there, one in no layer. */
static void run(rfi_ranges *r) {
  const rfi_op_def norm = {.name = "rmsnorm"}, product = {.name = "matmul"};
  const rfi_opr ops[] = {{.def = &norm, .phase = RFR_PHASE_FORWARD, .scope = "layers.0"},
                         {.def = &product, .phase = RFR_PHASE_FORWARD, .scope = "layers.0"},
                         {.def = &norm, .phase = RFR_PHASE_FORWARD, .scope = "layers.1"},
                         {.def = &product, .phase = RFR_PHASE_WGRAD, .scope = "layers.1"},
                         {.def = &product, .phase = RFR_PHASE_WGRAD, .scope = ""}};
  seen[0] = '\0';
  for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
    rfi_ranges_begin(r, &ops[i]);
    rfi_ranges_end(r);
  }
  rfi_ranges_end_layer(r);
  rfi_ranges_end_layer(r); /* no range is open */
  rfi_ranges_begin_named(r, "replay");
  rfi_ranges_end(r);
}

static void test_ranges(void **state) {
  (void)state;
  rfi_ranges r;
  assert_true(rfi_ranges_built());
  listens = true;
  rfi_ranges_open(&r);
  assert_ptr_equal(r.domain, seen);
  run(&r);
  assert_string_equal(seen, "[forward layers.0[rmsnorm][matmul]][forward layers.1[rmsnorm]]"
                            "[wgrad layers.1[matmul]][wgrad[matmul]][replay]");
  rfi_ranges_close(&r);
  run(&r); /* closed, or no profiler: nothing is called */
  assert_string_equal(seen, "");
}
#else
static void test_ranges(void **state) {
  (void)state;
  assert_false(rfi_ranges_built());
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranges)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
