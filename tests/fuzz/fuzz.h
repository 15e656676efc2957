/* SPDX-License-Identifier: Apache-2.0
 *
 * What the fuzz targets share. A target is one file here with LLVMFuzzerTestOneInput: bytes
 * of anybody in, and out comes a status with a slug, never a crash, a hang or a leak. What
 * a reader takes must also survive being printed and read again, where it has a printer.
 *
 * The same target is linked twice: with libFuzzer (make fuzz), and with a main that
 * replays tests/data/fuzz/TARGET (ctest), so that what was found once stays found.
 */
#ifndef RFT_FUZZ_H
#define RFT_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* The process's context, with a byte limit far above what an input may need. */
rfr_ctx *rft_fuzz_ctx(void);
/* Ends the process with `what` when it does not hold. */
void rft_fuzz_expect(bool holds, const char *what);
/* A status that a reader may return: RFR_OK, or one with slug, message and next step, and no
 * defect of ours. */
void rft_fuzz_status(rfr_status s);
/* The context holds nothing any more. */
void rft_fuzz_clean(void);
/* Path of a file in memory that holds `data`; the same file at each call. */
const char *rft_fuzz_file(const uint8_t *data, size_t n);
/* Path of a temporary folder in which `name` is that file; removed at exit. */
const char *rft_fuzz_folder(const char *name);

#endif
