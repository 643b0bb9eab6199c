"""Heads that multiply with the table of an embedding which is not theirs."""

import numpy as np
import pytest
import zoo_models as zoo

import keras_policy_ext as kpe


def head_of(model):
    (head,) = (x for x in zoo.layers_of(model) if "TiedHead" in str(type(x)))
    return head


@pytest.mark.parametrize("family", zoo.WITH_TIED_HEAD)
def test_a_tied_head_is_in_float8_where_asked(family, tmp_path):
    model = zoo.compiled(zoo.model_of(family))
    inputs, weights = zoo.data(model), zoo.arrays(model)
    expected = zoo.outputs(model, inputs)
    head = head_of(model)
    report = kpe.convert(model, "delayed")
    (reason,) = (x.reason for x in report.skipped if x.path == head.path)
    assert "is a tied head" in reason
    without = zoo.outputs(model, inputs)

    report = kpe.convert(model, "delayed", include=f"^{head.path}$")

    (entry,) = report.converted
    assert entry.path == head.path and entry.multiplications
    assert not entry.plain_multiplications
    error = zoo.error(zoo.outputs(model, inputs), without)
    assert 1e-3 < error < np.sqrt(2 / 3) * 2.0**-4

    loss, _ = zoo.step(model, inputs)
    assert np.isfinite(loss)
    (state,) = head.float8_state.matrices
    assert np.all(zoo.numpy(state).max(axis=1) > 0)

    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    zoo.assert_same_arrays(zoo.arrays(loaded), zoo.arrays(model))
    np.testing.assert_array_equal(
        zoo.outputs(loaded, inputs), zoo.outputs(model, inputs)
    )
    kpe.revert(model)
    assert not hasattr(head, "float8_state")
    zoo.assert_same_arrays(zoo.arrays(model), weights)
    np.testing.assert_array_equal(zoo.outputs(model, inputs), expected)


def test_generation_is_as_before():
    """`generate` multiplies in a method of the model, outside of its call."""
    model = zoo.model_of("tied_llama")
    ids = np.arange(3, 7, dtype="int32")[None]
    expected = zoo.numpy(model.generate(ids, max_new_tokens=4))
    kpe.convert(model, "current", include=f"^{head_of(model).path}$")
    got = zoo.numpy(model.generate(ids, max_new_tokens=4))
    np.testing.assert_array_equal(got, expected)
