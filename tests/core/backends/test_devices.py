"""What is known of devices, and what is chosen for each of them."""

import dataclasses
import types

import keras
import pytest

from keras_policy_ext import backends, contractions, formats, recipes
from keras_policy_ext.backends import devices

BACKEND = keras.backend.backend()

NATIVE = {  # The devices with native matmuls of e4m3fn, by backend.
    "jax": {"h200", "b200", "b300", "rtx50", "ada", "mi350", "rdna4", "tpu7x"},
    "torch": {"h200", "b200", "b300", "rtx50", "ada", "mi350", "rdna4"},
    "tensorflow": {"h200", "b200", "b300", "rtx50", "ada"},
}
ASKED = ["h200", "b200", "mi300", "mi350", "tpu7x", "a100", "mps", "cpu"]


def chosen(name, recipe="current"):
    """The choice for a matmul in what XLA compiles, where that matters."""
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"),
        recipes.get(recipe),
        "bfloat16",
        "float32",
    )
    with devices.pretend(name):
        return dataclasses.replace(plan, for_xla=True).choice


@pytest.mark.any_backend
def test_every_device_says_what_it_is_and_where_that_is_written():
    assert set(ASKED) <= set(devices.KNOWN)
    families = {name for each in formats.FAMILIES.values() for name in each}
    assert families <= set(formats.names())
    for device in devices.KNOWN.values():
        assert device.source
        assert device.title in device.summary or device.float8
        assert (device.float8 is None) == (device.scales == ())
        assert device.multiplies_in in ("float32", "bfloat16", "float16")
    assert not devices.KNOWN["mps"].holds_float8
    listed = {**devices.NVIDIA, **devices.AMD, **devices.TPUS}.values()
    assert set(listed) | {"mps", "cpu", "cpu_bf16"} == set(devices.KNOWN)


@pytest.mark.parametrize("name", devices.KNOWN)
def test_each_device_gets_its_kind_of_kernel(name):
    choice = chosen(name)
    assert choice.native == (name in NATIVE[BACKEND]), choice
    assert choice.reason


@pytest.mark.any_backend
def test_what_is_pretended_ends_with_its_block():
    before = backends.engine.device()
    with devices.pretend("tpu7x"):
        assert backends.engine.device() is devices.KNOWN["tpu7x"]
        with devices.pretend("t4"):
            assert backends.engine.device() is devices.KNOWN["t4"]
        assert backends.engine.device() is devices.KNOWN["tpu7x"]
    assert backends.engine.device() == before


@pytest.mark.any_backend
def test_what_is_not_known_is_emulated_in_float32_and_says_so():
    for device in (
        devices.unknown("a thing"),
        devices.of_amd("gfx1300", "a thing"),
        devices.of_google("TPU v99"),
    ):
        assert "is not known here" in device.lacking("float8_e4m3fn")
        assert device.multiplies_in == "float32"
        assert device.title in device.summary


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("capability", "float8", "scales", "narrow"),
    [
        ((6, 1), None, (), "float32"),
        ((7, 5), None, (), "float16"),
        ((8, 6), None, (), "bfloat16"),
        ((8, 9), "ocp", ("tensor", "rows"), "bfloat16"),
        ((9, 0), "ocp", ("tensor", "rows", "blocks"), "bfloat16"),
        ((10, 3), "ocp", ("tensor", "mx"), "bfloat16"),
        ((13, 0), "ocp", ("tensor",), "bfloat16"),
    ],
)
def test_cards_of_nvidia_go_by_their_capability(
    capability, float8, scales, narrow
):
    device = devices.of_nvidia(capability, "a card")
    assert (device.title, device.maker) == ("a card", "nvidia")
    assert (device.float8, device.scales) == (float8, scales)
    assert device.multiplies_in == narrow


@pytest.mark.any_backend
def test_a_format_of_the_other_family_is_told_what_would_be_native():
    fnuz, ocp = formats.FAMILIES["fnuz"], formats.FAMILIES["ocp"]
    mi300, mi350 = devices.KNOWN["mi300"], devices.KNOWN["mi350"]
    assert mi300.lacking(*fnuz) is None
    assert mi350.lacking(*ocp) is None
    assert "'hybrid_fnuz'" in mi300.lacking(*ocp)
    assert "'hybrid'" in mi350.lacking(*fnuz)
    assert mi300.lacking(fnuz[0], ocp[0]) is not None


@pytest.mark.skipif(BACKEND != "jax", reason="how JAX names its devices")
@pytest.mark.parametrize(
    ("platform", "kind", "capability", "known"),
    [
        ("tpu", "TPU v5 lite", None, "v5e"),
        ("tpu", "TPU v6 lite", None, "v6e"),
        ("tpu", "TPU7x", None, "tpu7x"),
        ("gpu", "AMD Instinct MI300X", "gfx942", "mi300"),
        ("gpu", "AMD Instinct MI355X", "gfx950:sramecc+", "mi350"),
        ("gpu", "AMD Instinct MI210", "gfx90a", "mi200"),
        ("gpu", "AMD Radeon RX 9070", "gfx1201", "rdna4"),
        ("gpu", "NVIDIA H100", "9.0", "h200"),
        ("gpu", "Tesla T4", "7.5", "t4"),
    ],
)
def test_devices_are_known_by_what_jax_says(
    monkeypatch, platform, kind, capability, known
):
    import jax

    from keras_policy_ext.backends.jax import engine as jax_devices

    device = types.SimpleNamespace(device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    # Looked up anew.
    monkeypatch.setattr(jax_devices, "found", jax_devices.found.__wrapped__)
    found = backends.engine.device()
    assert kind in found.title
    for field in ("maker", "float8", "scales", "multiplies_in"):
        expected = getattr(devices.KNOWN[known], field)
        assert getattr(found, field) == expected
