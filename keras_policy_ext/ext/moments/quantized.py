"""The class of optimizers whose moments are stored in one byte a number."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from keras_policy_ext import user_code
from keras_policy_ext._keras import (
    first_use,
    optimizer_variables,
    variable_values,
)
from keras_policy_ext._keras.optimizer_facts import (
    public_class,
    updates_apart,
    updates_elementwise,
)
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.moments import _keras, moment_kernels
from keras_policy_ext.ext.moments.codes import BLOCKS, numbers_in_file
from keras_policy_ext.ext.moments.settings import Settings
from keras_policy_ext.ext.moments.slots import (
    QuantizedSlot,
    Step,
    WeightPart,
    as_step,
)

STORED = "quantized_state"
"""The key of a config and of a file that says how slots are stored."""

SCALE = ".scale"
"""What follows the key of the codes of a slot in a file."""


@keras.saving.register_keras_serializable("keras_policy_ext")
class QuantizedState(_keras.KnowsParts, keras.optimizers.Optimizer):
    """A mixin for optimizers whose moments are stored in one byte a number.

    `quantize_state` makes optimizers of it; their class also derives from the
    class that they had. The arithmetic is that of this class, in float32.
    """

    stock_class: ClassVar[type[keras.optimizers.Optimizer]]
    _state_settings: Settings
    _state_step: Step

    def add_variable(
        self,
        shape: Any,
        initializer: Any = "zeros",
        dtype: Any = None,
        aggregation: str = "none",
        layout: Any = None,
        name: str | None = None,
    ) -> keras.Variable:
        """Add a variable; one for moments is stored in one byte a number.

        Args:
            shape: As for `keras.Optimizer.add_variable`, like the others.
            initializer: Its first value.
            dtype: Its dtype.
            aggregation: How replicas are combined.
            layout: Its layout.
            name: Its name, by which moments are known.
        """
        dtype = keras.backend.standardize_dtype(dtype)
        kind = self._state_settings.kind_of(name, shape, dtype)
        if kind is None:
            return super().add_variable(
                shape, initializer, dtype, aggregation, layout, name
            )
        options = {} if layout is None else {"layout": layout}
        with keras.name_scope(self.name, caller=self):
            slot = QuantizedSlot(
                str(name),
                tuple(shape),
                keras.initializers.get(initializer),
                dtype,
                kind=kind,
                form=self._state_settings.moments,
                number=len(_keras.own_variables(self)),
                step=self._state_step,
                aggregation=aggregation,
                **options,
            )
        _keras.track(self, slot)
        return slot

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the optimizer: of a quantized slot its two."""
        found: list[keras.Variable] = []
        for each in _keras.own_variables(self):
            quantized = isinstance(each, QuantizedSlot)
            found += each.parts if quantized else (each,)
        return found

    def update_step(
        self, gradient: Tensor, variable: Any, learning_rate: Any
    ) -> Any:
        """Update a variable and its slots, and quantize these.

        Args:
            gradient: The gradient.
            variable: The variable.
            learning_rate: The learning rate.
        """
        if self._update_in_parts(gradient, variable, learning_rate):
            return None
        with self._state_step.running(_keras.steps_made(self)):
            return self._stock_step(gradient, variable, learning_rate)

    def _stock_step(
        self, gradient: Tensor, variable: Any, learning_rate: Any
    ) -> Any:
        """Update a variable, or a part, as its class does."""
        fused = None
        cls: Any = self.stock_class
        # A computed variable has to be assigned to.
        computed = isinstance(variable, variable_values.ComputedVariable)
        if updates_apart(self) and not computed:
            fused = _keras.fused_update(cls)
        if fused is None:
            return super().update_step(gradient, variable, learning_rate)
        with moment_kernels.current.in_place():
            return fused(self, [gradient], [variable], learning_rate)

    def _update_in_parts(
        self, gradient: Tensor, variable: Any, learning_rate: Any
    ) -> bool:
        """Update a variable part by part, if that is possible and faster."""
        # A part stays in the cache of a CPU, and there is no float32 copy of a
        # whole slot.
        if not updates_elementwise(self):
            return False
        slots = _keras.slots_of_variable(self, variable)
        if not slots or not all(isinstance(s, QuantizedSlot) for s in slots):
            return False
        step = as_step(_keras.steps_made(self))
        keys = [slot.key(step) for slot in slots]

        def update(
            gradient: Tensor, weight: Tensor, *stored: Tensor
        ) -> list[Tensor]:
            part = WeightPart(variable, weight)
            with self._state_step.on_parts(slots, stored):
                self._stock_step(gradient, part, learning_rate)
                return [part.value, *(slot.value for slot in slots)]

        def store(first: Any, weight: Tensor, *values: Tensor) -> list[Tensor]:
            found = [weight]
            for slot, value, key in zip(slots, values, keys, strict=True):
                found += slot.quantized(value, key, first)
            return found

        variables = [variable, *(part for slot in slots for part in slot.parts)]
        changed = moment_kernels.current.updated_in_parts(
            update,
            store,
            BLOCKS[self._state_settings.moments],
            step,
            gradient,
            # That of the model is a `tf.Variable` on TensorFlow.
            [
                v.value if isinstance(v, keras.Variable) else v
                for v in variables
            ],
        )
        if changed is None:
            return False
        for each, value in zip(variables, changed, strict=True):
            each.assign(value)
        return True

    # TensorFlow assigns to the tf.Variable in a variable.

    def assign(self, variable: Any, value: Any) -> None:
        """Assign a value to a variable of the model or of the optimizer."""
        if isinstance(variable, (QuantizedSlot, WeightPart)):
            variable.assign(value)
        else:
            super().assign(variable, value)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Add a value to a variable of the model or of the optimizer."""
        if isinstance(variable, (QuantizedSlot, WeightPart)):
            variable.assign(ops.add(variable.value, value))
        else:
            super().assign_add(variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtract a value from a variable of the model or the optimizer."""
        if isinstance(variable, (QuantizedSlot, WeightPart)):
            variable.assign(ops.subtract(variable.value, value))
        else:
            super().assign_sub(variable, value)

    def set_weights(self, weights: list[Any]) -> None:
        """Set the values of `variables`, all or none.

        Args:
            weights: An array for each of `variables`: of a quantized slot the
                codes, then the scale.

        Raises:
            ValueError: If the arrays do not fit; nothing is changed then.
        """
        wanted = [tuple(v.shape) for v in self.variables]
        given = [tuple(np.shape(each)) for each in weights]
        if not self.built or given != wanted:
            raise ValueError(
                f"The arrays do not fit the optimizer {self.name!r}. Received: "
                f"arrays of shapes {given}. Allowed: those of its `variables`"
                f"{'' if self.built else ', once it is built'}: {wanted}. For "
                "moments that are not stored in one byte a number, save and "
                "load a file: both forms load into each other."
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def __reduce__(self) -> Any:
        # The class is made by a function, so that pickle does not find it.
        # Like a stock optimizer, the copy has the config and is not built.
        return QuantizedState.from_config, (self.get_config(),)

    def get_config(self) -> dict[str, Any]:
        """Return the config of the optimizer, and how its state is stored."""
        stored = {
            "optimizer": described(self.stock_class),
            **self._state_settings.config(),
        }
        return {**super().get_config(), STORED: stored}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> keras.optimizers.Optimizer:
        """Make an optimizer of a config; it is not built yet.

        Args:
            config: A config from `get_config`.
            custom_objects: Classes that the config names.
        """
        config = dict(config)
        stored = dict(config.pop(STORED))
        named = {**stored.pop("optimizer"), "config": config}
        # `keras.optimizers.deserialize` does not know Lamb (Keras 3.15).
        optimizer = keras.saving.deserialize_keras_object(named, custom_objects)
        return make_quantized(optimizer, Settings.read(**stored))

    def save_own_variables(
        self, store: MutableMapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Write codes and scales to a file's store, and how they are read."""
        slots: dict[str, list[str]] = {}
        for index, variable in enumerate(_keras.own_variables(self)):
            if isinstance(variable, QuantizedSlot):
                slots[str(index)] = [variable.kind, variable.form]
                codes, scale = map(ops.convert_to_numpy, variable.parts)
                store[str(index)] = codes
                store[f"{index}{SCALE}"] = scale
            else:
                store[str(index)] = ops.convert_to_numpy(variable)
        text = json.dumps({"version": 1, "slots": slots})
        store[STORED] = np.frombuffer(text.encode(), np.uint8)

    def load_own_variables(
        self, store: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Read slots from a file's store; round those in another form."""
        slots, values = read_slots(store)
        own = _keras.own_variables(self)
        wrong = _why_not(values, own)
        if wrong is not None:
            user_code.warn(
                f"The state of the optimizer {self.name!r} was not loaded: "
                f"{wrong} It starts anew. Build the optimizer with the "
                "variables that the file was written with."
            )
            return
        rounded = False
        for index, variable in enumerate(own):
            key = str(index)
            if not isinstance(variable, QuantizedSlot):
                variable.assign(values[key])
            elif slots.get(key) == [variable.kind, variable.form]:
                variable.codes.assign(np.asarray(store[key]))
                variable.scale.assign(np.asarray(store[f"{key}{SCALE}"]))
            else:
                rounded = True
                variable.assign(values[key])
        if rounded:
            user_code.warn(
                f"The moments of the optimizer {self.name!r} were rounded: "
                "the file has them in another form than the optimizer, which "
                "stores one byte a number. To keep all their bits, load them "
                "into an optimizer that is stored like the one in the file."
            )


def described(cls: type) -> dict[str, Any]:
    """Return the entries by which a config names a class of optimizers."""
    name = cls.__name__
    if getattr(keras.optimizers, name, None) is cls:
        registered, module = None, "keras.optimizers"
    else:
        registered = keras.saving.get_registered_name(cls)
        module = cls.__module__
    return {"module": module, "class_name": name, "registered_name": registered}


@functools.cache
def quantized_class(cls: type) -> Any:
    """Return the subclass of an optimizer class with QuantizedState."""
    _let_stock_classes_read_others()
    members = {
        "stock_class": cls,
        "__module__": __name__,
        "__doc__": cls.__doc__,
    }
    # All have one registered name: `QuantizedState.from_config` reads them, and
    # finds the other class in the config.
    made = type(f"Quantized{cls.__name__}", (QuantizedState, cls), members)
    register = keras.saving.register_keras_serializable
    return register("keras_policy_ext", "QuantizedState")(made)


def make_quantized(
    optimizer: keras.optimizers.Optimizer, settings: Settings
) -> keras.optimizers.Optimizer:
    """Change the class of an optimizer that is not built, and return it."""
    # On PyTorch Keras makes objects of private classes, which change the
    # tensors of all slots in place; the public ones call `update_step`.
    cls = public_class(optimizer) or type(optimizer)
    step = Step()
    with optimizer_variables.untracked():
        optimizer._state_settings = settings.for_optimizer(optimizer)
        optimizer._state_step = step
    optimizer.__class__ = quantized_class(cls)
    return optimizer


def slots_in(store: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return kind and form of the quantized slots in a file, by their keys.

    Raises:
        ValueError: If a later version of the package has written it.
    """
    if STORED not in store.keys():  # noqa: SIM118 (Keras's store)
        return {}
    found = json.loads(np.asarray(store[STORED]).tobytes())
    if found.get("version") != 1:
        raise ValueError(
            "The file has an optimizer whose state is stored in a way that "
            f"this version does not know. Received: {found.get('version')!r}. "
            "Allowed: version 1. Load it with a newer keras_policy_ext."
        )
    return found["slots"]


def read_slots(
    store: Mapping[str, Any],
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return what `slots_in` does, and all variables, slots in float32."""
    slots = slots_in(store)
    values = {}
    for key in store.keys():  # noqa: SIM118 (Keras's store)
        if key in slots:
            codes = np.asarray(store[key])
            scale = np.asarray(store[f"{key}{SCALE}"])
            values[key] = numbers_in_file(codes, scale, *slots[key])
        elif key != STORED and not key.endswith(SCALE):
            values[key] = store[key]
    return slots, values


def _why_not(values: Mapping[str, Any], own: list[keras.Variable]) -> Any:
    """Return why a file does not fit the variables of an optimizer, or None."""
    if len(values) != len(own):
        return f"the file has {len(values)} variables, it has {len(own)}."
    for index, variable in enumerate(own):
        there, here = tuple(values[str(index)].shape), tuple(variable.shape)
        if there != here:
            return f"{variable.path!r} has shape {here}, in the file {there}."
    return None


def _load_float(
    stock: Any, optimizer: keras.optimizers.Optimizer, store: Mapping[str, Any]
) -> None:
    """Load an optimizer, also one that is stored in one byte a number."""
    if isinstance(optimizer, QuantizedState) or not slots_in(store):
        stock(optimizer, store)
        return
    _, values = read_slots(store)
    user_code.warn(
        f"The moments of the optimizer {optimizer.name!r} are rounded: in the "
        "file they have one byte a number. Training continues with the "
        "rounded ones, in float32."
    )
    stock(optimizer, values)


def _made(
    stock: Any,
    cls: Any,
    config: dict[str, Any],
    custom_objects: Mapping[str, object] | None = None,
) -> keras.optimizers.Optimizer:
    """Make a class of a config, also of one that is stored in one byte."""
    if STORED not in config:
        return stock(cls, config, custom_objects)
    config = dict(config)
    stored = dict(config.pop(STORED))
    stored.pop("optimizer")
    made = stock(cls, config, custom_objects)
    return make_quantized(made, Settings.read(**stored))


def _let_stock_classes_read_others() -> None:
    """Have stock optimizers read configs and files of those in one byte."""
    _keras.around_loading(_load_float)
    _keras.around_making(_made)


first_use.wait(_let_stock_classes_read_others)
