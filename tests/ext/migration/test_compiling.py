"""Arguments of `compile` as tf_keras wrote them, in both formats."""

import json

import h5py
import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext import migration
from keras_policy_ext.migration import migrate_config


def tensor(name):
    return [[name, 0, 0, {}]]


def dense(name, source):
    return {
        "class_name": "Dense",
        "config": {"name": name, "units": 2},
        "name": name,
        "inbound_nodes": [tensor(source)],
    }


def model_config(*outputs):
    """A functional model with an input `x` and these layers as outputs."""
    first = {
        "class_name": "InputLayer",
        "config": {"name": "x", "batch_input_shape": [None, 2]},
        "name": "x",
        "inbound_nodes": [],
    }
    fields = {
        "name": "model",
        "layers": [first, *(dense(name, "x") for name in outputs)],
        "input_layers": [["x", 0, 0]],
        "output_layers": [[name, 0, 0] for name in outputs],
    }
    return {"class_name": "Functional", "config": fields}


def wrapped(fn, name=None):
    fields = {"name": name or fn, "dtype": "float32", "fn": fn}
    return {"class_name": "MeanMetricWrapper", "config": fields}


def compiled(*outputs, custom_objects=None, **arguments):
    """The model of a `.keras` config with these arguments of `compile`."""
    arguments = {"optimizer": "sgd", "loss": "mse", **arguments}
    config = {**model_config(*outputs), "compile_config": arguments}
    return keras.saving.deserialize_keras_object(
        migrate_config(config, custom_objects=custom_objects),
        custom_objects=custom_objects,
    )


def from_hdf5(path, *outputs, custom_objects=None, **training):
    """The model of a `.h5` file that tf_keras would have written."""
    training = {
        "optimizer_config": {"class_name": "SGD", "config": {}},
        "loss": "mse",
        **training,
    }
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.15.0"
        file.attrs["model_config"] = json.dumps(model_config(*outputs))
        file.attrs["training_config"] = json.dumps(training)
        for name in outputs:
            group = file.create_group(f"model_weights/{name}")
            arrays = {"kernel:0": np.eye(2), "bias:0": np.zeros(2)}
            group.attrs["weight_names"] = list(arrays)
            for key, value in arrays.items():
                group[key] = value
    with pytest.warns(UserWarning, match="no state of the optimizer"):
        return migration.load_legacy_model(path, custom_objects=custom_objects)


X = np.array([[1.0, 2.0], [-3.0, 0.5]], "float32")
Y = np.array([[0.5, 2.5], [-1.0, 1.0]], "float32")


def logs(model, targets=Y):
    return model.evaluate(X, targets, verbose=0, return_dict=True)


def test_cosine_similarity_is_a_metric_and_no_loss(tmp_path):
    metrics = [[wrapped("cosine_similarity")]]

    model = from_hdf5(tmp_path / "old.h5", "a", metrics=metrics)

    norms = np.linalg.norm(X, axis=1) * np.linalg.norm(Y, axis=1)
    expected = (np.sum(X * Y, 1) / norms).mean()
    # A few operations in float32 on numbers up to 1.
    assert abs(logs(model)["cosine_similarity"] - expected) < 8 * 2**-24


def my_metric(y_true, y_pred):
    return ops.max(ops.abs(ops.subtract(y_true, y_pred)), -1)


def test_function_of_the_caller_is_a_metric(tmp_path):
    model = from_hdf5(
        tmp_path / "old.h5",
        "a",
        metrics=[[wrapped("my_metric")]],
        custom_objects={"my_metric": my_metric},
    )

    error = logs(model)["my_metric"] - np.abs(X - Y).max(1).mean()
    assert abs(error) < 8 * 2**-24


def test_loss_object_is_a_metric(tmp_path):
    fields = {"name": "mae", "reduction": "auto", "fn": "mean_absolute_error"}
    loss = {"class_name": "MeanAbsoluteError", "config": fields}

    model = from_hdf5(
        tmp_path / "old.h5", "a", metrics=[[wrapped(loss, "mae")]]
    )

    assert abs(logs(model)["mae"] - np.abs(X - Y).mean()) < 8 * 2**-24


def test_output_without_a_metric_has_none(tmp_path):
    metrics = [[wrapped("hinge", "q")], [None]]

    model = from_hdf5(tmp_path / "old.h5", "a", "b", metrics=metrics)

    names = [key for key in logs(model, [Y, Y]) if "loss" not in key]
    assert names == ["a_q"]


@pytest.mark.parametrize("metrics", ["mae", ["mae"], ["mae", "mse"]])
def test_flat_metrics_are_of_every_output(metrics):
    model = compiled("a", "b", metrics=metrics)

    names = {key for key in logs(model, [Y, Y]) if "loss" not in key}
    flat = [metrics] if isinstance(metrics, str) else metrics
    assert names == {f"{x}_{name}" for x in "ab" for name in flat}


@pytest.mark.parametrize(
    "alias, loss",
    [
        ("huber_loss", "huber"),
        ("kullback_leibler_divergence", "kl_divergence"),
        ("logcosh", "log_cosh"),
        ("log_cosh", "log_cosh"),
    ],
)
def test_aliases_of_losses_are_known(alias, loss):
    model = compiled("a", loss=alias)

    value = keras.losses.get(loss)(ops.convert_to_tensor(Y), model(X))
    expected = ops.convert_to_numpy(value).mean()
    assert abs(logs(model)["loss"] - expected) < 1e-5 * max(1, abs(expected))


@pytest.mark.parametrize(
    "alias, metric",
    [
        ("cosine_proximity", keras.metrics.CosineSimilarity),
        ("kullback_leibler_divergence", keras.metrics.KLDivergence),
        ("logcosh", keras.metrics.LogCoshError),
        ("log_cosh", keras.metrics.LogCoshError),
    ],
)
def test_aliases_of_metrics_are_known(alias, metric):
    model = compiled("a", metrics=[alias])
    expected = metric()
    expected.update_state(Y, model(X))

    difference = logs(model)[alias] - float(expected.result())
    assert abs(difference) < 1e-5


@pytest.mark.parametrize("key", ["loss", "metrics", "weighted_metrics"])
def test_unknown_functions_are_named(key):
    value = "mine" if key == "loss" else ["mse", "mine"]

    with pytest.raises(ValueError, match=rf"function 'mine' \(compile, {key}"):
        compiled("a", **{key: value})


def test_slash_in_names_of_outputs_becomes_an_underscore():
    model = compiled(
        "o/a",
        "o/b",
        loss={"o/a": "mse", "o/b": "mae"},
        metrics={"o/b": "mse"},
        loss_weights={"o/b": 0.25},
    )
    first, second = (ops.convert_to_numpy(x) for x in model(X))

    found = logs(model, [Y, Y])

    expected = ((first - Y) ** 2).mean() + 0.25 * abs(second - Y).mean()
    assert abs(found["loss"] - expected) < 1e-5 * max(1, expected)
    assert "o_b_mse" in found


class MyLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.max(ops.abs(y_true - y_pred), -1)


def test_loss_class_of_the_caller_gets_its_reduction():
    fields = {"reduction": "auto", "name": None}

    model = compiled(
        "a",
        loss={"class_name": "MyLoss", "config": fields},
        custom_objects={"MyLoss": MyLoss},
    )

    assert model.loss.reduction == "sum_over_batch_size"


class MyAdam(keras.optimizers.Adam):
    pass


def test_optimizer_class_of_the_caller_is_told_what_it_takes():
    fields = {
        "name": "MyAdam",
        "learning_rate": 0.5,
        "jit_compile": False,
        "is_legacy_optimizer": False,
    }

    model = compiled(
        "a",
        optimizer={"class_name": "MyAdam", "config": fields},
        custom_objects={"MyAdam": MyAdam},
    )

    assert type(model.optimizer) is MyAdam
    assert float(model.optimizer.learning_rate) == 0.5
