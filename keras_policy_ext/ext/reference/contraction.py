"""Compute the three matmuls of a contraction, in NumPy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.ext.reference.casting import float32, matmul_key
from keras_policy_ext.ext.reference.matrices import (
    Asked,
    Quantized,
    quantize_matrices,
)
from keras_policy_ext.ext.reference.scales import amax, is_whole

Array = np.ndarray[Any, Any]


class AxisGroups(NamedTuple):
    """The letters of an equation's axes: batch, rows, columns, contracted.

    Rows and contracted letters are in the order of the inputs, batch and
    columns in the order of the result. So the axes of a group are flattened in
    the same order in all three matmuls.
    """

    inputs: str
    kernel: str
    outputs_grad: str
    batch: str
    rows: str
    columns: str
    contracted: str

    def letters(self, operand: str) -> tuple[str, str, str]:
        """Return the letters of an operand's matrix axes: batch, rows, columns.

        The home matrix is the one that the first matmul of the operand reads.
        The second matmul reads its transpose.
        """
        two = {
            "inputs": (self.rows, self.contracted),
            "kernel": (self.columns, self.contracted),
            "outputs_grad": (self.rows, self.columns),
        }
        return self.batch, *two[operand]


def form_of(equation: str) -> AxisGroups:
    """Parse an equation such as `"abc,cd->abd"` to `AxisGroups`.

    Raises:
        ValueError: If it does not have two operands and a result, or one of
            them repeats a letter.
    """
    parts = equation.replace(" ", "").replace("->", ",").split(",")
    if equation.count("->") != 1 or len(parts) != 3 or _odd(*parts):
        raise ValueError(
            "`equation` does not describe a contraction of two operands. "
            f"Received: {equation!r}. Allowed: two operands and a result, "
            "with no letter repeated within one of them, such as "
            '"abc,cd->abd". Replace "..." by letters.'
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
    """Return the axis size for each letter of an equation.

    Raises:
        ValueError: If the shapes of the operands do not fit the equation.
    """
    sizes: dict[str, int] = {}
    for operand, value in operands.items():
        letters, shape = getattr(form, operand), np.shape(value)
        pairs = dict(zip(letters, shape, strict=False))
        wrong = any(sizes.get(c, size) != size for c, size in pairs.items())
        if len(letters) != len(shape) or wrong:
            raise ValueError(
                f"The operand {operand!r} does not fit {letters!r} of the "
                f"equation. Received: shape {shape}. Allowed: an axis for "
                f"each letter, with these sizes: {sizes}. Correct the operand "
                "or the equation."
            )
        sizes |= pairs
    return sizes


def home_matrices(form: AxisGroups, operand: str, value: ArrayLike) -> Array:
    """Reshape an operand to `(batch, rows, columns)` for its first matmul.

    An axis that no other operand has is summed in float64, and the sum is
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
    """Reshape `(batch, rows, columns)` back to the shape of an operand.

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
    """Return True if the letters of an equation are not valid."""
    twice = any(len(set(p)) != len(p) for p in (first, second, result))
    others = not (first + second + result).isalpha()
    return twice or others or bool(set(result) - set(first + second))


def _product(letters: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[c] for c in letters)


Read = dict[tuple[str, str], Array | Quantized]

_MATMULS = {
    "forward": ("outputs_grad", "inputs", "kernel"),
    "inputs_grad": ("inputs", "outputs_grad", "kernel"),
    "kernel_grad": ("kernel", "outputs_grad", "inputs"),
}
"""The operand that each matmul computes, and the two that it reads."""


class Scaling(Protocol):
    """The methods of a recipe that the reference implementation uses."""

    def quantization(self, operand: str, matmul: str) -> Asked | None:
        """Return how an operand of a matmul is quantized; None if it is not."""


class _OfBank(NamedTuple):
    """A recipe with a scale per matrix where it has one per tensor."""

    recipe: Scaling

    def quantization(self, operand: str, matmul: str) -> Asked | None:
        asked = self.recipe.quantization(operand, matmul)
        return None if asked is None else asked.of_each_matrix


class Linear(NamedTuple):
    """The output, gradients and quantized operands of a linear layer.

    Attributes:
        y: The output, of the shape of `outputs_grad`.
        inputs_grad: The gradient of the inputs, of their shape.
        kernel_grad: The gradient of the kernel, of its shape.
        quantized: Codes by operand, in its shape, for operands that have one
            scale per tensor in both of their matmuls.
        scales: Their dequantizing scales, float32 scalars.
        matrices: By operand and matmul, such as `"inputs", "forward"`: the
            `Quantized` that this matmul reads and whose last axis it sums.
            Matmuls that are not quantized are left out.
    """

    y: Array
    inputs_grad: Array
    kernel_grad: Array
    quantized: dict[str, Array]
    scales: dict[str, Array]
    matrices: dict[tuple[str, str], Quantized]


def linear(
    x: ArrayLike,
    kernel: ArrayLike,
    g: ArrayLike,
    recipe: Scaling,
    key: int | None = None,
) -> Linear:
    """Compute a linear layer, forward and backward, under a recipe.

    `y = x·w`, `inputs_grad = g·wᵀ`, `kernel_grad = xᵀ·g`: the `einsum` of
    `"ab,bc->ac"` after all axes of x but the last are flattened.

    Args:
        x: `(..., in)`.
        kernel: `(in, out)`.
        g: `(..., out)`, the gradient of the output.
        recipe: A recipe without a history.
        key: The int32 key of the step, if the recipe rounds stochastically.

    Returns:
        A `Linear`.

    Raises:
        ValueError: If the recipe has a history (see `DelayedLinear`), or
            rounds stochastically and there is no key.
    """
    x, g = np.asarray(x), np.asarray(g)
    rows = einsum("ab,bc->ac", _rows(x), kernel, _rows(g), recipe, key)
    shapes = {"inputs": x.shape, "outputs_grad": g.shape}
    return rows._replace(
        y=rows.y.reshape(g.shape),
        inputs_grad=rows.inputs_grad.reshape(x.shape),
        quantized={
            operand: codes.reshape(shapes.get(operand, codes.shape))
            for operand, codes in rows.quantized.items()
        },
    )


def einsum(
    equation: str,
    x: ArrayLike,
    kernel: ArrayLike,
    g: ArrayLike,
    recipe: Scaling,
    key: int | None = None,
    is_bank: bool = False,
) -> Linear:
    """Compute a contraction, forward and backward, under a recipe.

    Each matmul reads its two operands as matrices whose last axis it sums.
    They are quantized from the original values as `recipe.quantization` says.
    If the second matmul of an operand needs the transpose of what the first
    one reads, it reads that. Values are dequantized, multiplied in float64,
    and rounded once to float32. Operands without a quantization are multiplied
    unquantized.

    Args:
        equation: Two operands and a result, such as `"abc,cd->abd"`.
        x: The first operand.
        kernel: The second operand.
        g: The gradient of the result.
        recipe: A recipe without a history.
        key: The int32 key of the step, if the recipe rounds stochastically.
        is_bank: Whether the kernel is a bank of matrices, as of experts. Where
            the recipe has one scale per tensor, each matrix of the batch then
            has its own.

    Returns:
        A `Linear`.

    Raises:
        ValueError: If the equation or a shape is wrong, the recipe has a
            history (see `DelayedLinear`), or rounds stochastically and there
            is no key.
    """
    if hasattr(recipe, "amax_history_length"):
        raise ValueError(
            "`recipe` needs a history, and this function keeps no state "
            f"between steps. Received: {recipe!r}. Allowed: a recipe without "
            "history, such as CurrentScaling(). For this recipe use "
            "`reference.DelayedLinear`."
        )
    if is_bank:
        recipe = _OfBank(recipe)
    form = form_of(equation)
    operands = {"inputs": x, "kernel": kernel, "outputs_grad": g}
    sizes = sizes_of(form, operands)
    read: Read = {}
    for operand, value in operands.items():
        home = home_matrices(form, operand, value)
        read |= _read(operand, home, recipe, amax(value), key)
    results = {
        made: from_matrices(form, made, _multiply(read, matmul), sizes)
        for matmul, (made, *_) in _MATMULS.items()
    }
    tensors = _of_tensors(read, form, sizes)
    return Linear(
        results["outputs_grad"],
        results["inputs"],
        results["kernel"],
        {operand: codes for operand, (codes, _) in tensors.items()},
        {operand: scale for operand, (_, scale) in tensors.items()},
        {k: v for k, v in read.items() if isinstance(v, Quantized)},
    )


def _readers(operand: str) -> tuple[str, str]:
    """Return the names of the first and second matmul that read an operand."""
    first, second = (m for m, (_, *two) in _MATMULS.items() if operand in two)
    return first, second


def _read(
    operand: str,
    home: Array,
    recipe: Scaling,
    observed: np.float32,
    key: int | None,
) -> Read:
    """Return an operand as quantized for each of its two matmuls."""

    def of(matmul: str, matrices: Array) -> Array | Quantized:
        asked = recipe.quantization(operand, matmul)
        own = None if key is None else matmul_key(key, observed, matmul)
        return quantize_matrices(matrices, asked, own) if asked else matrices

    matmuls = _readers(operand)
    first = of(matmuls[0], home)
    if isinstance(first, Quantized) and _once(operand, recipe):
        second: Array | Quantized = first.transposed
    else:
        second = of(matmuls[1], home.swapaxes(1, 2))
    return {
        (operand, matmul): _marked(matmul, each)
        for matmul, each in zip(matmuls, (first, second), strict=True)
    }


def _once(operand: str, recipe: Scaling) -> bool:
    """Return True if both matmuls can read one quantization of an operand."""
    first, second = (recipe.quantization(operand, m) for m in _readers(operand))
    if first is None or second is None or first.hadamard is not None:
        return False
    return first.transposed == second


def _marked(matmul: str, each: Array | Quantized) -> Array | Quantized:
    """In matmuls of gradients, set scales of non-finite tiles to NaN."""
    if isinstance(each, Quantized) and matmul != "forward":
        return each.marked
    return each


def _multiply(read: Read, matmul: str) -> Array:
    """Compute a matmul of operands in float64, rounded once to float32."""
    left, right = (_float64(read[o, matmul]) for o in _MATMULS[matmul][1:])
    with np.errstate(over="ignore", invalid="ignore"):
        return (left @ right.swapaxes(1, 2)).astype(np.float32)


def _float64(each: Array | Quantized) -> Array:
    if isinstance(each, Quantized):
        return each.dequantize()
    return each.astype(np.float64)


def _of_tensors(
    read: Read, form: AxisGroups, sizes: dict[str, int]
) -> dict[str, tuple[Array, Array]]:
    """Return (codes, scale) of the operands that have one scale."""
    found: dict[str, tuple[Array, Array]] = {}
    for operand in ("inputs", "kernel", "outputs_grad"):
        first, second = _readers(operand)
        home, turned = read[operand, first], read[operand, second]
        both = [q for q in (home, turned) if isinstance(q, Quantized)]
        if not both or any(not is_whole(q.tile) for q in both):
            continue
        codes = (both[0] if both[0] is home else both[0].transposed).codes
        if codes.size == math.prod(sizes[c] for c in getattr(form, operand)):
            tensor = from_matrices(form, operand, codes, sizes)
            found[operand] = tensor, both[0].scales.reshape(())
    return found


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
