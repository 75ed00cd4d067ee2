"""A run's state on disk: saved at window boundaries, whole or not at all, on any layout and back on any other.

Tensors go through torch's distributed checkpoint (DCP), which writes every shard once and reshards at load. Around it
stands what DCP does not promise: a checkpoint counts only with its manifest, which is written last and names every file
with size and checksum, and the folder gets its name only then. A kill at any moment leaves the last confirmed
checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from moetrain.checkpoint import tensors
from moetrain.checkpoint.runs import Run, RunLoadPlanner, RunSavePlanner
from moetrain.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
EXTRA = "extra.pt"
#: without these two there is nothing to load
NEEDED = (EXTRA, ".metadata")
#: keys of a saved config that a resumed run may not change: they make the tensors, and the order of the sequences
FIXED_KEYS = ("model", "seed")


class DamagedError(Exception):
    """A checkpoint that must not be used, and why."""


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: holds ``step_00000012`` and so on.
        keep: how many to keep.

    Every rank makes the same calls. Without a process group there is one rank.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self.keep = path, keep
        self._writing: _Writing | None = None
        self._group: dist.ProcessGroup | None = None  # what a thread talks over, beside the training's own

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Any],
        config: dict[str, Any],
        background: bool = False,
        confirmed: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the state after ``step``, and calls ``confirmed``: it is on disk, complete, with its manifest.

        In the ``background``, this returns when a copy of the state is in host memory; the next ``save``, or ``wait``,
        waits for the writer first, and raises what it met. Else it returns when all is done. Only when a checkpoint is
        confirmed, older ones go. Later ones are of a run that was given up (resumed from further back, or started
        afresh): they are renamed to ``step_….superseded``, which nobody loads or deletes.

        Args:
            step: number in the folder's name.
            model, optimizer: plain or sharded; buffers and the optimizer's moments are included.
            extra: nested dict of numbers, strings and tensors, the same on every rank.
            config: written into the manifest.
            background: write in a thread.
            confirmed: called on rank 0, in the background by the thread.

        Raises:
            UserError: the disk is full or not writable; the checkpoints before stay.
            TypeError: ``extra`` holds something that could not be loaded again.
        """
        self.wait()
        final = self._folder(step)
        partial = final.with_suffix(".partial")

        packed = b""  # stays on rank 0

        def prepare() -> None:
            nonlocal packed
            packed = _pack(extra)
            self._clean_up()
            partial.mkdir(parents=True)

        def confirm() -> None:
            (partial / EXTRA).write_bytes(packed)
            _write_manifest(partial, step, config)
            replaced = final.with_suffix(".replaced")
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            _sync(self.path)
            if replaced.exists():
                shutil.rmtree(replaced)
            for later in [s for s in self._steps() if s > step]:
                _set_aside(self._folder(later))
            # a damaged one is none of the kept: it would push out the last one that could be loaded
            whole = [s for s in self._steps() if self._is_whole(s)]
            for old in [s for s in whole if s not in whole[-self.keep :]]:
                shutil.rmtree(self._folder(old))

        def write(state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is fine
                planner, alone = RunSavePlanner(), not _distributed()
                # DCP keeps what goes into a file until its end: where values come from a drive, each has its own
                brought = any(isinstance(value, Run) and value.is_brought for value in state.values())
                writer = FileSystemWriter(partial, single_file_per_rank=not brought)
                dcp_save(state, storage_writer=writer, process_group=group, no_dist=alone, planner=planner)

        def confirm_and_say() -> None:
            confirm()
            confirmed()

        state = tensors.named_state(model, optimizer).read()
        with self._in_words():
            _on_first_rank(prepare)
            if not background:
                write(state)
                _on_first_rank(confirm_and_say)
                return
        if _distributed() and self._group is None:
            self._group = dist.new_group(backend="gloo")
        state, group = tensors.copied(state), self._group

        def work() -> None:
            write(state, group)
            if _rank() == 0:  # DCP returns here when every rank has written
                confirm_and_say()

        self._writing = _Writing(work)

    def wait(self) -> None:
        """Until what is being written in the background is confirmed; raises what ``save`` would have raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            error = writing.join()
            with self._in_words():
                _on_first_rank(lambda: _raise(error))
                _raise(error)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            reason = _not_written(_cause(error))
            if reason is None:
                raise
            raise UserError(
                f"the checkpoint could not be written to {self.path} ({reason}); make room or give another "
                "run_dir; checkpoints before it are whole"
            ) from error

    def latest(self) -> int | None:
        """Step of the newest checkpoint that has a manifest and all its files in full size."""
        for step in reversed(self._steps()):
            try:
                _manifest(self._folder(step), checksums=False)
            except DamagedError:
                continue
            return step
        return None

    def found(self) -> bool:
        """Whether there is a checkpoint, so that ``load_latest`` fills everything or raises; every rank asks."""

        def look() -> bool:
            self._restore()
            return bool(self._steps())

        return bool(self._asked(look))

    def load_latest(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any] | None = None,
        warn: Callable[[str], None] = print,
    ) -> dict[str, Any] | None:
        """Loads the newest whole checkpoint into model and optimizer, in whatever layout they are now.

        Args:
            model, optimizer: filled in place.
            config: the run's; checked against the saved one where it makes the tensors, and the order of the data.
            warn: told of damaged checkpoints that are passed over, and of data that is not the saved run's.

        Returns:
            the saved ``extra``, or None where there is no checkpoint.

        Raises:
            UserError: all checkpoints are damaged, or the newest is of another model.
        """
        step: int | None = self._asked(lambda: self._newest_whole(warn))
        if step is None:
            return None
        folder = self._folder(step)
        if config is not None:
            before = _manifest(folder, checksums=False)["config"]
            _compare(folder, before, config)
            for sentence in _other_data(folder, before, config):
                warn(sentence)
        saved = FileSystemReader(folder).read_metadata()
        named = tensors.named_state(model, optimizer)
        reason = named.difference(saved)
        if reason is None:
            try:
                named.load(saved, lambda state: _fill(state, folder))
            except ValueError as error:
                reason = str(error)
        if reason is not None:
            raise UserError(
                f"checkpoint {folder} does not fit this model ({reason}); use the config it was made with, "
                "another run_dir, or checkpoint.resume=never"
            )
        extra: dict[str, Any] = torch.load(folder / EXTRA, map_location="cpu", weights_only=True)
        return extra

    # -- which one ----------------------------------------------------------------------------------------------------

    def _asked(self, look: Callable[[], Any]) -> Any:
        """Rank 0 looks, everyone takes what it found."""
        try:
            return _on_first_rank(look)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror}); mend its permissions or give another run_dir"
            ) from error

    def _newest_whole(self, warn: Callable[[str], None]) -> int | None:
        self._restore()
        reasons = []
        for step in reversed(self._steps()):
            try:
                _manifest(self._folder(step), checksums=True)
            except DamagedError as error:
                reasons.append(f"{self._folder(step)} {error}")
                continue
            for reason in reasons:
                warn(f"checkpoint {reason}: passed over, going on from step {step}")
            return step
        if reasons:
            raise UserError(
                f"no checkpoint in {self.path} is whole ({'; '.join(reasons)}); remove it to start afresh, or use "
                "checkpoint.resume=never or another run_dir"
            )
        return None

    def _steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        names = (p.name.removeprefix("step_") for p in self.path.iterdir() if p.name.startswith("step_") and p.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def _is_whole(self, step: int) -> bool:
        """By manifest and sizes; checksums of old ones are not worth their time at each save."""
        try:
            _manifest(self._folder(step), checksums=False)
        except DamagedError:
            return False
        return True

    def _folder(self, step: int) -> Path:
        return self.path / f"step_{step:08d}"

    def _restore(self) -> None:
        """A save was killed between putting a checkpoint of the same step away and giving the new one its name."""
        for replaced in self.path.glob("step_*.replaced"):
            if not replaced.with_suffix("").exists():
                replaced.rename(replaced.with_suffix(""))

    def _clean_up(self) -> None:
        """Removes what saves that were killed left half written or half removed."""
        self._restore()
        for left in [*self.path.glob("step_*.partial"), *self.path.glob("step_*.replaced")]:
            shutil.rmtree(left)


class _Writing:
    """A thread, and the error that it met. A process that ends in between leaves a checkpoint that does not count."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the training thread raises it
            self._error = error

    def join(self) -> BaseException | None:
        self._thread.join()
        return self._error


def _fill(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(state, checkpoint_id=folder, no_dist=not _distributed(), planner=RunLoadPlanner())


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _pack(extra: dict[str, Any]) -> bytes:
    """In memory first: torch hides a full disk in an error of its own, and what cannot be loaded shows now."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    try:
        torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError("extra may hold dicts, lists, tuples, strings, numbers, None and tensors only") from error
    return buffer.getvalue()


def _set_aside(folder: Path) -> None:
    aside = folder.with_suffix(".superseded")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)


# -- manifest ---------------------------------------------------------------------------------------------------------


def _write_manifest(folder: Path, step: int, config: dict[str, Any]) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    manifest = {"format": FORMAT, "step": step, "world_size": _world(), "files": files, "config": config}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _sync(path)
    _sync(folder)


def _manifest(folder: Path, *, checksums: bool) -> dict[str, Any]:
    """The manifest of a whole checkpoint; DamagedError says what is wrong with another."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        version, step = manifest["format"], int(manifest["step"])
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        config = manifest["config"]
    except FileNotFoundError:
        raise DamagedError("has no manifest, so it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError("has a damaged manifest") from None
    if version != FORMAT:
        raise DamagedError(f"has format {version}, and this version reads {FORMAT}")
    if not isinstance(config, dict) or not files.keys() >= set(NEEDED):
        raise DamagedError("has a damaged manifest")
    if folder.name != f"step_{step:08d}":
        raise DamagedError(f"has the manifest of step {step}")
    for name, (size, checksum) in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"lacks {name}")
        if path.stat().st_size != size:
            raise DamagedError(f"has {name} with {path.stat().st_size} bytes instead of {size}")
        try:
            whole = not checksums or _sha256(path) == checksum
        except OSError as error:
            raise DamagedError(f"has {name}, which cannot be read ({error.strerror})") from None
        if not whole:
            raise DamagedError(f"has {name} with a wrong checksum")
    return manifest


def _compare(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    for key in FIXED_KEYS:
        before, after = saved.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            inner = next(k for k in sorted({*before, *after}) if before.get(k) != after.get(k))
            key, before, after = f"{key}.{inner}", before.get(inner), after.get(inner)
        raise UserError(
            f"checkpoint {folder} was made with {key} {before}, and this run has {after}; use the same value, "
            "another run_dir, or checkpoint.resume=never"
        )


def _other_data(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a run reads otherwise than the one it continues: allowed (a later phase, a moved file), and said."""
    before, after = saved.get("data") or {}, now.get("data") or {}
    return [
        f"data.{key} was {before[key]!r} in checkpoint {folder} and is {after[key]!r} now: going on with the sequences "
        "of the new data after as many as were seen"
        for key in sorted(before.keys() & after.keys())
        if before[key] != after[key]
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    """``hashlib.file_digest`` of Python 3.10."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk, and not only promised."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- ranks ------------------------------------------------------------------------------------------------------------


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _world() -> int:
    return dist.get_world_size() if _distributed() else 1


def _on_first_rank(do: Callable[[], Any]) -> Any:
    """Runs ``do`` on rank 0; its result or error is every rank's, so that nobody waits for a rank that gave up."""
    answer: list[Any] = [None, None]
    if _rank() == 0:
        try:
            answer[0] = do()
        except (OSError, UserError, TypeError, CheckpointException) as error:
            answer[1] = error
    if _distributed():
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _cause(error: BaseException) -> BaseException:
    """What went wrong inside DCP, which hands errors on as (error, traceback) by rank."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _not_written(cause: BaseException) -> str | None:
    """Why the disk did not take a file; None where the error is another."""
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    if isinstance(cause, RuntimeError) and "inline_container" in str(cause):  # torch's file writer hides the OSError
        return "the disk took only a part of a file, it may be full"
    return None
