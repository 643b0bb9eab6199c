"""Runs the notebooks of docs/notebooks, on the backends that they name.

    python integration/documentation/notebooks.py [NAME ...]

runs them on the first backend that each names, and keeps the outputs in the
files. A notebook names its backends in its metadata; the tests run it on all
of them, and leave the file as it is.
"""

import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "notebooks"
SECONDS = 300


def paths():
    return sorted(FOLDER.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def backends(notebook):
    return notebook.metadata["backends"]


def run(notebook, backend):
    """Run all cells in a process and a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            resources={"metadata": {"path": folder}},
            kernel_name="python3",
        )
        client.execute(env={**os.environ, "KERAS_BACKEND": backend})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = plain(cell.outputs)


def plain(outputs):
    """Outputs without the logs of frameworks, what was printed in one piece."""
    kept = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.get("name") == kept[-1].get("name") == "stdout":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main(names):
    for path in paths():
        if not names or path.stem in names:
            notebook = read(path)
            run(notebook, backends(notebook)[0])
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
