"""Why `_keras/keras_hub.py` is needed. Run by tox with KerasHub."""

import keras
import pytest

from keras_policy_ext._keras import built_layers, keras_hub

hub = pytest.importorskip(
    "keras_hub", reason="KerasHub is installed by `tox run -e kerashub-jax`"
)


def backbone():
    """Two layers in bfloat16, and the model of them."""
    first = keras.layers.Dense(2, name="first", dtype="bfloat16")
    query = keras.layers.Dense(2, name="query", dtype="bfloat16")
    x = keras.Input((2,))
    model = hub.models.Backbone(x, query(first(x)), dtype="bfloat16")
    return model, first, query


def test_a_quantized_backbone_says_nothing_of_its_other_layers():
    model, _, query = backbone()
    assert model.get_config()["dtype"]["config"]["name"] == "bfloat16"
    query.quantize("int8")
    config = model.get_config()["dtype"]["config"]
    assert config["default_policy"] is None
    assert list(config["policy_map"]) == [query.path]
    assert keras_hub.writes_map_of_quantized_layers(model)


def test_a_backbone_finds_its_adapters_by_the_number_of_the_layer(tmp_path):
    model, first, _ = backbone()
    model.enable_lora(1, target_layer_names=["query"])
    path = str(tmp_path / "adapters.lora.h5")
    model.save_lora_weights(path)
    inner = keras.layers.Dense(1)
    inner.build((None, 1))
    with built_layers.unlocked(first):
        first.inner = inner
    with pytest.raises(AttributeError, match="lora_kernel_a"):
        model.save_lora_weights(path)
    keras_hub.count_adapted_layers_again(model)
    model.save_lora_weights(path)
    model.load_lora_weights(path)
