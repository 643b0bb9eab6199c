"""Why `ext/export/_keras/` is needed."""

import inspect

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import _keras as keras_hub
from keras_policy_ext.ext.export import safetensors_files
from keras_policy_ext.ext.export._keras.symbolic import Symbols

hub = pytest.importorskip(
    "keras_hub", reason="KerasHub is installed by `tox run -e export-torch`"
)

FAMILIES = [
    "GPT2Backbone",
    "Gemma3Backbone",
    "Gemma4Backbone",
    "GemmaBackbone",
    "Llama3Backbone",
    "MistralBackbone",
    "Qwen3_5Backbone",
    "QwenBackbone",
]


def backbone():
    return hub.models.Llama3Backbone(
        vocabulary_size=8,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=12,
    )


@pytest.mark.full
def test_the_families_that_are_written():
    assert keras_hub.families() == FAMILIES
    assert keras_hub.family(backbone()) == "Llama3Backbone"

    class Mine(hub.models.Llama3Backbone):
        pass

    mine = Mine(**{**SIZES, "num_layers": 1})
    assert keras_hub.family(mine) == "Llama3Backbone"
    assert keras_hub.family(keras.layers.Dense(2)) is None


SIZES = {
    "vocabulary_size": 8,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 8,
    "intermediate_dim": 12,
}


def test_a_map_of_stand_ins_is_that_of_the_model():
    model = backbone()
    symbols = Symbols()
    found = keras_hub.weight_map(model, symbols)
    exporter = keras_hub._exporter()
    stock = exporter.MODEL_EXPORTERS["Llama3Backbone"](
        model, include_lm_head=True
    )
    assert found.keys() == stock.keys()
    for name, expected in stock.items():
        got = symbols.evaluate(found[name], keras.ops.convert_to_numpy)
        np.testing.assert_array_equal(
            got, keras.ops.convert_to_numpy(expected), err_msg=name
        )


def test_configs_are_dictionaries_with_a_kind_of_model():
    config = keras_hub.config(backbone())
    assert config["model_type"] == "llama"
    assert config["hidden_size"] == 8


@pytest.mark.parametrize("of_a_task", [False, True])
def test_stock_export_of_a_frozen_model_writes_its_numbers(of_a_task, tmp_path):
    """In floats: `kpe.export` is what writes them in one byte."""
    model = backbone()
    if of_a_task:
        model = hub.models.Llama3CausalLM(model, preprocessor=None)
    kpe.freeze(model)
    model.export_to_transformers(tmp_path / "frozen")
    kpe.thaw(model)
    model.export_to_transformers(tmp_path / "thawed")
    frozen, thawed = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("frozen", "thawed")
    )
    slots, _ = safetensors_files.read(tmp_path / "frozen/model.safetensors")
    assert {slot.dtype for slot in slots.values()} == {"F32"}
    assert frozen == thawed


def test_the_loader_of_converters_is_asked_for_little():
    """What `loading._Asked` has; more fails here first."""
    loader = pytest.importorskip(
        "keras_hub.src.utils.transformers.safetensor_utils"
    ).SafetensorLoader
    signature = inspect.signature(loader.port_weight)
    assert list(signature.parameters) == [
        "self",
        "keras_variable",
        "hf_weight_key",
        "hook_fn",
    ]


def test_a_backbone_is_made_of_a_config(tmp_path):
    config = keras_hub.config(backbone())
    converter = keras_hub.Converter(tmp_path, {**config, "rms_norm_eps": 1e-3})
    made = converter.make_backbone("bfloat16")
    assert made.compute_dtype == "bfloat16"
    # KerasHub's converter leaves this one at its default.
    assert made.layer_norm_epsilon == 1e-3
    task = keras_hub.language_model_of(made)
    assert isinstance(task, hub.models.Llama3CausalLM)
