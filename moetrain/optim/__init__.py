"""Parameter groups, AdamW and learning-rate schedules."""

from moetrain.optim.adamw import build_adamw, parameter_groups
from moetrain.optim.batch_sizes import BatchSizes, FixedBatch, NoiseSteeredBatch, RampedBatch
from moetrain.optim.schedules import (
    Constant,
    ConstantCosineConstant,
    Cosine,
    LearningRate,
    Schedule,
    StepDecay,
)

__all__ = [
    "BatchSizes",
    "Constant",
    "ConstantCosineConstant",
    "Cosine",
    "FixedBatch",
    "LearningRate",
    "NoiseSteeredBatch",
    "RampedBatch",
    "Schedule",
    "StepDecay",
    "build_adamw",
    "parameter_groups",
]
