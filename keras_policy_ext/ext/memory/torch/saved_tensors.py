"""PyTorch: the tensors that autograd saves for gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
from keras import ops
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.ext.memory.saved_tensors import (
    Kept,
    Measured,
    MeasuredStep,
    Memory,
    Origin,
    kept_of,
    source_of_variable,
)

# The public way to compute without numbers, the device "meta", has other
# kernels than the device of the model. Where this is gone, the forward pass is
# run.
try:
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError:
    FakeTensorMode = None

_ORIGIN = "keras_policy_ext_origin"
"""The attribute of a storage that holds its `Origin`."""


def _kept(step: MeasuredStep) -> Measured:
    if FakeTensorMode is not None:
        # A layer may do anything with its tensors, and fail in any way.
        with contextlib.suppress(Exception):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                found, most = _saved(step, mode.from_tensor)
            by = "saved tensors of PyTorch, without numbers"
            return Measured(found, by, most)
    # A layer that cannot be called on tensors without data is called on zeros.
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        found, most = _saved(step, torch.detach)
    return Measured(found, "saved tensors of PyTorch, of a forward pass", most)


@contextlib.contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """On exit of the block, restore buffers that a module has written."""
    buffers = [x for x in tensors if not isinstance(x, torch.nn.Parameter)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _saved(step: MeasuredStep, taken: Any) -> tuple[list[Kept], int]:
    """Return what a pass on zeros saves, and its most bytes of new tensors."""
    for tensor in step.held:
        _given(tensor, "weights")
    values = [
        _given(
            # A value in another dtype than its variable says to have, cast.
            ops.cast(taken(variable.value.detach()), variable.dtype),
            source_of_variable(is_weight),
        )
        for variable, is_weight in zip(
            step.variables, step.weights, strict=True
        )
    ]
    for value, trained in zip(values, step.trained, strict=True):
        value.requires_grad_(trained)
    batch = keras.tree.map_structure(_zeros, step.batch)
    saved, sources = _SavedByAutograd(), _Sources()
    try:
        with sources, saved.hooks(), torch.enable_grad():
            step.call(values, batch, saved.inside)
    finally:
        for value in (*values, *step.held):
            vars(value.untyped_storage()).pop(_ORIGIN, None)
    return list(saved.kept.values()), sources.most


class _SavedByAutograd:
    """The tensors that autograd saves, each with the layer that saves it."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self._layers: list[int] = []
        # So that no other memory gets the id of one that was saved.
        self._memories: list[Any] = []

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """In the block, attribute saved tensors to layer `number`."""
        self._layers.append(number)
        try:
            yield
        finally:
            self._layers.pop()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that records the tensors autograd saves."""
        hooks = torch.autograd.graph.saved_tensors_hooks
        return hooks(self._save, lambda saved: saved)

    def _save(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        self._memories.append(memory)
        layer = self._layers[-1] if self._layers else None
        kept = kept_of(_origin(tensor), layer)
        if kept is not None:
            self.kept.setdefault(id(memory), kept)
        return tensor


class _Sources(TorchDispatchMode):
    """A context that records what each computed tensor is computed from.

    Attributes:
        most: The most bytes of computed tensors at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._bytes = 0

    def _add(self, bytes: int) -> None:
        self._bytes += bytes
        self.most = max(self.most, self._bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        operands = [_origin(x) for x in _tensors((args, kwargs))]
        sources = frozenset[str]().union(*(x.sources for x in operands))
        for tensor in _tensors(results):
            memory = tensor.untyped_storage()
            origin = getattr(memory, _ORIGIN, None)
            if origin is None:
                origin = Origin(memory.nbytes(), sources or {"others"})
                setattr(memory, _ORIGIN, origin)
                self._add(origin.bytes)
                weakref.finalize(memory, self._add, -origin.bytes)
            origin.sources |= sources
        return results


def _tensors(structure: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(structure)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _origin(tensor: Tensor) -> Origin:
    memory = tensor.untyped_storage()
    origin = getattr(memory, _ORIGIN, None)
    return Origin(memory.nbytes(), {"others"}) if origin is None else origin


def _given(tensor: Tensor, source: str) -> Tensor:
    memory = tensor.untyped_storage()
    setattr(memory, _ORIGIN, Origin(memory.nbytes(), {source}, is_given=True))
    return tensor


def _zeros(like: Any) -> Tensor:
    return _given(ops.zeros(like.shape, like.dtype), "batch")


class TorchMemory(Memory):
    """Read from what autograd saves in a step that computes nothing."""

    name = "torch"

    @override
    def kept(self, step: MeasuredStep) -> Measured:
        with _unchanged(step.held):
            return _kept(step)

    @override
    def most_held(
        self, function: Callable[[], Any], given: Sequence[Tensor]
    ) -> int | None:
        for tensor in given:
            _given(tensor, "others")
        try:
            with torch.no_grad(), _Sources() as sources:
                function()
        finally:
            for tensor in given:
                vars(tensor.untyped_storage()).pop(_ORIGIN, None)
        return sources.most


MEMORY = TorchMemory()
