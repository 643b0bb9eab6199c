"""What files of Keras's own float8 have, in the form of this package."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from keras_policy_ext import policies
from keras_policy_ext.ext.delayed.entries import HISTORY, SCALE
from keras_policy_ext.files import (
    entries,
    input_files,
    keras_float8,
    model_files,
)
from keras_policy_ext.files.model_files import CONFIG, WEIGHTS, PathLike
from keras_policy_ext.recipes import OPERANDS

_POLICY = "QuantizedFloat8DTypePolicy"

KERAS = entries.Schema(
    title="The float8 state that Keras wrote for",
    kept="the layer",
    forms={
        key.format(i=0, operand=operand): entries.Form(
            np.floating, rank, entries.is_amax
        )
        for operand in OPERANDS
        # In the order of Keras.
        for rank, key in enumerate((SCALE, HISTORY))
    },
    allowed=(
        f"for each of {', '.join(OPERANDS)} a float scalar and a float vector, "
        "finite and >= 0"
    ),
    advice=(
        "Load the file into the model under a plain policy, which reads only "
        "the weights, and then convert the model."
    ),
)


@dataclasses.dataclass(frozen=True)
class KerasWeights:
    """The variables of a layer that was saved in Keras's own float8.

    `keras.layers.Dense` and `EinsumDense` under `quantize("float8")` save all
    their variables by number: the kernel, the bias if there is one, and then
    for each of `recipes.OPERANDS` a scale and an amax history (keras 3.4 to
    3.15). The scale dequantizes. The history is a ring with the newest amax at
    index 0, as in `ext.delayed.observations`. An operand that Keras never
    observed has the scale 1 and zeros.
    """

    own: Mapping[str, Any]  # The kernel and the bias, by number.
    # The entries of the state, by the keys of `SavedState`.
    state: Mapping[str, Any]

    @classmethod
    def of(cls, store: Mapping[str, Any]) -> KerasWeights:
        """Split the entries of such a layer."""
        numbers = [str(number) for number in range(len(store.keys()))]
        count = len(numbers) - len(KERAS.forms)  # A kernel, maybe a bias.
        of_state = zip(KERAS.forms, numbers[count:], strict=True)
        return cls(
            own={number: store[number] for number in numbers[:count]},
            state={key: store[number] for key, number in of_state},
        )

    def check(self, path: str) -> None:
        """Raise ValueError if the state is damaged."""
        group = entries.Group(KERAS, path, self.state)
        for key in KERAS.forms:
            group.read(key)

    def as_state(self) -> dict[str, np.ndarray]:
        """Return the entries of a `SavedState`, where an unused scale is 0."""
        arrays = {key: np.asarray(item) for key, item in self.state.items()}
        for operand in OPERANDS:
            names = {"i": 0, "operand": operand}
            scale = SCALE.format(**names)
            history = arrays[HISTORY.format(**names)]
            if arrays[scale] == 1.0 and not history.any():
                arrays[scale] = np.zeros((), "float32")
        version = np.array(entries.STATE.version, "int32")
        recipe = np.frombuffer(str(history.size).encode(), "uint8")
        return {**arrays, entries.VERSION: version, entries.RECIPE: recipe}


@contextlib.contextmanager
def rewritten_model(path: PathLike) -> Iterator[PathLike]:
    """In the block, a copy of a model exists that this package reads.

    It yields the path of a temporary folder. Its layers in Keras's own float8
    have this package's policies, and their states its groups.

    Raises:
        ValueError: If the history length of a policy in it is < 1.
    """
    text = model_files.content(path, CONFIG)
    config = _with_own_policies(input_files.json_in(text, path))
    with model_files.unpacked(path) as copy:
        (copy / CONFIG).write_text(json.dumps(config), "utf8")
        model_files.rewrite(copy / WEIGHTS, _move_state)
        yield copy


def rewritten_weights(path: PathLike) -> AbstractContextManager[PathLike]:
    """Return a block in which a copy of weights exists that this package reads.

    It yields the path of a temporary `.weights.h5` file.
    """
    return model_files.rewritten(path, _move_state)


def _move_state(group: Any) -> None:
    """Move a state in Keras's form to a group of this package, in a file."""
    if not keras_float8.is_group(group):
        return
    weights = KerasWeights.of(group)
    state = weights.as_state()
    for number in set(group) - set(weights.own):
        del group[number]
    new = group.parent.create_group(entries.GROUP).create_group("vars")
    for name, value in state.items():
        new[name] = value


def _with_own_policies(config: Any) -> Any:
    """Return a config with Keras's float8 policies in this package's form."""
    if isinstance(config, list):
        return [_with_own_policies(item) for item in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == _POLICY:
        return policies.serialize(policies.get(config))
    return {key: _with_own_policies(value) for key, value in config.items()}
