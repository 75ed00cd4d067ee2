"""The training loop: for each global batch, one exact step. Everything it uses is handed in by ``train``.

Everything beside the step (log, evaluation, checkpoint, stop) happens between windows, where nothing is half done.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor

from moetrain.accumulate import MoEAccumulator, StepReport, Window
from moetrain.accumulate.denominators import count_denominators
from moetrain.accumulate.traffic import Traffic
from moetrain.config.run import RunConfig
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss
from moetrain.observe import RunLog, Value
from moetrain.optim import BatchSizes, FixedBatch, LearningRate, NoiseSteeredBatch
from moetrain.parallel.ranks import Ranks


@dataclass
class Progress:
    """Where a run is: accepted steps, and what they have seen."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Budget:
    """When a run is done: after so many accepted steps, or so many tokens in them.

    ``expected_steps``: the same in steps, exact unless the batch follows measurements.
    """

    steps: int | None
    tokens: int | None
    expected_steps: int

    def reached(self, progress: Progress) -> bool:
        if self.steps is not None:
            return progress.step >= self.steps
        return progress.tokens >= (self.tokens or 0)


class StopSignal:
    """SIGTERM asks for a stop at the next window boundary; every rank learns of it there."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.asked = ranks, False

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True

    def reached(self) -> bool:
        return self.ranks.any(self.asked)


@torch.no_grad()
def evaluate(
    accumulator: MoEAccumulator, loss: DeepSeekLoss, windows: Iterable[Window], ranks: Ranks
) -> dict[str, float]:
    """Mean next-token loss and perplexity over windows of held-out data; touches no training state."""
    model, pipeline = accumulator.model, accumulator.pipeline
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for window in windows:
        window = window.to(ranks.device)
        total[1] += count_denominators(window, device=ranks.device).valid[0]
        if pipeline is not None:
            total[0] += pipeline.forward(window)[0].to(torch.float64)
            continue
        for item in window:
            total[0] += loss(model, item)[0].to(torch.float64)
    model.train()
    Traffic().sum(total[0], ranks.pipe_groups, "report")
    Traffic().sum(total, ranks.groups, "report")
    mean = (total[0] / total[1].clamp(min=1)).item()
    return {"eval_loss": mean, "perplexity": math.exp(min(mean, 700.0)), "eval_tokens": int(total[1].item())}


def run(
    config: RunConfig,
    *,
    accumulator: MoEAccumulator,
    loss: DeepSeekLoss,
    windows: Callable[[Progress], Iterable[Window]],
    sizes: BatchSizes,
    learning_rate: LearningRate,
    budget: Budget,
    held_out: Callable[[], Iterable[Window]],
    progress: Progress,
    save: Callable[[Progress], None],
    log: RunLog,
    ranks: Ranks,
    alive: Callable[[int], None],
    mfu_per_rate: float | None,
) -> dict[str, Value]:
    """Trains from ``progress`` to the config's budget; returns the last record.

    A discarded window uses up its data, and neither step count nor schedule moves; ``MAX_DISCARDED`` in a row end the
    run with a UserError. ``alive`` is told the step in between.
    """
    record: dict[str, Value] = {}
    discarded = 0
    with StopSignal(ranks) as stop:
        for window in windows(progress):
            alive(progress.step)
            accumulator.bias_rate = config.balance.bias_rate.at(progress.tokens)
            loss.mtp_weight = config.mtp.weight.at(progress.tokens)
            sequences = sizes.size(progress.sequences)
            learning_rate.next_batch(sequences, sequences * config.data.seq_len)
            report = accumulator.step(window)
            progress.sequences += sequences
            stopping = stop.reached()
            if report.skipped is None:
                discarded = 0
                progress.step += 1
                progress.tokens += sequences * config.data.seq_len
                if isinstance(sizes, NoiseSteeredBatch):
                    _steer(sizes, report, sequences)
            else:
                discarded += 1
                log.note(f"step {progress.step + 1}: window discarded, {report.skipped}")
                if discarded >= MAX_DISCARDED:
                    raise UserError(
                        f"{discarded} windows in a row were discarded after step {progress.step} ({report.skipped}); "
                        "lower optimizer.lr or look at the data; the last checkpoint is whole"
                    )
                if not stopping:
                    continue
            last = budget.reached(progress)
            if report.skipped is None and (progress.step % config.log.every == 0 or last):
                record = log.step(_record(progress, report, sequences, sizes), mfu_per_rate=mfu_per_rate)
            if report.skipped is None and config.eval.every and (progress.step % config.eval.every == 0 or last):
                log.evaluation({"step": progress.step, **evaluate(accumulator, loss, held_out(), ranks)})
            alive(progress.step)
            due = config.checkpoint.every and progress.step % config.checkpoint.every == 0
            if due or last or stopping:
                save(progress)
            if stopping and not last:
                log.note(f"stopped by SIGTERM after step {progress.step}; the same command continues from there")
            if last or stopping:
                break
    return record


MAX_DISCARDED = 20  # windows in a row: beyond that the run is broken, not unlucky


def _steer(sizes: NoiseSteeredBatch, report: StepReport, sequences: int) -> None:
    if report.noise is None:
        raise UserError(
            "batch.noise_scale needs two parts of a batch to compare: give the run more ranks, or a batch.micro_batch "
            f"of at most half the step's {sequences} sequences"
        )
    noise, signal, valid = torch.stack([*report.noise, report.valid_tokens]).tolist()
    if math.isfinite(noise):  # a step whose tokens all lie on one rank says nothing
        sizes.measured(noise, signal, max(valid, 1.0) / sequences)


def _record(progress: Progress, report: StepReport, sequences: int, sizes: BatchSizes) -> dict[str, float]:
    """Host numbers of a step; the one read of the report's tensors."""
    names = list(report.losses)
    violation = report.max_violation
    worst: Tensor = violation.max() if violation.numel() else torch.zeros(())
    numbers = torch.stack(
        [
            report.total,
            *report.losses.values(),
            report.grad_norm.to(torch.float64),
            worst.to(torch.float64),
            report.valid_tokens,
            report.routed_tokens,
        ]
    ).tolist()
    total, values, (norm, worst_value, valid, routed) = numbers[0], numbers[1:-4], numbers[-4:]
    extra = {"batch": float(sequences)} if not isinstance(sizes, FixedBatch) else {}
    if isinstance(sizes, NoiseSteeredBatch):
        extra["noise_scale"] = sizes.noise_scale
    if report.loss_scale != 1.0:
        extra["loss_scale"] = report.loss_scale
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss": values[0],
        "total": total,
        **dict(zip(names, values, strict=True)),
        "lr": report.learning_rate,
        "grad_norm": norm,
        "max_violation": worst_value,
        "valid_tokens": int(valid),
        "routed_tokens": int(routed),
        **extra,
    }
