"""The protocols of matmul kernels, convolutions and state kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.both_layouts import BothLayouts, RowCasts
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.casting import Cast, Codec
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import EACH_MATRIX, Quantization, Tile

Shapes = tuple[Any, Any]
OTHER_SCALES = "its scales are those of other tiles"
"""The reason of a kernel that is for other scales; users do not see it."""

ROW = Tile(free=1)
"""One scale per row of the matrix that a matmul reads."""


Convolution: TypeAlias = Any
"""A `contractions.kinds.Conv`: strides, padding and the like."""

E8M0 = "float8_e8m0fnu"
"""The format of the scales of MX blocks."""

MX_BLOCK = 32
"""The number of elements in a block of the OCP MX formats."""


class Choice(NamedTuple):
    """The kind of kernel selected for a contraction, and the reason.

    Attributes:
        kind: `"native"` (the matmul reads float8 operands), `"emulated"` (the
            same values, multiplied in float32, or in bfloat16 if exact), or
            `"rounded"` (floats, of which the kernel is on a grid of few bits).
        reason: One sentence for the user.
    """

    kind: str
    reason: str

    @property
    def native(self) -> bool:
        """True if `kind` is `"native"`."""
        return self.kind == "native"


class Request(NamedTuple):
    """The description of a matmul for which a kernel is selected.

    Attributes:
        batched: Whether each operand may be a batch of matrices.
        prefer: `"auto"`, `"native"` or `"emulated"`.
        for_xla: Whether XLA is known to compile it.
    """

    matmul: str
    a: Quantization
    b: Quantization
    batched: bool
    prefer: str | None
    for_xla: bool

    @property
    def of_whole_tensors(self) -> bool:
        """True if each operand has one scale for the whole tensor."""
        return self.tiles == (Tile(), Tile())

    @property
    def of_matrices(self) -> bool:
        """True if each matrix of both operands has one scale."""
        return self.tiles == (EACH_MATRIX,) * 2

    @property
    def of_rows(self) -> bool:
        """True if an operand has row scales, the other row or tensor scales."""
        return ROW in self.tiles and set(self.tiles) <= {ROW, Tile()}

    @property
    def of_mx(self) -> bool:
        """True if both operands have scales of MX blocks."""
        return self.tiles == (Tile(1, MX_BLOCK),) * 2

    @property
    def refused_as_mx(self) -> str | None:
        """Why these scales are not those of the MX formats, or None."""
        if "nearest" in (self.a.scale_rounding, self.b.scale_rounding):
            return "the scales of MX blocks are powers of two"
        return None

    @property
    def formats(self) -> tuple[str, str]:
        """The names of the formats of the two operands."""
        return self.a.format, self.b.format

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        """For each of the two operands, the tile that shares one scale."""
        return self.a.tile, self.b.tile


class MatmulKernel(Protocol):
    """A kernel that multiplies two matrices.

    It may have three more members. `writes_float32` is true if a float32
    output costs no more than its memory. `with_bias(bias)` returns a kernel
    that adds a bias per column, in the dtype of the output, before rounding to
    it; None if there is no such kernel. `of_gradient` is the kernel for the
    gradient of a float32 kernel in a layer of bfloat16; it returns float32,
    rounded to bfloat16 before or after the scales multiply it.
    """

    @property
    def native(self) -> bool:
        """True if the kernel reads float8 operands."""

    def supports(self, request: Request) -> str | None:
        """Return why this kernel cannot compute a matmul; None if it can."""

    def reason(self, request: Request) -> str:
        """Return a sentence that tells users what this kernel computes."""

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply (b, m, k) by (b, n, k) transposed, both quantized.

        (b, m, n); summed in float32, or if `fast` in fewer bits on a GPU.
        """


class NativeMatmul(MatmulKernel):
    """A kernel that reads float8 operands, by default of one scale each."""

    native = True

    @override
    def supports(self, request: Request) -> str | None:
        """Return why this kernel cannot compute a matmul, or None."""
        if not self.reads(request):
            return OTHER_SCALES
        if request.prefer == "emulated":
            return "asked for by kernels.prefer"
        return self.refusal(request)

    def reads(self, request: Request) -> bool:
        """Return True if this kernel is for the scales of a matmul."""
        return request.of_whole_tensors

    def refusal(self, request: Request) -> str | None:
        """Return why, apart from scales, a matmul is not native; or None."""
        raise NotImplementedError


class Convolutions(Protocol):
    """Float32 convolutions of inputs x and a kernel w; g: outputs' gradient."""

    reason: str
    """Why there is no float8 convolution."""

    def outputs(self, conv: Convolution, x: Tensor, w: Tensor) -> Tensor:
        """Compute the outputs of the convolution."""

    def inputs_grad(
        self, conv: Convolution, g: Tensor, w: Tensor, shape: Shape
    ) -> Tensor:
        """Compute the gradient of the inputs, which have this shape."""

    def kernel_grad(
        self, conv: Convolution, x: Tensor, g: Tensor, shape: Shape
    ) -> Tensor:
        """Compute the gradient of the kernel, which has this shape."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """The kernels of one framework: matmuls, convolutions and casts.

    Attributes:
        matmuls: The matmul kernels, the best first; the last supports all.
        cast: Takes a tensor, the scale of each element, the name of a format,
            and whether to multiply by the scale instead of dividing by it.
            Returns values of the format, in float32 or in its dtype.
        narrow_cast: Like `cast`, but returns the dtype of the format.
        widen: Takes values in a float8 dtype or in float32, and the compute
            dtype of a layer. Returns them in the compute dtype if the engine
            multiplies in it, otherwise in float32.
        both_layouts: Casts an operand for both of its matmuls in one pass; None
            if casting and transposing are left to the framework.
        row_casts: Casts an operand by rows for both of its matmuls; None if
            that is left to the framework.
        training_cast: Like `cast`, for layers in training, which are never
            exported; None to use `cast`.
        encode: Takes float32 values of a format and its name; returns codes.
        decode: Takes codes and the name of a format; returns the values.
        straight: Takes a `BoundPlan` that multiplies its operands as plain
            matrices. Returns its passes as lists of kernels, or None.
    """

    name: str
    device: Callable[[], Device]
    matmuls: tuple[MatmulKernel, ...]
    plain: MatmulKernel
    convolutions: Convolutions
    cast: Cast = casting.quantize_float32
    narrow_cast: Cast = casting.quantize
    widen: Codec = casting.widen
    both_layouts: BothLayouts | None = None
    row_casts: RowCasts | None = None
    training_cast: Cast | None = None
    encode: Codec = casting.encode
    decode: Codec = casting.decode
    straight: Callable[[Any], Any] = lambda bound: None

    @property
    def cast_in_training(self) -> Cast:
        """`training_cast` if there is one, else `cast`."""
        return self.training_cast or self.cast

    def select(self, request: Request) -> tuple[MatmulKernel, Choice]:
        """Select the first kernel that supports a matmul; return its `Choice`.

        If the matmul is not native, the reason is that of the first kernel that
        is for such scales and refuses for something else.
        """
        refusals = []
        for kernel in self.matmuls:  # The last one supports all.
            refusal = kernel.supports(request)
            if refusal is None:
                break
            refusals.append(refusal)
        if kernel.native or not refusals:
            kind = "native" if kernel.native else "emulated"
            return kernel, Choice(kind, kernel.reason(request))
        for refusal in refusals:
            if refusal != OTHER_SCALES:
                return kernel, Choice("emulated", refusal)
        scales = " with ".join(
            dict.fromkeys(map(_scales_in_words, request.tiles))
        )
        reason = f"no float8 matmul of {self.name} has {scales}"
        return kernel, Choice("emulated", reason)


def _scales_in_words(tile: Tile) -> str:
    """Return the scales of such tiles in words, as `"scales of rows"`."""
    if tile.is_whole:
        return "a scale for a tensor"
    if tile == EACH_MATRIX:
        return "a scale for each matrix"
    return "scales of rows" if tile == ROW else "scales of blocks"
