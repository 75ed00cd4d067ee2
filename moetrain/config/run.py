"""Everything a run is, typed: model, data, batch, optimizer, schedule, balance, layout, engine.

One frozen object holds what the file and the command line said, checked before anything is allocated. Fields
that do not work yet are typed too, so that a config written today stays valid; ``moetrain.config.support``
refuses them in words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, field_validator, model_validator

from moetrain.config.model import ModelConfig
from moetrain.config.values import (
    Fraction,
    Int,
    NotNegative,
    NotNegativeReal,
    Piecewise,
    Positive,
    PositiveReal,
    Section,
    Truth,
)

FilePath = Annotated[Path, AfterValidator(Path.expanduser)]
OffloadTo = Literal["none", "cpu", "nvme"]


class DataConfig(Section):
    """What is read, and how it becomes sequences.

    ``source``: ``stdlib`` (the source text of Python's standard library), a text file, a folder of text, or
    the PREFIX of a pre-tokenised PREFIX.bin and PREFIX.idx. ``tokenizer``: ``bytes`` or a ``tokenizer.json``.
    ``seq_len`` in tokens. ``pack`` fills sequences with several documents; ``document_mask`` keeps them from
    seeing each other. ``held_out`` is the share of the data kept for evaluation.
    """

    source: str = "stdlib"
    tokenizer: str = "bytes"
    seq_len: Annotated[Positive, Field(ge=2)]
    pack: Truth = True
    document_mask: Truth = False
    held_out: Annotated[Fraction, Field(lt=1)] = 0.01

    @field_validator("source", "tokenizer")
    @classmethod
    def _home(cls, path: str) -> str:
        return str(Path(path).expanduser()) if path.startswith("~") else path

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.document_mask and not self.pack:
            raise ValueError("document_mask needs pack: a sequence of one document has nothing to mask")
        return self


class BatchRamp(Section):
    """Batch size growing from ``start`` sequences to ``global_batch`` over the first ``tokens`` tokens (V2,
    V3), in steps of ``increment`` sequences (default: ``start``)."""

    start: Positive
    tokens: Positive
    increment: Positive | None = None


class NoiseScale(Section):
    """Batch size steered by the measured gradient noise scale, between ``minimum`` and ``maximum``
    sequences, from ``global_batch`` on.

    Sizes are ``minimum`` and whole ``increment`` (default: ``minimum``) above it; ``decay`` is that of the
    averages of noise and signal, per step.
    """

    minimum: Positive
    maximum: Positive
    increment: Positive | None = None
    decay: Annotated[Fraction, Field(lt=1)] = 0.95


class BatchConfig(Section):
    """``global_batch``: sequences of one optimizer step over all ranks; ``micro_batch``: of one forward on
    one rank.

    ``lr_rule``: how the learning rate follows a batch that is not ``lr_reference`` (default:
    ``global_batch``) sequences: not at all (as V2 and V3 do in their ramp), linearly, by the square root.
    """

    global_batch: Positive
    micro_batch: Positive
    ramp: BatchRamp | None = None
    noise_scale: NoiseScale | None = None
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    lr_reference: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> BatchConfig:
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch ({self.micro_batch}) must not exceed global_batch ({self.global_batch}): "
                "a step would be mostly padding"
            )
        if self.ramp and self.ramp.start > self.global_batch:
            raise ValueError(f"ramp.start ({self.ramp.start}) must not exceed global_batch ({self.global_batch})")
        if self.ramp and self.noise_scale:
            raise ValueError("ramp and noise_scale both set the batch size: give one of them")
        noise = self.noise_scale
        if noise and not noise.minimum <= self.global_batch <= noise.maximum:
            raise ValueError(
                f"global_batch ({self.global_batch}), where noise_scale starts, must lie between its minimum "
                f"({noise.minimum}) and maximum ({noise.maximum})"
            )
        return self


class OptimizerConfig(Section):
    """AdamW. ``lr`` is the peak rate; ``max_norm`` clips the one global gradient norm (null: no clipping), and
    a window whose norm is above ``skip_above`` is discarded whole, on every rank (null: none). ``moments: bf16``
    halves what they take (V3)."""

    name: Literal["adamw"] = "adamw"
    lr: PositiveReal
    betas: tuple[Annotated[Fraction, Field(lt=1)], Annotated[Fraction, Field(lt=1)]] = (0.9, 0.95)
    eps: PositiveReal = 1e-8
    weight_decay: NotNegativeReal = 0.1
    max_norm: PositiveReal | None = 1.0
    skip_above: PositiveReal | None = None
    moments: Literal["fp32", "bf16"] = "fp32"

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.moments == "bf16" and self.betas[1] > 1 - 2**-8:
            raise ValueError(
                f"moments: bf16 would round away what betas[1] ({self.betas[1]}) adds in a step: "
                "set it to 0.996 at most (V3: 0.95), or moments: fp32"
            )
        return self


class _Schedule(Section):
    unit: Literal["steps", "tokens"] = "steps"
    warmup_steps: NotNegative = 0


class ConstantSchedule(_Schedule):
    """The peak rate after the warm-up."""

    kind: Literal["constant"] = "constant"


class CosineSchedule(_Schedule):
    """A cosine from the peak to ``final`` times the peak over the whole budget."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.1


class StepSchedule(_Schedule):
    """Multiplied by ``factor`` at each of the fractions ``at`` of the budget (V2: 0.316 at 60 % and 90 %)."""

    kind: Literal["step"] = "step"
    factor: Annotated[PositiveReal, Field(le=1)] = 0.316
    at: tuple[Fraction, ...] = (0.6, 0.9)

    @field_validator("at")
    @classmethod
    def _growing(cls, at: tuple[float, ...]) -> tuple[float, ...]:
        if list(at) != sorted(set(at)):
            raise ValueError(f"must grow from entry to entry, which {list(at)} does not")
        return at


class ConstantCosineConstantSchedule(_Schedule):
    """V3's: the peak for ``constant``, a cosine to ``ratio`` over ``cosine``, ``ratio`` for ``hold``, then
    ``last``.

    Lengths in ``unit`` (the warm-up lies within ``constant``); ``ratio`` and ``last`` are fractions of the
    peak.
    """

    kind: Literal["constant_cosine_constant"] = "constant_cosine_constant"
    constant: NotNegative
    cosine: Positive
    ratio: Fraction = 0.1
    hold: NotNegative
    last: Fraction


ScheduleConfig = Annotated[
    ConstantSchedule | CosineSchedule | StepSchedule | ConstantCosineConstantSchedule, Discriminator("kind")
]


class BalanceConfig(Section):
    """Load balance: which tokens a loss looks at (``scope``), its weights, and the rate of the routing bias.

    ``alpha`` weighs the expert loss, ``alpha_device`` and ``alpha_communication`` V2's losses over expert
    groups, ``z_loss`` the squared log-sum-exp of the router's logits. ``bias_rate`` is V3's gamma by tokens;
    ``zero_centred`` keeps the mean of the bias at 0.

    Scope ``window`` knows the global counts by running all ``forwards_first`` (what waits for its backward
    may wait on the host: ``parallel.offload_activations``) or by a ``counting_pass`` (one forward more, no
    memory); ``auto``: the first where the pipeline schedule allows it.
    """

    scope: Literal["sequence", "micro_batch", "running", "previous", "window"] = "sequence"
    alpha: NotNegativeReal = 0.0
    alpha_device: NotNegativeReal = 0.0
    alpha_communication: NotNegativeReal = 0.0
    z_loss: NotNegativeReal = 0.0
    bias_rate: Piecewise = Piecewise(((0.0, 0.0),))
    zero_centred: Truth = False
    window_order: Literal["auto", "forwards_first", "counting_pass"] = "auto"

    @property
    def losses(self) -> dict[str, Any]:
        """Their weights, as ``moetrain.accumulate.Balance`` takes them."""
        return {
            "alpha": self.alpha,
            "alpha_device": self.alpha_device,
            "alpha_communication": self.alpha_communication,
            "z_loss": self.z_loss,
        }


class MtpConfig(Section):
    """``weight``: lambda of the multi-token-prediction loss by tokens (V3: 0.3, after 10T tokens 0.1)."""

    weight: Piecewise = Piecewise(((0.0, 0.3),))


PipelineSchedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
]
SINGLE = ("gpipe", "1f1b")
V = ("zbv_zero_bubble", "dualpipev")
SPLIT_BACKWARD = ("interleaved_zero_bubble", *V)
FORWARDS_FIRST = ("gpipe", "looped_bfs")


class Fp8Config(Section):
    """How ``precision: fp8`` computes (docs/precision.md).

    ``products``: what multiplies; ``auto`` takes Triton's kernels on a GPU that has FP8 and the reference on a CPU.
    ``scales``: ``power_of_two`` rounds all of them up, as Blackwell wants; what travels to experts always is.
    ``attention_output``: what the layer after the attention keeps of its input for the backward.
    """

    products: Literal["auto", "reference", "triton", "torch", "deep_gemm"] = "auto"
    scales: Literal["fp32", "power_of_two"] = "fp32"
    attention_output: Literal["e4m3", "e5m6"] = "e4m3"


class ParallelConfig(Section):
    """How a run is spread. ``world_size`` is what the file was written for (null: any number of processes).

    ``dp_shard`` -1 takes the ranks that are left. ``pp`` pipeline ranks hold ``stages_per_rank`` stages each
    (default: as many as ``schedule`` needs). ``recompute`` trades compute for activations: ``selective`` makes
    norms and MLA's up-projections again, ``full`` whole blocks. ``offload_activations`` lets activations wait in
    host memory (GPU only), ``offload_states`` keeps parameters, gradients and optimizer states there between
    their uses. ``dispatch`` brings tokens to experts: ``auto`` takes DeepEP where it is installed and the run
    computes in bf16 on GPUs. ``reduce: window`` reduces gradients once a window, ``micro_batch`` at every micro-batch
    (less memory, more traffic). A collective that waits longer than ``timeout_s`` for a rank ends the run.
    """

    world_size: Positive | None = None
    pp: Positive = 1
    dp_replicate: Positive = 1
    dp_shard: Int = -1
    ep: Positive = 1
    cp: Positive = 1
    dispatch: Literal["auto", "all_to_all", "deep_ep"] = "auto"
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: Positive | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    reduce: Literal["window", "micro_batch"] = "window"
    reshard_after_forward: Truth = True
    offload_activations: Truth = False
    offload_states: Truth = False
    timeout_s: PositiveReal = 600.0

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        each = 1 if self.schedule in SINGLE else 2
        return self.pp * (self.stages_per_rank or each)

    def _pipeline(self) -> None:
        fixed = 1 if self.schedule in SINGLE else 2 if self.schedule in V else None
        if fixed and self.stages_per_rank not in (None, fixed):
            raise ValueError(
                f"schedule {self.schedule} puts {fixed} stage{'s' if fixed > 1 else ''} on a rank: leave "
                f"stages_per_rank ({self.stages_per_rank}) out"
            )
        if self.schedule not in SPLIT_BACKWARD:
            return
        why = f"schedule {self.schedule} takes weight gradients apart from the rest of the backward"
        if self.reshard_after_forward:
            raise ValueError(f"{why}, and weights must be there for both: set reshard_after_forward: false")
        if self.recompute != "none":
            raise ValueError(
                f"{why}, and every part would be recomputed for each: set recompute: none, or schedule: 1f1b"
            )
        if self.reduce == "micro_batch":
            raise ValueError(f"{why}, so there is no backward that ends with a micro-batch: set reduce: window")

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"dp_shard ({self.dp_shard}) must be at least 1, or -1 for the ranks that are left")
        if self.offload_activations and self.recompute == "selective":
            raise ValueError(
                "offload_activations with recompute: selective would keep on the device what selective computes again: "
                "set recompute to full or none"
            )
        fixed = self.pp * self.dp_replicate * self.cp * max(self.dp_shard, 1)
        if self.world_size and (self.world_size % fixed or (self.dp_shard != -1 and self.world_size != fixed)):
            raise ValueError(
                f"world_size ({self.world_size}) must be pp * dp_replicate * cp * dp_shard = {fixed}"
                + (" times a whole number" if self.dp_shard == -1 else "")
            )
        if self.pp > 1:
            self._pipeline()
        shards = self.dp_shard if self.dp_shard != -1 else self.world_size and self.world_size // fixed
        if shards and shards * self.cp % self.ep:
            raise ValueError(f"ep ({self.ep}) must divide the {shards * self.cp} ranks that shard the model")
        return self


class DeepSpeedConfig(Section):
    """What ``engine: deepspeed`` shards, and what it keeps outside the device; used with that engine only.

    ``zero_stage`` 1 shards optimizer states, 2 gradients too, 3 parameters too. Offloading to ``nvme`` needs
    ``nvme_path``, a folder on the drive, and Debian's package libaio-dev. ``bucket``: elements that are reduced or
    gathered in one call; ``small_parameter``: parameters of fewer elements are kept whole on every rank (stage 3);
    ``sub_group``: elements that the optimizer steps at once (stage 3), the most that is brought back from a drive.
    ``cpu_adam``: whose AdamW steps states on the host; ``auto`` takes DeepSpeed's on a machine with GPUs if it can be
    compiled, torch's otherwise. ``json_file``: further keys of DeepSpeed's own configuration.
    """

    zero_stage: Literal[1, 2, 3] = 3
    offload_optimizer: OffloadTo = "none"
    offload_parameters: OffloadTo = "none"
    nvme_path: FilePath | None = None
    bucket: Positive = 200_000_000
    small_parameter: NotNegative = 100_000
    sub_group: Positive = 1_000_000_000
    cpu_adam: Literal["auto", "deepspeed", "torch"] = "auto"
    json_file: FilePath | None = None

    @model_validator(mode="after")
    def _consistent(self) -> DeepSpeedConfig:
        if self.offload_parameters != "none" and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs zero_stage 3, not {self.zero_stage}")
        if self.offload_optimizer == "nvme" and self.zero_stage != 3:
            raise ValueError(f"offload_optimizer: nvme needs zero_stage 3, not {self.zero_stage}")
        if "nvme" in (self.offload_optimizer, self.offload_parameters) and self.nvme_path is None:
            raise ValueError("offload to nvme needs nvme_path, a folder on the drive")
        if self.cpu_adam == "deepspeed" and self.offload_optimizer == "none":
            raise ValueError("cpu_adam: deepspeed steps states on the host: set offload_optimizer to cpu or nvme")
        return self


class EvalConfig(Section):
    """Evaluation on the held-out data each ``every`` steps (0: never), over ``batches`` global batches."""

    every: NotNegative = 0
    batches: Positive = 4


class CheckpointConfig(Section):
    """A checkpoint each ``every`` steps (0: only at the end), the last ``keep`` kept; ``resume: auto``
    continues; with ``async_save`` training goes on while it is written (a copy of the state in host memory)."""

    every: NotNegative = 0
    keep: Positive = 2
    resume: Literal["auto", "never"] = "auto"
    async_save: Truth = False


class LogConfig(Section):
    """A record each ``every`` steps; TensorBoard when it is installed (``auto``)."""

    every: Positive = 1
    tensorboard: Literal["auto", "off"] = "auto"


def _default_run_dir(given: dict[str, Any]) -> Path:
    return Path("runs", str(given.get("name", "run")))


class RunConfig(Section):
    """A whole run. Exactly one of ``steps`` and ``tokens`` is its budget. Paths are relative to the working
    directory. ``experts``: whose grouped products experts take in bf16 on a GPU;
    ``triton`` routes by a kernel of its own, too."""

    name: str
    seed: NotNegative = 1234
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "float64", "bf16", "fp16", "fp8"] = "fp32"
    run_dir: FilePath = Field(default_factory=_default_run_dir)
    steps: Positive | None = None
    tokens: Positive | None = None
    model: ModelConfig
    init_from: FilePath | None = None
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ConstantSchedule()
    balance: BalanceConfig = BalanceConfig()
    mtp: MtpConfig = MtpConfig()
    parallel: ParallelConfig = ParallelConfig()
    fp8: Fp8Config = Fp8Config()
    experts: Literal["torch", "triton"] = "torch"
    engine: Literal["native", "deepspeed"] = "native"
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @field_validator("name")
    @classmethod
    def _file_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"must be letters, digits, dots, dashes and underscores as it names a folder, not {name!r}"
            )
        return name

    def _layouts(self) -> None:
        parallel = self.parallel
        if parallel.pp == 1:
            return
        if parallel.stages > self.model.num_hidden_layers:
            raise ValueError(
                f"parallel.pp ({parallel.pp}) with schedule {parallel.schedule} makes {parallel.stages} stages of "
                f"{self.model.num_hidden_layers} layers: give pp or stages_per_rank less, or another schedule"
            )
        if self.balance.window_order == "forwards_first" and parallel.schedule not in FORWARDS_FIRST:
            raise ValueError(
                f"balance.window_order forwards_first is not the order of schedule {parallel.schedule}: use "
                "counting_pass, or schedule gpipe or looped_bfs"
            )
        if self.batch.noise_scale:
            raise ValueError("batch.noise_scale needs the whole gradient on each rank: set parallel.pp 1, or use ramp")

    @property
    def counts_first(self) -> bool:
        """Whether scope ``window`` needs a counting pass: asked for, or backwards come too early for all forwards."""
        balance, parallel = self.balance, self.parallel
        active = any((balance.alpha, balance.alpha_device, balance.alpha_communication))
        early = parallel.pp > 1 and parallel.schedule not in FORWARDS_FIRST
        early |= self.engine == "deepspeed" and self.deepspeed.zero_stage == 3
        return active and balance.scope == "window" and (balance.window_order == "counting_pass" or early)

    def _zero(self) -> None:
        parallel, zero = self.parallel, self.deepspeed
        alone = {"parallel.pp": parallel.pp, "parallel.dp_replicate": parallel.dp_replicate}
        for key, size in alone.items():
            if size > 1:
                raise ValueError(f"{key} ({size}) needs engine: native; set it to 1 with engine: deepspeed")
        if parallel.ep > 1 and zero.zero_stage == 3:
            raise ValueError(
                f"parallel.ep ({parallel.ep}) needs deepspeed.zero_stage 1 or 2: stage 3 shards experts over all ranks"
            )
        if parallel.offload_states:
            raise ValueError("parallel.offload_states is the native engine's: set deepspeed.offload_optimizer instead")
        if self.precision == "float64":
            raise ValueError("precision: float64 needs engine: native, since DeepSpeed's master weights are fp32")
        if self.precision in ("bf16", "fp8") and zero.zero_stage == 1:
            raise ValueError(
                f"precision: {self.precision} needs deepspeed.zero_stage 2 or 3: stage 1 would add up micro-batches' "
                "gradients in another optimizer of DeepSpeed's, which this engine does not drive"
            )
        if self.batch.noise_scale:
            raise ValueError("batch.noise_scale needs each rank's own gradient, which ZeRO does not keep: use ramp")
        if self.checkpoint.async_save and "nvme" in (zero.offload_optimizer, zero.offload_parameters):
            raise ValueError("checkpoint.async_save copies to memory what nvme is to spare it: set it to false")
        if self.optimizer.moments == "bf16" and zero.offload_optimizer == "nvme":
            raise ValueError("optimizer.moments: bf16 cannot lie on a drive: set it to fp32, or offload_optimizer: cpu")
        if self.optimizer.moments == "bf16" and zero.cpu_adam == "deepspeed":
            raise ValueError(
                "optimizer.moments: bf16 is not what DeepSpeed's CPU Adam keeps, which has fp32: set it to fp32, or "
                "deepspeed.cpu_adam: torch"
            )
        if parallel.reduce == "micro_batch" and zero.zero_stage == 1:
            raise ValueError(
                "parallel.reduce: micro_batch needs deepspeed.zero_stage 2 or 3: stage 1 keeps whole gradients until "
                "the window ends"
            )
        if zero.zero_stage == 3 and self.balance.window_order == "forwards_first":
            raise ValueError(
                "balance.window_order: forwards_first gives wrong gradients under ZeRO 3, without an error: use "
                "counting_pass, or deepspeed.zero_stage 2"
            )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if (self.steps is None) == (self.tokens is None):
            both = "not both" if self.steps else "neither is there"
            raise ValueError(f"give the budget as either steps or tokens: {both}")
        model, balance, length = self.model, self.balance, self.data.seq_len
        if length > model.max_position_embeddings:
            raise ValueError(
                f"data.seq_len ({length}) must not exceed model.max_position_embeddings "
                f"({model.max_position_embeddings})"
            )
        if length <= model.num_nextn_predict_layers + 1:
            raise ValueError(
                f"data.seq_len ({length}) must exceed model.num_nextn_predict_layers + 1 "
                f"({model.num_nextn_predict_layers + 1}), or multi-token prediction has no target"
            )
        if balance.bias_rate.largest > 0 and model.topk_method != "noaux_tc":
            raise ValueError(
                f"balance.bias_rate needs a routing bias, which topk_method {model.topk_method} lacks: "
                "set it to 0 or use noaux_tc"
            )
        if model.n_routed_experts % self.parallel.ep:
            raise ValueError(
                f"parallel.ep ({self.parallel.ep}) must divide model.n_routed_experts ({model.n_routed_experts}), "
                "or ranks would hold different numbers of experts"
            )
        self._layouts()
        if self.engine == "deepspeed":
            self._zero()
        if self.batch.noise_scale:
            if self.parallel.reduce == "micro_batch":
                raise ValueError("batch.noise_scale needs parallel.reduce: window, which has each rank's own gradient")
            if self.parallel.ep > 1:
                raise ValueError(
                    "batch.noise_scale needs each rank's own gradient, and experts spread over ranks have that of all: "
                    "set parallel.ep 1, or use ramp"
                )
            budget = "steps" if self.steps else "tokens"
            if self.schedule.kind != "constant" and self.schedule.unit != budget:
                raise ValueError(
                    f"with batch.noise_scale nobody knows beforehand how many tokens a step has: give schedule.unit "
                    f"{budget}, as the budget, or a constant schedule"
                )
        if self.eval.every and not self.data.held_out:
            raise ValueError("eval.every needs held-out data: give data.held_out a share, or eval.every 0")
        for key in ("alpha_device", "alpha_communication"):
            if getattr(balance, key) > 0 and model.n_group == 1:
                raise ValueError(f"balance.{key} balances expert groups and needs model.n_group above 1")
        return self
