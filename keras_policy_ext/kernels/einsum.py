"""Einsum equations as data: no tensor is touched here."""

from __future__ import annotations

import functools
import string
from typing import NamedTuple


class Terms(NamedTuple):
    """The three terms of an explicit equation of two operands."""

    first: str
    second: str
    out: str


class MatmulForm(NamedTuple):
    """An einsum as a batched matmul: letters in the order of the output.

    Attributes:
        batch: In both operands and in the output.
        rows: In the first operand and in the output.
        columns: In the second operand and in the output.
        contracted: In both operands only.
    """

    batch: str
    rows: str
    columns: str
    contracted: str


class DotForm(NamedTuple):
    """An einsum as XLA's `dot_general`, by numbers of axes.

    Attributes:
        contracted: Axes of the first operand, and of the second.
        batch: Likewise.
        transposed: Which axis of the product comes where in the output.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    transposed: tuple[int, ...]


def split(equation: str) -> Terms:
    """Split and check `"ab,bc->ac"`.

    Args:
        equation: Two operands, an explicit output; `...` is allowed.

    Returns:
        The terms, without spaces.

    Raises:
        ValueError: If the equation has another form, repeats a letter in one
            term, or has an output letter that is in no operand.
    """
    if not isinstance(equation, str):
        raise ValueError(_form_error(equation, "it is no string"))
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


@functools.lru_cache(maxsize=1024)
def explicit(equation: str, first_rank: int, second_rank: int) -> str:
    """Replace `...` by letters, for operands of these ranks.

    Args:
        equation: E.g. `"...x,xy->...y"`.
        first_rank: Number of axes of the first operand.
        second_rank: Number of axes of the second operand.

    Returns:
        An equation with one letter per axis, e.g. `"abx,xy->aby"`.

    Raises:
        ValueError: If the equation is malformed or the ranks do not fit.
    """
    terms = split(equation)
    free = [c for c in string.ascii_letters if c not in equation]
    wide = 0
    for term, rank in zip(terms, (first_rank, second_rank), strict=False):
        missing = rank - len(term.replace("...", ""))
        if missing < 0 or (missing > 0 and "..." not in term):
            raise ValueError(
                f"An operand does not fit the einsum equation {equation!r}. "
                f"Received: rank {rank} for {term!r}. Allowed: rank "
                f"{len(term.replace('...', ''))}, or more with '...'."
            )
        wide = max(wide, missing)
    letters = "".join(free[:wide])
    first, second = (
        term.replace("...", letters[wide - rank + len(term) - 3 :])
        if "..." in term
        else term
        for term, rank in zip(terms, (first_rank, second_rank), strict=False)
    )
    return f"{first},{second}->{terms.out.replace('...', letters)}"


@functools.lru_cache(maxsize=1024)
def matmul_form(equation: str) -> MatmulForm | None:
    """The batched matmul of an explicit equation.

    Returns:
        Its letters, or None where an operand has an axis of its own that is
        summed away.
    """
    first, second, out = split(equation)
    if set(first) - set(second + out) or set(second) - set(first + out):
        return None
    return MatmulForm(
        batch="".join(c for c in out if c in first and c in second),
        rows="".join(c for c in out if c in first and c not in second),
        columns="".join(c for c in out if c in second and c not in first),
        contracted="".join(c for c in first if c in second and c not in out),
    )


@functools.lru_cache(maxsize=1024)
def dot_form(equation: str) -> DotForm:
    """The `dot_general` of an explicit equation that has a `matmul_form`.

    Its product has the axes of the batch, then those that the first operand
    has left, then those of the second, each in the order of the operand.
    """
    first, second, out = split(equation)
    batch = "".join(c for c in out if c in first and c in second)
    summed = "".join(c for c in first if c in second and c not in out)

    def axes(letters: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b = ([term.index(c) for c in letters] for term in (first, second))
        return tuple(a), tuple(b)

    left = "".join(c for c in first + second if c not in batch + summed)
    product = batch + left
    order = tuple(product.index(c) for c in out)
    return DotForm(axes(summed), axes(batch), order)


def inputs_grad(equation: str) -> tuple[str, tuple[int, ...]]:
    """The equation of the gradient of the first operand.

    Returns:
        The equation over (outputs_grad, second operand), and the axes of the
        first operand that it lacks since they were summed away: the gradient
        is constant along them.
    """
    first, second, out = split(equation)
    kept = "".join(c for c in first if c in second or c in out)
    axes = tuple(i for i, c in enumerate(first) if c not in kept)
    return f"{out},{second}->{kept}", axes


def kernel_grad(equation: str) -> tuple[str, tuple[int, ...]]:
    """The same for the second operand, over (first operand, outputs_grad)."""
    first, second, out = split(equation)
    kept = "".join(c for c in second if c in first or c in out)
    axes = tuple(i for i, c in enumerate(second) if c not in kept)
    return f"{first},{out}->{kept}", axes


def _form_error(equation: object, why: str) -> str:
    return (
        f"Not an einsum equation of two operands: {why}. Received: "
        f"{equation!r}. Allowed: e.g. 'ab,bc->ac' or '...x,xy->...y'. Write "
        "the output out, and transpose or take diagonals outside."
    )
