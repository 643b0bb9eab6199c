"""Reports where nothing counts multiplications, as in the core alone."""

import warnings

import keras
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext import _extensions
from keras_policy_ext.conversion import work

POLICY = "float8/current_from_float32"


@pytest.fixture(autouse=True)
def uncounted(monkeypatch):
    _extensions.import_for("counter")  # Else the first report would do so.
    monkeypatch.setattr(work, "_counter", work.ModelWork)


def model_of(*inner):
    return keras.Sequential([keras.Input((7, 16)), *inner])


def mixed():
    return model_of(
        layers.Dense(16, name="dense"),
        layers.BatchNormalization(name="norm"),
        layers.SeparableConv1D(4, 2, name="separable"),
    )


def texts(report):
    return str(report), report.table(full=True)


def test_kernels_have_parameters_and_no_multiplications():
    report = kpe.convert(mixed(), POLICY)
    entries = {
        e.path.rpartition("/")[2]: (e.parameters, e.multiplications)
        for e in (*report.converted, *report.skipped)
    }
    separable = 2 * 16 + 16 * 4
    assert entries == {
        "dense": (16 * 16, None),
        "norm": (4 * 16, 0),
        "separable": (separable, None),
    }
    assert all(e.sizes_known for e in report.converted)


def test_a_report_has_no_column_of_them():
    model = mixed()
    short, full = texts(kpe.convert(model, POLICY))
    # Kernels of 352 of 436 weights.
    assert short.startswith("80.7 % of the parameters are in float8\n2 of 2")
    frozen, frozen_full = texts(kpe.freeze(model))
    assert frozen.startswith("Some kernels are stored in float8, 73.4 % of")
    for text in (short, full, frozen, frozen_full, *texts(kpe.thaw(model))):
        assert "MACs" not in text and "multiplications" not in text
        assert "parameters" in text and "no part of the call" not in text


def test_rows_that_are_left_out_have_no_share():
    names = "bcdefghijklmnopqrstuvwxyz"
    model = model_of(
        *(type(name, (layers.Dense,), {})(16, name=name) for name in names)
    )
    report = kpe.convert(model, POLICY, filter="all")
    assert str(report).count("more") == 1
    assert "multiplications" not in str(report)


def test_a_warning_is_given_if_little_is_in_float8():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kpe.convert(model_of(layers.Dense(16), layers.Dense(4)), POLICY)
    model = model_of(layers.Dense(64, name="dense"), layers.Dense(1, name="1"))
    message = r"Only 5\.9 % of the entries of kernels of .+ are in float8"
    with pytest.warns(UserWarning, match=message):
        kpe.convert(model, POLICY, include="1$")
    model = model_of(
        layers.Dense(16, name="dense"), layers.LayerNormalization()
    )
    with pytest.warns(UserWarning, match="None of the entries of") as w:
        kpe.convert(model, POLICY, exclude="dense")
    assert (
        "after `convert`. 1 layer of class Dense: `exclude` matches its path"
    ) in str(w[0].message)
    with pytest.warns(UserWarning, match="`convert` has changed nothing"):
        kpe.convert(model_of(layers.LayerNormalization()), POLICY)


def test_routers_are_found_and_stay_in_floats():
    inputs = keras.Input((16,))
    gate = layers.Dense(4, name="gate")
    chosen = keras.ops.one_hot(keras.ops.argmax(gate(inputs), axis=-1), 4)
    outputs = layers.Dense(4, name="up")(inputs) * chosen
    report = kpe.convert(keras.Model(inputs, outputs), POLICY)
    (left,) = report.skipped
    assert left.path == gate.path and left.reason.startswith("it decides")
