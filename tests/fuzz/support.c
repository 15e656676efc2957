/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers of the fuzz targets, see fuzz.h. Files are in memory, in one folder: the linker gives calls of open, stat and
 * the like to the functions __wrap_X below (cmake/fuzz.cmake), which answer for that folder and pass on all others. The
 * kernel took half of the time of a reader of several small files.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

void rft_fuzz_expect(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "fuzz target: %s; last error: %s\n", what, rfr_last_error()->message);
  abort();
}

rfr_ctx *rft_fuzz_ctx(void) {
  static rfr_ctx *ctx;
  if (ctx) return ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  o.use_onednn = 0;
  o.byte_limit = (size_t)64 << 20;
  rft_fuzz_expect(rfr_ctx_create(&o, &ctx) == RFR_OK, "no context");
  return ctx;
}

void rft_fuzz_status(rfr_status s) {
  const rfr_error *e = rfr_last_error();
  if (s == RFR_OK) return;
  rft_fuzz_expect(s != RFR_INTERNAL && e->status == s && *e->slug && *e->message && *e->next, "not a proper error");
  rft_fuzz_expect(strchr(e->message, '\n') == NULL, "a message of several lines");
}

void rft_fuzz_clean(void) { rft_fuzz_expect(rfr_ctx_get_stats(rft_fuzz_ctx()).live_blocks == 0, "blocks are left"); }

/* ---- files in memory ---- */

#define FOLDER "/refrain-fuzz"
enum { FILES = 8, FIRST_FD = 1 << 28 }; /* descriptors of the system are smaller */
static struct {
  char path[64];
  uint8_t *data; /* allocated: `room` bytes */
  size_t n, room;
  bool present;
} files[FILES];
static int n_files;

const char *rft_fuzz_folder(void) { return FOLDER; }

static bool in_folder(const char *path) { return strncmp(path, FOLDER, sizeof FOLDER - 1) == 0; }

/* Finds a file; -1: it does not exist. */
static int find_file(const char *path) {
  for (int i = 0; i < n_files; i++)
    if (strcmp(files[i].path, path) == 0) return i;
  return -1;
}

static int put(const char *path, const void *data, size_t n) {
  int i = find_file(path);
  if (i < 0) {
    rft_fuzz_expect(n_files < FILES && strlen(path) < sizeof files->path, "too many files");
    strcpy(files[i = n_files++].path, path);
  }
  files[i].present = data != NULL;
  if (!data) return i;
  if (n > files[i].room) {
    files[i].room = 2 * n;
    files[i].data = realloc(files[i].data, files[i].room);
    rft_fuzz_expect(files[i].data != NULL, "no memory for a file");
  }
  if (n) memcpy(files[i].data, data, n);
  files[i].n = n;
  return i;
}

void rft_fuzz_put(const char *name, const void *data, size_t n) {
  char path[128];
  snprintf(path, sizeof path, FOLDER "/%s", name);
  put(path, data, n);
}

const char *rft_fuzz_file(const void *data, size_t n) { return files[put(FOLDER "/fuzz", data, n)].path; }

int __real_open(const char *path, int flags, ...);
int __real_close(int fd);
int __real_stat(const char *path, struct stat *st);
int __real_lstat(const char *path, struct stat *st);
int __real_fstat(int fd, struct stat *st);
int __real_access(const char *path, int mode);
ssize_t __real_pread(int fd, void *data, size_t n, off_t offset);
int __wrap_open(const char *path, int flags, ...);
int __wrap_close(int fd);
int __wrap_stat(const char *path, struct stat *st);
int __wrap_lstat(const char *path, struct stat *st);
int __wrap_fstat(int fd, struct stat *st);
int __wrap_access(const char *path, int mode);
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset);

static int describe(const char *path, struct stat *st) {
  const int i = find_file(path);
  const bool is_folder = strcmp(path, FOLDER) == 0 || strcmp(path, FOLDER "/") == 0;
  if (!is_folder && (i < 0 || !files[i].present)) {
    errno = ENOENT;
    return -1;
  }
  memset(st, 0, sizeof *st);
  st->st_mode = is_folder ? S_IFDIR | 0700 : S_IFREG | 0600;
  st->st_size = is_folder ? 0 : (off_t)files[i].n;
  return 0;
}

int __wrap_open(const char *path, int flags, ...) {
  struct stat st;
  va_list args;
  if (in_folder(path)) return describe(path, &st) != 0 ? -1 : FIRST_FD + find_file(path);
  va_start(args, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
  va_end(args);
  return __real_open(path, flags, mode);
}
int __wrap_close(int fd) { return fd >= FIRST_FD ? 0 : __real_close(fd); }
int __wrap_stat(const char *path, struct stat *st) {
  return in_folder(path) ? describe(path, st) : __real_stat(path, st);
}
int __wrap_lstat(const char *path, struct stat *st) {
  return in_folder(path) ? describe(path, st) : __real_lstat(path, st);
}
int __wrap_fstat(int fd, struct stat *st) {
  return fd >= FIRST_FD ? describe(files[fd - FIRST_FD].path, st) : __real_fstat(fd, st);
}
int __wrap_access(const char *path, int mode) {
  struct stat st;
  return in_folder(path) ? describe(path, &st) : __real_access(path, mode);
}
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset) {
  if (fd < FIRST_FD) return __real_pread(fd, data, n, offset);
  const size_t size = files[fd - FIRST_FD].n, at = (size_t)offset < size ? (size_t)offset : size;
  if (n > size - at) n = size - at;
  if (n) memcpy(data, files[fd - FIRST_FD].data + at, n);
  return (ssize_t)n;
}

bool rft_fuzz_part(const char **text, size_t *n, const char **part, size_t *n_part) {
  static const char line[] = "\n----\n";
  if (!*text) return false;
  const char *next = memmem(*text, *n, line, sizeof line - 1);
  *part = *text;
  *n_part = next ? (size_t)(next - *text) : *n;
  *n -= next ? *n_part + sizeof line - 1 : *n;
  *text = next ? next + sizeof line - 1 : NULL;
  return true;
}
