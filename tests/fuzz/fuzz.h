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

/* The context of the process. Its byte limit is far above the needs of any input. */
rfr_ctx *rft_fuzz_ctx(void);
/* Aborts with the text `what` if the condition is false. */
void rft_fuzz_expect(bool holds, const char *what);
/* Aborts unless a reader may return the status: RFR_OK, or an error with slug, one-line message and next step that is
 * not internal. */
void rft_fuzz_status(rfr_status s);
/* Aborts if the context has live blocks. */
void rft_fuzz_clean(void);
/* Path of a file in memory that holds `data`; the same file at each call. */
const char *rft_fuzz_file(const void *data, size_t n);
/* Path of a folder in memory. */
const char *rft_fuzz_folder(void);
/* Sets the contents of a file of this folder; NULL: the folder does not have it. */
void rft_fuzz_put(const char *name, const void *data, size_t n);
/* Takes the next of the files that an input has, which are separated by lines "----"; false: none is left. Starts with
 * the input in *text, which is not NULL, and *n. */
bool rft_fuzz_part(const char **text, size_t *n, const char **part, size_t *n_part);

#endif
