/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers of the fuzz targets, see fuzz.h. Files are in memory: a reader opens the descriptor's name under /proc, so
 * that an execution needs no disk; a folder has links to such files.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/file.h"
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

enum { FILES = 8 };
static char folder[256];
static struct {
  char name[64];
  int fd;       /* of the file in memory */
  bool present; /* the folder has a link to it */
} files[FILES];
static int n_files;

static void remove_folder(void) { rfi_tree_discard(folder); }

const char *rft_fuzz_folder(void) {
  if (*folder) return folder;
  const char *root = getenv("TMPDIR");
  snprintf(folder, sizeof folder, "%s/refrain-fuzz-XXXXXX", root ? root : "/tmp");
  rft_fuzz_expect(mkdtemp(folder) != NULL, "no folder");
  atexit(remove_folder);
  return folder;
}

static int find_file(const char *name) {
  for (int i = 0; i < n_files; i++)
    if (strcmp(files[i].name, name) == 0) return i;
  rft_fuzz_expect(n_files < FILES, "too many files");
  snprintf(files[n_files].name, sizeof files->name, "%s", name);
  files[n_files].fd = memfd_create(name, MFD_CLOEXEC);
  rft_fuzz_expect(files[n_files].fd >= 0, "no file in memory");
  return n_files++;
}

void rft_fuzz_put(const char *name, const void *data, size_t n) {
  const int i = find_file(name), fd = files[i].fd;
  char path[64], link[512];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  snprintf(link, sizeof link, "%s/%s", rft_fuzz_folder(), name);
  rft_fuzz_expect(!data || (ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n), "the file is not written");
  if (data && !files[i].present) rft_fuzz_expect(symlink(path, link) == 0, "no link");
  if (!data && files[i].present) rft_fuzz_expect(unlink(link) == 0, "the link stays");
  files[i].present = data != NULL;
}

const char *rft_fuzz_file(const void *data, size_t n) {
  static char path[64];
  rft_fuzz_put("fuzz", data, n);
  snprintf(path, sizeof path, "/proc/self/fd/%d", files[find_file("fuzz")].fd);
  return path;
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
