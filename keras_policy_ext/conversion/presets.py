"""Presets of KerasHub whose layers are frozen."""

from __future__ import annotations

import pathlib
from typing import Any

import keras

from keras_policy_ext import _input_files, _user_code
from keras_policy_ext.conversion import files, frozen_files, lost_float8
from keras_policy_ext.conversion.weight_files import WEIGHTS, PathLike

_SHARDED = "model.weights.json"
_CONFIGS = ("config.json", "metadata.json", "task.json", "preprocessor.json")
_OF_TASK = "task.weights.h5"


@_user_code.once
def load_preset(cls: Any, preset: PathLike, **options: Any) -> keras.Model:
    """`cls.from_preset(preset)`, with every layer frozen as it was saved.

    There is never more than one of the float kernels that KerasHub makes.

    Args:
        cls: A class of KerasHub, such as `keras_hub.models.CausalLM` or
            `keras_hub.models.Backbone`.
        preset: A local folder, as `save_to_preset` writes it.
        **options: As for `cls.from_preset`, such as `dtype`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there are no weights in such a folder.
        ValueError: If the weights are damaged or do not fit.
    """
    folder = pathlib.Path(str(preset))
    weights = next(
        (x for n in (WEIGHTS, _SHARDED) if (x := folder / n).exists()), None
    )
    if weights is None:
        raise FileNotFoundError(
            "There are no weights of a preset here. Received: "
            f"{str(preset)!r}. Allowed: a local folder with {WEIGHTS} or "
            f"{_SHARDED}. A preset that is elsewhere is loaded by "
            "`cls.from_preset`; then call `keras_policy_ext.freeze`."
        )
    numbers = files.check_weights(weights)
    for name in _CONFIGS:
        if (folder / name).is_file():
            _input_files.json_in((folder / name).read_bytes(), folder / name)
    with (
        lost_float8.silent(),
        _input_files.within_memory_of(folder, numbers),
        frozen_files.frozen_when_built(weights),
    ):
        model = cls.from_preset(str(folder), load_weights=False, **options)
    backbone = getattr(model, "backbone", model)
    frozen_files.freeze_as_saved(backbone, weights)
    if model is not backbone and (folder / _OF_TASK).exists():
        model.load_task_weights(str(folder / _OF_TASK))
    files.load(backbone, weights)
    return model
