"""The examples in the documentation say what happens, on each backend."""

import contextlib
import doctest
import pathlib
import re

import keras
import pytest

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
