"""JAX: `lax.dot_general`, on float8 operands where XLA has a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.jax import devices
from keras_policy_ext.backends.jax.scaled_dot import ScaledDot
from keras_policy_ext.backends.keras_convolutions import KerasConvolutions
from keras_policy_ext.backends.matmuls import OTHER_SCALES, Engine, Request
from keras_policy_ext.backends.scaled_products import (
    Emulated,
    Plain,
    are_powers_of_two,
    exact_in,
    have_vector,
    scaled,
    unscaled,
)
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.quantized import Quantized


def _product(
    a: Tensor,
    b: Tensor,
    precision: lax.Precision = lax.Precision.DEFAULT,
    dtype: Any = jnp.float32,
) -> Tensor:
    """(b, m, k) and (b, n, k) to (b, m, n), accumulated in float32."""
    single = a.shape[0] == 1 and b.shape[0] == 1
    if single:
        a, b = a[0], b[0]
    axes, batch = ((1, 1), ((), ())) if single else ((2, 2), ((0,), (0,)))
    product = lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), batch),
        precision=precision,
        preferred_element_type=dtype,
    )
    return product[jnp.newaxis] if single else product


class EmulatedDot(Emulated):
    """Multiplies in 16 bits where that is exact and the device is faster so.

    Sums are in float32 either way. Of float32 operands XLA for a TPU or GPU
    takes fewer bits, unless it is asked for all.
    """

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`."""
        device = devices.here()
        x, y = unscaled(a), unscaled(b)
        narrow = device.multiplies_in
        if exact_in(narrow, a, b):
            product = _product(x.astype(narrow), y.astype(narrow))
        elif device.maker == "cpu" or exact_in("bfloat16", a, b):
            product = _product(x, y)
        else:
            product = _product(x, y, lax.Precision.HIGHEST)
        return scaled(product, a, b, dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The same; of float64 operands in float64."""
    wide = a.dtype == jnp.float64
    return _product(a, b, dtype=jnp.float64 if wide else jnp.float32)


class Float8Dot:
    """Float8 operands reach XLA, which has a kernel or converts them."""

    native = True

    def supports(self, request: Request) -> str | None:
        """See `MatmulKernel.supports`."""
        if not request.of_whole_tensors:
            return OTHER_SCALES
        return self.refusal(request)

    def refusal(self, request: Request) -> str | None:
        """Why a matmul is not native whatever its scales are, or None."""
        if request.prefer == "emulated":
            return "asked for by kernels.prefer"
        if request.prefer == "native":
            return None
        return devices.lacking(*request.formats)

    def reason(self, request: Request) -> str:
        """See `MatmulKernel.reason`."""
        if devices.lacking(*request.formats) is None:
            return "lax.dot_general on float8 operands"
        return "lax.dot_general, converted by XLA"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`.

        XLA takes any precision but the highest for leave to accumulate fast,
        in matmuls of float8 on a GPU; as in Flax's `fp8_ops`.
        """
        precision = lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST

        def direct() -> Tensor:
            product = _product(a.values, b.values, precision)
            return scaled(product, a, b, dtype)

        def dequantized() -> Tensor:
            return _dequantized_product(a, b, precision, dtype)

        # XLA's float8 matmul writes no float64.
        if have_vector(a, b) or dtype == "float64":
            return direct()
        return lax.platform_dependent(cuda=dequantized, default=direct)


class Float8DotOfRows(Float8Dot):
    """The same with scales of rows, which multiply the product.

    XLA has no float8 matmul that takes them: the scales of its own are ones.
    """

    def supports(self, request: Request) -> str | None:
        """See `MatmulKernel.supports`."""
        return self.refusal(request) if request.of_rows else OTHER_SCALES

    def reason(self, request: Request) -> str:
        """See `MatmulKernel.reason`."""
        return super().reason(request) + ", scales of rows after it"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`.

        XLA for CUDA reads float8 where it is cast to bfloat16 as well, and
        small matmuls, for which it casts, are then none of float16. A number
        times a power of two is rounded to bfloat16 as the number is, so it
        may write that: half of what it moves.
        """
        precision = lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST
        narrow = dtype == "bfloat16" and are_powers_of_two(a, b)
        written = jnp.bfloat16 if narrow else jnp.float32

        def direct() -> Tensor:
            return _product(a.values, b.values, precision)

        def cast() -> Tensor:
            x, y = (each.values.astype(jnp.bfloat16) for each in (a, b))
            return _product(x, y, precision, written).astype(jnp.float32)

        if have_vector(a, b):
            sums = direct()
        else:
            sums = lax.platform_dependent(cuda=cast, default=direct)
        return scaled(sums, a, b, dtype)


def _dequantized_product(
    a: Quantized, b: Quantized, precision: lax.Precision, dtype: str
) -> Tensor:
    """What XLA for CUDA makes one matmul of.

    It reads the float8 values, multiplies by the float32 scales as they were
    before they were cast here, adds a bias, and writes `dtype`. Of a product
    of float8 values it makes one that writes float32, and kernels after it.

    Behind a barrier, since of a scale that is a slice of several it casts the
    several, and does not see that the slice was to be cast back (JAX 0.10).
    """
    scales = lax.optimization_barrier(
        [each.scale.reshape(()) for each in (a, b)]
    )
    first, second = (
        each.values.astype(dtype) * scale.astype(dtype)
        for each, scale in zip((a, b), scales, strict=True)
    )
    return _product(first, second, precision, jnp.dtype(dtype))


def _casts_before_amax() -> bool:
    """XLA for CUDA does; a CPU may be where a program for CUDA is made.

    Not where there are several devices: the amax in the branch of a first step
    could be one of all of them, and CUDA records no graph of such a branch.
    """
    maker = devices.here().maker
    return maker in ("nvidia", "cpu") and jax.device_count() == 1


def _requantizes_kernels() -> bool:
    """Return True if XLA makes one layout where two matmuls read one each.

    With several devices a kernel of which they have parts could be gathered
    twice.
    """
    return devices.here().one_layout and jax.device_count() == 1


ENGINE = Engine(
    name="jax",
    device=devices.here,
    matmuls=(
        Float8Dot(),
        Float8DotOfRows(),
        ScaledDot(),
        EmulatedDot(_product),
    ),
    plain=Plain(_wide_product),
    convolutions=KerasConvolutions("XLA has no float8 convolution"),
    cast=casting.quantize_float32,
    narrow_cast=casting.quantize,
    widen=casting.widen,
    casts_before_amax=_casts_before_amax,
    requantizes_kernels=_requantizes_kernels,
)
