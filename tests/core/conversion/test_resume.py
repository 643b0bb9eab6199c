"""A training that was killed goes on from its last whole checkpoint."""

import os
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import (
    batch_for,
    float_weights,
    model_in_float8,
    states_of,
)
from steps import numpy

STEPS = 7
KILLED = 3  # exit status, of neither success nor an exception


def train(model, steps, after_each=lambda step: None):
    """The losses of some steps, each on a batch of its own."""
    losses = []
    for step in steps:
        model.reset_metrics()
        losses.append(float(model.train_on_batch(*batch_for(model, seed=step))))
        after_each(step)
    return losses


def be_killed(folder, at):
    """Train with a checkpoint after each step, and die while writing one."""
    model = model_in_float8()

    def save(step):
        path = folder / f"{step}.keras"
        model.save(path)
        if step == at:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            os._exit(KILLED)

    train(model, range(STEPS), save)


def last_whole(folder):
    """The last checkpoint that loads, and the step that made it."""
    for step in reversed(range(STEPS)):
        if (folder / f"{step}.keras").exists():
            try:
                return step, kpe.load_model(folder / f"{step}.keras")
            except ValueError as error:
                assert "damaged or truncated" in str(error)
    raise AssertionError("no checkpoint")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Where a run left its checkpoints, and the step it was killed at."""
    folder = tmp_path_factory.mktemp("checkpoints")
    at = random.Random(os.getpid()).randrange(2, STEPS - 1)
    process = subprocess.run(
        [sys.executable, __file__, str(folder), str(at)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # the modules of tests/
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    assert process.returncode == KILLED, process.stderr
    return folder, at


@pytest.mark.full
def test_a_killed_run_resumes_with_the_losses_of_one_never_killed(killed):
    folder, at = killed
    reference = model_in_float8()
    losses = train(reference, range(STEPS))
    assert len(set(losses)) == STEPS
    step, model = last_whole(folder)
    assert step == at - 1, "the one being written is damaged"
    resumed = train(model, range(at, STEPS))
    # Of torch only closeness is asked: its sums depend on how many threads
    # there are, and the killed process may have had others.
    rtol = 1e-6 if keras.backend.backend() == "torch" else 0
    np.testing.assert_allclose(resumed, losses[at:], rtol=rtol, atol=0)
    pairs = [*zip(float_weights(reference), float_weights(model), strict=True)]
    pairs += zip(states_of(reference), states_of(model), strict=True)
    pairs += zip(
        reference.optimizer.variables, model.optimizer.variables, strict=True
    )
    for expected, found in pairs:
        expected, found = numpy(expected), numpy(found)
        atol = rtol * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


if __name__ == "__main__":
    be_killed(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
