"""Delete the extensions from the package that is installed here.

What is left is the core: what a step, `convert`, `freeze` and a file need. And
`reference`, which the core does not import, and its tests do.
"""

import importlib.util
import pathlib
import shutil

MODULES = (
    "activations.py",
    "callbacks.py",
    "export",
    "loops.py",
    "migration.py",
    "mixed_precision",
    "optimizers.py",
)
"""The public modules that have names of extensions, without `reference`."""

JUDGE = "reference"


def main():
    """Delete them, each of which has to be there."""
    package = importlib.util.find_spec("keras_policy_ext")
    (folder,) = map(pathlib.Path, package.submodule_search_locations)
    extensions = [x for x in (folder / "ext").iterdir() if x.name != JUDGE]
    for path in [*extensions, *(folder / name for name in MODULES)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        print(f"deleted {path}")


if __name__ == "__main__":
    main()
