"""PyTorch: run a function on shapes, and record what it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import keras
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keras_policy_ext.backends.traced_programs import (
    Kind,
    Step,
    TracedProgram,
)

MATMUL, ADDED_MATMUL, LINEAR, EINSUM = "matmul", "addmm", "linear", "einsum"
TENSORDOT, CONVOLUTION, TRANSPOSED = "tensordot", "conv", "conv_transpose"
OTHER = "other"
"""Kinds of functions that multiply; those of the last are not counted."""

_KINDS = {
    **{
        getattr(place, name): kind
        for kind, names in {
            MATMUL: ("matmul", "mm", "bmm", "mv", "dot"),
            ADDED_MATMUL: ("addmm", "addmv", "baddbmm"),
        }.items()
        for name in names
        for place in (torch, torch.Tensor)
    },
    torch.Tensor.__matmul__: MATMUL,
    functional.linear: LINEAR,
    torch.einsum: EINSUM,
    torch.tensordot: TENSORDOT,
    **{
        getattr(place, f"{kind}{rank}d"): kind
        for kind in (CONVOLUTION, TRANSPOSED)
        for rank in (1, 2, 3)
        for place in (torch, functional)
    },
    **dict.fromkeys(
        (
            *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
            *(functional.bilinear, functional.multi_head_attention_forward),
        ),
        OTHER,
    ),
    functional.scaled_dot_product_attention: "attention",
}
"""The kind of each function that multiplies."""

_CHOICES = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in (
        *("topk", "argmax", "argmin", "argsort", "sort", "kthvalue"),
        "multinomial",
    )
)
"""Functions that look for the largest or smallest entries."""

# With an axis they return a tuple: the entries and their positions.
_EXTREMES = {torch.max, torch.min, torch.Tensor.max, torch.Tensor.min}


class ProductCall(NamedTuple):
    """A call of a function that multiplies.

    Attributes:
        kind: The kind of the function, such as `MATMUL`.
        equation: The equation of an einsum, else None.
        shapes: The shapes of the operands.
        outputs: The shape of the outputs; None of several.
    """

    kind: str
    equation: str | None
    shapes: list[Any]
    outputs: Any


class RecordedProgram(NamedTuple):
    """The calls of functions that PyTorch has run.

    Attributes:
        products: The calls of functions that multiply.
        steps: All calls, in order; see `_memory_of` for the keys of tensors.
        kept: What has these keys for ids, so that nothing else gets one.
    """

    products: list[ProductCall]
    steps: list[Step]
    kept: list[Any]


def trace(function: Callable[..., Any], inputs: list[Any]) -> TracedProgram:
    """Trace a function with PyTorch; see `Backend.trace`.

    It runs the function with fake tensors, which have no values, and with
    tensors full of ones if that fails. Not on the "meta" device, for which
    Keras has other code: some of its operations return a new empty tensor,
    which no recorded operation made (keras 3.15).
    """
    device = "gpu" if torch.cuda.is_available() else "cpu"
    with torch.no_grad(), keras.device(device):
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            # What a variable is assigned is a fake, which only this block sees.
            with fakes, keras.StatelessScope():
                return _trace(function, inputs)
        # Code that reads values, and operations without a kernel for fakes,
        # raise errors of many types. Any other error is raised again.
        except Exception:
            return _trace(function, inputs)


def steps(program: RecordedProgram) -> Iterable[Step]:
    """Return the calls of a program; see `Backend.steps`."""
    return program.steps


@contextlib.contextmanager
def in_scope(number: int) -> Iterator[None]:
    """In the block, the calls that are recorded have this number."""
    _SCOPES.append(number)
    try:
        yield
    finally:
        _SCOPES.pop()


_SCOPES: list[int] = []
"""The numbers of the open scopes; the innermost is last."""


def _trace(function: Callable[..., Any], inputs: list[Any]) -> TracedProgram:
    """Run a function on ones, and record its calls."""
    tensors = [keras.ops.ones(x.shape, x.dtype) for x in inputs]
    recorder = _Recorder()
    # Not in `__enter__` and `__exit__`, where an interrupt could keep PyTorch
    # from leaving the recorder.
    _Recorder.entered.append(recorder)
    try:
        with recorder:
            outputs = function(*tensors)
    finally:
        _Recorder.entered.pop()
    tensors = _tensors_in(keras.tree.flatten(outputs))
    returned = [id(_memory_of(x)) for x in tensors]
    outputs = keras.tree.map_structure(_described, outputs)
    return TracedProgram(outputs, recorder.program, returned)


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor, which a view of it shares."""
    # A transform such as `vmap` wraps tensors (no public name, torch 2.13).
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # Sparse tensors have none.
        return tensor


def _described(x: Any) -> Any:
    """Return a `keras.KerasTensor` for a tensor; any other value as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


class _Recorder(TorchFunctionMode):
    """A context that records the functions called in it.

    Attributes:
        entered: All recorders that run; only the last, the innermost, records.
        program: What it has recorded.
    """

    entered: ClassVar[list[_Recorder]] = []

    def __init__(self) -> None:
        super().__init__()
        self.program = RecordedProgram([], [], [])

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of PyTorch and record what it computes."""
        outputs = function(*args, **(kwargs or {}))
        results = _results(function, args, outputs)
        # Most calls make no tensor: they read a shape or a dtype.
        if results and self.entered[-1] is self:
            operands = keras.tree.flatten([*args, *(kwargs or {}).values()])
            if function in _KINDS:
                product = _product_call(function, operands, outputs)
                self.program.products.append(product)
            is_pair = isinstance(outputs, tuple)
            self._add_step(_kind(function, is_pair), operands, results)
        return outputs

    def _add_step(
        self, kind: Kind, operands: list[Any], results: list[torch.Tensor]
    ) -> None:
        """Record a call that has made tensors."""
        tensors = _tensors_in(operands)
        read, made = ([*map(_memory_of, x)] for x in (tensors, results))
        self.program.kept.extend([*read, *made])
        scope = _SCOPES[-1] if _SCOPES else None
        dtypes = [str(x.dtype) for x in results]
        keys: list[tuple[Hashable, str]] = [
            *zip(map(id, made), dtypes, strict=True)
        ]
        self.program.steps.append(Step(kind, list(map(id, read)), keys, scope))


def _results(
    function: Any, args: tuple[Any, ...], outputs: Any
) -> list[torch.Tensor]:
    """Return the tensors that a call has made or changed."""
    if function is torch.Tensor.__setitem__:  # It returns None.
        return _tensors_in(args[:1])
    return _tensors_in(
        outputs if isinstance(outputs, (list, tuple)) else [outputs]
    )


def _kind(function: Any, is_pair: bool) -> Kind:
    """Return the kind of a call; `is_pair`: it returns values and positions."""
    if function in _KINDS:
        return "product"
    is_choice = function in _CHOICES or (function in _EXTREMES and is_pair)
    return "choice" if is_choice else "other"


def _product_call(
    function: Any, operands: list[Any], outputs: Any
) -> ProductCall:
    """Return the record of a call; `operands` are all arguments, flattened."""
    kind = _KINDS[function]
    equation = operands[0] if kind == EINSUM else None
    shapes = [x.shape for x in operands if hasattr(x, "shape")]
    return ProductCall(kind, equation, shapes, getattr(outputs, "shape", None))
