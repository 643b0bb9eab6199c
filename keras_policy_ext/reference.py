"""A slow and simple NumPy implementation, to test every kernel against.

It imports only NumPy and ml_dtypes. Everything is float32 unless stated
otherwise; `scale` is the dequantizing multiplier, `x ≈ q * scale`. `dtype` is
the name of a narrow format (`formats.names()`).
"""

from keras_policy_ext.ext.reference.blocks import (
    BlockQuantized,
    NVFP4Quantized,
    quantize_block,
    quantize_mx,
    quantize_nvfp4,
)
from keras_policy_ext.ext.reference.casting import (
    cast,
    dequantize,
    matmul_key,
    quantize,
    quantize_dequantize,
    random_bits,
    round_scalar,
    stochastic_cast,
    stochastic_round,
)
from keras_policy_ext.ext.reference.contraction import (
    Linear,
    Scaling,
    einsum,
    form_of,
    home_matrices,
    linear,
)
from keras_policy_ext.ext.reference.delayed_linear import DelayedLinear
from keras_policy_ext.ext.reference.errors import (
    pack,
    sqnr_db,
    underflow_fraction,
    unpack,
)
from keras_policy_ext.ext.reference.hadamard_transform import hadamard
from keras_policy_ext.ext.reference.matrices import (
    Asked,
    Quantized,
    quantize_matrices,
)
from keras_policy_ext.ext.reference.moments import (
    dequantize_moments,
    quantize_moments,
)
from keras_policy_ext.ext.reference.scales import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    amax,
    delayed_scale,
    scale_from_amax,
    scale_of_multiplier,
    tile_amax,
    update_history,
)

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "Asked",
    "BlockQuantized",
    "DelayedLinear",
    "Linear",
    "NVFP4Quantized",
    "Quantized",
    "Scaling",
    "amax",
    "cast",
    "delayed_scale",
    "dequantize",
    "dequantize_moments",
    "einsum",
    "form_of",
    "hadamard",
    "home_matrices",
    "linear",
    "matmul_key",
    "pack",
    "quantize",
    "quantize_block",
    "quantize_dequantize",
    "quantize_matrices",
    "quantize_moments",
    "quantize_mx",
    "quantize_nvfp4",
    "random_bits",
    "round_scalar",
    "scale_from_amax",
    "scale_of_multiplier",
    "sqnr_db",
    "stochastic_cast",
    "stochastic_round",
    "tile_amax",
    "underflow_fraction",
    "unpack",
    "update_history",
]
