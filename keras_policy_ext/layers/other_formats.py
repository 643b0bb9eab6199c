"""A word about layers in formats that the device here does not multiply."""

from __future__ import annotations

from keras_policy_ext import _user_code, backends, formats
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.recipes import MATMULS, Recipe
from keras_policy_ext.recipes.fields import counterpart


def warn(policy: Float8DTypePolicy) -> None:
    """Warn where a policy is emulated for the family of its formats alone.

    A loaded model goes on in the formats that it was trained in, on any
    device: numbers and scales stay what they were.
    """
    native = backends.engine().device().float8
    families = {formats.get(name).family for name in _formats_of(policy.recipe)}
    if native is None or not families - {native, None}:
        return
    _user_code.warn(_text(policy, native))


def _formats_of(recipe: Recipe) -> list[str]:
    """The formats of all that a recipe quantizes, each once."""
    asked = (
        recipe.quantization(operand, matmul)
        for matmul, operands in MATMULS.items()
        for operand in operands
    )
    return list(dict.fromkeys(q.format for q in asked if q is not None))


def _text(policy: Float8DTypePolicy, native: str) -> str:
    own, others = _formats_of(policy.recipe), formats.FAMILIES[native]
    text = (
        f"This model was trained in {' and '.join(own)}; "
        f"{backends.engine().device().title} multiplies "
        f"{' and '.join(others)}. "
        "It stays in the formats that it has, with its numbers and scales, "
        "and its matmuls are emulated."
    )
    other = counterpart(policy.recipe)
    if other is None:
        return text
    name = Float8DTypePolicy(policy.default_policy, recipe=other).full_name
    return (
        f"{text} For native ones: kpe.convert(model, {name!r}), which keeps "
        "the histories that scales come from."
    )
