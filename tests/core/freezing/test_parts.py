"""Products with large kernels, which a CPU decodes part by part."""

import re
import threading

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import backends, formats, stored_kernels
from keras_policy_ext.backends import parts
from steps import normal, numpy

BACKEND = keras.backend.backend()
EINSUM = keras.layers.EinsumDense
# A layer with more than 2^17 numbers in its kernel, an equation, and the shape
# of its inputs.
LAYERS = {
    "dense": (lambda: keras.layers.Dense(500), "ab,bc->ac", (1, 300)),
    "a few rows": (lambda: keras.layers.Dense(500), "ab,bc->ac", (16, 300)),
    "many rows": (lambda: keras.layers.Dense(500), "ab,bc->ac", (40, 300)),
    "no part divides it": (
        lambda: keras.layers.Dense(401),
        "ab,bc->ac",
        (3, 353),
    ),
    "heads": (
        lambda: EINSUM("abc,cde->abde", (5, 16, 32)),
        "abc,cde->abde",
        (2, 5, 300),
    ),
    "heads in front": (
        lambda: EINSUM("abc,dce->abde", (5, 4, 120)),
        "abc,dce->abde",
        (2, 5, 300),
    ),
    "out of heads": (
        lambda: EINSUM("abde,dec->abc", (5, 300)),
        "abde,dec->abc",
        (2, 5, 16, 32),
    ),
    "columns in front": (
        lambda: EINSUM("abc,dc->abd", (5, 500)),
        "abc,dc->abd",
        (2, 5, 300),
    ),
    "channels before positions": (
        lambda: EINSUM("abc,cd->adb", (500, 5)),
        "abc,cd->adb",
        (2, 5, 300),
    ),
    "a bank": (
        lambda: EINSUM("abc,acd->abd", (5, 200)),
        "abc,acd->abd",
        (4, 5, 300),
    ),
    "a matrix that would be copied": (
        lambda: EINSUM("abce,cde->abd", (5, 200)),
        "abce,cde->abd",
        (2, 5, 30, 40),
    ),
}
COPIED = {"a matrix that would be copied"}


def frozen(name, **options):
    make, _, shape = LAYERS[name]
    keras.utils.set_random_seed(0)
    layer = make()
    layer.build(shape)
    kpe.freeze(layer, **options)
    return layer, normal(*shape)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Several threads share parts that are larger than these kernels."""
    if BACKEND == "torch":
        import torch

        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    else:
        monkeypatch.setattr(parts, "cores", lambda: 1)


@pytest.fixture
def by_parts(monkeypatch):
    """Whether each product that could be cut was: a list of bools."""
    found = []
    framework = type(backends.current)
    plain = framework.product_by_parts

    def seen(self, *given):
        product = plain(self, *given)
        found.append(product is not None)
        return product

    monkeypatch.setattr(framework, "product_by_parts", seen)
    return found


def assert_near(found, wanted):
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def exactly(layer, equation, x):
    kernel = layer._kernel.stored.dequantized().astype("float64")
    return np.einsum(equation, x.astype("float64"), kernel)


def gradient(layer, x, outputs_grad):
    """The gradient of `sum(layer(x) * outputs_grad)`."""
    if BACKEND == "jax":
        import jax

        return jax.grad(lambda x: (layer(x) * outputs_grad).sum())(x)
    x = ops.convert_to_tensor(x)
    if BACKEND == "torch":
        x.requires_grad_()
        (layer(x) * ops.convert_to_tensor(outputs_grad)).sum().backward()
        return x.grad
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(layer(x) * outputs_grad)
    return tape.gradient(total, x)


FEW = ("dense-tensor", "heads-channel", "a bank-block", "out of heads-block")


@pytest.mark.full_except(*FEW, "no part divides it-channel")
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("name", LAYERS)
def test_parts_make_the_whole(name, granularity, by_parts):
    layer, x = frozen(name, granularity=granularity)
    found = numpy(layer(x))
    # Blocks of a bank run across its matrices.
    is_copied = name in COPIED or (
        granularity == "block" and name in ("a bank", "heads in front")
    )
    assert by_parts == ([] if is_copied else [True])
    assert_near(found, exactly(layer, LAYERS[name][1], x))


@pytest.mark.full_except(*FEW)
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_the_inputs_is_that_of_the_whole(name, granularity):
    layer, x = frozen(name, granularity=granularity)
    outputs_grad = normal(*layer(x).shape, seed=1)
    found = numpy(gradient(layer, x, outputs_grad))
    inputs, kernel, outputs = LAYERS[name][1].replace("->", ",").split(",")
    equation = f"{outputs},{kernel}->{inputs}"
    assert_near(found, exactly(layer, equation, outputs_grad))


@pytest.mark.full_except("dense-group32", "out of heads-channel")
@pytest.mark.parametrize("granularity", ["channel", "group32", "group128"])
@pytest.mark.parametrize("name", LAYERS)
def test_parts_of_integers_make_the_whole(name, granularity, by_parts):
    options = {"weights": "int4", "granularity": granularity}
    layer, x = frozen(name, **options)
    found = numpy(layer(x))
    if name in ("dense", "no part divides it", "heads"):
        assert by_parts == [True]
    assert_near(found, exactly(layer, LAYERS[name][1], x))
    outputs_grad = normal(*found.shape, seed=1)
    found = numpy(gradient(layer, x, outputs_grad))
    inputs, kernel, outputs = LAYERS[name][1].replace("->", ",").split(",")
    equation = f"{outputs},{kernel}->{inputs}"
    assert_near(found, exactly(layer, equation, outputs_grad))


@pytest.mark.full_except("dense-group16")
@pytest.mark.parametrize("granularity", ["channel", "group16"])
@pytest.mark.parametrize("name", ["dense", "no part divides it", "a bank"])
def test_parts_of_four_bit_floats_make_the_whole(name, granularity, by_parts):
    options = {"weights": "float4_e2m1fn", "granularity": granularity}
    layer, x = frozen(name, **options, scale_format="float8_e4m3fn")
    found = numpy(layer(x))
    is_copied = name == "a bank" and granularity == "group16"
    assert by_parts == ([] if is_copied else [True])
    assert_near(found, exactly(layer, LAYERS[name][1], x))
    if by_parts:
        kpe.widen(layer)
        assert_near(numpy(layer(x)), found)


@pytest.mark.parametrize("weights", stored_kernels.WEIGHTS)
def test_every_code_has_its_number(weights):
    codes = np.arange(256, dtype="uint8")
    codes = codes[: 1 << formats.get(weights).bits]
    dtype = formats.get(weights).dtype
    if formats.get(weights).is_integer:
        dtype = np.dtype("int8")
    values = codes.view(dtype).astype("float32")
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    for shape in ((-1,), (2, -1)):
        given = ops.convert_to_tensor(codes.reshape(shape))
        found = numpy(backends.current.numbers(given, weights))
        np.testing.assert_array_equal(found, values.reshape(shape))
        signs = np.signbit(found), np.signbit(values.reshape(shape))
        np.testing.assert_array_equal(*signs)


@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_a_gradient_is_differentiated_again(granularity):
    """As in a gradient penalty: the second product is that of the outputs."""
    layer, x = frozen("dense", granularity=granularity)
    outputs_grad = normal(1, 500, seed=1)
    if BACKEND == "jax":
        import jax

        found = jax.grad(
            lambda g: (gradient(layer, x, g) ** 2).sum(),
        )(outputs_grad)
    elif BACKEND == "torch":
        import torch

        x = ops.convert_to_tensor(x).requires_grad_()
        g = ops.convert_to_tensor(outputs_grad).requires_grad_()
        total = (layer(x) * g).sum()
        (once,) = torch.autograd.grad(total, x, create_graph=True)
        (found,) = torch.autograd.grad((once**2).sum(), g)
    else:
        import tensorflow as tf

        g = tf.constant(outputs_grad)
        with tf.GradientTape() as tape:
            tape.watch(g)
            total = tf.reduce_sum(gradient(layer, x, g) ** 2)
        found = tape.gradient(total, g)
    once = exactly(layer, "ac,bc->ab", outputs_grad)
    assert_near(numpy(found), 2 * exactly(layer, "ab,bc->ac", once))


@pytest.mark.full_except("no part divides it-float8_e5m2")
@pytest.mark.parametrize("weights", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ["dense", "no part divides it", "a bank"])
def test_inputs_are_rounded_before_they_are_cut(name, weights, by_parts):
    options = {"activations": "dynamic", "weights": weights}
    layer, x = frozen(name, **options)
    equation = LAYERS[name][1]
    found = numpy(layer(x))
    assert by_parts == [True]
    amax = np.abs(x).max(-1, keepdims=True)
    scale = amax / np.float32(448)
    number = ops.cast(x / scale, "float8_e4m3fn")
    rounded = numpy(ops.cast(number, "float32")) * scale
    assert_near(found, exactly(layer, equation, rounded))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_in_16_bits_the_sum_is_one_in_float32(policy):
    with kpe.policy_scope(policy):
        layer, x = frozen("dense")
    x = numpy(ops.cast(ops.cast(x, layer.compute_dtype), "float32"))
    found = ops.cast(layer(x), "float32")
    wanted = exactly(layer, "ab,bc->ac", x).astype("float32")
    wanted = ops.cast(ops.cast(wanted, layer.compute_dtype), "float32")
    unit = 2.0**-8 if policy == "mixed_bfloat16" else 2.0**-11
    atol = unit * np.abs(wanted).max()
    np.testing.assert_allclose(numpy(found), numpy(wanted), rtol=0, atol=atol)


def test_any_number_of_rows_may_follow_another():
    """A compiled function with an open number of rows has all the forms."""
    layer, _ = frozen("no part divides it")

    def call(x):
        return layer(x)

    if BACKEND == "tensorflow":
        import tensorflow as tf

        spec = tf.TensorSpec((None, 353), "float32")
        call = tf.function(call, input_signature=[spec])
    for rows in (3, 0, 1, 16, 17, 600, 1):
        x = normal(rows, 353)
        found = numpy(call(ops.convert_to_tensor(x)))
        assert found.shape == (rows, 401)
        if rows:
            assert_near(found, exactly(layer, "ab,bc->ac", x))


def test_threads_do_not_share_the_memory_of_parts():
    layers = [frozen(name)[0] for name in ("dense", "no part divides it")]
    xs = [normal(1, each.kernel.shape[0], seed=1) for each in layers]
    wanted = [numpy(layer(x)) for layer, x in zip(layers, xs, strict=True)]
    wrong = []

    def call(layer, x, expected):
        for _ in range(30):
            if not np.array_equal(numpy(layer(x)), expected):
                wrong.append(layer.name)

    threads = [
        threading.Thread(target=call, args=given)
        for given in zip(layers, xs, wanted, strict=True)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.extension("recurrent")
@pytest.mark.full_except("LSTM")
@pytest.mark.parametrize("name", ["GRU", "LSTM", "SimpleRNN"])
def test_a_recurrent_kernel_is_decoded_once_a_sequence(name, monkeypatch):
    keras.utils.set_random_seed(0)
    layer = getattr(keras.layers, name)(8, return_sequences=True)
    layer.build((2, 9, 5))
    kpe.freeze(layer)
    framework, decoded = type(backends.current), []
    plain = framework.numbers

    def numbers(self, codes, format_name):
        decoded.append(tuple(codes.shape))
        return plain(self, codes, format_name)

    monkeypatch.setattr(framework, "numbers", numbers)
    x = normal(2, 9, 5)
    found = numpy(layer(x))
    assert decoded.count(tuple(layer.cell.recurrent_kernel.shape)) == 1
    kpe.thaw(layer)
    np.testing.assert_allclose(found, numpy(layer(x)), atol=1e-6)


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_of_a_bank_only_the_matrices_that_are_asked_for_are_decoded(
    granularity, monkeypatch
):
    layer, _ = frozen("a bank", granularity=granularity)
    kernel = layer._kernel
    whole = numpy(kernel.value)
    framework, decoded = type(backends.current), []
    plain = framework.numbers

    def numbers(self, codes, format_name):
        decoded.append(int(np.prod(codes.shape)))
        return plain(self, codes, format_name)

    monkeypatch.setattr(framework, "numbers", numbers)
    for index in (2, slice(1, 3), (1, slice(None), 5), Ellipsis):
        np.testing.assert_array_equal(numpy(kernel[index]), whole[index])
    if granularity != "block":  # Their blocks run across matrices.
        assert decoded[0] == whole[0].size


def memory_of_floats(layer, x):
    """The bytes that a call of a layer takes for floats, at least."""
    if BACKEND == "jax":
        import jax

        weights = [
            [v.value for v in each]
            for each in (
                layer.trainable_variables,
                layer.non_trainable_variables,
            )
        ]

        def call(weights, x):
            return layer.stateless_call(*weights, x)[0]

        planned = jax.jit(call).lower(weights, x).compile()
        return planned.memory_analysis().temp_size_in_bytes
    if BACKEND == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(lambda x: layer(x), jit_compile=True)
        text = compiled.experimental_get_compiler_ir(tf.constant(x))(
            stage="optimized_hlo"
        )
        # Fusions compute what they name, but write their results alone.
        found = re.findall(r"^  (?:ROOT )?\S+ = f32\[([\d,]+)\]", text, re.M)
        return max(
            4 * int(np.prod([int(n) for n in shape.split(",")]))
            for shape in found
        )
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                size = result.untyped_storage().nbytes()
                self.found = max(self.found, size)
            return result

    with Largest() as largest, torch.no_grad():
        layer(x)
    return largest.found


@pytest.mark.parametrize("rows", [1, 16])
def test_nothing_of_the_size_of_a_kernel_is_in_floats(rows, monkeypatch):
    layer = keras.layers.Dense(2048, use_bias=False)
    layer.build((rows, 2048))
    kpe.freeze(layer)
    x = normal(rows, 2048)
    assert memory_of_floats(layer, x) <= parts.cores() << 22
    monkeypatch.setattr(type(backends.current), "cuts", lambda *_: False)
    # Of another size: what is compiled for one size is kept.
    whole = keras.layers.Dense(2040, use_bias=False)
    whole.build((rows, 2048))
    kpe.freeze(whole)
    assert memory_of_floats(whole, x) >= 4 * 2048 * 2040


@pytest.mark.skipif(
    BACKEND != "jax", reason="XLA says what it plans for a program of JAX"
)
def test_a_gradient_has_no_more_than_a_part_of_a_kernel_in_floats():
    import jax

    layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((2048,)), *layers])
    kpe.freeze(model)
    weights = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
        )
    ]

    def gradient(weights, x):
        def total(x):
            return model.stateless_call(*weights, x)[0].sum()

        return jax.value_and_grad(total)(x)

    compiled = jax.jit(gradient).lower(weights, normal(8, 2048)).compile()
    planned = compiled.memory_analysis().temp_size_in_bytes
    assert planned < 4 * 2048 * 2048
