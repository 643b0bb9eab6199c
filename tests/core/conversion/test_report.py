"""What a report says, and when a conversion warns."""

import dataclasses
import json
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext import backends, reports
from keras_policy_ext.conversion import (
    Converted,
    Report,
    Skipped,
)
from report_models import MULTIPLICATIONS, POLICY, model_of_many_kinds

pytestmark = pytest.mark.any_backend


# Shares


@pytest.mark.extension("recurrent")
def test_the_first_line_has_the_shares_of_all_work_and_weights(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = model_of_many_kinds()
    parameters = model.count_params()
    report = kpe.convert(model, POLICY)
    total = sum(MULTIPLICATIONS.values())
    products = 100 * (1 - MULTIPLICATIONS["depthwise"] / total)
    weights = 100 * (96 + 80 + 32) / parameters
    first, second = str(report).splitlines()[:2]
    assert first == (
        f"{products:.1f} % of the multiplications and {weights:.1f} % of the "
        "parameters are in float8"
    )
    assert second.startswith("3 of 4 layers with a kernel; 1,232 mult")
    assert total == 1232 and second.endswith(f" {parameters} parameters")
    entries = [*report.converted, *report.skipped]
    found = {
        e.path.rpartition("/")[2]: e.multiplications
        for e in entries
        if e.multiplications
    }
    assert found == MULTIPLICATIONS
    assert report.totals.parameters_in_float8 == 208
    assert report.totals.parameters == parameters


def test_layers_that_follow_float8_already_count_as_in_float8(monkeypatch):
    model = model_of_many_kinds()
    first = kpe.convert(model, POLICY)
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in ({}, {"exclude": "conv"}, {"min_size": 1000}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            again = kpe.convert(model, POLICY, **arguments)
        assert not again.converted
        assert str(again).splitlines()[0] == str(first).splitlines()[0]
        policies = {e.path: e.policy for e in again.skipped}
        assert policies["conv"] == POLICY
        assert policies["depthwise"] is None
        assert f"{POLICY} as before" in again.table(full=True)


@pytest.mark.parametrize("dtype, before", [("float32", 4), ("bfloat16", 2)])
def test_what_is_kept_for_the_backward_pass_is_told(dtype, before, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    framework = type(backends.current)
    monkeypatch.setattr(framework, "kept_dtype", lambda *_: "uint8")
    with kpe.policy_scope(dtype):
        two = [layers.Dense(4, name=name) for name in ("one", "two")]
    model = keras.Sequential([keras.Input((4,)), *two])
    report = kpe.convert(model, "delayed", include="one")
    (entry,) = report.converted
    assert (entry.kept_bytes, entry.kept_bytes_before) == (1, before)
    told = f"Saved activations: 1 byte per element (was {before}). "
    assert told in str(report) and told in report.table(full=True)
    # As it is where the product of the gradient is not in float8.
    recipe = "delayed(kernel_grad='high_precision')"
    report = kpe.convert(model, recipe)
    assert {entry.kept_bytes for entry in report.converted} == {before}
    assert f": {before} bytes per element (as before)." in str(report)
    assert "Saved activations" not in str(kpe.revert(model))


def test_a_device_that_keeps_more_is_told_of(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    framework = type(backends.current)
    monkeypatch.setattr(framework, "kept_dtype", lambda *_: "float32")
    with kpe.policy_scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    assert ": 4 bytes per element (was 2)." in str(kpe.convert(model))


@pytest.mark.extension("recurrent")
def test_only_layers_with_something_to_multiply_have_a_row():
    report = kpe.convert(model_of_many_kinds(), POLICY)
    assert "BatchNormalization" not in str(report)
    assert "BatchNormalization" in report.table(full=True)
    json.dumps(report.as_dict())
    assert {e["path"] for e in report.as_dict()["skipped"]} == {
        "norm",
        "depthwise",
    }


RECIPES = ["current", "rowwise", "block", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_scaled_per_tensor_is_named(recipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = model_of_many_kinds()
    finer = {"conv"} if recipe != "current" else set()
    for report in (kpe.convert(model, recipe), kpe.convert(model, recipe)):
        entries = report.as_dict()
        entries = [*entries["converted"], *entries["skipped"]]
        assert {e["path"] for e in entries if e["per_tensor"]} == finer
        for text in (str(report), report.table(full=True)):
            told = "Scaled per tensor, in eight bits: 1 Conv1D." in text
            assert told == bool(finer)
    reverted = kpe.revert(model)
    assert "per tensor" not in str(reverted)
    assert not any(e.per_tensor for e in reverted.converted)


@pytest.mark.parametrize(
    "recipe, per_tensor, shares",
    [
        ("delayed", False, True),
        ("current", False, True),
        ("rowwise", False, False),
        ("block", False, False),
        ("mxfp8", False, False),
        ("nvfp4", True, True),
    ],
)
def test_attention_with_scales_of_all_positions_is_named(
    recipe, per_tensor, shares, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    inputs = keras.Input((4, 6))
    outputs = layers.MultiHeadAttention(2, 3, name="mha")(inputs, inputs)
    model = keras.Model(inputs, outputs)
    report = kpe.convert(model, recipe, attention="float8")
    (entry,) = (e for e in report.converted if e.path == "mha")
    assert (entry.per_tensor, entry.shares_scales) == (per_tensor, shares)
    assert sum(e.shares_scales for e in report.converted) == shares
    told = "Scales of all positions and examples: 1 MultiHeadAttention."
    assert (told in str(report)) == shares
    assert ("Scaled per tensor, in eight bits" in str(report)) == per_tensor


@pytest.mark.extension("recurrent")
def test_what_is_reverted_is_no_longer_in_float8():
    model = model_of_many_kinds()
    kpe.convert(model, POLICY)
    report = kpe.revert(model)
    first = str(report).splitlines()[0]
    assert first == "3 layers back in plain policies; none is in float8"
    assert "float32" in str(report)
    assert "No layer" in str(kpe.revert(model))


def test_reports_that_others_make_need_no_counts():
    done = Converted("model/a", "Dense", POLICY)
    left = Skipped("model/b", "Dense", "because")
    report = Report((done,), (left,))
    assert str(report).startswith("1 of 2 layers in float8")
    assert POLICY in str(report)
    assert "– because" in report.table(full=True)


def test_shares_are_whole_only_where_they_are_exact():
    assert reports.percent(0, 0) == reports.percent(0, 9) == "0 %"
    assert reports.percent(9, 9) == "100 %"
    assert reports.percent(10**6 - 1, 10**6) == ">99.9 %"
    assert reports.percent(1, 10**6) == "<0.1 %"
    assert reports.percent(999, 1000) == "99.9 %"
    assert reports.percent(1, 1000) == "0.1 %"
    assert reports.percent(1, 3) == "33.3 %"


def test_amounts_have_three_digits():
    numbers = (999, 12_345, 1_234_567, 2_834_161_664, 7 * 10**14)
    texts = ["999", "12,345", "1.23M", "2.83G", "700T"]
    assert [reports.amount(number) for number in numbers] == texts


# Warnings


def caught(model, *args, **kwargs):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        report = kpe.convert(model, *args, **kwargs)
    return report, [w for w in found if "convert`" in str(w.message)]


@pytest.mark.extension("count")
def test_a_conversion_that_converts_nothing_warns_and_says_why():
    model = model_of_many_kinds()
    report, (warning,) = caught(model, POLICY, min_size=1000)
    assert not report.converted
    assert warning.category is UserWarning
    call = caught.__code__.co_firstlineno + 3
    assert (warning.filename, warning.lineno) == (__file__, call)
    message = str(warning.message)
    assert message.startswith("None of the multiplications of 'kinds' are in")
    # The three largest, the largest first.
    conv, lstm = 100 * 576 / 1232, 100 * 480 / 1232
    assert (
        f"{conv:.1f} % are in 1 layer of class Conv1D: its kernel has 96 "
        "entries, fewer than 1000. "
        f"{lstm:.1f} % are in 1 layer of class LSTMCell"
    ) in message
    assert "DepthwiseConv1D: a depthwise" in message
    assert "Dense:" not in message
    assert "change `include`" in message and "`kpe.revert`" in message


@pytest.mark.extension("count")
def test_a_conversion_of_less_than_a_tenth_warns():
    # 32 of 1232 multiplications.
    report, (warning,) = caught(model_of_many_kinds(), POLICY, include="head")
    assert len(report.converted) == 1
    assert str(warning.message).startswith("Only 2.6 % of the multipl")


@pytest.mark.extension("count")
def test_a_tenth_is_enough():
    def two(units):
        inputs = keras.Input((2,))
        x = layers.Dense(units, name="rest")(inputs)
        return keras.Model(inputs, [x, layers.Dense(1, name="part")(inputs)])

    assert caught(two(9), POLICY, include="part")[1] == []
    assert len(caught(two(10), POLICY, include="part")[1]) == 1


@pytest.mark.extension("count")
def test_shares_are_of_what_could_be_multiplied():
    """Embeddings are most of the parameters, and none of the work."""
    ids = keras.Input((3,), dtype="int32")
    x = layers.Embedding(1000, 4)(ids)
    report, found = caught(keras.Model(ids, layers.Dense(2)(x)), POLICY)
    assert found == []
    assert str(report).startswith("100 % of the multiplications and 0.2 %")


def test_a_model_without_a_kernel_warns_that_nothing_was_changed():
    model = keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(), layers.ReLU()]
    )
    report, (warning,) = caught(model, POLICY)
    assert "has changed nothing" in str(warning.message)
    assert warning.filename == __file__
    assert str(report) == "No layer with a kernel to multiply with"


@pytest.mark.extension("count")
def test_a_warning_that_is_an_error_undoes_the_conversion():
    model = model_of_many_kinds()
    x = np.ones((2, 8, 4), "float32")
    expected = model(x)
    classes = [type(layer) for layer in model.layers]
    with (
        warnings.catch_warnings(),
        pytest.raises(UserWarning, match=r"Only 2\.6 %"),
    ):
        warnings.simplefilter("error", UserWarning)
        kpe.convert(model, POLICY, include="head")
    assert [type(layer) for layer in model.layers] == classes
    assert not any("amax" in v.path for v in model.variables)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(model(x)),
        keras.ops.convert_to_numpy(expected),
    )


@pytest.mark.extension("count")
def test_entries_say_all_that_as_dict_says():
    report = kpe.convert(model_of_many_kinds(), POLICY)
    entry = report.as_dict()["converted"][0]
    assert entry == dataclasses.asdict(report.converted[0])
    assert entry["path"] == "conv"
    assert (entry["parameters"], entry["multiplications"]) == (96, 576)


class NeverCalled(keras.Model):
    """A model that says that it is built, before its layers have weights."""

    def __init__(self):
        super().__init__(name="never")
        self.inner = [keras.layers.Dense(4), keras.layers.Dense(2)]
        self.built = True

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def test_a_model_that_was_never_called_is_told_to_be_called():
    with pytest.warns(UserWarning, match="changed nothing") as caught:
        kpe.convert(NeverCalled())
    assert "'never' has 2 layers without weights yet" in str(caught[0].message)
    assert "Call the model on data" in str(caught[0].message)
