# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a published model on conversations, asks it a question and exports the adapter.

    python3 finetune.py MODEL ROWS.jsonl RUN EXPORT

MODEL   a Hugging Face folder or a GGUF file      RUN     the folder of the run, which must not exist
ROWS    one {"messages": [...]} per line          EXPORT  the folder of the adapter for the PEFT library
"""
import sys

import refrain


def on_event(event):
    if event.kind == "metrics":
        print(f"step {event.step} of {event.steps}: loss {event.loss:.4f}")
    if event.kind == "evaluation":
        print(f"held-out loss {event.loss:.4f}")


def main(model, rows, run, export):
    info = refrain.finetune(model, rows, run, on_event=on_event, overrides={"adapter.rank": 8, "run.epochs": 2})
    print(f"{info.train_rows} rows, {info.trained_tokens} trained tokens, {info.trainable_parameters} parameters")
    with refrain.Model(run) as chat:
        question = [{"role": "user", "content": "1 + 1?"}]
        chat.generate(question, tokens=20, temperature=0, on_text=lambda text: print(text, end="", flush=True))
        print()
    refrain.export(run, export, format="peft")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except refrain.RefrainError as error:
        sys.exit(f"{error.message}\n{error.next}")
