"""Programs of users, as mypy sees them; `tox run -e types` checks this file.

A line with `type: ignore` has to be an error: mypy fails where it is not.
"""

from typing import Any, assert_type

import keras

import keras_policy_ext as kpe
from keras_policy_ext import layers
from keras_policy_ext.conversion import Report
from keras_policy_ext.ext.audit.audit import Audit
from keras_policy_ext.ext.inspect.inspection import Inspection
from keras_policy_ext.ext.memory.step_memory import MemoryReport
from keras_policy_ext.ext.plan.step_plan import PlanReport
from keras_policy_ext.ext.tune.tune import Tuned
from keras_policy_ext.ext.watch.monitor import Watch
from keras_policy_ext.ext.what_if.what_if import WhatIf


def convert_and_look(model: Any) -> None:
    """Lazy names have the types of what they name."""
    assert_type(kpe.convert(model, "current", include="dense"), Report)
    assert_type(kpe.convert(model, filter="auto"), Report)
    assert_type(kpe.convert(model, filter="safe"), Report)
    assert_type(kpe.convert(model, filter=kpe.filters.Safe()), Report)
    assert_type(kpe.convert(model, filter=lambda layer: True), Report)
    kpe.convert(model, recipe=kpe.recipes.CurrentScaling())
    kpe.convert(model, kpe.Float8DTypePolicy("mixed_bfloat16"))
    kpe.convert(model, keras.dtype_policies.DTypePolicy("float32"))
    assert_type(kpe.revert(model), Report)
    assert_type(kpe.inspect(model), Inspection)
    assert_type(kpe.memory(model, 8), MemoryReport)
    assert_type(kpe.audit(model, []), Audit)
    assert_type(kpe.what_if(model, [], "current"), WhatIf)
    assert_type(kpe.plan(model, 8, "h200", "current"), PlanReport)
    assert_type(kpe.watch(model, every=10), Watch)
    assert_type(kpe.tune(model, [], {"loss": 0.01}), Tuned)
    assert_type(kpe.filters.Auto(smallest=1024), kpe.filters.Auto)


def mistakes(model: Any) -> None:
    """Names and arguments that do not exist are errors."""
    print(kpe.no_such_name)  # type: ignore[attr-defined]
    kpe.convert(model, no_such_argument=3)  # type: ignore[call-arg]
    kpe.convert(model, min_size="large")  # type: ignore[arg-type]
    kpe.convert(model, policy=3)  # type: ignore[arg-type]
    kpe.convert(model, include=3)  # type: ignore[arg-type]
    kpe.convert(model, filter="large")  # type: ignore[arg-type]
    kpe.convert(model, attention="float16")  # type: ignore[arg-type]
    kpe.freeze(model, exclude=3)  # type: ignore[arg-type]
    kpe.load_model()  # type: ignore[call-arg]


class Own(layers.Float8Mixin, keras.layers.Layer):
    """A layer of one's own has the constructor of its Keras class."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units

    def call(self, x: Any) -> Any:
        """Multiply."""
        return self.float8_matmul(x, self.kernel)


def make_layers() -> None:
    """Float8 layers are classes; other names are those of Keras."""
    assert_type(layers.Dense(4, dtype="mixed_float8"), layers.Dense)
    assert_type(Own(3), Own)
    layers.LayerNormalization()
    Own()  # type: ignore[call-arg]
