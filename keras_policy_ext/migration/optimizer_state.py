"""Iterations and slots of an optimizer.

The file has them in the order in which tf_keras created them, and only HDF5
has names. So the order is known here, by class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import keras

from keras_policy_ext.migration import files
from keras_policy_ext.migration.problems import Config


class SlotLayout(NamedTuple):
    """Slots in the order of the file.

    Slots of one tuple take turns variable by variable; the next tuple comes
    after all variables. The names are those of Keras 3.
    """

    blocks: tuple[tuple[str, ...], ...]
    optional: Mapping[str, str] = {}
    """Slots that are there only if an argument of the optimizer is on."""


_AMSGRAD = {"velocity_hat": "amsgrad"}
_RMS = {"momentum": "momentum", "average_gradient": "centered"}
_MOMENTS = SlotLayout((("momentum", "velocity"), ("velocity_hat",)), _AMSGRAD)
_ACCUMULATED = ("accumulated_grad", "accumulated_delta_var")

# Read off the files that tf_keras 2.21 writes; `legacy` is OptimizerV2, which
# was tf.keras.optimizers until TensorFlow 2.10.
LAYOUTS = {
    "Adadelta": SlotLayout((_ACCUMULATED,)),
    "Adagrad": SlotLayout((("accumulator",),)),
    "Adam": _MOMENTS,
    "AdamW": _MOMENTS,
    "Adamax": SlotLayout((("momentum", "norm"),)),
    "Ftrl": SlotLayout((("accumulator", "linear"),)),
    "Lion": SlotLayout((("momentum",),)),
    "RMSprop": SlotLayout(
        (("velocity",), ("momentum",), ("average_gradient",)), _RMS
    ),
    "SGD": SlotLayout((("momentum",),)),
}
LEGACY_LAYOUTS = {
    "Adadelta": SlotLayout(tuple((name,) for name in _ACCUMULATED)),
    "Adagrad": LAYOUTS["Adagrad"],
    "Adam": SlotLayout(
        (("momentum",), ("velocity",), ("velocity_hat",)), _AMSGRAD
    ),
    "Adamax": SlotLayout((("momentum",), ("norm",))),
    "Ftrl": LAYOUTS["Ftrl"],
    "RMSprop": LAYOUTS["RMSprop"],
    "SGD": SlotLayout((("momentum",),), {"momentum": "momentum"}),
}


def load(
    optimizer: keras.optimizers.Optimizer,
    trained: list[keras.Variable],
    config: Config,
    variables: list[keras.Variable],
    saved: list[object],
) -> str | None:
    """Give a built optimizer the state of a file.

    Args:
        optimizer: Of Keras 3, not a loss scaler.
        trained: The variables it was built for, in that order.
        config: Its legacy config.
        variables: The same variables in the order of the file.
        saved: What the file has, the number of iterations first.

    Returns:
        None; or what is missing, as a sentence for a warning. The state is
        then as it was, except for the number of iterations.
    """
    if not saved:
        return "The file holds no state of the optimizer."
    iterations = files.array(saved[0], (), "the number of iterations")
    optimizer.iterations.assign(int(iterations))
    slots = _order(config, variables)
    if slots is None:
        return (
            f"The slots of {config['class_name']!r} have no counterpart in "
            "Keras 3 and start anew; the number of iterations is restored."
        )
    if len(slots) != len(saved) - 1:
        return (
            f"The slots of the optimizer start anew: the file has "
            f"{len(saved) - 1} arrays instead of {len(slots)}. The number of "
            "iterations is restored."
        )
    arrays = [
        files.array(data, v.shape, f"the slot {slot!r} of {v.path!r}")
        for (slot, v), data in zip(slots, saved[1:], strict=True)
    ]
    targets = {slot: _targets(optimizer, trained, slot) for slot, _ in slots}
    for (slot, variable), value in zip(slots, arrays, strict=True):
        # SGD without momentum: tf_keras has slots of zeros, Keras 3 none.
        if id(variable) in targets[slot]:
            targets[slot][id(variable)].assign(value)
    return None


def _order(
    config: Config, variables: list[keras.Variable]
) -> list[tuple[str, keras.Variable]] | None:
    """Slot and variable of each array; None if unknown."""
    fields = config["config"]
    layouts = LEGACY_LAYOUTS
    if not fields.get("is_legacy_optimizer", True):
        layouts = LAYOUTS
    layout = layouts.get(config["class_name"].rsplit(">", 1)[-1])
    if layout is None:
        return None
    off = {s for s, name in layout.optional.items() if not fields.get(name)}
    blocks = [block for block in layout.blocks if off.isdisjoint(block)]
    if fields.get("use_ema"):
        blocks.insert(0, ("average",))
    return [
        (slot, variable)
        for block in blocks
        for variable in variables
        for slot in block
    ]


def _targets(
    optimizer: keras.optimizers.Optimizer,
    trained: list[keras.Variable],
    slot: str,
) -> dict[int, keras.Variable]:
    """The slot variables by the variable they belong to.

    Keras names them `<path of the variable>_<slot>` and keeps the order of
    the variables; two variables of one path are told apart by the order.
    """
    ending = f"_{slot}"
    found = [v for v in optimizer.variables if v.name.endswith(ending)]
    wanted = [v.path.replace("/", "_") + ending for v in trained]
    by_name: dict[str, list[keras.Variable]] = {}
    for variable in found:
        by_name.setdefault(variable.name, []).append(variable)
    return {
        id(variable): by_name[name].pop(0)
        for variable, name in zip(trained, wanted, strict=True)
        if by_name.get(name)
    }
