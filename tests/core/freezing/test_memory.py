"""How much memory a frozen model takes, on disk and in a process."""

import gc
import json
import weakref

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import SLOW
from processes import run
from steps import normal

UNITS, LAYERS = 2048, 12
"""50 M parameters."""

SAVE = f"""
import pathlib, sys
import keras, numpy as np
import keras_policy_ext as kpe

folder = pathlib.Path(sys.argv[1])
layers = [keras.layers.Dense({UNITS}) for _ in range({LAYERS})]
model = keras.Sequential([keras.Input(({UNITS},)), *layers])
model.save(folder / "float32.keras")
kpe.freeze(model)
model.save(folder / "frozen.keras")
"""

# With oneDNN TensorFlow keeps what was freed in a pool, for new tensors.
MEMORY = """
import ctypes, gc, json, os, pathlib, sys
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import keras, numpy as np
import keras_policy_ext as kpe

folder, name, freezes = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[4:]

def megabytes(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1000

def load(path):
    return kpe.load_model(path, compile=False)

# What the framework and the loader need for any model.
units = int(sys.argv[3])
small = keras.Sequential([keras.Input((units,)), keras.layers.Dense(units)])
small.save(folder / f"small-{name}.keras")
kpe.freeze(load(folder / f"small-{name}.keras"))
kpe.freeze(small)
small.save(folder / f"small-{name}.keras")
load(folder / f"small-{name}.keras")
del small
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
before = megabytes("VmRSS")
model = load(folder / f"{name}.keras")
gc.collect()
peak, held = megabytes("VmHWM") - before, megabytes("VmRSS") - before
if freezes:
    kpe.freeze(model)
    gc.collect()
# The C library keeps what is free for the next that asks for memory.
ctypes.CDLL(None).malloc_trim(0)
after = megabytes("VmRSS") - before
found = dict(peak=peak, held=held, after=after)
(folder / f"{name}.json").write_text(json.dumps(found))
"""


def _can_reset_the_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Megabytes of loading each file, in a process of its own."""
    if not _can_reset_the_peak():
        pytest.skip("this system does not say what the peak was")
    folder = tmp_path_factory.mktemp("memory")
    backend = keras.backend.backend()
    run(backend, SAVE, folder)
    run(backend, MEMORY, folder, "float32", UNITS, "freezes")
    run(backend, MEMORY, folder, "frozen", UNITS)
    found = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("float32", "frozen")
    }
    for name in found:
        size = (folder / f"{name}.keras").stat().st_size
        found[name]["file"] = size / 1e6
    print(found)
    return found


def slow(claim):
    """The numbers of one framework say little of another: all are slow."""
    for mark in SLOW:
        claim = mark(claim)
    return claim


@pytest.mark.full
@slow
def test_the_file_has_a_quarter_of_the_size(measured):
    assert measured["frozen"]["file"] <= 0.27 * measured["float32"]["file"]


@pytest.mark.full
@slow
def test_loading_never_holds_the_float_form(measured):
    assert measured["frozen"]["peak"] <= 0.45 * measured["float32"]["peak"]


@pytest.mark.full
@slow
def test_a_model_that_is_frozen_lets_its_floats_go(measured):
    weights = 4 * LAYERS * UNITS * (UNITS + 1) / 1e6
    assert measured["float32"]["held"] > 0.9 * weights
    assert measured["float32"]["after"] <= 0.35 * weights
    assert measured["frozen"]["after"] <= 0.35 * weights


def trained(converted, size=37):
    """A model that was trained, and has predicted."""
    layers = [keras.layers.Dense(size, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((size,)), *layers])
    if converted:
        kpe.convert(model, "delayed")
    model.compile("adam", "mse")
    x = normal(4, size)
    model.fit(x, x, verbose=0)
    model.evaluate(x, x, verbose=0)
    model.predict(x, verbose=0)
    return model


def held(reference):
    """How many numbers are in memory that a reference leads to."""
    found = reference()
    if getattr(found, "dtype", None) == "resource":  # of a tf.Variable
        import tensorflow as tf

        found = tf.raw_ops.ReadVariableOp(resource=found, dtype=tf.float32)
    return 0 if found is None else int(np.prod(found.shape))


@pytest.mark.full_except("False")
@pytest.mark.parametrize("converted", [False, True])
def test_nothing_keeps_the_floats_of_a_trained_model(converted):
    """Nor the optimizer's slots: no step, graph, state, or list of Keras."""
    model = trained(converted)
    gone = [v for v in model.optimizer.variables if tuple(v.shape) == (37, 37)]
    gone += [layer.kernel for layer in model.layers]
    values = [v.value for v in gone]
    values += [v.handle for v in values if hasattr(v, "handle")]
    references = [weakref.ref(each) for each in [*gone, *values]]
    assert len(references) >= 18
    assert all(held(each) == 37 * 37 for each in references)
    del gone, values
    step = weakref.ref(model.predict_function)
    kpe.freeze(model)
    gc.collect()
    assert sum(map(held, references)) == 0
    assert step() is None


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow's own count"
)
def test_tensorflow_counts_the_floats_as_free():
    import tensorflow as tf

    def taken():
        gc.collect()
        return tf.config.experimental.get_memory_info("CPU:0")["current"]

    try:
        before = taken()
    except ValueError as error:
        pytest.skip(f"counts with oneDNN only: {error}")
    model = trained(False, 1024)
    floats = 3 * 4 * 1024**2
    assert taken() - before >= 3 * floats  # with two slots of Adam
    kpe.freeze(model)
    assert taken() - before <= 0.35 * floats


def made_variables(monkeypatch):
    """Shapes of the floating variables that are made from now on."""
    found = []
    init = keras.Variable.__init__

    def noting(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if "float" in self.dtype:
            found.append(tuple(self.shape))

    monkeypatch.setattr(keras.Variable, "__init__", noting)
    return found


@pytest.mark.full
def test_no_float_kernel_is_made_while_loading(tmp_path, monkeypatch):
    layers = [keras.layers.Conv1D(5, 3), keras.layers.GRU(7)]
    model = keras.Sequential(
        [keras.Input((9, 4)), *layers, keras.layers.Dense(11)]
    )
    kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    shapes = {tuple(v.shape) for v in model.variables if v.dtype == "uint8"}
    assert shapes == {(3, 4, 5), (5, 21), (7, 21), (7, 11)}
    found = made_variables(monkeypatch)
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert found and not shapes & set(found)
    x = normal(2, 9, 4)
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), loaded.predict(x, verbose=0)
    )


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="torch has parameters"
)
def test_no_parameter_keeps_a_float_kernel(tmp_path):
    import torch

    layers = [keras.layers.Dense(37) for _ in range(3)]
    model = keras.Sequential([keras.Input((37,)), *layers])
    model.save(tmp_path / "model.keras")
    del layers
    model = kpe.load_model(tmp_path / "model.keras")
    kpe.freeze(model)
    gc.collect()
    kept = [
        x
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, torch.nn.Parameter)
        and tuple(x.shape) == (37, 37)
        and x.is_floating_point()
    ]
    assert kept == []
