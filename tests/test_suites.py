"""The quick suite, the rest and what is nightly are the whole suite."""

import configparser
import itertools
import os
import pathlib
import re
import subprocess

import pytest
from _pytest.mark.expression import Expression

pytestmark = pytest.mark.any_backend
ROOT = pathlib.Path(__file__).parent.parent
BACKENDS = ("tensorflow", "jax", "torch")
MARKERS = ("any_backend", "full", "nightly", "slow")


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
def test_each_test_is_quick_or_in_the_rest_or_nightly(tox, backend):
    whole, paths = selection(tox, "testenv", backend)
    parts = [
        selection(tox, f"testenv:{name}-{{tensorflow, jax, torch}}", backend)
        for name in ("quick", "rest")
    ]
    assert [each for _, each in parts] == [paths, paths]
    for count in range(len(MARKERS) + 1):
        for marks in itertools.combinations(MARKERS, count):
            taken = [takes(expression, marks) for expression, _ in parts]
            is_daily = takes(whole, marks) and "nightly" not in marks
            assert sum(taken) == is_daily, marks


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


def test_the_turns_of_the_backends_are_the_rest_together(tox):
    labels = dict(
        line.split(" = ") for line in tox["tox"]["labels"].split("\n") if line
    )
    turns = {b: names(labels[f"rest-of-{b}"]) for b in BACKENDS}
    assert set().union(*turns.values()) == names(labels["rest"])
    for backend, turn in turns.items():
        assert {n for n in turn if n.startswith("rest-")} == {f"rest-{backend}"}
        assert {"docs", "cross"} <= turn


def turn(commit_count=None, **environment):
    """What `backend_in_turn` of `.ci/run` prints after so many commits."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    (function,) = re.findall(r"(?ms)^backend_in_turn\(\) {.+?^}", script)
    git = (
        "git() { case $1 in rev-parse) echo false ;; "
        f"rev-list) echo {commit_count} ;; esac; }}"
        if commit_count
        else "git() { return 127; }"
    )
    return subprocess.run(
        [
            "bash",
            "-c",
            f"set -euo pipefail\n{git}\n{function}\nbackend_in_turn",
        ],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **environment},
    )


needs_the_script = pytest.mark.skipif(
    not (ROOT / ".ci" / "run").exists(),
    reason="a source distribution has no .ci/run",
)


@needs_the_script
def test_three_commits_one_after_the_other_give_each_backend_its_turn():
    printed = [turn(count).stdout for count in (1114, 1115, 1116)]
    assert printed[1] == "torch (1115 commits, modulo 3: 2)\n"
    assert {each.split()[0] for each in printed} == set(BACKENDS)


@needs_the_script
def test_without_the_history_the_day_chooses_the_backend():
    printed = turn().stdout
    assert printed.split()[0] in BACKENDS
    assert "days of the year" in printed


@needs_the_script
def test_a_backend_that_is_asked_for_is_in_turn_and_another_is_refused():
    assert turn(1114, BACKEND_IN_TURN="jax").stdout == "jax (BACKEND_IN_TURN)\n"
    refused = turn(1114, BACKEND_IN_TURN="numpy")
    assert refused.returncode == 2
    assert "Allowed: tensorflow jax torch." in refused.stderr


def names(text):
    """Names of environments; `x-{a, b}` stands for x-a and x-b."""
    return {
        start + end.strip()
        for start, ends in re.findall(r"([\w-]+)(?:{(.+?)})?", text)
        for end in ends.split(",")
    }


@pytest.mark.full_except("named")
@pytest.mark.nightly_except("named", "another")
@pytest.mark.parametrize("case", ["named", "another", "third"])
def test_cases_that_are_not_named_are_marked(case, request):
    marks = {mark.name for mark in request.node.iter_markers()}
    assert ("full" in marks) == (case != "named")
    assert ("nightly" in marks) == (case == "third")
