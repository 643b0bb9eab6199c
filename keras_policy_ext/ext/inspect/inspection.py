"""`inspect`: the precision of each layer, and the scales of its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats, user_code
from keras_policy_ext._keras import variable_values
from keras_policy_ext._keras.walking import layers_within, own_weights
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.conversion.layers_report import LayersReport
from keras_policy_ext.conversion.work import Work, scalars, work_of
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.layers.stored_weights import (
    StoredVariable,
    stored_in,
)
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    stock_policy_of,
)
from keras_policy_ext.reports import Column, counted, readable_bytes


@dataclasses.dataclass(frozen=True)
class Operand:
    """The format, amax and scale of one operand of a float8 matmul.

    Attributes:
        kernel: The path of the weight that is contracted.
        name: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        format: The number format, e.g. `"float8_e4m3fn"`.
        amax: The newest observed amax; for a kernel that was never observed,
            its present amax; None if there is none.
        scale: The dequantizing scale that the last step took from the history;
            None if there was none.
        saturation: The newest amax as a fraction of the largest value that
            this scale represents; above 1 the step clipped it.
    """

    kernel: str
    name: str
    format: str
    amax: float | None
    scale: float | None
    saturation: float | None


@dataclasses.dataclass(frozen=True)
class StoredOperand:
    """A kernel of a frozen layer that is stored in float8, with its scales.

    Attributes:
        kernel: The path of the kernel.
        format: The number format, e.g. `"float8_e4m3fn"`.
        granularity: The unit that has a scale: `"channel"`, `"tensor"` or
            `"block"`.
        bytes: The bytes of its codes and scales.
        smallest_scale: The smallest of its scales.
        largest_scale: The largest of its scales.
        activations: `"dynamic"` or `"static"`; None if its inputs are not
            quantized.
        inputs_scale: The scale of its inputs, if it is static.
    """

    kernel: str
    format: str
    granularity: str
    bytes: int
    smallest_scale: float
    largest_scale: float
    activations: str | None
    inputs_scale: float | None

    @classmethod
    def of(cls, kernel: StoredVariable) -> StoredOperand:
        """Return the entry of a frozen layer's kernel."""
        stored, given = kernel.stored, kernel.inputs_scale
        return cls(
            kernel.path,
            kernel.weights,
            kernel.granularity,
            stored.nbytes,
            float(np.min(stored.scale, initial=np.inf)),
            float(np.max(stored.scale, initial=0)),
            kernel.recipe.activations,
            None if given is None else float(ops.convert_to_numpy(given)),
        )

    def rows(self, several: bool) -> list[list[str]]:
        """Return table rows (name, amax, scale, saturation) of the operands."""
        size = readable_bytes(self.bytes)
        name = self.kernel.rpartition("/")[2] if several else "kernel"
        scales = f"{self.smallest_scale:.3g}"
        if self.largest_scale != self.smallest_scale:
            scales += f"–{self.largest_scale:.3g}"
        found = [[f"{name}, {size}, {self.granularity}", "–", scales, "–"]]
        if self.activations is not None:
            given = self.inputs_scale
            scale = "–" if given is None else f"{given:.3g}"
            found.append([f"inputs, {self.activations}", "–", scale, "–"])
        return found


@dataclasses.dataclass(frozen=True)
class Inspected(Work):
    """The policy, operands and multiplications of one layer with weights.

    Attributes:
        path: The layer's path.
        class_name: The name of its class.
        policy: The full name of the policy that it follows in fact.
        recipe: The repr of the float8 recipe, None if it is not in float8.
        kernel: `"native"`, `"emulated"`, or `"rounded"` if it trains in floats
            for a grid of few bits. None if it follows none of our policies, or
            was not called in this process yet.
        reason: Why it is so.
        operands: The operands in its state; empty under a recipe without state.
        stored: Its stored kernels, if it is frozen.
        parameters, multiplications, plain_multiplications, sizes_known: As
            for `work.Work`.
    """

    path: str
    class_name: str
    policy: str
    recipe: str | None
    kernel: str | None
    reason: str | None
    operands: tuple[Operand, ...]
    stored: tuple[StoredOperand, ...] = ()

    @property
    def in_float8(self) -> bool:
        """True if the layer follows a float8 policy."""
        return self.recipe is not None

    @property
    def frozen(self) -> bool:
        """True if the layer's kernels are stored in float8."""
        return bool(self.stored)

    @property
    def saturation(self) -> float | None:
        """The largest saturation of the layer's operands; None if unknown."""
        known = [o.saturation for o in self.operands]
        return max((s for s in known if s is not None), default=None)


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection(LayersReport):
    """The report of `inspect`: one entry for each layer with weights.

    `str` says how much of the model is in float8. It has one row for all
    layers of one class under one policy, fits on a screen of 24 lines, and
    is as wide as the terminal. `table(full=True)` has rows for every layer,
    one for each operand.

    Attributes:
        layers: One entry for each layer.
        parameters: Entries of the weights, without the float8 state.
        state: Entries of the float8 state. `model.count_params()` is the sum
            of the two.
        built: Whether the model is built, or has weights in layers that are.
    """

    layers: tuple[Inspected, ...]
    parameters: int
    state: int
    built: bool = True

    _columns = (
        Column("kernel"),
        Column("saturation", right=True),
        Column("policy", wraps=True),
    )
    _full_columns = (
        Column(""),
        Column("operand"),
        *(Column(h, right=True) for h in ("amax", "scale", "saturation")),
    )
    _every = "Every layer: inspection.table(full=True)"

    @property
    def _entries(self) -> tuple[Inspected, ...]:
        return self.layers

    def _treatment(self, entry: Inspected) -> tuple[str, str | None]:
        return entry.policy, entry.kernel

    def _cells(self, group: Sequence[Inspected]) -> list[str]:
        known = [e.saturation for e in group if e.saturation is not None]
        return [
            group[0].kernel or "–",
            f"{max(known):.3g}" if known else "–",
            group[0].policy,
        ]

    def _full_rows(self, entry: Inspected) -> list[list[str] | str]:
        """Return a heading for a layer, and below it a row for each operand."""
        about = [entry.path, entry.class_name, entry.policy, entry.kernel]
        several = len(entry.stored) > 1
        rows = [cells for each in entry.stored for cells in each.rows(several)]
        kernels = {operand.kernel for operand in entry.operands}
        several = len(kernels) > 1
        names = {kernel.rpartition("/")[2] for kernel in kernels}
        # Of other layers, they may all be called the same.
        parts = 1 if len(names) == len(kernels) else 2
        for operand in entry.operands:
            name = operand.name
            if several:
                name = f"{'/'.join(operand.kernel.split('/')[-parts:])}: {name}"
            numbers = (operand.amax, operand.scale, operand.saturation)
            cells = ("–" if n is None else f"{n:.3g}" for n in numbers)
            rows.append([name, *cells])
        head = "  ".join(filter(None, about))
        return [head, *(["", *row] for row in rows)]

    def _head(self) -> list[str]:
        if self.built:
            return super()._head()
        return [
            "The model is not built, so its layers have no weights yet. Call "
            "it on a batch of data, or `model.build(input_shape)`, first."
        ]

    def _notes(self, full: bool) -> list[str]:
        """Return sentences on the float8 state, and on emulated layers."""
        state = (
            f"{self.parameters:,} parameters, and {self.state:,} numbers of "
            f"float8 state; Keras counts {self.parameters + self.state:,}"
        )
        reasons = {
            f"{each.kernel}: {each.reason}"
            for each in self.layers
            if each.in_float8 and each.reason is not None
        }
        notes = [*([state] if self.state else []), *sorted(reasons)]
        notes[:0] = self._frozen_notes()
        # The full table has no column of multiplications.
        return notes if full else [*notes, *super()._notes(full)]

    def _frozen_notes(self) -> list[str]:
        frozen = [each.stored for each in self.layers if each.stored]
        if not frozen:
            return []
        stored = [kernel for layer in frozen for kernel in layer]
        size = readable_bytes(sum(each.bytes for each in stored))
        verb = "is" if len(frozen) == 1 else "are"
        return [
            f"{counted(len(frozen), 'layer')} {verb} frozen, with "
            f"{counted(len(stored), 'kernel')} of {size}"
        ]


@user_code.once
def inspect(model: keras.Layer) -> Inspection:
    """Return the policy, operands and scales of each layer with weights.

    Args:
        model: A Keras model or layer.

    Returns:
        One entry for each layer that has weights of its own or is in float8;
        `print` it for a table.

    Raises:
        TypeError: If `model` is not a Keras model or layer.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model)
        >>> inspection = kpe.inspect(model)
        >>> inspection.parameters
        264
        >>> inspection.layers[0].policy
        'float8/current_from_float32'
    """
    check_is_layer(
        model,
        "can be looked at",
        "; a file goes to `keras-policy-ext inspect FILE`",
    )
    shown = [
        layer
        for layer in layers_within(model)
        if not isinstance(layer, Float8State)
        and (float8_policy_of(layer) or own_weights(layer))
    ]
    work = work_of(model)
    states = [v for v in model.weights if is_state(v)]
    weights = [v for v in model.weights if not is_state(v)]
    return Inspection(
        tuple(_inspected(layer, work.of(layer)) for layer in shown),
        scalars(weights),
        scalars(states),
        built=model.built or bool(weights),
    )


def _inspected(layer: keras.Layer, counted: Work) -> Inspected:
    policy = float8_policy_of(layer)
    choice = policy and layer.kernel_choice
    return Inspected(
        path=path_of(layer),
        class_name=type(layer).__name__,
        policy=policy.full_name if policy else stock_policy_of(layer).name,
        recipe=repr(policy.recipe) if policy else None,
        kernel=choice.kind if choice else None,
        reason=choice.reason if choice else None,
        operands=tuple(_operands(layer)) if policy else (),
        stored=tuple(StoredOperand.of(each) for each in stored_in(layer)),
        **dataclasses.asdict(counted),
    )


def _operands(layer: keras.Layer) -> list[Operand]:
    found = []
    for kernel in layer.float8_contracted:
        state = layer.float8_state.of(kernel)
        if state is None:
            continue
        state.look_at(variable_values.value_without_autocast(kernel))
        for name, (scale, (amax, *_)) in state.rows().items():
            if name == "kernel" and state.is_unseen(name):
                amax = layer.float8_state.states.amax(kernel).max()
            number_format = state.recipe.format_of(name)
            largest = np.float32(formats.get(number_format).max) * scale
            observed, known = amax > 0, scale > 0
            operand = Operand(
                kernel.path,
                name,
                number_format,
                float(amax) if observed else None,
                float(scale) if known else None,
                float(amax / largest) if known and observed else None,
            )
            found.append(operand)
    return found
