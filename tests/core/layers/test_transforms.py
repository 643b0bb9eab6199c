"""Layers in float8 in functions that are mapped over examples, or derived."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import needs_whole_graphs
from keras_policy_ext import recipes
from keras_policy_ext.layers.stored_weights import is_state
from steps import normal, numpy, observe_inputs

BACKEND = keras.backend.backend()

if BACKEND == "torch":
    import torch
    from torch.func import grad, jacfwd, jacrev, vjp, vmap

    from keras_policy_ext.backends.torch.gradients import are_transforms_active

if BACKEND == "tensorflow":
    import tensorflow as tf

if BACKEND == "jax":
    import jax

torch_only = pytest.mark.skipif(
    BACKEND != "torch", reason=f"torch.func; the backend is {BACKEND}"
)

RECIPES = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.CurrentScaling(),
    "block": recipes.BlockScaling(),
    "high precision": recipes.RowwiseScaling(
        forward="high_precision", kernel_grad="high_precision"
    ),
}

LAYERS = {
    "dense": (kpe.layers.Dense, (4,), {}, (8,)),
    "relu": (kpe.layers.Dense, (4,), {"activation": "relu"}, (8,)),
    "einsum": (
        kpe.layers.EinsumDense,
        ("abc,cd->abd", (None, 4)),
        {"bias_axes": "d"},
        (3, 8),
    ),
    "convolution": (kpe.layers.Conv1D, (4, 2), {}, (3, 8)),
    "recurrent": (kpe.layers.GRU, (4,), {"unroll": True}, (3, 8)),
}


def made(kind, recipe="delayed"):
    """A layer that was built, and three examples of other magnitudes."""
    layer_class, arguments, options, shape = LAYERS[kind]
    policy = kpe.Float8DTypePolicy("float32", recipe=RECIPES[recipe])
    layer = layer_class(*arguments, **options, dtype=policy)
    layer.build((None, *shape))
    magnitudes = np.float32([1, 100, 0.01]).reshape(3, *[1 for _ in shape])
    return layer, ops.convert_to_tensor(normal(3, *shape) * magnitudes)


def of_one(layer):
    """The layer as a function of one example."""
    return lambda x: layer(x[None])[0]


def one_by_one(function, xs):
    return ops.stack([function(x) for x in xs])


def same(found, expected):
    np.testing.assert_allclose(
        numpy(found), numpy(expected), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow_except(
    "dense-high precision", "convolution-block", "einsum-current"
)
@pytest.mark.full_except("relu-delayed")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_mapped_layer_is_called_on_one_example_after_another(kind, recipe):
    layer, xs = made(kind, recipe)
    found = ops.vectorized_map(of_one(layer), xs)
    same(found, one_by_one(of_one(layer), xs))
    if (kind, recipe) == ("dense", "current"):
        together = numpy(layer(xs))
        assert np.abs(numpy(found) - together).max() > 1e-3


# The transforms of PyTorch, against its gradients


def sum_of(layer):
    return lambda x: (of_one(layer)(x) ** 2).sum()


def slope(function, again=False):
    """The gradient of a function of a tensor, by autograd."""

    def call(x):
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(x), x, create_graph=again)
        return found if not again else (found, x)

    return call


def slope_of_slope(function):
    def call(x):
        found, x = slope(function, again=True)(x)
        return torch.autograd.grad((found**2).sum(), x)[0]

    return call


def square_of_slope(function):
    return lambda x: (grad(function)(x) ** 2).sum()


DERIVATIVES = (
    {
        "grad": (grad, slope),
        "vjp": (lambda f: lambda x: vjp(f, x)[1](torch.tensor(1.0))[0], slope),
        "jacrev": (jacrev, slope),
        "grad of grad": (lambda f: grad(square_of_slope(f)), slope_of_slope),
    }
    if BACKEND == "torch"
    else {}
)


@pytest.mark.full
@torch_only
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_derivatives_are_those_of_autograd(kind, recipe, name):
    layer, xs = made(kind, recipe)
    transformed, expected = DERIVATIVES[name]
    function = sum_of(layer)
    same(transformed(function)(xs[0]), expected(function)(xs[0]))
    mapped = vmap(transformed(function))(xs)
    same(mapped, one_by_one(expected(function), xs))


@torch_only
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_jacobian_has_a_row_for_each_output(recipe):
    layer, xs = made("dense", recipe)
    found = jacrev(layer)(xs)
    expected = torch.autograd.functional.jacobian(layer, xs)
    assert tuple(found.shape) == (3, 4, 3, 8)
    same(found, expected)

    xs.requires_grad_()
    outputs = layer(xs)

    def row(outputs_grad):
        return torch.autograd.grad(
            outputs, xs, outputs_grad, retain_graph=True
        )[0]

    rows = vmap(row)(torch.eye(12).view(12, 3, 4))
    same(rows.view(3, 4, 3, 8), expected)


@torch_only
@pytest.mark.parametrize("axis", [0, 1])
def test_examples_may_lie_along_any_axis_and_in_two(axis):
    layer, xs = made("dense")
    found = vmap(of_one(layer), in_dims=axis)(xs.movedim(0, axis))
    expected = one_by_one(of_one(layer), xs)
    same(found, expected)
    same(vmap(vmap(of_one(layer)))(xs[:, None])[:, 0], expected)


@torch_only
@pytest.mark.parametrize("kind", ["dense", "recurrent"])
def test_weights_are_trained_through_transforms(kind):
    layer, xs = made(kind)
    function = sum_of(layer)
    losses = [
        vmap(function)(xs).sum() + square_of_slope(function)(xs[0]),
        sum(function(x) for x in xs)
        + (slope(function, again=True)(xs[0])[0] ** 2).sum(),
    ]
    weights = [v.value for v in layer.trainable_weights if not is_state(v)]
    pairs = zip(*(torch.autograd.grad(x, weights) for x in losses), strict=True)
    for found, expected in pairs:
        same(found, expected)
        assert numpy(expected).any()


@torch_only
def test_products_of_activations_are_transformed():
    layer = kpe.layers.MultiHeadAttention(
        2, 8, attention="float8", dtype="float8/current_from_float32"
    )
    layer.build((None, 5, 16), (None, 5, 16))
    xs = ops.convert_to_tensor(normal(3, 5, 16))

    def of_pair(x):
        return (layer(x[None], x[None]) ** 2).sum()

    same(vmap(grad(of_pair))(xs), one_by_one(slope(of_pair), xs))


@torch_only
@pytest.mark.parametrize("scales", ["static", "dynamic", None])
def test_a_frozen_model_is_transformed(scales):
    inputs = keras.Input((16,))
    outputs = keras.layers.Dense(16, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4)(outputs))
    kpe.convert(model, "delayed")
    xs = ops.convert_to_tensor(normal(3, 16))
    if scales == "static":
        observe_inputs(model, numpy(xs))
    kpe.freeze(model, activations=scales)
    same(vmap(of_one(model))(xs), one_by_one(of_one(model), xs))
    for name in ("grad", "grad of grad"):
        transformed, expected = DERIVATIVES[name]
        function = sum_of(model)
        found = vmap(transformed(function))(xs)
        same(found, one_by_one(expected(function), xs))


@torch_only
@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode_is_refused(frozen):
    from torch.autograd import forward_ad

    layer, xs = made("dense")
    if frozen:
        kpe.freeze(layer)
    with pytest.raises(NotImplementedError, match="jacrev"):
        jacfwd(layer)(xs)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(xs.requires_grad_(), xs)
        with pytest.raises(NotImplementedError, match="jacrev"):
            layer(dual)


@torch_only
def test_a_third_derivative_is_refused():
    layer, xs = made("dense")
    thrice = grad(square_of_slope(square_of_slope(sum_of(layer))))
    with pytest.raises(NotImplementedError, match="third derivative"):
        thrice(xs[0])


@pytest.mark.full
@torch_only
@needs_whole_graphs
def test_a_transform_is_refused_by_the_compiler():
    layer, xs = made("dense")

    def mapped(x):
        return vmap(of_one(layer))(x)

    whole = torch.compile(mapped, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        whole(xs)
    parts = torch.compile(torch.compiler.disable(mapped), backend="eager")
    same(parts(xs), mapped(xs))


@torch_only
def test_pytorch_tells_of_its_transforms():
    told = []

    def function(x):
        told.append(are_transforms_active())
        return x.sum()

    for call in (function, grad(function), vmap(function)):
        call(torch.ones(3))
    assert told == [False, True, True]


# The loops that TensorFlow vectorizes lose gradients that are custom


tensorflow_only = pytest.mark.skipif(
    BACKEND != "tensorflow", reason=f"of its tapes; the backend is {BACKEND}"
)


def mapped_slope(layer, xs):
    """The gradient through a loop, which a tape records, by the inputs."""
    with tf.GradientTape() as tape:
        tape.watch(xs)
        outputs = ops.vectorized_map(of_one(layer), xs)
    return tape.gradient(outputs, xs)


@tensorflow_only
@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["delayed", "current", "frozen"])
def test_gradients_of_vectorized_loops_are_refused_and_not_wrong(kind, way):
    layer, xs = made("dense", kind if kind in RECIPES else "current")
    if kind == "frozen":
        kpe.freeze(layer)
    function = mapped_slope if way == "eager" else tf.function(mapped_slope)
    with pytest.raises(NotImplementedError, match=r"tf\.map_fn"):
        function(layer, xs)


@pytest.mark.full_except("delayed")
@tensorflow_only
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_loops_of_tensorflow_are_those_of_calls(recipe):
    layer, xs = made("dense", recipe)
    found, expected = [], []
    for results, function in (
        (found, lambda x: tf.map_fn(of_one(layer), x)),
        (expected, lambda x: one_by_one(of_one(layer), tf.unstack(x, 3))),
    ):
        with tf.GradientTape() as tape:
            tape.watch(xs)
            outputs = function(xs) ** 2
        results += tape.gradient(outputs, [xs, layer.kernel.value])
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@pytest.mark.full_except("current")
@tensorflow_only
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_jacobian_of_a_tape_has_a_row_for_each_output(recipe):
    layer, xs = made("dense", recipe)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(xs)
        outputs = layer(xs)
    rows = [
        tape.gradient(outputs, xs, output_gradients=tf.reshape(one, (3, 4)))
        for one in tf.unstack(tf.eye(12))
    ]
    found = tape.jacobian(outputs, xs)
    same(found, tf.reshape(tf.stack(rows), (3, 4, 3, 8)))


@tensorflow_only
def test_a_derivative_of_a_jacobian_is_refused_and_not_wrong():
    layer, xs = made("dense")
    with pytest.raises(LookupError, match="differentiated again"):
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(xs)
                outputs = layer(xs) ** 2
            jacobian = tape.jacobian(outputs, xs)
        outer.gradient(jacobian, layer.kernel.value)


@tensorflow_only
def test_tensorflow_still_loses_custom_gradients_in_vectorized_loops():
    """Where it does not, or calls the loop otherwise, see `VECTORIZED`."""
    scopes = []

    @tf.custom_gradient
    def fivefold(x):
        scopes.append(tf.get_current_name_scope())
        return 2 * x, lambda outputs_grad: 5 * outputs_grad

    x = tf.ones(3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        outputs = fivefold(x)
        mapped = tf.vectorized_map(fivefold, x)
    assert np.all(tape.gradient(outputs, x) == 5)
    assert np.all(tape.gradient(mapped, x) == 2)
    assert ["loop_body" in scope for scope in scopes] == [False, True]


@pytest.mark.full_except("relu-high precision")
@pytest.mark.skipif(BACKEND != "jax", reason=f"jax.vmap; not {BACKEND}")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["relu", "einsum", "convolution"])
@pytest.mark.slow_except(
    "einsum-high precision",
    "einsum-current",
    "convolution-block",
    "convolution-current",
    "convolution-high precision",
    "convolution-delayed",
)
def test_gradients_that_jax_maps_are_those_of_calls(kind, recipe):
    layer, xs = made(kind, recipe)
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        outputs, _ = layer.stateless_call(weights, [], x[None])
        return ops.sum(outputs**2)

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))
    mapped = jax.vmap(slopes, in_axes=(None, 0))(weights, xs)
    expected = [slopes(weights, x) for x in xs]
    for found, *others in zip(
        jax.tree.leaves(mapped), *map(jax.tree.leaves, expected), strict=True
    ):
        same(found, ops.stack(others))
