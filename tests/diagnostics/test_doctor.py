"""What `doctor` says of contractions and recipes."""

import io

import keras
import pytest
from rich.console import Console

from keras_policy_ext import kernels, recipes
from keras_policy_ext.diagnostics import doctor
from keras_policy_ext.kernels import Choice, devices


@pytest.fixture(autouse=True)
def _no_recipes_of_other_tests(monkeypatch):
    ours = {
        name: recipe
        for name, recipe in recipes.REGISTRY.items()
        if recipe.__module__.startswith("keras_policy_ext.")
    }
    monkeypatch.setattr(recipes.spec, "REGISTRY", ours)


def users(cell):
    """The recipes and matmuls of a cell."""
    if cell == "all":
        cell = ", ".join(recipes.names())
    for user in cell.split(", "):
        recipe, _, matmuls = user.partition(": ")
        for matmul in matmuls.split(" and ") if matmuls else recipes.MATMULS:
            yield recipe, matmul


def answers():
    """Kind and reason by contraction, recipe and matmul."""
    found = {}
    for contractions, cell, *choice in doctor.rows():
        for contraction in contractions.split(", "):
            for user in users(cell):
                assert (contraction, *user) not in found
                found[contraction, *user] = tuple(choice)
    return found


@pytest.mark.parametrize("asked", ["auto", "native"])
def test_every_matmul_of_every_recipe_has_one_answer(asked):
    with kernels.prefer(asked):
        found = answers()
        for name, contraction in doctor.CONTRACTIONS.items():
            for recipe in recipes.names():
                selected = kernels.select(contraction, recipe, "bfloat16")
                assert found[name, recipe, "forward"] == tuple(selected)
    count = len(doctor.CONTRACTIONS) * len(recipes.names())
    assert len(found) == count * len(recipes.MATMULS)


def test_equal_answers_share_a_row_and_others_name_their_matmuls(monkeypatch):
    def choose(plan, matmul):
        wide = plan.recipe.name == "delayed" and matmul != "forward"
        return None, Choice("native", "wide" if wide else "fast")

    monkeypatch.setattr(kernels.Plan, "choose", choose)
    contractions = ", ".join(doctor.CONTRACTIONS)
    _, *others = recipes.names()

    assert doctor.rows() == [
        (
            contractions,
            ", ".join(["delayed: forward", *others]),
            "native",
            "fast",
        ),
        (
            contractions,
            "delayed: inputs_grad and kernel_grad",
            "native",
            "wide",
        ),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_contractions_fits_on_a_screen(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(doctor.contraction_table())
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 40
    for recipe in recipes.names():
        assert any(recipe in line or " all " in line for line in lines)


@pytest.mark.parametrize("asked", ["emulated", "native"])
def test_every_frozen_kernel_has_one_answer(asked):
    with kernels.prefer(asked):
        rows = doctor.frozen_rows()
        seen = [
            (per, inputs)
            for granularities, inputs, *_ in rows
            for per in granularities.split(", ")
        ]
    assert len(seen) == len(set(seen)) == 9
    kinds = {kind for _, inputs, kind, _ in rows if inputs == "not quantized"}
    assert kinds == {"emulated"}
    # TensorFlow has a float8 matmul where XLA compiles, which it does not here.
    can = asked == "native" and keras.backend.backend() != "tensorflow"
    assert ("native" in {kind for *_, kind, _ in rows}) == can


def printed_for(device):
    console = Console(file=io.StringIO(), width=200)
    doctor.run(console, device)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "name",
    ["h200", "b200", "mi300", "mi350", "tpu7x", "a100", "mps", "cpu"],
)
def test_a_device_that_is_elsewhere_is_asked_about(name):
    printed = printed_for(name)
    assert "A device that is elsewhere" in printed
    assert devices.KNOWN[name].title in printed
    assert "This machine" not in printed
    if name == "h200":
        assert "native" in printed
    if name in ("a100", "mps", "cpu"):
        assert "native" not in printed
    assert devices.pretended() is None


def test_without_a_name_it_is_about_this_machine():
    printed = printed_for(None)
    assert "This machine" in printed
    assert kernels.engine().device().title in printed
    assert "Float8 gains" in printed


def test_asking_about_another_device_leaves_no_trace():
    before = doctor.rows(), doctor.frozen_rows()
    printed_for("h200")
    assert (doctor.rows(), doctor.frozen_rows()) == before
