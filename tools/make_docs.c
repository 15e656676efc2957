/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes the generated parts of docs/: errors.md from errors.def, config.md from the configuration's schema,
 * limits.md from a table whose rows are tried, plan.svg, and the blocks of other pages that show traces, reports and
 * files (tools/docs_shows.c). `make docs` runs it; the test docs_current runs it with --check, so that no page
 * differs from the code.
 *
 *   make_docs [--check] DOCS_FOLDER
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "docs.h"
#include "train/config.h"

/* ---- tables of the source ---- */

static rfr_status errors_page(rfr_ctx *ctx, const char *root, rfi_string *s) {
  (void)ctx, (void)root;
  rfr_error row;
  RFI_TRY(
      rfi_string_printf(s, "<!-- SPDX-License-Identifier: Apache-2.0; made by `make docs` -->\n# Errors\n\n"
                           "Every failure has a status, a slug that never changes, and one next step. The exit code of "
                           "`refrain` is 2 for invalid and\nmismatch, 3 for no memory, no fit and unsupported, 4 "
                           "for io, 5 for stopped, 70 for internal, else 1;\nof `refrain diff` always 2. With "
                           "`--json` an error is one object on standard error: status, slug, message, next, file, "
                           "line.\nMistakes on the command line have the slug `usage`.\n\n"
                           "| slug | status | what it means | what to do |\n|---|---|---|---|\n"));
  for (int i = 0; rfr_error_row(i, &row); i++)
    RFI_TRY(rfi_string_printf(s, "| `%s` | %s | %s | %s |\n", row.slug, rfr_status_name(row.status), row.message,
                              row.next));
  return RFR_OK;
}

static rfr_status config_page(rfr_ctx *ctx, const char *root, rfi_string *s) {
  (void)ctx, (void)root;
  RFI_TRY(rfi_string_printf(s,
                            "<!-- SPDX-License-Identifier: Apache-2.0; made by `make docs` -->\n# Configuration\n\n"
                            "A run is described by plain YAML (JSON is a subset): no anchors, no tags, no key twice, "
                            "no unknown key. `--set a.b=c` changes\none value. `refrain keys WORD` prints the rows "
                            "below that contain a word; `refrain check CONFIG.yaml` prints the resolved\n"
                            "configuration, each value with its source.\n\n"));
  return rfi_config_table(s);
}

static rfr_status limits_page(rfr_ctx *ctx, const char *root, rfi_string *s) {
  (void)root;
  return docs_limits(ctx, s);
}

/* Pictures of pipeline schedules. */
#define PICTURE(function, kind)                                               \
  static rfr_status function(rfr_ctx *ctx, const char *root, rfi_string *s) { \
    (void)root;                                                               \
    return docs_schedule_picture(ctx, kind, s);                               \
  }
PICTURE(gpipe_picture, "gpipe")
PICTURE(one_f_one_b_picture, "1f1b")
PICTURE(interleaved_picture, "interleaved")
PICTURE(zb_h1_picture, "zb-h1")
PICTURE(zb_v_picture, "zb-v")

/* ---- files ---- */

static bool read_page(const char *path, rfi_string *s) {
  char piece[4096];
  FILE *f = fopen(path, "rb");
  bool good = f != NULL;
  for (size_t n; good && (n = fread(piece, 1, sizeof piece, f)) > 0;) good = rfi_string_append(s, piece, n) == RFR_OK;
  if (f) fclose(f);
  return good && rfi_string_append(s, "", 0) == RFR_OK;
}

static bool write_page(const char *path, const rfi_string *s) {
  FILE *f = fopen(path, "wb");
  bool good = f && fwrite(s->data, 1, s->n, f) == s->n;
  return f && fclose(f) == 0 && good;
}

int main(int argc, char **argv) {
  const bool check = argc == 3 && strcmp(argv[1], "--check") == 0;
  static const struct {
    const char *name;
    rfr_status (*make)(rfr_ctx *ctx, const char *root, rfi_string *s); /* NULL: a page with generated blocks */
  } pages[] = {{"errors.md", errors_page},
               {"config.md", config_page},
               {"limits.md", limits_page},
               {"plan.svg", docs_plan},
               {"frozen.md", NULL},
               {"life-of-a-step.md", NULL},
               {"trace-format.md", NULL},
               {"planning.md", NULL},
               {"embedding.md", NULL},
               {"experts.md", NULL},
               {"schedules.md", NULL},
               {"python.md", NULL},
               {"runs.md", NULL},
               {"scale.md", NULL},
               {"schedule-gpipe.svg", gpipe_picture},
               {"schedule-1f1b.svg", one_f_one_b_picture},
               {"schedule-interleaved.svg", interleaved_picture},
               {"schedule-zb-h1.svg", zb_h1_picture},
               {"schedule-zb-v.svg", zb_v_picture}};
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *ctx;
  int failed = 0;
  /* the same text on every machine */
  o.threads = 1;
  o.isa = "v2";
  o.use_onednn = 0;
  if (argc != 2 + check || rfr_ctx_create(&o, &ctx) != RFR_OK) return 2;
  for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
    rfi_string s = {.ctx = ctx}, old = {.ctx = ctx};
    char path[1024], root[1024];
    snprintf(root, sizeof root, "%s/..", argv[argc - 1]);
    snprintf(path, sizeof path, "%s/%s", argv[argc - 1], pages[i].name);
    const bool there = read_page(path, &old);
    rfr_status status = pages[i].make ? pages[i].make(ctx, root, &s)
                        : there       ? docs_renew(ctx, root, pages[i].name, old.data, &s)
                                      : RFR_IO;
    if (status != RFR_OK) fprintf(stderr, "%s: %s\n", path, rfr_last_error()->message);
    const bool same = status == RFR_OK && there && old.n == s.n && memcmp(old.data, s.data, s.n) == 0;
    const bool good = same || (status == RFR_OK && !check && write_page(path, &s));
    if (!good) fprintf(stderr, check ? "%s is not current: run make docs\n" : "%s cannot be written\n", path);
    failed |= !good;
    rfi_string_deinit(&s);
    rfi_string_deinit(&old);
  }
  rfr_ctx_destroy(ctx);
  return failed;
}
