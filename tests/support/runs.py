"""Whole runs of the three scales' smoke configs, made small enough for a test, on text that is the same everywhere."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import moetrain
from moetrain.config import RunConfig
from tests.support.processes import run_plain

ROOT = Path(__file__).parents[2]
SCALES = ("16B", "236B", "671B")

#: fewer and narrower layers than smoke.yaml; every feature stays
SMALL = [
    "model.hidden_size=32", "model.intermediate_size=48", "model.moe_intermediate_size=16", "model.num_hidden_layers=3",
    "model.num_attention_heads=2", "model.num_key_value_heads=2", "model.kv_lora_rank=16", "model.qk_nope_head_dim=8",
    "model.qk_rope_head_dim=4", "model.v_head_dim=8", "data.seq_len=32", "data.held_out=0.1", "eval.every=0",
    "checkpoint.every=0", "log.tensorboard=off", "schedule.warmup_steps=2",
]  # fmt: skip


def corpus(folder: Path) -> Path:
    """Twenty documents of words, from a generator: no Python version changes them."""
    texts = folder / "texts"
    if not texts.exists():
        texts.mkdir(parents=True)
        r = random.Random(7)
        words = ["".join(r.choices("abcdefghij", k=r.randint(2, 7))) for _ in range(60)]
        for i in range(20):
            (texts / f"{i:02d}.txt").write_text(" ".join(r.choices(words, k=300)))
    return texts


def overrides(scale: str, folder: Path, *more: str) -> list[str]:
    q = [] if scale == "16B" else ["model.q_lora_rank=16"]
    return [*SMALL, *q, f"data.source={corpus(folder)}", f"run_dir={folder / 'run'}", *more]


def run_config(scale: str, folder: Path, *more: str) -> RunConfig:
    return moetrain.load_config(ROOT / "configs" / scale / "smoke.yaml", overrides(scale, folder, *more))


def records(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run_dir: Path, key: str = "total") -> list[float]:
    return [record[key] for record in records(run_dir)]


def train_on(world: int, scale: str, folder: Path, *more: str) -> Path:
    """Trains in ``world`` forked processes that see what torchrun would tell them; returns the run's folder."""
    config = run_config(scale, folder, *more)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    run_plain(_train, world, config, port)
    return config.run_dir


def _train(rank: int, world: int, config: RunConfig, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if world == 1:
        del os.environ["MASTER_ADDR"]
    moetrain.train(config)


def environment() -> dict[str, str]:
    """For subprocesses: the packages importable, one thread."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
