/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes the pages of docs/ that are tables in the source: errors.md from errors.def,
 * config.md from the configuration's schema. `make docs` runs it; the test docs_current
 * runs it with --check, so that a page never says other than the code does.
 *
 *   make_docs [--check] DOCS_FOLDER
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "train/config.h"

static rfr_status errors_page(rfi_string *s) {
  rfr_error row;
  RFI_TRY(rfi_string_printf(s, "<!-- SPDX-License-Identifier: Apache-2.0; made by `make docs` -->\n# Errors\n\n"
                               "Every failure is a status, a slug that stays the same, and one next step. The program "
                               "`refrain` ends with 2 for invalid and\nmismatch, 3 for no memory, no fit and "
                               "unsupported, 4 for io, 5 for stopped, 70 for internal, else 1.\n\n"
                               "| slug | status | what it means | what to do |\n|---|---|---|---|\n"));
  for (int i = 0; rfr_error_row(i, &row); i++)
    RFI_TRY(rfi_string_printf(s, "| `%s` | %s | %s | %s |\n", row.slug, rfr_status_name(row.status), row.message,
                              row.next));
  return RFR_OK;
}

static rfr_status config_page(rfi_string *s) {
  RFI_TRY(rfi_string_printf(s,
                            "<!-- SPDX-License-Identifier: Apache-2.0; made by `make docs` -->\n# Configuration\n\n"
                            "A run is described by plain YAML (JSON is a subset): no anchors, no tags, no key twice, "
                            "no unknown key. `--set a.b=c` changes\none value. `refrain check CONFIG.yaml` prints "
                            "what came out, each value with its source.\n\n"));
  return rfi_config_table(s);
}

static bool same_as(const char *path, const rfi_string *s) {
  FILE *f = fopen(path, "rb");
  char *old = calloc(1, s->n + 2);
  size_t n = f && old ? fread(old, 1, s->n + 1, f) : 0;
  bool same = f && old && n == s->n && memcmp(old, s->data, n) == 0;
  if (f) fclose(f);
  free(old);
  return same;
}

static bool write_page(const char *path, const rfi_string *s) {
  FILE *f = fopen(path, "wb");
  bool good = f && fwrite(s->data, 1, s->n, f) == s->n;
  return f && fclose(f) == 0 && good;
}

int main(int argc, char **argv) {
  bool check = argc == 3 && strcmp(argv[1], "--check") == 0;
  static const struct {
    const char *name;
    rfr_status (*make)(rfi_string *s);
  } pages[] = {{"errors.md", errors_page}, {"config.md", config_page}};
  rfr_ctx *ctx;
  int failed = 0;
  if (argc != 2 + check || rfr_ctx_create(NULL, &ctx) != RFR_OK) return 2;
  for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
    rfi_string s = {.ctx = ctx};
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", argv[argc - 1], pages[i].name);
    bool good = pages[i].make(&s) == RFR_OK && (check ? same_as(path, &s) : write_page(path, &s));
    if (!good) fprintf(stderr, check ? "%s is not current: run make docs\n" : "%s cannot be written\n", path);
    failed |= !good;
    rfi_string_deinit(&s);
  }
  rfr_ctx_destroy(ctx);
  return failed;
}
