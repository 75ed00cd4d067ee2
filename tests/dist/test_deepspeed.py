"""DeepSpeed's ZeRO under our window: the step of one process with one batch, whatever is sharded and wherever it lies.

In fp32, which is DeepSpeed's limit for master weights. The reference is float64, so what is seen is fp32's rounding.
"""

from __future__ import annotations

import pytest
import torch

from moetrain.accumulate import LossScale, MoEAccumulator, Window
from moetrain.config import RunConfig
from moetrain.engine import DeepSpeedEngine, NativeEngine
from moetrain.engine.zero_settings import settings_of
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.processes import run_ranks
from tests.support.runs import corpus, run_config
from tests.support.small import V2, V3, difference, every_loss, rank_window, rows, window
from tests.support.zero import FP16  # also: before ranks are forked

pytestmark = pytest.mark.dist

#: relative, of a gradient: three steps' sums in fp32, 2^-24 each, through about 20 products one after the other
BOUND = 2e-5
STEPS = 3

#: ranks -> name -> (family, scope, what is configured)
VARIANTS = {
    2: {
        "ZeRO 1": ("V3", "window", ("deepspeed.zero_stage=1",)),
        "ZeRO 1, host": ("V3", "sequence", ("deepspeed.zero_stage=1", "deepspeed.offload_optimizer=cpu")),
        "ZeRO 1, experts over 2": ("V3", "window", ("deepspeed.zero_stage=1", "parallel.ep=2")),
        "ZeRO 2": ("V3", "window", ("deepspeed.zero_stage=2",)),
        "ZeRO 2, host": ("V2", "window", ("deepspeed.zero_stage=2", "deepspeed.offload_optimizer=cpu")),
        "ZeRO 2, experts over 2, host": (
            "V3",
            "previous",
            ("deepspeed.zero_stage=2", "parallel.ep=2", "deepspeed.offload_optimizer=cpu"),
        ),
        "ZeRO 3": ("V3", "window", ("deepspeed.zero_stage=3",)),
        "ZeRO 3, nothing kept whole": ("V3", "window", ("deepspeed.zero_stage=3", "deepspeed.small_parameter=0")),
        "ZeRO 3, recompute": ("V3", "sequence", ("deepspeed.zero_stage=3", "parallel.recompute=full")),
        "ZeRO 3, all on the host": (
            "V2",
            "window",
            ("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"),
        ),
        "ZeRO 3, small pieces": (
            "V3",
            "sequence",
            ("deepspeed.zero_stage=3", "deepspeed.bucket=1000", "deepspeed.sub_group=3000", "deepspeed.small_parameter=0"),
        ),
    },
    4: {
        "ZeRO 1, experts over 2": ("V2", "window", ("deepspeed.zero_stage=1", "parallel.ep=2")),
        "ZeRO 2": ("V3", "previous", ("deepspeed.zero_stage=2", "parallel.recompute=selective")),
        "ZeRO 2, experts over 4": ("V3", "sequence", ("deepspeed.zero_stage=2", "parallel.ep=4")),
        "ZeRO 3": ("V3", "window", ("deepspeed.zero_stage=3", "parallel.recompute=full")),
        "ZeRO 3, optimizer on the host": (
            "V3",
            "sequence",
            ("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=cpu"),
        ),
    },
}


def config_of(folder, family, *more: str) -> RunConfig:
    base = run_config("671B", folder, "engine=deepspeed", "precision=fp32", "optimizer.eps=1e-3", *more)
    return base.model_copy(update={"model": {"V3": V3, "V2": V2}[family]})


def steps(engine, config, scope, groups, windows, *, order, gradients, skip=lambda norm: None, loss_scale=None):
    accumulator = MoEAccumulator(
        engine.model,
        engine.optimizer,
        loss=DeepSeekLoss(config.model),
        balance=every_loss(config.model, scope),
        max_norm=0.5,
        groups=groups,
        window_order=order,
        owner=engine.owner,
        skip_if=lambda norm: gradients() or skip(norm),
        loss_scale=loss_scale,
    )
    return [accumulator.step(each) for each in windows]


def reference(config: RunConfig, scope: str):
    alone = Ranks(0, 1, torch.device("cpu"), None)
    config = config.model_copy(update={"precision": "float64"})
    engine = NativeEngine(config, alone, DeepSeekLoss(config.model))
    seen = []

    def keep() -> None:
        seen.append({name: p.grad.clone() for name, p in engine.model.named_parameters()})

    reports = steps(engine, config, scope, (), [window([6])] * STEPS, order="forwards_first", gradients=keep)
    return {
        "gradients": seen,
        "reports": [(r.total, r.grad_norm, r.load) for r in reports],
        "parameters": {name: p.detach() for name, p in engine.model.named_parameters()},
        "bias": {name: b.clone() for name, b in engine.model.named_buffers()},
    }


def rank(number: int, world: int, folder, wanted):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    found = {}
    for name, (family, scope, more) in VARIANTS[world].items():
        config = config_of(folder, family, *more)
        ep = config.parallel.ep
        ranks = Ranks(number, world, torch.device("cpu"), *meshes("cpu", world, ep=ep))
        engine = DeepSpeedEngine(config, ranks)
        module = engine.model.module
        seen = []

        def keep(module=module, seen=seen) -> None:
            seen.append({n: safe_get_full_grad(p).clone() for n, p in module.named_parameters()})

        order = "counting_pass" if config.deepspeed.zero_stage == 3 else "forwards_first"
        part = [rank_window(number, world)] * STEPS
        reports = steps(engine, config, scope, ranks.groups, part, order=order, gradients=keep)
        parameters = {n: safe_get_full_fp32_param(p).clone() for n, p in module.named_parameters()}
        experts = {n for n, p in module.named_parameters() if not getattr(p, "allreduce", True)}
        bias = {n: b.clone() for n, b in module.named_buffers()}
        local = number % ep if experts else 0

        def mine(n, x, experts=experts, local=local, ep=ep):
            return x.chunk(ep)[local] if n in experts else x

        want = wanted[name]
        found[name] = {
            "gradients": max(
                difference(got, {n: mine(n, x) for n, x in w.items()})
                for got, w in zip(seen, want["gradients"], strict=True)
            ),
            "parameters": difference(parameters, {n: mine(n, x) for n, x in want["parameters"].items()}),
            "loss": max(abs(float(r.total / w[0]) - 1) for r, w in zip(reports, want["reports"], strict=True)),
            "norm": max(abs(float(r.grad_norm / w[1]) - 1) for r, w in zip(reports, want["reports"], strict=True)),
            "counts": all(torch.equal(r.load, w[2]) for r, w in zip(reports, want["reports"], strict=True)),
            "bias": all(torch.allclose(bias[n].double(), b.double(), atol=1e-7) for n, b in want["bias"].items()),
        }
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_stage_takes_the_step_of_one_process(tmp_path, world):
    wanted, known = {}, {}
    for name, (family, scope, more) in VARIANTS[world].items():
        if (family, scope) not in known:
            known[family, scope] = reference(config_of(tmp_path, family), scope)
        wanted[name] = known[family, scope]
    for number, found in enumerate(run_ranks(rank, world, tmp_path, wanted, timeout=250)):
        for name, apart in found.items():
            assert apart["counts"] and apart["bias"], (number, name, apart)
            worst = {key: apart[key] for key in ("gradients", "parameters", "loss", "norm")}
            assert max(worst.values()) < BOUND, (number, name, worst)


#: (precision, ZeRO stage, optimizer on the host)
HALF = [("bf16", stage, host) for stage in (2, 3) for host in (False, True)]
HALF += [("fp16", 1, True), ("fp16", 3, False)] if FP16 else []


def adds_up(number: int, world: int, folder):
    """Relative difference of every gradient of a window of eight equal micro-batches from that of one of them."""
    from deepspeed.utils import safe_get_full_grad

    found = {}
    for precision, stage, host in HALF:
        more = (f"deepspeed.zero_stage={stage}", f"deepspeed.offload_optimizer={'cpu' if host else 'none'}")
        config = config_of(folder, "V3", f"precision={precision}", *more)
        ranks = Ranks(number, world, torch.device("cpu"), *meshes("cpu", world))
        engine = DeepSpeedEngine(config, ranks)
        parameters = dict(engine.model.module.named_parameters())
        seen = []

        def keep(parameters=parameters, seen=seen) -> bool:
            seen.append({n: safe_get_full_grad(p).double() for n, p in parameters.items()})
            return True

        part = rows(4 * number, 4 * number + 1)
        scope, order = ("window", "forwards_first") if stage < 3 else ("sequence", "counting_pass")
        windows = [Window([part] * 8), Window([part])]
        steps(
            engine, config, scope, ranks.groups, windows, order=order, gradients=keep, loss_scale=LossScale(2.0**10)
        )  # fmt: skip
        found[precision, stage, host] = (difference(*seen), {p.dtype for p in parameters.values()})
    return found


def refused(number: int, world: int, folder) -> str:
    from moetrain.engine import deepspeed

    deepspeed.takes_fp16 = lambda: False
    with pytest.raises(UserError) as error:
        ranks = Ranks(number, world, torch.device("cpu"), *meshes("cpu", world))
        DeepSpeedEngine(config_of(folder, "V3", "precision=fp16"), ranks)
    return str(error.value)


def test_a_cpu_without_fp16_units_is_named(tmp_path):
    corpus(tmp_path)
    (sentence,) = run_ranks(refused, 1, tmp_path)
    assert "this CPU lacks: use precision=bf16" in sentence


def test_in_half_precision_micro_batches_add_up_in_fp32(tmp_path):
    """Eight eighths are one: products of 16 bits scale by powers of two without an error, and sums of 16 bits
    would round."""
    corpus(tmp_path)
    for found in run_ranks(adds_up, 2, tmp_path):
        for (precision, stage, host), (apart, dtypes) in found.items():
            assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}, (precision, stage, host)
            assert apart < (1e-6 if precision == "bf16" else 1e-4), (precision, stage, host)


DISCARDING = (
    ("deepspeed.zero_stage=1",),
    ("deepspeed.zero_stage=2", "deepspeed.offload_optimizer=cpu"),
    ("deepspeed.zero_stage=2",),
    ("deepspeed.zero_stage=3",),
    ("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"),
)


def discards(number: int, world: int, folder):
    """Two steps: alone, with a discarded window between them, and with one that ends in an error of its guard's."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for more in DISCARDING:
        for between in (None, "discarded", "raised"):
            config = config_of(folder, "V3", *more)
            ranks = Ranks(number, world, torch.device("cpu"), *meshes("cpu", world))
            engine = DeepSpeedEngine(config, ranks)
            verdicts = iter([None, None] if between is None else [None, between, None])

            def judge(norm: float, verdicts=verdicts) -> str | None:
                verdict = next(verdicts)
                if verdict == "raised":
                    raise ZeroDivisionError
                return verdict

            accumulator = MoEAccumulator(
                engine.model, engine.optimizer, loss=DeepSeekLoss(config.model), groups=ranks.groups,
                balance=every_loss(config.model, "previous"), max_norm=0.5, owner=engine.owner, skip_if=judge,
            )  # fmt: skip
            reports = [accumulator.step(rank_window(number, world))]
            other = Window([rows(number, number + 1)] * 3)
            if between == "discarded":
                assert accumulator.step(other).skipped == "discarded"
            elif between == "raised":
                with pytest.raises(ZeroDivisionError):
                    accumulator.step(other)
            reports.append(accumulator.step(rank_window(number, world)))
            assert [r.skipped for r in reports] == [None, None]
            module = engine.model.module
            found[more, between] = (
                {n: safe_get_full_fp32_param(p).clone() for n, p in module.named_parameters()},
                {n: b.clone() for n, b in module.named_buffers()},
                [float(r.total) for r in reports],
            )
    return found


@pytest.mark.timeout(150)
def test_a_window_without_a_step_leaves_nothing_behind(tmp_path):
    corpus(tmp_path)  # once, for all ranks
    for found in run_ranks(discards, 2, tmp_path, timeout=140):
        for more in DISCARDING:
            p, b, losses = found[more, None]
            for between in ("discarded", "raised"):
                p2, b2, losses2 = found[more, between]
                assert losses == losses2, (more, between)
                assert all(torch.equal(p[n], p2[n]) for n in p), (more, between)
                assert all(torch.equal(b[n], b2[n]) for n in b), (more, between)


def starves(number: int, world: int, folder, stage: int, ep: int, together: bool):
    """20 steps in which a rank's tokens go to two experts, other ones in each step; stage 0: ours.

    ``together``: those of all ranks go to the same half of the experts, so that the other half, which is all that a
    rank of two has where experts are spread, sees no token; and the ranks take turns with the windows, some empty.
    """
    more = () if ep == 1 else (f"parallel.ep={ep}",)
    config = config_of(folder, "V3", f"deepspeed.zero_stage={stage or 1}", *more)
    ranks = Ranks(number, world, torch.device("cpu"), *meshes("cpu", world, ep=ep))
    if stage:
        engine = DeepSpeedEngine(config, ranks)
    else:
        engine = NativeEngine(config, ranks, DeepSeekLoss(config.model))
    accumulator = MoEAccumulator(
        engine.model, engine.optimizer, loss=DeepSeekLoss(config.model), groups=ranks.groups, owner=engine.owner
    )
    routers = len(accumulator.ledger.routers)
    losses = []
    for step in range(20):
        part = rank_window((number + step) % world if together else number, world)
        first = 4 * ((step + (0 if together else number)) % 2)
        chosen = torch.tensor([first, first + 1 + step % 3])
        routing = [chosen.expand(routers, item.input_ids.numel(), 2) for item in part]
        losses.append(float(accumulator.step(part, routing=routing).total))
    return losses


STARVED = {
    "half of them on each rank": (False, ((2, 2, 1), (2, 3, 1))),
    "all of a rank": (True, ((2, 1, 2), (2, 2, 2))),
    "ranks in turn": (True, ((4, 3, 1),)),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", [
    list(STARVED)[0], *(pytest.param(which, marks=pytest.mark.slow) for which in list(STARVED)[1:])])
def test_starved_experts_neither_hang_nor_change_a_loss(tmp_path, which):
    corpus(tmp_path)
    together, layouts = STARVED[which]
    want = run_ranks(starves, 2, tmp_path, 0, 1, together)[0]
    for world, stage, ep in layouts:
        got = run_ranks(starves, world, tmp_path, stage, ep, together, timeout=120)[0]
        assert len(got) == 20 and got == pytest.approx(want, rel=1e-5), (world, stage, ep)


def test_a_json_file_adds_keys_and_may_not_take_ours(tmp_path):
    alone = Ranks(0, 1, torch.device("cpu"), None)
    path = tmp_path / "zero.json"

    def settings(text):
        path.write_text(text)
        return settings_of(config_of(tmp_path, "V3", f"deepspeed.json_file={path}"), alone)

    got = settings('{"zero_optimization": {"reduce_bucket_size": 5}, "dump_state": true}')
    assert got["zero_optimization"]["reduce_bucket_size"] == 5 and got["dump_state"] is True
    assert got["gradient_clipping"] == 0.0 and got["zero_optimization"]["stage"] == 3
    for text, said in (
        ('{"gradient_clipping": 1.0}', "sets gradient_clipping"),
        ('{"zero_optimization": {"stage": 2}}', "sets zero_optimization.stage"),
        ('{"zero_optimization": {"zero_hpz_partition_size": 2}}', "sets zero_optimization.zero_hpz_partition_size"),
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        ('{"zero_optimization": [1]}', "must be an object"),
        ('{"zero_optimization": null}', "must be an object"),
        ('{"gradient_allreduce_op": "sum"}', "would change the step"),
        ('{"zero_optimization": {"zero_quantized_gradients": true}}', "would change the step"),
        ('{"zero_optimization": {"round_robin_gradients": true}}', "nobody has looked at"),
        ('{"zero_optimization": {"reduce_buckett_size": 5}}', "sets zero_optimization.reduce_buckett_size"),
    ):
        with pytest.raises(UserError, match=said):
            settings(text)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        settings_of(config_of(tmp_path, "V3", f"deepspeed.json_file={path}"), alone)
