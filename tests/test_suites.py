"""The quick suite and what it leaves out are the whole suite together."""

import configparser
import itertools
import pathlib
import re

import pytest
from _pytest.mark.expression import Expression

pytestmark = pytest.mark.any_backend
ROOT = pathlib.Path(__file__).parent.parent
BACKENDS = ("tensorflow", "jax", "torch")
MARKERS = ("any_backend", "full", "slow")


@pytest.fixture(scope="module")
def tox():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return parser


def selection(tox, section, backend):
    """The expression of marks and the paths that pytest gets there."""
    defaults = tox[section]["commands"].split("{posargs:")[1]
    expression, paths = re.match(r'-m "(.+)" (.+)}$', defaults).groups()
    lines = dict(
        line.split(": ") for line in tox["testenv"]["all"].split("\n") if line
    )
    all_of_it = lines.get(backend) or lines["!torch"]
    return expression.replace("{[testenv]all}", all_of_it), paths.split()


def takes(expression, marks):
    return Expression.compile(expression).evaluate(
        lambda name, **_: name in marks
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_test_is_either_quick_or_in_the_rest(tox, backend):
    whole, paths = selection(tox, "testenv", backend)
    parts = [
        selection(tox, f"testenv:{name}-{{tensorflow, jax, torch}}", backend)
        for name in ("quick", "rest")
    ]
    assert [each for _, each in parts] == [paths, paths]
    for count in range(len(MARKERS) + 1):
        for marks in itertools.combinations(MARKERS, count):
            taken = [takes(expression, marks) for expression, _ in parts]
            assert sum(taken) == takes(whole, marks), marks


def test_the_full_label_runs_what_the_default_and_the_rest_do(tox):
    labels = dict(
        line.split(" = ") for line in tox["tox"]["labels"].split("\n") if line
    )
    default = names(tox["tox"]["env_list"].strip().replace("\n", ","))
    rest = names(labels["rest"])
    assert not default & rest
    in_one_part = {
        re.sub("^(quick|rest)-", "py311-", name) for name in default | rest
    }
    assert names(labels["full"]) == in_one_part


def names(text):
    """Names of environments; `x-{a, b}` stands for x-a and x-b."""
    return {
        start + end.strip()
        for start, ends in re.findall(r"([\w-]+)(?:{(.+?)})?", text)
        for end in ends.split(",")
    }


@pytest.mark.full_except("named")
@pytest.mark.parametrize("case", ["named", "another"])
def test_only_cases_that_are_named_stay_quick(case, request):
    is_full = request.node.get_closest_marker("full") is not None
    assert is_full == (case != "named")
