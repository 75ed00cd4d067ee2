"""Micro-batches through pipeline stages: torch's schedules, with a window's slots and ledger.

torch.distributed.pipelining decides who computes what when. What it does not know is that a step is more than its
gradients: which slot a forward belongs to (the ledger writes there), when a router's counts are complete, and that a
recomputed block replays its routing. So each stage says its slot before it computes, and everything else stays the
schedule's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from moetrain.accumulate import Router, RoutingLedger, Window, find_routers
from moetrain.accumulate.ledger import NONE
from moetrain.accumulate.owners import Stages, is_fsdp, settle_gradients
from moetrain.accumulate.traffic import Traffic
from moetrain.config.run import FORWARDS_FIRST, SPLIT_BACKWARD, ParallelConfig
from moetrain.model import DeepSeek, DeepSeekLoss
from moetrain.model.deepseek import Part
from moetrain.parallel.ranks import Ranks
from moetrain.parallel.stages import cut, slots, stages_of

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """See ``moetrain.accumulate.accumulator.Pipeline``. Made by every rank alike, after ``plan.spread``.

    Args:
        model: this rank's part of it.
        loss: its loss.
        config: the plan.
        ranks: this process; ``ranks.pipe`` is there.
        dtype: of the hidden states that stages hand on.
        seq_len: as given to ``plan.spread``.
    """

    def __init__(
        self,
        model: DeepSeek,
        loss: DeepSeekLoss,
        config: ParallelConfig,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        seq_len: int = 4096,
    ) -> None:
        assert ranks.pipe is not None
        # its dump of the whole schedule, when a rank is lost, would hide the sentence that says where
        logging.getLogger(ScheduleGPipe.__module__).setLevel(logging.CRITICAL)
        self.model, self.loss, self.config, self.dtype, self.device = model, loss, config, dtype, ranks.device
        self.pipe = ranks.pipe.get_group()
        self.traffic = Traffic()
        self.held: Callable[[torch.device], AbstractContextManager[Any]] = lambda device: nullcontext()
        parts = cut(model.config, config.stages, seq_len)
        own = stages_of(config, ranks.pipe.get_local_rank())
        self.parts = {number: parts[number] for number in own}
        self.all_forwards_first = config.schedule in FORWARDS_FIRST
        self.routers = _whole_models(model)
        self.rows = {number: _rows(model, part) for number, part in self.parts.items()}
        self.stages = Stages(
            groups=(self.pipe,),
            split=config.schedule in SPLIT_BACKWARD,
            **_copies(model, config, ranks),
        )
        self._schedules: dict[tuple[int, int, int, bool], tuple[Any, list[_Stage]]] = {}
        self.window: Window | None = None
        self.ledger: RoutingLedger | None = None
        self.counting = self.unsettled = False
        self.sums = self.scale = torch.zeros(0)

    # -- what the accumulator asks ------------------------------------------------------------------------------------

    def fill(self, window: Window) -> Window:
        """Rows of padding until all micro-batches have one shape, micro-batches of padding until the schedule runs."""
        rows = max(item.input_ids.shape[0] for item in window)
        if len({item.input_ids.shape[1] for item in window}) > 1:
            raise ValueError("a pipeline needs micro-batches with rows of one length: pad them")
        items = [item.with_rows(rows) for item in window]
        missing = slots(self.config, len(items)) - len(items)
        return Window.of([*items, *[items[0].empty()] * missing])

    @torch.no_grad()
    def forward(self, window: Window, ledger: RoutingLedger | None = None) -> Tensor:
        """Loss sums without gradient; with a ledger, what it counts is written."""
        self.counting = True
        return self._through(self.fill(window), ledger, None)

    def run(self, window: Window, scale: Tensor, ledger: RoutingLedger) -> Tensor:
        self.counting = False
        self.unsettled = self.all_forwards_first
        return self._through(window, ledger, scale)

    # -- what stages ask ----------------------------------------------------------------------------------------------

    def compute(self, part: Part, slot: int, x: Tensor) -> Tensor:
        assert self.window is not None
        item = self.window[slot]
        hidden = None if part.first else x
        with self.held(self.device):
            out: Tensor = self.model(item.input_ids, part=part, hidden=hidden, **self.loss.inputs(item))
        return out

    @contextmanager
    def forward_of(self, slot: int, rows: slice) -> Iterator[None]:
        if self.ledger is not None:
            self.ledger.slot = slot
        yield
        if self.ledger is not None and not self.counting:
            self.ledger.forward_done(slot, rows)

    @contextmanager
    def backward_of(self, slot: int, rows: slice) -> Iterator[None]:
        """``rows``: the routers that are through with the slot."""
        assert self.ledger is not None
        if self.unsettled:
            self.ledger.forwards_done()
            self.unsettled = False
        with self.ledger.backward_of(slot, rows):
            yield

    def settle(self) -> None:
        """After weight gradients that no hook has seen."""
        if is_fsdp(self.model):
            settle_gradients(self.model)

    # -- torch's side -------------------------------------------------------------------------------------------------

    def _through(self, window: Window, ledger: RoutingLedger | None, scale: Tensor | None) -> Tensor:
        self.window, self.ledger = window, ledger
        terms = len(self.loss.depths)
        stat = torch.promote_types(self.dtype, torch.float32)
        self.sums = torch.zeros(terms, dtype=stat if scale is None else scale.dtype, device=self.device)
        if scale is not None:
            self.scale = scale
        key = (len(window), *window[0].input_ids.shape, scale is not None)
        if key not in self._schedules:
            # one of each kind: it holds what it receives, and a batch that grows would leave many behind
            self._schedules = {other: kept for other, kept in self._schedules.items() if other[-1] != key[-1]}
            self._schedules[key] = self._schedule(*key)
        arguments: dict[str, Any] = {}
        ids = () if 0 not in self.parts else (torch.cat([item.input_ids for item in window]),)
        if self.config.stages - 1 in self.parts and scale is not None:
            arguments["target"] = torch.arange(len(window))  # who computes a loss looks the targets up
        schedule, stages = self._schedules[key]
        try:
            schedule.step(*ids, return_outputs=False, **arguments)
            for stage in stages:  # a pass without backwards would keep every slot's output until the next one
                stage.clear_runtime_states()
        except BaseException:
            self._schedules.clear()  # half a window is in it
            raise
        finally:
            self.window = self.ledger = None
        return self.sums

    def _schedule(self, slots: int, rows: int, tokens: int, training: bool) -> tuple[Any, list[_Stage]]:
        kind = SCHEDULES[self.config.schedule]
        stages = [self._stage(number, rows, tokens) for number in self.parts]
        single = issubclass(kind, PipelineScheduleSingle)
        loss_fn = self._scaled if training else None
        return kind(stages[0] if single else stages, slots, loss_fn=loss_fn, scale_grads=False), stages

    def _stage(self, number: int, rows: int, tokens: int) -> _Stage:
        part = self.parts[number]
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(rows, tokens, self.model.config.hidden_size, dtype=self.dtype, device="meta")
        hidden.requires_grad_()
        sums = torch.empty(len(self.loss.depths), device="meta")
        return _Stage(
            self,
            _Compute(self, part),
            self.rows[number],
            stage_index=number,
            num_stages=self.config.stages,
            device=self.device,
            input_args=(ids if part.first else hidden,),
            output_args=(sums if part.last else hidden,),
            group=self.pipe,
        )

    def _scaled(self, sums: Tensor, _: Tensor) -> Tensor:
        return (sums.to(self.scale.dtype) * self.scale).sum()


class _Compute(nn.Module):
    """A part as torch wants it; the parameters stay the model's."""

    def __init__(self, pipeline: Pipeline, part: Part) -> None:
        super().__init__()
        self._of = (pipeline, part)  # a tuple: the model is not this module's child
        self.slot = 0

    def forward(self, x: Tensor) -> Tensor:
        pipeline, part = self._of
        return pipeline.compute(part, self.slot, x)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those whose gradients torch takes apart from the rest of a backward."""
        part, model = self._of[1], self._of[0].model
        modules: list[nn.Module] = [model.layers[i] for i in part.layers]
        if part.last:
            modules += [model.norm, model.lm_head, *model.mtp]
        if part.first or (part.last and len(model.mtp)):
            modules.append(model.embed_tokens)
        for module in modules:
            yield from module.parameters()


class _Stage(PipelineStage):
    """torch's stage; says its slot."""

    def __init__(self, pipeline: Pipeline, compute: _Compute, rows: slice, **kwargs: Any) -> None:
        super().__init__(compute, **kwargs)
        self.pipeline, self.compute, self.rows = pipeline, compute, rows

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.compute.slot = fwd_chunk_id
        with self.pipeline.forward_of(fwd_chunk_id, self.rows):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self.pipeline.sums += out.detach()
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        with self.pipeline.backward_of(bwd_chunk_id, self.rows if full_backward else NONE):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        with self.pipeline.backward_of(bwd_chunk_id, self.rows):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.pipeline.settle()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends:
            self.pipeline.traffic.count("stages", send.tensor)
        return sends

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Of a stage that lies on one rank with the next; torch refuses a pass without gradients here."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The window's owner reduces."""


def _whole_models(model: DeepSeek) -> list[Router]:
    """Every router of the model; those that lie elsewhere only as facts."""
    here = {router.name: router for router in find_routers(model)}
    with torch.device("meta"):
        every = find_routers(DeepSeek(model.config))
    return [here.get(r.name) or replace(r, attach=lambda tap: None, bias=lambda: None) for r in every]


def _rows(model: DeepSeek, part: Part) -> slice:
    """The part's routers among the whole model's."""
    config = model.config
    first = sum(config.is_moe_layer(i) for i in range(part.layers.start))
    count = sum(config.is_moe_layer(i) for i in part.layers)
    return slice(first, first + count + (config.num_nextn_predict_layers if part.last else 0))


def _copies(model: DeepSeek, config: ParallelConfig, ranks: Ranks) -> dict[str, Any]:
    """The embedding, where the first stage and multi-token prediction are on different ranks."""
    ends = (stages_of(config, 0), stages_of(config, config.pp - 1))
    apart = not any({0, config.stages - 1} <= set(end) for end in ends)
    if not (model.config.num_nextn_predict_layers and apart):
        return {}
    assert ranks.pipe is not None
    group, position = ranks.pipe.get_group(), ranks.pipe.get_local_rank()
    if config.pp > 2:
        # every rank makes every group, in one order
        for first in range(ranks.data_world):
            holders = [first, first + (config.pp - 1) * ranks.data_world]
            made = dist.new_group(holders)
            if ranks.rank in holders:
                group = made
    if position not in (0, config.pp - 1):
        return {}
    return {"copy": model.embed_tokens.weight, "copy_groups": (group,), "counted": position == 0}
