"""The CUDA backend's formulas on CPU: torch's attention and grouped products give what the project's own give."""

from __future__ import annotations

import pytest
import torch

from moetrain.model.backends import REFERENCE, Backend, SdpaAttention, grouped_mm_experts, looped_experts
from moetrain.model.dispatch import LocalDispatcher
from moetrain.model.rope import Rotation
from tests.support.small import V3, global_batch, model


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tokens", [12, 150])
def test_attention(tokens, documents):
    g = torch.Generator().manual_seed(0)
    q, kv, k_pe = (torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in
                   ((2, tokens, 3, 12), (2, tokens, 3, 15), (2, tokens, 4)))  # fmt: skip
    angle = torch.randn(1, tokens, 2, generator=g, dtype=torch.float64)
    ids = (torch.rand(2, tokens, generator=g) < 0.1).cumsum(1) if documents else None
    weight = torch.randn(2, tokens, 21, generator=g, dtype=torch.float64)
    found = []
    for attention in (REFERENCE.attention, SdpaAttention()):
        heads = attention.heads(q, kv, k_pe, Rotation(angle.cos(), angle.sin()), 0.3)
        y = attention.attend(heads, 3, 0.3, ids)
        found.append([y, *torch.autograd.grad((y * weight).sum(), (q, kv, k_pe))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("starved", [False, True])
def test_experts(starved):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, generator=g, requires_grad=True)
    up = torch.randn(8, 24, 16, generator=g, requires_grad=True)
    down = torch.randn(8, 16, 12, generator=g, requires_grad=True)
    weight = torch.rand(40, 2, generator=g, requires_grad=True)
    choice = torch.randint(0, 2 if starved else 8, (40, 2), generator=g)
    out = torch.randn(40, 16, generator=g)
    found = []
    for experts in (looped_experts, grouped_mm_experts):
        routed = LocalDispatcher(8).send(x, choice, weight)
        y = experts(routed, up, down, in_place_grad=False)
        found.append([y, *torch.autograd.grad((y * out).sum(), (x, up, down, weight))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)  # fp32 sums of some 40 terms of size 10, some cancel
    if starved:
        assert bool((found[0][2][2:] == 0).all())


def test_the_choice_is_made_by_device_and_dtype():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert Backend.for_device(cpu, torch.float32).experts is looped_experts
    fused = Backend.for_device(cuda, torch.bfloat16)
    assert isinstance(fused.attention, SdpaAttention) and fused.experts is grouped_mm_experts
    assert fused.describe == "attention: torch sdpa, experts: torch grouped_mm"
    assert Backend.for_device(cuda, torch.float32).experts is looped_experts
    assert Backend.for_device(cuda, torch.bfloat16, "triton").route is not fused.route is REFERENCE.route


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_the_step_on_the_cpu():
    batch = global_batch()
    losses = []
    for device in ("cpu", "cuda"):
        m = model(V3, dtype=torch.float32).to(device)
        m.use_backend(Backend.for_device(torch.device(device), torch.float32))
        targets = torch.stack([batch["labels"], batch["labels"]]).to(device)
        sums = m(batch["input_ids"].to(device), targets=targets)
        sums.sum().backward()
        losses.append((sums.detach().cpu(), m.lm_head.weight.grad.cpu()))
    for a, b in zip(*losses, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
