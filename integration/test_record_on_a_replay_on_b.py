"""A bad step that was recorded on one backend is replayed on another."""

import json

import pytest

from processes import is_installed, run

RECORD = """
import sys
import keras, numpy as np
import keras_policy_ext as kpe

model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(5, activation="relu", name="up"),
        keras.layers.Dense(3, name="down"),
    ]
)
model.compile("adam", "mse")
kpe.convert(model, "delayed")
recorder = kpe.record(model, sys.argv[1], every=2)
rng = np.random.default_rng(0)
for n in range(6):
    x = rng.normal(size=(8, 6)).astype("float32")
    y = rng.normal(size=(8, 3)).astype("float32")
    if n == 5:
        y[0, 0] = np.inf
    logs = model.train_on_batch(x, y, return_dict=True)
    written = recorder.step((x, y), logs["loss"])
assert written
"""

REPLAY = """
import json, sys
import keras_policy_ext as kpe

report = kpe.replay(sys.argv[1], recipes=["current"])
print(report)
print(json.dumps(report.as_dict()))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    if not is_installed("torch"):
        pytest.skip("torch not installed")
    path = tmp_path_factory.mktemp("recorded") / "crash.zip"
    run("torch", RECORD, path)
    return path


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_the_origin_is_that_of_the_recording(path, backend):
    """The losses before it differ by the order of summation."""
    if not is_installed(backend):
        pytest.skip(f"{backend} not installed")
    *shown, line = run(backend, REPLAY, path).splitlines()
    found = json.loads(line)
    assert found["recorded_by"]["backend"] == "torch"
    assert found["replayed_by"]["backend"] == backend
    *before, bad = found["steps"]
    assert [step["step"] for step in found["steps"]] == [5, 6]
    assert bad["recorded"] == bad["loss"] == "inf"
    for step in before:
        assert step["loss"] == pytest.approx(step["recorded"], rel=1e-2)
    origin = found["origin"]
    assert origin["layer"].endswith("down")
    assert (origin["operand"], origin["step"]) == ("outputs_grad", 6)
    assert "Recorded with torch" in " ".join(shown)
