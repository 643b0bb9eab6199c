"""What CONTRIBUTING.md says of recipes, layers and kernels works."""

import dataclasses
import pathlib
import re

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import backends, kernels
from steps import numpy

PAGE = pathlib.Path(__file__).parent.parent / "CONTRIBUTING.md"


def section(title):
    """The lines under a heading of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names_of(title):
    """What the example of a section defines."""
    (code,) = re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)
    names = {"__name__": "contributing_page"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("what", ["recipe", "layer", "framework's kernel"])
def test_to_add_something_takes_forty_lines_to_read(what):
    assert 10 < len(section(f"Add a {what}").strip().splitlines()) <= 40


@pytest.mark.full
def test_add_a_recipe(registry, tmp_path):
    recipe = names_of("Add a recipe")["PerRow"]()
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", recipe="per_row")
    assert policy.recipe == recipe
    assert kpe.get(policy.full_name) == policy
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    model = keras.Sequential(
        [keras.Input((8,)), kpe.layers.Dense(4, dtype=policy)]
    )
    model.compile("sgd", "mse")
    before = model.evaluate(x, x[:, :4], verbose=0)
    model.fit(x, x[:, :4], epochs=5, verbose=0)
    assert model.evaluate(x, x[:, :4], verbose=0) < before
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].dtype_policy == policy
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(model(x)))


def test_add_a_layer():
    layer_class = names_of("Add a layer")["Pairwise"]
    layer = layer_class(4, dtype="float8_from_float32")
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype("float32")
    y = numpy(layer(x))
    assert layer.quantization_mode == "float8"
    assert [m.kernel for m in layer.float8_state.matrices] == [layer.kernel]
    exact = (x @ numpy(layer.kernel)) ** 2
    assert 0 < np.abs(y - exact).max() < 0.2 * exact.max()


def test_add_a_kernel_of_a_framework(monkeypatch):
    products = []

    class Counted(names_of("Add a framework's kernel")["SmallMatmul"]):
        def multiply(self, a, b, dtype, fast):
            products.append(dtype)
            return super().multiply(a, b, dtype, fast)

    layer = kpe.layers.Dense(4, dtype="float8/current_from_float32")
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
    x[0, 0] = 9.0
    layer.build(x.shape)
    with kernels.prefer("emulated"):
        expected = numpy(layer(x))
    engine = backends.engine
    larger = dataclasses.replace(engine, matmuls=(Counted(), *engine.matmuls))
    monkeypatch.setattr(backends, "engine", larger)
    assert kernels.select("ab,bc->ac").reason == "small sums"
    assert "no batch" in kernels.select("gab,gbc->gac").reason
    # Another number of rows: what was compiled for three has no such kernel.
    np.testing.assert_allclose(numpy(layer(x[:2])), expected[:2], rtol=1e-5)
    assert products == ["float32"]
