"""Transfer learning: the first layers of MobileNet, frozen, and a head."""

import keras
from keras import layers

from programs.data import JIT, fit, normal
from programs.data import predict as predicted

SIDE = 32


def make():
    keras.utils.set_random_seed(0)
    whole = keras.applications.MobileNet(
        (SIDE, SIDE, 3), alpha=0.25, include_top=False, weights=None
    )
    features = whole.get_layer("conv_pw_3_relu").output
    base = keras.Model(whole.inputs, features, name="base")
    base.trainable = False
    inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    x = base(x, training=False)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.2, seed=1)(x)
    outputs = layers.Dense(1)(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile=JIT,
    )
    return model


def pictures():
    x = 127.5 * (1 + normal(8, SIDE, SIDE, 3)).clip(0, 2)
    return x.astype("float32"), (x[:, 0, 0, 0] > 127).astype("float32")


def train(model):
    return fit(model, *pictures())


def predict(model):
    return predicted(model, pictures()[0])
