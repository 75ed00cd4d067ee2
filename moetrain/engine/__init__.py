"""Who owns sharding, reduction, clipping and optimizer state."""

from moetrain.engine.host import reuse_host_memory
from moetrain.engine.native import NativeEngine
from moetrain.engine.protocol import Engine

__all__ = ["Engine", "NativeEngine", "reuse_host_memory"]
