"""`convert` and `revert`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import keras

from keras_policy_ext import policies, policy_names, recipes
from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import candidates, composites, models, training
from keras_policy_ext.conversion.candidates import Candidate, Unconverted
from keras_policy_ext.conversion.report import (
    Report,
    report_of,
    reverted_report,
    warn_of_little,
)
from keras_policy_ext.conversion.selection import Selection
from keras_policy_ext.layers.class_swap import enter_float8, leave_float8
from keras_policy_ext.layers.drop_in import original_of
from keras_policy_ext.layers.transaction import undone
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    held_policy,
    is_frozen,
    layers_in_float8,
    source_policy_of,
)

_FROZEN = "it is frozen; `thaw` gives it float weights"

Decision = tuple[Candidate, Float8DTypePolicy]


def convert(
    model: keras.Layer,
    policy: object = None,
    *,
    include: object = None,
    exclude: object = None,
    filter: Callable[[Any], bool] | Any = None,
    min_size: int | None = None,
    attention: str | None = None,
) -> Report:
    """Make the layers of a model compute in float8, in place.

    Each layer keeps its weights, its place in the model, and the dtypes that
    it had: a policy says here how numbers are scaled and which layers follow
    it, and not in which precision the rest computes. Amaxes of the kernels
    are taken at once. A model that is compiled, or has trained, keeps its
    optimizer with all slots, and goes on training.

    Args:
        model: A model, or a layer, whose layers with weights are built. It
            needs no `call`. Models inside it are converted too.
        policy: A float8 policy, a recipe, or the name of one. None: where
            layers have float8 policies, those follow theirs and the others
            stay; else the global policy, if that is float8; else delayed
            scaling.
        include: A regular expression, or several: only layers with a match
            in their path are converted.
        exclude: The same for layers that are not.
        filter: `f(layer) -> bool`: whether to convert a layer; or
            `kpe.filters.Auto()`, or `"auto"`, which leaves out layers that
            lose by it.
        min_size: Only layers whose kernel has at least so many entries.
        attention: `"float8"`: where all projections of an attention layer are
            converted, its scores and its weighted sum are computed in float8
            too, with current scaling. None leaves these two as they are.

    Returns:
        What was converted, and what was not and why.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model or a part of it is not built, the policy is
            not float8, `include` matches no layer, or a `MultiOptimizer` has
            been used. The model is then unchanged.
    """
    survey, decisions, left = _decided(
        model,
        policy,
        attention,
        include=include,
        exclude=exclude,
        filter=filter,
        min_size=min_size,
    )
    if decisions:
        training.check_optimizers(model)
    with training.changing(model):
        report = _convert(model, survey, decisions, left, attention)
        # In here, so that an error made of this warning undoes all.
        warn_of_little(report, model, stacklevel=2)
    return report


@contextlib.contextmanager
def converted(
    model: keras.Layer, policy: object = None, **options: Any
) -> Iterator[Report]:
    """A model as `convert` would make it, for the time of a block.

    All that its layers hold is then put back. Optimizers and compiled steps
    do not get to know of it: nothing is to be trained meanwhile.

    Args:
        model: As for `convert`.
        policy: Likewise.
        **options: The other arguments of `convert`.

    Raises:
        TypeError: As for `convert`.
        ValueError: Likewise.
    """
    attention = options.pop("attention", None)
    survey, decisions, left = _decided(model, policy, attention, **options)
    with undone(walking.layers_within(model)), training.replicas(model):
        yield _convert(model, survey, decisions, left, attention)


def _decided(
    model: keras.Layer,
    policy: object,
    attention: str | None,
    include: object = None,
    exclude: object = None,
    filter: Callable[[Any], bool] | Any = None,
    min_size: int | None = None,
) -> tuple[candidates.Survey, list[Decision], list[Unconverted]]:
    """Read the arguments of `convert`; nothing is changed."""
    selection = Selection.read(include, exclude, filter, min_size)
    _check_attention(attention)
    models.check(model)
    survey = candidates.survey(model)
    requested = _requested(model, policy)
    return survey, *_decide(survey.candidates, requested, selection)


def _convert(
    model: keras.Layer,
    survey: candidates.Survey,
    decisions: list[Decision],
    left: list[Unconverted],
    attention: str | None,
) -> Report:
    """Change the layers; their states are not known to optimizers yet."""
    for candidate, target in decisions:
        enter_float8(candidate.layer, target)
        state = candidate.layer.float8_state
        state.observe(candidate.layer.float8_contracted)
    refused = [
        Unconverted(composite, reason)
        for composite in survey.composites
        if (reason := _enter_composite(composite, attention))
    ]
    composites.declare_policies(model)
    contracting = [
        layer
        for layer in survey.composites
        if attention and float8_policy_of(layer) is not None
    ]
    return report_of(
        model,
        [*(candidate.layer for candidate, _ in decisions), *contracting],
        [*left, *refused, *survey.skipped],
    )


def revert(model: keras.Layer) -> Report:
    """Undo `convert`: stock layers, with the weights they have.

    Every layer gets back the policy that float8 stood on, and those of the
    classes of this package become the stock layers of the same name. A layer
    of your own keeps its class. The optimizer keeps its slots. Layers that are
    frozen stay so: `thaw` gives them float weights.

    Args:
        model: As for `convert`.

    Returns:
        The layers that were in float8, and, as skipped, those that are frozen.

    Raises:
        ValueError: If the model or a part of it is not built, or all its
            float8 layers are frozen. The model is then unchanged.
    """
    models.check(model)
    layers = walking.layers_within(model)
    stays = [each for layer in layers for each in _why_it_stays(layer)]
    kept = {id(each.layer) for each in stays}
    in_float8 = layers_in_float8(model)
    reverted = [layer for layer in in_float8 if id(layer) not in kept]
    if stays and not reverted:
        raise ValueError(_all_frozen(model))
    with training.changing(model):
        _revert(model, kept)
        left = [each for each in stays if float8_policy_of(each.layer)]
        return reverted_report(report_of(model, reverted, left))


@contextlib.contextmanager
def reverted(model: keras.Layer) -> Iterator[None]:
    """A model as `revert` would make it, for the time of a block.

    As for `converted`, all is then put back, and nothing is to be trained
    meanwhile.
    """
    layers = walking.layers_within(model)
    with undone(layers), training.replicas(model):
        stays = [each for layer in layers for each in _why_it_stays(layer)]
        _revert(model, {id(each.layer) for each in stays})
        yield


def _revert(model: keras.Layer, kept: Container[int]) -> None:
    """Make all layers stock ones but those with these ids."""
    for layer in walking.layers_within(model):
        if id(layer) not in kept and (
            original_of(type(layer)) is not None
            or isinstance(layer.dtype_policy, Float8DTypePolicy)
            or float8_policy_of(layer) is not None
        ):
            leave_float8(layer)
    composites.declare_policies(model)


def _requested(model: keras.Layer, policy: object) -> Float8DTypePolicy | None:
    """The policy for all layers; None where each has its own."""
    if isinstance(policy, recipes.Recipe) or (
        isinstance(policy, str) and policy.partition("(")[0] in recipes.names()
    ):
        recipe = recipes.get(policy)
        return _float8(Float8DTypePolicy("float32", recipe=recipe))
    if policy is not None:
        return _float8(_policy(policy))
    layers = [x for x in walking.layers_within(model) if not is_frozen(x)]
    if any(map(_holds_what_trains, layers)):
        return None
    current = policies.dtype_policy()
    if isinstance(policies.as_float8(current), Float8DTypePolicy):
        return _float8(policies.as_float8(current))
    return Float8DTypePolicy("float32")


def _holds_what_trains(layer: keras.Layer) -> bool:
    """Whether a layer has a float8 policy; that of a frozen backbone is none.

    Such a backbone has one for the layers in it that are frozen.
    """
    held = held_policy(layer)
    return isinstance(held, Float8DTypePolicy) and held.recipe.trains


def _policy(policy: object) -> keras.DTypePolicy:
    try:
        return policies.get(policy)
    except ValueError as error:
        if isinstance(policy, str) and policy_names.is_full_name(policy):
            raise  # It says what is wrong with the name.
        raise ValueError(_no_float8(policy)) from error


def _float8(policy: keras.DTypePolicy) -> Float8DTypePolicy:
    if not isinstance(policy, Float8DTypePolicy):
        raise ValueError(_no_float8(policy.name))
    if not policy.recipe.trains:
        raise ValueError(
            "This policy is that of layers whose kernels are stored in "
            f"float8. Received: {policy.full_name!r}. Allowed: one with a "
            f"recipe to train with: {', '.join(recipes.names())}. "
            "`keras_policy_ext.freeze(model)` stores kernels."
        )
    return policy


def _no_float8(received: object) -> str:
    return (
        "A model is converted to a float8 dtype policy. Received: "
        f"{received!r}. Allowed: a Float8DTypePolicy or its name, such as "
        "'mixed_float8' or 'float8/current_from_float32', where each layer "
        "keeps its own source; a recipe or its name, one of "
        f"{', '.join(map(repr, recipes.names()))}. To leave float8, use "
        "`revert`."
    )


def _decide(
    found: list[Candidate],
    requested: Float8DTypePolicy | None,
    selection: Selection,
) -> tuple[list[Decision], list[Unconverted]]:
    """Which candidates get which policy, and why others get none."""
    reasons = selection.reasons(found)
    decisions, left = [], []
    for number, candidate in enumerate(found):
        target, reason = _target(candidate.layer, requested)
        reason = reasons.get(number) or reason
        if reason is None and target is not None:
            decisions.append((candidate, target))
        else:
            left.append(Unconverted(candidate.layer, str(reason)))
    return decisions, left


def _why_it_stays(layer: keras.Layer) -> Iterator[Unconverted]:
    """Why `revert` leaves a layer in float8; nothing if it does not."""
    if is_frozen(layer):
        yield Unconverted(layer, _FROZEN)
    elif original_of(type(layer)) is not None and any(
        map(is_frozen, walking.layers_within(layer))
    ):
        # On a GPU the stock form has cuDNN read codes of a cell as numbers.
        yield Unconverted(layer, "layers in it are frozen")


def _all_frozen(model: keras.Layer) -> str:
    return (
        f"All float8 layers of {model.name!r} are frozen, and their float "
        "weights are gone. Received: a frozen model. Allowed: one with layers "
        "that compute in float8 and keep float weights. `keras_policy_ext."
        "thaw(model)` makes stock layers of frozen ones, with the weights "
        "that theirs were rounded to."
    )


def _target(
    layer: keras.Layer, requested: Float8DTypePolicy | None
) -> tuple[Float8DTypePolicy | None, str | None]:
    """The policy that a layer gets, or the reason why it gets none."""
    if is_frozen(layer):
        return None, _FROZEN
    own = held_policy(layer)
    given = own if requested is None else requested
    if not isinstance(given, Float8DTypePolicy):
        return None, f"its own policy is {own.name}, not float8"
    resolved, source = given.for_path(layer.path), source_policy_of(layer)
    if not isinstance(resolved, Float8DTypePolicy):
        return None, f"a rule of the policy keeps it in {source.name}"
    try:
        target = Float8DTypePolicy(source.name, recipe=resolved.recipe)
    except ValueError:
        return None, f"it computes in {source.name}, not in floating point"
    if float8_policy_of(layer) == target:
        return None, f"it follows {target.full_name} already"
    return (own if requested is None else target), None


def _check_attention(attention: object) -> None:
    if attention not in (None, "float8"):
        raise ValueError(
            "`attention` is neither 'float8' nor None. Received: "
            f"{attention!r}. Allowed: 'float8', to compute scores and "
            "weighted sums in float8, or None, to leave them as they are."
        )


def _enter_composite(layer: keras.Layer, attention: str | None) -> str | None:
    """Give a composite its float8 form, and choose its own products.

    Returns:
        Why these are not in float8 though that was asked for.
    """
    was_stock = original_of(type(layer)) is None
    if not composites.enter_float8_with_children(layer):
        return None
    choose = getattr(layer, "choose_attention", None)
    if choose is None or not (was_stock or attention):
        return None
    try:
        choose(attention)
    except ValueError as reason:
        choose(None)
        return str(reason)
    return None
