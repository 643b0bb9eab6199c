"""Recipes that train kernels in floats for a grid of few bits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from keras_policy_ext import formats
from keras_policy_ext._types import override
from keras_policy_ext.policy_names import QAT
from keras_policy_ext.recipes.fields import integer, wrong
from keras_policy_ext.recipes.recipe import HIGH_PRECISION, Recipe
from keras_policy_ext.stored_kernels import SCALE_FORMATS, Grid

GROUPS = (None, 16, 32, 64, 128)
"""How many elements that a matmul sums share a scale; None for all."""

INPUTS = (None, "int8")
"""The formats to which inputs can be rounded."""

CLIP_OF_CHANNELS = 0.9
"""The clip of channels in few bits, whose amax is far from most values.

In int4 it wins back more of the loss of rounding than 1.0, and alike by all
seeds (`integration/benchmarks/four_bits.py`). An amax of 32 values is nearer.
"""

MOST_STEPS = 2**22
"""The longest delay, half of what a state counts to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnGrid(Recipe):
    """Kernels on a grid of few bits, for `keras_policy_ext.freeze`.

    A step multiplies with the kernel that `freeze` would store, rounded anew
    from the float kernel, in the compute dtype. The gradients of all operands
    are in high precision. That of the kernel passes straight through the
    rounding; a value that was clipped has none.

    Attributes:
        weights: The format of the numbers, as for `freeze`.
        group: How many elements that a matmul sums share a scale: 16, 32, 64
            or 128. None for one scale per output of the kernel.
        inputs: `"int8"` rounds the inputs too, with a scale per token, or per
            example of a convolution, as with `activations="dynamic"` of
            `freeze`. None does not.
        clip: The share of an amax that becomes the largest number of the
            format; larger values are clipped. None for `CLIP_OF_CHANNELS` with
            one scale per output and four bits or less, and otherwise 1.
        delay: The number of steps that multiply with the float kernel, before
            it is rounded. A state of each kernel counts them.
        scale_format: The format of the scales, as for `freeze`.

    Raises:
        TypeError, ValueError: If a field has a wrong type or value.
    """

    family: ClassVar[str] = QAT
    weights: ClassVar[str]

    group: int | None = None
    inputs: str | None = None
    clip: float | None = None
    delay: int = 0
    scale_format: str = "float32"
    forward: str = HIGH_PRECISION
    inputs_grad: str = HIGH_PRECISION
    kernel_grad: str = HIGH_PRECISION

    def __post_init__(self) -> None:
        for field, allowed in (
            ("group", GROUPS),
            ("inputs", INPUTS),
            ("scale_format", SCALE_FORMATS),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or value not in allowed:
                words = " or ".join(map(repr, allowed))
                raise ValueError(wrong(self, field, words))
        if self.inputs and not formats.get(self.weights).is_integer:
            # A frozen kernel in e4m3 has inputs in e4m3; one in e2m1, none.
            raise ValueError(
                "Inputs in int8 go with kernels of integers alone. Received: "
                f"weights={self.weights!r} and inputs={self.inputs!r}. "
                "Allowed: inputs=None. Leave it out, or take 'int8' or 'int4'."
            )
        if self.clip is not None and (
            type(self.clip) not in (int, float) or not 0.1 <= self.clip <= 1.0
        ):
            words = "a number from 0.1 to 1, or None"
            raise ValueError(wrong(self, "clip", words))
        integer(self, "delay", 0, MOST_STEPS)
        super().__post_init__()

    @property
    def remembers(self) -> bool:
        """True if steps are counted, until kernels are rounded."""
        return self.delay > 0

    @property
    @override
    def grid(self) -> Grid:
        per = "channel" if self.group is None else f"group{self.group}"
        clip = self.clip
        if clip is None:
            is_coarse = formats.get(self.weights).bits <= 4
            of_channels = is_coarse and self.group is None
            clip = CLIP_OF_CHANNELS if of_channels else 1.0
        return Grid(
            self.weights,
            per,
            clip,
            self.inputs,
            self.delay,
            self.scale_format,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(OnGrid):
    """Kernels of integers from -127 to 127; see `OnGrid`."""

    name: ClassVar[str] = "int8"
    weights: ClassVar[str] = "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(OnGrid):
    """Kernels of integers from -7 to 7; see `OnGrid`."""

    name: ClassVar[str] = "int4"
    weights: ClassVar[str] = "int4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int3(OnGrid):
    """Kernels of integers from -3 to 3; see `OnGrid`."""

    name: ClassVar[str] = "int3"
    weights: ClassVar[str] = "int3"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int2(OnGrid):
    """Kernels of -1, 0 and 1; see `OnGrid`."""

    name: ClassVar[str] = "int2"
    weights: ClassVar[str] = "int2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class E4M3(OnGrid):
    """Kernels in e4m3fn, which train in floats; see `OnGrid`."""

    name: ClassVar[str] = "float8_e4m3fn"
    weights: ClassVar[str] = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class E2M1(OnGrid):
    """Kernels in e2m1fn, by default those of NVFP4; see `OnGrid`.

    In NVFP4 16 elements have a scale in e4m3fn, times one number per kernel,
    here a power of two: see `stored_kernels.outer_scale`. In MXFP4 32 elements
    have a power of two: `group=32`, `scale_format="float8_e8m0fnu"`.
    """

    name: ClassVar[str] = "float4_e2m1fn"
    weights: ClassVar[str] = "float4_e2m1fn"

    group: int | None = 16
    scale_format: str = "float8_e4m3fn"
