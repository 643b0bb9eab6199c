"""Float8 models of PyTorch's loops: their parameters, copies and files."""

import gc

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import BEFORE_3_15
from converted_models import states_of
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from steps import numpy
from torch_loops import (
    adam,
    adamw,
    assert_same_bits,
    batches,
    network,
    plain,
    trained,
)

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="torch.optim is PyTorch's"
)


def test_parameters_are_in_one_order_converted_loaded_and_copied(tmp_path):
    import copy

    model = network()
    model.save(tmp_path / "model.keras")
    names = [name for name, _ in model.named_parameters()]
    loaded = kpe.load_model(tmp_path / "model.keras")
    for other in (loaded, copy.deepcopy(model)):
        assert [name for name, _ in other.named_parameters()] == names


def built(layer):
    layer.build((None, 4))
    return layer


def test_a_layer_has_the_parameters_of_its_copy_converted_or_frozen():
    """Of one in a `torch.nn.Module`, which is copied part by part."""
    import copy

    made = built(kpe.layers.Dense(2, dtype="float8/4_from_float32"))
    converted = built(keras.layers.Dense(2))
    kpe.convert(converted, "float8/4_from_float32")
    frozen = built(keras.layers.Dense(2))
    kpe.freeze(frozen)
    for layer in (made, converted, frozen):
        other = copy.deepcopy(layer)
        assert list(layer.state_dict()) == list(other.state_dict())
        names = [name for name, _ in layer.named_parameters()]
        assert names == [name for name, _ in other.named_parameters()]


def test_an_optimizer_goes_on_with_a_model_that_was_loaded(tmp_path):
    import copy

    model = network()
    optimizer = adam(model.parameters())
    for x, y in batches(3):
        plain(model, optimizer, None, x, y)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    resumed = adam(loaded.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x, y in batches(3):
        plain(model, optimizer, None, x, y)
        plain(loaded, resumed, None, x, y)
    assert_same_bits(model, loaded)


def test_an_averaged_model_follows():
    import torch

    model = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = adamw(model.parameters())
    for x, y in batches(4):
        plain(model, optimizer, None, x, y)
        average.update_parameters(model)
    x, _ = next(batches(1))
    found = numpy(average(torch.tensor(x)))
    assert np.all(np.isfinite(found))
    for state in states_of(average.module):
        np.testing.assert_array_equal(numpy(state)[:, 0], VALID_MARK)


@pytest.mark.extension("loops")
def test_an_averaged_module_follows_a_layer_in_it():
    import torch

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = built(keras.layers.Dense(2))
            kpe.convert(self.dense, "float8/4_from_float32")

        def forward(self, x, training=None):
            return self.dense(x, training=training)

    module = Module()
    average = torch.optim.swa_utils.AveragedModel(module)
    optimizer = adam(module.parameters())
    for _ in range(2):
        x = np.ones((3, 4), "float32")
        plain(module, optimizer, None, x, x[:, :2])
        average.update_parameters(module)
    for kept, weight in zip(
        kpe.loops.weights(average), kpe.loops.weights(module), strict=True
    ):
        assert kept.shape == weight.shape


def test_accumulation_resumes_in_the_middle(tmp_path):
    """What was observed in the micro-batches before is in the file."""
    model = network()
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    model.compile(optimizer, "mse")
    data = list(batches(4))
    data[0] = (100 * data[0][0], data[0][1])
    model.train_on_batch(*data[0])
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    for x, y in data[1:]:
        model.train_on_batch(x, y)
        loaded.train_on_batch(x, y)
    assert_same_bits(model, loaded)
    assert numpy(states_of(model)[0])[0, 10] == np.abs(data[0][0]).max()


def test_a_file_has_the_amaxes_of_micro_batches_themselves(tmp_path):
    """And 1 for a use: not multiplied as they are among gradients."""
    model = network()
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    model.compile(optimizer, "mse")
    ((x, y),) = batches(1)
    model.train_on_batch(x, y)
    model.save_weights(tmp_path / "model.weights.h5")
    found = []

    def collect(name, entry):
        if name.endswith(".observed"):
            found.append(np.array(entry))

    with h5py.File(tmp_path / "model.weights.h5") as file:
        file.visititems(collect)
    assert len(found) == len(states_of(model))
    for matrix in found:
        np.testing.assert_array_equal(matrix[:, 0], 1.0)
    assert np.abs(x).max() in [matrix[0, 1:9].max() for matrix in found]


@pytest.mark.parametrize("name", ["bfloat16", "half", "double"])
@pytest.mark.extension("inspect")
def test_a_state_that_a_module_has_cast_is_refused_until_it_is_cast_back(name):
    import torch

    model = trained(plain, adam, 2, unmodified=True)
    getattr(model, name)()
    for use in (model, lambda x: kpe.inspect(model)):
        with pytest.raises(ValueError, match=r"state .*was cast.*float\(\)"):
            use(torch.ones((2, 8)))
    model.float()
    plain(model, adam(model.parameters()), None, *next(batches(1)))
    for state in states_of(model):
        assert state.value.dtype == torch.float32
        np.testing.assert_array_equal(numpy(state)[:, 0], VALID_MARK)


@pytest.mark.skipif(
    BEFORE_3_15,
    reason=f"Keras {keras.__version__} itself leaves tensors in `keras.tree`",
)
@pytest.mark.parametrize(
    "recipe", ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"]
)
def test_a_step_leaves_no_tensor_to_be_collected_as_garbage(recipe):
    """Each would take its memory until a collection, which a GPU waits for."""
    import torch

    x = torch.ones(16, 32)
    layer = kpe.layers.Dense(32, dtype=kpe.Float8DTypePolicy(recipe=recipe))

    def step():
        layer(x).sum().backward()
        layer.zero_grad()

    def tensors():
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    step()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        step()
        assert tensors() == before
    finally:
        gc.enable()
