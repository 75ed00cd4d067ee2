"""moetrain: DeepSeek-style mixture-of-experts training whose step is the same in every layout.

The public names are below. They load when first used, so that ``import moetrain`` and the command line answer
at once instead of waiting for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetrain.accumulate import (
        Balance,
        MoEAccumulator,
        RoutingLedger,
        StepReport,
        Window,
        count_denominators,
        grad_norm,
        update_bias,
    )
    from moetrain.checkpoint.hugging_face import from_pretrained, save_pretrained
    from moetrain.config import ModelConfig, RunConfig, load_config
    from moetrain.engine.host import reuse_host_memory
    from moetrain.errors import UserError
    from moetrain.trainer import train

__version__ = "0.1.0.dev0"

_HOME = {
    "Balance": "moetrain.accumulate",
    "MoEAccumulator": "moetrain.accumulate",
    "RoutingLedger": "moetrain.accumulate",
    "StepReport": "moetrain.accumulate",
    "Window": "moetrain.accumulate",
    "count_denominators": "moetrain.accumulate",
    "grad_norm": "moetrain.accumulate",
    "update_bias": "moetrain.accumulate",
    "from_pretrained": "moetrain.checkpoint.hugging_face",
    "save_pretrained": "moetrain.checkpoint.hugging_face",
    "ModelConfig": "moetrain.config",
    "RunConfig": "moetrain.config",
    "load_config": "moetrain.config",
    "reuse_host_memory": "moetrain.engine.host",
    "UserError": "moetrain.errors",
    "train": "moetrain.trainer",
}

__all__ = [
    "Balance",
    "MoEAccumulator",
    "ModelConfig",
    "RoutingLedger",
    "RunConfig",
    "StepReport",
    "UserError",
    "Window",
    "__version__",
    "count_denominators",
    "from_pretrained",
    "grad_norm",
    "load_config",
    "reuse_host_memory",
    "save_pretrained",
    "train",
    "update_bias",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moetrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
