"""`freeze` and `thaw`: kernels of one byte or less an element, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import keras
import numpy as np

from keras_policy_ext import (
    _extensions,
    backends,
    contractions,
    formats,
    stored_kernels,
    user_code,
)
from keras_policy_ext._keras import built_layers, walking
from keras_policy_ext.conversion import candidates, in_place, roles, training
from keras_policy_ext.conversion.candidates import (
    Candidate,
    Unconverted,
    path_of,
)
from keras_policy_ext.conversion.report import (
    FrozenReport,
    Report,
    Stored,
    ThawedReport,
    report_of,
)
from keras_policy_ext.conversion.requested import PathPatterns, Selection
from keras_policy_ext.conversion.traced_model import TracedModel
from keras_policy_ext.conversion.work import DEPTHWISE, work_of
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.by_operation import (
    ByOperation,
    form_by_operation,
    is_own,
)
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.layers.drop_in import drop_ins, form_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.stored_weights import Frozen, held
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    is_frozen,
    source_policy_of,
)
from keras_policy_ext.recipes import FrozenKernels

_SAVING_METHODS = ("save_own_variables", "load_own_variables")


def has_own_files(layer: keras.Layer) -> str | None:
    """Return why a layer that overrides saving cannot be frozen, or None."""
    # Its files hold float kernels: codes would be loaded as values.
    for name in _SAVING_METHODS:
        if name in vars(layer):
            return f"it has a `{name}` of its own"
    float8_classes = drop_ins()  # By stock class.
    for base in type(layer).__mro__:
        if base in (Float8Mixin, keras.Layer) or base in float8_classes:
            return None  # A float8 class replaces the methods of these.
        for name in _SAVING_METHODS:
            if name in vars(base) and base not in float8_classes.values():
                return (
                    f"its class {base.__name__} has a `{name}` of its own, "
                    "which reads and writes float weights"
                )
    return None


@user_code.once
def freeze(
    model: keras.Layer,
    *,
    weights: str | None = None,
    granularity: str | None = None,
    activations: str | None = None,
    trained_scales: bool = False,
    scales: Literal["amax", "least_squares"] = "amax",
    scale_format: str | None = None,
    to: Literal["keras"] | None = None,
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    filter: Callable[[Any], bool] | Literal["all"] | None = None,
) -> FrozenReport:
    """Store the kernels of a model in few bits, in place.

    Kernels of Dense, EinsumDense, convolutions, attention, recurrent cells and
    embeddings become codes with scales, and the floating-point weights are
    released. A frozen layer computes with the rounded kernel: the kernel does
    not train, and gradients pass to the inputs. LoRA adapters still train.
    Biases are unchanged, and so are the layers that the report lists as
    skipped.

    Args:
        model: A built model or layer, in float8 or not, trained or not.
        weights: The format: `"float8_e4m3fn"`, `"float8_e5m2"` or
            `"float4_e2m1fn"`, or integers: `"int8"`, `"int4"`, `"int3"` or
            `"int2"`. A code is one byte in memory; files have two in a byte of
            four or three bits, and four of two bits. None stores each kernel as
            it was trained for, by a recipe such as `"int4"`, and others in
            `"float8_e4m3fn"`.
        granularity: What has a scale: `"channel"` (each output of a kernel,
            each row of an embedding), `"tensor"`, `"block"` (128 by 128
            elements of the kernel as a matrix), or `"group16"`, `"group32"`,
            `"group64"`, `"group128"` (so many elements that a matmul sums).
            NVFP4 has `weights="float4_e2m1fn"`, `"group16"` and
            `scale_format="float8_e4m3fn"`. None, and
            `"group"`, mean what a kernel was trained for, and otherwise
            `"channel"` and `"group32"`.
        activations: None leaves the inputs of matmuls unquantized.
            `"dynamic"` quantizes them too, with a scale per token, or per
            example of a convolution: to e4m3fn, and to int8 beside kernels of
            integers, but not beside `"float4_e2m1fn"`. `"static"` uses one
            scale for all, from the amaxes that delayed scaling observed in
            training or in `calibrate`. With either, embeddings that also
            compute logits, such as `ReversibleEmbedding`, stay in floats unless
            `include` names them, because other readers of a language model
            keep them so.
        trained_scales: Whether kernels that were trained under delayed
            scaling keep their scale instead of getting a new one; only with
            `granularity="tensor"`.
        scales: How a scale is found: `"amax"`, by which nothing is clipped; or
            `"least_squares"`, the clip with the least squared error of the
            numbers that share it, for kernels that were not trained for the
            format.
        scale_format: The format of the scales: `"float32"`, `"bfloat16"`,
            `"float8_e8m0fnu"`, which has the powers of two, or
            `"float8_e4m3fn"`, times one power of two per kernel. Files have
            them in it. None means what a kernel was trained for, and otherwise
            `"float32"`.
        to: `"keras"` makes Keras's own layers in int8 and int4 of the frozen
            ones, so that files of the model load without this package. It
            has `Dense`, `EinsumDense` and `Embedding`, `"int8"` per channel,
            and `"int4"` per channel or group. None keeps this package's.
        include: As for `convert`.
        exclude: As for `convert`.
        filter: `f(layer) -> bool`: whether to freeze a layer; or `"all"`. None
            leaves out layers that decide, such as routers of experts, as
            `convert` does; but not one that is in float8 already.

    Returns:
        What was stored, in how many bytes and with what error; and what was
        not stored and why.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not built, an argument is unknown, a
            kernel is not finite, or a requested scale was never observed.
            The model is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.freeze(model)
        >>> stored = report.stored[0]
        >>> stored.bytes_before, stored.bytes_after  # 32 * 8 codes, 8 scales
        (1024, 288)
    """
    asked = _Asked(
        weights, granularity, activations, scales, scale_format, trained_scales
    )
    asked.check()
    writer = _writer(to)
    given: object = filter
    if given == "auto":  # Its class may be missing: it is an extension's.
        raise ValueError(_no_filter(given))
    selection = Selection.read(include, exclude, filter)
    if isinstance(selection.filter, candidates.SizeFilter):
        raise ValueError(_no_filter(filter))
    candidates.check(model, "can be frozen")
    traced = TracedModel(model)
    eligible, skipped = freezable(traced)
    work = work_of(model)
    by_role = deciding(selection, eligible, traced)
    reasons = selection.reasons(eligible, by_role)
    by_logits: dict[int, str] = {}
    if activations is not None and include is None:
        by_logits = _computing_logits(model, eligible)
        reasons = {**by_logits, **reasons}
    chosen = [each for n, each in enumerate(eligible) if n not in reasons]
    stay = [Unconverted(eligible[n].layer, reasons[n]) for n in sorted(reasons)]
    _check_not_frozen(chosen)
    plans = [_plan(each, asked) for each in chosen]
    if writer is not None:
        writer.check([(plan.layer, plan.recipe) for plan in plans])
    stored: list[Stored] = []
    with training.changing(model) as retraced:
        # Embeddings that stay for this reason alone leave float8 too.
        for number in by_logits:
            if reasons[number] is by_logits[number]:
                to_stock_class(eligible[number].layer)
        _revert_users(model, chosen)
        for plan in plans:
            kernels = list(plan.kernels(stored))
            to_float8_class(plan.layer, plan.policy, kernels)
        for layer in candidates.survey(model).composites:
            in_place.enter_float8_with_children(layer)
        in_place.declare_policies(model)
        layers = [plan.layer for plan in plans]
        in_floats = [x for layer in layers for x in _kernels_in_floats(layer)]
        holds = not in_floats and work.hold_for(layers)
        report = report_of(
            FrozenReport,
            model,
            layers,
            [*stay, *in_floats, *skipped],
            retraced=retraced,
            work=work if holds else None,  # None: counted anew.
            stored=tuple(stored),
        )
        if writer is not None:
            writer.convert(model, layers)
        return report


class Writer(Protocol):
    """Makes other layers of frozen ones, for the argument `to` of `freeze`.

    An extension registers one by `register_writer`.
    """

    def check(self, layers: Sequence[tuple[Any, FrozenKernels]]) -> None:
        """Raise ValueError if a layer cannot be frozen so by its recipe."""

    def convert(self, model: keras.Layer, layers: Sequence[Any]) -> None:
        """Make other layers of frozen ones of a model, in place."""


_writers: dict[str, Writer] = {}


def register_writer(to: str, writer: Writer) -> None:
    """Register what `freeze` calls for its argument `to`."""
    _writers[to] = writer


def _writer(to: object) -> Writer | None:
    """Return what makes layers of another kind of frozen ones, or None."""
    if to is None:
        return None
    _extensions.import_for("writers")
    if to in _writers:
        return _writers[str(to)]
    known = ", ".join(map(repr, _writers))
    raise ValueError(
        f"`to` is no kind of layers. Received: to={to!r}. Allowed: {known}, or "
        "None for frozen layers of this package. Pass one of them."
    )


def thaw(model: keras.Layer) -> Report:
    """Undo `freeze` in place: give the layers of a model float weights again.

    Layers are stock layers again. The weights have the values that `freeze`
    rounded them to: the rounding is not undone.

    Args:
        model: As for `freeze`.

    Returns:
        A report of the layers that were frozen, with rounded weights.

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
    candidates.check(model, "can be thawed")
    frozen = frozen_layers(model)
    with training.changing(model) as retraced:
        for layer in frozen:
            to_stock_class(layer)
        # Composites too, if none of the layers in them stays in float8.
        for layer in candidates.survey(model).composites:
            inner = walking.layers_within(layer)[1:]
            was_frozen = any(each is x for each in inner for x in frozen)
            if was_frozen and not any(map(float8_policy_of, inner)):
                to_stock_class(layer)
        return report_of(ThawedReport, model, frozen, [], retraced=retraced)


def frozen_layers(model: keras.Layer) -> list[Any]:
    """Return the layers of a model whose kernels are stored in float8."""
    return [layer for layer in walking.layers_within(model) if is_frozen(layer)]


def freezable(
    traced: TracedModel,
) -> tuple[list[Candidate], list[Unconverted]]:
    """Return the layers that `freeze` can freeze, and others with a reason."""
    model = traced.model
    survey = candidates.survey(model, traced=traced)
    found = list(map(_with_own_kernels, survey.candidates))
    by_id = {id(each.layer): each for each in found if each.kernels}
    elsewhere = (
        "it multiplies with a weight of another layer, which is stored there"
    )
    skipped = [Unconverted(x.layer, elsewhere) for x in found if not x.kernels]
    # Skipped layers that do not train in float8, embeddings, can be frozen.
    for each in survey.skipped:
        form = _float8_class(each.layer)
        trains = getattr(form, "float8_trains", True)
        in_codes = candidates.quantized_by_keras(each.layer)
        if form is None or trains or in_codes or not each.layer.built:
            skipped.append(each)
            continue
        kernels = tuple(stored_weights.kernels_to_store(each.layer, form))
        by_id[id(each.layer)] = Candidate(each.layer, form, kernels)
    order = walking.layers_within(model)
    holders = _holders(order)
    chosen = []
    for layer in order:
        if id(layer) not in by_id:
            continue
        candidate = by_id[id(layer)]
        reason = has_own_files(layer) or _why_shared(candidate, holders)
        if reason := reason or _why_moved(candidate):
            skipped.append(Unconverted(layer, reason))
        else:
            chosen.append(candidate)
    return chosen, skipped


def _with_own_kernels(candidate: Candidate) -> Candidate:
    """Return a candidate with only the kernels that its layer owns.

    Kernels of other layers, with which it multiplies, are stored there.
    """
    if not candidate.owners:
        return candidate
    own = {id(each) for each in walking.own_weights(candidate.layer)}
    kernels = tuple(each for each in candidate.kernels if id(each) in own)
    return dataclasses.replace(candidate, kernels=kernels, owners=())


def deciding(
    selection: Selection, eligible: list[Candidate], traced: TracedModel
) -> dict[int, str]:
    """Return why some layers stay in floats: they choose, as routers do.

    The reasons are by index in `eligible`. Layers that are in float8 already
    are frozen all the same.
    """
    if selection.deciding:
        return {}
    reasons = roles.deciding(eligible, traced)
    in_floats = [n for n in reasons if not float8_policy_of(eligible[n].layer)]
    return {n: reasons[n] for n in in_floats}


def _no_filter(given: object) -> str:
    """Return the message for a filter that `freeze` does not take."""
    return (
        "This filter is about the speed or the accuracy of training, and not "
        f"about stored kernels. Received: filter={given!r}. Allowed: a "
        "function of a layer that returns a bool; 'all'; or None, for all "
        "layers but those that decide, such as routers of experts. Choose "
        "layers by `include` and `exclude`."
    )


def _revert_users(model: keras.Layer, chosen: list[Candidate]) -> None:
    """Make stock layers of those that multiply with kernels to be frozen.

    They are layers that do not own these kernels.
    """
    # They hold the state of these kernels. As stock layers they read values.
    to_freeze = {id(each.layer) for each in chosen}
    for each in candidates.survey(model).candidates:
        reads_stored = any(id(owner) in to_freeze for owner in each.owners)
        in_float8 = float8_policy_of(each.layer) is not None
        if reads_stored and in_float8 and id(each.layer) not in to_freeze:
            to_stock_class(each.layer)


def _computing_logits(
    model: keras.Layer, eligible: list[Candidate]
) -> dict[int, str]:
    """Return why embeddings that also compute logits stay, by index."""
    return {
        number: "it computes logits, whose inputs other readers do not round; "
        "`include` freezes it too"
        for number, each in enumerate(eligible)
        if issubclass(each.form, keras.layers.ReversibleEmbedding)
        and each.layer is not model  # Then it was asked for by itself.
        and not is_frozen(each.layer)
    }


def shares_stored_kernels(model: keras.Layer) -> bool:
    """Return True if several layers of a model hold the same stored kernel."""
    layers = walking.layers_within(model)
    holders = _holders(layers)
    stored = [each for x in layers for each in stored_weights.stored_in(x)]
    return any(len(holders.get(id(held(each)), ())) > 1 for each in stored)


def _holders(layers: list[keras.Layer]) -> dict[int, list[keras.Layer]]:
    """Return the layers that hold a variable, by the id of the variable."""
    holders: dict[int, list[keras.Layer]] = {}
    for layer in layers:
        tracked = walking.tracked_variables(layer)
        for variable in [*tracked, *walking.captured_variables(layer)]:
            # Of a stored kernel, `held` returns the codes.
            holders.setdefault(id(held(variable)), []).append(layer)
    return holders


def _why_shared(
    candidate: Candidate, holders: dict[int, list[keras.Layer]]
) -> str | None:
    """Return why a layer stays if another one holds its kernel, or None."""
    # The other would keep the float kernel and train it alone; in a model that
    # is rebuilt from a file, it would read codes as values.
    for kernel in candidate.kernels:
        for holder in holders.get(id(kernel), ()):
            if holder is not candidate.layer:
                path = candidates.path_of(holder)
                return f"layer {path!r} holds its weight {kernel.name!r} too"
    return None


def _why_moved(candidate: Candidate) -> str | None:
    """Return why a layer has no kernel that can be stored, or None."""
    form: Any = candidate.form
    if stored_weights.kernels_to_store(candidate.layer, form):
        return None
    # Only in a product that is recognised by operation a kernel may be moved.
    if not issubclass(form, ByOperation) or is_frozen(candidate.layer):
        return None
    return "it moves its kernel before it multiplies with it"


def _kernels_in_floats(layer: Any) -> Iterator[Unconverted]:
    """Yield the kernels of a frozen layer that stay in floats, and why."""
    for each in walking.own_weights(layer):
        if isinstance(each, stored_weights.StoredVariable):
            continue
        if each.name == DEPTHWISE:
            yield Unconverted(layer, f"{each.name!r} is depthwise", each)
        elif layer.is_float8_kernel(layer, each):
            reason = f"{each.name!r} is moved, or read in several ways"
            yield Unconverted(layer, reason, each)


def form_to_freeze(layer: keras.Layer) -> Any:
    """Return the float8 class with which to freeze a stock layer, or None.

    None if it has that class already, saves its weights in its own way, or has
    no kernels of its own to store.
    """
    form = _float8_class(layer)
    if form is type(layer) or not issubclass(form or object, Float8Mixin):
        return None
    if has_own_files(layer):
        return None
    # Products by operation may be with weights of other layers only.
    if issubclass(form, ByOperation) and not is_own(layer):
        return None
    return form


def lacks_form(layer: keras.Layer) -> bool:
    """Return True if a layer has no float8 class as far as is known."""
    return not isinstance(layer, Float8Mixin) and _float8_class(layer) is None


def _float8_class(layer: keras.Layer) -> Any:
    """Return the float8 class for a layer; None if there is none."""
    try:
        return form_of(type(layer)) or form_by_operation(layer)
    except TypeError:  # A subclass overrides its `call`, for instance.
        return None


class _Asked(NamedTuple):
    """The arguments of `freeze` that say how kernels are stored."""

    weights: str | None
    granularity: str | None
    activations: str | None
    scales: str
    scale_format: str | None
    trained_scales: bool

    def check(self) -> None:
        """Raise ValueError if an argument is wrong."""
        self.recipe(None)
        _check_trained(self.trained_scales, self.granularity)
        if self.scales not in ("amax", "least_squares"):
            raise ValueError(
                "`scales` is no way to find scales. Received: "
                f"scales={self.scales!r}. Allowed: 'amax' or 'least_squares'. "
                "Pass one of them."
            )

    def recipe(self, grid: stored_kernels.Grid | None) -> FrozenKernels:
        """Return how to store a kernel: as asked, else as it was trained for.

        `grid` is what it was trained for; None for floats or float8.
        """
        weights, per, activations = self[:3]
        scale_format = self.scale_format
        if weights is None and grid is not None:
            weights = grid.weights
            if activations is None and grid.inputs is not None:
                activations = "dynamic"
        if per in (None, "group"):
            begins, per = per or "", "channel" if per is None else "group32"
            if grid is not None and grid.weights == weights:
                fits = grid.granularity.startswith(begins)
                per = grid.granularity if fits else per
        if grid is not None and grid.weights == weights:
            scale_format = scale_format or grid.scale_format
        return FrozenKernels(
            weights=weights or stored_kernels.WEIGHTS[0],
            per=per,
            activations=activations,
            scale_format=scale_format or stored_kernels.SCALE_FORMATS[0],
        )

    def clips(
        self, recipe: FrozenKernels, grid: stored_kernels.Grid | None
    ) -> tuple[float, ...]:
        """Return the shares of an amax that are tried as the largest number.

        With 1.0 no value is clipped.
        """
        if self.scales == "least_squares":
            return stored_kernels.CLIPS
        if grid is None or grid[:2] != (recipe.weights, recipe.per):
            return (1.0,)
        return (grid.clip,)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The recipe and the scales with which `freeze` stores one layer."""

    candidate: Candidate
    recipe: FrozenKernels
    inputs_scales: dict[str, float]  # Static ones, by the path of the kernel.
    scales: dict[str, float]  # Trained ones of kernels; others are computed.
    clips: tuple[float, ...]  # See `stored_kernels.clipped_scales`.

    @property
    def layer(self) -> Any:
        """The layer to freeze."""
        return self.candidate.layer

    @property
    def policy(self) -> Float8DTypePolicy:
        """The float8 policy that the layer gets."""
        source = source_policy_of(self.layer).name
        return Float8DTypePolicy(source, recipe=self.recipe)

    def kernels(self, stored: list[Stored]) -> Iterator[Frozen]:
        """Yield (kernel, its codes, scale of its inputs); add to `stored`."""
        form: Any = self.candidate.form
        for kernel in stored_weights.kernels_to_store(self.layer, form):
            value = stored_weights.float_value(kernel)
            axes = form.float8_axes(self.layer, kernel)
            how = self.recipe.per, self.recipe.weights
            form_of_scales = self.recipe.scale_format
            scale: Any = self.scales.get(kernel.path)
            try:
                if scale is None and self.clips != (1.0,):
                    scale = stored_kernels.clipped_scales(
                        value, axes, *how, self.clips, form_of_scales
                    )
                each = stored_kernels.quantize(
                    value, axes, *how, scale, form_of_scales
                )
            except ValueError as error:
                raise ValueError(f"{kernel.path!r}: {error}") from error
            stored.append(Stored.of(kernel, value, each))
            yield kernel, each, self.inputs_scales.get(kernel.path)


def _plan(candidate: Candidate, asked: _Asked) -> _Plan:
    """Return the `_Plan` of a layer, with the scales recorded in its state."""
    layer: Any = candidate.layer
    policy = float8_policy_of(layer)
    grid = None if policy is None else policy.recipe.grid
    recipe = asked.recipe(grid)
    input_scales: dict[str, float] = {}
    kernel_scales: dict[str, float] = {}
    form: Any = candidate.form
    none_seen: tuple[float, tuple[float, ...]] = 0.0, ()  # Scale and amaxes.
    for kernel in candidate.kernels:
        has_state = isinstance(layer, Float8Mixin)
        state = layer.float8_state.of(kernel) if has_state else None
        rows = {} if state is None else state.rows()
        _, amaxes = rows.get("inputs", none_seen)
        # Layers that look up rows, such as embeddings, have no float inputs.
        if recipe.activations == "static" and form.float8_trains:
            amax = float(np.max(amaxes, initial=0.0))
            if not amax:
                raise ValueError(_unseen(layer))
            input_scales[kernel.path] = amax / formats.get("float8_e4m3fn").max
        scale, _ = rows.get("kernel", none_seen)
        if asked.trained_scales and scale > 0:
            kernel_scales[kernel.path] = float(scale)
    clips = asked.clips(recipe, grid)
    return _Plan(candidate, recipe, input_scales, kernel_scales, clips)


def _unseen(layer: keras.Layer) -> str:
    """Return the message for a layer that lacks a static scale."""
    return (
        f"Layer {candidates.path_of(layer)!r} has seen no amax of its "
        "inputs. Received: activations='static'. Allowed: a model that "
        "was trained or calibrated under delayed scaling. Call "
        "`keras_policy_ext.convert(model, 'delayed')` and "
        "`keras_policy_ext.calibrate(model, data)` first; or leave the layer "
        "out with `exclude`, or freeze with activations='dynamic', which "
        "needs no data."
    )


def _check_trained(trained_scales: bool, granularity: str | None) -> None:
    """Raise if trained scales are asked for, and not one per tensor."""
    if trained_scales and granularity != "tensor":
        raise ValueError(
            "trained_scales=True needs granularity='tensor': scales from "
            "training are those of whole kernels. Received: "
            "trained_scales=True and "
            f"granularity={granularity or 'channel'!r}. Allowed: "
            "granularity='tensor'. Pass that, or leave out "
            "trained_scales=True to compute new scales."
        )


def _check_not_frozen(chosen: list[Candidate]) -> None:
    """Raise if a layer to freeze is frozen already."""
    for each in chosen:
        policy: Any = float8_policy_of(each.layer)
        if is_frozen(each.layer):
            raise ValueError(
                f"Layer {candidates.path_of(each.layer)!r} is frozen "
                f"already. Received: a layer under {policy.full_name!r}. "
                "Allowed: layers with float kernels. To export the model, "
                "call `export`: no second `freeze` is needed. To freeze only "
                "the other layers, pass `exclude`. To freeze this one with "
                "other arguments, call `keras_policy_ext.thaw(model)` first; "
                "its weights are then rounded twice."
            )


def widen(model: keras.Layer) -> tuple[str, ...]:
    """Keep frozen kernels in float16 too, for faster calls with few rows.

    Float16 holds each number of a float8 format, so a kernel takes three bytes
    a number. Outputs are equal to the bit, with quantized inputs too, but for
    large kernels with PyTorch on x86: FBGEMM multiplies them, and outputs
    differ by up to 2e-6 of the largest. Files do not grow: they have the codes
    alone, so call `widen` again on a loaded model. If other codes are loaded,
    the numbers in float16 are updated.

    Args:
        model: A frozen model or layer.

    Returns:
        Paths of the layers whose kernels are in float16 too. Layers that look
        up rows are not, nor are layers whose matmuls this device runs in
        float8, nor kernels of more than 131,072 elements with JAX or
        TensorFlow on a CPU, which read codes faster.

    Raises:
        TypeError: If it is no Keras model or layer.
        ValueError: If it is not built, no layer of it is frozen, or it is
            distributed. The model is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.freeze(model)
        >>> len(kpe.widen(model))
        1
    """
    candidates.check(model, "can be widened")
    frozen = frozen_layers(model)
    if not frozen or keras.distribution.distribution() is not None:
        raise ValueError(_refusal(model, frozen))
    to_widen = [(layer, _to_widen(layer)) for layer in frozen]
    layers = [layer for layer, variables in to_widen if variables]
    with training.changing(model):
        for layer, variables in to_widen:
            for variable in variables:
                if variable.widened is None:
                    stored_weights.keep_widened(layer, variable)
        built_layers.track_again(layers)
    return tuple(path_of(layer) for layer in layers)


def _to_widen(layer: keras.Layer) -> list[stored_weights.StoredVariable]:
    """Return the stored kernels that each call of a layer dequantizes."""
    recipe = layer.float8_policy.recipe
    # A class that does not train looks up rows, and dequantizes only these.
    if not layer.float8_trains or contractions.multiplies_codes(recipe):
        return []
    gains = backends.current.gains_from_float16
    stored = stored_weights.stored_in(layer)
    return [each for each in stored if gains(math.prod(each.shape))]


def _refusal(model: keras.Layer, frozen: list[Any]) -> str:
    """Return the message for a model that cannot be widened.

    `frozen` are its frozen layers, perhaps none.
    """
    if not frozen:
        return (
            f"No layer of {model.name!r} is frozen. Received: a model with "
            "float weights. Allowed: one whose kernels are stored in float8. "
            "Call `keras_policy_ext.freeze(model)` first."
        )
    return (
        "Kernels of a distributed model are not kept widened: each device "
        "would hold all of them. Received: a model under a distribution of "
        "Keras. Allowed: one on a single device. Leave the kernels as they "
        "are, or `keras_policy_ext.thaw(model)`."
    )
