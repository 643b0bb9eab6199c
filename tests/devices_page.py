"""Writes the table of devices in `docs/devices.md`.

python tests/devices_page.py
"""

import pathlib

from keras_policy_ext.backends.devices import KNOWN
from keras_policy_ext.ext.gain.products import PRODUCTS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "devices.md"
START = "<!-- Written by tests/devices_page.py: do not edit. -->\n"
END = "<!-- As far as here. -->\n"


def table():
    """A row for each device that is known."""
    rows = [
        [
            "name",
            "device",
            "multiplies",
            "with scales of",
            "else in",
            "products",
        ],
        ["---"] * 6,
    ]
    for name, device in KNOWN.items():
        read = {"ocp": "OCP", "fnuz": "fnuz", None: "–"}[device.float8]
        scales = ", ".join(device.scales) or "–"
        title = device.title.partition(" ")[2]
        products = ", ".join(PRODUCTS.get(name, "–").split())
        known = [f"`{name}`", title, read, scales, device.multiplies_in]
        rows.append([*known, products])
    sources = dict.fromkeys(each.source for each in KNOWN.values())
    return (
        "".join(f"| {' | '.join(row)} |\n" for row in rows)
        + f"\nSources: {'; '.join(sources)}.\n"
    )


def page():
    """The page with this table in it."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(START)
    return before + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
