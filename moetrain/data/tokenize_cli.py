"""``tokenize``: text to PREFIX.bin and PREFIX.idx, in parallel, and again from where it stopped.

Documents are cut into parts of a fixed size; a part that is finished stays in PREFIX.parts until all are. So a run
that was killed repeats at most one part a worker, and the result does not depend on workers or interruptions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.progress import Progress

from moetrain.data.indexed import IndexedWriter, files_of, read_indexed
from moetrain.data.sources import documents_of
from moetrain.data.tokenizers import load_tokenizer
from moetrain.errors import UserError

PART_DOCUMENTS = 256


def tokenize(source: str, out: str, *, tokenizer: str, workers: int, part_documents: int = PART_DOCUMENTS) -> None:
    """Writes ``out``.bin and ``out``.idx; each document gets its end token.

    Args:
        source: ``stdlib``, a text file or a folder of text (see ``documents_of``).
        out: prefix of the two files.
        tokenizer: ``bytes`` or the path of a tokenizer.json.
        workers: processes.
        part_documents: documents of a part; an interrupted run goes on only with the same number.

    Raises:
        UserError: source or tokenizer missing or unusable, or the disk is not writable.
    """
    prefix = Path(out)
    vocab_size = load_tokenizer(tokenizer).vocab_size
    documents = documents_of(source)
    parts = prefix.with_name(prefix.name + ".parts")
    numbers = range(-(-len(documents) // part_documents))
    try:
        _prepare(parts, _fingerprint(source, tokenizer, part_documents, [d.where for d in documents]))
        open_parts = [n for n in numbers if not files_of(parts / f"{n:06d}")[1].exists()]
        with Progress() as progress:
            bar = progress.add_task("tokenize", total=len(numbers), completed=len(numbers) - len(open_parts))
            with ProcessPoolExecutor(
                max_workers=min(workers, len(open_parts) or 1), mp_context=get_context("spawn")
            ) as pool:
                running = [pool.submit(_part, source, tokenizer, str(parts), n, part_documents) for n in open_parts]
                for done in as_completed(running):
                    done.result()
                    progress.advance(bar)
        sequences, tokens = _join(parts, prefix, len(numbers), vocab_size)
        shutil.rmtree(parts)
    except OSError as error:
        raise UserError(f"{prefix} cannot be written ({error.strerror}); make room or give another --out") from error
    print(f"{prefix}.bin and .idx: {sequences:,} documents, {tokens:,} tokens ({tokenizer})")


def _part(source: str, tokenizer: str, parts: str, number: int, size: int) -> None:
    """Tokenises one part; its .idx, which appears last, says that it is whole."""
    coder = load_tokenizer(tokenizer)
    name = Path(parts) / f"{number:06d}"
    partial = name.with_name(name.name + f".{os.getpid()}.partial")
    writer = IndexedWriter(partial, coder.vocab_size)
    for document in documents_of(source)[number * size : (number + 1) * size]:
        ids = coder.encode(document.read(), document.where)
        writer.add(np.append(ids.astype(np.int64), coder.eos))
    writer.close()
    for written, wanted in zip(files_of(partial), files_of(name), strict=True):
        os.replace(written, wanted)


def _join(parts: Path, prefix: Path, count: int, vocab_size: int) -> tuple[int, int]:
    """All parts behind each other; the files get their names when they are complete."""
    partial = prefix.with_name(prefix.name + ".partial")
    writer = IndexedWriter(partial, vocab_size)
    sequences = total = 0
    for number in range(count):
        tokens, ends = read_indexed(parts / f"{number:06d}")
        first = 0
        for end in ends:
            writer.add(tokens[first:end])
            first = int(end)
        sequences, total = sequences + len(ends), total + len(tokens)
    writer.close()
    for written, wanted in zip(files_of(partial), files_of(prefix), strict=True):
        os.replace(written, wanted)
    return sequences, total


def _prepare(parts: Path, fingerprint: str) -> None:
    """Keeps the parts of an interrupted run of the same job; those of another are of no use."""
    manifest = parts / "job.json"
    if manifest.is_file() and json.loads(manifest.read_text()) != fingerprint:
        shutil.rmtree(parts)
    parts.mkdir(parents=True, exist_ok=True)
    for left in parts.glob("*.partial.*"):
        left.unlink()
    manifest.write_text(json.dumps(fingerprint))


def _fingerprint(source: str, tokenizer: str, size: int, documents: list[str]) -> str:
    digest = hashlib.sha256(json.dumps([source, tokenizer, size, documents]).encode())
    if tokenizer != "bytes":
        digest.update(Path(tokenizer).read_bytes())
    for where in documents:
        path = Path(where)
        if path.is_file():
            entry = path.stat()
            digest.update(f"{entry.st_size} {entry.st_mtime_ns}".encode())
    return digest.hexdigest()
