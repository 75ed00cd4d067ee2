"""Documents to sequences of equal length.

All tokens of a split are one array (or one memory map) with the places where documents end; a sequence is cut from it
when it is asked for. Packed sequences follow each other without a gap, as DeepSeek packs (V3 paper 4.1); a document
mask keeps documents of a sequence from seeing each other, and losses from crossing between them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.generic]
Ends = npt.NDArray[np.int64]


class TokenDataset:
    """Sequences of ``seq_len`` tokens.

    Args:
        tokens: ids of all documents, one after the other, each with its end token.
        ends: where each document ends in ``tokens``, int64, growing.
        seq_len: T.
        pack: fill sequences with several documents (the tail that fills none is left out); else one document a
            sequence, cut off or padded.
        document_mask: also give ``document_ids``.
    """

    def __init__(self, tokens: Tokens, ends: Ends, *, seq_len: int, pack: bool, document_mask: bool) -> None:
        self.tokens, self.ends, self.seq_len = tokens, ends, seq_len
        self.pack, self.document_mask = pack, document_mask

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len if self.pack else len(self.ends)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """``input_ids``, ``labels`` (same positions, -100 = no loss), int64 [T]; ``document_ids`` or ``attention_mask``
        where they say something."""
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        if not self.pack:
            return self._document(number)
        first = number * self.seq_len
        ids = self._ids(first, first + self.seq_len)
        item = {"input_ids": ids, "labels": ids}
        if self.document_mask:
            places = np.arange(first, first + self.seq_len)
            numbers = np.searchsorted(self.ends, places, side="right")
            item["document_ids"] = torch.from_numpy(numbers - numbers[0])
        return item

    def padding(self) -> dict[str, Tensor]:
        """A sequence with nothing in it."""
        zeros = torch.zeros(self.seq_len, dtype=torch.int64)
        item = {"input_ids": zeros, "labels": torch.full_like(zeros, -100), "attention_mask": zeros}
        if self.document_mask:
            item["document_ids"] = zeros
        return item

    def _document(self, number: int) -> dict[str, Tensor]:
        first = int(self.ends[number - 1]) if number else 0
        ids = self._ids(first, min(int(self.ends[number]), first + self.seq_len))
        item = self.padding()
        for key, value in (("input_ids", ids), ("labels", ids), ("attention_mask", torch.ones_like(ids))):
            item[key] = torch.cat([value, item[key][len(ids) :]])
        if len(ids) == self.seq_len:
            del item["attention_mask"]
        return item

    def _ids(self, first: int, last: int) -> Tensor:
        return torch.from_numpy(np.asarray(self.tokens[first:last]).astype(np.int64))
