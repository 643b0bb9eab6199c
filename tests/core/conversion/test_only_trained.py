"""Models without a `call`: GANs, VAEs, pairs; only their parts are built."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import BEFORE_3_15, SLOW
from converted_models import Block, float_weights, states_of
from keras_policy_ext._keras import optimizer_variables
from steps import mean_square, normal, numpy, state_of, step

POLICY = "float8/4_from_float32"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.compile... was not called"),
    pytest.mark.filterwarnings("ignore:.*unbuilt state"),
    pytest.mark.filterwarnings("ignore:You are saving a model that has not"),
]


def part(inputs, units, outputs, name):
    """A Sequential of stock layers, one in a block that makes it itself."""
    layers = [Block(units), keras.layers.Dense(outputs)]
    return keras.Sequential([keras.Input((inputs,)), *layers], name=name)


@keras.saving.register_keras_serializable("only_trained")
class Gan(keras.Model):
    """As in guides: two parts, two optimizers, no `call`."""

    def __init__(self, generator=None, discriminator=None, **kwargs):
        super().__init__(**kwargs)
        self.generator = generator or part(4, 4, 6, "generator")
        self.discriminator = discriminator or part(6, 6, 1, "discriminator")

    def compile(self, g_optimizer, d_optimizer):
        super().compile()
        self.g_optimizer = g_optimizer
        self.others = {"d": [d_optimizer]}

    def get_compile_config(self):
        serialize = keras.saving.serialize_keras_object
        found = {
            "g_optimizer": self.g_optimizer,
            "d_optimizer": self.others["d"][0],
        }
        return {name: serialize(value) for name, value in found.items()}

    def compile_from_config(self, config):
        self.compile(
            **{
                name: keras.saving.deserialize_keras_object(value)
                for name, value in config.items()
            }
        )
        self.g_optimizer.build(self.generator.trainable_variables)
        self.others["d"][0].build(self.discriminator.trainable_variables)

    def one_step(self):
        """Losses of a step of each part, without the adversary between."""
        (d_optimizer,) = self.others["d"]
        return [
            step(self.generator, self.g_optimizer, normal(8, 4), mean_square),
            step(self.discriminator, d_optimizer, normal(8, 6), mean_square),
        ]


def gan(**kwargs):
    keras.utils.set_random_seed(0)
    model = Gan()
    model.compile(
        keras.optimizers.Adam(0.01, **kwargs), keras.optimizers.Adam(0.02)
    )
    return model


def by_path(report):
    return {entry.path: entry.policy for entry in report.converted}


@pytest.mark.full
def test_a_model_that_has_no_call_is_converted_and_reverted():
    model = gan()
    assert not model.built
    weights = float_weights(model)
    report = kpe.convert(model, POLICY)
    assert set(by_path(report).values()) == {POLICY}
    assert [path.split("/")[0] for path in by_path(report)] == (
        3 * ["generator"] + 3 * ["discriminator"]
    )
    assert not model.built
    assert len(kpe.inspect(model).layers) >= 6
    assert {e.path for e in kpe.revert(model).converted} == set(by_path(report))
    for now, before in zip(float_weights(model), weights, strict=True):
        np.testing.assert_array_equal(now, before)
    assert len(model.weights) == len(weights)


@pytest.mark.parametrize("how", ["call", "build"])
def test_a_part_without_weights_is_named_though_the_model_says_it_is_built(how):
    class Late(Gan):
        pass

    late = keras.Sequential([keras.layers.Dense(3)], name="late")
    model = Late(late)
    if how == "call":
        with pytest.raises(NotImplementedError):
            model(normal(2, 4))
    else:
        model.build((None, 4))
    assert model.built  # Keras says so
    with pytest.raises(ValueError, match=r"generator .*'late'.*Allowed.*Call"):
        kpe.convert(model, POLICY)
    assert not states_of(model)


def test_each_part_without_weights_is_named_by_its_attribute():
    model = keras.Model()
    model.done = part(4, 4, 2, "finished")
    model.towers = [keras.layers.Dense(3), part(4, 4, 2, "tower")]
    model.heads = {"a": [keras.layers.LSTM(2)]}
    model.partly = keras.Model()
    model.partly.finished = part(4, 4, 2, "finished")
    model.partly.late = keras.layers.Dense(2)
    model.empty = [keras.layers.Dropout(0.1), keras.layers.Add()]
    for function in (kpe.convert, kpe.revert):
        with pytest.raises(ValueError, match="not built") as error:
            function(model)
        message = str(error.value)
        for name in ("towers[0] (", "heads['a'][0] (", "partly.late ("):
            assert name in message
        for name in ("done", "finished", "towers[1]", "empty"):
            assert name not in message
    assert not states_of(model)


def test_parts_that_never_get_weights_need_not_be_built():
    model = gan()
    model.augment = keras.Sequential(
        [keras.layers.RandomFlip(), keras.layers.Dropout(0.1)]
    )
    model.add = keras.layers.Add()
    assert len(kpe.convert(model, POLICY).converted) == 6


@pytest.mark.full
def test_a_model_with_a_call_is_converted_once_its_parts_are_built():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(4)
            self.second = keras.layers.Dense(2)

        def call(self, x):
            return self.second(self.first(x))

    model = Net()
    model.first.build((None, 3))
    with pytest.raises(ValueError, match=r"second \(Dense"):
        kpe.convert(model, POLICY)
    model.second.build((None, 4))
    assert not model.built
    assert len(kpe.convert(model, POLICY).converted) == 2
    outputs = model(normal(8, 3))
    assert outputs.shape == (8, 2)


def test_a_built_model_with_an_unused_part_is_converted_but_for_that_part():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(4)
            self.unused = keras.layers.Dense(2, name="unused")

        def call(self, x):
            return self.used(x)

    model = Net()
    model(normal(2, 3))
    report = kpe.convert(model, POLICY)
    assert len(report.converted) == 1
    assert [entry.path for entry in report.skipped] == ["unused"]
    assert "never called" in report.skipped[0].reason
    assert "1 layer without weights yet, such as 'unused'" in str(report)
    assert "without weights" not in str(kpe.convert(model.used))


def test_nothing_to_convert_is_refused_as_before():
    class Empty(keras.Model):
        pass

    with pytest.raises(ValueError, match="has no weights yet"):
        kpe.convert(Empty())
    with pytest.raises(ValueError, match="has no weights yet"):
        kpe.convert(keras.layers.Dense(2))


@pytest.mark.slow_except()
@pytest.mark.full
@pytest.mark.extension("calibrate")
def test_the_parts_are_calibrated_by_a_function_or_one_by_one():
    some, others = gan(), gan()
    for model in (some, others):
        kpe.convert(model, POLICY)
    x = normal(64, 4)  # Two batches of one shape: each is compiled.
    paths = kpe.calibrate(
        some, x, call=lambda x: some.discriminator(some.generator(x))
    )
    assert len(paths) == 6
    fakes = others.generator.predict(x, verbose=0)
    kpe.calibrate(others.generator, x)
    kpe.calibrate(others.discriminator, fakes)
    for one, other in zip(states_of(some), states_of(others), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow_except()
@pytest.mark.full
@pytest.mark.extension("calibrate")
def test_a_function_gets_batches_as_they_are_and_no_more_than_steps():
    model, seen = gan(), []
    kpe.convert(model, POLICY)
    batches = [(normal(8, 4), normal(8, 6)), (normal(8, 4), normal(8, 6))]

    def call(batch):
        noise, real = batch
        seen.append(real)
        return model.generator(noise), model.discriminator(real)

    assert len(kpe.calibrate(model, iter(batches), steps=1, call=call)) == 6
    assert len(seen) == 1
    assert tuple(seen[0].shape) == (8, 6)


@pytest.mark.extension("calibrate")
def test_a_model_without_a_call_says_how_it_is_calibrated():
    model = gan()
    kpe.convert(model, POLICY)
    before = states_of(model)
    with pytest.raises(ValueError, match=r"without a `call`.*`call=`.*parts"):
        kpe.calibrate(model, normal(8, 4))
    with pytest.raises(TypeError, match=r"`call`.*Allowed: a function"):
        kpe.calibrate(model, normal(8, 4), call="generator")
    for now, then in zip(states_of(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.full
@pytest.mark.skipif(
    BEFORE_3_15,
    reason=f"Keras {keras.__version__} saves no optimizer in a list in a dict",
)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=SLOW), {"gradient_accumulation_steps": 2}],
    ids=str,
)
@pytest.mark.slow_except()
def test_load_model_brings_back_all_parts_and_all_optimizers(tmp_path, options):
    model = gan(**options)
    model.one_step()
    kpe.convert(model, POLICY)
    model.one_step()
    model.save(tmp_path / "gan.keras")
    loaded = kpe.load_model(tmp_path / "gan.keras")
    assert len(states_of(loaded)) == 6
    for now, then in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(numpy(now), numpy(then))
    assert [loaded.one_step() for _ in range(3)] == [
        model.one_step() for _ in range(3)
    ]


@pytest.mark.full
def test_weights_load_into_a_model_that_is_not_built_or_change_nothing(
    tmp_path,
):
    model = gan()
    kpe.convert(model, POLICY)
    model.one_step()
    model.save(tmp_path / "gan.keras")
    fresh = gan()
    kpe.load_weights(fresh, tmp_path / "gan.keras", as_saved=True)
    assert not fresh.built
    for now, then in zip(fresh.weights, model.weights, strict=True):
        np.testing.assert_array_equal(numpy(now), numpy(then))
    late = Gan(keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(ValueError, match=r"generator \("):
        kpe.load_weights(late, tmp_path / "gan.keras")


def test_an_optimizer_keeps_the_order_in_which_it_got_several_parts():
    model = keras.Model()
    model.decoder = part(2, 2, 3, "decoder")
    model.encoder = part(3, 3, 2, "encoder")
    optimizer = keras.optimizers.Adam()

    def variables():
        return [
            *model.encoder.trainable_variables,
            *model.decoder.trainable_variables,
        ]

    optimizer.build(variables())
    model.vae_optimizer = optimizer

    def convert(model):
        kpe.convert(model, "delayed")

    for function in (convert, kpe.revert, convert):
        function(model)
        known = optimizer_variables.known_to_optimizer(optimizer)
        assert [v.path for v in known] == [v.path for v in variables()]
        assert list(map(id, known)) == list(map(id, variables()))


@pytest.mark.full
def test_an_optimizer_of_one_part_gets_no_states_of_another():
    model = gan()
    model.optimizer = model.g_optimizer  # of `compile`, for a part alone
    model.one_step()
    kpe.convert(model, POLICY)
    known = optimizer_variables.known_to_optimizer(model.optimizer)
    wanted = model.generator.trainable_variables
    assert list(map(id, known)) == list(map(id, wanted))
    assert np.all(np.isfinite(model.one_step()))


def twins():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(n, name=f"d{n}") for n in (4, 5, 2)]
    network = keras.Sequential([keras.Input((4,)), *layers], name="network")
    ema = keras.models.clone_model(network)
    ema.set_weights(network.get_weights())
    return network, ema


@pytest.mark.full_except("False-ema", "True-model")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["model", "ema"])
@pytest.mark.parametrize("together", [False, True])
def test_a_model_and_its_copy_are_converted_in_either_order(order, together):
    pair = twins()
    model = keras.Model()
    if together:
        model.network, model.ema = pair
    for number in order:
        kpe.convert(pair[number], POLICY)
    network, ema = pair
    assert len(states_of(network)) == len(states_of(ema)) == 3
    loss = step(network, keras.optimizers.SGD(0.1), normal(8, 4), mean_square)
    assert np.isfinite(loss)
    assert np.any(state_of(network.layers[-1])["outputs_grad"][1] > 0)
    assert not np.any(state_of(ema.layers[-1])["outputs_grad"][1] > 0)
    kpe.revert(ema)
    assert len(states_of(network)) == 3
    assert not states_of(ema)


@pytest.mark.parametrize("number", [0, 1], ids=["model", "ema"])
@pytest.mark.extension("loops")
def test_the_weights_of_a_model_and_its_copy_are_paired_without_states(number):
    network, ema = pair = twins()
    expected = [numpy(w) for w in network.weights]
    paths = [w.path for w in network.weights]
    kpe.convert(pair[number], POLICY)
    for model in pair:
        assert [w.path for w in kpe.loops.weights(model)] == paths
    pairs = list(
        zip(kpe.loops.weights(network), kpe.loops.weights(ema), strict=True)
    )
    for value, average in pairs:
        average.assign(0.5 * value + 0.25 * average)
    for (_, average), before in zip(pairs, expected, strict=True):
        np.testing.assert_allclose(numpy(average), 0.75 * before, rtol=1e-6)


@pytest.mark.parametrize("number", [0, 1], ids=["model", "ema"])
def test_set_weights_of_a_copy_without_float8_is_refused_and_changes_nothing(
    number,
):
    network, ema = pair = twins()
    kpe.convert(pair[number], POLICY)
    before = [numpy(w) for w in ema.weights]
    with pytest.raises(ValueError):
        ema.set_weights(network.get_weights())
    for now, then in zip(ema.weights, before, strict=True):
        np.testing.assert_array_equal(numpy(now), then)


def test_a_copy_made_of_a_converted_model_takes_its_weights_with_the_states():
    network, _ = twins()
    kpe.convert(network, POLICY)
    step(network, keras.optimizers.SGD(0.1), normal(8, 4), mean_square)
    copy = keras.models.clone_model(network)
    assert [w.path for w in copy.weights] == [w.path for w in network.weights]
    copy.set_weights(network.get_weights())
    for one, other in zip(states_of(copy), states_of(network), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.extension("loops")
def test_weights_of_a_module_are_those_of_the_layers_in_it():
    if keras.backend.backend() != "torch":
        pytest.skip("torch.nn.Module is PyTorch's")
    import torch

    network, _ = twins()
    kpe.convert(network, POLICY)
    module = torch.nn.Sequential(network)
    assert kpe.loops.weights(module) == kpe.loops.weights(network)
