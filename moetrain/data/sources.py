"""Where text comes from: the standard library of this Python, a folder, a file. A source is a list of named documents.

The standard library's source text is real text that every machine already has; it differs between Python versions, so
runs on it compare only within one.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moetrain.errors import UserError

ENDINGS = (".txt", ".md", ".rst", ".py", ".jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One document: where it is from, and how to read it."""

    where: str
    read: Callable[[], bytes]


def documents_of(source: str) -> list[Document]:
    """Documents in a fixed order.

    Args:
        source: ``stdlib``, a text file, or a folder (searched through, files ending in .txt .md .rst .py .jsonl). A
            file is a document; a .jsonl file has one a line, under ``text``.

    Raises:
        UserError: nothing there, or nothing in it.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in _sorted(root, (".py",)) if not _NOT_LIBRARY.intersection(p.relative_to(root).parts)]
    else:
        root = Path(source)
        if root.is_file():
            paths = [root]
        elif root.is_dir():
            paths = _sorted(root, ENDINGS)
            if not paths:
                raise UserError(f"data.source {root} holds no text file ({', '.join(ENDINGS)}); give another folder")
        else:
            raise UserError(
                f"data.source {root} does not exist; give `stdlib`, a text file, a folder, or a PREFIX of .bin and .idx"
            )
    found = [document for path in paths for document in _documents_in(path)]
    if not found:
        raise UserError(f"data.source {source} holds no document; give another source")
    return found


def _sorted(root: Path, endings: tuple[str, ...]) -> list[Path]:
    """By path, written with slashes, so that every machine has the same order."""
    files = (p for p in root.rglob("*") if p.suffix in endings and p.is_file())
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def _documents_in(path: Path) -> Iterator[Document]:
    if path.suffix != ".jsonl":
        yield Document(str(path), lambda: _bytes(path))
        return
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            text = json.loads(line)["text"].encode()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{where} is no JSON object with a string under `text`; mend or remove it") from None
        yield Document(where, lambda text=text: text)  # type: ignore[misc]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); mend its permissions or leave it out") from None
