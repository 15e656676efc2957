# SPDX-License-Identifier: Apache-2.0
"""Writes src/text/unicode_categories.def, the general category of every code point.

usage: make_unicode_tables.py OUT

The categories are those of the Oniguruma library inside the Python package tokenizers, which is what tokenizer.json
files are written for; the table lists ranges, so that the library needs no Unicode data of the system.
"""
import sys

from tokenizers import Regex, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()


def members(pattern):
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, points))):
        yield from points[begin:end]


def main():
    category = [len(CATEGORIES)] * 0x110000
    for index, name in enumerate(CATEGORIES):
        for point in members(r"\p{%s}" % name):
            category[point] = index
    rows = []
    for point in range(0x110000):
        if point == 0 or category[point] != category[point - 1]:
            rows.append("0x%X" % (point << 5 | category[point]))
    with open(sys.argv[1], "w", encoding="ascii") as out:
        out.write("/* SPDX-License-Identifier: Apache-2.0\n *\n"
                  " * General categories of Unicode 16, made by tools/make_unicode_tables.py: each entry begins a\n"
                  " * range, the first code point << 5 | category; categories count in the order of rfi_category.\n */\n")
        line = ""
        for row in rows:
            if len(line) + len(row) + 2 > 120:
                out.write(line.rstrip() + "\n")
                line = ""
            line += row + ", "
        out.write(line.rstrip() + "\n")
    print(len(rows), "ranges")


main()
