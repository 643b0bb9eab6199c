"""How a product by parts reads the operands of an einsum as matrices."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from keras_policy_ext.contractions.equations import EinsumForm, axes_alone
from keras_policy_ext.stored_kernels import Axes


class KernelMatrices(NamedTuple):
    """A stored kernel, viewed as matrices that need no copy of it.

    The matrices are those that the kernel has in memory: its last axes are the
    summed and the other axes of the product, in either order. Axes before
    these tell matrices apart; inputs may lack some of them.

    Attributes:
        operand: The letters of the equation by role, for the operand that the
            kernel multiplies, in the kernel's order.
        result: The same for the result: here the axes that tell matrices apart
            are those of the kernel.
        shape: `(matrices, m, n)`; the kernel has these sizes in memory.
        sums: Whether the product adds up over `m`; otherwise over `n`.
        scales_shape: The shape of the scales: 1 for each axis that is summed.
    """

    operand: EinsumForm
    result: EinsumForm
    shape: tuple[int, int, int]
    sums: bool
    scales_shape: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def kernel_matrices(
    form: EinsumForm,
    axes: Axes,
    shape: tuple[int, ...],
    in_blocks: bool,
    matmul: str,
) -> KernelMatrices | None:
    """Return how a matmul views a stored kernel; None if it needs a copy.

    Args:
        form: The letters of the einsum equation by role.
        axes: The axes of the kernel that the forward matmul sums over, and the
            others, of which each entry has a scale.
        shape: The shape of the kernel.
        in_blocks: Whether each block of it has a scale.
        matmul: `"forward"` or `"inputs_grad"`.
    """
    letters, forward = form.second, matmul == "forward"
    # Each role's letters, in the kernel's order.
    batch, columns, contracted = (
        "".join(c for c in letters if c in role)
        for role in (form.batch, form.columns, form.contracted)
    )
    if axes_alone(form, "kernel") or not (columns and contracted):
        return None
    summed, free = ("".join(letters[i] for i in group) for group in axes)
    is_in_order = (summed, free) == (contracted, columns)
    if set(free) & set(contracted) or (in_blocks and not is_in_order):
        return None
    # Columns in front are matrices that read the same inputs, such as the
    # heads of "btd,ndh->btnh". Their gradient would be a sum over matrices.
    alone = letters.partition(contracted)[0]
    if set(alone) == set(columns) or batch or not forward or in_blocks:
        alone = ""
    matrices, columns = batch + alone, columns.removeprefix(alone)
    axis_groups = matrices, contracted, columns
    sums_first = letters == "".join(axis_groups)
    if not sums_first:
        axis_groups = matrices, columns, contracted
        if letters != "".join(axis_groups):
            return None
    sizes = dict(zip(letters, shape, strict=True))
    count, m, n = (
        math.prod(sizes[letter] for letter in group) for group in axis_groups
    )
    operand = form._replace(batch=batch, columns=columns, contracted=contracted)
    return KernelMatrices(
        operand=operand,
        result=operand._replace(batch=matrices),
        shape=(count, m, n),
        sums=sums_first == forward,
        scales_shape=tuple(
            1 if letter in contracted else sizes[letter] for letter in letters
        ),
    )
