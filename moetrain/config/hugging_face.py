"""Between a Hugging Face ``config.json`` and our keys: every writer of that file spells some differently.

DeepSeek's own files carry ``rope_scaling`` and every routing key; transformers >= 5 writes
``rope_parameters`` and leaves out ``scoring_func`` and ``topk_method`` for V3, where they are fixed. Both
directions work on plain dictionaries.
"""

from __future__ import annotations

from typing import Any

from moetrain.errors import UserError

_ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}

# What every reader takes where the file is silent; in transformers' own V3 files it always is.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True},
}

_PLAIN = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "moe_layer_freq",
    "num_attention_heads",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "bos_token_id",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
    "attention_dropout",
]

# Written by older files; what they switch on or off is not part of our model.
_MUST_BE: dict[str, Any] = {"mlp_bias": False, "rope_interleave": True}

# Readers' defaults for these differ, and some change no tensor's shape: a file without one is not guessed at.
_DEMANDED = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "q_lora_rank",
)

_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read(config: dict[str, Any]) -> dict[str, Any]:
    """The facts of a ``config.json`` under our keys; raises UserError for another architecture."""
    family = config.get("model_type")
    if family not in _FAMILY_DEFAULTS:
        raise UserError(f"config.json: model_type must be deepseek_v2 or deepseek_v3, not {family!r}")
    for key, value in _MUST_BE.items():
        if config.get(key, value) != value:
            raise UserError(f"config.json: {key} must be {value!r}, not {config[key]!r}")
    for key in _DEMANDED:
        if key not in config:
            raise UserError(f"config.json lacks {key}: add it (null where the model does not use it)")
    facts = {"model_type": family, **_FAMILY_DEFAULTS[family]}
    # null stands for "not used", which our own defaults already say.
    facts.update({key: config[key] for key in _PLAIN if config.get(key) is not None})
    if facts["topk_method"] == "gready":  # the spelling of the first released V2 code
        facts["topk_method"] = "greedy"
    facts.setdefault("n_shared_experts", 0)
    facts.setdefault("first_k_dense_replace", 0)
    depth = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    facts["num_nextn_predict_layers"] = depth or 0
    ends = config.get("eos_token_id")
    facts["eos_token_id"] = ends[0] if isinstance(ends, list) and ends else ends
    facts.update(_rope(config))
    return facts


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise UserError(f"config.json: rope_scaling must be a mapping, not {scaling!r}")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "yarn":
        raise UserError(f"config.json: rope_scaling must be of type yarn or absent, not {kind!r}")
    for key, value in (("attention_factor", None), ("truncate", True)):
        if scaling.get(key, value) not in (None, value):
            raise UserError(f"config.json: rope_scaling.{key} must be absent, not {scaling[key]!r}: DeepSeek has none")
    if scaling.get("mscale") and not scaling.get("mscale_all_dim"):
        raise UserError(
            "config.json: rope_scaling gives mscale without mscale_all_dim, which DeepSeek's code and transformers "
            "understand differently; give both (equal, as every released model has them) or neither"
        )
    yarn = {key: scaling[key] for key in _YARN if scaling.get(key) is not None}
    return {"rope_theta": theta, "rope_scaling": yarn}


def write(facts: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` from our facts, in the form of DeepSeek's own files, which every transformers reads."""
    family = facts["model_type"]
    if facts["moe_layer_freq"] != 1:
        raise UserError(
            f"moe_layer_freq is {facts['moe_layer_freq']}, which transformers ignores: it would load another model"
        )
    out = {key: facts[key] for key in (*_PLAIN, "rope_theta", "rope_scaling", "eos_token_id")}
    out["num_key_value_heads"] = facts["num_attention_heads"]
    out["attention_dropout"] = 0.0
    out.update(
        architectures=[_ARCHITECTURES[family]],
        model_type=family,
        num_nextn_predict_layers=facts["num_nextn_predict_layers"],
        use_cache=True,
    )
    return out
