"""Native matmuls get scales in float32 in the backward pass as well.

A backward pass saves scales of eight bits as codes. No native kernel for them
runs on a CPU, so one stands in for them here: it refuses codes.
"""

import dataclasses

import numpy as np
import pytest
from keras import ops

from keras_policy_ext import backends, contractions, formats, kernels, recipes
from steps import normal
from ways import BACKEND


class StandIn:
    """A native kernel for all scales, which multiplies as the emulated one."""

    native = True

    def __init__(self, emulated):
        self.emulated, self.calls = emulated, 0

    def supports(self, request):
        is_narrow = all(formats.get(name).bits == 8 for name in request.formats)
        return None if is_narrow else "not of eight bits"

    def reason(self, request):
        return "a stand-in"

    def multiply(self, a, b, dtype, fast):
        for operand in (a, b):
            assert "float32" in str(operand.scale.dtype)
            assert "float8" in str(operand.values.dtype)
        self.calls += 1
        return self.emulated.multiply(a.decoded(), b.decoded(), dtype, fast)


@pytest.fixture
def stand_in(monkeypatch):
    engine = backends.engine
    native = StandIn(engine.matmuls[-1])
    matmuls = (native, *engine.matmuls)
    replaced = dataclasses.replace(engine, matmuls=matmuls, both_layouts=None)
    monkeypatch.setattr(backends, "engine", replaced)
    if BACKEND == "tensorflow":  # it saves codes where it is not on a CPU
        framework = type(backends.current)
        monkeypatch.setattr(framework, "on_cpu", lambda self, x: False)
    return native


def gradients(recipe, equation):
    """The gradients of both operands, of a plan that is like no other."""
    plan = contractions.make_plan(
        contractions.Einsum(equation), recipe, "float32", "float32", True
    )
    x, w, g = (ops.convert_to_tensor(normal(*s)) for s in SHAPES)
    _, residuals = plan.bound.forward(x, w, (), False)
    saved = plan.bound.residuals(residuals.leaves(), residuals.shapes)
    found = plan.bound.backward(saved, g, ())[:2]
    return [ops.convert_to_numpy(each) for each in found]


SHAPES = (64, 128), (128, 96), (64, 96)


@pytest.mark.parametrize("name", ["current", "rowwise", "mxfp8"])
@pytest.mark.slow_except("current")
def test_a_native_backward_pass_reads_float32_scales(name, stand_in):
    recipe = recipes.get(name)
    found = gradients(recipe, "ab,bc->ac")
    assert stand_in.calls == 3
    with kernels.prefer("emulated"):
        stand_in.supports = lambda request: "asked for by kernels.prefer"
        expected = gradients(recipe, "ab,bc->ac")
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, other)
