"""Errors begin with the fault, and tell value and alternative."""

import ast
import pathlib

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import kernels, numerics
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.ext.mixed import experimental
from keras_policy_ext.mixed_precision import (
    LossScaleOptimizer,
    Policy,
    StochasticRounding,
)
from refusals import refused

pytestmark = pytest.mark.any_backend


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])


@pytest.mark.parametrize(
    ("call", "purpose"),
    [
        (kpe.convert, "can be converted"),
        (kpe.revert, "can be reverted"),
        (kpe.freeze, "can be frozen"),
        (kpe.thaw, "can be thawed"),
        (kpe.widen, "can be widened"),
        (kpe.watch, "can be watched"),
        (lambda model: kpe.export(model, "a"), "can be exported"),
        (lambda model: kpe.record(model, "a.zip"), "can be recorded"),
        (lambda model: kpe.what_if(model, None), "have operands to quantize"),
        (lambda model: kpe.tune(model, None, {}), "have layers to tune"),
    ],
    ids=lambda each: each.replace(" ", "-") if isinstance(each, str) else "",
)
def test_what_is_no_model_is_told_what_models_are_for(call, purpose):
    with pytest.raises(TypeError, match=f"only those {purpose}. Received: 3"):
        call(3)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_a_plain_policy_is_said_to_be_one(policy):
    with pytest.raises(ValueError, match="It is a plain policy") as raised:
        kpe.convert(dense(), policy)
    assert "Did you mean" not in str(raised.value)


def test_the_type_of_what_is_no_policy_is_said():
    with refused(
        ValueError, "not a dtype policy", "3 (of type int)", "float32"
    ):
        kpe.set_dtype_policy(3)


def adam():
    return keras.optimizers.Adam()


REFUSED = {
    "include": (
        lambda: kpe.convert(dense(), include="("),
        (ValueError, "`include` is not a valid regular", "'('", "'ffn'"),
    ),
    "include of a number": (
        lambda: kpe.convert(dense(), include=3),
        (TypeError, "`include`", "3", "regular expression"),
    ),
    "exclude": (
        lambda: kpe.convert(dense(), exclude="["),
        (ValueError, "`exclude` is not a valid regular", "'['", "'ffn'"),
    ),
    "filter": (
        lambda: kpe.convert(dense(), filter=3),
        (TypeError, "`filter`", "3", "'auto'"),
    ),
    "answer of filter": (
        lambda: kpe.convert(dense(), filter=lambda layer: "yes"),
        (TypeError, "`filter` did not return a bool", "'yes'", "True"),
    ),
    "min_size": (
        lambda: kpe.convert(dense(), min_size="big"),
        (TypeError, "`min_size`", "'big'", "an int >= 0"),
    ),
    "attention": (
        lambda: kpe.convert(dense(), attention=True),
        (ValueError, "`attention`", "True", "'float8'"),
    ),
    "model": (
        lambda: kpe.convert("model.keras"),
        (TypeError, "not a Keras model", "'model.keras'", "keras.Model"),
    ),
    "steps": (
        lambda: kpe.calibrate(dense(), [], steps=0),
        (TypeError, "`steps`", "0", "an int >= 1"),
    ),
    "trained_scales": (
        lambda: kpe.freeze(dense(), trained_scales=True),
        (ValueError, "trained_scales", "'channel'", "'tensor'"),
    ),
    "policy of memory": (
        lambda: kpe.memory(dense(), 2, "bfloat16"),
        (ValueError, "Cannot compare with 'bfloat16'", "float32", "same dtype"),
    ),
    "batch": (
        lambda: kpe.memory(dense(), "big"),
        (TypeError, "`batch`", "'big'", "arrays"),
    ),
    "batch of nothing": (
        lambda: kpe.memory(dense(), 0),
        (ValueError, "`batch`", "0", "the size of a batch"),
    ),
    "format": (
        lambda: kpe.export(dense(), "out", "pickle"),
        (ValueError, "'pickle'", "'pickle'", "'safetensors'"),
    ),
    "optimizer to be scaled": (
        lambda: LossScaleOptimizer("adam"),
        (TypeError, "`inner_optimizer`", "'adam'", "keras.optimizers"),
    ),
    "scaled optimizer": (
        lambda: LossScaleOptimizer(LossScaleOptimizer(adam())),
        (TypeError, "`inner_optimizer`", "LossScaleOptimizer", "does not"),
    ),
    "fixed scale": (
        lambda: LossScaleOptimizer(adam(), dynamic=False),
        (ValueError, "`initial_scale`", "dynamic=False", "number"),
    ),
    "growth": (
        lambda: LossScaleOptimizer(
            adam(), dynamic=False, initial_scale=2.0, dynamic_growth_steps=2
        ),
        (ValueError, "`dynamic_growth_steps`", "2", "None"),
    ),
    "dynamic": (
        lambda: LossScaleOptimizer(adam(), dynamic=8.0),
        (TypeError, "`dynamic`", "8.0", "False"),
    ),
    "two names": (
        lambda: experimental.LossScaleOptimizer(
            adam(), "dynamic", optimizer=adam()
        ),
        (TypeError, "`inner_optimizer` and `optimizer`", "Adam", "one of"),
    ),
    "layer": (
        lambda: experimental.get_layer_policy("dense"),
        (TypeError, "`layer`", "'dense'", "keras.Layer"),
    ),
    "policy": (
        lambda: Policy(3),
        (TypeError, "`name`", "3", "'mixed_float16'"),
    ),
    "optimizer to be rounded": (
        lambda: StochasticRounding("adam"),
        (TypeError, "`inner_optimizer`", "'adam'", "keras.optimizers"),
    ),
    "seed": (
        lambda: StochasticRounding(adam(), seed=0.5),
        (TypeError, "`seed`", "0.5", "an int"),
    ),
    "contraction": (
        lambda: kernels.select(None, "delayed", "bfloat16"),
        (ValueError, "`contraction`", "None", "einsum"),
    ),
    "dtype": (
        lambda: kernels.select("ab,bc->ac", "delayed", "int8"),
        (ValueError, "`dtype`", "'int8'", "bfloat16"),
    ),
    "shapes": (
        lambda: numerics.sqnr_db(np.ones(3, "f4"), np.ones(4, "f4")),
        (ValueError, "different shapes", "(4,)", "equal shapes"),
    ),
    "device": (
        lambda: device_named("h300"),
        (ValueError, "Did you mean", "'h300'", "h200"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_names_fault_value_and_alternative(case):
    call, expected = REFUSED[case]
    with refused(*expected):
        call()


def test_quantize_says_that_it_does_nothing_on_float8_layers():
    layer = kpe.layers.Dense(4)
    layer.build((None, 4))
    with refused(NotImplementedError, "does nothing", "'float8'", "modes"):
        layer.quantize("float8")


DEFINITIONS = (
    " wraps an optimizer",
    " says what",
    " says which",
    " means layers",
    " is what to do",
    " is made from its name",
    " must have different",
    "Only ",
    "Nothing is ",
)


def test_no_message_begins_with_a_definition():
    package = pathlib.Path(kpe.__file__).parent
    found = [
        f"{path.relative_to(package)}: {text}"
        for path in package.rglob("*.py")
        for text in messages(ast.parse(path.read_text("utf-8")))
        if any(each in text for each in DEFINITIONS)
    ]
    assert not found


def messages(tree):
    """The first sentences of what is raised or warned of, without values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [
                piece.value if isinstance(piece, ast.Constant) else "#"
                for piece in node.values
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            pieces = [node.value]
        else:
            continue
        first, received, _ = "".join(pieces).partition(" Received")
        if received:
            yield first
