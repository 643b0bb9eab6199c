"""JAX: the current device, and the matmul kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.emulated import (
    LARGEST,
    Emulated,
    KerasConvolutions,
    Plain,
    exact_in,
    is_vector_product,
    may_write_bfloat16,
    scaled,
    scales_in_product,
    unscaled,
)
from keras_policy_ext.backends.jax.pallas_casts import PallasCasts
from keras_policy_ext.backends.jax.rows import PallasRowCasts
from keras_policy_ext.backends.matmuls import (
    E8M0,
    MX_BLOCK,
    Engine,
    MatmulKernel,
    NativeMatmul,
    Request,
)
from keras_policy_ext.numerics.casting import encode_scales
from keras_policy_ext.numerics.quantized import Quantized


def here() -> Device:
    """Return the `Device` that `pretend` set, else the one JAX runs on."""
    return devices.pretended() or found()


def lacking(*formats: str) -> str | None:
    """Return why XLA has no matmul of these formats on the device.

    None if it has one.
    """
    device = here()
    if device.maker == "cpu":
        return "XLA has no float8 matmul for a CPU"
    return device.lacking(*formats)


def lacking_mx() -> str | None:
    """Return why XLA has no matmul with MX block scales here.

    None if it has one.
    """
    device = here()
    if device.maker == "cpu":
        return "XLA has no float8 matmul for a CPU"
    if "mx" in device.scales:
        return None
    return f"{device.title} is no Blackwell that scales MX blocks (10.x)"


@functools.cache
def found() -> Device:
    """Return the `Device` that JAX runs on, from the table of devices.

    A CPU is always the table's `cpu`. XLA lacks some bfloat16 matmuls on CPUs:
    "Unsupported element type for DotThunk: BF16 x BF16 = F32" (JAX 0.10).
    """
    if jax.default_backend() == "cpu":
        return devices.KNOWN["cpu"]
    device = jax.devices()[0]
    if jax.default_backend() == "tpu":
        return devices.of_google(device.device_kind)
    # NVIDIA's are numbers, AMD's are names, and others have none.
    capability = str(getattr(device, "compute_capability", None))
    title = f"{device.device_kind} (capability {capability})"
    if capability.startswith("gfx"):
        return devices.of_amd(capability, title)
    numbers = _numbers(capability)
    if numbers is None:
        return devices.unknown(title)
    return devices.of_nvidia(numbers, title)


def _numbers(capability: str) -> tuple[int, ...] | None:
    """Convert a compute capability such as `"9.0"` to (9, 0), or None."""
    numbers = capability.split(".")
    if len(numbers) != 2 or not all(each.isdigit() for each in numbers):
        return None
    return tuple(map(int, numbers))


TERMS = 128
"""The contracted axis is padded to a multiple of this.

With 32 XLA fails to compile (JAX 0.10).
"""


class ScaledDot(NativeMatmul):
    """`lax.scaled_dot`, which XLA compiles to a matmul that reads the scales.

    It was not run in this release, for want of a Blackwell GPU. The code that
    XLA compiles for a B200 was inspected: it has the tensor-core instructions
    that scale blocks. `integration/lowering` checks this again.
    """

    @override
    def reads(self, request: Request) -> bool:
        return request.of_mx

    @override
    def refusal(self, request: Request) -> str | None:
        """Return why `lax.scaled_dot` cannot run a matmul, or None."""
        if request.refused_as_mx is not None:
            return request.refused_as_mx
        if not hasattr(lax, "scaled_dot"):
            return f"jax {jax.__version__} has no scaled_dot"
        # On request also where XLA converts the operands.
        requested = request.prefer == "native"
        return (None if requested else lacking_mx()) or failing()

    @override
    def reason(self, request: Request) -> str:
        """Return, for reports, which operation multiplies MX blocks."""
        if lacking_mx() is None:
            return "lax.scaled_dot on float8 operands"
        return "lax.scaled_dot, converted by XLA"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply two operands with scales of MX blocks."""
        # `fast` is not read: `scaled_dot` has one way to accumulate.
        read = a.values, a.scale, b.values, b.scale
        if dtype != "bfloat16":
            return _scaled_product(*read).astype(dtype)
        # On CUDA sums in float32 may be written in bfloat16.
        return lax.platform_dependent(
            cuda=lambda: _scaled_product(*read, dtype=jnp.bfloat16),
            default=lambda: _scaled_product(*read).astype(dtype),
        )


@functools.cache
def failing() -> str | None:
    """Return why `lax.scaled_dot` fails on this device; None if it works.

    It is tested once per process, with real data. On GPUs XLA compiles it
    through Triton only, which may be missing or not support the device.
    """
    try:
        with jax.ensure_compile_time_eval():
            if _gives_our_numbers():
                return None
    # On an untried device a compiler may raise anything. Users see it.
    except Exception as error:
        message = str(error).partition("\n")[0]
        return f"lax.scaled_dot fails here: {type(error).__name__}: {message}"
    return "lax.scaled_dot does not multiply here as it should"


def _gives_our_numbers() -> bool:
    """Return True if `_scaled_product` is right to ten bits on this device."""
    rng = np.random.default_rng(0)
    operands, exact = [], []
    for rows in (136, 72):
        values = rng.integers(-8, 9, (1, rows, 256)).astype("float32")
        scale = 2.0 ** rng.integers(-4, 5, (1, rows, 256 // MX_BLOCK))
        operands += [jnp.asarray(values, "float8_e4m3fn"), jnp.float32(scale)]
        exact.append((values * np.repeat(scale, MX_BLOCK, 2))[0])
    computed = np.asarray(jax.jit(_scaled_product)(*operands))[0]
    expected = exact[0] @ exact[1].T
    error = np.abs(computed - expected).max() / np.abs(expected).max()
    return bool(error < 2.0**-10)


def _scaled_product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Tensor:
    """Multiply (b, m, k) by (b, n, k) transposed, with scales of MX blocks."""
    scales = [
        lax.bitcast_convert_type(
            _pad_last_axis(encode_scales(each, E8M0), TERMS // MX_BLOCK),
            jnp.float8_e8m0fnu,
        )
        for each in (a_scale, b_scale)
    ]
    return lax.scaled_dot(
        _pad_last_axis(a, TERMS),
        _pad_last_axis(b, TERMS),
        lhs_scale=scales[0],
        rhs_scale=scales[1],
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=dtype,
    )


def _pad_last_axis(x: Tensor, multiple: int) -> Tensor:
    """Pad the last axis of a tensor with zeros to a multiple of a number."""
    missing = -x.shape[2] % multiple
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing)))


def _product(
    a: Tensor,
    b: Tensor,
    precision: lax.PrecisionLike = lax.Precision.DEFAULT,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Tensor:
    """Multiply (b, m, k) by (b, n, k) transposed; write and sum in `dtype`."""
    # A batch of one is a plain matrix, as in `quantized.swapped`.
    is_single = a.shape[0] == 1 and b.shape[0] == 1
    if is_single:
        a, b = a[0], b[0]
    contracted = ((1,), (1,)) if is_single else ((2,), (2,))
    batch = ((), ()) if is_single else ((0,), (0,))
    product = lax.dot_general(
        a,
        b,
        dimension_numbers=(contracted, batch),
        precision=precision,
        preferred_element_type=dtype,
    )
    return product[jnp.newaxis] if is_single else product


class EmulatedDot(Emulated):
    """An emulated kernel that multiplies in 16 bits where that is exact.

    Otherwise it multiplies in float32; the sums are always in float32. XLA
    reduces the precision of float32 operands on TPUs and GPUs, unless full
    precision is requested.
    """

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply the decoded operands, in 16 bits if that is exact."""
        device = here()
        x, y = unscaled(a), unscaled(b)
        in_16_bits = device.multiplies_in
        if exact_in(in_16_bits, a, b):
            product = _product(x.astype(in_16_bits), y.astype(in_16_bits))
        # A reduced precision loses nothing of what bfloat16 represents.
        elif device.maker == "cpu" or exact_in("bfloat16", a, b):
            product = _product(x, y)
        else:
            product = _product(x, y, lax.Precision.HIGHEST)
        return scaled(product, a, b, dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matmul `_product` in float32, in float64 if `a` is float64."""
    wide = a.dtype == jnp.float64
    return _product(a, b, dtype=jnp.float64 if wide else jnp.float32)


class Float8Dot(NativeMatmul):
    """A kernel that passes float8 operands to XLA; scales multiply the output.

    On CUDA the product names its algorithm. XLA then calls cuBLASLt, which
    multiplies by an exact float32 scale, adds the bias, and rounds once.
    With its default flags and no algorithm, XLA compiles the product with
    Triton, and scales it in a second kernel (JAX 0.11 on an H100).
    """

    @override
    def reads(self, request: Request) -> bool:
        return request.of_whole_tensors or request.of_matrices

    @override
    def refusal(self, request: Request) -> str | None:
        requested = request.prefer == "native"
        return None if requested else lacking(*request.formats)

    @override
    def reason(self, request: Request) -> str:
        """Return, for reports, which operation multiplies float8."""
        if lacking(*request.formats) is None:
            return "lax.dot_general on float8 operands"
        return "lax.dot_general, converted by XLA"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply float8 values; on CUDA, by cuBLASLt."""

        def usual() -> Tensor:
            product = _product(a.values, b.values, _PRECISION[fast])
            return scaled(product, a, b, dtype)

        return lax.platform_dependent(
            cuda=lambda: self._by_cublas(a, b, dtype, fast), default=usual
        )

    def _by_cublas(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Return the product on CUDA; XLA passes its algorithm to cuBLASLt."""
        if is_vector_product(a, b):
            # XLA makes no matmul of it, and would add up in the narrow dtype.
            x, y = (each.values.astype(jnp.float32) for each in (a, b))
            return scaled(_product(x, y, _PRECISION[fast]), a, b, dtype)
        algorithm = _CUBLAS[fast]
        # Over several devices XLA may add up a product, then scale it: both in
        # `dtype`, with a scale that is rounded to it.
        may_be_partial = dtype != "float32" and jax.device_count() > 1
        if scales_in_product(a, b, dtype) and not may_be_partial:
            scale = a.scale.reshape(()) * b.scale.reshape(())
            # XLA gives cuBLASLt the float32 scale from before the cast below.
            # It would not if it could move a reshape behind the cast. At most
            # `LARGEST`, since infinity times a sum of 0 would be NaN.
            scale = lax.optimization_barrier(jnp.minimum(scale, LARGEST))
            # XLA would merge products that share an operand, and scale what
            # is rounded already.
            x, y = lax.optimization_barrier((a.values, b.values))
            return _product(x, y, algorithm, dtype) * scale.astype(dtype)
        written = jnp.float32
        if may_write_bfloat16(a, b, dtype):
            written = jnp.bfloat16
        sums = _product(a.values, b.values, algorithm, written)
        return scaled(sums.astype(jnp.float32), a, b, dtype)


_CUBLAS = {
    True: lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    False: lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
}
"""By whether a product may accumulate fast, the algorithm of cuBLASLt."""

_PRECISION = {True: lax.Precision.DEFAULT, False: lax.Precision.HIGHEST}
"""By the same, the precision by which XLA decides (as in Flax's `fp8_ops`)."""


class Float8DotOfRows(Float8Dot):
    """The same kernel for scales of rows, which XLA has no matmul for."""

    @override
    def reads(self, request: Request) -> bool:
        return request.of_rows

    @override
    def reason(self, request: Request) -> str:
        return super().reason(request) + ", scales of rows after it"

    @property
    def of_gradient(self) -> MatmulKernel:
        """The same kernel for the gradient of a float32 kernel."""
        return GradientOfRows()


class GradientOfRows(Float8DotOfRows):
    """A kernel that rounds sums to bfloat16, and returns them scaled.

    It is for the gradient of a float32 kernel in a layer of bfloat16. On CUDA
    the sums are rounded before the scales multiply them, and not after: once
    as well, and cuBLASLt writes half of the bytes.
    """

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply; on CUDA, round sums to bfloat16 before scaling."""

        def usual() -> Tensor:
            product = super(GradientOfRows, self).multiply(a, b, dtype, fast)
            return product.astype(jnp.float32)

        def rounded_before() -> Tensor:
            sums = _product(a.values, b.values, _CUBLAS[fast], jnp.bfloat16)
            return scaled(sums.astype(jnp.float32), a, b, "float32")

        # XLA makes no matmul of a product with a vector. Several devices add up
        # partial sums, which must be in float32.
        if is_vector_product(a, b) or jax.device_count() > 1:
            return usual()
        return lax.platform_dependent(cuda=rounded_before, default=usual)


ENGINE = Engine(
    name="jax",
    device=here,
    matmuls=(
        Float8Dot(),
        Float8DotOfRows(),
        ScaledDot(),
        EmulatedDot(_product),
    ),
    plain=Plain(_wide_product),
    convolutions=KerasConvolutions("XLA has no float8 convolution"),
    both_layouts=PallasCasts(here),
    row_casts=PallasRowCasts(here),
)
