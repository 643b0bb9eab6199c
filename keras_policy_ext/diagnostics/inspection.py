"""What each layer of a model computes in, and how its numbers are scaled."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_policy_ext import _keras_compat, formats
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.conversion.report import render
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state import Float8State, StateVariable


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a contraction.

    Attributes:
        kernel: The path of the weight that is contracted.
        name: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        format: The number format, e.g. `"float8_e4m3fn"`.
        amax: The newest amax; None if none was observed.
        scale: The dequantizing scale of the last step that had one from the
            history; None if there was none.
        saturation: The newest amax as a fraction of the largest number that
            this scale represents; above 1 the step cut it off.
    """

    kernel: str
    name: str
    format: str
    amax: float | None
    scale: float | None
    saturation: float | None


@dataclasses.dataclass(frozen=True)
class Inspected:
    """One layer with weights.

    Attributes:
        path: The layer's path.
        class_name: The name of its class.
        policy: The full name of the policy that it really follows.
        recipe: The repr of the float8 recipe, None if it is not in float8.
        kernel: `"native"` or `"emulated"`, None if it is not in float8, or
            was not called in this process yet.
        reason: Why it is native or emulated.
        operands: What its state says; empty under a recipe without state.
    """

    path: str
    class_name: str
    policy: str
    recipe: str | None
    kernel: str | None
    reason: str | None
    operands: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The layers of a model that have weights; `str` makes it a table.

    Attributes:
        layers: One entry for each.
        parameters: Scalars in the weights, as `model.count_params()`.
        state: Scalars in the float8 state.
    """

    layers: tuple[Inspected, ...]
    parameters: int
    state: int

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types: `{"layers": […], …}`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        from rich import box
        from rich.table import Table

        in_float8 = [layer for layer in self.layers if layer.recipe]
        table = Table(
            title=f"{len(in_float8)} of {len(self.layers)} layers in float8",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for heading in ("layer", "class", "policy", "kernel", "operand"):
            table.add_column(heading, overflow="fold")
        for heading in ("amax", "scale", "saturation"):
            table.add_column(heading, justify="right")
        for layer in self.layers:
            for row in _rows(layer):
                table.add_row(*row)
        reasons = {f"{each.kernel}: {each.reason}" for each in in_float8}
        notes = sorted(reason for reason in reasons if "None" not in reason)
        counts = (
            f"{self.parameters:,} parameters, and {self.state:,} numbers of "
            "float8 state beside them"
        )
        return "\n".join([render(table, 130), counts, *notes])


def inspect(model: Any) -> Inspection:
    """Look at the policy and the float8 state of each layer.

    Args:
        model: A Keras model or layer.

    Returns:
        One entry for each layer that has weights of its own or is in float8;
        `print` it for a table.

    Raises:
        TypeError: If `model` is neither.
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(
            "Only Keras models and layers can be looked at. Received: "
            f"{model!r} (of type {type(model).__name__}). Allowed: a "
            "keras.Model or keras.Layer; a file goes to `keras-policy-ext "
            "inspect FILE`. Pass the model itself."
        )
    layers = _keras_compat.layers_within(model)
    shown = (
        _inspected(layer)
        for layer in layers
        if not isinstance(layer, Float8State) and _is_shown(layer)
    )
    states = [v for v in model.weights if isinstance(v, StateVariable)]
    weights = [v for v in model.weights if not isinstance(v, StateVariable)]
    return Inspection(tuple(shown), _scalars(weights), _scalars(states))


def _scalars(variables: list[Any]) -> int:
    return sum(int(np.prod(v.shape)) for v in variables)


def _is_shown(layer: Any) -> bool:
    in_float8 = getattr(layer, "float8_policy", None) is not None
    return in_float8 or bool(_keras_compat.own_weights(layer))


def _inspected(layer: Any) -> Inspected:
    policy = getattr(layer, "float8_policy", None)
    choice = getattr(layer, "kernel_choice", None)
    if not isinstance(layer, Float8Mixin) or policy is None:
        own = layer.dtype_policy
        if isinstance(own, keras.dtype_policies.DTypePolicyMap):
            own = own[layer.path or ""]
        return Inspected(
            path_of(layer), type(layer).__name__, own.name, None, None, None, ()
        )
    return Inspected(
        path_of(layer),
        type(layer).__name__,
        policy.full_name,
        repr(policy.recipe),
        None if choice is None else choice.kind,
        None if choice is None else choice.reason,
        tuple(_operands(layer)),
    )


def _operands(layer: Any) -> list[Operand]:
    found = []
    for kernel in layer.float8_contracted:
        state = layer.float8_state.of(kernel)
        if state is None:
            continue
        for name, (scale, amaxes) in state.rows().items():
            format_name = state.recipe.format_of(name)
            found.append(_operand(kernel, name, format_name, scale, amaxes[0]))
    return found


def _operand(
    kernel: Any, name: str, format_name: str, scale: Any, amax: Any
) -> Operand:
    largest = np.float32(formats.get(format_name).max) * scale
    known = bool(scale > 0)
    return Operand(
        kernel.path,
        name,
        format_name,
        float(amax) if amax > 0 else None,
        float(scale) if known else None,
        float(amax / largest) if known and amax > 0 else None,
    )


def _rows(layer: Inspected) -> list[list[str]]:
    head = [layer.path, layer.class_name, layer.policy, layer.kernel or "–"]
    if not layer.operands:
        return [[*head, "–", "–", "–", "–"]]
    rows = []
    several = len({operand.kernel for operand in layer.operands}) > 1
    for operand in layer.operands:
        name = operand.name
        if several:
            name = f"{operand.kernel.rpartition('/')[2]}: {name}"
        numbers = (operand.amax, operand.scale, operand.saturation)
        cells = ["–" if n is None else f"{n:.3g}" for n in numbers]
        rows.append([*head, name, *cells])
        head = ["", "", "", ""]
    return rows
