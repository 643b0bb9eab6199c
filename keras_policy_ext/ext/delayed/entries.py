"""What files have of the states of kernels; see `files.entries`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.delayed.observations import (
    UNIT,
    UNSEEN,
    VALID_MARK,
    newest_first,
)
from keras_policy_ext.ext.delayed.variable import StateVariable
from keras_policy_ext.files import entries
from keras_policy_ext.files.entries import Form, is_amax
from keras_policy_ext.files.saved_layers import SavedState
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import OPERANDS, Recipe

MOST_STEPS = 2.0**23
"""The count of steps restarts at this number, which float32 holds exactly."""

ROUNDING = 2.0**-20
"""The largest error of the share of an average that observed something."""

SCALE = "{i}.{operand}.scale"
HISTORY = "{i}.{operand}.amax_history"
PART = "{i}.{operand}.observed"  # The share of an average that observed it.
EARLIER = "{i}.observed"  # By micro-batches before the next step.
STEPS = "{i}.steps"  # The count of a state that counts steps.

_AMAXES = {
    SCALE: Form(np.floating, (0, 1), is_amax),
    HISTORY: Form(np.floating, (1, 2), is_amax),
}

STATE = dataclasses.replace(
    entries.STATE,
    forms={
        **entries.STATE.forms,
        **_AMAXES,
        PART: Form(
            np.floating, (0, 1), lambda x: abs(x - 0.5) <= 0.5 + ROUNDING
        ),
        EARLIER: Form(np.float32, 2, lambda x: x >= 0),
        STEPS: Form(np.integer, 0, lambda x: (x >= 0) & (x < MOST_STEPS)),
    },
    allowed=(
        f"for each kernel i and each of {', '.join(OPERANDS)}, a float scalar "
        "and a float vector (i.<operand>.scale and i.<operand>.amax_history), "
        "finite and >= 0, and maybe a float from 0 to 1 (i.<operand>.observed)"
        f", or an integer (i.steps), from 0 to {MOST_STEPS - 1:.0f}"
    ),
)
"""The entries of a state, with those of its kernels."""


class KernelState(NamedTuple):
    """The state of a kernel in a file: its settled matrix, and observations.

    `earlier` is what micro-batches before the next step observed, or None.
    """

    matrix: np.ndarray
    earlier: np.ndarray | None


def kernels(
    saved: SavedState,
    recipes: Sequence[Recipe],
    matrices: Sequence[int] | None = None,
) -> list[KernelState]:
    """Return one state per kernel of a layer; missing ones start anew.

    A kernel whose recipe has no state has none, and is not counted in
    `matrices`: of the others, the numbers of matrices with a history, or
    None for what the file has. A single history becomes that of each.

    Raises:
        ValueError: If entries are incomplete, damaged, or too new.
    """
    saved = dataclasses.replace(saved, schema=STATE)
    recipes = [r for r in recipes if r.remembers]
    if recipes and saved.store:
        saved.check_own_version()
    return [
        KernelState(
            _matrix(saved, i, recipe, matrices[i] if matrices else None),
            _observed_before_step(saved, i),
        )
        for i, recipe in enumerate(recipes)
    ]


def _matrix(
    saved: SavedState, i: int, recipe: Recipe, matrices: int | None
) -> np.ndarray:
    """Return the state matrix of kernel `i`, as `StateVariable` has it."""
    # Its rows: for each operand in turn, one per matrix of the kernel.
    source = source_of(recipe, matrices or _matrices_in_file(saved, i))
    layout, matrix = source.layout, source.layout.never_observed()
    # Views: what is written into them is in the matrix.
    scales, histories = layout.scale(matrix), layout.history(matrix)
    if not source.observes_amaxes:
        if STEPS.format(i=i) in saved.store:
            histories[0, 0] = saved.read(STEPS, i=i)
        return matrix
    keys = [
        key.format(i=i, operand=operand)
        for key in _AMAXES
        for operand in OPERANDS
    ]
    if not any(key in saved.store for key in keys):
        return matrix
    count = len(matrix) // len(OPERANDS)
    for n, operand in enumerate(OPERANDS):
        rows = slice(n * count, (n + 1) * count)
        names = {"i": i, "operand": operand}
        scales[rows] = _per_matrix(saved, count, SCALE, names)
        rings = _per_matrix(saved, count, HISTORY, names, rank=1)
        histories[rows] = [_resized(x, layout.length) for x in rings]
        matrix[rows, 0] = [_mark_of(row) for row in matrix[rows]]
        if PART.format(**names) in saved.store:
            # An average of states, of which this part has observed.
            part = _per_matrix(saved, count, PART, names)
            matrix[rows, 0] = UNSEEN + part
    return matrix


def _matrices_in_file(saved: SavedState, i: int) -> int:
    """Return how many matrices of kernel `i` have a history in the file."""
    names = {"i": i, "operand": OPERANDS[0]}
    if SCALE.format(**names) not in saved.store:
        return 1
    return int(saved.read(SCALE, **names).size)


def _per_matrix(
    saved: SavedState,
    count: int,
    template: str,
    names: Mapping[str, Any],
    rank: int = 0,
) -> np.ndarray:
    """Return an entry for `count` matrices; for one it has `rank` axes."""
    array = saved.read(template, **names)
    if array.ndim > rank and len(array) != count:
        key = template.format(**names)
        fault = f"{key!r} is of {len(array)} matrices, the kernel of "
        raise saved.damaged(f"{fault}{count}")
    shape_of_one = array.shape[array.ndim - rank :]
    return np.broadcast_to(array, (count, *shape_of_one))


def _observed_before_step(saved: SavedState, i: int) -> np.ndarray | None:
    """Return what micro-batches observed since the last step, or None."""
    if EARLIER.format(i=i) not in saved.store:
        return None
    return saved.read(EARLIER, i=i) * np.float32(UNIT)


def arrays_for_file(
    kernels: Sequence[tuple[StateVariable, Tensor | None]], merged: bool
) -> dict[str, np.ndarray]:
    """Return the entries of the states of a layer's kernels.

    Each state variable comes with what micro-batches before the next step
    observed. If LoRA adapters are `merged` into the kernels of the file, those
    are not the kernels whose amaxes were observed: they get zeros.
    """
    arrays: dict[str, np.ndarray] = {}
    for i, (variable, earlier) in enumerate(kernels):
        for key, value in _kernel_for_file(i, variable).items():
            other_kernel = merged and ".kernel." in key
            arrays[key] = np.zeros_like(value) if other_kernel else value
        if earlier is not None:
            uses = ops.convert_to_numpy(earlier) / np.float32(UNIT)
            # A file has no NaN. To a state it is the same as infinity.
            uses = np.nan_to_num(uses, nan=np.inf, posinf=np.inf)
            arrays[EARLIER.format(i=i)] = uses
    return arrays


def _kernel_for_file(i: int, variable: StateVariable) -> dict[str, np.ndarray]:
    """Return the entries of the state of kernel number `i`."""
    layout, matrix = variable.rows_layout, variable.trusted()
    scales, histories = layout.scale(matrix), layout.history(matrix)
    if not variable.observes_amaxes:  # A count is in place of the newest amax.
        return {STEPS.format(i=i): histories[0, 0].astype("int32")}
    arrays = {}
    marks = np.array([_mark_of(row) for row in matrix], "float32")
    for operand in OPERANDS:
        names, rows = {"i": i, "operand": operand}, variable.rows_of(operand)
        values = {SCALE: scales[rows], HISTORY: histories[rows]}
        # A reader infers the marks from scale and history. `PART` is for those
        # that differ: of an average, or of an operand that was all zeros.
        if (matrix[rows, 0] != marks[rows]).any():
            values[PART] = matrix[rows, 0] - UNSEEN
        for key, value in values.items():
            entry = value[0] if variable.matrix_count == 1 else value
            arrays[key.format(**names)] = entry
    return arrays


def _mark_of(row: np.ndarray) -> float:
    """Return -1 for an observed row of a state, -2 for an unobserved one."""
    return VALID_MARK if row[1:].any() else UNSEEN


def _resized(ring: np.ndarray, length: int) -> np.ndarray:
    """Crop an amax history, or pad it with zeros; keep the newest."""
    # In the ring the newest is first, and the second newest last.
    aged = newest_first(ring)[:length]
    aged = np.pad(aged, (0, length - len(aged)))
    return np.concatenate([aged[:1], aged[:0:-1]])
