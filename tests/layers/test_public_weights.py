"""What others read of a frozen layer is in floats."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.layers.stored_variable import StoredVariable


def layer(name):
    layers = keras.layers
    return {
        "dense": lambda: layers.Dense(3),
        "einsum": lambda: layers.EinsumDense("abc,cd->abd", (None, 3)),
        "conv": lambda: layers.Conv1D(3, 2),
        "embedding": lambda: layers.Embedding(7, 5),
        "reversible": lambda: layers.ReversibleEmbedding(7, 5),
    }[name]()


def frozen(name, dtype=None, **options):
    keras.utils.set_random_seed(0)
    with kpe.policy_scope(dtype or "float32"):
        made = layer(name)
    made.build((None, 4) if "emb" in name or "rev" in name else (None, 4, 6))
    kpe.freeze(made, **options)
    (kernel,) = (v for v in made.weights if isinstance(v, StoredVariable))
    return made, kernel.stored.dequantized()


class Reads(keras.layers.Layer):
    """Uses the weight of another layer, as KerasHub's Gemma4 does."""

    def __init__(self, other):
        super().__init__(dtype=other.dtype_policy)
        self.other = other
        self.weight = "kernel" if hasattr(other, "kernel") else "embeddings"

    def call(self, x):
        return keras.ops.convert_to_tensor(getattr(self.other, self.weight))


def public(made):
    return Reads(made)(np.zeros(1, "float32"))


NAMES = ["dense", "einsum", "conv", "embedding", "reversible"]


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_layer_shows_numbers_and_not_codes(name, granularity):
    made, expected = frozen(name, granularity=granularity)
    got = keras.ops.convert_to_numpy(public(made))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["dense", "embedding"])
def test_in_the_compute_dtype(name):
    made, expected = frozen(name, "mixed_bfloat16")
    value = public(made)
    assert keras.backend.standardize_dtype(value.dtype) == "bfloat16"
    got = keras.ops.convert_to_numpy(keras.ops.cast(value, "float32"))
    np.testing.assert_allclose(got, expected, rtol=2**-8)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_are_merged_in(name):
    made, expected = frozen(name)
    made.enable_lora(2, lora_alpha=4)
    rng = np.random.default_rng(0)
    a, b = (v for v in made.trainable_weights if "lora" in v.path)
    for factor in (a, b):
        factor.assign(rng.normal(size=factor.shape))
    a, b = map(keras.ops.convert_to_numpy, (a, b))
    got = keras.ops.convert_to_numpy(public(made))
    np.testing.assert_allclose(
        got, expected + 2 * (a @ b), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "SimpleRNN"])
def test_a_frozen_cell_shows_numbers_of_both_kernels(name, granularity):
    made = getattr(keras.layers, name)(3)
    made.build((None, 4, 6))
    assert made.cell.kernel.path.endswith("/kernel")
    kpe.freeze(made, granularity=granularity)
    for kernel in ("kernel", "recurrent_kernel"):
        variable = getattr(made.cell, kernel)
        assert isinstance(variable, StoredVariable)
        reads = Reads(made.cell)
        reads.weight = kernel
        got = keras.ops.convert_to_numpy(reads(np.zeros(1, "float32")))
        np.testing.assert_array_equal(got, variable.stored.dequantized())
    kpe.thaw(made)
    assert type(made.cell) is getattr(keras.layers, f"{name}Cell")
    assert made.cell.kernel is made.weights[0]


def test_a_cell_that_is_not_built_has_no_kernel():
    policy = kpe.Float8DTypePolicy("float32")
    assert not hasattr(kpe.layers.GRU(3, dtype=policy).cell, "kernel")


def test_a_layer_that_is_not_built_has_no_kernel():
    made = kpe.layers.Dense(3, dtype=kpe.Float8DTypePolicy("float32"))
    assert not hasattr(made, "kernel")
