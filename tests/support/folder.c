/* SPDX-License-Identifier: Apache-2.0
 *
 * Folders for tests; plain stdio, so that the code under test does not check itself.
 */
#include "support/folder.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *rft_path(rft_folder *folder, const char *name) {
  char *text = folder->joined[folder->next++ % 8];
  snprintf(text, sizeof folder->joined[0], "%s/%s", folder->path, name);
  return text;
}

void rft_write(rft_folder *folder, const char *name, const void *data, size_t n) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", folder->path, name);
  for (char *p = path + strlen(folder->path) + 1; (p = strchr(p, '/')) != NULL; p++) {
    *p = 0;
    mkdir(path, 0777);
    *p = '/';
  }
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(data, 1, n, file), n);
  assert_int_equal(fclose(file), 0);
}

char *rft_read(rft_folder *folder, const char *name, size_t *n) {
  FILE *file = fopen(rft_path(folder, name), "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  long size = ftell(file);
  rewind(file);
  char *data = calloc(1, (size_t)size + 1);
  assert_non_null(data);
  assert_int_equal(fread(data, 1, (size_t)size, file), (size_t)size);
  fclose(file);
  *n = (size_t)size;
  return data;
}

int rft_folder_setup(void **state) {
  rft_folder *folder = calloc(1, sizeof *folder);
  /* In memory where possible, because thousands of fsyncs are slow on a disk. */
  const char *base = getenv("TMPDIR");
  if (!base) base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : P_tmpdir;
  if (!folder || rfr_ctx_create(NULL, &folder->ctx) != RFR_OK) return -1;
  snprintf(folder->path, sizeof folder->path, "%s/refrain-test-XXXXXX", base);
  if (!mkdtemp(folder->path)) return -1;
  *state = folder;
  return 0;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at) {
  (void)st, (void)kind, (void)at;
  return remove(path);
}

int rft_folder_teardown(void **state) {
  rft_folder *folder = *state;
  rfr_ctx_stats stats = rfr_ctx_get_stats(folder->ctx);
  nftw(folder->path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
  if (stats.live_blocks) fprintf(stderr, "%lld blocks leaked\n", (long long)stats.live_blocks);
  rfr_ctx_destroy(folder->ctx);
  free(folder);
  return stats.live_blocks == 0 ? 0 : -1;
}

void rft_write_texts(rft_folder *folder) {
  for (int i = 0; i < 6; i++) {
    char name[32], text[400];
    int n = 0;
    for (int k = 0; k < 9 + i; k++) n += sprintf(text + n, "%d plus %d is %d\n", i, k, i + k);
    snprintf(name, sizeof name, "text/%d.txt", i);
    rft_write(folder, name, text, (size_t)n);
  }
}
