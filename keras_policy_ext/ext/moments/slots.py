"""A slot of an optimizer that is stored as codes with scales."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.moments import _keras, moment_kernels
from keras_policy_ext.ext.moments.codes import (
    blocks_of,
    dequantize_moments,
    quantize_moments,
)
from keras_policy_ext.numerics import key_of_use


class Step:
    """The slots that one `update_step` of an optimizer has used.

    Meanwhile they hold float32 tensors, as if they were variables. At the end
    they are quantized, with random bits that are a hash of the step.
    """

    def __init__(self) -> None:
        self.used: list[QuantizedSlot] | None = None

    @contextlib.contextmanager
    def running(self, iterations: keras.Variable) -> Iterator[None]:
        """In the block, slots hold float32 tensors; then, quantize them."""
        used: list[QuantizedSlot] = []
        self.used = used
        try:
            yield
            step = as_step(iterations)
            for slot in used:
                slot.settle(step)
        finally:
            self.used = None
            for slot in used:
                slot.held_value = None

    @contextlib.contextmanager
    def on_parts(
        self, slots: Sequence[QuantizedSlot], stored: Sequence[Tensor]
    ) -> Iterator[None]:
        """In the block, slots are parts of themselves, and hold tensors.

        Args:
            slots: The slots of one weight.
            stored: For each its codes and its scales, of the part.
        """
        self.used = []
        for slot, *part in zip(slots, stored[::2], stored[1::2], strict=True):
            slot.part = tuple(part)
        try:
            yield
        finally:
            self.used = None
            for slot in slots:
                slot.held_value = slot.part = None


def as_step(iterations: keras.Variable) -> Tensor:
    """Return a count of steps as an int32 scalar."""
    return ops.cast(ops.convert_to_tensor(iterations), "int32")


class WeightPart:
    """A part of a weight, which an `update_step` may change.

    Attributes:
        whole: The variable that it is a part of.
        value: The numbers of the part (numbers,).
    """

    def __init__(self, whole: Any, value: Tensor):
        self.whole, self.value = whole, value

    @property
    def dtype(self) -> str:
        """The dtype of the weight."""
        return str(keras.backend.standardize_dtype(self.value.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(self.value.shape)

    def assign(self, value: Any) -> None:
        """Change the numbers of the part."""
        self.value = ops.cast(value, self.dtype)


class QuantizedSlot(
    variable_values.ComputedVariable, _keras.StoredInParts, keras.Variable
):
    """A slot that is read and assigned as a float variable of its shape.

    It has no memory of its own, but two variables, of which the optimizer
    tells Keras in its place.

    Attributes:
        codes: Uint8 variable of the shape of the slot.
        scale: Float32 or uint8 variable (blocks,).
        kind: `"first"` or `"second"`.
        form: `"float8"` or `"mx"`.
        number: The place of the slot among the variables of the optimizer.
        held_value: Its float32 tensor during a step; else None.
        part: Codes and scales of the part that a step is at; else None.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        initial: Callable[..., Tensor],
        dtype: str,
        *,
        kind: str,
        form: str,
        number: int,
        step: Step,
        **options: Any,
    ):
        def part(index: int) -> Callable[..., Tensor]:
            def value(_: Any, dtype: str | None = None) -> Tensor:
                x = ops.cast(initial(shape, dtype="float32"), "float32")
                return quantize_moments(x, kind, form)[index]

            return value

        made = {"trainable": False, "autocast": False}
        self.codes = keras.Variable(
            part(0), shape=shape, dtype="uint8", name=name, **made, **options
        )
        # Without one, a distribution would choose it by the path of the slot.
        layout = _keras.layout_of(self.codes).get("layout")
        if layout is not None:
            mesh = layout.device_mesh
            options["layout"] = keras.distribution.TensorLayout((None,), mesh)
        self.scale = keras.Variable(
            part(1),
            shape=(blocks_of(shape, form),),
            dtype="uint8" if form == "mx" else "float32",
            name=f"{name}_scale",
            **made,
            **options,
        )
        super().__init__(self.codes, dtype)
        self.kind, self.form, self.number = kind, form, number
        self.step = step
        self.held_value: Tensor | None = None
        self.part: tuple[Tensor, ...] | None = None
        self.stored_parts = {
            "quantized_codes": self.codes,
            "quantized_scale": self.scale,
        }

    @property
    def parts(self) -> tuple[keras.Variable, keras.Variable]:
        """The two variables, codes and scale."""
        return self.codes, self.scale

    @property
    def value(self) -> Tensor:
        """The numbers of the slot."""
        if self.held_value is not None:
            return self.held_value
        codes, scale = self.part or (self.codes.value, self.scale.value)
        numbers = dequantize_moments(codes, scale, self.kind, self.form)
        return self._hold(ops.cast(numbers, self.dtype))

    def assign(self, value: Any) -> Any:
        """Quantize numbers, at once or at the end of the running step.

        Rows alone (`tf.IndexedSlices`) replace those rows, as in a variable.
        """
        if hasattr(value, "dense_shape"):
            rows = ops.expand_dims(value.indices, 1)
            value = ops.scatter_update(self.value, rows, value.values)
        value = ops.convert_to_tensor(value, dtype=self.dtype, sparse=False)
        if self.part is None and tuple(value.shape) != tuple(self.shape):
            value = ops.broadcast_to(value, self.shape)
        if self.step.used is None:
            self._quantize(value, None)
        else:
            self.held_value = None
            self._hold(value)
        return value

    def settle(self, step: Tensor) -> None:
        """Quantize what was held, with the random bits of a step."""
        self._quantize(self.held_value, self.key(step))

    def key(self, step: Tensor) -> Tensor:
        """Return the key of the random bits of a step."""
        key = moment_kernels.current.moment_key(step, self.number)
        return key_of_use(step, 0, self.number) if key is None else key

    def quantized(
        self, value: Any, key: Tensor | None, first: Tensor | int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scales of numbers, before which are `first`."""
        value = ops.cast(ops.stop_gradient(value), "float32")
        return quantize_moments(value, self.kind, self.form, key, first)

    def _hold(self, value: Tensor) -> Tensor:
        used = self.step.used
        if used is not None:
            self.held_value = value
            if not any(slot is self for slot in used):
                used.append(self)
        return value

    def _quantize(self, value: Any, key: Tensor | None) -> None:
        codes, scale = self.quantized(value, key)
        self.codes.assign(codes)
        self.scale.assign(scale)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the numbers of the slot as a NumPy array."""
        return np.asarray(ops.convert_to_numpy(self.value))
