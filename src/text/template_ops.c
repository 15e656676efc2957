/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators, subscripts, slices, attributes and printf-style formats of template values, as Python has them. Integers
 * have 64 bits; an overflow is an error.
 */
#include <math.h>
#include <string.h>

#include "text/template_value.h"

static rfi_tval fail_op(rfi_render *r, const char *op, const rfi_tval *a, const rfi_tval *b) {
  const rfi_tval *u = a->kind == RFI_T_UNDEFINED ? a : b->kind == RFI_T_UNDEFINED ? b : NULL;
  if (u && u->as.hint) rfi_render_fail(r, "\"%s\" is undefined", u->as.hint);
  else rfi_render_fail(r, "%s cannot be applied to %s and %s", op, rfi_tval_type(a), rfi_tval_type(b));
  return rfi_tval_none();
}

static rfi_tval overflow(rfi_render *r) {
  rfi_render_fail(r, "an integer does not fit in 64 bits");
  return rfi_tval_none();
}

static rfi_tval power(rfi_render *r, const rfi_tval *a, const rfi_tval *b) {
  int64_t base, exponent;
  if (rfi_tval_as_int(a, &base) && rfi_tval_as_int(b, &exponent) && exponent >= 0) {
    int64_t result = 1;
    if (base == 0 || base == 1) return rfi_tval_int(exponent == 0 ? 1 : base);
    if (base == -1) return rfi_tval_int(exponent % 2 ? -1 : 1);
    for (; exponent > 0; exponent--)
      if (__builtin_mul_overflow(result, base, &result)) return overflow(r);
    return rfi_tval_int(result);
  }
  const double x = rfi_tval_as_float(a), y = rfi_tval_as_float(b);
  if (x == 0 && y < 0) return rfi_render_fail(r, "zero to a negative power"), rfi_tval_none();
  if (x < 0 && y != trunc(y)) return rfi_render_fail(r, "a complex number is not supported"), rfi_tval_none();
  const double result = pow(x, y);
  if (isinf(result) && !isinf(x) && !isinf(y)) return rfi_render_fail(r, "the result is too large"), rfi_tval_none();
  return rfi_tval_float(result);
}

static rfi_tval numbers(rfi_render *r, int op, const rfi_tval *a, const rfi_tval *b) {
  int64_t i, k, result;
  if (op == RFI_TOKEN_POW) return power(r, a, b);
  const bool ints = rfi_tval_as_int(a, &i) && rfi_tval_as_int(b, &k);
  const double x = rfi_tval_as_float(a), y = rfi_tval_as_float(b);
  if ((op == '/' || op == '%' || op == RFI_TOKEN_FLOORDIV) && y == 0)
    return rfi_render_fail(r, "division by zero"), rfi_tval_none();
  if (op == '/') return rfi_tval_float(ints ? (double)((long double)i / (long double)k) : x / y);
  if (ints) {
    switch (op) {
      case '+': return __builtin_add_overflow(i, k, &result) ? overflow(r) : rfi_tval_int(result);
      case '-': return __builtin_sub_overflow(i, k, &result) ? overflow(r) : rfi_tval_int(result);
      case '*': return __builtin_mul_overflow(i, k, &result) ? overflow(r) : rfi_tval_int(result);
      case '%':
        if (k == -1) return rfi_tval_int(0);
        result = i % k;
        return rfi_tval_int(result != 0 && (result < 0) != (k < 0) ? result + k : result);
      default:
        if (k == -1) return __builtin_sub_overflow((int64_t)0, i, &result) ? overflow(r) : rfi_tval_int(result);
        result = i / k;
        return rfi_tval_int(i % k != 0 && (i % k < 0) != (k < 0) ? result - 1 : result);
    }
  }
  if (op == '+') return rfi_tval_float(x + y);
  if (op == '-') return rfi_tval_float(x - y);
  if (op == '*') return rfi_tval_float(x * y);
  /* as CPython's float_divmod */
  double remainder = fmod(x, y), quotient = (x - remainder) / y;
  if (remainder != 0) {
    if ((y < 0) != (remainder < 0)) {
      remainder += y;
      quotient -= 1;
    }
  } else {
    remainder = copysign(0, y);
  }
  if (op == '%') return rfi_tval_float(remainder);
  if (quotient == 0) return rfi_tval_float(copysign(0, x / y));
  double floored = floor(quotient);
  if (quotient - floored > 0.5) floored += 1;
  return rfi_tval_float(floored);
}

static rfi_tval repeated(rfi_render *r, const rfi_tval *v, int64_t times) {
  if (v->kind == RFI_T_TEXT) {
    rfi_tbuilder b = {.r = r};
    for (int64_t i = 0; i < times && v->as.text->n > 0 && rfi_render_step(r, 1); i++)
      rfi_tbuilder_add_text(&b, v->as.text, 0, v->as.text->n);
    return rfi_tbuilder_finish(&b);
  }
  rfi_tlist *list = rfi_tlist_new(r);
  for (int64_t i = 0; i < times && v->as.list->n > 0 && rfi_render_step(r, 1); i++)
    for (int64_t k = 0; k < v->as.list->n && r->status == RFR_OK; k++) rfi_tlist_add(r, list, v->as.list->items[k]);
  return rfi_tlist_value(list, v->kind);
}

static bool is_sequence(const rfi_tval *v) {
  return v->kind == RFI_T_TEXT || v->kind == RFI_T_LIST || v->kind == RFI_T_TUPLE;
}

rfi_tval rfi_tval_binary(rfi_render *r, int op, const rfi_tval *a, const rfi_tval *b) {
  int64_t times;
  char name[3] = {op < 256              ? (char)op
                  : op == RFI_TOKEN_POW ? '*'
                                        : '/',
                  op < 256              ? 0
                  : op == RFI_TOKEN_POW ? '*'
                                        : '/'};
  if (r->status != RFR_OK) return rfi_tval_none();
  if (rfi_tval_is_number(a) && rfi_tval_is_number(b)) return numbers(r, op, a, b);
  if (op == '%' && a->kind == RFI_T_TEXT) return rfi_text_format(r, a->as.text, b);
  if (op == '*' && is_sequence(a) && rfi_tval_as_int(b, &times)) return repeated(r, a, times);
  if (op == '*' && is_sequence(b) && rfi_tval_as_int(a, &times)) return repeated(r, b, times);
  if (op != '+' || a->kind != b->kind || !is_sequence(a)) return fail_op(r, name, a, b);
  if (a->kind != RFI_T_TEXT) {
    rfi_tlist *list = rfi_tlist_new(r);
    for (int64_t i = 0; i < a->as.list->n && r->status == RFR_OK; i++) rfi_tlist_add(r, list, a->as.list->items[i]);
    for (int64_t i = 0; i < b->as.list->n && r->status == RFR_OK; i++) rfi_tlist_add(r, list, b->as.list->items[i]);
    return rfi_tlist_value(list, a->kind);
  }
  /* the result of the filter safe is HTML to jinja2: "+" escapes the other text */
  const bool safe = a->as.text->safe || b->as.text->safe;
  const rfi_text *left = safe ? rfi_text_escape(r, a->as.text) : a->as.text;
  const rfi_text *right = safe ? rfi_text_escape(r, b->as.text) : b->as.text;
  rfi_tbuilder t = {.r = r};
  rfi_tbuilder_add_text(&t, left, 0, left->n);
  rfi_tbuilder_add_text(&t, right, 0, right->n);
  const rfi_tval sum = rfi_tbuilder_finish(&t);
  return safe ? rfi_text_mark_safe(r, sum.as.text) : sum;
}

rfi_tval rfi_tval_negate(rfi_render *r, const rfi_tval *v) {
  const rfi_tval zero = rfi_tval_int(0);
  if (v->kind == RFI_T_FLOAT) return rfi_tval_float(-v->as.f);
  if (rfi_tval_is_number(v)) return numbers(r, '-', &zero, v);
  rfi_render_fail(r, "\"-\" needs a number, not %s", rfi_tval_type(v));
  return rfi_tval_none();
}

/* The item of a sequence, or an undefined value. */
static rfi_tval item_at(rfi_render *r, const rfi_tval *object, int64_t i) {
  const int64_t n = rfi_tval_length(r, object);
  if (i < 0) i += n;
  if (i < 0 || i >= n) return rfi_tval_undefined("item of a sequence");
  if (object->kind != RFI_T_TEXT) return object->as.list->items[i];
  rfi_text *s = object->as.text;
  const size_t begin = rfi_text_offset(r, s, i);
  uint32_t size;
  if (begin >= s->n) return rfi_tval_none();
  rfi_utf8_at(s->data + begin, s->n - begin, &size);
  return rfi_text_slice(r, s, begin, begin + size);
}

static rfi_tval fail_undefined(rfi_render *r, const rfi_tval *v) {
  if (v->as.hint) rfi_render_fail(r, "\"%s\" is undefined", v->as.hint);
  else rfi_render_fail(r, "the value is undefined");
  return rfi_tval_none();
}

/* The method or non-item member of a value; absent if there is none. */
static rfi_tval python_attribute(rfi_render *r, const rfi_tval *object, const rfi_text *name) {
  bool refused = false;
  if (object->kind == RFI_T_NAMESPACE) {
    const rfi_tval key = {.kind = RFI_T_TEXT, .as.text = (rfi_text *)name};
    const rfi_tval *v = rfi_tdict_find(r, object->as.dict, &key);
    if (v) return *v;
  } else if (object->kind == RFI_T_LOOP) {
    return rfi_tloop_attribute(r, object, name);
  }
  rfi_tfunction method = rfi_tmethod_find(r, object, name, &refused);
  if (method) return rfi_tmethod_new(r, object, method);
  if (!refused) return (rfi_tval){.kind = RFI_T_ABSENT};
  return rfi_tval_undefined("a method that changes its object");
}

rfi_tval rfi_tval_item(rfi_render *r, const rfi_tval *object, const rfi_tval *key) {
  int64_t i;
  if (!rfi_render_step(r, 1)) return rfi_tval_none();
  if (object->kind == RFI_T_UNDEFINED) return fail_undefined(r, object);
  if (object->kind == RFI_T_DICT) {
    const rfi_tval *v = rfi_tdict_find(r, object->as.dict, key);
    if (v) return *v;
  } else if ((is_sequence(object) || object->kind == RFI_T_RANGE) && rfi_tval_as_int(key, &i)) {
    return item_at(r, object, i);
  }
  if (key->kind != RFI_T_TEXT) return rfi_tval_undefined("item");
  const rfi_tval v = python_attribute(r, object, key->as.text);
  return v.kind == RFI_T_ABSENT ? rfi_tval_undefined(rfi_text_string(r, key->as.text)) : v;
}

rfi_tval rfi_tval_attribute(rfi_render *r, const rfi_tval *object, const rfi_text *name) {
  if (!rfi_render_step(r, 1)) return rfi_tval_none();
  if (object->kind == RFI_T_UNDEFINED) return fail_undefined(r, object);
  const rfi_tval v = python_attribute(r, object, name);
  if (v.kind != RFI_T_ABSENT) return v;
  if (object->kind == RFI_T_DICT) {
    const rfi_tval key = {.kind = RFI_T_TEXT, .as.text = (rfi_text *)name};
    const rfi_tval *member = rfi_tdict_find(r, object->as.dict, &key);
    if (member) return *member;
  }
  return rfi_tval_undefined(name->data); /* names of attributes end in NUL */
}

/* Python's slice.indices. */
static bool slice_bounds(rfi_render *r, const rfi_tval bounds[3], int64_t n, int64_t *start, int64_t *stop,
                         int64_t *step) {
  int64_t v[3] = {0, 0, 1};
  bool given[3];
  for (int i = 0; i < 3; i++) {
    given[i] = bounds[i].kind != RFI_T_NONE && bounds[i].kind != RFI_T_ABSENT;
    if (given[i] && !rfi_tval_as_int(&bounds[i], &v[i])) {
      rfi_render_fail(r, "a slice needs integers, not %s", rfi_tval_type(&bounds[i]));
      return false;
    }
  }
  if (v[2] == 0 || v[2] == INT64_MIN) {
    rfi_render_fail(r, "the step of a slice is 0 or too large");
    return false;
  }
  const int64_t low = v[2] < 0 ? -1 : 0, high = v[2] < 0 ? n - 1 : n;
  for (int i = 0; i < 2; i++) {
    if (!given[i]) v[i] = (i == 0) == (v[2] > 0) ? low : high;
    else if (v[i] < 0) v[i] = v[i] + n < low ? low : v[i] + n;
    else if (v[i] > high) v[i] = high;
  }
  *start = v[0];
  *stop = v[1];
  *step = v[2];
  return true;
}

rfi_tval rfi_tval_slice(rfi_render *r, const rfi_tval *object, const rfi_tval bounds[3]) {
  int64_t start, stop, step;
  if (r->status != RFR_OK) return rfi_tval_none();
  if (object->kind == RFI_T_UNDEFINED) return fail_undefined(r, object);
  if (!is_sequence(object) && object->kind != RFI_T_RANGE) {
    rfi_render_fail(r, "%s cannot be sliced", rfi_tval_type(object));
    return rfi_tval_none();
  }
  if (!slice_bounds(r, bounds, rfi_tval_length(r, object), &start, &stop, &step)) return rfi_tval_none();
  if (object->kind == RFI_T_TEXT && step == 1) {
    rfi_text *s = object->as.text;
    const size_t begin = rfi_text_offset(r, s, start);
    const rfi_tval part = rfi_text_slice(r, s, begin, stop > start ? rfi_text_offset(r, s, stop) : begin);
    return s->safe ? rfi_text_mark_safe(r, part.as.text) : part;
  }
  rfi_tlist *list = rfi_tlist_new(r);
  const rfi_tlist *items = rfi_tval_items(r, object);
  if (object->kind == RFI_T_LIST && list) list->foreign = items->foreign;
  for (int64_t i = start; items && (step > 0 ? i < stop : i > stop) && rfi_render_step(r, 1);) {
    rfi_tlist_add(r, list, items->items[i]);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  if (object->kind != RFI_T_TEXT) return rfi_tlist_value(list, object->kind == RFI_T_TUPLE ? RFI_T_TUPLE : RFI_T_LIST);
  rfi_tbuilder b = {.r = r};
  for (int64_t i = 0; list && i < list->n; i++) rfi_tval_print(&b, &list->items[i]);
  return rfi_tbuilder_finish(&b);
}

/* One conversion of a format; `spec` is "%", flags, width, precision and the letter. */
static void add_conversion(rfi_tbuilder *b, const char *flags, int64_t width, int64_t precision, char letter,
                           const rfi_tval *v) {
  rfi_render *r = b->r;
  rfi_tbuilder part = {.r = r};
  const bool left = strchr(flags, '-') != NULL;
  int64_t i;
  if (letter == 's' || letter == 'r') {
    if (letter == 's') rfi_tval_print(&part, v);
    else rfi_tval_repr(&part, v);
  } else if (letter == 'd' || letter == 'i' || letter == 'u') {
    if (v->kind == RFI_T_FLOAT && fabs(v->as.f) < 9e18) i = (int64_t)v->as.f;
    else if (!rfi_tval_as_int(v, &i)) {
      rfi_render_fail(r, "%%%c needs a number, not %s", letter, rfi_tval_type(v));
      return;
    }
    char text[32];
    rfi_snprintf(text, sizeof text, strchr(flags, '+') ? "%+lld" : strchr(flags, ' ') ? "% lld" : "%lld", (long long)i);
    rfi_tbuilder_add(&part, text, strlen(text), 0);
  } else if (letter == 'f' || letter == 'F') {
    if (!rfi_tval_is_number(v) || precision > 100) {
      rfi_render_fail(r, "%%f needs a number, not %s", rfi_tval_type(v));
      return;
    }
    char text[512];
    rfi_snprintf(text, sizeof text, strchr(flags, '+') ? "%+.*f" : "%.*f", precision < 0 ? 6 : (int)precision,
                 rfi_tval_as_float(v));
    rfi_tbuilder_add(&part, text, strlen(text), 0);
  } else {
    rfi_render_fail(r, "the conversion %%%c of a format is not supported", letter >= 32 && letter < 127 ? letter : '?');
    return;
  }
  rfi_text *s = rfi_tbuilder_finish(&part).as.text;
  if (precision >= 0 && (letter == 's' || letter == 'r') && precision < rfi_text_chars(r, s))
    s = rfi_text_slice(r, s, 0, rfi_text_offset(r, s, precision)).as.text;
  const int64_t missing = width - rfi_text_chars(r, s);
  const bool zeros = strchr(flags, '0') && !left && letter != 's' && letter != 'r';
  size_t sign = zeros && s->n > 0 && strchr("+- ", s->data[0]) != NULL;
  if (zeros) rfi_tbuilder_add_text(b, s, 0, sign);
  else sign = 0;
  for (i = 0; i < missing && !left && rfi_render_step(r, 1); i++) rfi_tbuilder_add(b, zeros ? "0" : " ", 1, 0);
  rfi_tbuilder_add_text(b, s, sign, s->n);
  for (i = 0; i < missing && left && rfi_render_step(r, 1); i++) rfi_tbuilder_add(b, " ", 1, 0);
}

rfi_tval rfi_text_format(rfi_render *r, const rfi_text *format, const rfi_tval *value) {
  rfi_tbuilder b = {.r = r};
  const bool many = value->kind == RFI_T_TUPLE;
  int64_t used = 0;
  const int64_t n = many ? value->as.list->n : 1;
  uint32_t i = 0;
  while (i < format->n && rfi_render_step(r, 1)) {
    uint32_t end = i;
    while (end < format->n && format->data[end] != '%') end++;
    rfi_tbuilder_add_text(&b, format, i, end);
    if ((i = end) == format->n) break;
    i++;
    char flags[8] = "";
    int64_t width = 0, precision = -1;
    const rfi_tval *v = NULL;
    if (i < format->n && format->data[i] == '(' && value->kind == RFI_T_DICT) {
      const char *close = memchr(format->data + i, ')', format->n - i);
      if (!close) break;
      const rfi_tval key = rfi_text_slice(r, format, i + 1, (size_t)(close - format->data));
      if (!(v = rfi_tdict_find(r, value->as.dict, &key)))
        return rfi_render_fail(r, "the dictionary of a format lacks a key"), rfi_tval_none();
      i = (uint32_t)(close - format->data) + 1;
      used = n;
    }
    for (size_t k = 0; i < format->n && k < 7 && memchr("-+ 0#", format->data[i], 5); i++) flags[k++] = format->data[i];
    for (; i < format->n && format->data[i] >= '0' && format->data[i] <= '9' && width < 100000; i++)
      width = 10 * width + format->data[i] - '0';
    if (i < format->n && format->data[i] == '.')
      for (precision = 0, i++; i < format->n && format->data[i] >= '0' && format->data[i] <= '9' && precision < 1000;
           i++)
        precision = 10 * precision + format->data[i] - '0';
    if (i >= format->n) return rfi_render_fail(r, "the format ends inside a conversion"), rfi_tval_none();
    const char letter = format->data[i++];
    if (letter == '%') {
      rfi_tbuilder_add(&b, "%", 1, 0);
      continue;
    }
    if (!v) {
      if (used >= n) return rfi_render_fail(r, "a format has more conversions than arguments"), rfi_tval_none();
      v = many ? &value->as.list->items[used] : value;
      used++;
    }
    add_conversion(&b, flags, width, precision, letter, v);
  }
  if (used < n && value->kind != RFI_T_DICT && value->kind != RFI_T_LIST && value->kind != RFI_T_RANGE &&
      value->kind != RFI_T_UNDEFINED)
    return rfi_render_fail(r, "a format has fewer conversions than arguments"), rfi_tval_none();
  return rfi_tbuilder_finish(&b);
}
