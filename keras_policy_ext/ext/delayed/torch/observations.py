"""PyTorch: store observations outside of `.grad`, for any training loop.

The `.grad` attributes belong to the training loop: `clip_grad_norm_` measures
and scales them, `GradScaler` divides them, an optimizer reads them. None of
that may change an observation. So as soon as the gradient of a state has been
accumulated, its observation is moved to the variable. `.grad` is left with
zero, or with NaN if an amax was not finite. The NaN tells a loss scaler to skip
the step.

The observations are entered into the state when the variable is assigned, as by
Keras's optimizers, or before an optimizer of `torch.optim` updates the kernel.
That optimizer then finds no gradient and leaves the state alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.delayed.observations import UNIT

_STATES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The state variables in the order of creation, by id of their parameter."""


class Observed:
    """The observations of amaxes since a state was last assigned.

    Attributes:
        latest: The sum over the uses since the gradient of the state was last
            cleared, float32 (operands, width); None if there was no use.
        gradient: The gradient that `latest` was moved out of.
        earlier: The largest of the earlier sums, which a Keras optimizer that
            accumulates gradients has already read; None if there are none.
        group: The process group of the replicas that have used the model since
            and are going to all-reduce their observations; None for one.
        shards: All states of a model that `fully_shard` has sharded, and the
            process group of its shards; None for other models.
        version: The version counter of the state when it was last read.
    """

    def __init__(self) -> None:
        self.latest: Tensor | None = None
        self.gradient: Tensor | None = None
        self.earlier: Tensor | None = None
        self.group: Any = None
        self.shards: tuple[list[Any], Any] | None = None
        self.version = -1

    def take_from(self, parameter: Tensor) -> None:
        """Move an observation out of a state's newly accumulated gradient."""
        gradient = parameter.grad.detach()
        observation = gradient.clone()
        gradient.mul_(0.0)  # A NaN stays, and infinity becomes one.
        # A loop that has cleared the gradient has discarded the earlier
        # backward pass, so the earlier observation is discarded too.
        is_same_pass = parameter.grad is self.gradient
        if is_same_pass:
            # No sum: passes of one graph all use the same slots.
            observation = _larger(self.latest, observation)
        self.latest, self.gradient = observation, parameter.grad

    def keep(self) -> None:
        """Merge `latest` into `earlier`, which clearing gradients keeps."""
        self.earlier = _larger(self.earlier, self.latest)
        self.latest = self.gradient = None

    def taken(self) -> Tensor | None:
        """Return the merged observations, and clear them; None if none."""
        self.keep()
        observation, self.earlier = self.earlier, None
        return observation

    def replaced(self) -> None:
        """Clear all observations, after another state was assigned."""
        self.taken()
        if self in _HOST_FLAGS:
            # Unobserved, until the GPU reports the new state.
            _HOST_FLAGS[self][0].fill_(True)


_HOST_FLAGS: weakref.WeakKeyDictionary[Observed, tuple[Tensor, memoryview]] = (
    weakref.WeakKeyDictionary()
)
"""The flags that `host_flags` returns, and their bytes.

They are not an attribute, since copies of a state would share it.
"""

_FREE: list[Tensor] = []
"""Flags of deleted states, to be reused.

The memory is never freed, since a pending kernel may still write into it.
"""


def keep_out_of_grad(variable: keras.Variable, parameter: Tensor) -> None:
    """Install a hook that moves a state's observations out of `.grad`."""
    variable.observed = Observed()
    if not (parameter.is_leaf and parameter.requires_grad):
        # Made in a layer that is not trainable, or a stand-in for a tensor
        # that comes later: no gradient is accumulated in such a tensor.
        return
    _STATES[id(parameter)] = variable
    reference = weakref.ref(variable)

    def take(parameter: Tensor) -> None:
        state = reference()
        if state is not None:
            state.observed.take_from(parameter)

    parameter.register_post_accumulate_grad_hook(take)


def taken(variable: keras.Variable, value: Tensor) -> list[Tensor]:
    """Return a state's stored observations, and clear them.

    `value` is assigned to it, as for `merged`. They are at most two: of this
    pass, and of earlier ones whose gradients an optimizer has accumulated.
    """
    observed = variable.observed
    # An optimizer that accumulates gradients assigns the old value until its
    # step. The observations are kept for that.
    if value is variable.value:
        observed.keep()
        return []
    # Replicas that have not exchanged their observations do so now.
    if observed.group is not None:
        observations = _taken_over_replicas(variable, value)
    else:
        observations = [observed.latest, observed.earlier]
        observed.latest = observed.earlier = observed.gradient = None
    observed.group = None
    return [each for each in observations if each is not None]


# A collective ends a graph that is being made, which goes on behind it.
@torch.compiler.disable
def _taken_over_replicas(
    variable: keras.Variable, value: Tensor
) -> list[Tensor | None]:
    """Return a state's observations on all replicas, and clear them."""
    observed = variable.observed.taken()
    if _is_settled(value):
        return [observed]
    return _over_replicas([variable], [observed])


def merged(value: Tensor, observations: list[Tensor]) -> Tensor:
    """Return a value for a state, merged with the observations of `taken`.

    The value, float32 (operands, width), is an observation, a settled state or
    zeros; or the tensor in the variable itself, which an optimizer that
    accumulates gradients assigns until it takes its step. Settled rows stay.
    """
    if not observations:
        return value
    # A settled row begins with a negative mark.
    largest = functools.reduce(torch.maximum, [value, *observations])
    return torch.where(value[:, :1] < 0.0, value, _counted(largest))


def enter(states: Iterable[keras.Variable]) -> None:
    """Update states with their observations, and clear their gradients.

    If gradients are averaged over replicas, every replica must call this for
    the same states in the same order.
    """
    states = list(states)
    for state in states:
        if state.value.grad is None:  # the loop has cleared it
            state.observed.latest = state.observed.gradient = None
    observations = [state.observed.taken() for state in states]
    observations = _over_replicas(states, observations)
    for state in states:
        state.observed.group = None
    for state, observation in zip(states, observations, strict=True):
        gradient, state.value.grad = state.value.grad, None
        if observation is None:
            observation = gradient
        if observation is not None:
            state.assign(observation)


def changed_value(variable: keras.Variable) -> Tensor | None:
    """Return a state on a CPU as an array if it has changed, else None.

    It has changed if the tensor's version is not that of the last call.
    """
    tensor, observed = variable.value, variable.observed
    # Tensors of other types stand for numbers that are not there yet.
    has_numbers = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    # A call of `to` may have cast it.
    is_float32 = has_numbers and tensor.dtype == torch.float32
    if observed is None or not is_float32 or tensor.device.type != "cpu":
        return None
    if tensor._version == observed.version:
        return None
    observed.version = tensor._version
    return tensor.detach().numpy()


def host_flags(parameter: Tensor) -> Tensor | None:
    """Return the flags that a GPU sets to report unobserved operands.

    They are bool (operands,), in pinned memory, which a kernel writes
    asynchronously. None for a state without gradient. Also None if there are
    none yet while CUDA captures a graph, which cannot allocate pinned memory.
    """
    state = _STATES.get(id(parameter))
    if state is None:
        return None
    if state.observed not in _HOST_FLAGS:
        on_gpu = parameter.is_cuda
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        if not _FREE:
            _FREE.append(pinned_flags(parameter.shape[0], on_gpu))
        unseen = _FREE.pop().fill_(True)
        weakref.finalize(state.observed, _FREE.append, unseen)
        _HOST_FLAGS[state.observed] = unseen, memoryview(unseen.numpy())
    return _HOST_FLAGS[state.observed][0]


def pinned_flags(count: int, pinned: bool = True) -> Tensor:
    """Return a bool tensor (count,), all True, in host memory."""
    return torch.ones(count, dtype=torch.bool, device="cpu", pin_memory=pinned)


def seen_lately(parameter: Tensor) -> bool:
    """Return True if a GPU reported that all operands were observed."""
    state = _STATES.get(id(parameter))
    if state is None or state.observed not in _HOST_FLAGS:
        return False
    _, bytes_of_flags = _HOST_FLAGS[state.observed]
    return True not in bytes_of_flags


def know_replicas(parameter: Tensor) -> None:
    """Record a state's replicas for the next all-reduce of observations.

    It does nothing outside of DistributedDataParallel and `fully_shard`. Call
    it in a forward pass whose gradients are taken. All states of the module
    take part in the next all-reduce, on every replica, whichever layers a
    replica uses. Inside `join`, where replicas that have ended would not
    answer, each keeps its own amaxes (`_join_config`, private).
    """
    module = _active_module()
    state = _STATES.get(id(parameter))
    if state is not None and state.observed.shards is not None:
        states, group = state.observed.shards
        for each in states:
            each.observed.group = group
    if module is not None and state is not None:
        _record_group(module, state)


def know_group(
    variables: Iterable[keras.Variable], group: dist.ProcessGroup
) -> None:
    """Set the process group over which a model's observations are reduced.

    `variables` are those of a model that `fully_shard` has sharded.
    """
    ids = {id(variable) for variable in variables}
    states = [each for each in _all_states() if id(each) in ids]
    for state in states:
        state.observed.shards = states, group


def know_replicas_in_graph() -> None:
    """Call `know_replicas` for a module whose step is compiled.

    The compiler has replaced the parameters that the layers see.
    """
    module = _active_module()
    parameters = () if module is None else module.parameters()
    for parameter in parameters:
        state = _STATES.get(id(parameter))
        if state is not None:
            _record_group(module, state)  # In all states of the module.
            return


def _active_module() -> Any:
    """Return the DistributedDataParallel module that is called now, or None."""
    # PyTorch keeps it for its compiler, under a private name (1.7 to 2.13).
    # Without it each replica keeps its own amaxes.
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def _record_group(
    module: DistributedDataParallel, state: keras.Variable
) -> None:
    """Record the process group of a module in all its states, like `state`."""
    joining = getattr(getattr(module, "_join_config", None), "enable", False)
    is_recorded = state.observed.group is not None
    if is_recorded or joining or module.process_group.size() == 1:
        return
    for parameter in module.parameters():
        state = _STATES.get(id(parameter))
        if state is not None:
            state.observed.group = module.process_group


def _larger(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the maximum of two observations, or the one that is not None."""
    if first is None or second is None:
        return second if first is None else first
    return _counted(torch.maximum(first, second))


def _counted(largest: Tensor) -> Tensor:
    """Return an observation with at least one use per slot that has an amax."""
    # The merged observations may have used different slots.
    slots = (largest[:, 1:] != 0.0).sum(1, keepdim=True).to(largest.dtype)
    uses = torch.maximum(largest[:, :1], UNIT * slots)
    return torch.cat([uses, largest[:, 1:]], dim=1)


def _is_settled(value: Tensor) -> bool:
    """Return True for a state, whose rows begin with a negative mark."""
    return bool((value[:, 0] < 0.0).all())


def _over_replicas(
    states: list[keras.Variable], observations: list[Tensor | None]
) -> list[Tensor | None]:
    """Combine each observation with those of its replicas, by all-reduce."""
    # There is one all-reduce per process group, of the maximum of each entry.
    indices_of_group: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        if state.observed.group is not None:
            indices_of_group.setdefault(state.observed.group, []).append(i)
    combined = list(observations)
    for group, indices in indices_of_group.items():
        parts = [_filled(observations[i], states[i]) for i in indices]
        flat = torch.cat([part.reshape(-1) for part in parts])
        # A maximum may lose NaN. Infinity is discarded later, as NaN would be.
        flat = torch.nan_to_num(flat, nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        sizes = [part.numel() for part in parts]
        for i, part in zip(indices, flat.split(sizes), strict=True):
            combined[i] = _counted(part.reshape(tuple(states[i].shape)))
    return combined


def _filled(observation: Tensor | None, state: keras.Variable) -> Tensor:
    """Return an observation of a state; zeros for None."""
    if observation is None:
        return torch.zeros_like(state.value.detach())
    return observation


def _before_step(
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Update float8 states before an optimizer's step; return its arguments."""
    if not _STATES:
        return None  # The arguments stay.
    _enter_states_of(optimizer)

    # A closure takes gradients inside the step, so the same follows it.
    def updating(argument: Any) -> Any:
        if argument is optimizer or not callable(argument):
            return argument
        return _updating_states(argument, optimizer)

    return (
        tuple(map(updating, args)),
        {name: updating(value) for name, value in kwargs.items()},
    )


def _updating_states(
    closure: Callable[..., Any], optimizer: torch.optim.Optimizer
) -> Any:
    """Wrap an optimizer's closure to update float8 states after each call."""

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        _enter_states_of(optimizer)
        return loss

    return call


def _enter_states_of(optimizer: torch.optim.Optimizer) -> None:
    """Enter observations into states whose kernels an optimizer updates."""
    groups = optimizer.param_groups
    ids = {id(p) for group in groups for p in group["params"]}
    with torch.no_grad(), variable_values.without_notifying():
        enter(
            state
            for state in _all_states()
            if id(state.value) in ids or id(state.kernel.value) in ids
        )


def _all_states() -> list[Any]:
    """Return all state variables; other threads may create more meanwhile."""
    references = _STATES.valuerefs()
    states = (reference() for reference in references)
    return [state for state in states if state is not None]


register_optimizer_step_pre_hook(_before_step)
