/* SPDX-License-Identifier: Apache-2.0
 */
#include "report/thin.h"

#include <math.h>

static int64_t count(const rfi_log_rows *rows, rfi_series series) {
  int64_t n = 0;
  for (int64_t i = 0; i < rows->n; i++) n += !isnan(rows->items[i].value[series]);
  return n;
}

/* The four points of a bucket in order, each once. */
static int64_t put_bucket(const int64_t four[4], int64_t *out) {
  int64_t sorted[4], n = 0, kept = 0;
  for (int k = 0; k < 4; k++) {
    int64_t at = n++;
    for (; at > 0 && sorted[at - 1] > four[k]; at--) sorted[at] = sorted[at - 1];
    sorted[at] = four[k];
  }
  for (int k = 0; k < 4; k++)
    if (k == 0 || sorted[k] != sorted[k - 1]) out[kept++] = sorted[k];
  return kept;
}

int64_t rfi_thin(const rfi_log_rows *rows, rfi_series series, int64_t most, int64_t *out) {
  const int64_t n = count(rows, series), buckets = most / 4 > 0 ? most / 4 : 1;
  int64_t kept = 0, seen = 0, bucket = 0, four[4] = {-1, -1, -1, -1}; /* first, smallest, largest, last */
  for (int64_t i = 0; i < rows->n; i++) {
    const double x = rows->items[i].value[series];
    if (isnan(x)) continue;
    if (n <= most) {
      out[kept++] = i;
      continue;
    }
    if (four[0] < 0) four[0] = four[1] = four[2] = i;
    if (x < rows->items[four[1]].value[series]) four[1] = i;
    if (x > rows->items[four[2]].value[series]) four[2] = i;
    four[3] = i;
    if (++seen * buckets < (bucket + 1) * n) continue;
    kept += put_bucket(four, out + kept);
    four[0] = -1;
    bucket++;
  }
  return kept;
}
