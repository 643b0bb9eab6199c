"""The float8 state of a layer in a file.

It is a group of its own beside the weights of the layer, which
stock layers don't look at. For the kernel that was made as number `i`:

| key | shape | value |
|---|---|---|
| `format_version` | () | 1; once in the group |
| `policy` | (bytes,) | the policy that the layer has; once in the group |
| `given` | (bytes,) | the policy that `convert` was given for it, if it was |
| `attention` | (bytes,) | what an attention layer has for that, if anything |
| `i.<operand>.scale` | () | last scale used, 0 if none |
| `i.<operand>.amax_history` | (length,) | the ring of amaxes |
| `i.<operand>.observed` | () | how much of it was; if other than it looks |
| `i.observed` | as in memory | of micro-batches before, 1 for a use; if any |

Under a recipe that rounds at random it has, in place of scales and amaxes:

| key | shape | value |
|---|---|---|
| `i.steps` | () | how many steps there were, an integer |

The ring is that of `numerics.observations`. An operand looks observed if it
has a scale or an amax; one that was all zeros has none and has 1 for
`observed`, and an average with what was never observed has the part that was.
`policy` is a full name in UTF-8: by it `load_model` knows a layer again that
was made as a stock one. Kernels have numbers and not names, as weights have in
Keras: a weight that was not given a name is called differently in each model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext import _input_files
from keras_policy_ext.layers.state_variable import (
    StateVariable,
    is_amax,
    newest_first,
)
from keras_policy_ext.numerics.observations import (
    MOST_STEPS,
    ROUNDING,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.numerics.scale_sources import source_of, state_source_of
from keras_policy_ext.recipes import OPERANDS, Recipe

FORMAT_VERSION = 1
"""Version of the entries; one more when older readers would misread them."""


VERSION_KEY = "format_version"

POLICY_KEY = "policy"

GIVEN_KEY = "given"

ATTENTION_KEY = "attention"

STEPS = "steps"


def entries_for_file(
    number: int, variable: StateVariable
) -> dict[str, np.ndarray]:
    """Return the entries of a state for a file."""
    layout = variable.rows_layout
    matrix = variable.trusted()
    if not variable.observes_amaxes:
        steps = layout.history(matrix)[0, 0].astype("int32")
        return {f"{number}.{STEPS}": steps}
    entries = {}
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        entries[f"{prefix}.scale"] = layout.scale(matrix)[row]
        entries[f"{prefix}.amax_history"] = layout.history(matrix)[row]
        if matrix[row, 0] != _looks(matrix[row]):
            entries[f"{prefix}.observed"] = matrix[row, 0] - UNSEEN
    return entries


def entries_of(store: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read the entries in the store of a layer, each once."""
    return {
        key: _input_files.array_in("float8_state", store[key])
        for key in sorted(store.keys())
    }


def text_in(entries: dict[str, np.ndarray], key: str, path: str) -> str:
    """Return a text that a file holds about a layer; "" if it has none.

    Args:
        entries: What was in the file for the state of the layer.
        key: `POLICY_KEY`, `GIVEN_KEY` or `ATTENTION_KEY`.
        path: That of the state, for messages.

    Raises:
        ValueError: If the entry is no text, or the file has a newer format.
    """
    if key not in entries:
        return ""
    _check_version(entries, path)
    value = entries[key]
    if value.ndim == 1 and value.dtype == "uint8" and value.size:
        with contextlib.suppress(UnicodeDecodeError):
            return value.tobytes().decode()
    found = f"{key!r} is {value.dtype} of shape {value.shape}"
    raise ValueError(_damaged(path, found))


def matrices_in(
    entries: dict[str, np.ndarray], recipe: Recipe, count: int, path: str
) -> list[np.ndarray]:
    """The states that a file has for the kernels of a layer.

    Args:
        entries: What was in the file for the state of the layer.
        recipe: What the layer follows, or is going to.
        count: How many kernels it has.
        path: That of the state, for messages.

    Returns:
        A settled matrix for each kernel, none if the recipe has no state.
        What the file lacks starts anew.

    Raises:
        ValueError: If the entries are incomplete, of wrong shapes or values,
            or written by a newer version of this package.
    """
    if source_of(recipe).state_shape is None or not count:
        return []
    if not entries:
        layout = state_source_of(recipe).layout
        return [layout.never_observed() for _ in range(count)]
    _check_version(entries, path)
    return [_matrix(i, recipe, entries, path) for i in range(count)]


def matrices_from(
    variables: list[StateVariable], entries: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """The matrices that a file means; those it lacks start anew."""
    if not variables:
        return []
    path = variables[0].path.rpartition("/")[0]
    return matrices_in(entries, variables[0].recipe, len(variables), path)


def _check_version(entries: dict[str, np.ndarray], path: str) -> None:
    if VERSION_KEY not in entries:
        raise ValueError(_damaged(path, f"it lacks {VERSION_KEY!r}"))
    version = entries[VERSION_KEY]
    if version.shape or version.dtype.kind != "i" or version < 1:
        raise ValueError(_damaged(path, f"{VERSION_KEY!r} is {version!r}"))
    if version > FORMAT_VERSION:
        raise ValueError(
            f"The float8 state of {path!r} was written by a newer version of "
            f"keras_policy_ext. Received: format {version}. Allowed: up to "
            f"{FORMAT_VERSION}. Update keras_policy_ext, or load the weights "
            "without float8 state: into the model with a plain policy."
        )


def _matrix(
    number: int, recipe: Recipe, entries: dict[str, np.ndarray], path: str
) -> np.ndarray:
    source = state_source_of(recipe)
    matrix = source.layout.never_observed()
    if not source.observes_amaxes:
        steps = _steps_in(number, entries, path)
        source.layout.history(matrix)[0, 0] = steps
        return matrix
    names = [
        f"{n}.{kind}" for n in OPERANDS for kind in ("scale", "amax_history")
    ]
    wanted = {f"{number}.{name}" for name in names}
    if wanted.isdisjoint(entries):
        return matrix
    if not wanted <= entries.keys():
        lacking = ", ".join(sorted(wanted - entries.keys()))
        raise ValueError(_damaged(path, f"it lacks {lacking}"))
    _check_earlier(number, entries, path)
    layout, damaged = source.layout, functools.partial(_damaged, path)
    scales, histories = layout.scale(matrix), layout.history(matrix)
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        ring = amaxes_in(entries, f"{prefix}.amax_history", damaged)
        scales[row] = amaxes_in(entries, f"{prefix}.scale", damaged)
        histories[row] = _resized(ring, layout.length)
        matrix[row, 0] = _looks(matrix[row])
        if f"{prefix}.observed" in entries:
            matrix[row, 0] = UNSEEN + _part_in(entries, prefix, damaged)
    return matrix


def _looks(row: np.ndarray) -> float:
    """The first column of a row as its other numbers let one expect it."""
    return VALID_MARK if row[1:].any() else UNSEEN


def _part_in(
    entries: Mapping[str, np.ndarray],
    prefix: str,
    damaged: Callable[[str], str],
) -> np.ndarray:
    """How much of an operand's row was observed: from 0, nothing, to 1."""
    key = f"{prefix}.observed"
    part = entries[key]
    is_part = not part.shape and part.dtype.kind == "f"
    if not is_part or not abs(part - 0.5) <= 0.5 + ROUNDING:
        raise ValueError(damaged(f"{key!r} is {part!r}"))
    return part.astype("float32")


def _steps_in(
    number: int, entries: dict[str, np.ndarray], path: str
) -> np.ndarray:
    """A count of steps; 0 where the file has none."""
    key = f"{number}.{STEPS}"
    steps = entries.get(key, np.array(0, "int32"))
    is_count = not steps.shape and steps.dtype.kind in "iu"
    if not is_count or not 0 <= steps < MOST_STEPS:
        raise ValueError(_damaged(path, f"{key!r} is {steps!r}"))
    _check_earlier(number, entries, path)
    return steps


def amaxes_in(
    entries: Mapping[str, np.ndarray], key: str, damaged: Callable[[str], str]
) -> np.ndarray:
    """A scale or an amax history in float32.

    Raises:
        ValueError: With the text that `damaged` makes of what was found.
    """
    value = entries[key]
    rank = 1 if key.endswith("amax_history") else 0
    if value.ndim != rank or not value.size or value.dtype.kind != "f":
        found = f"{key!r} is {value.dtype} of shape {value.shape}"
        raise ValueError(damaged(found))
    with np.errstate(over="ignore"):
        value = value.astype("float32")
    if not is_amax(value):
        raise ValueError(damaged(f"{key!r} is {value}"))
    return value


def earlier_key(number: int) -> str:
    """The key of what was observed in micro-batches before the next step."""
    return f"{number}.observed"


def earlier_for_file(observation: Any) -> np.ndarray:
    """An observation for a file: uses and amaxes, not that many `UNIT`.

    What was not finite is infinite there.
    """
    array = ops.convert_to_numpy(observation) / np.float32(UNIT)
    return np.nan_to_num(array, nan=np.inf, posinf=np.inf)


def earlier_of_file(array: np.ndarray) -> np.ndarray:
    """The observation that `earlier_for_file` has written."""
    return array * np.float32(UNIT)


def _check_earlier(
    number: int, entries: dict[str, np.ndarray], path: str
) -> None:
    key = earlier_key(number)
    if key not in entries:
        return
    value = entries[key]
    shaped = value.ndim == 2 and value.dtype == "float32"
    if not shaped or not np.all(value >= 0):
        found = f"{key!r} is {value.dtype} of shape {value.shape}: {value}"
        raise ValueError(_damaged(path, found))


def _damaged(path: str, found: str) -> str:
    keys = "i.<operand>.scale and i.<operand>.amax_history"
    return (
        f"The float8 state of {path!r} in this file is damaged; the layer's "
        f"state was not changed. Received: {found}. Allowed: {VERSION_KEY!r}, "
        f"{POLICY_KEY!r} and {ATTENTION_KEY!r} (UTF-8, may be missing), and, "
        f"for each kernel i and each of {', '.join(OPERANDS)}, a float "
        f"scalar and a float vector ({keys}), finite and >= 0, and maybe a "
        "float from 0 to 1 (i.<operand>.observed), or an integer "
        f"(i.{STEPS}), from 0 to {MOST_STEPS - 1:.0f}. Save the "
        "model again, or delete the group from the file: the state then "
        "starts anew."
    )


def _resized(ring: np.ndarray, length: int) -> np.ndarray:
    """A history cut or padded with zeros, the newest entries kept.

    In the ring index 0 is the newest and the last index the one before it.
    """
    aged = newest_first(ring)[:length]
    aged = np.pad(aged, (0, length - len(aged)))
    return np.concatenate([aged[:1], aged[:0:-1]])
