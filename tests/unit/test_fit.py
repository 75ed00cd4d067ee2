"""A run that cannot fit is refused before anything is allocated: what is missing, and what works instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moetrain.config import load_config
from moetrain.errors import UserError
from moetrain.planning.fit import Machine, check, host_memory, rank_states

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30

LAPTOP = Machine(gpus=0, gpu_bytes=0, host_bytes=22 * GIB, local_ranks=1, ranks=1, fp8=False)
H200x8 = Machine(gpus=8, gpu_bytes=139 * GIB, host_bytes=12_000 * GIB, local_ranks=8, ranks=8, fp8=True)

# What is trained: without the routing biases, 256 for each of the 58 + 1 layers of experts.
V3 = 671_026_419_200 + 11_610_068_224 - 59 * 256


def refusal(scale: str, machine: Machine, *overrides: str) -> str:
    path = CONFIGS / scale
    with pytest.raises(UserError) as error:
        check(load_config(path, overrides), path, machine)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_671b_on_a_laptop_says_what_is_missing_and_what_works() -> None:
    text = refusal("671B", LAPTOP)
    assert "needs 8 CUDA GPUs (here: none)" in text
    assert "GiB of host memory for parameters, gradients and AdamW states (here: 22 GiB)" in text
    assert text.endswith(f"what runs here is `python -m moetrain --config {CONFIGS}/671B/smoke.yaml`")


def test_the_host_memory_of_671b_is_that_of_its_states() -> None:
    """16-bit weights and fp32 sums of gradients, with what passes on its way to the drive; there 16 bytes a parameter:
    fp32 masters, moments and gradients. Without a drive gradients are in memory twice."""
    states = rank_states(load_config(CONFIGS / "671B"), 8)
    assert states.device == 0
    assert 8 * states.host == pytest.approx(6 * V3 + 8 * 5 * 4 * 1e9, rel=1e-9)
    assert 8 * states.drive == pytest.approx(16 * V3, rel=1e-9)
    states = rank_states(load_config(CONFIGS / "671B", ["deepspeed.offload_optimizer=cpu"]), 8)
    assert 8 * states.host == pytest.approx(22 * V3, rel=1e-9) and states.drive == 0


@pytest.mark.parametrize(("precision", "width"), [("fp32", 16), ("bf16", 16), ("float64", 32)])
def test_native_states_shard_over_the_ranks(precision: str, width: int) -> None:
    config = load_config(CONFIGS / "671B", ["engine=native", f"precision={precision}", "optimizer.moments=fp32"])
    alone = rank_states(config, 1)
    assert alone.device == width * V3 and alone.host == 0
    assert rank_states(config, 8).device == pytest.approx(alone.device / 8, abs=3)


def test_zero_stages_shard_what_they_say() -> None:
    parameters = V3
    common = ["optimizer.moments=fp32", "precision=fp16", "parallel.reduce=window"]
    for stage, width in ((1, 2 + 4 + 12 / 8), (2, 2 + (4 + 12) / 8), (3, 18 / 8)):
        setting = f"deepspeed={{zero_stage: {stage}}}"
        states = rank_states(load_config(CONFIGS / "671B", [*common, setting]), 8)
        assert states.device == pytest.approx(width * parameters, rel=1e-9)


def test_a_machine_that_has_it_all_passes() -> None:
    check(load_config(CONFIGS / "671B"), CONFIGS / "671B", H200x8)


@pytest.mark.parametrize("scale", ["16B", "236B", "671B"])
def test_smoke_runs_fit_a_small_machine(scale: str) -> None:
    small = replace(LAPTOP, host_bytes=GIB)
    check(load_config(CONFIGS / scale / "smoke.yaml"), CONFIGS / scale / "smoke.yaml", small)
    check(load_config(CONFIGS / scale / "smoke.yaml"), None, replace(small, local_ranks=8, ranks=8))


def test_a_wrong_number_of_processes_is_answered_with_the_command() -> None:
    text = refusal("671B", replace(H200x8, local_ranks=1, ranks=1))
    assert "was written for 8 processes and 1 started" in text
    assert f"torchrun --nproc_per_node 8 -m moetrain --config {CONFIGS}/671B" in text


def test_gpus_without_fp8_are_refused_for_an_fp8_run() -> None:
    assert "GPUs that compute in FP8" in refusal("671B", replace(H200x8, fp8=False))


def test_gpu_memory_is_counted_for_each_gpu() -> None:
    text = refusal("671B", H200x8, "engine=native", "optimizer.moments=bf16")
    assert f"{12 * V3 // 8 / GIB:.0f} GiB on each GPU" in text and "(here: 139 GiB)" in text


def test_too_few_gpus_are_counted() -> None:
    assert "needs 8 CUDA GPUs (here: 4)" in refusal("671B", replace(H200x8, gpus=4))


def test_a_small_run_that_only_lacks_a_gpu_is_sent_to_the_cpu() -> None:
    path = CONFIGS / "671B" / "smoke.yaml"
    with pytest.raises(UserError, match=r"needs 1 CUDA GPU with .* \(here: none\); device=cpu runs it without"):
        check(load_config(path, ["device=cuda"]), path, LAPTOP)


def test_a_run_on_the_cpu_counts_all_its_ranks_against_one_memory() -> None:
    text = refusal("16B", replace(LAPTOP, ranks=2, local_ranks=2), "device=cpu", "parallel.world_size=null")
    assert "GiB of host memory" in text and "CUDA" not in text


def test_this_machine_has_some_memory() -> None:
    here = Machine.here()
    assert here.host_bytes == pytest.approx(host_memory(), rel=0.2)
    assert GIB / 4 < here.host_bytes < 2**50
    assert here.ranks >= 1


def test_another_number_of_shards_than_processes_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel\.dp_shard: 2 asks for 2 processes and 1 started"):
        check(load_config(CONFIGS / "671B" / "smoke.yaml", ["parallel.dp_shard=2"]), None, LAPTOP)


def test_expert_groups_have_to_fit_the_processes() -> None:
    config = load_config(CONFIGS / "671B" / "smoke.yaml", ["parallel.ep=2"])
    with pytest.raises(
        UserError, match=r"parallel\.ep: 2 must divide the 1 process that started: use `torchrun --nproc"
    ):
        check(config, None, LAPTOP)


def test_deep_ep_is_refused_where_it_is_not() -> None:
    given = ("engine=native", "parallel.dispatch=deep_ep", "parallel.world_size=null")
    assert "DeepEP is not installed; use parallel.dispatch=all_to_all" in refusal("671B/smoke.yaml", LAPTOP, *given)
