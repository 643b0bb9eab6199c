"""The notebooks run on the backends they name, and have their outputs."""

import notebooks
import pytest

NAMES = [path.name for path in notebooks.paths()]
RUNS = [
    (path.name, backend)
    for path in notebooks.paths()
    for backend in notebooks.backends(notebooks.read(path))
]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_a_notebook_runs(name, backend):
    notebooks.run(notebooks.read(notebooks.FOLDER / name), backend)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_keeps_its_outputs_and_no_errors(name):
    cells = notebooks.read(notebooks.FOLDER / name).cells
    outputs = [o for c in cells if c.cell_type == "code" for o in c.outputs]
    assert len(outputs) > 3
    assert not [o for o in outputs if o.output_type == "error"]


def test_there_are_notebooks_for_every_framework():
    named = {backend for _, backend in RUNS}
    assert named == {"jax", "tensorflow", "torch"}
