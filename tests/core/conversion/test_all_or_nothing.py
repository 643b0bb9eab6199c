"""What fails in the middle changes nothing, wherever it fails.

An interrupt is let happen at many of the calls of this package's functions,
one after the other on one model, as Ctrl+C would.
"""

import gc
import pathlib
import sys

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import Scaled
from keras_policy_ext.conversion import training
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.layers.transaction import unchanged_on_error
from steps import numpy

BACKEND = keras.backend.backend()
JIT = BACKEND == "jax"
PACKAGE = str(pathlib.Path(kpe.__file__).parent)
POLICY = "float8/4_from_float32"
# Fewer where eager operations take long; each spreads over all the calls.
POINTS = 25 if BACKEND == "torch" else 3


def data(size=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 4, 6)).astype("float32")
    return x, x[:, 0, :3] * 0.5


def trained():
    """Layers of all kinds, one in Keras's float8, and nested optimizers."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 6))
    attention = keras.layers.MultiHeadAttention(2, 3, name="attention")
    x = Scaled(6, name="scaled")(attention(inputs, inputs))
    inner = [keras.Input((4, 6)), keras.layers.Dense(5, "tanh", name="dense")]
    x = keras.Sequential(inner, name="inner")(x)
    stock = keras.layers.Dense(4, name="stock")
    x = keras.layers.Flatten()(stock(x))
    outputs = keras.layers.Dense(3, name="head")(x)
    model = keras.Model(inputs, outputs, name="model")
    stock.quantize("float8")
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=JIT)
    fit(model)
    return model


def converted():
    model = trained()
    kpe.convert(model, POLICY, attention="float8")
    fit(model)
    return model


def fit(model):
    x, y = data()
    history = model.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0)
    return history.history["loss"]


class Interrupt(BaseException):
    """Like KeyboardInterrupt, which pytest would take for its own."""


class Interrupting:
    """Raises at a call of a function of this package, and counts them.

    Args:
        number: At which of them; None for none.
    """

    def __init__(self, number=None):
        self.number = number
        self.calls = 0

    def __enter__(self):
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _profile(self, frame, event, argument):
        file = frame.f_code.co_filename
        ours = event == "call" and file.startswith(PACKAGE)
        # Not what puts things back, nor generators on their way out.
        generator = frame.f_code.co_name.startswith("<")
        if not ours or generator or file.endswith("transaction.py"):
            return
        self.calls += 1
        if self.calls - 1 == self.number:
            sys.setprofile(None)
            raise Interrupt(frame.f_code.co_qualname)


def layers_within(model):
    return model._flatten_layers()


def identities(model):
    """Everything that has to stay the same object, in order."""
    layers = layers_within(model)
    functions = ("train_function", "test_function", "predict_function")
    optimizer = model.optimizer
    optimizers = [optimizer, optimizer.inner_optimizer]
    parameters = []
    if BACKEND == "torch":
        parameters = [(n, id(p)) for n, p in model.named_parameters()]
    return {
        "layers": [(id(x), type(x), x.name, x.trainable) for x in layers],
        "policies": [id(x.dtype_policy) for x in layers],
        "modes": [x.quantization_mode for x in layers],
        "attributes": [list(vars(x)) for x in layers],
        "locked": [x._tracker.locked for x in layers],
        "weights": [[id(v) for v in x.weights] for x in layers],
        "trainable": [id(v) for v in model.trainable_variables],
        "parameters": parameters,
        "functions": [id(getattr(model, name)) for name in functions],
        "optimizers": [id(each) for each in optimizers],
        "slots": [[id(v) for v in each.variables] for each in optimizers],
        "known": [list(map(id, x._trainable_variables)) for x in optimizers],
        "indices": [dict(x._trainable_variables_indices) for x in optimizers],
    }


def values(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [numpy(v) for v in variables]


def same(arrays, others):
    for array, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(array, other)


def check_interrupted(model, change, name):
    """Interrupt a change of a model at many points, the last one included."""
    before, numbers = identities(model), values(model)
    variables = [*model.variables, *model.optimizer.variables]

    def check(where):
        now = identities(model)
        for key, value in before.items():
            assert now[key] == value, (name, where, key)
        same(values(model), numbers)

    for _ in range(2):  # The first time some caches are filled.
        gc.collect()
        with (
            pytest.raises(Interrupt),
            unchanged_on_error(training.parts(model), variables),
        ):
            with Interrupting() as calls:
                change()
            raise Interrupt
        check("after it")
    points = np.linspace(0, calls.calls - 1, POINTS).astype(int)
    for point in dict.fromkeys(map(int, points)):
        # States that an undone change has made are told of assignments until
        # Python collects them: the number of calls would depend on when.
        gc.collect()
        with pytest.raises(Interrupt) as where, Interrupting(point):
            change()
        check(f"call {point}, of {where.value}")


def check_goes_on(victim, twin):
    """Whether two models predict and train alike, with the steps they had."""
    x, _ = data()
    same([victim.predict(x, verbose=0)], [twin.predict(x, verbose=0)])
    assert fit(victim) == fit(twin)
    same(values(victim), values(twin))


@pytest.fixture(autouse=True)
def collected_between_changes():
    """Python collects where a test says so: calls of a change are counted."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.weights.h5"
    model = converted()
    fit(model)
    model.save_weights(path)
    return path


@pytest.mark.full
@pytest.mark.slow_except()
def test_what_is_interrupted_leaves_a_stock_model_as_it_was():
    victim, twin = trained(), trained()
    changes = {
        "convert": lambda: kpe.convert(victim, POLICY, attention="float8"),
        "to_float8_class": lambda: to_float8_class(
            victim.get_layer("scaled"), POLICY
        ),
    }
    for name, change in changes.items():
        check_interrupted(victim, change, name)
    check_goes_on(victim, twin)


@pytest.mark.full
@pytest.mark.slow_except()
def test_loading_that_is_interrupted_leaves_a_stock_model_as_it_was(weights):
    victim = trained()
    kpe.convert(victim, POLICY)
    kpe.revert(victim)  # Out of Keras's float8.

    def load():
        kpe.load_weights(victim, weights, as_saved=True)

    check_interrupted(victim, load, "load")


@pytest.mark.slow_except()
@pytest.mark.full
@pytest.mark.extension("calibrate")
def test_what_is_interrupted_leaves_a_converted_model_as_it_was(weights):
    victim, twin = converted(), converted()
    x, _ = data()
    changes = {
        "convert": lambda: kpe.convert(victim, "float8/8_from_float32"),
        "revert": lambda: kpe.revert(victim),
        "calibrate": lambda: kpe.calibrate(victim, x),
        "to_stock_class": lambda: to_stock_class(victim.get_layer("scaled")),
        "load": lambda: kpe.load_weights(victim, weights),
        "load as saved": lambda: kpe.load_weights(
            victim, weights, as_saved=True
        ),
    }
    for name, change in changes.items():
        check_interrupted(victim, change, name)
    check_goes_on(victim, twin)


# Refusals


def flash_model(flash):
    """Two attention layers, of which the second may use flash attention."""
    inputs = keras.Input((4, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    last = keras.layers.MultiHeadAttention(
        2, 4, flash_attention=flash or None, name="second"
    )
    model = keras.Model(inputs, last(x, x), name="model")
    model.compile("adam", "mse", jit_compile=JIT)
    return model


def layers_of(model):
    return [(x, type(x), x.dtype_policy) for x in layers_within(model)]


@pytest.mark.full
def test_flash_attention_is_reported_by_convert_and_the_rest_is_converted():
    report = kpe.convert(flash_model(True), POLICY, attention="float8")
    converted = [entry.path for entry in report.converted]
    assert "first" in converted and "second" not in converted
    assert "second/query" in converted
    (entry,) = [e for e in report.skipped if e.path == "second"]
    assert "flash attention" in entry.reason


class LocalSelfAttention(keras.layers.MultiHeadAttention):
    """Attention of one's own, as ViTs for small datasets have it."""

    def _compute_attention(self, query, key, value, *args, **kwargs):
        return value, None


def test_attention_of_a_class_of_its_own_is_reported_by_convert():
    """It keeps it, so that its two products are not in float8."""
    inputs = keras.Input((4, 8))
    layer = LocalSelfAttention(2, 4, name="own")
    model = keras.Model(inputs, layer(inputs, inputs))
    report = kpe.convert(model, POLICY, attention="float8")
    assert "own/query" in [entry.path for entry in report.converted]
    assert "own" not in [entry.path for entry in report.converted]
    (entry,) = [e for e in report.skipped if e.path == "own"]
    assert "computes scores and weighted sum itself" in entry.reason
    assert layer.quantization_mode is None


def test_flash_attention_that_a_file_does_not_allow_changes_nothing(tmp_path):
    saved, live = flash_model(False), flash_model(True)
    kpe.convert(saved, POLICY, attention="float8")
    saved.save_weights(tmp_path / "saved.weights.h5")
    before = layers_of(live)
    numbers = [numpy(v) for v in live.variables]
    with pytest.raises(ValueError, match=r"'second'.*flash_attention=True"):
        kpe.load_weights(live, tmp_path / "saved.weights.h5", as_saved=True)
    assert layers_of(live) == before
    same([numpy(v) for v in live.variables], numbers)
