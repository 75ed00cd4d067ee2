"""DeepSpeed's configuration: from the run's own keys, and from a JSON file as far as the step stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from moetrain.config.run import RunConfig
from moetrain.errors import UserError
from moetrain.parallel.plan import dtypes
from moetrain.parallel.ranks import Ranks

#: keys of DeepSpeed's that this engine sets by what the run says; a JSON file may not
OURS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "managed_gradient_accumulation", "gradient_clipping", "fp16", "bf16", "amp", "data_types", "optimizer", "scheduler",
    "communication_data_type", "zero_optimization.stage", "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)  # fmt: skip
#: keys that it may set, since the step stays as it is: there are others that scale, round or drop gradients
THEIRS = (
    "aio", "comms_logger", "dump_state", "flops_profiler", "memory_breakdown", "steps_per_print",
    "wall_clock_breakdown", "zero_optimization.allgather_bucket_size", "zero_optimization.contiguous_gradients",
    "zero_optimization.memory_efficient_linear", "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance", "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.sub_group_size",
)  # fmt: skip


def settings_of(config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    zero, on_gpu = config.deepspeed, ranks.device.type == "cuda"
    _, computed = dtypes(config.precision, ranks.device)
    optimization: dict[str, Any] = {
        "stage": zero.zero_stage,
        "overlap_comm": zero.zero_stage >= 2 and on_gpu,
        "contiguous_gradients": True,
        "reduce_bucket_size": zero.bucket,
        "allgather_bucket_size": zero.bucket + zero.bucket % 2,  # it wants an even number
        "stage3_prefetch_bucket_size": zero.bucket // 10,
        "stage3_param_persistence_threshold": zero.small_parameter,
        "sub_group_size": zero.sub_group,
    }
    for key, place in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_parameters)):
        if place != "none":
            optimization[key] = {"device": place, "pin_memory": on_gpu}
            if place == "nvme":
                optimization[key]["nvme_path"] = str(zero.nvme_path)
    if zero.offload_parameters == "nvme":
        # By default a thousand million elements of each group stay in memory, and each parameter that is gathered holds
        # one of five buffers: so none stays, and none is gathered before its use or kept after it.
        optimization["offload_param"] |= {"max_in_cpu": 0, "buffer_count": 8}
        optimization |= {
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": optimization,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if computed == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
    elif computed == torch.float16:
        settings["fp16"] = {"enabled": True, "loss_scale": 1.0}
    if zero.json_file is not None:
        _merge(settings, zero.json_file)
    return settings


def _merge(settings: dict[str, Any], path: Path) -> None:
    try:
        more = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"deepspeed.json_file: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"deepspeed.json_file: {path} is not JSON ({error})") from error
    if not isinstance(more, dict):
        raise UserError(f"deepspeed.json_file: {path} must hold an object of DeepSpeed's keys")
    optimization = more.pop("zero_optimization", {})
    if not isinstance(optimization, dict):
        raise UserError(f"deepspeed.json_file: zero_optimization in {path} must be an object of DeepSpeed's keys")
    given = [*more, *(f"zero_optimization.{key}" for key in optimization)]
    taken = [key for key in given if key in OURS]
    if taken:
        raise UserError(
            f"deepspeed.json_file: {path} sets {', '.join(taken)}, which this run's own keys say (batch, optimizer, "
            "precision, deepspeed): leave it out there"
        )
    others = [key for key in given if key not in THEIRS]
    if others:
        raise UserError(
            f"deepspeed.json_file: {path} sets {', '.join(others)}, which would change the step, or which nobody has "
            f"looked at: it may set {', '.join(THEIRS)}"
        )
    if optimization.get("overlap_comm") and settings["zero_optimization"]["stage"] == 1:
        raise UserError(
            f"deepspeed.json_file: {path} sets zero_optimization.overlap_comm, which needs deepspeed.zero_stage 2 or 3"
        )
    settings["zero_optimization"] |= optimization
    settings |= more


def taken_by(deepspeed: Any, settings: dict[str, Any], path: Path | None) -> Any:
    """DeepSpeed's own object of ``settings``; ``path``: the JSON file that is in them."""
    try:
        return deepspeed.DeepSpeedConfig(settings)
    except Exception as error:  # pydantic's, DeepSpeed's, assertions, whatever a value of another type brings about
        if path is None:
            raise
        said = str(error).strip().splitlines()[0]
        if hasattr(error, "errors"):
            first = error.errors()[0]
            said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"deepspeed.json_file: DeepSpeed does not take what {path} says ({said})") from error
