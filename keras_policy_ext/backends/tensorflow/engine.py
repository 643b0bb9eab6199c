"""TensorFlow: the current device, matmul kernels, and casts compiled by XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_policy_ext import backends
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
from keras_policy_ext.backends.matmuls import Engine, NativeMatmul, Request
from keras_policy_ext.backends.tensorflow.backend import compiles_parts
from keras_policy_ext.backends.tensorflow.gradients import behind_barrier
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.quantized import Quantized


def here() -> Device:
    """Return the `Device` that `pretend` set, else that of this machine."""
    return devices.pretended() or found()


def lacking(*formats: str) -> str | None:
    """Return why XLA has no matmul of these formats on the device.

    None if it has one. TensorFlow does not tell what AMD's and Google's devices
    support.
    """
    device = here()
    if device.maker == "nvidia":
        return device.lacking(*formats)
    if device.maker == "cpu":
        return "no GPU here has a float8 matmul"
    return (
        f"TensorFlow has float8 matmuls for NVIDIA's GPUs, not {device.title}"
    )


@functools.cache
def found() -> Device:
    """Return this machine's `Device`: the best GPU for float8, else a CPU.

    CPUs are not told apart: bfloat16 matmuls took 0.8 to 1.14 times as long as
    float32 ones in steps of six layers (TF 2.21).
    """
    gpus = [_device_of(each) for each in tf.config.list_physical_devices("GPU")]
    with_float8 = [each for each in gpus if each.float8]
    return [*with_float8, *gpus, devices.KNOWN["cpu"]][0]


def _device_of(gpu: object) -> Device:
    """Return the `Device` of a GPU, by its compute capability."""
    details = tf.config.experimental.get_device_details(gpu)
    name = details.get("device_name", "a GPU")
    capability = details.get("compute_capability")
    if capability is None:
        return devices.unknown(name)
    return devices.of_nvidia(capability, f"{name} (capability {capability})")


def encode(values: Tensor, format_name: str) -> Tensor:
    """Encode values as codes; see `casting.encode`."""
    if not compiles_parts(values):
        return casting.encode(values, format_name)
    compiled = _compile_by_xla(casting.encode, tf.float32, (format_name,))
    return _call_on_vector(compiled, values)


def decode(codes: Tensor, format_name: str) -> Tensor:
    """Decode codes to values; see `casting.decode`."""
    if not compiles_parts(codes):
        return casting.decode(codes, format_name)
    compiled = _compile_by_xla(casting.decode, tf.uint8, (format_name,))
    return _call_on_vector(compiled, codes)


def cast_in_training(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """Round `x / scale` to values of `dtype`, held in float32, for training.

    With `is_factor`, round `x * scale`. XLA compiles it where it compiles parts
    of a program and there is one scale: the result cannot be exported, and no
    training step is exported.
    """
    if not compiles_parts(x) or scale.shape.num_elements() != 1:
        return casting.quantize_float32(x, scale, dtype, is_factor)
    options = dtype, is_factor
    compiled = _compile_by_xla(
        casting.quantize_float32, x.dtype, options, scales=1
    )
    return _call_on_vector(compiled, x, tf.reshape(scale, ()))


def _call_on_vector(
    compiled: Callable[..., Tensor], x: Tensor, *others: Tensor
) -> Tensor:
    """Call a function of vectors on `x`, flattened; return the shape of `x`."""
    result = compiled(tf.reshape(x, [-1]), *others)
    result = tf.reshape(result, tf.shape(x))
    result.set_shape(x.shape)  # As far as the graph knows it.
    return result


@functools.cache
def _compile_by_xla(
    function: Callable[..., Tensor],
    dtype: tf.DType,
    options: tuple[Any, ...],
    scales: int = 0,
) -> Any:
    """Compile `function(vector of this dtype, *scales, *options)` by XLA."""
    scale = tf.TensorSpec([], tf.float32)
    return tf.function(
        lambda *tensors: function(*tensors, *options),
        jit_compile=True,
        autograph=False,
        input_signature=[tf.TensorSpec([None], dtype), *[scale] * scales],
    )


# TensorFlow has no public way to say how XLA multiplies (TF 2.21). Without
# this module XLA takes Triton, and gradients are accumulated fast as well.
try:
    from tensorflow.compiler.tf2xla.python import xla
except ImportError:
    xla = None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (b, m, k) by (b, n, k) transposed, to (b, m, n)."""
    if a.shape[0] != 1 or b.shape[0] != 1:
        return tf.matmul(a, b, transpose_b=True)
    # A batch of one is multiplied as plain matrices.
    return tf.matmul(a[0], b[0], transpose_b=True)[tf.newaxis]


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matmul `_product` in float32, in float64 if `a` is float64."""
    if a.dtype == tf.float64:
        return _product(a, b)
    return _product(tf.cast(a, tf.float32), tf.cast(b, tf.float32))


class XlaMatmul(NativeMatmul):
    """A kernel that passes float8 operands to XLA; scales multiply the output.

    `tf.matmul` refuses float8 operands, and so does `XlaDotV2`, which drops
    the algorithm of its `PrecisionConfig` as well (TF 2.21). A module of
    StableHLO keeps both: see `_by_cublas`.

    Without that, XLA turns a matmul of operands that are cast from float8 into
    a float8 matmul, of Triton if its flags are the default. A scale that
    multiplies an operand before the matmul can be rounded to bfloat16, and
    keep XLA from a float8 matmul; see JAX's `Float8Dot`.
    """

    @override
    def reads(self, request: Request) -> bool:
        return request.of_whole_tensors or request.of_matrices

    @override
    def refusal(self, request: Request) -> str | None:
        """Return why XLA cannot run a float8 matmul; None if it can."""
        requested = request.prefer == "native"
        reason = None if requested else lacking(*request.formats)
        if reason is None and not request.for_xla:
            return "only XLA has a float8 matmul: jit_compile=True"
        return reason

    @override
    def reason(self, request: Request) -> str:
        """Return, for reports, how XLA comes to multiply float8."""
        if request.prefer == "native":
            return "casts for XLA, asked for"
        return "XLA takes the casts into the matmul"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply two float8 operands by XLA; scale the output."""
        is_native = lacking(*map(_format_of, (a, b))) is None
        read = written = "float32"
        # XLA adds up the products of a vector in the dtype of the result.
        if is_native and not is_vector_product(a, b):
            read = "bfloat16"
            if may_write_bfloat16(a, b, dtype):
                written = "bfloat16"
            if xla is not None and backends.current.traces_for_xla():
                return _by_cublas(a, b, written, dtype, fast)
        x, y = (casting.as_dtype(each.values, read) for each in (a, b))
        # XLA accumulates fast unless the highest precision is asked for.
        product = _fast_product if fast else _exact_product
        sums = tf.cast(product(x, y, written), tf.float32)
        return scaled(sums, a, b, dtype)


class XlaMatmulOfRows(XlaMatmul):
    """The same kernel for scales of rows, which XLA has no matmul for."""

    @override
    def reads(self, request: Request) -> bool:
        return request.of_rows


class EmulatedMatmul(Emulated):
    """An emulated kernel that multiplies in 16 bits where that is exact.

    Only XLA has a 16-bit matmul that writes its sums in float32.
    """

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply the decoded operands, in 16 bits if that is exact."""
        in_16_bits = here().multiplies_in
        in_xla = backends.current.traces_for_xla()
        if not in_xla or not exact_in(in_16_bits, a, b):
            return super().multiply(a, b, dtype, fast)
        x, y = (tf.cast(unscaled(each), in_16_bits) for each in (a, b))
        return scaled(_fast_product(x, y, "float32"), a, b, dtype)


def _fast_product(a: Tensor, b: Tensor, written: str) -> Tensor:
    """Multiply (b, m, k) by (b, n, k) transposed; write the sums in a dtype.

    Sums may be in fewer bits than float32.
    """
    if a.dtype == written:
        return _product(a, b)
    return tf.raw_ops.BatchMatMulV3(
        x=a, y=b, Tout=tf.as_dtype(written), adj_y=True
    )


def _exact_product(a: Tensor, b: Tensor, written: str) -> Tensor:
    """Multiply in XLA, in its highest precision; write the sums in a dtype."""
    if xla is None:
        return _fast_product(a, b, written)
    axes = xla.DotDimensionNumbers(
        lhs_contracting_dimensions=(2,),
        rhs_contracting_dimensions=(2,),
        lhs_batch_dimensions=(0,),
        rhs_batch_dimensions=(0,),
    )
    highest = xla.PrecisionConfig.HIGHEST
    precision = xla.PrecisionConfig(operand_precision=[highest, highest])
    return xla.dot_general(a, b, axes, precision, tf.as_dtype(written))


def _by_cublas(
    a: Quantized, b: Quantized, written: str, dtype: str, fast: bool
) -> Tensor:
    """Return the scaled product; sums are in `written` if scaled later."""
    # The product names its algorithm, so XLA leaves it to cuBLASLt, which
    # multiplies by an exact float32 scale, adds the bias, and rounds once.
    if scales_in_product(a, b, dtype):
        scale = tf.reshape(a.scale, ()) * tf.reshape(b.scale, ())
        # Infinity times a sum of 0 would be NaN.
        scale = tf.minimum(scale, LARGEST)
        # XLA gives cuBLASLt the float32 scale from before the cast below. It
        # would not if it could move a reshape behind the cast.
        (scale,) = behind_barrier(scale)
        return _float8_product(a, b, dtype, fast) * tf.cast(scale, dtype)
    sums = tf.cast(_float8_product(a, b, written, fast), tf.float32)
    return scaled(sums, a, b, dtype)


def _float8_product(
    a: Quantized, b: Quantized, written: str, fast: bool
) -> Tensor:
    """Multiply float8 values as `_product` does; write sums in a dtype."""
    formats = _format_of(a), _format_of(b)
    x, y = (
        tf.cast(each.values, name)
        for each, name in zip((a, b), formats, strict=True)
    )
    (product,) = xla.call_module(
        # XLA would merge products that share an operand, and scale the parts.
        behind_barrier(x, y),
        version=9,  # Of the calling convention, as in JAX's exports.
        module=_module(*formats, written, fast),
        Tout=[tf.as_dtype(written)],
        Sout=[tf.TensorShape([x.shape[0], x.shape[1], y.shape[1]])],
        platforms=["CUDA"],
        # A CPU beside a GPU multiplies so as well, and a program for a GPU
        # may be made on a machine without one.
        disabled_checks=[xla.call_module_disable_check_platform()],
    )
    return product


@functools.cache
def _module(a: str, b: str, written: str, fast: bool) -> str:
    """Return StableHLO code that multiplies (b, m, k) by (b, n, k)."""
    left, right, out = _HLO_TYPES[a], _HLO_TYPES[b], _HLO_TYPES[written]
    x, y, z = (f"tensor<?x?x?x{each}>" for each in (left, right, out))
    return f"""
module @float8_product attributes {{jax.uses_shape_polymorphism = true}} {{
  func.func public @main(%a: {x}, %b: {y}) -> {z} {{
    %0 = stablehlo.dot_general %a, %b,
        batching_dims = [0] x [0], contracting_dims = [2] x [2],
        algorithm = <
            lhs_precision_type = {left}, rhs_precision_type = {right},
            accumulation_type = f32,
            lhs_component_count = 1, rhs_component_count = 1,
            num_primitive_operations = 1,
            allow_imprecise_accumulation = {str(fast).lower()}
        > : ({x}, {y}) -> {z}
    return %0 : {z}
  }}
}}
"""


_HLO_TYPES = {
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "bfloat16": "bf16",
    "float32": "f32",
}


def _format_of(operand: Quantized) -> str:
    """Return the name of the float8 format of an operand."""
    quantization: Any = operand.quantization  # Not None of a float8 operand.
    return str(quantization.format)


ENGINE = Engine(
    name="tensorflow",
    device=here,
    matmuls=(XlaMatmul(), XlaMatmulOfRows(), EmulatedMatmul(_product)),
    plain=Plain(_wide_product),
    convolutions=KerasConvolutions("XLA has no float8 convolution"),
    training_cast=cast_in_training,
    encode=encode,
    decode=decode,
)
