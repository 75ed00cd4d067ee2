"""Where parameters, gradients and optimizer states of a rank lie, and how many bytes they are: the part of a run's
memory that is known without looking at a single operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from moetrain.config import RunConfig
from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek

#: buffers that DeepSpeed stages states and parameters of a drive in (``buffer_count`` of its two offloads as the engine
#: sets it), and one more of each for what is on its way
STATE_BUFFERS, PARAMETER_BUFFERS = 5, 9


@dataclass(frozen=True)
class States:
    """Bytes of parameters, gradients and optimizer states of one rank, by where they are kept."""

    device: int
    host: int
    drive: int = 0


def rank_states(config: RunConfig, ranks: int) -> States:
    """Bytes that one of ``ranks`` ranks keeps on the device, on the host and on the node's drive.

    native: everything sharded over the data ranks, in the master format (fp32, or float64). deepspeed (0.19,
    ``runtime/zero/stage3.py``, ``stage_1_and_2.py``): weights in what is computed in, sums of gradients and an fp32
    master beside the moments; the ZeRO stage tells what shards. Offloaded to the host, gradients are there twice: as
    they are summed, and as the optimizer takes them. On a drive, gradients as they are summed stay in memory.
    """
    numbers, experts, largest = _sizes(config.model.model_dump_json())
    master = 8 if config.precision == "float64" else 4
    moments = 2 * (2 if config.optimizer.moments == "bf16" else master)
    shards = max(1, ranks // config.parallel.dp_replicate)
    own = numbers // shards
    if config.engine == "native":
        size = own * (2 * master + moments)
        return States(0, size) if config.parallel.offload_states else States(size, 0)

    zero, whole = config.deepspeed, numbers - experts + experts // config.parallel.ep
    weights = 2 if config.precision in ("bf16", "fp16", "fp8") else 4
    device = host = drive = 0
    if zero.offload_parameters == "none":
        device += weights * (own if zero.zero_stage == 3 else whole)
    elif zero.offload_parameters == "cpu":
        host += weights * own
    else:
        drive += weights * own
        host += weights * PARAMETER_BUFFERS * -(-largest // shards)
    states = master + moments
    match zero.offload_optimizer:
        case "none":
            device += own * states + master * (own if zero.zero_stage >= 2 else whole)
        case "cpu":
            # below stage 3 what comes to the host is of the parameters' dtype
            host += own * (states + master + (master if zero.zero_stage == 3 else weights))
            if zero.zero_stage < 3:  # a gradient on its way: room for the largest parameter's on both sides
                device, host = device + weights * largest, host + weights * largest
        case "nvme":
            drive += own * (states + master)
            host += own * master + STATE_BUFFERS * master * min(zero.sub_group, own)
    return States(device, host, drive)


@lru_cache(maxsize=16)
def _sizes(model: str) -> tuple[int, int, int]:
    """Numbers of all parameters together, of the routed experts', and of the largest."""
    with torch.device("meta"):  # the real model, without its memory
        built = DeepSeek(ModelConfig.model_validate_json(model))
    sizes = {name: p.numel() for name, p in built.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name), max(sizes.values())
