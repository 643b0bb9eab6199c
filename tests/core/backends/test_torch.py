"""What torch's kernels do by themselves.

The layouts that CUDA demands of the float8 matmul are checked without a GPU.
"""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.backend import standardize_dtype

from keras_policy_ext import backends, kernels, recipes
from keras_policy_ext.ext.delayed.observations import VALID_MARK

if keras.backend.backend() != "torch":
    pytest.skip(
        f"torch's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import torch

from fake_gpus import fake_cuda
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.torch.scaled_mm import ScaledMM, _padded
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import DelayedScaling
from products import forward_product, shapes_of, three_products, whole


@pytest.fixture
def cuda():
    with fake_cuda() as empty:
        yield empty


SIZES = [(32, 48, 64), (5, 7, 3), (1, 1, 1), (17, 16, 33), (16, 1, 128)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("gradient", ["float8_e4m3fn", "float8_e5m2"])
def test_the_three_matmuls_obey_the_layout_rules_of_cuda(cuda, sizes, gradient):
    three_matmuls(
        "ab,bc->ac", dict(zip("abc", sizes, strict=True)), gradient, cuda
    )


def test_formats_named_fnuz_obey_them(cuda):
    empty = functools.partial(cuda, dtype="float8_e4m3fnuz")
    sizes = {"a": 17, "b": 16, "c": 33}
    three_matmuls("ab,bc->ac", sizes, "float8_e5m2fnuz", empty)


@pytest.mark.parametrize(
    "equation", ["abc,cde->abde", "abcd,cde->abe", "ab,cb->ac", "ab,bc->ca"]
)
def test_every_einsum_that_is_a_matmul_obeys_them(cuda, equation):
    sizes = {"a": 2, "b": 3, "c": 5, "d": 7, "e": 4}
    three_matmuls(equation, sizes, "float8_e5m2", cuda)


@settings(max_examples=25)
@given(sizes=st.tuples(*[st.integers(1, 70)] * 3))
def test_any_sizes_obey_them(sizes):
    sizes = dict(zip("abc", sizes, strict=True))
    with fake_cuda() as empty:
        three_matmuls("ab,bc->ac", sizes, "float8_e5m2", empty)


def three_matmuls(equation, sizes, gradient, empty):
    """Run forward and both gradients on fake float8 tensors."""
    x, w, y = shapes_of(equation, sizes)
    one = empty(1, 1, 1, dtype="float32")
    outputs, dx, dw = three_products(
        equation,
        ScaledMM(),
        whole(empty(*x), one),
        whole(empty(*w), one),
        whole(empty(*y, dtype=gradient), one, gradient),
        ("bfloat16", "bfloat16", "float32"),
    )
    assert [tuple(t.shape) for t in (outputs, dx, dw)] == [y, x, w]
    dtypes = [standardize_dtype(t.dtype) for t in (outputs, dx, dw)]
    assert dtypes == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda e: e(48, 32).t(), lambda e: e(64, 48).t(), "row_major"),
        (lambda e: e(32, 48), lambda e: e(48, 64), "col_major"),
        (lambda e: e(5, 7), lambda e: e(3, 7).t(), "divisible by 16"),
    ],
    ids=["first not row-major", "second not column-major", "sizes"],
)
def test_fake_cuda_refuses_a_wrong_layout(cuda, first, second, message):
    """Or else the tests above would show nothing."""
    one = cuda(dtype="float32")
    a, b = first(cuda), second(cuda)
    with pytest.raises(RuntimeError, match=message):
        torch._scaled_mm(a, b, one, one)


def test_padding_appends_zeros_and_keeps_the_numbers():
    x = torch.arange(1, 16.0).reshape(3, 5).to(torch.float8_e4m3fn)
    padded = _padded(x)
    assert padded.shape == (16, 16)
    assert torch.equal(padded[:3, :5].float(), x.float())
    assert padded.float().abs().sum() == x.float().abs().sum()
    aligned = torch.zeros(16, 32, dtype=torch.float8_e5m2)
    assert _padded(aligned) is aligned


@pytest.mark.gpu
def test_a_matmul_is_native_on_a_gpu_with_float8_units():
    hopper_or_ada = torch.cuda.get_device_capability() >= (8, 9)
    assert kernels.select("ab,bc->ac").native == hopper_or_ada


# bfloat16 on a CPU

EMULATED = backends.engine.matmuls[-1]


def operands(*shapes):
    """Float8 numbers as the CPU holds them, each with a scale."""
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        values = torch.randn(shape, generator=generator) * 50
        values = values.to(torch.float8_e4m3fn).float()
        scale = torch.rand((1, 1, 1), generator=generator) / 300
        yield whole(values, scale)


EQUATIONS = [
    ("ab,bc->ac", (33, 129), (129, 17)),
    ("ba,bc->ca", (129, 33), (129, 17)),
    ("abc,cde->abde", (3, 5, 64), (64, 2, 7)),
    ("btnh,bsnh->bnts", (2, 9, 4, 16), (2, 11, 4, 16)),
    ("bnts,bsnh->btnh", (2, 4, 9, 11), (2, 11, 4, 16)),
    ("abc,bd->acd", (3, 5, 4), (5, 6)),
]


@pytest.mark.parametrize("device", ["cpu_bf16", "cpu"])
@pytest.mark.parametrize(("equation", "first", "second"), EQUATIONS)
def test_a_bfloat16_result_is_rounded_once(equation, first, second, device):
    a, b = operands(first, second)
    with devices.pretend(device):
        y = forward_product(equation, EMULATED, a, b, "bfloat16")
    assert y.dtype == torch.bfloat16
    exact = torch.einsum(equation, a.values.double(), b.values.double())
    exact = exact * (a.scale * b.scale).double().reshape(())
    # Half an ulp of a number with 8 bits, and what float32 sums differ by.
    error = (y.double() - exact).abs()
    allowed = exact.abs() * 2.0**-8 + exact.abs().max() * 2.0**-20
    assert torch.all(error <= allowed)
    ideal = exact.float().bfloat16()
    assert (y != ideal).double().mean() < 0.01


def test_scales_that_are_not_finite_reach_a_bfloat16_result():
    a, b = operands((4, 8), (8, 3))
    spoiled = whole(a.values, torch.full((1, 1, 1), float("nan")))
    with devices.pretend("cpu_bf16"):
        y = forward_product("ab,bc->ac", EMULATED, spoiled, b, "bfloat16")
    assert torch.isnan(y).all()


def test_other_results_are_not_computed_in_bfloat16():
    a, b = operands((33, 129), (129, 17))
    scale = (a.scale * b.scale).reshape(())
    exact = a.values.double() @ b.values.double() * scale
    for dtype in ("float32", "float16"):
        with devices.pretend("cpu_bf16"):
            y = forward_product("ab,bc->ac", EMULATED, a, b, dtype).double()
        unit = {"float32": 2.0**-20, "float16": 2.0**-11}[dtype]
        allowed = exact.abs() * unit + exact.abs().max() * 2.0**-20
        assert torch.all((y - exact).abs() <= allowed)


# One choice less


def test_scales_are_chosen_only_while_an_operand_was_not_seen():
    source = source_of(DelayedScaling())
    state = torch.zeros(source.state_shape)
    state[:, 0] = VALID_MARK

    def unseen():
        known = source.simplified(source.history_scales(state))
        return None if known.unseen is None else known.unseen.tolist()

    assert unseen() == [True] * 3
    state[:2, 10] = 3.0
    assert unseen() == [False, False, True]
    state[2, 10] = 3.0
    assert unseen() is None
    known = source.history_scales(state)
    assert source.simplified(known).scales is known.scales


def test_scales_that_are_parts_of_a_tensor_are_aligned(monkeypatch):
    """CuBLASLt refuses a scale at an address that 16 does not divide."""
    addresses = []

    def multiplied(a, b, scale_a, scale_b, **options):
        addresses.extend((scale_a.data_ptr(), scale_b.data_ptr()))
        return right(a, b, scale_a, scale_b, **options)

    right = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    scales = torch.tensor([2.0, 0.5, 4.0])
    values = torch.ones(1, 16, 16).to(torch.float8_e4m3fn)
    whole = recipes.Quantization(format="float8_e4m3fn")
    a, b = (Quantized(values, s.reshape(1, 1, 1), whole) for s in scales[1:])
    product = ScaledMM().multiply(a, b, "float32", True)
    assert [address % 16 for address in addresses] == [0, 0]
    np.testing.assert_array_equal(product, np.full((1, 16, 16), 32.0))
