/* SPDX-License-Identifier: Apache-2.0
 *
 * Standard error of the ranks of a launcher. Open MPI reports a rank that was killed by a signal in a message between
 * two lines of dashes. Ranks that wait for the same rank report the same error. Any of them may be killed before it has
 * written its report, so all write it, and the launcher prints it once.
 */
#include "rank_death.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_about_end(const char *message) {
  static const char *const texts[] = {"exited on signal", "terminated normally, but", "exited with non-zero status",
                                      "exiting improperly"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    if (strstr(message, texts[i])) return true;
  return false;
}

/* Open MPI 5 wraps its lines anywhere between two words. */
static void take_message(rank_death *d) {
  int rank, signal;
  char flat[sizeof d->text];
  memcpy(flat, d->text, d->n + 1);
  for (char *c = flat; (c = strchr(c, '\n'));) *c = ' ';
  const char *at = strstr(flat, "process rank "), *how = strstr(flat, "exited on signal ");
  if (!is_about_end(flat)) fputs(d->text, stderr);
  if (d->rank < 0 && at && how && sscanf(at, "process rank %d", &rank) == 1 &&
      sscanf(how, "exited on signal %d", &signal) == 1)
    d->rank = rank, d->signal = signal;
}

/* The length of a line without the rank that ends an error in JSON. */
static size_t length_without_rank(const char *text) {
  const char *end = NULL;
  for (const char *at = text; (at = strstr(at, JSON_RANK)); at++) end = at;
  return end && strncmp(text, "{", 1) == 0 ? (size_t)(end - text) : strlen(text);
}

/* Handles a line of a rank. Lines of several ranks may be interleaved. */
static void pass_on(rank_death *d) {
  static const char *const heads[] = {"error: ", "help: ", "{\"status\": "};
  bool is_report = false;
  for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
    is_report = is_report || strncmp(d->text, heads[i], strlen(heads[i])) == 0;
  const size_t n = length_without_rank(d->text);
  for (int i = 0; is_report && i < d->n_reports; i++)
    if (n == length_without_rank(d->reports[i]) && memcmp(d->reports[i], d->text, n) == 0) return;
  char *copy = is_report && d->n_reports < MOST_REPORTS ? strdup(d->text) : NULL;
  if (copy) d->reports[d->n_reports++] = copy;
  fputs(d->text, stderr);
}

/* The text ends with a line, which begins at `line`. */
static void take_line(rank_death *d, size_t line) {
  enum { DASHES = 40 };
  const bool dashes = strspn(d->text + line, "-") >= DASHES;
  if (dashes && !d->in_message) {
    d->in_message = true;
    return;
  }
  if (d->in_message && !dashes) return;
  if (d->in_message) take_message(d);
  else pass_on(d);
  d->in_message = false;
  d->n = 0;
}

void rank_death_read(rank_death *d) {
  char bytes[1024];
  ssize_t n;
  while (d->from >= 0 && (n = read(d->from, bytes, sizeof bytes)) > 0)
    for (ssize_t i = 0; i < n; i++) {
      d->text[d->n++] = bytes[i];
      d->text[d->n] = 0;
      size_t line = d->n - 1;
      while (line > 0 && d->text[line - 1] != '\n') line--;
      if (bytes[i] == '\n') take_line(d, line);
      if (d->n + 1 < sizeof d->text) continue;
      fputs(d->text, stderr); /* longer than any message of mpirun */
      d->n = 0;
      d->in_message = false;
    }
}

/* The folder of the run, found as in cmd_train.c. */
static void find_folder(const cli *c, char *out, size_t size) {
  struct stat st;
  if (c->out) snprintf(out, size, "%s", c->out);
  else if (c->operand && stat(c->operand, &st) == 0 && S_ISDIR(st.st_mode)) snprintf(out, size, "%s", c->operand);
  else cli_default_folder("runs", c->operand ? c->operand : "", out, size);
}

void rank_failure_append(const cli *c, rfr_ctx *ctx, int rank, int ranks, const char *error, const char *message) {
  char folder[4200];
  rfr_failure failure = rfr_failure_default();
  failure.rank = rank, failure.ranks = ranks;
  failure.error = error, failure.message = message;
  find_folder(c, folder, sizeof folder);
  if (access(folder, W_OK) == 0) rfr_failure_append(ctx, folder, &failure);
}

void rank_death_report(const cli *c, rank_death *d) {
  char what[128];
  rfr_ctx *ctx;
  while (d->n_reports > 0) free(d->reports[--d->n_reports]);
  if (d->rank < 0) return;
  snprintf(what, sizeof what, "rank %d was killed by signal %d (%s)%s", d->rank, d->signal, strsignal(d->signal),
           d->was_stopped ? ": it was stopped (SIGSTOP) while it started or ended" : "");
  cli_fail(
      RFR_IO,
      d->was_stopped
          ? "--resume continues from the newest checkpoint"
          : "the kernel's log names a process that ran out of memory; --resume continues from the newest checkpoint",
      "%s", what);
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) return;
  rank_failure_append(c, ctx, d->rank, (int)c->ranks, "launcher", what);
  rfr_ctx_destroy(ctx);
}
