"""The same model twice: ours and transformers', with the same random weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek


def random_config(family: str, seed: int) -> dict[str, Any]:
    """A small config with odd sizes, in Hugging Face's keys; what varies is drawn from ``seed``."""
    r = random.Random(f"{family}-{seed}")
    groups = r.choice([1, 2, 4])
    per_group = r.choice([2, 3, 5])
    kept = r.randint(1, groups)
    heads = r.choice([1, 2, 3])
    scale = r.choice([1.0, 2.5, 16.0])
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": r.choice([61, 96]),
        "hidden_size": heads * r.choice([11, 13, 24]),  # transformers asks for a multiple of the heads
        "intermediate_size": r.choice([29, 64]),
        "moe_intermediate_size": r.choice([7, 16]),
        "num_hidden_layers": 3,
        "first_k_dense_replace": r.choice([0, 1]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": groups * per_group,
        "n_shared_experts": r.choice([1, 2]),
        "num_experts_per_tok": r.randint(1, min(4, kept * per_group)),
        "n_group": groups,
        "topk_group": kept,
        "routed_scaling_factor": scale,
        "norm_topk_prob": r.choice([True, False]) if family == "deepseek_v3" else False,
        "q_lora_rank": r.choice([None, 13, 32]),
        # transformers' V2 cannot view what lies behind an odd width as complex numbers
        "kv_lora_rank": r.choice([10, 20] if family == "deepseek_v2" else [9, 20]),
        "qk_nope_head_dim": r.choice([6, 8, 12] if family == "deepseek_v2" else [5, 8, 12]),
        "qk_rope_head_dim": r.choice([2, 6, 8]),
        "v_head_dim": r.choice([7, 10]),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }
    if family == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if seed % 2:
        c = r.choice([0.707, 1.0])
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": r.choice([4.0, 40.0]),
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": c,
            "mscale_all_dim": c,
        }
    return config


def ours_from(config: dict[str, Any]) -> DeepSeek:
    v3 = config["model_type"] == "deepseek_v3"
    extra = {"scoring_func": "sigmoid" if v3 else "softmax"}
    if v3:
        extra["topk_method"] = "noaux_tc"
    return DeepSeek(ModelConfig(**{**config, **extra}))


def theirs_from(config: dict[str, Any], **over: Any) -> nn.Module:
    import transformers as t

    keys = dict(config)
    yarn = keys.pop("rope_scaling", None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if yarn is not None:
        rope |= {**{k: v for k, v in yarn.items() if k != "type"}, "rope_type": "yarn"}
    v3 = keys.pop("model_type") == "deepseek_v3"
    make, cls = (t.DeepseekV3Config, t.DeepseekV3ForCausalLM) if v3 else (t.DeepseekV2Config, t.DeepseekV2ForCausalLM)
    hf = make(**keys, rope_parameters=rope, use_cache=False, **over)
    hf._attn_implementation, hf._experts_implementation = "eager", "eager"  # every dtype
    return cls(hf)


def as_theirs(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names, under transformers' names in memory (gate and up of an MLP are apart there)."""
    out = {}
    for name, value in named.items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("gate_up_proj.weight"):
            out[full.replace("gate_up_proj", "gate_proj")], out[full.replace("gate_up_proj", "up_proj")] = value.chunk(
                2
            )
        else:
            out[full] = value
    return out


def twins(family: str, seed: int, dtype: torch.dtype, **over: Any) -> tuple[DeepSeek, nn.Module]:
    """Two models with equal weights; norms away from 1 and biases of both signs, so that nothing hides."""
    config = {**random_config(family, seed), **over}
    g = torch.Generator().manual_seed(seed)
    ours, theirs = ours_from(config), theirs_from(config)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.rand(p.shape, generator=g) + 0.5 if p.ndim == 1 else torch.randn(p.shape, generator=g) * 0.2)
        for name, b in ours.named_buffers():
            if name.endswith("correction_bias"):
                b.copy_(torch.randn(b.shape, generator=g) * 0.4 - 0.3)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    for name, b in theirs.named_buffers():
        if name.endswith("correction_bias"):
            b.data = b.data.float()  # `.to(float64)` casts it; both keep the same fp32 numbers
    theirs.load_state_dict(as_theirs({**dict(ours.named_parameters()), **dict(ours.named_buffers())}), strict=True)
    return ours, theirs


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
