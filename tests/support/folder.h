/* SPDX-License-Identifier: Apache-2.0
 *
 * A fresh folder and a context for each test that uses files. Teardown removes the folder and checks that the context
 * has no block left, so a leak fails the test.
 */
#ifndef RFT_FOLDER_H
#define RFT_FOLDER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "refrain/ctx.h"

typedef struct rft_folder {
  rfr_ctx *ctx;
  char path[512];
  char joined[8][1024]; /* the last eight results of rft_path */
  int next;
} rft_folder;

/* Returns folder/name, valid for the next seven calls. */
char *rft_path(rft_folder *folder, const char *name);
/* Writes a file with plain stdio, creating its folders; fails the test on errors. */
void rft_write(rft_folder *folder, const char *name, const void *data, size_t n);
/* Writes text/0.txt to text/5.txt, a few hundred bytes each, as training data. */
void rft_write_texts(rft_folder *folder);
/* Reads a complete file and appends a NUL; free with free(). */
char *rft_read(rft_folder *folder, const char *name, size_t *n);

int rft_folder_setup(void **state);
int rft_folder_teardown(void **state);
#define rft_folder_test(f) cmocka_unit_test_setup_teardown(f, rft_folder_setup, rft_folder_teardown)

#endif
