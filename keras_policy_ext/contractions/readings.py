"""How a product by parts reads the operands of an einsum as matrices."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.parts import StoredMatrix
from keras_policy_ext.contractions.equations import (
    EinsumForm,
    Sizes,
    axes_alone,
)
from keras_policy_ext.stored_kernels import BLOCK, Axes


class Reading(NamedTuple):
    """An einsum of a stored kernel as matrices that need no copy of it.

    The matrices of the kernel are those that it has in memory: its last axes
    are the summed and the other axes of the product, in either order. Axes
    before these tell matrices apart; inputs may lack some of them.

    Attributes:
        operand_form: The form of the equation, for the inputs or the outputs
            gradient, with letters in the kernel's order.
        result_form: The same for the result: here the axes that tell matrices
            apart are those of the kernel.
        shape: The kernel as `(matrices, m, n)`.
        sums_first: Whether `m` are the axes that the outputs sum over.
        forward: False for the gradient of the inputs.
        scaled: What the scales multiply: `"inputs"` or `"outputs"` of the
            product, or `"blocks"`, parts of it.
        scale_shape: The scales as `(matrices or 1, 1, size or 1)`; those of
            blocks as they are stored.
    """

    operand_form: EinsumForm
    result_form: EinsumForm
    shape: tuple[int, int, int]
    sums_first: bool
    forward: bool
    scaled: str
    scale_shape: tuple[int, ...]

    def product(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        format_name: str,
        dtype: str,
    ) -> Tensor | None:
        """Multiply by parts; None if the kernel should be decoded at once.

        Args:
            x: The inputs, or the outputs gradient, in their own axes.
            codes: The codes, or numbers in float16, in the kernel's axes.
            scale: The scales, as they are stored.
            format_name: The format of the codes.
            dtype: See `Arithmetic.product_by_parts`.

        Returns:
            Float32, (matrices, rows, outputs).
        """
        framework, blocks = backends.current, None
        if self.scaled == "blocks":
            # One row of scales for BLOCK entries of the axis that is cut.
            rows = ops.transpose(scale) if self.sums_first else scale
            *_, n = self.shape
            blocks = framework.repeat(rows, BLOCK, 1)[:, :n]
        else:
            scale = framework.reshape(scale, self.scale_shape)
        x, form = ops.cast(x, "float32"), self.operand_form
        if self.forward:
            x = form.matrix("inputs", form.summed("inputs", x))
        else:
            x = form.matrix("outputs_grad", x)
        if self.scaled == "inputs":
            x = x * scale
        sums = self.sums_first == self.forward
        matrix = StoredMatrix(format_name, self.shape, sums)
        y = framework.product_by_parts(x, codes, matrix, blocks, dtype)
        return y * scale if y is not None and self.scaled == "outputs" else y

    def result(self, product: Tensor, sizes: Sizes) -> Tensor:
        """Return the outputs, or the inputs gradient, in their own axes."""
        matmul = "forward" if self.forward else "inputs_grad"
        return self.result_form.result(matmul, product, sizes)


@functools.lru_cache(maxsize=4096)
def reading_of(
    form: EinsumForm,
    axes: Axes,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    in_blocks: bool,
    forward: bool,
) -> Reading | None:
    """Return how to read a kernel; None if its matrices need a copy.

    Args:
        form: The form of the equation.
        axes: The axes of the kernel that share a scale.
        shape: The shape of the kernel.
        scale_shape: The shape of its scales.
        in_blocks: Whether each block of it has a scale.
        forward: False for the gradient of the inputs.
    """
    second = form.second
    batch, columns, contracted = (
        "".join(c for c in second if c in group)
        for group in (form.batch, form.columns, form.contracted)
    )
    if axes_alone(form, "kernel") or not (columns and contracted):
        return None
    # Columns in front are matrices that read the same inputs, such as the
    # heads of "btd,ndh->btnh". Their gradient would be a sum over matrices.
    alone = second.partition(contracted)[0]
    if set(alone) == set(columns) or batch or not forward:
        alone = ""
    matrices = batch + alone
    columns = columns.removeprefix(alone)
    sums_first = second == matrices + contracted + columns
    if not (sums_first or second == matrices + columns + contracted):
        return None
    operand_form = form._replace(
        batch=batch, columns=columns, contracted=contracted
    )
    sizes = dict(zip(second, shape, strict=True))
    inner = (contracted, columns) if sums_first else (columns, contracted)
    count, m, n = (_size(group, sizes) for group in (matrices, *inner))
    scaled = "blocks"
    if in_blocks:
        in_order = tuple(
            "".join(second[axis] for axis in group) for group in axes
        )
        if matrices or in_order != (contracted, columns):
            return None
    else:
        of_scale = dict(zip(second, scale_shape, strict=True))
        groups = matrices, columns, contracted
        found = of_matrices, of_columns, of_contracted = tuple(
            _size(group, of_scale) for group in groups
        )
        full = tuple(_size(group, sizes) for group in groups)
        is_whole = all(x in (1, y) for x, y in zip(found, full, strict=True))
        if not is_whole or 1 not in (of_columns, of_contracted):
            return None
        by_column = of_contracted == 1
        scaled = "outputs" if by_column == forward else "inputs"
        scale_shape = of_matrices, 1, of_columns * of_contracted
    return Reading(
        operand_form,
        operand_form._replace(batch=matrices),
        (count, m, n),
        sums_first,
        forward,
        scaled,
        scale_shape,
    )


def _size(letters: str, sizes: dict[str, int]) -> int:
    """Return how many entries the axes of some letters have together."""
    return math.prod(map(sizes.__getitem__, letters))
