"""The user's choice of layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from keras_policy_ext import _user_code
from keras_policy_ext.conversion import filters
from keras_policy_ext.conversion.candidates import Candidate, path_of

Patterns = tuple[re.Pattern[str], ...]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What `include`, `exclude`, `filter` and `min_size` say.

    Attributes:
        include: Patterns, one of which must be found in the path; None: any.
        exclude: Patterns none of which may be found there.
        filter: A predicate of a layer, or an `Auto`; None: any layer.
        min_size: The fewest entries of a kernel.
    """

    include: Patterns | None
    exclude: Patterns
    filter: Callable[[Any], bool] | filters.Auto | None
    min_size: int

    @classmethod
    def read(
        cls, include: object, exclude: object, filter: object, min_size: object
    ) -> Selection:
        """Check the arguments of `convert`.

        Raises:
            TypeError: If one has the wrong type.
            ValueError: If a pattern is none, or `min_size` is negative.
        """
        return cls(
            None if include is None else _patterns("include", include),
            () if exclude is None else _patterns("exclude", exclude),
            _filter(filter),
            _min_size(min_size),
        )

    def reasons(self, candidates: list[Candidate]) -> dict[int, str]:
        """Why candidates are left out.

        Args:
            candidates: All layers that could be converted, in order.

        Returns:
            A reason for each number of a candidate that is left out.

        Raises:
            ValueError: If `include` matches none of them.
            TypeError: If the filter does not answer with a bool.
        """
        paths = [path_of(candidate.layer) for candidate in candidates]
        self._check_matches(paths)
        found = {}
        for number, candidate in enumerate(candidates):
            reason = self._reason(candidate, paths[number])
            if reason is not None:
                found[number] = reason
        if isinstance(self.filter, filters.Auto):
            found = {**self.filter.reasons(candidates), **found}
        return found

    def _reason(self, candidate: Candidate, path: str) -> str | None:
        if self.include is not None and not _found(self.include, path):
            return "`include` does not match its path"
        pattern = _found(self.exclude, path)
        if pattern:
            return f"`exclude` matches its path: {pattern.pattern!r}"
        if candidate.size < self.min_size:
            return (
                f"its kernel has {candidate.size} entries, fewer than "
                f"{self.min_size}"
            )
        if callable(self.filter) and not _answer(self.filter, candidate.layer):
            return "`filter` returned False"
        return None

    def _check_matches(self, paths: list[str]) -> None:
        include = self.include
        matched = any(_found(include or (), path) for path in paths)
        if include is not None and paths and not matched:
            raise ValueError(_no_match("include", include, paths))
        for pattern in dict.fromkeys(self.exclude):
            if paths and not any(pattern.search(path) for path in paths):
                _user_code.warn(_no_match("exclude", (pattern,), paths))


def _found(patterns: Patterns, path: str) -> re.Pattern[str] | None:
    return next((p for p in patterns if p.search(path)), None)


def _patterns(name: str, given: object) -> Patterns:
    several = [given] if isinstance(given, (str, re.Pattern)) else given
    if not isinstance(several, Iterable):
        raise TypeError(_wrong_patterns(name, given))
    read = []
    for pattern in several:
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
    return (
        f"`{name}` {fault}. Received: {given!r}. Allowed: a regular "
        "expression that is found in the paths of layers, or a list of them, "
        "such as 'ffn' or ['.*/query', '.*/key']; a function of a layer goes "
        "to `filter`."
    )


def _no_match(name: str, patterns: Patterns, paths: list[str]) -> str:
    shown = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
    given = [pattern.pattern for pattern in patterns]
    return (
        f"`{name}` matches no layer that could be converted. Received: "
        f"{given!r}. Paths of such layers: {shown}. Allowed: regular "
        "expressions found in a path."
    )


def _filter(given: object) -> Any:
    if isinstance(given, str) and given == "auto":
        return filters.Auto()
    if given is None or isinstance(given, filters.Auto):
        return given
    if callable(given) and not isinstance(given, type):
        return given
    raise TypeError(
        f"`filter` is neither a function nor 'auto'. Received: {given!r} (of "
        f"type {type(given).__name__}). Allowed: a function of a layer that "
        "returns a bool, 'auto', `kpe.filters.Auto(...)`, or None."
    )


def _answer(predicate: Callable[[Any], object], layer: keras.Layer) -> bool:
    answer: Any = predicate(layer)
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    raise TypeError(
        f"`filter` did not return a bool. Received: {answer!r} for "
        f"{path_of(layer)!r}. Allowed: True or False. Return one of them."
    )


def _min_size(given: object) -> int:
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise TypeError(_wrong_size(given))
    if given < 0:
        raise ValueError(_wrong_size(given))
    return int(given)


def _wrong_size(given: object) -> str:
    return (
        f"`min_size` is not a number of entries. Received: {given!r} (of type "
        f"{type(given).__name__}). Allowed: an int >= 0, the fewest entries "
        "that a kernel must have, such as 1_000_000; or None."
    )
