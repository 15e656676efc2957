/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain top: a run in progress, at a terminal. It draws on the terminal's second screen and restores the first one at
 * the end. Without a terminal it prints one screen.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

static volatile sig_atomic_t ended;
static void on_signal(int number) {
  (void)number;
  ended = 1;
}

/* Erases the rest of each line, which may have text of the previous screen. */
static void write_line_ends(const char *text, size_t n, void *user) {
  (void)user;
  for (size_t i = 0; i < n; i++) {
    if (text[i] == '\n') fputs("\033[K", stdout);
    putchar(text[i]);
  }
}

static int columns_of_terminal(void) {
  struct winsize size = {.ws_col = 80};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col < 40 ? 40 : size.ws_col > 400 ? 400 : size.ws_col;
}

static double wall_time(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static rfr_status watch(rfr_report *r) {
  struct sigaction action = {.sa_handler = on_signal}; /* a signal may end a sleep early */
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  rfr_status s = RFR_OK;
  fputs("\033[?1049h\033[?25l", stdout);
  while (s == RFR_OK && !ended && !ferror(stdout)) {
    int changed;
    fputs("\033[H", stdout);
    s = rfr_report_screen(r, 0, columns_of_terminal(), 1, wall_time(), write_line_ends, NULL);
    fputs("\033[J", stdout);
    fflush(stdout);
    if (s == RFR_OK && !ended) nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    if (s == RFR_OK) s = rfr_report_read(r, &changed);
  }
  fputs("\033[?25h\033[?1049l", stdout);
  fflush(stdout);
  return s;
}

rfr_status cli_top(cli *c) {
  rfr_report *r = NULL;
  const char *term = getenv("TERM");
  const bool terminal = isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0;
  rfr_status s = cli_run_folders(c);
  if (s == RFR_OK) s = rfr_report_open(c->ctx, c->operands, 1, &r);
  if (s == RFR_OK) s = c->once || !terminal ? rfr_report_screen(r, 0, 80, 0, 0, cli_write, NULL) : watch(r);
  rfr_report_close(r);
  return s;
}
