"""Attention: projections in float8, and on request its two products."""

import inspect
import json
import operator

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.frameworks.operations import UNIT
from keras_policy_ext.layers import class_swap
from keras_policy_ext.recipes import CurrentScaling
from products import quantized
from saving_models import (
    assert_equal,
    assert_same_policies,
    matrices,
    randomized,
    twin_of,
)
from steps import gradients, mean_square, normal, numpy, relative_rms, state_of
from ways import FASTEST, compiled

JIT = keras.backend.backend() == "jax"  # XLA takes longer than it saves.

SCORES = "aecd,abcd->acbe"  # keys and queries, as in MultiHeadAttention
WEIGHTED_SUM = "acbe,aecd->abcd"

FLOAT32_TOLERANCE = 1e-6
"""Relative RMS of a float32 result against one accumulated in float64."""

PRODUCTS_ONLY = [(".*/(query|key|value|attention_output)", None)]


def policy(source="float32", recipe="4", rules=()):
    return kpe.Float8DTypePolicy(source, recipe=recipe, rules=rules)


def half(x):
    """`x` rounded to bfloat16, in float32."""
    return numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))


def float32(x):
    return numpy(ops.cast(x, "float32"))


# Two activations


class Product(kpe.layers.Float8Mixin, keras.layers.Layer):
    """An einsum of the two halves of its inputs, flattened."""

    def __init__(self, equation, shapes, **kwargs):
        super().__init__(**kwargs)
        self.equation = equation
        self.shapes = shapes
        self.built = True

    def call(self, inputs, training=None):
        size = np.prod(self.shapes[0])
        first = ops.reshape(inputs[:size], self.shapes[0])
        second = ops.reshape(inputs[size:], self.shapes[1])
        return self.float8_activations_einsum(self.equation, first, second)


SHAPES = {
    SCORES: ((2, 5, 3, 4), (2, 6, 3, 4)),
    WEIGHTED_SUM: ((2, 3, 6, 5), (2, 5, 3, 4)),
}

ACTIVATION_RECIPES = {
    "": CurrentScaling(),
    "delayed(fp8_format='e4m3')": CurrentScaling(fp8_format="e4m3"),
    "current(power_of_two=True)": CurrentScaling(power_of_two=True),
}


def product(equation, dtype, a, b, g):
    """Outputs and both gradients of the einsum, for the outputs' gradient."""
    layer = Product(equation, (a.shape, b.shape), dtype=dtype)
    x = np.concatenate([a.ravel(), b.ravel()])
    g = ops.convert_to_tensor(g)

    def loss(y):
        return ops.sum(ops.multiply(ops.cast(y, "float32"), g))

    y, dx, _ = gradients(layer, x, loss, compiled=True)
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    dx = float32(dx)
    da, db = dx[: a.size].reshape(a.shape), dx[a.size :].reshape(b.shape)
    return float32(y), da, db


def operands(equation):
    a, b = SHAPES[equation]
    a, b = normal(*a, seed=1), normal(*b, seed=2)
    # Tails that saturate under any scale but the tensor's own.
    return 30 * a, 1e-3 * b, normal(*np.einsum(equation, a, b).shape, seed=3)


@pytest.mark.parametrize(
    "spec, equation, source",
    [
        ("", SCORES, "float32"),
        ("", WEIGHTED_SUM, "mixed_bfloat16"),
        ("delayed(fp8_format='e4m3')", WEIGHTED_SUM, "float32"),
        ("current(power_of_two=True)", SCORES, "float32"),
    ],
)
def test_two_activations_are_contracted_as_numpy_says(spec, equation, source):
    recipe = ACTIVATION_RECIPES[spec]
    a, b, g = operands(equation)
    tolerance = FLOAT32_TOLERANCE
    if source == "mixed_bfloat16":
        a, b, g = half(a), half(b), half(g)
        tolerance = 2.0**-8  # the outputs are rounded to 8 bits
    dtype = policy(source, recipe=spec)
    found = product(equation, dtype, a, b, g)
    x = quantized(a, "inputs", recipe)
    w = quantized(b, "kernel", recipe)
    z = quantized(g, "outputs_grad", recipe)
    first, second, out = equation.replace("->", ",").split(",")
    expected = (
        np.einsum(equation, x, w),
        np.einsum(f"{out},{second}->{first}", z, w),
        np.einsum(f"{first},{out}->{second}", x, z),
    )
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_rms(actual, wanted) < tolerance
    plain = np.einsum(equation, a, b)
    assert relative_rms(found[0], plain) > 100 * FLOAT32_TOLERANCE


def test_an_infinite_gradient_reaches_both_activations():
    a, b, g = operands(SCORES)
    g[0, 0, 0, 0] = np.inf
    _, da, db = product(SCORES, policy(), a, b, g)
    assert np.all(np.isnan(da)) and np.all(np.isnan(db))


def test_outputs_may_be_changed_in_place():
    found = []
    for change in (operator.add, operator.iadd):
        layer = Product(SCORES, SHAPES[SCORES], dtype=policy("float32"))
        x = normal(sum(map(np.prod, SHAPES[SCORES])))

        def loss(y, change=change):
            return ops.sum(ops.square(change(y, 1.0)))

        found.append(numpy(gradients(layer, x, loss, compiled=True)[1]))
    np.testing.assert_array_equal(*found)


def test_activations_that_do_not_fit_are_refused():
    layer = Product(SCORES, ((1, 2, 3, 4), (1, 2, 3, 5)), dtype=policy())
    with pytest.raises(ValueError, match="differ in axis 'd'"):
        layer(normal(24 + 30))


# Names, configs, errors


def test_every_name_that_keras_has_is_a_float8_layer():
    stock = [keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention]
    found = 0
    for name in dir(keras.layers):
        for cls in stock:
            if getattr(keras.layers, name) is cls:
                ours = getattr(kpe.layers, name)
                assert issubclass(ours, (kpe.layers.Float8Mixin, cls))
                assert ours.__name__ == cls.__name__
                found += 1
    assert found >= len(stock)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_the_signature_is_the_stock_one_and_attention(name):
    stock = inspect.signature(getattr(keras.layers, name)).parameters
    ours = dict(inspect.signature(getattr(kpe.layers, name)).parameters)
    attention = ours.pop("attention")
    assert attention.kind is attention.KEYWORD_ONLY
    assert attention.default is None
    assert list(ours.items()) == list(stock.items())


def mha(dtype=None, **kwargs):
    return kpe.layers.MultiHeadAttention(3, 4, dtype=dtype, **kwargs)


def gqa(dtype=None, **kwargs):
    return kpe.layers.GroupedQueryAttention(4, 6, 3, dtype=dtype, **kwargs)


LAYERS = {"mha": mha, "gqa": gqa}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_config_names_attention_only_where_it_is_set(make):
    layer = make(policy("mixed_bfloat16"), attention="float8")
    config = json.loads(json.dumps(keras.layers.serialize(layer)))
    again = keras.layers.deserialize(config)
    assert type(again) is type(layer)
    assert again.get_config()["attention"] == "float8"
    assert again.dtype_policy == layer.dtype_policy
    config = make("float32").get_config()
    stock = next(c for c in type(layer).__mro__ if "keras.src" in c.__module__)
    assert type(stock.from_config(config)) is stock


@pytest.mark.parametrize("wrong", ["float16", "", True, 8])
def test_an_unknown_kind_of_attention_is_refused(wrong):
    with pytest.raises(ValueError, match=r"Allowed: 'float8' .* or None"):
        mha(attention=wrong)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_flash_attention_is_refused_beside_attention_in_float8(make):
    with pytest.raises(ValueError, match="flash_attention=True"):
        make(attention="float8", flash_attention=True)
    make(flash_attention=True)
    make(attention="float8", flash_attention=False)


# What is float8, and what says so


def float_weights(layer):
    """All weights but the states."""
    states = {id(v) for v in matrices(layer)}
    return [v for v in layer.weights if id(v) not in states]


def modes(layer):
    """The quantization modes of the projections, by name."""
    projections = [
        x
        for x in layer._flatten_layers(include_self=False)
        if isinstance(x, keras.layers.EinsumDense)
    ]
    return {x.name: x.quantization_mode for x in projections}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_the_projections_are_float8_and_the_layer_where_it_contracts(make):
    for attention in (None, "float8"):
        layer = make("float8/4_from_mixed_bfloat16", attention=attention)
        layer.build((2, 5, 8), (2, 5, 8))
        assert layer.quantization_mode == attention
        assert modes(layer) == {
            "query": "float8",
            "key": "float8",
            "value": "float8",
            "attention_output": "float8",
        }
        sizes = [np.prod(v.shape) for v in float_weights(layer)]
        assert layer.count_params() == sum(sizes)
        paths = [v.path for v in layer.weights]
        assert len(set(paths)) == len(paths) == len(sizes) + 4


def test_rules_take_out_a_projection_or_the_products_by_path():
    rules = [(".*/query", None), ("mha", None)]
    layer = mha(policy(rules=rules), attention="float8", name="mha")
    layer.build((2, 5, 8), (2, 5, 8))
    assert layer.quantization_mode is None
    found = modes(layer)
    assert found.pop("query") is None
    assert set(found.values()) == {"float8"}
    assert layer.float8_policy is None


def test_a_layer_becomes_stock_and_float8_again():
    layer = mha(policy(rules=PRODUCTS_ONLY), attention="float8")
    layer.build(X.shape, X.shape)
    found = []
    for change in (None, class_swap.leave_float8, class_swap.enter_float8):
        for part in (layer, *projections(layer)) if change else ():
            arguments = (policy(),) if change is class_swap.enter_float8 else ()
            change(part, *arguments)
        found.append((type(layer), layer.quantization_mode))
    assert found == [
        (kpe.layers.MultiHeadAttention, "float8"),
        (keras.layers.MultiHeadAttention, None),
        # A stock layer has no `attention` to come back to.
        (kpe.layers.MultiHeadAttention, None),
    ]
    layer.choose_attention("float8")
    assert layer.quantization_mode == "float8"


# The same as the stock layer

X, Y, Z = normal(2, 5, 8), normal(2, 6, 8, seed=1), normal(2, 6, 8, seed=2)
MASK = np.random.default_rng(3).random((2, 5, 6)) < 0.7
PADDING = np.arange(6) < [[4], [6]]
IMAGES = normal(2, 2, 3, 8)

CASES = {
    "self": ({}, (X, X), {}),
    "causal": ({}, (X, X), {"use_causal_mask": True}),
    "cross, masked": ({}, (X, Y, Z), {"attention_mask": MASK}),
    "masked and causal": (
        {"use_bias": False},
        (X, Y),
        {
            "attention_mask": MASK,
            "value_mask": PADDING,
            "use_causal_mask": True,
            "return_attention_scores": True,
        },
    ),
    "dropout": ({"dropout": 0.4, "seed": 7}, (X, Y), {"training": True}),
    "causal dropout": (
        {"dropout": 0.4, "seed": 7},
        (X, X),
        {"training": True, "use_causal_mask": True},
    ),
    "gate": ({"use_gate": True}, (X, Y), {}),
    "window": ({"sliding_window": 2}, (X, X), {"use_causal_mask": True}),
}

ONLY_MHA = {
    # On JAX the fused attention of Keras 3.15 wants one size for both.
    "value_dim": (
        {"value_dim": 2, "output_shape": (3, 2)},
        (X, Y),
        {"return_attention_scores": True},
    ),
    "axes": ({"attention_axes": (2,)}, (IMAGES, IMAGES), {}),
    "two axes": ({}, (IMAGES, IMAGES), {}),
}

PAIRS = [("mha", case) for case in CASES | ONLY_MHA] + [
    ("gqa", case) for case in ("causal", "cross, masked", "causal dropout")
]

FLOAT8_PAIRS = [
    ("mha", "causal dropout"),
    ("mha", "value_dim"),
    ("mha", "axes"),
    ("gqa", "cross, masked"),
]


def built_pair(kind, case, **kwargs):
    """Our layer and a stock one of the same weights, and their arguments."""
    options, args, call_kwargs = (CASES | ONLY_MHA)[case]
    stock_class = {
        "mha": keras.layers.MultiHeadAttention,
        "gqa": keras.layers.GroupQueryAttention,
    }[kind]
    known = inspect.signature(stock_class).parameters
    lacking = set(options) - set(known)
    if lacking:
        pytest.skip(f"Keras {keras.__version__} has no {lacking.pop()}")
    layer = LAYERS[kind](**options, **kwargs)
    layer.build(*(x.shape for x in args))
    config = {**layer.get_config(), "dtype": layer.dtype_policy.name}
    config.pop("attention", None)
    stock = stock_class.from_config(config)
    stock.build(*(x.shape for x in args))
    rng = np.random.default_rng(5)
    for ours, theirs in zip(float_weights(layer), stock.weights, strict=True):
        value = rng.normal(size=tuple(theirs.shape))
        if "seed" in theirs.path:
            value = numpy(theirs)
        ours.assign(value)
        theirs.assign(value)
    return layer, stock, args, call_kwargs


def of_tensors(layer, call_kwargs):
    """The call of a layer, for JAX as a function of its variables too."""
    if keras.backend.backend() != "jax":
        return lambda *tensors: keras.tree.flatten(
            layer(*tensors, **call_kwargs)
        ), ()

    def call(variables, others, *tensors):
        outputs, _ = layer.stateless_call(
            variables, others, *tensors, **call_kwargs
        )
        return keras.tree.flatten(outputs)

    trainable = [v.value for v in layer.trainable_variables]
    return call, (trainable, [v.value for v in layer.non_trainable_variables])


def outputs_of(layer, args, call_kwargs):
    """What a layer returns; on JAX compiled, which is sooner done."""
    call, variables = of_tensors(layer, call_kwargs)
    tensors = map(ops.convert_to_tensor, args)
    return list(map(float32, compiled(call, FASTEST)(*variables, *tensors)))


def program_of(layer, args, call_kwargs):
    """The operations that JAX would compile, as text."""
    import jax

    call, variables = of_tensors(layer, call_kwargs)
    return str(jax.make_jaxpr(call)(*variables, *args))


@pytest.mark.parametrize("kind, case", PAIRS)
def test_a_plain_policy_computes_exactly_as_the_stock_layer(kind, case):
    layer, stock, *call = built_pair(
        kind, case, dtype="mixed_bfloat16", attention="float8"
    )
    assert layer.quantization_mode is None
    if keras.backend.backend() == "jax":
        assert program_of(layer, *call) == program_of(stock, *call)
        return
    for ours, theirs in zip(
        outputs_of(layer, *call), outputs_of(stock, *call), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind, case", FLOAT8_PAIRS)
def test_attention_in_float8_computes_nearly_as_the_stock_layer(kind, case):
    layer, stock, *call = built_pair(
        kind, case, dtype=policy(rules=PRODUCTS_ONLY), attention="float8"
    )
    assert layer.quantization_mode == "float8"
    for ours, theirs in zip(
        outputs_of(layer, *call), outputs_of(stock, *call), strict=True
    ):
        # Rounding to four bits errs by at most 2**-4 of a number, and four
        # operands are rounded. Another mask or dropout would err by 1.
        assert ours.shape == theirs.shape
        assert 1e-3 < relative_rms(ours, theirs) < 4 * 2.0**-4


@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_the_two_products_are_quantized_and_nothing_else(kind):
    layer, stock, (x, y), call_kwargs = built_pair(
        kind,
        "masked and causal",
        dtype=policy(rules=PRODUCTS_ONLY),
        attention="float8",
    )
    outputs, probabilities = outputs_of(layer, (x, y), call_kwargs)
    query, key, value = (
        numpy(projection(ops.convert_to_tensor(t)))
        for projection, t in (
            (stock._query_dense, x),
            (stock._key_dense, y),
            (stock._value_dense, y),
        )
    )
    query = query * np.float32(query.shape[-1] ** -0.5)
    if kind == "gqa":
        key, value = np.repeat(key, 2, axis=2), np.repeat(value, 2, axis=2)
    recipe = CurrentScaling()
    scores = np.einsum(
        "bkhd,bqhd->bhqk",
        quantized(key, "inputs", recipe),
        quantized(query, "kernel", recipe),
    )
    mask = MASK & PADDING[:, None, :] & np.tri(5, 6, dtype=bool)
    exponents = np.exp(scores - scores.max(-1, keepdims=True)) * mask[:, None]
    expected = exponents / exponents.sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4, atol=1e-6)
    heads = np.einsum(
        "bhqk,bkhd->bqhd",
        quantized(probabilities, "inputs", recipe),
        quantized(value, "kernel", recipe),
    )
    heads = ops.convert_to_tensor(heads.astype("float32"))
    expected = numpy(stock._output_dense(heads))
    assert relative_rms(outputs, expected) < FLOAT32_TOLERANCE


def test_a_subclass_with_attention_of_its_own_keeps_it():
    class Mine(kpe.layers.MultiHeadAttention):
        def _compute_attention(self, query, key, value, *args, **kwargs):
            return ops.zeros_like(query), None

    layer = Mine(3, 4, dtype=policy(), attention="float8")
    np.testing.assert_array_equal(numpy(layer(X, X)), 0)


# Files


def attention_model(layers, dtype, **kwargs):
    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 3, dtype=dtype, **kwargs)(
        inputs, inputs, use_causal_mask=True
    )
    x = layers.GroupQueryAttention(3, 4, 2, dtype=dtype, **kwargs)(x, inputs)
    return keras.Model(inputs, x)


@pytest.fixture(scope="module")
def observed():
    rules = [(".*/key", None)]
    dtype = policy("mixed_bfloat16", rules=rules)
    model = attention_model(kpe.layers, dtype, attention="float8")
    return randomized(model)


def through_keras(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def through_weights(model, folder):
    model.save_weights(folder / "model.weights.h5")
    other = twin_of(model)
    other.load_weights(folder / "model.weights.h5")
    return other


def through_json(model, folder):
    other = keras.models.model_from_json(model.to_json())
    other.set_weights(model.get_weights())
    return other


@pytest.mark.parametrize(
    "route", [through_keras, through_weights, through_json]
)
def test_a_model_comes_back_as_it_was(observed, route, tmp_path):
    assert len(matrices(observed)) == 6
    other = route(observed, tmp_path)
    assert_same_policies(observed, other)
    assert_equal(observed.weights, other.weights)
    for layer in other.layers[1:]:
        assert layer.quantization_mode == "float8"


def keys_of(path):
    """The names of all datasets in a file."""
    keys = set()
    with h5py.File(path) as file:
        file.visititems(
            lambda name, x: keys.add(name) if hasattr(x, "shape") else None
        )
    return keys


@pytest.mark.parametrize("ending", [".weights.h5", ".keras"])
def test_stock_files_load_here_and_ours_in_stock_layers(ending, tmp_path):
    ours = randomized(attention_model(kpe.layers, policy()), seed=1)
    stock = randomized(attention_model(keras.layers, "float32"), seed=2)
    for model, name in ((ours, "ours"), (stock, "stock")):
        save = model.save if ending == ".keras" else model.save_weights
        save(tmp_path / (name + ending))
    wanted = [numpy(v) for v in float_weights(ours)]
    other = [numpy(v) for v in stock.weights]
    stock.load_weights(tmp_path / f"ours{ending}")
    ours.load_weights(tmp_path / f"stock{ending}")
    for v, value in zip(stock.weights, wanted, strict=True):
        np.testing.assert_array_equal(numpy(v), value)
    for v, value in zip(float_weights(ours), other, strict=True):
        np.testing.assert_array_equal(numpy(v), value)
    for v in matrices(ours):
        assert np.all(numpy(v)[:, 1:] == 0), "state of a file that has none"
    if ending == ".weights.h5":
        keys = keys_of(tmp_path / "ours.weights.h5")
        extra = keys - keys_of(tmp_path / "stock.weights.h5")
        assert keys - extra == keys_of(tmp_path / "stock.weights.h5")
        assert extra and all("/float8_state/" in key for key in extra)


# Training


def projections(layer):
    return [
        x
        for x in layer._flatten_layers(include_self=False)
        if isinstance(x, kpe.layers.EinsumDense)
    ]


@pytest.mark.parametrize(
    "kind, source, recipe, attention",
    [
        ("mha", "mixed_float16", "current", "float8"),
        ("gqa", "mixed_bfloat16", "4", None),
    ],
)
def test_a_layer_that_is_used_twice_learns(kind, source, recipe, attention):
    layer = LAYERS[kind](policy(source, recipe), attention=attention)
    inputs = keras.Input((5, 8), dtype="float32")
    x = layer(inputs, inputs, use_causal_mask=True)
    x = keras.layers.Dense(8, dtype="float32")(layer(x, inputs))
    model = keras.Model(inputs, x)
    optimizer = keras.optimizers.Adam(0.01)
    if source == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=JIT)
    x = normal(8, 5, 8)
    history = model.fit(x, 0.5 * x, epochs=8, batch_size=8, verbose=0)
    losses = history.history["loss"]
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.9 * losses[0]
    for projection in projections(layer) if recipe == "4" else ():
        for scale, amaxes in state_of(projection).values():
            assert scale > 0 and np.all(amaxes > 0)
            assert np.max(amaxes) < 100  # not the sum over all uses


def test_without_a_word_on_training_a_gradient_observes():
    layer = mha(policy())
    model = keras.Sequential([keras.Input((5, 8)), SelfAttention(layer)])
    variables = model.trainable_variables
    _, _, grads = gradients(model, X, mean_square, None, compiled=True)
    states = {id(v) for v in matrices(layer)}
    observed = [
        numpy(gradient)
        for variable, gradient in zip(variables, grads, strict=True)
        if id(variable) in states
    ]
    assert len(observed) == 4
    for observation in observed:
        np.testing.assert_array_equal(observation[:, 0], UNIT)


class SelfAttention(keras.layers.Layer):
    """Calls a layer with the same tensor for all of its inputs, by name."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def build(self, input_shape):
        if not self.layer.built:
            self.layer.build(input_shape, input_shape)

    def call(self, inputs):
        return self.layer(query=inputs, value=inputs, use_causal_mask=True)


def test_rematerialization_changes_no_gradient():
    found = []
    for scope in (keras.RematScope(mode=None), keras.RematScope(mode="full")):
        with scope:
            layer = mha(policy("float32", "current"), attention="float8")
            layer.build((2, 5, 8), (2, 5, 8))
        stack = [keras.Input((5, 8)), SelfAttention(layer)]
        model = keras.Sequential(stack)
        rng = np.random.default_rng(0)
        for v in layer.weights:
            v.assign(rng.normal(size=tuple(v.shape)))
        _, dx, grads = gradients(model, X, mean_square, compiled=True)
        found.append([numpy(dx), *map(numpy, grads)])
    for plain, rematerialized in zip(*found, strict=True):
        assert np.any(plain != 0)
        # Another program may sum in another order.
        np.testing.assert_allclose(rematerialized, plain, rtol=1e-4, atol=1e-6)
