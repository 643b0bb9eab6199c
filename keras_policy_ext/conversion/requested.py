"""Decide which policy `convert` gives to each layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import keras
import numpy as np

from keras_policy_ext import (
    _extensions,
    policies,
    policy_names,
    recipes,
    user_code,
)
from keras_policy_ext._keras import walking
from keras_policy_ext.conversion.candidates import (
    Candidate,
    SizeFilter,
    Unconverted,
    path_of,
)
from keras_policy_ext.conversion.filters import Safe
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies._source_map import is_stock_map
from keras_policy_ext.policies.float8 import of_file
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    held_policy,
    is_frozen,
    of_path,
    source_policy_of,
)
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.recipes.spec import did_you_mean, is_spec


class DTypePolicyLike(Protocol):
    """A dtype policy of Keras or of this package.

    This is a protocol because type checkers that do not follow imports of
    Keras read `keras.DTypePolicy` as Any, and then accept everything.
    """

    @property
    def name(self) -> str:
        """The name, such as `"mixed_bfloat16"`."""

    @property
    def compute_dtype(self) -> str:
        """Return the dtype that a layer computes in."""

    @property
    def variable_dtype(self) -> str:
        """Return the dtype of the weights."""


class HasPolicy(Protocol):
    """An object with a float8 policy, such as the result of `tune`."""

    @property
    def policy(self) -> Float8DTypePolicy:
        """Return the policy."""


PolicyLike: TypeAlias = DTypePolicyLike | Recipe | str | Mapping[str, Any]
"""A policy, a recipe, the name of one, or the config of a policy."""

PathPatterns: TypeAlias = (
    str | re.Pattern[str] | Iterable[str | re.Pattern[str]]
)
"""One regular expression or several, searched in the path of a layer."""

LayerFilter: TypeAlias = (
    Callable[[Any], bool] | SizeFilter | Literal["all", "auto", "safe"]
)
"""A function of a layer that returns a bool, a filter by size, or a name."""

_FILTERS = ("all", "auto", "safe")

Patterns = tuple[re.Pattern[str], ...]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The arguments of `convert` that select layers, such as `include`."""

    # Patterns, one of which must be found in the path; None: any.
    include: Patterns | None
    exclude: Patterns  # Patterns none of which may be found there.
    # A predicate of a layer, or one by size; None: any layer.
    filter: Callable[[Any], bool] | SizeFilter | None
    min_size: int  # The fewest entries of a kernel.
    # Whether layers that decide, such as routers, and tied heads are
    # converted. They are if a predicate or `"all"` says which layers are.
    deciding: bool = False

    @classmethod
    def read(
        cls,
        include: object = None,
        exclude: object = None,
        filter: object = None,
        min_size: object = None,
    ) -> Selection:
        """Check the arguments of `convert` that select layers, and hold them.

        Raises:
            TypeError: If one has the wrong type.
            ValueError: If one has a wrong value.
        """
        return cls(
            include=None if include is None else _patterns("include", include),
            exclude=() if exclude is None else _patterns("exclude", exclude),
            filter=_filter(filter),
            min_size=_min_size(min_size),
            deciding=_is_all(filter) or callable(filter),
        )

    def reasons(
        self,
        candidates: list[Candidate],
        by_role: Mapping[int, str] | None = None,
    ) -> dict[int, str]:
        """Return why candidates are left out, by the index of each.

        `by_role` has reasons that rank before those of a filter by size.

        Raises:
            ValueError: If `include` matches none of them.
            TypeError: If the filter does not return a bool.
        """
        paths = [path_of(candidate.layer) for candidate in candidates]
        self._check_matches(paths)
        reasons = {}
        for number, candidate in enumerate(candidates):
            reason = self._reason(candidate, paths[number])
            reason = reason or self._tied_head(candidate)
            if reason is not None:
                reasons[number] = reason
        if isinstance(self.filter, SizeFilter):
            numbers = [
                number
                for number, candidate in enumerate(candidates)
                if self._tied_head(candidate) is None
            ]
            # Its reasons are by index in this list, without tied heads.
            left_out = self.filter.reasons([candidates[n] for n in numbers])
            by_size = {numbers[n]: reason for n, reason in left_out.items()}
            by_role = {**by_size, **(by_role or {})}
        return {**(by_role or {}), **reasons}

    def _tied_head(self, candidate: Candidate) -> str | None:
        """Return why a tied head is left out, unless it is requested."""
        if not candidate.is_tied or float8_policy_of(candidate.layer):
            return None
        if self.include is not None or self.deciding:
            return None
        return (
            "it is a tied head, which multiplies with the table of another "
            "layer; an `include` that matches its path, or `filter='all'`, "
            "converts it"
        )

    def _reason(self, candidate: Candidate, path: str) -> str | None:
        """Return why the arguments leave a candidate out, or None."""
        if self.include is not None and not _first_match(self.include, path):
            return "`include` does not match its path"
        pattern = _first_match(self.exclude, path)
        if pattern:
            return f"`exclude` matches its path: {pattern.pattern!r}"
        if candidate.size < self.min_size:
            return (
                f"its kernel has {candidate.size} entries, fewer than "
                f"{self.min_size}"
            )
        if callable(self.filter) and not _answer_of_filter(
            self.filter, candidate.layer
        ):
            return "`filter` returned False"
        return None

    def _check_matches(self, paths: list[str]) -> None:
        """Raise if `include` matches no path; warn if an `exclude` does not."""
        include = self.include
        matched = any(_first_match(include or (), path) for path in paths)
        if include is not None and paths and not matched:
            raise ValueError(_no_match("include", include, paths))
        for pattern in dict.fromkeys(self.exclude):
            if paths and not any(pattern.search(path) for path in paths):
                user_code.warn(_no_match("exclude", (pattern,), paths))


def _first_match(patterns: Patterns, path: str) -> re.Pattern[str] | None:
    """Return the first pattern that is found in a path, or None."""
    return next((p for p in patterns if p.search(path)), None)


def _patterns(name: str, given: object) -> Patterns:
    """Compile the patterns of the argument `name`, given alone or in a list."""
    patterns = [given] if isinstance(given, (str, re.Pattern)) else given
    if not isinstance(patterns, Iterable):
        raise TypeError(_wrong_patterns(name, given))
    read = []
    for pattern in patterns:
        if not isinstance(pattern, (str, re.Pattern)):
            raise TypeError(_wrong_patterns(name, given))
        try:
            read.append(re.compile(pattern))
        except re.error as error:
            fault = f"is not a valid regular expression ({error})"
            raise ValueError(_wrong_patterns(name, given, fault)) from error
    return tuple(read)


def _wrong_patterns(
    name: str,
    given: object,
    fault: str = "is neither a regular expression nor a list of them",
) -> str:
    """Return the message for patterns that cannot be read."""
    return (
        f"`{name}` {fault}. Received: {given!r}. Allowed: a regular "
        "expression that is found in the paths of layers, or a list of them, "
        "such as 'ffn' or ['.*/query', '.*/key']; a function of a layer goes "
        "to `filter`."
    )


def _no_match(name: str, patterns: Patterns, paths: list[str]) -> str:
    """Return the message for patterns that match no path."""
    shown = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
    given = [pattern.pattern for pattern in patterns]
    return (
        f"`{name}` matches no layer that could be converted. Received: "
        f"{given!r}. Paths of such layers: {shown}. Allowed: regular "
        "expressions found in a path."
    )


def _is_all(given: object) -> bool:
    """Return True for the filter `"all"`."""
    return isinstance(given, str) and given == "all"


def _filter(given: object) -> Any:
    """Return the filter that an argument means; None for all layers."""
    if given is None or _is_all(given):
        return None
    if isinstance(given, str) and given in _FILTERS:
        if given == "safe":
            return Safe()
        return _extensions.get("conversion.filters.Auto")()
    if isinstance(given, SizeFilter):
        return given
    if callable(given) and not isinstance(given, type):  # Not `Auto` itself.
        return given
    error = ValueError if isinstance(given, str) else TypeError
    raise error(
        "`filter` is neither a function nor the name of a filter. Received: "
        f"{given!r} (of type {type(given).__name__}). "
        f"{did_you_mean(given, _FILTERS)}Allowed: a function of a layer that "
        f"returns a bool; {', '.join(map(repr, _FILTERS))}; "
        "`kpe.filters.Auto(...)`; or None, for all layers but those that "
        "decide, such as routers of experts."
    )


def _answer_of_filter(
    predicate: Callable[[keras.Layer], object], layer: keras.Layer
) -> bool:
    """Return what the filter says of a layer; raise if it is no bool."""
    answer: Any = predicate(layer)
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    raise TypeError(
        f"`filter` did not return a bool. Received: {answer!r} for "
        f"{path_of(layer)!r}. Allowed: True or False. Return one of them."
    )


def _min_size(given: object) -> int:
    """Return the fewest entries of a kernel; raise if it is no such number."""
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise TypeError(_wrong_size(given))
    if given < 0:
        raise ValueError(_wrong_size(given))
    return int(given)


def _wrong_size(given: object) -> str:
    """Return the message for a `min_size` that is no number."""
    return (
        f"`min_size` is not a number of entries. Received: {given!r} (of type "
        f"{type(given).__name__}). Allowed: an int >= 0, the fewest entries "
        "that a kernel must have, such as 1_000_000; or None."
    )


FROZEN = "it is frozen; `thaw` gives it float weights"
_PLAIN = "its own policy is "


@dataclasses.dataclass(frozen=True)
class Requested:
    """The policies that `convert` can give to layers."""

    # Float8 policies, or maps with some; several if earlier conversions differ.
    policies: tuple[keras.DTypePolicy, ...]
    # Whether a layer with a float8 policy of its own follows that one.
    own_first: bool

    @classmethod
    def read(
        cls, model: keras.Layer, policy: object, recipe: object
    ) -> Requested:
        """Return the policies that the arguments of `convert` request.

        Without arguments these are the policies of earlier conversions, else
        the global policy if it is float8, else the default recipe. A layer that
        was made under a float8 policy of its own then follows that
        (`own_first`).
        """
        given = _requested_policy(policy, recipe)
        if given is not None:
            return cls((given,), own_first=False)
        layers = [x for x in walking.layers_within(model) if not is_frozen(x)]
        earlier = _given_before(layers)
        if earlier or any(map(_made_in_float8, layers)):
            return cls(tuple(earlier), own_first=True)
        current = policies.dtype_policy()
        if any(isinstance(x, Float8DTypePolicy) for x in _within(current)):
            return cls((_float8_or_raise(current),), own_first=True)
        return cls((_of_recipe(recipes.DEFAULT),), own_first=True)

    def target(self, layer: keras.Layer) -> Target:
        """Return the policy that a layer gets, or the reason why it gets none.

        Raises:
            ValueError: If earlier conversions gave several policies, and this
                layer has none of its own.
        """
        if is_frozen(layer):
            return Target(reason=FROZEN)
        own = held_policy(layer)
        if self.own_first and _made_in_float8(layer):
            return _target_of(layer, given=own, own=own)
        if not self.policies:
            return Target(reason=f"{_PLAIN}{own.name}, not float8")
        if len(self.policies) > 1:
            raise ValueError(_different_policies(layer, self.policies))
        return _target_of(layer, given=self.policies[0], own=None)


def warn_if_only_plain_policies(unconverted: list[Unconverted]) -> None:
    """Warn if `convert` changed nothing because policies are not float8."""
    plain = [x for x in unconverted if x.reason.startswith(_PLAIN)]
    if not plain:
        return
    layers = "1 layer is" if len(plain) == 1 else f"{len(plain)} layers are"
    user_code.warn(
        f"`convert` has changed nothing: {layers} under plain policies, such "
        f"as {path_of(plain[0].layer)!r}, and others were made under float8 "
        "policies. Without a policy only those are converted. To convert all, "
        "pass a policy: `keras_policy_ext.convert(model, 'float8')`."
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """The policy for one layer, or the reason why the layer gets none.

    `given` is the full name of the policy from `convert`, or None.
    """

    policy: Float8DTypePolicy | None = None
    given: str | None = None
    reason: str | None = None


def _target_of(
    layer: keras.Layer, given: keras.DTypePolicy, own: keras.DTypePolicy | None
) -> Target:
    """Return the policy that a layer gets, or why it gets none.

    `given` is the policy to apply; `own` is the same if the layer had it
    before, else None.
    """
    source = source_policy_of(layer)
    policy = policies.as_float8(of_path(given, layer.path))
    policy_here = policy
    if isinstance(policy, Float8DTypePolicy):
        policy_here = policy.for_path(layer.path)
    if not isinstance(policy_here, Float8DTypePolicy):
        return Target(reason=f"a rule of the policy keeps it in {source.name}")
    try:
        target = Float8DTypePolicy(source.name, recipe=policy_here.recipe)
    except ValueError:
        return Target(
            reason=f"it computes in {source.name}, not in floating point"
        )
    if float8_policy_of(layer) == target:
        return Target(reason=f"it follows {target.full_name} already")
    if own is not None:
        return Target(policy=own)
    return Target(policy=target, given=policy.full_name)


def _given_before(layers: list[keras.Layer]) -> list[keras.DTypePolicy]:
    """Return the distinct policies that earlier conversions gave to layers."""
    # They differ by recipe and rules: the dtypes are those of the layer.
    policies_given: dict[object, keras.DTypePolicy] = {}
    for layer in layers:
        follows = float8_policy_of(layer)
        if not isinstance(layer, Float8Mixin) or follows is None:
            continue
        name = layer.float8_state.given
        if name is None:
            continue
        given = of_file(name)
        here = given.for_path(layer.path)
        # Unless the layer was given another policy since, not by `convert`.
        if getattr(here, "recipe", None) == follows.recipe:
            policies_given.setdefault((given.recipe, given.rules), given)
    return list(policies_given.values())


def _made_in_float8(layer: keras.Layer) -> bool:
    """Return True if a layer was made under a float8 policy to train."""
    # That of a backbone with frozen layers is float8 too, but does not train.
    held = held_policy(layer)
    return isinstance(held, Float8DTypePolicy) and held.recipe.trains


def _policy_of_tuned(policy: object) -> Float8DTypePolicy | None:
    """Return the policy of what `tune` returned; None for anything else."""
    own = getattr(policy, "policy", None)
    return own if isinstance(own, Float8DTypePolicy) else None


def check_tuned(policy: object, candidates: Iterable[Candidate]) -> None:
    """Raise ValueError if `tune` returned rules for layers of another model."""
    paths = [path_of(candidate.layer) for candidate in candidates]
    escaped = set(map(re.escape, paths))
    rules = _policy_of_tuned(policy) or ()  # A policy yields its patterns.
    missing = [pattern for pattern in rules if pattern not in escaped]
    if missing:
        raise ValueError(
            "What `tune` returned is of another model, or its layers had other "
            f"names. Received: a rule for {missing[0]!r}, and "
            f"{len(missing) - 1} more. Paths of layers: "
            f"{', '.join(paths[:5])}. Allowed: the paths of this model. Give "
            "the model and its layers the names that they had for `tune`, or "
            "pass `policy` of the result, which ignores such rules."
        )


def _requested_policy(policy: object, recipe: Any) -> keras.DTypePolicy | None:
    """Return the policy that the arguments request; None without arguments."""
    policy = _policy_of_tuned(policy) or policy
    if recipe is None:
        return None if policy is None else _float8_or_raise(_policy(policy))
    if policy is None:
        return _float8_or_raise(_of_recipe(recipe))
    names_recipe = is_spec(policy) and policy != policy_names.MODE
    if isinstance(policy, recipes.Recipe) or names_recipe:
        raise ValueError(
            "`policy` and `recipe` both give a recipe. Received: "
            f"policy={policy!r} and recipe={recipe!r}. Allowed: one of them, "
            "or a float8 policy beside a recipe. Leave one out."
        )
    _float8_or_raise(_policy(policy))  # It raises if the policy has no float8.
    return _float8_or_raise(Float8DTypePolicy(policy, recipe=recipe))


def _of_recipe(recipe: Any) -> Float8DTypePolicy:
    """Return a float8 policy with this recipe; each layer keeps its dtypes."""
    return Float8DTypePolicy("float32", recipe=recipes.get(recipe))


def _policy(policy: object) -> keras.DTypePolicy:
    """Return the policy that an argument of `convert` means."""
    if isinstance(policy, recipes.Recipe) or is_spec(policy):
        return _of_recipe(policy)
    try:
        return policies.get(policy)
    except ValueError as error:
        if isinstance(policy, str) and policy_names.is_full_name(policy):
            raise  # It says what is wrong with the name.
        raise ValueError(_no_float8(policy)) from error


def _float8_or_raise(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """Return a policy in this package's form; raise if it has no float8."""
    policy = policies.as_float8(policy)
    inner = [x for x in _within(policy) if isinstance(x, Float8DTypePolicy)]
    if not inner:
        hint = (
            "It is a plain policy, and layers keep their own: pass a recipe. "
        )
        raise ValueError(_no_float8(policy.name, hint))
    for each in inner:
        if not each.recipe.trains:
            raise ValueError(
                "This policy is that of layers whose kernels are stored in "
                f"float8. Received: {each.full_name!r}. Allowed: one with a "
                f"recipe to train with: {', '.join(recipes.names())}. "
                "`keras_policy_ext.freeze(model)` stores kernels."
            )
    return policy


def _within(policy: keras.DTypePolicy) -> list[keras.DTypePolicy]:
    """Return all policies in a `DTypePolicyMap`; of another policy, itself."""
    if not is_stock_map(policy):
        return [policies.as_float8(policy)]
    each: Any = policy
    inner = [each.default_policy, *(each[key] for key in each)]
    return [x for one in inner for x in _within(one)]


def _no_float8(received: object, hint: str = "") -> str:
    """Return the message for a policy that is not float8."""
    words = ("float8", policy_names.ALIAS, *recipes.names())
    return (
        f"{received!r} is not a recipe or a float8 dtype policy. "
        f"{hint or did_you_mean(received, words)}Allowed: a recipe "
        f"or its name, one of {', '.join(map(repr, recipes.names()))}; "
        "'float8' for the default one; a Float8DTypePolicy or its name, such "
        "as 'float8/current_from_float32', where each layer keeps its own "
        "source. To leave float8, use `revert`."
    )


def _different_policies(
    layer: keras.Layer, given: tuple[keras.DTypePolicy, ...]
) -> str:
    """Return the message that a policy has to be passed again."""
    named = " and ".join(repr(getattr(x, "full_name", x.name)) for x in given)
    return (
        "Layers of this model were converted with different policies, and "
        f"{path_of(layer)!r} has none of its own. Received: no policy, after "
        f"{named}. Allowed: a policy, or an `include` that matches only layers "
        "with one. Pass the policy for the remaining layers."
    )
