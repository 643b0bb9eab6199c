"""Narrow formats of numbers, described as data.

Every constant of a floating-point format is computed from `ml_dtypes`, from its
`finfo` and from all codes of the format. None is typed in by hand.
`docs/numerics.md` lists them. Integers are symmetric: -max to max. This module
imports neither keras nor a framework.
"""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["ALIASES", "FAMILIES", "INTEGERS", "Format", "get", "names"]

_NAMES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)

#: The float8 formats of numbers, by family: those of the Open Compute Project,
#: and those without infinities and negative zero. A device multiplies one.
FAMILIES = {
    "ocp": ("float8_e4m3fn", "float8_e5m2"),
    "fnuz": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
}

#: The formats of integers, of which kernels can be stored.
INTEGERS = ("int8", "int4", "int3", "int2")

#: Short names that recipe strings may use. Code uses the exact names.
ALIASES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The description of a narrow format, such as e4m3fn or int4.

    An integer has no exponent bits, and all its values have full precision.

    Attributes:
        name: The exact ml_dtypes name, e.g. `"float8_e4m3fn"`; `"int3"`, which
            ml_dtypes has not.
        dtype: The NumPy dtype of that name; int8 for `"int3"`.
        bits: The width of one value in bits.
        max: The largest finite value (a Python float).
        smallest_normal: The smallest positive value of full precision.
        smallest_subnormal: The smallest positive value. Equal to
            `smallest_normal` in formats without subnormals
            (`float8_e8m0fnu`).
        has_inf: Whether the format has infinities. Casts saturate anyway.
        mantissa_bits: Stored significand bits, the leading one not counted.
        exponent_bits: Bits of the exponent.
        exponent_bias: The bias that is subtracted from the exponent of a code:
            a normal value is `2**(exponent - exponent_bias)` times a
            significand from 1 to 2.
        has_sign: Whether the format has negative values.
        has_negative_zero: Whether the sign of 0 is kept.
        nan_codes: The codes that are NaN, none or several.
        nan_code: The code that a cast gives to NaN without a sign, or None.
        finite_count: The number of finite values; 0 counts once.
    """

    name: str
    dtype: np.dtype[Any]
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_inf: bool
    mantissa_bits: int
    exponent_bits: int
    exponent_bias: int
    has_sign: bool
    has_negative_zero: bool
    nan_codes: tuple[int, ...]
    nan_code: int | None
    finite_count: int

    @functools.cached_property
    def family(self) -> str | None:
        """The family in `FAMILIES` that has this format, or None."""
        families = (
            each for each, names in FAMILIES.items() if self.name in names
        )
        return next(families, None)

    @property
    def is_integer(self) -> bool:
        """True if the values are the integers from -max to max."""
        return self.name in INTEGERS

    @property
    def numbers_per_byte(self) -> int:
        """The number of values in a byte: 2 for three and four bits, 4 for two.

        The first value is in the lowest bits.
        """
        return 8 // self.bits

    @property
    def storage(self) -> dict[str, str]:
        """The dtype that stores this format, by framework name.

        It is the format's own dtype if the framework computes with it,
        otherwise `"uint8"`, for codes. TensorFlow has kernels for few
        operations on float8, and none in loops. JAX and PyTorch disagree on
        the e8m0 code of 0, and only JAX has casts to four bits.
        """
        is_float8 = self.has_sign and self.bits == 8 and not self.is_integer
        own = self.name if is_float8 else "uint8"
        return {"jax": own, "torch": own, "tensorflow": "uint8"}


def names() -> tuple[str, ...]:
    """Return the exact names of floating-point formats, such as e4m3fn's."""
    return _NAMES


def get(identifier: "str | np.dtype[Any] | type | Format") -> Format:
    """Return the `Format` of an ml_dtypes name or dtype.

    Args:
        identifier: A name from `names()` or `INTEGERS`, the NumPy dtype or
            scalar type of that name, or a `Format` (returned unchanged).

    Returns:
        The `Format`.

    Raises:
        ValueError: If there is no such format. Aliases such as `"e4m3"` belong
            to recipe strings and are refused.

    Examples:
        >>> kpe.formats.get("float8_e4m3fn").max
        448.0
        >>> kpe.formats.get("int4").max
        7.0
    """
    if isinstance(identifier, str) and identifier in _NAMES:
        return _derive(identifier)
    if isinstance(identifier, Format):
        return identifier
    name = _name_of(identifier)
    if name in INTEGERS:
        return _integers(name)
    if name not in _NAMES:
        raise ValueError(_unknown(identifier, name))
    return _derive(name)


def _name_of(identifier: object) -> str:
    """Return the name of a dtype, or what was passed in its place."""
    if isinstance(identifier, str):
        return identifier
    try:
        return np.dtype(identifier).name  # type: ignore[call-overload]
    except TypeError:
        return repr(identifier)


def _unknown(identifier: object, name: str) -> str:
    """Return the message for something that names no format."""
    hint = ALIASES.get(name)
    step = f"Write {hint!r}." if hint else "Use one of these exact names."
    return (
        f"Unknown number format. Received: {identifier!r}. "
        f"Allowed: {', '.join(_NAMES + INTEGERS)}. {step}"
    )


@functools.cache
def _derive(name: str) -> Format:
    """Return a format with its constants, from the dtype of `ml_dtypes`."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    bits, mantissa_bits = int(info.bits), int(info.nmant)
    values = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float64)
    has_sign = bool((values < 0).any())
    # The exponent of 1 is 0, so that its code has the bias and nothing else.
    bias = int(np.flatnonzero(values == 1)[0]) >> mantissa_bits
    nan_codes = tuple(int(code) for code in np.flatnonzero(np.isnan(values)))
    code_of_nan = int(np.array(np.nan, "float32").astype(dtype).view(np.uint8))
    return Format(
        name=name,
        dtype=dtype,
        bits=bits,
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        has_inf=bool(np.isinf(values).any()),
        mantissa_bits=mantissa_bits,
        exponent_bits=bits - mantissa_bits - has_sign,
        exponent_bias=bias,
        has_sign=has_sign,
        has_negative_zero=bool(np.signbit(values[values == 0]).any()),
        nan_codes=nan_codes,
        nan_code=code_of_nan if nan_codes else None,
        finite_count=np.unique(values[np.isfinite(values)]).size,
    )


@functools.cache
def _integers(name: str) -> Format:
    """Return a symmetric format of integers: the lowest code is not used."""
    dtype = np.dtype(getattr(ml_dtypes, name, np.int8))
    bits = int(name.removeprefix("int"))
    largest = 2 ** (bits - 1) - 1
    return Format(
        name=name,
        dtype=dtype,
        bits=bits,
        max=float(largest),
        smallest_normal=1.0,
        smallest_subnormal=1.0,
        has_inf=False,
        mantissa_bits=bits - 1,
        exponent_bits=0,
        exponent_bias=0,
        has_sign=True,
        has_negative_zero=False,
        nan_codes=(),
        nan_code=None,
        finite_count=2 * largest + 1,
    )
