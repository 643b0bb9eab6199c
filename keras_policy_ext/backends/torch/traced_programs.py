"""PyTorch: run a function on shapes, and follow the values in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import keras
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keras_policy_ext.backends.traced_programs import Flow, TracedProgram

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


def trace(
    function: Callable[..., Any], inputs: list[Any], flow: Flow | None = None
) -> TracedProgram:
    """Trace a function with PyTorch; see `Backend.trace`.

    Like Keras, it runs on the real device if the meta device fails.
    """
    try:
        return _trace(function, inputs, flow, device="meta")
    # Operations without a kernel for "meta" raise errors of many types. Any
    # other error is raised again on the real device.
    except Exception:
        real_device = "gpu" if torch.cuda.is_available() else "cpu"
        return _trace(function, inputs, flow, device=real_device)


def mark_call(
    flow: Flow, number: int, operands: list[Any], results: list[Any]
) -> list[Any]:
    """Mark a call that is being recorded; see `Backend.mark_call`."""
    _Recorder.entered[-1].keep(*operands, *results)
    flow.called(number, map(id, operands), map(id, results))
    return results


def _trace(
    function: Callable[..., Any],
    inputs: list[Any],
    flow: Flow | None,
    device: str,
) -> TracedProgram:
    """Run a function on ones on a device, and record its calls."""
    with torch.no_grad(), keras.device(device):
        tensors = [keras.ops.ones(x.shape, x.dtype) for x in inputs]
        if flow is not None:
            flow.start(map(id, tensors))
        recorder = _Recorder(flow)
        # Not in `__enter__` and `__exit__`, where an interrupt could keep
        # PyTorch from leaving the recorder.
        _Recorder.entered.append(recorder)
        try:
            with recorder:
                outputs = function(*tensors)
        finally:
            _Recorder.entered.pop()
    if flow is not None:
        flow.finish(map(id, _tensors_in(keras.tree.flatten(outputs))))
    outputs = keras.tree.map_structure(_described, outputs)
    return TracedProgram(outputs, recorder.products, recorder.chooses)


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def _described(x: Any) -> Any:
    """Return a `keras.KerasTensor` for a tensor; any other value as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


class _Recorder(TorchFunctionMode):
    """A context that records the functions called in it that multiply.

    Attributes:
        entered: All recorders that run; only the last, the innermost, records.
        chooses: See `TracedProgram`.
    """

    entered: ClassVar[list[_Recorder]] = []

    def __init__(self, flow: Flow | None = None) -> None:
        super().__init__()
        self.products: list[ProductCall] = []
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
        if self.entered[-1] is self:
            operands = keras.tree.flatten([*args, *(kwargs or {}).values()])
            if function in _KINDS:
                self.products.append(_product_call(function, operands, outputs))
            chooses = function in _CHOICES or (
                function in _EXTREMES and isinstance(outputs, tuple)
            )
            self.chooses = self.chooses or chooses
            if self._flow is not None:
                self._follow(function, operands, outputs, chooses)
        return outputs

    def _follow(
        self, function: Any, operands: list[Any], outputs: Any, chooses: bool
    ) -> None:
        """Pass what is known of the operands on to the outputs of a call."""
        operand_tensors = _tensors_in(operands)
        results = _tensors_in(keras.tree.flatten(outputs))
        if isinstance(outputs, tuple):  # Perhaps a leaf for `keras.tree`.
            results = _tensors_in(outputs)
        if function is torch.Tensor.__setitem__:  # It returns None.
            results = operand_tensors[:1]
        if not results or self._flow is None:
            return
        self.keep(*operand_tensors, *results)
        kind: Any = "choice" if chooses else "other"
        if function in _KINDS:
            kind = "product"
        keys_and_dtypes = [(id(x), x.dtype) for x in results]
        self._flow.computed(kind, map(id, operand_tensors), keys_and_dtypes)


def _product_call(
    function: Any, operands: list[Any], outputs: Any
) -> ProductCall:
    """Return the record of a call; `operands` are all arguments, flattened."""
    kind = _KINDS[function]
    equation = operands[0] if kind == EINSUM else None
    shapes = [x.shape for x in operands if hasattr(x, "shape")]
    return ProductCall(kind, equation, shapes, getattr(outputs, "shape", None))
