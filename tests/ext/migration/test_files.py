"""Every file of tf_keras gives the model that tf_keras had."""

import os

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import migration
from legacy_files import (
    FILES,
    WITHOUT_CODE,
    error_allowed,
    expected,
    is_loss_scaler,
    load,
    loaded,
    predictions,
    saved_weights,
    weights_by_layer,
)

TRAINED = [name for name in WITHOUT_CODE if "next" in expected(name)]
WITH_SLOTS = [name for name in TRAINED if name != "recurrent.keras"]
SLOTS = {
    "m": "momentum",
    "v": "velocity",
    "velocity": "velocity",
    "momentum": "momentum",
}


@pytest.mark.full_except("recurrent.keras", "tensorflow_2_3.h5")
@pytest.mark.parametrize("name", WITHOUT_CODE)
@pytest.mark.slow_except(
    "sequential_bfloat16.keras",
    "nested.keras",
    "functional_float16.h5",
    "sequential_float16.keras",
)
def test_predictions_are_those_of_tf_keras(name):
    model = loaded(name)
    if any(stops_masks(layer) for layer in model.layers):
        pytest.skip(f"Keras {keras.__version__} ends masks at recurrent layers")

    values = predictions(model, name)

    assert values.keys() == expected(name)["predictions"].keys()
    for key, value in expected(name)["predictions"].items():
        error = np.abs(values[key] - value).max()
        assert error <= error_allowed(model, value), key


def stops_masks(layer):
    """Whether it takes a mask and hands none on, as no layer of tf_keras."""
    return isinstance(layer, keras.layers.RNN) and not layer.supports_masking


@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_weights_are_equal_to_the_bit(name):
    weights = weights_by_layer(loaded(name))
    saved = saved_weights(name)

    assert weights.keys() == saved.keys()
    for key, value in saved.items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)


@pytest.mark.parametrize("ending", ["h5", "keras"])
def test_layers_have_the_policies_of_the_file(ending):
    def names(model):
        layers = [x for x in loaded(f"{model}.{ending}").layers if x.weights]
        return {x.name: x.dtype_policy.name for x in layers}

    assert names("functional_float16") == {
        "block_conv": "mixed_float16",
        "shortcut": "mixed_float16",
        "norm": "mixed_float16",
        "logits": "float32",
    }
    assert set(names("sequential_bfloat16").values()) == {"mixed_bfloat16"}
    assert set(names("recurrent").values()) == {"float32"}


def test_frozen_and_shared_layers_stay_so():
    model = loaded("nested.h5")
    body, gate = model.get_layer("body"), model.get_layer("gate")

    assert gate.trainable_weights == []
    assert len(model.trainable_weights) == len(body.weights) == 4


def saved_slots(name):
    """Name of the slot and bits of every slot in the file, sorted."""
    slots = []
    for path, value in expected(name)["slots"].items():
        parts = path.removesuffix(":0").split("/")
        found = [SLOTS[part] for part in parts if part in SLOTS]
        if found:
            slots.append((found[0], value.tobytes()))
    return sorted(slots)


def restored_slots(optimizer):
    slots = []
    for variable in optimizer.variables:
        slot = variable.name.rsplit("_", 1)[-1]
        if slot in SLOTS.values():
            value = ops.convert_to_numpy(variable)
            slots.append((slot, value.tobytes()))
    return sorted(slots)


def inner(optimizer):
    return optimizer.inner_optimizer if is_loss_scaler(optimizer) else optimizer


@pytest.mark.parametrize("name", WITH_SLOTS)
def test_iterations_and_slots_are_restored_to_the_bit(name):
    optimizer = inner(loaded(name).optimizer)

    assert int(optimizer.iterations) == 3
    assert saved_slots(name)
    assert restored_slots(optimizer) == saved_slots(name)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "functional_float16.keras",
        "recurrent.h5",
        "sequential_bfloat16.h5",
        "tensorflow_2_3.h5",
    ],
)
@pytest.mark.slow_except("tensorflow_2_3.h5")
def test_next_update_is_that_of_tf_keras(name):
    model = load(name)
    variables = model.trainable_variables
    before = weights_by_layer(model)

    inner(model.optimizer).apply([0.5 * v.value + 0.125 for v in variables])

    changed = 0
    for key, value in saved_weights(name, "next").items():
        weight = weights_by_layer(model)[key]
        # The update has some ten operations in float32; the weight rounds.
        error = 20 * 2**-24 * np.abs(value - before[key]).max()
        error += 2**-24 * np.abs(value).max()
        np.testing.assert_allclose(weight, value, 0, error, err_msg=key)
        changed += not np.array_equal(weight, before[key])
    assert changed == len(variables)


def test_hyperparameters_are_restored():
    optimizer = loaded("sequential_bfloat16.h5").optimizer
    decayed = loaded("recurrent.h5").optimizer

    assert isinstance(optimizer, keras.optimizers.RMSprop)
    assert optimizer.momentum == 0.5
    assert optimizer.clipnorm == 1.0
    assert float(optimizer.learning_rate) == pytest.approx(0.01 * 0.5**0.3)
    # Of OptimizerV2: rate / (1 + decay · iterations).
    assert float(decayed.learning_rate) == pytest.approx(0.05 / 1.3)


def test_loss_and_metrics_are_restored():
    model = loaded("functional_float16.h5")
    images = expected("functional_float16.h5")["inputs"]["image"]

    logs = model.evaluate(
        images, np.array([0, 1, 0, 1]), verbose=0, return_dict=True
    )

    assert logs.keys() == {"loss", "accuracy"}
    assert np.isfinite(logs["loss"])


def test_missing_optimizer_state_is_told():
    # tf_keras saved none of OptimizerV2 in archives.
    with pytest.warns(UserWarning, match="no state of the optimizer"):
        model = migration.load_legacy_model(FILES / "recurrent.keras")

    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "name, settings",
    [
        ("functional_float16.h5", (True, 8.0, 2)),
        ("functional_float16.keras", (True, 8.0, 2)),
        ("sequential_float16.keras", (True, 2.0**15, 2000)),
        ("tensorflow_2_3.h5", (True, 64.0, 5)),
    ],
)
def test_loss_scale_is_kept(name, settings):
    optimizer = loaded(name).optimizer

    assert isinstance(optimizer, kpe.mixed_precision.LossScaleOptimizer)
    assert settings == (
        optimizer.dynamic,
        optimizer.initial_scale,
        optimizer.dynamic_growth_steps,
    )
    assert float(optimizer.loss_scale) == settings[1]


def test_loss_scale_of_a_policy_is_kept():
    first, last = loaded("tensorflow_2_3.h5").layers

    assert first.dtype_policy == kpe.LossScaleDTypePolicy("mixed_float16", 128)
    assert last.dtype_policy == keras.DTypePolicy("float32")


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_loss_scale_is_dropped_by_default_with_a_warning(policy):
    with (
        kpe.policy_scope(policy),
        pytest.warns(UserWarning, match="loss scale was dropped.*128"),
    ):
        model = migration.load_legacy_model(FILES / "tensorflow_2_3.h5")

    assert not is_loss_scaler(model.optimizer)
    assert model.layers[0].dtype_policy == keras.DTypePolicy("mixed_float16")


def test_loss_scale_is_an_error_on_request():
    path = FILES / "tensorflow_2_3.h5"

    with pytest.raises(ValueError, match=r"FixedLossScale.*'dense'.*compile"):
        migration.load_legacy_model(path, on_loss_scale="error")


def test_uncompiled_loading_meets_no_scale_of_an_optimizer():
    model = migration.load_legacy_model(
        FILES / "functional_float16.h5", on_loss_scale="error", compile=False
    )

    assert not model.compiled


@pytest.mark.parametrize(
    "name", ["tensorflow_2_3.h5", "sequential_float16.keras"]
)
def test_file_is_not_touched(name, tmp_path):
    path = tmp_path / name
    path.write_bytes((FILES / name).read_bytes())
    path.chmod(0o444)
    before = path.stat().st_mtime_ns

    migration.load_legacy_model(path, "keep")

    assert path.read_bytes() == (FILES / name).read_bytes()
    assert path.stat().st_mtime_ns == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.full
@pytest.mark.parametrize("name", ["nested.keras", "recurrent.h5"])
def test_model_is_one_of_keras_3_from_now_on(name, tmp_path):
    path = tmp_path / "new.keras"
    model = loaded(name)

    model.save(path)
    again = keras.saving.load_model(path)

    assert weights_by_layer(again).keys() == weights_by_layer(model).keys()
    for key, value in predictions(model, name).items():
        np.testing.assert_array_equal(predictions(again, name)[key], value)
