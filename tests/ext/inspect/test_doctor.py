"""What `doctor` says of contractions and recipes."""

import json
import os
from unittest import mock

import keras
import pytest

from keras_policy_ext import backends, contractions, kernels, recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.matmuls import Choice
from keras_policy_ext.ext.gain import auto, estimate
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.ext.inspect import doctor
from keras_policy_ext.ext.sampling import machine


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
    for names, cell, *choice in doctor.rows():
        for contraction in names.split(", "):
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

    monkeypatch.setattr(contractions.Plan, "choose", choose)
    every = ", ".join(doctor.CONTRACTIONS)
    names = recipes.names()
    at = names.index("delayed")

    assert doctor.rows() == [
        (
            every,
            ", ".join([*names[:at], "delayed: forward", *names[at + 1 :]]),
            "native",
            "fast",
        ),
        (
            every,
            "delayed: inputs_grad and kernel_grad",
            "native",
            "wide",
        ),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_contractions_fits_on_a_screen(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(doctor.report())
    assert max(map(len, text.splitlines())) <= width
    _, _, text = text.partition("\nFloat8 contractions on ")
    lines = text.partition("\nFrozen kernels")[0].splitlines()
    assert len(lines) <= 40
    for recipe in recipes.names():
        assert any(recipe in line or " all " in line for line in lines)


def test_the_report_is_data_and_html_too():
    report = doctor.report("h100")
    data = json.loads(json.dumps(report.as_dict()))
    assert data["verdict"] == report.verdict == doctor_says("h100")
    assert data["machine"] == {} and data["device"]["device"]
    assert [tuple(row) for row in data["break_even"]] == [*report.break_even]
    page = report._repr_html_()
    assert page.count("<table>") == 4
    assert "<caption>Frozen kernels (Dense)</caption>" in page


def doctor_says(device):
    with devices.pretend(device_named(device)):
        return doctor.verdict()


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
    with mock.patch.dict(os.environ, COLUMNS="200"):
        return str(doctor.report(device))


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


@pytest.mark.parametrize("name", ["h100", "rtx5090", "mi355x", "a10", "m3"])
def test_doctor_begins_with_one_sentence_of_the_device(name):
    first, *_ = printed_for(name).splitlines()
    title = device_named(name).title
    assert first.startswith(f"{title[0].upper()}{title[1:]} with")
    with devices.pretend(device_named(name)):
        choice = auto.choice_for(contractions.Einsum("ab,bc->ac"))
    assert ("natively" in first) == choice.native
    assert ("emulated" in first) != choice.native


def test_doctor_tells_the_size_from_which_a_device_elsewhere_gains():
    h100 = device_named("h100")
    row = estimate.break_even(keras.backend.backend(), h100)
    printed = printed_for("h100")
    assert f"larger than about {row.size} by {row.size}" in printed
    assert "H100 (asked)" in printed


@pytest.mark.any_backend
def test_slow_bfloat16_is_told(monkeypatch):
    monkeypatch.setattr(machine, "slowdown", lambda: 11.2)
    assert "takes 11 times as long in bfloat16" in printed_for(None)
    assert "times as long" not in printed_for("h100")
    monkeypatch.setattr(machine, "slowdown", lambda: 1.5)
    assert "times as long" not in printed_for(None)


@pytest.mark.any_backend
def test_the_slowdown_is_that_of_a_matmul_in_bfloat16(monkeypatch):
    times = iter([9.0, 2.0, 2.5, 2.2, 9.0, 1.0, 0.5, 0.7])
    monkeypatch.setattr(machine, "timed", lambda matrix: next(times))
    assert machine.slowdown() == 2.0 / 0.5
    with devices.pretend("h200"):
        assert machine.slowdown() == 1.0


def test_without_a_name_it_is_about_this_machine():
    printed = printed_for(None)
    assert "This machine" in printed
    assert backends.engine.device().title in printed
    assert "Float8 gains" in printed


def test_asking_about_another_device_leaves_no_trace():
    before = doctor.rows(), doctor.frozen_rows()
    printed_for("h200")
    assert (doctor.rows(), doctor.frozen_rows()) == before
