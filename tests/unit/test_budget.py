"""How long a run is, in steps and tokens, for batches that stay and batches that grow."""

from __future__ import annotations

from pathlib import Path

from moetrain.config import load_config
from moetrain.loop import Progress
from moetrain.trainer import batch_sizes, budget_of

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_budget_in_tokens_is_the_steps_that_hold_them_the_last_one_begun_included():
    config = load_config(CONFIGS / "671B" / "smoke.yaml", ["tokens=1e6"])
    budget, tokens = budget_of(config, batch_sizes(config))
    assert budget.expected_steps == 245 and tokens == 245 * 16 * 256
    assert not budget.reached(Progress(step=244, tokens=244 * 16 * 256))
    assert budget.reached(Progress(step=245, tokens=245 * 16 * 256))


def test_the_ramp_of_v3_makes_its_run_longer_than_a_constant_batch():
    config = load_config(CONFIGS / "671B")
    ramped, tokens = budget_of(config, batch_sizes(config))
    constant = config.model_copy(update={"batch": config.batch.model_copy(update={"ramp": None})})
    assert (
        budget_of(constant, batch_sizes(constant))[0].expected_steps == 235_240
    )  # 14.8e12 / (15360 * 4096), rounded up
    # by hand: 469e9 tokens over batches of 3072, 6144, 9216 and 12288 sequences, a quarter of the way each
    by_hand = sum(469e9 / 4 / (size * 4096) for size in (3072, 6144, 9216, 12288)) + (14.8e12 - 469e9) / (15360 * 4096)
    assert abs(ramped.expected_steps - by_hand) < 5
    assert config.tokens is not None and 0 <= tokens - config.tokens < 15360 * 4096


def test_a_budget_in_steps_counts_the_tokens_of_a_ramp():
    config = load_config(CONFIGS / "671B" / "smoke.yaml", ["steps=9", "batch.ramp={start: 4, tokens: 8192}"])
    budget, tokens = budget_of(config, batch_sizes(config))
    # 8192 tokens are 32 sequences of 256: 4, 4, 4, 8, 8, 12, then 16
    assert budget.expected_steps == 9 and tokens == 256 * (4 * 3 + 8 * 2 + 12 + 16 * 3)
