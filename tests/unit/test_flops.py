"""Counts and FLOPs of the three released models: the published figures, and the real model on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from moetrain.checkpoint.hugging_face import tensor_inventory
from moetrain.checkpoint.names import pieces
from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek
from moetrain.model.flops import flops_per_token, kv_cache_bytes_per_token, parameter_counts

CONFIGS = Path(__file__).parents[2] / "configs"
SCALES = ("16B", "236B", "671B")


def config_of(scale):
    return ModelConfig(**yaml.safe_load((CONFIGS / scale / "model.yaml").read_text()))


EXACT = {
    "embedding": (209_715_200, 524_288_000, 926_679_040),
    "head": (209_715_200, 524_288_000, 926_679_040),
    "query": (6_291_456, 7_864_320 + 1_536 + 37_748_736, 11_010_048 + 1_536 + 37_748_736),
    "latent": (1_179_648 + 512, 2_949_120 + 512, 4_128_768 + 512),
    "key_value": (2_097_152, 16_777_216, 16_777_216),
    "output": (4_194_304, 83_886_080, 117_440_512),
    "attention": (13_763_072, 149_227_520, 187_107_328),
    "dense_ffn": (67_239_936, 188_743_680, 396_361_728),
    "expert": (8_650_752, 23_592_960, 44_040_192),
    "shared": (17_301_504, 47_185_920, 44_040_192),
    "gate": (131_072, 819_200, 1_835_008 + 256),
    "moe_layer": (584_847_872, 3_972_116_480, 11_507_286_272),
    "moe_layer_activated": (83_104_256, 338_800_640, 585_318_656),
    "dense_layer": (81_007_104, 337_981_440, 583_483_392),
    "routed": (14_394_851_328, 222_717_542_400, 653_908_770_816),
    "total": (15_706_484_224, 235_741_434_880, 671_026_419_200),
    "mtp": (0, 0, 11_610_068_224),
}


@pytest.mark.parametrize("what", EXACT)
@pytest.mark.parametrize("scale", SCALES)
def test_exact_counts(scale, what):
    got = getattr(parameter_counts(config_of(scale)), what)
    assert got == EXACT[what][SCALES.index(scale)]


@pytest.mark.parametrize(
    ("scale", "head", "both", "neither"),
    [("16B", 2.451, 2.661, 2.242), ("236B", 20.852, 21.376, 20.327), ("671B", 36.626, 37.552, 35.699)],
)
def test_activated_counts_in_billions(scale, head, both, neither):
    counts = parameter_counts(config_of(scale))
    assert counts.activated / 1e9 == pytest.approx(head, abs=6e-4)
    assert counts.activated_with_embedding / 1e9 == pytest.approx(both, abs=6e-4)
    assert counts.activated_neither / 1e9 == pytest.approx(neither, abs=6e-4)


@pytest.mark.parametrize(
    ("scale", "full", "causal"), [("16B", 18.11, 16.41), ("236B", 185.50, 155.30), ("671B", 281.15, 250.45)]
)
def test_training_flops_per_token_at_4096(scale, full, causal):
    config = config_of(scale)
    assert flops_per_token(config, 4096, causal=False) / 1e9 == pytest.approx(full, abs=0.006)
    assert flops_per_token(config, 4096) / 1e9 == pytest.approx(causal, abs=0.006)


def test_published_v3_throughput_is_385_teraflops():
    """arXiv 2505.09343 table 4: 1541.7 tokens/s a GPU is 385 TFLOP/s causal."""
    assert flops_per_token(config_of("671B"), 4096) * 1541.7 / 1e12 == pytest.approx(386.1, abs=0.1)
    with_mtp = flops_per_token(config_of("671B"), 4096, mtp=True)
    assert with_mtp / 1e9 == pytest.approx(260.64, abs=0.01)
    full = flops_per_token(config_of("671B"), 4096, causal=False, mtp=True)
    assert full / 1e9 == pytest.approx(291.85, abs=0.01)


@pytest.mark.parametrize(("scale", "size"), [("16B", 31_104), ("236B", 69_120), ("671B", 70_272)])
def test_kv_cache(scale, size):
    assert kv_cache_bytes_per_token(config_of(scale)) == size


@pytest.fixture(scope="module", params=SCALES)
def meta(request):
    config = config_of(request.param)
    with torch.device("meta"):
        return request.param, config, DeepSeek(config)


def test_the_real_model_has_these_counts(meta):
    _, config, model = meta
    counts = parameter_counts(config)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    main = sum(t.numel() for name, t in tensors.items() if not name.startswith("mtp."))
    assert main == counts.total
    assert sum(t.numel() for t in tensors.values()) - main == counts.mtp


def test_the_real_model_is_covered_exactly_by_the_released_tensors(meta):
    """Every element of every tensor of ours is exactly one released element, and shapes fit."""
    _, config, model = meta
    state = model.state_dict()
    covered = dict.fromkeys(state, 0)
    for piece in pieces(config):
        target = state[piece.ours]
        if piece.expert is not None:
            target = target[piece.expert]
        if piece.rows is not None:
            target = target[piece.rows[0] : piece.rows[1]]
        assert tuple(target.shape) == piece.shape, piece
        covered[piece.ours] += 0 if piece.copy else target.numel()
    assert covered == {name: t.numel() for name, t in state.items()}


@pytest.mark.parametrize(("scale", "count"), [("16B", 5_291), ("236B", 29_102), ("671B", 91_991)])
def test_released_tensor_counts(scale, count):
    assert len(tensor_inventory(config_of(scale), quantized=scale == "671B")) == count


def test_released_v3_elements():
    inventory = tensor_inventory(config_of("671B"), quantized=True)
    size = {name: torch.Size(shape).numel() for name, (shape, _) in inventory.items()}
    assert sum(size.values()) == 684_531_386_000
    assert sum(n for name, n in size.items() if name.endswith("_scale_inv")) == 41_540_496
    assert inventory["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"][0] == (5, 56)
    assert inventory["model.layers.61.eh_proj.weight"] == ((7168, 14336), torch.bfloat16)
    assert inventory["model.layers.61.mlp.gate.e_score_correction_bias"] == ((256,), torch.float32)


def test_published_totals_of_what_a_release_stores():
    counts = parameter_counts(config_of("671B"))
    assert counts.mtp_stored / 1e9 == pytest.approx(13.463, abs=6e-4)
