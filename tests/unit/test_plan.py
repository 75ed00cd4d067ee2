"""The plan reproduces published facts, counts what real runs send, and says what would mend what does not fit."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from moetrain.__main__ import main
from moetrain.config import load_config
from moetrain.errors import UserError
from moetrain.planning.hardware import TABLE, cluster
from moetrain.planning.layout import Layout
from moetrain.planning.plan import RESERVE, changes, fewest, fp8_weight_bytes, make_plan, search
from moetrain.planning.trace import rows_per_token
from moetrain.planning.traffic import traffic

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
V3 = ["engine=native", "parallel.world_size=null", "parallel.pp=16", "parallel.ep=64", "parallel.reduce=window",
      "optimizer.moments=bf16"]  # fmt: skip


def test_v3_fits_on_its_own_cluster_at_the_speed_of_its_report():
    """arXiv 2412.19437: PP16, EP64, 2048 H800 of 80 GB (3.2); 14.8 trillion tokens in 2.664 million GPU hours (table 1)
    are 1,543 tokens/s on each, with fused kernels. DualPipe recomputes parts of blocks (3.2.3), which torch's schedules
    with split backwards cannot: here it is 1F1B that recomputes them whole."""
    config = load_config(CONFIGS / "671B", [*V3, "parallel.recompute=full"])
    plan = make_plan(config, cluster("2048xH800"), fused=True)
    assert plan.fits and plan.slots == 120
    assert plan.speed.tokens == pytest.approx(14.8e12 / 2.664e6 / 3600, rel=0.25)


def test_16b_full_fine_tuning_fits_on_eight_h100():
    """DeepSeek-V2's README and the V2-Lite model card: 8x80G GPUs to fine-tune V2-Lite."""
    given = ["engine=native", "parallel.world_size=null", "parallel.recompute=full", "parallel.reduce=micro_batch"]
    assert make_plan(load_config(CONFIGS / "16B", given), cluster("8xH100")).fits


def test_fp8_weights_of_671b_fit_on_eight_h200_and_not_on_eight_h100():
    """One byte a weight and a scale a block; DeepSeek-V3's README: 685B on the Hub with MTP's copies of embedding and
    head."""
    size = fp8_weight_bytes(load_config(CONFIGS / "671B"))
    assert size == pytest.approx(682.6e9, rel=0.01)
    assert size / 8 + RESERVE > TABLE["H100"].memory and size / 8 + RESERVE < TABLE["H200"].memory


TRAFFIC = {
    "2 ranks, FSDP2": (2, []),
    "2 ranks, FSDP2, reduced in each micro-batch": (2, ["parallel.reduce=micro_batch"]),
    "2 ranks, FSDP2, not resharded": (2, ["parallel.reshard_after_forward=false"]),
    "4 ranks, FSDP2, 2 copies": (4, ["parallel.dp_replicate=2"]),
    "2 ranks, experts over 2": (2, ["parallel.ep=2"]),
    "4 ranks, experts over 4": (4, ["parallel.ep=4"]),
    "2 stages, 1F1B": (2, ["parallel.pp=2"]),
    "2 x 2 stages, interleaved 1F1B": (2, ["parallel.pp=2", "parallel.schedule=interleaved_1f1b"]),
    "2 stages of 2 ranks, 1F1B": (4, ["parallel.pp=2"]),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_is_what_real_runs_sent(name):
    """benchmarks/results/traffic.csv; what travels to experts depends on the routing."""
    world, keys = TRAFFIC[name]
    rows = list(csv.DictReader((ROOT / "benchmarks" / "results" / "traffic.csv").open()))
    seen = next(row for row in rows if row["layout"] == name)
    config = load_config(CONFIGS / "671B" / "smoke.yaml", ["batch.micro_batch=2", *keys])
    found = {flow.kind: flow.whole for flow in traffic(Layout(config, world, "cpu"), cluster(f"{world}xCPU"))}
    for kind in ("gradients", "parameters", "stages"):
        assert found.get(kind, 0) == int(seen[kind]), kind
    assert found.get("experts", 0) == pytest.approx(int(seen["experts"]), rel=0.15)


def test_a_token_goes_to_as_many_ranks_as_its_experts_may_lie_on():
    model = load_config(CONFIGS / "671B").model
    assert rows_per_token(model, 1) == pytest.approx(1)
    assert rows_per_token(model, 8) == pytest.approx(4, rel=0.1)  # a group a rank: at most topk_group (V3 paper 2.1.2)
    assert 7 < rows_per_token(model, 64) <= 8
    assert rows_per_token(model, 256) == pytest.approx(8)


def test_what_does_not_fit_is_mended_by_one_key():
    config = load_config(CONFIGS / "16B", ["engine=native", "parallel.world_size=null", "parallel.recompute=full"])
    plan = make_plan(config, cluster("8xH100"))
    mends = changes(plan)
    assert not plan.fits and 1 <= len(mends) <= 3 and all(mend.plan.fits for mend in mends)
    assert str(mends[0]) == "parallel.reduce=micro_batch"


def test_the_command_answers_in_json_and_by_its_exit_code(capsys):
    arguments = ["plan", "--config", str(CONFIGS / "671B" / "smoke.yaml"), "--gpus", "2xH100", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["gpus"] == "2xH100" and found["ranks"][0]["peak"] < 1 << 30


def test_gpus_are_written_as_a_number_and_a_kind():
    assert cluster("8xh200").count == 8 and cluster("8xH100", nodes=4).nodes == 4
    assert cluster("H100", keys={"price": 1.9}).hardware.price == 1.9
    with pytest.raises(UserError, match=r"--gpus: X9 is not in the table .* gpu\.memory=NUMBER"):
        cluster("8xX9")
    with pytest.raises(UserError, match=r"gpu\.memroy: .* did you mean gpu\.memory"):
        cluster("8xH100", keys={"memroy": 1})
    with pytest.raises(UserError, match="fp8 needs GPUs that compute in FP8, which A100 do not"):
        make_plan(load_config(CONFIGS / "671B"), cluster("8xA100"))


def test_what_the_plan_proposes_runs_as_it_is_printed():
    """Also of a config that was written for another number of GPUs, with another engine."""
    smoke = CONFIGS / "671B" / "smoke.yaml"
    given = ["engine=deepspeed", "parallel.world_size=1", "device=cuda", "precision=bf16", "batch.global_batch=8"]
    config, gpus = load_config(smoke, given), cluster("2xH100")
    small = dataclasses.replace(gpus.hardware, memory=int(0.999 * make_plan(config, gpus).need))
    gpus = dataclasses.replace(gpus, hardware=small)
    mends, (won, _) = changes(make_plan(config, gpus)), search(config, gpus)
    assert mends and won
    for change in [*mends, *won[:6]]:
        again = load_config(smoke, [*given, *str(change).split()])
        assert again.parallel.world_size in (None, change.plan.cluster.count), str(change)
        plan = make_plan(again, change.plan.cluster)
        assert plan.fits and plan.need == change.plan.need, str(change)


def test_a_search_gives_layouts_of_both_engines_the_fastest_first(capsys):
    given = ["plan", "--config", str(CONFIGS / "671B" / "smoke.yaml"), "--gpus", "2xH100", "--search", "--json"]
    assert main([*given, "parallel.world_size=null", "device=cuda", "precision=bf16", "batch.global_batch=4"]) == 0
    found = json.loads(capsys.readouterr().out)["fit"]
    seconds = [plan["seconds"]["step"] for plan in found]
    assert seconds == sorted(seconds) and all(plan["fits"] and plan["flops"] > 0 for plan in found)
    assert any("engine=deepspeed" in plan["keys"] for plan in found)


def test_the_fewest_gpus_are_looked_for_between_powers_of_two():
    config = load_config(CONFIGS / "16B", ["engine=native", "parallel.recompute=full", "batch.micro_batch=1"])
    plan = fewest(config, cluster("1xH100"))
    one_less = dataclasses.replace(plan.cluster, count=plan.cluster.count - 1)
    assert plan.fits and not make_plan(plan.config, one_less).fits


def test_under_zero_3_scope_window_is_planned_as_it_runs_by_a_counting_pass():
    """Not with the activations of all forwards: training takes the pass there whatever ``auto`` would mean."""
    keys = ["engine=deepspeed", "parallel.world_size=null", "device=cuda", "precision=bf16", "balance.alpha=1e-4"]
    once, window = (
        make_plan(load_config(CONFIGS / "671B" / "smoke.yaml", [*keys, f"balance.scope={scope}"]), cluster("2xH100"))
        for scope in ("sequence", "window")
    )
    assert window.config.counts_first
    assert window.need == pytest.approx(once.need, rel=0.01) and window.speed.step > once.speed.step
