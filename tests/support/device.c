/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens the named device once; device.h has the rest.
 */
#include "support/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/context.h"

bool rft_device_named(int *argc, char **argv) {
  rfr_ctx *ctx;
  const rfi_backend *backend;
  rfi_device *device;
  if (*argc > 2 && strcmp(argv[1], "--device") == 0) {
    setenv("REFRAIN_DEVICE", argv[2], 1);
    memmove(argv + 1, argv + 3, sizeof *argv * (size_t)(*argc - 2));
    *argc -= 2;
  }
  if (!getenv("REFRAIN_DEVICE")) return true;
  rfr_status s = rfr_ctx_create(NULL, &ctx);
  if (s == RFR_OK) s = rfi_backend_find(ctx, &backend);
  if (s == RFR_OK) s = backend->open(ctx, &device);
  if (s == RFR_OK) backend->close(device);
  else fprintf(stderr, "%s\n", rfr_last_error()->message);
  rfr_ctx_destroy(ctx);
  return s == RFR_OK;
}

rft_room rft_room_open(rfr_ctx *ctx, size_t bytes) {
  rft_room r;
  void *memory;
  OK(rfi_backend_find(ctx, &r.backend));
  OK(r.backend->open(ctx, &r.device));
  OK(r.backend->alloc(r.device, RFI_MEMORY_ARENA, bytes, &memory));
  r.memory = memory;
  return r;
}

const void *rft_room_put(const rft_room *room, size_t at, const void *data, size_t n) {
  OK(room->backend->copy(room->device, room->memory + at, data, n));
  return room->memory + at;
}

void rft_room_close(rft_room *room) {
  room->backend->free(room->device, RFI_MEMORY_ARENA, room->memory);
  room->backend->close(room->device);
}
