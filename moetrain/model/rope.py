"""Rotary positions and YaRN, with the softmax scale that belongs to them (DeepSeek-V3 inference code,
``precompute_freqs_cis`` and ``MLA.__init__``; V2 paper 3.1.4, V3 paper 4.3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moetrain.config.model import ModelConfig, Yarn


class Rotation(NamedTuple):
    """cos and sin of every token's angles, [B or 1, T, qk_rope_head_dim / 2], at least fp32."""

    cos: Tensor
    sin: Tensor


def yarn_mscale(factor: float, coefficient: float) -> float:
    """``m(s, c) = 0.1 c ln(s) + 1`` for s > 1, else 1."""
    return 1.0 if factor <= 1.0 else 0.1 * coefficient * math.log(factor) + 1.0


def softmax_scale(config: ModelConfig) -> float:
    """``qk_head_dim^-0.5``, times ``m(factor, mscale_all_dim)^2`` where YaRN is on."""
    scale: float = config.qk_head_dim**-0.5
    yarn = config.rope_scaling
    if yarn is not None:
        scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def correction_range(yarn: Yarn, width: int, theta: float) -> tuple[float, float]:
    """The frequency indices between which YaRN goes from keeping to dividing by its factor (10 and 23 as released)."""

    def index(turns: float) -> float:
        size: float = math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi))
        return float(width * size / (2 * math.log(theta)))

    low = max(math.floor(index(yarn.beta_fast)), 0)
    high = min(math.ceil(index(yarn.beta_slow)), width - 1)
    return (low, high + 0.001) if low == high else (low, high)


def inverse_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """[qk_rope_head_dim / 2], float64: ``theta^(-2i / width)``, bent by YaRN where it is on."""
    width = config.qk_rope_head_dim
    i = torch.arange(width // 2, dtype=torch.float64, device=device)
    freq = config.rope_theta ** (-2.0 * i / width)
    yarn = config.rope_scaling
    if yarn is not None and yarn.factor > 1.0:
        low, high = correction_range(yarn, width, config.rope_theta)
        ramp = ((i - low) / (high - low)).clamp(0.0, 1.0)
        freq = freq / yarn.factor * ramp + freq * (1.0 - ramp)
    return freq


def rotation(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
    """Angles of ``position_ids`` [B or 1, T] (int64); ``dtype`` is the model's, the result at least fp32.

    cos and sin carry ``m(mscale) / m(mscale_all_dim)``, which is 1 for every released model.
    """
    stat = torch.promote_types(dtype, torch.float32)
    freq = inverse_frequencies(config, position_ids.device).to(stat)
    angle = position_ids.to(stat).unsqueeze(-1) * freq
    yarn = config.rope_scaling
    size = 1.0
    if yarn is not None:
        size = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return Rotation(angle.cos() * size, angle.sin() * size)
