"""States on PyTorch, whose observations are kept outside of `.grad`."""

from __future__ import annotations

import functools
from typing import Any

import keras
import torch

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.torch import operators
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.backends.torch.gradients import are_transforms_active
from keras_policy_ext.ext.delayed.frameworks import Settle, States
from keras_policy_ext.ext.delayed.torch import observations
from keras_policy_ext.ext.delayed.torch.kernels import CpuStates, TritonStates
from keras_policy_ext.numerics.scale_sources import source_of


class TorchStates(States):
    """States that are changed in place, and observed by hooks of gradients."""

    kernels = (TritonStates(), CpuStates())

    @override
    def seen_lately(self, state: Tensor) -> bool:
        return observations.seen_lately(state)

    @override
    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        with torch.no_grad():
            if torch.compiler.is_compiling():
                name = _name_of(operators.in_pieces(settle))
                return _settled(name, value, previous)
            return super().settle_here(settle, value, previous)

    @override
    def version(self, x: Tensor) -> int | None:
        # Tensors of `torch.inference_mode` have no such counter, and in a graph
        # it counts nothing.
        if torch.compiler.is_compiling():
            return None
        has_counter = is_real(x) and not x.is_inference()
        return x._version if has_counter else None

    @override
    def as_value_of(self, variable: keras.Variable, value: Tensor) -> Tensor:
        # Keras's conversion would return the same tensor, but take the host as
        # long as the update of the state.
        stored = variable.value
        if type(value) is torch.Tensor and (
            value.dtype == stored.dtype and value.device == stored.device
        ):
            return value
        return super().as_value_of(variable, value)

    @override
    def assigned(
        self, variable: keras.Variable, value: Tensor
    ) -> Tensor | None:
        with torch.no_grad():
            state = variable.value
            observed = observations.taken(variable, value)
            merge = self._merge_in_place(variable, state)
            if merge is not None:
                merge(value, observed, state)
                return None
            value = observations.merged(value, observed)
            return super().settle(variable.settling, value, state)

    def _merge_in_place(self, variable: keras.Variable, state: Tensor) -> Any:
        """Return `TritonStates.merge` for a state's source; None without it."""
        if torch.compiler.is_compiling():
            return None  # A graph sees no change in place.
        # The first entry is `TritonStates`; tests interpret it on a CPU.
        first_kernels: Any = self.kernels[:1]
        if not (
            state.is_cuda or any(each.interpreted for each in first_kernels)
        ):
            return None
        source = source_of(variable.recipe, variable.matrix_count)
        kernels: Any = self.kernels_for(source, state)
        # In a stateless scope of Keras the variable must not change.
        can_change = (
            not variable_values.is_stateless() and state.is_contiguous()
        )
        if not can_change or not hasattr(kernels, "merge"):
            return None
        return functools.partial(kernels.merge, source)

    @override
    def keep_observations(
        self, variable: keras.Variable, tensor: Tensor
    ) -> None:
        observations.keep_out_of_grad(variable, tensor)

    @override
    def earlier_observation(self, variable: keras.Variable) -> Tensor | None:
        return variable.observed.earlier

    @override
    def put_earlier_observation(
        self, variable: keras.Variable, value: Tensor
    ) -> None:
        value = torch.as_tensor(value, device=variable.value.device)
        variable.observed.earlier = value

    @override
    def known_value(self, variable: keras.Variable) -> Tensor | None:
        # None also if it is unchanged: callers look for changes.
        if torch.compiler.is_compiling() or are_transforms_active():
            return None
        return observations.changed_value(variable)

    @override
    def passes(self, source: Any, interpreted: bool) -> Any:
        # It needs Triton.
        from keras_policy_ext.ext.delayed.torch.passes import StatePasses

        return StatePasses(source, interpreted)

    def number_of_use(self, variable: keras.Variable) -> int | None:
        """Return the number of this use of a kernel in the graph being made."""
        if torch.compiler.is_compiling():
            return _number_in_graph(id(variable))
        return None

    @override
    def know_replicas(self, state: Tensor, in_graph: bool) -> None:
        if in_graph:
            observations.know_replicas_in_graph()
        else:
            observations.know_replicas(state)


STATES = TorchStates()

_FUNCTIONS: dict[str, Settle] = {}
"""What computes new states in graphs, by names, as for `operators`."""


@torch.compiler.assume_constant_result
def _name_of(pieces: Any) -> str:
    """Register what computes a state; return its name, equal in any process."""
    settle = operators.from_pieces(pieces)
    return operators.register(settle, repr(settle), _FUNCTIONS)


@torch.library.custom_op("keras_policy_ext::settled", mutates_args=())
def _settled(
    name: str, value: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    """Return the new state after a value; see `Settling`, `CatchingUp`."""
    settled = _FUNCTIONS[name](value, previous)
    (settled,) = operators.unshared([settled], [value, previous])
    return settled


@_settled.register_fake
def _(name: str, value: Tensor, previous: Tensor) -> Tensor:
    return torch.empty_like(previous)


_USES: dict[int, int] = {}
"""How often the graph that is being made uses kernels, by ids of states."""

_GRAPH: list[Any] = [None]
"""What tells this graph from others."""


@torch.compiler.assume_constant_result
def _number_in_graph(state: int) -> int:
    """Return how many uses of a kernel this graph has so far; count one.

    An attribute that counts them would be guarded, and each number would be
    another graph.
    """
    # The compiler runs this function, as it is. If it starts a graph anew, the
    # id of the trace is another one (private, torch 2.11 to 2.13). Without it
    # the numbers go on, and a graph that is compiled anew has other slots.
    guards = getattr(torch, "_guards", None)
    context = getattr(guards, "CompileContext", None)
    find = getattr(context, "current_trace_id", lambda: None)
    graph = find()
    if graph != _GRAPH[0]:
        _GRAPH[0] = graph
        _USES.clear()
    number = _USES.get(state, 0)
    _USES[state] = number + 1
    return number
