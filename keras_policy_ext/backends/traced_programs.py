"""The operations of traced programs, and how values flow through them."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple


class TracedProgram(NamedTuple):
    """A traced function: its outputs and its program.

    Attributes:
        outputs: The outputs, with a `keras.KerasTensor` for each tensor.
        program: The program, in the form of the framework: on JAX a jaxpr, on
            TensorFlow a graph, on PyTorch a `RecordedProgram`.
        returned: The key of each tensor in the outputs; see `Step`.
    """

    outputs: Any
    program: Any
    returned: Sequence[Hashable]


Kind = Literal["product", "choice", "same", "other"]


class Step(NamedTuple):
    """An operation of a program, in the form that all frameworks share.

    A tensor is known by a key, such as its id in the program.

    Attributes:
        kind: `"product"` if it multiplies, `"choice"` if it looks for the
            largest or smallest entries, such as a top-k, an argmax or a sort;
            `"same"` if it only gives each of its operands another key.
        operands: The keys of its operands.
        results: The keys of its results, each with the name of its dtype.
        scope: The number of the innermost `Backend.in_scope` in which it is.
    """

    kind: Kind
    operands: list[Hashable]
    results: list[tuple[Hashable, str]]
    scope: int | None


Sources = frozenset[int]
NONE: Sources = frozenset()


_VALUES = "float|complex|variant"
"""In names of dtypes of values; the last is that of lists of TensorFlow."""


class _Seen(NamedTuple):
    """The sources of one tensor.

    Attributes:
        reached: Those that the values come from.
        ranked: Those from whose values the largest or smallest were taken.
        positions: Those in whose values these are positions of chosen entries.
    """

    reached: Sources = NONE
    ranked: Sources = NONE
    positions: Sources = NONE


class Flow:
    """Follows products through a program, to tensors and to choices.

    A source is the number of the scope in which a product is. Its values reach
    a tensor if no other product is in between. Sources make a choice if a
    top-k, an argmax or a sort looks for entries of a tensor that they reach,
    and the program uses the positions that it finds, or compares with the
    entries.

    Args:
        steps: The operations of the program, in order.
        returned: The keys of the tensors that it returns.
        passing: Scopes whose products are no sources, and pass values on.

    Attributes:
        chosen: For each such choice, its sources.
        read: For each scope, the sources that reach operands in it.
        returned: For each tensor that is returned, the sources that reach it.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        returned: Iterable[Hashable],
        passing: Collection[int] = (),
    ) -> None:
        """Follow values from step to step, as the attributes say.

        Products in a scope of `passing` are no sources: they pass theirs on.
        """
        self.chosen: set[Sources] = set()
        self.read: dict[int, set[int]] = {}
        self._seen: dict[Hashable, _Seen] = {}
        for step in steps:
            is_source = step.kind == "product" and step.scope not in passing
            self._follow(step, is_source)
        known = [self._of(key) for key in returned]
        # Who gets positions may use them.
        self._count_positions_as_used(known)
        self.returned = [each.reached for each in known]

    def _follow(self, step: Step, is_source: bool) -> None:
        """Pass what is known of the operands of an operation to its results."""
        known = [self._of(key) for key in step.operands]
        if step.kind == "same":
            for (key, _), seen in zip(step.results, known, strict=True):
                self._put(key, seen)
            return
        # The sources of values, of chosen entries, and of the positions of such
        # entries, in all operands; see `_Seen`.
        reached = NONE.union(*(each.reached for each in known))
        ranked = NONE.union(*(each.ranked for each in known))
        positions = NONE.union(*(each.positions for each in known))
        # A cast or another shape of positions does not use them.
        keeps_positions = (
            step.kind != "choice"
            and len(known) == 1
            and not any(re.search(_VALUES, x) for _, x in step.results)
        )
        if not keeps_positions:
            self._count_positions_as_used(known)
        if step.scope is not None:
            self.read.setdefault(step.scope, set()).update(reached)
        for key, dtype in step.results:
            seen = _Seen()
            if is_source:
                own = [] if step.scope is None else [step.scope]
                seen = _Seen(reached=frozenset(own))
            elif re.search(_VALUES, dtype):  # Of a choice, the chosen entries.
                is_choice = step.kind == "choice"
                seen = _Seen(reached, reached if is_choice else ranked)
            elif step.kind == "choice":  # The places of these entries.
                seen = _Seen(positions=reached)
            elif keeps_positions:
                seen = _Seen(positions=positions)
            elif "bool" in dtype:  # A mask, by comparison with chosen entries.
                seen = _Seen(positions=ranked)
            self._put(key, seen)

    def _of(self, key: Hashable) -> _Seen:
        return self._seen.get(key, _Seen())  # No source, if it is unknown.

    def _put(self, key: Hashable, known: _Seen) -> None:
        """Set what is known of a tensor; forget it if that is nothing."""
        # Where a program runs twice, a tensor of the first run is replaced.
        if any(known):
            self._seen[key] = known
        else:
            self._seen.pop(key, None)

    def _count_positions_as_used(self, known: Iterable[_Seen]) -> None:
        self.chosen.update(x.positions for x in known if x.positions)


# Name scopes with numbers

_SCOPE = "kpe_layer_"


def scope_name(number: int) -> str:
    """Return a name scope that marks operations, for `scope_number`."""
    return f"{_SCOPE}{number}"


def scope_number(name: str) -> int | None:
    """Return the number in the innermost scope of `scope_name`, or None."""
    found = re.findall(rf"{_SCOPE}(\d+)", name)
    return int(found[-1]) if found else None
