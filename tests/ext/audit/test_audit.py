"""`audit`: which outputs depend on others through scales."""

import dataclasses
from typing import ClassVar

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from keras_policy_ext.recipes import Quantization, Recipe, Tile
from steps import no_grad, normal, numpy

APART = ("rowwise", "block", "mxfp8")


def causal(kind="mha", **kwargs):
    x = keras.Input((6, 8))
    layer = {
        "mha": lambda: layers.MultiHeadAttention(2, 4, name="mha"),
        "gqa": lambda: layers.GroupQueryAttention(4, 4, 2, name="gqa"),
    }[kind]()
    y = layer(x, x, use_causal_mask=True)
    return keras.Model(x, layers.Dense(3, name="head")(y))


X = normal(2, 6, 8)


def operands_of(audit):
    return {(x.layer.split("/")[-1], x.operand, x.axis) for x in audit.leaks}


def both_axes(*operands):
    return {(*each, a) for each in operands for a in ("batch", "position")}


ALL = both_axes(
    ("query", "inputs"),
    ("key", "inputs"),
    ("value", "inputs"),
    ("mha", "first"),
    ("mha", "second"),
    ("attention_output", "inputs"),
    ("head", "inputs"),
)


@pytest.mark.slow_except("current")
@pytest.mark.full
@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4"])
def test_each_operand_with_a_scale_of_the_tensor_is_named(recipe):
    model = causal()
    kpe.convert(model, recipe, attention="float8")
    audit = kpe.audit(model, X)
    assert operands_of(audit) == ALL
    assert audit.products == 7 and audit.axes == ("batch", "position")
    assert audit.unexamined == ()
    for leak in audit.leaks:
        assert leak.scale_of == "the tensor" and not leak.by_history
        # Four bits, or underflow of what is 50 times smaller.
        assert 1e-3 < leak.effect < 0.5


@pytest.mark.slow_except()
@pytest.mark.full
@pytest.mark.parametrize("kind", ["mha", "gqa"])
@pytest.mark.parametrize("recipe", APART)
def test_nothing_is_named_where_scales_are_apart(recipe, kind):
    model = causal(kind)
    kpe.convert(model, recipe, attention="float8")
    audit = kpe.audit(model, X)
    assert audit.leaks == () and audit.products == 7
    assert "No output depends on others through its scales." in str(audit)


@pytest.mark.slow_except()
@pytest.mark.full
@pytest.mark.parametrize("recipe", APART)
def test_nothing_is_named_in_bfloat16(recipe):
    model = causal()
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", recipe=recipe)
    kpe.convert(model, policy, attention="float8")
    assert kpe.audit(model, X).leaks == ()


@pytest.mark.full
@pytest.mark.slow_except()
def test_models_of_tokens_are_examined_by_other_tokens():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8)(tokens)
    x = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(2, 4, name="mha")(x, x, use_causal_mask=True)
    model = keras.Model(tokens, layers.Dense(3, name="head")(y))
    kpe.convert(model, "current", attention="float8")
    batch = np.random.default_rng(0).integers(0, 11, (2, 6)).astype("int32")
    assert operands_of(kpe.audit(model, batch)) == ALL
    kpe.convert(model, "rowwise", attention="float8")
    assert kpe.audit(model, batch).leaks == ()


@pytest.mark.slow_except()
@pytest.mark.full
def test_convolutions_have_a_scale_of_the_tensor_under_every_recipe():
    model = keras.Sequential(
        [
            keras.Input((8, 3)),
            layers.Conv1D(4, 2, padding="causal", name="conv"),
            layers.Dense(2, name="dense"),
        ]
    )
    kpe.convert(model, "rowwise")
    audit = kpe.audit(model, normal(2, 8, 3))
    assert operands_of(audit) == both_axes(("conv", "inputs"))
    assert {leak.product for leak in audit.leaks} == {"convolution"}


@pytest.mark.full
def test_frozen_models_have_a_scale_per_token_or_per_image():
    model = keras.Sequential(
        [
            keras.Input((8, 3)),
            layers.Conv1D(4, 2, padding="causal", name="conv"),
            layers.Dense(2, name="dense"),
        ]
    )
    kpe.freeze(model, activations="dynamic")
    audit = kpe.audit(model, normal(2, 8, 3))
    assert operands_of(audit) == {("conv", "inputs", "position")}
    assert audit.products == 2


@pytest.mark.slow_except()
@pytest.mark.full
def test_steps_of_recurrent_layers_are_examined():
    model = keras.Sequential([keras.Input((5, 4)), layers.GRU(3)])
    kpe.convert(model, "current")
    audit = kpe.audit(model, normal(2, 5, 4))
    assert audit.unexamined == ()
    assert {leak.axis for leak in audit.leaks} >= {"batch"}


def dense_model():
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(4, name="a"), layers.Dense(2)]
    )
    kpe.convert(model, "delayed")
    return model


def test_scales_of_a_history_are_told_apart():
    model = dense_model()
    kpe.calibrate(model, normal(4, 8))
    audit = kpe.audit(model, normal(4, 8, seed=1))
    assert [leak.by_history for leak in audit.leaks] == [True, True]
    assert all(leak.effect == 0.0 for leak in audit.leaks)
    assert "history" in str(audit)


def test_features_are_no_positions_and_one_example_is_no_batch():
    model = dense_model()
    assert {leak.axis for leak in kpe.audit(model, normal(4, 8)).leaks} == {
        "batch"
    }
    audit = kpe.audit(model, normal(1, 8))
    assert audit.axes == () and audit.leaks == ()
    assert "Not examined: batch, position." in str(audit)
    assert "No output depends" not in str(audit)


class Noise(layers.Layer):
    """Draws numbers for inference too, and counts its calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(ops.mean(x))
        return x + 0.0 * keras.random.normal(ops.shape(x), seed=self.seeds)


def test_the_model_is_not_changed():
    model = keras.Sequential(
        [keras.Input((8,)), Noise(), layers.Dense(4), layers.Dropout(0.5)]
    )
    kpe.convert(model, "delayed")
    x = normal(4, 8)
    with no_grad():
        model(x)
    before = [numpy(v) for v in model.variables]
    losses = len(model.losses)
    dense = model.layers[1]
    attributes, plan = dict(vars(dense)), dense.float8_state.last_call.plan
    audit = kpe.audit(model, normal(4, 8, seed=2))
    assert audit.leaks
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(numpy(variable), value)
    assert len(model.losses) == losses
    assert dict(vars(dense)).keys() == attributes.keys()
    assert dense.float8_state.last_call.plan is plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsOfRows(Recipe):
    """A scale for two rows."""

    name: ClassVar[str] = "pairs_of_rows_of_a_test"
    granularity: ClassVar[str] = "blockwise"

    def quantization(self, operand, matmul):
        return Quantization(format="float8_e4m3fn", tile=Tile(free=2))


@pytest.mark.full
def test_tiles_of_two_examples_are_named():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    kpe.convert(model, PairsOfRows())
    (leak,) = kpe.audit(model, normal(4, 8)).leaks
    assert (leak.scale_of, leak.axis) == ("2×all", "batch")


def test_a_float_model_has_no_products():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    audit = kpe.audit(model, normal(4, 8))
    assert audit.products == 0 and audit.leaks == ()
    assert str(audit).startswith("0 float8 products")


def test_the_report_is_text_html_and_a_dict():
    audit = kpe.audit(dense_model(), normal(4, 8))
    (first, _) = audit.as_dict()["leaks"]
    assert first["axis"] == "batch" and isinstance(first["effect"], float)
    assert audit.leaks[0].layer in audit.table(full=True)
    assert "<table>" in audit._repr_html_()
    assert repr(audit) == str(audit)


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(TypeError, match="only those can be audited"):
        kpe.audit("model", X)
    model = dense_model()
    with pytest.raises(TypeError, match="`batch` is not arrays"):
        kpe.audit(model, 8)
    with pytest.raises(ValueError, match="is not built"):
        kpe.audit(layers.Dense(3), normal(2, 3))
