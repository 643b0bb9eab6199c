"""The Python of a page as one program, from its first line to its last.

A comment before a block may name the backend that it is for, or say that it is
`not run` and why.
"""

import re
import textwrap

BACKENDS = ("jax", "tensorflow", "torch")
BLOCK = re.compile(
    r"^(?: {4})?(?:<!-- (?P<mark>[^>]+) -->\n(?: {4})?)?```python\n"
    r"(?P<code>.*?)^(?: {4})?```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text):
    """The mark, the code and the number of lines before it, of each block."""
    for found in BLOCK.finditer(text):
        mark, code = found["mark"], found["code"]
        if mark not in (None, *BACKENDS) and not mark.startswith("not run: "):
            raise ValueError(f"This comment is not understood: {mark!r}")
        before = text[: found.start("code")].count("\n")
        yield mark, textwrap.dedent(code), before


def program(text, backend):
    """The Python for a backend, at the lines of the page."""
    lines = [""] * text.count("\n")
    for mark, code, before in blocks(text):
        if mark in (None, backend):
            lines[before : before + code.count("\n")] = code.splitlines()
    return "\n".join(lines)


def run(path, backend):
    """Run the program of a page; errors name the lines of the page."""
    code = program(path.read_text("utf-8"), backend)
    exec(compile(code, str(path), "exec"), {"__name__": "page"})
