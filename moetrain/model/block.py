"""One pre-norm transformer block: attention, then a dense or a mixture-of-experts feed-forward (facts B.1)."""

from __future__ import annotations

from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model.layers import MLP, RMSNorm
from moetrain.model.mla import MLA
from moetrain.model.moe import MoE
from moetrain.model.rope import Rotation


class Block(nn.Module):
    """Layer ``index`` of the model (MTP modules count on from the main layers). [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig, index: int, depth: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        moe = depth > 0 or config.is_moe_layer(index)
        self.mlp = MoE(config, depth) if moe else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_BTD: Tensor, rotation: Rotation, document_ids: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation, document_ids)
        y: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return y
