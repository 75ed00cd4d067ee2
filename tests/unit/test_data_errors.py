"""Broken data: each case ends in one sentence that names the file or key and the mend."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from moetrain.config.run import DataConfig
from moetrain.data import build_data
from moetrain.data.indexed import IndexedWriter
from moetrain.errors import UserError


def pair(folder: Path) -> Path:
    writer = IndexedWriter(folder / "x", 300)
    for n in range(1, 30):
        writer.add(range(n))
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


CASES = {
    "source missing": (lambda f: {"source": str(f / "nowhere")}, "does not exist; give `stdlib`"),
    "folder without text": (lambda f: {"source": str(f)}, "holds no text file"),
    "too little text": (lambda f: {"source": text(f, b"abc")}, "too few for one sequence of data.seq_len 16"),
    "held out too small": (lambda f: {"source": text(f), "held_out": 0.001}, "data.held_out 0.001 .* less than one"),
    "tokenizer missing": (lambda f: {"source": text(f), "tokenizer": str(f / "t")}, "data.tokenizer .* does not exist"),
    "tokenizer no tokenizer": (
        lambda f: {"source": text(f), "tokenizer": text(f, b"{}", "t.json") + "/t.json"},
        "is no tokenizer.json",
    ),
    "vocabulary too small": (lambda f: {"source": text(f), "vocab_size": 200}, "set model.vocab_size to at least 257"),
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
    from tests.unit.test_data import small_tokenizer

    (tmp_path / "texts").mkdir()
    source = text(tmp_path / "texts", b"caf\xe9 " * 40)
    build_data(DataConfig(source=source, seq_len=8, held_out=0.1), vocab_size=257, seed=0)
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 text \(byte 3\)"):
        build_data(
            DataConfig(source=source, tokenizer=str(small_tokenizer(tmp_path)), seq_len=8), vocab_size=257, seed=0
        )
