"""Pre-tokenised text: Megatron's PREFIX.bin and PREFIX.idx, memory mapped.

The .bin file holds the tokens of all sequences one after the other. The .idx file (Megatron-Core ``IndexedDataset``,
little endian) holds: magic ``MMIDIDX\\0\\0``, u64 version 1, u8 token type, u64 number of sequences S, u64 number of
document boundaries D, int32 [S] lengths in tokens, int64 [S] byte offsets into .bin, int64 [D] boundaries: document d
is the sequences boundary d .. boundary d + 1. Mostly a sequence is a document; text that was cut into sentences has
several in one.

A damaged pair is refused with the file's name: half a corpus read as a whole one would go unnoticed.
"""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moetrain.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_LONGEST = 2**31 - 1
_CHUNK = 1 << 24


def files_of(prefix: Path) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def read_indexed(prefix: Path) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """Tokens (memory mapped) and where each document ends in them, int64 [n], growing; empty documents are left out.

    Raises:
        UserError: a file is missing, foreign, cut off, or the two do not belong together.
    """
    binary, index = files_of(prefix)
    for path in (binary, index):
        if not path.is_file():
            raise UserError(f"data.source {prefix}: {path} is missing; both {binary.name} and {index.name} are needed")
    try:
        return _read(binary, index)
    except OSError as error:
        raise UserError(f"{error.filename or index} cannot be read ({error.strerror}); mend its permissions") from None


def _read(binary: Path, index: Path) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    size = index.stat().st_size
    raw = np.memmap(index, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    head = raw[: HEAD.size].tobytes()
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise UserError(f"{index} is no index of tokenised text (its first bytes are wrong); make it with `tokenize`")
    _, version, code, sequences, boundaries = HEAD.unpack(head)
    if version != 1:
        raise UserError(f"{index} has format version {version}, and only 1 is known; make it again with `tokenize`")
    if code not in DTYPES:
        raise UserError(f"{index} names an unknown token type (code {code}); make it again with `tokenize`")
    wanted = HEAD.size + sequences * 12 + boundaries * 8
    if size != wanted:
        raise UserError(
            f"{index} has {size} bytes where its header says {wanted}: it is cut off or damaged; make it again"
        )
    lengths = np.frombuffer(raw, dtype="<i4", count=sequences, offset=HEAD.size)
    starts = np.frombuffer(raw, dtype="<i8", count=sequences, offset=HEAD.size + 4 * sequences)
    documents = np.frombuffer(raw, dtype="<i8", count=boundaries, offset=HEAD.size + 12 * sequences)
    if bool((lengths < 0).any()):
        raise UserError(f"{index} holds a negative length: it is damaged; make it again with `tokenize`")
    ends = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
    total, width = int(ends[-1]), np.dtype(DTYPES[code]).itemsize
    if binary.stat().st_size != total * width:
        raise UserError(
            f"{binary} has {binary.stat().st_size} bytes where {index.name} says {total * width}: "
            "one of the two is cut off or of another corpus; make both again"
        )
    if not np.array_equal(starts, ends[:-1] * width):
        raise UserError(
            f"the sequences of {index} do not lie one after the other in {binary.name}: it is damaged, or of a subset; "
            "make both again"
        )
    if not (boundaries and documents[0] == 0 and documents[-1] == sequences and bool((np.diff(documents) >= 0).all())):
        raise UserError(f"the document boundaries of {index} are damaged; make it again with `tokenize`")
    if not total:
        raise UserError(f"{binary} holds no token; give data.source another corpus")
    ends = ends[documents]
    tokens: npt.NDArray[np.integer] = np.memmap(binary, dtype=DTYPES[code], mode="r")
    return tokens, ends[1:][ends[1:] > ends[:-1]]


class IndexedWriter:
    """Writes PREFIX.bin as documents come and PREFIX.idx, on disk before it has its name, when closed.

    Args:
        prefix: path without ending.
        vocab_size: picks the token type: uint16 where ids fit, else int32.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.binary, self.index = files_of(prefix)
        self._code = 8 if vocab_size <= 2**16 else 4
        self.dtype = np.dtype(DTYPES[self._code])
        self._lengths = array("i")
        self._file = self.binary.open("wb")

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """One document."""
        self.extend(tokens, np.array([len(tokens)]))

    def extend(self, tokens: npt.NDArray[np.integer], ends: npt.NDArray[np.int64]) -> None:
        """Several documents that lie one after the other and end at ``ends``."""
        lengths = np.diff(ends, prepend=0)
        if len(lengths) and int(lengths.max()) > _LONGEST:
            raise UserError(
                f"a document of {lengths.max():,} tokens is too long for {self.index} ({_LONGEST:,}); cut its file up"
            )
        for i in range(0, len(tokens), _CHUNK):  # `tokens` may be a memory map that is larger than memory
            self._file.write(np.ascontiguousarray(tokens[i : i + _CHUNK], dtype=self.dtype).data)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())

    def close(self) -> None:
        """Completes both files."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.frombuffer(self._lengths, dtype=np.intc).astype("<i4")
        starts = (lengths.cumsum(dtype=np.int64) - lengths) * self.dtype.itemsize
        boundaries = np.arange(len(lengths) + 1, dtype="<i8")
        partial = self.index.with_name(self.index.name + ".partial")
        with partial.open("wb") as file:
            file.write(HEAD.pack(MAGIC, 1, self._code, len(lengths), len(boundaries)))
            for column in (lengths, starts.astype("<i8"), boundaries):
                file.write(column.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.index)
