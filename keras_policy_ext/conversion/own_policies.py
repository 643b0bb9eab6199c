"""The policies of models themselves, which Keras leaves out of files.

A Functional or Sequential model that is loaded has the global policy of that
moment. A file says which it had in `metadata.json`, where Keras reads nothing:

```
"keras_policy_ext": {"dtype_policies": [[name, config], …]}
```

One pair for the model and for each model in it, in the order in which
`walking.layers_within` finds them.
"""

from __future__ import annotations

import pathlib
import zipfile
from typing import Any

import keras

from keras_policy_ext import _input_files, policies
from keras_policy_ext._keras import global_policy, walking
from keras_policy_ext.conversion.weight_files import PathLike

_METADATA = "metadata.json"
_KEY = "keras_policy_ext"
_POLICIES = "dtype_policies"


def describe(model: keras.Layer) -> dict[str, Any]:
    """Return the entries for the metadata of a file."""
    found = [
        [each.name, keras.dtype_policies.serialize(each.dtype_policy)]
        for each in _models(model)
    ]
    return {_KEY: {_POLICIES: found}}


def restore(model: keras.Layer, path: PathLike) -> None:
    """Give the models of a file the policies that they had when saved.

    Nothing where the file says nothing, or has other models than were made
    of it.

    Raises:
        ValueError: If what it says is no list of policies.
    """
    said = _read(path)
    models = _models(model)
    if [name for name, _ in said] != [each.name for each in models]:
        return
    for each, (_, policy) in zip(models, said, strict=True):
        if each.dtype_policy != policy:
            global_policy.replace_layer_policy(each, policy)


def _models(model: keras.Layer) -> list[Any]:
    layers = walking.layers_within(model)
    return [layer for layer in layers if isinstance(layer, keras.Model)]


def _read(path: PathLike) -> list[tuple[str, keras.DTypePolicy]]:
    """Names and policies that a file says."""
    try:
        metadata = _input_files.json_in(_bytes(path), path)
        if not isinstance(metadata, dict) or _KEY not in metadata:
            return []
        said = metadata[_KEY][_POLICIES]
        return [(str(name), policies.get(dict(each))) for name, each in said]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The policies of the models in this file cannot be read. "
            f"Received: {str(path)!r}, and in its {_METADATA}: {error}. "
            "Allowed: a file as `model.save` writes it. Save it again, or load "
            "it with `keras.saving.load_model`."
        ) from error


def _bytes(path: PathLike) -> bytes:
    """The metadata of a file or folder; those of none, if it has none."""
    place = pathlib.Path(str(path))
    try:
        if place.is_dir():
            return (place / _METADATA).read_bytes()
        with zipfile.ZipFile(place) as archive:
            _input_files.check_archive(path, archive)
            return archive.read(_METADATA)
    except (KeyError, OSError, zipfile.BadZipFile):
        return b"{}"
