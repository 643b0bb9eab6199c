"""`freeze` and `thaw`: kernels of one byte a number, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_policy_ext import _user_code, formats, stored_kernels
from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import (
    candidates,
    composites,
    left_out,
    models,
    training,
)
from keras_policy_ext.conversion.argument_types import PathPatterns
from keras_policy_ext.conversion.candidates import Candidate, Unconverted
from keras_policy_ext.conversion.frozen_report import (
    FrozenReport,
    Stored,
    frozen_report,
    thawed_report,
)
from keras_policy_ext.conversion.report import Report, report_of
from keras_policy_ext.conversion.selection import Selection
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.layers.drop_in import form_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.stored_variable import held
from keras_policy_ext.layers.stored_weights import Frozen
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    is_frozen,
    source_policy_of,
)
from keras_policy_ext.recipes import FrozenKernels


@_user_code.once
def freeze(
    model: keras.Layer,
    *,
    weights: str = "float8_e4m3fn",
    granularity: str = "channel",
    activations: str | None = None,
    trained_scales: bool = False,
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
) -> FrozenReport:
    """Store the kernels of a model in float8, one byte a number, in place.

    Kernels of Dense, EinsumDense, convolutions, attention, recurrent cells
    and embeddings become codes with scales, and the floating-point weights
    are let go. A frozen layer computes what it was rounded to: its kernel
    does not train, and gradients pass to its inputs. Adapters of LoRA train
    beside it. Biases stay as they are, and so does what the report names.

    Args:
        model: A built model or layer, in float8 or not, trained or not.
        weights: The format: `"float8_e4m3fn"` or `"float8_e5m2"`.
        granularity: What has a scale: `"channel"` (each output of a kernel,
            each word of an embedding), `"tensor"`, or `"block"` (128 by 128
            numbers of the kernel as a matrix).
        activations: None leaves the inputs of products as they are.
            `"dynamic"` rounds them to e4m3fn too, with a scale for each
            token, or example of a convolution; `"static"` with one scale for
            all, from the amaxes that were seen in training or by `calibrate`,
            under delayed scaling. Embeddings that also compute logits, as
            `ReversibleEmbedding` does, then stay in floats, as other readers
            of a language model have them, unless `include` names them.
        trained_scales: Whether kernels that were trained under delayed
            scaling keep the scale that they had, and are not scaled anew;
            with `granularity="tensor"` only.
        include: As for `convert`.
        exclude: As for `convert`.

    Returns:
        What was stored, in how many bytes, and how near to what it was; and
        what was not stored and why.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not built, an argument is unknown, a
            kernel is not finite, or a scale that is asked for was never
            seen. The model is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.freeze(model)
        >>> stored = report.stored[0]
        >>> stored.bytes_before, stored.bytes_after  # 32 * 8 codes, 8 scales
        (1024, 288)
    """
    recipe = FrozenKernels(
        weights=weights, per=granularity, activations=activations
    )
    _check_trained(trained_scales, granularity)
    selection = Selection.read(include, exclude, None, None)
    models.check(model)
    found, skipped = freezable(model)
    reasons = selection.reasons(found)
    projecting: dict[int, str] = {}
    if activations is not None and include is None:
        projecting = _projecting(model, found)
        reasons = {**projecting, **reasons}
    chosen = [each for n, each in enumerate(found) if n not in reasons]
    left = [Unconverted(found[n].layer, reasons[n]) for n in sorted(reasons)]
    _check_not_frozen(chosen)
    plans = [_plan(each, recipe, trained_scales) for each in chosen]
    stored: list[Stored] = []
    with training.changing(model) as retraced:
        for number in projecting:
            if reasons[number] is projecting[number]:
                to_stock_class(found[number].layer)
        for plan in plans:
            kernels = list(plan.kernels(stored))
            to_float8_class(plan.layer, plan.policy, kernels)
        for layer in candidates.survey(model).composites:
            composites.enter_float8_with_children(layer)
        composites.declare_policies(model)
        layers = [plan.layer for plan in plans]
        report = report_of(model, layers, [*left, *skipped], retraced=retraced)
    return frozen_report(report, stored)


def thaw(model: keras.Layer) -> Report:
    """Give a frozen model float weights again, in place.

    Layers are the stock ones again. The weights are those that the kernels
    were rounded to: what `freeze` has lost does not come back.

    Args:
        model: As for `freeze`.

    Returns:
        The layers that were frozen, and nothing skipped; it says that their
        weights are rounded.

    Raises:
        ValueError: If the model or a part of it is not built.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.freeze(model)
        >>> report = kpe.thaw(model)
        >>> type(model.layers[0]) is keras.layers.Dense
        True
    """
    models.check(model)
    frozen = frozen_layers(model)
    with training.changing(model) as retraced:
        for layer in frozen:
            to_stock_class(layer)
        for layer in candidates.survey(model).composites:
            composites.leave_with_children(layer, frozen)
        return thawed_report(report_of(model, frozen, [], retraced=retraced))


def frozen_layers(model: keras.Layer) -> list[Any]:
    """The layers of a model whose kernels are stored."""
    return [layer for layer in walking.layers_within(model) if is_frozen(layer)]


def freezable(
    model: keras.Layer,
) -> tuple[list[Candidate], list[Unconverted]]:
    """The layers of a model that can be frozen, and why others cannot."""
    survey = candidates.survey(model)
    found = {id(each.layer): each for each in survey.candidates}
    skipped = []
    for each in survey.skipped:
        form = _form(each.layer)
        trains = getattr(form, "float8_trains", True)
        if form is None or trains or not each.layer.built:
            skipped.append(each)
            continue
        kernels = tuple(stored_weights.kernels_to_store(each.layer, form))
        found[id(each.layer)] = Candidate(each.layer, form, kernels)
    order = walking.layers_within(model)
    holders = _holders(order)
    assigned = left_out.kernels_assigned_in(order)
    chosen = []
    for layer in order:
        if id(layer) not in found:
            continue
        candidate = found[id(layer)]
        reason = left_out.has_own_files(layer) or _shared(candidate, holders)
        if reason := reason or _assigned(candidate, assigned):
            skipped.append(Unconverted(layer, reason))
        else:
            chosen.append(candidate)
    return chosen, skipped


def _projecting(model: keras.Layer, found: list[Candidate]) -> dict[int, str]:
    """The embeddings in a model that compute logits too, and why they stay.

    By number. What reads an exported model computes logits of inputs that are
    not rounded, and has the table in floats.
    """
    return {
        number: "it computes logits, whose inputs other readers do not round; "
        "`include` freezes it too"
        for number, each in enumerate(found)
        if issubclass(each.form, keras.layers.ReversibleEmbedding)
        and each.layer is not model
        and not is_frozen(each.layer)
    }


def shares_stored_kernels(model: keras.Layer) -> bool:
    """Return True if more than one layer of a model holds a stored kernel."""
    layers = walking.layers_within(model)
    holders = _holders(layers)
    stored = [each for x in layers for each in stored_weights.stored_in(x)]
    return any(len(holders.get(id(held(each)), ())) > 1 for each in stored)


def _holders(layers: list[keras.Layer]) -> dict[int, list[keras.Layer]]:
    """The layers that hold each variable, by its id."""
    holders: dict[int, list[keras.Layer]] = {}
    for layer in layers:
        tracked = walking.tracked_variables(layer)
        for variable in [*tracked, *walking.captured_variables(layer)]:
            holders.setdefault(id(held(variable)), []).append(layer)
    return holders


def _shared(
    candidate: Candidate, holders: dict[int, list[keras.Layer]]
) -> str | None:
    """Why a layer is not frozen: another one holds a kernel of it too.

    The other layer would keep the float kernel, and train it alone; in a
    model that is made anew from a file it would take codes for numbers.
    """
    for kernel in candidate.kernels:
        for holder in holders.get(id(kernel), ()):
            if holder is not candidate.layer:
                path = candidates.path_of(holder)
                return f"layer {path!r} holds its weight {kernel.name!r} too"
    return None


def _assigned(candidate: Candidate, reasons: dict[int, str]) -> str | None:
    """Why a layer is not frozen: code of the user's assigns a kernel."""
    found = (reasons.get(id(kernel)) for kernel in candidate.kernels)
    return next(filter(None, found), None)


def form_to_freeze(layer: Any) -> Any:
    """The class that a stock layer has when it is frozen.

    None if it has that class, or has no kernels of its own to store.
    """
    form = _form(layer)
    if form is type(layer) or not issubclass(form or object, Float8Mixin):
        return None
    if left_out.has_own_files(layer):
        return None
    return form


def _form(layer: keras.Layer) -> Any:
    """The float8 form of a layer's class, if it computes nothing else."""
    try:
        return form_of(type(layer))
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The decision about one layer."""

    candidate: Candidate
    recipe: FrozenKernels
    inputs_scales: dict[str, float]
    scales: dict[str, float]

    @property
    def layer(self) -> Any:
        return self.candidate.layer

    @property
    def policy(self) -> Float8DTypePolicy:
        source = source_policy_of(self.layer).name
        return Float8DTypePolicy(source, recipe=self.recipe)

    def kernels(self, stored: list[Stored]) -> Iterator[Frozen]:
        """What each kernel becomes; and a note of it."""
        form: Any = self.candidate.form
        for kernel in stored_weights.kernels_to_store(self.layer, form):
            value = stored_weights.float_value(kernel)
            try:
                each = stored_kernels.quantize(
                    value,
                    form.float8_axes(self.layer, kernel),
                    self.recipe.per,
                    self.recipe.weights,
                    self.scales.get(kernel.path),
                )
            except ValueError as error:
                raise ValueError(f"{kernel.path!r}: {error}") from error
            stored.append(Stored.of(kernel, value, each))
            yield kernel, each, self.inputs_scales.get(kernel.path)


def _plan(
    candidate: Candidate, recipe: FrozenKernels, trained_scales: bool
) -> _Plan:
    """Decide what is done with a layer, once all arguments are checked."""
    layer: Any = candidate.layer
    inputs: dict[str, float] = {}
    scales: dict[str, float] = {}
    for kernel in candidate.kernels:
        rows = _seen(layer, kernel)
        form: Any = candidate.form
        if recipe.activations == "static" and form.float8_trains:
            amax = float(np.max(rows["inputs"][1], initial=0.0)) if rows else 0
            if not amax:
                raise ValueError(_unseen(layer, "inputs", "static"))
            inputs[kernel.path] = amax / formats.get("float8_e4m3fn").max
        if trained_scales and rows:
            scale = float(rows["kernel"][0])
            if scale > 0:
                scales[kernel.path] = scale
    return _Plan(candidate, recipe, inputs, scales)


def _seen(layer: Any, kernel: keras.Variable) -> Any:
    """Return the amaxes of a kernel and its inputs; nothing without state."""
    if not isinstance(layer, Float8Mixin):
        return {}
    variable = layer.float8_state.of(kernel)
    return {} if variable is None else variable.rows()


def _unseen(layer: Any, operand: str, asked: str) -> str:
    return (
        f"Layer {candidates.path_of(layer)!r} has seen no amax of its "
        f"{operand}. Received: activations={asked!r}. Allowed: a model that "
        "was trained or calibrated under delayed scaling. Call "
        "`keras_policy_ext.convert(model)` and "
        "`keras_policy_ext.calibrate(model, data)` first; or leave the layer "
        "out with `exclude`, or freeze with activations='dynamic', which "
        "needs no data."
    )


def _check_trained(trained_scales: bool, granularity: str) -> None:
    if trained_scales and granularity != "tensor":
        raise ValueError(
            "trained_scales=True needs granularity='tensor': scales from "
            "training are those of whole kernels. Received: "
            f"trained_scales=True and granularity={granularity!r}. Allowed: "
            "granularity='tensor'. Pass that, or scale the kernels anew."
        )


def _check_not_frozen(chosen: list[Candidate]) -> None:
    for each in chosen:
        policy: Any = float8_policy_of(each.layer)
        if is_frozen(each.layer):
            raise ValueError(
                f"Layer {candidates.path_of(each.layer)!r} is frozen. "
                f"Received: a layer under {policy.full_name!r}. Allowed: "
                "layers with float kernels. `keras_policy_ext.thaw(model)` "
                "gives them back, rounded; or leave the layer out with "
                "`exclude`."
            )
