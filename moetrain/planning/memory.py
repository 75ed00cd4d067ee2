"""Peak memory of a rank: a window played through without running it.

Pieces of the real model (``moetrain.planning.trace``) say what blocks allocate and free; this module plays them in the
order of the schedule, with what FSDP2 does between them: gathering and prefetching weights, keeping or reducing
gradients, in the order and with the lifetimes of torch's own code (``torch/distributed/fsdp/_fully_shard``, 2.13). The
peak is that of the sum, not a sum of peaks.

What it does not see: scratch space inside kernels, collectives' own buffers and the allocator's gaps; for those the
plan keeps a margin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from moetrain.config.run import SINGLE
from moetrain.engine.pipeline import SCHEDULES
from moetrain.planning.layout import Layout, Parameter
from moetrain.planning.states import rank_states
from moetrain.planning.trace import Mark, Piece, Pieces, Place, Stretch, pieces

ROOT: Place = ("root", "root")
_SIMULATED = 4  # micro-batches played; later ones repeat them


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        rank: pipeline rank.
        peak: the most tensor bytes on the device at one time.
        by: what that is made of: ``parameters`` (sharded masters, buffers), ``gradients`` (reduced), ``optimizer``,
            ``gathered`` (weights in the dtype of the computation), ``unsharded gradients``, ``activations``,
            ``buffers`` (of reductions and pipeline stages), ``data`` (tokens and routing statistics).
        host: bytes kept in host memory.
        drive: bytes kept on the node's drive.
    """

    rank: int
    peak: int
    by: dict[str, int]
    host: int
    drive: int = 0


class _Bytes:
    """Current and largest sum, by kind."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.total += size
        if size > 0:
            self.bump(kind, 0)

    def bump(self, kind: str, size: int) -> None:
        """``size`` more of a kind for a moment."""
        if self.total + size > self.peak:
            self.peak = self.total + size
            self.at_peak = {**self.now, kind: self.now[kind] + size}

    def move(self, size: int, before: str, after: str) -> None:
        self.now[before] -= size
        self.now[after] += size


@dataclass
class _Group:
    """An FSDP2 parameter group: what it holds, and what it has allocated at the moment."""

    parameters: tuple[Parameter, ...]
    ranks: int
    width: int  # bytes of a gathered number
    cast: bool  # gathered in another dtype than stored
    reshard: bool
    unsharded: bool = False
    gathering: int | None = None  # bytes of an all-gather that nobody has waited for
    forwards: list[int] = field(default_factory=list)
    fresh: bool = False  # gradients of the last backward hang on the gathered weights
    accumulated: bool = False  # gradients of earlier backwards wait, unsharded
    reduced: bool = False  # gradients of this window have been reduced

    @property
    def padded(self) -> int:
        return sum(p.shard(self.ranks) for p in self.parameters) * self.ranks

    @property
    def shard(self) -> int:
        return sum(p.shard(self.ranks) for p in self.parameters)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


class _Fsdp:
    """What FSDP2 does at its hooks. Method names are those of ``FSDPParamGroup``."""

    def __init__(self, groups: dict[Place, _Group], memory: _Bytes, stored: int, copies: int, offload: bool) -> None:
        self.groups, self.memory, self.stored, self.copies, self.offload = groups, memory, stored, copies, offload
        self.order: list[Place] = []  # post-forward order
        self.held = 0  # the last all-gather of a forward, until the next one is copied out
        self.scattering: list[int] = []
        self.retained = 0

    def unshard(self, g: _Group) -> None:
        if g.unsharded or g.gathering is not None:
            return
        if g.ranks == 1:
            g.gathering = 0
            return
        g.gathering = g.padded * g.width
        self.memory.add("gathered", g.gathering)
        if g.cast or self.offload:  # the shard in the dtype of the computation, or brought from the host
            self.memory.bump("gathered", g.shard * g.width)

    def wait(self, g: _Group, forward: bool) -> None:
        if g.gathering is None:
            return
        if forward:
            self.release_held()
        if g.ranks == 1:
            done = 0
            for p in g.parameters:
                self.memory.bump("gathered", done + p.numel * g.width * (2 if g.cast else 1))
                done += p.numel * g.width
        self.memory.add("gathered", g.padded * g.width)
        if forward and g.ranks > 1:
            self.held = g.gathering
        else:
            self.memory.add("gathered", -g.gathering)
        g.gathering, g.unsharded = None, True

    def release_held(self) -> None:
        self.memory.add("gathered", -self.held)
        self.held = 0

    def reshard(self, g: _Group) -> None:
        if g.unsharded:
            self.memory.add("gathered", -g.padded * g.width)
            g.unsharded = False

    def pre_forward(self, place: Place) -> None:
        g = self.groups[place]
        self.unshard(g)
        self.wait(g, forward=True)

    def post_forward(self, place: Place) -> None:
        g = self.groups[place]
        if g.reshard:
            self.reshard(g)
        g.forwards.append(len(self.order))
        self.order.append(place)

    def pre_backward(self, place: Place) -> None:
        g = self.groups[place]
        self.unshard(g)
        self.wait(g, forward=False)
        if g.forwards:
            index = g.forwards.pop()
            if index > 0:
                self.unshard(self.groups[self.order[index - 1]])

    def post_backward(self, place: Place, *, sync: bool, reshard: bool = True) -> None:
        g, memory = self.groups[place], self.memory
        wide = self.stored
        if g.fresh and not g.accumulated:
            memory.move(g.numel * g.width, "activations", "unsharded gradients")
        elif g.fresh and g.cast:  # added to what is there, in the wider dtype
            memory.add("activations", -g.numel * g.width)
            g.fresh = False
        if not sync:
            if reshard:
                self.reshard(g)
            if g.fresh and not g.accumulated and g.cast:
                for p in g.parameters:
                    memory.add("unsharded gradients", p.numel * wide)
                    memory.add("unsharded gradients", -p.numel * g.width)
            g.fresh, g.accumulated = False, True
            return
        if reshard:
            self.reshard(g)
        if self.scattering:
            memory.add("buffers", -self.scattering.pop(0))
        if not (g.fresh or g.accumulated):
            return
        width = wide if g.accumulated or not g.cast else g.width
        into = g.padded * wide
        memory.add("buffers", into)
        memory.add("unsharded gradients", -g.numel * width)
        out = g.shard * wide
        self.scattering.append(into)
        kind = "buffers" if g.reduced or self.offload else "gradients"
        memory.add(kind, out)
        if g.ranks == 1:
            memory.bump("buffers", into)  # divided by a factor of one
        if kind == "buffers":
            if self.copies > 1 and not self.offload:
                self.retained += out
            else:
                memory.add(kind, -out)
        g.fresh = g.accumulated = False
        g.reduced = True

    def finalize(self) -> None:
        while self.scattering:
            self.memory.add("buffers", -self.scattering.pop())
        self.memory.add("buffers", -self.retained)
        self.retained = 0
        self.order.clear()
        for g in self.groups.values():
            g.forwards.clear()


class Action(NamedTuple):
    """What a pipeline rank does next: ``F``orward, ``B``ackward of a slot in a stage."""

    what: str
    stage: int
    slot: int


class _Window:
    """Plays one window of a pipeline rank."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank, self.memory = layout, rank, _Bytes()
        config, kind = layout.config, layout.kind
        self.pieces = pieces(config.model, kind)
        stored, computed = layout.dtypes
        self.stored = stored.itemsize
        p = config.parallel
        self.parameters = layout.groups(rank)
        self.sync_all = p.reduce == "micro_batch" and layout.sharded
        groups = {}
        for place, parameters in self.parameters.items():
            if place[1] == "experts" and layout.plain_experts:
                continue
            cast = layout.cast and place[1] != "gate"
            width = computed.itemsize if cast else stored.itemsize
            reshard = p.reshard_after_forward and place != ROOT
            groups[place] = _Group(parameters, layout.ranks_of(place), width, cast, reshard)
        self.fsdp = None
        if layout.sharded:
            # on a CPU the states are on the device already
            offload = p.offload_states and layout.device == "cuda"
            self.fsdp = _Fsdp(groups, self.memory, self.stored, p.dp_replicate, offload)
        self.first_forward = True
        self.left = 0  # activations that a micro-batch left behind so far

    # -- pieces -------------------------------------------------------------------------------------------------------

    def play(
        self,
        events: Iterable[Stretch | Mark],
        unit: str,
        *,
        backward: bool,
        sync: bool = False,
        first: bool = False,
        last: bool = False,
    ) -> None:
        memory, fsdp = self.memory, self.fsdp
        for event in events:
            if isinstance(event, Stretch):
                memory.bump("activations", event.peak)
                memory.now["activations"] += event.delta
                memory.total += event.delta
                self.left += event.delta
                continue
            if fsdp is None:
                continue
            place = (unit if event.place[0].startswith("layers") else event.place[0], event.place[1])
            if place not in fsdp.groups:
                if place in self.parameters and event.what == "grad_out":
                    self.plain_backward(place, fresh=first or self.sync_all, first=first)
                continue
            if event.what == "enter":
                fsdp.pre_forward(place)
            elif event.what == "leave":
                if backward:  # a forward that runs again is a root of its own, and lets go of what it gathered
                    fsdp.release_held()
                else:
                    fsdp.post_forward(place)
            elif event.what == "grad_in":
                fsdp.pre_backward(place)
            else:
                self.post_backward(place, sync, last)

    def post_backward(self, place: Place, sync: bool, last: bool) -> None:
        assert self.fsdp is not None
        g = self.fsdp.groups[place]
        g.fresh = not g.accumulated or g.cast
        if g.fresh:
            self.left -= g.numel * g.width
        self.fsdp.post_backward(place, sync=sync, reshard=g.reshard or last)

    def plain_backward(self, place: Place, *, fresh: bool, first: bool) -> None:
        """Gradients that FSDP2 has nothing to do with; ``fresh``: ``events`` made them, also where they were there."""
        size = sum(p.numel for p in self.parameters[place]) * self.stored if fresh else 0
        self.memory.move(size, "activations", "gradients")
        self.memory.add("gradients", 0 if first else -size)
        self.left -= size

    def _units(self, stage: int, slot: int) -> list[tuple[str, Piece]]:
        part, model = self.layout.parts[stage], self.layout.config.model
        units = [(f"layers.{i}", self._traced(f"layers.{i}", slot).block(model.is_moe_layer(i))) for i in part.layers]
        if part.first:
            units.insert(0, ("root", self.pieces.embed))
        if part.last:
            units.append(("root", self._traced("mtp.0", slot).end))
        return units

    def _traced(self, unit: str, slot: int) -> Pieces:
        shares = self.layout.shares
        share = dict(shares[slot]).get(unit) if slot < len(shares) else None
        if share is None:
            return self.pieces
        return pieces(self.layout.config.model, replace(self.layout.kind, imbalance=share))

    def forward(self, stage: int, slot: int) -> None:
        units = self._units(stage, slot)
        if self.fsdp is not None:
            self.fsdp.pre_forward(ROOT)
        for unit, piece in units:
            if piece.kept and (stage, unit) not in self.kept:
                self.kept.add((stage, unit))
                self.memory.add("gathered", piece.kept)
            self.play(piece.forward, unit, backward=False)
        if self.fsdp is not None:
            self.fsdp.post_forward(ROOT)
            self.fsdp.release_held()

    def backward(self, stage: int, slot: int, *, first: bool, sync: bool, last: bool) -> None:
        """``first``: nothing has been accumulated yet."""
        units = self._units(stage, slot)
        if self.fsdp is not None:
            self.fsdp.pre_backward(ROOT)
        for unit, piece in reversed(units):
            fresh = first or (self.fsdp is not None and (self.layout.cast or self.sync_all))
            events = piece.backward if fresh else piece.again
            self.play(events, unit, backward=True, sync=sync, first=first, last=last)
        if self.fsdp is not None:
            self.post_backward(ROOT, sync, last)
            if last:
                self.fsdp.finalize()
        elif first:
            size = sum(p.numel for ps in self.parameters_of(stage) for p in ps) * self.stored
            self.memory.move(size, "activations", "gradients")
            self.left -= size

    def parameters_of(self, stage: int) -> list[tuple[Parameter, ...]]:
        """Groups whose gradients a backward of this stage makes."""
        part = self.layout.parts[stage]
        names = {f"layers.{i}" for i in part.layers}
        own = [ps for place, ps in self.parameters.items() if place[0] in names]
        root = self.parameters[ROOT]
        if part.first:
            own.append(tuple(p for p in root if p.name.startswith("embed")))
        if part.last:
            own.append(tuple(p for p in root if not p.name.startswith("embed")))
            own += [ps for place, ps in self.parameters.items() if place[0].startswith("mtp")]
        return own

    # -- the window ---------------------------------------------------------------------------------------------------

    def run(self) -> RankMemory:
        memory = self.memory
        host = self._states()
        self._play()
        self._step()
        return RankMemory(self.rank, memory.peak, {k: v for k, v in memory.at_peak.items() if v}, host)

    def _play(self) -> None:
        layout, memory = self.layout, self.memory
        p = layout.config.parallel
        self.kept: set[tuple[int, str]] = set()
        memory.add("data", self._data())
        if p.pp > 1:
            self._pipeline()
        elif layout.forwards_first:
            self._all_forwards()
        else:
            K = min(layout.slots, _SIMULATED)
            for slot in range(K):
                self.forward(0, slot)
                last = slot == K - 1
                self.backward(0, slot, first=slot == 0, sync=last or self.sync_all, last=last)
                self._nothing_left()

    def passing(self) -> dict[str, int]:
        """What a window needs besides states: the same at its peak, without parameters, gradients and moments."""
        self._play()
        return {kind: size for kind, size in self.memory.at_peak.items() if size and kind != "gradients"}

    def _nothing_left(self) -> None:
        """What the graph itself held goes with it."""
        self.memory.add("activations", -self.left)
        self.left = 0

    def _all_forwards(self) -> None:
        K, memory = self.layout.slots, self.memory
        played = min(K, _SIMULATED)
        each = []
        for slot in range(played):
            before = self.left
            self.forward(0, slot)
            each.append(self.left - before)
        one = each[0]
        on_host = self.layout.config.parallel.offload_activations and self.layout.device == "cuda"
        memory.add("activations", 0 if on_host else one * (K - played))
        for slot in range(played):
            last = slot == played - 1
            before = self.left
            self.backward(0, slot, first=slot == 0, sync=last or self.sync_all, last=last)
            excess = self.left - (before - each[slot])  # what the graph itself held goes with it
            memory.add("activations", -excess)
            self.left -= excess
            if slot == 0:
                memory.add("activations", 0 if on_host else -one * (K - played))

    def _pipeline(self) -> None:
        layout, memory = self.layout, self.memory
        config = layout.config
        K = layout.slots
        played = min(K, layout.config.parallel.stages * 2 + _SIMULATED)
        hidden = layout.rows * config.data.seq_len * config.model.hidden_size * layout.dtypes[1].itemsize
        stages = layout.stages(self.rank)
        count = config.parallel.stages
        for stage in stages:  # torch keeps a buffer for each slot, in both directions
            counting = stage > 0 and config.counts_first  # the counting pass receives into its own
            memory.add("buffers", K * hidden * ((stage > 0) + (stage < count - 1) + counting))
        sends_wait = config.parallel.schedule not in SINGLE  # torch waits for what was sent when all is done
        per_slot: dict[tuple[int, int], int] = {}
        done: set[int] = set()
        for action in order(layout, self.rank, played):
            before = self.left
            if action.what == "F":
                self.forward(action.stage, action.slot)
                per_slot[action.stage, action.slot] = self.left - before
                continue
            self.backward(action.stage, action.slot, first=action.stage not in done, sync=self.sync_all, last=False)
            done.add(action.stage)
            excess = self.left - (before - per_slot.pop((action.stage, action.slot)))
            memory.add("activations", -excess)
            self.left -= excess
            if sends_wait and action.stage < count - 1:
                memory.add("buffers", hidden)
            if action.stage > 0:
                memory.add("buffers", hidden)  # gradients of what was received stay until the next window
        memory.add("buffers", (K - played) * hidden * sum(stage > 0 for stage in stages))
        if sends_wait:
            outputs = hidden * sum(stage < count - 1 for stage in stages)
            memory.add("buffers", (K - played) * outputs)
            memory.add("buffers", -K * outputs)
        if self.fsdp is not None:
            for place in self.fsdp.groups:
                if place != ROOT:
                    self.fsdp.post_backward(place, sync=True)
            self.fsdp.post_backward(ROOT, sync=True)
            self.fsdp.finalize()

    def _states(self) -> int:
        """Parameters and moments, which are there all the time. Returns what lies on the host instead."""
        layout, memory = self.layout, self.memory
        config = layout.config
        offload = config.parallel.offload_states and layout.device == "cuda"
        numbers = padded = buffers = 0
        for place, parameters in self.parameters.items():
            ranks = layout.ranks_of(place) if layout.sharded else 1
            padded += sum(p.shard(ranks) for p in parameters)
            numbers += sum(p.shard(ranks) for p in parameters)
            if config.model.topk_method == "noaux_tc":
                buffers += sum(p.shape[0] * 4 for p in parameters if p.gate)
        moments = 2 * (2 if config.optimizer.moments == "bf16" else self.stored)
        memory.add("parameters", buffers)
        if offload:
            return padded * self.stored + numbers * (self.stored + moments)
        memory.add("parameters", padded * self.stored)
        memory.add("optimizer", numbers * moments)
        return 0

    def _data(self) -> int:
        """Tokens of the window, and the ledger's statistics."""
        config, layout = self.layout.config, self.layout
        model = config.model
        K, tokens = layout.slots, layout.rows * config.data.seq_len
        routers = sum(model.is_moe_layer(i) for i in range(model.num_hidden_layers)) + model.num_nextn_predict_layers
        width = model.n_routed_experts + (model.n_group if config.balance.alpha_communication else 0)
        stat = torch.promote_types(layout.dtypes[1], torch.float32).itemsize
        ledger = routers * (model.n_routed_experts * (8 + 2 * stat) + width * 8 + 2 * stat)
        return K * (tokens * 8 * (3 if config.data.document_mask else 2) + ledger)

    def _step(self) -> None:
        """The optimizer's own moment: with moments in bf16 one parameter's are in fp32."""
        layout = self.layout
        if layout.config.optimizer.moments == "bf16" and not (
            layout.config.parallel.offload_states and layout.device == "cuda"
        ):
            sizes = []
            for place, parameters in self.parameters.items():
                ranks = layout.ranks_of(place) if layout.sharded else 1
                sizes += [p.shard(ranks) for p in parameters]
            pairs = zip([0, *sizes], sizes, strict=False)  # the one before is let go when the next is there
            self.memory.bump("optimizer", max(2 * self.stored * (a + b) for a, b in pairs))


def order(layout: Layout, rank: int, slots: int) -> list[Action]:
    """What pipeline rank ``rank`` computes, in order, from torch's own schedules."""
    p = layout.config.parallel
    if p.schedule == "gpipe":
        both: Sequence[str] = "FB"
        return [Action(what, rank, slot) for what in both for slot in range(slots)]
    if p.schedule == "1f1b":
        warm = min(slots, p.pp - rank)
        actions = [Action("F", rank, slot) for slot in range(warm)]
        for slot in range(slots):
            actions.append(Action("B", rank, slot))
            if warm + slot < slots:
                actions.append(Action("F", rank, warm + slot))
        return actions
    assert p.schedule not in SINGLE
    stages: list[Any] = [_Stage(number, p.stages, p.pp, rank) for number in layout.stages(rank)]
    schedule = SCHEDULES[p.schedule](stages, slots, loss_fn=lambda *_: None)
    actions = []
    for action in schedule.pipeline_order[rank]:
        actions += _flat(action)
    return actions


def _flat(action: _Action | None) -> list[Action]:
    if action is None:
        return []
    if action.sub_actions is not None:
        return [each for sub in action.sub_actions for each in _flat(sub)]
    kinds = {
        _ComputationType.FORWARD: "F",
        _ComputationType.FULL_BACKWARD: "B",
        _ComputationType.BACKWARD_INPUT: "I",
        _ComputationType.BACKWARD_WEIGHT: "W",
    }
    what = kinds.get(action.computation_type)
    return [] if what is None else [Action(what, action.stage_index, action.microbatch_index or 0)]


class _Stage:
    """What torch's schedules ask of a stage before they run."""

    is_first = is_last = has_backward = False

    def __init__(self, number: int, count: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = number, count, ranks, rank
        self.is_first, self.is_last = number == 0, number == count - 1
        self.group = None
        self.submod = None


def rank_memory(layout: Layout, rank: int = 0) -> RankMemory:
    """Of pipeline rank ``rank`` (its first data rank, which holds the largest shards)."""
    if layout.config.engine == "deepspeed":
        return _deepspeed(layout, rank)
    return _Window(layout, rank).run()


def _deepspeed(layout: Layout, rank: int) -> RankMemory:
    """States as ZeRO's stage shards them, and what passes as a window that reduces in every micro-batch has it.

    Below stage 3 nothing is gathered, and gradients wait whole (1) or this rank's part of them does, in fp32 with that
    of the last micro-batch beside it (2). Stage 3 gathers, and keeps what is used again within a billion numbers.
    """
    config, world = layout.config, layout.world
    zero = config.deepspeed
    states = rank_states(config, world)
    parallel = config.parallel.model_copy(update={"reduce": "micro_batch", "offload_states": False})
    order = "counting_pass" if config.counts_first else config.balance.window_order
    balance = config.balance.model_copy(update={"window_order": order})
    native = config.model_copy(update={"engine": "native", "parallel": parallel, "balance": balance})
    window = _Window(replace(layout, config=native), rank)
    numbers = sum(p.numel for ps in window.parameters.values() for p in ps)
    width = layout.dtypes[1].itemsize
    if zero.zero_stage < 3:
        window.fsdp = None
    passing = window.passing()
    by = {"states": states.device, "activations": passing["activations"], "data": passing["data"]}
    if zero.zero_stage == 2 and width == 4:
        by["gradients"] = numbers // world * width
    elif zero.zero_stage == 3 and world > 1:
        gathered = passing.get("gathered", 0) // width
        by["gathered"] = width * min(numbers, gathered + (0 if zero.offload_parameters == "nvme" else LIVE))
    # what is reduced in one call, twice where reductions overlap; half precision is sent in fp32
    each = 4 if width == 4 else width + 4
    by["buffers"] = min(zero.bucket, numbers) * each * (2 if layout.device == "cuda" and zero.zero_stage > 1 else 1)
    return RankMemory(rank, sum(by.values()), {k: v for k, v in by.items() if v}, states.host, states.drive)


#: numbers that ZeRO 3 leaves gathered when they are used again soon (stage3_max_live_parameters, its default)
LIVE = 1_000_000_000
