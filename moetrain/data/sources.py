"""Where text comes from: the standard library of this Python, a folder, a file. A source is a sequence of documents.

The standard library's source text is real text that every machine already has; it differs between Python versions (and
in a few generated files between builds), so runs on it compare only within one.

Nothing is read before it is asked for: a file is a document and known by its path, a .jsonl file's documents are known
by where their lines lie (20 bytes each), so a corpus far larger than memory can be gone through in pieces.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from moetrain.errors import UserError

ENDINGS = (".txt", ".md", ".rst", ".py", ".jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_SHORTEST_JSON = len(b'{"text":""}')
_CHUNK = 1 << 24

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """One document: a whole file, or (``line`` > 0) the bytes start .. stop of a .jsonl file. Small, and pickles."""

    path: Path
    start: int
    stop: int
    line: int

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.path} line {self.line}" if self.line else str(self.path)

    def read(self) -> bytes:
        """Its text.

        Raises:
            UserError: the file cannot be read, or the line is no JSON object with a string under ``text``.
        """
        try:
            if not self.line:
                return self.path.read_bytes()
            with self.path.open("rb") as file:
                file.seek(self.start)
                raw = file.read(self.stop - self.start)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        try:
            return bytes(json.loads(raw)["text"].encode())
        except UnicodeEncodeError:
            raise UserError(f"{self.where} holds half a surrogate pair, which is no text; mend or remove it") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{self.where} is no JSON object with a string under `text`; mend or remove it") from None


class Documents(Sequence[Document]):
    """The documents of some files, in the files' order.

    Args:
        files: text files; those ending in .jsonl have a document a line (blank lines are none), others are one each.

    Raises:
        UserError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        found = [_lines(path) if path.suffix.lower() == ".jsonl" else _whole(path) for path in self.files]
        self._first = np.cumsum([0, *(len(starts) for starts, _, _ in found)])
        nothing = np.empty(0, np.int64)
        self._starts, self._stops, self._numbers = (
            np.concatenate([nothing, *column]) for column in (zip(*found, strict=True) if found else ((), (), ()))
        )

    @property
    def sizes(self) -> Int64:
        """Bytes of each document as it lies on disk, [n]."""
        sizes: Int64 = self._stops - self._starts
        return sizes

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, number: int) -> Document: ...
    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...
    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        path = self.files[int(np.searchsorted(self._first, number, side="right")) - 1]
        return Document(path, int(self._starts[number]), int(self._stops[number]), int(self._numbers[number]))


def documents_of(source: str) -> Documents:
    """Documents in a fixed order: that of the paths, written with slashes, whatever machine they lie on.

    Args:
        source: ``stdlib``, a text file, or a folder (searched through, files ending in .txt .md .rst .py .jsonl; .json
            is left out, as nothing says where its text is). A file is a document; a .jsonl file has one a line, under
            ``text``.

    Raises:
        UserError: nothing there, or nothing in it.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in _sorted(root, (".py",)) if not _NOT_LIBRARY.intersection(p.relative_to(root).parts)]
    else:
        root = Path(source)
        if root.suffix in (".bin", ".idx"):
            raise UserError(
                f"data.source {root} is half of a tokenised pair; leave the ending out: {root.with_suffix('')}"
            )
        if root.is_file():
            paths = [root]
        elif root.is_dir():
            paths = _sorted(root, ENDINGS)
            if not paths:
                raise UserError(f"data.source {root} holds no text file ({', '.join(ENDINGS)}); give another folder")
        else:
            raise UserError(
                f"data.source {root} does not exist; give `stdlib`, a text or .jsonl file, a folder, or a "
                "PREFIX of .bin and .idx"
            )
    found = Documents(paths)
    if not len(found):
        raise UserError(f"data.source {source} holds no document; give another source")
    return found


def _sorted(root: Path, endings: tuple[str, ...]) -> list[Path]:
    files = (p for p in root.rglob("*") if p.suffix.lower() in endings and p.is_file())
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def _whole(path: Path) -> tuple[Int64, Int64, Int64]:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    return np.array([0]), np.array([size]), np.array([0])


def _lines(path: Path) -> tuple[Int64, Int64, Int64]:
    """Where the lines that are not blank start and stop, and their numbers from 1."""
    stops, size = [], 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                stops.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size)
                size += len(chunk)
            stop = np.concatenate([*stops, [size]]).astype(np.int64)  # a last line without an end; or an empty one
            start = np.concatenate([[0], stop[:-1] + 1])
            kept = stop - start >= _SHORTEST_JSON
            for i in np.flatnonzero(~kept & (stop > start)):  # too short to be right: wrong or blank?
                file.seek(int(start[i]))
                kept[i] = bool(file.read(int(stop[i] - start[i])).strip())
    except OSError as error:
        raise _unreadable(path, error) from None
    return start[kept], stop[kept], np.flatnonzero(kept) + 1


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error.strerror}); mend its permissions or leave it out")
