"""The page of how recipes train is that of the JSON, and it is resumable."""

import json

import keras
import numpy as np
import pytest
import train as recipe_training
import training_page

import keras_policy_ext as kpe
from keras_policy_ext import contractions, recipes
from keras_policy_ext.ext import demo
from keras_policy_ext.ext.sampling import machine

SMALL = demo.Settings(
    steps=3,
    context=16,
    width=16,
    heads=2,
    hidden=32,
    blocks=1,
    windows=2,
    validations=1,
    held_out=4,
)


@pytest.mark.any_backend
def test_the_page_is_that_of_the_committed_results():
    found = training_page.PAGE.read_text("utf-8")
    assert found == training_page.page(), (
        "run python integration/recipes/training_page.py"
    )


@pytest.mark.any_backend
def test_every_recipe_is_expected_on_every_backend():
    # Other tests may have defined recipes of their own.
    of_tests = [
        name
        for name, recipe in recipes.REGISTRY.items()
        if not recipe.__module__.startswith("keras_policy_ext.")
    ]
    ours = set(recipes.names()) - {*of_tests}
    trained = {*recipe_training.PLAIN, *recipe_training.RECIPES}
    named = {recipes.parse(each).name for each in recipe_training.RECIPES}
    assert ours == named
    assert set(recipe_training.RECIPES) <= {*training_page.EXPECTED} <= trained
    for spec in recipe_training.RECIPES:
        # The default would be that of the device.
        recipe = recipes.parse(spec)
        assert getattr(recipe, "power_of_two", False) is not None


def write(folder, runs):
    content = {"environment": {"backend": "torch"}, "runs": runs}
    (folder / "torch.json").write_text(json.dumps(content))


def run(recipe, seed, loss, steps=training_page.STEPS):
    return {
        "recipe": recipe,
        "seed": seed,
        "steps": steps,
        "validation_loss": loss,
    }


@pytest.mark.any_backend
def test_a_gap_is_to_the_baseline_of_the_same_seed(tmp_path):
    write(
        tmp_path,
        [
            run("mixed_bfloat16", 0, 1.0),
            run("mixed_bfloat16", 1, 2.0),
            run("delayed", 0, 1.01),
            run("delayed", 1, 2.06),
            run("delayed", 2, 1.0),  # Its baseline was not run.
            run("current", 0, 1.0, steps=5),
        ],
    )
    text = training_page.page(tmp_path)

    assert "| `delayed` | +1.00 | +3.00 | – | +2.00 | 2.00 |" in text
    assert "`current` |" not in text
    (missing,) = (x for x in text.split("\n\n") if x.startswith("Not run, or"))
    assert "`delayed`" in missing and "`current`" in missing
    assert text.count("\nNot run.\n") == 2


@pytest.mark.any_backend
def test_a_variant_is_below_chance_if_it_is_below_every_run_of_delayed(
    tmp_path,
):
    runs = [run("mixed_bfloat16", seed, 1.0) for seed in (0, 1, 2)]
    runs += [run("delayed", seed, 1.05) for seed in (0, 1, 2)]
    runs += [run("delayed; nudged 1", seed, 1.03) for seed in (0, 1)]
    runs += [run("delayed(margin=1)", s, x) for s, x in enumerate((1.02, 1.04))]
    runs.append(run("delayed(margin=2)", 2, 1.0))  # Nothing nudged there.
    write(tmp_path, runs)
    text = training_page.page(tmp_path)

    assert "| `delayed(margin=1)` | +2.00 | +4.00 | – | 1 of 2 |" in text
    assert "| `delayed(margin=2)` | – | – | +0.00 | – |" in text
    assert "| `delayed; nudged 1` | +3.00 | +3.00 | – | 0 of 2 |" in text


@pytest.mark.any_backend
def test_variants_of_four_bits_are_compared_with_four_bits(tmp_path):
    runs = [run("mixed_bfloat16", 0, 1.0), run("delayed", 0, 1.01)]
    runs += [run("nvfp4", 0, 1.05), run("nvfp4; unrounded: kernel", 0, 1.02)]
    write(tmp_path, runs)
    text = training_page.page(tmp_path)

    assert training_page.CHANCE not in text
    _, _, table = text.partition(training_page.OF_FOUR_BITS)
    assert "| `nvfp4` | +5.00 |" in table
    assert "| `nvfp4; unrounded: kernel` | +2.00 |" in table


@pytest.mark.full
@pytest.mark.any_backend
def test_a_run_is_appended_when_it_is_over_and_never_repeated(
    tmp_path, monkeypatch
):
    trained = []

    def trains(recipe, settings):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append((recipe, settings.seed))
        small = SMALL._replace(steps=settings.steps, seed=settings.seed)
        return once(recipe, small)

    once = recipe_training.trained
    monkeypatch.setattr(recipe_training, "trained", trains)
    monkeypatch.setattr(recipe_training, "PLAIN", ("mixed_bfloat16",))
    arguments = ["block", "--seeds", "0", "1", "--steps", "3"]
    arguments += ["--results", str(tmp_path)]

    with pytest.raises(KeyboardInterrupt):
        recipe_training.main(arguments)
    file = tmp_path / f"{machine.backend()}.json"
    first = json.loads(file.read_text())["runs"]
    del trained[:]
    recipe_training.main(arguments)

    runs = json.loads(file.read_text())["runs"]
    assert [(x["recipe"], x["seed"]) for x in first] == [
        ("mixed_bfloat16", 0),
        ("mixed_bfloat16", 1),
    ]
    assert trained == [("block", 0), ("block", 1)]
    assert runs[:2] == first and len(runs) == 4
    assert runs[2]["kernels"] and runs[2]["steps"] == 3


def test_nudged_weights_differ_by_one_part_in_ten_thousand():
    weights = {"w": np.ones((50, 50), "float32")}
    (found,) = recipe_training.nudged(weights, 0, 1).values()
    assert 0.9e-4 < np.abs(found - 1).max() < 1.1e-4


@pytest.mark.parametrize("operand", recipes.OPERANDS)
def test_an_operand_that_is_not_rounded_changes_the_matmuls_that_read_it(
    operand,
):
    random = np.random.default_rng(0)
    x, w, g = (random.normal(size=(8, 8)).astype("float32") for _ in range(3))
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"),
        recipes.CurrentScaling(),
        "float32",
        "float32",
    )

    def products():
        x_, w_, g_ = map(keras.ops.convert_to_tensor, (x, w, g))
        outputs, residuals = plan.bound.forward(x_, w_, (), False)
        gradients = plan.bound.backward(residuals, g_, ())[:2]
        return list(map(keras.ops.convert_to_numpy, (outputs, *gradients)))

    before = products()
    with recipe_training.rounding_all_but(operand):
        between = products()
    exact = [x @ w, g @ w.T, x.T @ g]
    for matmul, rounded, found, best in zip(
        recipes.MATMULS, before, between, exact, strict=True
    ):
        closer = np.linalg.norm(found - best) < np.linalg.norm(rounded - best)
        changed = np.any(rounded != found)
        assert closer == changed == (operand in recipes.MATMULS[matmul])
    for one, other in zip(products(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_was_traced_before_is_not_taken_for_unrounded():
    layer = kpe.layers.Dense(8, dtype=kpe.Float8DTypePolicy(recipe="current"))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")

    def outputs():
        return keras.ops.convert_to_numpy(layer(x)).astype("float32")

    before = outputs()
    with recipe_training.rounding_all_but("kernel"):
        between = outputs()
    assert np.any(before != between)
    np.testing.assert_array_equal(outputs(), before)


def test_an_operand_that_is_rounded_at_random_is_not_left_unrounded():
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"),
        recipes.NVFP4Scaling(),
        "float32",
        "float32",
    )
    with (
        recipe_training.rounding_all_but("outputs_grad"),
        pytest.raises(ValueError, match="rounded at random"),
    ):
        plan.bound.outputs_grad.first.quantize(None, None, None, None)
