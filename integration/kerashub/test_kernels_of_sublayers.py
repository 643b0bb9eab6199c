"""Gemma 4, whose blocks multiply with kernels of layers they never call."""

import hub_models as hub
import keras
import keras_hub
import numpy as np
import pytest

import keras_policy_ext as kpe

LENGTH, BATCH = 8, 2
DELAYED = "float8/4_from_float32"


def gemma4(dtype=None, **options):
    keras.utils.set_random_seed(0)
    model = keras_hub.models.Gemma4Backbone(
        vocabulary_size=hub.TOKENS,
        image_size=16,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=16,
        sliding_window_size=8,
        vision_encoder=None,
        dtype=dtype,
        name="gemma4",
        **options,
    )
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            fan = np.prod(variable.shape[:-1])
            variable.assign(rng.normal(size=variable.shape) / np.sqrt(fan))
    return model


MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 2,
    "expert_intermediate_dim": 16,
    "num_experts_per_token": 2,
}


def data():
    rng = np.random.default_rng(0)
    shape = (BATCH, LENGTH)
    return {
        "token_ids": rng.integers(0, hub.TOKENS, shape).astype("int32"),
        "padding_mask": np.ones(shape, "int32"),
        "position_ids": np.tile(np.arange(LENGTH, dtype="int32"), (BATCH, 1)),
    }


def blocks(model):
    return [
        layer
        for layer in hub.layers_of(model)
        if type(layer).__name__ == "Gemma4TextDecoderBlock"
    ]


@pytest.mark.parametrize("options", [{}, MIXTURE], ids=["dense", "mixture"])
def test_blocks_multiply_in_float8_train_and_come_back(options, tmp_path):
    model, inputs = gemma4(**options), data()
    before = hub.numpy(model(inputs))
    classes = [type(layer) for layer in hub.layers_of(model)]

    report = kpe.convert(model, DELAYED)

    found = [e for e in report.converted if "DecoderBlock" in e.class_name]
    assert len(found) == 2
    for entry in found:
        assert entry.multiplications == 3 * 16 * 32  # Of a token.
        assert not entry.plain_multiplications
    idle = [e.path for e in report.skipped if "its kernel" in e.reason]
    assert len(idle) == 6 and all("ffw" in path for path in idle)
    got = hub.numpy(model(inputs))
    assert 1e-3 < np.sqrt(np.mean((got - before) ** 2)) / np.std(before) < 0.5

    model.compile("sgd", "mse", jit_compile=keras.backend.backend() == "jax")
    for _ in range(3):
        model.train_on_batch(inputs, np.zeros(before.shape))
    for block in blocks(model):
        assert len(block.float8_contracted) == 3
        for state in block.float8_state.matrices:
            assert np.all(hub.numpy(state).max(axis=1) > 0)

    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    hub.assert_same_arrays(hub.arrays(loaded), hub.arrays(model))
    np.testing.assert_array_equal(
        hub.numpy(loaded(inputs)), hub.numpy(model(inputs))
    )
    trained = hub.arrays(model, state=False)
    for each in (model, loaded):
        kpe.revert(each)
        assert [type(layer) for layer in hub.layers_of(each)] == classes
        assert not hub.followed(each)
        hub.assert_same_arrays(hub.arrays(each), trained)


def test_frozen_kernels_are_read_as_numbers():
    model, inputs = gemma4(), data()
    plain = kpe.freeze(gemma4())
    kpe.convert(model, DELAYED)
    report = kpe.freeze(model)
    paths = sorted(entry.path for entry in report.converted)
    assert paths == sorted(entry.path for entry in plain.converted)
    assert sum("ffw" in path for path in paths) == 6
    assert not any(hasattr(x, "float8_contracted") for x in blocks(model))
    frozen = hub.numpy(model(inputs))
    kpe.thaw(model)
    thawed = hub.numpy(model(inputs))
    np.testing.assert_allclose(frozen, thawed, rtol=1e-4, atol=1e-5)
