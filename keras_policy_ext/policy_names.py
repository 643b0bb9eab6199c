"""Parse float8 policy names by their grammar, without keras.

```
full name = "float8" ["/" spec] "_from_" source [";rules=" JSON]
          | ("qat" | "integers") "/" spec "_from_" source [";rules=" JSON]
          | "mixed_float8" [";rules=" JSON]
```

`spec` is a recipe's compact string (`Recipe.spec`); without it the recipe is
delayed scaling, as in Keras. The first word is the recipe's `mode`: `qat`
(quantization-aware training) rounds kernels that train in floats, and
`integers` is of kernels that are stored as such.
`mixed_float8` is short for `float8/current_from_mixed_bfloat16`. `source` is a
plain policy name, and the JSON is a compact list of `[pattern, policy name or
null]`.
Examples: `float8_from_mixed_bfloat16`, `float8/16_from_float32`,
`float8/current_from_float32;rules=[["head",null],["emb.*","float32"]]`.
"""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

MODE = "float8"
"""A complete name: the default recipe over the global policy."""

ALIAS = "mixed_float8"
_ALIAS_MEANS = "float8/current_from_mixed_bfloat16"

QAT = "qat"
INTEGERS = "integers"
MODES = (MODE, QAT, INTEGERS)
"""The first words of full names; layers report them too."""

_BEGINNINGS = tuple(f"{mode}/" for mode in MODES)

_FULL_NAME = re.compile(
    r"(?P<mode>float8|(?:qat|integers)(?=/))(?:/(?P<spec>[^;]+?))?"
    r"_from_(?P<source>\w+)(?:;rules=(?P<rules>.*))?",
    re.DOTALL,
)

NamedRules = tuple[tuple[str, str | None], ...]


class PolicyName(NamedTuple):
    """The parts of a policy's full name: recipe, source and rules."""

    mode: str
    spec: str | None
    source: str
    rules: NamedRules


def is_full_name(name: str) -> bool:
    """Return True if a string looks like the name of a float8 policy."""
    # `"float8_e4m3fn"` is a dtype and `"float8"` a mode, so False for both.
    if name == ALIAS or name.startswith(ALIAS + ";"):
        return True
    return name.startswith(_BEGINNINGS) or (
        name.startswith("float8") and "_from_" in name
    )


def is_ours(name: str) -> bool:
    """Return True if a string names a float8 policy that Keras cannot read."""
    # `"float8_from_<source>"` is a name in Keras too, so False.
    if re.fullmatch(r"float8_from_\w+", name):
        return False
    return name == MODE or is_full_name(name)


def parse(name: str) -> PolicyName:
    """Parse a float8 policy's full name.

    Raises:
        ValueError: If it doesn't follow the grammar of this module.
    """
    text = name
    if text.startswith(ALIAS):
        text = _ALIAS_MEANS + text[len(ALIAS) :]
    match = _FULL_NAME.fullmatch(text)
    if match is None:
        raise ValueError(_grammar_error(name))
    rules = match["rules"]
    return PolicyName(
        mode=match["mode"],
        spec=match["spec"],
        source=match["source"],
        rules=() if rules is None else _parse_rules(rules, name),
    )


def render(
    spec: str,
    source: str,
    rules: Iterable[tuple[str, str | None]] = (),
    mode: str = MODE,
) -> str:
    """Return the full name of a float8 policy, which `parse` can read.

    `spec` is `""` for delayed scaling with 1024 amaxes; rules are
    (pattern, name or None).
    """
    begin = f"{mode}/{spec}" if spec else mode
    pairs = [list(rule) for rule in rules]
    if not pairs:
        return f"{begin}_from_{source}"
    compact = json.dumps(pairs, separators=(",", ":"))
    return f"{begin}_from_{source};rules={compact}"


def _parse_rules(text: str, name: str) -> NamedRules:
    """Return the rules in a full name; raise if they are none."""
    try:
        pairs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(_grammar_error(name)) from error
    if not isinstance(pairs, list) or not all(map(_is_rule, pairs)):
        raise ValueError(_grammar_error(name))
    return tuple((pattern, policy) for pattern, policy in pairs)


def _is_rule(pair: object) -> bool:
    """Return True for a list of a pattern and a name or None."""
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and (pair[1] is None or isinstance(pair[1], str))
    )


def _grammar_error(name: str) -> str:
    """Return the message for a name that breaks the grammar."""
    return (
        f"Cannot read this as a float8 policy name. Received: {name!r}. "
        "Allowed: 'mixed_float8', 'float8_from_<source>', "
        "'float8/<recipe>_from_<source>', 'qat/<recipe>_from_<source>' or "
        "'integers/<recipe>_from_<source>', "
        "where <source> is a plain policy name and <recipe> a history length "
        "or a recipe, each with an "
        'optional \';rules=[["<path pattern>","<policy>" or null],…]\'. '
        "Write for instance 'float8/16_from_mixed_bfloat16'."
    )
