"""The entries that files have for a float8 layer: their schema, as data.

A file has up to two groups of entries for a layer, each with its `Schema`:

- `STATE`: the group `float8_state` beside the weights.
- `FROZEN`: the weights of a frozen layer. Keras counts entries, so that a layer
  that is not frozen rejects them.

`saved_layers` reads them. A key is a template, as in
`CODES_SCALE.format(name="kernel")`. What a recipe remembers of kernels has keys
that begin with the number of the kernel, as in "0.steps"; the extension that
keeps it has their forms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_policy_ext.files import input_files

GROUP = "float8_state"
"""The name of the group of a state, beside that of the weights."""

VERSION = "format_version"
POLICY = "policy"
GIVEN = "given"  # The policy that `convert` was given.
ATTENTION = "attention"
RECIPE = "recipe"  # In place of a policy: the source is the layer's own.
HEADER = "stored"
CODES = "{name}"
CODES_SCALE = "{name}.scale"
CODES_OF_SCALE = "{name}.scale_codes"  # Of scales that are not in float32.
OUTER_SCALE = "{name}.outer_scale"  # Beside scales in e4m3fn.
INPUTS_SCALE = "{name}.inputs_scale"


@dataclasses.dataclass(frozen=True)
class Form:
    """The dtype, rank and valid numbers of an entry's array."""

    dtype: Any  # Its dtype, or an abstract one of NumPy.
    # The number of its axes, or several; None for any.
    rank: int | tuple[int, ...] | None
    # Returns True for each valid number, floats in float32; None if all are.
    is_valid: Callable[[np.ndarray], np.ndarray] | None = None

    def fits(self, array: Any) -> bool:
        """Return True if an array has the dtype and rank; no empty vector."""
        ranks = self.rank if isinstance(self.rank, tuple) else (self.rank,)
        if None not in ranks and array.ndim not in ranks:
            return False
        is_empty = None not in ranks and not array.size
        return np.issubdtype(array.dtype, self.dtype) and not is_empty


@dataclasses.dataclass(frozen=True)
class Schema:
    """The entries of a kind of groups, and the texts of errors about them."""

    title: str  # The first words of an error; the path of the layer follows.
    kept: str  # The object that an error leaves unchanged, in words.
    forms: Mapping[str, Form]  # The form of each entry, by key.
    allowed: str  # The entries that are allowed, in words.
    advice: str  # The next step if a group is damaged.
    update: str = ""  # The next step if a version is newer.
    # The newest version that this package reads. It is increased only if older
    # versions of this package would misread a file.
    version: int = 1


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of entries in a file, which are checked when they are read."""

    schema: Schema  # The schema of its entries.
    path: str  # The path of the layer or state, for messages.
    store: Mapping[str, Any]  # The entries by key.

    def damaged(self, fault: str) -> ValueError:
        """Return the ValueError for a group that is damaged."""
        schema = self.schema
        return ValueError(
            f"{schema.title} {self.path!r} in this file is damaged; "
            f"{schema.kept} was not changed. Received: {fault}. Allowed: "
            f"{schema.allowed}. {schema.advice}"
        )

    def check_version(self, version: int) -> None:
        """Raise ValueError if a newer version of this package wrote it."""
        schema = self.schema
        if version > schema.version:
            raise ValueError(
                f"{schema.title} {self.path!r} was written by a newer version "
                f"of keras_policy_ext. Received: format {version}. Allowed: "
                f"up to {schema.version}. {schema.update}"
            )

    def item(self, key: str) -> Any:
        """Return an entry as it is stored; ValueError if it is missing."""
        if key not in self.store:
            raise self.damaged(f"it lacks {key!r}")
        input_files.check_dataset(self.path, self.store[key])
        return self.store[key]

    def read(self, template: str, **names: Any) -> np.ndarray:
        """Return the array of an entry by its template; floats in float32.

        Raises:
            ValueError: If it is missing or malformed, or has invalid values.
        """
        key, form = template.format(**names), self.schema.forms[template]
        array = np.asarray(self.item(key))
        if not form.fits(array):
            raise self.damaged(
                f"{key!r} is {array.dtype} of shape {array.shape}"
            )
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                array = array.astype("float32")
        if form.is_valid and not np.all(valid := form.is_valid(array)):
            verb = "has" if array.ndim else "is"
            raise self.damaged(f"{key!r} {verb} {array[~valid].flat[0]}")
        return array


def _positive(array: np.ndarray) -> np.ndarray:
    """Return True for each finite number above 0."""
    return np.isfinite(array) & (array > 0)


def is_amax(array: np.ndarray) -> np.ndarray:
    """Return True for each number that an amax or a scale can be."""
    return np.isfinite(array) & (array >= 0)


_TEXT = Form(np.uint8, 1)

STATE = Schema(
    title="The float8 state of",
    kept="the layer's state",
    forms={
        VERSION: Form(np.signedinteger, 0, lambda x: x >= 1),
        POLICY: _TEXT,
        GIVEN: _TEXT,
        ATTENTION: _TEXT,
        RECIPE: _TEXT,
    },
    allowed=(
        f"{VERSION!r}, {POLICY!r}, {GIVEN!r} and {ATTENTION!r} (UTF-8, may be "
        "missing), and what the recipe remembers of each kernel"
    ),
    advice=(
        "Save the model again, or delete the group from the file; the layer "
        "then begins with an empty state."
    ),
    update=(
        "Update keras_policy_ext, or load the weights without float8 state: "
        "into the model with a plain policy."
    ),
)

FROZEN = Schema(
    title="The group of the frozen layer",
    kept="the layer",
    forms={
        HEADER: _TEXT,
        CODES: Form(np.uint8, None),
        CODES_SCALE: Form(np.float32, None, _positive),
        CODES_OF_SCALE: Form(np.unsignedinteger, None),
        OUTER_SCALE: Form(np.floating, 0, _positive),
        INPUTS_SCALE: Form(np.floating, 0, _positive),
    },
    allowed=(
        f"an entry {HEADER!r} (JSON) with the names of the weights, and one "
        "entry for each. For a kernel: uint8 codes of finite numbers, and "
        "'<name>.scale' (float32), or '<name>.scale_codes', finite and > 0"
    ),
    advice="Copy the file again, or take an earlier one.",
    update="Update keras_policy_ext.",
)


# Checks of the fields of a header; each gets the header too.


def _are_names(value: object, _header: Mapping[str, Any]) -> bool:
    """Return True if a header's entry lists strings, each once."""
    if not isinstance(value, list):
        return False
    return all(type(x) is str for x in value) and len(set(value)) == len(value)


def _is_axes_of_kernels(value: object, header: Mapping[str, Any]) -> bool:
    """Return True if a value of a header has a list of axes per kernel."""
    if not isinstance(value, dict):
        return False
    if not all(isinstance(each, list) for each in value.values()):
        return False
    axes = [axis for each in value.values() for axis in each]
    are_axes = all(type(axis) is int and axis >= 0 for axis in axes)
    return are_axes and set(value) <= set(header["names"])


def _are_shapes(value: object, header: Mapping[str, Any]) -> bool:
    """Return True if a header's entry has shapes of kernels."""
    if not isinstance(value, dict) or not set(value) <= set(header["summed"]):
        return False
    if not all(isinstance(each, list) for each in value.values()):
        return False
    sizes = [size for each in value.values() for size in each]
    return all(type(size) is int and size >= 0 for size in sizes)


def _is_lora(value: object, _header: Mapping[str, Any]) -> bool:
    """Return True for the rank and alpha of adapters, or None without."""
    if not isinstance(value, dict):
        return value is None
    rank, alpha = value.get("rank"), value.get("alpha")
    return type(rank) is int and rank > 0 and type(alpha) in (int, float)


HEADER_FIELDS: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "names": _are_names,
    "summed": _is_axes_of_kernels,
    "lora": _is_lora,
    "shapes": _are_shapes,
}
"""The check of each JSON field, in an order in which later ones rely on earlier
ones. The recipe of kernels checks its own fields."""
