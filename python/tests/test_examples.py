# SPDX-License-Identifier: Apache-2.0
"""The examples, and the commands of docs/python.md, which shows their code."""
import pathlib
import re
import subprocess
import sys
import unittest

from support import ROOT, FolderTest


def run(*arguments, **options):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **options)


class Examples(FolderTest):
    def test_finetune(self):
        done = run(ROOT / "examples" / "finetune.py", self.model, self.rows, self.folder / "run", self.folder / "peft")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("held-out loss", done.stdout)
        self.assertTrue((self.folder / "peft" / "adapter_model.safetensors").is_file())
        again = run(ROOT / "examples" / "finetune.py", self.model, self.rows, self.folder / "run", self.folder / "x")
        self.assertEqual(again.returncode, 1)
        self.assertIn("resume", again.stderr)
        self.assertNotIn("Traceback", again.stderr)

    def test_torch_layer(self):
        try:
            import torch  # noqa: F401
        except ImportError:
            self.skipTest("PyTorch is not installed")
        done = run(ROOT / "examples" / "torch_layer.py")
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class Page(FolderTest):
    def test_commands(self):
        """Each block of docs/python.md that is a Python session runs and prints what the page says."""
        page = (ROOT / "docs" / "python.md").read_text()
        sessions = re.findall(r"```\n(\$ python3 -c '(.*?)'\n(.*?))```", page, re.S)
        self.assertGreaterEqual(len(sessions), 4)
        for name in ("model", "rows.jsonl"):
            (self.folder / name).symlink_to(self.model.parent / name)
        for _, code, printed in sessions:
            done = run("-c", code, cwd=self.folder)
            self.assertEqual(done.stdout + done.stderr, printed)


class Doctests(unittest.TestCase):
    def test_public_names_have_docstrings(self):
        import refrain
        for name in refrain.__all__:
            value = getattr(refrain, name)
            if isinstance(value, type) or callable(value):
                self.assertTrue(value.__doc__, name)


if __name__ == "__main__":
    unittest.main()
