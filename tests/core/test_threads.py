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
from keras_policy_ext import kernels, seams
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


def test_a_handler_hears_the_contractions_of_its_thread():
    first, second = (
        kpe.layers.Dense(2, dtype=POLICY, name=name) for name in "ab"
    )
    x = np.ones((1, 2), "float32")
    first(x), second(x)
    all_handle = threading.Barrier(2)

    def handled(layer):
        seen = []

        def note(call):
            seen.append(call.layer.name)
            return call.run()

        with seams.on_contraction(note):
            all_handle.wait(30)
            layer(x)
            all_handle.wait(30)
        layer(x)
        return seen

    found = at_once(lambda: handled(first), lambda: handled(second))
    assert found == [["a"], ["b"]]


def test_a_handler_hears_the_operations_of_its_thread():
    first, second = (
        keras.layers.Dense(2, use_bias=False, name=name) for name in "ab"
    )
    x = np.ones((1, 2), "float32")
    first(x), second(x)
    all_handle = threading.Barrier(2)

    def handled(layer):
        seen = []

        def note(layer, run, name, args, kwargs):
            seen.append((layer.name, name))
            return run(*args, **kwargs)

        with seams.on_operation({seams.PRODUCTS: note}):
            all_handle.wait(30)
            layer(x)
            all_handle.wait(30)
        layer(x)
        return seen

    found = at_once(lambda: handled(first), lambda: handled(second))
    assert found == [[("a", "matmul")], [("b", "matmul")]]


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
    layer.float8_state.last_call.plan = None
    at_once(loss.backward)
    assert layer.kernel_choice.native


def made_in_dtype():
    return keras.layers.Dense(1).compute_dtype


def read_in_dtype():
    return keras.backend.standardize_dtype(keras.Variable(1.0).value.dtype)


# Keras has one store for all tasks of a thread.
STORED = pytest.mark.parametrize(
    ("scope", "now"),
    [
        pytest.param(kpe.policy_scope, made_in_dtype, id="policy_scope"),
        pytest.param(
            lambda dtype: kpe.autocast_scope(dtype),
            read_in_dtype,
            id="autocast_scope",
            marks=pytest.mark.extension("mixed"),
        ),
    ],
)


async def holding(scope, now, dtype, entered, wait_for):
    with scope(dtype):
        entered.set()
        await wait_for.wait()
        return now()


@STORED
def test_a_scope_within_that_of_another_task_is_refused(scope, now):
    async def both():
        entered, ended = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(
            holding(scope, now, "float16", entered, ended)
        )
        await entered.wait()
        with (
            pytest.raises(RuntimeError, match=r"Received: .*Allowed: "),
            scope("bfloat16"),
        ):
            pass
        ended.set()
        return await first

    assert asyncio.run(both()) == "float16"
    assert now() == "float32"


@STORED
def test_tasks_that_await_outside_have_a_scope_each(scope, now):
    async def working(dtype):
        seen = []
        for _ in range(3):
            with scope(dtype):
                seen.append(now())
            await asyncio.sleep(0)
            seen.append(now())
        return seen

    async def both():
        with scope("float64"):
            return await asyncio.gather(working("float16"), working("bfloat16"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has no float64.
        outer = asyncio.run(in_scope(scope, now, "float64"))
        found = asyncio.run(both())
    assert found == [["float16", outer] * 3, ["bfloat16", outer] * 3]
    assert now() == "float32"


async def in_scope(scope, now, dtype):
    with scope(dtype):
        return now()


@STORED
def test_a_scope_that_is_left_too_early_is_told_and_leaves_nothing(scope, now):
    """A task is started in a block, and goes on when that has ended."""

    async def both():
        entered, ended = asyncio.Event(), asyncio.Event()
        with (
            pytest.raises(RuntimeError, match="within a later one"),
            scope("float16"),
        ):
            inner = asyncio.create_task(
                holding(scope, now, "bfloat16", entered, ended)
            )
            await entered.wait()
        ended.set()
        return await inner

    assert asyncio.run(both()) == "bfloat16"
    assert now() == "float32"


@STORED
def test_an_exception_that_leaves_a_scope_too_early_is_not_replaced(scope, now):
    def generator(dtype):
        with scope(dtype):
            yield

    first, second = generator("float16"), generator("bfloat16")
    next(first), next(second)
    with pytest.raises(KeyError):
        first.throw(KeyError)
    assert now() == "bfloat16"
    second.close()
    assert now() == "float32"


@STORED
def test_a_thread_that_a_task_starts_has_scopes_of_its_own(scope, now):
    async def outer():
        def work():
            before = now()
            with scope("bfloat16"):
                return before, now()

        with scope("float16"):
            return await asyncio.to_thread(work), now()

    assert asyncio.run(outer()) == (("float32", "bfloat16"), "float16")


@STORED
def test_a_scope_that_another_thread_ends_changes_nothing_there(scope, now):
    loop = asyncio.new_event_loop()
    held = holding(scope, now, "float16", asyncio.Event(), asyncio.Event())

    def leave_it_open():
        task = loop.create_task(held)
        loop.run_until_complete(asyncio.sleep(0))
        return task

    (task,) = at_once(leave_it_open)
    with scope("bfloat16"):
        held.close()
        assert now() == "bfloat16"
    task.cancel()
    loop.close()


def test_setting_the_policy_in_the_scope_of_another_task_is_refused():
    async def both():
        entered, ended = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(
            holding(kpe.policy_scope, made_in_dtype, "float16", entered, ended)
        )
        await entered.wait()
        with pytest.raises(RuntimeError, match="policy_scope"):
            kpe.set_dtype_policy("bfloat16")
        carried = kpe.carry_policy(made_in_dtype)()  # It cannot overlap.
        ended.set()
        return await first, carried

    assert asyncio.run(both()) == ("float16", "float16")
    assert made_in_dtype() == "float32"


def test_no_policy_is_carried_into_a_coroutine():
    with pytest.raises(TypeError, match=r"Received: .*Allowed: "):
        kpe.carry_policy(in_scope)


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


@pytest.mark.full
@pytest.mark.slow_except()
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


@pytest.mark.full
@pytest.mark.extension("calibrate")
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


@pytest.mark.full
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
