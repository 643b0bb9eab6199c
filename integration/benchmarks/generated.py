"""Files of the repository that are written by a script."""

import sys


def write_or_check(path, text):
    """Write a file; with `--check` only fail where it is another.

    Args:
        path: A `pathlib.Path`.
        text: What is to be in it.
    """
    if sys.argv[1:] != ["--check"]:
        path.write_text(text, encoding="utf-8")
    elif path.read_text("utf-8") != text:
        sys.exit(f"{path.name} is not what {sys.argv[0]} would write.")
