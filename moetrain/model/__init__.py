"""The DeepSeek family in plain PyTorch for one device."""

from moetrain.model.backends import Backend
from moetrain.model.deepseek import DeepSeek
from moetrain.model.loss import DeepSeekLoss
from moetrain.model.weights import FreshWeights, Unfilled, Weights

__all__ = ["Backend", "DeepSeek", "DeepSeekLoss", "FreshWeights", "Unfilled", "Weights"]
