"""The architecture of a DeepSeek model, with the keys of DeepSeek's and Hugging Face's own config files.

The names are theirs, so that someone with the paper or a released ``config.json`` at hand finds every number
again. A config that is wrong in itself (five groups of sixteen experts) is refused here, before any tensor
exists.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError, field_validator, model_validator

from moetrain.config import hugging_face
from moetrain.config.sentences import first_sentence
from moetrain.config.values import (
    NotNegative,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Section,
    Truth,
)
from moetrain.errors import UserError


class Yarn(Section):
    """Context extension of the rotary embedding (YaRN), with the keys of ``rope_scaling`` and Hugging Face's
    defaults.

    cos and sin are multiplied by m(factor, mscale) / m(factor, mscale_all_dim), attention logits by
    m(factor, mscale_all_dim)^2, where m(s, c) = 0.1 c ln(s) + 1 for s > 1 (DeepSeek-V3's inference code).
    """

    type: Literal["yarn"] = "yarn"
    factor: PositiveReal
    original_max_position_embeddings: Positive
    beta_fast: PositiveReal = 32.0
    beta_slow: PositiveReal = 1.0
    mscale: NotNegativeReal = 1.0
    mscale_all_dim: NotNegativeReal = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Yarn:
        if self.factor < 1:
            raise ValueError(f"factor ({self.factor:g}) must be at least 1, since YaRN lengthens the context")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast ({self.beta_fast:g}) must exceed beta_slow ({self.beta_slow:g})")
        return self


class ModelConfig(Section):
    """Shape of a DeepSeek-V2-Lite, V2 or V3 model.

    ``deepseek_v2`` routes by softmax (``greedy`` or ``group_limited_greedy``), ``deepseek_v3`` by sigmoid
    with a correction bias (``noaux_tc``). ``q_lora_rank`` None means that queries are not compressed
    (V2-Lite). ``num_nextn_predict_layers`` is the depth of multi-token prediction. ``initializer_range`` is
    the standard deviation used in training (0.006, V2 and V3 papers), not the 0.02 of the released
    ``config.json`` files.
    """

    model_type: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    moe_intermediate_size: Positive
    num_hidden_layers: Positive
    first_k_dense_replace: NotNegative
    moe_layer_freq: Positive = 1
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    n_routed_experts: Positive
    n_shared_experts: NotNegative
    num_experts_per_tok: Positive
    n_group: Positive = 1
    topk_group: Positive = 1
    routed_scaling_factor: PositiveReal = 1.0
    scoring_func: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    norm_topk_prob: Truth
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    rope_theta: PositiveReal = 10000.0
    rope_scaling: Yarn | None = None
    max_position_embeddings: Positive
    rms_norm_eps: PositiveReal = 1e-6
    initializer_range: PositiveReal = 0.006
    num_nextn_predict_layers: NotNegative = 0
    bos_token_id: NotNegative | None = None
    eos_token_id: NotNegative | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    attention_dropout: NotNegativeReal = 0.0

    @field_validator("q_lora_rank", mode="before")
    @classmethod
    def _no_query_compression(cls, value: Any) -> Any:
        """DeepSeek's inference configs write 0 where Hugging Face writes null."""
        return None if value == 0 and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        experts, groups, kept = self.n_routed_experts, self.n_group, self.topk_group
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must equal num_attention_heads "
                f"({self.num_attention_heads}): latent attention has a key and value head for each query head"
            )
        if self.attention_dropout:
            raise ValueError(f"attention_dropout ({self.attention_dropout:g}) must be 0: these models use none")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim ({self.qk_rope_head_dim}) must be even: rotation works on pairs")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace ({self.first_k_dense_replace}) must not exceed num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        if experts % groups:
            raise ValueError(f"n_routed_experts ({experts}) must be a multiple of n_group ({groups})")
        if kept > groups:
            raise ValueError(f"topk_group ({kept}) must not exceed n_group ({groups})")
        allowed = experts if self.topk_method == "greedy" else experts // groups * kept
        if self.num_experts_per_tok > allowed:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must not exceed the {allowed} experts a "
                "token may choose from (n_routed_experts / n_group * topk_group)"
            )
        if (self.scoring_func == "sigmoid") != (self.topk_method == "noaux_tc"):
            raise ValueError(
                f"scoring_func {self.scoring_func} does not go with topk_method {self.topk_method}: sigmoid "
                "goes with noaux_tc, softmax with greedy or group_limited_greedy"
            )
        if (self.model_type == "deepseek_v3") != (self.scoring_func == "sigmoid"):
            wanted = "sigmoid" if self.model_type == "deepseek_v3" else "softmax"
            raise ValueError(f"model_type {self.model_type} needs scoring_func {wanted}, not {self.scoring_func}")
        if self.topk_method == "noaux_tc" and groups > 1 and experts // groups < 2:
            raise ValueError(
                f"n_group ({groups}) leaves one expert a group, but noaux_tc scores a group by its best two: "
                "use at least two experts a group or n_group 1"
            )
        for key in ("bos_token_id", "eos_token_id"):
            token = getattr(self, key)
            if token is not None and token >= self.vocab_size:
                raise ValueError(f"{key} ({token}) must be below vocab_size ({self.vocab_size})")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the part without position and the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer ``index`` (from 0) holds experts rather than a dense feed-forward."""
        return index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read the ``config.json`` of a DeepSeek V2-Lite, V2 or V3 folder, or of one that transformers wrote.

        Keys that do not change the architecture are ignored. Raises UserError where the architecture is
        another one.
        """
        facts = hugging_face.read(config)
        # Hugging Face readers drop what they do not know; what `read` returns holds only keys of this class.
        try:
            return cls.model_validate(facts)
        except ValidationError as error:
            raise UserError(f"config.json: {first_sentence(error, cls).text}") from None

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that transformers loads; ``torch_dtype`` is left to whoever writes the
        weights."""
        return hugging_face.write(self.model_dump(mode="json"))
