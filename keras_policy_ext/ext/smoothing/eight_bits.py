"""Rules that keep the last blocks and the logits of a model at eight bits."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from typing import Any

import keras

from keras_policy_ext import formats, recipes, user_code
from keras_policy_ext.conversion.candidates import path_of, survey
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import source_policy_of

SHARE = 0.15
"""The part of the blocks that are kept, unless a number is given.

Source: arXiv 2509.25149, section 4.1.
"""

Block = tuple[str, str]
"""A block of a model: what stands in paths before its number, the number."""


@user_code.once
def eight_bit_rules(
    model: keras.Layer,
    recipe: recipes.Recipe | str = "rowwise",
    *,
    first: int = 0,
    last: int | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return rules for a policy: last blocks and logits at eight bits.

    Training in four bits can diverge if the last blocks are in four bits too.
    Pass the rules to a policy whose recipe is `"nvfp4"`, and the policy to
    `convert`.

    The blocks of a model are numbered in the paths of their layers, as in
    `"backbone/transformer_layer_3/query"`. Layers after the last block, and
    `ReversibleEmbedding`s, compute logits. Without numbers each layer is a
    block.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv
    2509.25149), section 4.1: fewer than 15 % of the layers, the last ones, in
    bfloat16 or MXFP8. Its model of 12 billion parameters keeps the first two
    blocks too.

    Args:
        model: A built model.
        recipe: The recipe of the layers that are kept, or its name.
        first: How many of the first blocks are kept.
        last: How many of the last blocks are kept; None for 15 % of all,
            rounded up.

    Returns:
        Pairs of a pattern and the name of a policy, for the argument `rules`
        of `Float8DTypePolicy`.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is negative, the recipe has a format of fewer
            than eight bits, or no layer of the model can be in float8.

    Examples:
        >>> model = keras.Sequential([keras.Input((16,))])
        >>> for number in range(3):
        ...     model.add(keras.layers.Dense(16, name=f"block_{number}"))
        >>> rules = kpe.conversion.eight_bit_rules(model)
        >>> policy = kpe.Float8DTypePolicy(
        ...     "float32", recipe="nvfp4", rules=rules
        ... )
        >>> [each.policy[:12] for each in kpe.convert(model, policy).converted]
        ['float8/nvfp4', 'float8/nvfp4', 'float8/rowwi']
    """
    kept = recipes.get(recipe)
    _check_bits(kept)
    found = [each.layer for each in survey(model).candidates]
    if not found:
        raise ValueError(
            "No layer of this model can compute in float8. Received: "
            f"{model!r}. Allowed: a built model with layers that have float8 "
            "forms. Call it once, then ask again."
        )
    blocks = _blocks(list(map(path_of, found)))
    order = list(dict.fromkeys(each for each in blocks if each is not None))
    number = math.ceil(SHARE * len(order)) if last is None else last
    number = _count("last", number)
    chosen = {*order[: _count("first", first)], *order[-number:][:number]}
    ends = max(i for i, each in enumerate(blocks) if each is not None)
    rules: dict[str, str] = {}
    for place, (layer, block) in enumerate(zip(found, blocks, strict=True)):
        after = block is None and place > ends
        if block in chosen or after or _computes_logits(layer):
            pattern = _pattern(layer, block if block in chosen else None)
            source = source_policy_of(layer)
            policy = Float8DTypePolicy(source.name, recipe=kept)
            rules.setdefault(pattern, policy.full_name)
    return tuple(rules.items())


def _blocks(paths: list[str]) -> list[Block | None]:
    """Return the block of each path; None for a path outside of all."""
    numbers: dict[str, set[str]] = {}
    for path in paths:
        for prefix, number in _numbers(path):
            numbers.setdefault(prefix, set()).add(number)
    # Keras numbers layers of one name from the second on: "block", "block_1".
    firsts = {
        prefix[:-1]
        for prefix, several in numbers.items()
        if prefix.endswith("_") and "1" in several and "0" not in several
    }
    for path in paths:
        for prefix, number in _firsts(path, firsts):
            numbers.setdefault(prefix + "_", set()).add(number)
    found = []
    for path in paths:
        # A number counts blocks if another path has another one in its place.
        # The outermost such number counts.
        counted = [x for x in _numbers(path) if len(numbers[x[0]]) > 1]
        several = [*counted, *_firsts(path, firsts)]
        found.append(min(several, key=lambda x: len(x[0]), default=None))
    return found if any(found) else [(path, "") for path in paths]


_WITHOUT_NUMBER = "/"
"""In place of the number of a first block that has none."""


def _firsts(path: str, firsts: set[str]) -> list[Block]:
    """Return the first blocks that a path is in, which have no number."""
    within = [x for x in firsts if f"{path}/".startswith(f"{x}/")]
    return [(each, _WITHOUT_NUMBER) for each in within]


def _numbers(path: str) -> Iterable[Block]:
    """Yield each number in a path, after what stands before it."""
    for match in re.finditer(r"\d+", path):
        yield path[: match.start()], match.group()


def _pattern(layer: keras.Layer, block: Block | None) -> str:
    """Return a pattern for all layers of a block, or for one layer."""
    if block is None or not block[1]:
        return re.escape(path_of(layer))
    prefix, number = block
    if number == _WITHOUT_NUMBER:
        return re.escape(prefix) + "(?:/.*)?"
    return re.escape(prefix + number) + r"(?!\d).*"


def _computes_logits(layer: keras.Layer) -> bool:
    # By name: KerasHub has one of its own, and an old Keras none.
    classes = type(layer).__mro__
    return any(each.__name__ == "ReversibleEmbedding" for each in classes)


def _count(name: str, value: Any) -> int:
    allowed = (
        f"`{name}` counts blocks. Received: {value!r} (of type "
        f"{type(value).__name__}). Allowed: an int >= 0. Leave it out for the "
        "default."
    )
    if isinstance(value, bool):
        raise TypeError(allowed)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(allowed) from error
    if number < 0:
        raise ValueError(allowed)
    return number


def _check_bits(recipe: recipes.Recipe) -> None:
    names = {recipe.format_of(operand) for operand in recipes.OPERANDS}
    narrow = sorted(n for n in names if formats.get(n).bits < 8)
    if narrow:
        raise ValueError(
            "The layers that are kept would be in four bits too. Received: "
            f"{recipe!r}, with {', '.join(narrow)}. Allowed: a recipe with "
            "formats of eight bits, such as 'rowwise'. Pass it as `recipe`."
        )
