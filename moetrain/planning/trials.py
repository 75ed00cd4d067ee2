"""Trials of ``tune``: processes that take a few real steps, and what became of them, memory that ran out included.

A trial is as many processes as the run has, started as torchrun starts them: each finds the others through a store that
the starter keeps, at a port that the system gives it. The first that ends with an error ends all; nothing is left
running, also when the starter itself is killed (their standard input ends with it).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from moetrain.errors import UserError

#: what is said where memory has run out: by torch on CUDA and on a CPU, by Python, by C++, by the system (no thread or
#: mapping more), by CUDA's libraries
_SHORTAGE = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|not enough memory|MemoryError|bad_?alloc|"
    r"Cannot allocate memory|can't start new thread|Thread creation failed|_ALLOC_FAILED",
    re.IGNORECASE,
)
#: seconds in which the other ranks of one that ended may still say why they do
GRACE = 3.0
_FROM_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def shortage(text: str) -> str:
    """The line of ``text`` that says that memory ran out, shortened; empty where none does."""
    for line in text.splitlines():
        if _SHORTAGE.search(line):
            line = re.sub(r"^.*?\[enforce fail at [^\]]*\] *(err == 0\.)? *", "", line.strip())
            asked = re.search(r"tried to allocate ([\d.]+ \w+)", line, re.IGNORECASE)
            return f"out of memory, asking for {_larger(asked[1])}" if asked else f"out of memory: {line[:120]}"
    return ""


def _larger(size: str) -> str:
    number, _, unit = size.partition(" ")
    return f"{int(number) / 2**20:,.1f} MiB" if unit == "bytes" else size


@dataclass(frozen=True)
class Measured:
    """What the ranks of a trial needed, each number the largest of them.

    Attributes:
        peak: bytes of tensors (CUDA: allocated by torch) at the worst moment.
        held: bytes that the process had resident at most (CUDA: that torch had reserved).
        counted: bytes that count towards ``have``.
        have: bytes that the process may have; 0 where nobody says.
        seconds: median of a step, for each length of window.
    """

    peak: int
    held: int
    counted: int
    have: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Runner:
    """Starts trials of ``config`` on ``processes`` of this machine.

    Attributes:
        limit: bytes of each process, None: what there is.
        timeout: seconds without progress after which a trial is ended.
        steps: that are timed for each length of window.
    """

    config: Path
    processes: int
    on_gpu: bool
    limit: int | None
    timeout: float
    steps: int

    def run(self, overrides: Sequence[str], windows: Sequence[int], reached: Callable[[str], None]) -> Measured | str:
        """What was measured, or why it does not fit.

        Args:
            overrides: of the config, for this trial.
            windows: lengths in micro-batches, the longest first.
            reached: told how far the trial is.

        Raises:
            UserError: it ended for another reason than memory or time.
        """
        with tempfile.TemporaryDirectory(prefix="moetrain-tune-") as folder:
            store = None
            if self.processes > 1:  # the system gives the port, so that no two can meet at it
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks: list[_Rank] = []
            try:
                for rank in range(self.processes):
                    command = self._command(folder, overrides, windows)
                    ranks.append(_Rank(command, self._environment(rank, store), Path(folder), rank))
                hung = self._wait(ranks, reached)
            finally:
                for each in ranks:
                    each.kill()
            if hung:
                return f"no progress for {self.timeout:.0f} s ({hung})"
            return _outcome(ranks)

    def _command(self, folder: str, overrides: Sequence[str], windows: Sequence[int]) -> list[str]:
        command = [sys.executable, "-m", "moetrain.trial", folder, "--config", str(self.config)]
        command += ["--windows", *map(str, windows), "--steps", str(self.steps)]
        if self.limit is not None:
            command += ["--gpu-limit" if self.on_gpu else "--host-limit", str(self.limit)]
        return [*command, "--overrides", *overrides]

    def _environment(self, rank: int, store: Any) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key not in _FROM_TORCHRUN}
        if store is None:
            return environment
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        return environment | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _wait(self, ranks: Sequence[_Rank], reached: Callable[[str], None]) -> str:
        """Until all have ended, or one has with an error and ``GRACE`` is over; where it was if that never comes."""
        sizes, at = [0] * len(ranks), "the start"
        moved = time.monotonic()
        end = float("inf")
        while any(each.process.poll() is None for each in ranks):
            now = time.monotonic()
            found = [each.written() for each in ranks]
            if found != sizes:
                sizes, moved = found, now
                at = ranks[0].lines[-1].get("reached", at) if ranks[0].lines else at
                reached(at)
            if end == float("inf") and any(each.process.poll() for each in ranks):
                end = now + GRACE
            if now > end:
                return ""
            if now - moved > self.timeout:
                return f"after {at}"
            time.sleep(0.05)
        return ""


class _Rank:
    """A process of a trial, in a session of its own: Ctrl-C reaches the starter alone."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path, rank: int) -> None:
        self.rank, self.killed = rank, False
        self._said, self._complained = folder / f"rank.{rank}", folder / f"stderr.{rank}"
        with self._complained.open("wb") as complaints:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                start_new_session=True,
            )

    def written(self) -> int:
        return self._said.stat().st_size if self._said.exists() else 0

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it said; the last line may be cut off."""
        if not self._said.exists():
            return []
        return [json.loads(line) for line in self._said.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def complaints(self) -> str:
        return self._complained.read_bytes()[-20_000:].decode(errors="replace")

    def kill(self) -> None:
        """It and what it started."""
        if self.process.poll() is None:
            self.killed = True
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _outcome(ranks: Sequence[_Rank]) -> Measured | str:
    """Memory that ran out on one rank is the reason, whatever the others say who then lost it."""
    said: list[dict[str, Any]] = [{key: x for line in each.lines for key, x in line.items()} for each in ranks]
    which = "rank {}: " if len(ranks) > 1 else ""
    for each, lines in zip(ranks, said, strict=True):
        code = each.process.returncode
        where = which.format(each.rank)
        if lines.get("error", {}).get("kind") == "memory":
            return where + str(lines["error"]["text"])
        if code == -signal.SIGKILL and not each.killed:
            return f"{where}killed by the system (SIGKILL), which ends processes when memory is short"
        if code and "error" not in lines and (short := shortage(each.complaints)):
            return where + short
    errors = [lines["error"] for lines in said if "error" in lines]
    errors.sort(key=lambda error: ("user", "fault", "lost").index(error["kind"]))
    if errors:
        text = errors[0]["text"]
        raise UserError(text if errors[0]["kind"] == "user" else f"a trial ended with an error of its own: {text}")
    for each, lines in zip(ranks, said, strict=True):
        if "measured" not in lines:
            last = (each.complaints.strip().splitlines() or ["without a word"])[-1]
            raise UserError(
                f"a trial's process ended with code {each.process.returncode}, and not for memory: {last[:200]}"
            )
    measured = [lines["measured"] for lines in said]
    return Measured(
        **{key: max(int(each[key]) for each in measured) for key in ("peak", "held", "counted", "have")},
        seconds=tuple(map(max, zip(*(each["seconds"] for each in measured), strict=True))),
    )
