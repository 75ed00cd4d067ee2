"""How many bytes of tensors are alive, counted by following every storage from its making to its end.

Resident memory says what allocators hold, torch's allocator statistics exist on CUDA alone, and torch's own trackers
for FSDP2 refuse a second micro-batch. Here a dispatch mode sees what every operator returns, and a weak reference on
each storage says when it is gone: the same number on a CPU, a GPU and for fake tensors, which have sizes and no memory.
It sees what autograd runs on threads of its own (dispatch modes travel there) and what custom operators do inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

#: kind -> gives the tensors that are of this kind at the moment
Kinds = Mapping[str, Callable[[], Iterable[Tensor | None]]]
REST = "activations"
#: torch.tensor(...) fills its storage out of sight, and then shows it to the dispatcher
_MAKES = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}
_CLOSE = 1.001  # a moment whose bytes are within this of the peak's stands for the peak's


class TensorMemory(TorchDispatchMode):
    """Inside, follows tensor storages; ``current`` and ``peak`` in bytes, each storage once whoever shares it.

    Counted are the tensors that ``kinds`` gives when it is entered, and every storage that is made inside. Operators'
    own scratch space is not seen; tensors from before that nobody gave are not counted.

    Args:
        kinds: names for groups of tensors, asked again whenever ``peak_by`` needs it; a storage that several name is
            the first's. ``training_kinds`` gives those of a training step.
        device: count what lies there ("cpu", "cuda"); None: everywhere but on meta.
    """

    def __init__(self, kinds: Kinds | None = None, device: str | None = None) -> None:
        super().__init__()
        self.kinds, self.device = dict(kinds or {}), device
        self.current = self.peak = 0
        self._live: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # by id: storage, bytes
        self._at_peak: dict[str, int] = {}
        self._seen = 0  # bytes of the moment that _at_peak describes
        self._rising = False  # the last change was a new peak
        self._hidden = 0
        self._restore: list[Callable[[], None]] = []

    @property
    def peak_by(self) -> dict[str, int]:
        """Bytes of the peak by kind, what no kind names as ``activations``; they sum to ``peak``.

        Of a moment within 0.1 % of the peak.
        """
        self._look()
        named = {kind: size for kind, size in self._at_peak.items() if kind != REST}
        return {**named, REST: self.peak - sum(named.values())}

    def by_kind(self) -> dict[str, int]:
        """The same of what is alive now."""
        named = {kind: 0 for kind in self.kinds}
        taken: set[int] = set()
        for kind, tensors in self.kinds.items():
            for storage in _storages(tensors()):
                key = id(storage)
                if key not in taken and self._is_live(key, storage):
                    taken.add(key)
                    named[kind] += self._live[key][1]
        return {**named, REST: self.current - sum(named.values())}

    def reset_peak(self) -> None:
        """The peak is looked for anew, from what is alive now."""
        self.peak, self._at_peak, self._seen, self._rising = self.current, {}, 0, True

    # -- following ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> TensorMemory:
        for tensors in self.kinds.values():
            for tensor in _plain(tensors()):
                self._add(tensor)
        self._replace(UntypedStorage, "resize_", self._resize)  # FSDP2 frees gathered weights so
        # DTensor looks shapes up on fake tensors of the whole size, in the mode that is on: those are nobody's memory
        self._replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._hide)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._restore:
            self._restore.pop()()

    def _replace(self, owner: type, name: str, around: Callable[..., Any]) -> None:
        before, own = getattr(owner, name), name in vars(owner)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(before, *args, **kwargs)

        setattr(owner, name, replaced)
        self._restore.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def _resize(self, resize: Callable[..., Any], storage: UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        if self._is_live(id(storage), storage):
            self._sized(id(storage), storage)
        elif size and self._counts(storage.device.type):
            self._follow(storage)
        return out

    def _hide(self, look_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._hidden += 1
        try:
            return look_up(*args, **kwargs)
        finally:
            self._hidden -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: what it does with its parts is seen
        if self._hidden:
            return func(*args, **kwargs)
        if f"{func.namespace}::{func._opname}" in OPDEFS and not any(issubclass(kind, FakeTensor) for kind in types):
            out = self._inside(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if self._is_live(id(storage), storage):
                self._sized(id(storage), storage)
            elif func in _MAKES or not any(storage is x.untyped_storage() for x in tensors_in((args, kwargs))):
                self._add(tensor)
        return out

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A custom operator's own operators are seen, too."""
        device = next((x.device.type for x in tensors_in((args, kwargs))), "cpu")
        key = torch._C.DispatchKey.CPU if device == "cpu" else torch._C.DispatchKey.CUDA
        with _Again(self):
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def _counts(self, device: str) -> bool:
        return device != "meta" if self.device is None else device == self.device

    def _is_live(self, key: int, storage: UntypedStorage) -> bool:
        entry = self._live.get(key)
        return entry is not None and entry[0]() is storage

    def _add(self, tensor: Tensor) -> None:
        if self._counts(tensor.device.type):
            storage = tensor.untyped_storage()
            if not self._is_live(id(storage), storage):
                self._follow(storage)

    def _follow(self, storage: UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._live[key] = (weakref.ref(storage, lambda gone: self._end(key, gone)), size)
        self._change(size)

    def _sized(self, key: int, storage: UntypedStorage) -> None:
        reference, before = self._live[key]
        size = storage.nbytes()
        if size != before:
            if size < before:
                self._look()
            self._live[key] = (reference, size)
            self._change(size - before)

    def _end(self, key: int, gone: weakref.ref[UntypedStorage]) -> None:
        entry = self._live.get(key)
        if entry is not None and entry[0] is gone:
            self._look()
            del self._live[key]
            self.current -= entry[1]

    def _change(self, by: int) -> None:
        self.current += by
        if self.current > self.peak:
            self.peak, self._rising = self.current, True

    def _look(self) -> None:
        """Before something ends: if all there is now is the peak so far, what is it made of?"""
        if self._rising and self.kinds and self.peak > self._seen * _CLOSE:
            self._rising, self._seen = False, self.peak
            self._at_peak = self.by_kind()
        self._rising = False


class _Again:
    """The mode on once more while it handles an operator."""

    def __init__(self, mode: TensorMemory) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        TorchDispatchMode.__enter__(self.mode)

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self.mode, *error)


def training_kinds(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Kinds:
    """``parameters``, ``gradients`` and ``optimizer`` states (buffers count as parameters), and of FSDP2 ``gathered``
    parameters and ``unsharded`` gradients; the rest is activations."""

    def parameters() -> Iterator[Tensor]:
        yield from model.parameters()
        yield from model.buffers()

    def gradients() -> Iterator[Tensor | None]:
        for p in model.parameters():
            yield p.grad

    def states() -> Iterator[Tensor]:
        for state in [] if optimizer is None else list(optimizer.state.values()):
            yield from (x for x in state.values() if isinstance(x, Tensor))

    kinds: dict[str, Callable[[], Iterable[Tensor | None]]] = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": states,
    }
    fsdp = list(_fsdp_parameters(model))
    if not fsdp:
        return kinds

    managed = {id(x) for p in fsdp for x in (p.sharded_param, getattr(p, "_unsharded_param", None))}
    plain = [p for p in model.parameters() if id(p) not in managed]  # left out of FSDP2

    def sharded() -> Iterator[Tensor]:
        yield from (p._sharded_param_data for p in fsdp)
        yield from plain
        yield from model.buffers()

    def sharded_gradients() -> Iterator[Tensor | None]:
        yield from (p.sharded_param.grad for p in fsdp)
        yield from (p.grad for p in plain)

    def gathered() -> Iterator[Tensor]:
        for p in fsdp:
            yield from p.all_gather_outputs

    def unsharded() -> Iterator[Tensor | None]:
        for p in fsdp:
            yield p.unsharded_accumulated_grad
            unsharded_param = getattr(p, "_unsharded_param", None)  # there since the first gather
            yield None if unsharded_param is None else unsharded_param.grad

    return {
        "parameters": sharded,
        "gradients": sharded_gradients,
        "optimizer": states,
        "gathered": gathered,
        "unsharded": unsharded,
    }


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", ()):
            yield from group.fsdp_params


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Of what an operator takes or returns: tensors, or tuples and lists of them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def _plain(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """The tensors that hold the values: the local part of a DTensor."""
    for tensor in tensors:
        if tensor is None:
            continue
        if is_traceable_wrapper_subclass_type(type(tensor)):
            wrapper: Any = tensor
            parts = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
            yield from _plain(part for part in parts if isinstance(part, Tensor))
        else:
            yield tensor


def _storages(tensors: Iterable[Tensor | None]) -> Iterator[UntypedStorage]:
    for tensor in _plain(tensors):
        yield tensor.untyped_storage()
