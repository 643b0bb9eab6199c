"""The formats named fnuz: recipes, devices, and models that change devices."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from conftest import visible_gpus
from keras_policy_ext import backends, formats, kernels, recipes, reference
from keras_policy_ext.backends import devices
from keras_policy_ext.ext.stochastic.rounding import round_to_neighbour
from keras_policy_ext.numerics import casting
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from steps import gradients, numpy
from ways import run

BACKEND = keras.backend.backend()
E4M3, E5M2 = formats.FAMILIES["fnuz"]
HYBRID = "float8/current(fp8_format='hybrid_fnuz')"
DELAYED = "float8/delayed(amax_history_length=4,fp8_format='hybrid_fnuz')"


def bfloat16_numbers():
    """Every number of bfloat16, in float32, infinities and NaN among them."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    x = high.view("float32")
    # JAX and TensorFlow on a CPU read a subnormal as 0.
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_every_bfloat16_number_has_the_code_of_ml_dtypes(name):
    x = bfloat16_numbers()
    largest = formats.get(name).max
    with np.errstate(invalid="ignore"):
        golden = np.clip(x, -largest, largest).astype(formats.get(name).dtype)
    expected = golden.view("uint8")
    np.testing.assert_array_equal(
        reference.cast(x, name).view("uint8"), expected
    )
    one = np.float32(1)
    wide = casting.quantize_float32(ops.convert_to_tensor(x), one, name)
    np.testing.assert_array_equal(numpy(casting.encode(wide, name)), expected)
    # There is one zero, and one NaN in its place.
    assert not np.signbit(numpy(wide)[numpy(wide) == 0]).any()
    assert set(expected[np.isnan(x)]) == {0x80}
    assert np.nanmax(numpy(wide)) == formats.get(name).max
    again = casting.decode(ops.convert_to_tensor(expected), name)
    np.testing.assert_array_equal(numpy(again), numpy(wide))


@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_the_cast_of_the_framework_gives_the_same_numbers(name):
    """What an emulated matmul reads, and what a native one does."""
    x = bfloat16_numbers()
    engine = backends.engine
    scale = np.float32(0.37)
    expected = reference.quantize(x, scale, name).astype("float32")
    arguments = ops.convert_to_tensor(x), ops.convert_to_tensor(scale), name
    found = numpy(engine.widen(engine.cast(*arguments)))
    np.testing.assert_array_equal(found, expected)
    zero = found == 0
    assert not np.signbit(found[zero]).any()
    narrow = engine.widen(engine.narrow_cast(*arguments))
    np.testing.assert_array_equal(numpy(narrow), expected)


def test_random_rounding_gives_no_negative_zero():
    x = ops.convert_to_tensor(np.float32([-1e-9, -0.0, 1e-9, -3.0]))
    bits = ops.zeros((4,), "int32")
    found = numpy(round_to_neighbour(x, bits, E4M3))
    assert found.tolist() == [0.0, 0.0, 0.0, -3.0]
    assert np.signbit(found).tolist() == [False, False, False, True]


@pytest.mark.any_backend
def test_recipes_name_the_formats():
    for cls in (CurrentScaling, DelayedScaling):
        hybrid = cls(fp8_format="hybrid_fnuz")
        found = [hybrid.format_of(name) for name in recipes.OPERANDS]
        assert found == [E4M3, E4M3, E5M2]
        assert cls(fp8_format="e4m3fnuz").format_of("outputs_grad") == E4M3
    assert recipes.get(HYBRID.partition("/")[2]).format_of("kernel") == E4M3


@pytest.mark.any_backend
def test_families_are_not_mixed_in_a_matmul():
    class Mixed(CurrentScaling):
        name = "mixed for this test"

        def quantization(self, operand, matmul):
            of_kernel = operand == "kernel"
            return recipes.Quantization(
                format=E4M3 if of_kernel else "float8_e4m3fn"
            )

    with pytest.raises(ValueError, match="formats of OCP by those named fnuz"):
        Mixed()
    recipes.REGISTRY.pop(Mixed.name)


@pytest.mark.parametrize("name", devices.KNOWN)
def test_only_an_mi300_reads_them_where_the_framework_knows_it(name):
    with devices.pretend(name):
        choice = kernels.select(
            "ab,bc->ac", CurrentScaling(fp8_format="hybrid_fnuz")
        )
    assert choice.native == (name == "mi300" and BACKEND != "tensorflow")
    native_in_others = devices.KNOWN[name].float8 == "ocp"
    if native_in_others and BACKEND == "jax":
        assert "current(fp8_format='hybrid') is native" in choice.reason


def dense(policy, units=5):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            kpe.layers.Dense(16, activation="relu", dtype=policy),
            kpe.layers.Dense(units, dtype=policy),
        ]
    )
    model.compile("sgd", "mse")
    return model


def batch(units=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 8)), rng.normal(size=(8, units))


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="JAX multiplies them on a CPU")
def test_native_matmuls_of_them_give_the_emulated_numbers():
    layer = kpe.layers.Dense(5, dtype=HYBRID + "_from_float32")
    layer.build((4, 8))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")

    def step(kind):
        with kernels.prefer(kind):
            loss = lambda y: ops.sum(y * ops.sin(y))  # noqa: E731
            y, dx, grads = gradients(layer, x, loss)
        assert layer.kernel_choice.kind == kind
        return y, dx, grads[0]

    for native, emulated in zip(step("native"), step("emulated"), strict=True):
        np.testing.assert_allclose(
            numpy(native), numpy(emulated), rtol=1e-5, atol=1e-6
        )


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA of TensorFlow")
def test_what_tensorflow_has_xla_compile_gives_the_emulated_numbers():
    layer = kpe.layers.Dense(5, dtype=HYBRID + "_from_float32")
    layer.build((4, 8))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    outputs = []
    for kind in ("native", "emulated"):
        with kernels.prefer(kind):
            outputs.append(run(lambda x: layer(x), "xla", x))
        assert layer.kernel_choice.kind == kind
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("policy", [HYBRID, DELAYED])
def test_a_model_trains_and_its_operands_are_kept_in_one_byte(
    policy, monkeypatch
):
    model = dense(f"{policy}_from_mixed_bfloat16")
    x, y = batch()
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    framework = backends.current
    monkeypatch.setattr(type(framework), "on_cpu", lambda self, x: False)
    values = ops.ones((2, 3))
    assert framework.kept_dtype(values, E4M3) == "uint8"


# From one device to another


@pytest.fixture
def files(tmp_path):
    """A trained model of a policy, as files."""

    @functools.cache
    def made(policy):
        model = dense(f"{policy}_from_float32")
        model.fit(*batch(), epochs=2, verbose=0)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        return model, tmp_path

    return made


def words(caught):
    return {str(each.message) for each in caught if "fnuz" in str(each.message)}


@pytest.mark.full
@pytest.mark.parametrize("load", [kpe.load_model, keras.saving.load_model])
@pytest.mark.parametrize(
    ("policy", "elsewhere"),
    [
        (DELAYED, "mi350"),
        ("float8/delayed(amax_history_length=4)", "mi300"),
    ],
)
def test_a_model_loads_where_other_formats_are_native_with_a_word(
    files, policy, elsewhere, load
):
    model, folder = files(policy)
    with devices.pretend(elsewhere), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        loaded = load(folder / "model.keras")
    (word,) = words(w)
    assert devices.KNOWN[elsewhere].title in word
    assert "It stays in the formats that it has" in word
    # Numbers and states are those it was saved with.
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    x, _ = batch()
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), loaded.predict(x, verbose=0)
    )
    recipe = loaded.layers[0].float8_policy.recipe
    assert recipe == model.layers[0].float8_policy.recipe


@pytest.mark.full
def test_what_the_word_says_keeps_the_histories(files):
    _, folder = files(DELAYED)
    with devices.pretend("mi350"), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        loaded = kpe.load_model(folder / "model.keras")
    (word,) = words(w)
    asked = word.partition("kpe.convert(model, ")[2].partition("), which")[0]
    name = asked.strip("\"'")
    before = {v.path: numpy(v) for v in loaded.weights if "float8" in v.path}
    kpe.convert(loaded, name)
    after = {v.path: numpy(v) for v in loaded.weights if "float8" in v.path}
    assert before
    for path, matrix in before.items():
        # The amax of a kernel is entered when a layer is converted.
        rows = [recipes.OPERANDS.index(x) for x in ("inputs", "outputs_grad")]
        np.testing.assert_array_equal(after[path][rows], matrix[rows])
    recipe = loaded.layers[0].float8_policy.recipe
    assert recipe == DelayedScaling(amax_history_length=4)
    with warnings.catch_warnings(), devices.pretend("mi350"):
        warnings.simplefilter("error")
        loaded.load_weights(folder / "model.weights.h5")


def test_where_nothing_or_the_same_family_is_native_no_word_is_said(files):
    _, folder = files(DELAYED)
    model = dense(f"{DELAYED}_from_float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("mi300", "mi200", "cpu", "mps"):
            with devices.pretend(name):
                model.load_weights(folder / "model.weights.h5")
    if not visible_gpus():
        assert backends.engine.device().float8 is None


@keras.saving.register_keras_serializable("fnuz")
class Block(keras.layers.Layer):
    """Makes its layer itself, a stock one whenever it is made."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(8)

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, inputs):
        return self.dense(inputs)


def test_a_layer_that_its_model_makes_anew_says_it_too(tmp_path):
    model = keras.Sequential([keras.Input((8,)), Block()])
    kpe.convert(model, f"{HYBRID}_from_float32")
    model.save(tmp_path / "model.keras")
    with devices.pretend("h200"), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        loaded = kpe.load_model(tmp_path / "model.keras")
    (word,) = words(w)
    assert "kpe.convert(model, 'float8/current_from_float32')" in word
    assert loaded.layers[0].dense.float8_policy is not None
