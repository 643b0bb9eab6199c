"""Loops of PyTorch as they are written for any model train a float8 one."""

import functools
import gc

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import BEFORE_3_15
from converted_models import states_of
from keras_policy_ext.numerics.observations import SEALED
from steps import numpy

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="torch.optim is PyTorch's"
)

LENGTH = 16
DELAYED = kpe.recipes.DelayedScaling(amax_history_length=LENGTH)
FREE = 4  # outputs of the model


def batches(count, size=16):
    rng = np.random.default_rng(0)
    target = rng.normal(size=(8, FREE))
    for x in rng.normal(size=(count, size, 8)).astype("float32"):
        yield x, np.sin(x @ target).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(FREE)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    kpe.convert(model, DELAYED)
    return model


def adam(parameters):
    import torch

    return torch.optim.Adam(parameters, 1e-3)


def adamw(parameters):
    import torch

    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.5)


def momentum(parameters):
    import torch

    return torch.optim.SGD(
        parameters, 0.01, momentum=0.9, nesterov=True, weight_decay=1e-2
    )


def by_size(parameters):
    """Weight decay for matrices only, as language models are trained."""
    import torch

    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2]},
        ],
        1e-3,
        weight_decay=0.5,
    )


OPTIMIZERS = [adam, adamw, momentum, by_size]


def loss_of(model, x, y):
    import torch

    x, y = torch.tensor(x), torch.tensor(y)
    return torch.mean((model(x, training=True) - y) ** 2)


def plain(model, optimizer, parameters, x, y):
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def with_zeros(model, optimizer, parameters, x, y):
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, x, y).backward()
    optimizer.step()


def clipped(model, optimizer, parameters, x, y):
    import torch

    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.125)
    optimizer.step()


def scaled(model, optimizer, parameters, x, y):
    """Mixed precision as in PyTorch's examples."""
    import torch

    if not hasattr(optimizer, "scaler"):
        optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler = optimizer.scaler
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters, 0.125)
    scaler.step(optimizer)
    scaler.update()


def accumulated(model, optimizer, parameters, x, y):
    optimizer.zero_grad()
    for half in (slice(0, 8), slice(8, 16)):
        (loss_of(model, x[half], y[half]) / 2).backward()
    optimizer.step()


def trained(loop, make, steps, unmodified, model=None, call=None):
    """A model after some steps, of all parameters or by `kpe.loops`."""
    model = model or network()
    parameters = list(model.parameters())
    if not unmodified:
        parameters = kpe.loops.parameters(model)
    optimizer = make(parameters)
    for x, y in batches(steps):
        loop(model if call is None else call, optimizer, parameters, x, y)
        if not unmodified:
            kpe.loops.settle(model)
    return model


def forward_error(model):
    """How far float8 is from float32, as a fraction, on a new batch."""
    x = np.random.default_rng(9).normal(size=(256, 8)).astype("float32")
    found = numpy(model(x))
    kpe.revert(model)
    exact = numpy(model(x))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def assert_same_bits(first, second):
    for a, b in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b), err_msg=a.path)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("loop", [plain, with_zeros, accumulated])
def test_a_loop_over_all_parameters_has_the_bits_of_kpe_loops(loop, make):
    found = trained(loop, make, 12, unmodified=True)
    assert_same_bits(found, trained(loop, make, 12, unmodified=False))


@functools.cache
def error_with_kpe_loops(loop, make):
    """The reference after 1000 steps."""
    return forward_error(trained(loop, make, 1000, unmodified=False))


def assert_observed_and_as_exact(model, loop, make):
    for state in states_of(model):
        matrix = numpy(state)
        assert np.all(matrix[:, 0] == SEALED)
        assert np.all(matrix[:, 10:] > 0.0), "the whole history is observed"
    assert forward_error(model) <= 1.2 * error_with_kpe_loops(loop, make)


@pytest.mark.parametrize(
    ("loop", "make"), [(plain, adamw), (clipped, momentum), (scaled, adam)]
)
def test_after_1000_steps_float8_is_as_exact_as_with_kpe_loops(loop, make):
    found = trained(loop, make, 1000, unmodified=True)
    assert_observed_and_as_exact(found, loop, make)


def test_after_1000_compiled_steps_float8_is_as_exact():
    import torch

    model = network()
    found = trained(plain, adamw, 1000, True, model, torch.compile(model))
    assert_observed_and_as_exact(found, plain, adamw)


@pytest.mark.parametrize("loop", [clipped, scaled])
def test_what_is_done_to_gradients_is_not_done_to_observations(loop):
    """The order of a sum over parameters is all that differs."""
    found = trained(loop, momentum, 4, unmodified=True)
    expected = trained(loop, momentum, 4, unmodified=False)
    for a, b in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=1e-5, atol=1e-6)


def test_the_norm_of_gradients_is_that_of_the_weights():
    import torch

    model = network()
    ((x, y),) = batches(1)
    loss_of(model, x, y).backward()
    weights = [p.grad for p in kpe.loops.parameters(model)]
    expected = torch.linalg.vector_norm(torch.cat([g.ravel() for g in weights]))
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    # Four norms of parts are combined in another order.
    assert abs(found - expected) <= 4 * 2.0**-23 * expected


def test_a_step_that_a_scaler_skips_leaves_no_trace():
    import torch

    model = network()
    optimizer = adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    (x, y), (x_next, y_next) = batches(2)
    before = [numpy(w).copy() for w in model.weights]
    x_inf = x.copy()
    x_inf[0, 0] = np.inf
    scaler.scale(loss_of(model, x_inf, y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(numpy(weight), value)
    scaled_down = network()
    for each in (model, scaled_down):
        optimizer = adam(each.parameters())
        optimizer.zero_grad()
        (8 * loss_of(each, x_next, y_next)).backward()
        optimizer.step()
    assert_same_bits(model, scaled_down)


def test_what_saturates_is_still_seen_by_a_scaler():
    """The cast to float8 makes an infinite gradient finite."""
    import torch

    model = network()
    model.layers[-1].bias.trainable = False
    model.layers[0].bias.trainable = False
    optimizer = adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    ((x, y),) = batches(1)
    scaler.scale(loss_of(model, x, y) * np.inf).backward()
    before = numpy(model.layers[0].kernel).copy()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    np.testing.assert_array_equal(numpy(model.layers[0].kernel), before)


def test_a_backward_pass_that_is_discarded_is_not_observed():
    """As the discriminator's in the generator's half of a GAN."""
    model, other = network(), network()
    (x, y), (x_other, y_other) = batches(2)
    optimizer = adam(model.parameters())
    loss_of(model, 100 * x_other, y_other).backward()
    plain(model, optimizer, None, x, y)
    plain(other, adam(other.parameters()), None, x, y)
    assert_same_bits(model, other)


def test_an_optimizer_of_other_weights_enters_nothing():
    model = network()
    first, last = model.layers
    before = numpy(states_of(model)[1]).copy()
    ((x, y),) = batches(1)
    loss_of(model, x, y).backward()
    adam(first.parameters()).step()
    np.testing.assert_array_equal(numpy(states_of(model)[1]), before)
    assert numpy(states_of(model)[0])[0, 10] == np.abs(x).max()
    adam(last.parameters()).step()
    assert numpy(states_of(model)[1])[2, 10] > 0


def test_an_optimizer_of_the_kernels_alone_enters_what_they_saw():
    model = network()
    optimizer = adam([layer.kernel.value for layer in model.layers])
    ((x, y),) = batches(1)
    plain(model, optimizer, None, x, y)
    assert numpy(states_of(model)[0])[0, 10] == np.abs(x).max()


@pytest.mark.parametrize("steps", [None, 3])
def test_fit_and_a_loop_take_turns(steps):
    model, other = network(), network()
    xs, ys = (np.concatenate(part) for part in zip(*batches(6), strict=True))
    for each in (model, other):
        each.compile(
            keras.optimizers.SGD(0.01, gradient_accumulation_steps=steps), "mse"
        )
        each.fit(xs, ys, batch_size=16, verbose=0, shuffle=False)
    trained(plain, adamw, 3, True, model)
    trained(plain, adamw, 3, False, other)
    for each in (model, other):
        each.fit(xs, ys, batch_size=16, verbose=0, shuffle=False)
    assert_same_bits(model, other)


def test_a_loop_in_the_manner_of_keras_reads_gradients_and_applies_them():
    import torch

    model, other = network(), network()
    optimizer = keras.optimizers.SGD(0.01)
    for x, y in batches(4):
        model.zero_grad()
        loss_of(model, x, y).backward()
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in weights], weights)
    other.compile(keras.optimizers.SGD(0.01), "mse")
    for x, y in batches(4):
        other.train_on_batch(x, y)
    assert_same_bits(model, other)


def test_micro_batches_of_a_keras_optimizer_are_observed_together():
    model = network()
    xs, ys = (np.concatenate(part) for part in zip(*batches(3), strict=True))
    xs[0] *= 100  # in the first micro-batch, whose gradients are cleared
    optimizer = keras.optimizers.SGD(1e-6, gradient_accumulation_steps=3)
    model.compile(optimizer, "mse")
    model.fit(xs, ys, batch_size=16, verbose=0, shuffle=False)
    history = numpy(states_of(model)[0])[0, 10:]
    np.testing.assert_array_equal(history[1:], 0.0)
    assert history[0] == np.abs(xs).max()


def closures(make):
    """A loop that takes the gradients inside of the step."""

    def loop(model, optimizer, parameters, x, y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return trained(loop, make, 6, unmodified=True)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_step_with_a_closure_has_the_bits_of_one_without(make):
    assert_same_bits(closures(make), trained(plain, make, 6, unmodified=True))


def test_lbfgs_leaves_settled_states():
    import torch

    model = closures(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    for state in states_of(model):
        matrix = numpy(state)
        np.testing.assert_array_equal(matrix[:, :9], [[SEALED] + [0.0] * 8] * 3)
        assert np.all(matrix[:, 9] > 0.0)


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
        np.testing.assert_array_equal(numpy(state)[:, 0], SEALED)


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
        np.testing.assert_array_equal(numpy(state)[:, 0], SEALED)


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
