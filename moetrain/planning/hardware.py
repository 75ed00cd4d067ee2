"""The machines that plans are made for, as data, each number with where it comes from.

Rates are dense (half of what data sheets give "with sparsity"), links are one direction. GPU memory is what torch
reports as a card's capacity ("GPU 0 has a total capacity of 139.80 GiB" on an H200, in out-of-memory messages that
users posted): less than the data sheet's number by what ECC and driver take. What CUDA's context and NCCL take of the
rest is the plan's reserve. Prices are assumptions of the order of what clouds ask; V3's report counts 2 dollars a GPU
hour of H800.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moetrain.config import RunConfig
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
        drives: bytes of the node's NVMe drives; drive_bandwidth: bytes/s of all of them, read or written.
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
    host_memory: float = 2048 * GIB  # DGX H100, H200 and B200, as sold
    host_bandwidth: float = 400e9  # two sockets of DDR5, as measured by STREAM on such servers: an assumption
    drives: float = 8 * 3.84e12  # data drives of DGX A100, H100, H200 and B200
    drive_bandwidth: float = 24e9  # 3 GB/s of each, as such drives are written: an assumption


_DGX = "node: NVIDIA DGX BasePOD reference architecture, core components (2 TB, 8 x 3.84 TB, 400 Gb/s for each GPU)"
TABLE = {
    each.name: each
    for each in (
        Hardware(
            "H100", 79.1 * GIB, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 8, 2.5,
            f"NVIDIA H100 Tensor Core GPU data sheet, SXM (80 GB; 1,979 and 3,958 TFLOPS with sparsity); {_DGX}",
        ),
        Hardware(
            "H200", 139.8 * GIB, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 8, 3.0,
            f"NVIDIA H200 Tensor Core GPU data sheet, SXM (141 GB; 1,979 and 3,958 TFLOPS with sparsity); {_DGX}",
        ),
        Hardware(
            "H800", 79.1 * GIB, 989e12, 1979e12, 3.35e12, 200e9, 50e9, 8, 2.0,
            "as H100 with NVLink 400 GB/s in both directions (arXiv 2505.09343, 4.1), 400 Gb/s InfiniBand, 2 dollars "
            "an hour (arXiv 2412.19437, table 1)",
        ),
        Hardware(
            "A100", 79.1 * GIB, 312e12, 0.0, 2.039e12, 300e9, 25e9, 8, 1.5,
            "NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM; node: NVIDIA DGX A100 640GB data sheet (2 TB, "
            "8 x 3.84 TB, 200 Gb/s for each GPU)",
            host_link=27e9, host_bandwidth=250e9,
        ),
        Hardware(
            "B200", 178.3 * GIB, 2.25e15, 4.5e15, 8e12, 900e9, 50e9, 8, 5.0,
            "NVIDIA DGX B200 data sheet, an eighth of it (72 PFLOPS FP8 with sparsity, 64 TB/s, 14.4 TB/s NVLink); "
            "node: DGX B200 user guide (180 GB each, 2 TB, upgradable to 4, 8 x 3.84 TB, 400 Gb/s for each GPU)",
        ),
        Hardware(
            "GB200", 184.3 * GIB, 2.5e15, 5e15, 8e12, 900e9, 50e9, 72, 6.0,
            "NVIDIA GB200 NVL72 data sheet, a 72nd of it (720 PFLOPS FP8 with sparsity, 13.4 TB, 576 TB/s, 130 TB/s "
            "NVLink; 17 TB LPDDR5X at 18.4 TB/s); network: 400 Gb/s for each GPU; drives: an assumption",
            host_link=225e9, host_memory=17e12, host_bandwidth=18.4e12, drives=18 * 4 * 3.84e12, drive_bandwidth=216e9,
        ),
        Hardware(
            "L40S", 44.4 * GIB, 362e12, 733e12, 864e9, 27e9, 25e9, 8, 1.0,
            "NVIDIA L40S data sheet (48 GB with ECC, PCIe 4.0 x16); node and its 200 Gb/s for each GPU: assumptions",
            host_link=27e9, host_memory=1024 * GIB, drives=15e12, drive_bandwidth=12e9,
        ),
        Hardware(
            "MI300X", 191.7 * GIB, 1307e12, 2615e12, 5.3e12, 448e9, 50e9, 8, 2.5,
            "AMD Instinct MI300X data sheet (seven links of 64 GB/s a direction); node and its 400 Gb/s for each GPU: "
            "assumptions",
        ),
        Hardware(
            "4090", 23.5 * GIB, 165e12, 330e12, 1.008e12, 27e9, 1.25e9, 8, 0.4,
            "NVIDIA Ada GPU architecture white paper, FP32 sums (PCIe 4.0 x16); node and its 10 Gb/s for each GPU: "
            "assumptions",
            host_link=27e9, host_memory=512 * GIB, host_bandwidth=200e9, drives=4e12, drive_bandwidth=5e9,
        ),
        Hardware(
            "CPU", 24 * GIB, 3e9, 0.0, 20e9, 5e9, 1.25e9, 2, 0.0,
            "this project's development machine: two cores with AVX2 and no bf16 units, a process each; "
            "fp32 runs at 60 GFLOP/s, see moetrain.planning.speed",
            host_memory=24 * GIB, host_bandwidth=20e9, drives=100e9, drive_bandwidth=1e9,
        ),
    )
}  # fmt: skip


#: numbers that a GPU described on the command line may leave out
OPTIONAL = {"price", *(f.name for f in dataclasses.fields(Hardware) if f.default is not dataclasses.MISSING)}


#: numbers that may be 0: what a GPU or its node has none of, or costs nothing
MAY_BE_NONE = {"fp8", "drives", "price"}


@dataclass(frozen=True)
class Cluster:
    """``count`` GPUs of one kind, over nodes of ``hardware.per_node``."""

    hardware: Hardware
    count: int

    @property
    def device(self) -> str:
        return "cpu" if self.hardware.name == "CPU" else "cuda"

    def computes(self, config: RunConfig) -> None:
        """Raise UserError where these GPUs have no units for the config's precision."""
        if config.precision == "fp8" and self.device == "cuda" and not self.hardware.fp8:
            raise UserError(f"precision: fp8 needs GPUs that compute in FP8, which {self.hardware.name} do not")

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
        least = 0 if key in MAY_BE_NONE else 1 if key == "per_node" else math.ulp(0.0)
        if not (least <= keys[key] < math.inf):
            raise UserError(
                f"gpu.{key}: {keys[key]:g} is not a number "
                + ("of 0 or more" if not least else "of 1 or more" if least == 1 else "above 0")
            )
    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes: {nodes} is not a number of nodes; give 1 or more")
    known = next((each for each in TABLE.values() if each.name.lower() == name.lower()), None)
    if known is None:
        missing = sorted(fields - keys.keys() - OPTIONAL)
        if missing:
            close = difflib.get_close_matches(name, TABLE, n=1)
            if close and not keys:
                raise UserError(f"--gpus: there is no {name} in the table; did you mean {count}x{close[0]}?")
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
