"""Float8 arithmetic in `keras.ops`, bit-identical on every backend.

`casting` changes dtypes, `scaling` turns amaxes into scales, `tiles` and
`quantized` make quantized tensors, `scale_sources` finds their scales,
`observations` keeps histories, `errors` measures the quantization error,
`stochastic` rounds to 16 bits at random. `reference` (NumPy) tests all.
"""

from keras_policy_ext.numerics.casting import (
    cast,
    decode_scales,
    dequantize,
    encode_scales,
    quantize,
    quantize_dequantize,
    view,
)
from keras_policy_ext.numerics.errors import sqnr_db, underflow_fraction
from keras_policy_ext.numerics.scaling import (
    amax,
    round_up_to_power_of_two,
    scale_from_amax,
)
from keras_policy_ext.numerics.stochastic import (
    ROUNDABLE,
    key_of_use,
    stochastic_round,
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
