"""The DeepSeek family in plain PyTorch for one device."""

from moetrain.model.backends import Backend
from moetrain.model.deepseek import DeepSeek
from moetrain.model.loss import DeepSeekLoss

__all__ = ["Backend", "DeepSeek", "DeepSeekLoss"]
