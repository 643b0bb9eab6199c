"""The tensors that are saved for the backward pass."""

from __future__ import annotations

import dataclasses

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.matmuls import Engine, Shapes
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_protocol import HistoryScales, StateReading


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The tensors that are saved for the backward pass.

    Attributes:
        inputs: What `kernel_grad` reads, as it was quantized, in the axes of
            the operand where it has one scale; a transposed copy would be one
            more tensor.
        kernel: What `inputs_grad` reads, likewise.
        known: What the state said; None for a recipe without.
        amaxes: Of inputs and kernel, float32 scalars; None if not observed.
        shapes: Of the inputs and the kernel; scalars for sizes that a graph
            of TensorFlow does not know.
        engine: The kernels of the framework.
    """

    inputs: Quantized
    kernel: Quantized
    known: StateReading | None
    amaxes: tuple[Tensor, Tensor] | None
    shapes: Shapes
    engine: Engine

    def leaves(self, narrow: bool = True) -> list[Tensor]:
        """The tensors, in the order in which `BoundPlan.residuals` takes them.

        Args:
            narrow: Whether operands are, where the framework says so.
        """
        operands: tuple[Quantized, ...] = (self.inputs, self.kernel)
        if narrow:
            operands = _narrowed(self.engine, *operands)
        kept = []
        for operand in operands:
            kept += operand.leaves()
        known = [] if self.known is None else self.known.leaves()
        return [*kept, *known, *(self.amaxes or ())]


def _narrowed(engine: Engine, *operands: Quantized) -> tuple[Quantized, ...]:
    """Operands in the dtypes in which the framework saves them."""
    framework, encode = backends.current(), engine.encode
    found = []
    for operand in operands:
        if operand.quantization is not None:
            format_name = operand.quantization.format
            dtype = framework.kept_dtype(operand.values, format_name)
            operand = operand.narrowed(dtype, encode)
        found.append(operand)
    return tuple(found)


def settled(
    known: StateReading | None, state: tuple[Tensor, ...] = ()
) -> StateReading | None:
    """What the state says, or less where a choice is already made."""
    if not isinstance(known, HistoryScales) or known.unseen is None:
        return known
    framework = backends.current()
    if framework.known_any(known.unseen) is False:
        return HistoryScales(known.scales, None)
    lately = bool(state) and framework.seen_lately(*state)
    return dataclasses.replace(known, seen_lately=lately) if lately else known
