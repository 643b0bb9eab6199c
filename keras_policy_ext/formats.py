"""Number formats as data: what a float8 or float4 number is.

Every constant is derived from `ml_dtypes.finfo`; nothing here is typed in by
hand. This module imports neither keras nor a framework.
"""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np

_NAMES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn",
)

#: Short names that recipe strings may use. Code uses the exact names.
ALIASES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A narrow floating-point format.

    Attributes:
        name: The exact ml_dtypes name, e.g. `"float8_e4m3fn"`.
        dtype: The NumPy dtype of that name.
        bits: Width of one number in bits.
        max: The largest finite value (a Python float).
        smallest_normal: The smallest positive value of full precision.
        smallest_subnormal: The smallest positive value. Equal to
            `smallest_normal` in formats without subnormals
            (`float8_e8m0fnu`).
        has_inf: Whether the format has infinities. Casts saturate whether
            it has them or not.
        mantissa_bits: Stored significand bits, the leading one not counted.
    """

    name: str
    dtype: np.dtype[Any]
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_inf: bool
    mantissa_bits: int


def names() -> tuple[str, ...]:
    """The exact names that `get` knows."""
    return _NAMES


def get(identifier: "str | np.dtype[Any] | type | Format") -> Format:
    """Return the format of an ml_dtypes name or dtype.

    Args:
        identifier: A name from `names()`, the NumPy dtype or scalar type of
            that name, or a `Format` (returned as it is).

    Returns:
        The `Format`.

    Raises:
        ValueError: If there is no such format here. Aliases such as
            `"e4m3"` belong to recipe strings and are refused.
    """
    if isinstance(identifier, Format):
        return identifier
    name = _name_of(identifier)
    if name not in _NAMES:
        raise ValueError(_unknown(identifier, name))
    return _derive(name)


def _name_of(identifier: object) -> str:
    if isinstance(identifier, str):
        return identifier
    try:
        return np.dtype(identifier).name  # type: ignore[call-overload]
    except TypeError:
        return repr(identifier)


def _unknown(identifier: object, name: str) -> str:
    hint = ALIASES.get(name)
    step = f"Write {hint!r}." if hint else "Use one of these exact names."
    return (
        f"Unknown number format. Received: {identifier!r}. "
        f"Allowed: {', '.join(_NAMES)}. {step}"
    )


@functools.cache
def _derive(name: str) -> Format:
    dtype = np.dtype(getattr(ml_dtypes, name))
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return Format(
        name=name,
        dtype=dtype,
        bits=int(info.bits),
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        has_inf=_has_inf(dtype, int(info.bits)),
        mantissa_bits=int(info.nmant),
    )


def _has_inf(dtype: np.dtype[Any], bits: int) -> bool:
    codes = np.arange(2**bits, dtype=np.uint8)
    return bool(np.isinf(codes.view(dtype).astype(np.float32)).any())
