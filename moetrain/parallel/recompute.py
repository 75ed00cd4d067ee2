"""Activation recompute: what a block keeps for its backward, and what it computes again.

``full``: a block keeps its input and runs again. ``selective`` (V3 paper 3.2.3): the outputs of norms and of MLA's
up-projections are not kept, although the products and the attention behind them ask for them; they are computed again
from what is small, once, when the first of them is asked for. (SwiGLU's output is never kept, see
``moetrain_kernels.grouped_ffn``.)

The routing of a second run is the first one's: the ledger replays each router's choice, so a tie or low-precision
jitter cannot send a token elsewhere (see ``moetrain.accumulate.ledger``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from moetrain.model.block import Block


def recompute_in_backward(module: nn.Module) -> None:
    """Replaces ``module.forward``; names of parameters and hooks of wrappers stay as they are."""
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # the model draws no random numbers, so there is no generator state to bring back
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = checkpointed


def recompute_what_is_cheap(block: Block) -> None:
    """Norms and up-projections of ``block``; replaces ``forward`` of the block and its norms, and MLA's ``expand``."""
    kept = _Kept()
    for norm in (block.input_layernorm, block.post_attention_layernorm):
        norm.forward = kept.again(norm.forward)  # type: ignore[method-assign]
    block.self_attn.expand = kept.again(block.self_attn.expand)  # type: ignore[method-assign]
    forward = block.forward

    def forgetting(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with kept.forgetting():
            return forward(*args, **kwargs)

    block.forward = forgetting  # type: ignore[method-assign]


class _Place(NamedTuple):
    """Where a tensor lies in an output that is made again."""

    run: _Run
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept:
    """Of one block's forward: which storages are outputs that need not be kept."""

    def __init__(self) -> None:
        self.open = False
        self._runs: dict[int, tuple[_Run, int, Tensor]] = {}

    def forgetting(self) -> _Forgetting:
        return _Forgetting(self)

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` of tensors, whose outputs and inner values are made again instead of kept."""

        def run(*inputs: Tensor) -> Any:
            if not self.open:
                return fn(*inputs)
            made = _Run(fn)
            outputs = _Again.apply(made, _wants_gradient(inputs[0]), *inputs)
            for index, output in enumerate(outputs):
                # held until the block is through, so that no other tensor gets its address meanwhile
                self._runs[output.untyped_storage()._cdata] = (made, index, output.detach())
            return outputs if made.several else outputs[0]

        return run

    def pack(self, x: Tensor) -> Tensor | _Place:
        found = self._runs.get(x.untyped_storage()._cdata)
        if found is None or found[2].dtype != x.dtype:
            return x
        return _Place(found[0], found[1], x.size(), x.stride(), int(x.storage_offset()))

    @staticmethod
    def unpack(x: Tensor | _Place) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return x.run.output(x.output).detach().as_strided(x.size, x.stride, x.offset)

    def close(self) -> None:
        self.open = False
        self._runs = {}


class _Forgetting(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd saves of such outputs is only their place."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__(kept.pack, kept.unpack)
        self.kept = kept

    def __enter__(self) -> None:
        self.kept.open = True
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.kept.close()


def _wants_gradient(like: Tensor) -> Tensor:
    """An empty input, so that outputs have a gradient also where only weights are trained."""
    return torch.empty(0, dtype=like.dtype, device=like.device, requires_grad=True)


class _Run:
    """One call of a function: its inputs, and for the time of a backward its outputs with their graph."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.several = fn, False
        self.inputs: tuple[tuple[Tensor, bool], ...] = ()  # without their graph, and whether they have a gradient
        self._made: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def outputs_of(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.fn(*inputs)
        self.several = isinstance(outputs, tuple)
        return outputs if self.several else (outputs,)

    def made(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs as leaves, and the outputs of them."""
        if self._made is None:
            inputs = tuple(x.detach().requires_grad_(wanted) for x, wanted in self.inputs)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                self._made = inputs, self.outputs_of(*inputs)
        return self._made

    def output(self, index: int) -> Tensor:
        return self.made()[1][index]

    def forget(self) -> None:
        """The inputs, too: the graph that leads here lives as long as anybody holds the loss or a stage's output."""
        self._made, self.inputs = None, ()


class _Again(torch.autograd.Function):
    """Runs without a graph; the backward makes the graph of a second run and goes through it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        run.inputs = tuple((x.detach(), wanted) for x, wanted in zip(inputs, ctx.needs_input_grad[2:], strict=True))
        return run.outputs_of(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        inputs, outputs = run.made()
        trained = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        if trained:
            torch.autograd.backward([y for y, _ in trained], [g for _, g in trained])
        run.forget()
        return None, None, *(x.grad for x in inputs)
