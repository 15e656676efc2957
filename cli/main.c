/* SPDX-License-Identifier: Apache-2.0
 *
 * Entry: parse, make the context, call the command, map its status to an exit code. The
 * mapping below is the only one; what a command prints on failure is the library's error
 * as two lines, what and what next.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

enum { DONE = 0, FAILED = 1, USAGE = 2, NO_FIT = 3, IO = 4, STOPPED = 5, DEFECT = 70 };

static int exit_code(rfr_status s) {
  switch (s) {
    case RFR_OK: return DONE;
    case RFR_NUMERIC: return FAILED;
    case RFR_INVALID:
    case RFR_MISMATCH: return USAGE;
    case RFR_NO_MEMORY:
    case RFR_NO_FIT:
    case RFR_UNSUPPORTED: return NO_FIT;
    case RFR_IO: return IO;
    case RFR_STOPPED: return STOPPED;
    default: return DEFECT;
  }
}

static void print_warning(rfr_log_level level, const char *message, void *user) {
  const cli *c = user;
  if (level == RFR_LOG_WARNING && !c->quiet) fprintf(stderr, "warning: %s\n", message);
}

/* A plan of a GPU's step needs no GPU: without one it is made for the device that is not there. `auto` is the GPU where
 * one can be used, else the CPU, and says which; a device that was named is never another one. */
static const char *device_of(const cli *c, const char *device) {
  const bool looks = c->command == CLI_INDEX_plan || c->command == CLI_INDEX_trace;
  const bool is_auto = strcmp(device, "auto") == 0;
  rfr_ctx *ctx = NULL;
  char text[256] = "";
  if (!is_auto && !(looks && strcmp(device, "cuda") == 0)) return device;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = "cpu";
  o.threads = 1;
  if (rfr_ctx_create(&o, &ctx) != RFR_OK) return device;
  const bool found = rfr_cuda_describe(ctx, text, sizeof text) == RFR_OK;
  rfr_ctx_destroy(ctx);
  if (!is_auto) return found ? device : "cuda:none";
  if (!found) snprintf(text, sizeof text, "%s", rfr_last_error()->message);
  if (!c->quiet) fprintf(stderr, "device: %s: %s\n", found ? "cuda" : "cpu", text);
  return found ? "cuda" : "cpu";
}

static rfr_status run_command(cli *c) {
  static rfr_status (*const table[CLI_COMMAND_COUNT])(cli *) = {
#define CLI_CALL(name, operands, least, most, summary) cli_##name,
      CLI_COMMANDS(CLI_CALL)
#undef CLI_CALL
  };
  rfr_ctx_options o = rfr_ctx_options_default();
  if (c->threads >= 0) o.threads = c->threads < INT_MAX ? (int)c->threads : -1; /* for it to refuse */
  if (c->device) o.device = c->device;                                          /* else REFRAIN_DEVICE */
  if (o.device) o.device = device_of(c, o.device);
  o.log = print_warning;
  o.log_user = c;
  rfr_status s = rfr_ctx_create(&o, &c->ctx);
  if (s == RFR_OK) s = table[c->command](c);
  const rfr_error *e = rfr_last_error();
  if (s != RFR_OK && e->status == s) {
    if (s == RFR_STOPPED) fprintf(stderr, "%s\n", e->message);
    else fprintf(stderr, "error: %s [%s]\n", e->message, e->slug);
    if (strcmp(e->slug, "argument") == 0) /* of a call: options are what was given here */
      fprintf(stderr, "help: refrain %s --help says what it takes\n", cli_command_name(c->command));
    else if (*e->next) fprintf(stderr, "help: %s\n", e->next);
  }
  rfr_ctx_destroy(c->ctx);
  return s;
}

/* OpenMP's waiting threads spin for milliseconds by default, which on a machine that has other
 * work to do steals the very core that the late thread needs: steps get several times
 * slower. The runtime reads its settings when it is loaded, before main, so the program starts
 * itself once more with a short spin, unless the user has said otherwise. */
static void limit_spinning(char **argv) {
  if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
  if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execv("/proc/self/exe", argv); /* on failure: just slower */
}

int main(int argc, char **argv) {
  cli c;
  limit_spinning(argv);
  rfr_status s = cli_parse(argc, argv, &c);
  if (s == RFR_OK) {
    if (c.version) printf("refrain %s\n", rfr_version());
    else if (c.help) cli_print_help(stdout, c.command);
    else s = run_command(&c);
  }
  free(c.sets);
  if (fflush(stdout) != 0 && s == RFR_OK) {
    fputs("error: standard output cannot be written\nhelp: check the pipe or the free space behind it\n", stderr);
    s = RFR_IO;
  }
  return exit_code(s);
}
