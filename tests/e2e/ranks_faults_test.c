/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults of one of four ranks at random times: it is killed, stopped, or cannot write files any more. Every time all
 * processes end within a minute, no process is left, and a record in the run's folder names the rank. The last
 * checkpoint is good, and the run that continues from it ends bitwise equal to an undisturbed one.
 *
 *   ranks_faults_test [FAULTS [SEED]]
 *
 * Without arguments the test ends early on a busy machine, where nine faults would exceed ctest's timeout. It runs at
 * least three faults, which cover every kind and every mode, and prints how many it ran.
 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/random.h"
#include "support/thin.h"

enum { RANKS = 4, LIMIT_SECONDS = 60, PATIENCE_SECONDS = 600, LEAST = 3, ENOUGH_SECONDS = 400 };
enum { FAULTS = RFT_FEWER(9, 3), LAST = RFT_FEWER(80, 32), EVERY = 4 };
typedef enum fault { KILL, STOP, FULL, KINDS } fault;
static const char *const kind_names[KINDS] = {"killed", "stopped", "full disk"};
/* Values of the section parallel; with a pipeline of 2 ranks each stage has two data-parallel ranks. */
static const char *const modes[] = {"shard=full", "shard=none", "pipeline=2"};
enum { MODES = sizeof modes / sizeof *modes };

#define PROGRAM RFT_BINARY_DIR "/refrain"
static char root[64];
static uint64_t state;
static double fastest = 1e9; /* seconds of an undisturbed run, including its start */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static _Noreturn void give_up(const char *what, const char *folder) {
  fprintf(stderr, "FAILED: %s; see %s\n", what, folder);
  exit(1);
}

/* ---- processes ---- */

static pid_t start(const char *folder, const char *mode, bool resumes) {
  char out[128], log[128], shard[64];
  snprintf(out, sizeof out, "%s/%s", root, folder);
  snprintf(log, sizeof log, "%s/%s.%s", root, folder, resumes ? "resume" : "log");
  snprintf(shard, sizeof shard, "parallel.%s", mode);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  const int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  dup2(fd, 1);
  dup2(fd, 2);
  chdir(root);
  if (resumes) execl(PROGRAM, PROGRAM, "train", out, "--resume", "--ranks", "4", (char *)NULL);
  else execl(PROGRAM, PROGRAM, "train", "c.yaml", "--ranks", "4", "--out", out, "--set", shard, (char *)NULL);
  _exit(126);
}

/* Waits for the process; returns its exit code, or -1 after so many seconds. */
static int wait_for(pid_t pid, int seconds) {
  for (double end = now() + seconds; now() < end; usleep(10000)) {
    int status;
    if (waitpid(pid, &status, WNOHANG) == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }
  return -1;
}

/* Whether a file of /proc/PID contains `text`, for environ as the end of a variable. */
static bool proc_has(pid_t pid, const char *file, const char *text) {
  static char bytes[1 << 17];
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
  const int fd = open(path, O_RDONLY);
  if (fd < 0) return false;
  ssize_t n, all = 0;
  while ((n = read(fd, bytes + all, sizeof bytes - (size_t)all)) > 0) all += n;
  close(fd);
  /* in environ the text must end at a NUL */
  return memmem(bytes, (size_t)all, text, strlen(text) + (file[0] == 'e')) != NULL;
}

/* The process of a rank of the run (-1: of any rank); 0: there is none. */
static pid_t find_rank(const char *folder, int rank) {
  char variable[64], out[128];
  pid_t found = 0;
  snprintf(out, sizeof out, "%s/%s", root, folder);
  snprintf(variable, sizeof variable, "OMPI_COMM_WORLD_RANK=%d", rank);
  DIR *d = opendir("/proc");
  for (struct dirent *e; d && !found && (e = readdir(d));) {
    const pid_t pid = (pid_t)strtol(e->d_name, NULL, 10);
    if (pid > 0 && proc_has(pid, "cmdline", out) && (rank < 0 || proc_has(pid, "environ", variable))) found = pid;
  }
  if (d) closedir(d);
  return found;
}

/* ---- files ---- */

static char *read_all(const char *path, size_t *n) {
  FILE *f = fopen(path, "rb");
  if (!f) return NULL;
  fseek(f, 0, SEEK_END);
  *n = (size_t)ftell(f);
  rewind(f);
  char *text = calloc(*n + 1, 1);
  if (!text || fread(text, 1, *n, f) != *n) abort();
  fclose(f);
  return text;
}

/* Compares the tensors of the last checkpoints. */
static bool same_end(const char *a, const char *b) {
  char folder[2][160];
  int files = 0;
  bool same = true;
  for (int k = 0; k < 2; k++) snprintf(folder[k], sizeof folder[k], "%s/%s/step-%06d", root, k ? b : a, LAST);
  DIR *d = opendir(folder[0]);
  for (struct dirent *e; d && same && (e = readdir(d));) {
    char path[2][512], *text[2];
    size_t n[2];
    if (!strstr(e->d_name, ".safetensors")) continue;
    for (int k = 0; k < 2; k++) {
      snprintf(path[k], sizeof path[k], "%s/%s", folder[k], e->d_name);
      text[k] = read_all(path[k], &n[k]);
    }
    same = text[0] && text[1] && n[0] == n[1] && memcmp(text[0], text[1], n[0]) == 0;
    free(text[0]), free(text[1]);
    files++;
  }
  if (d) closedir(d);
  return same && files > 0;
}

static bool names_rank(const char *folder, int rank) {
  char path[160], says[3][64];
  size_t n;
  snprintf(path, sizeof path, "%s/%s/failures.jsonl", root, folder);
  snprintf(says[0], sizeof says[0], "rank %d was killed", rank);
  snprintf(says[1], sizeof says[1], "rank %d did not arrive", rank);
  snprintf(says[2], sizeof says[2], "\"rank %d: ", rank);
  char *text = read_all(path, &n);
  bool named = false;
  for (int i = 0; i < 3 && text; i++) named = named || strstr(text, says[i]);
  free(text);
  return named;
}

/* The launcher prints an error that several ranks report once. A rank that waits for another one may report that one
 * instead. */
static bool repeats_an_error(const char *folder) {
  char path[160];
  size_t n;
  bool found = false;
  snprintf(path, sizeof path, "%s/%s.log", root, folder);
  char *text = read_all(path, &n), *line = text;
  while (line && !found && (line = strstr(line, "error: "))) {
    char *end = strchr(line, '\n');
    if (!end) break;
    *end = 0;
    found = strstr(end + 1, line) != NULL;
    line = end + 1;
  }
  free(text);
  return found;
}

static bool has_checkpoint(const char *folder, int step) {
  char path[160];
  snprintf(path, sizeof path, "%s/%s/step-%06d/MANIFEST.json", root, folder, step);
  return access(path, F_OK) == 0;
}

/* ---- one fault ---- */

static void strike(fault kind, pid_t pid) {
  const struct rlimit nothing = {1, 1};
  if (kind == FULL) prlimit(pid, RLIMIT_FSIZE, &nothing, NULL);
  else kill(pid, kind == KILL ? SIGKILL : SIGSTOP);
}

static void one(int i) {
  char folder[32], what[160];
  const fault kind = (fault)(i % KINDS);
  /* three consecutive faults cover all kinds and all modes, nine cover all pairs */
  const int mode = (i + i / KINDS) % MODES;
  /* Only ranks that write files can fail to write: rank 0 without shards; of a stage the first rank. */
  const int rank = kind != FULL || mode == 0 ? (int)rft_below(&state, RANKS)
                   : mode == 1               ? 0
                                             : 2 * (int)rft_below(&state, 2);
  /* A rank may be stopped while it exits. Then the other ranks have ended, and only the launcher can name it. */
  const bool late = kind == STOP && mode == 1;
  snprintf(folder, sizeof folder, "fault-%d", i);
  const pid_t launcher = start(folder, modes[mode], false);
  const int step = late ? LAST : EVERY;
  for (double end = now() + PATIENCE_SECONDS; !has_checkpoint(folder, step) && now() < end;) usleep(5000);
  if (!late) usleep(rft_below(&state, (uint32_t)(2e5 * fastest))); /* the steps take about a fifth of the run's time */
  const pid_t victim = find_rank(folder, rank);
  if (victim) strike(kind, victim);
  const double struck = now();
  const int code = wait_for(launcher, LIMIT_SECONDS);
  const double seconds = now() - struck;
  snprintf(what, sizeof what, "fault %d, %s, rank %d %s", i, modes[mode], rank, kind_names[kind]);
  if (code < 0) give_up(what, folder);
  for (int n = 0; n < 100 && find_rank(folder, -1); n++) usleep(100000); /* orphans of mpirun must end too */
  if (find_rank(folder, -1)) fprintf(stderr, "a process is left\n"), give_up(what, folder);
  if (code == 0) printf("%s: too late\n", what);
  else if (!names_rank(folder, rank)) fprintf(stderr, "the rank is not named\n"), give_up(what, folder);
  if (repeats_an_error(folder)) fprintf(stderr, "an error is printed twice\n"), give_up(what, folder);
  if (wait_for(start(folder, modes[mode], true), PATIENCE_SECONDS) != 0)
    fprintf(stderr, "cannot resume\n"), give_up(what, folder);
  if (!same_end(modes[mode], folder)) fprintf(stderr, "other bits\n"), give_up(what, folder);
  if (code != 0) printf("%s: ended after %.1f s\n", what, seconds);
  fflush(stdout);
}

#ifndef RFT_SANITIZED
/* A rank that is stopped when it makes a call of MPI in which the others wait without a deadline. Not with a sanitizer,
 * whose library must be loaded first. */
static void stopped_in(const char *call, bool trains) {
  char log[128];
  size_t n;
  setenv("LD_PRELOAD", RFT_STOPS, 1);
  setenv("RFT_STOPPED_RANK", "2", 1);
  setenv("RFT_STOPPED_IN", call, 1);
  const pid_t launcher = start(call, modes[0], false);
  unsetenv("LD_PRELOAD");
  for (double end = now() + PATIENCE_SECONDS; trains && !has_checkpoint(call, LAST) && now() < end;) usleep(5000);
  const double stopped = now();
  const int code = wait_for(launcher, LIMIT_SECONDS);
  snprintf(log, sizeof log, "%s/%s.log", root, call);
  char *text = read_all(log, &n);
  const bool named = text && strstr(text, "rank 2 was killed by signal 9 (Killed): it was stopped");
  free(text);
  if (code <= 0 || !named || names_rank(call, 2) != trains) give_up("rank 2 stopped in a call of MPI", call);
  printf("rank 2 stopped in %s: ended after %.1f s\n", call, now() - stopped);
}
#else
static void stopped_in(const char *call, bool trains) { (void)call, (void)trains; }
#endif

/* With its own copy of the data: sources change while a campaign runs. */
static void write_configuration(void) {
  char path[128], command[512];
  snprintf(command, sizeof command, "mkdir %s/text && cp %s/src/base/*.c %s/text", root, RFT_SOURCE_DIR, root);
  if (system(command) != 0) abort();
  snprintf(path, sizeof path, "%s/c.yaml", root);
  FILE *f = fopen(path, "w");
  if (!f) abort();
  fprintf(f,
          "refrain: 1\n"
          "model: {model_type: llama, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 4}\n"
          "data: {train: [\"text/*.c\"], tokenizer: bytes, sequence: 16}\n"
          "batch: {tokens: 128, microbatch: 2}\n"
          "optimizer: {lr: 1e-3}\nprecision: {dtype: bf16}\n"
          "parallel: {timeout: 5s}\n"
          "run: {steps: %d, seed: 3, checkpoint_every: %d}\n",
          LAST, EVERY);
  fclose(f);
}

int main(int argc, char **argv) {
  const int faults = argc > 1 ? atoi(argv[1]) : FAULTS;
  char command[128];
  const double started = now();
  state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  snprintf(root, sizeof root, P_tmpdir "/refrain-faults-XXXXXX");
  if (!mkdtemp(root)) abort();
  write_configuration();
  setenv("REFRAIN_THREADS", "1", 1);
  rft_find_leaks(false); /* a rank that ends after a fault leaves blocks; cli_ranks_test looks at the other runs */
  for (int m = 0; m < MODES; m++) {
    const double begun = now();
    if (wait_for(start(modes[m], modes[m], false), PATIENCE_SECONDS) != 0) give_up("the undisturbed run", root);
    if (now() - begun < fastest) fastest = now() - begun;
  }
  for (int i = 0; i < faults; i++) {
    if (argc < 2 && i >= LEAST && now() - started > ENOUGH_SECONDS) {
      printf("%d of %d faults in %.0f s: the machine is busy\n", i, faults, now() - started);
      break;
    }
    one(i);
  }
  stopped_in("MPI_Init_thread", false);
  stopped_in("MPI_Finalize", true);
  snprintf(command, sizeof command, "rm -rf %s", root);
  return system(command) == 0 ? 0 : 1;
}
