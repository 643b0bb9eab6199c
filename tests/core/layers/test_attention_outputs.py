"""What attention computes, beside the stock layer."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from attention_layers import (
    FLOAT32_TOLERANCE,
    LAYERS,
    PRODUCTS_ONLY,
    X,
    Y,
    Z,
    float32,
    float_weights,
    policy,
)
from keras_policy_ext.recipes import CurrentScaling
from products import quantized
from steps import normal, numpy, relative_rms
from ways import FASTEST, compiled

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


@pytest.mark.full_except("mha-axes", "mha-cross, masked", "mha-gate")
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


@pytest.mark.full_except("mha-causal dropout")
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
