"""Folders in the released layout: what is read, written, and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain import from_pretrained, save_pretrained
from moetrain.checkpoint.fp8_blocks import dequantise, quantise
from moetrain.errors import UserError
from tests.support.small import FAMILIES, V3, difference, model, state


def filled(config, dtype=torch.float32):
    m = model(config, dtype=dtype)
    g = torch.Generator().manual_seed(5)
    for name, bias in m.named_buffers():
        if name.endswith("correction_bias"):
            bias.copy_(torch.randn(bias.shape, generator=g) + 2.0)
    return m


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [5_000_000_000, 20_000], ids=["one file", "shards"])
def test_round_trip_is_bit_exact(tmp_path, family, limit):
    m = filled(FAMILIES[family])
    save_pretrained(m, tmp_path, max_shard_bytes=limit)
    assert (limit > 1e6) == (tmp_path / "model.safetensors").exists()
    again = from_pretrained(tmp_path)
    assert difference(state(again), state(m)) == 0.0
    assert again.config.to_hf() == m.config.to_hf()


def test_the_bias_stays_fp32_and_the_rest_takes_the_dtype(tmp_path):
    m = filled(V3)
    save_pretrained(m, tmp_path, dtype=torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")
    kinds = {name: t.dtype for name, t in saved.items()}
    assert {d for n, d in kinds.items() if n.endswith("correction_bias")} == {torch.float32}
    assert {d for n, d in kinds.items() if not n.endswith("correction_bias")} == {torch.bfloat16}
    again = from_pretrained(tmp_path, dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(again.named_buffers(), m.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert again.norm.weight.dtype == torch.bfloat16


def test_multi_token_prediction_is_stored_as_released(tmp_path):
    m = filled(V3)
    save_pretrained(m, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"):
        assert f"model.layers.3.{name}.weight" in saved
    assert torch.equal(saved["model.layers.3.shared_head.head.weight"], saved["lm_head.weight"])
    assert torch.equal(saved["model.layers.3.embed_tokens.weight"], saved["model.embed_tokens.weight"])


def test_fp8_blocks_are_dequantised_by_their_multipliers():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=g) * torch.logspace(-3, 3, 300)
    q, scale = quantise(weight)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (2, 3) and scale.dtype == torch.float32
    want = torch.empty_like(weight)
    for i in range(2):
        for j in range(3):
            rows, columns = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[rows, columns]
            assert float(scale[i, j]) == pytest.approx(float(block.abs().max()) / 448, rel=1e-6)
            want[rows, columns] = q[rows, columns].float() * scale[i, j]
    got = dequantise(q, scale)
    assert torch.equal(got, want)
    # three mantissa bits: half a step is 1/16 of a value, or of the smallest normal number
    floor = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300] * 2**-6
    assert bool(((got - weight).abs() <= torch.maximum(weight.abs(), floor) / 16 * 1.001).all())


def test_a_folder_with_fp8_blocks_loads_right(tmp_path):
    m = filled(V3)
    save_pretrained(m, tmp_path, quantize="fp8")
    saved = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert saved[name].dtype == torch.float8_e4m3fn and name + "_scale_inv" in saved
    assert saved["model.layers.3.eh_proj.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]
    again = from_pretrained(tmp_path)
    assert torch.equal(again.embed_tokens.weight, m.embed_tokens.weight)
    want = dequantise(saved[name], saved[name + "_scale_inv"])
    width = V3.moe_intermediate_size
    assert torch.equal(again.layers[1].mlp.experts.gate_up_proj[2, width:], want)
    # once in FP8, the numbers no longer change
    save_pretrained(again, tmp_path / "again", quantize="fp8")
    twice = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(twice[k].float(), v.float()) for k, v in saved.items())


def damage(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    content = {k: v for k, v in (json.loads(path.read_text()) | values).items() if v is not None}
    path.write_text(json.dumps(content))


GATE = "model.layers.1.mlp.gate.weight"
BROKEN = {
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()], "config.json does not exist"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config of another architecture": (lambda f: edit_config(f, model_type="llama"), "llama"),
    "config lacks a key": (lambda f: edit_config(f, hidden_size=None), "hidden_size"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "cut off": (lambda f: _cut(f / "model.safetensors"), "damaged or cut off"),
    "missing tensor": (lambda f: damage(f, lambda t: t.pop(GATE)), f"lacks the tensor {GATE}"),
    "unexpected tensor": (lambda f: damage(f, lambda t: t.update(other=torch.ones(1))), "holds the tensor other"),
    "wrong shape": (lambda f: damage(f, lambda t: t.update({GATE: torch.ones(3, 3)})), "of shape \\[3, 3\\]"),
    "FP8 without scales": (
        lambda f: damage(f, lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)})),
        "in FP8 but not its",
    ),
    "index of nothing": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "missing shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}})),
        "names b.safetensors, which is not in",
    ),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(tmp_path, case):
    save_pretrained(filled(V3), tmp_path)
    break_it, sentence = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_announced_but_missing_mtp_loads_without_and_says_so(tmp_path):
    save_pretrained(filled(V3), tmp_path)
    damage(tmp_path, lambda t: [t.pop(k) for k in list(t) if k.startswith("model.layers.3.")])
    with pytest.warns(UserWarning, match="holds none: loaded without"):
        m = from_pretrained(tmp_path)
    assert len(m.mtp) == 0


MEASURE = """
import resource, sys, torch
from moetrain import from_pretrained
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
m = from_pretrained(sys.argv[1])
size = sum(p.numel() * 4 for p in m.parameters())
largest = max(p.numel() * 4 for p in m.parameters())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(size, largest, after - before)
"""


def test_loading_needs_the_model_and_a_few_tensors(tmp_path):
    """Shards are mapped, not read; a sharded folder of 130 MB must not cost 260 MB."""
    big = V3.model_copy(
        update={"vocab_size": 2000, "hidden_size": 256, "moe_intermediate_size": 640, "n_routed_experts": 16}
    )
    save_pretrained(model(big, dtype=torch.float32), tmp_path, max_shard_bytes=10_000_000)
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    size, largest, grown = map(int, ran.stdout.split())
    assert size > 80_000_000
    # resident pages of the mapped shards count too: at most the shard that is being read, twice over for its neighbours
    assert grown < size + 4 * largest + 60_000_000, (size, largest, grown)
