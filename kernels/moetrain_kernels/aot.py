"""Compiles every Triton kernel as it ships, for GPUs that are not here: python -m moetrain_kernels.aot

Prints a line of JSON for each kernel and target: registers a thread, bytes of shared memory, spills, and the matrix
instructions in the assembly. What tests hold the shipped sizes against, and where ``CONFIGS`` come from.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moetrain_kernels import triton_grouped, triton_moe, triton_quantise

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: in the assembly of a target: products of E4M3, products of 16-bit numbers
MATRIX = {
    "sm_90": (r"\bQGMMA\b", r"\bHGMMA\b"),
    "sm_100": (r"\bUTCQMMA\b", r"\bUTCHMMA\b"),
    "gfx942": (r"v_mfma_\w+fp8_fp8", r"v_mfma_\w+bf16"),
}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def kernels(target: str) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, function, types of arguments, constants, options), of every kernel."""
    e4m3 = "*fp8e4nv"
    major = {"sm_90": 9, "sm_100": 10}.get(target)

    def how(kind: str) -> dict[str, int]:
        return dict(triton_grouped.CONFIGS.get(major or 0, {}).get(kind, triton_grouped.FALLBACK))

    int32 = "*i32"
    for power_of_two in (False, True):
        yield f"tiles, power of two {power_of_two}", triton_quantise.tiles_kernel, {
            "x": "*bf16", "q": e4m3, "s": "*fp32", "R": "i32", "C": "i32", "stride_x": "i32", "floor": "fp32",
        }, {"POWER_OF_TWO": power_of_two, "BLOCK_R": 32}, {"num_warps": 4}  # fmt: skip
    yield "blocks", triton_quantise.blocks_kernel, {
        "x": "*fp32", "q": e4m3, "qt": e4m3, "s": "*fp32", "R": "i32", "C": "i32", "parts": "i32", "floor": "fp32",
    }, {"POWER_OF_TWO": False}, {"num_warps": 8}  # fmt: skip
    for x in ("*bf16", e4m3):
        yield f"columns of {x[1:]}", triton_quantise.columns_kernel, {
            "x": x, "tile_scale": "*fp32", "q": e4m3, "s": "*fp32", "row_B": int32, "end_B": int32, "C": "i32",
            "width": "i32", "floor": "fp32",
        }, {"POWER_OF_TWO": False, "OF_TILES": x == e4m3, "BLOCK_C": 64}, {"num_warps": 4}  # fmt: skip
    for kind, number, scaled, block_k in (("fp8", e4m3, True, 128), ("bf16", "*bf16", False, 64)):
        for even in ("", ", ragged"):
            yield f"grouped product, {kind}{even}", triton_grouped.product_kernel, {
                "a": number, "b": number, "c": "*bf16", "a_scale": "*fp32", "b_scale": "*fp32", "expert_B": int32,
                "row_B": int32, "end_B": int32, "many": "i32", "J": "i32", "K": "i32", "stride_be": "i64",
                "stride_bj": "i32", "stride_bk": "=1", "stride_se": "i32", "stride_sj": "i32", "stride_sk": "i32",
                "part_j": "i32", "part_k": "i32",
            }, {"SCALED": scaled, "EVEN": not even, "BLOCK_K": block_k, **how(kind + even)}, {}  # fmt: skip
        along = {"stride_ai": "i32", "stride_ak": "=1", "stride_bj": "i32", "stride_bk": "=1"}
        across = {"stride_ai": "=1", "stride_ak": "i32", "stride_bj": "=1", "stride_bk": "i32"}
        yield f"grouped weight gradient, {kind}", triton_grouped.weight_kernel, {
            "a": number, "b": number, "c": "*fp32" if scaled else "*bf16", "a_scale": "*fp32", "b_scale": "*fp32",
            "start_E": int32, "count_E": int32, "E": "i32", "I": "i32", "J": "i32", **(along if scaled else across),
        }, {"SCALED": scaled, "BLOCK_K": block_k, **how(f"{kind}, weights")}, {}  # fmt: skip
    yield from triton_moe.shipped()


def compiled(
    target: str, name: str, fn: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    """What became of one kernel."""
    options = {**options, **{k: constants.pop(k) for k in ("num_warps", "num_stages") if k in constants}}
    constants |= {k: 1 for k, v in types.items() if v == "=1"}
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in fn.arg_names}
    # pointers, sizes and strides are multiples of 16 in every shape of the DeepSeek family
    aligned = {
        (fn.arg_names.index(k),): [["tt.divisibility", 16]]
        for k, v in types.items()
        if k not in constants and (v[0] == "*" or (v.startswith("i") and k not in ("many", "E", "parts")))
    }
    source = ASTSource(fn, signature, {(fn.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    kernel = triton.compile(source, target=TARGETS[target], options=options)
    found = {"target": target, "kernel": name, "shared": kernel.metadata.shared, **constants, **options}
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "-res-usage", file.name)
            assembly = _tool("nvdisasm", "-c", file.name)
        registers = re.search(r"REG:(\d+)", usage)
        stack = re.search(r"STACK:(\d+)", usage)
        assert registers and stack, usage
        # a spill is a store to local memory; reserved stack without one costs nothing
        found |= {
            "registers": int(registers[1]),
            "stack": int(stack[1]),
            "spills": len(re.findall(r"\bSTL\b", assembly)),
        }
    else:
        assembly = kernel.asm["amdgcn"]
        number = {key: re.search(rf"\.{key}:\s+(\d+)", assembly) for key in ("vgpr_count", "vgpr_spill_count")}
        found |= {
            "registers": int(number["vgpr_count"][1]) if number["vgpr_count"] else -1,
            "spills": int(number["vgpr_spill_count"][1]) if number["vgpr_spill_count"] else -1,
        }
    fp8, half = (len(re.findall(pattern, assembly)) for pattern in MATRIX[target])
    return found | {"fp8_products": fp8, "half_products": half}


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([NVIDIA_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="sm_90, sm_100, gfx942")
    for target in parser.parse_args().targets:
        for name, *kernel in kernels(target):
            print(json.dumps(compiled(target, name, *kernel)), flush=True)


if __name__ == "__main__":
    main()
