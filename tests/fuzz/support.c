/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers of the fuzz targets, see fuzz.h. Files are in memory: a reader opens the descriptor's name under /proc, so
 * that an execution needs no disk.
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

const char *rft_fuzz_file(const uint8_t *data, size_t n) {
  static char path[64];
  static int fd = -1;
  if (fd < 0) {
    fd = memfd_create("fuzz", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  }
  rft_fuzz_expect(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n, "no file in memory");
  return path;
}

static char folder[256];

static void remove_folder(void) { rfi_tree_discard(folder); }

const char *rft_fuzz_folder(const char *name) {
  char link[512];
  if (*folder) return folder;
  const char *root = getenv("TMPDIR");
  snprintf(folder, sizeof folder, "%s/refrain-fuzz-XXXXXX", root ? root : "/tmp");
  rft_fuzz_expect(mkdtemp(folder) != NULL, "no folder");
  snprintf(link, sizeof link, "%s/%s", folder, name);
  rft_fuzz_expect(symlink(rft_fuzz_file(NULL, 0), link) == 0, "no link");
  atexit(remove_folder);
  return folder;
}
