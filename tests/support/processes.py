"""Several real processes on gloo, and what each of them returned."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 90) -> list[Any]:
    """Runs ``fn(rank, world, *args)`` in ``world`` processes with a gloo process group; returns every rank's result.

    Forked, since a fresh interpreter costs seconds of imports; results have to pickle. The first error ends all of them
    and is raised with its traceback; nothing is left running.
    """
    return _run(_with_group, fn, world, args, timeout)


def run_plain(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 90) -> list[Any]:
    """The same for a function that makes its own process group."""
    return _run(_call, fn, world, args, timeout)


def _run(
    main: Callable[..., Any], fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_guarded, args=(main, fn, rank, world, args, folder), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        waiting = {p.sentinel: p for p in processes}
        try:
            while waiting:
                done = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
                if not done:
                    raise TimeoutError(f"{len(waiting)} of {world} ranks still run after {timeout} s")
                for sentinel in done:
                    process = waiting.pop(sentinel)  # type: ignore[index]
                    process.join()
                    if process.exitcode:
                        raise RuntimeError(_first_failure(folder, processes.index(process), process.exitcode))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads(Path(folder, f"result.{rank}").read_bytes()) for rank in range(world)]


def _first_failure(folder: str, rank: int, exitcode: int) -> str:
    """The earliest traceback: other ranks fail after it, only since their peer is gone."""
    errors = sorted(Path(folder).glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return f"rank {rank} ended with exit code {exitcode}"
    return f"rank {errors[0].suffix[1:]} failed:\n{errors[0].read_text()}"


def _guarded(
    main: Callable[..., Any], fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: str
) -> None:
    try:
        torch.set_num_threads(1)
        Path(folder, f"result.{rank}").write_bytes(pickle.dumps(main(fn, rank, world, args, folder)))
    except BaseException:
        Path(folder, f"error.{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _with_group(fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: str) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    result = fn(rank, world, *args)
    dist.destroy_process_group()
    return result


def _call(fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: str) -> Any:
    return fn(rank, world, *args)
