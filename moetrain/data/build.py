"""From a config's ``data`` section to a training and a held-out dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetrain.config.run import DataConfig
from moetrain.data.indexed import files_of, read_indexed
from moetrain.data.packing import Ends, TokenDataset, Tokens
from moetrain.data.sources import documents_of
from moetrain.data.tokenizers import load_tokenizer
from moetrain.errors import UserError


@dataclass(frozen=True)
class Data:
    """Both splits and what they were made from."""

    train: TokenDataset
    held_out: TokenDataset
    vocab_size: int
    tokenizer_name: str
    source: str

    def describe(self) -> str:
        """One line for the console."""
        return (
            f"{self.source} ({self.tokenizer_name}): {len(self.train.tokens) / 1e6:,.1f} M tokens in "
            f"{len(self.train):,} training sequences, {len(self.held_out):,} held out"
        )


def build_data(config: DataConfig, *, vocab_size: int, seed: int) -> Data:
    """Reads and tokenises the source (a .bin/.idx pair is mapped, not read) and splits it by documents.

    The held-out split is the last documents: of a pair as they lie there, of text after a shuffle by ``seed``.

    Args:
        config: the ``data`` section.
        vocab_size: the model's; no token may reach it.
        seed: the run's.

    Raises:
        UserError: the source or the tokenizer is missing or damaged, a token does not fit the model, or there is too
            little text for one sequence in each split.
    """
    prefix = Path(config.source)
    if config.source != "stdlib" and any(path.exists() for path in files_of(prefix)):
        tokens, ends = read_indexed(prefix)
        largest, name = _largest(tokens), "tokenised before"
    else:
        tokens, ends, largest, name = _text(config, seed)
    if largest > vocab_size:
        raise UserError(
            f"the tokens of {config.source} ({name}) go up to {largest - 1}, but model.vocab_size is {vocab_size}: "
            f"set model.vocab_size to at least {largest} or use another tokenizer"
        )
    cut = _cut(ends, config.held_out)
    at = int(ends[cut - 1]) if cut else 0
    if cut == 0:  # one document: held out is its tail
        cut, at = 1, len(tokens) - max(1, round(len(tokens) * config.held_out)) if config.held_out else len(tokens)
        parts = ((tokens[:at], np.array([at])), (tokens[at:], np.array([len(tokens) - at])))
    else:
        parts = ((tokens[:at], ends[:cut]), (tokens[at:], ends[cut:] - at))
    train, held_out = (
        TokenDataset(t, e, seq_len=config.seq_len, pack=config.pack, document_mask=config.document_mask)
        for t, e in parts
    )
    if not len(train):
        raise UserError(
            f"data.source {config.source} has {len(tokens):,} tokens, too few for one sequence of data.seq_len "
            f"{config.seq_len} in training; give more text or a smaller data.seq_len"
        )
    if config.held_out and not len(held_out):
        raise UserError(
            f"data.held_out {config.held_out:g} of {config.source} is less than one sequence of data.seq_len "
            f"{config.seq_len}; give a larger data.held_out, or 0 for none"
        )
    return Data(train, held_out, vocab_size, name, config.source)


def _text(config: DataConfig, seed: int) -> tuple[Tokens, Ends, int, str]:
    """Tokens, document ends, vocabulary size and name of the tokenizer."""
    tokenizer = load_tokenizer(config.tokenizer)
    documents = documents_of(config.source)
    order = np.random.default_rng(seed).permutation(len(documents))
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    end = np.array([tokenizer.eos], dtype=dtype)
    pieces: list[Tokens] = []
    for number in order:
        document = documents[number]
        pieces += [tokenizer.encode(document.read(), document.where).astype(dtype), end]
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)[1::2]
    return np.concatenate(pieces), ends, tokenizer.vocab_size, tokenizer.name


def _largest(tokens: Tokens) -> int:
    """One more than the largest id, read in pieces so that a mapped corpus never lies in memory whole."""
    step = 1 << 24
    return 1 + max(int(np.max(tokens[i : i + step])) for i in range(0, len(tokens), step))


def _cut(ends: Ends, held_out: float) -> int:
    """Number of documents that train; 0 where a single document has to be split."""
    if not held_out:
        return len(ends)
    wanted = int(ends[-1]) * (1.0 - held_out)
    return min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)
