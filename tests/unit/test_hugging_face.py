"""Folders in the released layout: what is read, written, and refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain import from_pretrained, save_pretrained
from moetrain.checkpoint.fp8_blocks import dequantise, quantise
from moetrain.checkpoint.hugging_face import tensor_inventory
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_what_is_written_is_the_inventory(tmp_path, family, quantize):
    config = FAMILIES[family]
    save_pretrained(filled(config), tmp_path, dtype=torch.bfloat16, quantize=quantize)
    written = {name: (tuple(t.shape), t.dtype) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert written == tensor_inventory(config, quantized=quantize == "fp8")


def test_duplicates_of_embedding_and_head_may_be_absent(tmp_path):
    m = filled(V3)
    save_pretrained(m, tmp_path)
    damage(tmp_path, lambda t: [t.pop(f"model.layers.3.{n}.weight") for n in ("embed_tokens", "shared_head.head")])
    assert difference(state(from_pretrained(tmp_path)), state(m)) == 0.0


def test_duplicates_that_differ_give_way_to_the_main_model_with_a_word(tmp_path):
    m = filled(V3)
    save_pretrained(m, tmp_path)
    damage(tmp_path, lambda t: t["model.layers.3.shared_head.head.weight"].add_(1))
    with pytest.warns(UserWarning, match=r"model.layers.3.shared_head.head.weight with other values"):
        again = from_pretrained(tmp_path)
    assert difference(state(again), state(m)) == 0.0


def test_stacked_experts_load_too(tmp_path):
    """As transformers writes them on demand; its own folders are in tests/parity."""
    m = filled(V3)
    save_pretrained(m, tmp_path)

    def stack(t):
        for layer in (1, 2, 3):
            name = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([t.pop(f"{name}.{e}.{part}_proj.weight") for e in range(V3.n_routed_experts)])
                for part in ("gate", "up", "down")
            )
            t[f"{name}.gate_up_proj"], t[f"{name}.down_proj"] = torch.cat([gate, up], dim=1), down

    damage(tmp_path, stack)
    assert difference(state(from_pretrained(tmp_path)), state(m)) == 0.0


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


def test_quantising_what_was_fp8_changes_nothing():
    """A released folder that is read and written again keeps its bits, over many blocks and sizes of numbers."""
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(128 * 20 + 64, 128 * 20 + 1, generator=g) * torch.logspace(-6, 3, 128 * 20 + 1)
    weight[:128, :128] = 0.0
    q, scale = quantise(weight)
    again, same = quantise(dequantise(q, scale))
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8)) and torch.equal(same, scale)
    assert bool(q.float().isfinite().all())


def test_fp8_blocks_go_over_shards_and_ragged_ends(tmp_path):
    wide = V3.model_copy(update={"hidden_size": 200, "moe_intermediate_size": 136, "n_routed_experts": 4, "n_group": 2})
    save_pretrained(filled(wide), tmp_path, quantize="fp8", max_shard_bytes=100_000)
    again = from_pretrained(tmp_path)
    want = {}
    for shard in tmp_path.glob("model-*.safetensors"):
        want |= load_file(shard)
    name = "model.layers.2.mlp.experts.1.down_proj.weight"
    assert want[name + "_scale_inv"].shape == (2, 2)
    down = again.layers[2].mlp.experts.down_proj[1]
    assert torch.equal(down, dequantise(want[name], want[name + "_scale_inv"]))


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


def shards(change):
    """The folder as several shards, one of which is then changed."""

    def break_it(folder: Path) -> None:
        save_pretrained(filled(V3), folder, max_shard_bytes=20_000)
        change(next(folder.glob("model-00002-of-*.safetensors")))

    return break_it


def lose_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path)


def a_folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


GATE = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
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
    "scales without FP8": (
        lambda f: damage(f, lambda t: t.update({GATE + "_scale_inv": torch.ones(1, 1)})),
        "its weight is float32 and not FP8",
    ),
    "scales of another size": (
        lambda f: damage(
            f, lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn), GATE + "_scale_inv": torch.ones(2, 1)})
        ),
        "does not fit its weight",
    ),
    "another FP8": (
        lambda f: damage(f, lambda t: t.update({GATE: t[GATE].to(torch.float8_e5m2)})),
        f"has {GATE} as float8_e5m2",
    ),
    "integers": (lambda f: damage(f, lambda t: t.update({NORM: t[NORM].to(torch.int8)})), f"has {NORM} as int8"),
    "duplicate of another shape": (
        lambda f: damage(f, lambda t: t.update({"model.layers.3.embed_tokens.weight": torch.ones(2, 2)})),
        "has model.layers.3.embed_tokens.weight of shape",
    ),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged or cut off"),
    "config is a folder": (lambda f: a_folder_instead(f / "config.json"), "config.json cannot be read"),
    "one shard cut off": (shards(lambda p: _cut(p)), "model-00002-of-.* is damaged or cut off"),
    "one shard lost": (shards(lambda p: p.unlink()), "names model-00002-of-.*, which is not in"),
    "a shard lacks a tensor": (shards(lose_a_tensor), "model-00002-of-.* although model.safetensors.index.json"),
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


class Killed(BaseException):
    pass


@pytest.mark.parametrize("limit", [5_000_000_000, 20_000], ids=["one file", "shards"])
def test_a_killed_save_is_the_old_model_the_new_one_or_refused(tmp_path, monkeypatch, limit):
    old, new = filled(V3), filled(V3.model_copy(update={"routed_scaling_factor": 1.5}))
    new.norm.weight.data.fill_(7.0)
    outcomes = set()
    for calls in range(100):
        folder = tmp_path / str(calls)
        save_pretrained(old, folder, max_shard_bytes=limit)
        left = calls

        def step(*args, real, **kwargs):
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for where, name in ((os, "replace"), (Path, "unlink")):
                real = getattr(where, name)
                patch.setattr(where, name, lambda *a, real=real, **k: step(*a, real=real, **k))
            try:
                save_pretrained(new, folder, max_shard_bytes=limit)
            except Killed:
                pass
            else:
                break
        try:
            found = from_pretrained(folder)
        except UserError:
            outcomes.add("refused")
        else:
            which = new if found.config.routed_scaling_factor == 1.5 else old
            assert difference(state(found), state(which)) == 0.0
            outcomes.add("old" if which is old else "new")
        save_pretrained(new, folder, max_shard_bytes=limit)
        assert difference(state(from_pretrained(folder)), state(new)) == 0.0
        assert not [p for p in folder.iterdir() if p.name.endswith(".partial")]
    assert {"old", "refused"} <= outcomes and calls < 99


def test_a_full_disk_is_one_sentence_and_the_old_model_stays(tmp_path):
    m = filled(V3)
    save_pretrained(m, tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot be written .*make room or give another folder") as caught:
            save_pretrained(m, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert difference(state(from_pretrained(tmp_path)), state(m)) == 0.0


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken cannot be written"):
        save_pretrained(filled(V3), tmp_path / "taken")


def test_other_files_of_the_folder_stay(tmp_path):
    (tmp_path / "model_ema.safetensors").write_bytes(b"x")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(filled(V3), tmp_path, max_shard_bytes=20_000)
    save_pretrained(filled(V3), tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "model_ema.safetensors", "tokenizer.json"]


MEASURE = """
import re, sys, torch
from pathlib import Path
from moetrain import from_pretrained, save_pretrained

def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024

def growth(do):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    result = do()
    return result, memory("VmHWM") - before

m, read = growth(lambda: from_pretrained(sys.argv[1]))
_, written = growth(lambda: save_pretrained(m, sys.argv[2], max_shard_bytes=int(sys.argv[3])))
print(sum(p.numel() * 4 for p in m.parameters()), max(p.numel() * 4 for p in m.parameters()), read, written)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure")
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_reading_and_writing_need_the_model_and_a_few_tensors(tmp_path, quantize):
    """Mapped files count too: reading 100 MB must not cost 200, nor writing them more than some shards."""
    big = V3.model_copy(
        update={"vocab_size": 2000, "hidden_size": 256, "moe_intermediate_size": 640, "n_routed_experts": 16}
    )
    shard = 8_000_000
    save_pretrained(model(big, dtype=torch.float32), tmp_path / "a", max_shard_bytes=shard, quantize=quantize)
    root = Path(__file__).parents[2]
    # freed buffers go back at once: what the allocator keeps of them differs by 15 MB from run to run
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "a"), str(tmp_path / "b"), str(shard)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"} | allocator,
    )
    size, largest, read, written = map(int, ran.stdout.split())
    assert size > 100_000_000 and largest < 21_000_000
    assert read < size + 5 * shard, (size, largest, read)
    assert written < 5 * shard, (size, largest, written)
