"""Layers in Keras's own float8 become layers of this package."""

import os

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.conversion import in_place
from steps import normal, numpy, state_of

POLICY = "float8/4_from_float32"


def in_stock_float8(policy=None):
    dense = keras.layers.Dense(3, "relu", dtype=policy)
    model = keras.Sequential(
        [keras.Input((4, 6)), keras.layers.Conv1D(5, 3), dense]
    )
    model.add(keras.layers.EinsumDense("abc,cd->abd", (2, 2)))
    if policy is None:
        dense.quantize("float8")
    return model, dense


@pytest.mark.full_except("quantized when built")
@pytest.mark.parametrize(
    "policy",
    [
        None,
        keras.dtype_policies.QuantizedFloat8DTypePolicy(
            "float8", "float32", 16
        ),
    ],
    ids=["quantized later", "quantized when built"],
)
def test_layers_in_stock_float8_are_taken_over(policy):
    model, dense = in_stock_float8(policy)
    kernel, weights = numpy(dense.kernel), len(dense.weights)
    assert weights == 8
    if policy is None:
        kpe.convert(model, POLICY)
    else:
        # Without a policy, layers follow their own.
        report = kpe.convert(model)
        assert [e.path for e in report.converted] == [dense.path]
        assert dense.float8_policy.amax_history_length == 16
    assert type(dense) is kpe.layers.Dense
    assert len(dense.weights) == 3
    assert "inputs_scale" not in vars(dense)
    assert state_of(dense)["kernel"][1][0] == np.abs(kernel).max()
    x = normal(2, *model.input_shape[1:])
    model.compile("adam", "mse")
    losses = [
        model.train_on_batch(x, normal(2, *model.output_shape[1:]))
        for _ in range(3)
    ]
    assert losses[-1] < losses[0]
    kpe.revert(model)
    assert type(dense) is keras.layers.Dense
    assert dense.quantization_mode is None
    assert len(dense.weights) == 2


@pytest.mark.full
def test_a_model_trained_in_stock_float8_goes_on():
    """Fact A16: Keras raises after `quantize`, unless compiled again."""
    x, y = normal(8, 6), normal(8, 2)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.layers[0].quantize("float8")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, epochs=2, verbose=0)
    slots = {v.path: numpy(v) for v in model.optimizer.variables}
    kpe.convert(model, POLICY)
    for variable in model.optimizer.variables:
        np.testing.assert_array_equal(numpy(variable), slots[variable.path])
    history = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]


def test_a_failed_conversion_leaves_stock_float8_as_it_was(monkeypatch):
    model, dense = in_stock_float8()
    x = normal(2, *model.input_shape[1:])
    weights, y = model.get_weights(), numpy(model(x))
    policy = dense.dtype_policy

    def fail(model):
        raise RuntimeError("after the layers")

    monkeypatch.setattr(in_place, "declare_policies", fail)
    with pytest.raises(RuntimeError, match="after the layers"):
        kpe.convert(model, POLICY)
    assert type(dense) is keras.layers.Dense
    assert dense.dtype_policy == policy
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(numpy(model(x)), y)


# Folders of such models


def in_a_folder(folder):
    model, _ = in_stock_float8()
    model.save(folder, zipped=False)
    return folder


def test_an_error_names_the_folder_that_was_given(tmp_path):
    folder = in_a_folder(tmp_path / "mine")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="mine"):
        kpe.load_model(folder)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="only some users of POSIX systems cannot write what is read-only",
)
def test_a_folder_of_files_that_are_read_only_loads(tmp_path):
    folder = in_a_folder(tmp_path / "mine")
    for path in [*folder.iterdir(), folder]:
        path.chmod(0o555)
    try:
        assert kpe.load_model(folder).layers[1].float8_policy is not None
    finally:
        folder.chmod(0o755)
