"""`Float8DTypePolicy`, and `get`, which converts identifiers to policies."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeGuard

import keras

from keras_policy_ext import _extensions, policy_names, recipes
from keras_policy_ext.policies import _global, plain
from keras_policy_ext.policies._source_map import SourceMap, is_stock_map
from keras_policy_ext.recipes.fields import settled
from keras_policy_ext.recipes.spec import did_you_mean

_ALLOWED = (
    "a policy object, a config dict, a dtype, None (the global policy), or a "
    "name: 'mixed_bfloat16', 'mixed_float16', a dtype such as 'float32', "
    "'float8' (over the global policy), 'mixed_float8', "
    "'float8_from_<source>', 'float8/<recipe>_from_<source>', or a quantized "
    "Keras policy such as 'int8_from_float32'"
)

Rules = tuple[tuple[str, keras.DTypePolicy | None], ...]


class _Given(NamedTuple):
    """The parts of the source argument of a policy: source, recipe, rules."""

    source: keras.DTypePolicy
    recipe: recipes.Recipe | None = None
    rules: Rules = ()


@keras.saving.register_keras_serializable(package="keras_policy_ext")
class Float8DTypePolicy(SourceMap):
    """A dtype policy: float8 for layers that support it, else the source.

    It works wherever Keras takes a policy: `dtype=policy` of any layer or
    model, `keras.config.set_dtype_policy(policy)`.

    Args:
        source_name: The plain policy that float8 extends: `"mixed_bfloat16"`,
            `"float32"`, a plain `keras.DTypePolicy`, or None for the global
            policy (its source, if that is float8). Also a full float8 name
            such as `"float8/16_from_mixed_bfloat16"` or a float8 policy, whose
            recipe and rules are then used.
        *args: Keras's older, mode-first form: `Float8DTypePolicy("float8",
            source_name)` or `("float8", source_name, amax_history_length)`.
        amax_history_length: The length of delayed scaling's history in steps,
            int >= 1.
        recipe: A recipe, its name or spec string, or None for
            `DelayedScaling(amax_history_length=…)`, as in Keras.
        rules: Ordered pairs `(pattern, policy or None)`. The first whose
            pattern is, or as a regular expression fully matches, a layer's
            path decides: None keeps the source policy, otherwise any
            identifier that `get` takes, plain or float8 without rules.
        mode: `"float8"`; for Keras's keyword form `mode="float8"`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is not allowed, the source doesn't compute in
            floating point, or name, recipe and history length disagree.

    Examples:
        >>> policy = kpe.Float8DTypePolicy("mixed_bfloat16", recipe="current")
        >>> policy.compute_dtype, policy.variable_dtype
        ('bfloat16', 'float32')
        >>> policy.full_name
        'float8/current_from_mixed_bfloat16'
        >>> kpe.layers.Dense(8, dtype=policy).quantization_mode
        'float8'
    """

    def __init__(
        self,
        source_name: object = None,
        *args: Any,
        amax_history_length: int = plain.DEFAULT_LENGTH,
        recipe: plain.RecipeLike = None,
        rules: object = (),
        mode: str | None = None,
    ) -> None:
        """Read the arguments, and raise if they disagree."""
        source_name, length = plain.mode_first(
            source_name, args, mode, amax_history_length
        )
        given = _read_source(source_name)
        super().__init__(given.source)
        self._recipe = plain.merge_recipes(given.recipe, recipe, length)
        self._mode = self._recipe.mode  # Layers ask for it in each call.
        self._rules = _merge_rules(given.rules, _read_rules(rules))
        self._patterns = [re.compile(pattern) for pattern, _ in self._rules]
        self._without_rules = self
        if self._rules:
            self._without_rules = type(self)(given.source, recipe=self._recipe)

    @property
    def full_name(self) -> str:
        """A name from which `get` builds an equal policy."""
        rules = _with_names(self._rules)
        recipe = self._recipe
        return policy_names.render(
            recipe.spec, self._source_name, rules, recipe.mode
        )

    @property
    def amax_history_length(self) -> int | None:
        """The number of amaxes in the recipe's history; None without one."""
        return plain.length_of(self._recipe)

    @property
    def recipe(self) -> recipes.Recipe:
        """The recipe by which layers scale and quantize values."""
        return self._recipe

    @property
    def rules(self) -> Rules:
        """The pairs `(path pattern, policy or None)`, in order."""
        return self._rules

    @property
    def mode(self) -> str:
        """The mode of the recipe: `"float8"`, `"qat"` or `"integers"`."""
        return self._mode

    @property
    def quantization_mode(self) -> None:
        """None, so that Keras does not treat every layer as quantized.

        The layers that follow it report its `mode` themselves.
        """
        return None

    def for_path(self, path: str | None) -> keras.DTypePolicy:
        """Return the policy that the rules give to the layer at a path.

        Args:
            path: The layer's path, e.g. `"model/block/dense"`; None (a layer
                that isn't built) applies no rules.

        Returns:
            A `Float8DTypePolicy` without rules if a capable layer is to
            compute in float8, otherwise a plain `keras.DTypePolicy`.
        """
        if path is None or not self._rules:
            return self._without_rules
        rules = zip(self._rules, self._patterns, strict=True)
        for (text, policy), pattern in rules:
            if text == path or pattern.fullmatch(path):
                return self._source_policy if policy is None else policy
        return self._without_rules

    def __getitem__(self, key: str) -> keras.DTypePolicy:
        """Return the plain policy of a path, as stock layers ask."""
        # Fast without rules: Keras asks seven times in the call of a layer.
        if not self._rules:
            return self._source_policy
        policy = self.for_path(key)
        if isinstance(policy, Float8DTypePolicy):
            return policy.source_policy
        return policy

    def __contains__(self, key: object) -> bool:
        return any(key == pattern for pattern, _ in self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[str]:
        return iter([pattern for pattern, _ in self._rules])

    def __repr__(self) -> str:
        """Return the call that makes this policy."""
        arguments = [repr(self._source_name)]
        length = plain.length_of(self._recipe)
        if self._recipe.spec == str(length):  # No other field is changed.
            arguments.append(f"amax_history_length={length}")
        elif self._recipe.spec:
            arguments.append(f"recipe={self._recipe.spec!r}")
        if self._rules:
            arguments.append(f"rules={_with_names(self._rules)!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def get_config(self) -> dict[str, Any]:
        """Return the policy's fields as JSON types, for `from_config`."""
        return {
            "source_name": self._source_name,
            "recipe": recipes.serialize(self._recipe),
            "rules": [list(rule) for rule in _with_names(self._rules)],
        }

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> Self:
        """Build the policy from the dict of its `get_config()`.

        A recipe that does not say whether its scales are powers of two has
        powers of two, as in the versions that did not write it.
        """
        # Keras passes `custom_objects`, which `config` has none of.
        fields = dict(config)
        if fields.get("recipe") is not None:
            recipe = recipes.get(fields["recipe"])
            fields["recipe"] = settled(recipe, power_of_two=True)
        if _is_full_name(fields.get("source_name")):
            fields["source_name"] = of_file(fields["source_name"])
        if "rules" in fields:
            fields["rules"] = _rules_of_file(fields["rules"])
        return cls(**fields)

    def _key(self) -> tuple[object, ...]:
        return self._source_name, self._recipe, _with_names(self._rules)

    def _instead_of_writing(self, key: object) -> str:
        return f"Build a policy with rules=[({key!r}, …)]. "


def get(identifier: object) -> keras.DTypePolicy:
    """Convert a name, dtype, dict, policy or None to a dtype policy.

    Args:
        identifier: A policy, a config dict, a dtype (NumPy, ml_dtypes, JAX,
            TensorFlow, PyTorch or Python), None for the global policy, or a
            name. Keras's `QuantizedFloat8DTypePolicy` becomes a
            `Float8DTypePolicy` (see `as_float8`); the dtype names `"int8"`
            and `"float8_e4m3fn"` are plain policies of that dtype.

    Returns:
        A `keras.DTypePolicy`; never a string.

    Raises:
        ValueError: If the identifier does not describe a policy.

    Warns:
        UserWarning: If the policy asks for float64 while JAX has none, because
            `jax_enable_x64` is off. Not for None.

    Examples:
        >>> kpe.get("mixed_float8").full_name
        'float8/current_from_mixed_bfloat16'
        >>> kpe.get("float16").compute_dtype
        'float16'
    """
    if identifier is None:
        return as_float8(_global.dtype_policy())
    if isinstance(identifier, keras.DTypePolicy):
        policy = as_float8(identifier)
    elif isinstance(identifier, str):
        policy = _from_name(identifier)
    elif isinstance(identifier, Mapping):
        policy = _from_dict(identifier)
    else:
        policy = _from_dtype(identifier)
    plain.warn_of_missing_float64(policy)
    return policy


SourceMap.read = staticmethod(get)


def of_file(name: str) -> keras.DTypePolicy:
    """Convert the name of a policy in a file to the policy.

    Unlike `get`, it does not ask the device: a recipe that does not say whether
    its scales are powers of two has powers of two. New names say it.

    Raises:
        ValueError: If the name does not describe a policy.
    """
    if not policy_names.is_full_name(name):
        return get(name)
    parts = policy_names.parse(name)
    recipe = _recipe_of(name, parts)
    if recipe is not None:
        recipe = settled(recipe, power_of_two=True)
    rules = _rules_of_file(parts.rules)
    return Float8DTypePolicy(parts.source, recipe=recipe, rules=rules)


def _rules_of_file(rules: Any) -> Any:
    """Return the rules in a file, with names replaced by policies.

    Rules that are malformed are returned unchanged: `_read_rules` raises.
    """
    # `_read_rules` says what is wrong with rules that are returned unchanged.
    try:
        pairs = dict(rules)
    except (TypeError, ValueError):
        return rules
    if len(pairs) < len(rules):  # Two have one pattern.
        return rules
    return [
        (pattern, of_file(each) if _is_full_name(each) else each)
        for pattern, each in pairs.items()
    ]


def as_float8(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """Convert Keras's own float8 policy to a `Float8DTypePolicy`.

    Other policies are returned unchanged.

    `keras.dtype_policies.QuantizedFloat8DTypePolicy` means delayed scaling
    with its history length.

    Raises:
        ValueError: If its history length is < 1, which Keras accepts.
    """
    if not isinstance(policy, keras.dtype_policies.QuantizedFloat8DTypePolicy):
        return policy
    _extensions.import_for("keras_float8_policy")
    config = policy.get_config()
    source = config["source_name"] or plain.name_of_dtypes(policy)
    length = config["amax_history_length"]
    return Float8DTypePolicy(source, amax_history_length=length)


def _from_name(name: str) -> keras.DTypePolicy:
    """Return the policy that a name means."""
    if name == policy_names.MODE:
        return Float8DTypePolicy(recipe=recipes.DEFAULT)
    if policy_names.is_full_name(name):
        return Float8DTypePolicy(name)
    try:
        if "_from_" in name:
            return as_float8(keras.dtype_policies.get(name))
        return keras.DTypePolicy(name)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(_unknown(name, str(error))) from error


def _from_dict(config: Mapping[str, Any]) -> keras.DTypePolicy:
    """Return the policy of a Keras config."""
    if config.get("class_name") in ("Policy", "PolicyV1"):
        return _from_legacy(config.get("config"))
    try:
        classes = filter(None, (Float8DTypePolicy, _loss_scale_policy()))
        named = {cls.__name__: cls for cls in classes}
        policy = keras.dtype_policies.deserialize(dict(config), named)
    except Exception as error:  # Keras raises what the dict makes it raise.
        raise ValueError(_unknown(config, str(error))) from error
    if not isinstance(policy, keras.DTypePolicy):
        raise ValueError(_unknown(config, f"it means {policy!r}"))
    return as_float8(policy)


def _from_legacy(config: object) -> keras.DTypePolicy:
    """Build a policy from the config dict of tf_keras's `Policy`."""
    # It has a name and maybe a loss scale; "auto" is Keras's default.
    fields = dict(config) if isinstance(config, Mapping) else {}
    name = fields.pop("name", None)
    loss_scale = fields.pop("loss_scale", "auto")
    if not isinstance(name, str) or fields:
        raise ValueError(_not_legacy(config))
    try:
        if loss_scale == "auto":
            return _from_name(name)
        policy = _loss_scale_policy()
        if policy is None:
            raise ValueError(
                "This config of a tf_keras policy has a loss scale, which "
                "keras_policy_ext.mixed_precision reads, and that is not "
                f"installed. Received: {config!r}. Allowed without it: a "
                "config without 'loss_scale'. Remove that entry, or install "
                "the whole package."
            )
        return policy(name, loss_scale)
    except TypeError as error:
        raise ValueError(_not_legacy(config)) from error


def _loss_scale_policy() -> Any:
    """Return the class of policies with a loss scale; None if it is missing."""
    # Keras knows it once the extension for loss scales is imported.
    name = "keras_policy_ext>LossScaleDTypePolicy"
    return keras.saving.get_registered_object(name)


def _not_legacy(config: object) -> str:
    """Return the message for a config that is not of tf_keras."""
    return (
        f"Cannot read this config of a tf_keras policy. Received: {config!r}. "
        "Allowed: {'name': <policy name>}, and 'loss_scale': 'auto', "
        "'dynamic', None, a number, or the config of a FixedLossScale or "
        "DynamicLossScale. Remove the other entries."
    )


def _from_dtype(identifier: object) -> keras.DTypePolicy:
    """Return the plain policy of a dtype, of any framework."""
    try:
        text = str(identifier)
        if text.startswith("torch."):  # Keras knows them on torch only.
            return keras.DTypePolicy(text.removeprefix("torch."))
        return keras.DTypePolicy(keras.backend.standardize_dtype(identifier))
    except (TypeError, ValueError) as error:
        raise ValueError(_unknown(identifier, str(error))) from error


def _unknown(identifier: object, cause: str) -> str:
    """Return the message for something that is no policy."""
    return (
        f"{identifier!r} is not a dtype policy. {_hint(identifier)}Received: "
        f"{identifier!r} (of type {type(identifier).__name__}). Allowed: "
        f"{_ALLOWED}. Pass one of these. Cause: {cause}"
    )


def _hint(identifier: object) -> str:
    """Return a hint for an unknown policy name, such as a similar name."""
    sources = ("mixed_bfloat16", "mixed_float16", *plain.FLOATS)
    words = (policy_names.MODE, policy_names.ALIAS, *sources, *recipes.names())
    hint = did_you_mean(identifier, words)
    for name in recipes.names():
        if hint == f"Did you mean {name!r}? ":
            meant = f"float8/{name}_from_mixed_bfloat16"
            return f"Did you mean the recipe {name!r}, as in {meant!r}? "
    return hint


def _read_source(identifier: object) -> _Given:
    """Split the source argument of a policy into its parts."""
    if _is_full_name(identifier):
        name = policy_names.parse(identifier)
        recipe = _recipe_of(identifier, name)
        source = _plain_source(name.source)
        return _Given(source, recipe, _read_rules(name.rules))
    try:
        policy = get(identifier)
    except ValueError as error:
        also = ", or a full name such as 'float8_from_<source>'"
        raise ValueError(_wrong_source(identifier, also)) from error
    # The global policy may be a map of Keras, whose default counts.
    while identifier is None and is_stock_map(policy):
        policy = as_float8(policy.default_policy)
    if not isinstance(policy, Float8DTypePolicy):
        return _Given(_plain_source(policy))
    if identifier is None:  # Only the source of a global policy counts.
        return _Given(policy.source_policy)
    return _Given(policy.source_policy, policy.recipe, policy.rules)


def _recipe_of(
    full_name: str, parts: policy_names.PolicyName
) -> recipes.Recipe | None:
    """Return the recipe that a full name has; None for the default one."""
    if parts.spec is None:
        return None
    recipe = recipes.parse(parts.spec)
    # Files of the first versions have kernels of integers in the family float8.
    if parts.mode in (recipe.mode, recipe.family):
        return recipe
    allowed = policy_names.render(
        recipe.spec, parts.source, parts.rules, recipe.mode
    )
    raise ValueError(
        f"A policy name has another first word with this recipe. Received: "
        f"{full_name!r}. Allowed: {allowed!r}. Write that."
    )


def _plain_source(identifier: object) -> keras.DTypePolicy:
    """Return a plain policy of its own for a source; raise for others."""
    try:
        policy = get(identifier)
    except ValueError as error:
        raise ValueError(_wrong_source(identifier)) from error
    if plain.is_plain(policy):
        plain.floating(policy, "The source of a Float8DTypePolicy")
        # Keras renames policies that it finds in a map: keep an own object.
        return keras.DTypePolicy(policy.name)
    raise ValueError(_wrong_source(identifier))


def _wrong_source(identifier: object, also: str = "") -> str:
    """Return the message for a source that is no plain policy."""
    return (
        f"{identifier!r} cannot be the source of a Float8DTypePolicy, which is "
        "a plain policy: other settings would be lost. "
        f"{_hint(identifier)}Allowed: "
        f"'mixed_bfloat16', 'mixed_float16', {plain.FLOAT_NAMES}{also}. Pass "
        "the name of the plain policy; give a loss scale to the optimizer, by "
        "mixed_precision.wrap_optimizer."
    )


def _merge_rules(named: Rules, rules: Rules) -> Rules:
    """Return the rules of a name, or else those given; not both."""
    if named and rules and _with_names(named) != _with_names(rules):
        raise ValueError(
            "Name and `rules` of a Float8DTypePolicy disagree. Received: "
            f"{named!r} and {rules!r}. Allowed: one of them. Give the rules "
            "once."
        )
    return named or rules


def _read_rules(rules: Any) -> Rules:
    """Return rules as pairs of a pattern and a policy; raise if invalid."""
    if isinstance(rules, Mapping):
        rules = rules.items()
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Iterable):
        raise TypeError(_wrong_rules(rules))
    read = tuple(_read_rule(rule) for rule in rules)
    patterns = [pattern for pattern, _ in read]
    twice = {p for p in patterns if patterns.count(p) > 1}
    if twice:
        raise ValueError(
            "The first rule that matches decides, so a second rule with the "
            f"same pattern is never used. Received: {sorted(twice)} more "
            "than once. Allowed: each pattern once. Remove one of them."
        )
    return read


def _read_rule(rule: object) -> tuple[str, keras.DTypePolicy | None]:
    """Return the pattern and the policy, or None, of a rule."""
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise TypeError(_wrong_rules(rule))
    pattern, identifier = rule
    if not isinstance(pattern, str):
        raise TypeError(_wrong_rules(rule))
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(_wrong_rules(rule, f" Cause: {error}")) from error
    if identifier is None:
        return pattern, None
    try:
        policy = get(identifier)
    except ValueError as error:
        if _is_full_name(identifier):
            raise  # It says what is wrong with the name.
        raise ValueError(_wrong_rules(rule)) from error
    if isinstance(policy, Float8DTypePolicy):
        if policy.rules:
            raise ValueError(_wrong_rules(rule))
        return pattern, policy
    return pattern, _plain_source(policy)


def _is_full_name(identifier: object) -> TypeGuard[str]:
    """Return True for the name of a float8 policy with its source."""
    return isinstance(identifier, str) and policy_names.is_full_name(identifier)


def _wrong_rules(received: object, cause: str = "") -> str:
    """Return the message for rules that cannot be read."""
    return (
        f"Cannot read rules of a Float8DTypePolicy. Received: {received!r}. "
        "Allowed: pairs (pattern, policy), where the pattern is a regular "
        "expression for layer paths and the policy None (the source), a "
        "plain floating policy, or a float8 policy without rules of its own. "
        f"Write for instance rules=[('.*/head', None)].{cause}"
    )


def _with_names(rules: Rules) -> policy_names.NamedRules:
    """Return rules with the full names of their policies."""
    return tuple((pattern, _full_name(policy)) for pattern, policy in rules)


def _full_name(policy: keras.DTypePolicy | None) -> str | None:
    """Return a policy's name, a full one if it is float8; None for None."""
    if isinstance(policy, Float8DTypePolicy):
        return policy.full_name
    return None if policy is None else policy.name
