"""Segmentation as in `unet`, with probabilities in place of logits."""

import keras

from programs import unet

# A softmax over channels and the cross-entropy of images, in stock Keras: 3.14
# and 3.15 fail, 3.12 and 3.13 do not.
KERAS_FAILS = {"torch": "grad_input must be contiguous"}
if keras.__version__ < "3.14":
    KERAS_FAILS = {}

train, predict = unet.train, unet.predict


def make():
    return unet.make("softmax")
