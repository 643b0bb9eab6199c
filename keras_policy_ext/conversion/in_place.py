"""`convert` and `revert`: a built model to float8 in place, and back.

The way of `convert`, with the modules that it goes through:

1. `candidates.survey` sorts the layers of the model: those that can be in
   float8, those that only create other layers (composites), and others with
   the reason. Layers of a class without a float8 form are traced first, since
   their products are recognised by operation (`layers.by_operation`).
2. `requested.Requested` has the policies that the arguments ask for, and
   `requested.Selection` the layers. `filters` leave out layers by size. What
   the layers do in a call of the model leaves out those that decide, such as
   routers.
3. So far nothing has changed, and all bad input is found. Then
   `training.changing` opens a block at whose end optimizers get the new states
   and compiled steps are dropped. If anything fails in it, layers and
   optimizers are what they were.
4. In it, each chosen layer gets its float8 class, and a state with the amaxes
   of its kernels (`layers.class_swap`). Composites get their float8 form, so
   that a model loaded from a file has float8 children again.
5. `report` says what was converted, and what was not and why.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal

import keras

from keras_policy_ext import _extensions, policies, user_code
from keras_policy_ext._keras import global_policy, keras_hub, walking
from keras_policy_ext.conversion import candidates, roles, training
from keras_policy_ext.conversion.candidates import (
    Candidate,
    Unconverted,
    path_of,
)
from keras_policy_ext.conversion.filters import Safe
from keras_policy_ext.conversion.report import (
    OF_A_MODEL,
    Report,
    RevertedReport,
    report_of,
    warn_of_little,
)
from keras_policy_ext.conversion.requested import (
    FROZEN,
    HasPolicy,
    LayerFilter,
    PathPatterns,
    PolicyLike,
    Requested,
    Selection,
    Target,
    check_tuned,
    warn_if_only_plain_policies,
)
from keras_policy_ext.conversion.traced_model import TracedModel
from keras_policy_ext.conversion.work import ModelWork, work_of
from keras_policy_ext.layers.attention_products import attends
from keras_policy_ext.layers.by_operation import can_attend, record_of
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.layers.drop_in import original_of
from keras_policy_ext.layers.transaction import unchanged_on_error, undone
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    is_frozen,
    layers_in_float8,
    of_path,
    source_policy_of,
)
from keras_policy_ext.recipes import Recipe

# Paths of layers in a composite, each with the float8 policy that it follows.
Followed = list[tuple[str, Float8DTypePolicy | None]]


def enter_float8_with_children(layer: keras.Layer) -> bool:
    """Convert a composite if all layers in it follow one float8 policy.

    A composite has no kernels, but creates layers with kernels, as LSTM does.
    In its float8 class it creates float8 layers. It keeps the policy that it
    holds if that one gives each of these layers the policy that it follows.
    Return whether it has its float8 class now.
    """
    followed = _followed_in(layer)
    distinct = {policy for _, policy in followed}
    if len(distinct) != 1 or None in distinct:
        return False
    held = policies.as_float8(layer.dtype_policy)
    to_float8_class(layer, held if _assigns(held, followed) else distinct.pop())
    return True


def declare_policies(model: keras.Layer) -> None:
    """Set each backbone's policy to match the float8 layers inside it."""
    # Such a policy has the recipe that most of the layers follow, and rules
    # for the others. A backbone keeps its policy if that says so already, if
    # Keras has quantized it, or if it has no layer in float8.
    for layer in walking.layers_within(model):
        if keras_hub.writes_map_of_quantized_layers(layer):
            _declare(layer)


def _declare(backbone: keras.Model) -> None:
    """Set the policy of a backbone, or keep it as `declare_policies` says."""
    own = backbone.dtype_policy
    is_map = isinstance(own, keras.dtype_policies.DTypePolicyMap)
    if is_map and not isinstance(own, Float8DTypePolicy):
        return  # KerasHub writes a map of the user's as it is.
    followed = _followed_in(backbone)
    layers = walking.layers_within(backbone)
    if any(map(candidates.quantized_by_keras, layers)):
        return
    if _assigns(own, followed) or not any(policy for _, policy in followed):
        return
    policy = policy_with_rules(source_policy_of(backbone), followed)
    global_policy.replace_layer_policy(backbone, policy)


def _followed_in(composite: keras.Layer) -> Followed:
    """Return the path of each convertible inner layer, with its float8 policy.

    The policy is None for a layer that is not in float8.
    """
    layers = [c.layer for c in candidates.survey(composite).candidates]
    return [(path_of(layer), float8_policy_of(layer)) for layer in layers]


def _assigns(policy: keras.DTypePolicy, followed: Followed) -> bool:
    """Return True if `policy` assigns each path the policy listed with it."""
    for path, its_policy in followed:
        assigned = policies.as_float8(of_path(policy, path))
        if isinstance(assigned, Float8DTypePolicy):  # Its rules may exclude it.
            assigned = assigned.for_path(path)
        is_float8 = isinstance(assigned, Float8DTypePolicy)
        if its_policy != (assigned if is_float8 else None):
            return False
    return True


def policy_with_rules(
    source: keras.DTypePolicy, followed: Followed
) -> Float8DTypePolicy:
    """Return a policy of the most common recipe, with rules for other layers.

    `source` is the plain policy that it extends. Some layer has a policy.
    """
    recipes = [policy.recipe for _, policy in followed if policy is not None]
    (recipe, _), *_ = collections.Counter(recipes).most_common(1)
    usual = Float8DTypePolicy(source.name, recipe=recipe)
    # A path that several layers have gets one rule.
    rules = {path: policy for path, policy in followed if policy != usual}
    return Float8DTypePolicy(
        source.name,
        recipe=recipe,
        rules=[(re.escape(path), policy) for path, policy in rules.items()],
    )


Decision = tuple[Candidate, Target]


@dataclasses.dataclass(frozen=True)
class _Decisions:
    """The decisions of `convert`, before any layer is changed."""

    survey: candidates.Survey
    decisions: list[Decision]  # The layers to convert, each with its policy.
    unconverted: list[Unconverted]  # The other candidates.
    work: ModelWork | None  # Of the layers before; None if not needed.


@user_code.once
def convert(
    model: keras.Layer,
    policy: PolicyLike | HasPolicy | None = None,
    *,
    recipe: Recipe | str | None = None,
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    filter: LayerFilter | None = None,
    min_size: int | None = None,
    attention: Literal["float8"] | None = None,
    smooth_swiglu: Any = None,
    optimizer: Literal["float8", "mx"] | None = None,
) -> Report:
    """Make the layers of a model compute in float8, in place.

    Each layer keeps its weights, its place in the model and its dtypes: here a
    policy says how values are scaled and which layers follow it, and not in
    which precision the others compute. Under `"delayed"` amaxes of the kernels
    are computed at once. A compiled model keeps its optimizer with all slots,
    and can train on.

    Args:
        model: A model, or a layer, whose layers with weights are built. It
            needs no `call`. Models inside it are converted too.
        policy: A float8 policy, a recipe, or the name of one; `"float8"` for
            the default recipe; or a map of Keras with float8 policies in it;
            or what `kpe.tune` returns.
            None: layers that were made under a float8 policy follow that one.
            The others get the policy of the previous `convert`. If there was
            none and some layers have float8 policies, the others are left as
            they are. If no layer has one, all get the global policy if that is
            float8, else `"current"`.
        recipe: Use instead of a `policy` that is a recipe; or give a float8
            policy and the recipe that it is to have.
        include: A regular expression, or several: only layers with a match
            in their path are converted.
        exclude: The same for layers that are not converted.
        filter: `f(layer) -> bool`: whether to convert a layer; or
            `kpe.filters.Auto()`, or `"auto"`, which leaves out layers that
            float8 slows down; or `"safe"`, which leaves out the first layer,
            heads and odd sizes (`kpe.filters.Safe`); or `"all"`. None,
            `"auto"` and `"safe"` leave out layers that decide instead of
            computing, such as routers of experts: a top-k, an argmax or a
            sort in the call of the model chooses among their outputs.
        min_size: The fewest entries of a kernel whose layer is converted.
        attention: `"float8"`: if all projections of an attention layer are
            converted, its scores and its weighted sum are computed in float8
            too, also in a layer of another class where they are recognised.
            None leaves these two unchanged.
        smooth_swiglu: Inputs for one call of the model: scales of channels are
            first folded into its gated blocks, by
            `kpe.conversion.smooth_swiglu`. None folds none.
        optimizer: `"float8"` or `"mx"`: the moments of the model's optimizers
            are stored in one byte a number too, as by
            `kpe.optimizers.quantize_state`. None leaves them.

    Returns:
        What was converted, and what was not and why.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model or a part of it is not built, the policy is
            not float8, none is given and earlier conversions gave several,
            no filter has that name, `include` matches no layer, what
            `kpe.tune` returned is of another model, or a `MultiOptimizer`
            has been used. The model is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model)
        >>> report.converted[0].policy
        'float8/current_from_float32'
        >>> kpe.convert(model, "delayed").converted[0].policy  # another recipe
        'float8_from_float32'
    """
    selection = Selection.read(include, exclude, filter, min_size)
    decided = _decisions_of(model, policy, selection, attention, recipe)
    if decided.decisions:
        training.check_optimizers(model)
    change = training.change_of(model, to_float8=True, optimizer=optimizer)
    notes_of_followers = training.before(change)
    folded = [] if smooth_swiglu is None else model.weights
    with (
        unchanged_on_error((), variables=folded),
        training.changing(model) as retraced_functions,
    ):
        nothing_folded = smooth_swiglu is not None and not _extensions.get(
            "conversion.smooth_swiglu"
        )(model, smooth_swiglu)
        report = _convert(model, decided, attention, retraced_functions)
        # In this block, so that an error made of a warning undoes all.
        warn_of_little(report, model)
        for sentence in report.without_effect:
            user_code.warn(sentence)
        for each in report.skipped:
            asked = any(p.search(each.path) for p in selection.include or ())
            if asked and each.reason == OF_A_MODEL:
                user_code.warn(f"{each.path!r} stays in floats: {OF_A_MODEL}.")
        if nothing_folded:
            user_code.warn(
                f"`smooth_swiglu` had no effect on {model.name!r}: no gated "
                "block was found, down(act(gate(x)) * up(x)) of Dense layers. "
                "Leave `smooth_swiglu` out."
            )
        if not decided.decisions:
            warn_if_only_plain_policies(decided.unconverted)
        training.after(change, notes_of_followers)
    return report


@contextlib.contextmanager
def converted(
    model: keras.Layer,
    policy: PolicyLike | HasPolicy | None = None,
    attention: Literal["float8"] | None = None,
    recipe: Recipe | str | None = None,
    **selected: Any,
) -> Iterator[Report]:
    """In the block, a model is converted; on exit, all layers are restored.

    Arguments and errors are those of `convert`. Optimizers and compiled steps
    are not updated, so do not train the model in the block.
    """
    selection = Selection.read(**selected)
    decided = _decisions_of(model, policy, selection, attention, recipe)
    with undone(walking.layers_within(model)), training.replicas(model):
        yield _convert(model, decided, attention)


def _decisions_of(
    model: keras.Layer,
    policy: PolicyLike | HasPolicy | None,
    selection: Selection,
    attention: Literal["float8"] | None,
    recipe: Recipe | str | None,
) -> _Decisions:
    """Check the arguments of `convert`, and choose a policy for each layer."""
    if attention not in (None, "float8"):
        raise ValueError(
            "`attention` is neither 'float8' nor None. Received: "
            f"{attention!r}. Allowed: 'float8', to compute scores and "
            "weighted sums in float8, or None, to leave them as they are."
        )
    candidates.check(model)
    traced = TracedModel(model)
    survey = candidates.survey(model, attention is not None, traced)
    requested = Requested.read(model, policy, recipe)
    convertible = survey.candidates
    check_tuned(policy, convertible)
    work = None
    # Why layers that decide, and under "safe" the ends, are left out, by index.
    by_role: dict[int, str] = {}
    if convertible and not selection.deciding:
        work = work_of(model)
        by_role = roles.deciding(convertible, traced)
        if isinstance(selection.filter, Safe):
            by_role = {**roles.ends(convertible, traced), **by_role}
    reasons = selection.reasons(convertible, by_role)
    decisions, unconverted = _decide(convertible, requested, reasons)
    return _Decisions(survey, decisions, unconverted, work)


def _convert(
    model: keras.Layer,
    decided: _Decisions,
    attention: Literal["float8"] | None,
    retraced: Sequence[str] = (),
) -> Report:
    """Convert the chosen layers; optimizers do not know the new state yet."""
    survey, work = decided.survey, decided.work
    chosen = [candidate.layer for candidate, _ in decided.decisions]
    if attention or (work is not None and not work.hold_for(chosen)):
        work = None  # The report counts anew.
    for candidate, target in decided.decisions:
        to_float8_class(candidate.layer, target.policy)
        state = candidate.layer.float8_state
        state.given = target.given
        if state.states is not None:
            state.states.settle(candidate.layer.float8_contracted)
        if attention and can_attend(candidate.layer):
            candidate.layer.choose_attention(attention)
    refused = [  # Their attention stays in floats.
        Unconverted(composite, reason)
        for composite in survey.composites
        if (reason := _convert_composite(composite, attention))
    ]
    declare_policies(model)
    # With `attention`, composites multiply too: two activations.
    contracting = [
        layer
        for layer in survey.composites
        if attention and float8_policy_of(layer) is not None
    ]
    without_effect = []  # Sentences for the report.
    changed = [*chosen, *contracting]
    if attention is not None:
        without_effect = _on_attention_in_floats(changed)
        refused += _with_attention_in_floats(model, changed, refused)
        if not contracting and not any(map(attends, changed)):
            without_effect.append(_on_no_attention(model, refused))
    return report_of(
        Report,
        model,
        changed,
        [*decided.unconverted, *refused, *survey.skipped],
        names_others=True,
        without_effect=without_effect,
        retraced=retraced,
        work=work,
    )


@user_code.once
def revert(model: keras.Layer) -> Report:
    """Undo `convert`: make the layers stock layers, and keep the weights.

    Every layer gets back the source policy of its float8 policy. Layers of
    this package become the stock layers of the same name; a layer of your own
    keeps its class. The optimizer keeps its slots, and has them in float32.
    Frozen layers stay frozen: `thaw` gives them float weights.

    Args:
        model: As for `convert`.

    Returns:
        A report of the layers that were in float8. Frozen layers are skipped.

    Raises:
        ValueError: If the model or a part of it is not built, or all its
            float8 layers are frozen. The model is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model)
        >>> report = kpe.revert(model)
        >>> type(model.layers[0]) is keras.layers.Dense
        True
    """
    candidates.check(model, "can be reverted")
    layers = walking.layers_within(model)
    stays = [each for layer in layers for each in _why_it_stays(layer)]
    staying = {id(each.layer) for each in stays}
    in_float8 = layers_in_float8(model)
    reverted = [layer for layer in in_float8 if id(layer) not in staying]
    if stays and not reverted:
        raise ValueError(_all_frozen(model))
    change = training.change_of(model, to_float8=False)
    notes_of_followers = training.before(change)
    with training.changing(model) as retraced_functions:
        _revert(model, staying)
        training.after(change, notes_of_followers)
        left = [each for each in stays if float8_policy_of(each.layer)]
        return report_of(
            RevertedReport, model, reverted, left, retraced=retraced_functions
        )


@contextlib.contextmanager
def reverted(model: keras.Layer) -> Iterator[None]:
    """In the block, a model is reverted; do not train it there."""
    layers = walking.layers_within(model)
    with undone(layers), training.replicas(model):
        stays = [each for layer in layers for each in _why_it_stays(layer)]
        _revert(model, {id(each.layer) for each in stays})
        yield


def _revert(model: keras.Layer, staying: Container[int]) -> None:
    """Make all layers stock layers, but not those with an id in `staying`."""
    for layer in walking.layers_within(model):
        # Also layers that follow no float8, but have such a class or policy.
        if id(layer) not in staying and (
            original_of(type(layer)) is not None
            or isinstance(
                of_path(layer.dtype_policy, layer.path), Float8DTypePolicy
            )
            or float8_policy_of(layer) is not None
        ):
            to_stock_class(layer)
    declare_policies(model)


def _decide(
    candidates: list[Candidate], requested: Requested, reasons: dict[int, str]
) -> tuple[list[Decision], list[Unconverted]]:
    """Split candidates into those to convert, with their policies, and others.

    `reasons` says, by index, why a candidate is left out. Left out, too, is a
    layer whose kernel another layer multiplies in float8.
    """
    decisions, unconverted = [], []
    for number, candidate in enumerate(candidates):
        reason = reasons.get(number)
        target = Target(reason=reason)
        if reason is None:
            target = requested.target(candidate.layer)
        if target.policy is None:
            unconverted.append(Unconverted(candidate.layer, str(target.reason)))
        else:
            decisions.append((candidate, target))
    return _with_one_state(candidates, decisions, unconverted)


def _with_one_state(
    convertible: list[Candidate],
    decisions: list[Decision],
    unconverted: list[Unconverted],
) -> tuple[list[Decision], list[Unconverted]]:
    """Leave out layers whose kernels other layers multiply in float8."""
    # A kernel has one state, which is that of the layer that multiplies.
    unchanged = {id(each.layer) for each in unconverted}
    # By the id of a kernel, a layer other than its owner that multiplies with
    # it. Layers in float8 already go before those to convert.
    multiplying: dict[int, Candidate] = {}
    for each in convertible:
        if id(each.layer) in unchanged and float8_policy_of(each.layer):
            multiplying.update(_by_foreign_kernel(each))
    for each, _ in decisions:
        multiplying = {**_by_foreign_kernel(each), **multiplying}
    chosen = []
    for candidate, target in decisions:
        kernels = map(id, candidate.kernels)
        users = [multiplying.get(kernel, candidate) for kernel in kernels]
        others = [each for each in users if each is not candidate]
        if not others:
            chosen.append((candidate, target))
            continue
        path = path_of(others[0].layer)
        reason = f"layer {path!r} multiplies with its kernel"
        unconverted.append(Unconverted(candidate.layer, reason))
    return chosen, unconverted


def _by_foreign_kernel(candidate: Candidate) -> dict[int, Candidate]:
    """Return {id of kernel: candidate} for kernels that other layers own."""
    kernels = candidate.kernels if candidate.owners else ()
    return {id(kernel): candidate for kernel in kernels}


def _why_it_stays(layer: keras.Layer) -> Iterator[Unconverted]:
    """Yield the reason if `revert` leaves a layer in float8."""
    if is_frozen(layer):
        yield Unconverted(layer, FROZEN)
    elif original_of(type(layer)) is not None and any(
        map(is_frozen, walking.layers_within(layer))
    ):
        # On a GPU the stock form has cuDNN read codes of a cell as numbers.
        yield Unconverted(layer, "layers in it are frozen")


def _all_frozen(model: keras.Layer) -> str:
    """Return the message for a model that `thaw` is for."""
    return (
        f"All float8 layers of {model.name!r} are frozen, and their float "
        "weights are gone. Received: a frozen model. Allowed: one with layers "
        "that compute in float8 and keep float weights. `keras_policy_ext."
        "thaw(model)` makes stock layers of frozen ones, with the weights "
        "that theirs were rounded to."
    )


def _on_no_attention(model: keras.Layer, refused: list[Unconverted]) -> str:
    """Return the warning that `attention="float8"` had no effect."""
    why = (
        "it has no attention layer with all projections in float8"
        if not refused
        else f"in {path_of(refused[0].layer)!r}, {refused[0].reason}"
    )
    return (
        f"`attention='float8'` had no effect on {model.name!r}: {why}. "
        "Allowed: MultiHeadAttention and GroupQueryAttention whose "
        "projections are all converted, and layers of your own or of other "
        "libraries whose products are recognised. In an attention layer of "
        "your own, you can multiply with `float8_activations_einsum` and "
        "`float8_weighted_sum` of Float8Mixin."
    )


def _with_attention_in_floats(
    model: keras.Layer,
    converted: Sequence[keras.Layer],
    refused: Sequence[Unconverted],
) -> Iterator[Unconverted]:
    """Yield layers whose attention stays in floats, for the report.

    Some of the layers in them, such as projections, are in float8. Those in
    `converted` and `refused` are in the report already.
    """
    listed = {id(x) for x in converted} | {id(each.layer) for each in refused}
    for layer in walking.layers_within(model):
        reason = _why_attention_in_floats(layer)
        within = walking.layers_directly_in(layer)
        if id(layer) in listed or reason is None:
            continue
        if any(float8_policy_of(each) is not None for each in within):
            yield Unconverted(layer, reason)


def _on_attention_in_floats(converted: Sequence[keras.Layer]) -> list[str]:
    """Return a sentence for each class with products left in floats."""
    reasons = {
        type(x).__name__: reason
        for x in converted
        if (reason := _why_attention_in_floats(x))
    }
    return [
        f"`attention='float8'` had no effect on a part of {name}: {reason}."
        for name, reason in reasons.items()
    ]


def _why_attention_in_floats(layer: keras.Layer) -> str | None:
    """Return why products of two activations in a layer stay in floats."""
    record = record_of(layer)
    attention = None if record is None else record.attention
    return None if attention is None else attention.reason_in_floats


def _convert_composite(layer: keras.Layer, attention: str | None) -> str | None:
    """Convert a composite; return why its attention is in floats.

    A composite has no kernels, but creates layers with kernels.
    """
    was_stock = original_of(type(layer)) is None
    if not enter_float8_with_children(layer):
        reason = (
            "its attention is in float8 only if the layers in it are all "
            "converted, to one policy"
        )
        return reason if attention and can_attend(layer) else None
    choose = getattr(layer, "choose_attention", None)
    # Without `attention`, a layer that was converted before keeps its mode.
    if choose is None or not (was_stock or attention):
        return None
    try:
        choose(attention)
    except ValueError as error:  # The class cannot: its text says why.
        choose(None)
        return str(error)
    return None
