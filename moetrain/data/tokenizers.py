"""Text to token ids: bytes as they are, or a ``tokenizer.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moetrain.errors import UserError

Ids = npt.NDArray[np.integer]


class Tokenizer(Protocol):
    """``encode`` gives the ids of a document without its end; ``eos`` ends a document; ids are below ``vocab_size``."""

    name: str
    vocab_size: int
    eos: int

    def encode(self, document: bytes, where: str) -> Ids: ...


class ByteTokenizer:
    """A token for each byte, 0..255, and 256 for a document's end; 257 is reserved for padding and never in a text.

    Needs nothing and takes any file.
    """

    name = "bytes"
    vocab_size = 258
    eos = 256

    def encode(self, document: bytes, where: str) -> Ids:
        return np.frombuffer(document, dtype=np.uint8)


class JsonTokenizer:
    """A ``tokenizer.json`` through the package ``tokenizers``.

    A document's end is the eos token of ``tokenizer_config.json`` beside the file, or else the first special token
    whose text says so. No other special token is added, but where a document spells one out it becomes that token.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        if path.is_dir():
            raise UserError(f"data.tokenizer {path} is a folder; give the file: {path / 'tokenizer.json'}")
        if not path.is_file():
            raise UserError(f"data.tokenizer {path} does not exist; give `bytes` or the path of a tokenizer.json")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise UserError(
                f"data.tokenizer {path} is no tokenizer.json ({str(error).splitlines()[0]}); give another, or `bytes`"
            ) from None
        # files of fine-tuned models ask for both, and would cut documents off in silence
        self._backend.no_truncation()
        self._backend.no_padding()
        self.name = str(path)
        # not their number: ids may have gaps
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=0)
        self.eos = self._find_eos(path)

    def encode(self, document: bytes, where: str) -> Ids:
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where} is not UTF-8 text (byte {error.start}); convert it, or use data.tokenizer=bytes"
            ) from None
        # "fast" leaves out the character offsets, which nobody reads
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)

    def _find_eos(self, path: Path) -> int:
        name: str | None = None
        beside = path.with_name("tokenizer_config.json")
        if beside.is_file():
            try:
                entry = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError):
                raise UserError(f"{beside} is not valid JSON; mend or remove it") from None
            name = entry.get("content") if isinstance(entry, dict) else entry
            if name is not None and (not isinstance(name, str) or self._backend.token_to_id(name) is None):
                raise UserError(f"the eos_token {name!r} of {beside} is no token of {path.name}; mend or remove it")
        special = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        if name is None:
            ends = ("</s>", "<eos>", "endoftext", "end_of_text", "end▁of▁sentence", "end_of_sentence")
            name = next((text for text in special if any(end in text.lower() for end in ends)), None)
        found = None if name is None else self._backend.token_to_id(name)
        if found is None:
            raise UserError(
                f"data.tokenizer {path} names no end of text; put a tokenizer_config.json with `eos_token` beside it"
            )
        return int(found)


def load_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or the path of a tokenizer.json."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(Path(name))
