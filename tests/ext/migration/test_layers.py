"""Layers and their weights, in files as tf_keras writes them."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext.migration import load_legacy_model
from legacy_files import (
    functional_config,
    layer_in_graph,
    sequential_config,
    write_archive,
    write_h5,
)


def source(name, *shape):
    return layer_in_graph(
        name, "InputLayer", [], batch_input_shape=[None, *shape]
    )


def node(*names, **kwargs):
    return [[[name, 0, 0, kwargs] for name in names]]


def counting(*shape):
    return np.arange(np.prod(shape), dtype="float32").reshape(shape) / 8


@pytest.mark.full
def test_arguments_of_a_call_that_are_none_are_left_out(tmp_path):
    # tf_keras writes both next to the states of a Bidirectional.
    nothing = {"initial_state": None, "constants": None}
    gru = {"name": "gru", "units": 1, "reset_after": False}
    layers = [
        source("x", 2, 1),
        source("a", 1),
        source("b", 1),
        layer_in_graph(
            "both",
            "Bidirectional",
            node("x", "a", "b", **nothing),
            layer={"class_name": "GRU", "config": gru},
        ),
    ]
    arrays = {
        f"{way}/{name}:0": np.zeros(shape, "float32")
        for way in ("forward_gru", "backward_gru")
        for name, shape in (("k", (1, 3)), ("r", (1, 3)), ("b", 3))
    }
    config = functional_config(layers, ["x", "a", "b"], "both")
    path = write_h5(tmp_path / "m.h5", config, {"both": arrays})

    model = load_legacy_model(path)

    # All weights are 0: each of two steps halves the state.
    states = [np.full((1, 1), value, "float32") for value in (4, 8)]
    y = model([np.ones((1, 2, 1), "float32"), *states])
    np.testing.assert_allclose(ops.convert_to_numpy(y), [[1, 2]])


def test_group_of_a_class_with_capitals_in_a_row_is_found(tmp_path):
    config = sequential_config(
        ("ConvLSTM1D", {"name": "c", "filters": 1, "kernel_size": [1]}),
        shape=(2, 3, 1),
    )
    arrays = [counting(1, 1, 4), counting(1, 1, 4), counting(4)]
    paths = [f"layers/conv_lstm1d/cell/vars/{i}" for i in range(3)]
    tree = dict(zip(paths, arrays, strict=True))

    model = load_legacy_model(write_archive(tmp_path / "m", config, tree))

    for weight, array in zip(model.get_weights(), arrays, strict=True):
        np.testing.assert_array_equal(weight, array)


class Nameless(keras.layers.Layer):
    """A layer of a user, whose config is but what it adds."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))

    def call(self, x):
        return ops.matmul(x, self.kernel)

    def get_config(self):
        return {"units": self.units}


@pytest.mark.parametrize("ending", ["h5", "keras"])
def test_layer_without_a_name_in_its_config_has_that_of_its_entry(
    tmp_path, ending
):
    layers = [source("x", 2)]
    for name, of in (("second", "x"), ("first", "second")):
        layers.append(layer_in_graph(name, "Nameless", node(of), units=2))
        del layers[-1]["config"]["name"]
    arrays = {"second": counting(2, 2), "first": counting(2, 2) + 1}
    config = functional_config(layers, ["x"], "first")
    path = tmp_path / f"m.{ending}"
    if ending == "h5":
        weights = {name: {"k:0": array} for name, array in arrays.items()}
        write_h5(path, config, weights)
    else:
        weights = {
            "layers/nameless/vars/0": arrays["second"],
            "layers/nameless_1/vars/0": arrays["first"],
        }
        write_archive(path, config, weights)

    model = load_legacy_model(path, custom_objects={"Nameless": Nameless})

    for name, array in arrays.items():
        (weight,) = model.get_layer(name).get_weights()
        np.testing.assert_array_equal(weight, array)


def dense(name):
    return {"name": name, "units": 2, "use_bias": False}


@pytest.mark.parametrize("is_sequential", [True, False])
def test_names_that_differ_by_a_slash_stay_two(tmp_path, is_sequential):
    names = ["a/b", "a_b", "c/d"]
    if is_sequential:
        layers = [("Dense", dense(name)) for name in names]
        config = sequential_config(*layers, shape=(2,))
    else:
        layers = [source("x", 2)]
        for name, of in zip(names, ["x", *names], strict=False):
            entry = layer_in_graph(name, "Dense", node(of), **dense(name))
            layers.append(entry)
        config = functional_config(layers, ["x"], "c/d")
    arrays = {name: counting(2, 2) + i for i, name in enumerate(names)}
    weights = {name: {"k:0": array} for name, array in arrays.items()}

    model = load_legacy_model(write_h5(tmp_path / "m.h5", config, weights))

    for name, legacy in (("a_b_1", "a/b"), ("a_b", "a_b"), ("c_d", "c/d")):
        (weight,) = model.get_layer(name).get_weights()
        np.testing.assert_array_equal(weight, arrays[legacy])


@pytest.mark.parametrize(
    "dtype", ["int64", {"class_name": "Policy", "config": {"name": "int64"}}]
)
def test_fractions_are_discretized(tmp_path, dtype):
    # tf_keras wrote the dtype of the outputs.
    fields = {"name": "d", "bin_boundaries": [-0.5, 0.0, 0.5], "dtype": dtype}
    config = sequential_config(("Discretization", fields), shape=(4,))
    x = np.array([[-0.75, -0.25, 0.25, 0.75]], "float32")

    model = load_legacy_model(write_h5(tmp_path / "m.h5", config, {}))

    y = ops.convert_to_numpy(model(x))
    np.testing.assert_array_equal(y, [[0, 1, 2, 3]])


def test_crop_that_keras_3_leaves_out_is_told(tmp_path):
    fields = {"name": "crop", "height": 2, "width": 2}
    config = sequential_config(("RandomCrop", fields), shape=(4, 4, 1))
    path = write_h5(tmp_path / "m.h5", config, {})

    with pytest.warns(UserWarning, match="RandomCrop 'crop' .*training only"):
        load_legacy_model(path)


@pytest.mark.parametrize("ending", ["h5", "keras"])
@pytest.mark.parametrize("trainable", [True, False])
def test_wrapper_gets_its_own_weights_too(tmp_path, ending, trainable):
    inner = {"name": "dense", "units": 3, "trainable": trainable}
    inner = {"class_name": "Dense", "config": inner}
    fields = {"name": "s", "layer": inner, "trainable": trainable}
    config = sequential_config(("SpectralNormalization", fields), shape=(2,))
    kernel, bias, vector = counting(2, 3), counting(3) + 1, counting(1, 3) + 2
    path = tmp_path / f"m.{ending}"
    if ending == "h5":
        arrays = {"kernel": kernel, "bias": bias, "vector_u": vector}
        # What is not trainable is the wrapper's own first.
        order = ["kernel", "bias", "vector_u"]
        if not trainable:
            order = ["kernel", "vector_u", "bias"]
        saved = {f"s/{name}:0": arrays[name] for name in order}
        write_h5(path, config, {"s": saved})
    else:
        where = "layers/spectral_normalization"
        saved = {"vars/0": kernel, "vars/1": vector}
        saved |= {"layer/vars/0": kernel, "layer/vars/1": bias}
        saved = {f"{where}/{name}": array for name, array in saved.items()}
        write_archive(path, config, saved)

    model = load_legacy_model(path)

    layer = model.get_layer("s")
    for variable, array in (
        (layer.layer.kernel, kernel),
        (layer.layer.bias, bias),
        (layer.vector_u, vector),
    ):
        value = ops.convert_to_numpy(variable)
        np.testing.assert_array_equal(value, array)


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_direction_that_was_frozen_is_told_by_its_names(tmp_path, first):
    inner = {"class_name": "SimpleRNN", "config": {"name": "r", "units": 1}}
    fields = {"name": "forward_b", "layer": inner}
    config = sequential_config(("Bidirectional", fields), shape=(2, 1))
    ways = sorted(["backward", "forward"], key=lambda way: way != first)
    arrays = {
        way: [np.full(shape, value, "float32") for shape in ((1, 1), (1, 1), 1)]
        for way, value in (("forward", 1), ("backward", 2))
    }
    saved = {
        f"forward_b/{way}_r/simple_rnn_cell/{i}:0": array
        for way in ways
        for i, array in enumerate(arrays[way])
    }
    path = write_h5(tmp_path / "m.h5", config, {"forward_b": saved})

    layer = load_legacy_model(path).get_layer("forward_b")

    for way in ways:
        weights = getattr(layer, f"{way}_layer").get_weights()
        for weight, array in zip(weights, arrays[way], strict=True):
            np.testing.assert_array_equal(weight, array)
