"""`fit` that was killed from outside goes on from what its callbacks wrote."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

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

EPOCHS = 6
BATCH = 4  # of 12 examples, so that there are three steps in an epoch


def fit(model, callbacks=(), initial_epoch=0):
    """The losses of the epochs that are left."""
    x, y = batch_for(model, size=12)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        initial_epoch=initial_epoch,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return history.history["loss"]


def backup(folder):
    return keras.callbacks.BackupAndRestore(folder / "backup")


class Telling(keras.callbacks.Callback):
    """Says which step begins, and waits a little for what may come."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        print(f"step {self.epoch} {batch}", flush=True)
        time.sleep(0.1)


def be_killed(folder):
    path = str(folder / "{epoch}.keras")
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    fit(model_in_float8(), [checkpoint, backup(folder), Telling()])


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Where a run left its files, and the epoch it was killed in."""
    folder = tmp_path_factory.mktemp("killed")
    rng = random.Random(os.getpid())
    epoch, step = rng.randrange(1, EPOCHS - 1), rng.randrange(3)
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # the modules of tests/
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    with process:
        for line in process.stdout:
            if line.strip() == f"step {epoch} {step}":
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    return folder, epoch


@pytest.fixture(scope="module")
def reference():
    """A model that was never killed, and its losses."""
    model = model_in_float8()
    return model, fit(model)


def last_whole(folder):
    """The last checkpoint that loads, and how many epochs it has seen."""
    for epoch in reversed(range(1, EPOCHS + 1)):
        if (folder / f"{epoch}.keras").exists():
            try:
                return kpe.load_model(folder / f"{epoch}.keras"), epoch
            except ValueError as error:
                assert "damaged or truncated" in str(error)
    raise AssertionError("no checkpoint")


def assert_same_run(model, losses, reference):
    expected_model, expected = reference
    # Of torch only closeness is asked: its sums depend on how many threads
    # there are, and the killed process may have had others.
    rtol = 1e-6 if keras.backend.backend() == "torch" else 0
    expected = expected[-len(losses) :]
    np.testing.assert_allclose(losses, expected, rtol=rtol, atol=0)
    pairs = [
        *zip(float_weights(expected_model), float_weights(model), strict=True),
        *zip(states_of(expected_model), states_of(model), strict=True),
        *zip(
            expected_model.optimizer.variables,
            model.optimizer.variables,
            strict=True,
        ),
    ]
    for one, other in pairs:
        one, other = numpy(one), numpy(other)
        atol = rtol * np.abs(one).max()
        np.testing.assert_allclose(other, one, rtol=rtol, atol=atol)


@pytest.mark.nightly
@pytest.mark.slow_except()
@pytest.mark.extension("delayed")
def test_fit_goes_on_from_its_last_checkpoint(killed, reference):
    folder, epoch = killed
    model, seen = last_whole(folder)
    assert seen == epoch, "one was written after each whole epoch"
    losses = fit(model, initial_epoch=seen)
    assert len(losses) == EPOCHS - seen
    assert_same_run(model, losses, reference)


@pytest.mark.nightly
@pytest.mark.extension("delayed")
def test_fit_goes_on_by_backup_and_restore(killed, reference):
    folder, epoch = killed
    model = model_in_float8()
    losses = fit(model, [backup(folder)])
    assert len(losses) == EPOCHS - epoch, "only what was left"
    assert_same_run(model, losses, reference)


if __name__ == "__main__":
    be_killed(pathlib.Path(sys.argv[1]))
