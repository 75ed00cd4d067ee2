"""From a config's ``data`` section to a training and a held-out dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetrain.config.run import DataConfig
from moetrain.data.indexed import files_of, read_indexed
from moetrain.data.packing import Ends, TokenDataset, Tokens, check_ids
from moetrain.data.sources import documents_of
from moetrain.data.tokenizers import load_tokenizer
from moetrain.errors import UserError

_PIECE = 1 << 20
_PIECES = 64


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
            f"{self.source} ({self.tokenizer_name}): {_millions(len(self.train.tokens))} tokens in "
            f"{len(self.train):,} training sequences, {len(self.held_out):,} held out"
        )


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 100_000 else f"{count:,}"


def build_data(config: DataConfig, *, vocab_size: int, seed: int) -> Data:
    """Reads and tokenises the source and splits it by documents; a .bin/.idx pair is mapped, not read.

    The held-out split is the last documents, as many as ``held_out`` asks for and at least one sequence: of a pair as
    they lie there, of text after a shuffle by ``seed``. Where documents are too few or too large for that, it is the
    tail of the text instead, cut within a document. No token is in both splits.

    Text is held in memory whole, 2 bytes a token (4 with more than 65536 ids), by every rank: beyond some gigabytes
    ``tokenize`` it first.

    Args:
        config: the ``data`` section.
        vocab_size: the model's; no token may reach it.
        seed: the run's.

    Raises:
        UserError: the source or the tokenizer is missing or damaged, a token does not fit the model, or there is too
            little text for one sequence in each split.
    """
    prefix = Path(config.source)
    if config.source != "stdlib" and prefix.name and any(path.exists() for path in files_of(prefix)):
        (tokens, ends), tokenizer = read_indexed(prefix), "tokenised before"
        _check_some(tokens, vocab_size, config.source)
    else:
        tokens, ends, tokenizer = _text(config, vocab_size, seed)
    splits = _split(tokens, ends, config)
    train, held_out = (
        TokenDataset(
            tokens,
            ends,
            seq_len=config.seq_len,
            pack=config.pack,
            document_mask=config.document_mask,
            vocab_size=vocab_size,
            name=config.source,
        )
        for tokens, ends in splits
    )
    return Data(train, held_out, vocab_size, tokenizer, config.source)


def _text(config: DataConfig, vocab_size: int, seed: int) -> tuple[Tokens, Ends, str]:
    """Tokens, document ends, name of the tokenizer."""
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but model.vocab_size is {vocab_size}: "
            f"set model.vocab_size to at least {tokenizer.vocab_size} or use another tokenizer"
        )
    documents = documents_of(config.source)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    try:
        # memory is taken up only as it is written, and a token is mostly more than a byte
        tokens = np.empty(int(documents.sizes.sum()) + 2 * len(documents), dtype)
        ends = np.empty(len(documents), np.int64)
        at = 0
        for i, number in enumerate(np.random.default_rng(seed).permutation(len(documents))):
            document = documents[int(number)]
            ids = tokenizer.encode(document.read(), document.where)
            if at + len(ids) >= len(tokens):
                tokens = np.concatenate([tokens, np.empty(len(tokens) + len(ids), dtype)])
            tokens[at : at + len(ids)] = ids
            at += len(ids) + 1
            tokens[at - 1], ends[i] = tokenizer.eos, at
    except MemoryError:
        raise UserError(
            f"data.source {config.source} does not fit in memory; turn it into .bin and .idx with `tokenize` first"
        ) from None
    return tokens[:at], ends, tokenizer.name


def _check_some(tokens: Tokens, vocab_size: int, name: str) -> None:
    """Reads a small corpus whole and of a large one 64 pieces: a wrong tokenizer shows at the start, not at night."""
    starts = range(0, len(tokens), max(_PIECE, -(-len(tokens) // _PIECES)))
    for start in starts:
        check_ids(tokens[start : start + _PIECE], vocab_size, name)


def _split(tokens: Tokens, ends: Ends, config: DataConfig) -> tuple[tuple[Tokens, Ends], tuple[Tokens, Ends]]:
    """Tokens and document ends for training, and those held out."""
    total, least = len(tokens), config.seq_len if config.pack else 1
    if config.held_out:
        wanted = max(least, round(total * config.held_out))
        documents = int(np.searchsorted(ends, min(total * (1.0 - config.held_out), total - least), side="right"))
        at = int(ends[documents - 1]) if documents else 0
        if at < least or total - at > 2 * wanted:  # documents are too coarse
            at = total - wanted
    else:
        at = total
    if at < least:
        raise UserError(
            f"data.source {config.source} has {total:,} tokens, too few for one sequence of data.seq_len "
            f"{config.seq_len} in training beside data.held_out {config.held_out:g}; give more text or smaller values"
        )
    inside = int(np.searchsorted(ends, at, side="left"))  # the document that ends at or after the cut
    last = int(np.searchsorted(ends, at, side="right"))
    return (tokens[:at], np.append(ends[:inside], at)), (tokens[at:], ends[last:] - at)
