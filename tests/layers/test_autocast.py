"""What a layer with `AutocastMixin` casts, and what it leaves alone."""

import inspect
import threading

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from steps import gradients, numpy

MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
JIT = keras.backend.backend() == "jax"


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


def dtypes_of(structure):
    return keras.tree.map_structure(dtype_of, structure)


def ones(*shape, dtype="float32"):
    return ops.ones(shape, dtype)


class Layer(kpe.layers.AutocastMixin, keras.layers.Layer):
    pass


class Echo(Layer):
    """Returns its arguments as it was given them."""

    def call(self, first, second=None, third=None):
        return [x for x in (first, second, third) if x is not None]


@keras.saving.register_keras_serializable("test_autocast")
class Scale(Layer):
    """A kernel, a counter, a variable of the user's; and what was seen."""

    def __init__(self, units=2, regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.regularizer = regularizer
        self.seen = []

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], self.units),
            initializer="ones",
            regularizer=self.regularizer,
            name="kernel",
        )
        self.count = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="count"
        )
        self.user = keras.Variable(1.0, trainable=False, name="user")
        self.exact = self.add_weight(
            shape=(), initializer="ones", autocast=False, name="exact"
        )

    def call(self, inputs):
        for variable in (self.count, self.user):
            variable.assign_add(2.0**-14)
        return self.see(inputs)

    def see(self, inputs):
        product = ops.matmul(inputs, self.kernel)
        variables = (self.kernel, self.user, self.exact)
        self.seen.append(
            tuple(dtype_of(ops.convert_to_tensor(v)) for v in variables)
        )
        return product * ops.cast(self.exact, product.dtype)


# Arguments


ARGUMENTS = {
    "all": ({}, ["float16", "float16", "float16"]),
    "first": ({"autocast_args": "first"}, ["float16", "float32", "float32"]),
    "exclude": (
        {"autocast_exclude": ("second",)},
        ["float16", "float32", "float16"],
    ),
    "first and exclude": (
        {"autocast_args": "first", "autocast_exclude": "first"},
        ["float32", "float32", "float32"],
    ),
    "layer says no": ({"autocast": False}, ["float32", "float32", "float32"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_layer_says_which_arguments_are_cast(case):
    options, expected = ARGUMENTS[case]
    layer = Echo(dtype="mixed_float16", **options)
    x = ones(2)

    assert dtypes_of(layer(x, x, x)) == expected
    assert dtypes_of(layer(x, third=x, second=x)) == expected
    assert dtypes_of(layer(third=x, second=x, first=x)) == expected
    assert dtypes_of(layer(np.ones(2, "float32"), x, third=x)) == expected


def test_class_attributes_say_the_same():
    class Own(Echo):
        autocast_args = "first"
        autocast_exclude = ("first",)

    layer = Own(dtype="mixed_float16")
    assert dtypes_of(layer(ones(2), ones(2))) == ["float32", "float32"]
    other = Own(dtype="mixed_float16", autocast_args="all", autocast_exclude=())
    assert dtypes_of(other(ones(2), ones(2))) == ["float16", "float16"]


def test_floats_in_structures_are_cast_and_other_dtypes_kept():
    structure = {
        "floats": [ones(2), (ones(1, dtype="bfloat16"), np.ones(3, "f4"))],
        "ints": np.arange(3, dtype="int32"),
        "bools": ops.ones(2, "bool"),
    }
    expected = {
        "floats": ["float16", ("float16", "float16")],
        "ints": "int32",
        "bools": "bool",
    }
    layer = Echo(dtype="mixed_float16")
    assert dtypes_of(layer(structure)) == [expected]

    first = Echo(dtype="mixed_float16", autocast_args="first")
    kept = ["float32", ("bfloat16", "float32")]
    got = first(structure, structure)
    assert dtypes_of(got[0]) == expected
    assert dtypes_of(got[1]["floats"]) == kept


def test_starred_arguments_are_told_apart():
    class Star(Layer):
        def call(self, *xs, scale=None):
            return [*xs, scale]

    def dtypes(**options):
        layer = Star(dtype="mixed_float16", **options)
        return dtypes_of(layer(ones(1), ones(1), scale=ones(1)))

    assert dtypes(autocast_args="first") == ["float16", "float32", "float32"]
    assert dtypes(autocast_exclude="xs") == ["float32", "float32", "float16"]


@pytest.mark.parametrize("policy", ["int32", "uint8", "bool"])
def test_a_float_is_never_cast_to_an_integer(policy):
    for x in (np.float32([1.7]), ops.convert_to_tensor(np.float32([1.7]))):
        (y,) = Echo(dtype=policy)(x)
        assert dtype_of(y) == "float32"
        assert numpy(y)[0] == np.float32(1.7)


def test_symbolic_calls_cast_as_real_ones_do_and_make_no_nodes_of_it():
    class Sum(Layer):
        def call(self, a, b):
            return a, b

    first, second = keras.Input((3,)), keras.Input((3,))
    outputs = Sum(dtype="mixed_float16", autocast_args="first")(first, second)
    assert dtypes_of(outputs) == ("float16", "float32")
    model = keras.Model([first, second], outputs)
    assert [type(x).__name__ for x in model.operations] == [
        "InputLayer",
        "InputLayer",
        "Sum",
    ]
    real = model([ones(2, 3), ones(2, 3)])
    assert dtypes_of(tuple(real)) == ("float16", "float32")


def test_a_mask_survives_the_cast():
    class Masked(Layer):
        supports_masking = True

        def call(self, inputs, mask=None):
            self.mask = mask
            return inputs

    ids = np.array([[1, 2, 0]])
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(ids)
    assert dtype_of(embedded) == "float32"
    layer = Masked(dtype="mixed_float16")
    layer(embedded)
    np.testing.assert_array_equal(numpy(layer.mask), ids != 0)


def test_keras_layers_that_convert_nothing_still_do_not():
    class Lookup(kpe.layers.AutocastMixin, keras.layers.StringLookup):
        pass

    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras looks strings up with TensorFlow only")
    layer = Lookup(vocabulary=["a", "b"])
    assert not layer.converts_arguments
    assert numpy(layer(np.array(["b"]))).tolist() == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"autocast_args": "second"},
        {"autocast_args": True},
        {"autocast_exclude": ("secnd",)},
    ],
)
def test_a_wrong_choice_of_arguments_is_refused(options):
    with pytest.raises(ValueError, match=r"Received: .*Allowed: "):
        Echo(**options)


@pytest.mark.parametrize("exclude", [3, [1], [None]])
def test_exclusions_that_are_no_names_are_type_errors(exclude):
    with pytest.raises(TypeError, match="Received"):
        Echo(autocast_exclude=exclude)


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
