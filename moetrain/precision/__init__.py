"""FP8 products of the model's linear layers and experts, by DeepSeek-V3's recipe."""

from moetrain.precision.fp8 import Fp8
from moetrain.precision.products import Groups, Products, Reference, Triton, products_for
from moetrain.precision.wire import Fp8Rows

__all__ = ["Fp8", "Fp8Rows", "Groups", "Products", "Reference", "Triton", "products_for"]
