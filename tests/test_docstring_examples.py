"""The examples in the docstrings of the most used names run, as they stand."""

import doctest

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe

NAMES = [
    *("Float8DTypePolicy", "LossScaleDTypePolicy", "autocast_scope"),
    *("calibrate", "carry_policy", "convert", "dtype_policy", "export"),
    *("filters.Auto", "formats.get", "freeze", "get", "inspect"),
    *("kernels.prefer", "kernels.select", "layers.Dense"),
    *("layers.Float8Mixin", "layers.MultiHeadAttention", "load_model"),
    *("load_weights", "loops.is_state", "loops.parameters", "loops.weights"),
    *("memory", "mixed_precision.LossScaleOptimizer"),
    *("mixed_precision.StochasticRounding", "mixed_precision.compile"),
    *("numerics.cast", "numerics.quantize", "numerics.scale_from_amax"),
    "optimizers.quantize_state",
    *("policy_scope", "recipes.CurrentScaling", "recipes.DelayedScaling"),
    *("recipes.RowwiseScaling", "recipes.get", "revert"),
    *("set_dtype_policy", "thaw", "widen"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_docstring_gives_what_it_states(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = kpe
    for part in name.split("."):
        found = getattr(found, part)
    test = doctest.DocTestParser().get_doctest(
        found.__doc__, {"keras": keras, "np": np, "kpe": kpe}, name, name, 0
    )
    assert test.examples
    report = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
