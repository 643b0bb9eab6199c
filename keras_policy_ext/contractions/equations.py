"""Einsum equations of two operands, and the matrices that they multiply."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Size, Tensor


class Terms(NamedTuple):
    """The terms of the inputs, the kernel and the outputs in an equation."""

    first: str
    second: str
    out: str


def split(equation: str) -> Terms:
    """Split an equation such as `"ab,bc->ac"` into its terms; raise if invalid.

    It has two operands and an explicit output; `...` is allowed.

    Raises:
        ValueError: If the equation has another form, repeats a letter in one
            term, or has an output letter that is in no operand.
    """
    if not isinstance(equation, str):
        raise ValueError(_form_error(equation, "it is not a string"))
    text = equation.replace(" ", "")
    operands, arrow, out = text.partition("->")
    terms = [*operands.split(","), out]
    if not arrow or len(terms) != 3:
        raise ValueError(_form_error(equation, "it has another form"))
    for term in terms:
        letters = term.replace("...", "", 1)
        if not all(letter in string.ascii_letters for letter in letters):
            raise ValueError(
                _form_error(equation, f"{term!r} has other signs than letters")
            )
        if len(set(letters)) != len(letters):
            raise ValueError(_form_error(equation, f"{term!r} repeats an axis"))
    if set(terms[2]) - set(terms[0] + terms[1]):
        raise ValueError(
            _form_error(equation, "the output has an axis of no operand")
        )
    return Terms(*terms)


def explicit(equation: str, first_rank: int, second_rank: int) -> str:
    """Replace `...` in an equation by letters, for operands of these ranks.

    `"...x,xy->...y"` becomes `"abx,xy->aby"`. It raises ValueError if the
    equation is malformed or the ranks do not fit.
    """
    terms = split(equation)
    unused = [c for c in string.ascii_letters if c not in equation]
    counts: list[int] = []  # How many letters `...` stands for, by operand.
    for term, rank in zip(terms[:2], (first_rank, second_rank), strict=True):
        counts.append(rank - len(term.replace("...", "")))
        if counts[-1] < 0 or (counts[-1] > 0 and "..." not in term):
            raise ValueError(
                f"An operand does not fit the einsum equation {equation!r}. "
                f"Received: rank {rank} for {term!r}. Allowed: rank "
                f"{len(term.replace('...', ''))}, or more with '...'."
            )
    # The axes of `...` align at the last: lower ranks lack the first letters.
    letters = "".join(unused[: max(counts)])
    first, second = (
        term.replace("...", letters[len(letters) - count :])
        for term, count in zip(terms[:2], counts, strict=True)
    )
    return f"{first},{second}->{terms.out.replace('...', letters)}"


def outputs_shape(
    equation: str, first: Sequence[Size], second: Sequence[Size]
) -> tuple[Size, ...]:
    """Return the shape of the result of an explicit equation, from two shapes.

    `keras.ops.einsum` infers none with capital letters (keras 3.0 to 3.16).
    """
    terms = split(equation)
    sizes = dict(zip(terms.second, second, strict=True))
    sizes |= dict(zip(terms.first, first, strict=True))
    return tuple(map(sizes.__getitem__, terms.out))


def _form_error(equation: object, why: str) -> str:
    """Return the message for an equation that cannot be split."""
    return (
        f"Not an einsum equation of two operands: {why}. Received: "
        f"{equation!r}. Allowed: e.g. 'ab,bc->ac' or '...x,xy->...y'. Write "
        "'->' and the output axes; transpose or take diagonals in separate "
        "operations."
    )


Sizes = dict[str, Any]


class EinsumForm(NamedTuple):
    """The letters of an equation, grouped by their role in the matmul.

    Attributes:
        first: The term of the inputs.
        second: The term of the kernel.
        out: The term of the outputs.
        batch: Letters in both operands and in the output.
        rows: Letters in the inputs and in the output, in the inputs' order.
        columns: Letters in the kernel and in the output, in the output's order.
        contracted: Letters in both operands only.
    """

    first: str
    second: str
    out: str
    batch: str
    rows: str
    columns: str
    contracted: str

    @property
    def is_plain(self) -> bool:
        """True if the matrices are the operands, with axes flattened only."""
        rows, columns, contracted = self.rows, self.columns, self.contracted
        terms = rows + contracted, contracted + columns, rows + columns
        is_matrix = bool(rows and columns and contracted)
        return is_matrix and terms == (self.first, self.second, self.out)

    def sizes(self, inputs: Sequence[Size], kernel: Sequence[Size]) -> Sizes:
        """Return the size of each letter of the equation, from both shapes."""
        letters = self.first + self.second
        return dict(zip(letters, (*inputs, *kernel), strict=True))

    def summed(self, operand: str, x: Tensor, dtype: str = "float32") -> Tensor:
        """Sum an operand in `dtype` over the axes that no other term has."""
        alone = axes_alone(self, operand)
        return ops.sum(ops.cast(x, dtype), axis=alone) if alone else x

    def matrix(self, operand: str, x: Tensor) -> Tensor:
        """Reshape an operand, as `summed` returns it, to its home matrix.

        That is the matrix of its first matmul: (B, R, K), (B, C, K) or (B, R,
        C), where an axis flattens all batch, row, column or contracted letters.
        """
        axes, groups = _home_axes(self, operand)
        sizes, shape = shape_of(x), []
        for group in groups:
            shape.append(math.prod(map(sizes.__getitem__, group)))
        framework = backends.current
        if axes is not None:
            x = framework.permute(x, axes)
        return framework.reshape(x, shape)

    def matrix_axes(
        self, operand: str, axes: Sequence[tuple[str, ...]]
    ) -> tuple[Any, ...]:
        """Convert a list with an entry per operand axis to its matrix's axes.

        An entry names the mesh axes that cut an axis, perhaps none. A matrix
        axis gets that of the first axis flattened into it, or None if one of
        the others is cut too.
        """
        term, free, summed = self._home(operand)
        cut_by = dict(zip(term, axes, strict=True))
        return tuple(
            None
            if any(cut_by[c] for c in group[1:])
            else cut_by.get(group[:1], ())
            for group in (self.batch, free, summed)
        )

    def is_transposed_in_memory(self, operand: str) -> bool:
        """Return True if an operand is in memory as its matrix transposed."""
        term, free, summed = self._home(operand)
        order = self.batch + summed + free
        present = "".join(c for c in term if c in order)
        return present == order and bool(free) and bool(summed)

    def _home(self, operand: str) -> tuple[str, str, str]:
        """Return an operand's term, and the letters it keeps and sums.

        These are the two axes of its home matrix, that of its first matmul.
        """
        return {
            "inputs": (self.first, self.rows, self.contracted),
            "kernel": (self.second, self.columns, self.contracted),
            "outputs_grad": (self.out, self.rows, self.columns),
        }[operand]

    def result(self, matmul: str, matrix: Tensor, sizes: Sizes) -> Tensor:
        """Reshape and transpose the matrix of a matmul to the result's axes.

        It is (B, R, C) for `forward`, (B, R, K) for `inputs_grad`, (B, K, C)
        for `kernel_grad`, with the axes of `matrix`. `sizes` has the size of
        each letter.
        """
        framework = backends.current
        if matmul == "forward":
            order, term = self.rows + self.columns, self.out
        elif matmul == "inputs_grad":
            order, term = self.rows + self.contracted, self.first
        else:
            order, term = self.contracted + self.columns, self.second
        order = self.batch + order
        x = framework.reshape(matrix, list(map(sizes.__getitem__, order)))
        if order == term:
            return x
        present = "".join(c for c in term if c in order)
        if present != order:
            x = framework.permute(x, [order.index(c) for c in present])
        if present == term:
            return x
        # Over axes that were summed the gradient is constant.
        shape = [sizes[c] if c in present else 1 for c in term]
        x = framework.reshape(x, shape)
        return ops.broadcast_to(x, [sizes[c] for c in term])


@functools.lru_cache(maxsize=1024)
def form_of(equation: str) -> EinsumForm:
    """Return the letters of an equation, such as `"abc,cd->abd"`, by role."""
    first, second, out = split(equation)
    return EinsumForm(
        first,
        second,
        out,
        batch="".join(c for c in out if c in first and c in second),
        rows="".join(c for c in first if c in out and c not in second),
        columns="".join(c for c in out if c in second and c not in first),
        contracted="".join(c for c in first if c in second and c not in out),
    )


@functools.lru_cache(maxsize=4096)
def axes_alone(form: EinsumForm, operand: str) -> tuple[int, ...]:
    """Return the axes of an operand whose letters no other term has.

    `form` has the letters of the equation by role.
    """
    term, *groups = form._home(operand)
    order = "".join((form.batch, *groups))
    return tuple(i for i, letter in enumerate(term) if letter not in order)


@functools.lru_cache(maxsize=4096)
def _home_axes(
    form: EinsumForm, operand: str
) -> tuple[tuple[int, ...] | None, tuple[tuple[int, ...], ...]]:
    """Return how an operand becomes its matrix (batch, kept, summed axes).

    That is a permutation of its axes, or None; and for each axis of the matrix
    the axes that are flattened into it. `form` has the letters by role.
    """
    # A `summed` operand is permuted so, and flattened to a matrix.
    term, *groups = form._home(operand)
    groups = [form.batch, *groups]
    order = "".join(groups)
    term = "".join(c for c in term if c in order)
    axes = None if term == order else tuple(map(term.index, order))
    return axes, tuple(tuple(map(term.index, group)) for group in groups)


def shape_of(x: Tensor) -> tuple[Any, ...]:
    """Return the sizes of a tensor; a scalar tensor for each unknown size."""
    shape = tuple(x.shape)
    return tuple(ops.shape(x)) if None in shape else shape
