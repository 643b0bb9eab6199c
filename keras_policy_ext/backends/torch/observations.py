"""PyTorch: observations are kept apart from `.grad`, so that any loop works.

What is in `.grad` belongs to the author of a training loop: `clip_grad_norm_`
measures and scales it, `GradScaler` divides it, an optimizer follows it. An
observation must not go through any of that. So when the gradient of a state
has been accumulated, the observation in it is moved to the variable. What is
left in `.grad` is zero, which nothing changes, or NaN where an amax was not
finite, by which a loss scaler knows that it must skip the step.

The observations become state when something is assigned to the variable, as
Keras's optimizers do, or before an optimizer of `torch.optim` takes a step
with the kernel: it then finds no gradient for the state and leaves it alone,
weight decay included.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.observations import UNIT

_STATES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""State variables in the order of creation, by the id of their parameter."""


class Observed:
    """The observations of a kernel since its state was last assigned.

    Attributes:
        latest: The sum over the uses since the gradient of the state was last
            cleared, float32 (operands, width); None if there was no use.
        gradient: What is left of the gradient that `latest` was taken from.
        earlier: The largest of the sums before that, which a Keras optimizer
            that accumulates gradients has seen; None if there were none.
        group: The process group of the replicas that have used the model
            since, and are going to exchange what they observed; None where
            there is one replica.
        shards: All states of a model that `fully_shard` has cut, and the
            process group of its parts; None for any other model.
        version: How often the state had changed when it was last looked at.
    """

    def __init__(self) -> None:
        self.latest: Tensor | None = None
        self.gradient: Tensor | None = None
        self.earlier: Tensor | None = None
        self.group: Any = None
        self.shards: tuple[list[Any], Any] | None = None
        self.version = -1

    def take_from(self, parameter: Tensor) -> None:
        """Move the observation out of a gradient that was just accumulated.

        A gradient that was cleared in between takes with it what was
        observed before: the loop has discarded that backward pass.
        """
        gradient = parameter.grad.detach()
        observation = gradient.clone()
        gradient.mul_(0.0)
        continued = parameter.grad is self.gradient
        if continued and self.latest is not None:
            observation = self.latest + observation
        self.latest, self.gradient = observation, parameter.grad

    def keep(self) -> None:
        """Keep what there is beyond the next clearing of gradients."""
        self.earlier = _largest(self.earlier, self.latest)
        self.latest = self.gradient = None

    def taken(self) -> Tensor | None:
        """All that was observed, which is forgotten here."""
        self.keep()
        found, self.earlier = self.earlier, None
        return found

    def replaced(self) -> None:
        """Forget all: another state was assigned, nothing observed of it."""
        self.taken()
        if self in _TOLD:
            _TOLD[self].numpy()[:] = True


_TOLD: weakref.WeakKeyDictionary[Observed, Tensor] = weakref.WeakKeyDictionary()
"""What `told` returns. Not an attribute, which copies of a state would share.
"""

_FREE: list[Tensor] = []
"""The same memory of states that are gone, for the next states. It is never
freed, since a kernel that is still to run may write into it."""


def keep_apart(variable: Any, parameter: Tensor) -> None:
    """Keep the observations of a state apart from its gradient, from now on.

    Args:
        variable: A state variable.
        parameter: The leaf tensor in it.
    """
    variable.observed = Observed()
    if not (parameter.is_leaf and parameter.requires_grad):
        # Made in a layer that is not trainable, or a stand-in for a tensor
        # that comes later: no gradient is accumulated in such a tensor.
        return
    _STATES[id(parameter)] = variable
    reference = weakref.ref(variable)

    def take(parameter: Tensor) -> None:
        found = reference()
        if found is not None:
            found.observed.take_from(parameter)

    parameter.register_post_accumulate_grad_hook(take)


def with_observed(variable: Any, value: Tensor) -> Tensor:
    """Return the value to assign to a state, merged with its observations.

    Args:
        variable: A state variable.
        value: Float32 (operands, width): an observation, a settled state or
            zeros; or the tensor in the variable itself, which an optimizer
            that accumulates gradients assigns until it takes its step.

    Returns:
        The same shape; rows that are settled are those of `value`.
    """
    observed = variable.observed
    if value is variable.value:
        observed.keep()
        return value
    found = observed.taken()
    if observed.group is not None and not _is_settled(value):
        (found,) = _over_replicas([variable], [found])
    observed.group = None
    if found is None:
        return value
    largest = _counted(torch.maximum(value, found))
    return torch.where(value[:, :1] < 0.0, value, largest)


def enter(states: Iterable[Any]) -> None:
    """Make what was observed part of the states, and clear their gradients.

    Where gradients are averaged over replicas, every replica must call this
    for the same states in the same order.

    Args:
        states: State variables.
    """
    states = list(states)
    for state in states:
        if state.value.grad is None:  # the loop has cleared it
            state.observed.latest = state.observed.gradient = None
    found = [state.observed.taken() for state in states]
    found = _over_replicas(states, found)
    for state in states:
        state.observed.group = None
    for state, observation in zip(states, found, strict=True):
        gradient, state.value.grad = state.value.grad, None
        if observation is None:
            observation = gradient
        if observation is not None:
            state.assign(observation)


def changed_value(variable: Any) -> Tensor | None:
    """The state as an array, if it is new and on a CPU; otherwise None."""
    tensor, observed = variable.value, variable.observed
    # Tensors of other types stand for numbers that are not there yet.
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    known = known and tensor.dtype == torch.float32  # not cast by `to`
    if observed is None or not known or tensor.device.type != "cpu":
        return None
    if tensor._version == observed.version:
        return None
    observed.version = tensor._version
    return tensor.detach().numpy()


def told(parameter: Tensor) -> Tensor | None:
    """Where a GPU tells the host which operands of a state it has not seen.

    Args:
        parameter: That of a state on a GPU.

    Returns:
        Bool (operands,), pinned: a kernel writes into it, and nobody waits.
        None for a state that no gradient is taken of, and where there is none
        yet while CUDA captures a graph, which allows no such memory.
    """
    state = _STATES.get(id(parameter))
    if state is None:
        return None
    if state.observed not in _TOLD:
        on_gpu = parameter.is_cuda
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        if not _FREE:
            _FREE.append(pinned_flags(parameter.shape[0], on_gpu))
        unseen = _FREE.pop()
        unseen.numpy()[:] = True
        weakref.finalize(state.observed, _FREE.append, unseen)
        _TOLD[state.observed] = unseen
    return _TOLD[state.observed]


def pinned_flags(count: int, pinned: bool = True) -> Tensor:
    """Bool (count,), all true, in memory of the host whatever the default."""
    return torch.ones(count, dtype=torch.bool, device="cpu", pin_memory=pinned)


def seen_lately(parameter: Tensor) -> bool:
    """True if a GPU has told that all operands of a state were observed."""
    state = _STATES.get(id(parameter))
    unseen = None if state is None else _TOLD.get(state.observed)
    return unseen is not None and not unseen.numpy().any()


def know_replicas(parameter: Tensor) -> None:
    """Let states know their replicas, inside DistributedDataParallel.

    To be called in a forward pass whose gradients are taken. All states of
    the module take part in the next exchange, on every replica, whichever
    layers a replica uses. PyTorch keeps the module of that pass for its
    compiler (1.7 to 2.13), under no public name; were it gone, the amaxes of
    a replica would be its own. So they are inside `join`, where some replicas
    have ended and would not answer (`_join_config`, likewise).

    Args:
        parameter: That of a state in use.
    """
    module = _active_module()
    state = _STATES.get(id(parameter))
    if state is not None and state.observed.shards is not None:
        states, group = state.observed.shards
        for each in states:
            each.observed.group = group
    if module is not None and state is not None:
        _know_replicas(module, state)


def know_group(variables: Iterable[Any], group: Any) -> None:
    """Let states exchange what they observe in any forward pass, from now on.

    Args:
        variables: Those of a model that `fully_shard` has cut.
        group: The processes that have its parts.
    """
    ids = {id(variable) for variable in variables}
    states = [each for each in _all_states() if id(each) in ids]
    for state in states:
        state.observed.shards = states, group


def know_replicas_in_graph() -> None:
    """`know_replicas`, where a compiler has put another tensor in its place."""
    module = _active_module()
    parameters = () if module is None else module.parameters()
    for each in parameters:
        state = _STATES.get(id(each))
        if state is not None:
            # All of the module learn it together.
            _know_replicas(module, state)
            return


def _active_module() -> Any:
    """Return the replica that is called; None for none.

    The name is private (torch 2.13). Where it is gone, no replicas are known,
    and each of them keeps the amaxes that it observed itself.
    """
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def _know_replicas(module: Any, state: Any) -> None:
    """Let the states of a module know its replicas, if one of them does not."""
    joining = getattr(getattr(module, "_join_config", None), "enable", False)
    known = state.observed.group is not None
    if known or joining or module.process_group.size() == 1:
        return
    for each in module.parameters():
        state = _STATES.get(id(each))
        if state is not None:
            state.observed.group = module.process_group


def _largest(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return _counted(torch.maximum(first, second))


def _counted(largest: Tensor) -> Tensor:
    """A maximum of observations, with a use for each slot that has an amax.

    Those of one may be in other slots than those of the other.
    """
    slots = (largest[:, 1:] != 0.0).sum(1, keepdim=True).to(largest.dtype)
    uses = torch.maximum(largest[:, :1], UNIT * slots)
    return torch.cat([uses, largest[:, 1:]], dim=1)


def _is_settled(value: Tensor) -> bool:
    return bool((value[:, 0] < 0.0).all())


def _over_replicas(
    states: list[Any], found: list[Tensor | None]
) -> list[Tensor | None]:
    """The largest of what the replicas observed, entry by entry.

    In one exchange for each process group, whatever was observed where.
    """
    places: dict[Any, list[int]] = {}
    for place, state in enumerate(states):
        if state.observed.group is not None:
            places.setdefault(state.observed.group, []).append(place)
    combined = list(found)
    for group, chosen in places.items():
        parts = [_filled(found[i], states[i]) for i in chosen]
        flat = torch.cat([part.reshape(-1) for part in parts])
        # A maximum may lose NaN, and infinity is not entered either.
        flat = torch.nan_to_num(flat, nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        sizes = [part.numel() for part in parts]
        for i, part in zip(chosen, flat.split(sizes), strict=True):
            combined[i] = _counted(part.reshape(tuple(states[i].shape)))
    return combined


def _filled(observation: Tensor | None, state: Any) -> Tensor:
    if observation is None:
        return torch.zeros_like(state.value.detach())
    return observation


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Enter what was observed of the kernels that are about to change.

    A closure, which takes the gradients inside of the step, is followed by
    the same.
    """
    if not _STATES:
        return None
    _enter_states_of(optimizer)

    def followed(argument: Any) -> Any:
        if argument is optimizer or not callable(argument):
            return argument
        return _followed(argument, optimizer)

    return (
        tuple(map(followed, args)),
        {name: followed(value) for name, value in kwargs.items()},
    )


def _followed(closure: Callable[..., Any], optimizer: Any) -> Any:
    """A closure that leaves no observation behind."""

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        _enter_states_of(optimizer)
        return loss

    return call


def _enter_states_of(optimizer: Any) -> None:
    groups = optimizer.param_groups
    ids = {id(p) for group in groups for p in group["params"]}
    with torch.no_grad(), variable_values.untold():
        enter(
            state
            for state in _all_states()
            if id(state.value) in ids or id(state.kernel.value) in ids
        )


def _all_states() -> list[Any]:
    """The states that there are; another thread may be making some."""
    references = _STATES.valuerefs()
    found = (reference() for reference in references)
    return [state for state in found if state is not None]


register_optimizer_step_pre_hook(_before_step)
