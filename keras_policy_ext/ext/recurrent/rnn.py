"""Recurrent layers whose cells compute in float8."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import keras
from keras import ops

from keras_policy_ext import backends, policies
from keras_policy_ext._keras import built_layers, quantization
from keras_policy_ext._keras.built_layers import BuiltUnderSavedPath
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.bases import MixedInto
from keras_policy_ext.contractions.kinds import in_one_scale
from keras_policy_ext.ext.recurrent._keras import (
    PARTS_OF_LSTM_STEPS,
    run_recurrent_loop,
)
from keras_policy_ext.kernels import Einsum
from keras_policy_ext.layers.controller import Float8Controller
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.stored_weights import decoded_once


@dataclasses.dataclass(frozen=True)
class Gates(Einsum):
    """An einsum with a recurrent kernel, whose columns belong to several gates.

    With one scale per tensor the whole kernel is quantized and then sliced, so
    that all gates share the scale and the amax. With finer tiles it is sliced
    first, and each gate is a separate matrix.

    Attributes:
        equation: The equation, with a kernel of axes (inputs, gate, unit).
        count: The number of gates in the kernel.
        first: The first gate that is multiplied.
        last: The gate after the last one.
    """

    count: int
    first: int
    last: int

    reads_what_is_quantized: ClassVar[bool] = False

    def operand(self, name: str, x: Tensor, asked: Any) -> Tensor:
        """Return an operand as the tensor to quantize; a kernel by gate."""
        # A kernel with one scale is cut by gate after it is quantized.
        if name == "kernel":
            x = x if in_one_scale(asked) else self._cut(x)
        return super().operand(name, x, asked)

    def kernel_axes(self, axes: Any, asked: Any) -> tuple[Any, ...]:
        """Convert a list with an entry per kernel axis to `operand`'s axes."""
        if in_one_scale(asked):
            return tuple(axes)
        rows, columns = axes
        gates, features, units = super().kernel_axes((rows, (), ()), asked)
        return gates, None if columns else features, units

    def read(self, name: str, quantized: Any) -> Any:
        """Return a quantized operand as a matrix: of a kernel, the gates."""
        if name == "kernel" and in_one_scale(quantized.quantization):
            quantized = quantized.with_values(self._cut(quantized.values))
        return super().read(name, quantized)

    def product(
        self, matmul: str, kernel: Any, a: Any, b: Any, shapes: Any, dtype: str
    ) -> Tensor:
        """Run a matmul; return the outputs, or the gradient of an operand."""
        inputs, (rows, columns) = shapes
        cut = rows, self.last - self.first, columns // self.count
        result = super().product(matmul, kernel, a, b, (inputs, cut), dtype)
        if matmul != "kernel_grad":
            return result
        # The gradient of a whole kernel has zeros for the other gates.
        around = (0, 0), (self.first, self.count - self.last), (0, 0)
        return ops.reshape(ops.pad(result, around), (rows, columns))

    def _cut(self, kernel: Tensor) -> Tensor:
        rows, columns = kernel.shape
        shape = rows, self.count, columns // self.count
        return ops.reshape(kernel, shape)[:, self.first : self.last]


def gates_of(
    rank: int, per_gate: bool, first: int, last: int, count: int
) -> Gates:
    """Return the contraction of inputs with some gates of a cell's kernel.

    Args:
        rank: The rank of the inputs: (..., features), or (..., gate, features)
            if each gate has inputs of its own.
        per_gate: Whether each gate has inputs of its own.
        first: The first gate that is multiplied.
        last: The gate after the last one.
        count: The number of gates in the kernel.

    Returns:
        A contraction to (..., gate, units).
    """
    inputs = "gi" if per_gate else "i"
    rows = "abcdef"[: rank - len(inputs)]
    return Gates(f"{rows}{inputs},igu->{rows}gu", count, first, last)


class Float8Cell(Float8Mixin):
    """The common base of the float8 recurrent cells.

    A step has two parts, `float8_projection` and `float8_step`. So a recurrent
    layer can multiply the inputs of all steps at once.
    """

    float8_kernels = ("kernel", "recurrent_kernel")
    float8_replaces: tuple[str, ...] = ("call", "kernel", "recurrent_kernel")

    float8_gates: int

    def call(
        self, inputs: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """Compute one step of the recurrent cell.

        Args:
            inputs: (batch, features), floating.
            states: As in the stock cell, each (batch, units).
            training: Whether to observe amaxes and drop units.

        Returns:
            Outputs, (batch, units), in the compute dtype, and new states.
        """
        if self.float8_policy is None:
            return super().call(inputs, states, training=training)
        projected = self.float8_projection(inputs, training)
        kernel = self.recurrent_kernel
        return self.float8_step(projected, states, training, kernel)

    def float8_projection(
        self, inputs: Tensor, training: bool | None = None
    ) -> Tensor:
        """Multiply inputs by the input kernel in float8, and add the bias.

        Args:
            inputs: (batch, features), or (batch, steps, features) for all
                steps at once.
            training: See `call`.

        Returns:
            (..., gates * units), in the compute dtype.
        """
        inputs = self.convert_input(inputs)
        masks = None
        if self._drops(self.dropout) and training:
            step = inputs if len(inputs.shape) == 2 else inputs[:, 0]
            masks = self.get_dropout_mask(step)
        x = self._product(self.kernel, _masked(inputs, masks), training)
        bias = self._bias()[0]
        return x if bias is None else ops.add(x, bias)

    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None, kernel: Any
    ) -> tuple[Tensor, Any]:
        """Compute a step of the cell from projected inputs and states.

        Args:
            projected: (batch, gates * units), from `float8_projection`.
            states: See `call`.
            training: See `call`.
            kernel: The recurrent kernel, or what `decoded_once` makes of it.

        Returns:
            See `call`.
        """
        raise NotImplementedError

    def _drops(self, rate: float) -> bool:
        """Return True if the stock cell applies dropout at this rate."""
        return 0.0 < rate < 1.0

    def _recurrent(self, state: Tensor, training: bool | None) -> Tensor:
        """Apply recurrent dropout; return a list if each gate has its mask."""
        masks = None
        if self._drops(self.recurrent_dropout) and training:
            masks = self.get_recurrent_dropout_mask(state)
        return _masked(state, masks)

    def _product(
        self,
        kernel: keras.Variable,
        x: Tensor,
        training: bool | None,
        first: int = 0,
        last: int | None = None,
    ) -> Tensor:
        """Return `x @ kernel` of some gates, (..., (last - first) * units)."""
        # The kernel is (features, gates * units); x is (..., features), or a
        # list of such tensors, one per gate.
        last = self.float8_gates if last is None else last
        per_gate = isinstance(x, list)
        if not per_gate and last - first == self.float8_gates:
            return self.float8_matmul(x, kernel, training)
        if per_gate:
            x = ops.stack(x[first:last], axis=-2)
        contraction = gates_of(
            len(x.shape), per_gate, first, last, self.float8_gates
        )
        x = self.float8_controller.contract(contraction, x, kernel, training)
        return ops.concatenate(ops.unstack(x, axis=-2), axis=-1)

    def _bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of the input matmul and the recurrent matmul."""
        if self.bias is None:
            return None, None
        return self.convert_input(ops.convert_to_tensor(self.bias)), None


@drop_in
class SimpleRNNCell(Float8Cell, keras.layers.SimpleRNNCell):
    """`keras.layers.SimpleRNNCell` that can follow a float8 policy."""

    float8_gates = 1

    def call(
        self, sequence: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """Compute one step of the cell; see `Float8Cell.call`."""
        return super().call(sequence, states, training=training)

    @override
    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None, kernel: Any
    ) -> tuple[Tensor, Any]:
        state = self.convert_input(_first(states))
        inner = self._recurrent(state, training)
        inner = self._product(kernel, inner, training)
        outputs = ops.add(projected, inner)
        if self.activation is not None:
            outputs = self.activation(outputs)
        return outputs, _like(states, outputs)

    def _drops(self, rate: float) -> bool:
        return rate > 0.0


@drop_in
class GRUCell(Float8Cell, keras.layers.GRUCell):
    """`keras.layers.GRUCell` that can follow a float8 policy."""

    float8_gates = 3

    @override
    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None, kernel: Any
    ) -> tuple[Tensor, Any]:
        state = self.convert_input(_first(states))
        shares = ops.split(projected, 3, axis=-1)
        make = self._reset_after if self.reset_after else self._reset_before
        update, candidate = make(shares, state, training, kernel)
        outputs = update * state + (1 - update) * candidate
        return outputs, _like(states, outputs)

    def _reset_after(
        self,
        shares: list[Tensor],
        state: Tensor,
        training: bool | None,
        kernel: keras.Variable,
    ) -> tuple[Tensor, Tensor]:
        """Return the update gate and the candidate, for `reset_after=True`."""
        inner = self._recurrent(state, training)
        inner = self._product(kernel, inner, training)
        bias = self._bias()[1]
        if bias is not None:
            inner = ops.add(inner, bias)
        z, r, h = ops.split(inner, 3, axis=-1)
        z = self.recurrent_activation(shares[0] + z)
        r = self.recurrent_activation(shares[1] + r)
        return z, self.activation(shares[2] + r * h)

    def _reset_before(
        self,
        shares: list[Tensor],
        state: Tensor,
        training: bool | None,
        kernel: keras.Variable,
    ) -> tuple[Tensor, Tensor]:
        """Return the update gate and the candidate, for `reset_after=False`."""
        inner = self._recurrent(state, training)
        gates = self._product(kernel, inner, training, last=2)
        z, r = ops.split(gates, 2, axis=-1)
        z = self.recurrent_activation(shares[0] + z)
        r = self.recurrent_activation(shares[1] + r)
        inner = r * (inner[2] if isinstance(inner, list) else inner)
        h = self._product(kernel, inner, training, first=2)
        return z, self.activation(shares[2] + h)

    def _bias(self) -> tuple[Tensor | None, Tensor | None]:
        bias, _ = super()._bias()
        if bias is None or not self.reset_after:
            return bias, None
        return bias[0], bias[1]


@drop_in
class LSTMCell(Float8Cell, keras.layers.LSTMCell):
    """`keras.layers.LSTMCell` that can follow a float8 policy."""

    float8_gates = 4
    float8_replaces: tuple[str, ...] = (
        *Float8Cell.float8_replaces,
        *PARTS_OF_LSTM_STEPS,
    )

    @override
    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None, kernel: Any
    ) -> tuple[Tensor, Any]:
        state, carry = (self.convert_input(x) for x in states)
        inner = self._recurrent(state, training)
        inner = self._product(kernel, inner, training)
        gates = ops.split(ops.add(projected, inner), 4, axis=-1)
        into, forget, candidate, out = gates
        carry = self.recurrent_activation(forget) * carry
        carry += self.recurrent_activation(into) * self.activation(candidate)
        outputs = self.recurrent_activation(out) * self.activation(carry)
        return outputs, [outputs, carry]


def _masked(x: Tensor, masks: Any) -> Any:
    """Multiply by dropout masks; return a list if each gate has its own."""
    if masks is None:
        return x
    if isinstance(masks, (list, tuple)):
        return [_masked(x, mask) for mask in masks]
    if len(x.shape) > len(masks.shape):
        masks = ops.expand_dims(masks, 1)
    return ops.multiply(x, masks)


def _first(states: Any) -> Tensor:
    return states[0] if keras.tree.is_nested(states) else states


def _like(states: Any, outputs: Tensor) -> Any:
    return [outputs] if keras.tree.is_nested(states) else outputs


class _Float8Recurrent(BuiltUnderSavedPath, MixedInto):
    """The common base of recurrent layers with a float8 cell.

    The inputs of all steps are multiplied at once, before the loop. The loop
    contains only the matmul with the state.
    """

    float8_replaces = ("inner_loop",)

    float8_cell: type

    # Type checkers see the constructor of the stock layer.
    if not TYPE_CHECKING:

        def __init__(self, *args, **kwargs):
            kwargs["dtype"] = policies.get(kwargs.get("dtype"))
            super().__init__(*args, **kwargs)
            # The stock constructor made a stock cell. To make another one
            # would draw other seeds; the `build` that Keras wrapped is right
            # for both.
            policy = policies.get(self.cell.dtype_policy)
            Float8Controller.join(self.cell)
            built_layers.swap_class(self.cell, self.float8_cell)
            self.cell.float8_controller.replace_policy(policy)

    @property
    def quantization_mode(self) -> str | None:
        """The mode set by Keras; never `"float8"`: only the cell has that."""
        return quantization.other_mode(self)

    def call(
        self,
        sequences: Tensor,
        initial_state: Any = None,
        mask: Tensor = None,
        training: bool | None = None,
    ) -> Any:
        """Run the recurrent layer; arguments and result are the stock layer's.

        Args:
            sequences: (batch, steps, features), floating.
            initial_state: None, or a list of states, (batch, units).
            mask: None, or boolean (batch, steps).
            training: Whether to observe amaxes and drop units. None drops
                nothing, and observes amaxes if a gradient is taken.

        Returns:
            As in the stock layer.
        """
        return super().call(
            sequences, initial_state=initial_state, mask=mask, training=training
        )

    def inner_loop(
        self,
        sequences: Tensor,
        initial_state: Any,
        mask: Tensor,
        training: bool | None = None,
    ) -> Any:
        """Run the loop over steps; a float8 cell uses no fused kernel.

        Args:
            sequences: See `call`.
            initial_state: A list of states.
            mask: See `call`.
            training: See `call`.

        Returns:
            The last outputs, all outputs, and the last states.

        Raises:
            ValueError: If `use_cudnn=True` is set for a float8 cell.
        """
        cell = self.cell
        if not _in_float8(cell):
            return super().inner_loop(
                sequences, initial_state, mask, training=training
            )
        self._check_cudnn()
        if not keras.tree.is_nested(initial_state):
            initial_state = [initial_state]
        if keras.tree.is_nested(mask):
            mask = mask[0]

        kernel = decoded_once(cell.recurrent_kernel)

        def step(projected: Tensor, states: Any) -> tuple[Tensor, Any]:
            return cell.float8_step(projected, states, training, kernel)

        # The compiler of PyTorch ends a graph in Keras's other loop, as it
        # compares numbers of tensors. With a mask and `go_backwards` Keras
        # cannot unroll (keras 3.12 to 3.16).
        compiling = mask is None and backends.current.is_compiling()
        return run_recurrent_loop(
            self,
            step,
            cell.float8_projection(sequences, training),
            initial_state,
            mask,
            unroll=self.unroll or compiling,
        )

    def _check_cudnn(self) -> None:
        """Raise if this layer has `use_cudnn=True`, which excludes float8."""
        if self.__dict__.get("use_cudnn") is True:
            raise ValueError(
                f"use_cudnn=True is not possible for {self.name!r}: its cell "
                "is in float8, which cuDNN does not have. Received: "
                "use_cudnn=True. Allowed: 'auto' or False. Leave it out, or "
                "take this cell out of float8 with a rule: "
                f"({self.cell.path!r}, None)."
            )


class _CuDNN(MixedInto):
    """A mixin that turns cuDNN's fused kernels off for a float8 cell."""

    @property
    def use_cudnn(self) -> Any:
        """`"auto"`, True or False; always False if the cell is in float8.

        `keras.layers.Bidirectional` reads it too.
        """
        if self.built and _in_float8(self.cell):
            return False
        return self.__dict__.get("use_cudnn", "auto")

    @use_cudnn.setter
    def use_cudnn(self, value: object) -> None:
        self.__dict__["use_cudnn"] = value


@drop_in
class SimpleRNN(_Float8Recurrent, keras.layers.SimpleRNN):
    """`keras.layers.SimpleRNN` whose cell can follow a float8 policy."""

    float8_cell = SimpleRNNCell


@drop_in
class GRU(_CuDNN, _Float8Recurrent, keras.layers.GRU):
    """`keras.layers.GRU` whose cell can follow a float8 policy."""

    float8_cell = GRUCell


@drop_in
class LSTM(_CuDNN, _Float8Recurrent, keras.layers.LSTM):
    """`keras.layers.LSTM` whose cell can follow a float8 policy."""

    float8_cell = LSTMCell


def _in_float8(cell: Any) -> bool:
    return isinstance(cell, Float8Cell) and cell.float8_policy is not None
