"""PyTorch: the products of a function, as it calls them on shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keras_policy_ext.backends.traced_products import (
    Product,
    Traced,
    convolution,
    einsum,
    matmul,
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


def trace(function: Callable[..., Any], inputs: list[Any]) -> Traced:
    """See `Backend.trace`.

    As Keras does: on ones of the real device where an operation is not to be
    had on the device of shapes alone.
    """
    try:
        return _trace(function, inputs, "meta")
    # What an operation raises that lacks a kernel for "meta" differs from one
    # to the next. What fails for another reason fails again.
    except Exception:
        return _trace(function, inputs, None)


def _trace(
    function: Callable[..., Any], inputs: list[Any], device: str | None
) -> Traced:
    with torch.no_grad(), keras.device(device or _real_device()):
        tensors = [keras.ops.ones(x.shape, x.dtype) for x in inputs]
        with _Recorder() as recorder:
            outputs = function(*tensors)
    outputs = keras.tree.map_structure(_described, outputs)
    return Traced(outputs, recorder.products, recorder.is_complete)


def _real_device() -> str:
    # The device of a scope further out may be that of shapes alone.
    return "gpu" if torch.cuda.is_available() else "cpu"


def _described(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


class _Recorder(TorchFunctionMode):
    """Notes the products of the functions that are called in it.

    Of recorders in one another, the innermost does.
    """

    innermost: ClassVar[list[_Recorder]] = []

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.is_complete = True

    def __enter__(self) -> _Recorder:
        super().__enter__()
        self.innermost.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self.innermost.pop()
        super().__exit__(*raised)

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
            self._note(function, operands, shapes, outputs)
        return outputs

    def _note(
        self, function: Any, given: list[Any], shapes: list[Any], outputs: Any
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
