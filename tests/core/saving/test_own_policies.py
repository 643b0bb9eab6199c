"""The dtype policies of models themselves, in files."""

import copy
import json
import pathlib
import zipfile

import keras
import pytest

import keras_policy_ext as kpe
from processes import run


def nested():
    """A Functional model with a Sequential and a Functional one in it."""
    first = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8)], name="first"
    )
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(8)(inputs)
    second = keras.Model(inputs, outputs, name="second")
    inputs = keras.Input((8,))
    return keras.Model(inputs, second(first(inputs)), name="outer")


def policies_of(model):
    return [
        each.dtype_policy
        for each in (model, *map(model.get_layer, ("first", "second")))
    ]


@pytest.mark.parametrize(
    ("saved", "then"),
    [
        ("mixed_bfloat16", "float32"),
        ("float32", "mixed_bfloat16"),
        ("float8/current_from_mixed_bfloat16", "float32"),
        pytest.param(
            "loss scale", "float32", marks=pytest.mark.extension("mixed")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("zipped", [True, False])
def test_models_have_the_policies_that_they_were_saved_with(
    saved, then, zipped, tmp_path
):
    path = tmp_path / ("model.keras" if zipped else "model")
    if saved == "loss scale":
        saved = kpe.LossScaleDTypePolicy("mixed_float16", 64)
    with kpe.policy_scope(saved):
        model = nested()
    model.save(path, zipped=zipped)
    with kpe.policy_scope(then):
        loaded = kpe.load_model(path)
    assert policies_of(loaded) == policies_of(model) == [kpe.get(saved)] * 3


@pytest.mark.extension("mixed")
def test_a_loaded_model_scales_its_loss_if_the_saved_one_did(tmp_path):
    with kpe.policy_scope("mixed_float16"):
        model = nested()
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert kpe.dtype_policy().name == "float32"
    for each in (model, loaded):
        each.compile("sgd", "mse")
        assert hasattr(each.optimizer, "inner_optimizer")


def test_a_copy_of_a_converted_model_has_its_policies():
    with kpe.policy_scope("mixed_bfloat16"):
        model = nested()
    kpe.convert(model)
    assert policies_of(copy.deepcopy(model)) == policies_of(model)


@pytest.mark.full
def test_keras_alone_loads_the_file(tmp_path):
    with kpe.policy_scope("mixed_bfloat16"):
        model = nested()
    model.save(tmp_path / "model.keras")
    code = """
import keras, sys
model = keras.saving.load_model(sys.argv[1])
assert model.get_layer("first").layers[0].compute_dtype == "bfloat16"
assert "keras_policy_ext" not in sys.modules
"""
    run(keras.backend.backend(), code, tmp_path / "model.keras")


def rewritten(path, metadata):
    """The file, with other metadata; None for none."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files.pop("metadata.json")
    if metadata is not None:
        files["metadata.json"] = metadata
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.fixture
def path(tmp_path):
    with kpe.policy_scope("mixed_bfloat16"):
        model = nested()
    path = pathlib.Path(tmp_path) / "model.keras"
    model.save(path)
    return path


@pytest.mark.parametrize("metadata", [None, "{}", "[]"])
def test_a_file_that_says_nothing_gives_the_global_policy(path, metadata):
    rewritten(path, metadata)
    assert kpe.load_model(path).dtype_policy.name == "float32"


def test_policies_of_other_models_are_not_taken(path):
    said = [["other", keras.dtype_policies.serialize(kpe.get("float16"))]]
    text = json.dumps({"keras_policy_ext": {"dtype_policies": said}})
    rewritten(path, text)
    assert kpe.load_model(path).dtype_policy.name == "float32"


@pytest.mark.parametrize(
    "metadata",
    [
        "{",
        "[" * 100_000,
        '{"keras_policy_ext": 3}',
        '{"keras_policy_ext": {"dtype_policies": 3}}',
        '{"keras_policy_ext": {"dtype_policies": [["outer", "a"]]}}',
        '{"keras_policy_ext": {"dtype_policies": [["outer", {}]]}}',
    ],
    ids=["cut", "deep", "number", "no list", "no config", "empty"],
)
def test_damaged_metadata_is_refused(path, metadata):
    rewritten(path, metadata)
    with pytest.raises(ValueError, match=r"cannot be read.*metadata\.json"):
        kpe.load_model(path)


@keras.saving.register_keras_serializable("own_policies")
class MakesItsLayers(keras.layers.Layer):
    """A block that makes plain layers in its constructor."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization()
        self.wide = keras.layers.LayerNormalization(dtype="float32")
        self.dense = keras.layers.Dense(4)

    def build(self, shape):
        for layer in (self.norm, self.wide, self.dense):
            layer.build(shape)

    def call(self, x):
        return self.dense(self.wide(self.norm(x)))


@pytest.mark.parametrize("change", [kpe.convert, kpe.freeze])
@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_plain_layers_of_a_block_keep_their_policies(change, other, tmp_path):
    with kpe.policy_scope("mixed_bfloat16"):
        inputs = keras.Input((4,))
        block = MakesItsLayers()
        model = keras.Model(inputs, block(inputs))
    change(model)
    model.save(tmp_path / "model.keras")
    with kpe.policy_scope(other):
        loaded = kpe.load_model(tmp_path / "model.keras")
        assert kpe.dtype_policy().name == other
    again = loaded.get_layer(block.name)
    assert again.dense.quantization_mode == "float8"
    assert again.dense.compute_dtype == "bfloat16"
    assert again.norm.dtype_policy.name == "mixed_bfloat16"
    assert again.wide.dtype_policy.name == "float32"
    assert {v.dtype for v in again.norm.weights} == {"float32"}


def test_layers_that_were_never_converted_keep_their_float8_policies(tmp_path):
    with kpe.policy_scope("mixed_float8"):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, MakesItsLayers(name="block")(inputs))
    model.save(tmp_path / "model.keras")
    with kpe.policy_scope("float32"):
        block = kpe.load_model(tmp_path / "model.keras").get_layer("block")
    policy = model.get_layer("block").dense.dtype_policy
    assert isinstance(policy, kpe.Float8DTypePolicy)
    assert block.dense.dtype_policy == block.norm.dtype_policy == policy
    assert block.wide.dtype_policy.name == "float32"
