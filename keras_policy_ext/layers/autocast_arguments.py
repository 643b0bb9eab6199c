"""Which arguments of a call are cast, and what `add_weight` is given."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Self

WAYS = ("all", "first")

#: The order of tf_keras's `add_weight`.
_LEGACY = (
    "name",
    "shape",
    "dtype",
    "initializer",
    "regularizer",
    "trainable",
    "constraint",
)

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastArguments:
    """The arguments of a `call` that are cast to the compute dtype.

    Attributes:
        positional: Names of the parameters that take positions.
        rest: Name of the parameter that takes all further positions.
        only_first: Whether only the first argument is cast.
        excluded: Names of parameters that are not cast.
    """

    positional: tuple[str, ...]
    rest: str
    only_first: bool
    excluded: frozenset[str]

    @classmethod
    def of(cls, call: Callable[..., object], way: str, exclude: object) -> Self:
        """Read the signature of `call` and what the layer says.

        Raises:
            ValueError: If `way` is none of `WAYS`, or `call` has no parameter
                of a name in `exclude`.
            TypeError: If `exclude` is no string and holds none.
        """
        if way not in WAYS:
            raise ValueError(
                "`autocast_args` is neither 'all' nor 'first'. Received: "
                f"{way!r}. Allowed: 'all' (every argument is cast, as in "
                "Keras) or 'first' (only the first one, as in tf_keras). "
                "Choose one."
            )
        parameters = inspect.signature(call).parameters.values()
        return cls(
            positional=tuple(
                p.name for p in parameters if p.kind in _POSITIONAL
            ),
            rest=next(
                (p.name for p in parameters if p.kind == p.VAR_POSITIONAL), ""
            ),
            only_first=way == "first",
            excluded=_excluded(exclude, list(parameters)),
        )

    def at(self, position: int) -> bool:
        """Return True if a positional argument is cast."""
        known = position < len(self.positional)
        name = self.positional[position] if known else self.rest
        if self.only_first and position > 0:
            return False
        return name not in self.excluded

    def named(self, name: str) -> bool:
        """Return True if a keyword argument is cast."""
        if self.only_first and name not in self.positional[:1]:
            return False
        return name not in self.excluded


def exclusion(exclude: object) -> tuple[str, ...]:
    """`autocast_exclude` as a tuple of names.

    Raises:
        TypeError: If it is anything but one name or several.
    """
    names = [exclude] if isinstance(exclude, str) else exclude
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(name, str) for name in names):
            return names
    raise TypeError(
        "`autocast_exclude` is not a name or a tuple of names. Received: "
        f"{exclude!r}. Allowed: a name or a tuple of names of parameters of "
        "`call`. Pass for instance autocast_exclude=('mask_logits',)."
    )


def _excluded(
    exclude: object, parameters: list[inspect.Parameter]
) -> frozenset[str]:
    names = exclusion(exclude)
    allowed = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
    unknown = sorted(set(names) - set(allowed))
    if unknown and len(allowed) == len(parameters):
        raise ValueError(
            "`autocast_exclude` names arguments that `call` does not have. "
            f"Received: {unknown}. Allowed: {allowed}. Correct the name."
        )
    return frozenset(names)


def read_add_weight(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of Keras's `add_weight`, from those or tf_keras's.

    In tf_keras the name comes first: `add_weight("kernel", (3, 4))`; and
    `autocast` is called `experimental_autocast`.

    Raises:
        TypeError: If an argument is given twice, or there are too many.
    """
    kwargs = dict(kwargs)
    if "experimental_autocast" in kwargs:
        _once("autocast", kwargs, "as `experimental_autocast` and by name")
        kwargs["autocast"] = kwargs.pop("experimental_autocast")
    if not _is_legacy(args):
        return args, kwargs
    if len(args) > len(_LEGACY):
        raise TypeError(
            f"add_weight got too many arguments. Received: {args!r}. "
            f"Allowed: {', '.join(_LEGACY)}. Pass others by name."
        )
    for name, value in zip(_LEGACY, args, strict=False):
        _once(name, kwargs, "by position and by name")
        if value is not None:
            kwargs[name] = value
    return (), kwargs


def _is_legacy(args: tuple[Any, ...]) -> bool:
    """True if the name comes first; None is one that Keras is to make up."""
    first, second = (*args, None, None)[:2]
    unnamed = first is None and isinstance(second, (tuple, list))
    return isinstance(first, str) or unnamed


def _once(name: str, kwargs: dict[str, Any], how: str) -> None:
    if name in kwargs:
        raise TypeError(
            f"add_weight got {name!r} twice, {how}. Received: "
            f"{name}={kwargs[name]!r} as the second one. Allowed: one. Say "
            "it once."
        )
