# SPDX-License-Identifier: Apache-2.0
"""The ctypes structs and functions against the C headers."""
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import refrain
from refrain import _abi

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"


def fields(struct):
    return [name for name, *_ in struct._fields_]


def program():
    """C code that prints size and offsets of every struct; it does not compile if a field is missing."""
    lines = ["#include <stddef.h>", "#include <stdio.h>"]
    lines += [f'#include "refrain/{h.name}"' for h in sorted((INCLUDE / "refrain").glob("*.h"))]
    lines += ["int main(void) {"]
    for s in _abi.STRUCTS:
        name = s.__name__
        zeros = ", ".join("{0}" if issubclass(t, (ctypes.Structure, ctypes.Array)) else "0" for _, t in s._fields_)
        lines.append(f"  {name} all_{name} = {{{zeros}}}; (void)all_{name};")
        lines.append(f'  printf("{name} %zu", sizeof({name}));')
        lines += [f'  printf(" %zu", offsetof({name}, {f}));' for f in fields(s)]
        lines.append('  puts("");')
    return "\n".join(lines + ["  return 0;", "}", ""])


class Structs(unittest.TestCase):
    def test_layout(self):
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if not compiler:
            self.skipTest("there is no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "layout.c")
            source.write_text(program())
            subprocess.run([compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", source, "-o",
                            f"{folder}/layout"], check=True)
            printed = subprocess.run([f"{folder}/layout"], check=True, capture_output=True, text=True).stdout
        rows = [line.split() for line in printed.splitlines()]
        self.assertEqual(len(rows), len(_abi.STRUCTS))
        for (name, size, *offsets), struct in zip(rows, _abi.STRUCTS):
            self.assertEqual(name, struct.__name__)
            self.assertEqual(int(size), ctypes.sizeof(struct), name)
            self.assertEqual([int(o) for o in offsets], [getattr(struct, f).offset for f in fields(struct)], name)

    def test_types(self):
        """A field's C type: kind and size come from the layout; here signed against unsigned and real."""
        kinds = {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
                 "double": ctypes.c_double, "int": ctypes.c_int, "int32_t": ctypes.c_int32}
        text = "\n".join(h.read_text() for h in (INCLUDE / "refrain").glob("*.h"))
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        checked = 0
        for struct in _abi.STRUCTS:
            body = re.search(r"typedef struct %s \{(.*?)\n?\} %s;" % (struct.__name__, struct.__name__), text, re.S)
            self.assertTrue(body, struct.__name__)
            for kind, names in re.findall(r"\b(\w+) ([a-z_0-9, ]+);", body.group(1)):
                for name in names.split(", "):
                    if kind in kinds:
                        self.assertIs(dict(struct._fields_)[name], kinds[kind], f"{struct.__name__}.{name}")
                        checked += 1
        self.assertGreater(checked, 150)


class Functions(unittest.TestCase):
    def test_arguments(self):
        """Every declared function has as many arguments as in its header, and an rfr_status exactly where it says."""
        text = "\n".join(h.read_text() for h in (INCLUDE / "refrain").glob("*.h"))
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        found = {}
        for result, name, arguments in re.findall(r"RFR_API ([\w ]+[ *]+)(rfr_\w+)\(([^;]*)\);", text):
            count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
            found[name] = (count, result.strip() == "rfr_status", result.strip() == "void")
        for name, (result, *arguments) in _abi.FUNCTIONS.items():
            self.assertIn(name, found)
            self.assertEqual(found[name], (len(arguments), result is _abi.Status, result is None), name)

    def test_version(self):
        project = (INCLUDE.parent / "CMakeLists.txt").read_text()
        version = re.search(r"project\(refrain VERSION (\S+)", project).group(1)
        self.assertEqual(refrain.__version__, version)
        self.assertTrue(version.startswith(_abi.VERSION + "."))

    def test_numbers(self):
        """Enumerators that the package has by number, in the order of their tables."""
        from refrain import graphs, hooks, ranks, sweep, text
        header = {h.name: h.read_text() for h in (INCLUDE / "refrain").glob("*.h")}
        roles = re.findall(r"X\(RFR_ROLE_\w+, +\"(\w+)\"\)", header["trace.h"])
        self.assertEqual([roles[i] for i in graphs._ROLES.values()], list(graphs._ROLES))
        phases = re.findall(r"X\(RFR_PHASE_\w+, +\"(\w+)\"\)", header["trace.h"])
        self.assertEqual((phases, list(graphs._PHASES.values())), (list(graphs._PHASES), list(range(len(phases)))))
        points = re.findall(r"^  RFR_HOOK_(\w+),?$", header["hooks.h"], re.M)
        self.assertEqual([p.lower() for p in points], hooks._POINTS)
        self.assertIn(f"RFR_NCCL_ID_BYTES = {ranks._NCCL_ID_BYTES} ", header["dist.h"])
        actions = re.findall(r"^  X\((\w+), +[01], ", header["schedule.h"], re.M)
        self.assertEqual(actions, graphs._ACTIONS)
        self.assertEqual(len(re.findall(r"^  X\(RFR_RECIPE_\w+, ", re.search(
            r"#define RFR_RECIPES\(X\).*?\ntypedef", header["recipe.h"], re.S).group(0), re.M)), graphs._RECIPES)
        self.assertIn("RFR_RECOMPUTE_KEEP", header["program.h"])
        order = re.findall(r"RFR_RECOMPUTE_(KEEP|ALL|AUTO),", header["program.h"])
        self.assertEqual([o.lower() for o in order], list(graphs._RECOMPUTE))
        scores = re.search(r"enum rfr_moe_score \{(.*?)\}", header["ops.h"]).group(1)
        self.assertEqual([s.strip()[8:].lower() for s in scores.split(",")], list(graphs._SCORES))
        for names, prefix, file in ((text._FORMATS, "RFR_TOKENS_", "text.h"), (text._PATTERNS, "RFR_WORDS_", "text.h"),
                                    (sweep._STATES, "RFR_SWEEP_", "sweep.h")):
            found = re.findall(rf"^  {prefix}(\w+),?(?: +/\*.*)?$", header[file], re.M)
            self.assertEqual([n.lower() for n in found], names)


if __name__ == "__main__":
    unittest.main()
