"""PyTorch: find a function's matmuls, and the tensors that autograd saves."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import torch
from keras import ops
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.flows import Flow
from keras_policy_ext.backends.tracing import (
    Kept,
    Measured,
    MeasuredStep,
    Origin,
    Product,
    Traced,
    convolution,
    einsum,
    kept_of,
    matmul,
    source_of_variable,
)

_NAMES = ("matmul", "mm", "bmm", "mv", "dot")
_FIRST_TWO = frozenset(
    [
        *(getattr(torch, name) for name in _NAMES),
        *(getattr(torch.Tensor, name) for name in _NAMES),
        torch.Tensor.__matmul__,
    ]
)
_LAST_TWO = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in ("addmm", "addmv", "baddbmm")
)
_CONVOLUTIONS, _TRANSPOSED = (
    frozenset(
        getattr(place, f"{name}{rank}d")
        for place in (torch, functional)
        for rank in (1, 2, 3)
    )
    for name in ("conv", "conv_transpose")
)
_NOT_COUNTED = frozenset(
    [
        *(torch.einsum, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        *(functional.bilinear, functional.multi_head_attention_forward),
    ]
)


_CHOICES = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in (
        *("topk", "argmax", "argmin", "argsort", "sort", "kthvalue"),
        "multinomial",
    )
)
"""Functions that look for the largest or smallest entries."""

# They find positions too, if they are given an axis.
_EXTREMES = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in ("max", "min")
)
_UNCOUNTED_PRODUCTS = frozenset(
    (*_NOT_COUNTED, functional.scaled_dot_product_attention)
)


def trace(
    function: Callable[..., Any], inputs: list[Any], flow: Flow | None = None
) -> Traced:
    """Trace a function with PyTorch; see `Backend.trace`.

    Like Keras, it falls back to ones on the real device if an operation does
    not support the meta device.
    """
    try:
        return _trace(function, inputs, flow, "meta")
    # What an operation raises that lacks a kernel for "meta" differs from one
    # to the next. What fails for another reason fails again.
    except Exception:
        return _trace(function, inputs, flow, None)


def mark_call(
    flow: Flow, number: int, operands: list[Any], results: list[Any]
) -> list[Any]:
    """Mark a call that is being recorded; see `Backend.mark_call`."""
    _Recorder.innermost[-1].keep(*operands, *results)
    flow.called(number, map(id, operands), map(id, results))
    return results


def _trace(
    function: Callable[..., Any],
    inputs: list[Any],
    flow: Flow | None,
    device: str | None,
) -> Traced:
    with torch.no_grad(), keras.device(device or _real_device()):
        tensors = [keras.ops.ones(x.shape, x.dtype) for x in inputs]
        if flow is not None:
            flow.start(map(id, tensors))
        recorder = _Recorder(flow)
        recorder.keep(*tensors)
        # Left by code of PyTorch alone, which an interrupt here cannot skip.
        _Recorder.innermost.append(recorder)
        try:
            with recorder:
                outputs = function(*tensors)
        finally:
            _Recorder.innermost.pop()
    if flow is not None:
        flow.finish(map(id, _tensors_in(keras.tree.flatten(outputs))))
    outputs = keras.tree.map_structure(_described, outputs)
    return Traced(
        outputs, recorder.products, recorder.is_complete, recorder.chooses
    )


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def _real_device() -> str:
    # The device of a scope further out may be that of shapes alone.
    return "gpu" if torch.cuda.is_available() else "cpu"


def _described(x: Tensor) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


class _Recorder(TorchFunctionMode):
    """A context that records the matmuls of the functions called in it.

    Of nested recorders only the innermost records.
    """

    innermost: ClassVar[list[_Recorder]] = []

    def __init__(self, flow: Flow | None = None) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.is_complete = True
        self.chooses = False
        self._flow = flow
        self._kept: list[Any] = []

    def keep(self, *tensors: Any) -> None:
        """Hold tensors, so that no other tensor gets the `id` of one."""
        if self._flow is not None:
            self._kept += tensors

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        if self.innermost[-1] is self:
            given = [*args, *(kwargs or {}).values()]
            operands = keras.tree.flatten(given)
            shapes = [x.shape for x in operands if hasattr(x, "shape")]
            found = len(self.products)
            self._note(function, operands, shapes, outputs)
            chooses = function in _CHOICES or (
                function in _EXTREMES and isinstance(outputs, tuple)
            )
            self.chooses = self.chooses or chooses
            if self._flow is not None:
                multiplies = len(self.products) > found
                self._follow(function, operands, outputs, multiplies, chooses)
        return outputs

    def _follow(
        self,
        function: Any,
        operands: list[Any],
        outputs: Any,
        multiplies: bool,
        chooses: bool,
    ) -> None:
        given = _tensors_in(operands)
        results = _tensors_in(keras.tree.flatten(outputs))
        if isinstance(outputs, tuple):
            results = _tensors_in(outputs)
        if function is torch.Tensor.__setitem__:
            results = given[:1]
        if not results or self._flow is None:
            return
        self.keep(*given, *results)
        kind: Any = "choice" if chooses else "other"
        if multiplies or function in _UNCOUNTED_PRODUCTS:
            kind = "product"
        pairs = [(id(x), x.dtype) for x in results]
        self._flow.computed(kind, map(id, given), pairs)

    def _note(
        self,
        function: Any,
        given: list[Any],
        shapes: list[Any],
        outputs: Tensor,
    ) -> None:
        product = None
        if function in _FIRST_TWO:
            product = matmul(*shapes[:2])
        elif function in _LAST_TWO:
            product = matmul(*shapes[1:3])
        elif function is functional.linear:
            product = matmul(shapes[0], shapes[1][::-1])
        elif function is torch.einsum and len(shapes) == 2:
            product = einsum(given[0], *shapes)
        elif function is torch.tensordot:
            first, second = map(math.prod, shapes[:2])
            number = math.isqrt(first * second * outputs.numel())
            product = Product(number, (first, second))
        elif function in _CONVOLUTIONS:
            # Channels are the axis before those of space: a batch may lack.
            channels = outputs.shape[1 - len(shapes[1])]
            product = convolution(outputs.numel() // channels, *shapes[:2])
        elif function in _TRANSPOSED:
            channels = shapes[0][1 - len(shapes[1])]
            positions = math.prod(shapes[0]) // channels
            product = convolution(positions, *shapes[:2])
        elif function in _NOT_COUNTED:
            self.is_complete = False
        if product is not None:
            self.products.append(product)


# The public way to compute without numbers, the device "meta", has other
# kernels than the device of the model. Where this is gone, the forward pass is
# run.
try:
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError:
    FakeTensorMode = None

_ORIGIN = "keras_policy_ext_origin"
"""The attribute of a storage that holds its `Origin`."""


def kept(step: MeasuredStep) -> Measured:
    """List the tensors that autograd saves in a step, each memory once.

    If a layer cannot be called on tensors without data, it is called on zeros.
    """
    with _unchanged(step.held):
        return _kept(step)


def _kept(step: MeasuredStep) -> Measured:
    if FakeTensorMode is not None:
        # A layer may do anything with its tensors, and fail in any way.
        with contextlib.suppress(Exception):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                found, most = _saved(step, mode.from_tensor)
            by = "saved tensors of PyTorch, without numbers"
            return Measured(found, by, most)
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
    """Run a forward pass on zeros.

    Returns:
        The tensors that autograd saves, and the most bytes of new tensors at
        one time.
    """
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


def most_held(function: Callable[[], Any], given: Sequence[Tensor]) -> int:
    """Return the most bytes of new tensors in a call; see `Memory`."""
    for tensor in given:
        _given(tensor, "others")
    try:
        with _Sources() as sources:
            function()
    finally:
        for tensor in given:
            vars(tensor.untyped_storage()).pop(_ORIGIN, None)
    return sources.most


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
