"""Multi-token prediction against a plain reference, since transformers has none: V3 paper 2.2, facts B.6.

The reference is written from the formulas, token by token where that is plainer, in float64; it shares the blocks with
the model and nothing else. 1e-12 relative.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moetrain.accumulate import Window
from moetrain.model import DeepSeekLoss
from moetrain.model.rope import rotation
from tests.support.small import V3, model, rows


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def reference(m, batch):
    """Sums of cross-entropies: head, then depth 1, 2, ..."""
    config, weights = m.config, dict(m.named_parameters())
    eps = config.rms_norm_eps
    ids, labels, documents = batch["input_ids"], batch["labels"], batch["document_ids"]
    B, T = ids.shape
    turn = rotation(config, torch.arange(T).unsqueeze(0), torch.float64)
    embed = weights["embed_tokens.weight"]
    h = embed[ids]
    for layer in m.layers:
        h = layer(h, turn, documents)
    h = rms(h, weights["norm.weight"], eps)  # the state after the final norm is handed on
    sums = [summed(h, weights["lm_head.weight"], labels, documents, 1)]
    for k, module in enumerate(m.mtp, start=1):
        name = f"mtp.{k - 1}."
        joined = torch.zeros(B, T, 2 * config.hidden_size, dtype=torch.float64)
        for t in range(T):
            ahead = ids[:, t + k] if t + k < T else torch.zeros_like(ids[:, 0])
            # [embedding ; hidden], the order of the released weights
            joined[:, t] = torch.cat(
                [
                    rms(embed[ahead], weights[name + "enorm.weight"], eps),
                    rms(h[:, t], weights[name + "hnorm.weight"], eps),
                ],
                dim=-1,
            )
        h = joined @ weights[name + "eh_proj.weight"].t()
        h = rms(module.block(h, turn, documents), weights[name + "norm.weight"], eps)  # its own norm, positions unmoved
        sums.append(summed(h, weights["lm_head.weight"], labels, documents, k + 1))
    return torch.stack(sums)


def summed(h, head, labels, documents, ahead):
    """Position t predicts the label at t + ahead, of its own document."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(h.shape[0]):
        for t in range(h.shape[1] - ahead):
            if labels[b, t + ahead] != -100 and documents[b, t + ahead] == documents[b, t]:
                total = total + F.cross_entropy(h[b, t] @ head.t(), labels[b, t + ahead])
    return total


@pytest.mark.parametrize("depth", [1, 2])
def test_losses_and_every_gradient(depth):
    config = V3.model_copy(update={"num_nextn_predict_layers": depth})
    m, other = model(config), model(config)
    with torch.no_grad():
        for a, b in zip(m.parameters(), other.parameters(), strict=True):
            if a.ndim == 1:  # norms away from 1, or an order of norms could hide
                a.copy_(torch.rand(a.shape, generator=torch.Generator().manual_seed(a.numel())) + 0.5)
                b.copy_(a)
    batch = {k: v for k, v in rows(0, 3).items() if k != "attention_mask"}
    batch["labels"] = batch["input_ids"].masked_fill(batch["labels"] == -100, -100)
    got = DeepSeekLoss(config)(m, Window([batch])[0])
    want = reference(other, batch)
    assert float((got - want).abs().max() / want.max()) < 1e-12
    weight = torch.tensor([1.0, 0.7, 0.3][: depth + 1], dtype=torch.float64)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for (name, a), b in zip(m.named_parameters(), other.parameters(), strict=True):
        if b.grad is not None and b.grad.any():
            assert float((a.grad - b.grad).norm() / b.grad.norm()) < 1e-12, name
