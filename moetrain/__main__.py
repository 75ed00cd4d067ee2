"""The command line: ``python -m moetrain COMMAND ...``.

It answers help, versions and mistakes without importing torch. A mistake ends in one sentence on stderr and
exit code 2; of several processes every one exits, and those whose mistake nobody else has made speak.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import moetrain
from moetrain.errors import LostRankError, UserError

_EPILOG = """\
`python -m moetrain --config ...` is short for `python -m moetrain train --config ...`.

  python -m moetrain --config configs/671B/smoke.yaml               a small DeepSeek-V3 on this machine
  python -m moetrain --config configs/671B/smoke.yaml steps=20      with one key of the file replaced
  torchrun --nproc_per_node 8 -m moetrain --config configs/671B     8 processes
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a UserError like every other."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser(command: str, description: str, epilog: str = "") -> _Parser:
    return _Parser(
        prog=f"python -m moetrain {command}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _train(arguments: Sequence[str]) -> None:
    """train a model as a config file says (the default command)"""
    parser = _parser(
        "train",
        "Train a model. Checks the config and that the run fits this machine before anything is allocated.",
        "examples:\n" + _EPILOG.split("\n\n", 1)[1],
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="PATH",
        help="YAML file, or a folder with a config.yaml (configs/671B)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="replaces one key of the file, value in YAML: optimizer.lr=3e-4 model.num_hidden_layers=4",
    )
    parser.add_argument("--force", action="store_true", help="start even where the plan says that memory is missing")
    given = parser.parse_intermixed_args(arguments)
    path = Path(given.config)
    moetrain.train(moetrain.load_config(path, given.overrides), path, force=given.force)


def _tokenize(arguments: Sequence[str]) -> None:
    """turn text into the .bin and .idx that training reads"""
    parser = _parser(
        "tokenize",
        "Tokenise a text file or a folder of text into PREFIX.bin and PREFIX.idx. Interrupted, it continues.",
        "example:\n  python -m moetrain tokenize texts/ --out data/pretrain --tokenizer tokenizer.json",
    )
    parser.add_argument("source", metavar="SOURCE", help="text file or folder of text")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without .bin and .idx")
    parser.add_argument(
        "--tokenizer", default="bytes", help="a tokenizer.json, or bytes (default): one token for each byte"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    given = parser.parse_args(arguments)
    if given.workers < 1:
        parser.error(f"--workers must be at least 1, not {given.workers}")

    from moetrain.data.tokenize_cli import tokenize

    tokenize(given.source, given.out, tokenizer=given.tokenizer, workers=given.workers)


def _report(arguments: Sequence[str]) -> None:
    """sum up a run from its metrics"""
    parser = _parser("report", "Print a table of a run's first, best and last numbers.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, for instance runs/671B-smoke")

    from moetrain.observe.report import report

    report(parser.parse_args(arguments).run)


def _verify(arguments: Sequence[str]) -> None:
    """show on a config that the layout never changes the step"""
    parser = _parser(
        "verify",
        "Take a config's step in every layout there is and compare with one process and one big batch.\n"
        "The model is made small; what is checked is the step. Exit code 1 if a layout that has to be exact is not.",
        "example:\n  python -m moetrain verify --config configs/671B/smoke.yaml",
    )
    parser.add_argument("--config", required=True, metavar="PATH", help="YAML file or folder, as for train")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="default: float64")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces one key of the file")
    given = parser.parse_intermixed_args(arguments)
    config = moetrain.load_config(Path(given.config), given.overrides)

    from moetrain.verify import verify

    if not verify(config, dtype=given.dtype):
        sys.exit(1)


def _plan(arguments: Sequence[str]) -> None:
    """what a run needs, and whether it fits given GPUs"""
    parser = _parser(
        "plan",
        "Memory, traffic, time and cost of a config on given GPUs, from the real code, without running it.\n"
        "Exit code 0 if it fits, 1 if it does not.",
        "examples:\n"
        "  python -m moetrain plan --config configs/671B --gpus 8xH200\n"
        "  python -m moetrain plan --config configs/16B --gpus 8xH100 engine=native --search\n"
        "  python -m moetrain plan --config configs/16B --fewest H100 engine=native\n"
        "  python -m moetrain plan --config configs/671B --gpus 2048xH800 --dry-run engine=native parallel.pp=16\n"
        "  python -m moetrain plan --config configs/16B --gpus 8xH100 gpu.memory=94e9 gpu.price=1.9",
    )
    parser.add_argument("--config", required=True, metavar="PATH", help="YAML file or folder, as for train")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gpus", metavar="8xH200", help="how many GPUs of which kind, in all or on each of --nodes")
    what.add_argument("--fewest", metavar="KIND", help="the smallest number of these that the config fits on")
    parser.add_argument("--nodes", type=int, metavar="N", help="as many nodes with --gpus each")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--search", action="store_true", help="the fastest layouts for these GPUs and the global batch")
    parser.add_argument(
        "--dry-run", action="store_true", help="run the real step without memory, as one rank of all, and count"
    )
    parser.add_argument("--fused", action="store_true", help="elementwise work at the cost of fused kernels")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys, and gpu.KEY=NUMBER")
    given = parser.parse_intermixed_args(arguments)
    gpu, keys = {}, []
    for text in given.overrides:
        if text.startswith("gpu."):
            key, _, value = text[4:].partition("=")
            try:
                gpu[key] = float(value)
            except ValueError:
                raise UserError(f"gpu.{key}: {value!r} is not a number") from None
        else:
            keys.append(text)
    config = moetrain.load_config(Path(given.config), keys)

    from moetrain.planning.hardware import cluster
    from moetrain.planning.plan import changes, fewest, make_plan, search
    from moetrain.planning.show import show, show_search

    if given.fewest and (given.search or given.nodes is not None):
        parser.error("--search and --nodes take --gpus, not --fewest")
    gpus = cluster(given.gpus or f"1x{given.fewest}", given.nodes, gpu)
    if given.dry_run:
        from moetrain.planning.dry_run import dry_run
        from moetrain.planning.show import show_dry_run

        if not given.gpus or given.search:
            parser.error("--dry-run takes --gpus, and neither --fewest nor --search")
        run = dry_run(config, gpus)
        _print_json(run.to_json()) if given.json else show_dry_run(run)
        return
    if given.search:
        won, lost = search(config, gpus)
        if given.json:
            fits = [{"keys": str(each), **each.plan.to_json()} for each in won]
            _print_json({"fit": fits, "lost": [{"keys": keys, "why": why} for keys, why in lost]})
        else:
            show_search(won, lost)
        return
    plan = make_plan(config, gpus, fused=given.fused) if given.gpus else fewest(config, gpus)
    if plan is None:
        raise UserError(f"{given.config} does not fit on 8192 {given.fewest} either; try other keys, or --gpus for why")
    mends = [] if plan.fits else changes(plan)
    if given.json:
        fits = [{"keys": str(each), "gpus": str(each.plan.cluster), **each.plan.to_json()} for each in mends]
        _print_json(plan.to_json() | {"would_fit": fits})
    else:
        show(plan, mends)
    if not plan.fits:
        sys.exit(1)


def _print_json(what: dict[str, Any]) -> None:
    import json

    print(json.dumps(what))


def _tune(arguments: Sequence[str]) -> None:
    """the largest micro-batch that this machine takes, and the fastest"""
    parser = _parser(
        "tune",
        "Runs a few real steps with growing micro-batches, out of memory survived, and writes the config with the\n"
        "micro-batch and recompute that were fastest at the same global batch.",
        "examples:\n"
        "  python -m moetrain tune --config configs/671B/smoke.yaml --memory 1GiB\n"
        "  python -m moetrain tune --config configs/671B/smoke.yaml --processes 2 parallel.ep=2",
    )
    parser.add_argument("--config", required=True, metavar="PATH", help="YAML file or folder, as for train")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks (default: the config's, or all GPUs)")
    parser.add_argument("--memory", metavar="3GiB", help="of each process: of its GPU, or of the host on CPU")
    parser.add_argument("--recompute", metavar="none,full", help="which to try (default: none,selective,full)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed ones of a trial (default: 3)")
    parser.add_argument("--timeout", type=float, metavar="S", help="without progress (default: 0.8 parallel.timeout_s)")
    parser.add_argument("--out", type=Path, default=Path("tuned.yaml"), metavar="PATH", help="default: tuned.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces one key of the file")
    given = parser.parse_intermixed_args(arguments)
    for name in ("processes", "steps", "timeout"):
        if (number := getattr(given, name)) is not None and number <= 0:
            parser.error(f"--{name} must be more than 0, not {number}")
    recomputes = ("none", "selective", "full") if given.recompute is None else given.recompute.split(",")
    for name in recomputes:
        if name not in ("none", "selective", "full"):
            parser.error(f"--recompute: there is none, selective, full, and no {name!r}")
    if given.out.is_dir() or not given.out.parent.is_dir():
        parser.error(f"--out: {given.out} is {'a folder' if given.out.is_dir() else 'in a folder that is not there'}")
    moetrain.load_config(Path(given.config), given.overrides)  # a mistake is answered before torch is there

    from moetrain.config.values import bytes_of

    try:
        limit = None if given.memory is None else bytes_of(given.memory)
    except ValueError as error:
        raise UserError(f"--memory: {error}") from None

    from moetrain.planning.tune import tune

    tune(
        Path(given.config),
        given.overrides,
        processes=given.processes,
        limit=limit,
        recomputes=recomputes,
        timeout=given.timeout,
        steps=given.steps,
        out=given.out,
    )


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": _train,
    "plan": _plan,
    "tune": _tune,
    "verify": _verify,
    "tokenize": _tokenize,
    "report": _report,
}


def _run(arguments: list[str]) -> None:
    commands = "\n".join(f"  {name:<10} {command.__doc__}" for name, command in _COMMANDS.items())
    first = arguments[0] if arguments else "--help"
    if first in _COMMANDS:
        _COMMANDS[first](arguments[1:])
        return
    if "=" in first or (first.startswith("-") and first not in ("-h", "--help", "--version")):
        _train(arguments)
        return
    parser = _parser(
        "COMMAND",
        f"Trains DeepSeek-style mixture-of-experts models.\n\ncommands:\n{commands}\n\n"
        "`python -m moetrain COMMAND --help` tells what a command takes.",
        _EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"moetrain {moetrain.__version__}")
    if not first.startswith("-"):
        close = difflib.get_close_matches(first, _COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(_COMMANDS)}"
        raise UserError(f"unknown command {first!r}; {hint}")
    parser.parse_args([first])


#: seconds in which the launcher ends a process whose mistake the first one of its node has made, too, and told
PATIENCE = 2.0


def _say(error: Exception) -> None:
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", rank) != "0":
        time.sleep(PATIENCE)
    print(f"moetrain: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 2 for a mistake in what was given, 1 when ranks lost each other,
    130 when interrupted."""
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        _say(error)
        return 2
    except LostRankError as error:
        print(f"moetrain: {error}", file=sys.stderr)  # every rank: each says where it was
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("moetrain: interrupted", file=sys.stderr)
        return 130
    return 0


def _main() -> NoReturn:
    """``main`` as a process: one of several that ends with an error ends at once, whoever waits for it in a thread."""
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _main()
