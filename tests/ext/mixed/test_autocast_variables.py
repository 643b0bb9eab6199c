"""Variables of a layer with `AutocastMixin`: how they are read and written."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from autocast_layers import (
    JIT,
    MIXED,
    Echo,
    Layer,
    Scale,
    dtype_of,
    dtypes_of,
    ones,
)
from steps import gradients, numpy

# add_weight


def test_add_weight_takes_the_names_and_the_order_of_tf_keras():
    layer = Layer(dtype="mixed_float16")
    kernel = layer.add_weight("kernel", (3, 2))
    assert (kernel.name, tuple(kernel.shape)) == ("kernel", (3, 2))
    full = layer.add_weight(
        "full", (2,), "bfloat16", "ones", "l2", False, "non_neg"
    )
    assert (dtype_of(full), full.trainable) == ("bfloat16", False)
    assert numpy(ops.cast(full, "float32")).tolist() == [1.0, 1.0]
    assert isinstance(full.regularizer, keras.regularizers.L2)
    assert isinstance(full.constraint, keras.constraints.NonNeg)
    assert tuple(layer.add_weight(None, [2]).shape) == (2,)
    assert tuple(layer.add_weight("scalar").shape) == ()
    assert layer.add_weight("all", (1,), None, None, None, None).trainable

    keras_order = layer.add_weight((2,), "zeros", name="keras")
    assert numpy(keras_order).tolist() == [0.0, 0.0]

    plain = layer.add_weight("plain", (1,), experimental_autocast=False)
    assert kpe.is_autocast_variable(kernel)
    assert not kpe.is_autocast_variable(plain)
    assert layer.variables[0] is kernel


@pytest.mark.parametrize(
    "wrong",
    [
        lambda add: add("kernel", (1,), name="other"),
        lambda add: add("kernel", (1,), shape=(2,)),
        lambda add: add("k", autocast=True, experimental_autocast=True),
        lambda add: add("k", (), None, None, None, True, None, "extra"),
    ],
)
def test_a_weight_that_is_said_twice_is_refused(wrong):
    layer = Layer()
    with pytest.raises(TypeError, match="Received"):
        wrong(layer.add_weight)
    assert layer.variables == []


# Variables


@pytest.mark.parametrize("policy", MIXED)
def test_variables_are_cast_inside_a_call_and_nowhere_else(policy):
    layer = Scale(dtype=policy)
    layer(ones(1, 3))
    half = MIXED[policy]
    assert layer.seen[-1] == (half, half, "float32")
    assert dtypes_of([layer.kernel, layer.user]) == ["float32", "float32"]
    assert kpe.is_autocast_variable(layer.kernel)
    assert kpe.is_autocast_variable(layer.user)
    assert not kpe.is_autocast_variable(layer.exact)


def test_only_floating_variables_that_autocast_are_autocast_variables():
    assert not kpe.is_autocast_variable(ones(1))
    assert not kpe.is_autocast_variable(None)
    assert not kpe.is_autocast_variable(
        keras.Variable(1, trainable=False, dtype="int32")
    )
    assert not kpe.is_autocast_variable(keras.Variable(1.0, autocast=False))
    assert kpe.is_autocast_variable(keras.Variable(1.0))
    with kpe.autocast_scope("float16"):
        assert kpe.is_autocast_variable(keras.Variable(1.0))


def test_variables_of_a_layer_that_is_not_mixed_are_not_cast_in_another():
    class Reader(Layer):
        def __init__(self, other, **kwargs):
            super().__init__(**kwargs)
            self.other = other

        def call(self, inputs):
            self.other.see(ops.cast(inputs, "float32"))
            return self.other(inputs)

    other = Scale(dtype="float32")
    other.build((None, 3))
    assert not kpe.is_autocast_variable(other.kernel)
    outputs = Reader(other, dtype="mixed_float16")(ones(1, 3))
    assert other.seen == [("float32",) * 3] * 2
    assert dtype_of(outputs) == "float32"


def test_a_variable_that_another_layer_made_stays_that_layers():
    theirs = Scale(dtype="float32")
    theirs.build((None, 3))

    class Borrower(Layer):
        def __init__(self, variable, **kwargs):
            super().__init__(**kwargs)
            self.borrowed = [variable]

        def call(self, inputs):
            return ops.add(inputs, self.borrowed[0])

    stock = keras.layers.Dense(2, dtype="mixed_float16")
    stock.build((None, 3))
    mixed = Borrower(theirs.kernel, dtype="mixed_float16")
    assert dtype_of(mixed(ones(3, 2))) == "float32"
    Borrower(stock.kernel, dtype="float32")
    assert kpe.is_autocast_variable(stock.kernel)


def test_variables_follow_a_policy_that_is_set_later():
    layer = Scale(dtype="float32")
    layer(ones(1, 3))
    layer.dtype_policy = "mixed_bfloat16"
    layer(ones(1, 3))
    layer.dtype_policy = "float32"
    layer(ones(1, 3))
    half = ("bfloat16", "bfloat16", "float32")
    assert layer.seen == [("float32",) * 3, half, ("float32",) * 3]


# Writes


def test_small_additions_inside_a_call_are_not_lost():
    layer = Scale(dtype="mixed_float16")
    for _ in range(4):
        layer(ones(1, 3))
    for variable in (layer.count, layer.user):
        assert float(numpy(variable)) == 1 + 2.0**-12


class Containers(Layer):
    """Variables in containers that were filled after the assignment."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.nested = {"a": [self.made("nested")]}
        self.early = []
        self.early.append(self.made("early"))
        self.late = {"b": []}
        self.metric = keras.metrics.Mean()

    def made(self, name):
        return keras.Variable(1.0, trainable=False, name=name)

    def build(self, input_shape):
        self.late["b"].append(self.made("late"))

    def all(self):
        return [*self.nested["a"], *self.early, *self.late["b"]]

    def call(self, inputs):
        for variable in self.all():
            variable.assign_add(2.0**-14)
        self.metric.update_state(2.0 * ops.ones(3, inputs.dtype))
        return inputs


def test_variables_in_containers_count_however_they_came_in():
    layer = Containers(dtype="mixed_float16")
    for _ in range(4):
        layer(ones(1))
    got = {v.name: float(numpy(v)) for v in layer.all()}
    assert got == dict.fromkeys(["nested", "early", "late"], 1 + 2.0**-12)


def test_a_metric_that_is_updated_in_a_call_counts_exactly():
    layer = Containers(dtype="mixed_float16")
    layer.metric.count.assign(2048.0)  # the next integer is no float16
    layer.metric.total.assign(4096.0)
    for _ in range(2):
        layer(ones(1))
    assert float(numpy(layer.metric.count)) == 2054.0
    assert float(numpy(layer.metric.result())) == 2.0


def test_small_additions_are_not_lost_in_compiled_training():
    layer = Scale(dtype="mixed_float16")
    layer.build((None, 3))
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile("sgd", "mse", jit_compile=JIT, auto_scale_loss=False)
    data = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
    model.fit(*data, batch_size=2, verbose=0)
    assert float(numpy(layer.count)) == 1 + 2.0**-12
    assert float(numpy(layer.user)) == 1 + 2.0**-12


def test_every_kind_of_write_inside_a_call_reaches_the_variable():
    class Writer(Layer):
        def build(self, input_shape):
            self.c = self.add_weight("c", (), trainable=False)

        def call(self, inputs, how):
            getattr(self.c, how)(float(how == "assign") * 5.0 or 2.0**-12)
            return inputs

    layer = Writer(dtype="mixed_float16")
    for how, expected in (
        ("assign", 5.0),
        ("assign_add", 5.0 + 2.0**-12),
        ("assign_sub", 5.0),
    ):
        layer(ones(1), how=how)
        assert float(numpy(layer.c)) == expected


def test_gradients_reach_the_float32_variable():
    layer = Scale(dtype="mixed_bfloat16")
    layer.build((None, 3))
    x = np.ones((1, 3), "float32")
    _, _, grads = gradients(layer, x, lambda y: ops.sum(y), training=False)
    assert dtype_of(grads[0]) == "float32"
    np.testing.assert_array_equal(numpy(grads[0]), np.ones((3, 2)))


# Regularizers


def test_regularizers_see_the_variable_dtype_when_read_inside_a_call():
    class Reads(Scale):
        def call(self, inputs):
            self.read = list(self.losses)
            return self.see(inputs)

    layer = Reads(regularizer="l2", dtype="mixed_float16")
    layer.build((None, 3))
    layer.kernel.assign(300.0 * np.ones((3, 2)))  # 300² is no float16.
    layer(ones(1, 3))
    for losses in (layer.read, layer.losses):
        assert dtypes_of(losses) == ["float32"]
        assert float(numpy(losses[0])) == np.float32(0.01) * 6 * 300**2


def test_an_activity_regularizer_of_float16_outputs_is_finite():
    layer = Echo(dtype="mixed_float16", activity_regularizer="l2")
    layer(300.0 * ones(1, 8))  # In Keras 3.12 it is no mean over the batch.
    (loss,) = layer.losses
    assert dtype_of(loss) == "float32"
    assert float(numpy(loss)) == np.float32(0.01) * 8 * 300**2
    assert isinstance(layer.activity_regularizer, keras.regularizers.L2)
