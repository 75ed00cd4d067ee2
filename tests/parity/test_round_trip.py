"""Our folders load in transformers, and transformers' load here, with equal logits."""

from __future__ import annotations

import pytest
import torch

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
def test_a_folder_of_transformers_loads_here(tmp_path, family):
    _, theirs = twins(family, 3, torch.float32)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    ids = torch.randint(0, ours.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    assert relative(logits(ours, ids, True), logits(theirs, ids, False)) < BOUND
