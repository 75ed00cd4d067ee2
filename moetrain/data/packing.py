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

from moetrain.errors import UserError

Tokens = npt.NDArray[np.integer]
Ends = npt.NDArray[np.int64]


class TokenDataset:
    """Sequences of ``seq_len`` tokens.

    Args:
        tokens: ids of all documents, one after the other, each with its end token.
        ends: where each document ends in ``tokens``, int64, growing.
        seq_len: T.
        pack: fill sequences with several documents (the tail that fills none is left out); else one document a
            sequence, cut off or padded.
        document_mask: also give ``document_ids``, which count from 0 in each sequence.
        vocab_size: the model's. Every sequence is held against it: a corpus may be too large to be read at the start.
        name: what the tokens are from, for messages.
    """

    def __init__(
        self,
        tokens: Tokens,
        ends: Ends,
        *,
        seq_len: int,
        pack: bool,
        document_mask: bool,
        vocab_size: int,
        name: str = "the data",
    ) -> None:
        self.tokens, self.ends, self.seq_len = tokens, ends, seq_len
        self.pack, self.document_mask = pack, document_mask
        self.vocab_size, self.name = vocab_size, name

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len if self.pack else len(self.ends)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """``input_ids``, ``labels`` (same positions, -100 = no loss), int64 [T]; ``document_ids`` or ``attention_mask``
        where they say something.

        Raises:
            UserError: a token does not fit the model.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        if not self.pack:
            return self._document(number)
        first = number * self.seq_len
        ids = self._ids(first, first + self.seq_len)
        item = {"input_ids": ids, "labels": ids.clone()}
        if self.document_mask:
            places = np.arange(first, first + self.seq_len)
            numbers = np.searchsorted(self.ends, places, side="right")
            item["document_ids"] = torch.from_numpy(numbers - numbers[0])
        return item

    def padding(self) -> dict[str, Tensor]:
        """A sequence with nothing in it."""
        item = {key: torch.zeros(self.seq_len, dtype=torch.int64) for key in ("input_ids", "attention_mask")}
        item["labels"] = torch.full((self.seq_len,), -100)
        if self.document_mask:
            item["document_ids"] = torch.zeros(self.seq_len, dtype=torch.int64)
        return item

    def _document(self, number: int) -> dict[str, Tensor]:
        first = int(self.ends[number - 1]) if number else 0
        ids = self._ids(first, min(int(self.ends[number]), first + self.seq_len))
        item = self.padding()
        item["input_ids"][: len(ids)] = item["labels"][: len(ids)] = ids
        item["attention_mask"][: len(ids)] = 1
        if len(ids) == self.seq_len:
            del item["attention_mask"]
        return item

    def _ids(self, first: int, last: int) -> Tensor:
        ids = self.tokens[first:last].astype(np.int64)
        check_ids(ids, self.vocab_size, self.name)
        return torch.from_numpy(ids)


def check_ids(ids: Tokens, vocab_size: int, name: str) -> None:
    """Refuses ids that the model has no embedding for.

    Raises:
        UserError: an id is negative or at least ``vocab_size``.
    """
    if not len(ids):
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0:
        raise UserError(f"the tokens of {name} go down to {smallest}: the data is damaged; make it again")
    if largest >= vocab_size:
        raise UserError(
            f"the tokens of {name} go up to {largest}, but model.vocab_size is {vocab_size}: "
            f"set model.vocab_size to at least {largest + 1} or use another tokenizer"
        )
