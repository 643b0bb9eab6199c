"""Dtypes and policies of Keras."""

import keras

SOURCES = {
    "mixed_bfloat16": ("bfloat16", "float32"),
    "mixed_float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "float32": ("float32", "float32"),
    "float64": ("float64", "float64"),
}
NOT_FLOATING = ["int8", "int32", "uint8", "bool", "complex64"]
FLOAT8_DTYPES = ["float8_e4m3fn", "float8_e5m2"]


def stock_float8(source="mixed_bfloat16", length=16):
    return keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", source, length
    )


def built_dense(dtype, units=2):
    layer = keras.layers.Dense(units, dtype=dtype)
    layer.build((None, 4))
    return layer
