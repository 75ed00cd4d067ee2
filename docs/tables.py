"""The plan's tables in configs/*/README.md and docs/deepspeed.md, so that what they say is what the plan says.

python docs/tables.py            # writes them
python docs/tables.py --check    # exit code 1 and the name of each file whose tables the plan no longer agrees with
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moetrain.config import load_config
from moetrain.planning.hardware import GIB, cluster
from moetrain.planning.plan import Plan, make_plan

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- by docs/tables.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Row:
    """A config with keys on GPUs; ``name``: what the row is called where it is not called by its keys."""

    gpus: str
    keys: str = ""
    name: str = ""


def planned(scale: str, row: Row) -> Plan:
    keys = row.keys.split()
    gpu = dict(key.removeprefix("gpu.").split("=") for key in keys if key.startswith("gpu."))
    config = load_config(ROOT / "configs" / scale, [key for key in keys if not key.startswith("gpu.")])
    return make_plan(config, cluster(row.gpus, keys={key: float(value) for key, value in gpu.items()}))


# -- configs/*/README.md ----------------------------------------------------------------------------------------------

#: of another number of GPUs than the config was written for
_ANY = "parallel.world_size=null"
_NATIVE = f"engine=native {_ANY}"
_LARGE = f"{_NATIVE} optimizer.moments=bf16"
SCALES: dict[str, tuple[Row, ...]] = {
    "16B": (
        Row("1xH100"),
        Row("1xH200"),
        Row("1xB200", "engine=native"),
        Row("8xH100", f"{_NATIVE} batch.micro_batch=4 parallel.reduce=micro_batch"),
    ),
    "236B": (
        Row("4xH100"),
        Row("4xH200"),
        Row("4xB200", "deepspeed.offload_parameters=none"),
        Row("4xH200", "deepspeed.offload_optimizer=cpu"),
    ),
    "671B": (
        Row("8xH200"),
        Row("8xH200", "gpu.host_memory=4.4e12"),
        Row("8xH200", "batch.micro_batch=2 gpu.host_memory=4.4e12"),
        Row("8xB200", "batch.micro_batch=4 gpu.host_memory=4.4e12"),
        Row("32xH200", f"{_ANY} batch.micro_batch=2"),
        Row("128xH200", f"{_LARGE} parallel.ep=32"),
        Row("256xH100", f"{_LARGE} parallel.ep=32"),
        Row("1024xH100", f"{_LARGE} parallel.pp=4 parallel.ep=32 parallel.recompute=selective"),
        Row("2048xH100", f"{_LARGE} parallel.pp=8 parallel.ep=32 parallel.recompute=selective"),
        Row("2048xH800", f"{_LARGE} parallel.pp=16 parallel.ep=64 parallel.reduce=window"),
    ),
}  # fmt: skip

_HEAD = (
    "| GPUs | keys to add | GiB on a GPU | GiB of host memory on a node | TB on drives of a node | tokens/s on a GPU "
    "| MFU | days | |",
    "|---|---|---|---|---|---|---|---|---|",
)


def scale_table(scale: str) -> Iterator[str]:
    yield from _HEAD
    for row in SCALES[scale]:
        plan = planned(scale, row)
        keys = f"`{row.keys}`" if row.keys else "none"
        sizes = (
            _of(plan.need, plan.have),
            _of(plan.host_need, plan.host_have),
            _of(plan.drive_need, plan.drive_have, 1e12),
        )
        speed = f"{plan.speed.tokens:,.0f} | {100 * plan.speed.mfu:.1f} % | {plan.days:,.0f}"
        yield f"| {plan.cluster} | {keys} | {' | '.join(sizes)} | {speed} | {verdict(plan)} |"


def _of(need: int, have: int, unit: float = GIB) -> str:
    digits = 0 if unit == GIB else 1
    return f"{need / unit:,.{digits}f} of {have / unit:,.{digits}f}" if need else "0"


def verdict(plan: Plan) -> str:
    lacks = {
        "GPU memory": plan.need - plan.have,
        "host memory": plan.host_need - plan.host_have,
        "drives": plan.drive_need - plan.drive_have,
    }
    missing = [what for what, size in lacks.items() if size > 0]
    return f"lacks {' and '.join(missing)}" if missing else "fits"


# -- docs/deepspeed.md ------------------------------------------------------------------------------------------------

#: GPUs of a scale, with a node's memory where it is another one than such nodes are sold with
OFFLOAD = {"16B": ("1xH200", ""), "236B": ("4xH200", ""), "671B": ("8xH200", " gpu.host_memory=4.4e12")}
#: sequences of a GPU in a global batch, and in a micro-batch
EACH, MICRO = 64, 8


def offload_rows(scale: str) -> Iterator[Row]:
    gpus, memory = OFFLOAD[scale]
    batch = f"batch.global_batch={cluster(gpus).count * EACH} batch.ramp=null parallel.recompute=full{memory}"
    native = f"engine=native {batch} parallel.reduce=micro_batch"
    for name, keys, size in (
        ("native", native, MICRO),
        ("accumulation over 4", native, MICRO // 4),
        ("ZeRO offload", batch, MICRO),
        ("both", batch, MICRO // 4),
    ):
        yield Row(gpus, f"{keys} batch.micro_batch={size}", name)


def offload_table() -> Iterator[str]:
    yield "| | | micro-batch | GiB on a GPU | GiB of host memory on a node | tokens/s on a GPU | |"
    yield "|---|---|---|---|---|---|---|"
    for scale in OFFLOAD:
        for row in offload_rows(scale):
            plan = planned(scale, row)
            yield (
                f"| {scale} on {plan.cluster} | {row.name} | {plan.config.batch.micro_batch} "
                f"| {_of(plan.need, plan.have)} | {_of(plan.host_need, plan.host_have)} "
                f"| {plan.speed.tokens:,.0f} | {verdict(plan)} |"
            )


# -- files ------------------------------------------------------------------------------------------------------------

FILES = {f"configs/{scale}/README.md": scale for scale in SCALES} | {"docs/deepspeed.md": "offload"}


def with_table(file: str) -> str:
    """The file's text with the table that the plan gives today."""
    text = (ROOT / file).read_text()
    what = FILES[file]
    lines = "\n".join(offload_table() if what == "offload" else scale_table(what))
    found = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
    assert len(found.findall(text)) == 1, f"{file} must have one pair of {BEGIN} and {END}"
    return found.sub(lambda _: f"{BEGIN}\n{lines}\n{END}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    differ = [file for file in FILES if with_table(file) != (ROOT / file).read_text()]
    for file in differ:
        if not check:
            (ROOT / file).write_text(with_table(file))
        print(f"{file}: {'differs from the plan; run `python docs/tables.py`' if check else 'written'}")
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
