"""A warning where Keras's own loader leaves float8 layers behind.

`keras.saving.load_model` makes blocks of the user anew, and with them stock
layers; the states in the file that were theirs find no taker. Keras says
nothing of a group in a file that no layer reads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import h5py
import keras

from keras_policy_ext import _user_code
from keras_policy_ext.conversion import weight_files
from keras_policy_ext.conversion.weight_files import PathLike, Source
from keras_policy_ext.layers.state_files import VERSION_KEY
from keras_policy_ext.layers.stored_files import STORED
from keras_policy_ext.policies.of_layers import layers_in_float8

_STATE = "/float8_state/vars"

_silent = contextvars.ContextVar("keras_policy_ext_silent", default=False)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """No warning in this block, whose loader brings the layers back."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def warn(model: keras.Model, path: PathLike) -> None:
    """Warn if fewer layers are in float8 than when the model was saved.

    Of files other than `.keras` and folders nothing is known, and nothing said.
    """
    if _silent.get():
        return
    saved = saved_in(str(path))
    layers = layers_in_float8(model) if saved else []
    now = sum(bool(layer.float8_contracted) for layer in layers)
    if now < saved:
        _user_code.warn(
            f"{saved - now} of the {saved} layers that were in float8 when "
            "this model was saved are not in float8 now: their model or "
            "block made stock layers anew, in the source policy. Their "
            f"weights are loaded. Received: {str(path)!r}. "
            "`keras_policy_ext.load_model(path)` brings all of them back, "
            "with their scales. If they are to stay so, `revert` the model "
            "before it is saved."
        )


def saved_in(source: Source) -> int:
    """How many layers were in float8 when a model was saved."""
    return weight_files.count(source, _is_state)


def _is_state(group: h5py.Group) -> bool:
    """Return True if this is the state of a layer that has weights itself.

    A composite, such as attention, has a state too, to say what it is; and
    where it is frozen, a header that names no weight.
    """
    if not group.name.endswith(_STATE) or VERSION_KEY not in group:
        return False
    layer = group.parent.parent
    return "vars" in layer and bool(set(layer["vars"]) - {STORED})
