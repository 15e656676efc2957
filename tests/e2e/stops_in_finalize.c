/* SPDX-License-Identifier: Apache-2.0
 *
 * Loaded before the MPI library: stops the rank $RFT_STOPPED_RANK when it calls MPI_Finalize.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

__attribute__((visibility("default"))) int MPI_Finalize(void);
int MPI_Finalize(void) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *stopped = getenv("RFT_STOPPED_RANK");
  if (rank && stopped && strcmp(rank, stopped) == 0) raise(SIGSTOP);
  int (*finalize)(void) = NULL;
  void *symbol = dlsym(dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD), "MPI_Finalize");
  memcpy(&finalize, &symbol, sizeof finalize);
  return finalize();
}
