"""Golden losses: a refactor changes no number.

float64, so that machines agree: what differs between them is the order of sums. Made by `python -m tests.golden.make`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.make import CASES, curve

GOLDEN = json.loads((Path(__file__).parent / "losses.json").read_text())


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_the_curve_is_the_one_that_was_written_down(tmp_path, case):
    got, want = curve(case, tmp_path), GOLDEN[case]
    assert got.keys() == want.keys()
    for term, values in want.items():
        assert got[term] == pytest.approx(values, rel=1e-10), term
