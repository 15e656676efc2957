/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank that was killed by a signal: it cannot report it, and its launcher ends the others at once.
 */
#ifndef REFRAIN_CLI_RANK_DEATH_H
#define REFRAIN_CLI_RANK_DEATH_H

#include "cli.h"

enum { MOST_REPORTS = 64 };

typedef struct rank_death {
  int rank, signal; /* the first rank that was killed; -1: none */
  bool was_stopped; /* the launcher itself has killed it */
  int from;         /* standard error of mpirun and the ranks; -1: closed */
  char text[4096];  /* an incomplete line or message of mpirun */
  size_t n;
  bool in_message;
  char *reports[MOST_REPORTS]; /* lines of errors that were passed on; rank_death_report frees them */
  int n_reports;
} rank_death;

/* Passes on mpirun's output, except its messages about the end of a rank, which it parses, and errors that another rank
 * has already reported. */
void rank_death_read(rank_death *d);
/* Appends a line to failures.jsonl of the run's folder, if that can be written. The caller prints the error in any
 * case. */
void rank_failure_append(const cli *c, rfr_ctx *ctx, int rank, int ranks, const char *error, const char *message);
/* Prints the death and appends it; frees what `d` owns. */
void rank_death_report(const cli *c, rank_death *d);

#endif
