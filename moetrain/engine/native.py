"""The engine made of torch alone: FSDP2 where there are several ranks, a plain module where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moetrain.accumulate.owners import GradientOwner, owner_of
from moetrain.config.run import RunConfig
from moetrain.engine.filling import fill
from moetrain.engine.pipeline import Pipeline
from moetrain.model import DeepSeek, DeepSeekLoss, FreshWeights, Weights
from moetrain.optim import build_adamw, parameter_groups
from moetrain.parallel.plan import dtypes, spread
from moetrain.parallel.ranks import Ranks


class NativeEngine:
    """See ``moetrain.engine.protocol.Engine``.

    Args:
        config: the run.
        ranks: this process among the run's.
        loss: the model's.
        weights: what the model starts from; default: fresh ones from the run's seed.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        loss: DeepSeekLoss,
        *,
        weights: Weights | None = None,
    ) -> None:
        stored, computed = dtypes(config.precision, ranks.target)
        with torch.device("meta"):  # a rank has memory only for what is its own
            self.model = DeepSeek(config.model).to(stored)
        self.model.train()
        length = config.data.seq_len
        applied, fp8 = spread(
            self.model,
            config.parallel,
            config.precision,
            ranks,
            seq_len=length,
            fp8_config=config.fp8,
            experts=config.experts,
        )
        self.materialise(config, ranks, weights or FreshWeights(config.model.initializer_range, config.seed))
        self.pipeline = None
        if ranks.pipe is not None:
            self.pipeline = Pipeline(self.model, loss, config.parallel, ranks, dtype=computed, seq_len=length)
        self.optimizer, how = build_adamw(
            parameter_groups(self.model, config.optimizer.weight_decay),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            moments=config.optimizer.moments,
        )
        if fp8 is not None:
            self.optimizer.register_step_post_hook(fp8.drop)
        self.owner: GradientOwner = owner_of(
            self.model,
            self.optimizer,
            ranks.groups,
            # one rank has nothing to reduce
            every_micro_batch=config.parallel.reduce == "micro_batch" and ranks.mesh is not None,
            stages=None if self.pipeline is None else self.pipeline.stages,
        )
        self.applied: Sequence[str] = [*applied, how]

    def materialise(self, config: RunConfig, ranks: Ranks, weights: Weights) -> None:
        """Memory for what this rank holds, and its values."""
        self.model.to_empty(device="cpu" if config.parallel.offload_states else ranks.device)
        for module in self.model.modules():  # parameters come to the device for each use, buffers stay there
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(ranks.device))
        fill(self.model, weights)
