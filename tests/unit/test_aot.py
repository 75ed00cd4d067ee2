"""Every Triton kernel as it ships, compiled for GPUs that are not here: what it takes, what instructions it uses."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from tests.support.runs import ROOT

pytest.importorskip("triton")
SHARED = 227 * 1024  # bytes a block may have, sm_90 and sm_100
pytestmark = pytest.mark.timeout(300)


@functools.cache
def compiled(target: str) -> dict[str, dict]:
    """In a process of its own: what the interpreter runs cannot be compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    command = [sys.executable, "-m", "moetrain_kernels.aot", target]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {kernel["kernel"]: kernel for kernel in found}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_no_shipped_kernel_spills_or_asks_for_too_much(target):
    kernels = compiled(target)
    assert len(kernels) == 20
    for name, kernel in kernels.items():
        assert kernel["spills"] == 0 and kernel["stack"] == 0, name
        assert kernel["registers"] <= 255 and kernel["shared"] <= SHARED, name


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_products_use_the_matrix_instructions_of_their_numbers(target):
    """QGMMA and HGMMA (wgmma) on sm_90, UTCQMMA and UTCHMMA (tcgen05) on sm_100; nothing else multiplies matrices."""
    for name, kernel in compiled(target).items():
        fp8, half = kernel["fp8_products"] > 0, kernel["half_products"] > 0
        assert (fp8, half) == ("grouped" in name and "fp8" in name, "grouped" in name and "bf16" in name), name


def test_amd_compiles_too():
    """gfx942 has FP8 of another kind (fnuz), so its FP8 products are made of wider ones; bf16 has its instructions."""
    kernels = compiled("gfx942")
    assert kernels.keys() == compiled("sm_90").keys()
    assert all(kernels[name]["half_products"] for name in kernels if "grouped" in name and "bf16" in name)


def test_nothing_else_needs_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import moetrain.trainer, moetrain.verify, moetrain_kernels.quantise, torch\n"
        "from moetrain.precision import Fp8, products_for\n"
        "fp8 = Fp8(products_for('auto', torch.device('cpu')))\n"
        "print(fp8.linear(torch.ones(2, 8), torch.ones(4, 8)).sum().item())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == "64.0", ran.stderr[-2000:]
