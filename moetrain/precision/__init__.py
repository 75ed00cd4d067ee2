"""FP8 products of the model's linear layers and experts, by DeepSeek-V3's recipe."""

from moetrain.precision.fp8 import fp8_experts, fp8_linear, fp8_swiglu

__all__ = ["fp8_experts", "fp8_linear", "fp8_swiglu"]
