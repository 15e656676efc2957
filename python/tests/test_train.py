# SPDX-License-Identifier: Apache-2.0
"""Runs: training on a program's own data, fine-tuning, generation, export."""
import json
import math
import unittest

import refrain
from support import SMALL, FolderTest


def count(window):
    for i in range(window.sequence):
        window.tokens[i] = (window.index + i) % 11
        window.targets[i] = (window.index + i + 1) % 11
    window.position += 1


class Runs(FolderTest):
    def test_own_data(self):
        events = []
        data = refrain.Data(count, name="counting", train_windows=32, validation_windows=4)
        with refrain.Trainer(SMALL, self.folder / "run", data=data, on_event=events.append,
                             overrides={"run.steps": 30}) as run:
            run.train()
            info, evaluation = run.info, run.evaluate()
        losses = [e.loss for e in events if e.kind == "metrics"]
        self.assertEqual(len(losses), 30)
        self.assertLess(losses[-1], 0.7 * losses[0])
        self.assertEqual((info.step, info.window, info.vocab_size, info.layers), (30, 16, 256, 2))
        self.assertEqual(info.dtype, "f32" if info.dtype == "f32" else "bf16")
        self.assertEqual((evaluation.windows, evaluation.tokens), (4, 64))
        self.assertLess(evaluation.loss, losses[0])
        self.assertEqual(info.checkpoint, str(self.folder / "run" / "step-000030"))
        self.assertIn("checkpoint", [e.kind for e in events])

    def test_same_bits(self):
        """Two runs, one of which is resumed, have the same losses."""

        def losses(folder, steps, **options):
            found = []
            with refrain.Trainer(SMALL, folder, data=refrain.Data(count, train_windows=32), on_event=found.append,
                                 **options) as run:
                for _ in range(steps):
                    run.step()
                run.save()
            return [e.loss for e in found if e.kind == "metrics"]

        straight = losses(self.folder / "a", 6)
        first = losses(self.folder / "b", 3)
        second = losses(self.folder / "b", 3, resume=True)
        self.assertEqual(first + second, straight)

    def test_window_errors(self):
        def run(fill):
            with refrain.Trainer(SMALL, None, data=refrain.Data(fill, train_windows=8)) as trainer:
                trainer.step()

        class Mine(Exception):
            pass

        def fails(window):
            raise Mine

        def too_short(window):
            window.tokens = window.tokens[:3]

        def no_document(window):
            window.documents = []

        for fill, error in ((fails, Mine), (too_short, refrain.InvalidError), (no_document, refrain.InvalidError)):
            with self.assertRaises(error):
                run(fill)

    def test_window_is_a_copy(self):
        """What a program keeps of a window is its own."""
        kept = []
        data = refrain.Data(lambda window: (count(window), kept.append(window)), train_windows=8)
        with refrain.Trainer(SMALL, None, data=data) as run:
            run.step()
        self.assertEqual([list(w.tokens)[:2] for w in kept[:2]], [[0, 1], [1, 2]])

    def test_config_forms(self):
        for config in (SMALL, json.dumps(SMALL)):
            with refrain.Trainer(config, None, data=refrain.Data(count, train_windows=8),
                                 overrides=["optimizer.lr=0.5", "run.steps=3"]) as run:
                self.assertEqual(run.info.steps, 3)
        with refrain.Trainer(SMALL, None, data=refrain.Data(count, train_windows=8), overrides={
                "optimizer.clip": 0.5, "run.steps": 4, "model.tie_word_embeddings": True}) as run:
            self.assertEqual(run.info.steps, 4)


class Finetune(FolderTest):
    def test_all(self):
        """The way of the README: fine-tune, chat, export."""
        run, events = self.folder / "chat", []
        info = refrain.finetune(self.model, self.rows, run, on_event=events.append, overrides={
            "run.epochs": 2, "adapter.rank": 4, "optimizer.lr": 1e-2})
        self.assertGreater(info.adapter_parameters, 0)
        self.assertEqual(info.trainable_parameters, info.adapter_parameters)
        self.assertEqual(info.train_rows + info.validation_rows, 60)
        self.assertIn("evaluation", [e.kind for e in events])
        metrics = [e for e in events if e.kind == "metrics"]
        self.assertRegex(str(metrics[0]), r"^metrics step 1 steps \d+ loss \d.* lr \S+ ")
        self.assertRegex(str(events[-1]), r"^end done step \d+ steps \d+$")
        self.assertLess(metrics[-1].loss, metrics[0].loss)

        pieces = []
        with refrain.Model(run) as model:
            question = [{"role": "user", "content": "1 + 1?"}]
            answer = model.generate(question, tokens=8, temperature=0, on_text=pieces.append)
            self.assertEqual("".join(pieces), answer)
            self.assertEqual(model.generate(question, tokens=8, temperature=0), answer)
            cut = model.generate(question, tokens=8, temperature=0, on_text=lambda text: True)
            self.assertTrue(answer.startswith(cut))
            self.assertEqual(model.tokenizer.encode("1"), [49])
            tokenizer = model.tokenizer
            ids = model.template.encode(tokenizer, question, add_generation_prompt=True)
            self.assertEqual(model.generate(ids, tokens=8, temperature=0, stop=tokenizer.stops(model.template)), answer)
            scores = model.score(ids)
            self.assertEqual(len(scores), len(ids) * 256)
            self.assertTrue(all(math.isfinite(x) for x in scores))
            # The most probable next token is the first one of the answer.
            last = scores[-256:]
            best = max(range(256), key=lambda i: last[i])
            self.assertEqual(tokenizer.decode([best]), answer[:1])
        with self.assertRaises(refrain.ClosedError):
            tokenizer.encode("1")
        self.assertEqual(refrain.generate(run, question, tokens=8, temperature=0), answer)

        refrain.export(run, self.folder / "peft", format="peft")
        self.assertTrue((self.folder / "peft" / "adapter_config.json").is_file())
        refrain.export(run, self.folder / "merged")
        self.assertEqual(refrain.generate(self.folder / "merged", question, tokens=8, temperature=0), answer)
        with self.assertRaises(refrain.RefrainError) as caught:
            refrain.export(run, self.folder / "merged")
        self.assertEqual(caught.exception.slug, "export.exists")

    def test_model_folder(self):
        with refrain.Model(self.model, sequence=32) as model:
            self.assertEqual(model.info.window, 32)
            self.assertIsInstance(model.generate("1 + ", tokens=4, seed=3), str)
            with self.assertRaises(refrain.InvalidError):
                model.generate([], tokens=1)
            with self.assertRaises(refrain.InvalidError):
                model.generate([5000], tokens=1)
            with self.assertRaises(OverflowError):
                model.generate("1", tokens=2**64)
            with self.assertRaises(ZeroDivisionError):
                model.generate("1", temperature=0, stop=[], on_text=lambda text: 1 / 0)
            self.assertIsInstance(model.generate("1", tokens=2), str)

    def test_refusals(self):
        for call, slug in ((lambda: refrain.finetune("/nowhere", self.rows, self.folder / "x"), "file.open"),
                           (lambda: refrain.finetune(self.model, "/nowhere.jsonl", self.folder / "x"), "data.empty"),
                           (lambda: refrain.Model(self.folder), "file.open")):
            with self.assertRaises(refrain.RefrainError) as caught:
                call()
            self.assertEqual(caught.exception.slug, slug)
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
