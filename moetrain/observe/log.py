"""The run's log: one record a step, to every sink there is.

Only rank 0 writes. A log must never end a run: a full disk or a closed terminal costs the record, and is said once.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from moetrain.errors import UserError

Value = float | int | str | bool


class RunLog:
    """Sinks of one run; a context manager.

    Args:
        run_dir: where ``metrics.jsonl`` and TensorBoard's files go.
        rank: every rank but 0 is silent.
        total_steps: for the bar and the time that is left.
        console: show progress at all.
        tensorboard: write TensorBoard files where the package is installed.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, total_steps: int, console: bool = True, tensorboard: bool = True
    ) -> None:
        self.run_dir, self.total = run_dir, total_steps
        self.speaks, self._shown = rank == 0, console and rank == 0
        self._wants_tensorboard = tensorboard and self.speaks
        self._file: TextIO | None = None
        self._board: Any = None
        self._bar: Progress | None = None
        self._warned = False
        self._clock = _Clock()

    def __enter__(self) -> RunLog:
        if self.speaks:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                self._file = self.metrics.open("a", encoding="utf-8")
            except OSError as error:
                raise UserError(f"run_dir {self.run_dir} cannot be written ({error.strerror}); give another") from error
            if self._wants_tensorboard:
                self._board = _tensorboard(self.run_dir)
        if self._shown and sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=Console())
            self._bar.add_task("train", total=self.total, text="")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def metrics(self) -> Path:
        """One JSON object a line: step, time and numbers; a number that is not finite is null."""
        return self.run_dir / "metrics.jsonl"

    def resume_at(self, step: int) -> None:
        """Drops records of steps after ``step``, which will be taken again."""
        if self._file is None:
            return
        try:
            text = self.metrics.read_text(encoding="utf-8")
            kept = "".join(line + "\n" for line in text.splitlines() if _step_of(line) <= step)
            if kept != text:
                # beside it first: a disk that is full must not cost the records there are
                beside = self.metrics.with_suffix(".part")
                beside.write_text(kept, encoding="utf-8")
                self._file.close()
                beside.replace(self.metrics)
                self._file = self.metrics.open("a", encoding="utf-8")
        except OSError as error:
            self._warn(error)

    def start(self, facts: Mapping[str, str], *, step: int = 0, tokens: int = 0) -> None:
        """What the run is, before its first step (or the next after ``step``, ``tokens``); starts the clock."""
        for name, text in facts.items():
            self._print(f"{name:>8}  {text}")
        self._clock = _Clock(step, tokens)

    def step(self, record: Mapping[str, Value], *, mfu_per_rate: float | None = None) -> dict[str, Value]:
        """Logs a training record (``step``, ``tokens``, ``loss``, ...); returns it with the speed added.

        ``mfu_per_rate`` times tokens a second is the model-FLOPs utilisation, where the device's peak is known.
        """
        seconds, tokens_per_second = self._clock.lap(int(record["step"]), int(record["tokens"]))
        full = {**record, "tokens_per_s": tokens_per_second, "step_s": seconds}
        if mfu_per_rate is not None:
            full["mfu"] = mfu_per_rate * tokens_per_second
        self._write("train", full)
        left = self._clock.left(self.total)
        text = (
            f"loss {_number(full.get('loss'), '.4f')}  lr {_number(full.get('lr'), '.2e')}  "
            f"|g| {_number(full.get('grad_norm'), '.2f')}  {tokens_per_second:,.0f} tok/s"
        )
        if "mfu" in full:
            text += f"  MFU {100 * float(full['mfu']):.1f} %"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=int(record["step"]), text=f"{text}  eta {left}")
        else:
            self._print(f"step {record['step']}/{self.total}  {text}  eta {left}")
        return full

    def evaluation(self, record: Mapping[str, Value]) -> None:
        """Logs an evaluation record (``step``, ``eval_loss``, ``perplexity``, ...). Its time is nobody's speed."""
        self._write("eval", record)
        self._print(
            f"step {record['step']}/{self.total}  held out: loss {_number(record.get('eval_loss'), '.4f')}  "
            f"perplexity {_number(record.get('perplexity'), '.2f')}"
        )
        self._clock.pause()

    def note(self, text: str) -> None:
        """A sentence for the person watching."""
        self._print(text)
        self._clock.pause()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for sink in (self._file, self._board):
            try:
                if sink is not None:
                    sink.close()
            except OSError as error:  # what a full disk refused is tried once more here
                self._warn(error)
        self._file = self._board = None

    # -- sinks --------------------------------------------------------------------------------------------------------

    def _write(self, kind: str, record: Mapping[str, Value]) -> None:
        if self._file is None:
            return
        clean = {key: _finite(value) for key, value in record.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **clean}) + "\n")
            self._file.flush()
            if self._board is not None:
                for key, value in clean.items():
                    if isinstance(value, (int, float)) and key != "step":
                        self._board.add_scalar(f"{kind}/{key}", value, int(record["step"]))
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._print(f"warning: {self.metrics} cannot be written ({error.strerror}); training goes on without")

    def _print(self, text: str) -> None:
        if not self._shown:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                print(text, flush=True)
        except OSError:  # the terminal is gone, the run is not
            self._shown = False


class _Clock:
    """Seconds spent on steps; pauses (evaluation, checkpoints, notes) are left out."""

    def __init__(self, step: int = 0, tokens: int = 0) -> None:
        self._mark = time.perf_counter()
        self._step, self._tokens = step, tokens
        self._laps = 0
        self._timed_steps, self._timed = 0, 0.0

    def lap(self, step: int, tokens: int) -> tuple[float, float]:
        """Seconds a step and tokens a second since the last lap."""
        now = time.perf_counter()
        seconds = max(now - self._mark, 1e-9)
        steps, done = step - self._step, tokens - self._tokens
        self._mark, self._step, self._tokens = now, step, tokens
        self._laps += 1
        if self._laps > 1:  # the first one warms caches up
            self._timed += seconds
            self._timed_steps += steps
        return seconds / max(steps, 1), done / seconds

    def pause(self) -> None:
        self._mark = time.perf_counter()

    def left(self, total: int) -> str:
        if not self._timed_steps:
            return "-"
        seconds = int((total - self._step) * self._timed / self._timed_steps)
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def _tensorboard(run_dir: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run_dir / "tensorboard"))


def _finite(value: Value) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """The step of a line; one that was cut off by a kill counts as later than any."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _number(value: Value | None, form: str) -> str:
    return "-" if value is None else format(float(value), form)
