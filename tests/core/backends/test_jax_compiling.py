"""What a step costs to compile: functions, and rounds over a program."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import keras_policy_ext as kpe
from jax_programs import gradient_step
from keras_policy_ext import recipes
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.sources import Settling
from keras_policy_ext.numerics.scale_sources import source_of

if jax.default_backend() != "cpu":
    pytest.skip("tests of XLA for a CPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def _compiled_anew():
    """A program that was compiled before leaves no files."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX asks the setting once; whoever compiled before has asked.
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def inputs_of(model):
    return jnp.zeros((2, *model.input_shape[1:]), "bfloat16")


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_moves_are_not_taken_past_what_follows(recipe, tmp_path):
    """Each round goes over the whole program; XLA stops after 25."""
    policy = f"float8/{recipe}_from_mixed_bfloat16"
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 16))])
    model.add(kpe.layers.EinsumDense("btd,dhk->bthk", (8, 2, 4), dtype=policy))
    model.add(layers.Activation("silu", dtype="mixed_bfloat16"))
    model.add(kpe.layers.EinsumDense("bthk,hkd->btd", (8, 16), dtype=policy))
    model.add(kpe.layers.Dense(16, "silu", dtype=policy))
    step, weights = gradient_step(model)
    how = weights, inputs_of(model)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": ".*"}
    jax.jit(step).lower(*how).compile(options)
    rounds = list(tmp_path.glob("*.simplification.after_pipeline-start*"))
    assert 1 <= len(rounds) <= 8


def test_a_gpu_may_fuse_a_product_with_what_follows():
    layer = kpe.layers.Dense(8, dtype="float8/current_from_mixed_bfloat16")
    model = keras.Sequential([keras.Input((8,)), layer])
    step, weights = gradient_step(model)
    how = weights, inputs_of(model)
    found = {
        platform: jax.jit(step)
        .trace(*how)
        .lower(lowering_platforms=(platform,))
        .as_text()
        .count("optimization_barrier")
        for platform in ("cpu", "tpu")
    }
    # The outputs and the gradient of the kernel; nothing wants that of inputs.
    assert found == {"cpu": 2, "tpu": 0}


def test_settling_is_written_once_for_all_states_of_a_shape():
    recipe = recipes.DelayedScaling()
    settle = Settling(recipe)
    state = jnp.zeros(source_of(recipe).state_shape)

    def settled(*states):
        framework = frameworks.current
        return [framework.settle(settle, each, each + 1) for each in states]

    text = jax.jit(settled).lower(state, state, state).as_text()
    assert text.count("func.func private @_settled") == 1
    assert text.count("call @_settled") == 3


@pytest.mark.full
def test_a_second_sample_of_a_watch_compiles_nothing(caplog):
    """A new state has unseen operands, whose scales are of their amaxes."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    kpe.convert(model, "delayed", min_size=0)
    watch, x = kpe.watch(model, every=1), np.ones((4, 8))
    batch = x, x[:, :4]
    watch.step(batch)
    with jax.log_compiles():
        watch.step(batch)
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: x + 3.0)(x)
        assert "Compiling" in caplog.text
