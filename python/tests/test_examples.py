# SPDX-License-Identifier: Apache-2.0
"""The examples, whose code docs/python.md shows; tests/e2e/page_blocks runs the commands of the page."""
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


class Doctests(unittest.TestCase):
    def test_public_names_have_docstrings(self):
        import refrain
        for name in refrain.__all__:
            value = getattr(refrain, name)
            if isinstance(value, type) or callable(value):
                self.assertTrue(value.__doc__, name)


if __name__ == "__main__":
    unittest.main()
