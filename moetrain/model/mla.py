"""Multi-head latent attention (V2 paper 2.1, V3 paper eqs 1-11): keys and values come from one small latent per token.

Legend: B rows, T tokens, H heads, N unrotated and P rotated query/key width, V value width.
"""

from __future__ import annotations

from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model.backends import REFERENCE, Attention, Heads
from moetrain.model.layers import Linear, RMSNorm
from moetrain.model.rope import Rotation, softmax_scale


class MLA(nn.Module):
    """Training form (the latent is expanded). ``kv_a`` gives [latent; rotated key], ``kv_b`` per head [key; value]."""

    attention: Attention

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, h, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        self.heads, self.latent, self.rope = h, config.kv_lora_rank, config.qk_rope_head_dim
        self.scale = softmax_scale(config)
        self.attention = REFERENCE.attention
        if config.q_lora_rank is None:
            self.q_proj = Linear(d, h * config.qk_head_dim)
        else:
            self.q_a_proj = Linear(d, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = Linear(config.q_lora_rank, h * config.qk_head_dim)
        self.compressed_query = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = Linear(d, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, h * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(h * config.v_head_dim, d)

    def forward(self, x_BTD: Tensor, rotation: Rotation, document_ids: Tensor | None) -> Tensor:
        q = self.q_a_proj(x_BTD) if self.compressed_query else self.q_proj(x_BTD)
        latent, k_pe = self.kv_a_proj_with_mqa(x_BTD).split([self.latent, self.rope], dim=-1)
        heads = self.expand(q, latent, k_pe, *rotation)
        y_BTD: Tensor = self.o_proj(self.attention.attend(heads, self.heads, self.scale, document_ids))
        return y_BTD

    def expand(self, q: Tensor, latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        """Queries, keys and values of all heads from the small latents (q is one where queries are compressed)."""
        B, T, _ = latent.shape
        if self.compressed_query:
            q = self.q_b_proj(self.q_a_layernorm(q))
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q, kv = q.view(B, T, self.heads, -1), kv.view(B, T, self.heads, -1)
        return self.attention.heads(q, kv, k_pe, Rotation(cos, sin), self.scale)
