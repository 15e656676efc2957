/* SPDX-License-Identifier: Apache-2.0
 *
 * The differences of two runs as text. Texts of a run may have control characters, which could move the cursor of a
 * terminal: they are printed as question marks.
 */
#include <string.h>

#include "report/diff.h"

enum { NAME = 24, VALUE = 30, NUMBER = 12 }; /* columns */

static rfr_status put(rfi_string *out, const char *text, int columns) {
  char line[512];
  size_t n = 0;
  for (; *text && n + 1 < sizeof line; text++) line[n++] = (unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text;
  line[n] = 0;
  return rfi_string_printf(out, "%-*s ", columns, line);
}

/* A string or number of a value; "-" for null. */
static rfr_status put_value(rfi_string *out, const json_t *v, int columns) {
  char text[48] = "-";
  if (json_is_string(v)) return put(out, json_string_value(v), columns);
  if (json_is_integer(v)) rfi_snprintf(text, sizeof text, "%lld", (long long)json_integer_value(v));
  if (json_is_real(v)) rfi_snprintf(text, sizeof text, "%.6g", json_real_value(v));
  return put(out, text, columns);
}

static rfr_status end_line(rfi_string *out) {
  while (out->n > 0 && out->data[out->n - 1] == ' ') out->n--;
  return rfi_string_append(out, "\n", 1);
}

static const json_t *of(const json_t *pair, size_t i) { return json_array_get(pair, i); }

/* ---- parts ---- */

static rfr_status print_runs(const json_t *diff, rfi_string *out) {
  static const char *const sides[] = {"a", "b"};
  for (size_t i = 0; i < 2; i++) {
    RFI_TRY(put(out, sides[i], 1));
    RFI_TRY(put_value(out, of(json_object_get(diff, "runs"), i), NAME));
    RFI_TRY(
        rfi_string_printf(out, "step %lld\n", (long long)json_integer_value(of(json_object_get(diff, "steps"), i))));
  }
  return RFR_OK;
}

static rfr_status print_config(const json_t *diff, rfi_string *out) {
  const json_t *list = json_object_get(diff, "config"), *facts = json_object_get(diff, "facts");
  const size_t n = json_array_size(list);
  if (n == 0) RFI_TRY(rfi_string_printf(out, "\nconfiguration: equal\n"));
  else
    RFI_TRY(rfi_string_printf(out, "\nconfiguration: %zu key%s differ%s\n", n, n == 1 ? "" : "s", n == 1 ? "s" : ""));
  for (size_t i = 0; i < n; i++) {
    const json_t *o = of(list, i), *values = json_object_get(o, "values"), *sources = json_object_get(o, "sources");
    for (size_t k = 0; k < 2; k++) {
      RFI_TRY(rfi_string_append(out, "  ", 2));
      RFI_TRY(put(out, k ? "" : json_string_value(json_object_get(o, "key")), NAME));
      RFI_TRY(put(out, k ? "b" : "a", 1));
      RFI_TRY(put_value(out, of(values, k), VALUE));
      RFI_TRY(put_value(out, of(sources, k), 0));
      RFI_TRY(end_line(out));
    }
  }
  if (json_array_size(facts) > 0) RFI_TRY(rfi_string_printf(out, "\nmachine and size (not counted)\n"));
  for (size_t i = 0; i < json_array_size(facts); i++) {
    const json_t *o = of(facts, i), *values = json_object_get(o, "values");
    RFI_TRY(rfi_string_append(out, "  ", 2));
    RFI_TRY(put(out, json_string_value(json_object_get(o, "name")), NAME));
    RFI_TRY(put_value(out, of(values, 0), VALUE));
    RFI_TRY(put_value(out, of(values, 1), 0));
    RFI_TRY(end_line(out));
  }
  return RFR_OK;
}

static rfr_status print_curves(const json_t *diff, rfi_string *out) {
  static const char *const heads[] = {"last a", "last b", "best a", "best b", "mean |a-b|", "from step"};
  const json_t *list = json_object_get(diff, "curves");
  RFI_TRY(rfi_string_printf(out, "\n  %-*s ", NAME, "curve"));
  for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) RFI_TRY(put(out, heads[i], NUMBER));
  RFI_TRY(end_line(out));
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *o = of(list, i), *first = json_object_get(o, "first_step");
    RFI_TRY(rfi_string_append(out, "  ", 2));
    RFI_TRY(put(out, json_string_value(json_object_get(o, "name")), NAME));
    for (size_t k = 0; k < 2; k++) RFI_TRY(put_value(out, of(json_object_get(o, "last"), k), NUMBER));
    for (size_t k = 0; k < 2; k++) RFI_TRY(put_value(out, of(json_object_get(o, "best"), k), NUMBER));
    RFI_TRY(put_value(out, json_object_get(o, "area"), NUMBER));
    if (json_is_null(first)) RFI_TRY(put(out, "equal", 0));
    else RFI_TRY(put_value(out, first, 0));
    if (!json_is_true(json_object_get(o, "counts"))) RFI_TRY(put(out, "(not counted)", 0));
    RFI_TRY(end_line(out));
  }
  return RFR_OK;
}

static rfr_status put_shape(rfi_string *out, const json_t *shape) {
  RFI_TRY(rfi_string_append(out, "[", 1));
  for (size_t i = 0; i < json_array_size(shape); i++)
    RFI_TRY(rfi_string_printf(out, "%s%lld", i ? "," : "", (long long)json_integer_value(of(shape, i))));
  return rfi_string_append(out, "] ", 2);
}

static rfr_status print_tensor(const json_t *o, rfi_string *out) {
  const json_t *dtypes = json_object_get(o, "dtypes"), *shapes = json_object_get(o, "shapes");
  const bool same_type = json_equal(of(dtypes, 0), of(dtypes, 1)),
             same_shape = json_equal(of(shapes, 0), of(shapes, 1));
  RFI_TRY(rfi_string_append(out, "  ", 2));
  RFI_TRY(put_value(out, json_object_get(o, "max_abs"), NUMBER));
  RFI_TRY(put_value(out, json_object_get(o, "relative"), NUMBER));
  RFI_TRY(put(out, json_string_value(json_object_get(o, "name")), 0));
  for (size_t k = 0; k < 2 && !same_type; k++) RFI_TRY(put_value(out, of(dtypes, k), 0));
  for (size_t k = 0; k < 2 && !same_shape; k++) RFI_TRY(put_shape(out, of(shapes, k)));
  return end_line(out);
}

static rfr_status print_names(const json_t *list, const char *side, int64_t most, rfi_string *out) {
  const size_t n = json_array_size(list);
  for (size_t i = 0; i < n && (int64_t)i < most; i++) {
    RFI_TRY(rfi_string_printf(out, "  only in %s  ", side));
    RFI_TRY(put_value(out, of(list, i), 0));
    RFI_TRY(end_line(out));
  }
  return (int64_t)n > most ? rfi_string_printf(out, "  only in %s  %lld more\n", side, (long long)n - (long long)most)
                           : RFR_OK;
}

static rfr_status print_weights(const json_t *diff, int64_t most, rfi_string *out) {
  const json_t *w = json_object_get(diff, "weights"), *steps = json_object_get(w, "steps");
  const json_t *list = json_object_get(w, "different");
  const int64_t n = (int64_t)json_array_size(list);
  if (!json_is_object(w)) return rfi_string_printf(out, "\nweights: no checkpoint\n");
  RFI_TRY(rfi_string_printf(out, "\nweights: checkpoints of step "));
  RFI_TRY(put_value(out, of(steps, 0), 0));
  RFI_TRY(rfi_string_printf(out, "and "));
  RFI_TRY(put_value(out, of(steps, 1), 0));
  out->n--; /* the blank */
  RFI_TRY(rfi_string_printf(out, ", %lld tensors equal, %lld different\n",
                            (long long)json_integer_value(json_object_get(w, "equal")), (long long)n));
  if (n > 0) RFI_TRY(rfi_string_printf(out, "  %-*s %-*s %s\n", NUMBER, "max |a-b|", NUMBER, "|a-b|/|a|", "tensor"));
  for (int64_t i = 0; i < n && i < most; i++) RFI_TRY(print_tensor(of(list, (size_t)i), out));
  if (n > most) RFI_TRY(rfi_string_printf(out, "  %lld more tensors differ (--all)\n", (long long)(n - most)));
  RFI_TRY(print_names(json_object_get(w, "missing"), "a", most, out));
  return print_names(json_object_get(w, "extra"), "b", most, out);
}

rfr_status rfi_diff_print(const json_t *diff, int64_t most, rfi_string *out) {
  RFI_TRY(print_runs(diff, out));
  RFI_TRY(print_config(diff, out));
  RFI_TRY(print_curves(diff, out));
  RFI_TRY(print_weights(diff, most, out));
  return json_is_true(json_object_get(diff, "equal")) ? rfi_string_printf(out, "\nthe runs are equal\n") : RFR_OK;
}
