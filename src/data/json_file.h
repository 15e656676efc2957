/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON files of limited size.
 */
#ifndef RFI_JSON_FILE_H
#define RFI_JSON_FILE_H

#include "base/json.h"
#include "data/file.h"

/* The largest JSON file that is read, because a parsed text takes up to 30 times its bytes. Indexes of the largest
 * model folders have 10 MB. */
enum { RFI_JSON_LIMIT = 16 << 20 };

/* Errors: file.*, json. Release with json_decref. */
rfr_status rfi_json_load(rfr_ctx *ctx, const char *path, json_t **out);

#endif
