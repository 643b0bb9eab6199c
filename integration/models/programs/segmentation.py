"""Segmentation as in `unet`, with probabilities in place of logits."""

from programs import unet

# A softmax over channels and the cross-entropy of images, in stock Keras.
KERAS_FAILS = {"torch": "grad_input must be contiguous"}

train, predict = unet.train, unet.predict


def make():
    return unet.make("softmax")
