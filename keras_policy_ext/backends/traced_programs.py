"""Traced programs, and the values in them: what reaches which choice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NamedTuple


class TracedProgram(NamedTuple):
    """A traced function: its outputs and its program.

    Attributes:
        outputs: The outputs, with a `keras.KerasTensor` for each tensor.
        program: The program, in the form of the framework: on JAX a jaxpr, on
            TensorFlow a graph, on PyTorch a list with a `ProductCall` for each
            call of a function that multiplies.
        chooses: Whether the function looks for the largest or smallest entries
            of a tensor, by a top-k, an argmax or a sort.
    """

    outputs: Any
    program: Any
    chooses: bool = False


class Given(NamedTuple):
    """The argument of this number, among the tensors that a call is given."""

    number: int


HERE = "here"
"""The source of what a program multiplies itself, outside of marked calls."""

Source = Hashable
Sources = frozenset[Source]
NONE: Sources = frozenset()


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


Through = Callable[[list[Sources]], list[Sources]]

# No number is used twice: a framework may keep a program with older marks.
_NUMBERS = itertools.count()


class _MarkedCall(NamedTuple):
    """A marked call: a map of its sources, and the number of its results."""

    through: Through
    results: int


class Flow:
    """The sources whose values reach a tensor, and those that make a choice.

    A tensor is known by a key, such as its id in a program of the framework.
    Sources are the arguments of a program, the calls that are marked in it,
    and its products. The values of a source reach a tensor if no product or
    marked call is in between. Sources make a choice if a top-k, an argmax or
    a sort looks for entries of a tensor that they reach, and the program uses
    the positions that it finds, or compares with the entries.

    Attributes:
        chosen: For each such choice, its sources.
        returned: For each tensor that is returned, the sources that reach it.
    """

    def __init__(self) -> None:
        self.chosen: set[Sources] = set()
        self.returned: list[Sources] = []
        self._seen: dict[Hashable, _Seen] = {}
        self._calls: dict[int, _MarkedCall] = {}

    def start(self, inputs: Iterable[Hashable]) -> None:
        """Forget all tensors, and start with these arguments."""
        self._seen = {
            key: _Seen(frozenset([Given(number)]))
            for number, key in enumerate(inputs)
        }
        self.chosen.clear()

    def finish(self, outputs: Iterable[Hashable]) -> None:
        """Set `returned`; positions that are returned count as used."""
        known = [self._of(key) for key in outputs]
        self._count_positions_as_used(known)
        self.returned = [each.reached for each in known]

    def new_call(self, through: Through, results: int) -> int:
        """Return a number for a call that is going to be marked.

        Args:
            through: Maps the sources that reach each operand of the call to
                those that reach each of its results.
            results: The number of its results.
        """
        number = next(_NUMBERS)
        self._calls[number] = _MarkedCall(through, results)
        return number

    def results_of(self, number: int | None) -> int | None:
        """Return how many results a marked call has; None if it is none."""
        call = None if number is None else self._calls.get(number)
        return None if call is None else call.results

    def same(self, old: Hashable, new: Hashable) -> None:
        """Give the tensor `new` the sources of the tensor `old`."""
        self._put(new, self._of(old))

    def called(
        self,
        number: int,
        operands: Iterable[Hashable],
        results: Iterable[Hashable],
    ) -> None:
        """Give the results of a marked call the sources that its map finds.

        The operands' positions count as used, since the call is not followed.
        """
        known = [self._of(key) for key in operands]
        self._count_positions_as_used(known)
        through = self._calls[number].through
        of_results = through([each.reached for each in known])
        for key, reached in zip(results, of_results, strict=True):
            self._put(key, _Seen(reached))

    def computed(
        self,
        kind: Literal["product", "choice", "other"],
        operands: Iterable[Hashable],
        results: Iterable[tuple[Hashable, object]],
    ) -> None:
        """Pass the sources of an operation's operands on to its results.

        Args:
            kind: `"choice"` for a top-k, an argmax or a sort.
            operands: Its tensors.
            results: Each with its dtype.
        """
        known = [self._of(key) for key in operands]
        # The sources of values, of chosen entries, and of the positions of such
        # entries, in all operands; see `_Seen`.
        reached = NONE.union(*(each.reached for each in known))
        ranked = NONE.union(*(each.ranked for each in known))
        positions = NONE.union(*(each.positions for each in known))
        with_dtypes = [(key, str(dtype)) for key, dtype in results]
        # A cast or another shape of positions does not use them.
        keeps_positions = (
            kind == "other"
            and len(known) == 1
            and not any("float" in dtype for _, dtype in with_dtypes)
        )
        if not keeps_positions:
            self._count_positions_as_used(known)
        for key, dtype in with_dtypes:
            seen = _Seen()
            if kind == "product":
                seen = _Seen(reached=frozenset([HERE]))
            elif "float" in dtype:  # Values; of a choice, the chosen entries.
                seen = _Seen(reached, reached if kind == "choice" else ranked)
            elif kind == "choice":  # Integers: the places of these entries.
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


# The name scopes of marked calls

_SCOPE = "kpe_layer_"


def scope_name(number: int) -> str:
    """Return a name scope that marks operations, for `layer_of`."""
    return f"{_SCOPE}{number}"


def layer_of(name: str) -> int | None:
    """Return the number in the innermost scope of `scope_name`, or None."""
    found = re.findall(rf"{_SCOPE}(\d+)", name)
    return int(found[-1]) if found else None
