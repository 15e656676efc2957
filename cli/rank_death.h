/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank that was killed by a signal: it cannot report it, and its launcher ends the others at once.
 */
#ifndef REFRAIN_CLI_RANK_DEATH_H
#define REFRAIN_CLI_RANK_DEATH_H

#include "cli.h"

enum { MOST_REPORTS = 64 };

typedef struct rank_death {
  int rank, signal; /* of the first one; rank -1: none */
  bool was_stopped; /* the launcher has killed it */
  int from;         /* what mpirun and the ranks write to stderr; -1: nothing */
  char text[4096];  /* a line, or a message of mpirun that has not ended */
  size_t n;
  bool in_message;
  char *reports[MOST_REPORTS]; /* lines of errors that were passed on; rank_death_report frees them */
  int n_reports;
} rank_death;

/* Passes on what has come from mpirun, without its messages about the end of a rank, which it takes, and
 * without errors that another rank has reported. */
void rank_death_read(rank_death *d);
/* Appends a line to failures.jsonl of the run's folder, if it can be written. The caller prints the error, whatever
 * comes of the file. */
void rank_failure_append(const cli *c, rfr_ctx *ctx, int rank, int ranks, const char *error, const char *message);
/* Prints the death and appends it; frees what `d` owns. */
void rank_death_report(const cli *c, rank_death *d);

#endif
