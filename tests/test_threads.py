"""Threads and tasks that work at the same time do not disturb each other.

Models are made in the main thread, one after the other: Keras draws the seeds
of initializers from the one generator of Python's `random`.
"""

import asyncio
import concurrent.futures
import contextvars
import threading
import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import Scaled
from keras_policy_ext import kernels
from keras_policy_ext.layers.contraction_hooks import (
    call_hooks,
    contraction_hook,
)
from keras_policy_ext.layers.drop_in import form_of
from steps import numpy

BACKEND = keras.backend.backend()
JIT = BACKEND == "jax"
POLICY = "float8/4_from_float32"


def at_once(*functions):
    """Call functions, each in a thread of its own, and return the results."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [f.result() for f in [pool.submit(g) for g in functions]]


# Scopes


def test_each_thread_has_the_preference_of_its_own_blocks():
    all_are_in = threading.Barrier(3)

    def preferring(kind):
        with kernels.prefer(kind):
            all_are_in.wait(30)
            seen = kernels.preferred(), kernels.select("ab,bc->ac").reason
            all_are_in.wait(30)
        return seen, kernels.preferred()

    kinds = ("native", "emulated", "auto")
    alone = []
    for kind in kinds:
        with kernels.prefer(kind):
            alone.append(kernels.select("ab,bc->ac").reason)
    results = at_once(*[lambda kind=kind: preferring(kind) for kind in kinds])
    expected = zip(kinds, alone, strict=True)
    assert results == [(seen, "auto") for seen in expected]


def test_a_thread_sees_the_block_that_it_was_started_in_if_asked_to():
    with kernels.prefer("native"):
        context = contextvars.copy_context()
        seen = at_once(
            kernels.preferred, lambda: context.run(kernels.preferred)
        )
    assert seen == ["auto", "native"]


def test_each_task_has_the_preference_of_its_own_blocks():
    async def preferring(kind):
        seen = []
        for _ in range(3):
            with kernels.prefer(kind):
                await asyncio.sleep(0)
                seen.append(kernels.preferred())
            await asyncio.sleep(0)
            seen.append(kernels.preferred())
        return seen

    async def both():
        with kernels.prefer("emulated"):
            return await asyncio.gather(
                preferring("native"), preferring("auto")
            )

    native, auto = asyncio.run(both())
    assert native == ["native", "emulated"] * 3
    assert auto == ["auto", "emulated"] * 3


def test_a_hook_sees_the_contractions_of_its_thread():
    all_hooked = threading.Barrier(2)

    def hooked(name):
        seen = []
        with contraction_hook(lambda state, inputs: seen.append(state)):
            all_hooked.wait(30)
            call_hooks(name, None)
            all_hooked.wait(30)
        call_hooks(f"{name}, later", None)
        return seen

    assert at_once(lambda: hooked("a"), lambda: hooked("b")) == [["a"], ["b"]]


@pytest.mark.skipif(
    BACKEND != "torch", reason="only PyTorch has threads for backward passes"
)
def test_a_pass_done_again_on_another_thread_has_the_kernels_of_the_first():
    import torch

    with keras.RematScope("full"):
        layer = kpe.layers.Dense(16, dtype=POLICY)
    with kernels.prefer("native"):
        loss = layer(torch.ones(16, 16), training=True).sum()
    assert layer.kernel_choice.native
    layer.__dict__.pop("_last_plan")
    at_once(loss.backward)
    assert layer.kernel_choice.native


# Models


def model(seed):
    keras.utils.set_random_seed(seed)
    layers = [Scaled(8, activation="tanh"), keras.layers.Dense(4)]
    made = keras.Sequential([keras.Input((5, 6)), *layers])
    made.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    return made


def data(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(32, 5, 6)).astype("float32")
    return x, x[..., :4] * 0.5


def trained(made, seed, epochs=3):
    x, y = data(seed)
    history = made.fit(
        x, y, epochs=epochs, batch_size=8, shuffle=False, verbose=0
    )
    return history.history["loss"]


def numbers(made):
    return [numpy(v) for v in (*made.weights, *made.optimizer.variables)]


def same(first, second):
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_models_converted_and_trained_at_once_get_what_each_gets_alone():
    kinds = ["emulated", "auto" if BACKEND == "tensorflow" else "native"]

    def life(made, seed):
        with kernels.prefer(kinds[seed]):
            losses = trained(made, seed, epochs=1)
            kpe.convert(made, POLICY)
            losses += trained(made, seed)
            in_float8 = numbers(made)
            kpe.revert(made)
            return losses + trained(made, seed, epochs=1), in_float8

    first, second = model(0), model(1)
    alone = [life(first, 0), life(second, 1)]
    first, second = model(0), model(1)
    together = at_once(lambda: life(first, 0), lambda: life(second, 1))
    for (got, values), (losses, wanted) in zip(together, alone, strict=True):
        assert got == losses
        same(values, wanted)


def test_one_model_is_calibrated_while_another_trains():
    x, _ = data(2)
    models = [model(seed) for seed in (0, 0, 0, 1, 1)]
    for made in models:
        kpe.convert(made, POLICY)
    calibrated, wanted, others, learner, expected = models
    kpe.calibrate(wanted, x)
    trained(expected, 1)
    trains, ended = threading.Event(), threading.Event()

    def calibrate():
        trains.wait(60)
        kpe.calibrate(calibrated, x)
        while not ended.is_set():
            kpe.calibrate(others, x, steps=1)

    def train():
        trains.set()
        try:
            trained(learner, 1)
        finally:
            ended.set()

    at_once(calibrate, train)
    same(numbers(calibrated), numbers(wanted))
    same(numbers(learner), numbers(expected))


def test_models_loaded_at_once_come_back_and_leave_warnings_as_they_were(
    tmp_path,
):
    made = model(0)
    kpe.convert(made, POLICY)
    trained(made, 0)
    made.save(tmp_path / "model.keras")
    before = warnings.showwarning, list(warnings.filters)

    def load():
        return [kpe.load_model(tmp_path / "model.keras") for _ in range(3)]

    for loaded in [*at_once(load, load)[0], *at_once(load, load)[1]]:
        same(numbers(loaded), numbers(made))
    assert (warnings.showwarning, list(warnings.filters)) == before


def test_a_class_has_one_float8_form_whoever_asks_first():
    classes = [type("Own", (keras.layers.Dense,), {}) for _ in range(50)]
    all_are_there = threading.Barrier(4)

    def forms():
        all_are_there.wait(30)
        return [form_of(cls) for cls in classes]

    first, *others = at_once(*[forms] * 4)
    assert all(each == first for each in others)
