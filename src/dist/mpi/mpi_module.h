/* SPDX-License-Identifier: Apache-2.0
 *
 * Interface of the MPI module: one exported function that returns this table. It uses only plain C, so the module needs
 * no symbol of the library. A module of another build is refused by `abi`.
 *
 * The module moves bytes between this process and one peer at a time, without blocking. Sums, deadlines and the
 * comparison of calls are in the library (comm_mpi.c). A function that can fail returns NULL, or the reason for the
 * failure, which is valid until the next call.
 */
#ifndef RFI_MPI_MODULE_H
#define RFI_MPI_MODULE_H

#include <stdbool.h>
#include <stddef.h>

enum { RFI_MPI_ABI = 3 };
#define RFI_MPI_ENTRY "rfi_mpi_module_get"

typedef struct rfi_mpi_module {
  int abi;
  /* Starts MPI if nothing has started it, and joins all of its processes. */
  const char *(*open)(void **link, int *rank, int *size);
  /* Starts sending a message to `peer` and receiving one from it; 0 bytes: none. At most one such exchange per peer may
   * be in flight. */
  const char *(*start)(void *link, int peer, const void *to, size_t to_bytes, void *from, size_t from_bytes);
  const char *(*test)(void *link, int peer, bool *done);
  /* Starts a single message to or from `peer`, independent of `start`; any number may be in flight. */
  const char *(*send)(void *link, int peer, const void *data, size_t bytes, void **request);
  const char *(*receive)(void *link, int peer, void *data, size_t bytes, void **request);
  /* If the request has completed or failed: frees it and sets it to NULL. */
  const char *(*test_one)(void *link, void **request);
  /* Frees the link. `all`: every rank calls this, so MPI is finalized too if `open` has started it. Otherwise the
   * function waits for no peer, and the launcher terminates the other processes. */
  void (*close)(void *link, bool all);
} rfi_mpi_module;

typedef const rfi_mpi_module *(*rfi_mpi_entry)(void);

#endif
