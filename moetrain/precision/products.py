"""What multiplies quantised operands: one interface, chosen once for a run and printed, never silently replaced.

``Reference`` brings operands back and multiplies in fp32 (at least): it runs anywhere, slowly, and defines the numbers
that the faster ones have to give.

A linear layer is one group of rows, a layer's experts are many: row n of a group meets the group's weight.

Legend: N rows sorted by group, E groups (experts), I inputs, O outputs.
"""

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moetrain.errors import UserError
from moetrain_kernels.quantise import GRADIENTS, Quantised, columns, quantise, tiles

if TYPE_CHECKING:
    from moetrain_kernels.triton_quantise import Blocks, Columns


class Groups:
    """How many of N rows each of E groups has; read on the host only by those who ask."""

    def __init__(self, counts_E: Tensor, rows: int) -> None:
        self.counts_E, self.rows = counts_E, rows

    @cached_property
    def counts(self) -> list[int]:
        return [self.rows] if self.counts_E.numel() == 1 else self.counts_E.tolist()


class SwiGLUGradients(NamedTuple):
    """Of gate and up [N, 2m], of the weight [N] (None without one), and the output again, as tiles [N, m]."""

    dgu: Tensor
    dweight: Tensor | None
    again: Quantised


class Products(Protocol):
    """The three products of the recipe and what they take (V3 paper 3.3.1, 3.3.2)."""

    describe: str

    def tiles(self, x_NC: Tensor, *, power_of_two: bool, floor: float) -> Quantised:
        """1 x 128 tiles; an amax below ``floor`` counts as that."""
        ...

    def weight(self, w_EOI: Tensor, parts: int, *, power_of_two: bool) -> Any:
        """128 x 128 blocks of each matrix, stacked ``parts`` (gate and up rows) apart; its form is their own."""
        ...

    def fprop(self, x: Quantised, weight: Any, groups: Groups, dtype: torch.dtype) -> Tensor:
        """``x W^T``: [N, O]."""
        ...

    def dgrad(self, dy: Quantised, weight: Any, groups: Groups, dtype: torch.dtype) -> Tensor:
        """``dy W``: [N, I]."""
        ...

    def swiglu(self, gu: Tensor, weight_N: Tensor | None, *, power_of_two: bool) -> Quantised:
        """``silu(gate) * up * weight`` as tiles: gu [N, 2m], gate columns first -> [N, m]."""
        ...

    def swiglu_backward(
        self, gu: Quantised, weight_N: Tensor | None, dh: Tensor, *, dtype: torch.dtype, power_of_two: bool
    ) -> SwiGLUGradients:
        """From tiles of the input and dh [N, m]; ``dtype`` is that of the input's gradient."""
        ...

    def wgrad(self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool) -> Tensor:
        """``dy^T x`` of each group in fp32 (at least): [E, O, I]; both operands in 128 x 1 columns made here.

        x is what Fprop saw, brought back and made into columns. Groups without rows get zeros.
        """
        ...


class Reference:
    """Quantised, brought back, multiplied in fp32."""

    describe = "reference (quantised, fp32 products)"

    def tiles(self, x_NC: Tensor, *, power_of_two: bool, floor: float) -> Quantised:
        return tiles(x_NC, power_of_two=power_of_two, floor=floor)

    def weight(self, w_EOI: Tensor, parts: int, *, power_of_two: bool) -> Quantised:
        return quantise(w_EOI.unflatten(1, (parts, -1)), (128, 128), power_of_two=power_of_two)

    def fprop(self, x: Quantised, weight: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        y = torch.empty(x.values.shape[0], _outputs(weight), dtype=dtype, device=x.values.device)
        stat = torch.promote_types(dtype, torch.float32)
        rows = x.dequantise(stat).split(groups.counts)
        for a, w, out in zip(rows, _matrices(weight, stat), y.split(groups.counts), strict=True):
            if a.shape[0]:
                out.copy_(torch.mm(a, w().t()))
        return y

    def dgrad(self, dy: Quantised, weight: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        dx = torch.empty(dy.values.shape[0], weight.values.shape[-1], dtype=dtype, device=dy.values.device)
        stat = torch.promote_types(dtype, torch.float32)
        rows = dy.dequantise(stat).split(groups.counts)
        for g, w, out in zip(rows, _matrices(weight, stat), dx.split(groups.counts), strict=True):
            if g.shape[0]:
                out.copy_(torch.mm(g, w()))
        return dx

    def swiglu(self, gu: Tensor, weight_N: Tensor | None, *, power_of_two: bool) -> Quantised:
        gate, up = gu.chunk(2, dim=-1)
        h = F.silu(gate) * up
        h = h if weight_N is None else (h * weight_N.unsqueeze(1)).to(gu.dtype)
        return tiles(h, power_of_two=power_of_two)

    def swiglu_backward(
        self, gu: Quantised, weight_N: Tensor | None, dh: Tensor, *, dtype: torch.dtype, power_of_two: bool
    ) -> SwiGLUGradients:
        stat = torch.promote_types(dtype, torch.float32)
        gate, up = gu.dequantise(stat).chunk(2, dim=-1)
        act, g = F.silu(gate), dh.to(stat)
        h, dweight = act * up, None
        if weight_N is not None:
            dweight = torch.linalg.vecdot(g, h)
            g, h = (x * weight_N.to(stat).unsqueeze(1) for x in (g, h))
        dgate = torch.ops.aten.silu_backward(g * up, gate)
        dgu = torch.cat([dgate, g * act], dim=-1).to(dtype)
        return SwiGLUGradients(dgu, dweight, tiles(h, power_of_two=power_of_two))

    def wgrad(self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool) -> Tensor:
        stat = torch.promote_types(dy_NO.dtype, torch.float32)
        x_NI = x.dequantise(stat) if isinstance(x, Quantised) else x
        dw = torch.zeros(len(groups.counts), dy_NO.shape[1], x_NI.shape[1], dtype=stat, device=dy_NO.device)
        for g, a, out in zip(dy_NO.split(groups.counts), x_NI.split(groups.counts), dw.unbind(0), strict=True):
            if g.shape[0]:
                g = columns(g, power_of_two=power_of_two, floor=GRADIENTS).dequantise(stat)
                a = columns(a, power_of_two=power_of_two).dequantise(stat)
                torch.mm(g.t(), a, out=out)
        return dw


class Triton:
    """The project's own kernels (``moetrain_kernels.triton_grouped``): no count is read on the host."""

    describe = "Triton kernels"

    def __init__(self) -> None:
        from moetrain_kernels import triton_grouped, triton_moe, triton_quantise

        self._grouped, self._moe, self._quantise = triton_grouped, triton_moe, triton_quantise

    def tiles(self, x_NC: Tensor, *, power_of_two: bool, floor: float) -> Quantised:
        return self._quantise.tiles(x_NC, power_of_two=power_of_two, floor=floor)

    def weight(self, w_EOI: Tensor, parts: int, *, power_of_two: bool) -> _Weight:
        values, transposed, scale = self._quantise.blocks(w_EOI, parts, power_of_two)
        return _Weight(values, transposed, scale, parts)

    def fprop(self, x: Quantised, weight: _Weight, groups: Groups, dtype: torch.dtype) -> Tensor:
        return self._product(x, weight.values, weight, groups, False, dtype)

    def dgrad(self, dy: Quantised, weight: _Weight, groups: Groups, dtype: torch.dtype) -> Tensor:
        return self._product(dy, weight.transposed, weight, groups, True, dtype)

    def _product(
        self, x: Quantised, w: Tensor, weight: _Weight, groups: Groups, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        y: Tensor = self._grouped.grouped_fp8(
            x.values, x.scale, w, weight.scale, groups.counts_E, weight.parts, transposed, dtype
        )
        return y

    def swiglu(self, gu: Tensor, weight_N: Tensor | None, *, power_of_two: bool) -> Quantised:
        return self._moe.swiglu_tiles(gu, weight_N, power_of_two=power_of_two)

    def swiglu_backward(
        self, gu: Quantised, weight_N: Tensor | None, dh: Tensor, *, dtype: torch.dtype, power_of_two: bool
    ) -> SwiGLUGradients:
        found = self._moe.swiglu_backward_tiles(gu, weight_N, dh, dtype=dtype, power_of_two=power_of_two)
        return SwiGLUGradients(*found)

    def wgrad(self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool) -> Tensor:
        return self._grouped.grouped_fp8_weight(*self.columns(dy_NO, x, groups, power_of_two=power_of_two))

    def blocks(self, groups: Groups) -> Blocks:
        return self._quantise.Blocks.of(groups.counts_E, groups.rows)

    def columns(
        self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool
    ) -> tuple[Columns, Columns, Blocks]:
        """Wgrad's operands, padded to whole blocks of each group."""
        rows = self.blocks(groups)
        dy = self._quantise.columns(dy_NO, rows, power_of_two=power_of_two, floor=GRADIENTS)
        return dy, self._quantise.columns(x, rows, power_of_two=power_of_two), rows


class _Weight(NamedTuple):
    """E4M3 [E, O, I] and transposed [E, I, O], since FP8 products read both operands along the sum."""

    values: Tensor
    transposed: Tensor
    scale: Tensor
    parts: int


def products_for(name: str, device: torch.device, *, power_of_two: bool = False) -> Products:
    """The products of ``fp8.products`` on a device; ``auto`` chooses once, anything else is what it says or an error.

    Raises:
        UserError: this machine lacks what was asked for.
    """
    on_gpu = device.type == "cuda"
    if name == "reference" or (name == "auto" and not on_gpu):
        return Reference()
    asks = on_gpu and name in ("torch", "deep_gemm")
    major = torch.cuda.get_device_capability(device)[0] if asks else 0
    lacks = ""
    if not on_gpu:
        lacks = "a GPU"
    elif importlib.util.find_spec("triton") is None:
        lacks = "triton, which is not installed"
    elif name == "torch" and major != 9:
        lacks = "a Hopper GPU (sm_90)"
    elif name == "deep_gemm" and importlib.util.find_spec("deep_gemm") is None:
        lacks = "DeepGEMM, which is not installed"
    elif name == "deep_gemm" and major >= 10 and not power_of_two:
        lacks = "fp8.scales=power_of_two on this GPU"
    if lacks:
        raise UserError(f"fp8.products: {name} needs {lacks}; use fp8.products=reference, slow and for any machine")
    if name == "torch":
        from moetrain.precision.libraries import TorchScaled

        return TorchScaled()
    if name == "deep_gemm":
        import deep_gemm

        from moetrain.precision.libraries import DeepGemm

        return DeepGemm(deep_gemm, blackwell=major >= 10)
    return Triton()


def _outputs(weight: Quantised) -> int:
    return weight.values.shape[1] * weight.values.shape[2]


def _matrices(weight: Quantised, dtype: torch.dtype) -> list[Any]:
    """Of each group, what makes its matrix [O, I] when it is needed: a group without rows needs none."""
    return [
        lambda v=v, s=s: Quantised(v, s, weight.tile).dequantise(dtype).flatten(0, 1)
        for v, s in zip(weight.values.unbind(0), weight.scale.unbind(0), strict=True)
    ]
