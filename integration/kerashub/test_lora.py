"""Adapters of KerasHub beside float8 kernels."""

import hub_models as hub
import numpy as np
import pytest

import keras_policy_ext as kpe


@pytest.mark.parametrize("convert_first", [True, False])
def test_adapters_train_beside_float8(convert_first, tmp_path):
    model = hub.task("gpt2", "mixed_bfloat16")
    steps = [kpe.convert, lambda m: m.backbone.enable_lora(2)]
    for step in steps if convert_first else reversed(steps):
        step(model)
    trainable = {v.path for v in model.trainable_variables}
    assert {p.split("/")[-2] for p in trainable if "float8" not in p} == {
        "query",
        "value",
    }
    before = hub.arrays(model, state=False)
    losses = hub.train(hub.compiled(model, 0.05), *hub.data("gpt2"), 6)
    assert losses[-1] < losses[0]
    after = hub.arrays(model, state=False)
    changed = {p for p in before if (before[p] != after[p]).any()}
    adapters = {p for p in before if "lora_kernel" in p}
    assert len(adapters) == 8
    assert adapters <= changed
    assert not {p for p in changed if p.endswith("/kernel")}

    model.backbone.save_lora_weights(tmp_path / "a.lora.h5")
    for layer in hub.layers_of(model):
        if getattr(layer, "lora_enabled", False):
            layer.lora_kernel_a.assign(np.zeros(layer.lora_kernel_a.shape))
            layer.lora_kernel_b.assign(np.zeros(layer.lora_kernel_b.shape))
    model.backbone.load_lora_weights(tmp_path / "a.lora.h5")
    hub.assert_same_arrays(hub.arrays(model, state=False), after)
