"""What a layer with `AutocastMixin` casts, and what it leaves alone."""

import inspect
import threading

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from autocast_layers import JIT, Echo, Layer, Scale, dtype_of, dtypes_of, ones
from steps import gradients, numpy

# The same dtypes everywhere


class Net(kpe.layers.AutocastMixin, keras.Model):
    """A subclassed model with weights of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = set()

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], 2))

    def call(self, inputs):
        product = ops.matmul(inputs, self.kernel)
        if not getattr(product, "is_meta", False):
            self.seen.add(dtypes_of((inputs, self.kernel, product)))
        return product

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], 2)


def test_call_fit_evaluate_predict_and_stateless_call_have_the_same_dtypes():
    model = Net(dtype="mixed_bfloat16")
    model.compile("sgd", "mse", jit_compile=JIT)
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")

    def stateless_call():
        outputs, _ = model.stateless_call(
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
            ops.convert_to_tensor(x),
        )
        assert dtype_of(outputs) == "bfloat16"

    ways = {
        "call": lambda: model(x),
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "stateless_call": stateless_call,
    }
    for name, way in ways.items():
        model.seen.clear()
        way()
        assert model.seen == {("bfloat16",) * 3}, name


def test_stateless_losses_are_in_the_variable_dtype():
    layer = Scale(regularizer="l2", dtype="mixed_float16")
    layer.build((None, 3))
    *_, losses = layer.stateless_call(
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
        ones(1, 3),
        return_losses=True,
    )
    assert dtypes_of(losses) == ["float32"]


def test_state_is_not_rounded_where_stateless_call_is_in_a_scope():
    layer = Scale(dtype="mixed_float16")
    layer.build((None, 3))
    layer.count.assign(1 + 2.0**-12)
    trainable, state = (
        [ops.copy(v.value) for v in variables]
        for variables in (
            layer.trainable_variables,
            layer.non_trainable_variables,
        )
    )
    with kpe.autocast_scope("float16"):
        _, state = layer.stateless_call(trainable, state, ones(1, 3))
    assert dtypes_of(state) == ["float32", "float32"]
    assert float(numpy(state[0])) == 1 + 2.0**-12 + 2.0**-14


def test_what_is_rematerialized_has_the_same_dtypes():
    class Product(Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight("kernel", (input_shape[-1], 2))
            self.seen = set()

        def call(self, inputs):
            self.seen.add(dtype_of(ops.convert_to_tensor(self.kernel)))
            return ops.matmul(inputs, self.kernel)

    with keras.RematScope(mode="full"):
        layer = Product(dtype="mixed_float16")
    layer.build((None, 3))

    def loss(outputs):
        return ops.sum(ops.cast(outputs, "float32"))

    gradients(layer, np.ones((1, 3), "float32"), loss, training=None)
    assert layer.seen == {"float16"}


# Strict layers


class AddRandom(Layer):
    def call(self, inputs):
        noise = keras.random.normal(inputs.shape)
        return {"sum": ops.add(inputs, noise), "ids": 1}


def test_a_strict_layer_refuses_outputs_in_another_dtype():
    layer = AddRandom(dtype="mixed_float16", strict=True, name="noise")
    with pytest.raises(ValueError) as caught:
        layer(ones(2))
    for part in (
        "'noise' (AddRandom)",
        "output['sum']",
        "Received: float32",
        "Allowed: float16",
        "dtype=self.compute_dtype",
    ):
        assert part in str(caught.value)
    layer.strict = False
    assert dtype_of(layer(ones(2))["sum"]) == "float32"


def test_a_strict_layer_takes_its_compute_dtype_and_what_is_no_float():
    layer = Echo(dtype="mixed_float16", strict=True)
    layer(ones(1), ops.ones(2, "int32"), ops.ones(2, "bool"))
    with pytest.raises(ValueError, match=r"output\[1\]"):
        Echo(dtype="mixed_float16", strict=True, autocast_args="first")(
            ones(1), ones(1)
        )


def test_a_strict_model_is_strict_in_fit_too():
    class Wide(Net):
        def call(self, inputs):
            return ops.cast(super().call(inputs), "float32")

    model = Wide(dtype="mixed_bfloat16", strict=True)
    model.build((None, 3))
    model.compile("sgd", "mse", jit_compile=JIT)
    # Keras 3.12 on JAX wraps what happens while it builds the model.
    with pytest.raises((ValueError, RuntimeError), match="is strict"):
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


# Scopes


def test_scopes_of_autocasting_nest_and_restore_after_an_exception():
    variable = keras.Variable(1.0)
    with kpe.autocast_scope("float16"):
        assert dtype_of(variable.value) == "float16"
        with pytest.raises(KeyError), kpe.autocast_scope(None):
            assert dtype_of(variable.value) == "float32"
            raise KeyError
        with (
            kpe.autocast_scope(np.dtype("float16")),
            kpe.autocast_scope("bfloat16"),
        ):
            assert dtype_of(variable) == "bfloat16"
        assert dtype_of(variable) == "float16"
    assert dtype_of(variable.value) == "float32"


def test_a_scope_switches_autocasting_off_inside_a_call():
    class Exact(Scale):
        def call(self, inputs):
            with kpe.autocast_scope(None):
                self.read = dtype_of(ops.convert_to_tensor(self.kernel))
            return self.see(inputs)

    layer = Exact(dtype="mixed_float16")
    layer(ones(1, 3))
    assert layer.read == "float32"
    assert layer.seen[0][0] == "float16"


@pytest.mark.parametrize("dtype", ["int32", "bool", "float8_e4m3fn", "x", 3])
def test_a_scope_of_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"Received: .*Allowed: "):
        kpe.autocast_scope(dtype)


def test_a_scope_belongs_to_its_thread():
    variable, seen = keras.Variable(1.0), []
    with kpe.autocast_scope("float16"):
        thread = threading.Thread(
            target=lambda: seen.append(dtype_of(variable.value))
        )
        thread.start()
        thread.join()
    assert seen == ["float32"]


# Configs and files


def test_what_the_constructor_was_told_survives_in_the_config():
    options = {
        "autocast_args": "first",
        "autocast_exclude": ["inputs"],
        "strict": True,
    }
    layer = Scale(3, dtype="mixed_float16", **options)
    config = layer.get_config()  # From the arguments of the constructor.
    assert config["units"] == 3
    assert {k: config[k] for k in options} == options
    again = Scale.from_config(config)
    assert again.get_config() == config
    assert (again.autocast_args, again.strict) == ("first", True)
    assert again.autocast_exclude == ("inputs",)
    for untold in (Scale(3), Echo()):
        assert not options.keys() & untold.get_config().keys()


def test_layers_that_write_their_own_config_keep_theirs():
    class Own(Layer):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.units = units

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    class Dense(kpe.layers.AutocastMixin, keras.layers.Dense):
        pass

    class Child(Dense):
        pass

    own = Own(3, strict=True).get_config()
    assert (own["units"], own["strict"]) == (3, True)
    zeros = keras.initializers.Zeros()  # No argument that Keras notes itself.
    for cls in (Dense, Child):
        layer = cls(3, kernel_initializer=zeros, autocast_args="first")
        config = layer.get_config()
        assert config["autocast_args"] == "first"
        assert cls.from_config(config).units == 3
        stock = keras.layers.Dense(3, kernel_initializer=zeros).get_config()
        assert config.keys() - stock.keys() == {"autocast_args"}


def test_a_saved_model_is_the_same_after_loading(tmp_path):
    layer = Scale(dtype="mixed_float16", autocast_exclude=(), strict=True)
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile("adam", "mse", jit_compile=JIT)
    data = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    model.fit(*data, verbose=0)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert other.layers[-1].strict
    for one, two in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))
        assert kpe.is_autocast_variable(one) == kpe.is_autocast_variable(two)
    np.testing.assert_array_equal(
        model.predict(data[0], verbose=0), other.predict(data[0], verbose=0)
    )


# Together with float8


@pytest.mark.parametrize("autocast_is_first", [True, False])
def test_the_two_mixins_combine(autocast_is_first):
    mixins = [kpe.layers.AutocastMixin, kpe.layers.Float8Mixin]
    if not autocast_is_first:
        mixins.reverse()

    class Both(*mixins, keras.layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight("kernel", (input_shape[-1], 2))
            self.count = self.add_weight(
                "count", (), initializer="ones", trainable=False
            )

        def call(self, inputs, offset):
            self.count.assign_add(2.0**-14)
            return self.float8_matmul(inputs, self.kernel), offset

    policy = "float8/2_from_mixed_float16"
    layer = Both(dtype=policy, autocast_exclude="offset", strict=False)
    x = np.ones((4, 3), "float32")
    outputs, offset = layer(x, ops.ones(1))
    assert dtypes_of((outputs, offset)) == ("float16", "float32")
    assert layer.quantization_mode == "float8"
    assert len(layer.float8_state.matrices) == 1
    assert kpe.is_autocast_variable(layer.kernel)
    assert not kpe.is_autocast_variable(layer.float8_state.matrices[0])
    assert float(numpy(layer.count)) == 1 + 2.0**-14
    assert layer.get_config()["autocast_exclude"] == ["offset"]


@pytest.mark.parametrize(
    "mixin", [kpe.layers.AutocastMixin, kpe.layers.Float8Mixin]
)
@pytest.mark.parametrize("base", [keras.layers.Dense, keras.Model])
def test_a_mixin_has_to_come_before_the_keras_class(base, mixin):
    allowed = rf"Write class Own\({mixin.__name__}, {base.__name__}\)"
    with pytest.raises(TypeError, match=allowed):
        type("Own", (base, mixin), {})


def test_keras_finds_the_signature_of_call():
    assert list(inspect.signature(Scale().call).parameters) == ["inputs"]
    layer = Layer.__new__(Layer)
    with pytest.raises(Exception, match="super"):
        layer(ones(1))
