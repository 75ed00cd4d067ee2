"""Typed configuration: what a run is, read from YAML and checked before anything is allocated.

Imports pydantic and yaml only (never torch), so that a mistake in a file is answered at once.
"""

from moetrain.config.load import load_config
from moetrain.config.model import ModelConfig, Yarn
from moetrain.config.run import (
    BalanceConfig,
    BatchConfig,
    CheckpointConfig,
    ConstantCosineConstantSchedule,
    ConstantSchedule,
    CosineSchedule,
    DataConfig,
    DeepSpeedConfig,
    EvalConfig,
    LogConfig,
    MtpConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StepSchedule,
)
from moetrain.config.support import refuse_unsupported
from moetrain.config.values import Piecewise

__all__ = [
    "BalanceConfig",
    "BatchConfig",
    "CheckpointConfig",
    "ConstantCosineConstantSchedule",
    "ConstantSchedule",
    "CosineSchedule",
    "DataConfig",
    "DeepSpeedConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "MtpConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Piecewise",
    "RunConfig",
    "ScheduleConfig",
    "StepSchedule",
    "Yarn",
    "load_config",
    "refuse_unsupported",
]
