/* SPDX-License-Identifier: Apache-2.0
 *
 * Tests that run on a device too: `--device NAME` in front of the other arguments, or REFRAIN_DEVICE.
 */
#ifndef RFT_DEVICE_H
#define RFT_DEVICE_H

#include <stdbool.h>

#include "backend/backend.h"

/* Takes `--device NAME` at argv[1] out of the arguments and names it to every context from now on. False: a device is
 * named and is not there; standard error has why. */
bool rft_device_named(int *argc, char **argv);

/* Memory of the context's device, as a caller would allocate it. */
typedef struct rft_room {
  const rfi_backend *backend;
  rfi_device *device;
  char *memory;
} rft_room;
rft_room rft_room_open(rfr_ctx *ctx, size_t bytes);
/* Writes n bytes at `at`; returns where they are. */
const void *rft_room_put(const rft_room *room, size_t at, const void *data, size_t n);
void rft_room_close(rft_room *room);

#endif
