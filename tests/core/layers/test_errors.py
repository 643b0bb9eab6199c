"""Bad input: the error says what, what was got, what is allowed, what next."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import numpy

POLICY = kpe.Float8DTypePolicy("float32", amax_history_length=4)


class OneKernel(kpe.layers.Float8Mixin, keras.layers.Layer):
    """A layer whose `call` does whatever the test wants."""

    def __init__(self, action, **kwargs):
        super().__init__(**kwargs)
        self.action = action

    def build(self, input_shape):
        self.kernel = self.add_weight(name="kernel", shape=(4, 3))
        self.vector = self.add_weight(name="vector", shape=(4,))

    def call(self, x):
        return self.action(self, x)


def run(action, dtype=POLICY, x=None):
    layer = OneKernel(action, dtype=dtype)
    layer.build((2, 4))
    return layer(np.ones((2, 4), "float32") if x is None else x)


@pytest.mark.parametrize(
    ("dtype", "about", "value", "instead"),
    [
        ("float9", "dtype policy", "'float9'", "'float8'"),
        ("float8/0_from_float32", "amax_history_length", "0", "an integer"),
        ("float8/nonsense_from_float32", "recipe", "'nonsense'", "delayed"),
        ("float8_from_int32", "source", "'int32'", "'float32'"),
        ("no_such_policy", "dtype policy", "'no_such_policy'", "a dtype"),
    ],
)
def test_a_layer_refuses_a_policy_that_means_nothing(
    dtype, about, value, instead
):
    with pytest.raises(ValueError) as error:
        kpe.layers.Dense(2, dtype=dtype).build((None, 2))
    fault, _, allowed = str(error.value).partition("Allowed: ")
    assert about in fault
    assert value in fault
    assert instead in allowed


def test_a_tensor_computed_from_a_kernel_has_no_state():
    def action(layer, x):
        return layer.float8_matmul(x, keras.ops.add(layer.kernel, 1.0))

    with pytest.raises(ValueError) as error:
        run(action)
    text = str(error.value)
    assert "no float8 state" in text
    assert "Received: a tensor of shape (4, 3)" in text
    assert "kernel" in text and "add_weight" in text


def test_a_recipe_without_state_takes_any_tensor():
    def action(layer, x):
        return layer.float8_matmul(x, keras.ops.add(layer.kernel, 1.0))

    policy = kpe.Float8DTypePolicy("float32", recipe="current")
    assert numpy(run(action, policy)).shape == (2, 3)


@pytest.mark.parametrize(
    "equation, told",
    [
        ("ab->b", "another form"),
        ("ab,bc", "another form"),
        ("ab,bc,cd->ad", "another form"),
        ("aa,ac->ac", "repeats an axis"),
        ("ab,bc->az", "axis of no operand"),
        ("a1,1c->ac", "other signs than letters"),
        ("abx,bc->acx", "does not fit"),
    ],
)
@pytest.mark.parametrize("dtype", [POLICY, "float32"], ids=["float8", "plain"])
def test_a_wrong_equation_is_explained(equation, told, dtype):
    def action(layer, x):
        return layer.float8_einsum(equation, x, layer.kernel)

    with pytest.raises(ValueError, match=told) as error:
        run(action, dtype)
    assert "Received" in str(error.value)
    assert "Allowed" in str(error.value)


@pytest.mark.parametrize("dtype", [POLICY, "float32"], ids=["float8", "plain"])
def test_operands_of_different_sizes_are_not_broadcast(dtype):
    def action(layer, x):
        return layer.float8_matmul(x, layer.kernel)

    x = np.ones((2, 1), "float32")
    with pytest.raises(ValueError, match="differ in axis") as error:
        run(action, dtype, x)
    assert "(2, 1) and (4, 3)" in str(error.value)


def test_a_failed_call_leaves_state_and_weights_as_they_were():
    layer = kpe.layers.Dense(3, dtype=POLICY)
    layer.build((None, 4))
    before = [numpy(w) for w in layer.weights]
    with pytest.raises(ValueError):
        layer(np.ones((2, 5), "float32"), training=True)
    for a, b in zip(before, layer.weights, strict=True):
        np.testing.assert_array_equal(a, numpy(b))


def test_integers_are_multiplied_as_floats():
    layer = kpe.layers.Dense(3, dtype=POLICY)
    layer.build((None, 4))
    x = np.arange(8).reshape(2, 4)
    y = layer(x.astype("int32"))
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    np.testing.assert_array_equal(numpy(y), numpy(layer(x.astype("float32"))))


def test_an_unknown_kind_of_kernel_is_refused():
    with (
        pytest.raises(ValueError, match="auto, native, emulated"),
        kpe.kernels.prefer("fast"),
    ):
        pass
    assert kpe.kernels.preferred() == "auto"


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3", "e4m3", "int8"])
def test_a_cast_to_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError) as error:
        kpe.numerics.cast(np.ones(3, "float32"), dtype)
    assert "float8_e4m3fn" in str(error.value)


def test_quantizing_a_float8_layer_again_is_refused_with_the_reason():
    layer = kpe.layers.Dense(3, dtype=POLICY)
    layer.build((None, 4))
    before = layer.dtype_policy
    with pytest.raises((ValueError, NotImplementedError)):
        layer.quantize("int8")
    assert layer.dtype_policy == before
    assert layer.quantization_mode == "float8"


def test_weights_with_a_wrong_state_change_nothing():
    layer = kpe.layers.Dense(3, dtype=POLICY)
    layer.build((None, 4))
    before = layer.get_weights()
    wrong = [w * 0 for w in before]
    wrong[2] = before[2].copy()
    wrong[2][:, 12] = -5
    with pytest.raises(ValueError, match="not a float8 state"):
        layer.set_weights(wrong)
    for a, b in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_of_other_shapes_change_nothing():
    layer = kpe.layers.Dense(3, dtype=POLICY)
    layer.build((None, 4))
    before = layer.get_weights()
    wrong = [w * 0 for w in before]
    wrong[2] = np.zeros((3, 77), "float32")
    with pytest.raises(ValueError, match=r"none was set.*\(3, 77\)"):
        layer.set_weights(wrong)
    wrong[2] = np.full_like(before[2], np.inf)
    with pytest.raises(ValueError, match="not a float8 state"):
        layer.set_weights(wrong)
    for a, b in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [POLICY, "float32"], ids=["float8", "plain"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ab,bc->ac", None, "kernel"), "Received: inputs None"),
        (("ab,bc->ac", "x", None), "kernel None"),
        ((None, "x", "kernel"), "it is not a string"),
        ((3, "x", "kernel"), "it is not a string"),
        (("ab,bc->ac", "x", "kernel", None, "foo"), "dtype='foo'"),
        (("ab,bc->ac", "x", "kernel", None, "int8"), "dtype='int8'"),
    ],
)
def test_wrong_arguments_of_a_contraction_are_told(dtype, arguments, told):
    def action(layer, x):
        known = {"x": x, "kernel": layer.kernel}
        equation, *rest = arguments
        given = [known.get(each, each) for each in rest]
        return layer.float8_einsum(equation, *given)

    with pytest.raises(ValueError) as error:
        run(action, dtype)
    assert told in str(error.value)
    assert "Allowed: " in str(error.value)


@pytest.mark.parametrize("dtype", [POLICY, "float32"], ids=["float8", "plain"])
@pytest.mark.parametrize("kind", ["int32", "float32", "list"])
def test_a_contraction_takes_arrays_as_keras_does(dtype, kind):
    layer = OneKernel(None, dtype=dtype)
    layer.build((2, 4))
    x = np.arange(8).reshape(2, 4)
    given = x.tolist() if kind == "list" else x.astype(kind)
    y = layer.float8_matmul(given, layer.kernel)
    expected = layer.float8_matmul(x.astype("float32"), layer.kernel)
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    np.testing.assert_array_equal(numpy(y), numpy(expected))


def test_layers_follow_the_live_floatx():
    kpe.set_dtype_policy(None)
    keras.layers.ReLU()  # makes Keras store the policy of today's floatx
    keras.config.set_floatx("bfloat16")
    assert kpe.layers.Dense(1).compute_dtype == "bfloat16"
