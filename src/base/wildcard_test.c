/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "refrain/nn.h"

static void patterns(void **state) {
  (void)state;
  assert_true(rfr_name_matches("*norm*", "model.norm.weight"));
  assert_true(rfr_name_matches("model.layers.?.mlp.*", "model.layers.3.mlp.up_proj.weight"));
  assert_false(rfr_name_matches("model.layers.?.mlp.*", "model.layers.13.mlp.up_proj.weight"));
  assert_true(rfr_name_matches("*", ""));
  assert_false(rfr_name_matches("", "x"));
  assert_true(rfr_name_matches("a*b*c", "aXbYbZc"));
  assert_false(rfr_name_matches("a*b*c", "aXbYbZ"));
}

/* Many stars do not take exponential time. */
static void many_stars(void **state) {
  (void)state;
  assert_false(
      rfr_name_matches("*a*a*a*a*a*a*a*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(patterns), cmocka_unit_test(many_stars)};
  return cmocka_run_group_tests_name("wildcard", tests, NULL, NULL);
}
