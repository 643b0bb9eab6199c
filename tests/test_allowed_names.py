"""What an error lists as allowed is allowed there, name by name."""

import re

import keras
import pytest

import keras_policy_ext as kpe


def model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def conv(**changes):
    arguments = dict(
        strides=(1, 1),
        padding="valid",
        dilation_rate=(1, 1),
        data_format="channels_last",
    )
    return kpe.kernels.Conv(**{**arguments, **changes})


def attention(word):
    inputs = keras.Input((4, 6))
    layer = keras.layers.MultiHeadAttention(2, 3)
    return kpe.convert(
        keras.Model(inputs, layer(inputs, inputs)), attention=word
    )


def prefer(kind):
    with kpe.kernels.prefer(kind):
        pass


def scope(policy):
    with kpe.policy_scope(policy):
        pass


TAKES = {
    "a preference": prefer,
    "a compute dtype": lambda x: kpe.kernels.select("ab,bc->ac", dtype=x),
    "a recipe of a contraction": lambda x: kpe.kernels.select("ab,bc->ac", x),
    "a padding": lambda x: conv(padding=x),
    "a data format": lambda x: conv(data_format=x),
    "a recipe": kpe.recipes.get,
    "an operand": kpe.recipes.DelayedScaling().format_of,
    "formats of a recipe": lambda x: kpe.recipes.CurrentScaling(fp8_format=x),
    "a number format": kpe.formats.get,
    "a policy": kpe.get,
    "the global policy": scope,
    "the source of a policy": kpe.Float8DTypePolicy,
    "the recipe of a policy": lambda x: kpe.Float8DTypePolicy(recipe=x),
    "the source of a loss scale": kpe.LossScaleDTypePolicy,
    "an autocast dtype": kpe.autocast_scope,
    "a dtype to cast to": lambda x: kpe.numerics.cast(keras.ops.ones((2,)), x),
    "a dtype to round to": lambda x: kpe.numerics.stochastic_round(
        keras.ops.ones((2,)), x, seed=0
    ),
    "the policy of a conversion": lambda x: kpe.convert(model(), x),
    "the attention of a conversion": attention,
}


def allowed_names(message):
    """The names after "Allowed:": in quotes, or as a list of words."""
    listed = re.split(r"Allowed[^:]*: ", message)[1]
    quoted = re.findall(r"'([^']+)'", re.split(r"Cause: ", listed)[0])
    if quoted:
        return [name for name in quoted if "<" not in name]
    words = re.split(r"\.(?: |$)", listed)[0].split(", ")
    return [word for word in words if re.fullmatch(r"\w+", word)]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("what", TAKES)
def test_each_name_that_an_error_lists_is_accepted(what):
    with pytest.raises(ValueError, match="Allowed") as error:
        TAKES[what]("nonsense")
    names = allowed_names(str(error.value))
    assert names
    for name in names:
        TAKES[what](name)


@pytest.mark.parametrize(
    "changes",
    [
        {"strides": [1, 1]},
        {"strides": 1},
        {"strides": (0, 1)},
        {"strides": ()},
        {"dilation_rate": (1,)},
        {"dilation_rate": (1.0, 1.0)},
        {"padding": "causal"},
        {"data_format": None},
    ],
    ids=str,
)
def test_a_convolution_that_there_is_not_is_refused(changes):
    with pytest.raises(ValueError, match="Allowed"):
        conv(**changes)
