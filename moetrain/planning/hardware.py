"""The machines that plans are made for, as data, each number with where it comes from.

Rates are dense (half of what data sheets give "with sparsity"), links are one direction. Memory is the data sheet's
number in GiB, which is what the cards hold (five stacks of 16 GiB are an "80 GB" H100); what driver, CUDA context and
NCCL take of it is the plan's reserve. Prices are assumptions of the order of what clouds ask; V3's report counts 2 a
GPU hour of H800.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moetrain.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in the node it comes in.

    Attributes:
        memory: bytes.
        bf16, fp8: dense FLOP/s of the matrix units (0: the GPU has no such units).
        memory_bandwidth: bytes/s of its own memory.
        link: bytes/s to GPUs of the same node, one direction (NVLink, Infinity Fabric, or PCIe).
        network: bytes/s to other nodes for each GPU, one direction.
        host_link: bytes/s to host memory, one direction.
        host_memory: bytes of the node; host_bandwidth: bytes/s of the node's memory.
        per_node: GPUs of a node (those that ``link`` joins).
        price: of one GPU hour, in dollars.
        source: of the numbers.
    """

    name: str
    memory: float
    bf16: float
    fp8: float
    memory_bandwidth: float
    link: float
    network: float
    per_node: int
    price: float
    source: str
    host_link: float = 55e9  # PCIe 5.0 x16: 63 GB/s less protocol
    host_memory: float = 2048 * GIB
    host_bandwidth: float = 400e9  # two sockets of DDR5, as measured by STREAM on such servers: an assumption


_DGX = "network: 400 Gb/s InfiniBand for each GPU (DGX/HGX H100 data sheet)"
TABLE = {
    each.name: each
    for each in (
        Hardware("H100", 80 * GIB, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 8, 2.5, f"NVIDIA H100 SXM sheet; {_DGX}"),
        Hardware("H200", 141 * GIB, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 8, 3.0, f"NVIDIA H200 SXM sheet; {_DGX}"),
        Hardware(
            "H800", 80 * GIB, 989e12, 1979e12, 3.35e12, 200e9, 50e9, 8, 2.0,
            "as H100 with NVLink 400 GB/s in both directions (arXiv 2505.09343, 4.1), 400 Gb/s InfiniBand, 2 dollars "
            "an hour (arXiv 2412.19437, table 1)",
        ),
        Hardware(
            "A100", 80 * GIB, 312e12, 0.0, 2.039e12, 300e9, 25e9, 8, 1.5,
            "NVIDIA A100 80GB SXM data sheet; network: 200 Gb/s for each GPU (DGX A100 data sheet)",
            host_link=27e9, host_memory=1024 * GIB, host_bandwidth=250e9,
        ),
        Hardware(
            "B200", 180 * GIB, 2.25e15, 4.5e15, 8e12, 900e9, 50e9, 8, 5.0,
            "NVIDIA DGX B200 data sheet, an eighth of it",
        ),
        Hardware(
            "GB200", 186 * GIB, 2.5e15, 5e15, 8e12, 900e9, 50e9, 72, 6.0,
            "NVIDIA GB200 NVL72 data sheet, a 72nd of it; network: 400 Gb/s for each GPU",
            host_link=225e9, host_memory=36 * 480 * GIB, host_bandwidth=36 * 512e9,
        ),
        Hardware(
            "L40S", 48 * GIB, 362e12, 733e12, 864e9, 27e9, 25e9, 8, 1.0,
            "NVIDIA L40S data sheet (PCIe 4.0 x16); network: an assumption of 200 Gb/s for each GPU",
            host_link=27e9, host_memory=1024 * GIB,
        ),
        Hardware(
            "MI300X", 192 * GIB, 1307e12, 2615e12, 5.3e12, 448e9, 50e9, 8, 2.5,
            "AMD Instinct MI300X data sheet; network: an assumption of 400 Gb/s for each GPU",
        ),
        Hardware(
            "4090", 24 * GIB, 165e12, 330e12, 1.008e12, 27e9, 1.25e9, 8, 0.4,
            "NVIDIA Ada GPU architecture white paper (PCIe 4.0 x16); network: an assumption of 10 Gb/s for each GPU",
            host_link=27e9, host_memory=512 * GIB, host_bandwidth=200e9,
        ),
        Hardware(
            "CPU", 24 * GIB, 3e9, 0.0, 20e9, 5e9, 1.25e9, 2, 0.0,
            "this project's development machine: two cores with AVX2 and no bf16 units, a process each; "
            "fp32 runs at 60 GFLOP/s, see moetrain.planning.speed",
            host_memory=24 * GIB, host_bandwidth=20e9,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """``count`` GPUs of one kind, over nodes of ``hardware.per_node``."""

    hardware: Hardware
    count: int

    @property
    def device(self) -> str:
        return "cpu" if self.hardware.name == "CPU" else "cuda"

    @property
    def nodes(self) -> int:
        return -(-self.count // self.hardware.per_node)

    @property
    def here(self) -> int:
        """GPUs on a node."""
        return min(self.count, self.hardware.per_node)

    def __str__(self) -> str:
        return f"{self.count}x{self.hardware.name}"


def cluster(text: str, nodes: int | None = None, keys: Mapping[str, float] | None = None) -> Cluster:
    """``8xH200``: so many GPUs; with ``nodes``, on each of them. ``keys`` replace numbers of the table, or describe a
    GPU that is not in it.

    Raises:
        UserError: no such thing.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z0-9._-]+)", text.strip())
    if match is None or match[1] == "0":
        raise UserError(f"--gpus: {text!r} is not a number and a kind of GPU; write it as 8xH200")
    count, name = int(match[1] or 1), match[2]
    keys = dict(keys or {})
    fields = {f.name for f in dataclasses.fields(Hardware)} - {"name", "source"}
    for key in keys:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            raise UserError(
                f"gpu.{key}: there is no such number of a GPU; "
                + (f"did you mean gpu.{close[0]}?" if close else f"there is {', '.join(sorted(fields))}")
            )
    known = next((each for each in TABLE.values() if each.name.lower() == name.lower()), None)
    if known is None:
        missing = sorted(fields - keys.keys() - {"price", "host_link", "host_memory", "host_bandwidth"})
        if missing:
            raise UserError(
                f"--gpus: {name} is not in the table ({', '.join(TABLE)}); describe it on the command line, still "
                f"missing: {', '.join(f'gpu.{key}=NUMBER' for key in missing)}"
            )
        keys.setdefault("price", 0.0)
        given = {key: int(value) if key == "per_node" else value for key, value in keys.items()}
        hardware = Hardware(name=name, source="the command line", **given)  # type: ignore[arg-type]
    else:
        replaced: dict[str, Any] = {key: int(value) if key == "per_node" else value for key, value in keys.items()}
        hardware = dataclasses.replace(known, **replaced)
    return Cluster(hardware, count * (nodes or 1))
