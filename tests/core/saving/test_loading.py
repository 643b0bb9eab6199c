"""Converted models in files: plain Keras reads them, `kpe.load_model` whole.

What is in a file says best whether a model came back: that which was loaded
is saved again, and the two files must have the same arrays.
"""

import importlib.util
import json
import shutil
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import (
    BUILDERS,
    DELAYED,
    JIT,
    Block,
    batch_for,
    converted,
    float8_layers,
    float_weights,
    predictions,
    randomized,
    states_of,
    stock,
)
from keras_policy_ext import backends
from keras_policy_ext.numerics import primitives
from processes import run
from saving_models import assert_equal
from steps import numpy

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:__array__:DeprecationWarning",
    "ignore:Skipping nested container",  # where a layer did not load
    "ignore:.*layers that were in float8",  # see test_lost_float8.py
)

WEIGHTS = "model.weights.h5"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A converted model of each kind, and the folder that it was saved as."""
    found = {}

    def of(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind) / "model"
            model = converted(kind)
            model.save(folder, zipped=False)
            found[kind] = model, folder
        return found[kind]

    return of


def arrays(path):
    """All arrays in a file of weights, or in the folder of a model."""
    path = path / WEIGHTS if path.is_dir() else path
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


def assert_same_arrays(path, other):
    some, others = arrays(path), arrays(other)
    assert some.keys() == others.keys()
    for name in some:
        np.testing.assert_array_equal(some[name], others[name], err_msg=name)


def assert_same_layers(model, other):
    some, others = weighty_layers(model), weighty_layers(other)
    assert len(some) == len(others)
    for layer, twin in zip(some, others, strict=True):
        assert type(layer) is type(twin)
        assert layer.dtype_policy == twin.dtype_policy
        assert layer.quantization_mode == twin.quantization_mode


def weighty_layers(model):
    """The layers with weights, but for the states among them."""
    layers = model._flatten_layers()
    return [x for x in layers if x.weights and x.name != "float8_state"]


# Plain Keras, and kpe.load_model


@pytest.mark.full_except("blocks")
@pytest.mark.parametrize("kind", BUILDERS)
def test_plain_keras_loads_every_weight_and_slot(kind, saved):
    model, folder = saved(kind)
    loaded = keras.saving.load_model(folder)
    assert_equal(float_weights(model), float_weights(loaded))
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)


@pytest.mark.full_except("mixed", "subclassed")
@pytest.mark.parametrize("kind", BUILDERS)
def test_kpe_brings_every_layer_back_as_it_was(kind, saved, tmp_path):
    model, folder = saved(kind)
    loaded = kpe.load_model(folder)
    assert_same_layers(model, loaded)
    loaded.save(tmp_path / "again", zipped=False)
    assert_same_arrays(folder, tmp_path / "again")


@pytest.mark.extension("recurrent")
def test_the_models_of_this_file_lose_float8_under_plain_keras(saved):
    lost = {}
    for kind in BUILDERS:
        model, folder = saved(kind)
        plain = keras.saving.load_model(folder, compile=False)
        lost[kind] = len(float8_layers(model)) - len(float8_layers(plain))
    assert lost == {"blocks": 2, "subclassed": 5, "composites": 9, "mixed": 2}


def test_training_goes_on_bit_for_bit(tmp_path):
    """With variables of the optimizer that plain Keras finds no place for."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), Block(4), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=1.0, use_ema=True
    )
    model.compile(optimizer, "mse", jit_compile=JIT)
    kpe.convert(model, DELAYED)
    x, y = batch_for(model)
    x = x[:, 0]
    for _ in range(3):
        model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.gradient_accumulation_steps == 2
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)
    model.reset_metrics()  # Of older Keras: a loss is a mean since then.
    expected = [model.train_on_batch(x, y) for _ in range(3)]
    found = [loaded.train_on_batch(x, y) for _ in range(3)]
    assert len(set(map(float, expected))) > 1
    assert_equal(expected, found)
    assert_equal(states_of(model), states_of(loaded))


def test_a_model_without_compilation_stays_without(saved):
    model, folder = saved("blocks")
    loaded = kpe.load_model(folder, compile=False)
    assert not loaded.compiled
    assert_equal(states_of(model), states_of(loaded))


def test_a_stock_model_is_loaded_as_keras_does(tmp_path):
    model = randomized(stock("blocks"))
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert not float8_layers(loaded)
    assert_equal(model.weights, loaded.weights)
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)


def test_an_optimizer_that_is_not_in_the_file_is_warned_of_once(tmp_path):
    model = converted("blocks")
    model.get_layer("block").trainable = False  # Lost: the block makes anew.
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    config = model.get_layer("block").get_config()
    assert config["trainable"] is False
    model.save(tmp_path / "model", zipped=False)
    with h5py.File(tmp_path / "model" / WEIGHTS, "a") as file:
        del file["optimizer/vars/2"]
    with pytest.warns(UserWarning, match="Skipping variable") as caught:
        kpe.load_model(tmp_path / "model")
    assert len(caught) == 1


def test_a_file_that_names_an_optimizer_of_torch_loads_anywhere(
    saved, tmp_path
):
    model, folder = saved("blocks")
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    private = "keras.src.backend.torch.optimizers.torch_adam"
    config["compile_config"]["optimizer"] |= {
        "module": private,
        "registered_name": "Adam",
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    loaded = kpe.load_model(tmp_path / "model")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)


# Weights alone: float32, other lengths, into converted models and back


def test_float32_weights_load_into_a_converted_model_and_back(saved, tmp_path):
    path = tmp_path / "model.weights.h5"
    plain, model = randomized(stock("blocks"), 1), converted("blocks")
    plain.save_weights(path)
    model.load_weights(path)
    assert_equal(plain.weights, float_weights(model))
    assert_equal(plain.optimizer.variables, model.optimizer.variables)
    assert all(np.all(numpy(v)[:, 1:] == 0) for v in states_of(model))
    model, folder = saved("blocks")
    plain.load_weights(folder / WEIGHTS)
    assert_equal(plain.weights, float_weights(model))


@pytest.mark.full_except("8")
@pytest.mark.parametrize("length", [2, 8])
def test_a_history_of_another_length_keeps_the_newest(length, saved):
    saved_model, folder = saved("blocks")
    model = converted("blocks", 1, policy=f"float8/{length}_from_float32")
    model.load_weights(folder / WEIGHTS)
    kept = min(length, 4) - 1  # before the newest; the ring turns left
    for before, after in zip(
        states_of(saved_model), states_of(model), strict=True
    ):
        before, after = numpy(before)[:, 9:], numpy(after)[:, 9:]
        np.testing.assert_array_equal(before[:, :2], after[:, :2])
        np.testing.assert_array_equal(before[:, -kept:], after[:, -kept:])
        assert np.count_nonzero(after[0]) == 2 + kept


def test_load_weights_as_saved_converts_a_stock_model(saved, tmp_path):
    model, folder = saved("subclassed")
    other = stock("subclassed", 1)
    other.optimizer.build(other.trainable_variables)
    kpe.load_weights(other, folder / WEIGHTS, as_saved=True)
    other.save(tmp_path / "again", zipped=False)
    assert_same_arrays(folder, tmp_path / "again")
    np.testing.assert_array_equal(predictions(model), predictions(other))


def test_load_weights_leaves_policies_alone(saved):
    model, folder = saved("blocks")
    other = randomized(stock("blocks", 1), 1)
    kpe.load_weights(other, folder / WEIGHTS)
    assert not float8_layers(other)
    assert_equal(float_weights(model), other.weights)


# Files that are damaged, foreign or newer


def edited(folder, target, change):
    """A copy of a saved model whose file of weights was changed."""
    shutil.copytree(folder, target)
    with h5py.File(target / WEIGHTS, "a") as file:
        change(file)
    return target


def state_group(file):
    return file["layers/block/wide/float8_state/vars"]


def with_entry(key, value):
    def change(file):
        group = state_group(file)
        if key in group:
            del group[key]
        group[key] = value

    return change


def text(name):
    return np.frombuffer(name.encode(), "uint8")


def without_the_last_head(file):
    del file["layers/dense/vars/1"]


WRONG = {
    "an unknown recipe": (
        with_entry("policy", text("float8/quantum_from_float32")),
        "does not know.*quantum.*Update",
    ),
    "a plain policy": (
        with_entry("policy", text("float32")),
        "does not know.*'float32'.*Allowed",
    ),
    "a policy that is no text": (
        with_entry("policy", np.array([255, 254], "uint8")),
        "'policy' is uint8.*Save the model again",
    ),
    "an unknown mode of attention": (
        with_entry("attention", text("float4")),
        "does not know.*'float4'.*Update",
    ),
    "a newer format": (
        with_entry("format_version", np.int32(2)),
        "newer version.*format 2.*Update",
    ),
    "a damaged state": (
        with_entry("0.kernel.scale", np.float32(np.nan)),
        "'0.kernel.scale' is nan.*Save the model again",
    ),
    "another architecture": (without_the_last_head, "expected 2 variables"),
}


@pytest.fixture(scope="module")
def live():
    """Models that no test changes: a stock one, and one in float8."""
    return stock("blocks", 1), converted("blocks", 1)


@pytest.mark.full_except("another architecture")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.slow_except("a newer format", "an unknown mode of attention")
def test_a_wrong_file_is_refused_and_the_live_model_unchanged(
    wrong, saved, live, tmp_path
):
    _, folder = saved("blocks")
    change, message = WRONG[wrong]
    path = edited(folder, tmp_path / "model", change)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        kpe.load_model(path)
    for model in live:
        variables = [*model.weights, *model.optimizer.variables]
        before = [numpy(v).copy() for v in variables]
        classes = [type(x) for x in model._flatten_layers()]
        with pytest.raises(ValueError, match=f"(?s)unchanged.*{message}"):
            kpe.load_weights(model, path / WEIGHTS, as_saved=True)
        assert_equal(before, variables)
        assert classes == [type(x) for x in model._flatten_layers()]


def test_plain_keras_reads_what_a_newer_policy_left(saved, tmp_path):
    _, folder = saved("blocks")
    change, _ = WRONG["an unknown recipe"]
    path = edited(folder, tmp_path / "model", change)
    assert_equal(
        float_weights(saved("blocks")[0]),
        float_weights(keras.saving.load_model(path)),
    )


@pytest.fixture(scope="module")
def archive(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "model.keras"
    saved("blocks")[0].save(path)
    return path


def cut(content):
    return content[: len(content) // 2]


def flipped(content):
    middle = content.index(b"attention")  # in the file of weights or config
    return content[:middle] + b"A" + content[middle + 1 :]


def passed_for_another_kind(content, offset, byte):
    """Of a zip archive: offset 8 says "encrypted", 10 how it is compressed."""
    entry = content.index(b"PK\1\2") + offset
    return content[:entry] + bytes([byte]) + content[entry + 1 :]


DAMAGES = {
    "cut": cut,
    "flipped": flipped,
    "empty": lambda _: b"",
    "encrypted": lambda x: passed_for_another_kind(x, 8, 1),
    "compressed": lambda x: passed_for_another_kind(x, 10, 99),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_archive_is_refused(damage, archive, live, tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(damage(archive.read_bytes()))
    model = live[1]
    before = [numpy(v).copy() for v in model.weights]
    message = "damaged or truncated.*Received.*Allowed.*earlier checkpoint"
    with pytest.raises(ValueError, match=message):
        kpe.load_model(path)
    with pytest.raises(ValueError, match=message):
        kpe.load_weights(model, path)
    assert_equal(before, model.weights)


def test_one_wrong_bit_in_a_weight_is_noticed(archive, tmp_path):
    with zipfile.ZipFile(archive) as file:
        info = file.getinfo(WEIGHTS)
    content = bytearray(archive.read_bytes())
    content[info.header_offset + info.file_size - 8] ^= 1
    path = tmp_path / "model.keras"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"checksum of {WEIGHTS}"):
        kpe.load_model(path)


def test_truncated_weights_leave_the_live_model(saved, live, tmp_path):
    content = (saved("blocks")[1] / WEIGHTS).read_bytes()
    path = tmp_path / "cut.weights.h5"
    path.write_bytes(cut(content))
    before = [numpy(v).copy() for v in live[1].weights]
    with pytest.raises(ValueError, match=r"unchanged.*truncated file"):
        kpe.load_weights(live[1], path)
    assert_equal(before, live[1].weights)


def test_files_that_are_none_of_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="Allowed"):
        kpe.load_model(tmp_path / "none.keras")
    path = tmp_path / "other.keras"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("config.json", "{}")
    with pytest.raises(ValueError, match=f"lacks {WEIGHTS}.*Allowed"):
        kpe.load_model(path)
    with pytest.raises(ValueError, match="snapshot_download"):
        kpe.load_model("hf://someone/model")


def test_a_folder_without_a_config_is_loaded_as_keras_loads_it(
    tmp_path, monkeypatch
):
    (tmp_path / "0").mkdir()  # As the step of an Orbax checkpoint.
    errors = []
    for load in (keras.saving.load_model, kpe.load_model):
        with pytest.raises(Exception) as caught:
            load(tmp_path)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    assert errors[0][0] is not FileNotFoundError

    def loaded(path, custom_objects, compile, safe_mode):
        return path, custom_objects, compile, safe_mode

    monkeypatch.setattr(keras.saving, "load_model", loaded)
    given = tmp_path, {"a": 1}, False, False
    assert kpe.load_model(*given) == given


def test_other_warnings_are_shown(tmp_path):
    path = tmp_path / "model.keras"
    keras.Sequential([keras.Input((4,)), Warning_(2)]).save(path)
    with pytest.warns(UserWarning, match="mine") as caught:
        kpe.load_model(path)
    assert len(caught) == 1


@keras.saving.register_keras_serializable("test_loading")
class Warning_(keras.layers.Dense):
    @classmethod
    def from_config(cls, config):
        warnings.warn("mine", stacklevel=1)
        return cls(**config)


@pytest.fixture
def backend_without_kernels(monkeypatch):
    """As under Keras's backends of NumPy and OpenVINO."""

    def refuse(backend):
        raise NotImplementedError("No float8 kernels")

    for home in (backends, primitives):
        monkeypatch.delitem(vars(home), "current", raising=False)
    monkeypatch.delitem(vars(backends), "engine", raising=False)
    monkeypatch.setattr(primitives, "_load", refuse)


@pytest.mark.parametrize("loads", ["model", "weights", "as_saved"])
def test_files_without_float8_need_no_kernels(
    loads, tmp_path, backend_without_kernels
):
    layers = [keras.layers.Dense(4), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.save(tmp_path / "model.keras")
    if loads == "model":
        loaded = kpe.load_model(tmp_path / "model.keras")
    else:
        loaded = keras.models.clone_model(model)
        as_saved = loads == "as_saved"
        path = tmp_path / "model.keras"
        kpe.load_weights(loaded, path, as_saved=as_saved)
    for one, two in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))


IN_NUMPY = """
import sys, keras, numpy as np, keras_policy_ext as kpe

path = sys.argv[1] + "/model.keras"
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.save(path)
x = np.ones((2, 3))
same = np.array_equal(kpe.load_model(path).predict(x), model.predict(x))
try:
    kpe.convert(model)
except NotImplementedError as error:
    print("same", same, error)
"""


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None,
    reason="Keras's backend of NumPy needs SciPy",
)
def test_a_plain_model_loads_on_the_backend_of_numpy(tmp_path):
    assert "same True No float8 kernels" in run("numpy", IN_NUMPY, tmp_path)
