"""Models in and out of Hugging Face folders, one tensor at a time.

A 671B folder is larger than any host's memory, so nothing here ever holds more than the model and a few tensors:
reading fills a model that was built without memory and lets go of each shard after its last tensor, writing makes one
shard after the other.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
#: dtypes whose numbers are the weights; FP8 has scales besides
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    folder = Path(folder)
    config = ModelConfig.from_hf(_json(folder / "config.json"))
    with _Reader(folder) as reader:
        if config.num_nextn_predict_layers and not reader.has_prefix(f"model.layers.{config.num_hidden_layers}."):
            # transformers keeps the key and drops the weights
            warnings.warn(
                f"{folder} announces {config.num_nextn_predict_layers} MTP layers and holds none: loaded without",
                stacklevel=2,
            )
            config = config.model_copy(update={"num_nextn_predict_layers": 0})
        with torch.device("meta"):
            model = DeepSeek(config).to(dtype)
        model.to_empty(device=device)
        state = model.state_dict()
        with torch.no_grad():
            for piece in reader.plan(config):
                place, tensor = _place(state[piece.ours], piece), reader.read(piece)
                if not piece.copy:
                    place.copy_(tensor)
                elif not _equal(place, tensor):
                    warnings.warn(
                        f"{folder} has {piece.released} with other values than the main model's {piece.ours}, which "
                        "is used for both: here MTP shares it",
                        stacklevel=2,
                    )
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


class _Reader:
    """The tensors of a folder by name; shards are opened when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._where = self._locate()
        self._unread: Counter[str] = Counter()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

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
            return dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        raise UserError(f"{self.folder} holds neither {SINGLE} nor {INDEX}; give a Hugging Face folder with weights")

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._where)

    def plan(self, config: ModelConfig) -> list[Piece]:
        """What to read, after a check that everything is there and nothing else."""
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
        wanted = [p for p in wanted if p.released in self._where]
        names = (name for p in wanted for name in (p.released, p.released + SCALE))
        self._unread = Counter(self._where[name] for name in names if name in self._where)
        return wanted

    def read(self, piece: Piece) -> Tensor:
        """One tensor of the plan, once, in the shape the config asks for, never FP8."""
        tensor = self._tensor(piece.released)
        shard = self._where[piece.released]
        if tuple(tensor.shape) != piece.shape:
            raise UserError(
                f"{shard} in {self.folder} has {piece.released} of shape {list(tensor.shape)}, "
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
                f"{shard} in {self.folder} has {piece.released} as {_name(tensor.dtype)} {list(tensor.shape)}, which "
                "cannot be read; convert the folder to bfloat16"
            )
        if scale not in self._where:
            raise UserError(
                f"{self.folder} has {piece.released} in FP8 but not its {scale}; without the scales the weights mean "
                "nothing: download the folder again"
            )
        try:
            return dequantise(tensor, self._tensor(scale))
        except ValueError as error:
            raise UserError(f"{self.folder}: {scale} does not fit its weight ({error})") from None

    def _tensor(self, name: str) -> Tensor:
        shard = self._shard(self._where[name])
        try:
            tensor: Tensor = shard.get_tensor(name)
        except SafetensorError as error:
            if name in shard.keys():  # noqa: SIM118 - not a dict
                reason = f"has {name}, which cannot be read ({error})"
            else:
                reason = f"lacks {name}, although {INDEX} says so"
            raise UserError(f"{self._where[name]} in {self.folder} {reason}; download it again") from None
        self._unread[self._where[name]] -= 1
        if not self._unread[self._where[name]]:
            del self._open[self._where[name]]  # its pages count as this process' memory as long as it is mapped
        return tensor

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except SafetensorError as error:
                raise UserError(f"{self.folder / name} is damaged or cut off ({error}); download it again") from None
            except OSError as error:
                raise UserError(f"{self.folder / name} cannot be read ({error}); mend its permissions") from None
        return self._open[name]


def _place(tensor: Tensor, piece: Piece) -> Tensor:
    """The view of one of our tensors that a released tensor is."""
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    return tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]]


def _equal(place: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor of the folder is what ``place`` was filled with; in parts, so that no copy of it is made."""
    parts = zip(place.split(1024), tensor.split(1024), strict=True)
    return all(torch.equal(mine, part.to(mine)) for mine, part in parts)


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
