"""One rank of one trial of ``tune``: the run's real model, engine, layout and step, for a few steps of random tokens.

    python -m moetrain.trial FOLDER --config CONFIG --windows 4 --steps 3 [--overrides key=value ...]

``moetrain.planning.trials`` starts one for each rank. It leaves what it did in ``FOLDER/rank.N``, a JSON object a line:
what it has reached, and at last ``measured`` or ``error``. Its standard input is a pipe that ends with the process that
started it, and so does it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from moetrain.config import RunConfig
    from moetrain.data import TokenDataset
    from moetrain.parallel.ranks import Ranks

#: windows that may be discarded before the first is accepted (fp16 halves its loss scale so often at most)
PATIENCE = 20


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moetrain.trial")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--windows", type=int, nargs="+", required=True, help="lengths in micro-batches, longest first")
    parser.add_argument("--steps", type=int, required=True, help="timed ones of each length")
    parser.add_argument("--host-limit", type=int, help="bytes, as ulimit -d has them in KiB")
    parser.add_argument("--gpu-limit", type=int, help="bytes of what torch's allocator may reserve")
    parser.add_argument("--overrides", nargs="*", default=[])
    return parser.parse_args(arguments)


def _main() -> NoReturn:
    given = _arguments(sys.argv[1:])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if given.host_limit:  # before torch takes its part, since that is the process's, too
        resource.setrlimit(resource.RLIMIT_DATA, (given.host_limit, given.host_limit))
    rank = int(os.environ.get("RANK", "0"))
    code = 1
    with Path(given.folder, f"rank.{rank}").open("w", buffering=1) as file:

        def say(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")

        try:
            say(measured=_trial(given, say))
            code = 0
        except BaseException as error:
            say(error=_described(error))
    # nothing that still runs or waits may change the outcome
    os._exit(code)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _described(error: BaseException) -> dict[str, Any]:
    from moetrain.errors import UserError
    from moetrain.observe import stuck
    from moetrain.planning.trials import shortage

    chain = [error]
    while (at := chain[-1].__cause__ or chain[-1].__context__) is not None and at not in chain:
        chain.append(at)  # pipeline stages wrap what was raised in them
    for each in chain:
        if said := shortage(f"{type(each).__name__}: {each}"):
            return {"kind": "memory", "text": said}
        if isinstance(each, UserError):
            return {"kind": "user", "text": str(each)}
    text = str(chain[-1]).strip().splitlines()
    kind = "lost" if stuck.lost(error) else "fault"
    return {"kind": kind, "text": f"{type(chain[-1]).__name__}{': ' if text else ''}{text[0] if text else ''}"}


def _trial(given: argparse.Namespace, say: Any) -> dict[str, Any]:
    import torch

    from moetrain.config import load_config, refuse_unsupported
    from moetrain.config.run import SPLIT_BACKWARD
    from moetrain.errors import UserError
    from moetrain.model import DeepSeekLoss
    from moetrain.planning import fit, trials  # noqa: F401  (trials: later there may be no memory for it)
    from moetrain.planning.tensors import TensorMemory
    from moetrain.trainer import accumulator_of, engine_of, ranks_of

    config = load_config(given.config, given.overrides)
    # what fits is found out here: refused is only what the smallest run of this config lacks, too
    smallest = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_batch": 1})})
    if config.parallel.schedule not in SPLIT_BACKWARD:  # those go without recompute
        full = config.parallel.model_copy(update={"recompute": "full"})
        smallest = smallest.model_copy(update={"parallel": full})
    fit.check(smallest, given.config)
    refuse_unsupported(config)
    with ranks_of(config) as ranks:
        on_gpu = ranks.device.type == "cuda"
        have = given.host_limit or 0
        if on_gpu:
            free, whole = torch.cuda.mem_get_info(ranks.device)
            have = min(free, given.gpu_limit or free)
            if given.gpu_limit:
                torch.cuda.set_per_process_memory_fraction(min(1.0, given.gpu_limit / whole), ranks.device)
        windows = {length: _windows(config, ranks, length) for length in given.windows}
        # CUDA's allocator counts by itself; a CPU's does not, and the operators of the first steps are followed instead
        followed = TensorMemory(device="cpu")
        with nullcontext() if on_gpu else followed:
            loss = DeepSeekLoss(config.model, config.mtp.weight.at(0))
            engine = engine_of(config, ranks, loss)
            accumulator = accumulator_of(config, ranks, engine, loss)
            say(reached="engine")
            accepted, skipped = 0, None
            for number in range(PATIENCE):
                skipped = accumulator.step(next(windows[given.windows[0]])).skipped
                say(reached=f"step {number + 1}")
                accepted += skipped is None
                if accepted == (1 if on_gpu else 2):  # optimizer states are there from the second on
                    break
            else:
                raise UserError(f"{PATIENCE} windows of random tokens were discarded ({skipped})")
        seconds = []
        for length in given.windows:
            taken = []
            for _ in range(given.steps):
                window = next(windows[length])
                start = time.perf_counter()
                accumulator.step(window).total.item()
                if on_gpu:
                    torch.cuda.synchronize(ranks.device)
                taken.append(time.perf_counter() - start)
                say(reached="a timed step")
            seconds.append(statistics.median(taken))
        status = _status()
        if on_gpu:
            peak = torch.cuda.max_memory_allocated(ranks.device)
            held = counted = torch.cuda.max_memory_reserved(ranks.device)
        else:
            peak, held, counted = followed.peak, status["VmHWM"], status["VmData"]
    return {"peak": peak, "held": held, "counted": counted, "have": have, "seconds": seconds}


def _windows(config: RunConfig, ranks: Ranks, length: int) -> Iterator[Any]:
    """Of ``length`` micro-batches, or of the global batch where that has no more."""
    from moetrain.accumulate import Window
    from moetrain.data import GlobalBatches

    size = config.batch.micro_batch
    count = min(config.batch.global_batch, length * size * ranks.data_world)
    batches = GlobalBatches(_random_tokens(config), seed=config.seed)
    first = 0
    while True:
        yield Window(batches.window(first, count, rank=ranks.data_rank, world=ranks.data_world, micro_batch=size))
        first += count


def _random_tokens(config: RunConfig) -> TokenDataset:
    """Sequences as long as the run's, none of them padded; under a document mask, of four documents on average."""
    import numpy as np

    from moetrain.data import TokenDataset

    data, vocabulary = config.data, config.model.vocab_size
    random = np.random.default_rng(config.seed)
    tokens = random.integers(0, vocabulary, 64 * data.seq_len)
    if data.pack:
        ends = np.unique(np.append(random.integers(1, len(tokens), 4 * 64), len(tokens)))
    else:
        ends = np.arange(1, 65) * data.seq_len
    return TokenDataset(
        tokens,
        ends,
        seq_len=data.seq_len,
        pack=data.pack,
        document_mask=data.document_mask,
        vocab_size=vocabulary,
        name="random tokens",
    )


def _status() -> dict[str, int]:
    """Bytes of this process: ``VmHWM``, the most that was resident, and ``VmData``, what RLIMIT_DATA counts."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}
    except OSError:  # not Linux
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"VmHWM": most, "VmData": most}


if __name__ == "__main__":
    _main()
