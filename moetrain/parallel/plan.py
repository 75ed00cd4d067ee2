"""THE order in which a model is spread. Read top to bottom; nothing is wrapped anywhere else.

1. the pipeline: what other stages compute is dropped, so nothing below touches it
2. the backend for the device (attention, experts' products), and FP8 products
3. expert parallelism: experts split over the expert mesh, before anything shards what is left of them
4. recompute, inside what is sharded, so that weights are gathered before a block runs again
5. sharding: experts over the ranks that hold the same ones, every block over all data ranks, the rest at the root
   (DeepSpeed's ZeRO does this where it is the engine)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from moetrain.config.run import SPLIT_BACKWARD, Fp8Config, ParallelConfig
from moetrain.model import Backend, DeepSeek
from moetrain.model.dispatch import Dispatcher
from moetrain.model.gate import Gate
from moetrain.model.layers import MLP, Linear
from moetrain.model.mla import MLA
from moetrain.model.moe import MoE, RoutedExperts
from moetrain.parallel import deep_ep
from moetrain.parallel.ep import AllToAllDispatcher, reach, spread_experts
from moetrain.parallel.ranks import Ranks
from moetrain.parallel.recompute import recompute_in_backward, recompute_what_is_cheap
from moetrain.parallel.stages import cut, keep, stages_of
from moetrain.precision import Fp8, Fp8Rows, products_for

#: precision -> (dtype of the parameters that the optimizer steps, dtype of the computation)
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "fp8": (torch.float32, torch.bfloat16),
}


def dtypes(precision: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """``DTYPES`` of a device: what lies between FP8 products is fp32 on CPUs, most of which have no bf16 units."""
    stored, computed = DTYPES[precision]
    return stored, torch.float32 if precision == "fp8" and device.type == "cpu" else computed


def needs_group(precision: str, config: ParallelConfig) -> bool:
    """FSDP2 keeps fp32 master weights for half precision, and states on the host; it wants a group even of one."""
    stored, computed = DTYPES[precision]
    return stored != computed or config.offload_states


def experts_stay_plain(precision: str, config: ParallelConfig, holders: int) -> bool:
    """FSDP2 has nothing to do for spread experts that one rank holds alone: it would copy weights and gradients."""
    return holders == 1 and not needs_group(precision, config)


class Spread(NamedTuple):
    """What was applied, a line each, for rank 0 to print; and the FP8 products, which forget weights at each step."""

    applied: list[str]
    fp8: Fp8 | None


def spread(
    model: DeepSeek,
    config: ParallelConfig,
    precision: str,
    ranks: Ranks,
    *,
    seq_len: int = 4096,
    fp8_config: Fp8Config | None = None,
    experts: str = "torch",
    sharded_by: Literal["fsdp", "zero"] = "fsdp",
    weights_stay: bool = True,
) -> Spread:
    """Applies the plan in place.

    Args:
        seq_len: weighs attention against the rest where stages are cut by cost.
        sharded_by: ``zero`` leaves step 5 to DeepSpeed, which also owns what it wraps: parameters stay plain tensors,
            and their gradient hooks have to fire.
        weights_stay: under ``zero``: whether a rank has all weights all the time.
    """
    stored, computed = dtypes(precision, ranks.target)
    applied = [f"precision {precision}: parameters {_name(stored)}, computation {_name(computed)}, router fp32 or more"]

    if ranks.pipe is not None:
        parts = cut(model.config, config.stages, seq_len)
        keep(model, [parts[i] for i in stages_of(config, ranks.pipe.get_local_rank())])
        sizes = "+".join(str(len(part.layers)) for part in parts)
        applied.append(f"pipeline {config.schedule} over {config.pp} ranks: {config.stages} stages of {sizes} blocks")

    backend = Backend.for_device(ranks.target, computed, experts)
    model.use_backend(backend)
    applied.append(backend.describe)
    fp8 = None
    if precision == "fp8":
        gathered = config.reshard_after_forward and ranks.mesh is not None and ranks.mesh["dp_shard"].size() > 1
        comes_and_goes = gathered if sharded_by == "fsdp" else not weights_stay
        fp8 = _fp8(fp8_config or Fp8Config(), ranks, keep_weights=not (comes_and_goes or config.offload_states))
        kept = "kept for a window" if fp8.keep_weights else "made for each use"
        applied.append(
            f"{use_fp8(model, fp8)} layers' products in FP8: {fp8.products.describe}; quantised weights {kept}; "
            "the rest high"
        )

    if ranks.expert_mesh is not None:
        dispatcher, how = _dispatcher(model, config, ranks, computed, fp8 is not None)
        count = spread_experts(model, ranks.expert_mesh["ep"], dispatcher, plain=sharded_by == "zero")
        applied.append(
            f"experts of {count} layers over {ranks.expert_mesh['ep'].size()} ranks, {how}"
            f"{'' if fp8 is None else ' (tokens in FP8, sums not)'}; "
            f"each part on {ranks.expert_mesh['edp'].size()}; a token goes to {reach(model.config, config.ep)} at most"
        )
        groups = model.config.n_group
        if groups > 1 and groups % config.ep and config.ep % groups:
            applied.append(
                f"ep {config.ep} cuts the model's {groups} expert groups: the step is the same, and tokens go to more "
                "ranks than routing by groups means; an ep that divides n_group, or a multiple of it, does not"
            )

    blocks: list[Any] = [m for m in model.layers if m is not None]  # None: another stage's
    blocks += [module.block for module in model.mtp]
    if config.recompute != "none":
        for block in blocks:
            recompute_in_backward(block) if config.recompute == "full" else recompute_what_is_cheap(block)
        what = "whole" if config.recompute == "full" else "norms and up-projections (SwiGLU's always)"
        applied.append(f"recompute: {len(blocks)} blocks, {what}")

    if ranks.mesh is not None and sharded_by == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=stored) if stored != computed else None
        shard: dict[str, Any] = {"mesh": ranks.mesh, "reshard_after_forward": config.reshard_after_forward}
        if config.offload_states:
            shard["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
            applied.append("parameters, gradients and optimizer states in host memory")
        if policy is not None:
            # routers stay in fp32: their own group, without a cast
            for gate in (m for m in model.modules() if isinstance(m, Gate)):
                fully_shard(gate, **shard)
            shard["mp_policy"] = policy
        here = set()  # parameters that no other rank has a part of, and that nothing casts or moves
        if ranks.expert_mesh is not None:
            holders = tuple(name for name in ranks.expert_mesh.mesh_dim_names or () if name != "ep")
            mine = {**shard, "mesh": ranks.expert_mesh[holders]}
            if policy is not None:  # rows are in the computation's dtype, the router's weights beside them in fp32
                mine["mp_policy"] = replace(policy, cast_forward_inputs=False)
            for layer in (m for m in model.modules() if isinstance(m, MoE)):
                if experts_stay_plain(precision, config, mine["mesh"].size()):
                    here |= set(layer.experts.parameters())
                else:
                    fully_shard(layer.experts, **mine)
        for block in blocks:
            fully_shard(block, ignored_params=here, **shard)
        fully_shard(model, ignored_params=here, **{**shard, "reshard_after_forward": False})
        copies = f", {config.dp_replicate} copies" if config.dp_replicate > 1 else ""
        applied.append(
            f"FSDP2 over {ranks.mesh['dp_shard'].size()} ranks{copies}: {len(blocks)} blocks and the root, "
            f"reshard after forward {'on' if config.reshard_after_forward else 'off'}, "
            f"gradients summed each {config.reduce.replace('_', '-')}"
        )

    # the product may add into .grad where gradients are kept in the dtype it computes in, and runs once
    in_place = stored == computed and not (ranks.pipe is not None and config.schedule in SPLIT_BACKWARD)
    in_place = in_place and sharded_by == "fsdp"
    model.set_in_place_gradients(in_place)
    applied.append(f"weight gradients added by the backward product: {'yes' if in_place else 'no'}")
    return Spread(applied, fp8)


def _dispatcher(
    model: DeepSeek, config: ParallelConfig, ranks: Ranks, computed: torch.dtype, fp8: bool
) -> tuple[Callable[[str, int], Dispatcher], str]:
    assert ranks.expert_mesh is not None
    group = ranks.expert_mesh["ep"].get_group()
    fits = computed == torch.bfloat16 and ranks.device.type == "cuda"
    if config.dispatch == "deep_ep" or (config.dispatch == "auto" and fits and deep_ep.installed()):
        buffer = deep_ep.buffer_for(group, model.config.hidden_size)
        return lambda place, experts: deep_ep.DeepEPDispatcher(buffer, group.size(), experts, fp8=fp8), "DeepEP"
    wire = Fp8Rows() if fp8 else None
    return lambda place, experts: AllToAllDispatcher(group, experts, layer=place, wire=wire), "all-to-all"


def _fp8(config: Fp8Config, ranks: Ranks, *, keep_weights: bool) -> Fp8:
    return Fp8(
        products_for(config.products, ranks.target, power_of_two=config.scales == "power_of_two"),
        power_of_two=config.scales == "power_of_two",
        attention_output=config.attention_output,
        keep_weights=keep_weights,
    )


def use_fp8(model: DeepSeek, fp8: Fp8) -> int:
    """Attention's projections, dense and shared feed-forwards and routed experts (facts: V3 paper 3.3.1)."""
    layers = 0
    for module in model.modules():
        if isinstance(module, MLA):
            for name, projection in module.named_children():
                if isinstance(projection, Linear):
                    projection.product = fp8.linear_after_attention if name == "o_proj" else fp8.linear
                    layers += 1
        elif isinstance(module, MLP):
            module.product = fp8.swiglu
            layers += 1
        elif isinstance(module, RoutedExperts):
            module.product = fp8.experts
            layers += 1
    return layers


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
