"""Types of the arguments that choose a policy and layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from keras_policy_ext.conversion.filters import Auto
from keras_policy_ext.recipes import Recipe


class DTypePolicyLike(Protocol):
    """A dtype policy of Keras or of this package.

    A protocol, since type checkers that do not follow imports of Keras take
    `keras.DTypePolicy` for Any, and then accept everything.
    """

    @property
    def name(self) -> str:
        """Return the name, such as `"mixed_bfloat16"`."""

    @property
    def compute_dtype(self) -> str:
        """Return the dtype that a layer computes in."""

    @property
    def variable_dtype(self) -> str:
        """Return the dtype of the weights."""


PolicyLike: TypeAlias = DTypePolicyLike | Recipe | str | Mapping[str, Any]
"""A policy, a recipe, the name of one, or the config of a policy."""

PathPatterns: TypeAlias = (
    str | re.Pattern[str] | Iterable[str | re.Pattern[str]]
)
"""One regular expression or several, searched in the path of a layer."""

LayerFilter: TypeAlias = Callable[[Any], bool] | Auto | Literal["auto"]
"""A function of a layer that returns a bool, or a filter by size."""
