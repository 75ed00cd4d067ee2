"""Models in and out of Hugging Face folders, one tensor at a time.

A 671B folder is larger than any host's memory, so nothing here ever holds more than a few tensors beside what is filled
or saved: ``PretrainedWeights`` reads the rows that a process asks for and no others, and lets go of a file soon after,
writing makes one shard after the other.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetrain.checkpoint.fp8_blocks import dequantise, quantise, scale_shape
from moetrain.checkpoint.names import Piece, pieces
from moetrain.config.model import ModelConfig
from moetrain.errors import UserError
from moetrain.model import DeepSeek
from moetrain_kernels.quantise import TILE

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
#: dtypes whose numbers are the weights; FP8 has scales besides
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: elements read at once (rows of one tensor, at least one), and bytes after which files are let go of
STEP = 1 << 22
MAPPED = 1 << 25


def from_pretrained(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DeepSeek:
    """The model of a Hugging Face folder (DeepSeek-V2-Lite, V2, V3; also as transformers writes it).

    Args:
        folder: ``config.json`` and ``model.safetensors``, or shards with ``model.safetensors.index.json``. The MTP
            module's duplicates of embedding and head may be absent; where they differ from the main model's, that one
            counts, and a warning says so.
        dtype: of the parameters; the routing bias stays fp32. FP8 blocks are dequantised.
        device: where the model is made.

    Raises:
        UserError: a file or tensor is missing, damaged, of another shape, or not of this model; names it.
    """
    weights = PretrainedWeights(folder)
    with torch.device("meta"):
        model = DeepSeek(weights.config).to(dtype)
    model.to_empty(device=device)
    for name, tensor in model.state_dict().items():
        weights.fill(name, tensor.shape, 0, tensor)
    return model


def save_pretrained(
    model: DeepSeek,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    quantize: Literal["fp8"] | None = None,
) -> None:
    """Writes a folder in the released layout, which transformers loads (it leaves MTP out).

    Sharded parameters (FSDP2) are gathered one at a time; then every rank has to call this, rank 0 writes, and all
    return or fail together. Files get their names when all are complete, the one that a reader looks for last, so that
    a folder is never half of one model and half of another.

    Args:
        model: what is saved; MTP and the routing bias (fp32) are included.
        folder: made where it is missing.
        max_shard_bytes: a shard is closed before it grows beyond this; one tensor is never cut.
        dtype: of the saved weights; default: the model's.
        quantize: ``fp8``: linear weights in 128 x 128 blocks, as DeepSeek-V3 is released.

    Raises:
        UserError: the folder cannot be written, or ``quantize`` is unknown.
    """
    if quantize not in (None, "fp8"):
        raise UserError(f"quantize must be fp8 or None, not {quantize!r}")
    state = model.state_dict()
    saved = dtype or state["embed_tokens.weight"].dtype
    together = any(hasattr(tensor, "full_tensor") for tensor in state.values())
    writer = _Writer(Path(folder), max_shard_bytes)
    _on_first_rank(writer, writer.start, together)
    for ours, parts in groupby(pieces(model.config), key=lambda piece: piece.ours):
        released = _encoded(list(parts), _whole(state[ours]), saved, quantize)
        _on_first_rank(writer, partial(writer.add, released), together)
    _on_first_rank(writer, partial(writer.finish, _config_of(model.config, saved, quantize)), together)


def tensor_inventory(config: ModelConfig, *, quantized: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of a release: bf16, or FP8 with fp32 scales where ``quantized``; the bias fp32."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for piece in pieces(config):
        if piece.released.endswith("e_score_correction_bias"):
            found[piece.released] = (piece.shape, torch.float32)
        elif quantized and piece.linear:
            found[piece.released] = (piece.shape, torch.float8_e4m3fn)
            found[piece.released + SCALE] = (scale_shape(*piece.shape), torch.float32)
        else:
            found[piece.released] = (piece.shape, torch.bfloat16)
    return found


# -- reading ----------------------------------------------------------------------------------------------------------


class PretrainedWeights:
    """The weights of a Hugging Face folder, as ``moetrain.model.weights.Weights``: reads the rows that are asked for.

    FP8 blocks are dequantised. Of MTP's duplicates of embedding and head, where they differ from the main model's, that
    one counts, and a warning says so.

    Args:
        folder: see ``from_pretrained``.
        config: of the model that is filled; its tensors have to be the folder's, but may leave MTP out. Default: the
            folder's own, without MTP where it is announced and missing.

    Raises:
        UserError: a file or tensor is missing, damaged, of another shape, or not of this model; names it. What only the
            tensors themselves tell is found when they are read.
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None) -> None:
        self.folder = Path(folder)
        own = ModelConfig.from_hf(_json(self.folder / "config.json"))
        self._open: dict[str, Any] = {}
        self._mapped = 0
        self._where = self._locate()
        depth = own.num_nextn_predict_layers
        if depth and not any(n.startswith(f"model.layers.{own.num_hidden_layers}.") for n in self._where):
            # transformers keeps the key and drops the weights
            if config is None:
                warnings.warn(f"{folder} announces {depth} MTP layers and holds none: loaded without", stacklevel=3)
            own = own.model_copy(update={"num_nextn_predict_layers": 0})
        self.config = own if config is None else _one_of(self.folder, own, config)
        self._pieces = self._plan(own)

    @torch.no_grad()
    def fill(self, name: str, shape: Sequence[int], first: int, rows: Tensor) -> None:
        last, others = first + len(rows), set()
        for piece in self._pieces[name]:
            if piece.expert is not None:
                if first <= piece.expert < last:
                    place = rows[piece.expert - first]
                    self._fill(piece, 0, place if piece.rows is None else place[piece.rows[0] : piece.rows[1]])
                continue
            start, end = piece.rows or (0, shape[0])
            low, high = max(first, start), min(last, end)
            if low < high and not self._fill(piece, low - start, rows[low - first : high - first]):
                others.add(piece.released)
        for released in sorted(others):
            warnings.warn(
                f"{self.folder} has {released} with other values than the main model's {name}, which is used for both: "
                "here MTP shares it",
                stacklevel=3,
            )

    def _fill(self, piece: Piece, first: int, place: Tensor) -> bool:
        """Sets ``place`` to a released tensor's rows from ``first`` on; of a copy says whether it is what is there."""
        step = max(1, STEP // max(1, math.prod(piece.shape[1:])))
        same = True
        for at in range(0, len(place), step):
            part = place[at : at + step]
            tensor = self._read(piece, first + at, first + at + len(part))
            if piece.copy:
                same = same and torch.equal(part, tensor.to(part))
            else:
                part.copy_(tensor)
        return same

    def _locate(self) -> dict[str, str]:
        """File of every tensor."""
        index = self.folder / INDEX
        if index.is_file():
            where = _json(index).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
                raise UserError(f"{index} has no weight_map; download it again")
            for name in sorted(set(where.values())):
                if not (self.folder / name).is_file():
                    raise UserError(f"{index} names {name}, which is not in {self.folder}; download that shard")
            return dict(where)
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        raise UserError(f"{self.folder} holds neither {SINGLE} nor {INDEX}; give a Hugging Face folder with weights")

    def _plan(self, config: ModelConfig) -> dict[str, list[Piece]]:
        """What each of our tensors consists of, after a check that everything is there and nothing else."""
        wanted = list(pieces(config, fused=any(name.endswith(".mlp.experts.gate_up_proj") for name in self._where)))
        missing = [p.released for p in wanted if p.released not in self._where and not p.copy]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"{self.folder} lacks the tensor {missing[0]}{more}; its config.json asks for it")
        known = {p.released for p in wanted}
        other = [n for n in self._where if n.removesuffix(SCALE) not in known and not n.endswith("rotary_emb.inv_freq")]
        if other:
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise UserError(
                f"{self.folder} holds the tensor {sorted(other)[0]}{more}, which its config.json has no place for; "
                "the two do not belong together"
            )
        plan: dict[str, list[Piece]] = {}
        for piece in wanted:
            if piece.released in self._where:
                plan.setdefault(piece.ours, []).append(piece)
        return plan

    def _read(self, piece: Piece, first: int, last: int) -> Tensor:
        """Rows of a tensor that has the shape the config asks for, never FP8."""
        tensor, shape = self._rows(piece.released, first, last)
        shard = self._where[piece.released]
        if shape != piece.shape:
            raise UserError(
                f"{shard} in {self.folder} has {piece.released} of shape {list(shape)}, "
                f"and config.json makes it {list(piece.shape)}; the two do not belong together"
            )
        scale = piece.released + SCALE
        if tensor.dtype in PLAIN:
            if scale in self._where:
                raise UserError(
                    f"{self.folder} has {scale}, but its weight is {_name(tensor.dtype)} and not FP8; if that was "
                    "multiplied already, remove the scale"
                )
            return tensor
        if tensor.dtype != torch.float8_e4m3fn or tensor.ndim != 2:
            raise UserError(
                f"{shard} in {self.folder} has {piece.released} as {_name(tensor.dtype)} {list(shape)}, which "
                "cannot be read; convert the folder to bfloat16"
            )
        if scale not in self._where:
            raise UserError(
                f"{self.folder} has {piece.released} in FP8 but not its {scale}; without the scales the weights mean "
                "nothing: download the folder again"
            )
        # whole blocks, since a scale is of one
        above = first // TILE * TILE
        scales, size = self._rows(scale, above // TILE, -(-last // TILE))
        if size != scale_shape(*piece.shape):
            raise UserError(
                f"{self.folder}: {scale} does not fit its weight (scales are {list(size)}, and a {piece.shape[0]} x "
                f"{piece.shape[1]} weight has {scale_shape(*piece.shape)})"
            )
        return dequantise(self._rows(piece.released, above, last)[0], scales)[first - above :]

    def _rows(self, name: str, first: int, last: int) -> tuple[Tensor, tuple[int, ...]]:
        """Rows (fewer where the tensor ends before ``last``) and the shape of all."""
        file = self._opened(self._where[name])
        try:
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            tensor: Tensor = part[first:last] if shape else file.get_tensor(name)
        except SafetensorError as error:
            if name in file.keys():  # noqa: SIM118 - not a dict
                reason = f"has {name}, which cannot be read ({error})"
            else:
                reason = f"lacks {name}, although {INDEX} says so"
            raise UserError(f"{self._where[name]} in {self.folder} {reason}; download it again") from None
        self._mapped += tensor.nbytes
        return tensor, shape

    def _opened(self, name: str) -> Any:
        if self._mapped > MAPPED:  # what was read counts as this process' memory as long as its file is mapped
            self._open.clear()
            self._mapped = 0
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except SafetensorError as error:
                raise UserError(f"{self.folder / name} is damaged or cut off ({error}); download it again") from None
            except OSError as error:
                raise UserError(f"{self.folder / name} cannot be read ({error}); mend its permissions") from None
        return self._open[name]


def _one_of(folder: Path, own: ModelConfig, asked: ModelConfig) -> ModelConfig:
    """``asked``, after a check that its tensors are among those of the folder's model ``own``."""
    depth = asked.num_nextn_predict_layers
    if depth > own.num_nextn_predict_layers:
        raise UserError(
            f"{folder} holds {own.num_nextn_predict_layers} MTP layers, and model.num_nextn_predict_layers={depth} "
            "asks for more: set it lower"
        )
    same = own.model_copy(update={"num_nextn_predict_layers": depth})
    tensors = set(pieces(same))
    if set(pieces(asked)) != tensors:
        values = {key: (getattr(asked, key), getattr(same, key)) for key in type(asked).model_fields}
        apart = [
            f"model.{key}={ours} ({theirs} there)"
            for key, (ours, theirs) in values.items()
            if set(pieces(same.model_copy(update={key: ours}))) != tensors
        ]
        raise UserError(
            f"{folder} is another model than this run's: {', '.join(apart)}; leave `model` out of the run, and the "
            "folder says what it is"
        )
    return asked


def _place(tensor: Tensor, piece: Piece) -> Tensor:
    """The view of one of our whole tensors that a released tensor is."""
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    return tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a Hugging Face folder with config.json and weights") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); mend its permissions") from None
    except ValueError:
        raise UserError(f"{path} is not valid JSON; download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object; download it again")
    return content


# -- writing ----------------------------------------------------------------------------------------------------------


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _encoded(
    parts: Iterable[Piece], ours: Tensor, dtype: torch.dtype, quantize: str | None
) -> Iterator[tuple[str, Tensor]]:
    """The released tensors that one of ours becomes."""
    for piece in parts:
        tensor = _place(ours, piece)
        if piece.released.endswith("e_score_correction_bias"):
            yield piece.released, tensor.to(torch.float32)
        elif quantize == "fp8" and piece.linear:
            weight, scale = quantise(tensor)
            yield piece.released, weight
            yield piece.released + SCALE, scale
        else:
            yield piece.released, tensor.to(dtype)


def _config_of(config: ModelConfig, dtype: torch.dtype, quantize: str | None) -> dict[str, Any]:
    written = config.to_hf()
    v3 = config.model_type == "deepseek_v3"
    written["architectures"] = ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"]
    written["torch_dtype"] = _name(dtype)
    if quantize == "fp8":
        written["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    return written


class _Writer:
    """Shards one after the other under names of their own, renamed when their number is known."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.held: dict[str, Tensor] = {}
        self.size = self.total = 0
        self.shards: list[list[str]] = []

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if self.held and self.size + size > self.limit:
                self._flush()
            self.held[name] = tensor.cpu().contiguous().clone()  # a slice must not write the whole it is cut from
            self.size += size
            self.total += size

    def finish(self, config: Mapping[str, Any]) -> None:
        """Puts the new files in the place of an older model's; between the two a reader finds none."""
        self._flush()
        count = len(self.shards)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for old in (self.folder / INDEX, self.folder / SINGLE, *self.folder.glob("model-?????-of-?????.safetensors")):
            old.unlink(missing_ok=True)
        _write_json(self.folder / "config.json", dict(config))
        for i, name in enumerate(names):
            os.replace(self._temporary(i), self.folder / name)
        if count > 1:
            where = {tensor: names[i] for i, shard in enumerate(self.shards) for tensor in shard}
            _write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": where})

    def remove_unfinished(self) -> None:
        for left in self.folder.glob(".shard-*.partial"):
            left.unlink()

    def _flush(self) -> None:
        save_file(self.held, self._temporary(len(self.shards)), metadata={"format": "pt"})
        self.shards.append(list(self.held))
        self.held, self.size = {}, 0

    def _temporary(self, shard: int) -> Path:
        return self.folder / f".shard-{shard:05d}.partial"


def _on_first_rank(writer: _Writer, do: Callable[[], None], together: bool) -> None:
    """Runs ``do`` on rank 0; where ranks gather together, its failure is everyone's, so that nobody waits for it."""
    failure: list[str | None] = [None]
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        try:
            do()
        except (OSError, SafetensorError) as error:
            failure[0] = getattr(error, "strerror", None) or str(error)
            with suppress(OSError):
                writer.remove_unfinished()
    if together:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise UserError(f"{writer.folder} cannot be written ({failure[0]}); make room or give another folder")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
