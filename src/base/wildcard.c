/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns of parameter names. Iterative, with one backtracking point: the time is at most the product of both lengths.
 */
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
