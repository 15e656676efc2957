# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a model and rows made on the spot, folders, and a check that Python and torch are there."""
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class FolderTest(unittest.TestCase):
    """A test with a folder of its own and a tiny model in it."""

    @classmethod
    def setUpClass(cls):
        cls._tiny = tempfile.TemporaryDirectory()
        subprocess.run([ROOT / "tools" / "tiny-model", cls._tiny.name], check=True)
        cls.model = pathlib.Path(cls._tiny.name, "model")
        cls.rows = pathlib.Path(cls._tiny.name, "rows.jsonl")

    @classmethod
    def tearDownClass(cls):
        cls._tiny.cleanup()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


SMALL = {
    "refrain": 1,
    "model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "max_position_embeddings": 64},
    "data": {"train": [], "sequence": 16},
    "batch": {"tokens": 64, "microbatch": 2},
    "optimizer": {"lr": 1e-2},
    "run": {"steps": 6, "evaluate_every": 0, "checkpoint_every": 3},
}
