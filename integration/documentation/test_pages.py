"""The programs of pages that need KerasHub run."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_program_of_the_page_on_fine_tuning_runs(backend, tmp_path):
    page = ROOT / "docs" / "finetune.md"
    call = f"page_programs.run(pathlib.Path({str(page)!r}), {backend!r})"
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", f"import pathlib, page_programs; {call}"],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
