# SPDX-License-Identifier: Apache-2.0
"""Trains small tokenizers with the Python package tokenizers and writes them with the tokens that it gives.

usage: make_reference_tokenizers.py FOLDER (tests/data/tokenizers)

Each file is {"tokenizer": tokenizer.json, "cases": [{"text", "ids", "begins", "special", "decoded"}]}: ids and byte
offsets without the tokens of the post-processor, ids with them, and the text that the latter decode to. "special" is
left out if it equals "ids", "decoded" if it equals "text".
"""
import json
import os
import random
import sys

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import AddedToken, Regex, Tokenizer  # noqa: E402
from tokenizers import decoders as D, models, normalizers as N, pre_tokenizers as P, processors as R, trainers as T  # noqa: E402

WORDS = ("the a of to in and is it that for on with as was by this from are not have be one all you we at which can when "
         "train model token text data learn rate step loss gradient weight layer head attention user system assistant "
         "don't I'll she's they've we're naïve café über straße Москва привет данные 日本語 中文 한국어 العربية 12 345 6789 "
         "3.14 (x, y) if x == 0: return [a, b] # note\n def f(x):\n    pass\n 😀 👍🏽 ﬁ ① Å é ½").split(" ")
TEXTS = ["", " ", "Hello, world!", " the  model\n\n\nlearns   from 12345 tokens\t x ", "I'll I'LL don't DON'T 'ſ they've 'S",
         "naïve café\u0301 Å A\u030a e\u0301\u0323 \u0323\u0301 \ufb01 ① ½ ǅ İ ẞ", "日本語の テキスト 中文 한국어 \u1100\u1161\u11a8", "😀👍🏽 👨\u200d👩\u200d👧 🇩🇪 \U0001fae8 \ue000 \U0010fffd",
         "\u00a0\u1680\u180e\u2003\u2028\u200b\u3000x\u00a0y\ufeff", "a<|end|>b <|end|>  <tool> x<tool>Word Wordy my Word <|e", "<|end|><|end|>\n <mask>  y",
         "def f(x):\n    return x[0] + 1.5e-3  # ok\r\n\r\n", " " * 70 + "x" + "\n" * 20, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa the the",
         "३४ Ⅷ ² ٣ x2 1a", "_a-b__c…«d»!?¡", "Москва Привет данные العربية שלום ไทย हिन्दी", "\u0085\u000b\u000c\u001c\u001f\u007f\u009f.", "▁ ▁▁the▁model"]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LLAMA3 = CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|[\p{L}&&[^\p{Han}]]+|\s+(?!\S)|[\s\S]")


def corpus():
    r = random.Random(5)
    for _ in range(400):
        yield " ".join(r.choice(WORDS) for _ in range(30))


def train(model, trainer, pre, normalizer=None, decoder=None, post=None):
    t = Tokenizer(model)
    t.pre_tokenizer = pre
    if normalizer:
        t.normalizer = normalizer
    t.train_from_iterator(corpus(), trainer)
    if decoder:
        t.decoder = decoder
    if post:
        t.post_processor = post
    return t


def byte_level(pre, size=320, normalizer=None, post=None, **model):
    trainer = T.BpeTrainer(vocab_size=size, initial_alphabet=P.ByteLevel.alphabet(), special_tokens=["<|start|>", "<|end|>"],
                           show_progress=False)
    return train(models.BPE(**model), trainer, pre, normalizer, D.ByteLevel(), post)


def split(pattern):
    return P.Sequence([P.Split(Regex(pattern), "isolated"), P.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece(size=480):
    """BPE with bytes as tokens, as Llama 2 and Gemma."""
    special = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)]
    trainer = T.BpeTrainer(vocab_size=size, special_tokens=special, limit_alphabet=90, show_progress=False)
    t = train(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), trainer,
              P.Split("▁", "merged_with_next"), N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")]))
    j = json.loads(t.to_str())
    j["pre_tokenizer"] = None
    j["added_tokens"] = [a for a in j["added_tokens"] if a["id"] < 3]
    j["decoder"] = json.loads(D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)]).__getstate__())
    j["post_processor"] = json.loads(R.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
                                     .__getstate__())
    return j


def families():
    yield "gpt2", byte_level(P.ByteLevel(add_prefix_space=False))
    yield "roberta", byte_level(P.ByteLevel(add_prefix_space=True), post=R.RobertaProcessing(("<|end|>", 1), ("<|start|>", 0)))
    yield "smollm", byte_level(P.Sequence([P.Digits(True), P.ByteLevel(add_prefix_space=False)]))
    t = byte_level(split(LLAMA3), ignore_merges=True, post=R.Sequence([
        R.ByteLevel(), R.TemplateProcessing(single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 0)])]))
    t.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("Word", single_word=True), AddedToken("  \n")])
    t.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    yield "llama3", t
    yield "qwen2", byte_level(split(QWEN2), normalizer=N.NFC())
    yield "gpt4o", byte_level(split(GPT4O))
    yield "falcon", byte_level(P.Sequence([P.Punctuation("contiguous"), P.ByteLevel(add_prefix_space=False), P.Digits(False),
                                           P.Split(Regex("[0-9][0-9][0-9]"), "isolated")]))
    j = sentencepiece()
    yield "llama2", Tokenizer.from_str(json.dumps(j))
    j["normalizer"] = None
    j["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    yield "mistral", Tokenizer.from_str(json.dumps(j))
    j["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    j["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    j["decoder"]["decoders"].pop()
    t = Tokenizer.from_str(json.dumps(j))
    t.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁▁", normalized=False)])
    yield "gemma", t
    t = train(models.Unigram(), T.UnigramTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>",
                                                 show_progress=False),
              P.Metaspace(), N.Sequence([N.Nmt(), N.NFKC(), N.Replace(Regex(" {2,}"), " ")]), D.Metaspace(),
              R.TemplateProcessing(single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]))
    yield "unigram", t
    t = train(models.WordPiece(unk_token="[UNK]"), T.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False),
        P.BertPreTokenizer(), N.BertNormalizer(), D.WordPiece(), R.BertProcessing(("[SEP]", 2), ("[CLS]", 1)))
    yield "bert", t
    t = train(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", continuing_subword_prefix="##"), T.BpeTrainer(
        vocab_size=340, end_of_word_suffix="</w>", continuing_subword_prefix="##", special_tokens=["<unk>"],
        show_progress=False, limit_alphabet=80),
        P.Sequence([P.Whitespace(), P.Digits(True)]), N.Sequence([N.NFKD(), N.StripAccents(), N.Lowercase(), N.Strip()]),
        D.BPEDecoder(suffix="</w>"))
    yield "affixes", t
    # The unknown token of each piece shows where pieces begin.
    for behavior in ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]:
        for invert in [False, True]:
            t = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
            t.pre_tokenizer = P.Split(Regex(r"[aeiou ]|\d+"), behavior, invert=invert)
            yield "split_%s%s" % (behavior, "_inverted" if invert else ""), t


def main():
    for name, t in families():
        raw = Tokenizer.from_str(t.to_str())
        raw.post_processor = R.ByteLevel(trim_offsets=False)
        cases = []
        for text in TEXTS:
            offset = [0]
            for c in text:
                offset.append(offset[-1] + len(c.encode()))
            plain, full = raw.encode(text, add_special_tokens=False), t.encode(text)
            case = {"text": text, "ids": plain.ids, "begins": [offset[a] for a, _ in plain.offsets]}
            if full.ids != plain.ids:
                case["special"] = full.ids
            if t.decode(full.ids) != text:
                case["decoded"] = t.decode(full.ids)
            if name.startswith("split") and len(text) > 60:
                continue
            cases.append(case)
        with open("%s/%s.json" % (sys.argv[1], name), "w", encoding="ascii") as out:
            json.dump({"tokenizer": json.loads(t.to_str()), "cases": cases}, out, separators=(",", ":"))
            out.write("\n")


main()
