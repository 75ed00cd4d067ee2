"""What a model starts from, made whole and at once: the reference for everything that is filled in parts."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek


def drawn(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every parameter and buffer from (seed, name), in fp32."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DeepSeek(config).state_dict().items()}
    made = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            made[name] = torch.full(shape, 0.0 if name.endswith("correction_bias") else 1.0)
        else:
            generator = torch.Generator().manual_seed(seed * 0x9E3779B1 % 2**31 + zlib.crc32(name.encode()))
            made[name] = torch.randn(shape, generator=generator) * config.initializer_range
    return made
