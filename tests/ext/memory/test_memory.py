"""`kpe.memory`: the bytes that a training step keeps, by layer."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext import backends
from memory_models import ARRAY, BATCH, IN, OUT, WIDE, by_name, mlp, snapshot
from ways import BACKEND

X, H = BATCH * IN, BATCH * WIDE
FIRST, SECOND = IN * WIDE, WIDE * OUT
"""Numbers in the batch, between the layers, and in the two kernels."""

SCALARS = 64
"""Bytes of scales, amaxes and flags that a float8 contraction keeps at most."""

ACTIVATION = {
    # What an activation keeps beside the input of the next layer, in numbers
    # of the compute dtype and in bytes for each number between the layers.
    ("torch", "relu"): (0, 0),  # Its outputs are those inputs.
    ("torch", "gelu"): (1, 0),  # Its inputs.
    ("jax", "relu"): (0, 1),  # A mask.
    ("jax", "gelu"): (3, 0),  # Its inputs, halved; erfc and exp of them.
    ("tensorflow", "relu"): (0, 0),
    ("tensorflow", "gelu"): (3, 0),  # As on JAX, before exp.
}


def kept_by_activation(activation, itemsize):
    numbers, bytes = ACTIVATION[BACKEND, activation]
    return (numbers * itemsize + bytes) * H


activations = pytest.mark.parametrize("activation", ["relu", "gelu"])


@activations
def test_what_float32_layers_keep(activation):
    (form,) = kpe.memory(mlp(activation), BATCH, ()).forms
    # The batch is there anyway, and kernels are the weights themselves.
    assert form.activations == kept_by_activation(activation, 4) + 4 * H
    assert form.weight_copies == 0


@activations
def test_what_bfloat16_layers_keep(activation):
    (form,) = kpe.memory(mlp(activation, "mixed_bfloat16"), BATCH, ()).forms
    casts = 2 * (X + H)
    assert form.activations == kept_by_activation(activation, 2) + casts
    # No gradient of the batch is taken, so that the first kernel is not kept.
    assert form.weight_copies == 2 * SECOND


@activations
@pytest.mark.parametrize("recipe", mostly(["delayed", "current"], "delayed"))
def test_what_float8_layers_keep(activation, recipe):
    form = kpe.memory(mlp(activation), BATCH, recipe)[recipe]
    one = np.dtype(kept_dtype()).itemsize
    # A rectifier keeps a mask, and GELU what it does in a stock layer.
    mask = H if BACKEND == "tensorflow" else H // 8
    own = mask if activation == "relu" else kept_by_activation(activation, 4)
    known = own + one * (X + H)
    assert 0 <= form.activations - known <= 2 * SCALARS
    # PyTorch saves a kernel whose gradient is not asked for.
    kernels = one * (SECOND + (FIRST if BACKEND == "torch" else 0))
    assert 0 <= form.weight_copies - kernels <= 2 * SCALARS


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA is a choice there")
def test_a_model_that_xla_compiles_counts_as_it_is_compiled():
    model = mlp()
    plain = kpe.memory(model, BATCH, "delayed")["delayed"]
    model.compile("adam", "mse", jit_compile=True)
    compiled = kpe.memory(model, BATCH, "delayed")["delayed"]
    # Bits and not bytes of the mask, and a byte for each number.
    spared = (np.dtype(kept_dtype()).itemsize - 1) * (X + H)
    assert plain.activations - compiled.activations == H - H // 8 + spared
    assert "XLA" in compiled.counted_by and "XLA" not in plain.counted_by


def kept_dtype():
    """In which numbers of e4m3fn are kept here, of one byte or more."""
    name = backends.current.kept_dtype(ops.zeros((1, 1)), "float8_e4m3fn")
    return "uint8" if name.startswith("float8") else name


@pytest.mark.full
def test_weights_state_and_optimizer_are_those_of_their_variables():
    model = mlp()
    model.compile("adam", "mse")
    report = kpe.memory(model, BATCH, "delayed")
    floats = FIRST + WIDE + SECOND + OUT
    before, after = report.forms
    assert before.weights == after.weights == 4 * floats
    assert before.state == 0
    kpe.convert(model, "delayed")
    assert after.state == 4 * kpe.inspect(model).state
    assert by_name(after)["first"].weights == 4 * (FIRST + WIDE)
    # Two slots of Adam for each weight.
    assert 0 <= report.optimizer - 2 * 4 * floats <= 16
    model.fit(np.zeros((2, IN)), np.zeros((2, OUT)), verbose=0)
    assert kpe.memory(model, BATCH).optimizer == report.optimizer


def test_an_optimizer_that_makes_numbers_is_not_guessed():
    model = mlp()
    model.compile(keras.optimizers.Adafactor(), "mse")
    report = kpe.memory(model, BATCH, ())
    assert report.optimizer is None
    assert "optimizer" not in str(report)


class Both(keras.Model):
    """Two layers that keep the same tensor, one after the other."""

    def __init__(self):
        super().__init__()
        self.two = keras.layers.Dense(4, name="two")
        self.one = keras.layers.Dense(4, name="one")

    def call(self, x):
        x = 2.0 * x
        return self.one(x) + self.two(x)


def test_what_two_layers_keep_counts_once_with_the_first():
    model = Both()
    model(ARRAY)
    (form,) = kpe.memory(model, ARRAY, ()).forms
    assert form.kept == 4 * X
    assert by_name(form)["one"].kept == 4 * X
    assert by_name(form)["two"].kept == 0


def test_a_view_is_no_memory_of_its_own():
    inputs = keras.Input((IN,))
    x = keras.layers.Rescaling(2.0)(inputs)
    halves = keras.layers.Reshape((2, IN // 2))(x)
    outputs = [keras.layers.Dense(4)(each) for each in (x, halves)]
    (form,) = kpe.memory(keras.Model(inputs, outputs), BATCH, ()).forms
    assert form.kept == 4 * X


def test_a_layer_that_is_used_twice_keeps_for_both():
    shared = keras.layers.Dense(IN, name="shared")
    inputs = keras.Input((IN,))
    model = keras.Model(inputs, shared(shared(inputs)))
    (form,) = kpe.memory(model, BATCH, ()).forms
    assert form.kept == 4 * X
    (row,) = form.layers
    assert row.weights == 4 * (IN * IN + IN)


class Tied(keras.layers.Layer):
    """Multiplies with the kernel of another layer, which it has too."""

    def __init__(self, other, **kwargs):
        super().__init__(**kwargs)
        self.kernel = other.kernel

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.kernel))


def test_a_weight_of_two_layers_counts_once():
    dense = keras.layers.Dense(OUT, use_bias=False)
    inputs = keras.Input((IN,))
    x = dense(inputs)
    model = keras.Model(inputs, Tied(dense)(x))
    (form,) = kpe.memory(model, BATCH, ()).forms
    assert form.weights == 4 * IN * OUT


def test_frozen_kernels_are_one_byte_and_nothing_more():
    model = mlp()
    kpe.freeze(model)
    (form,) = kpe.memory(model, BATCH).forms
    assert form.weights == FIRST + SECOND + 4 * (WIDE + OUT)
    assert form.state == 4 * (WIDE + OUT)
    # The biases train, and codes are the weights themselves.
    assert form.weight_copies == 0


def test_adapters_are_weights_and_are_kept_for():
    model = mlp()
    model.layers[0].enable_lora(4)
    (before, after) = kpe.memory(model, BATCH).forms
    adapters = 4 * 4 * (IN + WIDE)
    assert before.weights == after.weights
    assert before.weights == 4 * (FIRST + WIDE + SECOND + OUT) + adapters
    assert after.kept > 0


def test_loss_scaling_counts_with_the_optimizer():
    model = mlp(dtype="mixed_float16")
    model.compile("adam", "mse")
    report = kpe.memory(model, BATCH)
    floats = FIRST + WIDE + SECOND + OUT
    assert 8 * floats < report.optimizer <= 8 * floats + 64
    assert report.forms[0].kept > 0


@pytest.mark.skipif(
    BACKEND == "tensorflow",
    reason="Keras 3.15 rematerializes no call with keyword arguments there",
)
def test_what_is_computed_again_is_not_kept():
    with keras.RematScope(mode="list_of_layers", layer_names=["inner"]):
        inner = keras.Sequential(
            [
                keras.Input((IN,)),
                keras.layers.Dense(WIDE, "gelu"),
                keras.layers.Dense(IN),
            ],
            name="inner",
        )
    model = keras.Sequential(
        [keras.Input((IN,)), keras.layers.Rescaling(2.0), inner]
    )
    (form,) = kpe.memory(model, BATCH, ()).forms
    assert form.kept == 4 * X  # What goes into the inner model.


@pytest.mark.skipif(BACKEND != "tensorflow", reason="where loops are traced")
def test_loops_of_tensorflow_keep_each_step():
    units = 8

    def kept(steps):
        model = keras.Sequential(
            [keras.Input((steps, IN)), keras.layers.SimpleRNN(units)]
        )
        return kpe.memory(model, BATCH, ()).forms[0].kept

    # Inputs, state before and outputs; and the sizes of a list or two.
    step = (kept(12) - kept(6)) / 6
    assert 0 <= step - 4 * BATCH * (IN + 2 * units) <= 32


class Repeats(keras.layers.Layer):
    """A hyperbolic tangent of itself, some times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def call(self, x):
        def step(x, _):
            return ops.tanh(x), None

        return ops.scan(step, x, ops.zeros((self.times, 1)))[0]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="where loops are traced")
def test_loops_of_tensorflow_without_a_limit_are_as_long_as_their_lists():
    def kept(times):
        layers = [keras.layers.Dense(4), Repeats(times)]
        model = keras.Sequential([keras.Input((IN,)), *layers])
        return kpe.memory(model, BATCH, ()).forms[0].kept

    step = (kept(12) - kept(6)) / 6
    assert 0 <= step - 4 * BATCH * 4 <= 32


@pytest.mark.skipif(BACKEND != "torch", reason="shows what autograd saves")
def test_it_is_what_hooks_of_pytorch_see_in_a_real_step():
    import torch

    inputs = keras.Input((8, IN))
    x = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
    x = keras.layers.LayerNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(4, "silu")(x))
    kpe.convert(model, "delayed")
    batch = ops.zeros((BATCH, 8, IN))
    saved = []

    def save(tensor):
        saved.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        model(batch, training=True)
    sizes = {id(memory): memory.nbytes() for memory in saved}
    for given in (*(v.value for v in model.variables), batch):
        sizes.pop(id(given.untyped_storage()), None)
    (form,) = kpe.memory(model, batch, ()).forms
    assert form.kept == sum(sizes.values())


class Copies(keras.layers.Dense):
    def call(self, x):
        import torch

        copy = torch.empty(self.kernel.shape).copy_(self.kernel.value)
        return ops.matmul(x, copy)


@pytest.mark.skipif(BACKEND != "torch", reason="others do not write in place")
def test_what_is_written_in_place_is_of_what_it_is_written_from():
    inputs = keras.Input((IN,))
    x = keras.layers.Dense(WIDE)(inputs)
    model = keras.Model(inputs, Copies(OUT)(x))
    (form,) = kpe.memory(model, BATCH, ()).forms
    assert (form.activations, form.weight_copies) == (4 * H, 4 * SECOND)


class Wraps(keras.Model):
    def __init__(self):
        super().__init__()
        from torch import nn

        module = nn.Sequential(nn.Linear(IN, IN), nn.BatchNorm1d(IN))
        self.module = keras.layers.TorchModuleWrapper(module)
        self.dense = keras.layers.Dense(4)

    def call(self, x, training=False):
        return self.dense(self.module(x, training=training))


@pytest.mark.skipif(BACKEND != "torch", reason="a module of PyTorch")
def test_modules_of_pytorch_in_a_model():
    model = Wraps()
    model(ARRAY)
    before = [buffer.tolist() for buffer in model.buffers()]
    (form,) = kpe.memory(model, ARRAY, ()).forms
    assert [buffer.tolist() for buffer in model.buffers()] == before
    # Inputs of the two after the first, and a mean and a deviation.
    assert form.kept == 2 * 4 * X + 2 * 4 * IN
    assert not any(vars(x.untyped_storage()) for x in model.buffers())


class ReadsNumbers(keras.layers.Layer):
    def call(self, x):
        import torch

        largest = float(ops.convert_to_numpy(ops.max(ops.abs(x))))
        return x * (largest + float(torch.rand(())) + 1.0)


@pytest.mark.skipif(BACKEND != "torch", reason="others trace such a layer not")
def test_a_layer_that_reads_numbers_is_called_on_zeros():
    import torch

    model = mlp()
    reading = keras.Sequential([keras.Input((IN,)), ReadsNumbers(), model])
    before, random = snapshot(reading), torch.get_rng_state()
    (form,) = kpe.memory(reading, BATCH, ()).forms
    assert "forward pass" in form.counted_by
    # The first layer keeps its inputs, which are not those of the model.
    assert form.kept == 4 * X + kpe.memory(model, BATCH, ()).forms[0].kept
    assert snapshot(reading) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(vars(v.value.untyped_storage()) for v in reading.variables)


def small_optimizer():
    adam = kpe.mixed_precision.StochasticRounding(keras.optimizers.Adam())
    return kpe.optimizers.quantize_state(adam, minimum_size=0)


def test_an_optimizer_says_what_its_moments_and_weights_take():
    model = mlp(dtype="mixed_bfloat16")
    model.compile("adam", "mse")
    floats = FIRST + WIDE + SECOND + OUT
    report = kpe.memory(model, BATCH, "delayed", optimizer=small_optimizer())
    stock, small = report.forms
    assert (stock.weights, stock.gradients) == (4 * floats, 4 * floats)
    assert (small.weights, small.gradients) == (2 * floats, 2 * floats)
    blocks = sum(-(-size // 256) for size in (FIRST, WIDE, SECOND, OUT))
    moments = 2 * (floats + 4 * blocks)
    # Counters, learning rates and a seed.
    assert 0 <= stock.optimizer - 8 * floats <= 16
    assert 0 <= small.optimizer - moments <= 48
    assert small.together == sum(
        (small.weights, small.gradients, small.optimizer, small.state)
    ) + sum((small.activations, small.weight_copies))
    assert "saves" in str(report)

    # Made that way, it is the same, and so is what is said to be without.
    made = mlp(dtype="bfloat16")
    made.compile(small_optimizer(), "mse")
    kpe.convert(made, "delayed")
    as_it_is, without = kpe.memory(made, BATCH).forms
    for one, other in ((as_it_is, small), (without, stock)):
        assert one.optimizer == other.optimizer
        assert numbers(one) == numbers(other)
    assert {v.dtype for v in made.layers[0].weights[:2]} == {"bfloat16"}


def numbers(form):
    names = ("weights", "gradients", "state", "activations", "weight_copies")
    return [[getattr(row, name) for name in names] for row in form.layers]


def test_moments_in_one_byte_are_compared_with_float32():
    model = mlp()
    with pytest.raises(ValueError, match="no optimizer"):
        kpe.memory(model, BATCH, (), optimizer="float8")
    with pytest.raises(TypeError, match="'float8' or 'mx'"):
        kpe.memory(model, BATCH, (), optimizer=0.5)
    model.compile(kpe.optimizers.quantize_state(keras.optimizers.Adam()))
    as_it_is, without, converted = kpe.memory(model, BATCH).forms
    assert without.name == "without float8"
    # The second kernel alone is large enough.
    assert without.optimizer - as_it_is.optimizer == 2 * (3 * SECOND - 64)
    assert converted.optimizer == as_it_is.optimizer
    kpe.optimizers.dequantize_state(model.optimizer)
    _, small = kpe.memory(model, BATCH, (), optimizer="float8").forms
    assert (small.name, small.optimizer) == (
        "new optimizer",
        as_it_is.optimizer,
    )


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:The object being serialized")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_learning_rate_may_be_a_function(scaled):
    model, found = mlp(), []
    for rate in (keras.optimizers.schedules.CosineDecay(0.1, 9), lambda: 0.1):
        adam = keras.optimizers.Adam(rate)
        if scaled:
            adam = keras.optimizers.LossScaleOptimizer(adam)
        model.compile(adam, "mse")
        forms = kpe.memory(model, BATCH, (), optimizer="float8").forms
        found.append([form.optimizer for form in forms])
    assert found[0] == found[1] and found[0][1] < found[0][0]


def test_a_count_leaves_no_note_of_its_optimizer():
    model = mlp()
    kpe.convert(model, "delayed")
    model.compile("adam", "mse")
    kpe.memory(model, BATCH, ())
    state = model.layers[0].float8_state.matrices[0]
    assert not state.left_out


@pytest.mark.skipif(BACKEND != "jax", reason="the plans of XLA")
def test_what_xla_plans():
    report = kpe.memory(mlp(), BATCH, (), compile=True)
    (form,) = report.forms
    # At least what both layers multiply with in the backward pass.
    assert 4 * H <= form.planned <= 4 * form.kept
    assert "by XLA" in str(report)


@pytest.mark.skipif(BACKEND == "jax", reason="XLA plans there")
def test_no_plan_where_no_compiler_makes_one():
    with pytest.raises(ValueError, match="compile=True"):
        kpe.memory(mlp(), BATCH, compile=True)


eager = pytest.mark.skipif(BACKEND != "torch", reason="others compile steps")


@eager
def test_an_update_of_all_weights_at_once_is_a_peak():
    model = mlp()
    model.compile("adam", "mse")
    (form,) = kpe.memory(model, BATCH, ()).forms
    floats = FIRST + WIDE + SECOND + OUT
    # Adam of Keras has three tensors of the size of each weight.
    held = form.weights + form.gradients + form.optimizer + 12 * floats
    assert 0 <= form.peak - held <= 64
    assert "peak of a step" in str(kpe.memory(model, BATCH, ()))


@eager
def test_an_update_in_parts_is_no_peak():
    model = mlp(dtype="bfloat16")
    model.compile(small_optimizer(), "mse")
    (form,) = kpe.memory(model, 64 * BATCH, ()).forms
    outputs = 2 * 64 * (H + BATCH * OUT)
    # Keras holds the outputs of both layers until the forward pass ends.
    assert 0 <= form.peak - form.together <= 2 * outputs


class Late(keras.optimizers.SGD):
    """Asks for the numbers of a gradient, and fails without."""

    def update_step(self, gradient, variable, learning_rate):
        raise RuntimeError("not here")


@eager
def test_there_is_no_peak_if_the_optimizer_takes_no_step_of_samples():
    model = mlp()
    model.compile(Late(), "mse")
    (form,) = kpe.memory(model, BATCH, ()).forms
    assert form.peak is None
    assert "peak" not in str(kpe.memory(model, BATCH, ()))


def attention():
    inputs = keras.Input((32, 64))
    x = keras.layers.MultiHeadAttention(2, 32)(inputs, inputs)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dense(256, "gelu")(x)
    return keras.Model(inputs, keras.layers.Dense(64)(x))


@eager
@pytest.mark.full_except("adam-2")
@pytest.mark.parametrize("optimizer, size", [("adam", 2), ("sgd", 16)])
def test_the_peak_is_what_tensors_of_two_real_steps_take(optimizer, size):
    from keras_policy_ext.ext.memory.torch.saved_tensors import _Sources

    model = attention()
    model.compile(optimizer, "mse")
    kpe.convert(model, "current")  # Without state.
    x = np.zeros((size, 32, 64), "float32")
    model.optimizer.build(model.trainable_variables)
    with _Sources() as sources:
        model.train_on_batch(x, x)
        model.train_on_batch(x, x)
    (form,) = kpe.memory(model, size, ()).forms
    held = form.weights + form.optimizer + form.state + sources.most
    assert form.peak == pytest.approx(held, rel=0.1)


@pytest.mark.skipif(BACKEND != "jax", reason="XLA plans a whole step there")
@pytest.mark.full_except("adam")
@pytest.mark.parametrize("optimizer", ["adam", "small"])
@pytest.mark.slow_except("adam")
def test_the_peak_is_what_xla_plans_for_a_step_of_fit(optimizer):
    import jax

    small = optimizer == "small"
    with kpe.policy_scope("bfloat16" if small else "float32"):
        model = attention()
    kpe.convert(model, "delayed")
    model.compile(small_optimizer() if small else optimizer, "mse")
    (form,) = kpe.memory(model, 16, (), compile=True).forms
    x = np.zeros((16, 32, 64), "float32")
    model.train_on_batch(x, x)
    parts = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{x}_variables": True for x in parts})
    step = jax.jit(model.train_step, donate_argnums=0)
    plan = step.lower(state, (x, x, None)).compile().memory_analysis()
    taken = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    taken += plan.output_size_in_bytes - plan.alias_size_in_bytes
    assert form.peak == pytest.approx(taken, rel=0.1)
    assert form.peak > form.weights + form.optimizer


@pytest.mark.skipif(BACKEND == "torch", reason="a step is not compiled there")
def test_the_peak_of_a_compiled_step_is_not_guessed():
    model = mlp()
    model.compile("adam", "mse")
    (form,) = kpe.memory(model, BATCH, ()).forms
    assert form.peak is None


@pytest.mark.parametrize("full", [False, True])
def test_a_model_without_weights_has_no_empty_table(full):
    model = keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
    text = kpe.memory(model, 2).table(full=full)
    assert "No layer has weights" in text
    assert "class" not in text
