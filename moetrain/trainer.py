"""Wiring: from a config to a finished run. Every part is made here, in the order in which it is needed, and handed on.

(The module is not called ``train``, since ``moetrain.train`` is the function.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moetrain import loop
from moetrain.accumulate import Balance, LossScale, MoEAccumulator, Window
from moetrain.checkpoint import CheckpointFolder, PretrainedWeights
from moetrain.config import (
    ConstantCosineConstantSchedule,
    CosineSchedule,
    RunConfig,
    StepSchedule,
    refuse_unsupported,
)
from moetrain.data import Data, GlobalBatches, Prefetcher, build_data
from moetrain.engine import DeepSpeedEngine, Engine, NativeEngine, reuse_host_memory
from moetrain.loop import Budget, Progress
from moetrain.model import DeepSeekLoss, Unfilled, Weights
from moetrain.model.flops import flops_per_token, parameter_counts
from moetrain.observe import RunLog, peak_flops, stuck
from moetrain.optim import (
    BatchSizes,
    Constant,
    ConstantCosineConstant,
    Cosine,
    FixedBatch,
    LearningRate,
    NoiseSteeredBatch,
    RampedBatch,
    Schedule,
    StepDecay,
)
from moetrain.parallel.plan import needs_group
from moetrain.parallel.ranks import Ranks, started
from moetrain.planning import fit


@dataclass(frozen=True)
class Result:
    """What a run left behind: where, how far it came, and its last record."""

    run_dir: Path
    steps: int
    last: dict[str, float]


def train(config: RunConfig, path: Path | None = None, *, force: bool = False) -> Result:
    """Trains as ``config`` says, on the processes that ``torchrun`` started (one without it).

    ``path`` is the file that the config came from, for sentences. Continues from the newest whole checkpoint in
    ``run_dir`` unless ``checkpoint.resume`` is ``never``. ``force`` starts it whatever the plan says of memory.

    Raises:
        UserError: data, checkpoint or machine do not fit the config; one sentence with the mend.
    """
    fit.check(config, path, force=force)
    refuse_unsupported(config)
    with ranks_of(config) as ranks:
        # one process waits for nobody, however long its steps take
        patience = 0.8 * config.parallel.timeout_s if ranks.world > 1 else math.inf
        with stuck.Watch(ranks.rank, patience, ranks.ended) as watch:
            return _train(config, ranks, watch)


@contextmanager
def ranks_of(config: RunConfig) -> Iterator[Ranks]:
    """This process among those of the run."""
    with started(
        config.device,
        need_group=config.engine == "deepspeed" or needs_group(config.precision, config.parallel),
        dp_replicate=config.parallel.dp_replicate,
        ep=config.parallel.ep,
        pp=config.parallel.pp,
        timeout_s=config.parallel.timeout_s,
    ) as ranks:
        if ranks.device.type == "cpu":
            reuse_host_memory()
        yield ranks


def engine_of(config: RunConfig, ranks: Ranks, loss: DeepSeekLoss, *, resumes: bool = False) -> Engine:
    """``resumes``: a checkpoint will fill it."""
    weights: Weights | None = None
    if resumes:
        weights = Unfilled()
    elif config.init_from is not None:
        weights = PretrainedWeights(config.init_from, config.model)
    if config.engine == "deepspeed":
        return DeepSpeedEngine(config, ranks, weights=weights)
    return NativeEngine(config, ranks, loss, weights=weights)


def accumulator_of(
    config: RunConfig, ranks: Ranks, engine: Engine, loss: DeepSeekLoss, scheduler: LearningRate | None = None
) -> MoEAccumulator:
    """``scheduler`` moves with each accepted step; None: the optimizer keeps its rate."""
    return MoEAccumulator(
        engine.model,
        engine.optimizer,
        loss=loss,
        balance=_balance(config),
        max_norm=config.optimizer.max_norm,
        scheduler=scheduler,
        groups=ranks.groups,
        window_order="counting_pass" if config.counts_first else "forwards_first",
        offload_activations=config.parallel.offload_activations,
        device=ranks.device,
        loss_scale=LossScale() if config.precision == "fp16" else None,
        measure_noise=config.batch.noise_scale is not None,
        skip_if=_guard(config),
        pipeline=engine.pipeline,
        owner=engine.owner,
    )


def _train(config: RunConfig, ranks: Ranks, watch: stuck.Watch) -> Result:
    data = build_data(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    loss = DeepSeekLoss(config.model)
    checkpoints = CheckpointFolder(config.run_dir / "checkpoints", keep=config.checkpoint.keep)
    resumes = config.checkpoint.resume == "auto" and checkpoints.found()
    engine = engine_of(config, ranks, loss, resumes=resumes)
    watch.model = engine.model
    sizes = batch_sizes(config)
    budget, total_tokens = budget_of(config, sizes)
    learning_rate = LearningRate(
        engine.optimizer,
        _schedule(config, total_tokens if config.schedule.unit == "tokens" else budget.expected_steps),
        peak=config.optimizer.lr,
        warmup_steps=config.schedule.warmup_steps,
        unit=config.schedule.unit,
        rule=config.batch.lr_rule,
        reference=config.batch.lr_reference or config.batch.global_batch,
    )
    accumulator = accumulator_of(config, ranks, engine, loss, learning_rate)
    progress = Progress()
    resumed, damaged = None, list[str]()
    groups = engine.optimizer.param_groups
    settings = [{key: group[key] for key in ("betas", "eps", "weight_decay")} for group in groups]
    if resumes:
        resumed = checkpoints.load_latest(
            model=engine.model, optimizer=engine.optimizer, config=config.model_dump(mode="json"), warn=damaged.append
        )
    if resumed is not None:
        for group, ours in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(ours)  # a loaded optimizer has the settings it was saved with; the config's are the ones meant
        progress = Progress(**resumed["progress"])
        learning_rate.load_state_dict(resumed["learning_rate"])
        accumulator.load_state_dict(resumed["accumulator"])
        if isinstance(sizes, NoiseSteeredBatch) and "batch" in resumed:
            sizes.load_state_dict(resumed["batch"])
        torch.set_rng_state(resumed["rng"])

    def save(at: Progress) -> None:
        extra = {
            "progress": vars(at),
            "learning_rate": learning_rate.state_dict(),
            "accumulator": accumulator.state_dict(),
            "rng": torch.get_rng_state(),
        }
        if isinstance(sizes, NoiseSteeredBatch):
            extra["batch"] = sizes.state_dict()
        said = f"checkpoint of step {at.step}: {checkpoints.path}"
        checkpoints.save(
            at.step,
            model=engine.model,
            optimizer=engine.optimizer,
            extra=extra,
            config=config.model_dump(mode="json"),
            background=config.checkpoint.async_save,
            confirmed=lambda: log.note(said),
        )

    log = RunLog(
        config.run_dir,
        rank=ranks.rank,
        total_steps=budget.expected_steps,
        tensorboard=config.log.tensorboard == "auto",
    )
    with log:
        log.resume_at(progress.step)
        log.start(_facts(config, budget, ranks, engine, data), step=progress.step, tokens=progress.tokens)
        for sentence in damaged:
            log.note(sentence)
        if resumed is not None:
            log.note(f"resumed after step {progress.step} from {checkpoints.path}")
        last: dict[str, Any] = {}
        if not budget.reached(progress):
            last = loop.run(
                config,
                accumulator=accumulator,
                loss=loss,
                windows=partial(_windows, config, data, ranks, sizes),
                sizes=sizes,
                learning_rate=learning_rate,
                budget=budget,
                held_out=partial(_held_out, config, data, ranks),
                progress=progress,
                save=save,
                log=log,
                ranks=ranks,
                alive=watch.beat,
                mfu_per_rate=_mfu_per_rate(config, ranks),
            )
            checkpoints.wait()
        metrics = f"metrics: {config.run_dir / 'metrics.jsonl'}"
        if not last and progress.step:
            wanted = f"{config.steps} steps" if config.steps is not None else f"{config.tokens} tokens"
            log.note(
                f"nothing to do: {checkpoints.path} is already at step {progress.step} ({progress.tokens:,} tokens), "
                f"and {wanted} were asked for; more of them goes on from there, another run_dir starts anew; {metrics}"
            )
        elif budget.reached(progress):
            log.note(f"done: {progress.step} steps; {metrics}")
    return Result(config.run_dir, progress.step, last)


def _mfu_per_rate(config: RunConfig, ranks: Ranks) -> float | None:
    """FLOPs a token needs over FLOP/s of all devices: times tokens/s this is the MFU. None: peak unknown."""
    if ranks.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(ranks.device))
    return None if peak is None else flops_per_token(config.model, config.data.seq_len) / (peak * ranks.world)


def batch_sizes(config: RunConfig) -> BatchSizes:
    batch = config.batch
    if batch.ramp is not None:
        over = -(-batch.ramp.tokens // config.data.seq_len)
        return RampedBatch(batch.ramp.start, batch.global_batch, over, batch.ramp.increment or batch.ramp.start)
    if batch.noise_scale is not None:
        noise = batch.noise_scale
        return NoiseSteeredBatch(
            batch.global_batch,
            noise.minimum,
            noise.maximum,
            increment=noise.increment or noise.minimum,
            decay=noise.decay,
        )
    return FixedBatch(batch.global_batch)


def budget_of(config: RunConfig, sizes: BatchSizes) -> tuple[Budget, int]:
    """The budget, and the tokens it means; both exact where sizes are foreseeable and no window is discarded."""
    steps = sequences = 0
    wanted = None if config.tokens is None else -(-config.tokens // config.data.seq_len)
    settled = config.batch.ramp is None
    while steps < config.steps if config.steps is not None else sequences < (wanted or 0):
        size = sizes.size(sequences)
        left = (config.steps - steps) if config.steps is not None else -(-((wanted or 0) - sequences) // size)
        more = left if settled or size == config.batch.global_batch else 1  # nothing changes from here on
        steps, sequences = steps + more, sequences + more * size
    return Budget(config.steps, config.tokens, steps), sequences * config.data.seq_len


def _schedule(config: RunConfig, total: int) -> Schedule:
    """The schedule; ``total`` is the budget in its unit."""
    schedule = config.schedule
    match schedule:
        case CosineSchedule():
            return Cosine(total, schedule.final)
        case StepSchedule():
            return StepDecay([share * total for share in schedule.at], schedule.factor)
        case ConstantCosineConstantSchedule():
            return ConstantCosineConstant(
                schedule.constant, schedule.cosine, schedule.ratio, schedule.hold, schedule.last
            )
        case _:
            return Constant()


def _balance(config: RunConfig) -> Balance:
    b = config.balance
    return Balance(scope=b.scope, bias_rate=b.bias_rate.at(0), zero_centred=b.zero_centred, **b.losses)


def _guard(config: RunConfig) -> Callable[[float], str | None]:
    most = config.optimizer.skip_above

    def too_much(norm: float) -> str | None:
        if most is None or norm <= most:
            return None
        return f"the gradient norm {norm:.4g} is above optimizer.skip_above ({most:g})"

    return too_much


def _windows(config: RunConfig, data: Data, ranks: Ranks, sizes: BatchSizes, progress: Progress) -> Iterator[Window]:
    """This rank's windows from where the run is, the next one prepared while the last one trains where that can be."""
    batches, rank, world = GlobalBatches(data.train, seed=config.seed), ranks.data_rank, ranks.data_world
    consumed = progress.sequences

    def window(number: int) -> Window:
        nonlocal consumed
        first, size = consumed, sizes.size(consumed)
        consumed += size
        return Window(batches.window(first, size, rank=rank, world=world, micro_batch=config.batch.micro_batch))

    if not sizes.foreseeable:
        yield from map(window, itertools.count())
    with Prefetcher(window) as prefetched:
        yield from prefetched


def _held_out(config: RunConfig, data: Data, ranks: Ranks) -> Iterator[Window]:
    """The same held-out sequences in every evaluation."""
    batches, rank, world = GlobalBatches(data.held_out, seed=config.seed), ranks.data_rank, ranks.data_world
    size = config.batch.global_batch
    left = min(config.eval.batches * size, len(data.held_out))
    for first in range(0, left, size):
        count = min(size, left - first)
        yield Window(batches.window(first, count, rank=rank, world=world, micro_batch=config.batch.micro_batch))


def _facts(config: RunConfig, budget: Budget, ranks: Ranks, engine: Engine, data: Data) -> dict[str, str]:
    """What rank 0 prints before the first step."""
    counts = parameter_counts(config.model)
    parameters = counts.total + counts.mtp
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    per_rank = -(-config.batch.global_batch // ranks.data_world)
    facts = {
        "run": f"{config.name}, {budget.expected_steps} steps, in {config.run_dir}",
        "model": f"{parameters / 1e6:,.1f} M parameters, {config.model.model_type}",
        "data": data.describe(),
        "batch": f"{_batch_words(config)} of {config.data.seq_len} tokens a step",
        "window": f"{-(-per_rank // config.batch.micro_batch)} micro-batches of {config.batch.micro_batch} on each of "
        f"{ranks.data_world} data rank{'s' if ranks.data_world > 1 else ''}",
        "device": f"{device}, {torch.get_num_threads()} threads a rank" if device == "cpu" else device,
        "engine": config.engine,
    }
    if config.counts_first:
        facts["balance"] = "scope window by a counting pass: one forward of the window more"
    return facts | {f"plan {i}": line for i, line in enumerate(engine.applied, start=1)}


def _batch_words(config: RunConfig) -> str:
    batch = config.batch
    if batch.ramp is not None:
        return f"{batch.ramp.start} to {batch.global_batch} sequences"
    if batch.noise_scale is not None:
        return f"{batch.noise_scale.minimum} to {batch.noise_scale.maximum} sequences"
    return f"{batch.global_batch} sequences"
