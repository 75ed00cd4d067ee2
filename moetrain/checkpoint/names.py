"""Our parameter names and the released ones, as a table that is computed, so that both directions come from one place.

The released files hold gate and up projections apart and every expert on its own; here both are stacked. A ``Piece``
says which part of one of our tensors a released tensor is. transformers can also write experts as it holds them,
stacked like ours; that is the ``fused`` table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moetrain.config.model import ModelConfig


class Piece(NamedTuple):
    """A released tensor and the place it has in ours.

    Attributes:
        released: name in a Hugging Face folder.
        ours: name in ``DeepSeek``'s state dict.
        expert: index into a stacked tensor's first dimension, or None.
        rows: rows of that (first, last), or None for all.
        shape: of the released tensor.
        linear: whether the FP8 release quantises it.
        copy: a duplicate of a tensor that another piece already is (the MTP module's embedding and head).
    """

    released: str
    ours: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None
    linear: bool = False
    copy: bool = False


def pieces(config: ModelConfig, *, fused: bool = False) -> Iterator[Piece]:
    """Every tensor of a release, in the order in which layers come; the pieces of one of our tensors follow each other.

    ``fused``: experts stacked, as transformers writes them with ``save_original_format=False``.
    """
    d, v = config.hidden_size, config.vocab_size
    yield Piece("model.embed_tokens.weight", "embed_tokens.weight", (v, d))
    for layer in range(config.num_hidden_layers):
        yield from _block(config, f"model.layers.{layer}", f"layers.{layer}", config.is_moe_layer(layer), fused)
    yield Piece("model.norm.weight", "norm.weight", (d,))
    yield Piece("lm_head.weight", "lm_head.weight", (v, d))
    for k in range(config.num_nextn_predict_layers):
        there, here = f"model.layers.{config.num_hidden_layers + k}", f"mtp.{k}"
        yield Piece(f"{there}.embed_tokens.weight", "embed_tokens.weight", (v, d), copy=True)
        yield Piece(f"{there}.enorm.weight", f"{here}.enorm.weight", (d,))
        yield Piece(f"{there}.hnorm.weight", f"{here}.hnorm.weight", (d,))
        yield Piece(f"{there}.eh_proj.weight", f"{here}.eh_proj.weight", (d, 2 * d))
        yield from _block(config, there, f"{here}.block", True, fused)
        yield Piece(f"{there}.shared_head.norm.weight", f"{here}.norm.weight", (d,))
        yield Piece(f"{there}.shared_head.head.weight", "lm_head.weight", (v, d), copy=True)


def _block(config: ModelConfig, there: str, here: str, moe: bool, fused: bool) -> Iterator[Piece]:
    d, h = config.hidden_size, config.num_attention_heads
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    yield Piece(f"{there}.input_layernorm.weight", f"{here}.input_layernorm.weight", (d,))

    def attention(name: str, *shape: int) -> Piece:
        name = f"self_attn.{name}.weight"
        return Piece(f"{there}.{name}", f"{here}.{name}", shape, linear=len(shape) == 2)

    if config.q_lora_rank is None:
        yield attention("q_proj", h * config.qk_head_dim, d)
    else:
        yield attention("q_a_proj", config.q_lora_rank, d)
        yield attention("q_a_layernorm", config.q_lora_rank)
        yield attention("q_b_proj", h * config.qk_head_dim, config.q_lora_rank)
    yield attention("kv_a_proj_with_mqa", latent + rope, d)
    yield attention("kv_a_layernorm", latent)
    yield attention("kv_b_proj", h * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield attention("o_proj", d, h * config.v_head_dim)
    name = "post_attention_layernorm.weight"
    yield Piece(f"{there}.{name}", f"{here}.{name}", (d,))
    if not moe:
        yield from _mlp(f"{there}.mlp", f"{here}.mlp", d, config.intermediate_size)
        return
    e, m = config.n_routed_experts, config.moe_intermediate_size
    yield Piece(f"{there}.mlp.gate.weight", f"{here}.mlp.gate.weight", (e, d))
    if config.topk_method == "noaux_tc":
        bias = "mlp.gate.e_score_correction_bias"
        yield Piece(f"{there}.{bias}", f"{here}.{bias}", (e,))
    experts, up, down = f"{there}.mlp.experts", f"{here}.mlp.experts.gate_up_proj", f"{here}.mlp.experts.down_proj"
    if fused:
        yield Piece(f"{experts}.gate_up_proj", up, (e, 2 * m, d))
        yield Piece(f"{experts}.down_proj", down, (e, d, m))
    else:
        for i in range(e):
            yield Piece(f"{experts}.{i}.gate_proj.weight", up, (m, d), expert=i, rows=(0, m), linear=True)
            yield Piece(f"{experts}.{i}.up_proj.weight", up, (m, d), expert=i, rows=(m, 2 * m), linear=True)
        for i in range(e):
            yield Piece(f"{experts}.{i}.down_proj.weight", down, (d, m), expert=i, linear=True)
    if config.n_shared_experts:
        yield from _mlp(f"{there}.mlp.shared_experts", f"{here}.mlp.shared_experts", d, config.n_shared_experts * m)


def _mlp(there: str, here: str, d: int, width: int) -> Iterator[Piece]:
    stacked = f"{here}.gate_up_proj.weight"
    yield Piece(f"{there}.gate_proj.weight", stacked, (width, d), rows=(0, width), linear=True)
    yield Piece(f"{there}.up_proj.weight", stacked, (width, d), rows=(width, 2 * width), linear=True)
    yield Piece(f"{there}.down_proj.weight", f"{here}.down_proj.weight", (d, width), linear=True)
