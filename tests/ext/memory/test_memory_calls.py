"""What `kpe.memory` takes: models, batches, policies; and what it refuses."""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
import memory_page
from memory_models import ARRAY, BATCH, IN, OUT, by_name, mlp, snapshot
from ways import BACKEND


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = mlp("relu")
        self.drop = keras.layers.Dropout(0.5)
        self.norm = keras.layers.BatchNormalization(name="norm")

    def call(self, x, training=False):
        return ops.tanh(self.norm(self.drop(self.inner(x))))


@pytest.fixture
def subclassed():
    model = Subclassed()
    model(np.zeros((2, IN), "float32"))
    return model


def test_a_model_of_ones_own_and_a_model_in_it(subclassed):
    form = kpe.memory(subclassed, (BATCH, IN), ()).forms[0]
    rows = by_name(form)
    assert {"first", "second", "dropout", "norm"} <= rows.keys()
    # What the model computes in no layer is kept by the model.
    assert rows["subclassed"].kept >= 4 * BATCH * OUT
    nested = sum(rows[name].kept for name in ("first", "second"))
    assert nested == kpe.memory(mlp(), BATCH, ()).forms[0].kept


@pytest.mark.full_except("False")
@pytest.mark.parametrize("built", [True, False])
def test_the_model_stays_as_it_is(subclassed, built):
    subclassed.compile("adam", "mse")
    if built:
        x, y = np.zeros((2, IN)), np.zeros((2, OUT))
        subclassed.fit(x, y, verbose=0)
    before = snapshot(subclassed)
    policies = ["delayed", "nvfp4", "mixed_bfloat16"]
    kpe.memory(subclassed, (BATCH, IN), policies)
    assert snapshot(subclassed) == before


def test_counters_and_choices_of_float8_layers_stay(subclassed):
    kpe.convert(subclassed, "delayed")
    first = subclassed.inner.layers[0]
    (state,) = first.float8_state.matrices
    before = snapshot(subclassed), state.uses, first.kernel_choice
    report = kpe.memory(subclassed, (BATCH, IN))
    assert (snapshot(subclassed), state.uses, first.kernel_choice) == before
    assert [form.name for form in report.forms] == [
        "as it is",
        "without float8",
    ]


@pytest.mark.parametrize(
    "batch, policy, options",
    [
        ((BATCH, IN + 1), None, {}),  # Layers do not take it.
        (BATCH, None, {}),
        ((None, IN), None, {}),
        ((BATCH, IN), "bfloat16", {}),
        ((BATCH, IN), "delayed", {"include": "nothing"}),
        ((BATCH, IN), "delayed", {"compile": 1, "min_size": "large"}),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_is(
    subclassed, batch, policy, options
):
    before = snapshot(subclassed)
    with pytest.raises((ValueError, TypeError)):
        kpe.memory(subclassed, batch, policy, **options)
    assert snapshot(subclassed) == before


@pytest.mark.parametrize(
    "batch",
    [
        np.int64(BATCH),
        (BATCH, IN),
        ARRAY,
        ARRAY.astype("float64"),
        keras.KerasTensor((BATCH, IN), "float32"),
        keras.layers.InputSpec(shape=(BATCH, IN)),
        keras.layers.InputSpec(shape=(BATCH, IN), dtype="float32"),
    ],
)
def test_a_batch_is_told_in_many_ways(batch):
    model = mlp()
    assert kpe.memory(model, batch, ()) == kpe.memory(model, BATCH, ())


def test_several_inputs_of_several_dtypes():
    tokens = keras.Input((8,), dtype="int32", name="tokens")
    extra = keras.Input((IN,), name="extra")
    x = keras.layers.Embedding(50, IN)(tokens)
    x = keras.layers.Dense(4)(keras.layers.Add()([x, extra[:, None]]))
    model = keras.Model({"tokens": tokens, "extra": extra}, x)
    expected = kpe.memory(model, 2)
    assert expected.batch == 2 * 8 * 4 + 2 * IN * 4
    batch = {
        "tokens": np.zeros((2, 8), "int32"),
        "extra": keras.KerasTensor((2, IN), "float32"),
    }
    assert kpe.memory(model, batch) == expected


@pytest.mark.parametrize(
    "batch, error, said",
    [
        (0, ValueError, "Received: 0"),
        (True, TypeError, "bool"),
        ("a", TypeError, "'a'"),
        ((None, IN), ValueError, r"\(None, 16\)"),
        (keras.KerasTensor((None, IN), "float32"), ValueError, "unknown size"),
    ],
)
def test_what_is_no_batch_is_said(batch, error, said):
    with pytest.raises(error, match=said):
        kpe.memory(mlp(), batch)


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match="not built"):
        kpe.memory(keras.Sequential([keras.layers.Dense(2)]), (2, 3))
    with pytest.raises(TypeError, match=r"keras\.Layer"):
        kpe.memory("model.keras", 2)


class Parts(keras.Model):
    """As a GAN is: two models, and no `call`."""

    def __init__(self):
        super().__init__()
        self.one, self.two = mlp(), mlp()


def test_a_model_without_a_call_is_asked_for_its_parts():
    with pytest.raises(ValueError, match="each part"):
        kpe.memory(Parts(), (BATCH, IN))


def test_policies_in_all_ways():
    model = mlp()
    recipe = kpe.recipes.CurrentScaling()
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    asked = ["current", recipe, policy, "mixed_float8", "mixed_bfloat16"]
    report = kpe.memory(model, BATCH, asked)
    names = [form.name for form in report.forms]
    assert names == [
        "as it is",
        "current",
        "float8/current_from_float32",
        "mixed_float8",
        "mixed_bfloat16",
    ]
    current, named = report["current"], report[policy.full_name]
    assert current.layers == named.layers
    # A plain policy is that of a model which was made under it.
    expected = kpe.memory(mlp(dtype="mixed_bfloat16"), BATCH, ()).forms[0]
    assert report["mixed_bfloat16"].kept == expected.kept
    with pytest.raises(KeyError, match="current"):
        report["delayed"]


def test_without_a_policy_it_is_compared_with_convert():
    model = mlp()
    report = kpe.memory(model, BATCH)
    assert (
        report["converted"].layers
        == kpe.memory(model, BATCH, "current")["current"].layers
    )
    some = kpe.memory(model, BATCH, "delayed", exclude="first")["delayed"]
    assert {n: bool(row.state) for n, row in by_name(some).items()} == {
        "first": False,
        "second": True,
    }


def test_a_converted_model_is_what_was_foretold():
    model = mlp("gelu")
    foretold = kpe.memory(model, BATCH, "delayed")["delayed"].layers
    kpe.convert(model, "delayed")
    assert kpe.memory(model, BATCH).forms[0].layers == foretold


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_converted_model_is_shown_before_and_after(dtype, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = mlp("gelu", dtype)
    (before,) = kpe.memory(model, BATCH, ()).forms
    kpe.convert(model, "delayed")
    report = kpe.memory(model, BATCH)
    after, without = report.forms
    assert without.layers == before.layers
    assert after.kept != before.kept
    (heading,) = (x for x in str(report).splitlines() if "layers" in x)
    assert heading.split("class")[1].split() == [
        *("without", "float8"),
        *("as", "it", "is"),
    ]
    assert [form.name for form in kpe.memory(model, BATCH, []).forms] == [
        "as it is"
    ]


def test_a_frozen_model_has_no_before():
    model = mlp()
    kpe.freeze(model)
    (form,) = kpe.memory(model, BATCH).forms
    assert form.name == "as it is"


def test_the_report_as_data_and_as_tables():
    model = mlp()
    model.compile("adam", "mse")
    report = kpe.memory(model, BATCH, ["delayed", "mixed_bfloat16"])
    data = json.loads(json.dumps(report.as_dict()))
    assert data["forms"][0]["layers"][0]["path"].endswith("first")
    held = [each["optimizer"] for each in data["forms"]]
    assert held == 3 * [report.optimizer]
    text, full = str(report), report.table(full=True)
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    assert "mixed_bfloat16" in text and "weights" in text
    assert "first" in full and "second" in full
    assert "<table>" in report._repr_html_()


@pytest.mark.full
@pytest.mark.skipif(
    not keras.__version__.startswith("3.15"), reason="the page is of Keras 3.15"
)
def test_the_page_shows_what_is_printed():
    advice = f"run KERAS_BACKEND={BACKEND} python tests/memory_page.py"
    assert memory_page.page() == memory_page.PAGE.read_text("utf-8"), advice
