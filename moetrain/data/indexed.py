"""Pre-tokenised text: Megatron's PREFIX.bin and PREFIX.idx, memory mapped.

The .bin file holds the tokens of all documents one after the other, the .idx file how many each has (Megatron-Core
``IndexedDataset``: magic ``MMIDIDX``, version 1, dtype code, counts, int32 lengths, int64 byte offsets, int64 document
boundaries). A damaged pair is refused with the file's name: half a corpus read as a whole one would go unnoticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moetrain.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def files_of(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def read_indexed(prefix: Path) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
    """Tokens (memory mapped) and where each sequence ends in them, int64 [n].

    Raises:
        UserError: a file is missing, foreign, cut off, or the two do not belong together.
    """
    binary, index = files_of(prefix)
    for path in (binary, index):
        if not path.is_file():
            raise UserError(f"data.source {prefix}: {path} is missing; both {binary.name} and {index.name} are needed")
    raw = index.read_bytes()
    if len(raw) < HEAD.size or not raw.startswith(MAGIC):
        raise UserError(f"{index} is no index of tokenised text (its first bytes are wrong); make it with `tokenize`")
    _, version, code, sequences, documents = HEAD.unpack_from(raw)
    if version != 1:
        raise UserError(f"{index} has format version {version}, and only 1 is known; make it again with `tokenize`")
    if code not in DTYPES:
        raise UserError(f"{index} names an unknown token type (code {code}); make it again with `tokenize`")
    wanted = HEAD.size + sequences * 12 + documents * 8
    if len(raw) != wanted:
        raise UserError(
            f"{index} has {len(raw)} bytes where its header says {wanted}: it is cut off or damaged; make it again"
        )
    lengths = np.frombuffer(raw, dtype="<i4", count=sequences, offset=HEAD.size).astype(np.int64)
    if bool((lengths < 0).any()):
        raise UserError(f"{index} holds a negative length: it is damaged; make it again with `tokenize`")
    ends = lengths.cumsum()
    total = int(ends[-1]) if sequences else 0
    size = np.dtype(DTYPES[code]).itemsize
    if binary.stat().st_size != total * size:
        raise UserError(
            f"{binary} has {binary.stat().st_size} bytes where {index.name} says {total * size}: "
            "one of the two is cut off or of another corpus; make both again"
        )
    if not total:
        raise UserError(f"{binary} holds no token; give data.source another corpus")
    tokens: npt.NDArray[np.generic] = np.memmap(binary, dtype=DTYPES[code], mode="r")
    return tokens, ends


class IndexedWriter:
    """Writes PREFIX.bin as documents come and PREFIX.idx when closed.

    Args:
        prefix: path without ending.
        vocab_size: picks the token type: uint16 where ids fit, else int32.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.binary, self.index = files_of(prefix)
        self.code = 8 if vocab_size <= 2**16 else 4
        self._lengths: list[int] = []
        self._file = self.binary.open("wb")

    def add(self, tokens: Iterable[int] | npt.NDArray[np.generic]) -> None:
        array = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens)).astype(DTYPES[self.code])
        self._file.write(array.tobytes())
        self._lengths.append(len(array))

    def close(self) -> None:
        self._file.close()
        lengths = np.asarray(self._lengths, dtype="<i4")
        size = np.dtype(DTYPES[self.code]).itemsize
        starts = (lengths.astype("<i8").cumsum() - lengths) * size
        boundaries = np.arange(len(lengths) + 1, dtype="<i8")
        head = HEAD.pack(MAGIC, 1, self.code, len(lengths), len(boundaries))
        self.index.write_bytes(head + lengths.tobytes() + starts.astype("<i8").tobytes() + boundaries.tobytes())
