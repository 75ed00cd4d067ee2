"""A window: the K micro-batches of one optimizer step on one data rank, whole before the first forward.

What a step is defined on has to be known before anything of it is computed: how many tokens have a loss, how many are
routed, where documents end. So the micro-batches are gathered here first, and every later part asks the window.

Legend: B rows, T tokens, K slots.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORED = -100
_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "document_ids")


@dataclass(frozen=True)
class MicroBatch:
    """What one forward sees, with its slot, which travels with it so that any order of execution works.

    Attributes:
        slot: number in the window, 0..K-1.
        input_ids, labels: int64 [B, T], the same positions (Hugging Face convention: shifted inside, -100 = no loss).
        attention_mask: [B, T], 0 where a token is padding; None = no padding.
        position_ids: [B, T] or None.
        document_ids: [B, T] or None: packed documents; a loss never asks for a token of another document.
        extra: further tensors for the model, passed through as they are.
    """

    slot: int
    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def targets(self, ahead: int = 1) -> Tensor:
        """[B, T]: the label ``ahead`` places on, -100 past the row's end, across a document's end, and at padding.

        A padding token predicts nothing, also where it stands before a row's first token.
        """
        B, T = self.labels.shape
        out = self.labels.new_full((B, T), IGNORED)
        if ahead < T:
            out[:, : T - ahead] = self.labels[:, ahead:]
            if self.document_ids is not None:
                other = self.document_ids[:, ahead:] != self.document_ids[:, : T - ahead]
                out[:, : T - ahead].masked_fill_(other, IGNORED)
        if self.attention_mask is not None:
            out.masked_fill_(self.attention_mask == 0, IGNORED)
        return out

    def routed(self, depth: int = 0) -> Tensor | None:
        """[B, T] bool: tokens that count in expert statistics; None = all.

        In the main model (depth 0) these are the tokens that are not padding. MTP module ``depth`` works on positions
        whose input ``depth`` places on is a real token of the same document; the rest is padding to it.
        """
        B, T = self.input_ids.shape
        mask = None if self.attention_mask is None else self.attention_mask != 0
        if depth == 0:
            return mask
        keep = torch.zeros(B, T, dtype=torch.bool, device=self.input_ids.device)
        if depth < T:
            keep[:, : T - depth] = True
            if mask is not None:
                keep[:, : T - depth] &= mask[:, depth:] & mask[:, : T - depth]
            if self.document_ids is not None:
                keep[:, : T - depth] &= self.document_ids[:, depth:] == self.document_ids[:, : T - depth]
        return keep

    def attention_documents(self) -> Tensor | None:
        """[B, T] document numbers for the attention mask, with padding as a document of its own; None = not needed.

        Padding after a row's last token needs no mask: causal attention never looks there.
        """
        if self.attention_mask is None or self._padding_is_last:
            return self.document_ids
        base = torch.zeros_like(self.input_ids) if self.document_ids is None else self.document_ids
        return base.masked_fill(self.attention_mask == 0, -1)

    _padding_is_last: bool = True

    def empty(self) -> MicroBatch:
        """The same shape with nothing in it: padding only."""
        zeros = torch.zeros_like(self.input_ids)
        return dataclasses.replace(
            self,
            input_ids=zeros,
            labels=torch.full_like(zeros, IGNORED),
            attention_mask=zeros,
            position_ids=None if self.position_ids is None else zeros,
            document_ids=None if self.document_ids is None else zeros,
            _padding_is_last=True,
        )

    def with_rows(self, rows: int) -> MicroBatch:
        """The same with rows of padding, until there are ``rows``; it has no extras that would have to grow, too."""
        missing = rows - self.input_ids.shape[0]
        if not missing:
            return self
        empty = self.empty()
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        filled: dict[str, Any] = {}
        for name in _KNOWN:
            mine = mask if name == "attention_mask" else getattr(self, name)
            if mine is not None:
                filled[name] = torch.cat([mine, getattr(empty, name)[:1].expand(missing, -1)])
        return dataclasses.replace(self, **filled)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device, without waiting for the copy."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        moved = {name: move(getattr(self, name)) for name in _KNOWN}
        extra = {k: v.to(device, non_blocking=True) for k, v in self.extra.items()}
        return dataclasses.replace(self, extra=extra, **moved)  # type: ignore[arg-type]


class Window(Sequence[MicroBatch]):
    """The micro-batches of one optimizer step on one rank, in slot order.

    Args:
        micro_batches: mappings with ``input_ids`` and ``labels`` [B, T] and optionally ``attention_mask``,
            ``position_ids``, ``document_ids``; other tensors are passed through. Shapes may differ between them. A
            last, shorter window is a window.

    Raises:
        ValueError: no micro-batch, a key missing, or shapes that do not fit.
    """

    def __init__(self, micro_batches: Iterable[Mapping[str, Tensor] | MicroBatch]) -> None:
        self._items = [_micro_batch(slot, item) for slot, item in enumerate(micro_batches)]
        if not self._items:
            raise ValueError("a window needs at least one micro-batch")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, slot):  # type: ignore[no-untyped-def]
        return self._items[slot]

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._items)

    def to(self, device: torch.device | str) -> Window:
        return Window.of(item.to(device) for item in self._items)

    @classmethod
    def of(cls, items: Iterable[MicroBatch]) -> Window:
        """Of micro-batches that came out of a window."""
        window = cls.__new__(cls)
        window._items = [dataclasses.replace(item, slot=slot) for slot, item in enumerate(items)]
        return window


def windows(
    loader: Iterable[Mapping[str, Tensor]], micro_batches: int, *, group: dist.ProcessGroup | None = None
) -> Iterator[Window]:
    """Windows of ``micro_batches`` micro-batches from any loader; the last may be shorter and is not lost.

    Each rank's ``loader`` gives that rank's own micro-batches. Where ranks may have different numbers of them, give
    ``group`` (``dist.group.WORLD``): a rank that has fewer fills its window with micro-batches of padding, and all end
    together; it costs one number a window. Padding has the shape and the extra tensors of the rank's last micro-batch;
    that of a rank without any has no extras.
    """
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a whole number from 1 on, not {micro_batches}")
    items = iter(loader)
    padding: Mapping[str, Tensor] | MicroBatch = _PADDING  # for a rank that never had any
    while True:
        window: list[Mapping[str, Tensor] | MicroBatch] = list(itertools.islice(items, micro_batches))
        most = len(window) if group is None else _most(len(window), group)
        if most == 0:
            return
        if window:
            padding = Window(window[-1:])[0].empty()
        yield Window(window + [padding] * (most - len(window)))


_PADDING = {
    "input_ids": torch.zeros(1, 2, dtype=torch.int64),
    "labels": torch.full((1, 2), IGNORED),
    "attention_mask": torch.zeros(1, 2, dtype=torch.int64),
}


def _most(count: int, group: dist.ProcessGroup) -> int:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def _micro_batch(slot: int, item: Mapping[str, Tensor] | MicroBatch) -> MicroBatch:
    if isinstance(item, MicroBatch):
        item = {**item.extra, **{name: x for name in _KNOWN if (x := getattr(item, name)) is not None}}
    if not isinstance(item, Mapping):
        raise ValueError(
            f"micro-batch {slot} is a {type(item).__name__}: a window is built from mappings with input_ids and labels"
        )
    for key in ("input_ids", "labels"):
        if key not in item:
            raise ValueError(
                f"micro-batch {slot} has no {key!r}: a window is built from input_ids and labels (the same ids, not "
                f"shifted, with {IGNORED} where there is no loss)"
            )
    for key in _KNOWN:
        if item.get(key) is not None and not isinstance(item[key], Tensor):
            raise ValueError(f"micro-batch {slot}: {key} must be a tensor, not {type(item[key]).__name__}")
    shape = item["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f"micro-batch {slot}: input_ids must be [batch, tokens], not {list(shape)}")
    if 0 in shape:
        raise ValueError(f"micro-batch {slot} is empty ({list(shape)}): leave it out, or give a row of padding")
    known = {key: item[key] for key in _KNOWN if item.get(key) is not None}
    for key, value in known.items():
        if value.shape != shape:
            raise ValueError(
                f"micro-batch {slot}: {key} is {list(value.shape)}, but input_ids is {list(shape)} (labels are not "
                "shifted: same positions as the inputs)"
            )
    for key in ("input_ids", "labels"):
        if known[key].dtype not in (torch.int64, torch.int32):
            raise ValueError(f"micro-batch {slot}: {key} must be token ids, torch.int64, not {known[key].dtype}")
        known[key] = known[key].long()
    labels = known["labels"]
    if _on_host(labels) and bool(((labels < 0) & (labels != IGNORED)).any()):
        raise ValueError(f"micro-batch {slot}: labels must be token ids, or {IGNORED} where there is no loss")
    mask = known.get("attention_mask")
    last = mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()) if _on_host(mask) else False
    extra = {key: value for key, value in item.items() if key not in _KNOWN}
    for key, value in extra.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"micro-batch {slot}: {key!r} is no tensor, and goes to the model as it is; leave it out")
    return MicroBatch(slot=slot, extra=extra, _padding_is_last=last, **known)


def _on_host(x: Tensor | None) -> bool:
    """Whether looking at values costs no device synchronisation."""
    return x is None or x.device.type == "cpu"
