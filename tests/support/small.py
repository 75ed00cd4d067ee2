"""Tiny models of both families and one awkward global batch, in float64.

The batch has unequal valid tokens, a row without any label, padding, and packed documents: everything that a mean per
micro-batch would get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moetrain.accumulate import Balance, MoEAccumulator, StepReport, Window
from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek, DeepSeekLoss

V3 = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=2,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=64,
    num_nextn_predict_layers=1,
    initializer_range=0.3,
)

V2 = V3.model_copy(
    update={
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
        "num_nextn_predict_layers": 0,
    }
)

LITE = V2.model_copy(update={"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None})

FAMILIES = {"V3": V3, "V2": V2, "V2-Lite": LITE}

ROWS, TOKENS = 6, 12


def global_batch() -> dict[str, Tensor]:
    """The six rows of the awkward batch."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (ROWS, TOKENS), generator=g)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[3, 6:], mask[5, 2:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :9], labels[1], labels[3, 5:] = -100, -100, -100
    documents = (torch.rand(ROWS, TOKENS, generator=g) < 0.2).cumsum(1)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "document_ids": documents}


def rows(first: int, last: int) -> dict[str, Tensor]:
    return {key: value[first:last] for key, value in global_batch().items()}


def padding_row() -> dict[str, Tensor]:
    """A micro-batch with nothing in it, for ranks that have fewer rows than others."""
    return {key: torch.full_like(value, -100 if key == "labels" else 0) for key, value in rows(0, 1).items()}


def window(sizes: Sequence[int]) -> Window:
    """The whole batch, cut into micro-batches of these sizes; 0 is an empty one."""
    out, first = [], 0
    for size in sizes:
        out.append(rows(first, first + size) if size else padding_row())
        first += size
    assert first == ROWS
    return Window(out)


#: the same rows over several ranks, every rank with as many micro-batches
SPREAD: dict[int, list[list[tuple[int, int] | None]]] = {
    1: [[(0, 6)]],
    2: [[(0, 1), (1, 2), (2, 3)], [(3, 5), (5, 6), None]],
    4: [[(0, 1), (1, 2)], [(2, 4), None], [(4, 5), (5, 6)], [None, None]],
    8: [
        [(0, 1), None],
        [(1, 2), (2, 3)],
        [None, None],
        [(3, 4), None],
        [None, (4, 5)],
        [(5, 6), None],
        *[[None] * 2] * 2,
    ],
}


def rank_window(rank: int, world: int) -> Window:
    return Window(rows(*part) if part else padding_row() for part in SPREAD[world][rank])


def model(config: ModelConfig = V3, seed: int = 3, dtype: torch.dtype = torch.float64) -> DeepSeek:
    built = DeepSeek(config)
    built.init_weights(seed)
    return built.to(dtype)


def every_loss(config: ModelConfig, scope: str, **over: Any) -> Balance:
    """All balance losses that the family has, with weights large enough to matter."""
    grouped = config.n_group > 1
    weights: dict[str, Any] = {
        "alpha": 0.5,
        "alpha_device": 0.3 if grouped else 0.0,
        "alpha_communication": 0.2 if grouped else 0.0,
        "z_loss": 0.01,
        "bias_rate": 1e-3 if config.topk_method == "noaux_tc" else 0.0,
    }
    return Balance(scope=scope, **(weights | over))  # type: ignore[arg-type]


def sgd(m: torch.nn.Module, config: ModelConfig, balance: Balance, **kwargs: Any) -> MoEAccumulator:
    """Plain gradient descent: a wrong gradient is a wrong parameter."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    return MoEAccumulator(m, optimizer, loss=DeepSeekLoss(config), balance=balance, **{"max_norm": 1.0, **kwargs})


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor, detached."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def state(m: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whole, copied."""
    named = [*m.named_parameters(), *m.named_buffers()]
    return {name.removeprefix("module."): full(value).clone() for name, value in named}


def gradients_of(accumulator: MoEAccumulator) -> list[dict[str, Tensor]]:
    """Fills with every step's gradients, whole, as the norm sees them: reduced, and not yet clipped."""
    found: list[dict[str, Tensor]] = []
    norm = accumulator.owner.norm

    def seen() -> Tensor:
        named = accumulator.model.named_parameters()
        found.append({n.removeprefix("module."): full(p.grad).clone() for n, p in named if p.grad is not None})
        return norm()

    accumulator.owner.norm = seen  # type: ignore[method-assign]
    return found


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of any tensor."""
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).norm() / b[k].double().norm().clamp(min=1e-30)) for k in a)


def same_report(a: StepReport, b: StepReport, bound: float) -> None:
    """Every number of two reports agrees to a relative bound; counts agree exactly."""
    for name in b.losses:
        assert abs(float(a.losses[name] - b.losses[name])) <= bound * max(1.0, abs(float(b.losses[name]))), name
    assert abs(float(a.total - b.total)) <= bound * abs(float(b.total))
    assert abs(float(a.grad_norm - b.grad_norm)) <= bound * float(b.grad_norm)
    assert torch.equal(a.load, b.load)
    assert a.valid_tokens == b.valid_tokens and a.routed_tokens == b.routed_tokens
