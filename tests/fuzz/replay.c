/* SPDX-License-Identifier: Apache-2.0
 *
 * A main for a fuzz target without libFuzzer: every file of the folders named, once, each
 * in a block of exactly its size. An empty or missing folder is a failure: it would test
 * nothing.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"

static int replay_file(const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f) return 0;
  uint8_t *whole = malloc(1 << 20), *data = NULL;
  rft_fuzz_expect(whole != NULL, "no memory");
  const size_t n = fread(whole, 1, 1 << 20, f);
  fclose(f);
  data = malloc(n ? n : 1);
  rft_fuzz_expect(data != NULL, "no memory");
  for (size_t i = 0; i < n; i++) data[i] = whole[i];
  free(whole);
  LLVMFuzzerTestOneInput(data, n);
  free(data);
  return 1;
}

int main(int argc, char **argv) {
  int files = 0;
  for (int i = 1; i < argc; i++) {
    DIR *dir = opendir(argv[i]);
    if (!dir) continue;
    for (struct dirent *e; (e = readdir(dir));) {
      char path[1024];
      snprintf(path, sizeof path, "%s/%s", argv[i], e->d_name);
      if (e->d_name[0] != '.') files += replay_file(path);
    }
    closedir(dir);
  }
  printf("%d inputs\n", files);
  rfr_ctx_destroy(rft_fuzz_ctx());
  return files < 5;
}
