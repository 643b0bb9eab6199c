"""How a product by parts reads the operands of an einsum as matrices."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from keras_policy_ext.contractions.equations import EinsumForm, axes_alone
from keras_policy_ext.stored_kernels import Axes


class Reading(NamedTuple):
    """An einsum of a stored kernel as matrices that need no copy of it.

    The matrices of the kernel are those that it has in memory: its last axes
    are the summed and the other axes of the product, in either order. Axes
    before these tell matrices apart; inputs may lack some of them.

    Attributes:
        operand: The form of the equation, for what the kernel multiplies, with
            letters in the kernel's order.
        result: The same for the result: here the axes that tell matrices apart
            are those of the kernel.
        shape: See `StoredMatrix`, as for `sums`.
        scales: The shape of a scale for each of the other axes' entries.
    """

    operand: EinsumForm
    result: EinsumForm
    shape: tuple[int, int, int]
    sums: bool
    scales: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def reading_of(
    form: EinsumForm,
    axes: Axes,
    shape: tuple[int, ...],
    in_blocks: bool,
    matmul: str,
) -> Reading | None:
    """Return how a matmul reads a kernel; None if its matrices need a copy.

    Args:
        form: The form of the equation.
        axes: The axes of the kernel that share a scale.
        shape: The shape of the kernel.
        in_blocks: Whether each block of it has a scale.
        matmul: `"forward"` or `"inputs_grad"`.
    """
    second, forward = form.second, matmul == "forward"
    batch, columns, contracted = (
        "".join(c for c in second if c in group)
        for group in (form.batch, form.columns, form.contracted)
    )
    if axes_alone(form, "kernel") or not (columns and contracted):
        return None
    summed, free = ("".join(second[i] for i in group) for group in axes)
    is_in_order = (summed, free) == (contracted, columns)
    if set(free) & set(contracted) or (in_blocks and not is_in_order):
        return None
    # Columns in front are matrices that read the same inputs, such as the
    # heads of "btd,ndh->btnh". Their gradient would be a sum over matrices.
    alone = second.partition(contracted)[0]
    if set(alone) == set(columns) or batch or not forward or in_blocks:
        alone = ""
    matrices, columns = batch + alone, columns.removeprefix(alone)
    groups = matrices, contracted, columns
    sums_first = second == "".join(groups)
    if not sums_first:
        groups = matrices, columns, contracted
        if second != "".join(groups):
            return None
    sizes = dict(zip(second, shape, strict=True))
    count, m, n = (math.prod(map(sizes.__getitem__, each)) for each in groups)
    operand = form._replace(batch=batch, columns=columns, contracted=contracted)
    return Reading(
        operand,
        operand._replace(batch=matrices),
        (count, m, n),
        sums_first == forward,
        tuple(1 if c in contracted else sizes[c] for c in second),
    )
