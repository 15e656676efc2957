/* SPDX-License-Identifier: Apache-2.0
 *
 * The library loads its modules from its own folder, even after the process changes its working folder. Here a program
 * opens the library by a relative path and changes to a folder where a file of the module's name ends the process when
 * it is loaded.
 */
#include <dlfcn.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "refrain/train.h"

enum { TRAP = 42 }; /* the exit status of the foreign module */

#define CALL(name) ((__typeof__(&name))dlsym(library, #name))

/* In a child: opens the library from `folder` as `path`, changes to `next`, and describes the machine. Returns the exit
 * status: 0, TRAP, or the line that failed. The module path is written to `out`. */
static int describe_in_child(const char *folder, const char *path, const char *next, char out[PATH_MAX]) {
  int ends[2], status;
  assert_int_equal(pipe(ends), 0);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    rfr_ctx *ctx;
    rfr_machine machine = {0};
    if (chdir(folder) != 0) _exit(1);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) _exit(2);
    if (chdir(next) != 0) _exit(3);
    if (CALL(rfr_ctx_create)(NULL, &ctx) != RFR_OK) _exit(4);
    if (CALL(rfr_machine_describe)(ctx, &machine) != RFR_OK) _exit(5);
    const size_t n = strlen(machine.module_path) + 1;
    if (write(ends[1], machine.module_path, n) != (ssize_t)n) _exit(6);
    _exit(0);
  }
  close(ends[1]);
  memset(out, 0, PATH_MAX);
  const ssize_t got = read(ends[0], out, PATH_MAX - 1);
  assert_true(got >= 0);
  close(ends[0]);
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static void test_foreign_module_is_a_trap(void **state) {
  (void)state;
  const pid_t child = fork();
  int status;
  if (child == 0) {
    dlopen(RFT_BINARY_DIR "/trap/librefrain_onednn.so", RTLD_NOW | RTLD_LOCAL);
    _exit(0);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), TRAP);
}

static void test_working_folder(void **state) {
  (void)state;
  char path[PATH_MAX], real[PATH_MAX];
  assert_non_null(realpath(RFT_BINARY_DIR, real));
  static const char *const names[] = {"./librefrain.so", "made/../librefrain.so", RFT_BINARY_DIR "/librefrain.so"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    assert_int_equal(describe_in_child(RFT_BINARY_DIR, names[i], "trap", path), 0);
    assert_string_equal(path, real);
  }
}

int main(void) {
  unsetenv("REFRAIN_ONEDNN");
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_foreign_module_is_a_trap),
                                     cmocka_unit_test(test_working_folder)};
  return cmocka_run_group_tests_name("module_path", tests, NULL, NULL);
}
