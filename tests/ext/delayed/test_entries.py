"""The schema of what files have of states of kernels."""

import pathlib
import re

from keras_policy_ext.ext.delayed.entries import STATE
from keras_policy_ext.files import entries

ROOT = pathlib.Path(__file__).parents[3]


def test_the_page_on_design_has_the_keys_of_the_schema():
    page = (ROOT / "docs/internals/design.md").read_text("utf-8")
    section = page.partition("### In a file")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    keys = STATE.forms.keys() - {entries.RECIPE}
    keys = {key.format(i="i", operand="<operand>") for key in keys}
    assert told == keys | {entries.HEADER}


def test_an_error_says_which_entries_are_allowed():
    group = entries.Group(STATE, "model/dense", {})
    damaged = str(group.damaged("it lacks '0.steps'"))
    assert "Allowed: for each kernel i and each of inputs, kernel" in damaged
    assert damaged.endswith(STATE.advice)
