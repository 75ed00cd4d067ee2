"""Which rank waited for whom, in which layer: what a broken or hanging collective leaves behind, in a sentence.

torch says that something timed out, or that a peer closed a connection, not where the model was. The stack knows: the
collective is its innermost function of torch.distributed, and the layer is the nearest module (or FSDP2's group) above.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from moetrain.errors import LostRankError

GRACE = 5.0  # longer than a rank waits before it speaks (moetrain.__main__)
#: what torch and gloo say when ranks lose each other
LOST = re.compile(r"tim(ed|e) ?out|connection (closed|reset|refused)|broken pipe|peer|gloo|nccl", re.IGNORECASE)
WRAPPERS = {"wrapper", "wait", "_batch_p2p", "inner", "decorate_context"}
BETTER_KNOWN_AS = {"_wait_batch_p2p": "batch_isend_irecv"}  # of pipeline stages


class Watch:
    """Says on stderr where this rank has been for long, before torch ends it; NCCL ends it without an exception.

    A context manager around a run; an error that ranks who lost each other cause leaves it as a ``LostRankError`` that
    says where this rank waited. Where another rank has said that it ended, and this one still waits for it ``GRACE``
    seconds later (no signal reaches Python there), it ends the process.

    Args:
        rank: this process.
        seconds: how long no step may take.
        ended: which rank has ended and why; empty while all are there.

    Attributes:
        model: its modules' names are places; None before it is there.
    """

    def __init__(self, rank: int, seconds: float, ended: Callable[[], str] = str) -> None:
        self.rank, self.seconds, self.ended = rank, seconds, ended
        self.model: nn.Module | None = None
        self._beat, self._step, self._said = math.inf, 0, False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end.set()
        self._thread.join(GRACE)  # a thread that still runs when Python ends may abort the process
        if error is None or not lost(error):
            return
        if because := self.ended():
            raise LostRankError(f"rank {self.rank} ends, since {because}") from error
        said = str(_chain(error)[-1]).strip().splitlines()
        raise LostRankError(
            f"rank {self.rank} lost another one during {where(error, self.model)}, after step {self._step} "
            f"({said[-1] if said else type(error).__name__}); "
            "started again, the run goes on from its last checkpoint"
        ) from error

    def beat(self, step: int) -> None:
        """The run is between two windows, and all is well."""
        self._beat, self._step, self._said = time.monotonic(), step, False

    def _look(self) -> None:
        while not self._end.wait(min(1.0, self.seconds / 10)):
            if because := self.ended():
                if not self._end.wait(GRACE):
                    _say(f"rank {self.rank} ends, since {because}")
                    os._exit(1)
                return
            if not self._said and time.monotonic() - self._beat > self.seconds:
                self._said = True
                _say(
                    f"rank {self.rank} has been in {where_now(self.model)} for long: {self.seconds:.0f} s "
                    f"since step {self._step}"
                )


def _say(sentence: str) -> None:
    print(f"moetrain: {sentence}", file=sys.stderr, flush=True)


def lost(error: BaseException) -> bool:
    """Whether an error is one of communication."""
    return any(isinstance(e, RuntimeError) and LOST.search(str(e)) for e in _chain(error))


def where(error: BaseException, model: nn.Module | None) -> str:
    """``all_to_all_single in layers.3.mlp``, from an error's stack."""
    frames = [frame for e in _chain(error) for frame in _frames(e.__traceback__)]
    return _describe(frames[::-1], model)


def where_now(model: nn.Module | None) -> str:
    """The same of the main thread as it is, for another thread that watches it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _describe(frames, model)


def _chain(error: BaseException) -> list[BaseException]:
    """From what was raised last to what it came from."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    return chain


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _describe(inner_first: list[FrameType], model: nn.Module | None) -> str:
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    collective = layer = ""
    for frame in inner_first:
        package = str(frame.f_globals.get("__name__", ""))
        function = frame.f_code.co_name
        if not collective and package.startswith("torch.distributed") and function not in WRAPPERS:
            collective = BETTER_KNOWN_AS.get(function, function)
        if layer:
            continue
        if function == "_perform_action":  # torch's pipeline runtime: "2F5" is stage 2's forward of micro-batch 5
            layer = f"pipeline action {frame.f_locals.get('action')}"
            continue
        owner: Any = frame.f_locals.get("self", frame.f_locals.get("ctx"))
        if isinstance(owner, nn.Module):
            layer = names.get(id(owner), "")
        elif hasattr(owner, "_module_fqn"):  # FSDP2's group of parameters
            layer = str(owner._module_fqn or "the root")
        elif isinstance(getattr(owner, "layer", None), str):  # a dispatcher's, which waits outside of Python
            layer = owner.layer
            collective = collective or getattr(owner, "collective", "")
    return f"{collective or 'a collective'} in {layer or 'no layer (between micro-batches)'}"
