"""Banks of matrices, such as experts: a scale and a history for each."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import backends, reference
from keras_policy_ext.backends.matmuls import Request
from keras_policy_ext.contractions import Einsum, EinsumOfBank
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Quantization
from steps import gradients, normal, numpy, relative_rms

EXPERTS, TOKENS, WIDTH, OUT = 3, 4, 16, 8
SIZES = np.array([1.0, 1e5, 1e-5], "float32")[:, None, None]
KERNEL = normal(EXPERTS, WIDTH, OUT, seed=1) * SIZES
X = normal(TOKENS, EXPERTS, WIDTH, seed=2)
G = normal(TOKENS, EXPERTS, OUT, seed=3)
BATCHED, DENSE = "tei,eio->teo", "ti,eio->teo"
CURRENT = "float8/current_from_float32"
DELAYED = "float8_from_float32"


@keras.saving.register_keras_serializable("banks")
class Experts(keras.layers.Layer):
    """Experts by an operation of Keras."""

    def __init__(self, equation=BATCHED, **kwargs):
        super().__init__(**kwargs)
        self.equation = equation

    def build(self, shape):
        size = (EXPERTS, WIDTH, OUT)
        self.kernel = self.add_weight(name="kernel", shape=size)

    def call(self, x, training=None):
        return ops.einsum(self.equation, x, self.kernel)

    def get_config(self):
        return {**super().get_config(), "equation": self.equation}


class WithMixin(kpe.layers.Float8Mixin, keras.layers.Layer):
    float8_kernels = ("kernel",)

    @classmethod
    def float8_bank_axis(cls, layer, kernel):
        return 0

    def build(self, shape):
        size = (EXPERTS, WIDTH, OUT)
        self.kernel = self.add_weight(name="kernel", shape=size)

    def call(self, x, training=None):
        return self.float8_einsum(BATCHED, x, self.kernel, training)


def model_of(policy, equation=BATCHED):
    shape = (EXPERTS, WIDTH) if equation == BATCHED else (WIDTH,)
    layer = Experts(equation)
    model = keras.Sequential([keras.Input(shape), layer])
    layer.kernel.assign(KERNEL)
    if policy is not None:
        kpe.convert(model, policy)
    return model, model.layers[0]


def with_gradients(layer, x=X, g=G):
    def loss(y):
        return ops.sum(y * ops.convert_to_tensor(g))

    y, x_grad, (w_grad, *state) = gradients(layer, x, loss)
    return [numpy(each) for each in (y, x_grad, w_grad)], state


def layers_of(policy):
    yield model_of(policy)[1]
    mixin = WithMixin(dtype=policy)
    mixin.build(X.shape)
    yield mixin
    dense = kpe.layers.EinsumDense("abc,bcd->abd", (EXPERTS, OUT), dtype=policy)
    dense.build(X.shape)
    yield dense
    for layer in (mixin, dense):
        layer.kernel.assign(KERNEL)


def close(found, expected):
    """Equal but for the order of sums, expert by expert."""
    for one, other in zip(found, expected, strict=True):
        axis = 0 if one.shape == KERNEL.shape else 1
        for expert in range(EXPERTS):
            a, b = (np.take(x, expert, axis) for x in (one, other))
            assert relative_rms(a, b) < 1e-6


@pytest.mark.parametrize(
    "policy", [CURRENT, "float8/current(power_of_two=True)_from_float32"]
)
def test_all_three_products_are_those_of_the_reference(policy):
    recipe = kpe.get(policy).recipe
    expected = reference.einsum(BATCHED, X, KERNEL, G, recipe, is_bank=True)
    whole = reference.einsum(BATCHED, X, KERNEL, G, recipe)
    assert relative_rms(whole.y[:, 2], expected.y[:, 2]) > 0.9  # all is lost
    for layer in layers_of(policy):
        layer.kernel.assign(KERNEL)
        close(with_gradients(layer)[0], expected[:3])
    for expert in range(EXPERTS):
        one = reference.einsum(
            "ti,io->to", X[:, expert], KERNEL[expert], G[:, expert], recipe
        )
        np.testing.assert_array_equal(one.y, expected.y[:, expert])


@pytest.mark.parametrize("kind", ["native", "emulated"])
def test_both_kinds_of_matmuls_multiply_by_the_scales(kind):
    asked = Quantization(format="float8_e4m3fn").of_each_matrix
    engine = backends.engine
    request = Request("forward", asked, asked, True, kind, True)
    matmul, choice = engine.select(request)
    assert choice.native == (kind == "native")
    cast = engine.narrow_cast if choice.native else engine.cast
    a, b = (
        quantize(ops.convert_to_tensor(normal(3, 8, 16) * x), asked, cast=cast)
        for x in (SIZES, 1 / SIZES)
    )
    found = numpy(matmul.multiply(a[0], b[0], "float32", True))
    read = [each.decoded().dequantize() for each, _ in (a, b)]
    expected = numpy(read[0]) @ numpy(read[1]).swapaxes(1, 2)
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) < 1e-6


def test_tokens_that_all_experts_read_are_those_of_each():
    tokens = X[:, 0]
    repeated = np.repeat(tokens[:, None], EXPERTS, axis=1)
    for policy in (CURRENT, DELAYED):
        _, dense = model_of(policy, DENSE)
        _, batched = model_of(policy)
        found, _ = with_gradients(dense, tokens)
        expected, _ = with_gradients(batched, repeated)
        expected[1] = expected[1].sum(axis=1)
        np.testing.assert_array_equal(found[0], expected[0])
        assert relative_rms(found[1], expected[1]) < 1e-6
        np.testing.assert_array_equal(found[2], expected[2])


def one_step(model, x, g):
    """A step of training with this gradient of the outputs."""

    def loss(y_true, y):
        return ops.sum(y * y_true)

    if not model.compiled:
        model.compile(keras.optimizers.SGD(0.0), loss)
    model.train_on_batch(x, g)


def test_delayed_scaling_has_a_history_for_each_expert():
    """Those of a linear layer for each of them."""
    model, layer = model_of(DELAYED)
    recipe = layer.float8_policy.recipe
    each = [reference.DelayedLinear(recipe) for _ in range(EXPERTS)]
    for linear, kernel in zip(each, KERNEL, strict=True):
        seen = reference.update_history(
            linear.histories["kernel"], np.abs(kernel).max()
        )
        linear.histories["kernel"] = seen  # `convert` has looked at it.
    for n in range(3):
        x, g = X * (1.0 + n), G / (1.0 + n)
        found, _ = with_gradients(layer, x, g)
        expected = [np.zeros_like(a) for a in found]
        for expert, linear in enumerate(each):
            y = linear.forward(x[:, expert], KERNEL[expert])
            expected[0][:, expert] = y
            both = linear.backward(g[:, expert])
            expected[1][:, expert], expected[2][expert] = both
        close(found, expected)
        one_step(model, x, g)
    state = layer.float8_state.matrices[0]
    assert state.shape[0] == 3 * EXPERTS
    history = state.rows_layout.history(numpy(state))
    for expert, linear in enumerate(each):
        for operand, known in linear.histories.items():
            row = state.rows_of(operand).start + expert
            np.testing.assert_array_equal(history[row], known)


@pytest.mark.parametrize("policy", [CURRENT, DELAYED])
def test_an_expert_without_a_token_keeps_its_state(policy):
    model, layer = model_of(policy)
    one_step(model, X, G)
    states = [numpy(v).copy() for v in layer.float8_state.matrices]
    x, g = X.copy(), G.copy()
    x[:, 1], g[:, 1] = 0.0, 0.0
    found, _ = with_gradients(layer, x, g)
    assert all(np.isfinite(each).all() for each in found)
    assert not found[0][:, 1].any()
    assert not found[2][1].any()
    one_step(model, x, g)
    for state, before in zip(layer.float8_state.matrices, states, strict=True):
        now, moved = numpy(state), []
        for operand in ("inputs", "outputs_grad"):
            rows = state.rows_of(operand)
            moved.append((now[rows] != before[rows]).any(axis=1).tolist())
        assert moved == [[True, False, True]] * 2


def test_a_nan_of_one_expert_stays_in_it():
    _, layer = model_of(CURRENT)
    expected, _ = with_gradients(layer)
    x = X.copy()
    x[0, 1, 0] = np.nan
    found, _ = with_gradients(layer, x)
    assert np.isnan(found[2][1]).all()
    np.testing.assert_array_equal(found[2][[0, 2]], expected[2][[0, 2]])


@pytest.mark.parametrize("equation", [BATCHED, DENSE])
def test_it_trains_is_saved_and_comes_back(equation, tmp_path):
    model, layer = model_of(DELAYED, equation)
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    x = X if equation == BATCHED else X[:, 0]
    for _ in range(3):
        model.train_on_batch(x, G)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    (state,) = loaded.layers[0].float8_state.matrices
    np.testing.assert_array_equal(
        numpy(state), numpy(layer.float8_state.matrices[0])
    )
    assert loaded.train_on_batch(x, G) == model.train_on_batch(x, G)
    kept = numpy(layer.kernel)
    kpe.revert(model)
    assert type(model.layers[0]) is Experts
    np.testing.assert_array_equal(numpy(model.layers[0].kernel), kept)


def test_a_file_with_one_history_gives_it_to_each_expert():
    _, layer = model_of(DELAYED)
    state = layer.float8_state
    arrays = {}
    state.save_own_variables(arrays)
    one = {
        key: value[0] if key.startswith("0.") else value
        for key, value in arrays.items()
    }
    one["0.kernel.amax_history"][0] = 7.0
    state.load_own_variables(one)
    (variable,) = state.matrices
    history = variable.rows_layout.history(numpy(variable))
    assert history[variable.rows_of("kernel"), 0].tolist() == [7.0] * EXPERTS
    before = numpy(variable).copy()
    wrong = {
        key: value[:2] if key.startswith("0.") else value
        for key, value in arrays.items()
    }
    with pytest.raises(ValueError, match="is of 2 matrices, the kernel of 3"):
        state.load_own_variables(wrong)
    np.testing.assert_array_equal(numpy(variable), before)


def test_a_product_without_the_bank_is_refused():
    class Other(WithMixin):
        def call(self, x):
            return self.float8_einsum("tei,eio->to", x, self.kernel)

    layer = Other(dtype=DELAYED)
    layer.build(X.shape)
    with pytest.raises(ValueError, match="is no bank of matrices"):
        layer(X)


def contraction_of(layer, *inputs):
    """What a call of the layer contracts."""
    layer(*inputs)
    return type(layer.float8_state.last_call.plan.contraction)


@pytest.mark.full_except("rowwise")
@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8", "nvfp4"])
def test_finer_scales_stay_as_they_are(recipe):
    assert contraction_of(model_of(recipe)[1], X) is Einsum


def test_no_other_product_is_one_of_a_bank():
    model, layer = model_of(CURRENT)
    assert contraction_of(layer, X) is EinsumOfBank
    kpe.revert(model)
    kpe.freeze(model)
    assert contraction_of(model.layers[0], X) is Einsum
    scaled = kpe.layers.EinsumDense("ab,b->ab", 8, dtype=CURRENT)
    assert contraction_of(scaled, normal(2, 8)) is Einsum


@pytest.mark.full
def test_a_product_of_two_activations_is_none_of_a_bank():
    layer = kpe.layers.MultiHeadAttention(
        2, 8, attention="float8", dtype=CURRENT
    )
    x = normal(2, 4, 16)
    assert contraction_of(layer, x, x) is Einsum


@pytest.mark.extension("inspect", "keras_float8")
def test_what_is_shown_is_the_largest_of_the_experts():
    model, _ = model_of(DELAYED)
    one_step(model, X, G)
    (_, shown, _) = kpe.inspect(model).layers[0].operands
    largest = np.abs(KERNEL).max()
    assert shown.amax == largest
    dense = list(layers_of(DELAYED))[2]
    assert dense.kernel_amax_history.shape == (EXPERTS, 1024)
