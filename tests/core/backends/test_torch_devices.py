"""Which devices have float8 matmuls on PyTorch, by what they say they are."""

import dataclasses
import types

import keras
import pytest

from keras_policy_ext import backends, contractions, formats, kernels, recipes
from keras_policy_ext.numerics import casting

if keras.backend.backend() != "torch":
    pytest.skip(
        f"PyTorch's devices; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_gpus import fake
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.torch import backend as torch_devices
from keras_policy_ext.backends.torch import casts
from keras_policy_ext.backends.torch import casts as torch_casts
from keras_policy_ext.backends.torch.backend import is_real

FORWARD = contractions.Einsum("ab,bc->ac")


NVIDIA = {"T4": (7, 5), "A100": (8, 0), "RTX 30": (8, 6)}
NATIVE = {"L4": (8, 9), "H200": (9, 0), "B200": (10, 0), "RTX 50": (12, 0)}
AMD = {  # What it says of itself, and whether it multiplies these formats.
    "MI200": ((9, 0), "gfx90a:sramecc+:xnack-", "has no float8 matmul"),
    "MI300": ((9, 4), "gfx942:sramecc+:xnack-", "named fnuz"),
    "RDNA 3": ((11, 0), "gfx1100", "has no float8 matmul"),
    "MI350": ((9, 5), "gfx950:sramecc+:xnack-", None),
    "RDNA 4": ((12, 0), "gfx1201", None),
}


@pytest.mark.parametrize("name", NVIDIA)
def test_cards_of_nvidia_without_float8_units_emulate(monkeypatch, name):
    fake(monkeypatch, NVIDIA[name])
    choice = kernels.select(FORWARD)
    assert choice.kind == "emulated"
    assert str(NVIDIA[name]) in choice.reason


@pytest.mark.parametrize("name", NATIVE)
def test_cards_of_nvidia_with_float8_units_are_native(monkeypatch, name):
    fake(monkeypatch, NATIVE[name])
    assert kernels.select(FORWARD).kind == "native"


@pytest.mark.parametrize("name", ["H200", "MI300"])
def test_a_plan_is_bound_to_a_gpu_once(monkeypatch, name):
    """Another object for the same GPU would bind it anew, at each use."""
    fake(monkeypatch, *(AMD[name][:2] if name in AMD else [NATIVE[name]]))
    plan = contractions.make_plan(
        FORWARD, recipes.CurrentScaling(), "bfloat16", "float32"
    )
    assert plan.bound is plan.bound


@pytest.mark.parametrize("name", AMD)
def test_cards_of_amd_go_by_their_architecture(monkeypatch, name):
    capability, architecture, lacking = AMD[name]
    fake(monkeypatch, capability, architecture)
    choice = kernels.select(FORWARD)
    assert choice.native == (lacking is None)
    assert lacking is None or lacking in choice.reason


FACTS = {  # Capability, architecture: what is known of such a device.
    "t4": ((7, 5), None),
    "a100": ((8, 0), None),
    "h200": ((9, 0), None),
    "mi200": ((9, 0), "gfx90a:sramecc+:xnack-"),
    "mi300": ((9, 4), "gfx942:sramecc+:xnack-"),
    "rdna4": ((12, 0), "gfx1201"),
    "mps": (None, None),
    "cpu": (None, None),
    "cpu_bf16": (None, None),
}


@pytest.mark.parametrize("name", FACTS)
def test_the_device_is_the_known_one_of_what_it_says_of_itself(
    monkeypatch, name
):
    fake(monkeypatch, *FACTS[name], mps=name == "mps")
    monkeypatch.setattr(
        torch_devices,
        "_has_bfloat16_instructions",
        lambda: name == "cpu_bf16",
    )
    found = backends.engine.device()
    title = {"title": devices.KNOWN[name].title}
    assert dataclasses.replace(found, **title) == devices.KNOWN[name]


def test_formats_named_fnuz_are_native_on_an_mi300_alone(monkeypatch):
    recipe = "current(fp8_format='hybrid_fnuz')"
    for name, (capability, architecture, _) in AMD.items():
        fake(monkeypatch, capability, architecture)
        assert kernels.select(FORWARD, recipe).native == (name == "MI300")
    fake(monkeypatch)
    with kernels.prefer("native"):
        choice = kernels.select(FORWARD, recipe)
    assert choice.kind == "emulated"
    assert "fnuz" in choice.reason


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        (lambda x, y: x.float() @ y.float(), True),
        (lambda x, y: (x @ y).float(), False),
        (NotImplementedError("no such matmul"), False),
    ],
    ids=["float32", "16 bits", "none"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_in_float32_are_tried_before_they_are_used(
    monkeypatch, dtype, sums, expected
):
    def product(x, y, out_dtype):
        if isinstance(sums, Exception):
            raise sums
        return sums(x, y)

    ones = torch.ones
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(
        torch, "ones", lambda shape, device, dtype: ones(shape, dtype=dtype)
    )
    torch_devices._sums_in_float32.cache_clear()
    try:
        assert torch_devices.sums_in_float32(dtype) == expected
    finally:
        torch_devices._sums_in_float32.cache_clear()


@pytest.mark.parametrize("kind", ["auto", "native"])
def test_apple_s_gpus_emulate_even_if_native_is_asked_for(monkeypatch, kind):
    fake(monkeypatch, mps=True)
    with kernels.prefer(kind):
        choice = kernels.select(FORWARD)
    assert choice.kind == "emulated"
    if kind == "native":
        assert "Apple" in choice.reason


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rounding_asks_for_no_float8_where_there_is_none(monkeypatch, dtype):
    assert not torch_devices.casts_to_float8(torch.device("mps"))
    for name in ("cpu", "cuda"):
        assert torch_devices.casts_to_float8(torch.device(name))
    x = torch.tensor(np.random.default_rng(0).normal(size=500)).float() * 300
    scale = torch.tensor(0.37)
    by_cast = torch_casts.cast(x, scale, dtype)
    assert str(by_cast.dtype) == f"torch.{dtype}"
    assert not torch_casts._is_castable(dtype, torch.device("mps"))
    monkeypatch.setattr(torch_casts, "_is_castable", lambda *_: False)
    by_integers = torch_casts.cast(x, scale, dtype)
    assert by_integers.dtype == torch.float32
    expected = casting.quantize(x, scale, dtype).float()
    np.testing.assert_array_equal(by_integers, expected)
    np.testing.assert_array_equal(by_cast.float(), expected)


def test_what_is_kept_on_apple_s_gpus_is_no_float8():
    class OnDevice:
        def __init__(self, name):
            self.device = torch.device(name)

    def kept(name):
        name_of_format = formats.names()[0]
        return backends.current.kept_dtype(OnDevice(name), name_of_format)

    assert kept("mps") == "uint8"
    for name in ("cpu", "cuda"):
        assert kept(name) == formats.names()[0]


def test_triton_is_tried_with_numbers_where_others_have_none(monkeypatch):
    """What it says stays, also where a graph is made at the first call."""
    casts.lacking.cache_clear()
    monkeypatch.setattr(casts, "HAS_TRITON", True)
    monkeypatch.setattr(
        casts, "_gives_our_codes", lambda: is_real(torch.zeros(1))
    )
    try:
        with FakeTensorMode():
            assert casts.lacking() is None
    finally:
        casts.lacking.cache_clear()


def test_why_triton_does_not_cast_is_told(monkeypatch):
    def fails():
        raise RuntimeError("no compiler on this machine")

    casts.lacking.cache_clear()
    monkeypatch.setattr(casts, "HAS_TRITON", True)
    monkeypatch.setattr(casts, "_gives_our_codes", fails)
    try:
        assert "no compiler on this machine" in casts.lacking()
    finally:
        casts.lacking.cache_clear()


def test_triton_leaves_formats_named_fnuz_to_pytorch():
    triton = casts.TritonCasts(interpreted=True)
    x = torch.ones(2, 2)
    for name in formats.FAMILIES["ocp"]:
        assert triton.supports(x, "float32", name) is None
    for name in formats.FAMILIES["fnuz"]:
        assert name in triton.supports(x, "float32", name)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (120, 51), (1200, 501)])
def test_tensors_of_any_size_are_cast_and_widened(dtype, source, across, shape):
    """At once, by way of float16, or by parts: no multiple of one."""
    random = np.random.default_rng(0).normal(size=shape) * 30
    x = torch.tensor(random).to(source)
    x = x.t() if across else x
    scale = torch.tensor(0.37)
    narrow = torch_casts.narrow_cast(x, scale, dtype)
    expected = casting.quantize(x, scale, dtype)
    for compute_dtype in ("float32", "bfloat16"):
        with devices.pretend("cpu_bf16"):
            wide = torch_casts.widen(narrow, compute_dtype)
        assert wide.dtype == getattr(torch, compute_dtype)
        np.testing.assert_array_equal(wide.float(), expected.float())


def test_each_gpu_of_amd_is_described_by_its_own_properties(monkeypatch):
    fake(monkeypatch, capability=(9, 4), architecture="gfx942")
    names = ["gfx942:sramecc+", "gfx950:sramecc+"]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: types.SimpleNamespace(gcnArchName=names[index]),
    )
    found = [torch_devices.gpu_of(index) for index in range(2)]
    torch_devices.gpu_of.cache_clear()
    assert [each.title for each in found] == [
        devices.of_amd(name, title=name.partition(":")[0]).title
        for name in names
    ]
