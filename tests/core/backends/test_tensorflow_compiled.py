"""Large tensors in TensorFlow's graphs: casts and codes compiled by XLA."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of TensorFlow's kernels", allow_module_level=True)

import numpy as np
import tensorflow as tf

import keras_policy_ext as kpe
from keras_policy_ext import contractions, recipes
from keras_policy_ext.backends.tensorflow import backend, engine, gradients
from keras_policy_ext.numerics import casting
from ways import array

LARGE, SMALL = (256, 300), (5, 7)
SCALE = tf.constant(0.013)


def numbers(shape, dtype="float32"):
    x = np.random.default_rng(0).normal(size=shape)
    x.flat[:6] = 0.0, -0.0, np.nan, np.inf, -np.inf, 1e-5
    return tf.cast(tf.constant(x, tf.float32), dtype)


def same_bits(one, other):
    one, other = array(one), array(other)
    np.testing.assert_array_equal(one, other)
    if one.dtype == "float32":
        np.testing.assert_array_equal(np.signbit(one), np.signbit(other))


@pytest.mark.full_except(
    "False-shape1-bfloat16-float8_e5m2",
    "True-shape0-bfloat16-float8_e5m2",
    "True-shape1-bfloat16-float8_e5m2",
)
@pytest.mark.parametrize("format_name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("unknown", [False, True])
def test_bits_are_those_of_what_is_not_compiled(
    format_name, dtype, shape, unknown
):
    x = numbers(shape, dtype)
    spec = tf.TensorSpec([None, shape[1]] if unknown else shape, dtype)

    @tf.function(input_signature=[spec])
    def compiled(x):
        cast = engine.cast_in_training(x, SCALE, format_name)
        kept = engine.encode(cast, format_name)
        return cast, kept, engine.decode(kept, format_name)

    cast, kept, again = compiled(x)
    expected = casting.quantize_float32(x, SCALE, format_name)
    same_bits(cast, expected)
    same_bits(kept, casting.encode(expected, format_name))
    same_bits(again, expected)


def test_small_tensors_are_not_compiled():
    """XLA compiles for each size, which takes longer than they do."""
    assert backend.compiles_parts(numbers(LARGE))
    assert not backend.compiles_parts(numbers(SMALL))


@pytest.mark.parametrize(
    ("training", "dtype"),
    [(True, "uint8"), (None, "float32"), (False, "float32")],
)
def test_codes_are_kept_of_large_operands_in_training(training, dtype):
    x, w = numbers((256, 300)), numbers((300, 256))
    recipe = recipes.CurrentScaling()
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"), recipe, "float32", "float32", training
    )
    shapes = (tuple(x.shape), tuple(w.shape))
    forward = backend._shared_forward(plan, shapes, False)
    _, inputs, _, kernel, *_ = forward(x, w, ())
    assert inputs.dtype == kernel.dtype == dtype


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_model_trains_to_the_same_weights(monkeypatch, recipe):
    def trained():
        keras.utils.set_random_seed(0)
        policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
        layers = [
            kpe.layers.Dense(300, "relu", dtype=policy),
            kpe.layers.Dense(4, dtype=policy),
        ]
        model = keras.Sequential([keras.Input((260,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=(256, 260))
        model.fit(x, x[:, :4], epochs=2, batch_size=256, verbose=0)
        return model.get_weights()

    compiled = trained()
    backend._shared_forward.cache_clear()
    gradients._shared_backward.cache_clear()
    monkeypatch.setattr(backend, "_LARGE", 1 << 60)
    for one, other in zip(compiled, trained(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_a_model_of_large_layers_is_exported_without_compiled_parts(tmp_path):
    policy = kpe.Float8DTypePolicy("float32", recipe="current")
    model = keras.Sequential(
        [keras.Input((300,)), kpe.layers.Dense(300, dtype=policy)]
    )
    model.export(str(tmp_path / "model"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "model"))
    x = numbers((256, 300))[3:]
    found = served.serve(x)
    np.testing.assert_array_equal(array(found), array(model(x)))
    graph = served.serve.get_concrete_function(
        tf.TensorSpec((256, 300))
    ).graph.as_graph_def()
    compiled = [
        function.signature.name
        for function in graph.library.function
        if function.attr["_XlaMustCompile"].b
    ]
    assert compiled == []
