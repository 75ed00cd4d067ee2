"""Whatever is wrong with a config ends in one sentence that names where it stands and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moetrain.config import ModelConfig, load_config, refuse_unsupported
from moetrain.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
SMOKE = CONFIGS / "671B" / "smoke.yaml"


def sentence_of(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        action()
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("lr=1e-3", "unknown key `lr`; did you mean `optimizer.lr`?"),
        ("optimizer.learning_rate=1", "unknown key `optimizer.learning_rate`; here it is `optimizer.lr`"),
        ("optimizer.max_grad_norm=1", "did you mean `optimizer.max_norm`"),
        ("train_iters=1", "here it is `steps`"),
        ("optimiser.lr=1", "unknown key `optimiser`; did you mean `optimizer`?"),
        ("model.hiden_size=8", "did you mean `model.hidden_size`?"),
        ("schedule.constnt=8", "did you mean `schedule.constant`?"),
        ("optimizer.lr=fast", "`optimizer.lr` must be a number, not 'fast'"),
        ("optimizer.lr=-1", "`optimizer.lr` must be greater than 0, not -1"),
        ("optimizer.lr=.nan", "`optimizer.lr` must be a finite number"),
        ("optimizer.lr=true", "`optimizer.lr` must be a number, not true"),
        ("optimizer.betas=[0.9]", "`optimizer.betas` must be a list of 2 entries"),
        ("optimizer.betas=[0.9, 1]", "`optimizer.betas.1` must be less than 1, not 1"),
        ("optimizer=3", "`optimizer` must be a mapping of keys, not 3"),
        ("batch.global_batch=2.5", "`batch.global_batch` must be a whole number, not 2.5"),
        ("batch.global_batch='8'", "`batch.global_batch` must be a whole number, not '8'"),
        ("batch.micro_batch=32", "micro_batch (32) must not exceed global_batch (16)"),
        ("batch.ramp={start: 64, tokens: 1e6}", "ramp.start (64) must not exceed global_batch (16)"),
        ("batch.noise_scale={minimum: 2, maximum: 8}", "global_batch (16), where noise_scale starts, must lie between"),
        ("batch={global_batch: 4, micro_batch: 1, ramp: {start: 2, tokens: 9}, "
         "noise_scale: {minimum: 2, maximum: 9}}", "give one of them"),
        ("batch.lr_rule=cubic", "`batch.lr_rule` must be 'none', 'linear' or 'sqrt'"),
        ("parallel.pp=8", "makes 8 stages of 5 layers: give pp or stages_per_rank less, or another schedule"),
        ("parallel={pp: 2, schedule: dualpipev}", "set reshard_after_forward: false"),
        ("parallel={pp: 2, schedule: zbv_zero_bubble, reshard_after_forward: false, recompute: full}",
         "set recompute: none, or schedule: 1f1b"),
        ("parallel={pp: 2, schedule: interleaved_zero_bubble, reshard_after_forward: false, reduce: micro_batch}",
         "set reduce: window"),
        ("parallel={pp: 2, schedule: gpipe, stages_per_rank: 3}", "puts 1 stage on a rank: leave"),
        ("parallel={recompute: selective, offload_activations: true}", "set recompute to full or none"),
        ("parallel={pp: 2, schedule: 1f2b}", "`parallel.schedule` must be"),
        ("parallel.ep=3", "parallel.ep (3) must divide model.n_routed_experts (16)"),
        ("steps=null", "give the budget as either steps or tokens: neither is there"),
        ("steps=0", "`steps` must be greater than 0, not 0"),
        ("steps=1:30", "`steps` must be a whole number, not '1:30'"),
        ("precision=int4", "`precision` must be 'fp32', 'float64', 'bf16', 'fp16' or 'fp8', not 'int4'"),
        ("name=a/b", "`name` must be letters, digits"),
        ("seed=-1", "`seed` must be at least 0, not -1"),
        ("data.pack=3", "`data.pack` must be true or false, not 3"),
        ("data.seq_len=4096", "data.seq_len (4096) must not exceed model.max_position_embeddings (1024)"),
        ("data.seq_len=2", "data.seq_len (2) must exceed model.num_nextn_predict_layers + 1 (2)"),
        ("data={seq_len: 8, pack: false, document_mask: true}", "document_mask needs pack"),
        ("data.held_out=1", "`data.held_out` must be less than 1, not 1"),
        ("schedule.kind=linear", "`schedule.kind` must be one of constant, cosine, step, constant_"),
        ("schedule={unit: steps}", "`schedule.kind` must be one of"),
        ("schedule={kind: step, at: [0.9, 0.6]}", "`schedule.at` must grow from entry to entry"),
        ("balance.bias_rate=[[5, 1]]", "`balance.bias_rate` must start at token 0"),
        ("balance.bias_rate=[[0, 1], [0, 2]]", "`balance.bias_rate` must start at token 0 and grow"),
        ("balance.bias_rate=soon", "must be a number or a list of [from_tokens, value] pairs"),
        ("mtp.weight=-1", "`mtp.weight` must not be negative"),
        ("model.n_group=3", "n_routed_experts (16) must be a multiple of n_group (3)"),
        ("model.topk_group=5", "topk_group (5) must not exceed n_group (4)"),
        ("model.num_experts_per_tok=9", "num_experts_per_tok (9) must not exceed the 8 experts a"),
        ("model.qk_rope_head_dim=15", "qk_rope_head_dim (15) must be even"),
        ("model.first_k_dense_replace=6", "first_k_dense_replace (6) must not exceed num_hidden_layers (5)"),
        ("model.scoring_func=softmax", "scoring_func softmax does not go with topk_method noaux_tc"),
        ("model.model_type=deepseek_v2", "model_type deepseek_v2 needs scoring_func softmax, not sigmoid"),
        ("model.num_key_value_heads=2", "num_key_value_heads (2) must equal num_attention_heads (4)"),
        ("model.attention_bias=true", "`model.attention_bias` must be false, not true"),
        ("model.attention_dropout=0.1", "attention_dropout (0.1) must be 0"),
        ("model.hidden_act=gelu", "`model.hidden_act` must be 'silu', not 'gelu'"),
        ("data.held_out=0", "eval.every needs held-out data"),
        ("model.eos_token_id=260", "eos_token_id (260) must be below vocab_size (260)"),
        ("model.rope_scaling={factor: 0.5}", "factor (0.5) must be at least 1"),
        ("model.rope_scaling={beta_fast: 0.5}", "beta_fast (0.5) must exceed beta_slow (1)"),
        ("model=nowhere.yaml", "there is no file nowhere.yaml"),
        ("model.base=3", "`model.base` must be the path of a model file, not 3"),
        ("parallel={world_size: 8, pp: 3}", "world_size (8) must be pp * dp_replicate * cp * dp_shard = 3"),
        ("parallel={world_size: 8, ep: 3}", "ep (3) must divide the 8 ranks that shard the model"),
        ("parallel.dp_shard=0", "dp_shard (0) must be at least 1, or -1"),
        ("deepspeed={zero_stage: 2, offload_parameters: cpu}", "offload_parameters needs zero_stage 3"),
        ("deepspeed.offload_optimizer=nvme", "offload to nvme needs nvme_path"),
        ("deepspeed.zero_stage=4", "`deepspeed.zero_stage` must be 1, 2 or 3, not 4"),
    ],
)  # fmt: skip
def test_a_bad_value_is_answered_in_one_sentence(override: str, fragment: str) -> None:
    sentence = sentence_of(lambda: load_config(SMOKE, [override]))
    assert fragment in sentence


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("model.topk_method=noaux_tc", "scoring_func softmax does not go with topk_method noaux_tc"),
        ("balance.bias_rate=1e-3", "balance.bias_rate needs a routing bias, which topk_method greedy lacks"),
        (
            "balance.alpha_device=0.1",
            "balance.alpha_device balances expert groups and needs model.n_group above 1",
        ),
        ("balance.alpha_communication=0.1", "balance.alpha_communication balances expert groups"),
    ],
)
def test_what_the_architecture_cannot_do_is_refused(override: str, fragment: str) -> None:
    assert fragment in sentence_of(lambda: load_config(CONFIGS / "16B" / "smoke.yaml", [override]))


def test_a_group_of_one_expert_has_no_best_two() -> None:
    sentence = sentence_of(lambda: load_config(SMOKE, ["model.n_group=16", "model.topk_group=8"]))
    assert "n_group (16) leaves one expert a group" in sentence


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["parallel.pp=2"], "parallel.pp (2) needs engine: native"),
        (["parallel.dp_replicate=2"], "parallel.dp_replicate (2) needs engine: native"),
        (["parallel.ep=2"], "parallel.ep (2) needs deepspeed.zero_stage 1 or 2"),
        (["parallel.offload_states=true"], "set deepspeed.offload_optimizer instead"),
        (["precision=float64"], "precision: float64 needs engine: native"),
        (["precision=bf16", "deepspeed.zero_stage=1"], "needs deepspeed.zero_stage 2 or 3"),
        (["balance.window_order=forwards_first"], "gives wrong gradients under ZeRO 3"),
        (["deepspeed.zero_stage=2", "deepspeed.offload_parameters=cpu"], "offload_parameters needs zero_stage 3"),
        (["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=nvme"], "offload_optimizer: nvme needs zero_stage 3"),
        (["deepspeed.offload_optimizer=nvme"], "offload to nvme needs nvme_path"),
        (
            ["deepspeed={offload_optimizer: nvme, nvme_path: /tmp/x}", "checkpoint.async_save=true"],
            "checkpoint.async_save copies to memory",
        ),
        (
            ["deepspeed={offload_optimizer: nvme, nvme_path: /tmp/x}", "optimizer.moments=bf16"],
            "optimizer.moments: bf16 cannot lie on a drive",
        ),
        (
            ["deepspeed={offload_optimizer: cpu, cpu_adam: deepspeed}", "optimizer.moments=bf16"],
            "is not what DeepSpeed's CPU Adam keeps",
        ),
        (["deepspeed.cpu_adam=deepspeed"], "set offload_optimizer to cpu or nvme"),
        (["deepspeed.zero_stage=1", "parallel.reduce=micro_batch"], "needs deepspeed.zero_stage 2 or 3"),
        (
            ["batch={global_batch: 8, micro_batch: 2, noise_scale: {minimum: 4, maximum: 16}}"],
            "which ZeRO does not keep",
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(overrides: list[str], fragment: str) -> None:
    assert fragment in sentence_of(lambda: load_config(SMOKE, ["engine=deepspeed", *overrides]))


@pytest.mark.parametrize("override", ["steps", "=3", "optimizer..lr=1", "--lr=1", "optimizer.lr 3"])
def test_an_override_needs_key_and_value(override: str) -> None:
    assert "must have the form key=value" in sentence_of(lambda: load_config(SMOKE, [override]))


def test_an_override_that_is_no_yaml_says_so() -> None:
    sentence = sentence_of(lambda: load_config(SMOKE, ["name=[a"]))
    assert "override 'name=[a': the value is not YAML" in sentence


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "and is empty"),
        ("- 1\n- 2\n", "must hold keys and values"),
        ("name: [1, 2\n", "line 2"),
        ("name: x\nsteps: 3\nname: y\n", "line 3: key `name` stands twice"),
        ("name: x\nbatch: {micro_batch: 1, micro_batch: 2}\n", "line 2: key `micro_batch` stands twice"),
        ("name: x\nsteps: 3\n", "`model` is missing"),
        ("name: x\nstep: 3\n", "unknown key `step`; did you mean `steps`?"),
        ("name: x\nmodel: model.yaml\n", "there is no file"),
        ("name: x\nmodel: {base: [1]}\n", "`model.base` must be the path of a model file"),
        ("1: 2\n", "unknown key `1`"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path: Path, text: str, fragment: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    sentence = sentence_of(lambda: load_config(file))
    assert str(tmp_path) in sentence
    assert fragment in sentence


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: it is not UTF-8 text" in sentence_of(lambda: load_config(tmp_path))


def test_a_missing_file_names_the_ones_nearby() -> None:
    sentence = sentence_of(lambda: load_config(CONFIGS / "671B" / "smok.yaml"))
    assert "there is no file" in sentence and str(SMOKE) in sentence


def test_the_sentence_names_who_said_it(tmp_path: Path) -> None:
    """The run file, the model file it takes its facts from, or the override."""
    (tmp_path / "model.yaml").write_text((SMOKE.parent / "model.yaml").read_text().replace("q_lora", "q_lorra"))
    run = tmp_path / "run.yaml"
    run.write_text(SMOKE.read_text().replace("q_lora_rank: 96", "").replace("lr: 2e-3", "lr: 0"))
    assert sentence_of(lambda: load_config(run)).startswith(f"{tmp_path}/model.yaml: unknown key")
    (tmp_path / "model.yaml").write_text((SMOKE.parent / "model.yaml").read_text())
    assert sentence_of(lambda: load_config(run)).startswith(f"{run}: `optimizer.lr`")
    both = ["optimizer.lr=1", "seed=-3"]
    assert sentence_of(lambda: load_config(run, both)).startswith("override seed=-3: `seed`")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"model_type": "llama"}, "model_type must be deepseek_v2 or deepseek_v3, not 'llama'"),
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"rope_interleave": False}, "rope_interleave must be True"),
        ({"attention_bias": True}, "`attention_bias` must be false, not true"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "must be of type yarn or absent, not 'linear'"),
        ({"rope_scaling": 3}, "rope_scaling must be a mapping"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"scoring_func": "softmax"}, "scoring_func softmax does not go with topk_method noaux_tc"),
    ],
)  # fmt: skip
def test_another_architecture_is_not_read_as_ours(changes: dict[str, object], fragment: str) -> None:
    facts = load_config(SMOKE).model.to_hf()
    sentence = sentence_of(lambda: ModelConfig.from_hf({**facts, **changes}))
    assert sentence.startswith("config.json: ")
    assert fragment in sentence


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        (
            "balance={scope: window, alpha: 1, window_order: forwards_first}",
            "is not the order of schedule 1f1b",
        ),
        (
            "batch={global_batch: 8, micro_batch: 1, noise_scale: {minimum: 2, maximum: 9}}",
            "set parallel.pp 1, or use ramp",
        ),
    ],
)
def test_what_does_not_go_with_stages_is_refused(override: str, fragment: str) -> None:
    assert fragment in sentence_of(lambda: load_config(SMOKE, [override, "parallel.pp=2"]))


def test_noise_is_not_measured_where_experts_have_gradients_of_all_ranks() -> None:
    noise = "batch={global_batch: 8, micro_batch: 1, noise_scale: {minimum: 2, maximum: 9}}"
    assert "set parallel.ep 1, or use ramp" in sentence_of(lambda: load_config(SMOKE, [noise, "parallel.ep=2"]))


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("parallel.cp=2", "parallel.cp: 2 does not work yet in this version; use parallel.cp=1"),
    ],
)
def test_what_does_not_work_yet_is_refused_in_words(override: str, fragment: str) -> None:
    config = load_config(SMOKE, [override])
    assert fragment in sentence_of(lambda: refuse_unsupported(config))


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["model.hidden_size=64", "model.n_group=3"], "override model.n_group=3: "),
        (["optimizer.lr=1e-3", "batch.micro_batch=64", "data.seq_len=32"], "override batch.micro_batch=64: "),
        (["steps=5", "data.seq_len=9999"], "override data.seq_len=9999: "),
        (["model={n_group: 3}"], "override model={n_group: 3}: "),
    ],
)
def test_the_override_that_the_sentence_is_about_is_blamed(overrides: list[str], blamed: str) -> None:
    assert sentence_of(lambda: load_config(SMOKE, overrides)).startswith(blamed)
