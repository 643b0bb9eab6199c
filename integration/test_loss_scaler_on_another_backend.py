"""A scaled optimizer saved on one backend goes on training on another."""

import json

import pytest

from processes import BACKENDS, is_installed, run

COMMON = """
import json, pathlib, sys
import keras, numpy as np
import keras_policy_ext as kpe
from keras_policy_ext import mixed_precision

folder = pathlib.Path(sys.argv[1])
jit = keras.backend.backend() == "jax"
rng = np.random.default_rng(0)
x = rng.normal(size=(8, 3)).astype("float32")
y = x[:, :2]
bad = x * np.nan

def state(model):
    variables = [*model.weights, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v).tolist() for v in variables]

def report(model):
    scaler = model.optimizer
    print(json.dumps({
        "class": type(scaler).__name__,
        "scale": float(scaler.loss_scale),
        "skipped": int(scaler.skipped_steps),
        "state": state(model),
    }))
"""

SAVE = """
policy = kpe.LossScaleDTypePolicy(
    "mixed_float16", mixed_precision.DynamicLossScale(256.0)
)
inputs = keras.Input((3,))
model = keras.Model(inputs, keras.layers.Dense(2, dtype=policy)(inputs))
optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
mixed_precision.compile(model, optimizer, "mse", jit_compile=jit)
for batch in (x, bad, bad):
    model.fit(batch, y, verbose=0)
model.save(folder / "model.keras")
report(model)
"""

LOAD = """
for name in sys.argv[2:]:
    model = keras.saving.load_model(folder / name / "model.keras")
    report(model)
    model.fit(x, y, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0
    assert all(np.isfinite(w).all() for w in model.get_weights())
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder, and what each backend said of the model that it saved."""
    folder = tmp_path_factory.mktemp("saved")
    said = {}
    for backend in filter(is_installed, BACKENDS):
        (folder / backend).mkdir()
        printed = run(backend, COMMON + SAVE, folder / backend)
        said[backend] = json.loads(printed.splitlines()[-1])
    return folder, said


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scaler_of_each_backend_loads_on_another(saved, backend):
    folder, said = saved
    others = [name for name in said if name != backend]
    if backend not in said or not others:
        pytest.skip("needs this backend and another one")
    printed = run(backend, COMMON + LOAD, folder, *others)
    for name, line in zip(others, printed.splitlines(), strict=True):
        got = json.loads(line)
        assert got == said[name]
        assert (got["class"], got["scale"]) == ("LossScaleOptimizer", 64.0)
        assert got["skipped"] == 2
