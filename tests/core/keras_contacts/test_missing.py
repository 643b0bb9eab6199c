"""What is left without each of the contacts with Keras, as on a new one."""

import ast
import pathlib

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from hidden_names import hidden
from keras_policy_ext._keras import (
    calls,
    global_policy,
    put_around,
    saving_hooks,
    variable_values,
    versions,
    walking,
)
from keras_policy_ext.ext.delayed._keras import TellsItsValue
from private_names import private_attributes, private_definitions
from processes import run
from steps import numpy

LAYER, OPTIMIZER = keras.layers.Layer, keras.optimizers.Optimizer
BACKEND = keras.backend.backend()
FUNCTION = keras.Function
VARIABLE = next(
    x for x in keras.Variable.__mro__ if x.__module__.endswith(".variables")
)

# Nothing that converts and trains is missed without these.
DISPENSABLE = {
    LAYER: [
        "_tracker",
        "_track_variables",
        "_non_trainable_variables",
        "_metrics",
        "_is_quantized",
        "_remat_mode",
        "_flatten_layers",
        "_call_context_args",
        "_post_build",
        "_convert_input_args",
        "_check_lora_supported",
    ],
    keras.Model: [
        "_compiled_trainable_state",
        "_compile_config",
        "_flatten_metrics_in_order",
    ],
    FUNCTION: ["_nodes_by_depth"],
    keras.DTypePolicy: ["_name"],
    OPTIMIZER: [
        "_tracker",
        "_accumulated_gradients",
        "_model_variables_moving_average",
        "_exclude_from_weight_decay",
        "_exclude_from_weight_decay_pattern",
    ],
    VARIABLE: ["_value", "_autocast", "_layout", "_initialize"],
    keras.layers.Dense: ["_kernel"],
    keras.layers.Embedding: ["_embeddings"],
    keras.layers.MultiHeadAttention: ["_compute_attention", "_flash_attention"],
}

# What the optimizer that has been used is asked for.
OF_USED_OPTIMIZERS = [
    "_variables",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_var_key",
]

# What is asked for attention in float8.
OF_ATTENTION = [
    "_compute_attention",
    "_dot_product_equation",
    "_combine_equation",
]

# What has a test of its own below, or no case of its own.
OTHERS = {
    "_untrack_variable": "freezing",
    "_track_variable": "freezing",
    "_iterations": "an optimizer sets it when it is made",
    "_keras_history": "migration, and names of Hugging Face",
    "_inbound_nodes": "names of Hugging Face",
    "_is_default": "a mark: a layer without it gets its config by itself",
    "_load_state": "assets of frozen models",
    "_model_from_config": "frozen models: without it, loading one is refused",
    "_dtype_policy": "policies of layers",
    "_dtype": "the dtype that a variable says it has will do",
    "_modules": "of PyTorch",
    "_lora_enabled_layers": "of KerasHub",
    "_AutocastScope": "a module of Keras",
    "_return_attention_scores": "a call of attention without it fails",
    "_softmax": "attention without it has softmax under no autocast",
    "_distribution_strategy": "of Keras on TensorFlow, for replicas",
    "_serialize_to_tensors": "of TensorFlow, for its checkpoints",
    "_get_variable_index": "one-byte steps in parts; without it, of wholes",
    "_parallel_update_step": "the same, by `update_step`",
    "_quantization_geometry": "of Keras 3.16: a layer without it has no kernel",
}


def model():
    """Two layers, and one of attention, as someone uses them."""
    inputs = keras.Input((3, 4))
    x = keras.layers.MultiHeadAttention(1, 2)(inputs, inputs)
    outputs = keras.layers.Dense(2)(x)
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse", run_eagerly=True)
    return made


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 2))


def losses(trained):
    """Of three steps, the second of which goes by what the first observed."""
    return [float(np.ravel(trained.train_on_batch(*data()))[0]) for _ in "123"]


def converted_losses():
    keras.utils.set_random_seed(0)
    made = model()
    report = kpe.convert(made, "float8_from_float32")
    assert len(report.converted) > 1
    return losses(made), made


@pytest.fixture(scope="module")
def expected():
    return converted_losses()[0]


def cases():
    return [
        pytest.param(cls, name, id=f"{cls.__name__}.{name}")
        for cls, names in DISPENSABLE.items()
        for name in names
    ]


@pytest.mark.slow_except(
    "Layer._is_quantized", "Variable._layout", "Variable._value"
)
@pytest.mark.full
@pytest.mark.parametrize("cls, name", cases())
def test_models_convert_train_and_revert_without(cls, name, expected):
    with hidden(cls, name):
        found, made = converted_losses()
        kpe.revert(made)
    np.testing.assert_array_equal(found, expected)
    for layer in made.layers:
        assert not isinstance(layer, kpe.layers.Float8Mixin)


def assert_names(error, name):
    """It says what is missing, in which Keras, and which ones were tested."""
    text = str(error.value)
    assert name in text
    assert keras.__version__ in text
    assert "3.12 to" in text
    assert "pip install 'keras>=3.12,<" in text


@pytest.mark.full_except("_variables")
@pytest.mark.parametrize("name", OF_USED_OPTIMIZERS)
@pytest.mark.slow_except("_trainable_variables_indices")
def test_a_used_optimizer_is_refused_and_a_new_one_goes_without(name):
    with hidden(OPTIMIZER, name):
        used = model()
        before = losses(used)
        with pytest.raises(ImportError) as error:
            kpe.convert(used, "delayed")
        assert losses(used)[-1] < before[0]
        fresh = model()
        kpe.convert(fresh, "delayed")
        losses(fresh)
    assert_names(error, name)
    assert "new optimizer" in str(error.value)


@pytest.mark.full_except("_compute_attention", "_combine_equation")
@pytest.mark.parametrize("name", OF_ATTENTION)
def test_attention_in_float8_is_refused_and_projections_are_not(name):
    with hidden(keras.layers.MultiHeadAttention, name):
        made = model()
        with pytest.raises(ImportError) as error:
            kpe.convert(made, attention="float8")
        kpe.convert(made)
        losses(made)
    assert_names(error, name)


@pytest.mark.parametrize("name", ["_untrack_variable", "_trainable_variables"])
def test_freezing_and_thawing_are_refused(name):
    with hidden(LAYER, name):
        made = model()
        with pytest.raises(ImportError) as error:
            kpe.freeze(made)
            kpe.thaw(made)
        made.predict(data()[0], verbose=0)
    assert_names(error, name)


def test_adapters_are_refused_where_the_kernel_is_not_found():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    kpe.convert(made, "delayed")
    made.layers[0].enable_lora(1)
    with (
        hidden(keras.layers.Dense, "_kernel"),
        pytest.raises(ImportError) as error,
    ):
        made(np.ones((1, 4), "float32"))
    assert_names(error, "Dense._kernel")


def test_another_policy_is_refused_where_it_is_not_taken(monkeypatch):
    class Keeps(keras.layers.Layer):
        dtype_policy = keras.DTypePolicy("float32")

    with pytest.raises(ImportError) as error:
        global_policy.replace_layer_policy(
            Keeps(), keras.DTypePolicy("mixed_bfloat16")
        )
    assert_names(error, "_dtype_policy")


def test_a_layer_that_nothing_unlocks_is_refused():
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    tracker = vars(layer).pop("_tracker")
    with pytest.raises(ImportError) as error:
        kpe.layers.class_swap.to_float8_class(
            layer, kpe.Float8DTypePolicy("float32")
        )
    vars(layer)["_tracker"] = tracker
    assert_names(error, "Layer._tracker")


def test_states_learn_though_nobody_tells_that_they_were_made(
    monkeypatch, expected
):
    monkeypatch.delattr(TellsItsValue, "_initialize")
    np.testing.assert_array_equal(converted_losses()[0], expected)


@pytest.mark.full_except("calls-_AutocastScope")
@pytest.mark.parametrize(
    "module, name",
    [
        (calls, "_global_state"),
        (calls, "_AutocastScope"),
        (calls, "_symbolic_scope"),
        (global_policy, "_global_state"),
        (variable_values, "_global_state"),
    ],
    ids=lambda x: getattr(x, "__name__", x).rpartition(".")[2],
)
def test_models_convert_and_train_without_the_module(
    module, name, monkeypatch, expected
):
    monkeypatch.setattr(module, name, None)
    np.testing.assert_array_equal(converted_losses()[0], expected)


@pytest.mark.extension("mixed")
def test_without_autocast_scopes_mixed_layers_are_refused(monkeypatch):
    made = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_bfloat16")]
    )
    x = np.ones((1, 4), "float32")
    stock = numpy(made(x))
    monkeypatch.setattr(calls, "_AutocastScope", None)
    kpe.convert(made)
    with pytest.raises(ImportError) as error:
        made(x)
    kpe.revert(made)
    np.testing.assert_array_equal(numpy(made(x)), stock)
    assert_names(error, "AutocastScope")
    with pytest.raises(ImportError):
        kpe.autocast_scope("float32")


def test_what_needs_a_graph_is_refused():
    made = model()
    with hidden(FUNCTION, "_nodes_by_depth"), pytest.raises(ImportError) as e:
        walking.follow_graph(made, [data()[0]], None)
    assert_names(e, "_nodes_by_depth")


def test_hooks_that_keras_does_not_have_are_refused():
    with (
        pytest.raises(ImportError) as error,
        calls.in_place_of("_no_such_hook", None),
    ):
        pass
    assert_names(error, "Layer._no_such_hook")


def test_files_that_cannot_be_watched_are_said(monkeypatch):
    monkeypatch.setattr(saving_hooks, "_saving_lib", None)
    monkeypatch.setattr(versions, "WARNED_OF", set())
    with pytest.warns(UserWarning, match="saving_lib") as told:
        saving_hooks.around_loading(None)
    assert len(told) == 1
    assert not put_around(keras.Model, "no_such_method", None)


WITHOUT_INTERNALS = """
import builtins
import numpy as np
import keras

stock = builtins.__import__

def without_internals(name, globals=None, *args, **kwargs):
    who = (globals or {}).get("__name__", "")
    if name.startswith("keras.src") and who.startswith("keras_policy_ext"):
        raise ImportError(name)
    return stock(name, globals, *args, **kwargs)

builtins.__import__ = without_internals
import keras_policy_ext as kpe

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse", run_eagerly=True)
kpe.convert(model, "delayed")
x, y = np.ones((2, 4), "float32"), np.ones((2, 2), "float32")
losses = [float(np.ravel(model.train_on_batch(x, y))[0]) for _ in range(3)]
kpe.revert(model)
print("trained", losses[2] < losses[0])
"""


@pytest.mark.full
@pytest.mark.slow_except()
def test_import_convert_and_training_need_no_module_of_keras_src():
    assert "trained True" in run(BACKEND, WITHOUT_INTERNALS)


@pytest.mark.any_backend
def test_every_private_name_that_is_asked_for_is_missing_in_a_test():
    package = pathlib.Path(kpe.__file__).parent
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for files in ("_keras/*.py", "ext/*/_keras/*.py")
        for path in package.glob(files)
    ]
    own = set().union(*map(private_definitions, trees))
    asked = set().union(*map(private_attributes, trees)) - own
    tried = {*OF_USED_OPTIMIZERS, *OF_ATTENTION, *OTHERS}
    tried.update(*DISPENSABLE.values())
    assert asked - tried == set()
