"""`what_if`: what each recipe would do to the operands of each layer."""

import json

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from keras_policy_ext import reference
from keras_policy_ext.contractions import Einsum
from keras_policy_ext.ext.sampling.figures import Figures, measured, total
from keras_policy_ext.recipes import MATMULS, matmuls_of
from steps import mean_square, normal, numpy
from unusual_layers import Experts, attention, bank

X, Y = normal(8, 6), normal(8, 3, seed=1)


def dense(units, **kwargs):
    return layers.Dense(units, **kwargs)


def mlp(optimizer="adam"):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            dense(5, activation="relu", name="up"),
            layers.Dropout(0.5, seed=1),
            dense(3, name="down"),
        ]
    )
    if optimizer:
        model.compile(optimizer, "mse")
    return model


def entries(report, layer, **wanted):
    """The entries of a layer, by the end of its path."""
    found = [
        e
        for e in report.entries
        if e.layer.endswith(layer)
        and all(getattr(e, name) == value for name, value in wanted.items())
    ]
    assert found, (layer, wanted)
    return found


def entry(report, layer, operand, **wanted):
    """The first one, where it does not matter by which recipe."""
    return entries(report, layer, operand=operand, **wanted)[0]


# The figures


def figures(x, operand, matmul, asked, scale=None):
    contraction = Einsum("ab,bc->ac")
    if scale is not None:
        scale = ops.convert_to_tensor(np.float32(scale))
    x = ops.convert_to_tensor(x)
    return Figures.read(
        numpy(measured(contraction, operand, matmul, asked, x, scale))
    )


EVERY = [(o, m) for m, operands in MATMULS.items() for o in operands]


# Other tests register recipes of their own.
BUILT_IN = ["block", "current", "delayed", "mxfp8", "nvfp4", "rowwise"]


@pytest.mark.slow_except(
    "inputs-kernel_grad-block",
    "kernel-inputs_grad-nvfp4",
    "outputs_grad-inputs_grad-mxfp8",
    "inputs-forward-rowwise",
)
@pytest.mark.full_except(
    "outputs_grad-kernel_grad-current", "outputs_grad-kernel_grad-nvfp4"
)
@pytest.mark.parametrize("recipe", BUILT_IN)
@pytest.mark.parametrize(
    ("operand", "matmul"), EVERY, ids=[f"{o}-{m}" for o, m in EVERY]
)
def test_sqnr_is_that_of_the_reference(recipe, operand, matmul):
    x = normal(44, 70) * np.exp(normal(44, 1, seed=1))
    asked = kpe.recipes.get(recipe).quantization(operand, matmul)
    found = figures(x, operand, matmul, asked)
    # The kernel's rows are the axis that the outputs keep.
    home = (x.T if operand == "kernel" else x)[None]
    if matmul != matmuls_of(operand)[0]:
        home = home.swapaxes(1, 2)
    if asked.rounding == "stochastic":
        expected = reference.quantize_matrices(home, asked, key=0)
    else:
        expected = reference.quantize_matrices(home, asked)
    values = expected.dequantize()
    if asked.hadamard:
        home = reference.hadamard(home)  # padded to a multiple of 16
    np.testing.assert_allclose(
        found.sqnr_db, reference.sqnr_db(home, values), atol=0.01
    )
    lost = np.mean(values[home != 0] == 0)
    np.testing.assert_allclose(found.underflow_fraction, lost, atol=1e-6)


def test_fractions_kurtosis_and_values_that_are_not_finite():
    x = normal(64, 64)
    x[0] = 0.0
    x[1, 0], x[1, 1] = np.inf, np.nan
    asked = kpe.recipes.get("current").quantization("inputs", "forward")
    # 465 rounds beyond 448, the largest number of e4m3; 463 does not.
    x[2, :4] = [465.0, -465.0, 463.0, 1e-6]
    found = figures(x, "inputs", "forward", asked, scale=1.0)
    finite = np.where(np.isfinite(x), x, 0.0).astype("float64")
    count = np.count_nonzero(finite)
    assert found.nonfinite == 2 and found.amax == 465.0 and found.scale == 1.0
    np.testing.assert_allclose(found.saturated_fraction, 2 / count)
    lost = (np.abs(finite) <= 2.0**-10) & (finite != 0)
    np.testing.assert_allclose(found.underflow_fraction, lost.sum() / count)
    np.testing.assert_allclose(found.zero_fraction, 1 - count / finite.size)
    central = finite - finite.mean()
    expected = np.mean(central**4) / np.mean(central**2) ** 2
    np.testing.assert_allclose(found.kurtosis, expected, rtol=1e-4)


@pytest.mark.full
def test_figures_of_parts_add_up_to_those_of_the_whole():
    x = normal(32, 16)
    x[16:] *= 1e-20
    asked = kpe.recipes.get("mxfp8").quantization("inputs", "forward")
    whole = figures(x, "inputs", "forward", asked)
    parts = total(
        figures(h, "inputs", "forward", asked) for h in (x[:16], x[16:])
    )
    assert (parts.size, parts.amax) == (whole.size, whole.amax)
    np.testing.assert_allclose(parts.sqnr_db, whole.sqnr_db, rtol=1e-5)
    np.testing.assert_allclose(parts.kurtosis, whole.kurtosis, rtol=1e-5)


# What is captured


@pytest.mark.full_except("plain")
@pytest.mark.parametrize("is_converted", [False, True], ids=["plain", "float8"])
def test_operands_are_those_of_the_step(is_converted):
    model = keras.Sequential([keras.Input((6,)), dense(3, name="down")])
    model.compile("sgd", "mse")
    if is_converted:
        kpe.convert(model, "delayed")
    kernel, bias = (numpy(v) for v in model.layers[0].weights[:2])
    report = kpe.what_if(model, (X, Y), "current")
    outputs_grad = 2 * (X @ kernel + bias - Y) / Y.size
    assert len(report.entries) == 6
    for operand, x in (
        ("inputs", X),
        ("kernel", kernel),
        ("outputs_grad", outputs_grad),
    ):
        found = entry(report, "down", operand)
        np.testing.assert_allclose(found.amax, np.abs(x).max(), rtol=1e-5)
    assert report.loss == "the loss that the model was compiled with"
    loss = np.mean(np.square(X @ kernel + bias - Y))
    np.testing.assert_allclose(report.value, loss, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("is_converted", [False, True], ids=["plain", "float8"])
@pytest.mark.slow_except("float8")
def test_nothing_of_the_model_changes(is_converted):
    twins = [mlp(), mlp()]
    twins[1].set_weights(twins[0].get_weights())
    for model in twins:
        if is_converted:
            kpe.convert(model, "delayed")
        model.train_on_batch(X, Y)
    attributes = [set(vars(layer)) for layer in twins[0].layers]
    kinds = [type(layer) for layer in twins[0].layers]
    kpe.what_if(twins[0], (X, Y), ["current", "nvfp4"])
    assert [set(vars(layer)) for layer in twins[0].layers] == attributes
    assert [type(layer) for layer in twins[0].layers] == kinds
    # Seeds of dropout, slots, states: the next step shows them all.
    for model in twins:
        model.train_on_batch(X, Y)
    first, second = (
        [numpy(v) for v in (*m.variables, *m.optimizer.variables)]
        for m in twins
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
def test_losses():
    model = mlp(optimizer=None)
    report = kpe.what_if(model, X, "current")
    assert "sum of squares" in report.loss and "not compiled" in report.loss
    mine = kpe.what_if(
        model, (X, Y), "current", loss=lambda y, p: 0 * mean_square(p - y)
    )
    assert mine.value == 0.0 and mine.loss == "the loss passed as `loss`"
    lacks = entry(mine, "down", "outputs_grad")
    assert lacks.amax == 0.0 and lacks.note == "no gradient"


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return 1000.0 * mean_square(y_pred)


class AddedLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(1000.0 * mean_square(x))
        return x


@pytest.mark.full
def test_the_loss_is_that_of_the_model_though_it_is_compiled_without_one():
    own = OwnLoss([keras.Input((6,)), dense(3)])
    added = keras.Sequential([keras.Input((6,)), dense(3), AddedLoss()])
    for model, words in ((own, "`compute_loss`"), (added, "was compiled")):
        model.compile("sgd")
        found = kpe.what_if(model, X, "current")
        expected = 1000.0 * np.mean(numpy(model(X)) ** 2)
        np.testing.assert_allclose(found.value, expected, rtol=1e-5)
        assert words in found.loss


@pytest.mark.full_except("captured")
@pytest.mark.parametrize("way", ["captured", "tuned"])
def test_weights_with_a_regularizer_are_in_the_loss(way):
    model = keras.Sequential(
        [keras.Input((6,)), dense(3, kernel_regularizer="l2")]
    )
    model.compile("sgd", "mse")
    if way == "captured":
        value = kpe.what_if(model, (X, Y), "current").value
    else:
        value = kpe.tune(model, (X, Y), 1.0, "current").loss
    kernel = numpy(model.layers[0].kernel)
    plain = np.mean((X @ kernel - Y) ** 2)
    expected = plain + 0.01 * np.sum(kernel**2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.full
def test_gradients_are_of_the_scaled_loss():
    model = mlp()
    plain = kpe.what_if(model, (X, Y), "current")
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=1024.0
    )
    model.compile(scaled, "mse")
    found = kpe.what_if(model, (X, Y), "current")
    a, b = (entry(r, "down", "outputs_grad").amax for r in (plain, found))
    np.testing.assert_allclose(b, 1024 * a, rtol=1e-6)


@pytest.mark.full
def test_layers_are_shown_as_what_they_are():
    model = Experts()
    model(X)
    model.head.trainable = False
    report = kpe.what_if(model, X, ["current", "block"])
    paths = {e.layer.rsplit("/")[-1]: e.layer for e in report.entries}
    notes = {
        name: {e.operand: e.note for e in entries(report, path)}
        for name, path in paths.items()
    }
    assert set(notes) == {"empty", "zeros", "shared", "head"}
    assert notes["empty"]["inputs"] == "no values"
    assert notes["empty"]["outputs_grad"] == "no values"
    assert notes["zeros"]["inputs"] == "zeros"
    assert notes["head"]["kernel"] == "frozen"
    assert not any(notes["shared"].values())
    for operand in ("inputs", "kernel", "outputs_grad"):
        assert entry(report, paths["shared"], operand).uses == 2
    (unused,) = report.unexamined.items()
    assert unused[0].endswith("unused") and "did not call" in unused[1]
    text = report.table(full=True)
    for word in ("no values", "frozen", "zeros", "2 uses", "did not call"):
        assert word in text


@pytest.mark.slow
@pytest.mark.full
def test_experts_of_a_bank_without_tokens_are_counted():
    x = normal(4, 3, 6)
    x[:, 1] = 0.0
    report = kpe.what_if(bank(), x, ["current", "block"])
    for found in entries(report, "experts"):
        is_idle = found.operand == "inputs"
        said = "no values for 1 of 3 matrices" if is_idle else ""
        assert found.note == said


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_products_of_two_activations_are_of_the_attention(recipe):
    """Their SQNR is that of the operands under the recipe of activations."""
    x = normal(2, 5, 8) * np.exp(normal(2, 5, 1, seed=1))
    model = attention()
    stock = model.get_layer("mha")
    report = kpe.what_if(model, x, recipe, attention="float8")
    # Keras multiplies keys with queries, in this order.
    found = entry(report, "mha", "inputs", kernel="scores")
    keys = np.einsum("btd,dnh->btnh", x, numpy(stock.key_dense.kernel))
    np.testing.assert_allclose(found.amax, np.abs(keys).max(), rtol=1e-5)
    asked = kpe.recipes.get(recipe).quantization("inputs", "forward")
    home = keys.transpose(0, 2, 1, 3).reshape(-1, 5, 4)
    expected = reference.quantize_matrices(home, asked).dequantize()
    np.testing.assert_allclose(
        found.sqnr_db, reference.sqnr_db(home, expected), atol=0.3
    )
    values = entry(report, "mha", "kernel", kernel="weighted sum")
    # Under a scale for each row a power of two brings values near 448.
    is_folded = recipe == "rowwise"
    assert (values.amax > 224) == is_folded and values.sqnr_db > 25


def recurrent():
    x = keras.Input((5, 6))
    y = layers.LSTM(4, name="lstm")(x)
    return keras.Model(x, dense(3, name="head")(y))


@pytest.mark.full
@pytest.mark.slow_except()
def test_each_step_of_a_recurrent_layer_counts():
    report = kpe.what_if(recurrent(), normal(2, 5, 6), "current")
    assert report.unexamined == {}
    inner = entry(
        report, "lstm/lstm_cell", "outputs_grad", kernel="recurrent_kernel"
    )
    # PyTorch and TensorFlow compute the first step twice, in Keras.
    assert inner.uses in (5, 6) and inner.amax > 0


@pytest.mark.full
def test_rematerialized_layers_count_once():
    with keras.RematScope(mode="full"):
        model = keras.Sequential(
            [keras.Input((6,)), dense(5, name="up"), dense(3, name="down")]
        )
    report = kpe.what_if(model, X, "current")
    if report.unexamined:  # JAX computes it inside of a compiled function.
        assert keras.backend.backend() == "jax"
        assert all("rematerial" in why for why in report.unexamined.values())
    else:
        assert entry(report, "up", "inputs").uses == 1
        gradient = entry(report, "up", "outputs_grad")
        # TensorFlow watches nothing in what it computes again.
        is_lost = keras.backend.backend() == "tensorflow"
        assert gradient.note == ("no gradient" if is_lost else "")


# The report


@pytest.mark.full
@pytest.mark.slow_except()
def test_the_table_fits_and_the_dict_is_json():
    deep = keras.Sequential(
        [keras.Input((6,)), *(dense(6, name=f"dense_{n}") for n in range(9))]
    )
    report = kpe.what_if(deep, X, BUILT_IN)
    assert list(report.recipes) == BUILT_IN
    assert len(str(report).splitlines()) <= 24
    full = report.table(full=True)
    assert all(f"dense_{n}" in full for n in range(9))
    again = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert len(again["entries"]) == 9 * 6 * len(report.recipes)


@pytest.mark.full
def test_the_heat_map_is_one_page_with_a_colour_for_each_cell():
    report = kpe.what_if(mlp(), (X, Y), ["current", "nvfp4"])
    page = report.heat_map()
    assert page.count("background: hsl(") == 2 * 3 * 2
    assert "http" not in page and "<script" not in page
    assert "<td" in report._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (((X, Y, None, None),), TypeError, "4 parts"),
        (((object(),),), TypeError, "is not arrays"),
        ((iter([]),), ValueError, "no batch left"),
        (((X, Y), []), ValueError, "not recipes for training"),
        (((X, Y), "rowise"), ValueError, "rowwise"),
        (([X, Y],), ValueError, "A list is several inputs"),
        (((X, Y), "current", "mse"), TypeError, "`loss` is no function"),
        (
            ((X, Y), "current", keras.losses.mean_squared_error),
            ValueError,
            "no scalar",
        ),
    ],
    ids=[
        *("four", "object", "empty", "none", "typo", "list"),
        *("loss", "vector"),
    ],
)
def test_bad_arguments(arguments, error, words):
    model = mlp()
    with pytest.raises(error, match=words):
        kpe.what_if(model, *arguments)
    assert type(model.layers[0]) is layers.Dense


@pytest.mark.full
def test_the_first_batch_of_many_is_taken():
    def value(data):
        return kpe.what_if(mlp_, data, "current").entries[0].amax

    mlp_ = mlp()
    assert value(iter([(X, Y), (2 * X, Y)])) == value((X, Y))
    # As a data loader of PyTorch returns it.
    assert value(iter([[X, Y], [2 * X, Y]])) == value((X, Y))


def test_what_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match="Keras model or layer"):
        kpe.what_if("model", X)
