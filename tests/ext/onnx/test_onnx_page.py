"""The program of docs/export.md that writes and runs an ONNX file runs."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "export.md"


@pytest.mark.any_backend
def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, rest = PAGE.read_text("utf-8").partition("## ONNX files\n")
    section, _, _ = rest.partition("\n## ")
    blocks = re.findall("```python\n(.*?)```", section, re.S)
    assert len(blocks) == 2
    exec("".join(blocks), {})
