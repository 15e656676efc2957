/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of `refrain plan --frontier`; docs/planning.md shows it too.
 */
#include "cli.h"

void cli_frontier_table(const rfr_programs *p, int program, const rfr_frontier_point *point, int n, FILE *f) {
  char bytes[32];
  const double flops = rfr_program_flops(p, program) - rfr_program_recomputed_flops(p, program);
  fprintf(f, "%14s %10s %14s %9s %14s %8s\n", "peak bytes", "", "extra FLOPs", "of step", "extra bytes", "ops");
  for (int i = 0; i < n; i++)
    fprintf(f, "%14lld %10s %14.4g %8.2f%% %14.4g %8d\n", (long long)point[i].planned_bytes,
            cli_bytes(bytes, point[i].planned_bytes), point[i].extra_flops,
            flops > 0 ? 100 * point[i].extra_flops / flops : 0.0, point[i].extra_bytes, point[i].recomputed);
}
