"""Compile models that Keras loads without compiling them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext._keras.calls import in_place_of


@contextlib.contextmanager
def compiled_as_saved() -> Iterator[None]:
    """In the block, compile loaded models whose class has its own `compile`.

    Keras does not compile such a model (3.12 to 3.15), and warns. A task of
    KerasHub then has the default optimizer of its class. The file has the
    arguments with which `keras.Model.compile` was called. It is called with
    them again.
    """

    def compiled(stock: Any, model: Any, config: dict[str, Any]) -> None:
        if type(model).compile is keras.Model.compile:
            stock(model, config)
            return
        found = keras.saving.deserialize_keras_object(config)
        keras.Model.compile(model, **found)
        if model.built:
            model.optimizer.build(model.trainable_variables)

    with in_place_of("compile_from_config", compiled, keras.Model):
        yield
