"""The protocols of matmul kernels and of contractions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.both_layouts import BothLayouts
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import HistoryScales
from keras_policy_ext.recipes import Quantization, Tile

Shapes = tuple[Any, Any]
Cast = Callable[[Tensor, Tensor, str, bool], Tensor]

OTHER_SCALES = "its scales are those of other tiles"
"""Why a kernel refuses a matmul whose scales it does not support."""

ROW = Tile(free=1)
"""A scale for each row of a matrix that a matmul reads."""


class Choice(NamedTuple):
    """Which kind of kernel runs a contraction, and why.

    Attributes:
        kind: `"native"` (the matmul reads float8 operands) or `"emulated"`
            (the same numbers, multiplied in float32 or, where that is no
            less exact, in bfloat16).
        reason: One sentence for the user.
    """

    kind: str
    reason: str

    @property
    def native(self) -> bool:
        """Return True if the kind is `"native"`."""
        return self.kind == "native"


class Request(NamedTuple):
    """A matmul that a kernel is wanted for.

    Attributes:
        matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
        a: What becomes of the first operand.
        b: What becomes of the second one.
        batched: Whether there may be several matrices of each.
        prefer: `"auto"`, `"native"` or `"emulated"`.
        for_xla: Whether XLA is going to compile it, where that is known.
    """

    matmul: str
    a: Quantization
    b: Quantization
    batched: bool
    prefer: str | None
    for_xla: bool

    @property
    def of_whole_tensors(self) -> bool:
        """Return True if each operand has one scale."""
        return self.tiles == (Tile(), Tile())

    @property
    def of_rows(self) -> bool:
        """True if an operand has a scale per row, the other per row or one."""
        return ROW in self.tiles and set(self.tiles) <= {ROW, Tile()}

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of both operands."""
        return self.a.format, self.b.format

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        """How far one scale of each operand reaches."""
        return self.a.tile, self.b.tile


class MatmulKernel(Protocol):
    """One way to multiply two matrices.

    It may have two things more. `writes_float32` is true if a result in
    float32 costs no more than its memory. `adding(bias)` returns a kernel
    that adds a number for each column, in the dtype of the result, before it
    rounds to that; None where there is none.
    """

    @property
    def native(self) -> bool:
        """Return True if it reads float8 operands."""

    def supports(self, request: Request) -> str | None:
        """Return why this kernel does not support a matmul, or None."""

    def reason(self, request: Request) -> str:
        """Return one sentence for the user on what this kernel is."""

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply two matrices, accumulated in float32.

        Args:
            a: (b, m, k).
            b: (b, n, k).
            dtype: Of the result.
            fast: Whether a GPU may accumulate with fewer bits.

        Returns:
            (b, m, n).
        """


class Convolutions(Protocol):
    """A convolution of float32 tensors, and its gradients."""

    reason: str
    """Why they are not of float8 tensors."""

    def outputs(self, conv: Any, x: Tensor, w: Tensor) -> Tensor:
        """The outputs."""

    def inputs_grad(
        self, conv: Any, g: Tensor, w: Tensor, shape: Shape
    ) -> Tensor:
        """The gradient of inputs of this shape."""

    def kernel_grad(
        self, conv: Any, x: Tensor, g: Tensor, shape: Shape
    ) -> Tensor:
        """The gradient of a kernel of this shape."""


class StateKernels(Protocol):
    """What a source computes of a state, in a kernel for each question.

    The numbers are those of the source, whose methods are called the same.
    """

    def supports(self, source: Any, state: Tensor) -> str | None:
        """Return why these kernels do not support a source's state, or None."""

    def history_scales(self, source: Any, state: Tensor) -> HistoryScales:
        """Read the scales of a state, as they are before the step."""

    def observation(
        self, source: Any, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        """One use of a layer; amaxes may be those of parts of an operand."""

    def settle(self, source: Any, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state when a value is assigned to it."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """The kernels of one framework.

    Attributes:
        name: That of the framework.
        device: Says which device it computes on.
        matmuls: The ways to multiply, the best first; the last supports
            everything.
        plain: Multiplies what is not quantized.
        convolutions: Those of the framework.
        cast: Takes a tensor, the scale of each number, the name of a format,
            and whether to multiply by the scale instead of dividing by it;
            returns numbers of the format, in float32 or in its dtype.
        narrow_cast: The same, in the dtype of the format.
        widen: Takes numbers in a float8 dtype or in float32, and the dtype in
            which a layer computes; returns them in that where the engine
            multiplies such numbers, otherwise in float32.
        both_layouts: Casts for both matmuls of an operand in one pass; None
            where casting and transposing are left to the framework.
        training_cast: The same as `cast` for layers in training, which are
            not exported; None where that makes no difference.
        encode: Takes numbers of a format in float32 and its name; returns
            their codes.
        decode: Takes codes and the name of a format; returns the numbers.
        casts_before_amax: Whether a compiler takes into one kernel the cast
            and the amax of a tensor, if its scale does not wait.
        requantizes_kernels: Whether kernels are quantized again in the
            backward pass, and their codes not saved: see `RequantizedKernel`.
        states: The arithmetic of states as kernels of its own, the best
            first; that of the source in `keras.ops` follows.
    """

    name: str
    device: Callable[[], Device]
    matmuls: tuple[MatmulKernel, ...]
    plain: MatmulKernel
    convolutions: Convolutions
    cast: Cast
    narrow_cast: Cast
    widen: Callable[[Tensor, str], Tensor]
    both_layouts: BothLayouts | None = None
    training_cast: Cast | None = None
    encode: Callable[[Tensor, str], Tensor] = casting.encode
    decode: Callable[[Tensor, str], Tensor] = casting.decode
    casts_before_amax: Callable[[], bool] = lambda: False
    requantizes_kernels: Callable[[], bool] = lambda: False
    states: tuple[StateKernels, ...] = ()

    @property
    def cast_in_training(self) -> Cast:
        """See `training_cast`."""
        return self.training_cast or self.cast

    def state_kernels_for(
        self, source: Any, state: Tensor
    ) -> StateKernels | None:
        """Return the first kernels for a state of a source; None if none."""
        for states in self.states:
            if states.supports(source, state) is None:
                return states
        return None

    def select(self, request: Request) -> tuple[MatmulKernel, Choice]:
        """The first kernel that supports a matmul, and why it is that one.

        A user asks why a matmul is not native: the reason is then that of
        the first kernel for such scales which does not support it.
        """
        refusals = []
        for kernel in self.matmuls:
            refusal = kernel.supports(request)
            if refusal is None:
                break
            refusals.append(refusal)
        if kernel.native or not refusals:
            kind = "native" if kernel.native else "emulated"
            return kernel, Choice(kind, kernel.reason(request))
        reasons = [each for each in refusals if each != OTHER_SCALES]
        kinds = dict.fromkeys(map(_described, request.tiles))
        none = f"no float8 matmul of {self.name} has {' with '.join(kinds)}"
        return kernel, Choice("emulated", reasons[0] if reasons else none)


def _described(tile: Tile) -> str:
    """Describe what one scale belongs to."""
    if tile.is_whole:
        return "a scale for a tensor"
    return "scales of rows" if tile == ROW else "scales of blocks"
