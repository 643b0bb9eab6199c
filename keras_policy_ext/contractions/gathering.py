"""A kernel of which every device has a part, gathered in a byte a number."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.quantized import Quantized


def gathered(gathering: Any, axes: tuple[Any, ...], *reads: Quantized) -> Any:
    """All-gather the codes of a kernel that devices hold in parts.

    It is quantized and narrow before. Scales come from the amax of all parts,
    so that those of the same numbers are the same on every device.

    Args:
        gathering: From `Backend.gathering_of`.
        axes: See `Backend.gathered`, for the values.
        *reads: The same values with scales that may differ.
    """
    framework = backends.current()

    def along(x: Tensor) -> Tensor:
        sizes = zip(x.shape, axes, strict=True)
        cut = [() if size == 1 else names for size, names in sizes]
        return framework.gathered(x, gathering, cut)

    asked: Any = reads[0].quantization
    dtype = framework.kept_dtype(reads[0].values, asked.format)
    narrow = [each.narrowed(dtype) for each in reads]
    values = along(narrow[0].values)
    if asked.tile.is_whole:
        return tuple(each.with_values(values) for each in narrow)
    return tuple(
        dataclasses.replace(each, values=values, scale=along(each.scale))
        for each in narrow
    )
