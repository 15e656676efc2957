/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers of the fuzz targets. A target is one file with LLVMFuzzerTestOneInput: for any bytes, a reader must return a
 * status with a slug, without a crash, hang or leak. If the reader has a printer, an accepted input must also print as
 * text that reads back equal.
 *
 * Each target is linked twice: with libFuzzer (make fuzz), and with replay.c, which ctest runs on
 * tests/data/fuzz/TARGET.
 */
#ifndef RFT_FUZZ_H
#define RFT_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* The context of the process. Its memory limit is far above the needs of any input. */
rfr_ctx *rft_fuzz_ctx(void);
/* Aborts with the text `what` if the condition is false. */
void rft_fuzz_expect(bool holds, const char *what);
/* Aborts unless a reader may return the status: RFR_OK, or an error that is not internal, with a slug, a message of one
 * line and a next step. */
void rft_fuzz_status(rfr_status s);
/* Aborts if the context still has allocated blocks. */
void rft_fuzz_clean(void);
/* The path of a file in memory that contains `data`; the same path at each call. */
const char *rft_fuzz_file(const void *data, size_t n);
/* The path of a folder in memory. */
const char *rft_fuzz_folder(void);
/* Sets the contents of a file of this folder; NULL: the file does not exist. */
void rft_fuzz_put(const char *name, const void *data, size_t n);
/* Gets the next file of an input, whose files are separated by lines "----"; false: no file is left. At first *text is
 * the input, which is not NULL, and *n its size. */
bool rft_fuzz_part(const char **text, size_t *n, const char **part, size_t *n_part);

#endif
