"""Who owns sharding, reduction, clipping and optimizer state."""

from moetrain.engine.native import NativeEngine
from moetrain.engine.protocol import Engine

__all__ = ["Engine", "NativeEngine"]
