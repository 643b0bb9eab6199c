"""Equations as matrices: what a contraction's matmuls read, in NumPy.

The letters of an equation fall into four groups: batch (in both operands and
in the result), rows (of the inputs), columns (of the kernel) and contracted.
An axis of one operand alone is summed before anything else.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.reference.casting import float32

Array = np.ndarray[Any, Any]


class AxisGroups(NamedTuple):
    """The letters of an equation, by operand and by group.

    Rows and contracted letters are in the order of the inputs, batch and
    columns in that of the result. So merged axes count as one in all three
    matmuls, and in the same order.
    """

    inputs: str
    kernel: str
    outputs_grad: str
    batch: str
    rows: str
    columns: str
    contracted: str

    def letters(self, operand: str) -> tuple[str, str, str]:
        """Batch, rows and columns of the home matrix of an operand.

        That is what its first matmul reads; its second one reads the
        transpose.
        """
        two = {
            "inputs": (self.rows, self.contracted),
            "kernel": (self.columns, self.contracted),
            "outputs_grad": (self.rows, self.columns),
        }
        return self.batch, *two[operand]


def form_of(equation: str) -> AxisGroups:
    """The form of an equation such as `"abc,cd->abd"`.

    Raises:
        ValueError: If it is not one of two operands and a result, in letters
            that each of them has once.
    """
    parts = equation.replace(" ", "").replace("->", ",").split(",")
    if equation.count("->") != 1 or len(parts) != 3 or _odd(*parts):
        raise ValueError(
            "`equation` is not the equation of a contraction. Received: "
            f"{equation!r}. Allowed: two operands and a result in letters, "
            'each once in an operand, such as "abc,cd->abd". Write "..." out '
            "as letters."
        )
    first, second, result = parts
    shared = set(first) & set(second)
    return AxisGroups(
        *(first, second, result),
        batch="".join(c for c in result if c in shared),
        rows="".join(c for c in first if c in result and c not in second),
        columns="".join(c for c in result if c not in first),
        contracted="".join(c for c in first if c in shared - set(result)),
    )


def sizes_of(
    form: AxisGroups, operands: dict[str, ArrayLike]
) -> dict[str, int]:
    """The size of each letter.

    Raises:
        ValueError: If the shapes of the operands are not those of the form.
    """
    sizes: dict[str, int] = {}
    for operand, value in operands.items():
        letters, shape = getattr(form, operand), np.shape(value)
        pairs = dict(zip(letters, shape, strict=False))
        wrong = any(sizes.get(c, size) != size for c, size in pairs.items())
        if len(letters) != len(shape) or wrong:
            raise ValueError(
                f"The {operand} do not fit {letters!r} of the equation. "
                f"Received: shape {shape}. Allowed: an axis for each letter, "
                f"with these sizes: {sizes}. Correct one of the two."
            )
        sizes |= pairs
    return sizes


def home_matrices(form: AxisGroups, operand: str, value: ArrayLike) -> Array:
    """`(batch, rows, columns)` of an operand, as its first matmul reads it.

    An axis that no other operand has is summed, exactly, and the sum is
    rounded to float32.
    """
    have, groups = getattr(form, operand), form.letters(operand)
    wanted = "".join(groups)
    alone = tuple(i for i, c in enumerate(have) if c not in wanted)
    summed = float32(value)
    if alone:
        summed = float32(np.sum(summed, axis=alone, dtype=np.float64))
        have = "".join(c for c in have if c in wanted)
    ordered = summed.transpose([have.index(c) for c in wanted])
    sizes = dict(zip(wanted, ordered.shape, strict=True))
    return ordered.reshape([_product(g, sizes) for g in groups])


def from_matrices(
    form: AxisGroups, operand: str, matrices: Array, sizes: dict[str, int]
) -> Array:
    """An operand, or its gradient, of its home matrices.

    The gradient of an axis that was summed is broadcast along it.
    """
    have = "".join(form.letters(operand))
    tensor = matrices.reshape([sizes[c] for c in have])
    wanted = getattr(form, operand)
    order = [have.index(c) for c in wanted if c in have]
    tensor = tensor.transpose(order)
    alone = [i for i, c in enumerate(wanted) if c not in have]
    shape = [sizes[c] for c in wanted]
    return np.broadcast_to(np.expand_dims(tensor, alone), shape).copy()


def _odd(first: str, second: str, result: str) -> bool:
    """Return True if letters are something else, twice, or from nowhere."""
    twice = any(len(set(p)) != len(p) for p in (first, second, result))
    others = not (first + second + result).isalpha()
    return twice or others or bool(set(result) - set(first + second))


def _product(letters: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[c] for c in letters)
