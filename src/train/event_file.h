/* SPDX-License-Identifier: Apache-2.0
 *
 * Event files as TensorBoard reads them: records of a length, a message and their checksums. A message is a protocol
 * buffer of which we write the few fields of times, steps and scalars.
 *
 * Formats: tensorflow/core/lib/io/record_writer.cc (records; "masked" CRC-32C), tensorflow/core/util/event.proto and
 * tensorflow/core/framework/summary.proto (fields).
 */
#ifndef RFI_EVENT_FILE_H
#define RFI_EVENT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RFI_EVENT_TAG = 240 };
typedef struct rfi_scalar {
  const char *tag; /* "train/loss", at most RFI_EVENT_TAG bytes */
  double value;    /* left out if it is not finite */
} rfi_scalar;

/* maximum size of a record: 20 scalars with tags of 64 bytes, or 4 with tags of RFI_EVENT_TAG bytes */
enum { RFI_EVENT_BYTES = 2048 };

uint32_t rfi_crc32c(const void *data, size_t n);
/* Each function writes one record and returns its size. `time`: seconds since 1970. */
/* The first record of a file. */
size_t rfi_event_version(double time, uint8_t out[RFI_EVENT_BYTES]);
/* A session that begins with `step`: readers discard this step and later ones of earlier files. */
size_t rfi_event_session(double time, int64_t step, uint8_t out[RFI_EVENT_BYTES]);
size_t rfi_event_scalars(double time, int64_t step, const rfi_scalar *scalars, int n, uint8_t out[RFI_EVENT_BYTES]);

#endif
