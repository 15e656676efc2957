/* SPDX-License-Identifier: Apache-2.0
 *
 * Tests that run on a device too: `--device NAME` in front of the other arguments, or REFRAIN_DEVICE.
 */
#ifndef RFT_DEVICE_H
#define RFT_DEVICE_H

#include <stdbool.h>

#include "backend/backend.h"

/* Removes `--device NAME` at argv[1] from the arguments and uses that device in every later context. False: the device
 * is missing, and standard error has the reason. */
bool rft_device_named(int *argc, char **argv);

/* Memory of the context's device, allocated as a caller would. */
typedef struct rft_room {
  const rfi_backend *backend;
  rfi_device *device;
  char *memory;
} rft_room;
rft_room rft_room_open(rfr_ctx *ctx, size_t bytes);
/* Writes n bytes at offset `at`; returns their address. */
const void *rft_room_put(const rft_room *room, size_t at, const void *data, size_t n);
void rft_room_close(rft_room *room);

#endif
