/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain report: runs as one page for a browser, in a file or served while the runs are in progress.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "report_server.h"

static void write_text(const char *text, size_t n, void *user) { fwrite(text, 1, n, user); }

/* Writes the page to FILE.tmp first, so that a page that cannot be written completely does not replace the old one. A
 * link or a device, such as /dev/null, is written to: a rename would replace it. */
rfr_status cli_write_page(rfr_report *r, const char *path) {
  char temporary[4200];
  struct stat st;
  if (strcmp(path, "-") == 0) return rfr_report_page(r, 0, write_text, stdout);
  const bool replaces = lstat(path, &st) != 0 || S_ISREG(st.st_mode);
  if (snprintf(temporary, sizeof temporary, "%s%s", path, replaces ? ".tmp" : "") >= (int)sizeof temporary)
    return cli_usage("choose a shorter name", "the name of the report is too long");
  FILE *f = fopen(temporary, "wb");
  if (!f) return cli_cannot_write(path);
  rfr_status s = rfr_report_page(r, 0, write_text, f);
  const bool failed = ferror(f) != 0;
  if ((fclose(f) != 0 || failed) && s == RFR_OK) s = cli_cannot_write(path);
  if (s == RFR_OK && replaces && rename(temporary, path) != 0) s = cli_cannot_write(path);
  if (s != RFR_OK && replaces) remove(temporary);
  return s;
}

static rfr_status open_runs(cli *c, rfr_report **out) {
  if (c->n_operands > RFR_REPORT_RUNS)
    return cli_usage("give fewer runs", "%d runs; a report has at most %d", c->n_operands, RFR_REPORT_RUNS);
  const rfr_status s = cli_run_folders(c);
  return s == RFR_OK ? rfr_report_open(c->ctx, c->operands, c->n_operands, out) : s;
}

rfr_status cli_report(cli *c) {
  rfr_report *r = NULL;
  const char *path = c->out ? c->out : "report.html";
  if (c->follow && c->out) return cli_usage("omit --follow or --out", "--follow serves the page, --out writes it");
  if (c->wandb && (c->follow || c->out))
    return cli_usage(c->out ? "omit --out; --wandb names the folder" : "omit --follow", "--wandb writes no page");
  if (c->port && !c->follow) return cli_usage("add --follow, or omit --port", "--port is for --follow");
  rfr_status s = open_runs(c, &r);
  if (c->wandb) {
    for (int i = 0; i < c->n_operands && s == RFR_OK; i++) s = rfr_report_wandb(r, i, c->wandb);
    if (s == RFR_OK && !c->quiet && !c->json)
      fprintf(stderr, "wrote %s; upload: wandb sync %s/offline-run-*\n", c->wandb, c->wandb);
    rfr_report_close(r);
    return s;
  }
  if (s == RFR_OK) s = c->follow ? report_serve(r, c->port) : cli_write_page(r, path);
  if (s == RFR_OK && !c->follow && strcmp(path, "-") != 0 && !c->quiet && !c->json) fprintf(stderr, "wrote %s\n", path);
  rfr_report_close(r);
  return s;
}
