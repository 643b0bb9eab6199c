"""What the pages name exists, and their figures are those of the results."""

import importlib
import json
import pathlib
import re

import pytest

import keras_policy_ext as kpe
from keras_policy_ext import recipes
from keras_policy_ext.ext.gain import estimate
from keras_policy_ext.ext.gain.products import device_named

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_the_package_in_a_page_exists(page):
    text = page.read_text("utf-8")
    for name in sorted(set(re.findall(r"\bkpe\.(\w[\w.]*\w)", text))):
        if (DOCS / name).suffix in (".ipynb", ".md"):
            continue
        found = kpe
        for part in name.split("."):
            if not hasattr(found, part) and hasattr(found, "__path__"):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


@pytest.mark.parametrize("name", ["choose.md", "coming_from.md"])
def test_every_recipe_in_a_page_can_be_made(name):
    text = (DOCS / name).read_text("utf-8")
    words = "delayed|current|rowwise|block|mxfp8|nvfp4"
    specs = re.findall(rf'"((?:{words})(?:\([^"]*\))?)"', text)
    assert len(specs) > 5
    for spec in specs:
        recipes.get(spec)


def test_the_sizes_of_the_example_are_those_of_the_card():
    text = (DOCS / "choose.md").read_text("utf-8")
    card = device_named("rtx4090")
    jax, torch = (
        estimate.break_even(backend, card).size for backend in ("jax", "torch")
    )
    assert f"with JAX from {jax}³ on" in text
    assert f"from {torch}³ on" in text


def losses():
    """Mean losses of `docs/internals/training.md` by framework and recipe."""
    found = {}
    text = (DOCS / "internals" / "training.md").read_text("utf-8")
    for section in text.split("\n## ")[1:]:
        framework = section.partition("\n")[0]
        table = section.partition("\n###")[0]
        rows = re.findall(r"^\| `(.+?)` \|.* (\S+) \| \S+ \|$", table, re.M)
        found[framework] = dict(rows)
    return found


def test_the_losses_of_the_page_choose_are_those_of_how_recipes_train():
    text = (DOCS / "choose.md").read_text("utf-8")
    _, _, table = text.partition("| recipe | loss against bfloat16")
    rows = re.findall(
        r"^\| `(.+?)` \| (\S+) % \| (\S+) % \| (\S+) % \|", table, re.M
    )
    assert len(rows) == 8
    expected = losses()
    for recipe, *values in rows:
        for framework, value in zip(
            ("PyTorch", "JAX", "TensorFlow"), values, strict=True
        ):
            assert value == expected[framework][recipe], (recipe, framework)


def peak(framework, variant, turns):
    """MiB of a step of twelve GELU blocks, measured."""
    folder = ROOT / "integration" / "benchmarks" / "results"
    path = folder / f"memory_{framework}_cpu.json"
    case = f"memory of a step: 12 blocks 256-1024-256{turns}, gelu, 2048 rows"
    (found,) = (
        row["peak_mib"]
        for row in json.loads(path.read_text("utf-8"))["rows"]
        if (row["case"], row["variant"]) == (case, variant)
    )
    return round(found)


def test_the_memory_in_the_readme_is_what_was_measured():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for framework, turns in (("jax", ""), ("torch", " called in turn")):
        plain = peak(framework, "bfloat16", turns)
        float8 = peak(framework, "float8 current", turns)
        assert f"{float8} MiB instead of {plain} MiB" in text


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
