"""Writes the table of one backend into docs/memory.md.

KERAS_BACKEND=jax python tests/memory_page.py
"""

import contextlib
import io
import os
import pathlib
import re
from unittest import mock

import keras

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "memory.md"
BACKEND = keras.backend.backend()
BLOCK = re.compile(rf"(<!-- {BACKEND}, .*? -->\n```\n)(.*?)(```\n)", re.DOTALL)


def page():
    """The page, with what its first example prints on this backend."""
    text = PAGE.read_text("utf-8")
    example, *rest = re.findall("```python\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    keras.utils.clear_session()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.dict(os.environ, COLUMNS="80"),
    ):
        names = {}
        exec(example, names)
    with contextlib.redirect_stdout(io.StringIO()):
        for each in rest:
            exec(each, names)
    return BLOCK.sub(lambda m: m[1] + printed.getvalue() + m[3], text)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
