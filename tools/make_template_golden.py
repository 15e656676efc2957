#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/template.json: templates and what transformers' Jinja environment renders, or null if it refuses.
Needs the packages transformers and jinja2. The templates are ours.
"""
import datetime, json, os, sys, warnings
warnings.simplefilter("ignore")
from transformers.utils import chat_template_utils as oracle
class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime(2025, 11, 24, 16, 0, 0)
oracle.datetime = FixedDate
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "  Hällo\nWörld \t", "name": "Ann"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None, True, "é\"\\\u0001"]}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "日本 😀", "reasoning": "why", "empty": None},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "xs": [3, 1, 2], "d": {"b": 1, "A": 2, "k": None}, "s": "aBc dEf abc", "n": 5,
             "h": 0.1, "words": ["b", "a", "B", "A"]}
EXPRESSIONS = r"""
1 + 2 * 3 ** 2 // 4 % 5 - -6
2 ** 3 ** 2
-2 ** 2
7 / 2, 7 // 2, -7 // 2, 7 % -3, -7 % 3, 7.5 // 2, -7.5 % 2
1e16, 1e15, 123456.789, 1e-5, 0.0001, 1e22, 1.0, 100000000000000000000.0, 5e-324
10 ** 18, 2 ** 0.5
0x1F + 0b11 + 0o17 + 1_000
true + true, not true, none, 1 == true, 1.0 == 1, 'a' < 'b', [1, 2] < [1, 3], (1,) == (1,), {} == {}
1 < 2 < 3, 1 < 2 > 3, 1 in [1], 'b' in s, 'z' not in s, 'b' in d, 3 in xs
s ~ n ~ h ~ none ~ true ~ xs ~ d
'a' 'b' "c", 'x\ty\n\'\"\\ \x41 \u00e9 \U0001F600 \101 \q'
s[0], s[-1], s[2:5], s[::-1], s[-3:], s[:-3], s[::2], s[10:1:-2], xs[1:], xs[-2:], xs[::-1], xs[5], s[100]
messages[1].content[4], messages[4].content[0], messages[4].content[-1], messages[4].content[::-1], messages[4].content|length
d.k, d["b"], d.missing, d['missing'], d.get('A'), d.get('q'), d.get('q', 7), d|length
d.items()|list, d.keys()|list, d.values()|list, d.keys(), d.values(), d.items(), d|items|list
missing, missing|default('x'), none|default('x'), ''|default('x'), ''|default('x', true), missing is defined, missing|length
missing.x
missing + 1
missing == other, missing != 1, missing in xs, missing ~ 'a', not missing, missing or 'b', missing|list, missing|join
s|upper, s|lower, s|title, s|capitalize, s|trim, s|length, s|replace('a', 'x'), s|replace('a', 'x', 1), s|replace('', '.')
'ß ǆ ﬁ İ ΑΣ Σ'|upper, 'ß ǆ ﬁ İ ΑΣ Σ'|lower, 'ß ǆ ﬁ'|title, 'ǆab'|capitalize, 'ﬁx'.title(), 'aB'.swapcase()
'hello-world (foo) [bar] <baz> {q} it\'s'|title, 'hello-world it\'s'.title()
messages[1].content|trim, messages[1].content.strip(), messages[1].content.lstrip(), messages[1].content.rstrip(), 'xxaxx'.strip('x'), 'xyaxy'|trim('yx')
'a,b,,c'.split(','), ' a  b '.split(), 'a b c d'.split(' ', 2), 'a b c d'.rsplit(' ', 1), ' a b  c '.split(none, 1), ' a b  c '.rsplit(none, 1), 'a'.split('--')
'a--b--c'.partition('--'), 'a--b--c'.rpartition('--'), 'a'.partition('-'), 'a'.rpartition('-'), 'a\nb\r\nc\x0bd\u2028e'.splitlines(), 'a\nb\n'.splitlines(true)
s.startswith('aB'), s.startswith(('x', 'a')), s.endswith('c'), s.startswith('c', 2), s.endswith('B', 0, 2), s.find('c'), s.find('z'), s.rfind('c'), s.index('c'), s.count('c'), s.find('c', 3), '日本'.find('本'), s.rindex('a')
s.index('zz')
'{}-{}'.format(1, 'b'), '{1}{0}{x}'.format(1, 2, x=3), '%s|%5d|%-5s|%05.1f|%r|%%|%+d' % ('a', 42, 'b', 3.14159, 'c', 7), '%s' % xs, '%d' % 3.9, '%(a)s' % {'a': 1}, 'x'|format, '%s-%s'|format(1, 2)
'12'.isdigit(), 'a1'.isalnum(), 'ab'.isalpha(), ' '.isspace(), 'ab'.islower(), 'AB'.isupper(), ''.isdigit(), '²'.isdigit(), '½'.isnumeric(), 'aé'.isascii()
'7'.zfill(3), '-7'.zfill(4), 'a'.center(6, '*'), 'ab'.center(7), 'a'.ljust(3) ~ '|', 'a'.rjust(3), 'prefix-x'.removeprefix('prefix-'), 'x.py'.removesuffix('.py'), ', '.join(['a', 'b']), 'ab'|center(6)
xs|sort, xs|sort(reverse=true), words|sort, words|sort(case_sensitive=true), words|unique|list, words|unique(true)|list, messages|sort(attribute='role')|map(attribute='role')|list, d|dictsort, d|dictsort(true), {'a': 2, 'b': 1}|dictsort(by='value'), {'a': 2, 'b': 1}|dictsort(reverse=true)
xs|first, xs|last, []|first, xs|min, xs|max, xs|sum, xs|sum(start=10), [1.5, 2]|sum, words|max, words|min(true), []|max, xs|reverse|list, s|reverse, xs|join('-'), xs|join, messages|join(',', attribute='role'), 'abc'|list, 'abc'|join('.'), xs|batch(2)|list, xs|batch(2, 0)|list, xs|slice(2)|list, xs|slice(2, 'f')|list
messages|map(attribute='role')|list, messages|map(attribute='name', default='?')|list, words|map('upper')|join, messages|map(attribute='tool_calls.0.function.name', default='-')|list, xs|map('string')|list
messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list, messages|selectattr('name')|list|length, messages|rejectattr('name', 'defined')|list|length, xs|select('odd')|list, xs|reject('odd')|list, xs|select('gt', 1)|list, [0, 1, '']|select|list, messages|selectattr('role', 'in', ['tool', 'user'])|list|length
'42'|int, '4.9'|int, 'x'|int, 'x'|int(7), 4.9|int, ' 12 '|int, '1_000'|int, none|int, true|int, '1e3'|int, '3.5'|float, 'x'|float, '1e400'|float, -3|abs, -3.5|abs, true|abs
2.5|round, 3.5|round, 2.675|round(2), 2.5|round(method='ceil'), 2.567|round(2, 'floor'), 5|round, 1234.5|round(-2)
xs|string, none|string, xs|count, 'a b-c d_e'|wordcount, '<a href="x">\'&'|e, '<b>'|escape, ('<b>'|safe) + '<i>', '<i>' + ('<b>'|safe), ('<b>'|safe) ~ '<i>', ('<b>'|safe)|upper + '<i>'
s|indent, 'a\n\nb'|indent(2), 'a\n\nb'|indent(2, true), 'a\n\nb'|indent('> ', true, true), 'a\n'|indent ~ '|'
messages[2].tool_calls|tojson, messages[2].tool_calls|tojson(indent=2), messages[4].content|tojson, messages[4].content|tojson(ensure_ascii=true), d|tojson(sort_keys=true), d|tojson(separators=(',', ':')), [1e22, 0.1, 1.0, -0.0, true, none]|tojson, (1, 'a')|tojson, {1: 2, none: 3, true: 4, 1.5: 5}|tojson, '/</script>\x7f\u2028'|tojson, []|tojson(indent=1), {}|tojson(indent=1), [[1]]|tojson(indent='\t'), xs|tojson(indent=0)
missing|tojson
range(3)|tojson
xs|nofilter
xs is nothing
1 is odd, 2 is even, 9 is divisibleby 3, 9 is divisibleby(2), 'a' is string, 1 is number, true is number, 1.5 is float, 1 is integer, true is integer, true is boolean, none is none, {} is mapping, [] is sequence, 'a' is sequence, {} is iterable, 1 is iterable, 1 is sequence, missing is sequence, missing is iterable, missing is mapping, missing is none
true is true, 1 is true, false is false, 'a' is eq 'a', 1 is ne 2, 1 is lt 2, 2 is ge(2), 'a' is in 'abc', 1 is in [1], none is sameas none, 'a' is lower, 'A' is upper, xs is defined and xs, xs is not defined, range is callable, s is callable, 'upper' is filter, 'zz' is filter
1 if true else 2, 1 if false, (1 if false) is defined, 'a' if n > 3 else 'b' if n > 1 else 'c', n > 3 and 'y' or 'z', 0 or '', 0 and missing.x, not 1 == 2
range(3), range(1, 7, 2)|list, range(5, 0, -2)|list, range(3)[1], range(3)|length, range(2) == range(2), 2 in range(3), range(0)|list
range(1000000)
[1, 'a', "it's", 'q"', none, 1.5, [2], (3,), {}, 'é\n\x00\u200b\\']
{'a': 1, 'b': {'c': [1]}}, {1: 'x'}, (1, 2), (), (1,), [] , {'a': 1}.a, {'x': 1, 'x': 2}
dict(a=1, b=2), dict({'a': 1}, c=3), dict([('k', 'v')]), namespace(a=1).a, namespace({'b': 2}).b, namespace().zz
xs.append(4)
d.update({'a': 1})
d.pop('a')
{}.setdefault('a', 1)
namespace(_x=1)
xs.index(2), xs.count(1), xs.copy(), d.copy(), (1, 2).index(2)
xs[none]
xs[missing]
n[1:]
n.x, none.x, n['x'], s.nothing, xs.nothing
n()
s.upper(1)
'a' + 1
'a' * 3, [0] * 2, 2 * 'ab', 'a' * -1, (1,) + (2,), [1] + [2]
[1] + (2,)
'b' < 1
9223372036854775807, -9223372036854775807
strftime_now('%d %b %Y'), strftime_now('%Y-%m-%d %H:%M:%S %A %B %j'), strftime_now('')
raise_exception('no')
raise_exception('no ' ~ n)
''.__class__, ''.__class__.__mro__
messages|map('nofilter')|list
s|replace('a')
s|upper(1)
'x'|attr('upper')(), d|attr('k')|default('u')
messages[0].role.upper().lower().title()[:3], (s.split(' ')|last).upper()
xs|sort(attribute='zz')
'%d' % 'x'
'%s' % (1, 2)
1 // 0
1 % 0
s[0:1.5]
'abc'[true]
"nested 'quotes' " ~ 'and "more"'
messages[3]['content']|int + 1
messages[4].reasoning_content, messages[4].thinking, messages[4].reasoning, messages[4].empty is defined
cycler('a', 'b').next(), joiner('|')() ~ 'x'
""".strip("\n").split("\n")
TEMPLATES = [
    "  {% if true %}\n  a\n  {% endif %}\nb\n",
    "x {%- if true -%}  y  {%- endif -%} z",
    "x\n   {%+ if true %}y{%+ endif +%}\nz\n",
    "a {{- ' b ' -}} c {{ 'd' }}\n\n",
    "{# c #}\nx {#- c -#} y {# c +#}\nz",
    "{% raw %}{{ x }}{% if %}{% endraw %} {%- raw -%} a {%- endraw -%} b",
    "a\r\nb\rc{{ 'x\r\ny' }}\r\n",
    "{% for x in xs %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }}{{ loop.depth }}|{% endfor %}",
    "{% for x in [] %}a{% else %}b{% endfor %}{% for x in xs %}{% else %}c{% endfor %}{% for x in missing %}{% else %}d{% endfor %}",
    "{% for x in xs if x > 1 %}{{ loop.index }}{{ loop.length }}{{ x }}{{ loop.last }}{% endfor %}",
    "{% set ns = namespace(stop=false) %}{% for x in [1, 2, 3, 4] if not ns.stop %}{{ x }}{% if x == 2 %}{% set ns.stop = true %}{% endif %}{% endfor %}",
    "{% set ns = namespace(stop=false) %}{% for x in [1, 2, 3, 4] if not ns.stop %}{{ x }}{{ loop.last }}{% if x == 2 %}{% set ns.stop = true %}{% endif %}{% endfor %}",
    "{% for x in xs %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for x in xs %}{% for y in xs %}{% if y == 1 %}{% break %}{% endif %}{{ x }}{{ y }}{{ loop.index }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in xs %}{{ x }}{% set x = i %}{{ x }}{% endfor %}{{ x }}",
    "{% set a, b = 1, 2 %}{% set (c, d) = (3, [4]) %}{{ a }}{{ b }}{{ c }}{{ d }}{% for k, (v, w) in [(1, (2, 3))] %}{{ k }}{{ v }}{{ w }}{% endfor %}",
    "{% set a, b = [1] %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for c in 'aé' %}{{ c }}.{% endfor %}",
    "{% set t %} a {{ n }} {% endset %}[{{ t }}]{% set u | upper | trim %} b {% endset %}[{{ u }}]",
    "{% set d.x = 1 %}",
    "{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c=4) }}{{ m(b=5, a=6) }}{{ m() }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, k=4) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(q=2) }}",
    "{% macro m(n) %}{{ n }}{% if n > 0 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(4) }}{{ m(2)|length }}",
    "{% macro m() %}<{{ caller('x') }}>{% endmacro %}{% call(p) m() %}[{{ p }}]{% endcall %}{% macro q() %}{{ caller is defined }}{% endmacro %}{{ q() }}",
    "{% set x = 1 %}{% macro m() %}{{ x }}{{ n }}{% set x = 5 %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}{{ x }}",
    "{% macro m(a, b) %}{{ a }}-{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{'a': 1, 'b': 2}) }}{{ m(1, *[2]) }}",
    "{% filter upper %}a{{ s }}{% endfilter %}{% filter trim | indent(2, true) %} a\nb {% endfilter %}",
    "{% with a = 1, b = n %}{{ a }}{{ b }}{% set a = 3 %}{{ a }}{% endwith %}{{ a }}",
    "{% if n > 9 %}a{% elif n > 4 %}b{% else %}c{% endif %}{% if missing %}d{% endif %}{% if not missing.x is defined %}e{% endif %}",
    "{% if n == 5 %}{% set z = 1 %}{% else %}{% set z = 2 %}{% endif %}{{ z }}{% print n, s %}",
    "{% for m in messages %}{% generation %}{{ m.role }}{% set q = 1 %}{% endgeneration %}{{ q }} {% endfor %}",
    "{% set ns = namespace(a=1) %}{% for x in xs %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}{% set ns.b = 'n' %}{{ ns.b }}",
    "{% set g = xs|select('odd') %}{% for x in g %}{{ x }}{% endfor %}-{% for x in g %}{{ x }}{% endfor %}{{ 'y' if g else 'n' }}",
    "{{ (xs|select('odd'))|length }}",
    "{{ {'a': {'b': 1}}}}",
    "{{ '}}' }}{{ '%}' }}{# {{ #}{{-1}}",
    "{{ m.x }",
    "{% if %}{% endif %}",
    "{% for x in %}{% endfor %}",
    "{% for x in xs %}",
    "{% endfor %}",
    "{% unknown %}",
    "{{ 1 + }}",
    "{{ (1 }}",
    "{{ 'abc }}",
    "{% set 1 = 2 %}",
    "{{ f(a=1, 2) }}",
    "{% break %}",
    "{# open",
    "{% raw %}",
    "{{ a b }}",
    "{{ a is }}",
    "{{ \u00a0'x' }}\u2003{%- if true %} y{% endif %}",
    "{% for x in xs %}{{ n }}{% endfor %}{% set n = 1 %}{{ n }}",
    "{% filter upper %}{{ s }}{% endfilter %}{% if n %}{% set s = 'z' %}{% endif %}{{ s }}",
    "{% macro m() %}{{ s }}{{ n }}{% endmacro %}{{ m() }}{% set s = 'z' %}{{ m() }}",
    "{% for x in xs %}{% for y in xs %}{{ h }}{{ n }}{% endfor %}{% set h = 1 %}{% if x %}{% set n = 2 %}{% endif %}{{ n }}{% endfor %}{{ h }}",
    "{% set messages = messages[1:] %}{% for m in messages %}{{ m.role }}{% endfor %}",
    "{%- set ns = namespace(found=false) -%}{%- for m in messages[::-1] -%}{%- if not ns.found and m.role == 'user' -%}{%- set ns.found = true -%}"
    "{{ loop.index0 }}{{ (messages|length - 1) - loop.index0 }}{%- endif -%}{%- endfor -%}",
    "{{ bos_token }}{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>\n' + m.content|trim + eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
]
def render(template):
    chat = [{k: v for k, v in m.items() if v is not None} for m in MESSAGES]
    try:
        return oracle.render_jinja_template(conversations=[chat], chat_template=template, **VARIABLES)[0][0]
    except Exception:
        return None
def main():
    rows = []
    for e in EXPRESSIONS: TEMPLATES.append("{{ (" + e + ") }}" if ", " in e else "{{ " + e + " }}")
    for t in TEMPLATES:
        text = render(t)
        assert text is None or " at 0x" not in text, t
        rows.append([t, text])
    out = os.path.join(os.path.dirname(__file__), "..", "tests", "golden", "template.json")
    with open(out, "w", encoding="utf-8") as f:
        f.write(json.dumps({"messages": MESSAGES, "variables": VARIABLES}, ensure_ascii=False)[:-1] + ', "rows": [\n')
        f.write(",\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n]}\n")
    print(len(rows), "templates,", sum(t is None for _, t in rows), "refused")
main()
