/* SPDX-License-Identifier: Apache-2.0
 *
 * Entry: parse, create the context, call the command, map its status to an exit code. This is the only such mapping.
 */
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
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

static void log_warning(rfr_log_level level, const char *message, void *user) {
  if (level == RFR_LOG_WARNING) cli_warn(user, message);
}

/* The device to use. `auto` is a GPU if one can be used, otherwise the CPU; the choice is printed. A named device is
 * never replaced, except that plan and trace on `cuda` without a GPU use cuda:none, because they run nothing. */
static const char *device_of(const cli *c, const char *device) {
  const bool runs_nothing = c->command == CLI_INDEX_plan || c->command == CLI_INDEX_trace;
  const bool is_auto = strcmp(device, "auto") == 0;
  rfr_ctx *ctx = NULL;
  char text[256] = "";
  if (!is_auto && !(runs_nothing && strcmp(device, "cuda") == 0)) return device;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = "cpu";
  o.threads = 1;
  if (rfr_ctx_create(&o, &ctx) != RFR_OK) return device;
  const bool found = rfr_cuda_describe(ctx, text, sizeof text) == RFR_OK;
  rfr_ctx_destroy(ctx);
  if (!is_auto) return found ? device : "cuda:none";
  if (!found) snprintf(text, sizeof text, "%s", rfr_last_error()->message);
  if (!c->quiet && !c->json) fprintf(stderr, "device: %s: %s\n", found ? "cuda" : "cpu", text);
  return found ? "cuda" : "cpu";
}

/* The GPU of a rank: the one with its number on this machine, or the only one that the launcher makes visible. */
static void device_of_rank(cli *c, rfr_ctx_options *o) {
  static char name[32];
  const char *device = o->device ? o->device : getenv("REFRAIN_DEVICE"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!cli_has_ranks(c)) return;
  c->quiet = c->quiet || c->launch.rank > 0;
  if (!device || strcmp(device, "cuda") != 0) return;
  const bool one = visible && *visible && !strchr(visible, ',');
  snprintf(name, sizeof name, "cuda:%d", one ? 0 : c->launch.local_rank);
  o->device = name;
}

static rfr_status run_command(cli *c, char **argv, int *started) {
  static rfr_status (*const table[CLI_COMMAND_COUNT])(cli *) = {
#define CLI_CALL(name) cli_##name,
      CLI_COMMANDS(CLI_CALL)
#undef CLI_CALL
  };
  rfr_ctx_options o = rfr_ctx_options_default();
  if (c->threads >= 0) o.threads = c->threads < INT_MAX ? (int)c->threads : -1; /* the library refuses -1 */
  if (c->device) o.device = c->device;                                          /* otherwise REFRAIN_DEVICE */
  const bool reads_only = c->command == CLI_INDEX_report || c->command == CLI_INDEX_top ||
                          c->command == CLI_INDEX_diff || c->command == CLI_INDEX_sweep;
  if (c->command == CLI_INDEX_schedule || c->command == CLI_INDEX_keys || reads_only) o.device = "cpu";
  if (o.device) o.device = device_of(c, o.device);
  if (c->command == CLI_INDEX_train || c->command == CLI_INDEX_profile) {
    bool done;
    const rfr_status s = cli_start_ranks(c, o.device ? o.device : getenv("REFRAIN_DEVICE"), argv, &done, started);
    if (s != RFR_OK || done) {
      cli_report_error(c, s);
      return s;
    }
    device_of_rank(c, &o);
  }
  o.log = log_warning;
  o.log_user = c;
  c->ctx_options = o;
  rfr_status s = cli_refuse_hub_name(c);
  if (s == RFR_OK) s = cli_take_adapter(c);
  if (s == RFR_OK) s = rfr_ctx_create(&o, &c->ctx);
  if (s == RFR_OK) s = cli_join_ranks(c);
  if (s == RFR_OK) s = table[c->command](c);
  if (s == RFR_OK) s = cli_leave_ranks(c);
  cli_report_error(c, s);
  if (s != RFR_OK && !cli_prints_error(c, rfr_last_error())) s = RFR_OK; /* rank 0 reports it */
  rfr_comm_destroy(c->comm);
  rfr_ctx_destroy(c->ctx);
  return s;
}

/* By default OpenMP's waiting threads spin for milliseconds. On a busy machine that takes the core which the late
 * thread needs, and steps get several times slower. The OpenMP runtime reads its settings when it is loaded, before
 * main. So the program executes itself once more with a short spin, unless the user has set one. */
static void limit_spinning(char **argv) {
  if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
  /* if this fails, the program is only slower */
  if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execv("/proc/self/exe", argv);
}

/* If a standard stream is closed, the next opened file would get its descriptor, and text for the stream would be
 * written into the file. So opens /dev/null for reading: writing to a closed stream stays an error. */
static void open_closed_streams(void) {
  for (int fd = open("/dev/null", O_RDONLY); fd >= 0; fd = open("/dev/null", O_RDONLY)) {
    if (fd <= STDERR_FILENO) continue;
    close(fd);
    return;
  }
}

int main(int argc, char **argv) {
  cli c;
  open_closed_streams();
  signal(SIGCHLD, SIG_DFL); /* a parent may ignore it: then waitpid never returns a child */
  limit_spinning(argv);
  int started = 0; /* exit code of the ranks that this process has started */
  rfr_status s = cli_parse(argc, argv, &c);
  if (s == RFR_OK) {
    if (c.version) printf(c.json ? "{\"version\": \"%s\"}\n" : "refrain %s\n", rfr_version());
    else if (c.help && c.json) cli_print_help_json(stdout, c.command);
    else if (c.help) cli_print_help(stdout, c.command);
    else s = run_command(&c, argv, &started);
  }
  cli_deinit(&c);
  const bool lost = fflush(stdout) != 0 || ferror(stdout) != 0; /* ferror: an earlier flush may have failed */
  if (lost && s == RFR_OK)
    s = cli_fail(RFR_IO, "check the pipe, or the free space of the file", "standard output cannot be written");
  if (s == RFR_OK) return c.code ? c.code : started;
  return c.command == CLI_INDEX_diff ? USAGE : exit_code(s); /* 1 would mean that the runs differ */
}
