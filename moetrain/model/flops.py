"""Parameters and FLOPs of a model from its config alone, with the conventions of the published figures.

Published "activated" counts include the output head and leave the embedding out; published FLOPs per token are those
of the main model, forward and backward, without recompute (arXiv 2505.09343 table 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from moetrain.config.model import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Exact numbers of parameters; the routing bias is counted where there is one.

    Attributes:
        embedding, head: vocab_size x hidden_size each.
        attention: of one layer, its inner norms included.
        query, latent, key_value, output: its parts: q (whole, or both factors with their norm), kv_a with its norm,
            kv_b, o.
        dense_ffn: of one dense layer.
        expert: one routed expert.
        shared: the shared experts of one layer.
        gate: of one layer.
        moe_layer, dense_layer: whole layers with their two norms.
        moe_layer_activated: what one token uses of a mixture-of-experts layer.
        routed: all routed experts of the main model.
        total: the main model.
        mtp: what multi-token prediction adds (embedding and head are shared).
        mtp_stored: the same with the copies of embedding and head that released files hold.
        activated: of the main model for one token, with the head, without the embedding.
    """

    embedding: int
    head: int
    attention: int
    query: int
    latent: int
    key_value: int
    output: int
    dense_ffn: int
    expert: int
    shared: int
    gate: int
    moe_layer: int
    dense_layer: int
    moe_layer_activated: int
    routed: int
    total: int
    mtp: int
    mtp_stored: int
    activated: int

    @property
    def activated_with_embedding(self) -> int:
        return self.activated + self.embedding

    @property
    def activated_neither(self) -> int:
        return self.activated - self.head


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Every count, exactly (facts A.2)."""
    d, m, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    table = config.vocab_size * d
    query, latent, key_value, output = _attention_parts(config)
    query, latent = query + (config.q_lora_rank or 0), latent + config.kv_lora_rank
    attention = query + latent + key_value + output
    expert = 3 * d * m
    shared = config.n_shared_experts * expert
    gate = e * d + (e if config.topk_method == "noaux_tc" else 0)
    dense_ffn = 3 * d * config.intermediate_size
    rest = attention + 2 * d
    moe_layer = rest + e * expert + shared + gate
    moe_activated = rest + config.num_experts_per_tok * expert + shared + gate
    moe_layers = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    dense_layers = config.num_hidden_layers - moe_layers
    layers = moe_layers * moe_layer + dense_layers * (rest + dense_ffn)
    depth = config.num_nextn_predict_layers
    mtp = depth * (moe_layer + 2 * d * d + 3 * d)
    return ParameterCounts(
        embedding=table,
        head=table,
        attention=attention,
        query=query,
        latent=latent,
        key_value=key_value,
        output=output,
        dense_ffn=dense_ffn,
        expert=expert,
        shared=shared,
        gate=gate,
        moe_layer=moe_layer,
        dense_layer=rest + dense_ffn,
        moe_layer_activated=moe_activated,
        routed=moe_layers * e * expert,
        total=2 * table + d + layers,
        mtp=mtp,
        mtp_stored=mtp + depth * 2 * table,
        activated=table + d + moe_layers * moe_activated + dense_layers * (rest + dense_ffn),
    )


def flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True, mtp: bool = False) -> float:
    """Training FLOPs of one token: 6 for each matrix weight it meets, and attention's two products (facts E.4).

    Args:
        seq_len: T; attention costs ``6 L H (d_qk + d_v) T``, half of it under a causal mask.
        causal: count only what the mask leaves.
        mtp: add the multi-token-prediction modules, each with a pass through the head.
    """
    blocks, ends = flops_of_parts(config, seq_len, causal=causal, mtp=mtp)
    return sum(blocks) + ends


def flops_of_parts(
    config: ModelConfig, seq_len: int, *, causal: bool = True, mtp: bool = True
) -> tuple[list[float], float]:
    """The same by block of the main model, and of what comes after the last: head and multi-token prediction."""
    d = config.hidden_size
    counts = parameter_counts(config)
    attention_matrices = sum(_attention_parts(config))
    moe = attention_matrices + config.n_routed_experts * d
    moe += (config.num_experts_per_tok + config.n_shared_experts) * counts.expert
    dense = attention_matrices + counts.dense_ffn
    widths = config.qk_head_dim + config.v_head_dim
    attention = 6.0 * config.num_attention_heads * widths * seq_len * (0.5 if causal else 1.0)
    blocks = [6.0 * (moe if config.is_moe_layer(i) else dense) + attention for i in range(config.num_hidden_layers)]
    depth = config.num_nextn_predict_layers if mtp else 0
    ends = 6.0 * (counts.head + depth * (moe + 2 * d * d + counts.head)) + depth * attention
    return blocks, ends


def kv_cache_bytes_per_token(config: ModelConfig, bytes_each: int = 2) -> int:
    """Latent and rotated key of every layer, bf16 by default (facts A.3)."""
    return (config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers * bytes_each


def _attention_parts(config: ModelConfig) -> tuple[int, int, int, int]:
    """Matrices of one layer without norms: q, kv_a, kv_b, o."""
    d, h = config.hidden_size, config.num_attention_heads
    query = d * h * config.qk_head_dim
    if config.q_lora_rank is not None:
        query = config.q_lora_rank * (d + h * config.qk_head_dim)
    latent = config.kv_lora_rank
    up = latent * h * (config.qk_nope_head_dim + config.v_head_dim)
    return query, d * (latent + config.qk_rope_head_dim), up, h * config.v_head_dim * d
