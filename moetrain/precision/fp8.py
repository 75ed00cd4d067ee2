"""The recipe of DeepSeek-V3 (3.3): all three products of a linear layer take E4M3 operands and sum in fp32.

    Fprop  y = x W^T     x in 1 x 128 tiles, W in 128 x 128 blocks
    Dgrad  dx = dy W     dy in 1 x 128 tiles, W in 128 x 128 blocks
    Wgrad  dW = dy^T x   both in 128 x 1 columns, since tokens are what is summed over

What waits for the backward is the input as Fprop took it (E4M3 and its scales), made into columns again for Wgrad; of a
SwiGLU only its input, also in tiles, from which its output is computed again. The input of the linear layer after the
attention may wait in E5M6. What stays high is decided outside, by whose product is replaced
(``moetrain.parallel.plan``): embedding, head, gates, norms, attention core and MTP's projection.

Experts take rows, and gradients of rows, with power-of-two scales (3.3.3): those are what travels under expert
parallelism. Quantised again they are the same values, so it makes no difference how far they came.

Legend: N rows (of experts: entries sorted by expert), R rows before they are gathered, I inputs, O outputs, D width,
m expert width, E experts.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moetrain.precision.products import Groups, Products
from moetrain_kernels.quantise import ACTIVATIONS, E5M6, GRADIENTS, Quantised, e5m6


class Routed(Protocol):
    """What ``moetrain.model.backends.Routed`` is."""

    @property
    def x_RD(self) -> Tensor: ...

    @property
    def weight_N(self) -> Tensor: ...

    @property
    def row_N(self) -> Tensor: ...

    @property
    def position_N(self) -> Tensor: ...

    @property
    def offset_R(self) -> Tensor: ...

    @property
    def counts_E(self) -> Tensor: ...


class Fp8:
    """The products of a model in FP8; its verbs are those of ``moetrain.model.layers`` and ``backends.Experts``.

    Args:
        products: what multiplies.
        power_of_two: all scales are powers of two (Blackwell's format), not only those of what travels to experts.
        attention_output: what the linear layer after the attention keeps of its input.
        keep_weights: quantised weights are made once and kept until ``drop``: one byte a parameter. Only for weights
            that stay in memory themselves: of gathered ones it would keep what sharding spares.
    """

    def __init__(
        self,
        products: Products,
        *,
        power_of_two: bool = False,
        attention_output: Literal["e4m3", "e5m6"] = "e4m3",
        keep_weights: bool = False,
    ) -> None:
        self.products, self.power_of_two, self.attention_output = products, power_of_two, attention_output
        self.keep_weights = keep_weights
        self._kept: dict[tuple[Any, ...], tuple[torch.UntypedStorage, int, Any]] = {}

    def linear(self, x: Tensor, weight: Tensor, *, in_place_grad: bool = False) -> Tensor:
        """``x @ weight.T``: x [..., I], weight [O, I] -> [..., O], the dtype of x."""
        return self._linear(x, weight, in_place_grad, high=False)

    def linear_after_attention(self, x: Tensor, weight: Tensor, *, in_place_grad: bool = False) -> Tensor:
        """The same, but its input may be kept in E5M6 (paper 3.3.3)."""
        return self._linear(x, weight, in_place_grad, high=self.attention_output == "e5m6")

    def _linear(self, x: Tensor, weight: Tensor, in_place_grad: bool, high: bool) -> Tensor:
        y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, self, in_place_grad, high)
        return y.view(*x.shape[:-1], weight.shape[0])

    def swiglu(self, x_ND: Tensor, gate_up: Tensor, down: Tensor, *, in_place_grad: bool = False) -> Tensor:
        """``down(silu(gate x) * up x)``: x [N, D], gate_up [2m, D], down [D, m] -> [N, D]."""
        y: Tensor = _SwiGLU.apply(x_ND, gate_up, down, None, None, self, in_place_grad)
        return y

    def experts(self, routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool = False) -> Tensor:
        """SwiGLU of every entry by its expert, weighted and summed over the entries of each row: [R, D].

        gate_up [E, 2m, D], down [E, D, m]. Each expert's entries are a matrix of their own, also for Wgrad's columns.
        """
        routes = _Routes(routed.row_N, routed.position_N, routed.offset_R, routed.counts_E)
        y: Tensor = _SwiGLU.apply(routed.x_RD, gate_up, down, routed.weight_N, routes, self, in_place_grad)
        return y

    def weight(self, w: Tensor, parts: int) -> Any:
        """W as the products take it, [O, I] or [E, O, I]; within a window the same one, since the weights are."""
        # by the storage, which is the same for every view of a weight and each time it is gathered; its address is not:
        # another weight's may come to lie there. Held, so that it stays this weight's.
        storage = w.untyped_storage()
        key = storage._cdata, w.storage_offset(), w.shape
        _, version, kept = self._kept.get(key, (storage, -1, None))
        if kept is None or version != w._version:
            whole = w.detach() if w.ndim == 3 else w.detach().unsqueeze(0)
            kept = self.products.weight(whole, parts, power_of_two=self.power_of_two)
            if self.keep_weights:
                self._kept[key] = storage, w._version, kept
        return kept

    def drop(self, *_: Any) -> None:
        """Forgets the quantised weights: an accepted step has moved the weights."""
        self._kept.clear()

    def tiles(self, x: Tensor, *, travels: bool = False, floor: float = ACTIVATIONS) -> Quantised:
        return self.products.tiles(x, power_of_two=travels or self.power_of_two, floor=floor)

    def gradients(self, dy: Tensor, *, travel: bool = False) -> Quantised:
        return self.tiles(dy, travels=travel, floor=GRADIENTS)

    def wgrad(self, weight: Tensor, dy: Tensor, x: Tensor | Quantised, groups: Groups, in_place: bool) -> Tensor | None:
        dw = self.products.wgrad(dy, x, groups, power_of_two=self.power_of_two).view(weight.shape).to(weight.dtype)
        if not in_place:
            return dw
        if weight.grad is None:
            weight.grad = dw
        else:
            weight.grad.add_(dw)
        return None


class _Routes(NamedTuple):
    row_N: Tensor
    position_N: Tensor
    offset_R: Tensor
    counts_E: Tensor

    def sum_rows(self, y_ND: Tensor) -> Tensor:
        """Row r of the result is the sum of its entries."""
        bag = torch.ops.aten._embedding_bag_forward_only
        return bag(y_ND, self.position_N, self.offset_R, False, 0, False)[0]  # type: ignore[no-any-return]


def _one_group(x: Tensor) -> Groups:
    return Groups(torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device), x.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fp8: Fp8, in_place: bool, high: bool) -> Tensor:
        q = fp8.tiles(x)
        kept = e5m6(x) if high else q
        ctx.save_for_backward(*kept[:2])
        ctx.weight, ctx.fp8, ctx.in_place = weight, fp8, in_place
        ctx.kind, ctx.last = type(kept), kept[2]
        return fp8.products.fprop(q, fp8.weight(weight, 1), _one_group(x), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        kept: Quantised | E5M6 = ctx.kind(*ctx.saved_tensors, ctx.last)
        fp8, weight, groups = ctx.fp8, ctx.weight, _one_group(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = fp8.products.dgrad(fp8.gradients(dy), fp8.weight(weight, 1), groups, dy.dtype)
        if ctx.needs_input_grad[1]:
            x = kept if isinstance(kept, Quantised) else kept.dequantise(dy.dtype)
            dw = fp8.wgrad(weight, dy, x, groups, ctx.in_place)
        return dx, dw, None, None, None


class _SwiGLU(torch.autograd.Function):
    """Both products and what lies between; with ``routes``, of the experts. Keeps tiles of x and of its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weight_N: Tensor | None,
        routes: _Routes | None,
        fp8: Fp8,
        in_place: bool,
    ) -> Tensor:
        groups = _one_group(x) if routes is None else Groups(routes.counts_E, routes.row_N.shape[0])
        q = kept = fp8.tiles(x, travels=routes is not None)
        if routes is not None:
            q = kept.rows(routes.row_N)
        gu = fp8.products.fprop(q, fp8.weight(gate_up, 2), groups, x.dtype)
        waits = fp8.tiles(gu)
        h = fp8.products.swiglu(gu, weight_N, power_of_two=fp8.power_of_two)
        y = fp8.products.fprop(h, fp8.weight(down, 1), groups, x.dtype)
        ctx.save_for_backward(kept.values, kept.scale, waits.values, waits.scale, weight_N, *(routes or ()))
        ctx.gate_up, ctx.down, ctx.fp8, ctx.in_place, ctx.groups = gate_up, down, fp8, in_place, groups
        return y if routes is None else routes.sum_rows(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_values, x_scale, gu_values, gu_scale, weight_N, *rest = ctx.saved_tensors
        fp8, groups, in_place, dtype = ctx.fp8, ctx.groups, ctx.in_place, dy.dtype
        stat = torch.promote_types(dtype, torch.float32)
        routes = _Routes(*rest) if rest else None
        x = Quantised(x_values, x_scale, (1, 128))
        if routes is None:
            q = fp8.gradients(dy)
        else:
            x = x.rows(routes.row_N)
            travelled = fp8.gradients(dy, travel=True)
            q, dy = travelled.rows(routes.row_N), travelled.dequantise(dtype).index_select(0, routes.row_N)

        g = fp8.products.dgrad(q, fp8.weight(ctx.down, 1), groups, stat)
        dgu, dweight, again = fp8.products.swiglu_backward(
            Quantised(gu_values, gu_scale, (1, 128)), weight_N, g, dtype=dtype, power_of_two=fp8.power_of_two
        )
        d_gate_up = d_down = dx = None
        if ctx.needs_input_grad[2]:
            d_down = fp8.wgrad(ctx.down, dy, again, groups, in_place)
        if ctx.needs_input_grad[1]:
            d_gate_up = fp8.wgrad(ctx.gate_up, dgu, x, groups, in_place)
        if ctx.needs_input_grad[0]:
            dx = fp8.products.dgrad(fp8.gradients(dgu), fp8.weight(ctx.gate_up, 2), groups, dtype)
            dx = dx if routes is None else routes.sum_rows(dx)
        dweight = None if dweight is None else dweight.to(weight_N.dtype)
        return dx, d_gate_up, d_down, dweight, None, None, None
