# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from texts, sweeps, reports and differences of runs."""
import json
import math
import os
import subprocess
import unittest

import refrain
from support import ROOT, SMALL, FolderTest

REFRAIN = os.path.join(os.environ.get("REFRAIN_BUILD", ROOT / "build" / "release"), "refrain")
TEXT = "the quick brown fox jumps over the lazy dog; the dog sleeps. Größe, 12345!\n" * 40


def config(**run):
    """A byte model with data in files."""
    return {**SMALL, "model": {**SMALL["model"], "vocab_size": 256},
            "data": {"root": ".", "train": ["*.txt"], "validation": ["held/*.txt"], "sequence": 16},
            "run": {**SMALL["run"], "log_every": 1, **run}}


class LabTest(FolderTest):
    def setUp(self):
        super().setUp()
        (self.folder / "held").mkdir()
        (self.folder / "a.txt").write_text(TEXT)
        (self.folder / "held" / "b.txt").write_text(TEXT[:600])

    def train(self, name, **options):
        with refrain.Trainer(config(), self.folder / name, config_folder=self.folder, **options) as run:
            run.train()
        return self.folder / name


class Tokenizers(LabTest):
    def test_train(self):
        out = self.folder / "tokenizer"
        counts = refrain.train_tokenizer(self.folder / "*.txt", out, vocab_size=300, special=["<end>", "<pad>"],
                                         chat_template="chatml", min_frequency=3)
        self.assertEqual((counts.vocab_size, counts.merges), (300, 300 - 256 - 2))
        self.assertEqual((counts.files, counts.bytes), (1, len(TEXT.encode())))
        self.assertGreaterEqual(counts.least, 3)
        with refrain.Tokenizer(out) as t, refrain.ChatTemplate(out) as chat:
            self.assertEqual((t.id("<end>"), t.id(b"<pad>"), t.id("none"), t.eos), (0, 1, None, 0))
            ids = t.encode(TEXT)
            self.assertEqual(t.decode(ids), TEXT)
            self.assertLess(len(ids), len(TEXT) / 2)
            self.assertIn("user", chat.render([{"role": "user", "content": "Hi"}]))
        # the files are those of the program, for any number of threads
        subprocess.run([REFRAIN, "tokenizer-train", self.folder / "*.txt", "--out", self.folder / "other", "--vocab",
                        "300", "--special", "<end>", "--special", "<pad>", "--template", "chatml", "--min-frequency",
                        "3", "--threads", "1", "--quiet"], check=True)
        for file in sorted(p.name for p in out.iterdir()):
            self.assertEqual((out / file).read_bytes(), (self.folder / "other" / file).read_bytes(), file)
        refrain.train_tokenizer(self.folder / "a.txt", self.folder / "cut.json", vocab_size=300, max_bytes=100,
                                pattern="qwen2", threads=2)
        self.assertEqual([m["type"] for m in json.loads((self.folder / "cut.json").read_text())["pre_tokenizer"]
                          ["pretokenizers"]][0], "Split")

    def test_refusals(self):
        def train(**options):
            refrain.train_tokenizer(options.pop("files", self.folder / "a.txt"), self.folder / "t", **options)

        for options, slug in (({"vocab_size": 100}, "argument"), ({"special": ["a", "a"]}, "argument"),
                              ({"min_frequency": 0}, "argument"), ({"max_bytes": -1}, "argument"),
                              ({"files": "/nowhere/*.txt"}, "data.empty"), ({"files": []}, "argument")):
            with self.assertRaises(refrain.RefrainError, msg=options) as caught:
                train(**options)
            self.assertEqual(caught.exception.slug, slug, options)
        with self.assertRaises(ValueError):
            train(pattern="gpt5")
        with self.assertRaises(OverflowError):
            train(vocab_size=2**64)
        self.assertFalse((self.folder / "t").exists())

    def test_write_files(self):
        with refrain.Tokenizer(self.model) as t:
            (self.folder / "two.txt").write_text("1 + 1?")
            out = self.folder / "out.bin"
            documents, tokens = t.write_files([self.folder / "two.txt", self.folder / "two.txt"], out)
            self.assertEqual((documents, tokens), (2, 14))
            self.assertEqual(list(memoryview(out.read_bytes()).cast("H")), [*map(ord, "1 + 1?"), 2] * 2)
            t.write_files(self.folder / "two.txt", self.folder / "m.bin", format="megatron")
            self.assertTrue((self.folder / "m.idx").is_file())
            with self.assertRaises(refrain.RefrainError) as caught:
                t.write_files(self.folder / "two.txt", out)
            self.assertEqual(caught.exception.slug, "export.exists")
            with self.assertRaises(ValueError):
                t.write_files(self.folder / "two.txt", self.folder / "x.bin", format="numpy")


class Runs(LabTest):
    def test_phases(self):
        events = []
        ramp = {"batch.ramp": [{"until": 2, "tokens": 32}, {"until": 4, "tokens": 32, "sequence": 8}]}
        with refrain.Trainer(config(), self.folder / "run", config_folder=self.folder, on_event=events.append,
                             overrides=ramp) as run:
            self.assertEqual([(p.until, p.tokens, p.sequence) for p in run.phases],
                             [(2, 32, 16), (4, 32, 8), (0, 64, 16)])
            run.train()
        self.assertEqual([e.tokens for e in events if e.kind == "metrics"], [32, 32, 32, 32, 64, 64])
        self.assertIn("schedule", [e.kind for e in events])
        with refrain.Trainer(config(), None, config_folder=self.folder) as run:
            self.assertEqual([(p.until, p.tokens) for p in run.phases], [(0, 64)])

    def test_watch_and_average(self):
        events = []
        run = self.train("run", on_event=events.append, overrides={
            "run.watch": ["*.mlp.*"], "run.watch_every": 2, "optimizer.ema": 0.5})
        self.assertLessEqual({2, 4, 6}, {e.step for e in events if e.kind == "watch"})
        watched = [e.watched for e in events if e.kind == "watch"]
        self.assertTrue(all(".mlp." in w.name and w.elements > 0 and math.isfinite(w.rms) for w in watched[0]))
        with refrain.Model(run) as last, refrain.Model(run, ema=True) as average:
            self.assertNotEqual(last.score([1, 2]), average.score([1, 2]))
        refrain.export(run, self.folder / "average", ema=True)
        with refrain.Model(run, ema=True) as average, refrain.Model(self.folder / "average", sequence=16) as exported:
            self.assertEqual(exported.score([1, 2]), average.score([1, 2]))

    def test_row(self):
        rows = {"refrain": 1, "model": str(self.model), "adapter": {"type": "lora"}, "run": {"steps": 1},
                "data": {"train": [str(self.rows)], "sequence": 64}, "batch": {"tokens": 64, "microbatch": 1},
                "optimizer": {"lr": 1e-3}}
        with refrain.Trainer(rows, None) as run:
            pieces = run.row(0)
            self.assertIn("0 + 1?", "".join(p for p, _ in pieces))
            self.assertEqual([p for p, trained in pieces if trained], ["1", "<|im_end|>"])
            with self.assertRaises(refrain.InvalidError):
                run.row(10**6)

    def test_batch(self):
        with refrain.Model(self.model, sequence=32, texts=2) as model:
            prompts = ["1 + 1?", "2", "33 + 1?"]
            alone = [model.generate(p, tokens=6, seed=5 + i, stop=[]) for i, p in enumerate(prompts)]
            self.assertEqual(model.generate_batch(prompts, tokens=6, seed=5, stop=[]), alone)
            self.assertEqual(model.generate_batch([]), [])
            with self.assertRaises(refrain.InvalidError):
                model.generate_batch(["1", []])
        with self.assertRaises(refrain.InvalidError):
            refrain.Model(self.model, sequence=32, texts=65)


class Reports(LabTest):
    def test_report(self):
        first = self.train("first")
        with refrain.Report(first) as report:
            page = report.page()
            self.assertTrue(page.startswith("<!doctype html>") and "first" in page, page[:40])
            self.assertNotIn("http://", page.replace("http://www.w3.org", ""))
            report.save(self.folder / "page.html")
            self.assertEqual((self.folder / "page.html").read_text(), page)
            self.assertIsInstance(report.data(), dict)
            self.assertFalse(report.read())
            with refrain.Trainer(None, first, resume=True, overrides={"run.steps": 8}) as run:
                run.train()
            self.assertTrue(report.read())
            lines = report.screen(columns=60).splitlines()
            self.assertTrue(lines and all(len(line) <= 60 for line in lines), lines)
            self.assertNotIn("\x1b", report.screen())
            self.assertIn("\x1b", report.screen(colour=True))
            report.wandb(self.folder / "offline")
            self.assertEqual(len(list((self.folder / "offline").glob("offline-run-*/run-*.wandb"))), 1)
            with self.assertRaises(refrain.InvalidError):
                report.screen(1)
            with self.assertRaises(refrain.InvalidError):
                report.screen(columns=10)
        with self.assertRaises(refrain.ClosedError):
            report.page()
        for runs, slug in ((self.folder / "held", "run.folder"), ([], "argument"), ([first] * 17, "argument")):
            with self.assertRaises(refrain.RefrainError) as caught:
                refrain.Report(runs)
            self.assertEqual(caught.exception.slug, slug)

    def test_diff(self):
        first, second = self.train("first"), self.train("second", overrides={"optimizer.lr": 1e-3})
        found = refrain.diff(first, second)
        self.assertFalse(found["equal"])
        self.assertEqual([row["key"] for row in found["config"]], ["optimizer.lr"])
        self.assertGreater(len(found["weights"]["different"]), 5)
        self.assertIn("optimizer.lr", refrain.diff_text(first, second))
        self.assertLess(len(refrain.diff_text(first, second, tensors=1)), len(refrain.diff_text(first, second)))
        printed = subprocess.run([REFRAIN, "diff", "--json", first, second], capture_output=True, text=True).stdout
        self.assertEqual(json.loads(printed), found)
        self.assertTrue(refrain.diff(first, first)["equal"])
        with self.assertRaises(refrain.RefrainError):
            refrain.diff(first, self.folder / "held")

    def test_inspect(self):
        found = refrain.inspect(self.model)
        printed = subprocess.run([REFRAIN, "inspect", "--json", self.model], capture_output=True, text=True).stdout
        self.assertEqual(json.loads(printed), found)
        with self.assertRaises(refrain.FileError):
            refrain.inspect("/nowhere")


class Sweeps(LabTest):
    def grid(self, grid="optimizer.lr: [0.01, 0.0001]"):
        (self.folder / "c.yaml").write_text(json.dumps(config()))
        path = self.folder / "grid.yaml"
        path.write_text(f"refrain: 1\nconfig: c.yaml\ngrid: {{{grid}}}\n")
        return path

    def test_train(self):
        events = []
        with refrain.Sweep(self.grid(), self.folder / "s", overrides={"run.steps": 4}) as sweep:
            self.assertEqual((len(sweep), sweep.config), (2, str(self.folder / "c.yaml")))
            self.assertEqual(sweep[0].overrides, ("run.steps=4", "optimizer.lr=0.01"))
            self.assertEqual((sweep[-1].name, sweep[1].state, sweep[1].n_common), ("run-002", "waiting", 1))
            self.assertTrue(math.isnan(sweep[0].loss))
            with self.assertRaises(IndexError):
                sweep[2]
            with self.assertRaises(refrain.RefrainError) as caught:  # the folder is locked
                refrain.Sweep(self.folder / "grid.yaml", self.folder / "s", resume=True, overrides={"run.steps": 4})
            self.assertEqual(caught.exception.slug, "run.busy")
            sweep.train(on_event=lambda run, event: events.append((run.name, event.kind)))
            runs, best = [sweep[0], sweep[1]], sweep.rank()
        self.assertEqual([(r.state, r.step) for r in runs], [("done", 4)] * 2)
        self.assertEqual([r.loss for r in best], sorted(r.loss for r in runs))
        self.assertTrue({("run-001", "metrics"), ("run-002", "evaluation")} <= set(events))
        # the runs are those of the program
        subprocess.run([REFRAIN, "sweep", self.folder / "grid.yaml", "--out", self.folder / "p", "--set",
                        "run.steps=4", "--quiet"], check=True)
        for name in ("run-001", "run-002"):
            self.assertTrue(refrain.diff(self.folder / "s" / name, self.folder / "p" / name)["equal"])
        with refrain.Sweep(self.folder / "grid.yaml", self.folder / "p", resume=True,
                           overrides={"run.steps": 4}) as sweep:
            self.assertEqual([r.loss for r in sweep.rank()], [r.loss for r in best])
            sweep.train(on_event=lambda *_: self.fail("a finished run was trained"))

    def test_stop_and_failure(self):
        class Enough(Exception):
            pass

        def stop(run, event):
            if event.kind == "metrics" and event.step == 3:
                raise Enough

        grid = self.grid("data.train: [['*.txt'], ['none/*.txt']]")  # the second one has no data
        with refrain.Sweep(grid, self.folder / "s") as sweep:
            with self.assertRaises(Enough):
                sweep.train(on_event=stop)
            self.assertEqual([r.state for r in sweep], ["stopped", "waiting"])
            self.assertTrue(sweep[0].started)
        with refrain.Sweep(grid, self.folder / "s", resume=True) as sweep:
            sweep.train()
            self.assertEqual([(r.state, r.step) for r in sweep][0], ("done", 6))
            self.assertEqual(sweep[1].state, "failed")
            self.assertIn("none/*.txt", sweep[1].error)
            self.assertEqual([r.name for r in sweep.rank()], ["run-001"])
            sweep.record(1, "stopped")
            self.assertEqual((sweep[1].state, sweep[1].error), ("stopped", ""))
            with self.assertRaises(ValueError):
                sweep.record(1, "lost")
            with self.assertRaises(refrain.InvalidError):
                sweep.record(7, "done")

    def test_refusals(self):
        grid = self.grid("optimizer.lr: [0.01, -1]")
        with self.assertRaises(refrain.InvalidError) as caught:
            refrain.Sweep(grid, self.folder / "s")
        self.assertIn(f"{grid}:3: run-002", caught.exception.message)
        self.assertEqual((caught.exception.file, caught.exception.line), (str(grid), 3))
        (self.folder / "c.yaml").write_text("refrain: 1\nmodle: x\n")  # not a value of the grid
        with self.assertRaises(refrain.InvalidError) as caught:
            refrain.Sweep(grid, self.folder / "s")
        self.assertEqual((caught.exception.file, caught.exception.line), (str(self.folder / "c.yaml"), 2))
        with self.assertRaises(refrain.FileError):
            refrain.Sweep("/nowhere.yaml", self.folder / "s")
        self.assertFalse((self.folder / "s").exists())


if __name__ == "__main__":
    unittest.main()
