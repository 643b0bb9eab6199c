"""Image-model zoo: residual and inverted-bottleneck blocks by functions."""

import keras
from keras import layers

from programs.data import JIT, fit, images
from programs.data import predict as predicted


def residual(x, filters, name):
    shortcut = layers.Conv2D(filters, 1, name=f"{name}_0_conv")(x)
    shortcut = layers.BatchNormalization(name=f"{name}_0_bn")(shortcut)
    x = layers.Conv2D(filters, 3, padding="same", name=f"{name}_1_conv")(x)
    x = layers.BatchNormalization(name=f"{name}_1_bn")(x)
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.Activation("relu", name=f"{name}_out")(x)


def convnext(x, name):
    width = x.shape[-1]
    y = layers.DepthwiseConv2D(3, padding="same", name=f"{name}_depthwise")(x)
    y = layers.LayerNormalization(name=f"{name}_norm")(y)
    y = layers.Dense(2 * width, name=f"{name}_expand")(y)
    y = layers.Activation("gelu", name=f"{name}_gelu")(y)
    y = layers.Dense(width, name=f"{name}_project")(y)
    return layers.Add(name=f"{name}_add")([x, y])


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = layers.Rescaling(0.5)(inputs)
    x = residual(x, 4, "stage1")
    x = layers.MaxPooling2D(2)(x)
    x = convnext(x, "stage2")
    x = layers.GlobalAveragePooling2D(name="avg_pool")(x)
    outputs = layers.Dense(4, "softmax", name="predictions")(x)
    model = keras.Model(inputs, outputs, name="small_resnet")
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=JIT,
    )
    return model


def train(model):
    return fit(model, *images(channels=3))


def predict(model):
    return predicted(model, images(channels=3)[0])
