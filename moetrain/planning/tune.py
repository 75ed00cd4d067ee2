"""``tune``: the largest micro-batch that survives on this machine, and the fastest way to cut the same global batch.

Each trial is real processes that take real steps (``moetrain.planning.trials``). The first has one sequence; what it
needed, and how much more the plan's formula says that others need, says where to look next. From there sizes double
until one does not fit, and halve the gap. The plan only saves trials: what is proposed has been run.

Of all sizes only those are of interest that are the smallest for their number of micro-batches: with 8 sequences a rank
6, 6 and 4 do the work of 4 and 4, and need more.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from moetrain.config import RunConfig, load_config
from moetrain.config.load import to_yaml
from moetrain.errors import UserError
from moetrain.planning.fit import host_memory
from moetrain.planning.hardware import GIB
from moetrain.planning.layout import Layout
from moetrain.planning.memory import rank_memory
from moetrain.planning.plan import IMBALANCE
from moetrain.planning.trials import Measured, Runner

RECOMPUTES = ("none", "selective", "full")
#: micro-batches of a trial's window, where more need no more memory; time is then measured with half as many, too
LONG = 8
#: speeds that differ by less are taken for equal: three steps tell no more
TIE = 0.02


def sizes_of(share: int) -> list[int]:
    """For ``share`` sequences a rank: of each number of micro-batches the smallest size, growing."""
    return sorted({-(-share // number) for number in range(1, share + 1)})


def largest(sizes: Sequence[int], fits: Callable[[int], bool], start: int = 0) -> int:
    """Index of the largest of growing ``sizes`` that fits, -1 where none does.

    Looks at ``sizes[start]`` first and at its neighbour next, doubles or halves from there, then halves the gap.
    """
    low, high, at, far = -1, len(sizes), start, False
    while True:
        if fits(sizes[at]):
            low = at
        else:
            high = at
        if high - low == 1:
            return low
        if high == len(sizes):
            doubled = (i for i, size in enumerate(sizes) if size >= 2 * sizes[low])
            at = next(doubled, high - 1) if far else low + 1
        elif low == -1:
            at = max((i for i, size in enumerate(sizes) if 2 * size <= sizes[high]), default=0) if far else high - 1
        else:
            at = (low + high) // 2
        far = True


@dataclass(frozen=True)
class Trial:
    """``outcome``: what was measured, or why it does not fit; ``tokens`` a second of all ranks."""

    size: int
    recompute: str
    slots: int
    equal: bool
    outcome: Measured | str
    tokens: float = 0.0

    @property
    def fits(self) -> bool:
        return isinstance(self.outcome, Measured)

    @property
    def keys(self) -> list[str]:
        return _keys(self.size, self.recompute)


def _keys(size: int, recompute: str) -> list[str]:
    return [f"batch.micro_batch={size}", f"parallel.recompute={recompute}"]


def best(trials: Sequence[Trial]) -> Trial | None:
    """The fastest that fits; of equals micro-batches of equal length, then less memory."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        return None
    fastest = max(trial.tokens for trial in fitting)
    equals = [trial for trial in fitting if trial.tokens >= (1 - TIE) * fastest]
    return min(equals, key=lambda trial: (not trial.equal, trial.outcome.held))  # type: ignore[union-attr]


class Tuner:
    """Runs trials of one config and remembers them.

    Args:
        path, overrides: the config.
        processes: ranks of the run, all on this machine.
        limit: bytes of each process; None: a GPU's memory, or an equal share of the host memory that is free.
        recomputes: which to try.
        timeout: seconds without progress that end a trial; default: a little less than collectives wait for a rank.
        steps: timed ones of each trial.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        *,
        processes: int | None = None,
        limit: int | None = None,
        recomputes: Sequence[str] = RECOMPUTES,
        timeout: float | None = None,
        steps: int = 3,
        console: Console | None = None,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("tune starts the run's processes itself: start it without torchrun, with --processes")
        self.path, self.overrides = path, list(overrides)
        self.config = config = load_config(path, overrides)
        self.on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        gpus = torch.cuda.device_count() if self.on_gpu else 0
        self.processes = processes or config.parallel.world_size or max(1, gpus)
        if limit is None and not self.on_gpu:
            limit = host_memory() // self.processes
        self.limit = limit
        self.layout = Layout(config, self.processes, "cuda" if self.on_gpu else "cpu")
        self.share = -(-config.batch.global_batch // self.layout.data_world)
        self.sizes = sizes_of(self.share)
        self.recomputes = list(recomputes)
        self.trials: list[Trial] = []
        patience = timeout or 0.8 * config.parallel.timeout_s
        self.runner = Runner(path, self.processes, self.on_gpu, limit, patience, steps)
        self.out = console or Console(highlight=False)
        if not self.out.is_terminal:
            self.out.width = 120  # a file has room for the table
        self._planned: dict[tuple[int, str], int | None] = {}

    def say(self, line: str) -> None:
        self.out.print(line, markup=False, soft_wrap=True)

    def run(self) -> None:
        """All that has to be tried. May be interrupted: ``trials`` holds what has ended."""
        reached = 0
        for recompute in self.recomputes:
            try:
                self._config(1, recompute)
            except UserError as error:
                self.say(f"recompute={recompute} is left out: {error}")
                continue

            def fits(size: int, recompute: str = recompute) -> bool:
                return self.trial(size, recompute).fits

            known = self._fitting()
            if known is None and not fits(1):  # the least there is, whatever the plan says
                continue
            start = max(reached, self._expected(recompute))
            found = largest(self.sizes, fits, start)
            if found < 0:
                continue
            self._smaller(found, recompute)
            reached = max(reached, found)
            if found == len(self.sizes) - 1:
                self.say(f"recompute={recompute} takes all {self.share} sequences of a rank at once")
                break  # more recompute could only be slower

    def trial(self, size: int, recompute: str) -> Trial:
        for each in self.trials:
            if (each.size, each.recompute) == (size, recompute):
                return each
        name = f"trial {len(self.trials) + 1}: micro_batch={size} recompute={recompute}"
        config = self._config(size, recompute)
        slots = -(-self.share // size)
        windows = self._windows(config, slots)
        with self.out.status(name) if self.out.is_terminal else nullcontext() as status:

            def reached(what: str) -> None:
                if status is not None:
                    status.update(f"{name}: {what}")

            outcome = self.runner.run([*self.overrides, *_keys(size, recompute)], windows, reached)
        tokens = 0.0
        if isinstance(outcome, Measured):
            whole = config.batch.global_batch * config.data.seq_len
            tokens = whole / seconds_of(slots, windows, outcome.seconds)
        done = Trial(size, recompute, slots, self.share % size == 0, outcome, tokens)
        self.trials.append(done)
        self.say(f"{name}: {self._words(done)}")
        return done

    def _words(self, trial: Trial) -> str:
        if isinstance(trial.outcome, str):
            return f"does not fit, {trial.outcome}"
        peak, held = _size(trial.outcome.peak), _size(trial.outcome.held)
        what = f"{peak} allocated, {held} reserved" if self.on_gpu else f"{peak} of tensors, {held} resident"
        return f"{what}, {trial.tokens:,.0f} tokens/s"

    def _config(self, size: int, recompute: str) -> RunConfig:
        return load_config(self.path, [*self.overrides, *_keys(size, recompute)])

    def _windows(self, config: RunConfig, slots: int) -> list[int]:
        """Lengths of the trial's windows: the whole one where memory grows with it or it is short."""
        if self.layout.forwards_first:
            return [slots]
        most = max(LONG, 2 * config.parallel.stages)
        return [slots] if slots <= most else [most, most // 2]

    def _fitting(self) -> Trial | None:
        """The largest trial that fit."""
        return max((each for each in self.trials if each.fits), key=lambda each: each.size, default=None)

    def _expected(self, recompute: str) -> int:
        """Index of the largest size that should fit, by what the last trial needed and the plan's differences."""
        known = self._fitting()
        if known is None or isinstance(known.outcome, str) or not known.outcome.have:
            return 0
        before = self._plan(known.size, known.recompute)
        room = known.outcome.have - known.outcome.counted
        found = 0
        for i, size in enumerate(self.sizes):
            needs = self._plan(size, recompute)
            if before is None or needs is None or needs - before > room:
                break
            found = i
        return found

    def _plan(self, size: int, recompute: str) -> int | None:
        """Bytes of the fullest rank; None where there is no plan of such a layout."""
        if (size, recompute) not in self._planned:
            config = self._config(size, recompute)
            imbalance = IMBALANCE if config.parallel.ep > 1 else 1.0
            layout = Layout(config, self.processes, self.layout.device, imbalance)
            peak = None
            if not layout.split:
                with suppress(UserError):
                    peak = max(rank_memory(layout, rank).peak for rank in range(config.parallel.pp))
            self._planned[size, recompute] = peak
        return self._planned[size, recompute]

    def _smaller(self, index: int, recompute: str) -> None:
        """Half the size, and half of that, as long as that is faster: large is not always fast."""
        fastest = self.trial(self.sizes[index], recompute)
        while fastest.size > 1:
            smaller = self.trial(max(size for size in self.sizes if 2 * size <= fastest.size + 1), recompute)
            if not smaller.fits or smaller.tokens <= (1 + TIE) * fastest.tokens:
                return
            fastest = smaller


def seconds_of(slots: int, windows: Sequence[int], seconds: Sequence[float]) -> float:
    """Of a step of ``slots`` micro-batches: measured, or on the line through windows of two lengths.

    What a step takes apart from its micro-batches (reduction, optimizer, a pipeline's filling) is the line's start.
    """
    if len(windows) == 1:
        return seconds[0]
    long, short = windows
    each = (seconds[0] - seconds[1]) / (long - short)
    if not 0 < each * long <= seconds[0]:  # noise
        each = seconds[0] / long
    return seconds[0] + each * (slots - long)


def tune(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    processes: int | None = None,
    limit: int | None = None,
    recomputes: Sequence[str] = RECOMPUTES,
    timeout: float | None = None,
    steps: int = 3,
    out: Path = Path("tuned.yaml"),
    console: Console | None = None,
) -> Trial:
    """Tries, prints, writes the config with what is proposed to ``out`` and returns that; see ``Tuner``.

    Raises:
        UserError: nothing fits, or a trial fails for another reason than memory or time.
        KeyboardInterrupt: interrupted (SIGTERM, too); what is the best so far has been printed and written.
    """
    tuner = Tuner(
        path,
        overrides,
        processes=processes,
        limit=limit,
        recomputes=recomputes,
        timeout=timeout,
        steps=steps,
        console=console,
    )
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out} cannot be written; give another place")
    config, ranks = tuner.config, tuner.processes
    room = "all of each GPU" if tuner.limit is None else f"{_size(tuner.limit)} for each process"
    tuner.say(
        f"{path}: {config.batch.global_batch} sequences of {config.data.seq_len} tokens on {ranks} "
        f"process{'es' if ranks > 1 else ''}, {room}"
    )
    with _terminated_as_interrupted():
        try:
            tuner.run()
        except KeyboardInterrupt:
            _finish(tuner, out)
            raise
    proposed = _finish(tuner, out)
    if proposed is None:
        why = tuner.trials[-1].outcome if tuner.trials else "no kind of recompute goes with this config"
        raise UserError(
            f"{path} does not fit here, not even with batch.micro_batch=1 ({why}); give it more memory or ranks: "
            f"`python -m moetrain plan --config {path} --gpus 8xH200` says what it needs"
        )
    return proposed


def _finish(tuner: Tuner, out: Path) -> Trial | None:
    """Table, proposal and file."""
    proposed = best(tuner.trials)
    if tuner.trials:
        tuner.out.print(_table(tuner, proposed))
    if proposed is None:
        return None
    config = load_config(tuner.path, [*tuner.overrides, *proposed.keys])
    ranks = tuner.processes
    start = "python -m moetrain" if ranks == 1 else f"torchrun --nproc_per_node {ranks} -m moetrain"
    words = (
        f"micro_batch={proposed.size}, {proposed.slots} micro-batch{'es' if proposed.slots > 1 else ''} in the window "
        f"of each data rank, recompute={proposed.recompute}: {proposed.tokens:,.0f} tokens/s"
    )
    most = max((trial for trial in tuner.trials if trial.fits), key=lambda trial: trial.size)
    given = shlex.join([*tuner.overrides, *proposed.keys])
    comment = f"Written by `moetrain tune` from {tuner.path} on {ranks} process{'es' if ranks > 1 else ''}:\n{words}"
    try:
        out.write_text(to_yaml(config, comment), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); {words}") from None
    tuner.say(f"the largest that was seen to fit: micro_batch={most.size} with recompute={most.recompute}")
    tuner.say(f"proposed: {words}")
    tuner.say(f"  {start} --config {shlex.quote(str(tuner.path))} {given}")
    tuner.say(f"  {start} --config {shlex.quote(str(out))}")
    return proposed


def _table(tuner: Tuner, proposed: Trial | None) -> Table:
    table = Table(box=box.SIMPLE)
    sizes = ("allocated", "reserved") if tuner.on_gpu else ("tensors", "resident")
    for name in ("recompute", "micro-batch", "micro-batches", *sizes, "tokens/s"):
        table.add_column(name, justify="left" if name == "recompute" else "right")
    table.add_column("")
    order = {recompute: i for i, recompute in enumerate(tuner.recomputes)}
    for trial in sorted(tuner.trials, key=lambda trial: (order[trial.recompute], trial.size)):
        start = [trial.recompute, str(trial.size), str(trial.slots)]
        if isinstance(trial.outcome, Measured):
            numbers = [_size(trial.outcome.peak), _size(trial.outcome.held), f"{trial.tokens:,.0f}"]
            table.add_row(*start, *numbers, "proposed" if trial is proposed else "")
        else:
            table.add_row(*start, "", "", "", "does not fit")
    return table


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"
