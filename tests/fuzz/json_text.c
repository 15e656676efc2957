/* SPDX-License-Identifier: Apache-2.0 */
#include "json_text.h"

#include <string.h>

const char *const rft_extremes[RFT_EXTREMES] = {"-1",
                                                "0",
                                                "1",
                                                "2",
                                                "63",
                                                "4096",
                                                "4097",
                                                "65536",
                                                "65537",
                                                "16777217",
                                                "2147483647",
                                                "2147483648",
                                                "-2147483648",
                                                "4294967295",
                                                "4611686018427387904",
                                                "9223372036854775807",
                                                "-9223372036854775808",
                                                "9223372036854775808",
                                                "0.5",
                                                "-0.0",
                                                "1e308",
                                                "1e-320",
                                                "null",
                                                "true",
                                                "false",
                                                "\"\"",
                                                "\"../a\"",
                                                "\"\\u0000\"",
                                                "[]",
                                                "{}",
                                                "[-1]",
                                                "[2147483646]",
                                                "[[]]",
                                                "{\"\": []}"};

const char *rft_json_value_end(const char *at, const char *end) {
  int depth = 0;
  do {
    if (at >= end) return end;
    if (*at == '"') {
      for (at++; at < end && *at != '"'; at++) at += *at == '\\' && at + 1 < end;
      at += at < end;
    } else if (*at == '[' || *at == '{') {
      depth++;
      at++;
    } else if (*at == ']' || *at == '}') {
      depth--;
      at++;
    } else if (depth) {
      at++;
    } else {
      while (at < end && !memchr(",]} \n", *at, 5)) at++;
    }
  } while (depth > 0);
  return at;
}

const char *rft_json_next_value(const char *at, const char *end, const char *after) {
  for (; at < end; at++) {
    if (!*at || !strchr(after, *at)) continue;
    const char *value = at + 1;
    while (value < end && (*value == ' ' || *value == '\n')) value++;
    if (value < end && *value && strchr("\"[{-0123456789tfn", *value)) return value;
  }
  return NULL;
}
