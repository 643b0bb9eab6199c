"""Programs of stock Keras, as they are and converted; see `programs`."""

import contextlib
import importlib
import pathlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import training

FOLDER = pathlib.Path(__file__).parent / "programs"
HELPERS = {"__init__", "custom_steps", "data"}
PROGRAMS = sorted({path.stem for path in FOLDER.glob("*.py")} - HELPERS)
BACKEND = keras.backend.backend()
ALL = ("jax", "tensorflow", "torch")
QUICK = {
    "accumulation",
    "actor_critic",
    "contrastive",
    "diffusion",
    "distillation",
    "gan",
    "vae",
}
"""Those with a step of their own; the others take minutes to compile."""


def cases():
    """All programs; slow where they are compiled and `fit` trains them."""
    for name in PROGRAMS:
        slow = BACKEND != "torch" and name not in QUICK
        yield pytest.param(name, marks=[pytest.mark.slow] if slow else [])


pytestmark = [
    pytest.mark.filterwarnings("ignore:.compile... was not called"),
    pytest.mark.filterwarnings("ignore:You are saving a model that has not"),
]


@pytest.fixture(autouse=True, scope="module")
def quickly(tmp_path_factory):
    """On JAX compiling is what takes long, and each step runs a few times.

    What is compiled twice, such as the steps before conversion and after
    reversion, is taken from a folder.
    """
    if BACKEND != "jax":
        yield
        return
    import jax

    seconds = "jax_persistent_cache_min_compile_time_secs"
    before = {
        "jax_disable_most_optimizations": jax.config.read(
            "jax_disable_most_optimizations"
        ),
        "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
        seconds: getattr(jax.config, seconds),
    }
    folder = str(tmp_path_factory.mktemp("compiled"))
    configure_jax(dict(zip(before, (True, folder, 0), strict=True)))
    yield
    configure_jax(before)


def configure_jax(options):
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def program_of(name):
    program = importlib.import_module(f"programs.{name}")
    meant = getattr(program, "BACKENDS", ALL)
    if BACKEND not in meant:
        pytest.skip(f"{name} is written for {' and '.join(meant)}")
    return program


def arrays(variables):
    return [np.array(ops.convert_to_numpy(v.value)) for v in variables]


def optimizer_arrays(model):
    return [
        value
        for optimizer in training.all_optimizers(model)
        for value in arrays(optimizer.variables)
    ]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def kinds(model):
    """What each layer is, and the policy that it has."""
    return [
        (type(layer), layer.dtype_policy)
        for layer in walking.layers_within(model)
    ]


def states(model):
    return [v for v in model.variables if kpe.loops.is_state(v)]


def are_finite(losses):
    return len(losses) > 0 and np.all(np.isfinite(losses))


def saw_gradients(model):
    """Whether a layer in float8 has been trained since it was converted."""
    operands = (o for e in kpe.inspect(model).layers for o in e.operands)
    return any(o.amax for o in operands if o.name == "outputs_grad")


def stock_round_trip(program, path):
    """A trained stock model, after stock Keras did with it what it can."""
    model = program.make()
    assert are_finite(program.train(model))
    with refused_by_keras(program):
        model.save(path)
        loaded = keras.saving.load_model(path)
        compiles = getattr(program, "KERAS_COMPILES", True)
        assert bool(training.all_optimizers(loaded)) == compiles
    return model


def refused_by_keras(program):
    """Files of the program fail in Keras, or they do not."""
    if getattr(program, "KERAS_LOADS", True):
        return contextlib.nullcontext()
    return pytest.raises((NotImplementedError, TypeError, ValueError))


@pytest.mark.full
@pytest.mark.parametrize("name", cases())
@pytest.mark.slow_except("distillation", "actor_critic")
def test_a_program_trains_as_it_is_and_in_float8_and_comes_back(name, tmp_path):
    program = program_of(name)
    if BACKEND in getattr(program, "KERAS_FAILS", {}):
        with pytest.raises(Exception, match=program.KERAS_FAILS[BACKEND]):
            program.train(program.make())
        return
    model = stock_round_trip(program, tmp_path / "stock.keras")
    before, weights = kinds(model), arrays(model.weights)

    report = kpe.convert(model, "delayed")
    assert report.converted
    assert_same(arrays(kpe.loops.weights(model)), weights)
    assert are_finite(program.train(model))
    assert saw_gradients(model)

    check_files(program, model, tmp_path)

    weights = arrays(kpe.loops.weights(model))
    assert len(kpe.revert(model).converted) == len(report.converted)
    assert_same(arrays(model.weights), weights)
    assert kinds(model) == before
    assert are_finite(program.train(model))


def check_files(program, model, folder):
    """A model comes back from a file, or at least its weights do."""
    with refused_by_keras(program):
        model.save(folder / "float8.keras")
        loaded = kpe.load_model(folder / "float8.keras")
        assert_optimizers_came_back(loaded, model)
    if not getattr(program, "KERAS_LOADS", True):
        model.save_weights(folder / "float8.weights.h5")
        loaded = program.make()
        kpe.load_weights(loaded, folder / "float8.weights.h5", as_saved=True)
    assert len(states(loaded)) == len(states(model)) > 0
    assert_same(arrays(loaded.weights), arrays(model.weights))
    assert_same(program.predict(loaded), program.predict(model))


def assert_optimizers_came_back(loaded, model):
    """With all they have, unless Keras does not compile the model."""
    if training.all_optimizers(loaded):
        assert_same(optimizer_arrays(loaded), optimizer_arrays(model))
