"""Writes the speeds that `filter="auto"`, doctor and plan go by.

    python integration/benchmarks/break_even.py [--check]

They are those of JAX's steps of square Dense layers on GPUs, from the committed
results of `layer.py` and `jax_on_card.py`; of two measurements of the same, the
later one. `keras_policy_ext/ext/gain/estimate.py` reads them. `--check` writes
nothing, and fails where the table is another.
"""

import json
import pathlib
import re

from generated import write_or_check

from keras_policy_ext.ext.gain import estimate

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGE = pathlib.Path(__file__).parents[2] / "keras_policy_ext"
TABLE = PACKAGE / "ext" / "gain" / "measured.json"
OURS = ("float8 delayed", "float8 current", "float8 rowwise")


def table(folder=RESULTS):
    """All rows, in the order of devices, recipes and sizes."""
    found = {}
    for pattern, rows_of in (
        ("layer_jax_*.json", _of_layers),
        ("jax_on_card_*.json", _of_cards),
    ):
        for path in sorted(folder.glob(pattern)):
            result = json.loads(path.read_text("utf-8"))
            where = result["environment"]
            product = estimate.product_of(where["device"])
            if product is None:
                continue
            origin = f"{where['device']}, JAX, {where['date']}"
            for variant, size, speed in rows_of(result["rows"]):
                key = product, variant.split()[1], size
                known = found.get(key, {"date": ""})
                if where["date"] >= known["date"]:
                    found[key] = {
                        "speed": speed,
                        "origin": origin,
                        "date": where["date"],
                    }
    return [
        {
            "device": product,
            "recipe": recipe,
            "size": size,
            "speed": row["speed"],
            "origin": row["origin"],
        }
        for (product, recipe, size), row in sorted(found.items())
    ]


def _of_layers(rows):
    for row in rows:
        if row["variant"] in OURS and row["case"] == f"layer {row['size']}":
            yield row["variant"], row["size"], row["speedup_over_bfloat16"]


def _of_cards(rows):
    for row in rows:
        square = re.fullmatch(r"Dense (\d+)³", row["case"])
        if square and row["variant"] in OURS and "against_bfloat16" in row:
            yield row["variant"], int(square[1]), row["against_bfloat16"][0]


def main():
    text = json.dumps(table(), indent=1, ensure_ascii=False) + "\n"
    write_or_check(TABLE, text)


if __name__ == "__main__":
    main()
