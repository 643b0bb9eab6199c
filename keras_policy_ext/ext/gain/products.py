"""The names of products, such as `"h100"`, and the devices that they are."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator

from keras_policy_ext.backends.devices import KNOWN, Device

PRODUCTS = {
    "h200": "H100 H200 H800 H20 GH200",
    "b200": "B100 B200 GB200",
    "b300": "B300 GB300",
    "rtx50": "RTX5090 RTX5080 RTX5070 RTX5060 RTX5050",
    "ada": "L4 L40 L40S L20 RTX4090 RTX4080 RTX4070 RTX4060 RTX6000Ada",
    "rtx30": "RTX3090 RTX3080 RTX3070 RTX3060 A10 A10G A40 A6000 A5000 A4000",
    "a100": "A100 A800 A30",
    "t4": "T4 RTX2080 RTX2070 RTX2060",
    "v100": "V100",
    "mi350": "MI350 MI350X MI355X",
    "mi300": "MI300 MI300X MI300A MI325X",
    "mi200": "MI200 MI210 MI250 MI250X",
    "rdna4": "RX9070 RX9060",
    "rdna3": "RX7900 RX7800 RX7700 RX7600",
    "tpu7x": "TPU7x v7x Ironwood",
    "v6e": "v6e v6lite Trillium",
    "v5e": "v5e v5p v5lite v4 v3 v2",
    "mps": "mps Apple M1 M2 M3 M4 M5",
}
"""Products with the abilities of a device of `devices.KNOWN`, by its name
there."""

_TITLES = {"nvidia": "an NVIDIA", "amd": "an AMD", "google": "a TPU"}

_MAKER = r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|google|cloud|apple"
_VARIANT = (
    r"ti|super|laptop|gpu|pro|max|ultra|xtx?|gre|sxm\d?|pcie|nvl|\d+gb|hbm.*"
)


def device_named(name: str) -> Device:
    """Return the `Device` of a product or device name, such as `"h100"`.

    Args:
        name: A name in `devices.KNOWN` or of a product, such as `"RTX 4090"`.
            Case, blanks, hyphens, maker and variant are ignored.

    Raises:
        ValueError: If no device has this name.
    """
    if name in KNOWN:
        return KNOWN[name]
    known = _by_product()
    for plain in _plain_names(name):
        if plain in known:
            return known[plain]
    raise ValueError(
        f"{name!r} is not a known device.{_meant(name, known)} Received: "
        f"{name!r}. Allowed: {', '.join(KNOWN)}, and names of "
        "products, such as h100, rtx4090 or mi300x. Take the one that is most "
        "like it."
    )


def _by_product() -> dict[str, Device]:
    """Return all devices by product name, in lower case without blanks."""
    found = {_plain(name): device for name, device in KNOWN.items()}
    for name, products in PRODUCTS.items():
        device = KNOWN[name]
        for product in products.split():
            title = f"{_TITLES.get(device.maker)} {_spaced(product)}"
            if device.maker == "apple" or product.upper() == "TPU7X":
                title = device.title
            found[product.lower()] = dataclasses.replace(device, title=title)
    return found


def _spaced(product: str) -> str:
    """Put blanks into a product name: `RTX4090` to `RTX 4090`."""
    return re.sub(r"^(RTX|RX)(\d+)", r"\1 \2 ", product).strip()


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _plain_names(name: str) -> Iterator[str]:
    """Yield spellings of a device name to look up, the exact one first."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    others = [w for w in words if not re.fullmatch(f"{_MAKER}|{_VARIANT}", w)]
    product = "".join(others)
    shorter = re.sub(f"(?<=\\d)({_VARIANT})+$", "", product)
    for each in dict.fromkeys((_plain(name), product, shorter)):
        yield from (each, each.removeprefix("tpu"), each.removeprefix("rtx"))
        yield f"rtx{each}"


def _meant(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean …?"` with similar names, or `""` without any."""
    alike = difflib.get_close_matches(_plain(name), known, cutoff=0.7)
    return f" Did you mean {' or '.join(alike)}?" if alike else ""
