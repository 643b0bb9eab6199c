"""What a file says of a float8 layer: one reader, by the schema of `entries`.

Each entry is checked when it is asked for: a layer that needs no scales accepts
damaged ones. The functions `..._for_file` are the inverse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_policy_ext import input_files
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import entries
from keras_policy_ext.layers.entries import FROZEN, STATE, Group
from keras_policy_ext.layers.state_variable import StateVariable, newest_first
from keras_policy_ext.numerics.observations import UNIT, UNSEEN, VALID_MARK
from keras_policy_ext.numerics.scale_sources import source_of, state_source_of
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.float8 import of_file
from keras_policy_ext.recipes import OPERANDS, FrozenKernels, Recipe
from keras_policy_ext.stored_kernels import Axes, StoredKernel, scale_shape


class KernelState(NamedTuple):
    """The state of a kernel in a file: its settled matrix, and observations.

    `earlier` is what micro-batches before the next step observed, or None.
    """

    matrix: np.ndarray
    earlier: np.ndarray | None


class SavedState(Group):
    """The group of a float8 state in a file."""

    @classmethod
    def of(cls, store: Mapping[str, Any], path: str) -> SavedState:
        """Read all entries of a group; none if the file has no group."""
        keys, read = sorted(store.keys()), input_files.array_in
        arrays = {key: read(path, store[key]) for key in keys}
        return cls(schema=STATE, path=path, store=arrays)

    def policy(self, source: keras.DTypePolicy) -> Float8DTypePolicy | None:
        """Return the policy that the layer was saved under, or None.

        A file may have the recipe only, to which `source` is added.

        Raises:
            ValueError: If the entry is damaged, or names no float8 policy.
        """
        if recipe := self.text(entries.RECIPE):
            return Float8DTypePolicy(source, recipe=recipe)
        name, cause = self.text(entries.POLICY), ""
        if not name:
            return None
        try:
            policy = of_file(name)
            if isinstance(policy, Float8DTypePolicy):
                return policy  # Any other policy is refused below.
        except (TypeError, ValueError) as error:
            cause = f" Cause: {error}"
        allowed = "full names of float8 policies, as in `policy.full_name`"
        raise ValueError(self._unknown("a policy", name, allowed) + cause)

    @property
    def attention(self) -> str:
        """The argument `attention` of an attention layer; "" if missing."""
        mode = self.text(entries.ATTENTION)
        if mode not in ("", "float8"):
            text = self._unknown("an attention mode", mode, "float8")
            raise ValueError(text)
        return mode

    def text(self, key: str) -> str:
        """Return a string that the file has about the layer; "" if missing."""
        if key not in self.store:
            return ""
        self._check_version()
        text = self.read(key)
        try:
            return text.tobytes().decode()
        except UnicodeDecodeError as error:
            fault = f"{key!r} is {text.dtype} and no UTF-8"
            raise self.damaged(fault) from error

    def kernels(
        self, recipes: Sequence[Recipe], matrices: Sequence[int] | None = None
    ) -> list[KernelState]:
        """Return one state per kernel of a layer; missing ones start anew.

        A kernel whose recipe has no state has none, and is not counted in
        `matrices`: of the others, the numbers of matrices with a history, or
        None for what the file has. A single history becomes that of each.

        Raises:
            ValueError: If entries are incomplete, damaged, or too new.
        """
        recipes = [r for r in recipes if source_of(r).state_shape is not None]
        if recipes and self.store:
            self._check_version()
        return [
            KernelState(
                self._matrix(i, recipe, matrices[i] if matrices else None),
                self._observed_before_step(i),
            )
            for i, recipe in enumerate(recipes)
        ]

    def _matrix(
        self, i: int, recipe: Recipe, matrices: int | None
    ) -> np.ndarray:
        """Return the state matrix of kernel `i`, as `StateVariable` has it."""
        # Its rows: for each operand in turn, one per matrix of the kernel.
        source = state_source_of(recipe, matrices or self._matrices_in_file(i))
        layout, matrix = source.layout, source.layout.never_observed()
        # Views: what is written into them is in the matrix.
        scales, histories = layout.scale(matrix), layout.history(matrix)
        if not source.observes_amaxes:
            if entries.STEPS.format(i=i) in self.store:
                histories[0, 0] = self.read(entries.STEPS, i=i)
            return matrix
        keys = [
            key.format(i=i, operand=operand)
            for key in entries.AMAXES
            for operand in OPERANDS
        ]
        if not any(key in self.store for key in keys):
            return matrix
        count = len(matrix) // len(OPERANDS)
        for n, operand in enumerate(OPERANDS):
            rows = slice(n * count, (n + 1) * count)
            names = {"i": i, "operand": operand}
            scales[rows] = self._per_matrix(count, entries.SCALE, names)
            rings = self._per_matrix(count, entries.HISTORY, names, rank=1)
            histories[rows] = [_resized(x, layout.length) for x in rings]
            matrix[rows, 0] = [_mark_of(row) for row in matrix[rows]]
            if entries.PART.format(**names) in self.store:
                # An average of states, of which this part has observed.
                part = self._per_matrix(count, entries.PART, names)
                matrix[rows, 0] = UNSEEN + part
        return matrix

    def _matrices_in_file(self, i: int) -> int:
        """Return how many matrices of kernel `i` have a history in the file."""
        names = {"i": i, "operand": OPERANDS[0]}
        if entries.SCALE.format(**names) not in self.store:
            return 1
        return int(self.read(entries.SCALE, **names).size)

    def _per_matrix(
        self, count: int, template: str, names: Mapping[str, Any], rank: int = 0
    ) -> np.ndarray:
        """Return an entry for `count` matrices; for one it has `rank` axes."""
        array = self.read(template, **names)
        if array.ndim > rank and len(array) != count:
            key = template.format(**names)
            fault = f"{key!r} is of {len(array)} matrices, the kernel of "
            raise self.damaged(f"{fault}{count}")
        shape_of_one = array.shape[array.ndim - rank :]
        return np.broadcast_to(array, (count, *shape_of_one))

    def _observed_before_step(self, i: int) -> np.ndarray | None:
        """Return what micro-batches observed since the last step, or None."""
        if entries.EARLIER.format(i=i) not in self.store:
            return None
        return self.read(entries.EARLIER, i=i) * np.float32(UNIT)

    def _check_version(self) -> None:
        self.check_version(int(self.read(entries.VERSION)))

    def _unknown(self, what: str, value: str, allowed: str) -> str:
        """Return the text of an error about a value that the file has."""
        layer = self.path.removesuffix(f"/{entries.GROUP}")
        return (
            f"Layer {layer!r} was saved under {what} that this version of "
            f"keras_policy_ext does not know. Received: {value!r}. Allowed: "
            f"{allowed}. Update keras_policy_ext, or load the weights without "
            "float8, as Keras does: `keras.saving.load_model` or "
            "`model.load_weights`."
        )


def state_for_file(
    texts: Mapping[str, str],
    kernels: Sequence[tuple[StateVariable, Tensor | None]],
    merged: bool,
) -> dict[str, np.ndarray]:
    """Return the entries of the state of a layer, with strings about it.

    Each state variable comes with what micro-batches before the next step
    observed. If LoRA adapters are `merged` into the kernels of the file, those
    are not the kernels whose amaxes were observed: they get zeros.
    """
    arrays: dict[str, np.ndarray] = {}
    if kernels or texts:
        arrays[entries.VERSION] = np.array(STATE.version, "int32")
    for key, text in texts.items():
        arrays[key] = np.frombuffer(text.encode(), "uint8")
    for i, (variable, earlier) in enumerate(kernels):
        for key, value in _kernel_for_file(i, variable).items():
            other_kernel = merged and ".kernel." in key
            arrays[key] = np.zeros_like(value) if other_kernel else value
        if earlier is not None:
            uses = ops.convert_to_numpy(earlier) / np.float32(UNIT)
            # A file has no NaN. To a state it is the same as infinity.
            uses = np.nan_to_num(uses, nan=np.inf, posinf=np.inf)
            arrays[entries.EARLIER.format(i=i)] = uses
    return arrays


def _kernel_for_file(i: int, variable: StateVariable) -> dict[str, np.ndarray]:
    """Return the entries of the state of kernel number `i`."""
    layout, matrix = variable.rows_layout, variable.trusted()
    scales, histories = layout.scale(matrix), layout.history(matrix)
    if not variable.observes_amaxes:  # A count is in place of the newest amax.
        return {entries.STEPS.format(i=i): histories[0, 0].astype("int32")}
    arrays = {}
    marks = np.array([_mark_of(row) for row in matrix], "float32")
    for operand in OPERANDS:
        names, rows = {"i": i, "operand": operand}, variable.rows_of(operand)
        values = {entries.SCALE: scales[rows], entries.HISTORY: histories[rows]}
        # A reader infers the marks from scale and history. `PART` is for those
        # that differ: of an average, or of an operand that was all zeros.
        if (matrix[rows, 0] != marks[rows]).any():
            values[entries.PART] = matrix[rows, 0] - UNSEEN
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


def is_float8_layer(group: Any) -> bool:
    """Return True if an HDF5 group is the state of a layer that contracts."""
    # A layer contracts if `convert` gave it its policy (GIVEN), if its state
    # has a first kernel ("0."), or if it has weights. The state of a composite
    # such as attention has none of these; where the composite is frozen, its
    # group of weights holds a header alone.
    is_state = group.name.endswith(f"/{entries.GROUP}/vars")
    if not is_state or entries.VERSION not in group:
        return False
    if entries.GIVEN in group or any(key.startswith("0.") for key in group):
        return True
    layer = group.parent.parent
    return "vars" in layer and bool(set(layer["vars"]) - {entries.HEADER})


def is_frozen(store: Mapping[str, Any]) -> bool:
    """Return True if a group has the weights of a frozen layer."""
    return entries.HEADER in store


@dataclasses.dataclass(frozen=True)
class FrozenWeights(Group):
    """The group of a frozen layer's weights in a file."""

    recipe: FrozenKernels  # How kernels are stored.
    names: list[str]  # The names of the weights, in order.
    # The summed axes of each kernel, by name.
    summed: Mapping[str, tuple[int, ...]]
    lora: Mapping[str, Any] | None  # Rank and alpha of LoRA; None without.

    @classmethod
    def of(cls, store: Mapping[str, Any], path: str) -> FrozenWeights:
        """Read the header of a group; raise ValueError if it cannot be read."""
        group = Group(schema=FROZEN, path=path, store=store)
        header = _header_of(group)
        group.check_version(header["version"])
        try:
            for field, is_valid in entries.HEADER_FIELDS.items():
                if field not in header or not is_valid(header[field], header):
                    raise ValueError(f"{field!r} is {header.get(field)!r}")
            fields = ("weights", "per", "activations")
            recipe = FrozenKernels(**{key: header[key] for key in fields})
        except (ValueError, KeyError, TypeError) as error:
            raise group.damaged(f"in {entries.HEADER!r}: {error}") from error
        summed = {key: tuple(axes) for key, axes in header["summed"].items()}
        names, lora = header["names"], header["lora"]
        return cls(FROZEN, path, store, recipe, names, summed, lora)

    def array(self, name: str) -> np.ndarray:
        """Return a weight that is no kernel; bfloat16 becomes float32."""
        item = self.item(name)
        # HDF5 has no bfloat16: Keras stores two bytes, and an attribute.
        if getattr(item, "attrs", {}).get("dtype") == "bfloat16":
            array = np.array(item, "V2").view(ml_dtypes.bfloat16)
            return array.astype("float32")
        return np.asarray(item)

    def kernel(self, name: str) -> StoredKernel:
        """Return the codes and scales of a kernel; ValueError for damage."""
        recipe, summed = self.recipe, self.summed[name]
        codes = self.read(entries.CODES, name=name)
        free = tuple(axis for axis in range(codes.ndim) if axis not in summed)
        if len(summed) + len(free) != codes.ndim:
            fault = f"{name!r} has {codes.ndim} axes, and sums over {summed}"
            raise self.damaged(fault)
        axes = Axes(summed, free)
        scale = self.read(entries.CODES_SCALE, name=name)
        if scale.shape != scale_shape(codes.shape, axes, recipe.per):
            raise self.damaged(f"the scale of {name!r} is {scale.shape}")
        stored = StoredKernel(
            codes=codes,
            scale=scale,
            weights=recipe.weights,
            granularity=recipe.per,
            axes=axes,
        )
        if not np.all(np.isfinite(stored.values.astype("float16"))):
            raise self.damaged(f"{name!r} has codes of NaN")
        return stored


def _header_of(group: Group) -> dict[str, Any]:
    """Parse the header of a group; the version in it is an integer."""
    text = group.read(entries.HEADER).tobytes()
    try:
        header = input_files.json_in(text, group.path)
        if type(header["version"]) is int and header["version"] >= 1:
            return dict(header)
        fault = f"'version' is {header['version']!r}"
    except (ValueError, KeyError, TypeError) as error:
        fault = str(error)
    raise group.damaged(f"{entries.HEADER!r} cannot be read: {fault}")


def header_for_file(
    recipe: FrozenKernels,
    names: Sequence[str],
    summed: Mapping[str, Sequence[int]],
    lora: Mapping[str, Any] | None,
) -> np.ndarray:
    """Return the header that `FrozenWeights` reads."""
    header = {
        "version": FROZEN.version,
        "weights": recipe.weights,
        "per": recipe.per,
        "activations": recipe.activations,
        "names": names,
        "summed": summed,
        "lora": lora,
    }
    return np.frombuffer(json.dumps(header).encode(), "uint8")
