"""``tokenize``: text to PREFIX.bin and PREFIX.idx, in parallel, and again from where it stopped.

Documents are cut into parts of about the same number of bytes; a part that is finished stays in PREFIX.parts until all
are. So a run that was killed repeats at most one part a worker, and the result, the parts one behind the other, does
not depend on workers or interruptions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moetrain.data.indexed import IndexedWriter, files_of, read_indexed
from moetrain.data.sources import Document, Documents, documents_of
from moetrain.data.tokenizers import Tokenizer, load_tokenizer
from moetrain.errors import UserError

_SMALLEST_PART, _LARGEST_PART, _WANTED_PARTS = 1 << 18, 1 << 25, 256
_LINE_EVERY = 10.0  # seconds


def tokenize(source: str, out: str, *, tokenizer: str, workers: int, part_bytes: int | None = None) -> None:
    """Writes ``out``.bin and ``out``.idx; each document gets its end token.

    Args:
        source: ``stdlib``, a text file, a .jsonl file or a folder of them (see ``documents_of``).
        out: prefix of the two files.
        tokenizer: ``bytes`` or the path of a tokenizer.json.
        workers: processes; 1 works in this one.
        part_bytes: text of a part; by default a 256th of the source between 256 KiB and 32 MiB. An interrupted run goes
            on only with the same number.

    Raises:
        UserError: source or tokenizer missing or unusable, the disk is not writable, or a worker was killed.
    """
    prefix = Path(out)
    if not prefix.name:
        raise UserError(f"--out {out!r} is no prefix; give a path that ends in a name, for instance data/pretrain")
    coder = _coder(tokenizer)
    documents = documents_of(source)
    if part_bytes is None:
        part_bytes = min(max(int(documents.sizes.sum()) // _WANTED_PARTS, _SMALLEST_PART), _LARGEST_PART)
    cuts = _cuts(documents, part_bytes)
    parts = prefix.with_name(prefix.name + ".parts")
    try:
        _prepare(parts, _fingerprint(documents, tokenizer, coder, part_bytes))
        missing = [n for n in range(len(cuts) - 1) if not _is_whole(parts / f"{n:06d}", cuts[n + 1] - cuts[n])]
        with _progress(len(cuts) - 1, len(cuts) - 1 - len(missing)) as advance:
            work = ((documents[cuts[n] : cuts[n + 1]], tokenizer, parts / f"{n:06d}") for n in missing)
            if workers == 1:
                for job in work:
                    advance(_part(*job))
            else:
                _in_processes(work, min(workers, len(missing)), advance)
        total = _join(parts, prefix, len(cuts) - 1, coder.vocab_size)
        shutil.rmtree(parts)
    except BrokenProcessPool:
        raise UserError(
            "a process of `tokenize` was killed, perhaps for lack of memory; run it again with fewer --workers to go on"
        ) from None
    except OSError as error:
        raise UserError(f"{prefix} cannot be written ({error.strerror}); make room or give another --out") from error
    print(f"{prefix}.bin and .idx: {len(documents):,} documents, {total:,} tokens ({tokenizer})")


@functools.lru_cache(maxsize=1)
def _coder(name: str) -> Tokenizer:
    """Read once in each process: DeepSeek's takes a third of a second."""
    return load_tokenizer(name)


def _cuts(documents: Documents, part_bytes: int) -> list[int]:
    """Part n is documents cuts[n] .. cuts[n + 1]. A part ends with the document that fills it."""
    filled = documents.sizes.cumsum() // part_bytes
    inner = np.flatnonzero(np.diff(filled)) + 1
    return [0, *inner[inner < len(documents)].tolist(), len(documents)]


def _in_processes(
    work: Iterator[tuple[list[Document], str, Path]], workers: int, advance: Callable[[int], None]
) -> None:
    """Two jobs a worker are under way at a time, so that a corpus of many parts is never listed whole."""
    if not workers:
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    running: set[Future[int]] = set()
    try:
        while True:
            while len(running) < 2 * workers and (job := next(work, None)) is not None:
                running.add(pool.submit(_part, *job))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                advance(future.result())
    finally:  # after an error: those that have not begun never do
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Runs in each worker. A killed parent cannot end it, and it would wait for the next job for ever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches workers too: they go without a traceback
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _part(documents: Sequence[Document], tokenizer: str, name: Path) -> int:
    """Tokenises one part and gives its number of tokens; its .idx, which appears last, says that it is whole."""
    coder = _coder(tokenizer)
    partial = name.with_name(f"{name.name}.{os.getpid()}.partial")
    writer = IndexedWriter(partial, coder.vocab_size)
    total = 0
    for document in documents:
        ids = coder.encode(document.read(), document.where)
        writer.add(np.append(ids.astype(writer.dtype), writer.dtype.type(coder.eos)))
        total += len(ids) + 1
    writer.close()
    _rename(partial, name)
    return total


def _is_whole(name: Path, documents: int) -> bool:
    if not files_of(name)[1].exists():
        return False
    try:
        return len(read_indexed(name)[1]) == documents
    except UserError:  # the machine went down while it was written
        return False


def _join(parts: Path, prefix: Path, count: int, vocab_size: int) -> int:
    """All parts behind each other; the files get their names when they are complete. Gives the number of tokens."""
    partial = prefix.with_name(prefix.name + ".partial")
    writer = IndexedWriter(partial, vocab_size)
    total = 0
    for number in range(count):
        tokens, ends = read_indexed(parts / f"{number:06d}")
        writer.extend(tokens, ends)
        total += len(tokens)
    writer.close()
    _rename(partial, prefix)
    return total


def _rename(old: Path, new: Path) -> None:
    """The .idx goes first and comes last, so that it never stands beside a .bin of another run."""
    (old_binary, old_index), (new_binary, new_index) = files_of(old), files_of(new)
    new_index.unlink(missing_ok=True)
    os.replace(old_binary, new_binary)
    os.replace(old_index, new_index)


def _prepare(parts: Path, fingerprint: str) -> None:
    """Keeps the parts of an interrupted run of the same job; those of another are of no use."""
    manifest = parts / "job.txt"
    if manifest.is_file():
        if manifest.read_text() != fingerprint:
            shutil.rmtree(parts)
    elif parts.exists() and any(parts.iterdir()):
        raise UserError(f"{parts} is in the way: `tokenize` keeps its parts there; move it or give another --out")
    parts.mkdir(parents=True, exist_ok=True)
    for left in parts.glob("*.partial*"):
        left.unlink(missing_ok=True)
    manifest.write_text(fingerprint)


def _fingerprint(documents: Documents, tokenizer: str, coder: Tokenizer, part_bytes: int) -> str:
    """Of everything that the parts depend on; files by size and time of change."""
    digest = hashlib.sha256(json.dumps([coder.name, coder.vocab_size, coder.eos, part_bytes]).encode())
    if tokenizer != "bytes":
        digest.update(Path(tokenizer).read_bytes())
    for path in documents.files:
        entry = path.stat()
        digest.update(f"{path}\n{entry.st_size} {entry.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line now and then; what it gives is called with the tokens of each finished part."""
    console, began, tokens = Console(), time.monotonic(), 0
    if done:
        console.print(f"tokenize: {done} of {total} parts are there already", highlight=False)
    if console.is_terminal:
        columns = (TextColumn("tokenize"), BarColumn(), MofNCompleteColumn(), TextColumn("parts  {task.fields[rate]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("", total=total, completed=done, rate="")

            def advance(more: int) -> None:
                nonlocal tokens
                tokens += more
                bar.update(task, advance=1, rate=f"{tokens / (time.monotonic() - began):,.0f} tok/s")

            yield advance
        return
    last = began

    def line(more: int) -> None:
        nonlocal tokens, done, last
        tokens, done, now = tokens + more, done + 1, time.monotonic()
        if now - last >= _LINE_EVERY or done == total:
            print(f"tokenize: {done}/{total} parts  {tokens / max(now - began, 1e-9):,.0f} tok/s", flush=True)
            last = now

    yield line
