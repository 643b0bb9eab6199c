"""Optimizers with moments of one byte: what they learn, keep and refuse."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext import reference
from keras_policy_ext.ext.moments.slots import QuantizedSlot
from keras_policy_ext.ext.reference.moments import moment_key
from keras_policy_ext.numerics import primitives
from keras_policy_ext.optimizers import dequantize_state, quantize_state
from refusals import refused
from steps import no_grad, normal, numpy

BACKEND = keras.backend.backend()
OPTIMIZERS = keras.optimizers

SHAPE = (64, 80)
"""Of 20 blocks of 256 numbers."""

X = normal(256, 64)
Y = np.argmax(X[:, :10], axis=1)


def weight(shape=SHAPE):
    return keras.Variable(normal(*shape, seed=3), dtype="float32")


def built(optimizer, shape=SHAPE):
    variable = weight(shape)
    optimizer.build([variable])
    return optimizer, variable


def apply(optimizer, variable, gradient):
    with no_grad():
        optimizer.apply([ops.convert_to_tensor(gradient)], [variable])


def slots_of(optimizer):
    return [v for v in optimizer._variables if isinstance(v, QuantizedSlot)]


def bits(optimizer):
    return [numpy(v).copy() for v in optimizer.variables]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def model_with(optimizer, seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def fitted(model, epochs=1):
    history = model.fit(
        X, Y, batch_size=64, epochs=epochs, verbose=0, shuffle=False
    )
    return history.history["loss"][-1]


def test_an_adam_takes_27_hundredths_of_the_bytes():
    shape = (512, 512)
    sizes = [
        sum(each.nbytes for each in bits(built(optimizer, shape)[0]))
        for optimizer in (
            quantize_state(OPTIMIZERS.Adam()),
            quantize_state(OPTIMIZERS.Adam(), "mx"),
            OPTIMIZERS.Adam(),
        )
    ]
    assert sizes[0] <= 0.255 * sizes[2]
    assert sizes[1] <= 0.27 * sizes[2]


@pytest.mark.parametrize("form", ["float8", "mx"])
def test_slots_are_those_of_numpy_after_equal_gradients(form):
    """A float32 optimizer starts each step from the numbers of the slots."""
    # On PyTorch a stock one computes moments by other operations.
    stock = quantize_state(OPTIMIZERS.Adam(0.01), minimum_size=10**6)
    stock, its_weight = built(stock)
    optimizer, variable = built(quantize_state(OPTIMIZERS.Adam(0.01), form))
    for step in range(3):
        for slot, place in zip(slots_of(optimizer), (2, 3), strict=True):
            stock._variables[place].assign(slot.value)
        gradient = normal(*SHAPE, seed=step)
        apply(stock, its_weight, gradient)
        apply(optimizer, variable, gradient)
        for slot in slots_of(optimizer):
            wanted = reference.quantize_moments(
                numpy(stock._variables[slot.number]),
                slot.kind,
                form,
                moment_key(step, slot.number),
            )
            assert equal([numpy(part) for part in slot.parts], wanted)


def numbers_after(gradients, optimizer, shape=SHAPE):
    optimizer, variable = built(optimizer, shape)
    for gradient in gradients:
        apply(optimizer, variable, gradient)
    return [numpy(slot.value) for slot in slots_of(optimizer)], variable


@pytest.mark.full
def test_a_second_moment_follows_a_change_of_magnitude():
    """A step changes it by a thousandth, which rounding to nearest undoes."""
    large = np.ones(SHAPE, "float32")
    small = large.copy()
    small[:, ::2] = 0.1
    optimizer = quantize_state(OPTIMIZERS.Adam(1e-3, beta_2=0.99))
    found, _ = numbers_after([large] * 20 + [small] * 100, optimizer)
    mean = np.sqrt(found[1][:, ::2]).mean()  # as a step reads it
    stays = (1 - 0.99**20) * 0.99**100
    wanted = stays + 0.01 * (1 - 0.99**100)
    assert mean == pytest.approx(np.sqrt(wanted), rel=0.05)


HOSTILE = {
    "zeros": [np.zeros(SHAPE)] * 20,
    "one huge number": [np.eye(*SHAPE) * 1e30, np.ones(SHAPE)],
    "denormals": [np.full(SHAPE, 1e-41)] * 5,
    "infinity": [np.full(SHAPE, np.inf)],
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("form", ["float8", "mx"])
def test_hostile_gradients_leave_finite_slots(case, form):
    gradients = [g.astype("float32") for g in HOSTILE[case]]
    found, variable = numbers_after(
        gradients, quantize_state(OPTIMIZERS.Adam(), form)
    )
    assert all(np.all(np.isfinite(each)) for each in found)
    if case == "zeros":
        assert not any(each.any() for each in found)
        assert equal([numpy(variable)], [normal(*SHAPE, seed=3)])


def test_a_step_with_nan_under_a_loss_scaler_changes_no_slot():
    scaler = kpe.mixed_precision.LossScaleOptimizer(
        quantize_state(OPTIMIZERS.Adam())
    )
    scaler, variable = built(scaler)
    apply(scaler, variable, 1e4 * normal(*SHAPE))
    before = bits(scaler.inner_optimizer)
    apply(scaler, variable, np.full(SHAPE, np.nan, "float32"))
    assert equal(before, bits(scaler.inner_optimizer))


MAKE = {
    "Adam": lambda: OPTIMIZERS.Adam(1e-2),
    "AdamW": lambda: OPTIMIZERS.AdamW(1e-2, weight_decay=0.1),
    "Adamax": lambda: OPTIMIZERS.Adamax(1e-2),
    "Nadam": lambda: OPTIMIZERS.Nadam(1e-2),
    "Lion": lambda: OPTIMIZERS.Lion(1e-3),
    "RMSprop": lambda: OPTIMIZERS.RMSprop(1e-3, momentum=0.9),
    "SGD": lambda: OPTIMIZERS.SGD(0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda: OPTIMIZERS.Adagrad(1e-2),
    "Adadelta": lambda: OPTIMIZERS.Adadelta(1.0),
    "Lamb": lambda: OPTIMIZERS.Lamb(1e-2),
    "Adafactor": lambda: OPTIMIZERS.Adafactor(1e-2),
    "averages": lambda: OPTIMIZERS.Adam(1e-2, use_ema=True, amsgrad=True),
    "accumulation": lambda: OPTIMIZERS.Adam(
        1e-2, gradient_accumulation_steps=2, global_clipnorm=1.0
    ),
    "schedule": lambda: OPTIMIZERS.Adam(
        OPTIMIZERS.schedules.CosineDecay(1e-2, 20)
    ),
    "Keras's scaler": lambda: OPTIMIZERS.LossScaleOptimizer(
        OPTIMIZERS.Adam(1e-2)
    ),
    "scaler": lambda: kpe.mixed_precision.LossScaleOptimizer(
        OPTIMIZERS.Adam(1e-2)
    ),
}


#: Functions from a learning rate to one of Keras's optimizers, for all whose
#: state can be quantized. Without momentum, SGD has none.
MAKE_BY_RATE = {
    name: cls
    for name, cls in vars(OPTIMIZERS).items()
    if isinstance(cls, type)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    and name not in ("OptimizerMap", "Ftrl", "SGD")
}
MAKE_BY_RATE["SGD"] = lambda rate: OPTIMIZERS.SGD(rate, momentum=0.9)


@pytest.mark.full_except("Adam")
@pytest.mark.parametrize("name", mostly(MAKE, "Adam", "accumulation", "scaler"))
def test_optimizers_learn_as_in_float32(name):
    loss = fitted(model_with(MAKE[name]()), 2)
    optimizer = MAKE[name]()
    assert quantize_state(optimizer) is optimizer
    assert fitted(model_with(optimizer), 2) == pytest.approx(loss, rel=0.01)
    innermost = getattr(optimizer, "inner_optimizer", optimizer)
    assert slots_of(innermost)


def test_what_is_no_moment_stays_as_it_is():
    optimizer = OPTIMIZERS.Adam(
        amsgrad=True, use_ema=True, gradient_accumulation_steps=2
    )
    optimizer, _ = built(quantize_state(optimizer))
    names = {v.name.rpartition("variable")[2] for v in slots_of(optimizer)}
    assert len(slots_of(optimizer)) == 2
    assert all(n.endswith(("_momentum", "_velocity")) for n in names)
    centered = OPTIMIZERS.RMSprop(momentum=0.9, centered=True)
    assert len(slots_of(built(quantize_state(centered))[0])) == 1


@pytest.mark.parametrize("name", MAKE_BY_RATE)
def test_rounding_moments_changes_steps_only(name):
    """At a learning rate of almost 0, weights are as with float32 state."""
    made = [MAKE_BY_RATE[name](1e-6) for _ in range(2)]
    quantized, stock = built(quantize_state(made[0])), built(made[1])
    assert slots_of(quantized[0])
    for _ in range(3):
        gradient = normal(*SHAPE)
        for each in (quantized, stock):
            apply(*each, gradient)
    np.testing.assert_allclose(
        numpy(quantized[1]), numpy(stock[1]), rtol=1e-4, atol=1e-4
    )


def test_ftrl_is_refused_as_it_computes_weights_from_its_slots():
    optimizer = OPTIMIZERS.Ftrl()
    with refused(ValueError, "no moments", "Ftrl with", "Keep it as it is."):
        quantize_state(optimizer)
    assert type(optimizer) is OPTIMIZERS.Ftrl


def test_where_no_slot_is_known_the_error_names_the_argument_for_it():
    with refused(ValueError, "no moments", "SGD with", "say by `slots`"):
        quantize_state(OPTIMIZERS.SGD(), slots={"speed": "first"})


def test_small_and_excluded_weights_keep_float32():
    weights = [
        weight(),
        weight((10, 10)),
        keras.Variable(normal(*SHAPE), name="embeddings"),
    ]
    optimizer = quantize_state(OPTIMIZERS.SGD(momentum=0.9), exclude="embed")
    optimizer.build(weights)
    assert [isinstance(m, QuantizedSlot) for m in optimizer.momentums] == [
        True,
        False,
        False,
    ]


@pytest.mark.full
def test_a_file_keeps_all_bits_and_training_goes_on_with_them(tmp_path):
    model = model_with(quantize_state(OPTIMIZERS.Adam(1e-2)))
    fitted(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, OPTIMIZERS.Adam)
    assert equal(bits(model.optimizer), bits(loaded.optimizer))
    assert fitted(model) == fitted(loaded)
    assert equal(bits(model.optimizer), bits(loaded.optimizer))
    assert equal(map(numpy, model.weights), map(numpy, loaded.weights))


@pytest.mark.full
def test_bfloat16_weights_beside_one_byte_go_on_from_a_file(tmp_path):
    rounding = kpe.mixed_precision.StochasticRounding
    with kpe.policy_scope("bfloat16"):
        model = model_with(
            quantize_state(rounding(OPTIMIZERS.Adam(1e-2), seed=1))
        )
    first = fitted(model)
    kpe.convert(model, "delayed")
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, rounding)
    assert slots_of(loaded.optimizer.inner_optimizer)
    assert fitted(model) == fitted(loaded) < first
    assert equal(bits(model.optimizer), bits(loaded.optimizer))
    assert equal(map(numpy, model.weights), map(numpy, loaded.weights))
    assert loaded.layers[0].kernel.dtype == "bfloat16"


@pytest.mark.full
def test_float32_and_one_byte_load_into_each_other(tmp_path):
    stored = model_with(quantize_state(OPTIMIZERS.Adam(1e-2)))
    plain = model_with(OPTIMIZERS.Adam(1e-2))
    fitted(stored)
    fitted(plain)
    path = tmp_path / "stored.weights.h5"
    stored.save_weights(path)
    plain.save_weights(tmp_path / "plain.weights.h5")
    momentum = numpy(plain.optimizer._momentums[0]).copy()
    with pytest.warns(UserWarning, match="are rounded: in the file"):
        plain.load_weights(path)
    wanted = numpy(stored.optimizer._momentums[0])
    assert equal([numpy(plain.optimizer._momentums[0])], [wanted])
    with pytest.warns(UserWarning, match="were rounded: the file"):
        stored.load_weights(tmp_path / "plain.weights.h5")
    found = numpy(stored.optimizer._momentums[0])
    room = np.abs(momentum) / 16 + np.abs(momentum).max() / 448 / 2**9
    assert np.all(np.abs(found - momentum) <= room)


def test_a_built_optimizer_keeps_its_state_and_gets_float32_back():
    optimizer, variable = built(OPTIMIZERS.Adam())
    cls = type(optimizer)
    apply(optimizer, variable, normal(*SHAPE))
    before = bits(optimizer)
    quantize_state(optimizer)
    assert len(optimizer.variables) == len(before) + 2
    assert isinstance(optimizer, OPTIMIZERS.Adam)
    values = [numpy(slot.value) for slot in slots_of(optimizer)]
    for found, wanted in zip(values, before[2:], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1 / 14, atol=1e-6)
    apply(optimizer, variable, normal(*SHAPE))
    values = [numpy(slot.value) for slot in slots_of(optimizer)]
    assert dequantize_state(optimizer) is optimizer
    assert type(optimizer) is cls
    assert equal(bits(optimizer)[2:], values)
    apply(optimizer, variable, normal(*SHAPE))


@pytest.mark.full
def test_convert_stores_moments_and_revert_gives_float32_back():
    model = model_with(OPTIMIZERS.Adam(1e-2))
    first = fitted(model)
    kpe.convert(model, "delayed", optimizer="float8")
    assert slots_of(model.optimizer)
    assert fitted(model) < first
    kpe.revert(model)
    assert not slots_of(model.optimizer)
    assert all(v.dtype != "uint8" for v in model.optimizer.variables)
    fitted(model)


def test_convert_that_cannot_store_moments_changes_nothing():
    model = model_with(OPTIMIZERS.SGD())
    with refused(ValueError, "no moments", "SGD", "`slots`"):
        kpe.convert(model, optimizer="float8")
    assert type(model.layers[0]) is keras.layers.Dense
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    with refused(ValueError, "no optimizer", "'float8'", "compiled"):
        kpe.convert(model, optimizer="float8")
    with refused(ValueError, "no such form", "optimizer='fp8'", "'mx'"):
        kpe.convert(model, optimizer="fp8")
    assert type(model.layers[0]) is keras.layers.Dense


class Signed(keras.optimizers.Optimizer):
    """Its velocity has a sign."""

    def build(self, variables):
        super().build(variables)
        self.speeds = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient, variable, learning_rate):
        speed = self.speeds[self._get_variable_index(variable)]
        self.assign(speed, 0.5 * speed - gradient)
        self.assign_add(variable, learning_rate * speed)


def test_an_optimizer_of_ones_own_is_tried_first():
    optimizer = Signed(learning_rate=0.1)
    with refused(ValueError, "it has a sign", "Signed", "slots="):
        quantize_state(optimizer)
    assert type(optimizer) is Signed
    quantize_state(optimizer, slots={"velocity": "first"})
    found, _ = numbers_after([normal(*SHAPE)] * 2, optimizer)
    np.testing.assert_allclose(found[0], -1.5 * normal(*SHAPE), atol=0.4)


def test_arguments_that_are_not_allowed_are_refused():
    adam = OPTIMIZERS.Adam()
    with refused(TypeError, "not a Keras optimizer", "'adam'", "apply"):
        quantize_state("adam")
    with refused(ValueError, "no such form", "'int4'", "'mx'"):
        quantize_state(adam, "int4")
    with refused(TypeError, "`slots`", "'speed'", "a dict"):
        quantize_state(adam, slots="speed")
    with refused(TypeError, "`exclude`", "3", "strings"):
        quantize_state(adam, exclude=3)
    with refused(ValueError, "`slots`", "'third'", "'first'"):
        quantize_state(adam, slots={"momentum": "third"})
    assert not isinstance(adam, kpe.optimizers.QuantizedState)


@pytest.mark.skipif(BACKEND != "jax", reason="JAX donates buffers of a step")
def test_a_compiled_step_may_take_the_buffers_of_codes():
    import jax

    optimizer, variable = built(quantize_state(OPTIMIZERS.Adam()))
    other, its_weight = built(quantize_state(OPTIMIZERS.Adam()))
    gradient = ops.convert_to_tensor(normal(*SHAPE))
    step = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    state = [v.value + 0 for v in optimizer.variables]
    weights = [variable.value + 0]
    for _ in range(2):
        weights, state = step(state, [gradient], weights)
        apply(other, its_weight, gradient)
    assert [v.dtype for v in state] == [v.dtype for v in other.variables]
    codes = numpy(state[2]).astype(int) - bits(other)[2].astype(int)
    assert np.mean(codes != 0) < 0.01


def test_settings_come_back_from_a_config():
    optimizer = quantize_state(
        OPTIMIZERS.AdamW(), "mx", exclude="head", minimum_size=100
    )
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.deserialize(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


def compiled_steps(optimizer, variable, gradients):
    """Make steps as `fit` compiles them."""
    if BACKEND == "torch":
        for gradient in gradients:
            apply(optimizer, variable, gradient)
        return
    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(
            lambda x: optimizer.apply([x], [variable]), jit_compile=True
        )
        for gradient in gradients:
            step(ops.convert_to_tensor(gradient))
        return
    import jax

    step = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    weights = [variable.value + 0]
    state = [v.value + 0 for v in optimizer.variables]
    for gradient in gradients:
        weights, state = step(state, [gradient], weights)
    variable.assign(weights[0])
    optimizer.set_weights(state)


@pytest.mark.parametrize("form", mostly(["float8", "mx"], "float8"))
def test_a_step_in_parts_stores_the_bits_of_a_step_at_once(monkeypatch, form):
    backend = primitives.current
    shape = (70, 81)  # the last part is not of whole blocks
    looped = []

    def after_three_steps():
        made = quantize_state(OPTIMIZERS.Adam(0.01), form)
        optimizer, variable = built(made, shape)
        gradients = [normal(*shape, seed=step) for step in range(3)]
        compiled_steps(optimizer, variable, gradients)
        return [numpy(variable), *bits(optimizer)]

    def slice_update(*arguments):
        looped.append(arguments)
        return updated(*arguments)

    whole = after_three_steps()
    updated = ops.slice_update
    monkeypatch.setattr(ops, "slice_update", slice_update)
    monkeypatch.setattr(type(backend), "numbers_of_a_part", 256)
    assert equal(whole, after_three_steps())
    assert bool(looped) == (BACKEND != "torch")


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch alone has eager parts")
def test_a_gradient_that_is_broadcast_is_that_of_all_numbers():
    found = []
    for shape in ((1, 81), (70, 81)):
        made = quantize_state(OPTIMIZERS.Adam(0.01))
        optimizer, variable = built(made, (70, 81))
        apply(optimizer, variable, np.ones(shape, "float32"))
        (codes, _), _ = (slot.parts for slot in slots_of(optimizer))
        found.append((numpy(codes), numpy(variable)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
