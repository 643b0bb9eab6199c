"""Files and presets of models in float8."""

import copy

import hub_models as hub
import keras
import keras_hub
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.policies.of_layers import is_frozen

POLICY = "float8/4_from_float32"


@pytest.fixture(scope="module")
def trained():
    """A language model, partly in float8, after two steps."""
    model = hub.compiled(hub.task("gpt2", "mixed_bfloat16"))
    hub.randomize(model)
    kpe.convert(model, POLICY, exclude="layer_1/.*/value")
    hub.train(model, *hub.data("gpt2"), 2)
    return model


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.filterwarnings("ignore:.*`compile\\(\\)` method is custom")
def test_keras_loads_all_weights_and_load_model_everything(trained, tmp_path):
    path = tmp_path / "model.keras"
    trained.save(path)
    plain = keras.saving.load_model(path)
    assert not hub.followed(plain)
    assert hub.dtypes(plain) == hub.dtypes(trained)
    hub.assert_same_arrays(hub.arrays(plain), hub.arrays(trained, state=False))
    kpe.convert(plain)
    assert hub.followed(plain) == hub.followed(trained)

    loaded = kpe.load_model(path)
    assert_same(loaded, trained)
    inputs, _ = hub.data("gpt2")
    np.testing.assert_array_equal(
        loaded.predict_on_batch(inputs), trained.predict_on_batch(inputs)
    )


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.filterwarnings("ignore:.*`compile\\(\\)` method is custom")
def test_optimizer_is_loaded_once_the_model_is_compiled(trained, tmp_path):
    path = tmp_path / "model.keras"
    trained.save(path)
    loaded = hub.compiled(kpe.load_model(path))
    loaded.optimizer.build(loaded.trainable_variables)
    kpe.load_weights(loaded, path, as_saved=True)
    pairs = zip(
        loaded.optimizer.variables, trained.optimizer.variables, strict=True
    )
    assert int(loaded.optimizer.iterations) == 2
    for got, expected in pairs:
        np.testing.assert_array_equal(hub.numpy(got), hub.numpy(expected))


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_load_model_of_other_families(name, tmp_path):
    model = hub.task(name, "mixed_bfloat16")
    kpe.convert(model, POLICY)
    model.save(tmp_path / "model.keras")
    assert_same(kpe.load_model(tmp_path / "model.keras"), model)


@pytest.mark.parametrize(
    ("size", "file"),
    [(10, "model.weights.h5"), (1e-5, "model.weights.json")],
    ids=["one file", "shards"],
)
def test_preset_of_a_converted_backbone(size, file, trained, tmp_path):
    saved = trained.backbone
    saved.save_to_preset(str(tmp_path), max_shard_size=size)
    load = keras_hub.models.Backbone.from_preset
    plain = load(str(tmp_path))
    hub.assert_same_arrays(hub.arrays(plain), hub.arrays(saved, state=False))
    assert plain.compute_dtype == "float32"  # The global policy: KerasHub's.

    loaded = load(str(tmp_path), dtype="mixed_bfloat16")
    kpe.load_weights(loaded, tmp_path / file, as_saved=True)
    assert_same(loaded, saved)
    assert loaded.dtype_policy == saved.dtype_policy


def test_preset_of_a_converted_task_says_its_policy(trained, tmp_path):
    trained.save_to_preset(str(tmp_path))
    load = keras_hub.models.CausalLM.from_preset
    loaded = load(str(tmp_path), preprocessor=None)
    hub.assert_same_arrays(hub.arrays(loaded), hub.arrays(trained, state=False))
    assert hub.dtypes(loaded) == hub.dtypes(trained)
    kpe.load_weights(
        loaded.backbone, tmp_path / "model.weights.h5", as_saved=True
    )
    assert_same(loaded, trained)


def test_preset_of_a_backbone_made_with_a_policy(tmp_path):
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", rules=[("x", None)])
    saved = hub.llama(policy)
    saved.save_to_preset(str(tmp_path))
    for dtype, expected in ((None, "float32"), (policy, policy)):
        loaded = keras_hub.models.Backbone.from_preset(
            str(tmp_path), dtype=dtype
        )
        hub.assert_same_arrays(hub.arrays(loaded), hub.arrays(saved))
        assert loaded.dtype_policy == kpe.get(expected)


def assert_same(got, expected):
    assert hub.followed(got) == hub.followed(expected)
    assert hub.dtypes(got) == hub.dtypes(expected)
    hub.assert_same_arrays(hub.arrays(got), hub.arrays(expected))
    names = [
        [type(x).__name__ for x in hub.layers_of(m)] for m in (got, expected)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_frozen_in_part_reverted_widened_copied_and_loaded(name, tmp_path):
    model = hub.task(name)
    inputs, _ = hub.data(name)
    kpe.freeze(model, include="attention|embedding", activations="dynamic")
    before, policy = hub.numpy(model(inputs)), model.backbone.dtype_policy
    kpe.convert(model)
    assert model.backbone.dtype_policy != policy
    report = kpe.revert(model)
    assert report.converted and report.skipped
    assert model.backbone.dtype_policy == policy
    np.testing.assert_array_equal(hub.numpy(model(inputs)), before)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert kpe.widen(model)
    for each in (model, copy.deepcopy(model), loaded):
        np.testing.assert_array_equal(hub.numpy(each(inputs)), before)
        frozen = [x for x in hub.layers_of(each) if is_frozen(x)]
        assert len(frozen) == len(report.skipped)
