# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates of published models."""
from __future__ import annotations

import array
import ctypes
import json
from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Union

from . import _abi
from ._core import (Context, Handle, InvalidError, Path, copy_fields, create, lib, path_bytes, path_list,
                    text)

Messages = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "Hello"}, ...


def ids_array(ids: Sequence[int]) -> Any:
    """Token ids for the library."""
    try:
        values = array.array("i", ids)
    except (OverflowError, TypeError) as error:
        raise InvalidError("invalid", "argument", f"token ids are 32-bit integers: {error}") from None
    return (ctypes.c_int32 * len(values)).from_buffer(values) if values else (ctypes.c_int32 * 0)()


def text_bytes(value: str) -> bytes:
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidError("invalid", "argument", f"the text is not valid Unicode: {error}") from None


def messages_bytes(messages: Messages) -> bytes:
    try:
        return json.dumps(list(messages), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise InvalidError("invalid", "argument", f"the messages are not JSON: {error}") from None


_FORMATS = ["nanogpt", "llmc", "megatron"]  # in the order of rfr_token_format
_PATTERNS = ["gpt2", "llama3", "qwen2"]  # in the order of rfr_word_pattern


class Tokenizer(Handle):
    """The tokenizer of a model: `path` is a tokenizer.json, a folder that has one, or a GGUF file.

    The ids equal those of the package tokenizers. Any number of threads may use one tokenizer."""

    _destroy_name = "rfr_tokenizer_destroy"

    def __init__(self, path: Path, *, context: Optional[Context] = None) -> None:
        owner = context or Context("cpu")
        super().__init__(owner, create(owner, lib.rfr_tokenizer_open, path_bytes(path)),
                         None if context else owner)

    def encode(self, text: str, *, add_special: bool = False) -> List[int]:
        """The ids of a text; add_special: with the tokens around it, such as BOS."""
        options = lib.rfr_encode_options_default()
        options.add_special = add_special
        raw = text_bytes(text)
        return self._tokens(
            lambda out: lib.rfr_tokenizer_encode(self.pointer, raw, len(raw), ctypes.byref(options), out))

    def _tokens(self, encode: Callable[[Any], Any]) -> List[int]:
        tokens = _abi.rfr_tokens()
        try:
            self.context.call(encode, ctypes.byref(tokens))
            return list(tokens.ids[: tokens.n])
        finally:
            lib.rfr_tokens_deinit(ctypes.byref(tokens))

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of token ids; invalid bytes become U+FFFD."""
        with Decoder(self, keep_special=keep_special) as decoder:
            return "".join([decoder.add(i) for i in ids]) + decoder.end()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return int(self._call(lib.rfr_tokenizer_vocab_size))

    def token(self, id: int) -> Optional[bytes]:
        """A token as the vocabulary has it; None for an id that is not in use."""
        n = ctypes.c_size_t()

        def read(pointer: int) -> Optional[bytes]:
            found = lib.rfr_tokenizer_token(pointer, id, ctypes.byref(n))
            return ctypes.string_at(found, n.value) if found else None

        found: Optional[bytes] = self._call(read)
        return found

    def id(self, token: Union[str, bytes]) -> Optional[int]:
        """The id of a token as the vocabulary has it, or of an added token; None: there is none."""
        raw = text_bytes(token) if isinstance(token, str) else token
        return _id(self._call(lib.rfr_tokenizer_id, raw, len(raw)))

    def write_files(self, files: Union[Path, Sequence[Path]], out: Path, *, format: str = "nanogpt") -> Tuple[int, int]:
        """Tokenizes text files and rows of text (.jsonl, .jsonl.gz, .jsonl.zst) and writes their ids into the new file
        `out`, X.bin, as `refrain tokenize --out` does. Returns the numbers of documents and of tokens.

        format  "nanogpt": ids alone; "llmc": after a header; "megatron": with an index X.idx
        Raises ValueError for an unknown format, RefrainError with the slug "export.exists" if `out` is there, and
        InvalidError for a file that is not a text or a damaged row, with its line. On an error nothing is written."""
        paths, kind = path_list(files), _FORMATS.index(format)
        documents, tokens = ctypes.c_int64(), ctypes.c_int64()
        self._call(lib.rfr_tokenizer_write_files, (ctypes.c_char_p * len(paths))(*paths), len(paths), kind,
                   path_bytes(out), ctypes.byref(documents), ctypes.byref(tokens))
        return documents.value, tokens.value

    def is_special(self, id: int) -> bool:
        return bool(self._call(lib.rfr_tokenizer_is_special, id))

    @property
    def bos(self) -> Optional[int]:
        """The token that begins a text."""
        return _id(self._call(lib.rfr_tokenizer_bos))

    @property
    def eos(self) -> Optional[int]:
        """The token that ends a text."""
        return _id(self._call(lib.rfr_tokenizer_eos))

    def stops(self, template: Optional[ChatTemplate] = None) -> List[int]:
        """The tokens that end a generated text, with a template also the one that ends an answer."""
        ids, n = (ctypes.c_int32 * 64)(), ctypes.c_int()
        self._call(lambda pointer: lib.rfr_chat_stops(template.pointer if template else None, pointer, ids, 64,
                                                      ctypes.byref(n)))
        return list(ids[: n.value])


def _id(value: int) -> Optional[int]:
    return None if value < 0 else value


@dataclass(frozen=True)
class TokenizerTraining:
    """Counts of a training of a tokenizer; the fields are those of rfr_tokenizer_training."""

    vocab_size: int  # less than asked for, if no pair has min_frequency any more
    merges: int
    least: int  # how often the pair of the last merge occurred
    files: int
    bytes: int  # of text
    words: int  # distinct ones


def train_tokenizer(files: Union[Path, Sequence[Path]], out: Path, *, vocab_size: int = 32768, pattern: str = "gpt2",
                    special: Optional[Sequence[str]] = None, min_frequency: int = 2, max_bytes: int = 0,
                    chat_template: Optional[Path] = None, threads: int = 0) -> TokenizerTraining:
    """Trains a tokenizer with byte-level BPE and writes it into the new folder `out`, for Tokenizer, for data.tokenizer
    of a run, and for other libraries. `refrain tokenizer-train` writes the same files.

    files          or patterns of files: texts, and rows of JSONL (.jsonl, .jsonl.gz, .jsonl.zst)
    out            a folder; with the ending .json the file tokenizer.json alone
    vocab_size     ids: 256 bytes, the special tokens, and the merges
    pattern        how a text is split into words: "gpt2", "llama3" or "qwen2"
    special        tokens that get the first ids; the first one ends a text. None: "<|endoftext|>"
    min_frequency  a pair that is less frequent is not merged
    max_bytes      of text to train on; 0: all
    chat_template  "chatml", or the path of a template that is written into the folder

    The result depends on the texts and these options, not on `threads` or the order of the files. Raises ValueError
    for an unknown pattern, RefrainError with the slug "export.exists" if `out` is there, and InvalidError for a file
    that is not a text or a damaged row, with its line. On an error nothing is written.

        refrain.train_tokenizer("notes/**/*.txt", "tokenizer", vocab_size=8192)
        refrain.Tokenizer("tokenizer").encode("Hello")
    """
    options, counts, paths = lib.rfr_tokenizer_train_options_default(), _abi.rfr_tokenizer_training(), path_list(files)
    options.vocab_size, options.pattern = vocab_size, _PATTERNS.index(pattern)
    options.min_frequency, options.max_bytes = min_frequency, max_bytes
    if special is not None:
        tokens = [text_bytes(t) for t in special]
        options.special, options.n_special = (ctypes.c_char_p * len(tokens))(*tokens), len(tokens)
    options.chat_template = path_bytes(chat_template) if chat_template is not None else None
    with Context("cpu", threads=threads) as context:
        context.call(lambda: lib.rfr_tokenizer_train(
            context.pointer, (ctypes.c_char_p * len(paths))(*paths), len(paths), ctypes.byref(options),
            path_bytes(out), ctypes.byref(counts)))
    return TokenizerTraining(**copy_fields(counts))


class Decoder(Handle):
    """Turns ids into text, one at a time: add() returns the complete characters, end() the rest."""

    _destroy_name = "rfr_decoder_destroy"

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        out = ctypes.c_void_p()  # not through the context: a callback of a run may make one
        lib.rfr_decoder_create(tokenizer.pointer, keep_special, ctypes.byref(out))
        super().__init__(tokenizer.context, out.value)
        self._tokenizer = tokenizer
        tokenizer._retain()
        self._pieces: List[bytes] = []
        pieces = self._pieces
        self._writer = _abi.WriteFn(lambda data, n, _: pieces.append(data[:n]))

    def add(self, id: int) -> str:
        lib.rfr_decoder_add(self.pointer, id, self._writer, None)
        return self._take()

    def end(self) -> str:
        lib.rfr_decoder_end(self.pointer, self._writer, None)
        return self._take()

    def _take(self) -> str:
        out = b"".join(self._pieces).decode("utf-8", "replace")
        self._pieces.clear()
        return out

    def _free(self) -> None:
        was = self._pointer
        super()._free()
        if was is not None and self._pointer is None:
            self._tokenizer._release()


class ChatTemplate(Handle):
    """The chat template of a model: `path` is a model's folder, a template file, or "chatml"."""

    _destroy_name = "rfr_chat_template_destroy"

    def __init__(self, path: Path, *, choice: Optional[str] = None, context: Optional[Context] = None) -> None:
        owner = context or Context("cpu")
        name = choice.encode() if choice is not None else None
        super().__init__(owner, create(owner, lib.rfr_chat_template_open, path_bytes(path), name),
                         None if context else owner)

    @staticmethod
    def _options(add_generation_prompt: bool, tools: Optional[Sequence[Any]],
                 variables: Optional[Mapping[str, Any]]) -> Any:
        options = lib.rfr_chat_options_default()
        options.add_generation_prompt = add_generation_prompt
        if tools is not None:
            options.tools = json.dumps(list(tools)).encode()
        if variables is not None:
            options.variables = json.dumps(dict(variables)).encode()
        return options

    def render(self, messages: Messages, *, add_generation_prompt: bool = False, tools: Optional[Sequence[Any]] = None,
               variables: Optional[Mapping[str, Any]] = None) -> str:
        """The text of a conversation, as apply_chat_template of the transformers library gives it."""
        raw, rendered = messages_bytes(messages), _abi.rfr_rendered()
        options = self._options(add_generation_prompt, tools, variables)
        self._call(lib.rfr_chat_render, raw, len(raw), ctypes.byref(options), ctypes.byref(rendered))
        try:
            return text(ctypes.string_at(rendered.text or 0, rendered.n))
        finally:
            lib.rfr_rendered_deinit(ctypes.byref(rendered))

    def encode(self, tokenizer: Tokenizer, messages: Messages, *, add_generation_prompt: bool = False,
               tools: Optional[Sequence[Any]] = None, variables: Optional[Mapping[str, Any]] = None) -> List[int]:
        """The ids of a conversation. Only text of the template becomes special tokens."""
        raw, options = messages_bytes(messages), self._options(add_generation_prompt, tools, variables)
        return tokenizer._tokens(lambda out: lib.rfr_chat_encode(
            self.pointer, tokenizer.pointer, raw, len(raw), ctypes.byref(options), out))
