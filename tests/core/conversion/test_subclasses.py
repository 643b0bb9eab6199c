"""Subclasses of stock layers, and layers of the user, into float8."""

import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from small_models import POLICY, assert_same, weights
from steps import normal, numpy, state_of


@keras.saving.register_keras_serializable("test_convert")
class Doubled(keras.layers.Dense):
    float8_calls_super = True

    def call(self, inputs, training=None):
        return super().call(2 * inputs, training=training)


class Renamed(keras.layers.Dense):
    """A Dense that changes nothing that is computed."""


class OtherProduct(keras.layers.Dense):
    def call(self, inputs):
        return ops.matmul(inputs, ops.tanh(self.kernel))


class SaysNothing(keras.layers.Dense):
    def call(self, inputs):
        return super().call(2 * inputs)


class SaidByItsBase(Doubled):
    """What its base says does not hold for a `call` of its own."""

    def call(self, inputs):
        return ops.matmul(inputs, ops.tanh(self.kernel))


class OtherKernel(keras.layers.Dense):
    float8_calls_super = True

    @property
    def kernel(self):
        return ops.tanh(self._kernel)


def test_subclasses_are_converted_unless_they_compute_something_else():
    inputs = keras.Input((6,))
    x = inputs
    layers = [Doubled(6), Renamed(6), OtherProduct(6), OtherKernel(6)]
    layers += [SaysNothing(6), SaidByItsBase(6)]
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, x)
    report = kpe.convert(model, POLICY)
    assert [e.class_name for e in report.converted] == ["Doubled", "Renamed"]
    reasons = {e.class_name: e.reason for e in report.skipped}
    assert "a `call` of its own" in reasons["OtherProduct"]
    assert "a `kernel` of its own" in reasons["OtherKernel"]
    assert "`float8_calls_super = True`" in reasons["SaysNothing"]
    assert "a `call` of its own" in reasons["SaidByItsBase"]
    assert isinstance(layers[0], Doubled)
    assert layers[0].quantization_mode == "float8"
    kpe.revert(model)
    assert [type(layer) for layer in layers] == [
        Doubled,
        Renamed,
        OtherProduct,
        OtherKernel,
        SaysNothing,
        SaidByItsBase,
    ]


def test_a_converted_subclass_goes_on_doing_what_it_adds():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Doubled(6, use_bias=False)(inputs))
    plain = keras.Model(inputs, keras.layers.Dense(6, use_bias=False)(inputs))
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        kpe.convert(each, POLICY)
    x = normal(3, 6)
    # Twice the inputs have twice the scale, and the same codes.
    np.testing.assert_array_equal(numpy(model(x)), 2 * numpy(plain(x)))


def test_files_name_the_subclass_itself(tmp_path):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Doubled(6)(inputs))
    kpe.convert(model, POLICY)
    config = keras.saving.serialize_keras_object(model.layers[1])
    assert config["registered_name"] == "test_convert>Doubled"
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[1]) is Doubled
    assert_same(weights(model), weights(loaded))


def test_user_layers_with_the_mixin_follow_and_go_back():
    class Own(kpe.layers.Float8Mixin, keras.layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight(shape=(6, 6), float8=False)
            self.mix = self.add_weight(shape=(6, 6))

        def call(self, x):
            return self.float8_matmul(x, self.mix)

    inputs = keras.Input((6,))
    own = Own()
    model = keras.Model(inputs, own(inputs))
    kpe.convert(model, POLICY)
    assert type(own) is Own and own.quantization_mode == "float8"
    assert [v.path for v in own.float8_contracted] == [own.mix.path]
    assert state_of(own)["kernel"][1][0] == np.abs(numpy(own.mix)).max()
    kpe.revert(model)
    assert own.quantization_mode is None
    assert len(model.variables) == 2
