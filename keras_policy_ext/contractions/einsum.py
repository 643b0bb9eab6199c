"""Einsum equations as data: no tensor is touched here."""

from __future__ import annotations

import string
from typing import NamedTuple


class Terms(NamedTuple):
    """The three terms of an explicit equation of two operands."""

    first: str
    second: str
    out: str


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


def _form_error(equation: object, why: str) -> str:
    return (
        f"Not an einsum equation of two operands: {why}. Received: "
        f"{equation!r}. Allowed: e.g. 'ab,bc->ac' or '...x,xy->...y'. Write "
        "the output out, and transpose or take diagonals outside."
    )
