"""``verify`` says that the law holds where it does, and that it is broken where it is."""

from __future__ import annotations

import pytest

from moetrain import load_config
from moetrain.accumulate import ledger
from moetrain.verify import LAYOUTS, scaled, verify
from tests.support.runs import ROOT, SCALES


@pytest.fixture
def quick(monkeypatch):
    """Layouts of one process only: those of several are in tests/dist."""
    monkeypatch.setattr("moetrain.verify.LAYOUTS", tuple(x for x in LAYOUTS if x.world == 1))
    monkeypatch.setattr("moetrain.verify.ZERO_LAYOUTS", ())


@pytest.mark.parametrize("scale", [*(pytest.param(s, marks=pytest.mark.slow) for s in SCALES[:2]), SCALES[2]])
def test_it_holds_for_every_scale(scale, quick, capsys):
    assert verify(load_config(ROOT / "configs" / scale / "smoke.yaml"))
    out = capsys.readouterr().out
    assert "the law holds" in out and "BROKEN" not in out


def test_the_full_architectures_are_made_small_with_their_features():
    for scale in SCALES:
        full = load_config(ROOT / "configs" / scale, ["model.rope_scaling=null"]).model
        small = scaled(full)
        for key in ("topk_method", "n_group", "topk_group", "num_experts_per_tok", "num_nextn_predict_layers"):
            assert getattr(small, key) == getattr(full, key)


def test_a_core_that_counts_twice_is_found(quick, monkeypatch, capsys):
    """The check can fail: routers that add instead of writing break it under recompute."""
    wrong = ledger.Tap.scores

    def adding(self, gate, scores, choice):
        before = self.ledger.counts[self.ledger.slot, self.row].clone()
        out = wrong(self, gate, scores, choice)
        self.ledger.counts[self.ledger.slot, self.row] += before
        return out

    monkeypatch.setattr(ledger.Tap, "scores", adding)
    assert not verify(load_config(ROOT / "configs" / "671B" / "smoke.yaml"))
    assert "BROKEN" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_holds_over_ranks():
    assert verify(load_config(ROOT / "configs" / "671B" / "smoke.yaml"))
