"""For each operand: its quantization in each matmul and its memory layout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from keras_policy_ext import backends
from keras_policy_ext.contractions.kinds import Contraction
from keras_policy_ext.numerics import scaling
from keras_policy_ext.recipes import (
    MATMULS,
    OPERANDS,
    Quantization,
    Recipe,
    matmuls_of,
    read_transposed,
)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a contraction under a recipe.

    Attributes:
        contraction: What is multiplied.
        recipe: How the operands are scaled.
    """

    contraction: Contraction
    recipe: Recipe

    @functools.cached_property
    def quantizations(self) -> dict[tuple[str, str], Quantization | None]:
        """Return the quantization of each operand in each matmul."""
        return {
            (operand, matmul): self.contraction.quantization(
                self.recipe.quantization(operand, matmul)
            )
            for matmul, operands in MATMULS.items()
            for operand in operands
        }

    @functools.cached_property
    def shares_quantization(self) -> dict[str, bool]:
        """True for an operand that is quantized once for both matmuls."""
        return {
            operand: read_transposed(
                *(self.quantizations[operand, m] for m in matmuls_of(operand))
            )
            for operand in OPERANDS
        }

    @functools.cached_property
    def cast_for_both(self) -> dict[str, Quantization | None]:
        """Return the quantization that one cast can write for both matmuls.

        None unless both matmuls read the same numbers, with one scale.
        """
        found = {}
        for operand in OPERANDS:
            asked = self.quantizations[operand, matmuls_of(operand)[0]]
            can = asked is not None and asked.keeps_axes
            can = can and self.shares_quantization[operand]
            is_read = self.contraction.reads_what_is_quantized
            found[operand] = asked if can and is_read else None
        return found

    @functools.cached_property
    def stored_transposed(self) -> dict[tuple[str, str], bool]:
        """True if an operand is quantized as the transpose of its matrix.

        So it is where that is how it lies in memory, as most kernels do: a
        compiler that scales and transposes at once reads against the order of
        memory (up to ten times as slow, JAX 0.10, CPU).
        """
        return {
            (operand, matmul): asked is not None
            and not asked.keeps_axes
            and self.contraction.lies_across(operand)
            for (operand, matmul), asked in self.quantizations.items()
        }

    def reads_transpose(self, operand: str, matmul: str) -> bool:
        """Return True if a matmul reads the transpose of what is quantized."""
        is_second = matmul != matmuls_of(operand)[0]
        return is_second != self.stored_transposed[operand, matmul]

    def quantized_as(self, operand: str, matmul: str) -> Quantization | None:
        """Return the quantization of an operand as it lies in memory."""
        asked = self.quantizations[operand, matmul]
        if asked is None or not self.reads_transpose(operand, matmul):
            return asked
        return asked.transposed

    def kernel_axes(self, axes: Any, matmul: str) -> tuple[Any, ...]:
        """Return an entry for each axis of a kernel as it is quantized.

        Args:
            axes: See `Contraction.kernel_axes`.
            matmul: Which one reads it.
        """
        asked = self.quantizations["kernel", matmul]
        found = self.contraction.kernel_axes(axes, asked)
        if not self.stored_transposed["kernel", matmul]:
            return found
        batch, rows, columns = found
        return batch, columns, rows

    @functools.cached_property
    def kept(self) -> dict[str, Quantization | None]:
        """Return the quantization of each operand that is saved."""
        return {
            operand: self.quantized_as(operand, matmuls_of(operand)[1])
            for operand in ("inputs", "kernel")
        }


@functools.lru_cache(maxsize=1024)
def operands_of(contraction: Contraction, recipe: Recipe) -> Operands:
    """Return the operands of a contraction; the same object for equal ones."""
    return Operands(contraction, recipe)


def storing(cast: Any) -> Any:
    """Return a cast whose result is written: see `Backend.stored`."""

    def casting(*how: Any) -> Any:
        return backends.current().stored(cast(*how))

    return casting


def amax_of(operand: str) -> Any:
    """Return the function that computes the amax of an operand.

    A layer adds up the columns of its output gradient for its bias.
    """
    by_columns = operand == "outputs_grad"
    return scaling.amax_by_columns if by_columns else scaling.amax
