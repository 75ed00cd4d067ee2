"""Peak matrix rates, for model-FLOPs utilisation. MFU is shown only where the peak is known: a guess would be worse."""

from __future__ import annotations

# dense BF16 FLOP/s from NVIDIA's data sheets (half of the figures given "with sparsity"); longer names first
_PEAKS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H800", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A800", 312e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("4090", 165e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense BF16 FLOP/s of a GPU by the name torch gives it, or None where it is not in the table."""
    return next((peak for name, peak in _PEAKS if name in device_name), None)
