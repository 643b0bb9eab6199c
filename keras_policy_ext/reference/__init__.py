"""NumPy truth: slow, obvious, the judge of every kernel.

Imports NumPy and ml_dtypes only. Everything is float32 unless it says
otherwise; `scale` is the dequantizing multiplier, `x ≈ q * scale`. `dtype` is
the name of a narrow format (`formats.names()`).
"""

from keras_policy_ext.reference.blocks import (
    BlockQuantized,
    NVFP4Quantized,
    quantize_block,
    quantize_mx,
    quantize_nvfp4,
)
from keras_policy_ext.reference.casting import (
    cast,
    dequantize,
    quantize,
    quantize_dequantize,
    round_scalar,
    stochastic_round,
)
from keras_policy_ext.reference.errors import sqnr_db, underflow_fraction
from keras_policy_ext.reference.linear_layer import (
    DelayedLinear,
    Linear,
    Scaling,
    linear,
)
from keras_policy_ext.reference.scales import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    amax,
    delayed_scale,
    scale_from_amax,
    scale_of_multiplier,
    update_history,
)

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "BlockQuantized",
    "DelayedLinear",
    "Linear",
    "NVFP4Quantized",
    "Scaling",
    "amax",
    "cast",
    "delayed_scale",
    "dequantize",
    "linear",
    "quantize",
    "quantize_block",
    "quantize_dequantize",
    "quantize_mx",
    "quantize_nvfp4",
    "round_scalar",
    "scale_from_amax",
    "scale_of_multiplier",
    "sqnr_db",
    "stochastic_round",
    "underflow_fraction",
    "update_history",
]
