/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules that do not fit the library: of another build, of an unknown build, and a missing one. The first two trap
 * when they are called (cmake/tests.cmake builds them).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "refrain/train.h"
#include "support/context.h"

static void refuses(const char *folder, const char *slug, const char *says) {
  rfr_ctx_options o = rfr_ctx_options_default();
  const rfi_backend *backend;
  char text[256], id[RFR_NCCL_ID_BYTES];
  o.device = "cuda:none";
  o.module_path = folder;
  OK(rfr_ctx_create(&o, &ctx));
  for (int i = 0; i < 3; i++) {
    const rfr_status s = i == 0   ? rfi_backend_find(ctx, &backend)
                         : i == 1 ? rfr_cuda_describe(ctx, text, sizeof text)
                                  : rfr_comm_nccl_id(ctx, id);
    assert_int_equal(s, RFR_UNSUPPORTED);
    assert_string_equal(rfr_last_error()->slug, slug);
    if (!strstr(rfr_last_error()->message, says)) fail_msg("\"%s\" lacks %s", rfr_last_error()->message, says);
  }
  rfr_ctx_destroy(ctx);
  ctx = NULL;
}

static void test_modules(void **state) {
  char mine[64];
  (void)state;
  refuses(RFT_BINARY_DIR "/other_build", "backend.build", "other_build/librefrain_cuda.so is of build 0.0.1-other, ");
  snprintf(mine, sizeof mine, ", the library of %s-", rfr_version());
  refuses(RFT_BINARY_DIR "/other_build", "backend.build", mine);
  assert_non_null(strstr(rfr_last_error()->next, "remove the module"));
  refuses(RFT_BINARY_DIR "/old_build", "backend.build", "of build unknown, an old one");
  refuses(RFT_BINARY_DIR "/no_build", "backend.missing", "is not there");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_modules)};
  return cmocka_run_group_tests_name("modules", tests, NULL, NULL);
}
