"""Who owns sharding, reduction, clipping and optimizer state."""

from moetrain.engine.deepspeed import DeepSpeedEngine
from moetrain.engine.host import reuse_host_memory
from moetrain.engine.native import NativeEngine
from moetrain.engine.protocol import Engine

__all__ = ["DeepSpeedEngine", "Engine", "NativeEngine", "reuse_host_memory"]
