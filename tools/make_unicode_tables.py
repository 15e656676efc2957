# SPDX-License-Identifier: Apache-2.0
"""Writes the Unicode tables of src/text.

usage: make_unicode_tables.py FOLDER

  unicode_categories.def  the general category of every code point
  unicode_scripts.def     ranges of the scripts that published patterns name
  unicode_crates.def      where the packages inside tokenizers differ from these categories, or from utf8proc

The source is the Python package tokenizers itself, because tokenizer.json files are written for it: patterns use the
Oniguruma library (Unicode 16), other components use Rust packages of older versions.
"""
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
SCRIPTS = ["Han", "Hiragana", "Katakana", "Hangul"]
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
# Code points with a decomposition that are newer than the unicodedata module may be.
NEW_DECOMPOSITIONS = {0x105C9, 0x105E4, 0xA7F1, *range(0x1E030, 0x1E06E), *range(0x1CCD6, 0x1CCFA),
                      *range(0x11383, 0x113C9), *range(0x16121, 0x16129), *range(0x16D68, 0x16D6B)}


def members(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return {c for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, POINTS))) for c in POINTS[begin:end]}


def removed(component):
    kept = set()
    for _, (begin, end) in component.pre_tokenize_str("".join(map(chr, POINTS))):
        kept.update(POINTS[begin:end])
    return set(POINTS) - kept


def vanishing(normalizer):
    return {c for c in POINTS if normalizer.normalize_str(chr(c)) == ""}


def ranges(points):
    out = []
    for c in sorted(points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def write(path, comment, rows):
    with open(path, "w", encoding="ascii") as out:
        out.write("/* SPDX-License-Identifier: Apache-2.0\n *\n * Made by tools/make_unicode_tables.py: %s\n */\n" % comment)
        line = ""
        for row in rows:
            if len(line) + len(row) + 2 > 120:
                out.write(line.rstrip() + "\n")
                line = ""
            line += row + ", "
        out.write(line.rstrip() + "\n")


def bert(**on):
    off = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    return normalizers.BertNormalizer(**{**off, **on})


def main():
    folder = sys.argv[1]
    category = [len(CATEGORIES)] * 0x110000
    for index, name in enumerate(CATEGORIES):
        for point in members(r"\p{%s}" % name):
            category[point] = index
    write(folder + "/unicode_categories.def",
          "general categories, Unicode 16. Each entry begins a range:\n * the first code point << 5 | category.",
          ["0x%X" % (c << 5 | category[c]) for c in range(0x110000) if c == 0 or category[c] != category[c - 1]])
    write(folder + "/unicode_scripts.def", "ranges of scripts, Unicode 16.",
          ['{"%s", 0x%X, 0x%X}' % (name, a, b) for name in SCRIPTS for a, b in ranges(members(r"\p{%s}" % name))])

    def of(*names):
        return {c for c in POINTS if category[c] < len(CATEGORIES) and CATEGORIES[category[c]] in names}

    marks, rows = of("Mn", "Mc", "Me"), []

    def add(kind, points, delta=0):
        rows.extend("{%s, 0x%X, 0x%X, %d}" % (kind, a, b, delta) for a, b in ranges(points))

    punctuation = removed(pre_tokenizers.Punctuation("removed"))
    add("NO_PUNCTUATION", of("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po") - punctuation)
    add("PUNCTUATION", {c for c in punctuation if c >= 0x80} - of("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"))
    accents = vanishing(normalizers.StripAccents())
    add("NO_MARK", marks - accents)
    add("MARK", accents - marks)
    # Of characters that NFD decomposes, none vanishes.
    spaced = {c for c in POINTS if bert(strip_accents=True).normalize_str(chr(c)) == ""}
    add("NO_BERT_MARK", of("Mn") - spaced)
    add("BERT_MARK", spaced - of("Mn"))
    cleaned = vanishing(bert(clean_text=True)) - {0xFFFD}
    add("NO_CONTROL", of("Cc", "Cf", "Co") - cleaned - {9, 10, 13})
    chinese = {c for c in POINTS if bert(handle_chinese_chars=True).normalize_str(chr(c)) == " %s " % chr(c)}
    add("CHINESE", chinese)
    nfkd = normalizers.NFKD()
    add("NO_DECOMPOSITION", {c for c in POINTS if nfkd.normalize_str(chr(c)) == chr(c) and (
        c in NEW_DECOMPOSITIONS or unicodedata.normalize("NFKD", chr(c)) != chr(c))})
    numbers = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "removed"), pre_tokenizers.Digits(True)])
    alone = {POINTS[a] for _, (a, b) in numbers.pre_tokenize_str("".join(chr(c) for c in POINTS)) if b == a + 1}
    add("NUMERIC", {c for c in alone if len(pre_tokenizers.Digits(True).pre_tokenize_str("a%sa" % chr(c))) == 3})
    lower = normalizers.Lowercase()
    deltas = {}
    for c in POINTS:
        new = lower.normalize_str(chr(c))
        if len(new) == 1 and new != chr(c) and unicodedata.category(chr(c)) == "Cn" or (
                len(new) == 1 and new != chr(c).lower() and c < 0xFFFFF):
            deltas.setdefault(ord(new) - c, set()).add(c)
    for delta, points in sorted(deltas.items()):
        add("LOWER", points, delta)
    write(folder + "/unicode_crates.def", "{kind, first, last, difference of the lower case}.", rows)


main()
