"""`audit`: which outputs depend on other examples or positions by scales."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, user_code
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.ext.audit.shared_scales import (
    FACTOR,
    Product,
    Shared,
    listing,
    product_of,
    shared_in,
)
from keras_policy_ext.ext.sampling.captured import calls_undone
from keras_policy_ext.ext.sampling.symbolic_batches import map_arrays
from keras_policy_ext.reports import BaseReport, Column, Table, counted

AXES = ("batch", "position")


@dataclasses.dataclass(frozen=True)
class Leak:
    """An operand with scales that outputs share with what they should not see.

    Attributes:
        layer: The path of the layer.
        class_name: The name of its class.
        product: The einsum equation of the product, or `"convolution"`.
        operand: `"inputs"`; or `"first"` or `"second"` in a product of two
            activations.
        axis: `"batch"` if other examples share a scale, `"position"` if later
            positions do.
        scale_of: What one scale is of: `"the tensor"`, `"a row"`, or a tile
            such as `"1×128"`.
        effect: How far outputs move, relative to their RMS, if the others make
            the amax of the operand 50 times as large; 0 if only the tiles say
            that they share a scale.
        by_history: Whether the scale is from earlier steps, so that others
            move outputs of later steps only.
    """

    layer: str
    class_name: str
    product: str
    operand: str
    axis: str
    scale_of: str
    effect: float
    by_history: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Audit(BaseReport):
    """The report of `audit`: one entry for each operand and axis that leaks.

    `str` has a table that fits on a screen of 24 lines, the largest effects
    first; `table(full=True)` has all entries.

    Attributes:
        leaks: The entries, the largest effect first. Several calls of a layer
            have one entry, with the largest effect.
        products: The number of float8 products that were examined.
        axes: The axes along which they were examined: `"batch"`,
            `"position"`, or both.
        unexamined: Paths of float8 layers that were not examined: the model
            did not call them, compiled them itself, or called them
            differently for other values.
    """

    leaks: tuple[Leak, ...]
    products: int
    axes: tuple[str, ...]
    unexamined: tuple[str, ...] = ()

    _every = "All entries: audit.table(full=True)"

    def _count(self) -> int:
        return len(self.leaks)

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield what was examined, a table of the leaks, and notes."""
        where = " and ".join(self.axes) or "no axis"
        yield f"{counted(self.products, 'float8 product')}, by {where}"
        if self.leaks:
            yield Table(
                _COLUMNS, [_cells(leak) for leak in self.leaks[:number]]
            )
            if left := len(self.leaks) - number:
                yield f"and {left} more"
            yield (
                "Effect: how far outputs move, relative to their size, if "
                "others make the amax of the operand "
                f"{FACTOR:.0f} times as large. Under rowwise, block and mxfp8 "
                "matmuls share no scales."
            )
        elif self.products and self.axes:
            yield "No output depends on others through its scales."
        if any(leak.by_history for leak in self.leaks):
            yield (
                "history: the scale is from earlier steps, and so are the "
                "examples that it depends on."
            )
        lacking = [axis for axis in AXES if axis not in self.axes]
        if lacking:
            yield f"Not examined: {', '.join(lacking)}. {_LACKING}"
        if self.unexamined:
            shown = ", ".join(self.unexamined[: None if full else 3])
            layers = counted(len(self.unexamined), "float8 layer")
            yield f"Not examined: {layers}, such as {shown}."


_COLUMNS = (
    Column("layer", apart=True),
    Column("product"),
    Column("operand"),
    Column("axis"),
    Column("one scale for"),
    Column("effect", right=True),
)

_LACKING = (
    "A batch needs two examples; positions are the second axis of integers, "
    "or of numbers with three axes or more, of a size of two or more."
)


def _cells(leak: Leak) -> list[str]:
    effect = "history" if leak.by_history else f"{leak.effect:.2g}"
    about = [leak.layer, leak.product, leak.operand, leak.axis]
    return [*about, leak.scale_of, effect]


@user_code.once
def audit(model: keras.Layer, batch: Any) -> Audit:
    """Find layers whose outputs depend on others through their scales.

    An output for one example should not depend on the other examples of a
    batch, nor in a causal model on later positions. Under a recipe with one
    scale per tensor it does. The model is called on the batch for inference,
    without rounding, and again with other values for all examples but the
    first, and for the later half of the positions. Then each float8 product is
    computed with the changed part of one operand made larger. Outputs that
    stay in floats and move in float8 depend on it through scales. The tiles of
    the recipe are compared too. The model, its state and its random seeds are
    not changed.

    Args:
        model: A built model or layer.
        batch: Inputs of the model, as arrays: examples along the first axis,
            and positions along the second, if there are any.

    Returns:
        An entry for each operand whose scales others share; `print` it for a
        table.

    Raises:
        TypeError: If `model` is not a Keras model or layer, or `batch` is not
            arrays.
        ValueError: If the model is not built.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> report = kpe.convert(model, "current")
        >>> found = kpe.audit(model, np.ones((4, 8), "float32"))
        >>> found.leaks[0].operand, found.leaks[0].axis
        ('inputs', 'batch')
        >>> report = kpe.convert(model, "rowwise")
        >>> kpe.audit(model, np.ones((4, 8), "float32")).leaks
        ()
    """
    check_is_layer(model, "can be audited")
    if not model.built:
        raise ValueError(
            f"{type(model).__name__} {model.name!r} is not built. Received: a "
            "model without weights. Allowed: a model that was called once. "
            "Call it on the batch first."
        )
    batch = map_arrays(_as_array, batch)
    others = {
        axis: changed
        for axis in AXES
        if (changed := _with_others(batch, axis)) is not None
    }
    with calls_undone(model):
        for functions_too in (False, True):
            found = _examined(model, batch, others, functions_too)
            if not found.unexamined:
                break
    return found


def _examined(
    model: keras.Layer, batch: Any, others: dict[str, Any], functions_too: bool
) -> Audit:
    """Return the report of a model; with `functions_too`, compile nothing."""
    with _eager(functions_too):
        before, traced = _call(model, batch)
        found: dict[tuple[str, ...], Leak] = {}
        for axis, changed in others.items():
            after, _ = _call(model, changed)
            shared, differing = shared_in(before, after)
            traced += differing
            for each in shared:
                leak = _leak(each, axis)
                key = leak.layer, leak.product, leak.operand, axis
                known = found.get(key, leak)
                found[key] = max(known, leak, key=lambda leak: leak.effect)
    leaks = sorted(found.values(), key=lambda leak: -leak.effect)
    paths = dict.fromkeys(map(path_of, traced))
    return Audit(tuple(leaks), len(before), tuple(others), tuple(paths))


@contextlib.contextmanager
def _eager(functions_too: bool) -> Iterator[None]:
    """In the block, calls run step by step and assign no variables."""
    framework = backends.current
    with contextlib.ExitStack() as stack:
        stack.enter_context(framework.step_by_step())
        if functions_too:
            stack.enter_context(framework.functions_step_by_step())
        stack.enter_context(keras.StatelessScope(collect_losses=True))
        yield


def _call(
    model: keras.Layer, batch: Any
) -> tuple[list[Product], list[keras.Layer]]:
    """Call a model; return its float8 products, and layers without values."""
    found = listing()
    with found.listed():
        model(map_arrays(ops.convert_to_tensor, batch), training=False)
    return list(map(product_of, found.calls)), found.traced


def _leak(shared: Shared, axis: str) -> Leak:
    return Leak(
        layer=shared.path,
        class_name=shared.class_name,
        product=shared.product,
        operand=shared.operand,
        axis=axis,
        scale_of=shared.scale_of,
        effect=shared.effect,
        by_history=shared.by_history,
    )


def _as_array(x: Any) -> Any:
    if not isinstance(x, np.ndarray) and not ops.is_tensor(x):
        raise TypeError(
            "`batch` is not arrays. Received: "
            f"{x!r} (of type {type(x).__name__}). Allowed: arrays or tensors, "
            "also in a list, tuple or dict, as the model is called on. Pass "
            "the inputs of some examples."
        )
    return ops.convert_to_numpy(x)


def _with_others(batch: Any, axis: str) -> Any:
    """Return a batch with other values along an axis; None without the axis."""
    changed = []

    def other(x: Any) -> Any:
        part = _part(x, axis)
        if part is None:
            return x
        values = _other_values(x)
        found = np.array(x)
        found[part] = values[part]
        changed.append(not np.array_equal(found, x))
        return found

    found = map_arrays(other, batch)
    return found if any(changed) else None


def _part(x: Any, axis: str) -> Any:
    """Return an index of the others in an array, or None if there are none."""
    if axis == "batch":
        return np.s_[1:] if x.ndim and x.shape[0] > 1 else None
    least = 3 if np.issubdtype(x.dtype, np.floating) else 2
    if x.ndim < least or x.shape[1] < 2:
        return None
    return np.s_[:, x.shape[1] // 2 :]


def _other_values(x: Any) -> Any:
    """Return an array with other values, within the range of the array."""
    whole = np.asarray(x, "float64")
    if x.dtype == bool:
        return x
    # Integers, also those that are stored as floats, may be tokens.
    if np.array_equal(whole, np.floor(whole)) and whole.min() >= 0:
        smallest, largest = whole.min(), whole.max()
        count = largest - smallest + 1
        if count > 1 or not np.issubdtype(x.dtype, np.floating):
            return (smallest + (whole - smallest + 1) % count).astype(x.dtype)
    rng = np.random.default_rng(0)
    size = np.sqrt(np.mean(np.square(whole))) or 1.0
    return (whole + rng.normal(size=x.shape) * size).astype(x.dtype)
