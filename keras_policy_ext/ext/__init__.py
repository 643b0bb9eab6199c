"""Extensions: all that a step, `convert`, `freeze` and a file do not need.

Each folder is one. It imports names of the core without a leading underscore;
the core imports no extension, and works when this folder is deleted.
`NAMES` says which public names they add.
"""

_ROOT = __name__

NAMES = {
    public: f"{_ROOT}.{home}"
    for public, home in {
        "Tuned": "tune.tune",
        "LossScaleDTypePolicy": "mixed.loss_scales",
        "audit": "audit.audit",
        "autocast_scope": "mixed.autocast",
        "autopilot": "watch.autopilot",
        "bench": "bench.bench",
        "calibrate": "calibrate.calibration",
        "conversion.calibrate": "calibrate.calibration",
        "conversion.Smoothed": "smoothing.smoothing",
        "conversion.eight_bit_rules": "smoothing.eight_bits",
        "conversion.filters.Auto": "gain.auto",
        "conversion.smooth_swiglu": "smoothing.smoothing",
        "inspect": "inspect.inspection",
        "is_autocast_variable": "mixed.autocast",
        "layers.AutocastMixin": "mixed.autocast",
        "layers.GRU": "recurrent.rnn",
        "layers.GRUCell": "recurrent.rnn",
        "layers.LSTM": "recurrent.rnn",
        "layers.LSTMCell": "recurrent.rnn",
        "layers.SimpleRNN": "recurrent.rnn",
        "layers.SimpleRNNCell": "recurrent.rnn",
        "layers.autocast_scope": "mixed.autocast",
        "layers.is_autocast_variable": "mixed.autocast",
        "memory": "memory.step_memory",
        "numerics.ROUNDABLE": "stochastic.rounding",
        "numerics.key_of_use": "stochastic.rounding",
        "numerics.sqnr_db": "sampling.errors",
        "numerics.stochastic_round": "stochastic.rounding",
        "numerics.underflow_fraction": "sampling.errors",
        "plan": "plan.step_plan",
        "policies.LossScaleDTypePolicy": "mixed.loss_scales",
        "recipes.DelayedScaling": "delayed.recipe",
        "recipes.LARGEST_MARGIN": "delayed.recipe",
        "recipes.NVFP4Scaling": "nvfp4.recipe",
        "record": "replay.flight_recorder",
        "replay": "replay.replay",
        "tune": "tune.tune",
        "watch": "watch.monitor",
        "what_if": "what_if.what_if",
    }.items()
}
"""By public name, the module that has it."""

RECIPES = {
    "delayed": "recipes.DelayedScaling",
    "nvfp4": "recipes.NVFP4Scaling",
}
"""By the name of a recipe, the public name of its class."""

MODULES = (
    "activations",
    "callbacks",
    "loops",
    "migration",
    "mixed_precision",
    "optimizers",
    "reference",
)
"""Modules of the package that have names of extensions alone."""

REGISTERING = (
    "keras_policy_ext.activations",
    "keras_policy_ext.mixed_precision",
    "keras_policy_ext.optimizers",
    f"{_ROOT}.mixed.following",
    f"{_ROOT}.moments.following",
    f"{_ROOT}.qat.recipes",
    f"{_ROOT}.recurrent.rnn",
)
"""The modules with classes that files name, forms of Keras's layers, and
followers: imported with the package."""

ON_DEMAND = {
    # For the first report: what counts multiplications.
    "counter": f"{_ROOT}.count.counter",
    # For the first recipe that remembers something: what keeps that.
    "memory": f"{_ROOT}.delayed.states",
    # And what counts steps, for one that rounds at random.
    "counting": f"{_ROOT}.stochastic.counting",
    # For the first operand with scales on two levels, or rounded at random.
    "quantizations": f"{_ROOT}.nvfp4.quantized",
    # For `freeze(model, to=...)`.
    "writers": f"{_ROOT}.qat.keras_layers",
    # For the first product of a layer that is trained for a grid.
    "rounding": f"{_ROOT}.qat.rounding",
    # For the first layer in Keras's own float8, in a model or a file.
    "keras_float8": f"{_ROOT}.keras_float8.taking_over",
    # For the first policy of Keras's own float8.
    "keras_float8_policy": f"{_ROOT}.keras_float8.plain_calls",
}
"""By what the core asks for, the module that registers it."""
