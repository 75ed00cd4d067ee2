"""Sources of weights: whatever rows are asked for, they are those of the tensor that is made or read as a whole."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain import from_pretrained, save_pretrained
from moetrain.checkpoint import PretrainedWeights
from moetrain.errors import UserError
from moetrain.model import FreshWeights, weights
from tests.support.fresh import drawn
from tests.support.small import FAMILIES, V3, model, state

STD = 0.006


def whole(name, shape, seed):
    """In one draw."""
    key = seed * 0x9E3779B1 % 2**31 + weights.zlib.crc32(name.encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(key)) * STD


def rows_of(source, name, shape, first, last, dtype=torch.float32):
    rows = torch.full((last - first, *shape[1:]), torch.nan, dtype=dtype)
    source.fill(name, shape, first, rows)
    return rows


#: totals around torch's blocks of 16 and around chunks of 64: fewer than a block, whole ones, every remainder
SHAPES = [(n, 1) for n in (*range(1, 34), *range(60, 100), *range(124, 150))] + [(5, 3), (7, 9), (4, 5, 13), (1, 200)]


def test_fresh_rows_are_those_of_one_draw_bit_for_bit(monkeypatch):
    monkeypatch.setattr(weights, "CHUNK", 64)
    r = random.Random(0)
    for shape in SHAPES:
        for seed in (0, 1234):
            want = whole("layers.1.x", shape, seed)
            source = FreshWeights(STD, seed)
            cuts = [(0, shape[0]), (shape[0] - 1, shape[0]), (shape[0], shape[0])]
            cuts += [tuple(sorted((r.randint(0, shape[0]), r.randint(0, shape[0])))) for _ in range(4)]
            for first, last in cuts:
                got = rows_of(source, "layers.1.x", shape, first, last)
                assert torch.equal(got, want[first:last]), (shape, first, last)


@pytest.mark.parametrize("more", [-1, 0, 1, 15, 16, 17])
def test_at_full_size_chunks_are_no_other_numbers(more):
    shape = (weights.CHUNK * 2 + more, 1)
    want = whole("lm_head.weight", shape, 7)
    cut = weights.CHUNK + 5
    source = FreshWeights(STD, 7)
    assert torch.equal(rows_of(source, "lm_head.weight", shape, 0, cut), want[:cut])
    assert torch.equal(rows_of(source, "lm_head.weight", shape, cut, shape[0]), want[cut:])


def test_nothing_is_drawn_after_the_last_row_and_never_more_than_a_chunk(monkeypatch):
    monkeypatch.setattr(weights, "CHUNK", 64)
    sizes = []
    real = torch.Tensor.normal_
    monkeypatch.setattr(torch.Tensor, "normal_", lambda x, **k: sizes.append(x.numel()) or real(x, **k))
    rows_of(FreshWeights(STD, 0), "x", (100, 8), 3, 15)
    assert sizes == [64, 64]
    sizes.clear()
    rows_of(FreshWeights(STD, 0), "x", (101, 8), 0, 101)
    assert sum(sizes) == 808 and max(sizes) < 64 + 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_are_one_biases_zero_and_every_dtype_rounds_once(dtype):
    source = FreshWeights(V3.initializer_range, 3)
    for name, want in drawn(V3, 3).items():
        got = rows_of(source, name, want.shape, 0, len(want), dtype)
        assert torch.equal(got, want.to(dtype)), name


# -- released folders


def released(folder, config, **how):
    m = model(config, dtype=torch.float32)
    g = torch.Generator().manual_seed(5)
    for name, bias in m.named_buffers():
        assert name.endswith("correction_bias")
        bias.copy_(torch.randn(bias.shape, generator=g))
    save_pretrained(m, folder, **how)
    return m


#: widths beyond a block of 128, and no multiples of it
WIDE = V3.model_copy(
    update={
        "hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 136, "n_routed_experts": 4, "n_group": 2,
        "num_hidden_layers": 2,
    }
)  # fmt: skip


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("step", [1 << 22, 700], ids=["at once", "few rows at a time"])
def test_released_rows_are_those_of_the_whole_folder(tmp_path, monkeypatch, quantize, step):
    released(tmp_path, WIDE, quantize=quantize, max_shard_bytes=200_000)
    want = state(from_pretrained(tmp_path))
    saved = {}
    for shard in tmp_path.glob("*.safetensors"):
        saved |= load_file(shard)
    if quantize is None:  # what is read whole is what was written
        assert torch.equal(
            want["layers.1.mlp.experts.down_proj"][3], saved["model.layers.1.mlp.experts.3.down_proj.weight"]
        )
    monkeypatch.setattr("moetrain.checkpoint.hugging_face.STEP", step)
    monkeypatch.setattr("moetrain.checkpoint.hugging_face.MAPPED", 100_000)
    source = PretrainedWeights(tmp_path)
    r = random.Random(1)
    for name, tensor in want.items():
        n = len(tensor)
        for first, last in [(0, n), (n, n), *(tuple(sorted((r.randint(0, n), r.randint(0, n)))) for _ in range(4))]:
            assert torch.equal(rows_of(source, name, tensor.shape, first, last), tensor[first:last]), (
                name,
                first,
                last,
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_rows_that_are_asked_for_are_read(tmp_path, monkeypatch, family):
    config = FAMILIES[family]
    released(tmp_path, config)
    source = PretrainedWeights(tmp_path)
    read = []
    real = PretrainedWeights._rows
    monkeypatch.setattr(
        PretrainedWeights, "_rows", lambda self, *a: read.append((a[0], real(self, *a)[0].numel())) or real(self, *a)
    )
    e, m, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    rows_of(source, "layers.1.mlp.experts.gate_up_proj", (e, 2 * m, d), 2, 4)
    there = "model.layers.1.mlp.experts"
    assert read == [(f"{there}.{i}.{part}_proj.weight", m * d) for i in (2, 3) for part in ("gate", "up")]
    read.clear()
    rows_of(source, "layers.0.mlp.gate_up_proj.weight", (2 * config.intermediate_size, d), 40, 50)
    assert read == [("model.layers.0.mlp.gate_proj.weight", 8 * d), ("model.layers.0.mlp.up_proj.weight", 2 * d)]


def test_the_run_s_own_model_is_what_is_filled_and_may_leave_mtp_out(tmp_path):
    m = released(tmp_path, V3)
    plain = V3.model_copy(update={"num_nextn_predict_layers": 0, "routed_scaling_factor": 1.0})
    source = PretrainedWeights(tmp_path, plain)
    assert source.config is plain
    for name, tensor in state(m).items():
        if not name.startswith("mtp"):
            assert torch.equal(rows_of(source, name, tensor.shape, 0, len(tensor)), tensor), name


def test_another_model_than_the_run_s_is_refused_in_one_sentence(tmp_path):
    released(tmp_path, V3)
    other = V3.model_copy(update={"hidden_size": 64, "n_routed_experts": 16})
    said = r"run's: model.hidden_size=64 \(32 there\), model.n_routed_experts=16 \(8 there\); leave"
    with pytest.raises(UserError, match=said) as e:
        PretrainedWeights(tmp_path, other)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match=r"holds 1 MTP layers, and model.num_nextn_predict_layers=2 asks for more"):
        PretrainedWeights(tmp_path, V3.model_copy(update={"num_nextn_predict_layers": 2}))
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not k.startswith("model.layers.3.")}, path)
    with pytest.raises(UserError, match="holds 0 MTP layers"):
        PretrainedWeights(tmp_path, V3)
