"""Which kernel runs, why, and what a user may ask for."""

import functools

import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from conftest import visible_gpus
from keras_policy_ext import backends, contractions, kernels
from products import shapes_of, three_products, whole
from ways import BACKEND, compiled

CONV = contractions.Conv((1, 1), "same", (1, 1), "channels_last")
CONTRACTIONS = {
    "matmul": contractions.Einsum("ab,bc->ac"),
    "equation": "abc,cde->abde",
    "batched": "gab,gbc->gac",
    "summed alone": "ab,bc->c",
    "conv": CONV,
}
# Native without being asked, and when asked for, on a CPU.
ON_A_CPU = {
    "jax": {
        "matmul": ("emulated", "native"),
        "equation": ("emulated", "native"),
        "batched": ("emulated", "native"),
        "summed alone": ("emulated", "native"),
        "conv": ("emulated", "emulated"),
    },
    "torch": {
        "matmul": ("emulated", "native"),
        "equation": ("emulated", "native"),
        "batched": ("emulated", "emulated"),
        "summed alone": ("emulated", "native"),
        "conv": ("emulated", "emulated"),
    },
    # Without XLA, that is; `test_tensorflow.py` has the rest.
    "tensorflow": dict.fromkeys(CONTRACTIONS, ("emulated", "emulated")),
}


def is_on_a_gpu():
    return visible_gpus() > 0


def select(name, **kwargs):
    return kernels.select(CONTRACTIONS[name], **kwargs)


# Selection


@pytest.mark.parametrize("name", CONTRACTIONS)
@pytest.mark.skipif(is_on_a_gpu(), reason="a GPU is there: for CPUs only")
def test_the_kind_on_a_cpu(name):
    by_itself, asked_for = ON_A_CPU[BACKEND][name]
    assert select(name).kind == by_itself
    with kernels.prefer("native"):
        assert select(name).kind == asked_for


@pytest.mark.parametrize("name", CONTRACTIONS)
@pytest.mark.parametrize("kind", ["auto", "native", "emulated"])
@pytest.mark.parametrize("recipe", [None, "current", "delayed"])
def test_every_choice_has_a_kind_and_a_reason(name, kind, recipe):
    with kernels.prefer(kind):
        choice = select(name, recipe=recipe, dtype="bfloat16")
    assert choice.kind in ("native", "emulated")
    assert choice.native == (choice.kind == "native")
    assert len(choice.reason) > 10
    if kind == "emulated":
        assert not choice.native


def test_a_layer_tells_what_its_last_contraction_was():
    layer = kpe.layers.Dense(4, dtype="float8_from_float32")
    layer.build((None, 4))
    assert layer.kernel_choice is None
    layer(np.ones((2, 4), "float32"))
    assert layer.kernel_choice == kernels.select("ab,bc->ac")
    with kernels.prefer("emulated"):
        layer(np.ones((2, 4), "float32"))
    assert layer.kernel_choice.kind == "emulated"
    assert "prefer" in layer.kernel_choice.reason


def test_the_engine_is_that_of_the_backend():
    assert backends.engine.name == BACKEND
    assert backends.engine is backends.engine


def test_a_malformed_equation_or_recipe_is_refused():
    with pytest.raises(ValueError, match="einsum equation"):
        kernels.select("ab,bc")
    with pytest.raises(ValueError, match=r"not a contraction.*None.*Allowed"):
        kernels.select(None)
    with pytest.raises(ValueError, match="recipe"):
        kernels.select("ab,bc->ac", recipe="nonsense")


# Preference


def test_preferences_nest():
    assert kernels.preferred() == "auto"
    with kernels.prefer("native"):
        assert kernels.preferred() == "native"
        with kernels.prefer("emulated"):
            assert kernels.preferred() == "emulated"
            with kernels.prefer("auto"):
                assert kernels.preferred() == "auto"
            assert kernels.preferred() == "emulated"
        assert kernels.preferred() == "native"
    assert kernels.preferred() == "auto"


def test_a_preference_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), kernels.prefer("native"):
        raise ZeroDivisionError
    assert kernels.preferred() == "auto"


@pytest.mark.parametrize("kind", ["fast", "Native", "", None])
def test_an_unknown_preference_is_refused_with_what_is_allowed(kind):
    with pytest.raises(ValueError) as error, kernels.prefer(kind):
        pass
    for word in (repr(kind), "auto", "native", "emulated"):
        assert word in str(error.value)
    assert kernels.preferred() == "auto"


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("equation", ["ab,bc->ac", "abc,cde->abde"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_and_emulated_agree_on_a_gpu(equation, dtype):
    engine = backends.engine
    sizes = {"a": 5, "b": 48, "c": 33, "d": 7, "e": 4}
    rng = np.random.default_rng(0)
    tensors = [
        ops.convert_to_tensor(rng.normal(size=shape).astype("float32"))
        for shape in shapes_of(equation, sizes)
    ]
    formats = ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")
    scale = ops.convert_to_tensor(np.full((1, 1, 1), 0.013, "float32"))

    def three_matmuls(native):
        cast = engine.narrow_cast if native else engine.cast
        kernel = engine.matmuls[0 if native else -1]
        operands = [
            whole(cast(value, ops.reshape(scale, ()), name), scale, name)
            for value, name in zip(tensors, formats, strict=True)
        ]
        return three_products(equation, kernel, *operands, [dtype] * 3)

    # TensorFlow has native matmuls in what XLA compiles.
    way = "xla" if BACKEND == "tensorflow" else "eager"
    results = {
        native: compiled(functools.partial(three_matmuls, native), way)()
        for native in (True, False)
    }
    # Hopper's tensor cores add products with some 14 bits (DeepSeek-V3,
    # arXiv 2412.19437, section 3.5.2); a bfloat16 result has 8.
    tolerance = 2.0**-11 if dtype == "float32" else 2.0**-8
    for native, emulated in zip(results[True], results[False], strict=True):
        native, emulated = (
            ops.convert_to_numpy(ops.cast(t, "float32"))
            for t in (native, emulated)
        )
        error = np.linalg.norm(native - emulated) / np.linalg.norm(emulated)
        assert error < tolerance
