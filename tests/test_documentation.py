"""The examples in the documentation say what happens, on each backend."""

import contextlib
import doctest
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
import page_programs
from keras_policy_ext import recipes

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = ["autocasting.md", "mixed_precision.md"]


@contextlib.contextmanager
def float64():
    """What the pages tell users of JAX to switch on."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def examples(page):
    """The text of a page where all but its examples is blank.

    So the lines in a report are those of the page.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    inside, lines = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```pycon"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


OF_API = ("extending", "seams")
PROGRAMS = [
    "index.md",
    "train.md",
    "serve.md",
    "four_bits.md",
    "see_and_act.md",
    *(f"api/{name}.md" for name in OF_API),
]


@pytest.mark.full
@pytest.mark.parametrize("page", PROGRAMS)
@pytest.mark.slow_except("index.md")
def test_the_program_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page_programs.run(DOCS / page, keras.backend.backend())


@pytest.mark.full
@pytest.mark.slow_except()
def test_what_finds_and_skips_a_nan_runs_as_the_page_says(capsys):
    """The blocks of its sections, on data with an infinite number."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    _, _, section = text.partition("### The loss is NaN\n")
    section, _, _ = section.partition("### The loss is worse")
    find, check, watch, without, stop, skip = (
        code for _, code, _ in page_programs.blocks(section)
    )
    layers = [keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    kpe.convert(model, "current")
    model.compile("sgd", "mse")
    x, y = np.ones((64, 4), "float32"), np.zeros((64, 1), "float32")
    x[19, 2] = np.inf
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    names = {"keras": keras, "kpe": kpe, "np": np, "model": model}
    names |= {"batches": batches, "x": x, "y": y}
    exec(find, names)
    assert names["bx"] is batches[2][0]
    assert all(np.isfinite(w).all() for w in model.get_weights())
    for code in (check, without):
        capsys.readouterr()
        exec(code, names)
        assert capsys.readouterr().out.endswith("False\n")
    model.set_weights(names["good"])
    exec(watch, names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        layer.path for layer in layers
    ]
    assert lines[0].endswith("False")
    with pytest.raises(FloatingPointError, match="10 skipped"):
        names["x"] = np.tile(x * np.nan, (8, 1))
        names["y"] = np.tile(y, (8, 1))
        exec(stop, names)
    kpe.convert(model, "current")
    exec(skip, names)
    model.fit(x, y, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_give_what_it_states(page):
    test = doctest.DocTestParser().get_doctest(
        examples(page), {"__name__": "examples"}, page, str(DOCS / page), 0
    )
    assert len(test.examples) > 10
    report = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    with float64():
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_a_page_is_among_those_that_run(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert len(re.findall("^>>>", text, re.MULTILINE)) == len(
        re.findall("^>>>", examples(page), re.MULTILINE)
    )


def run(code, folder):
    """Run code in a process of its own, in a folder."""
    path = os.pathsep.join(filter(None, [str(folder), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_first_lines_of_the_readme_run_and_choose_the_backend(tmp_path):
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    first, *_ = re.findall("```python\n(.*?)```", text, re.S)
    chosen = 'os.environ.setdefault("KERAS_BACKEND", "jax")'
    assert first.index(chosen) < first.index("import keras\n")
    run(first, tmp_path)


@pytest.mark.any_backend
def test_a_newcomer_meets_one_first_program():
    pages = DOCS.parent / "README.md", DOCS / "index.md", DOCS / "train.md"
    readme, *others = (
        next(page_programs.blocks(page.read_text(encoding="utf-8")))[1]
        for page in pages
    )
    assert others == [readme, readme]
    train = pages[2].read_text(encoding="utf-8")
    own, _, _ = train.partition("\n## Name float8 in the layers")
    lines = pages[0].read_text(encoding="utf-8") + own
    assert len(lines.splitlines()) <= 250


@pytest.mark.full
@pytest.mark.slow_except()
def test_the_recipe_of_one_s_own_trains_and_loads_in_another_process(tmp_path):
    text = (DOCS / "api" / "recipes.md").read_text(encoding="utf-8")
    _, section = text.split("## A recipe of your own\n")
    module, trains, loads = re.findall("```python\n(.*?)```", section, re.S)
    assert len(module.splitlines()) < 30
    (tmp_path / "forward_only.py").write_text(module, encoding="utf-8")

    run(trains, tmp_path)
    assert np.load(tmp_path / "outputs.npy").any()
    run(loads, tmp_path)

    without = loads.replace("import forward_only\n", "")
    with pytest.raises(AssertionError, match="'ForwardOnly' is not a recipe"):
        run(without, tmp_path)


@pytest.mark.any_backend
def test_every_recipe_has_a_section_with_its_call_and_is_in_the_overview():
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    overview, *sections = re.split("^## ", page, flags=re.MULTILINE)
    by_title = {each.partition("\n")[0]: each for each in sections}
    # A test may have defined recipes of its own.
    for name in ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"):
        recipe = recipes.get(name)
        section = by_title[f"`{name}`"]
        (call,) = re.findall(r"(kpe\.recipes\.\w+\(\n.*?\n\))", section, re.S)
        shown = eval(call, {"kpe": kpe})
        assert shown == recipe
        for field in recipe.get_config():
            assert f"    {field}=" in call, (name, field)
        assert f"[`{name}`](#{name})" in overview
