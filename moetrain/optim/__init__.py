"""Parameter groups, AdamW and learning-rate schedules."""

from moetrain.optim.adamw import build_adamw, parameter_groups
from moetrain.optim.schedules import (
    Constant,
    ConstantCosineConstant,
    Cosine,
    LearningRate,
    Schedule,
    StepDecay,
)

__all__ = [
    "Constant",
    "ConstantCosineConstant",
    "Cosine",
    "LearningRate",
    "Schedule",
    "StepDecay",
    "build_adamw",
    "parameter_groups",
]
