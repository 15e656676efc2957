/* SPDX-License-Identifier: Apache-2.0
 *
 * The error of long sums in the portable GEMMs of f32, for each instruction set. With terms of random sign the error of
 * one sum of K terms grows with sqrt(K). With partial sums of 64 terms it stays close to the error of a GEMM with K =
 * 128. Models with large activations that cancel later, such as SmolLM2, show the difference as an error of their
 * gradients.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "support/op_check.h"
#include "support/op_run.h"

#define MOST 2.5e-7 /* 1.3 times the largest measured difference; one sum of 1536 terms has 7e-7 */

/* The relative difference from f64 in the L2 norm. */
static double difference(const char *text, const char *isa) {
  rft_case c;
  rft_run run;
  rft_reference exact;
  double wrong = 0, all = 0;
  const char *mistake = rft_case_parse(text, RFR_F32, &c);
  if (mistake) fail_msg("%s: %s", text, mistake);
  rft_run_init(&run, &c, RFT_DENSE, 0xFF, 0);
  rft_reference_init(&exact, &run, rft_op_get(c.def->code).ref, RFR_F64, 0, 0);
  mistake = rft_run_kernel(&run, rfi_cpu_kernel(isa, c.def->code), 2);
  if (mistake) fail_msg("%s: %s", text, mistake);
  for (int64_t i = 0; i < rfi_count(&c.out[0]); i++) {
    const double want = rft_get(&exact.out_arg[0], i), d = rft_get(&run.out_arg[0], i) - want;
    wrong += d * d, all += want * want;
  }
  rft_reference_deinit(&exact);
  rft_run_deinit(&run);
  assert_true(all > 0);
  return sqrt(wrong / all);
}

static void long_sums(void **state) {
  (void)state;
  static const char *const rows[] = {"matmul(f[37,128], f[41,128]) ta=0 tb=1 to=f",
                                     "matmul(f[37,576], f[41,576]) ta=0 tb=1 to=f",
                                     "matmul(f[37,1536], f[41,1536]) ta=0 tb=1 to=f",
                                     "matmul(f[3072,37], f[3072,41]) ta=1 tb=0 to=f",
                                     "lora_matmul(f[37,1536], f[41,1536], f[37,128], f[41,128]) tb=1 to=f",
                                     "grouped_matmul(f[37,1536], f[2,41,1536], i[3]=0,20,37) tb=1 to=f"};
  const char *isas[3];
  const int n = rft_isas(isas);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    for (int k = 0; k < n; k++) {
      const double d = difference(rows[i], isas[k]);
      print_message("%s, %s: %.2e\n", rows[i], isas[k], d);
      if (!(d <= MOST)) fail_msg("%s, %s: %.2e, more than %.2e", rows[i], isas[k], d, MOST);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(long_sums)};
  return cmocka_run_group_tests_name("gemm_precision", tests, NULL, NULL);
}
