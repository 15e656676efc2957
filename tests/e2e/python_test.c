/* SPDX-License-Identifier: Apache-2.0
 *
 * The Python package against the library of this build: runs the tests of python/tests, which need the standard
 * library alone, and PyTorch for some. The interpreter is $PYTHON or python3; without one they are skipped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cmocka.h>

#define PACKAGE RFT_SOURCE_DIR "/python"
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNDER_SANITIZER 1 /* the sanitizer's runtime must be loaded before the interpreter */
#else
#define UNDER_SANITIZER 0
#endif

static const char *interpreter(void) {
  const char *named = getenv("PYTHON");
  return named && *named ? named : "python3";
}

/* Runs a command line of the interpreter; returns its exit status. */
static int run(const char *arguments) {
  char line[2048];
  snprintf(line, sizeof line,
           "cd " PACKAGE "/tests && PYTHONPATH=" PACKAGE " PYTHONDONTWRITEBYTECODE=1 REFRAIN_LIBRARY=" RFT_BINARY_DIR
           "/librefrain.so REFRAIN_BUILD=" RFT_BINARY_DIR " %s %s",
           interpreter(), arguments);
  fflush(stdout);
  const int status = system(line);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void skip_with(const char *reason) {
  print_message("skipped: %s\n", reason);
  skip();
}

static void need_python(void) {
  if (UNDER_SANITIZER) skip_with("a sanitizer's runtime is not in the interpreter");
  if (run("-c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null") != 0)
    skip_with("there is no Python 3.9 or newer; PYTHON names another interpreter");
}

static void run_file(const char *arguments) {
  need_python();
  assert_int_equal(run(arguments), 0);
}

static void abi(void **state) { (void)state, run_file("test_abi.py"); }
static void core(void **state) { (void)state, run_file("test_core.py"); }
static void text(void **state) { (void)state, run_file("test_text.py"); }
static void train(void **state) { (void)state, run_file("test_train.py"); }
static void graphs(void **state) { (void)state, run_file("test_graphs.py"); }
static void ranks(void **state) { (void)state, run_file("test_ranks.py"); }
static void lab(void **state) { (void)state, run_file("test_lab.py"); }
static void examples(void **state) { (void)state, run_file("test_examples.py"); }

static void torch(void **state) {
  (void)state;
  need_python();
  if (run("-c 'import torch' 2>/dev/null") != 0) skip_with("PyTorch is not installed");
  assert_int_equal(run("test_torch.py"), 0);
}

static void types(void **state) {
  (void)state;
  need_python();
  if (run("-m mypy --version >/dev/null 2>&1") != 0) skip_with("mypy is not installed");
  assert_int_equal(run("-m mypy --config-file ../mypy.ini --cache-dir " RFT_BINARY_DIR "/mypy ../refrain"), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(abi),    cmocka_unit_test(core),  cmocka_unit_test(text), cmocka_unit_test(train),
      cmocka_unit_test(graphs), cmocka_unit_test(ranks), cmocka_unit_test(lab),  cmocka_unit_test(examples),
      cmocka_unit_test(torch),  cmocka_unit_test(types),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
