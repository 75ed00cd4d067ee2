"""Broken data: each case ends in one sentence that names the file or key and the mend."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from moetrain.config.run import DataConfig
from moetrain.data import build_data
from moetrain.data.indexed import IndexedWriter
from moetrain.errors import UserError
from tests.unit.test_data import hand_made, small_tokenizer


def pair(folder: Path) -> Path:
    writer = IndexedWriter(folder / "x", 300)
    for n in range(1, 30):
        writer.add(np.arange(n))
    writer.close()
    return folder / "x"


def edit(path: Path, offset: int, new: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(new)] = new
    path.write_bytes(raw)


def text(folder: Path, content: bytes = b"some text " * 50, name: str = "a.txt") -> str:
    (folder / name).write_bytes(content)
    return str(folder)


def indexed(damage):
    def make(folder: Path) -> dict[str, object]:
        prefix = pair(folder)
        damage(prefix)
        return {"source": str(prefix)}

    return make


def idx(prefix: Path) -> Path:
    return prefix.with_name("x.idx")


def bin_(prefix: Path) -> Path:
    return prefix.with_name("x.bin")


def tokenizer(beside: str | None = None, **keywords):
    """Text with a tokenizer.json, and what lies beside it."""

    def make(folder: Path) -> dict[str, object]:
        path = small_tokenizer(folder, **keywords)
        if beside is not None:
            path.with_name("tokenizer_config.json").write_text(beside)
        return {"source": text(folder), "tokenizer": str(path)}

    return make


def by_hand(*arguments):
    def make(folder: Path) -> dict[str, object]:
        hand_made(folder / "x", *arguments)
        return {"source": str(folder / "x")}

    return make


S = 29  # sequences of `pair`: their lengths start at byte 34, their places at 34 + 4 S, the documents at 34 + 12 S

CASES = {
    "source missing": (lambda f: {"source": str(f / "nowhere")}, "does not exist; give `stdlib`"),
    "folder without text": (lambda f: {"source": str(f)}, "holds no text file"),
    "too little text": (lambda f: {"source": text(f, b"abc")}, "too few for one sequence of data.seq_len 16"),
    "too little text beside what is held out": (
        lambda f: {"source": text(f), "held_out": 0.98},
        "has 501 tokens, too few for one sequence of data.seq_len 16 in training beside data.held_out 0.98",
    ),
    "tokenizer missing": (lambda f: {"source": text(f), "tokenizer": str(f / "t")}, "data.tokenizer .* does not exist"),
    "tokenizer no tokenizer": (
        lambda f: {"source": text(f), "tokenizer": text(f, b"{}", "t.json") + "/t.json"},
        "is no tokenizer.json",
    ),
    "vocabulary too small": (lambda f: {"source": text(f), "vocab_size": 200}, "set model.vocab_size to at least 258"),
    "tokenizer a folder": (
        lambda f: {"source": text(f), "tokenizer": str(f)},
        "is a folder; give the file: .*tokenizer.json",
    ),
    "tokenizer without an end": (tokenizer(eos="[SEP]"), "names no end of text; put a tokenizer_config.json"),
    "tokenizer config broken": (tokenizer("{"), "tokenizer_config.json is not valid JSON; mend or remove it"),
    "tokenizer config of another tokenizer": (
        tokenizer(json.dumps({"eos_token": "<end>"})),
        "the eos_token '<end>' of .*tokenizer_config.json is no token of tokenizer.json",
    ),
    "vocabulary of the file too large": (
        lambda f: {**tokenizer()(f), "vocab_size": 3},
        "tokenizer.json has 4 tokens, but model.vocab_size is 3: set model.vocab_size to at least 4",
    ),
    "half of a pair": (lambda f: {"source": f"{pair(f)}.bin"}, "x.bin is half of a tokenised pair; leave the ending"),
    "json line of half a character": (
        lambda f: {"source": text(f, b'{"text": "\\ud800"}\n', "a.jsonl")},
        "a.jsonl line 1 holds half a surrogate pair",
    ),
    "json line nested without end": (
        lambda f: {"source": text(f, b"[" * 100_000, "a.jsonl")},
        "a.jsonl line 1 is no JSON object",
    ),
    "only blank lines": (lambda f: {"source": text(f, b"\n \n\n", "a.jsonl")}, "holds no document"),
    "json line broken": (
        lambda f: {"source": text(f, b'{"text": "a"}\n{"t": 1}\n', "a.jsonl")},
        "a.jsonl line 2 is no JSON object",
    ),
    "idx missing": (indexed(lambda p: idx(p).unlink()), "x.idx is missing; both x.bin and x.idx are needed"),
    "bin missing": (indexed(lambda p: bin_(p).unlink()), "x.bin is missing"),
    "foreign idx": (indexed(lambda p: edit(idx(p), 0, b"GARBAGE")), "first bytes are wrong"),
    "idx of another version": (indexed(lambda p: edit(idx(p), 9, struct.pack("<Q", 2))), "format version 2"),
    "unknown token type": (indexed(lambda p: edit(idx(p), 17, b"\x63")), "unknown token type \\(code 99\\)"),
    "idx cut off": (indexed(lambda p: idx(p).write_bytes(idx(p).read_bytes()[:-5])), "cut off or damaged"),
    "negative length": (indexed(lambda p: edit(idx(p), 34, struct.pack("<i", -1))), "negative length"),
    "bin cut off": (indexed(lambda p: bin_(p).write_bytes(bin_(p).read_bytes()[:-4])), "one of the two is cut off"),
    "idx empty": (indexed(lambda p: idx(p).write_bytes(b"")), "first bytes are wrong"),
    "idx counts another number": (indexed(lambda p: edit(idx(p), 18, struct.pack("<Q", 2**60))), "cut off or damaged"),
    "sequences elsewhere": (
        indexed(lambda p: edit(idx(p), 34 + 4 * S, struct.pack("<q", 8))),
        "do not lie one after the other in x.bin",
    ),
    "documents that shrink": (
        indexed(lambda p: edit(idx(p), 34 + 12 * S + 8, struct.pack("<q", 5))),
        "document boundaries of .*x.idx are damaged",
    ),
    "no document": (by_hand(8, "<u2", [[1, 2]], []), "document boundaries of .*x.idx are damaged"),
    "no token": (by_hand(8, "<u2", [[]], [0, 1]), "x.bin holds no token"),
    "negative token": (by_hand(4, "<i4", [[5] * 50, [-7]], [0, 1, 2]), "go down to -7: the data is damaged"),
    "token beyond the model": (lambda f: {"source": str(pair(f)), "vocab_size": 10}, "up to 28, but model.vocab_size"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_broken_data_is_refused_in_one_sentence(tmp_path, case):
    make, sentence = CASES[case]
    given = dict(make(tmp_path))
    vocab_size = given.pop("vocab_size", 300)
    config = DataConfig(**{"seq_len": 16, "held_out": 0.1, **given})
    with pytest.raises(UserError, match=sentence) as caught:
        build_data(config, vocab_size=vocab_size, seed=0)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_needs_the_byte_tokenizer(tmp_path):
    (tmp_path / "texts").mkdir()
    source = text(tmp_path / "texts", b"caf\xe9 " * 40)
    build_data(DataConfig(source=source, seq_len=8, held_out=0.1), vocab_size=258, seed=0)
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 text \(byte 3\)"):
        build_data(
            DataConfig(source=source, tokenizer=str(small_tokenizer(tmp_path)), seq_len=8), vocab_size=258, seed=0
        )
