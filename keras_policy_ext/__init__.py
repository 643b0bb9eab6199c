"""Float8 dtype policies for Keras 3, on TensorFlow, JAX and PyTorch.

```python
import keras_policy_ext as kpe

model = keras.Sequential([keras.layers.Dense(512), ...])
model.build((None, 512))
kpe.convert(model)
```

Importing this package imports Keras and registers the classes that saved
files name. Kernels and tools load on first use.
"""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_policy_ext._version import __version__

try:
    import keras  # noqa: F401
except (ImportError, ValueError) as error:
    from keras_policy_ext_cli import without_backend

    raise ImportError(without_backend(error)) from error

from keras_policy_ext import _extensions, formats, layers, policies, recipes
from keras_policy_ext._keras import first_use, saving_hooks, versions
from keras_policy_ext.policies import (
    Float8DTypePolicy,
    carry_policy,
    deserialize,
    dtype_policy,
    get,
    policy_scope,
    serialize,
    set_dtype_policy,
)

# Without an `__init__.py`, a folder that was left there has no origin.
if getattr(importlib.util.find_spec(f"{__name__}.ext"), "origin", None):
    from keras_policy_ext import ext

    _extensions.add(ext.NAMES, ext.MODULES, ext.ON_DEMAND, ext.RECIPES)
    for _module in ext.REGISTERING:
        importlib.import_module(_module)
    # Now: to import the module of this name later would replace the function.
    from keras_policy_ext.export import export, load_quantized


def _function_in_saving(module: str, function: str) -> Callable[..., Any]:
    """Return a function of a module in `saving`, imported when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        """Import the module, and call the function."""
        home = importlib.import_module(f"{__name__}.saving.{module}")
        return getattr(home, function)(*args, **kwargs)

    return call


versions.warn_of_a_newer_keras()
# Now: a file with float8 layers may name no class of this package.
saving_hooks.around_loading(_function_in_saving("loading", "load_for_keras"))


def _hook_export_and_saving() -> None:
    """Hook into Keras's export and saving, at the first float8 policy."""
    saving_hooks.before_export(
        _function_in_saving("keras_hooks", "check_export")
    )
    saving_hooks.add_to_metadata(
        _function_in_saving("keras_hooks", "policies_of_models")
    )


first_use.wait(_hook_export_and_saving)

_LAZY_MODULES = (
    "backends",
    "conversion",
    "kernels",
    "numerics",
    "reports",
    "saving",
    "seams",
    "stored_kernels",
)

# Names of the core that load on their first use, and their modules. Those of
# extensions are in `ext`.
_LAZY_NAMES = {
    "convert": "conversion",
    "filters": "conversion",
    "freeze": "conversion",
    "load_model": "saving",
    "load_preset": "saving",
    "load_weights": "saving",
    "revert": "conversion",
    "thaw": "conversion",
    "widen": "conversion",
}

__all__ = [
    "Float8DTypePolicy",
    "LossScaleDTypePolicy",
    "Tuned",
    "__version__",
    "activations",
    "audit",
    "autocast_scope",
    "autopilot",
    "backends",
    "bench",
    "calibrate",
    "callbacks",
    "carry_policy",
    "conversion",
    "convert",
    "deserialize",
    "dtype_policy",
    "export",
    "filters",
    "formats",
    "freeze",
    "get",
    "inspect",
    "is_autocast_variable",
    "kernels",
    "layers",
    "load_model",
    "load_preset",
    "load_quantized",
    "load_weights",
    "loops",
    "memory",
    "migration",
    "mixed_precision",
    "numerics",
    "optimizers",
    "plan",
    "policies",
    "policy_scope",
    "recipes",
    "record",
    "reference",
    "replay",
    "reports",
    "revert",
    "saving",
    "seams",
    "serialize",
    "set_dtype_policy",
    "stored_kernels",
    "thaw",
    "tune",
    "watch",
    "what_if",
    "widen",
]

if TYPE_CHECKING:
    from keras_policy_ext import (
        activations,
        backends,
        callbacks,
        conversion,
        kernels,
        loops,
        migration,
        mixed_precision,
        numerics,
        optimizers,
        reference,
        reports,
        saving,
        seams,
        stored_kernels,
    )
    from keras_policy_ext.conversion import (
        convert,
        filters,
        freeze,
        revert,
        thaw,
        widen,
    )
    from keras_policy_ext.ext.audit.audit import audit
    from keras_policy_ext.ext.bench.bench import bench
    from keras_policy_ext.ext.calibrate.calibration import calibrate
    from keras_policy_ext.ext.inspect.inspection import inspect
    from keras_policy_ext.ext.memory.step_memory import memory
    from keras_policy_ext.ext.mixed.autocast import (
        autocast_scope,
        is_autocast_variable,
    )
    from keras_policy_ext.ext.mixed.loss_scales import LossScaleDTypePolicy
    from keras_policy_ext.ext.plan.step_plan import plan
    from keras_policy_ext.ext.replay.flight_recorder import record
    from keras_policy_ext.ext.replay.replay import replay
    from keras_policy_ext.ext.tune.tune import Tuned, tune
    from keras_policy_ext.ext.watch.autopilot import autopilot
    from keras_policy_ext.ext.watch.monitor import watch
    from keras_policy_ext.ext.what_if.what_if import what_if
    from keras_policy_ext.saving import load_model, load_preset, load_weights
else:

    def __getattr__(name):
        """Import a module, or a name of one, at its first use."""
        if name in _LAZY_MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _LAZY_NAMES:
            home = importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}")
            return getattr(home, name)
        if name in __all__ or _extensions.has(name):  # Of an extension.
            return _extensions.get(name)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}. It has: "
            f"{', '.join(__all__)}."
        )


def __dir__() -> list[str]:
    return sorted(__all__)
