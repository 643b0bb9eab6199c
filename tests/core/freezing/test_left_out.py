"""Layers that are left in floats, and named: code of theirs wants numbers."""

import re

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from frozen_models import outputs_of
from steps import normal, observe_inputs

LAYERS = keras.layers
SERIALIZE = keras.saving.register_keras_serializable("left_out")


@SERIALIZE
class SavesItself(LAYERS.Dense):
    def save_own_variables(self, store):
        store["k"] = ops.convert_to_numpy(self.kernel)
        store["b"] = ops.convert_to_numpy(self.bias)

    def load_own_variables(self, store):
        self.kernel.assign(np.array(store["k"]))
        self.bias.assign(np.array(store["b"]))


@SERIALIZE
class LoadsItself(LAYERS.Dense):
    def load_own_variables(self, store):
        kernel = np.array(store["0"])
        self.kernel.assign(kernel[:, : self.units])
        self.bias.assign(np.array(store["1"]))


@SERIALIZE
class OwnMixin(kpe.layers.Float8Mixin, LAYERS.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 5))

    def call(self, x):
        return self.float8_matmul(x, self.kernel)

    def save_own_variables(self, store):
        store["k"] = ops.convert_to_numpy(self.kernel)

    def load_own_variables(self, store):
        self.kernel.assign(np.array(store["k"]))


@SERIALIZE
class SavesItsChild(LAYERS.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = LAYERS.Dense(5)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

    def save_own_variables(self, store):
        store["k"] = ops.convert_to_numpy(self.inner.kernel)

    def load_own_variables(self, store):
        self.inner.kernel.assign(np.array(store["k"]))


OWN_FILES = {
    "both": lambda: SavesItself(5),
    "loads": lambda: LoadsItself(5),
    "mixin": OwnMixin,
    "parent": SavesItsChild,
}


def model_of(layer):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), layer, LAYERS.Dense(3)])


@pytest.mark.full_except("freeze-both", "freeze-loads", "freeze-mixin")
@pytest.mark.parametrize("kind", OWN_FILES)
@pytest.mark.parametrize("change", [kpe.convert, kpe.freeze])
def test_a_layer_with_files_of_its_own_comes_back(change, kind, tmp_path):
    model = model_of(OWN_FILES[kind]())
    if kind == "mixin" and change is kpe.convert:
        model.layers[0].kernel.assign(normal(6, 5))
    report = change(model)
    before = outputs_of(model, normal(4, 6))
    model.save(tmp_path / "model.keras")
    again = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(before, outputs_of(again, normal(4, 6)))
    modes = [
        [layer.quantization_mode for layer in each.layers]
        for each in (model, again)
    ]
    assert modes[0] == modes[1]
    if change is kpe.freeze:
        assert [x.is_frozen for x in (model.layers[1], again.layers[1])]
        skipped = [s for s in report.skipped if "own_variables" in s.reason]
        # A parent's methods are not read: its child is frozen.
        assert len(skipped) == (kind != "parent")
        assert all(s.path.startswith(model.layers[0].path) for s in skipped)


def assigned(call, names=("inner",), **attributes):
    """A layer with children whose `call` is given."""

    class Assigns(LAYERS.Layer):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, LAYERS.Dense(6))
            self.parts = [LAYERS.Dense(6) for _ in range(2)]
            for name, value in attributes.items():
                setattr(self, name, value)

        def build(self, shape):
            for each in (*(getattr(self, n) for n in names), *self.parts):
                each.build(shape)
            self.inner.kernel.assign(self.inner.kernel * 0.5)

    Assigns.call = call
    return Assigns()


def direct(self, x):
    self.inner.kernel.assign(self.inner.kernel * 0.5)
    return self.inner(x)


def by_a_name(self, x):
    kernel = self.inner._kernel
    kernel.assign_sub(kernel * 0.5)
    return self.inner(x)


def by_getattr(self, x):
    getattr(self.inner, "kernel").assign_add(self.inner.kernel)  # noqa: B009
    return self.inner(x)


def in_a_loop(self, x):
    for layer in self.parts:
        layer.kernel.assign(layer.kernel * 0.5)
        x = layer(x)
    return self.inner(x)


def in_a_function(self, x):
    def halve():
        self.inner.kernel.assign(self.inner.kernel * 0.5)

    halve()
    return self.inner(x)


def in_another_method(self, x):
    halve(self.inner)
    return self.inner(x)


def halve(layer):
    layer.kernel.assign(layer.kernel * 0.5)


ASSIGNING = (
    direct,
    by_a_name,
    by_getattr,
    in_a_loop,
    in_a_function,
    in_another_method,
)


@pytest.mark.parametrize("call", ASSIGNING)
def test_a_call_that_assigns_a_frozen_kernel_names_exclude(call):
    model = model_of(assigned(call))
    assert len(kpe.freeze(model).stored) == 4
    with pytest.raises(ValueError, match=r"is frozen; .*exclude='") as error:
        model(normal(4, 6))
    assert "thaw(model)" in str(error.value)


def test_without_the_layer_that_the_error_names_the_call_runs():
    model = model_of(assigned(direct))
    kpe.freeze(model)
    with pytest.raises(ValueError, match="is frozen") as error:
        model(normal(4, 6))
    (named,) = re.findall("exclude='(.*)'", str(error.value))
    kpe.thaw(model)
    report = kpe.freeze(model, exclude=named)
    assert len(report.stored) == 3
    assert [s.path for s in report.skipped] == [named]
    outputs_of(model, normal(4, 6))


@pytest.mark.full
def test_a_compiled_call_that_assigns_a_frozen_kernel_names_exclude():
    model = model_of(assigned(direct))
    kpe.freeze(model)
    model.compile(jit_compile=keras.backend.backend() == "jax")
    with pytest.raises(ValueError, match=r"is frozen; .*exclude='"):
        model.predict(normal(4, 6), verbose=0)


def reads(self, x):
    self.seen.assign(ops.max(self.inner.kernel))
    return self.inner(x)


def test_a_kernel_that_a_call_reads_is_frozen():
    seen = keras.Variable(0.0, trainable=False)
    model = model_of(assigned(reads, seen=seen))
    assert len(kpe.freeze(model).stored) == 4
    outputs_of(model, normal(4, 6))


def language_model():
    table = LAYERS.ReversibleEmbedding(11, 6, name="table")
    ids = keras.Input((4,), dtype="int32")
    x = LAYERS.Dense(6, name="inner")(table(ids))
    return keras.Model(ids, table(x, reverse=True))


@pytest.mark.full_except(".*-None", ".*-dynamic", ".*-static")
@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
@pytest.mark.parametrize("include", [None, ".*"])
def test_what_logits_are_computed_of_stays_where_inputs_are_rounded(
    activations, include
):
    model = language_model()
    ids = np.arange(8, dtype="int32").reshape(2, 4)
    if activations == "static":
        kpe.convert(model, "float8/4_from_float32")
        observe_inputs(model, ids)
    report = kpe.freeze(model, activations=activations, include=include)
    stays = activations is not None and include is None
    named = [s.path for s in report.skipped if "logits" in s.reason]
    assert [p.split("/")[-1] for p in named] == ["table"] * stays
    assert "logits" in report.table(full=True) or not stays
    table = model.get_layer("table")
    assert bool(getattr(table, "is_frozen", False)) is not stays
    assert (table.quantization_mode is None) is stays
    before = outputs_of(model, ids)
    if stays:
        x = model.get_layer("inner")(table(ids))
        logits = ops.matmul(x, ops.transpose(table.embeddings))
        np.testing.assert_allclose(
            before, ops.convert_to_numpy(logits), rtol=1e-5, atol=1e-6
        )


@pytest.mark.full
def test_freeze_asks_no_layer_for_its_config():
    class Asked(Exception):
        pass

    class Silent(LAYERS.Dense):
        def get_config(self):
            raise Asked

    class SilentBlock(LAYERS.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = Silent(4)
            self.cell = LAYERS.RNN(LAYERS.GRUCell(3))
            self.attention = LAYERS.MultiHeadAttention(1, 4)

        def call(self, x):
            x = self.inner(x)
            return self.cell(self.attention(x, x))

        def get_config(self):
            raise Asked

        get_build_config = get_config

    model = keras.Sequential([keras.Input((3, 6)), SilentBlock(), Silent(2)])
    model.compile("adam", "mse")
    assert len(kpe.freeze(model).stored) == 8
    kpe.thaw(model)
