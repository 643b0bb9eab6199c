"""What a GPU's matmul writes and adds itself, on a machine without one."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import contractions, kernels, recipes

if keras.backend.backend() != "torch":
    pytest.skip(
        f"PyTorch's matmuls; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import torch

from fake_gpus import fake_cuda
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.torch.scaled_mm import ScaledMM
from products import whole

SHAPES = {"x": (32, 48), "w": (48, 64), "g": (32, 64), "bias": (64,)}


@pytest.fixture
def scaled_mm(monkeypatch):
    """The calls of `_scaled_mm`: dtypes of results, and what was added."""
    calls, real = [], torch._scaled_mm

    def called(*args, bias=None, out_dtype=None, **kwargs):
        calls.append((out_dtype, bias))
        y = real(*args, out_dtype=torch.float32, **kwargs)
        # In float32, and rounded once: so does an epilogue of cuBLAS.
        y = y if bias is None else y + bias.float()
        return y.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", called)
    return calls


def operands(dtype):
    rng = np.random.default_rng(0)
    found = {
        name: torch.tensor(rng.normal(size=shape).astype("float32"))
        for name, shape in SHAPES.items()
    }
    dtypes = {"w": torch.float32}
    return [x.to(dtypes.get(name, dtype)) for name, x in found.items()]


def passes(device, dtype="bfloat16", recipe="current", **kwargs):
    """Outputs and both gradients, of a Dense with a float32 kernel."""
    x, w, g, bias = operands(getattr(torch, dtype))
    w = w.to(getattr(torch, kwargs.get("kernel_dtype", "float32")))
    with devices.pretend(device), kernels.prefer("native"):
        plan = contractions.make_plan(
            contractions.Einsum("ab,bc->ac"),
            recipes.get(recipe),
            dtype,
            kwargs.get("kernel_dtype", "float32"),
            True,
        )
        y, residuals = plan.bound.forward(x, w, (), False, bias)
        dx, dw, *_ = plan.bound.backward(residuals, g, ())
    return y, dx, dw


def is_bfloat16(x):
    return torch.equal(x, x.bfloat16().float())


def test_on_a_gpu_the_kernel_gradient_is_not_rounded_in_between(scaled_mm):
    *_, rounded = passes("cpu")
    *_, found = passes("h200")
    written = [dtype for dtype, _ in scaled_mm]
    narrow, wide = torch.bfloat16, torch.float32
    assert written == [narrow] * 3 + [narrow, narrow, wide]
    assert found.dtype == rounded.dtype == wide
    assert is_bfloat16(rounded)
    assert not is_bfloat16(found)
    np.testing.assert_array_equal(found.bfloat16().float(), rounded)


@pytest.mark.parametrize("kernel_dtype", ["bfloat16", "float64"])
def test_the_gradient_of_another_kernel_is_rounded(scaled_mm, kernel_dtype):
    *_, found = passes("h200", kernel_dtype=kernel_dtype)
    assert found.dtype == getattr(torch, kernel_dtype)
    assert scaled_mm[-1][0] == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_scales_of_rows_write_what_they_wrote(scaled_mm, device):
    *_, found = passes(device, recipe="rowwise")
    assert scaled_mm[-1][0] == torch.bfloat16
    assert is_bfloat16(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_the_matmul_adds_the_bias_and_rounds_once(scaled_mm, dtype):
    bias = operands(getattr(torch, dtype))[3]
    found, dx, _ = passes("h200", dtype)
    assert torch.equal(scaled_mm[0][1], bias)
    assert all(added is None for _, added in scaled_mm[1:])
    twice, same, _ = passes("cpu", dtype)
    np.testing.assert_array_equal(dx.float(), same.float())
    # Half an ulp of what is added, at most: it was rounded first.
    assert not torch.equal(found, twice)
    unit = torch.finfo(found.dtype).eps
    np.testing.assert_allclose(found.float(), twice.float(), unit, 4 * unit)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "bfloat16"), ("h200", "float32")]
)
def test_elsewhere_it_is_added_after_the_matmul(scaled_mm, device, dtype):
    found, *_ = passes(device, dtype)
    assert all(bias is None for _, bias in scaled_mm)
    bias = operands(getattr(torch, dtype))[3]
    with devices.pretend(device), kernels.prefer("native"):
        plan = contractions.make_plan(
            contractions.Einsum("ab,bc->ac"),
            recipes.get("current"),
            dtype,
            "float32",
        )
        x, w, *_ = operands(getattr(torch, dtype))
        product, _ = plan.bound.forward(x, w, (), False)
    np.testing.assert_array_equal(found.float(), (product + bias).float())


@pytest.mark.parametrize(
    ("equation", "output_shape", "bias_axes", "is_taken"),
    [
        ("abc,cde->abde", (None, 2, 4), "de", True),
        ("abc,cde->abde", (None, 2, 4), "e", False),
        ("abc,cd->adb", (4, None), "d", False),
        ("abc,cd->adb", (5, None), "b", False),
        ("abc,cd->abd", (None, 4), "bd", False),
    ],
)
def test_a_bias_is_of_the_columns_or_is_added_after(
    scaled_mm, equation, output_shape, bias_axes, is_taken
):
    if "b" in bias_axes or equation.endswith("b"):
        output_shape = tuple(5 if n is None else n for n in output_shape)
    layer = kpe.layers.EinsumDense(
        equation,
        output_shape,
        bias_axes=bias_axes,
        bias_initializer="normal",
        dtype="float8/current_from_mixed_bfloat16",
    )
    x = torch.tensor(np.random.default_rng(0).normal(size=(3, 5, 8))).float()
    layer.build(x.shape)
    with kernels.prefer("native"):
        expected = layer(x)
        with devices.pretend("h200"):
            found = layer(x)
    assert (scaled_mm[1][1] is not None) == is_taken
    expected, found = expected.detach().float(), found.detach().float()
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-8)
    if not is_taken:
        np.testing.assert_array_equal(found, expected)


def test_zeros_are_added_to_the_columns_that_pad_the_result(monkeypatch):
    real, sizes = torch._scaled_mm, []

    def called(a, b, *args, bias, **kwargs):
        sizes.append((tuple(bias.shape), b.shape[1]))
        return real(a, b, *args, bias=bias, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", called)
    with fake_cuda() as empty:
        one = empty(1, 1, 1, dtype="float32")
        a, b = whole(empty(1, 17, 16), one), whole(empty(1, 33, 16), one)
        bias = empty(33, dtype="bfloat16")
        with devices.pretend("h200"):
            y = ScaledMM().with_bias(bias).multiply(a, b, "bfloat16", True)
        assert tuple(y.shape) == (1, 17, 33)
    assert sizes == [((48,), 48)]


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: kpe.layers.Dense(4, **kwargs),
        lambda **kwargs: kpe.layers.EinsumDense(
            "abc,cde->abde", (5, 2, 4), bias_axes="be", **kwargs
        ),
    ],
    ids=["Dense", "EinsumDense"],
)
@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16"])
def test_the_gradient_of_a_bias_is_that_of_an_addition(make, source):
    layer = make(dtype=f"float8/current_from_{source}")
    x = torch.tensor(np.random.default_rng(0).normal(size=(3, 5, 8))).float()
    y = layer(x)
    g = torch.randn(y.shape).to(y.dtype)
    y.backward(g)
    bias = layer.bias.value.detach().clone().requires_grad_()
    (torch.zeros_like(y) + bias.to(y.dtype)).backward(g)
    np.testing.assert_array_equal(layer.bias.value.grad, bias.grad)


def test_the_gradient_of_a_bias_can_be_differentiated():
    layer = kpe.layers.Dense(4, dtype="float8/current_from_float32")
    y = layer(torch.ones(3, 8))
    g = torch.ones_like(y, requires_grad=True)
    bias = layer.bias.value
    (gradient,) = torch.autograd.grad(y, bias, g, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), g)
    np.testing.assert_array_equal(second, np.ones((3, 4)))


def test_for_a_bias_that_is_trained_alone_nothing_is_kept(scaled_mm):
    layer = kpe.layers.Dense(4, dtype="float8/current_from_mixed_bfloat16")
    layer.build((None, 8))
    layer.kernel.value.requires_grad_(False)
    x, kept = torch.ones(3, 8), []
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x)
    with devices.pretend("h200"), kernels.prefer("native"):
        with hooks:
            y = layer(x)
        y.backward(torch.ones_like(y))
        with torch.no_grad():
            layer(x)
    assert not kept
    np.testing.assert_array_equal(layer.bias.value.grad, np.full(4, 3.0))
    # A matmul has no gradient of what it adds.
    (_, trained), (_, constant) = scaled_mm
    assert trained is None
    assert constant is not None


def test_a_frozen_bias_has_no_gradient():
    layer = kpe.layers.Dense(4, dtype="float8/current_from_float32")
    layer.build((None, 8))
    layer.bias.value.requires_grad_(False)
    layer(torch.ones(3, 8)).sum().backward()
    assert layer.bias.value.grad is None
    assert layer.kernel.value.grad is not None
