"""Delete the extensions from the package that is installed here.

What is left is the core: what a step, `convert`, `freeze` and a file need.
"""

import importlib.util
import pathlib
import shutil

MODULES = (
    "ext",
    "activations.py",
    "callbacks.py",
    "export",
    "loops.py",
    "migration.py",
    "mixed_precision",
    "optimizers.py",
)
"""The extensions, and the public modules that have their names."""


def main():
    """Delete them, each of which has to be there."""
    package = importlib.util.find_spec("keras_policy_ext")
    (folder,) = package.submodule_search_locations
    for name in MODULES:
        path = pathlib.Path(folder) / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        print(f"deleted {path}")


if __name__ == "__main__":
    main()
