/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns of names. Matching is iterative, with one backtracking point: the time is at most the product of both
 * lengths.
 */
#include <string.h>

#include "base/base.h"
#include "refrain/nn.h"

int rfr_name_matches(const char *glob, const char *name) {
  const char *star = NULL, *mark = NULL;
  while (*name) {
    if (*glob == '*') {
      star = glob++;
      mark = name;
    } else if (*glob == '?' || *glob == *name) {
      glob++;
      name++;
    } else if (star) {
      glob = star + 1;
      name = ++mark;
    } else {
      return 0;
    }
  }
  while (*glob == '*') glob++;
  return *glob == '\0';
}

static int least(int a, int b) { return a < b ? a : b; }

/* cost[j]: edit distance of the pattern up to here to the first j characters of the name. */
int rfi_glob_distance(const char *glob, const char *name) {
  enum { NAME = 256 };
  const int n = least((int)strlen(name), NAME - 1);
  int cost[NAME];
  for (int j = 0; j <= n; j++) cost[j] = j;
  for (; *glob; glob++) {
    int before = cost[0]; /* distance without the last character of both */
    cost[0] += *glob != '*';
    for (int j = 1; j <= n; j++) {
      const int was = cost[j];
      if (*glob == '*') cost[j] = least(was, cost[j - 1]);
      else cost[j] = least(before + (*glob != '?' && *glob != name[j - 1]), 1 + least(was, cost[j - 1]));
      before = was;
    }
  }
  return cost[n];
}
