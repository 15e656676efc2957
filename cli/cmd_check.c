/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain check: the resolved configuration, each value with where it comes from; or the
 * files that lie in one split of its data.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static void warn(const rfr_event *e, void *user) {
  (void)user;
  if (e->kind == RFR_EVENT_WARNING) fprintf(stderr, "warning: %s\n", e->message);
}

static rfr_status list_files(cli *c, const char *config) {
  rfr_run *run = NULL;
  const bool validation = strcmp(c->files, "validation") == 0;
  if (!validation && strcmp(c->files, "train") != 0)
    return cli_usage("give train or validation", "--files %s is no split", c->files);
  rfr_run_options o = cli_run_options(c);
  o.programs = 0;
  rfr_status s = rfr_run_open(c->ctx, config, NULL, &o, &run);
  for (int64_t i = 0; s == RFR_OK; i++) {
    const char *path = rfr_run_data_file(run, validation, i);
    if (!path) break;
    puts(path);
  }
  rfr_run_close(run);
  return s;
}

rfr_status cli_check(cli *c) {
  char *text = NULL;
  rfr_status s = cli_read_file(c->operand, &text);
  if (s != RFR_OK) return s;
  if (c->files) {
    s = list_files(c, text);
  } else {
    rfr_run_options o = cli_run_options(c);
    o.on_event = warn;
    s = rfr_config_resolve(c->ctx, text, &o, !c->json, cli_write, NULL);
  }
  free(text);
  return s;
}
