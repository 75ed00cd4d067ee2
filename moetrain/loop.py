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
from moetrain.accumulate.denominators import count_denominators, sum_over
from moetrain.config.run import RunConfig
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss
from moetrain.observe import RunLog, Value
from moetrain.parallel.ranks import Ranks


@dataclass
class Progress:
    """Where a run is: accepted steps, and what they have seen."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0


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
def evaluate(model: torch.nn.Module, loss: DeepSeekLoss, windows: Iterable[Window], ranks: Ranks) -> dict[str, float]:
    """Mean next-token loss and perplexity over windows of held-out data; touches no training state."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for window in windows:
        window = window.to(ranks.device)
        total[1] += count_denominators(window, device=ranks.device).valid[0]
        for item in window:
            total[0] += loss(model, item)[0].to(torch.float64)
    model.train()
    sum_over(total, ranks.groups)
    mean = (total[0] / total[1].clamp(min=1)).item()
    return {"eval_loss": mean, "perplexity": math.exp(min(mean, 700.0)), "eval_tokens": int(total[1].item())}


def run(
    config: RunConfig,
    *,
    accumulator: MoEAccumulator,
    loss: DeepSeekLoss,
    windows: Callable[[Progress], Iterable[Window]],
    held_out: Callable[[], Iterable[Window]],
    progress: Progress,
    save: Callable[[Progress], None],
    log: RunLog,
    ranks: Ranks,
    mfu_per_rate: float | None,
) -> dict[str, Value]:
    """Trains from ``progress`` to the config's budget; returns the last record.

    A discarded window uses up its data, and neither step count nor schedule moves; ``MAX_DISCARDED`` in a row end the
    run with a UserError.
    """
    record: dict[str, Value] = {}
    discarded = 0
    with StopSignal(ranks) as stop:
        for window in windows(progress):
            accumulator.bias_rate = config.balance.bias_rate.at(progress.tokens)
            loss.mtp_weight = config.mtp.weight.at(progress.tokens)
            report = accumulator.step(window)
            progress.sequences += config.batch.global_batch
            stopping = stop.reached()
            if report.skipped is None:
                discarded = 0
                progress.step += 1
                progress.tokens += config.tokens_per_step
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
            last = progress.step >= config.total_steps
            if report.skipped is None and (progress.step % config.log.every == 0 or last):
                record = log.step(_record(progress, report), mfu_per_rate=mfu_per_rate)
            if config.eval.every and (progress.step % config.eval.every == 0 or last):
                log.evaluation({"step": progress.step, **evaluate(accumulator.model, loss, held_out(), ranks)})
            due = config.checkpoint.every and progress.step % config.checkpoint.every == 0
            if due or last or stopping:
                save(progress)
            if stopping and not last:
                log.note(f"stopped by SIGTERM after step {progress.step}; the same command continues from there")
            if last or stopping:
                break
    return record


MAX_DISCARDED = 20  # windows in a row: beyond that the run is broken, not unlucky


def _record(progress: Progress, report: StepReport) -> dict[str, float]:
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
    }
