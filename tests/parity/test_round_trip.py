"""Our folders load in transformers, and transformers' load here, with equal logits."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from moetrain import from_pretrained, save_pretrained
from tests.support.twins import ours_from, random_config, relative, twins

pytest.importorskip("transformers")
BOUND = 5e-6  # see test_transformers


def logits(m, ids, ours):
    with torch.no_grad():
        return m(ids) if ours else m(input_ids=ids).logits


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(4))
def test_ours_to_transformers_and_back(tmp_path, family, seed):
    from transformers import AutoModelForCausalLM

    over = {"num_nextn_predict_layers": 1} if family == "deepseek_v3" and seed % 2 else {}
    ours = ours_from({**random_config(family, seed), **over})
    ours.init_weights(seed)
    ids = torch.randint(0, ours.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    want = logits(ours, ids, True)
    save_pretrained(ours, tmp_path / "a")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    assert relative(logits(theirs, ids, False), want) < BOUND
    theirs.save_pretrained(tmp_path / "b")
    back = from_pretrained(tmp_path / "b")
    assert torch.equal(logits(back, ids, True), want) or relative(logits(back, ids, True), want) < BOUND


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("fused", [False, True], ids=["experts apart", "experts stacked"])
def test_a_folder_of_transformers_loads_here(tmp_path, family, fused):
    _, theirs = twins(family, 3, torch.float32)
    theirs.save_pretrained(tmp_path, save_original_format=not fused)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert fused == any(name.endswith(".mlp.experts.gate_up_proj") for name in file.keys())  # noqa: SIM118
    ours = from_pretrained(tmp_path)
    ids = torch.randint(0, ours.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    assert relative(logits(ours, ids, True), logits(theirs, ids, False)) < BOUND


RELEASES = {
    "V2-Lite": {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "n_group": 1},
    "V2": {"model_type": "deepseek_v2", "q_lora_rank": 13, "topk_method": "group_limited_greedy", "n_group": 4},
    "V3": {"model_type": "deepseek_v3", "q_lora_rank": 13, "n_group": 4, "num_nextn_predict_layers": 1},
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_a_release_goes_through_here_to_transformers(tmp_path, release, quantize):
    """A folder as released (experts apart; V3 with MTP, duplicates, biases far from 0) -> here -> transformers."""
    from transformers import AutoModelForCausalLM

    keys = RELEASES[release]
    over = {**keys, "topk_group": min(2, keys["n_group"]), "n_routed_experts": 12, "num_experts_per_tok": 3}
    made = ours_from({**random_config(keys["model_type"], 3), **over})
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.rand(p.shape, generator=g) + 0.5 if p.ndim == 1 else torch.randn(p.shape, generator=g) * 0.2)
        biases = [b for name, b in made.named_buffers() if name.endswith("correction_bias")]
        for b in biases:
            b.copy_(torch.randn(b.shape, generator=g) * 0.4 - 0.3)
    assert len(biases) == (0 if release != "V3" else sum(made.config.is_moe_layer(i) for i in range(3)) + 1)
    save_pretrained(made, tmp_path / "release", quantize=quantize, max_shard_bytes=20_000)

    here = from_pretrained(tmp_path / "release")
    save_pretrained(here, tmp_path / "again", max_shard_bytes=30_000)
    assert (tmp_path / "again" / "model.safetensors.index.json").exists()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(0, here.config.vocab_size, (2, 33), generator=g)
    want = logits(here, ids, True)
    assert relative(logits(theirs, ids, False), want) < BOUND
    if quantize is None:
        assert torch.equal(want, logits(made, ids, True))
    for b in biases:
        b.zero_()
    if biases and quantize is None:  # the biases decide something, so a lost one would have shown
        assert relative(logits(made, ids, True), want) > 1e-3
