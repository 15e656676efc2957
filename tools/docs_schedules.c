/* SPDX-License-Identifier: Apache-2.0
 *
 * The generated parts of docs/schedules.md: pictures and tables of `refrain schedule`, and figures over sizes.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "docs.h"

static rfr_status generate(rfr_ctx *ctx, const char *kind, int ranks, int microbatches, int chunks,
                           rfr_schedule **out) {
  rfr_schedule_options o = rfr_schedule_options_default();
  for (o.kind = RFR_SCHEDULE_GPIPE; rfr_schedule_kind_name(o.kind); o.kind++)
    if (strcmp(rfr_schedule_kind_name(o.kind), kind) == 0) break;
  o.ranks = ranks;
  o.microbatches = microbatches;
  o.chunks = chunks;
  return rfr_schedule_generate(ctx, &o, out);
}

/* Writes a table or a picture of a schedule with equal costs; destroys the schedule. */
static rfr_status draw(rfr_schedule *schedule, const char *title, rfi_string *s) {
  schedule_run run;
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  rfr_status status = f ? schedule_run_make(schedule, NULL, &run) : RFR_NO_MEMORY;
  if (status == RFR_OK && title) schedule_run_svg(&run, title, f);
  else if (status == RFR_OK) schedule_run_table(&run, f);
  if (f) schedule_run_deinit(&run);
  if (f && fclose(f) != 0) status = RFR_IO;
  if (status == RFR_OK) status = rfi_string_append(s, text, n);
  free(text);
  rfr_schedule_destroy(schedule);
  return status;
}

rfr_status docs_schedule_picture(rfr_ctx *ctx, const char *kind, rfi_string *s) {
  rfr_schedule *schedule;
  RFI_TRY(generate(ctx, kind, 4, 8, 0, &schedule));
  return draw(schedule, kind, s);
}

rfr_status docs_schedule_table(rfr_ctx *ctx, const char *kind, const char *size, rfi_string *s) {
  rfr_schedule *schedule;
  int ranks = 0, microbatches = 0, chunks = 0;
  sscanf(size, "%dx%dx%d", &ranks, &microbatches, &chunks);
  RFI_TRY(generate(ctx, kind, ranks, microbatches, chunks, &schedule));
  return draw(schedule, NULL, s);
}

rfr_status docs_schedule_order(rfr_ctx *ctx, const char *order, rfi_string *s) {
  rfr_schedule *schedule;
  RFI_TRY(rfr_schedule_parse_order(ctx, "order", order, strlen(order), NULL, 0, &schedule));
  return draw(schedule, NULL, s);
}

rfr_status docs_schedule_figures(rfr_ctx *ctx, rfi_string *s) {
  static const int sizes[][2] = {{4, 8}, {4, 16}, {8, 16}, {8, 32}};
  static const struct {
    const char *kind;
    int chunks;
  } rows[] = {{"gpipe", 1}, {"1f1b", 1},  {"interleaved", 2}, {"interleaved", 4},
              {"zb-h1", 1}, {"zb-h1", 2}, {"zb-v", 2}};
  RFI_TRY(rfi_string_printf(s, "%-12s %6s", "kind", "chunks"));
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
    RFI_TRY(rfi_string_printf(s, "    P %d M %-2d live slots", sizes[k][0], sizes[k][1]));
  RFI_TRY(rfi_string_printf(s, "\n"));
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    RFI_TRY(rfi_string_printf(s, "%-12s %6d", rows[i].kind, rows[i].chunks));
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
      rfr_schedule *schedule;
      rfr_schedule_result result;
      rfr_rank_result ranks[8];
      RFI_TRY(generate(ctx, rows[i].kind, sizes[k][0], sizes[k][1], rows[i].chunks, &schedule));
      const rfr_status status = rfr_schedule_simulate(schedule, NULL, 0, &result, ranks, NULL, NULL);
      rfr_schedule_destroy(schedule);
      RFI_TRY(status);
      RFI_TRY(rfi_string_printf(s, " %10.1f%% %4d %5d", 100 * result.bubble, ranks[0].live, ranks[0].slots));
    }
    RFI_TRY(rfi_string_printf(s, "\n"));
  }
  return RFR_OK;
}
