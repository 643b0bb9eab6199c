"""Devices, found by the names of products."""

import dataclasses

import pytest

import devices_page
from keras_policy_ext.backends.devices import KNOWN
from keras_policy_ext.ext.gain.products import device_named

pytestmark = pytest.mark.any_backend

PRODUCTS = {
    "h200": ["h100", "H100", "H-100", "NVIDIA H100 80GB HBM3", "h200"],
    "b200": ["b200", "GB200", "gb-200"],
    "rtx50": ["rtx5090", "RTX 5090", "rtx-5090", "GeForce RTX 5090", "5090"],
    "ada": ["l4", "L40S", "l40", "rtx4090", "RTX 4070 Ti SUPER", "ada"],
    "rtx30": ["rtx3090", "a10", "A10G", "RTX A6000"],
    "a100": ["a100", "A100-SXM4-80GB"],
    "t4": ["t4", "Tesla T4"],
    "v100": ["V100"],
    "mi300": ["mi300x", "MI325X", "AMD Instinct MI300X"],
    "mi350": ["mi355x", "mi350"],
    "v5e": ["v5e", "v5p", "TPU v5p", "tpu-v4"],
    "v6e": ["v6e", "TPU v6e"],
    "tpu7x": ["tpu7x", "TPU7x", "ironwood"],
    "mps": ["m3", "MPS", "Apple M3 Max"],
    "cpu": ["cpu", "CPU"],
}


@pytest.mark.parametrize("known", PRODUCTS)
def test_products_are_known_by_the_names_people_use(known):
    expected = KNOWN[known]
    for name in PRODUCTS[known]:
        found = device_named(name)
        assert dataclasses.replace(found, title=expected.title) == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rtx4909", "rtx4090"), ("h10", "h100"), ("mi300y", "mi300x")],
)
def test_a_misspelled_device_is_answered_with_a_question(name, meant):
    with pytest.raises(ValueError, match=f"Did you mean .*{meant}"):
        device_named(name)


def test_a_device_that_is_not_known_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'h300'. Allowed: h200, b200"):
        device_named("h300")


def test_the_page_has_the_table_of_the_devices():
    found = devices_page.PAGE.read_text("utf-8")
    assert found == devices_page.page(), "run python tests/devices_page.py"
