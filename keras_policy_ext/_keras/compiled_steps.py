"""Compiled training steps, and the logs that they return."""

from typing import Any

import keras

from keras_policy_ext._keras import walking

# Attributes of models that keep a compiled step; the last one is KerasHub's.
STEPS = (
    "train_function",
    "test_function",
    "predict_function",
    "generate_function",
)


class OwnReturnedLogs:
    """A model that says which logs `train_on_batch` returns as a list.

    Keras lists whatever `train_step` logs (`_flatten_metrics_in_order`,
    keras 3.0 to 3.15). Where it no longer asks, all logs are returned.
    """

    def returned_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The logs to return; all, unless a subclass leaves some out."""
        return logs

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        above: Any = super()
        return above._flatten_metrics_in_order(self.returned_logs(logs))


def forget_compiled_functions(model: keras.Model) -> None:
    """Let a model trace its training, test and prediction steps anew.

    As `compile` does, which would also ask for the loss and the metrics
    again (keras 3.0 to 3.15). KerasHub's models that generate keep one step
    more, which `compile` sets to None too (keras_hub 0.32). A `fit` that is
    under way, and has called back, makes no training step by itself.

    On TensorFlow a model tracks a step as long as the attribute is there, and
    the step keeps the weights that it reads.
    """
    trains = getattr(model, "train_function", None) is not None
    generates = hasattr(model, "make_generate_function")
    for name in STEPS if generates else STEPS[:-1]:
        if hasattr(model, name):
            if getattr(model, name) is not None:
                delattr(model, name)
            setattr(model, name, None)
    if trains:
        model.make_train_function()


def forget_gone_layers(model: keras.Model) -> None:
    """Let go the layers that were in a model when it was compiled.

    It keeps for each whether it was trainable (`_compiled_trainable_state`,
    keras 3.15), and with a float8 state the kernel. Where that is gone, so are
    they. Expires when Keras keeps no layers there.
    """
    kept = getattr(model, "_compiled_trainable_state", None)
    if isinstance(kept, dict):
        for layer in kept.keys() - set(walking.layers_within(model)):
            del kept[layer]
