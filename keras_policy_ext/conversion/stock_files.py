"""Files of models in Keras's own float8, rewritten as this package has them.

Such a file is no smaller set of layers: a composite, such as attention, is
made anew in the source policy when it is loaded, and Keras then finds eight
variables for a layer that has two. So the whole file is rewritten, into a
temporary folder: the scales and histories go into the groups in which this
package keeps them, and the rest is loaded like any file of this package.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from keras_policy_ext import _input_files, policies
from keras_policy_ext.conversion import files, weight_files
from keras_policy_ext.conversion.weight_files import PathLike
from keras_policy_ext.layers import stock_state
from keras_policy_ext.layers.state_files import FORMAT_VERSION, VERSION_KEY

_CONFIG = "config.json"
_POLICY = "QuantizedFloat8DTypePolicy"


@contextlib.contextmanager
def rewritten_model(
    path: PathLike,
) -> Iterator[PathLike]:
    """A file or folder of a model, in the form of this package.

    Yields:
        `path`, or a folder with the same model where it was in Keras's own
        float8.

    Raises:
        ValueError: If the history length of a policy in it is < 1.
    """
    if not weight_files.count(path, _own_count):
        yield path
        return
    config = json.dumps(
        _own_policies(_input_files.json_in(config_in(path), path))
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "model"
        if pathlib.Path(str(path)).is_dir():
            # Without their modes: copies of read-only files are written to.
            shutil.copytree(str(path), copy, copy_function=shutil.copyfile)
        else:
            with zipfile.ZipFile(str(path)) as archive:
                archive.extractall(copy)
        (copy / _CONFIG).write_text(config, "utf8")
        _rewrite(copy / weight_files.WEIGHTS)
        yield copy


@contextlib.contextmanager
def rewritten_weights(
    path: PathLike,
) -> Iterator[PathLike]:
    """A file of weights, or the weights of a model, in the same way.

    Yields:
        `path`, or the path of a `.weights.h5` file.
    """
    if not weight_files.count(path, _own_count):
        yield path
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        files.weights_of(path) as weights,
    ):
        copy = pathlib.Path(folder) / weight_files.WEIGHTS
        _rewrite(pathlib.Path(shutil.copyfile(weights, copy)))
        yield copy


def config_in(path: PathLike) -> bytes:
    """Read from where the user has it, which errors then name."""
    place = pathlib.Path(str(path))
    if place.is_dir():
        return (place / _CONFIG).read_bytes()
    with zipfile.ZipFile(place) as archive:
        return archive.read(_CONFIG)


def _rewrite(path: pathlib.Path) -> None:
    with h5py.File(path, "a") as file:
        for group in weight_files.groups(file):
            own = _own_count(group)
            if own:
                _move_state(group, own)


def _own_count(group: h5py.Group) -> int:
    """How many weights a layer in Keras's own float8 has beside the state.

    Returns:
        1 or 2; 0 where the variables in the group are not those of one.
    """
    own = len(group) - len(stock_state.NAMES)
    if own not in (1, 2) or "float8_state" in group.parent:
        return 0
    items = [group.get(str(number)) for number in range(len(group))]
    if not all(isinstance(item, h5py.Dataset) for item in items):
        return 0
    kernel, scales, histories = items[0], items[own::2], items[own + 1 :: 2]
    fits = (
        kernel.ndim >= 2
        and all(x.shape == () for x in scales)
        and all(x.ndim == 1 and x.size for x in histories)
        and len({x.shape for x in histories}) == 1
        and {x.dtype for x in items[own:]} == {np.dtype("float32")}
    )
    return own if fits else 0


def _move_state(group: h5py.Group, own: int) -> None:
    entries = {
        name: group[str(own + number)][()]
        for number, name in enumerate(stock_state.NAMES)
    }
    for number in range(own, own + len(entries)):
        del group[str(number)]
    state = group.parent.create_group("float8_state").create_group("vars")
    state[VERSION_KEY] = np.array(FORMAT_VERSION, "int32")
    state[stock_state.LENGTH_KEY] = np.array(
        entries["0.inputs.amax_history"].size, "int32"
    )
    for name, value in stock_state.observed(entries).items():
        state[name] = value


def _own_policies(config: Any) -> Any:
    """A config with policies of this package in place of Keras's float8."""
    if isinstance(config, list):
        return [_own_policies(item) for item in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == _POLICY:
        return policies.serialize(policies.get(config))
    return {key: _own_policies(value) for key, value in config.items()}
