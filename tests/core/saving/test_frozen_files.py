"""Files of frozen models keep the bytes, and come back whole."""

import json
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import BUILDERS, batch_for
from frozen_models import (
    JIT,
    dequantized,
    float_twin,
    frozen_layers,
    outputs_of,
)
from keras_policy_ext._keras import calls
from keras_policy_ext.files import model_files
from keras_policy_ext.saving import frozen_files
from saving_models import in_shards
from steps import normal, numpy, observe_inputs

LAYERS = keras.layers
DELAYED = "float8/4_from_float32"


def stack():
    layers = [
        LAYERS.Dense(5, activation="tanh", name="a"),
        LAYERS.LayerNormalization(name="norm"),
        LAYERS.Dense(3, name="b"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    return model


def trained(**kwargs):
    """A compiled and frozen model that has trained after that."""
    model = stack()
    if kwargs.get("activations") == "static":
        kpe.convert(model, DELAYED)
        observe_inputs(model, normal(8, 6))
    kpe.freeze(model, **kwargs)
    model.fit(normal(16, 6), normal(16, 3), verbose=0)
    return model


def assert_same(model, other, x):
    """Weights, policies and outputs are equal, bit for bit."""
    assert other is not model
    assert len(other.weights) == len(model.weights)
    for one, two in zip(model.weights, other.weights, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(numpy(one), numpy(two))
    for one, two in zip(
        frozen_layers(model), frozen_layers(other), strict=True
    ):
        assert one.float8_policy == two.float8_policy
    np.testing.assert_array_equal(outputs_of(model, x), outputs_of(other, x))


def floats_in(path):
    """Shapes of the float arrays in a file of weights."""
    shapes = []
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                shapes.append(item.shape)
                if isinstance(item, h5py.Dataset) and item.dtype.kind == "f"
                else None
            )
        )
    return shapes


@pytest.mark.full_except("channel-None")
@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.slow_except("tensor-None", "tensor-dynamic", "tensor-static")
def test_a_model_comes_back_whole(tmp_path, granularity, activations):
    model = trained(granularity=granularity, activations=activations)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = kpe.load_model(path)
    assert_same(model, loaded, normal(4, 6))
    assert int(loaded.optimizer.iterations) == 1
    for one, other in zip(
        model.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(numpy(one), numpy(other))
    model.fit(normal(16, 6), normal(16, 3), verbose=0, shuffle=False)
    loaded.fit(normal(16, 6), normal(16, 3), verbose=0, shuffle=False)
    for one, other in zip(
        model.trainable_variables, loaded.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(numpy(one), numpy(other), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.slow_except("subclassed")
def test_models_of_every_sort_come_back(tmp_path, kind):
    model, _ = BUILDERS[kind]()
    kpe.freeze(model, granularity="tensor")
    path = tmp_path / "model.keras"
    model.save(path)
    assert_same(model, kpe.load_model(path), batch_for(model)[0])


def test_a_folder_comes_back(tmp_path):
    model = trained()
    model.save(tmp_path / "model", zipped=False)
    assert_same(model, kpe.load_model(tmp_path / "model"), normal(4, 6))


@pytest.mark.full
def test_a_model_frozen_in_part_and_converted_in_part(tmp_path):
    model = stack()
    kpe.freeze(model, include="/a")
    kpe.convert(model, DELAYED)
    model.fit(normal(16, 6), normal(16, 3), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert_same(model, loaded, normal(4, 6))
    last = loaded.get_layer("b")
    assert (
        last.float8_policy.recipe == model.get_layer("b").float8_policy.recipe
    )
    assert any("amax" in v.path for v in loaded.variables)


def test_codes_are_in_the_file_and_no_float_kernels(tmp_path):
    model = trained()
    model.save_weights(tmp_path / "model.weights.h5")
    shapes = floats_in(tmp_path / "model.weights.h5")
    assert (6, 5) not in shapes and (5, 3) not in shapes
    with h5py.File(tmp_path / "model.weights.h5") as file:
        group = file["layers/dense/vars"]
        header = json.loads(group["stored"][()].tobytes())
        assert header["version"] == 1
        assert sorted(group) == ["bias", "kernel", "kernel.scale", "stored"]
        codes = numpy(model.layers[0]._kernel.codes)
        np.testing.assert_array_equal(group["kernel"][()], codes)


def test_weights_load_into_a_model_that_is_frozen_alike(tmp_path):
    model, path = trained(), tmp_path / "model.weights.h5"
    model.save_weights(path)
    for load in (kpe.load_weights, lambda m, p: m.load_weights(p)):
        other = stack()
        kpe.freeze(other)
        load(other, path)
        assert_same(model, other, normal(4, 6))


@pytest.mark.full
def test_as_saved_freezes_a_float_model(tmp_path):
    model, path = trained(granularity="block"), tmp_path / "model.weights.h5"
    model.save_weights(path)
    other = stack()
    other.fit(normal(16, 6), normal(16, 3), verbose=0)
    kpe.load_weights(other, path, as_saved=True)
    assert_same(model, other, normal(4, 6))
    other.fit(normal(16, 6), normal(16, 3), verbose=0)


@pytest.mark.parametrize("kind", ["weights.h5", "keras"])
def test_dequantize_loads_what_codes_stand_for(tmp_path, kind):
    source = stack()
    model = stack()
    model.set_weights(source.get_weights())
    kpe.freeze(model, granularity="tensor")
    path = tmp_path / f"model.{kind}"
    model.save(path) if kind == "keras" else model.save_weights(path)
    other = stack()
    kpe.load_weights(other, path, dequantize=True)
    expected = float_twin(stack, source, {"kernel": (0,)}, "tensor")
    for one, two in zip(other.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))
    assert not frozen_layers(other)


@pytest.mark.full
def test_dequantize_of_layers_of_many_kernels(tmp_path):
    def build():
        x = keras.Input((4,), dtype="int32")
        y = LAYERS.Embedding(11, 6)(x)
        y = LAYERS.MultiHeadAttention(2, 3)(y, y)
        y = LAYERS.Bidirectional(LAYERS.LSTM(3, return_sequences=True))(y)
        return keras.Model(x, LAYERS.Conv1D(3, 2)(y))

    model, other = build(), build()
    kpe.freeze(model)
    model.save_weights(tmp_path / "model.weights.h5")
    kpe.load_weights(other, tmp_path / "model.weights.h5", dequantize=True)
    x = np.random.default_rng(0).integers(0, 11, (3, 4))
    np.testing.assert_allclose(
        outputs_of(other, x), outputs_of(model, x), rtol=1e-4, atol=1e-6
    )
    kpe.thaw(model)
    for one, two in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))


def test_a_float_model_refuses_codes_with_the_way_out(tmp_path):
    model, path = trained(), tmp_path / "model.weights.h5"
    model.save_weights(path)
    for converts in (False, True):
        other = stack()
        if converts:
            kpe.convert(other, DELAYED)
        before = [numpy(v) for v in other.weights]
        with pytest.raises(ValueError) as error:
            kpe.load_weights(other, path)
        if converts:
            for word in ("load_model", "as_saved=True", "dequantize=True"):
                assert word in str(error.value)
        for value, variable in zip(before, other.weights, strict=True):
            np.testing.assert_array_equal(value, numpy(variable))


def test_a_frozen_model_refuses_float_weights_with_the_way_out(tmp_path):
    path = tmp_path / "model.weights.h5"
    stack().save_weights(path)
    model = trained()
    before = [numpy(v) for v in model.weights]
    with pytest.raises(ValueError, match=r"keras_policy_ext\.freeze"):
        kpe.load_weights(model, path)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


@pytest.mark.full
def test_a_model_frozen_otherwise_refuses_the_file(tmp_path):
    path = tmp_path / "model.weights.h5"
    trained(granularity="tensor").save_weights(path)
    model = trained()
    before = [numpy(v) for v in model.weights]
    with pytest.raises(ValueError, match="frozen with another recipe"):
        kpe.load_weights(model, path)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


def test_keras_itself_loads_layers_that_the_file_names(tmp_path, monkeypatch):
    """As it does in a program that has not imported this package."""
    monkeypatch.setattr(model_files, "count", lambda path, wanted: 0)
    model = trained()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same(model, loaded, normal(4, 6))


def test_vocabularies_come_back_beside_frozen_layers(tmp_path):
    if keras.backend.backend() != "tensorflow":
        pytest.importorskip("tensorflow", reason="it keeps the tables")
    words = LAYERS.StringLookup(name="words")
    words.adapt(["a", "b", "c", "a", "b", "a"])
    text = keras.Input((4,), dtype="string")
    x = LAYERS.Embedding(5, 6, name="embedding")(words(text))
    if keras.backend.backend() != "tensorflow":
        # Strings are in no graph of other backends: a model that only has it.
        model = Speller(words)
        model.build((None, 4))
    else:
        model = keras.Model(text, LAYERS.Dense(3)(x))
    kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    found = next(x for x in loaded._flatten_layers() if x.name == "words")
    assert found.get_vocabulary() == ["[UNK]", "a", "b", "c"]
    assert len(frozen_layers(loaded)) == len(frozen_layers(model)) > 0


@keras.saving.register_keras_serializable("test_frozen_files")
class Speller(keras.Model):
    """Words and what is learned of them."""

    def __init__(self, words=None, **kwargs):
        super().__init__(**kwargs)
        self.words = words or LAYERS.StringLookup(name="words")
        self.embedding = LAYERS.Embedding(5, 6)

    def build(self, input_shape):
        self.embedding.build(input_shape)

    def call(self, ids):
        return self.embedding(ids)


def test_code_in_a_file_is_not_run(tmp_path):
    layers = [LAYERS.Lambda(lambda x: 2 * x), LAYERS.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="safe_mode=False"):
        kpe.load_model(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras", safe_mode=False)
    x = normal(3, 6)
    np.testing.assert_array_equal(outputs_of(loaded, x), outputs_of(model, x))


def test_without_its_optimizer(tmp_path):
    model = trained()
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras", compile=False)
    assert not loaded.compiled
    assert_same(model, loaded, normal(4, 6))


def test_a_thawed_model_is_saved_as_any_other(tmp_path):
    model = trained()
    kpe.thaw(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = normal(3, 6)
    np.testing.assert_array_equal(outputs_of(loaded, x), outputs_of(model, x))
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert b"float8" not in archive.read("config.json")


@pytest.mark.parametrize("how", ["as it is", "as_saved", "dequantize"])
def test_sharded_weights_come_back(how, tmp_path):
    """Some layers have their entries in several shards."""
    model, other, by_file = trained(), stack(), stack()
    path = in_shards(model, tmp_path)
    if how == "dequantize":
        kpe.load_weights(other, path, dequantize=True)
        model.save_weights(tmp_path / "model.weights.h5")
        kpe.load_weights(
            by_file, tmp_path / "model.weights.h5", dequantize=True
        )
        assert_same(by_file, other, normal(4, 6))
        return
    if how == "as it is":
        kpe.freeze(other)
    kpe.load_weights(other, path, as_saved=how == "as_saved")
    assert_same(model, other, normal(4, 6))


@pytest.mark.parametrize("suffix", ["h5", "json"])
def test_load_model_refuses_a_file_of_weights(suffix, tmp_path):
    model = trained()
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    if suffix == "json":
        path = in_shards(model, tmp_path)
    with pytest.raises(ValueError, match="load_weights"):
        kpe.load_model(path)


@pytest.mark.parametrize("option", ["as_saved", "dequantize"])
def test_an_error_does_not_recommend_what_was_passed(option, tmp_path):
    trained().save_weights(tmp_path / "model.weights.h5")
    other = keras.Sequential([keras.Input((6,)), LAYERS.Dense(9)])
    with pytest.raises(ValueError, match="did not load") as error:
        kpe.load_weights(other, tmp_path / "model.weights.h5", **{option: True})
    _, _, allowed = str(error.value).partition("Allowed: weights of a model")
    assert allowed
    assert option not in allowed


def test_a_kernel_without_a_name_comes_back(tmp_path):
    from saving_models import Gated

    def build():
        return keras.Sequential([keras.Input((6,)), Gated(4, name="gated")])

    model = build()
    kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    x = normal(3, 6)
    np.testing.assert_array_equal(outputs_of(loaded, x), outputs_of(model, x))
    other = build()
    kpe.freeze(other)
    model.save_weights(tmp_path / "model.weights.h5")
    kpe.load_weights(other, tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(outputs_of(other, x), outputs_of(model, x))


class WithTable(kpe.layers.Float8Mixin, LAYERS.Layer):
    """Has a matrix of integers beside its kernel."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 4))
        self.table = self.add_weight(
            name="table",
            shape=(3, 2),
            dtype="int32",
            initializer="ones",
            trainable=False,
        )

    def call(self, x):
        return self.float8_matmul(x, self.kernel)


def test_a_matrix_of_integers_is_no_kernel(tmp_path):
    layer = WithTable(dtype="float8_from_float32")
    model = keras.Sequential([keras.Input((6,)), layer])
    kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(
        tmp_path / "model.keras", custom_objects={"WithTable": WithTable}
    )
    assert loaded.layers[0].table.dtype == "int32"
    x = normal(4, 6)
    np.testing.assert_array_equal(outputs_of(loaded, x), outputs_of(model, x))


def test_lora_comes_back_beside_the_bytes(tmp_path):
    model = stack()
    kernel = numpy(model.layers[0]._kernel)
    kpe.freeze(model, granularity="tensor")
    layer = model.layers[0]
    layer.enable_lora(2, lora_alpha=3)
    layer.lora_kernel_b.assign(normal(2, 5))
    codes = numpy(variable_of(layer))
    x = normal(4, 6)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        outputs_of(loaded, x), outputs_of(model, x), rtol=1e-5
    )
    np.testing.assert_array_equal(numpy(variable_of(loaded.layers[0])), codes)
    assert loaded.layers[0].lora_enabled
    other = stack()
    kpe.load_weights(other, tmp_path / "model.keras", dequantize=True)
    a, b = layer.lora_kernel_a, layer.lora_kernel_b
    merged = dequantized(kernel, (0,), "tensor") + 1.5 * numpy(a) @ numpy(b)
    np.testing.assert_allclose(
        numpy(other.layers[0]._kernel), merged, rtol=1e-5, atol=1e-6
    )


@pytest.mark.full_except("False")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.extension("moments")
def test_lora_inside_of_attention_trains_on_after_loading(quantized, tmp_path):
    """The optimizer has the slots of adapters that only the weights name."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3, 8))
    outputs = keras.layers.MultiHeadAttention(2, 4, name="att")(inputs, inputs)
    model = keras.Model(inputs, outputs)
    kpe.freeze(model)
    for name in ("query", "value"):
        getattr(model.get_layer("att"), f"{name}_dense").enable_lora(2)
    optimizer = keras.optimizers.Adam(0.01)
    if quantized:
        optimizer = kpe.optimizers.quantize_state(optimizer, minimum_size=4)
    model.compile(optimizer, "mse")
    x = normal(4, 3, 8)
    model.train_on_batch(x, x)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    for old, new in zip(
        model.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(numpy(old), numpy(new))
    for _ in range(2):
        losses = model.train_on_batch(x, x), loaded.train_on_batch(x, x)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def variable_of(layer):
    """The stored kernel, without adapters."""
    return layer._kernel


@pytest.mark.parametrize("suffix", ["h5", "json"])
def test_layers_are_frozen_as_soon_as_they_are_built(suffix, tmp_path):
    layers = [keras.layers.Dense(256) for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *layers])
    kpe.freeze(model)
    path = tmp_path / f"a.weights.{suffix}"
    shards = {"max_shard_size": 1e-4} if suffix == "json" else {}
    model.save_weights(path, **shards)

    def make():
        layers = [keras.layers.Dense(256) for _ in range(3)]
        return keras.Sequential([keras.Input((256,)), *layers])

    again = frozen_files.made_frozen(make, path)
    assert all(layer.is_frozen for layer in again.layers)
    again.load_weights(path)
    x = normal(2, 256)
    np.testing.assert_array_equal(numpy(again(x)), numpy(model(x)))


@keras.saving.register_keras_serializable("frozen_files")
class Experts(LAYERS.Layer):
    """Four experts that all compute, and a weight of each for each token."""

    def build(self, shape):
        self.up = self.add_weight(name="up", shape=(4, shape[-1], 16))
        self.down = self.add_weight(name="down", shape=(4, 16, shape[-1]))

    def call(self, x, weights):
        h = keras.ops.silu(keras.ops.einsum("btd,edf->btef", x, self.up))
        h = keras.ops.einsum("btef,efd->bted", h, self.down)
        return keras.ops.sum(h * weights[..., None], -2)


@keras.saving.register_keras_serializable("frozen_files")
class MixedBlock(LAYERS.Layer):
    """Layers of the package beside experts that multiply by operation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mix, self.router = LAYERS.Dense(8), LAYERS.Dense(4)
        self.experts = Experts()

    def build(self, shape):
        for layer in (self.mix, self.router, self.experts):
            layer.build(shape)

    def call(self, x):
        weights = keras.ops.softmax(self.router(x))
        return x + self.experts(self.mix(x), weights)


@pytest.mark.parametrize("tells", [True, False])
def test_experts_by_operation_beside_other_layers_load(
    tells, tmp_path, monkeypatch
):
    """Their products are recorded at the latest when they are frozen."""
    if not tells:
        monkeypatch.setattr(calls, "_BUILT", "_missing")
    inputs = keras.Input((5, 8))
    model = keras.Model(inputs, LAYERS.Dense(3)(MixedBlock()(inputs)))
    report = kpe.freeze(model)
    assert any(e.class_name == "Experts" for e in report.converted)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert_same(model, loaded, normal(2, 5, 8))


@keras.saving.register_keras_serializable("frozen_files")
class Assigning(LAYERS.Dense):
    """A layer that assigns its kernel when it is built."""

    def build(self, shape):
        super().build(shape)
        self.kernel.assign(normal(*self.kernel.shape))


@keras.saving.register_keras_serializable("frozen_files")
class WritingInPlace(LAYERS.Dense):
    """A layer that on PyTorch writes into the tensor of its kernel."""

    def build(self, shape):
        super().build(shape)
        if keras.backend.backend() == "torch":
            self.kernel.value.data.normal_()


@keras.saving.register_keras_serializable("frozen_files")
class Block(LAYERS.Layer):
    """A layer that builds another one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = LAYERS.Dense(8, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


@keras.saving.register_keras_serializable("frozen_files")
class AssigningInner(Block):
    """A layer that assigns the kernel of a layer in it."""

    def build(self, shape):
        super().build(shape)
        self.inner.kernel.assign(np.eye(8))


@keras.saving.register_keras_serializable("frozen_files")
class InvertingInner(Block):
    """A layer that inverts the first values of a kernel, which zeros lack."""

    def build(self, shape):
        super().build(shape)
        self.inverse = np.linalg.inv(numpy(self.inner.kernel))


def quantized(mode):
    """Return a function that makes a layer which Keras quantized."""

    def make():
        layer = LAYERS.Dense(8)
        layer.build((None, 8))
        layer.quantize(mode)
        return layer

    return make


@pytest.mark.parametrize("cls", [LAYERS.Embedding, LAYERS.ReversibleEmbedding])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_an_embedding_that_keras_quantized_stays_and_loads(mode, cls, tmp_path):
    ids = keras.Input((5,), dtype="int32")
    embedding = cls(8, 8)
    model = keras.Model(ids, LAYERS.Dense(3)(embedding(ids)))
    embedding.quantize(mode)
    report = kpe.freeze(model)
    assert f"quantized it ({mode})" in report.skipped[0].reason
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert_same(model, loaded, np.arange(10).reshape(2, 5) % 8)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(quantized("int8"), id="int8"),
        pytest.param(quantized("int4"), id="int4"),
        pytest.param(lambda: Assigning(8), id="assigns"),
        pytest.param(lambda: WritingInPlace(8), id="writes_in_place"),
        pytest.param(AssigningInner, id="assigns_inner"),
        pytest.param(InvertingInner, id="inverts_inner"),
    ],
)
def test_a_layer_whose_kernel_is_used_while_it_is_built_loads(make, tmp_path):
    """Its first values are other ones than those of the file."""
    layers = [LAYERS.Dense(8), make(), LAYERS.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    kpe.freeze(model)
    assert len(frozen_layers(model)) >= 2
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert len(frozen_layers(loaded)) == len(frozen_layers(model))
    assert_same(model, loaded, normal(4, 8))


@keras.saving.register_keras_serializable("frozen_files")
class Indexed(kpe.layers.Float8Mixin, LAYERS.Layer):
    """Two kernels, and integer matrices that do not train."""

    def build(self, shape):
        size = shape[-1]
        for name in ("first", "kernel", "last", "second"):
            is_kernel = name in ("kernel", "second")
            weight = self.add_weight(
                name=name,
                shape=(size, size),
                dtype=None if is_kernel else "int32",
                initializer="glorot_uniform" if is_kernel else "ones",
                trainable=is_kernel,
            )
            setattr(self, name, weight)

    def call(self, x):
        x = self.float8_matmul(x, self.kernel)
        return self.float8_matmul(x, self.second)


@pytest.mark.parametrize("how", ["kpe", "keras", "as_saved"])
def test_a_loaded_layer_has_its_weights_in_the_order_in_memory(how, tmp_path):
    path = tmp_path / "model.keras"

    def make():
        return keras.Sequential([keras.Input((4,)), Indexed(), Indexed()])

    model = make()
    kpe.freeze(model)
    model.save(path)
    if how == "as_saved":
        loaded = make()
        kpe.load_weights(loaded, path, as_saved=True)
    else:
        load = kpe.load_model if how == "kpe" else keras.saving.load_model
        loaded = load(path)
    names = [v.name for v in model.weights]
    assert [v.name for v in loaded.weights] == names
    loaded.set_weights(model.get_weights())
    assert_same(model, loaded, normal(2, 4))
    kpe.thaw(model)
    kpe.thaw(loaded)
    assert_same(model, loaded, normal(2, 4))
