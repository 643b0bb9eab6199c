"""What of Keras the import replaces, what waits for the first use, and why."""

import functools
import json
import pathlib
import pickle

import keras
import pytest

import keras_policy_ext as kpe
from processes import run

BACKEND = keras.backend.backend()

IMPORTED = {
    # What reads names of policies. The second is where Keras reads names that
    # begin with a quantization mode; keras 3.16 has it in the package too.
    "dtype_policies.dtype_policy.DTypePolicy.__init__",
    "dtype_policies.dtype_policy._get_quantized_dtype_policy_by_str",
    "dtype_policies._get_quantized_dtype_policy_by_str",
    # Loaders of model files, folders and bytes. A model whose block makes its
    # layers names no class of this package: only the file tells of its float8.
    # And Keras is in its loader when it makes the first layer.
    "saving.saving_lib._load_model_from_dir",
    "saving.saving_lib._load_model_from_fileobj",
}
"""What the import may replace, with the reason. Take out what it does not."""

OF_3_16 = {"dtype_policies._get_quantized_dtype_policy_by_str"}
"""What older versions of Keras do not have."""

FIRST_USE = {
    "layers.layer.Layer.set_weights",
    "models.model.Model.export",
    # A stock class may be asked for configs and files of optimizers with
    # moments in one byte.
    "optimizers.optimizer.Optimizer.from_config",
    "optimizers.optimizer.Optimizer.load_own_variables",
    "saving.saving_lib._serialize_model_as_json",
    # What prints how many parameters a model has: without scales and states.
    "utils.summary_utils.count_params",
    "utils.summary_utils.print_summary",
    "utils.summary_utils.weight_memory_size",
}
"""What the first policy or layer of this package may replace."""

KERAS_FLOAT8 = {
    "layers.layer.Layer._float8_call",
    "quantizers.modes.float8.Float8Strategy.call",  # Keras 3.16.
}
"""What the first policy of Keras's own float8 may replace."""

STATE = {
    "backend.Variable.assign",
    "optimizers.optimizer.Optimizer._filter_empty_gradients",
    "optimizers.optimizer.Optimizer.apply",
    "optimizers.optimizer.Optimizer.build",
    "optimizers.optimizer.Optimizer.finalize_variable_values",
}
"""What the first state of delayed scaling replaces."""

PROGRAMS = (
    "import keras_policy_ext",
    "keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]).compile()",
    "keras_policy_ext.convert(model)",
    "keras.dtype_policies.get('float8_from_float32')",
    "keras_policy_ext.convert(model, 'delayed')",
)

USES = (
    "keras_policy_ext.get('mixed_float8')",
    "keras_policy_ext.layers.Dense(2)",
    "keras_policy_ext.set_dtype_policy('mixed_bfloat16')",
    "keras_policy_ext.freeze(model)",
)


def replaced(*programs):
    """What each program replaces in a fresh process, and none before it."""
    model = (
        "import keras_policy_ext\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])\n"
    )
    first, *others = programs
    path = pathlib.Path(__file__).with_name("replaced_in_keras.py")
    code, others = path.read_text("utf-8"), [model + x for x in others]
    return json.loads(run(BACKEND, code, first, *others))


@functools.cache
def found():
    return [set(each) for each in replaced(*PROGRAMS)]


def test_the_import_replaces_no_more_than_it_has_to():
    at_import, *_ = found()
    assert len(at_import - OF_3_16) <= 4
    assert at_import <= IMPORTED
    assert at_import >= IMPORTED - OF_3_16, "take these out of the set"


def test_stock_layers_replace_nothing():
    _, by_stock, *_ = found()
    assert by_stock == set()


def test_the_first_use_replaces_what_a_float8_model_needs():
    *_, converted, by_name, with_state = found()
    assert converted == FIRST_USE
    assert with_state == STATE
    assert by_name and by_name <= KERAS_FLOAT8


@pytest.mark.any_backend
@pytest.mark.full_except(USES[0])
@pytest.mark.parametrize("use", USES)
def test_each_use_is_a_first_one(use):
    assert set(replaced(PROGRAMS[0], use)[1]) >= FIRST_USE


# What a file needs in a process in which nothing else was done


@keras.saving.register_keras_serializable("replaced")
class Block(keras.layers.Layer):
    """Makes its layer itself: its config names no policy of it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(4)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


BLOCK = """
import pickle, sys, warnings
import keras, keras_policy_ext

@keras.saving.register_keras_serializable("replaced")
class Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(4)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

def inner(model):
    return model.layers[0].inner
"""


FLOAT8 = "assert inner(model).float8_policy is not None"


def model_with_a_block(change):
    model = keras.Sequential([keras.Input((4,)), Block()])
    change(model)
    return model


def test_lost_float8_is_told_though_no_class_of_the_package_is_named(tmp_path):
    path = tmp_path / "model.keras"
    model_with_a_block(kpe.convert).save(path)
    model_with_a_block(kpe.convert).save(tmp_path / "model", zipped=False)
    code = """
for path in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.saving.load_model(path)
    assert type(inner(model)) is keras.layers.Dense
    assert ["1 of the 1 layers that were in float8" in str(x.message)
        for x in caught] == [True], caught
    assert path in str(caught[0].message)
"""
    run(BACKEND, BLOCK + code, path, tmp_path / "model")


def test_frozen_files_and_copies_load_as_the_first_thing(tmp_path):
    model_with_a_block(kpe.freeze).save(tmp_path / "frozen.keras")
    model = model_with_a_block(kpe.convert)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    load = "model = keras.saving.load_model(sys.argv[1])"
    run(BACKEND, f"{BLOCK}{load}\n{FLOAT8}", tmp_path / "frozen.keras")
    load = "model = pickle.load(open(sys.argv[1], 'rb'))"
    run(BACKEND, f"{BLOCK}{load}\n{FLOAT8}", tmp_path / "model.pickle")


def test_a_loaded_model_is_exported_and_saved_as_a_converted_one(tmp_path):
    layer = keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((4,)), layer])
    kpe.convert(model)
    model.save(tmp_path / "model.keras")
    code = """
import json, sys, zipfile
import keras, keras_policy_ext
path = sys.argv[1]
model = keras.saving.load_model(path)
assert model.layers[0].float8_policy is not None
try:
    model.export(path + ".onnx", format="onnx")
except NotImplementedError as error:
    assert "does not compute what layers in" in str(error)
else:
    raise AssertionError("exported")
model.save(path)
with zipfile.ZipFile(path) as archive:
    assert "keras_policy_ext" in json.loads(archive.read("metadata.json"))
"""
    run(BACKEND, code, tmp_path / "model.keras")


def test_layers_under_the_float8_policy_in_a_file_of_keras_compute(tmp_path):
    policy = keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", "float32", 4
    )
    layer = keras.layers.LayerNormalization(dtype=policy)
    keras.dtype_policies.get("float8_from_float32")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.save(tmp_path / "model.keras")
    code = """
import sys
import keras, keras_policy_ext
model = keras.saving.load_model(sys.argv[1])
assert model(keras.ops.ones((2, 4))).shape == (2, 4)
"""
    run(BACKEND, code, tmp_path / "model.keras")
