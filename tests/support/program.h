/* SPDX-License-Identifier: Apache-2.0
 *
 * The program `refrain` as a child process, in a folder of the test's own with a small configuration and its data.
 */
#ifndef RFT_PROGRAM_H
#define RFT_PROGRAM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

/* Standard output and standard error of the last child. */
enum { RFT_OUT_BYTES = 1 << 22, RFT_ERR_BYTES = 1 << 16 };
extern char rft_out[RFT_OUT_BYTES], rft_err[RFT_ERR_BYTES];

/* Starts PROGRAM with arguments up to a NULL; `input` is its standard input, NULL: that of the test. */
pid_t rft_start(const char *program, const char *input, const char *const *arguments);
/* Waits for the child and reads its output; returns its exit code, or minus the number of a signal. */
int rft_finish(pid_t child);

#define RFT_PROGRAM RFT_BINARY_DIR "/refrain"
#define START(arguments) rft_start(RFT_PROGRAM, NULL, arguments)
#define RUN(...) rft_finish(START(((const char *const[]){__VA_ARGS__, NULL})))
#define RUN_WITH(input, ...) rft_finish(rft_start(RFT_PROGRAM, input, (const char *const[]){__VA_ARGS__, NULL}))

void rft_slurp(const char *path, char *to, size_t size);
void rft_write_file(const char *name, const char *text);
void rft_assert_says(const char *where, const char *what);
/* Parses standard output, or standard error; duplicate keys are errors. Returns a new reference. */
json_t *rft_parsed(void);
json_t *rft_parsed_error(void);
json_int_t rft_number(const json_t *o, const char *key);

/* For cmocka: setup creates the folder with small.yaml and text/N.txt, and enters it; teardown removes it. */
int rft_program_set_up(void **state);
int rft_program_tear_down(void **state);

#endif
