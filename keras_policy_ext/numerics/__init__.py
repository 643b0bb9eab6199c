"""Float8 arithmetic in `keras.ops`, bit-identical on every backend.

`casting` changes dtypes, `scaling` turns amaxes into scales, `tiles` and
`quantized` make quantized tensors, `scale_sources` finds their scales.
`reference` (NumPy) tests all.
"""

from typing import TYPE_CHECKING, Any

from keras_policy_ext import _extensions

if TYPE_CHECKING:
    from keras_policy_ext.ext.sampling.errors import (
        sqnr_db,
        underflow_fraction,
    )
    from keras_policy_ext.ext.stochastic.rounding import (
        ROUNDABLE,
        key_of_use,
        stochastic_round,
    )

from keras_policy_ext.numerics.casting import (
    cast,
    decode_scales,
    dequantize,
    encode_scales,
    quantize,
    quantize_dequantize,
    view,
)
from keras_policy_ext.numerics.scaling import (
    amax,
    round_up_to_power_of_two,
    scale_from_amax,
)

__all__ = [
    "ROUNDABLE",
    "amax",
    "cast",
    "decode_scales",
    "dequantize",
    "encode_scales",
    "key_of_use",
    "quantize",
    "quantize_dequantize",
    "round_up_to_power_of_two",
    "scale_from_amax",
    "sqnr_db",
    "stochastic_round",
    "underflow_fraction",
    "view",
]


def __getattr__(name: str) -> Any:
    """Import a name of an extension; raise if that is not installed."""
    if _extensions.has(f"numerics.{name}") or name in __all__:
        return _extensions.get(f"numerics.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
