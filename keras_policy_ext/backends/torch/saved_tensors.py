"""PyTorch: which tensors autograd saves, of tensors without numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch
from keras import ops
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.measured import (
    Kept,
    Measured,
    MeasuredStep,
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
"""The attribute by which a memory keeps its `Origin`."""


def kept(step: MeasuredStep) -> Measured:
    """What autograd saves in the forward pass, each memory once.

    Where a layer cannot be called on tensors without numbers, it is called
    on zeros.
    """
    with _unchanged(step.held):
        return _kept(step)


def _kept(step: MeasuredStep) -> Measured:
    if FakeTensorMode is not None:
        # A layer may do anything with its tensors, and fail in any way.
        with contextlib.suppress(Exception):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                found = _saved(step, mode.from_tensor)
            return Measured(found, "saved tensors of PyTorch, without numbers")
    with torch.random.fork_rng():
        found = _saved(step, torch.detach)
    return Measured(found, "saved tensors of PyTorch, of a forward pass")


@contextlib.contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put back numbers that a module of PyTorch writes into its buffers."""
    buffers = [x for x in tensors if not isinstance(x, torch.nn.Parameter)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _saved(step: MeasuredStep, taken: Any) -> list[Kept]:
    """Call the model on its variables, as `taken` hands them out, and zeros."""
    for tensor in step.held:
        _given(tensor, "weights")
    values = [
        _given(taken(variable.value.detach()), source_of_variable(is_weight))
        for variable, is_weight in zip(
            step.variables, step.weights, strict=True
        )
    ]
    for value, trained in zip(values, step.trained, strict=True):
        value.requires_grad_(trained)
    batch = keras.tree.map_structure(_zeros, step.batch)
    saved = _SavedByAutograd()
    try:
        with _Sources(), saved.hooks(), torch.enable_grad():
            step.call(values, batch, saved.inside)
    finally:
        for value in (*values, *step.held):
            vars(value.untyped_storage()).pop(_ORIGIN, None)
    return list(saved.kept.values())


class _SavedByAutograd:
    """What autograd saves, and in the call of which layer."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self._layers: list[int] = []
        # So that no other memory gets the id of one that was saved.
        self._memories: list[Any] = []

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """The call of a layer."""
        self._layers.append(number)
        try:
            yield
        finally:
            self._layers.pop()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which autograd tells what it saves."""
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
    """Notes of each tensor that is computed what it is computed of."""

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
