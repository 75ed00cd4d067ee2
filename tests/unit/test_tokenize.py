"""``tokenize``: the same bytes whatever the workers, and a killed run goes on."""

from __future__ import annotations

import os
import time

import pytest

from moetrain.data import tokenize_cli
from moetrain.data.indexed import read_indexed
from moetrain.data.tokenize_cli import tokenize
from moetrain.errors import UserError


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(11):
        (folder / f"{i:02d}.txt").write_text(f"document {i} " * (i + 1))
    return str(folder)


def result(prefix):
    return [open(f"{prefix}{end}", "rb").read() for end in (".bin", ".idx")]


def test_workers_and_interruptions_change_no_byte(texts, tmp_path, monkeypatch):
    tokenize(texts, str(tmp_path / "one"), tokenizer="bytes", workers=1, part_documents=100)
    tokenize(texts, str(tmp_path / "two"), tokenizer="bytes", workers=2, part_documents=3)
    assert result(tmp_path / "one") == result(tmp_path / "two")
    tokens, ends = read_indexed(tmp_path / "one")
    assert len(ends) == 11 and (tokens[ends - 1] == 256).all()
    assert not (tmp_path / "two.parts").exists()

    # killed before the parts were joined: finished parts are used again, not made again
    monkeypatch.setattr(tokenize_cli, "_join", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenize(texts, str(tmp_path / "three"), tokenizer="bytes", workers=1, part_documents=3)
    monkeypatch.undo()
    parts = tmp_path / "three.parts"
    assert not (tmp_path / "three.bin").exists() and len(list(parts.glob("*.idx"))) == 4
    (parts / "000002.idx").unlink()  # one was not finished
    kept = {p.name: p.stat().st_mtime_ns for p in parts.glob("*.bin")}
    time.sleep(0.02)
    tokenize(texts, str(tmp_path / "three"), tokenizer="bytes", workers=1, part_documents=3)
    assert result(tmp_path / "three") == result(tmp_path / "one")
    assert len(kept) == 4


def test_parts_of_another_job_are_not_used(texts, tmp_path):
    out = str(tmp_path / "out")
    tokenize_cli._prepare(tmp_path / "out.parts", "another job")
    (tmp_path / "out.parts" / "000000.idx").write_bytes(b"rubbish")
    tokenize(texts, out, tokenizer="bytes", workers=1)
    assert len(read_indexed(tmp_path / "out")[1]) == 11


def test_a_missing_source_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        tokenize(str(tmp_path / "nowhere"), str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert os.listdir(tmp_path) == []
