"""A run is what its file says: shipped files load, overrides and bases combine, nothing is misread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrain.config import ModelConfig, Piecewise, RunConfig, Yarn, load_config, refuse_unsupported
from moetrain.config.sentences import dotted_keys
from moetrain.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
SMOKE = CONFIGS / "671B" / "smoke.yaml"
RUNS = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.name != "model.yaml")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_file_is_a_run(path: Path) -> None:
    config = load_config(path)
    assert config.run_dir == Path("runs") / config.name
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("scale", ["16B", "236B", "671B"])
def test_smoke_runs_work_now(scale: str) -> None:
    refuse_unsupported(load_config(CONFIGS / scale / "smoke.yaml"))


@pytest.mark.parametrize("scale", ["16B", "236B", "671B"])
def test_model_files_are_complete(scale: str) -> None:
    """No architecture fact is left to a default."""
    import yaml

    facts = yaml.safe_load((CONFIGS / scale / "model.yaml").read_text())
    assert set(facts) == set(ModelConfig.model_fields)
    assert set(facts["rope_scaling"]) == set(Yarn.model_fields)


@pytest.mark.parametrize("scale", ["16B", "236B", "671B"])
def test_smoke_has_the_features_of_its_scale(scale: str) -> None:
    full, small = (load_config(CONFIGS / scale / name) for name in ("config.yaml", "smoke.yaml"))
    for key in ("model_type", "scoring_func", "topk_method", "norm_topk_prob", "n_shared_experts"):
        assert getattr(small.model, key) == getattr(full.model, key)
    assert small.model.num_nextn_predict_layers == full.model.num_nextn_predict_layers
    assert (small.model.q_lora_rank is None) == (full.model.q_lora_rank is None)
    assert (small.model.n_group > 1) == (full.model.n_group > 1)
    assert small.schedule.kind == full.schedule.kind
    for key in ("alpha", "alpha_device", "alpha_communication"):
        assert (getattr(small.balance, key) > 0) == (getattr(full.balance, key) > 0)
    assert (small.balance.bias_rate.largest > 0) == (full.balance.bias_rate.largest > 0)


def test_the_671b_recipe_is_the_published_one() -> None:
    """DeepSeek-V3 paper, section 4.2."""
    config = load_config(CONFIGS / "671B")
    assert config.tokens == 14_800_000_000_000
    assert (config.batch.global_batch, config.data.seq_len) == (15360, 4096)
    assert config.batch.global_batch * config.data.seq_len == 62_914_560
    schedule = config.schedule
    assert schedule.kind == "constant_cosine_constant"
    assert schedule.constant + schedule.cosine + schedule.hold + 167e9 == config.tokens
    assert config.optimizer.lr * schedule.ratio == pytest.approx(2.2e-5)
    assert config.optimizer.lr * schedule.last == pytest.approx(7.3e-6)
    assert [config.balance.bias_rate.at(t) for t in (0, 14.2e12, 14.3e12, 14.8e12)] == [1e-3, 1e-3, 0, 0]
    assert [config.mtp.weight.at(t) for t in (0, 9.99e12, 10e12)] == [0.3, 0.3, 0.1]
    assert config.model.rope_scaling is None, "pre-training at 4096 tokens uses plain RoPE"


# ---- Hugging Face

# The config.json of the released models, as far as it concerns the architecture.
DATA = Path(__file__).parents[1] / "data"
RELEASED: dict[str, dict[str, Any]] = {
    scale: json.loads((DATA / f"config_{scale}.json").read_text()) for scale in ("16B", "236B", "671B")
}


@pytest.mark.parametrize("scale", RELEASED)
def test_the_released_config_is_our_model_file(scale: str) -> None:
    """Apart from the initial standard deviation, which the released files do not tell truly."""
    ours = load_config(CONFIGS / scale, [f"model={CONFIGS / scale / 'model.yaml'}"]).model
    assert ModelConfig.from_hf({**RELEASED[scale], "initializer_range": 0.006}) == ours


@pytest.mark.parametrize("scale", RELEASED)
def test_hugging_face_round_trip_loses_nothing(scale: str) -> None:
    config = ModelConfig.from_hf(RELEASED[scale])
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    theirs = RELEASED[scale]
    assert {key: theirs[key] for key in written.keys() & theirs.keys()} == {
        key: written[key] for key in written.keys() & theirs.keys()
    }


@pytest.mark.parametrize("scale", RELEASED)
def test_what_transformers_writes_reads_back(scale: str) -> None:
    """It renames rope_scaling to rope_parameters, and leaves scoring_func and topk_method out for V3."""
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_hf(RELEASED[scale])
    theirs = transformers.AutoConfig.for_model(**config.to_hf())
    written = json.loads(theirs.to_json_string())
    assert "rope_parameters" in written
    for key in ("scoring_func", "topk_method") if scale == "671B" else ():
        written.pop(key, None)
    assert ModelConfig.from_hf(written) == config


def test_query_rank_zero_means_none() -> None:
    assert ModelConfig.from_hf({**RELEASED["16B"], "q_lora_rank": 0}).q_lora_rank is None


def test_moe_layers_follow_dense_ones() -> None:
    config = ModelConfig.from_hf({**RELEASED["671B"], "moe_layer_freq": 2})
    assert [config.is_moe_layer(i) for i in range(7)] == [False, False, False, False, True, False, True]
    assert config.qk_head_dim == 192


# ---- YAML, overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.lr=3", 3.0),
        ("optimizer.max_norm=null", None),
        ("optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("log.tensorboard=off", "off"),
        ("engine=deepspeed", "deepspeed"),
        ("data.document_mask=true", True),
        ("batch.global_batch=1_024", 1024),
        # laid over the base's, which says 1.0 for both scales
        ("model.rope_scaling={factor: 4, original_max_position_embeddings: 64}", Yarn(
            factor=4, original_max_position_embeddings=64, mscale=1, mscale_all_dim=1)),
        ("parallel.recompute=none", "none"),
        ("balance.bias_rate=[[0, 1e-3], [1.5e6, 0]]", Piecewise(((0, 1e-3), (1.5e6, 0)))),
    ],
)  # fmt: skip
def test_an_override_replaces_one_key(override: str, value: object) -> None:
    found: Any = load_config(SMOKE, [override])
    for part in override.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value


def test_an_override_leaves_the_rest_alone() -> None:
    before = load_config(SMOKE).model_dump()
    after = load_config(SMOKE, ["model.hidden_size=64"]).model_dump()
    before["model"]["hidden_size"] = 64
    assert after == before


def test_a_step_budget_replaces_a_token_budget() -> None:
    config = load_config(CONFIGS / "671B", ["steps=10"])
    assert config.steps == 10 and config.tokens is None


def test_numbers_mean_the_same_in_the_file(tmp_path: Path) -> None:
    text = SMOKE.read_text().replace("base: model.yaml", f"base: {SMOKE.parent / 'model.yaml'}")
    file = tmp_path / "run.yaml"
    file.write_text(text.replace("lr: 2e-3", "lr: 5e-4").replace("steps: 150", "tokens: 1.5e7"))
    config = load_config(file)
    assert (config.optimizer.lr, config.tokens) == (5e-4, 15_000_000)


def test_a_model_path_is_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "tiny.yaml").write_text((CONFIGS / "16B" / "model.yaml").read_text())
    run = (CONFIGS / "16B" / "smoke.yaml").read_text().replace("base: model.yaml", "base: ../tiny.yaml")
    (tmp_path / "runs" / "run.yaml").write_text(run)
    expected = load_config(CONFIGS / "16B" / "smoke.yaml").model
    assert load_config(tmp_path / "runs" / "run.yaml").model == expected
    monkeypatch.chdir(tmp_path)  # in an override the path is the user's, so relative to where they are
    full = load_config("runs/run.yaml", ["model=tiny.yaml"]).model
    assert full.num_hidden_layers == 27


def test_the_model_can_come_from_a_hugging_face_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED["16B"]))
    run = tmp_path / "run.yaml"
    run.write_text(
        f"name: x\nsteps: 1\ninit_from: {tmp_path}\n"
        "data: {seq_len: 128}\nbatch: {global_batch: 1, micro_batch: 1}\noptimizer: {lr: 1e-5}\n"
    )
    assert load_config(run).model == ModelConfig.from_hf(RELEASED["16B"])


def test_the_nearest_key_is_named_wherever_a_letter_is_lost() -> None:
    """Every key of the config, with its last letter dropped, is answered with the key itself."""
    skip = {"ep", "pp", "cp", "lr", "at"}  # what is left of them is one letter
    for key in dotted_keys(RunConfig):
        section, dot, name = key.rpartition(".")
        # Sections that the run leaves out would first complain about what they lack.
        if name in skip or section.startswith(("batch.", "schedule", "model.rope")):
            continue
        with pytest.raises(UserError, match="unknown key") as error:
            load_config(SMOKE, [f"{section}{dot}{name[:-1]}=1"])
        assert f"`{key}`" in str(error.value)


# ---- Piecewise


@given(st.lists(st.tuples(st.integers(1, 10**13), st.floats(0, 10)), max_size=5, unique_by=lambda p: p[0]))
def test_a_piecewise_value_is_that_of_its_last_start(later: list[tuple[int, float]]) -> None:
    pairs = [(0, 0.5), *sorted(later)]
    value = Piecewise.model_validate(pairs)
    for i, (start, level) in enumerate(pairs):
        assert value.at(start) == level
        if i:
            assert value.at(start - 0.5) == pairs[i - 1][1]
    assert value.at(1e15) == pairs[-1][1]
    assert value.largest == max(level for _, level in pairs)
    assert Piecewise.model_validate_json(value.model_dump_json()) == value


def test_a_number_is_a_constant_piecewise_value() -> None:
    assert Piecewise.model_validate(0.3).at(10**15) == 0.3
