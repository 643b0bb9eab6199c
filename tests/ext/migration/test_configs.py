"""Configs of tf_keras become configs of Keras 3."""

import copy
import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.migration import migrate_config
from legacy_configs import DTYPE, layer, made
from legacy_files import FILES, WITHOUT_CODE

ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.5, "decay": 0.0}}


def config_in(name):
    if name.endswith(".h5"):
        with h5py.File(FILES / name) as file:
            return json.loads(file.attrs["model_config"])
    with zipfile.ZipFile(FILES / name) as archive:
        return json.loads(archive.read("config.json"))


@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_config_of_a_model_is_rewritten_without_changing_it(name):
    config = config_in(name)
    before = copy.deepcopy(config)

    first, second = migrate_config(config), migrate_config(config)

    assert config == before
    assert first == second
    assert first["module"] == "keras"
    assert '"tf_keras.' not in json.dumps(first)


def test_compiled_config_makes_a_compiled_model():
    model = made(config_in("functional_float16.keras"))

    assert isinstance(model.optimizer, kpe.mixed_precision.LossScaleOptimizer)
    assert model.optimizer.initial_scale == 8


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (DTYPE, "mixed_float16"),
        ({**DTYPE, "class_name": "PolicyV1"}, "mixed_float16"),
        ("mixed_bfloat16", "mixed_bfloat16"),
        ("_infer", "float32"),
        ("int32", "int32"),
    ],
)
def test_every_form_of_a_policy_is_read(dtype, expected):
    policy = made(layer("Flatten", dtype=dtype)).dtype_policy

    assert policy == keras.DTypePolicy(expected)


@pytest.mark.parametrize(
    "config",
    [
        {"class_name": "Sequential", "config": {"layers": [7]}},
        {"class_name": "Functional", "config": {"layers": [], "name": "f"}},
        layer("BatchNormalization", axis={}, momentum=[]) | {"config": 7},
        {"class_name": "function", "config": {}},
    ],
)
def test_config_of_nonsense_is_a_value_error(config):
    with pytest.raises(ValueError, match="Cannot"):
        migrate_config(config)


def scaled_policy(loss_scale, name="PolicyV1"):
    config = {"name": "mixed_float16", "loss_scale": loss_scale}
    return {"class_name": name, "config": config}


FIXED = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 4.0}}
DYNAMIC = {
    "class_name": "DynamicLossScale",
    "config": {
        "initial_loss_scale": 16.0,
        "increment_period": 3,
        "multiplier": 4.0,
    },
}


@pytest.mark.parametrize(
    "loss_scale", [FIXED, DYNAMIC, "dynamic", 4.0], ids=str
)
@pytest.mark.parametrize("name", ["Policy", "PolicyV1"])
def test_loss_scale_of_a_policy_is_kept_dropped_or_refused(loss_scale, name):
    config = scaled_policy(loss_scale, name)

    assert made(config) == kpe.LossScaleDTypePolicy("mixed_float16", loss_scale)
    with pytest.warns(UserWarning, match="loss scale was dropped"):
        dropped = made(config, on_loss_scale="drop")
    assert dropped == keras.DTypePolicy("mixed_float16")
    with pytest.raises(ValueError, match="has a loss scale"):
        migrate_config(config, on_loss_scale="error")


@pytest.mark.parametrize("loss_scale", ["auto", None])
def test_policy_without_scale_of_its_own_is_a_plain_one(loss_scale):
    policy = made(scaled_policy(loss_scale), on_loss_scale="error")

    assert policy == keras.DTypePolicy("mixed_float16")


@pytest.mark.parametrize(
    "name",
    ["LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3"],
)
@pytest.mark.parametrize(
    "fields, expected",
    [
        (
            {"dynamic": True, "initial_scale": 2.0, "dynamic_growth_steps": 7},
            (True, 2.0, 7, 2.0),
        ),
        (
            {
                "dynamic": False,
                "initial_scale": 0.5,
                "dynamic_growth_steps": None,
            },
            (False, 0.5, None, 2.0),
        ),
        ({"loss_scale": FIXED}, (False, 4.0, None, 2.0)),
        ({"loss_scale": DYNAMIC}, (True, 16.0, 3, 4.0)),
    ],
)
def test_every_form_of_a_loss_scaler_is_read(name, fields, expected):
    inner = "optimizer" if "loss_scale" in fields else "inner_optimizer"
    config = {"class_name": name, "config": {inner: ADAM, **fields}}

    kept = made(config)
    with pytest.warns(UserWarning, match="loss scale was dropped"):
        dropped = made(config, on_loss_scale="drop")

    assert isinstance(kept, kpe.mixed_precision.LossScaleOptimizer)
    assert expected == (
        kept.dynamic,
        kept.initial_scale,
        kept.dynamic_growth_steps,
        kept.multiplier,
    )
    assert isinstance(kept.inner_optimizer, keras.optimizers.Adam)
    assert isinstance(dropped, keras.optimizers.Adam)
    assert float(dropped.learning_rate) == 0.5


@pytest.mark.parametrize(
    "name", ["SGD", "Custom>SGD", "experimentalSGD", "Experimental>SGD"]
)
def test_optimizers_of_every_generation_are_read(name):
    config = {"lr": 0.5, "momentum": 0.9, "jit_compile": True}

    optimizer = made({"class_name": name, "config": config})

    assert isinstance(optimizer, keras.optimizers.SGD)
    assert optimizer.momentum == 0.9
    assert float(optimizer.learning_rate) == 0.5


def test_decay_becomes_the_schedule_that_it_was():
    config = {"learning_rate": 0.5, "decay": 0.25}

    optimizer = made({"class_name": "Adam", "config": config})

    schedule = optimizer.get_config()["learning_rate"]
    schedule = keras.optimizers.schedules.deserialize(schedule)
    rates = [float(schedule(step)) for step in range(4)]
    np.testing.assert_allclose(
        rates, [0.5 / (1 + 0.25 * t) for t in range(4)], rtol=1e-6
    )


def test_arguments_that_have_gone_are_left_out():
    lstm = layer(
        "LSTM",
        units=2,
        implementation=2,
        time_major=False,
        batch_input_shape=[],
    )
    norm = layer("BatchNormalizationV1", axis=[2], fused=True)
    zeros = {"class_name": "Zeros", "config": {"dtype": "float32"}}

    assert made(lstm).units == 2
    assert made(norm).axis == 2
    assert isinstance(made(zeros), keras.initializers.Zeros)


def test_synchronized_normalization_is_so_where_keras_can():
    config = layer("SyncBatchNormalization", axis=[1])

    if keras.backend.backend() == "tensorflow":
        assert made(config).synchronized
        return
    with pytest.warns(UserWarning, match="'it' no longer synchronizes"):
        assert not made(config).synchronized


def test_arguments_that_mattered_are_named_all_at_once():
    layers = [
        layer("LSTM", units=2, time_major=True),
        layer("BatchNormalization", virtual_batch_size=4),
        layer("Dense", units=2, surprise=1),
    ]
    config = {"class_name": "Sequential", "config": {"layers": layers}}

    with pytest.raises(ValueError, match="Without a counterpart") as error:
        migrate_config(config)

    for words in (
        "time_major=True of LSTM",
        "virtual_batch_size=4",
        "surprise=1",
    ):
        assert words in str(error.value)


def test_unknown_classes_and_functions_are_named_all_at_once():
    layers = [
        layer("Custom>Mine"),
        layer("ThresholdedReLU"),
        layer("Dense", units=1, activation="my_act"),
    ]
    config = {"class_name": "Sequential", "config": {"layers": layers}}

    with pytest.raises(ValueError, match="Unknown") as error:
        migrate_config(config)

    for words in ("Custom>Mine 'it'", "ThresholdedReLU 'it'", "'my_act'"):
        assert words in str(error.value)


def test_hard_sigmoid_is_that_of_tf_keras():
    x = np.linspace(-4, 4, 33, dtype="float32")

    y = made(layer("Activation", activation="hard_sigmoid"))(x)

    y = ops.convert_to_numpy(y)
    np.testing.assert_allclose(y, np.clip(0.2 * x + 0.5, 0, 1), atol=1e-7)
    stock = ops.convert_to_numpy(keras.activations.hard_sigmoid(x))
    assert np.abs(y - stock).max() > 0.05


def test_input_shape_of_a_first_layer_is_an_input_layer():
    # As Keras before 2.5 wrote sequential models, and 2.1 a bare list.
    first = layer("Dense", units=2, batch_input_shape=[None, 3])

    for fields in ({"name": "m", "layers": [first]}, [first]):
        model = made({"class_name": "Sequential", "config": fields})
        assert model.input_shape == (None, 3)


def functional(**node):
    layers = [
        {
            **layer("InputLayer", batch_input_shape=[None, 2]),
            "inbound_nodes": [],
        },
        node,
    ]
    layers[0]["name"] = "x"
    config = {
        "name": "m",
        "layers": layers,
        "input_layers": [["x", 0, 0]],
        "output_layers": [[node["name"], 0, 0]],
    }
    return {"class_name": "Functional", "config": config}


@pytest.mark.parametrize(
    "class_name, config, kwargs, named",
    [
        ("TFOpLambda", {"function": "signal.fft"}, {}, "tf.signal.fft"),
        (
            "TFOpLambda",
            {"function": "linalg.matmul"},
            {"b": 2.0, "transpose_b": True},
            "tf.linalg.matmul",
        ),
        (
            "TFOpLambda",
            {"function": "math.add"},
            {"y": [1.0, 2.0]},
            "tf.math.add",
        ),
        ("TensorFlowOpLayer", {"node_def": {"op": "AddV2"}}, {}, "tf.AddV2"),
    ],
)
def test_operation_without_counterpart_is_named(
    class_name, config, kwargs, named
):
    node = {
        **layer(class_name, **config),
        "name": "op",
        "inbound_nodes": [["x", 0, 0, kwargs]],
    }

    with pytest.raises(ValueError, match="'op'") as error:
        migrate_config(functional(**node))

    assert named in str(error.value)


def test_mask_that_keras_3_ignores_is_told():
    config = config_in("recurrent.h5")
    layers = {x["name"]: x for x in config["config"]["layers"]}
    for found in layers.values():
        if found["class_name"] == "Embedding":
            found["config"]["mask_zero"] = True

    with pytest.warns(UserWarning, match="ignores the mask.*LSTM 'last'"):
        migrate_config(config)


@pytest.mark.parametrize(
    "config, error, words",
    [
        ("Dense", TypeError, "Received: 'Dense'"),
        ({"units": 3}, ValueError, "keys ['units']"),
        ({"class_name": "Dense", "config": [1]}, ValueError, "[1]"),
        ({"class_name": "Policy", "config": {}}, ValueError, "no policy|name"),
    ],
)
def test_what_is_no_config_is_refused(config, error, words):
    with pytest.raises(error) as raised:
        migrate_config(config)

    assert any(word in str(raised.value) for word in words.split("|"))


def test_wrong_decision_about_loss_scales_is_refused():
    with pytest.raises(ValueError, match="Allowed: 'drop', 'keep', 'error'"):
        migrate_config(DTYPE, on_loss_scale="ignore")
