"""Quantize the state of optimizers, and make it float32 again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import user_code
from keras_policy_ext._keras import optimizer_variables
from keras_policy_ext._keras.optimizer_facts import public_class
from keras_policy_ext.ext.moments import _keras
from keras_policy_ext.ext.moments.quantized import (
    QuantizedState,
    make_quantized,
)
from keras_policy_ext.ext.moments.settings import KEPT, Settings
from keras_policy_ext.ext.moments.slots import QuantizedSlot


class _NoMomentsError(ValueError):
    """An optimizer has no slot that may be stored in one byte a number."""


def quantize_state(
    optimizer: keras.optimizers.Optimizer,
    moments: str = "float8",
    *,
    slots: Mapping[str, str] | None = None,
    exclude: str | Iterable[str] = (),
    minimum_size: int = 4096,
) -> keras.optimizers.Optimizer:
    """Store the moments of an optimizer in one byte a number, in place.

    Between steps a moment is a code of one byte for each number, and a scale
    for each block. A step reads one weight's moments in float32, calls the
    `update_step` of the optimizer, and quantizes them again. They are rounded
    at random, by bits that are a hash of the step and the place: to nearest, a
    moment would stay where it is while a step changes it by less than half a
    code. The state of a built optimizer is kept, rounded to nearest.

    First moments have a sign, four bits of exponent and three of mantissa. Of
    second moments the square root is stored, with four bits of each; above 0
    it never becomes 0. The weights, their averages (`use_ema`), accumulated
    gradients, `amsgrad`'s maxima and counters stay as they are, and so do
    moments of fewer than `minimum_size` numbers.

    Wrappers, such as a `LossScaleOptimizer`, stay; what they wrap is changed.
    In a `MultiOptimizer`, an optimizer without moments, such as `Ftrl`, stays
    as it is, and a warning names it.

    If a model has been trained with the optimizer, call
    `model.make_train_function(force=True)` then: its compiled step has the
    former slots. `kpe.convert(model, optimizer="float8")` does so itself.

    Args:
        optimizer: A Keras optimizer, of a class of Keras or of your own that
            makes its slots with `add_variable_from_reference` or
            `add_optimizer_variables`, and changes them in `update_step`.
        moments: `"float8"`: a float32 scale for 256 numbers. `"mx"`: a power
            of two, one byte, for 32.
        slots: What slots hold, by their names: `"first"` (signed moments),
            `"second"` (averages of squares or magnitudes), or `"float32"`,
            which leaves them. Default: those of Keras's optimizers.
        exclude: Weights whose paths contain one of these strings keep their
            moments in float32.
        minimum_size: The fewest numbers of a moment that is quantized.

    Returns:
        The same optimizer. Its class is another one, a subclass of its class.

    Raises:
        TypeError: If `optimizer` is no Keras optimizer.
        ValueError: If it has no moments, or a class of your own does not work
            this way, which is tried on copies. It is then unchanged.

    Examples:
        >>> optimizer = kpe.optimizers.quantize_state(keras.optimizers.Adam())
        >>> optimizer.build([keras.Variable(np.zeros((64, 64)))])
        >>> sum(np.asarray(v).nbytes for v in optimizer.variables[2:])
        8320
    """
    settings = Settings.read(moments, slots, exclude, minimum_size)
    _tell_of_traces(quantize(optimizer, settings))
    return optimizer


def quantize(optimizer: Any, settings: Settings) -> list[Any]:
    """Do what `quantize_state` does; return the optimizers that changed."""
    chosen, left = _to_change(optimizer, settings)
    for each in left:
        user_code.warn(
            f"The optimizer {each.name!r} of {optimizer.name!r} keeps its "
            f"state in float32: {type(each).__name__} has no moments that are "
            "known. The others have one byte a number."
        )
    for each in chosen:
        if isinstance(each, QuantizedState):
            _make_float(each)
        make_quantized(each, settings)
        _move(each, _quantized_slot)
    return chosen


def check_state(optimizer: keras.optimizers.Optimizer, moments: str) -> None:
    """Raise what `quantize_state` raises, and change nothing."""
    _to_change(optimizer, Settings.read(moments, None, (), 4096))


def dequantize_state(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Undo `quantize_state`: give an optimizer slots in float32, in place.

    Args:
        optimizer: A Keras optimizer. One that is not quantized is unchanged.

    Returns:
        The same optimizer, with the values that its moments were rounded to.

    Raises:
        TypeError: If `optimizer` is no Keras optimizer.
    """
    _tell_of_traces(dequantize(optimizer))
    return optimizer


def dequantize(optimizer: Any) -> list[Any]:
    """Do what `dequantize_state` does; return the optimizers that changed."""
    changed = [
        each for each in targets(optimizer) if isinstance(each, QuantizedState)
    ]
    for each in changed:
        _make_float(each)
    return changed


def _tell_of_traces(changed: list[Any]) -> None:
    """Warn if a graph of TensorFlow may update slots that were replaced."""
    # JAX is handed all slots in each step, and PyTorch reads them.
    if keras.backend.backend() != "tensorflow":
        return
    for each in changed:
        steps = _keras.steps_made(each)
        if each.built and np.any(ops.convert_to_numpy(steps) > 0):
            user_code.warn(
                f"The optimizer {each.name!r} has new slots, and has made "
                "steps. If a model was trained before in this process, its "
                "compiled step still updates the former slots. Call "
                "`model.make_train_function(force=True)`. `kpe.convert(model, "
                "optimizer=...)` and `kpe.revert(model)` do so themselves."
            )


def targets(optimizer: object) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that update weights: inside of wrappers."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` is not a Keras optimizer. Received: "
            f"{_short(optimizer)}. Allowed: an instance of a class of "
            "keras.optimizers. In a loop with an optimizer of torch.optim, "
            "use a Keras optimizer in its place: after `loss.backward()`, "
            "under `torch.no_grad()`, call `optimizer.apply([v.value.grad "
            "for v in model.trainable_variables], model.trainable_variables)`."
        )
    innermost = optimizer_variables.optimizers_within(optimizer)[-1]
    multiple = getattr(keras.optimizers, "MultiOptimizer", ())
    if not isinstance(innermost, multiple):
        return [innermost]
    if not innermost.optimizers:
        raise ValueError(
            "The MultiOptimizer does not know its optimizers yet. Received: "
            "one with a function that chooses them. Allowed: one with an "
            "OptimizerMap, or one that is built. Or quantize the state of "
            "the optimizers that the function returns."
        )
    return [each for one in innermost.optimizers for each in targets(one)]


def _short(optimizer: object) -> str:
    cls = type(optimizer)
    if isinstance(optimizer, (str, int, float, type(None))):
        return f"{optimizer!r} (of type {cls.__name__})"
    return f"an object of class {cls.__module__}.{cls.__qualname__}"


def _to_change(optimizer: Any, settings: Settings) -> tuple[list[Any], Any]:
    """Return the optimizers to change, and those without moments; or raise."""
    within = targets(optimizer)
    chosen, left, reason = [], [], None
    for each in within:
        own = each._state_settings if isinstance(each, QuantizedState) else None
        if own == settings.for_optimizer(each):  # It is stored so already.
            continue
        try:
            _check(each, settings)
            chosen.append(each)
        except _NoMomentsError as error:
            left.append(each)
            reason = reason or error
    if reason is not None and len(left) == len(within):
        raise reason
    return chosen, left


def _make_float(optimizer: Any) -> None:
    """Give an optimizer its former class, and float slots if it is built."""
    cls = optimizer.stock_class
    _move(optimizer, _float_slot)
    # A class of Keras on PyTorch has a private one, as what it makes has.
    optimizer.__class__ = type(cls.__new__(cls))
    for name in ("_state_settings", "_state_step"):
        vars(optimizer).pop(name, None)


def _move(optimizer: Any, make: Callable[..., keras.Variable | None]) -> None:
    """Replace the slots of an optimizer by those that a function makes."""
    replaced = {}
    with (
        _keras.replicas_of(optimizer),
        keras.name_scope(optimizer.name, caller=optimizer),
    ):
        for number, variable in enumerate(_keras.own_variables(optimizer)):
            made = make(optimizer, variable, number)
            if made is not None:
                made.assign(variable.value)
                replaced[id(variable)] = made
    if replaced:
        optimizer_variables.replace_slots(optimizer, replaced)


def _quantized_slot(
    optimizer: Any, variable: keras.Variable, number: int
) -> keras.Variable | None:
    settings = optimizer._state_settings
    kind = settings.kind_of(variable.name, variable.shape, variable.dtype)
    if kind is None:
        return None
    return QuantizedSlot(
        variable.name,
        tuple(variable.shape),
        keras.initializers.get("zeros"),
        variable.dtype,
        kind=kind,
        form=settings.moments,
        number=number,
        step=optimizer._state_step,
        aggregation=variable.aggregation,
        **_keras.layout_of(variable),
    )


def _float_slot(
    optimizer: Any, variable: keras.Variable, number: int
) -> keras.Variable | None:
    if not isinstance(variable, QuantizedSlot):
        return None
    return keras.Variable(
        "zeros",
        shape=tuple(variable.shape),
        dtype=variable.dtype,
        trainable=False,
        autocast=True,
        aggregation=variable.codes.aggregation,
        name=variable.name,
        **_keras.layout_of(variable.codes),
    )


def _check(optimizer: Any, settings: Settings) -> None:
    """Try on copies whether the state of an optimizer can be quantized."""
    if optimizer.built:
        optimizer_variables.check_can_retarget(optimizer)
    if isinstance(optimizer, QuantizedState):
        cls = optimizer.stock_class
    else:
        cls = type(optimizer)
    trial = dataclasses.replace(settings, exclude=(), minimum_size=0)
    try:
        stock, copy = _copy(optimizer), make_quantized(_copy(optimizer), trial)
        variables = [keras.Variable(np.ones((8, 8), "float32")) for _ in "ab"]
        stock.build(variables[:1])
        copy.build(variables[1:])
    # The code may be the user's, and raise anything.
    except Exception as error:
        raise ValueError(
            f"The state of {optimizer.name!r} cannot be quantized, as no copy "
            f"of it can be made: {error}. Received: an optimizer of class "
            f"{cls.__name__}. Allowed: one that `from_config(get_config())` "
            "makes again. Write both methods for it."
        ) from error
    slots = [
        v for v in _keras.own_variables(copy) if isinstance(v, QuantizedSlot)
    ]
    if not slots:
        names = [v.name for v in _keras.own_variables(stock)]
        # Of some of Keras's classes it is known that no slot may be rounded.
        kept = dataclasses.replace(settings, slots=()).for_optimizer(optimizer)
        advice = "Keep it as it is"
        if not kept.slots:
            advice += (
                ", or say by `slots` what its slots hold, such as "
                "slots={'momentum': 'first'}"
            )
        raise _NoMomentsError(
            f"{optimizer.name!r} has no moments that are known. Received: "
            f"{cls.__name__} with {', '.join(names)}. Allowed: an optimizer "
            f"with moments. {advice}."
        )
    named = public_class(optimizer) or cls
    if getattr(keras.optimizers, named.__name__, None) is not named:
        _check_steps(stock, copy, cls)


def copy_of(optimizer: Any) -> Any:
    """Return a copy that is not built, for a trial."""
    # Keras makes no lambda from a config. So a learning rate that is a function
    # or a schedule is another function in the copy.
    config = optimizer.get_config()
    made = type(optimizer).from_config(_with_constant_rates(config))
    for each in optimizer_variables.optimizers_within(made):
        if isinstance(config.get("learning_rate"), Mapping):
            each.learning_rate = lambda: _RATE  # It has no variable either.
        config = (config.get("inner_optimizer") or {}).get("config", {})
    return made


_RATE = 0.01


def _with_constant_rates(config: Any) -> Any:
    """Replace functions and schedules in a config, also of inner optimizers."""
    if not isinstance(config, Mapping):
        return config
    return {
        name: _RATE
        if name == "learning_rate" and isinstance(value, Mapping)
        else _with_constant_rates(value)
        for name, value in config.items()
    }


def _copy(optimizer: Any) -> Any:
    made = copy_of(optimizer)
    if isinstance(optimizer, QuantizedState):
        _make_float(made)
    return made


def _check_steps(stock: Any, copy: Any, cls: type) -> None:
    """Raise if a copy with quantized slots does not follow a stock one."""
    random = np.random.default_rng(0)
    reason = None
    try:
        for _ in range(3):
            gradient = random.standard_normal((8, 8)).astype("float32")
            for each in (stock, copy):
                each.apply([ops.convert_to_tensor(gradient)])
    except Exception as error:
        reason = f"its step fails: {error}"
    else:
        slots = map(_keras.own_variables, (stock, copy))
        for one, other in zip(*slots, strict=True):
            a, b = (np.asarray(ops.convert_to_numpy(v)) for v in (one, other))
            # Of three roundings at random, each by less than an eighth; what
            # is added may cancel.
            room = 0.4 * np.abs(a) + 0.1 * np.max(np.abs(a), initial=0.0)
            if np.any(np.abs(a - b) > room):
                reason = f"its slot {one.name!r} is another one after 3 steps"
                if isinstance(other, QuantizedSlot) and np.any(a < 0):
                    reason += ", as it has a sign"
                break
    if reason is not None:
        raise ValueError(
            f"The state of {cls.__name__} cannot be quantized: {reason}. "
            f"Received: an optimizer of class {cls.__name__}. Allowed: one "
            "that reads its slots, and assigns to them by `self.assign`, "
            "`assign_add` or `assign_sub`, in `update_step`. Change it, or "
            f"leave slots as they are: slots={{'name': {KEPT!r}}}."
        )
