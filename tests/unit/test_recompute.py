"""Selective recompute keeps what it says, and every backend's step is the same bit for bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moetrain.accumulate import Balance
from moetrain.model.backends import REFERENCE, SdpaAttention
from moetrain.parallel.recompute import recompute_in_backward, recompute_what_is_cheap
from tests.support.small import FAMILIES, V3, difference, every_loss, global_batch, model, sgd, state, window

HOW = {"none": lambda block: None, "selective": recompute_what_is_cheap, "full": recompute_in_backward}


def built(how, config=V3, attention=None):
    m = model(config)
    if attention is not None:
        m.use_backend(REFERENCE._replace(attention=attention))
    for block in [*m.layers, *(k.block for k in m.mtp)]:
        HOW[how](block)
    return m


@pytest.mark.parametrize("attention", [None, SdpaAttention()])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_bit_for_bit(family, attention):
    found = {}
    for how in HOW:
        m = built(how, FAMILIES[family], attention)
        accumulator = sgd(m, FAMILIES[family], every_loss(FAMILIES[family], "window"))
        for _ in range(2):
            accumulator.step(window([2, 4]))
        found[how] = state(m)
    assert difference(found["selective"], found["none"]) == difference(found["full"], found["none"]) == 0.0


def kept_by(m):
    """Bytes that wait between forward and backward, every storage once."""
    live: dict[int, weakref.ref] = {}
    total = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    live[x.untyped_storage().data_ptr()] = weakref.ref(x.untyped_storage())
            return out

    batch = global_batch()
    with Count():
        loss = m(batch["input_ids"], targets=torch.stack([batch["labels"]] * 2)).sum()
    gc.collect()
    total = sum(s.nbytes() for ref in live.values() if (s := ref()) is not None)
    loss.backward()
    return total


def test_it_keeps_less_than_none_and_more_than_full():
    none, selective, full = (kept_by(built(how)) for how in HOW)
    assert full < selective < none
    c, tokens = V3, global_batch()["input_ids"].numel()
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    heads = c.num_attention_heads * (2 * qk + c.v_head_dim)
    norms = 2 * c.hidden_size + c.q_lora_rank + c.kv_lora_rank
    blocks = c.num_hidden_layers + c.num_nextn_predict_layers
    assert none - selective >= 0.9 * 8 * tokens * blocks * (heads + norms)


def test_evaluation_and_frozen_weights_go_their_way():
    m = built("selective")
    with torch.no_grad():
        plain = model()(global_batch()["input_ids"])
        assert torch.equal(m(global_batch()["input_ids"]), plain)
    for name, p in m.named_parameters():
        p.requires_grad_(name.endswith("kv_b_proj.weight"))  # inside what runs again; no input of it has a gradient
    sgd(m, V3, Balance()).step(window([6]))
    whole = model()
    for name, p in whole.named_parameters():
        p.requires_grad_(name.endswith("kv_b_proj.weight"))
    sgd(whole, V3, Balance()).step(window([6]))
    assert difference(state(m), state(whole)) == 0.0
