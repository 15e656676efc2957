/* SPDX-License-Identifier: Apache-2.0
 *
 * Loaded before the MPI library: stops the rank $RFT_STOPPED_RANK when it calls $RFT_STOPPED_IN, MPI_Init_thread or
 * MPI_Finalize.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

__attribute__((visibility("default"))) int MPI_Init_thread(int *argc, char ***argv, int required, int *provided);
__attribute__((visibility("default"))) int MPI_Finalize(void);

/* Stores the library's function in *f. */
static void stop_in(const char *call, void *f) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *stopped = getenv("RFT_STOPPED_RANK");
  const char *in = getenv("RFT_STOPPED_IN");
  if (rank && stopped && in && strcmp(rank, stopped) == 0 && strcmp(in, call) == 0) raise(SIGSTOP);
  void *symbol = dlsym(dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD), call);
  memcpy(f, &symbol, sizeof symbol);
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  int (*f)(int *, char ***, int, int *);
  stop_in("MPI_Init_thread", &f);
  return f(argc, argv, required, provided);
}

int MPI_Finalize(void) {
  int (*f)(void);
  stop_in("MPI_Finalize", &f);
  return f();
}
