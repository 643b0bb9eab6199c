"""Why `ext/replay/_keras/` is needed."""

import keras
import pytest

from keras_policy_ext.ext.replay._keras import compiled_as_saved


class OwnCompile(keras.Sequential):
    def compile(self, **kwargs):
        super().compile(**kwargs)


def test_keras_does_not_compile_a_model_with_its_own_compile(tmp_path):
    model = OwnCompile([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    custom = {"OwnCompile": OwnCompile}

    def loaded():
        return keras.saving.load_model(tmp_path / "model.keras", custom)

    with pytest.warns(UserWarning, match="compile.* is custom"):
        assert not hasattr(loaded(), "optimizer")
    with compiled_as_saved():
        found = loaded()
    assert isinstance(found.optimizer, keras.optimizers.Adam) and found.compiled
    assert len(found.optimizer.variables) == len(model.optimizer.variables)
