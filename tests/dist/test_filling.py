"""Every rank fills what it holds: together it is the model that one process makes at once, bit for bit, in every layout.

And no rank needs more memory for it than its share and some tens of MB, from a seed and from a released folder.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import tests.support.zero  # noqa: F401 - before ranks are forked
from moetrain.checkpoint import PretrainedWeights, from_pretrained, save_pretrained
from moetrain.engine import DeepSpeedEngine, NativeEngine
from moetrain.engine.filling import own_rows
from moetrain.model import DeepSeek, DeepSeekLoss
from moetrain.parallel.plan import dtypes, needs_group
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.fresh import drawn
from tests.support.processes import run_ranks
from tests.support.runs import corpus, run_config
from tests.support.small import V3, state

pytestmark = pytest.mark.dist

#: sizes that four ranks do not divide: rows are padded, and of 10 experts in 2 x 2 parts a rank has 3 or 2
UNEVEN = V3.model_copy(
    update={
        "vocab_size": 66, "kv_lora_rank": 10, "num_hidden_layers": 5, "n_routed_experts": 10, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 17,
    }
)  # fmt: skip
#: fewer experts and rows than ranks: some ranks have nothing of a tensor
FEW = UNEVEN.model_copy(update={"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1})
EIGHT = UNEVEN.model_copy(update={"n_routed_experts": 8})

ZERO = "engine=deepspeed"
LAYOUTS = {
    1: {
        "one process": (UNEVEN, ()),
        "one process, bf16": (UNEVEN, ("precision=bf16",)),
        "ZeRO 3": (UNEVEN, (ZERO, "deepspeed.zero_stage=3")),
    },
    4: {
        "FSDP2": (UNEVEN, ()),
        "FSDP2, some with nothing": (FEW, ()),
        "FSDP2, bf16": (UNEVEN, ("precision=bf16",)),
        "FSDP2, FP8": (UNEVEN, ("precision=fp8", "parallel.recompute=full")),
        "states on the host": (UNEVEN, ("parallel.offload_states=true",)),
        "HSDP": (UNEVEN, ("parallel.dp_replicate=2",)),
        "experts over 2, each part on 2": (UNEVEN, ("parallel.ep=2",)),
        "experts over 2, two copies": (UNEVEN, ("parallel.ep=2", "parallel.dp_replicate=2")),
        "experts over 4": (EIGHT, ("parallel.ep=4",)),
        "4 stages": (UNEVEN, ("parallel.pp=4",)),
        "2 stages of 2": (UNEVEN, ("parallel.pp=2", "parallel.schedule=interleaved_1f1b")),
        "2 stages, experts over 2": (UNEVEN, ("parallel.pp=2", "parallel.ep=2")),
        "ZeRO 1": (UNEVEN, (ZERO, "deepspeed.zero_stage=1")),
        "ZeRO 1, experts over 2": (UNEVEN, (ZERO, "deepspeed.zero_stage=1", "parallel.ep=2")),
        "ZeRO 2, bf16": (UNEVEN, (ZERO, "deepspeed.zero_stage=2", "precision=bf16")),
        "ZeRO 3": (UNEVEN, (ZERO, "deepspeed.zero_stage=3")),
        "ZeRO 3, some with nothing": (FEW, (ZERO, "deepspeed.zero_stage=3", "deepspeed.small_parameter=0")),
        "ZeRO 3, all on the host, bf16": (
            UNEVEN,
            (ZERO, "precision=bf16", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"),
        ),
    },
}


def configured(folder, model, *more):
    config = run_config("671B", folder, "precision=fp32", "seed=77", "model.num_hidden_layers=5", *more)
    return config.model_copy(update={"model": model})


def released(folder, config):
    """In FP8, with biases that are not zero; what a process reads of it at once."""
    m = DeepSeek(config)
    m.init_weights(3)
    g = torch.Generator().manual_seed(5)
    for bias in m.buffers():
        bias.copy_(torch.randn(bias.shape, generator=g))
    save_pretrained(m, folder, quantize="fp8", max_shard_bytes=40_000)
    return state(from_pretrained(folder))


def of_native(engine):
    return state(engine.model)


def of_zero(engine):
    """Masters; and of the experts this rank's part."""
    from deepspeed.utils import safe_get_full_fp32_param

    module = engine.model.module
    found = {name: safe_get_full_fp32_param(p).clone() for name, p in module.named_parameters()}
    return found | {name: b.clone() for name, b in module.named_buffers()}


def on_rank(rank, world, folder, wanted):
    """Names of what is filled otherwise than the whole model, by layout and source; and how many were looked at."""
    found = {}
    for name, (model, more) in LAYOUTS[world].items():
        config = configured(folder, model, *more)
        p, zero = config.parallel, config.engine == "deepspeed"
        need = zero or (p.pp == 1 and world > 1) or needs_group(config.precision, p)
        where = (None, None, None)
        if need or world > 1:
            where = meshes("cpu", world, dp_replicate=p.dp_replicate, ep=p.ep, pp=p.pp, need_group=need)
        ranks = Ranks(rank, world, torch.device("cpu"), *where)
        for source, all_of_it in wanted[name].items():
            weights = None if source == "seed" else PretrainedWeights(source, model)
            if zero:
                engine = DeepSpeedEngine(config, ranks, weights=weights)
                assert {x.dtype for x in engine.model.module.parameters()} == {dtypes(config.precision, ranks.device)[1]}
                got = of_zero(engine)
            else:
                engine = NativeEngine(config, ranks, DeepSeekLoss(model), weights=weights)
                assert isinstance(engine.model, FSDPModule) == (ranks.mesh is not None)
                got = of_native(engine)
            part = rank % p.ep
            cut = zero and p.ep > 1
            want = {n: x.chunk(p.ep)[part] if cut and ".experts." in n else x for n, x in all_of_it.items()}
            apart = [n for n, x in got.items() if x.shape != want[n].shape or not torch.equal(x, want[n])]
            found[name, "seed" if weights is None else "folder"] = apart, set(got)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", LAYOUTS)
def test_what_ranks_fill_is_the_model_that_one_process_makes(tmp_path, world):
    corpus(tmp_path)
    sources = {}
    for config in (UNEVEN, FEW, EIGHT):
        folder = tmp_path / f"hf{config.n_routed_experts}"
        sources[config.n_routed_experts] = {"seed": drawn(config, 77), folder: released(folder, config)}
    wanted = {name: sources[config.n_routed_experts] for name, (config, _) in LAYOUTS[world].items()}
    found = run_ranks(on_rank, world, tmp_path, wanted, timeout=250)
    assert all(len(rank) == 2 * len(LAYOUTS[world]) for rank in found)
    for layout in found[0]:
        for number, rank in enumerate(found):
            assert not rank[layout][0], (layout, number)
        everything = sources[LAYOUTS[world][layout[0]][0].n_routed_experts]["seed"]
        assert set().union(*(rank[layout][1] for rank in found)) == everything.keys(), layout


#: 207 MB in fp32
BIG = V3.model_copy(
    update={
        "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 640,
        "n_routed_experts": 32, "n_group": 4,
    }
)  # fmt: skip
MEASURED = {
    "FSDP2": (),
    "experts over 2": ("parallel.ep=2",),
    "2 stages": ("parallel.pp=2",),
    "ZeRO 3": (ZERO, "deepspeed.zero_stage=3"),
}


def on_meta(config):
    with torch.device("meta"):
        return list(DeepSeek(config).parameters())


def memory(key):
    return int(re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024


class Filled(Exception):
    pass


def needs(rank, world, folder, more, released):
    """Bytes by which this process grows at most until all is filled, and bytes of what it then holds."""
    from moetrain.engine import deepspeed as engine

    config = configured(folder, BIG, *more)
    p, zero = config.parallel, config.engine == "deepspeed"
    ranks = Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, ep=p.ep, pp=p.pp, need_group=p.pp == 1))

    def stop(*args, **kwargs):  # the rest is DeepSpeed's: masters, buckets
        raise Filled

    engine._wrapped = stop
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    weights = None if released is None else PretrainedWeights(released, BIG)
    if zero:
        with pytest.raises(Filled):
            DeepSpeedEngine(config, ranks, weights=weights)
        return memory("VmHWM") - before, sum(x.numel() for x in on_meta(BIG)) * 4 // world
    model = NativeEngine(config, ranks, DeepSeekLoss(BIG), weights=weights).model
    return memory("VmHWM") - before, sum(own_rows(x).rows.nbytes for x in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("source", ["seed", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_rank_of_four_needs_its_share_and_some_tens_of_megabytes(tmp_path, source):
    corpus(tmp_path)
    size = sum(x.numel() for x in on_meta(BIG)) * 4
    folder = None
    if source == "folder":
        folder = tmp_path / "hf"
        save_pretrained(DeepSeek(BIG), folder, max_shard_bytes=20_000_000)
    for name, more in MEASURED.items():
        found = run_ranks(needs, 4, tmp_path, more, folder)
        assert sum(share for _, share in found) < 1.2 * size, name  # embedding and MTP's norms may be there twice
        for number, (grown, share) in enumerate(found):
            assert share < grown < share + 60_000_000 < 0.75 * size, (name, number, grown, share, size)
