"""What others read of a frozen layer is in floats."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.layers.stored_weights import StoredVariable

LAYERS = keras.layers


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
        return keras.ops.multiply(getattr(self.other, self.weight), 1)


def public(made):
    return Reads(made)(np.zeros(1, "float32"))


NAMES = ["dense", "einsum", "conv", "embedding", "reversible"]


@pytest.mark.full_except("dense-tensor", "einsum-channel", "einsum-tensor")
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


@pytest.mark.full_except("GRU-tensor", "LSTM-tensor", "SimpleRNN-block")
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.extension("recurrent")
def test_a_frozen_cell_shows_numbers_of_both_kernels(name, granularity):
    made = getattr(keras.layers, name)(3)
    made.build((None, 4, 6))
    assert made.cell.kernel.path.endswith("/kernel")
    kpe.freeze(made, granularity=granularity)
    for kernel in ("kernel", "recurrent_kernel"):
        variable = getattr(made.cell, kernel)
        reads = Reads(made.cell)
        reads.weight = kernel
        got = keras.ops.convert_to_numpy(reads(np.zeros(1, "float32")))
        np.testing.assert_array_equal(got, variable.stored.dequantized())
    kpe.thaw(made)
    assert type(made.cell) is getattr(keras.layers, f"{name}Cell")
    assert made.cell.kernel is made.weights[0]


WAYS = {
    "numpy": np.asarray,
    "ops": lambda v: ops.convert_to_numpy(ops.multiply(v, 1.0)),
    "an operator": lambda v: ops.convert_to_numpy(v * 1.0),
    "an index": lambda v: ops.convert_to_numpy(v[:]),
    "a cast": lambda v: ops.convert_to_numpy(ops.cast(v, "float32")),
    "transposed": lambda v: ops.convert_to_numpy(ops.transpose(v)).T,
    "its value": lambda v: ops.convert_to_numpy(v.value),
    "numpy()": lambda v: np.asarray(v.numpy()),
    "convert_to_numpy": ops.convert_to_numpy,
}


@pytest.mark.parametrize("way", WAYS)
def test_outside_of_a_call_it_is_read_in_numbers(way):
    made, expected = frozen("dense")
    listed = made.weights[[v.name for v in made.weights].index("kernel")]
    for read in (made.kernel, made._kernel, listed):
        np.testing.assert_array_equal(WAYS[way](read), expected)
        assert read.dtype == "float32" and tuple(read.shape) == (6, 3)
        assert read.path == f"{made.name}/kernel" and not read.trainable


@pytest.mark.parametrize("name", [*NAMES, "untied", "separable", "attention"])
def test_every_weight_that_is_stored_is_read_in_numbers(name):
    made = {
        "untied": lambda: LAYERS.ReversibleEmbedding(7, 5, tie_weights=False),
        "separable": lambda: LAYERS.SeparableConv1D(3, 2),
        "attention": lambda: LAYERS.MultiHeadAttention(2, 3),
    }.get(name, lambda: layer(name))()
    shape = (
        (None, 4)
        if "em" in name or name in ("reversible", "untied")
        else (None, 4, 6)
    )
    shapes = (shape, shape) if name == "attention" else (shape,)
    made.build(*shapes)
    wide = {v.path: ops.convert_to_numpy(v) for v in made.weights}
    assert kpe.freeze(made).stored
    for variable in made.weights:
        if variable.path not in wide:
            continue  # A scale.
        assert variable.dtype == "float32"
        error = np.asarray(variable) - wide[variable.path]
        size = np.linalg.norm(wide[variable.path])
        assert np.linalg.norm(error) <= 2.0**-4 * size
    for read, value in zip(made.weights, made.get_weights(), strict=True):
        np.testing.assert_array_equal(np.asarray(read), value)


def test_one_byte_is_what_is_held():
    made, _ = frozen("dense")
    held = [v for v in made.variables if tuple(v.shape) == (6, 3)]
    assert [v.dtype for v in held] == ["uint8"]
    if keras.backend.backend() == "torch":
        sizes = {p.dtype.itemsize for p in made.parameters() if p.ndim == 2}
        assert sizes == {1, 4}  # Codes, and their scales.


class LanguageModel(keras.Model):
    """Multiplies with its embeddings in a method, as generation loops do."""

    def __init__(self):
        super().__init__()
        self.embedding = LAYERS.Embedding(16, 4)

    def project(self, ids):
        x = self.embedding(ids)
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))

    def call(self, ids):
        return self.project(ids)


def compiled(function):
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(function)
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    import torch

    return torch.compile(function, backend="eager", fullgraph=True)


@pytest.mark.parametrize("way", [lambda f: f, compiled], ids=["eager", "graph"])
def test_a_method_outside_of_a_call_computes_what_the_call_does(way):
    on_torch = keras.backend.backend() == "torch"
    if way is compiled and on_torch and keras.__version__.startswith("3.12."):
        pytest.skip("torch.compile cannot trace the layer calls of Keras 3.12")
    model, ids = LanguageModel(), np.arange(8, dtype="int32")[None]
    model(ids)
    kpe.freeze(model)
    expected = ops.convert_to_numpy(model(ids))
    got = ops.convert_to_numpy(way(model.project)(ops.convert_to_tensor(ids)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class Tied(LAYERS.Layer):
    """Takes the weight of another layer, and its dtype, in `build`."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def build(self, shape):
        self.table = self.other.embeddings
        dtype = self.other.embeddings.dtype
        self.gain = self.add_weight(shape=(4,), dtype=dtype, initializer="ones")

    def call(self, x):
        return ops.matmul(x * self.gain, ops.transpose(self.table))


def test_another_layer_that_keeps_the_weight_computes_and_trains():
    embedding = LAYERS.Embedding(11, 4)
    embedding.build()
    kpe.freeze(embedding)
    tied = Tied(embedding)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), embedding, tied]
    )
    ids = np.arange(6, dtype="int32").reshape(2, 3)
    table = np.asarray(embedding.embeddings)
    np.testing.assert_allclose(
        model.predict(ids, verbose=0),
        table[ids] @ table.T,
        rtol=1e-5,
        atol=1e-6,
    )
    model.compile("sgd", "mse")
    model.fit(ids, np.zeros((2, 3, 11)), verbose=0)
    assert tied.gain.dtype == "float32"
    np.testing.assert_array_equal(np.asarray(embedding.embeddings), table)


@pytest.mark.parametrize("way", ["assign", "assign_add", "assign_sub"])
def test_an_assignment_names_thaw_and_sets_nothing(way):
    made, expected = frozen("dense")
    with pytest.raises(ValueError, match=r"is frozen; .*thaw\(model\)"):
        getattr(made.kernel, way)(np.ones((6, 3), "float32"))
    np.testing.assert_array_equal(np.asarray(made.kernel), expected)
    made.kernel.assign(expected)  # What it has already.


def test_a_cell_that_is_not_built_has_no_kernel():
    policy = kpe.Float8DTypePolicy("float32")
    assert not hasattr(kpe.layers.GRU(3, dtype=policy).cell, "kernel")


def test_a_layer_that_is_not_built_has_no_kernel():
    made = kpe.layers.Dense(3, dtype=kpe.Float8DTypePolicy("float32"))
    assert not hasattr(made, "kernel")
