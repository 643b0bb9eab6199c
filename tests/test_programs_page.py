"""The programs of docs/programs.md run, each on the backends it names."""

import pathlib
import re
import typing

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.numerics.observations import SLOTS, UNSEEN, VALID_MARK

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "programs.md"
BACKENDS = {"jax", "tensorflow", "torch"}
PATTERN = re.compile(
    r"^(?:<!-- (?P<backend>\w+) -->\n)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(typing.NamedTuple):
    backend: str | None
    code: str
    line: int


def sections():
    """The blocks of each section, the first of them that of the page."""
    text = PAGE.read_text(encoding="utf-8")
    first, *others = re.split(r"^## ", text, flags=re.MULTILINE)
    common = blocks_in(first)
    return {
        section.partition("\n")[0]: common + blocks_in(section)
        for section in others
    }


def blocks_in(text):
    return [
        Block(m["backend"], m["code"], line_of(m["code"]))
        for m in PATTERN.finditer(text)
    ]


def line_of(code):
    """How many lines of the page are before this."""
    return PAGE.read_text(encoding="utf-8").partition(code)[0].count("\n")


SECTIONS = sections()


@pytest.mark.full
@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.slow_except("A VAE")
def test_the_program_of_a_section_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    backend = keras.backend.backend()
    names = {"__name__": "programs_page"}
    blocks = [b for b in SECTIONS[title] if b.backend in (None, backend)]
    if len(blocks) == 1:
        pytest.skip(f"no block of this section is for {backend}")
    for block in blocks:
        lines = "\n" * block.line  # so that errors name those of the page
        exec(compile(lines + block.code, str(PAGE), "exec"), names)
    for model in names.values():
        if isinstance(model, keras.Model):
            assert_states_are_whole(model)


def assert_states_are_whole(model):
    """No optimizer has moved a state, nor has an average."""
    for variable in filter(kpe.loops.is_state, model.variables):
        state = keras.ops.convert_to_numpy(variable.value)
        assert np.all((state[:, 0] >= UNSEEN) & (state[:, 0] <= VALID_MARK))
        assert not state[:, 1 : SLOTS + 1].any()


def test_every_block_of_the_page_is_among_those_that_run():
    text = PAGE.read_text(encoding="utf-8")
    found = PATTERN.findall(text)
    assert len(found) == text.count("```python") > 12
    assert {backend for backend, _ in found} <= BACKENDS | {""}
    for backend in BACKENDS:
        assert any(each == backend for each, _ in found)
