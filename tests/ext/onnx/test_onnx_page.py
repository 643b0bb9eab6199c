"""The program of docs/onnx.md runs."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "onnx.md"


@pytest.mark.any_backend
def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall("```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert len(blocks) == 2
    exec("".join(blocks), {})
