"""Rules that keep the last blocks and the logits at eight bits."""

import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.demo import Settings, train

rules_of = kpe.conversion.eight_bit_rules
EIGHT = "float8/current_from_float32"


def stacked(names, tied=False):
    """A model with one Dense layer for each name."""
    ids = keras.Input((4,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(16, 16, name="tokens")
    x = table(ids) if tied else keras.layers.Embedding(16, 16)(ids)
    for name in names:
        x = keras.layers.Dense(16, name=name)(x)
    outputs = table(x, reverse=True) if tied else x
    return keras.Model(ids, outputs, name="model")


def kept(model, **options):
    """The layers that the rules keep, by converting with them."""
    rules = rules_of(model, "current", **options)
    policy = kpe.Float8DTypePolicy("float32", recipe="nvfp4", rules=rules)
    report = kpe.convert(model, policy)
    found = [each.path for each in report.converted if each.policy == EIGHT]
    others = {each.policy for each in report.converted} - {EIGHT}
    assert others <= {"float8/nvfp4_from_float32"}
    return found


BLOCKS = [f"layer_{i}_{name}" for i in range(12) for name in ("up", "down")]


def names(*numbers):
    return [f"layer_{i}_{name}" for i in numbers for name in ("up", "down")]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, (10, 11)),
        ({"last": 1}, (11,)),
        ({"last": 0}, ()),
        ({"first": 1, "last": 1}, (0, 11)),
        ({"first": 2, "last": 0}, (0, 1)),
        ({"last": 99}, range(12)),
    ],
)
def test_the_last_blocks_and_the_head_are_kept(options, numbers):
    model = stacked(["before", *BLOCKS, "head"])
    assert kept(model, **options) == [*names(*numbers), "head"]


def test_a_tied_head_is_kept_wherever_it_stands():
    model = stacked(BLOCKS, tied=True)
    assert kept(model, last=1) == ["tokens", *names(11)]


def test_one_pattern_is_of_one_block():
    rules = rules_of(stacked([*BLOCKS, "head"]), first=2, last=1)
    patterns = [pattern for pattern, _ in rules]
    assert len(patterns) == 4
    assert all(p.endswith(".*") for p in patterns[:3])


def test_without_numbers_each_layer_is_a_block():
    assert kept(stacked(["one", "two", "three"])) == ["three"]
    assert kept(stacked(["one", "two", "head"]), first=1, last=1) == [
        "one",
        "head",
    ]


def test_the_dtypes_of_each_layer_are_kept():
    model = stacked(BLOCKS)
    ((_, name), *_) = rules_of(model)
    assert name == "float8/rowwise(power_of_two=False)_from_float32"


def test_the_demo_keeps_its_last_block_and_its_logits():
    model = train.decoder(10, Settings(), "mixed_bfloat16")
    found = kept_of_demo(model)
    assert {each.rpartition("/")[2] for each in found} == {
        *(f"block_1_{x}" for x in ("query", "key", "value")),
        "block_1_attention_outputs",
        "block_1_feed_forward_up",
        "block_1_feed_forward_down",
        "logits",
    }


def kept_of_demo(model):
    rules = rules_of(model, "current")
    policy = kpe.Float8DTypePolicy("float32", recipe="nvfp4", rules=rules)
    report = kpe.convert(model, policy)
    return [e.path for e in report.converted if "current" in e.policy]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"last": -1}, ValueError, "`last` counts blocks. Received: -1"),
        ({"last": 1.0}, TypeError, "`last` counts"),
        ({"first": True}, TypeError, "`first` counts"),
        ({"recipe": "nvfp4"}, ValueError, "in four bits too"),
    ],
)
def test_wrong_arguments_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        rules_of(stacked(BLOCKS), **options)


def test_a_model_without_layers_for_float8_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5)])
    with pytest.raises(ValueError, match="No layer of this model"):
        rules_of(model)


def test_the_first_block_of_a_name_has_no_number():
    """Keras calls them `block`, `block_1` and `block_2`."""

    class Block(keras.layers.Layer):
        def build(self, shape):
            self.inner = keras.layers.Dense(16, name="inner")
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x)

    keras.utils.clear_session()
    blocks = [keras.Input((16,)), *(Block() for _ in range(3))]
    model = keras.Sequential([*blocks, keras.layers.Dense(4, name="head")])
    found = kept(model, first=1, last=1)
    paths = [layer.inner.path for layer in model.layers[:3]]
    assert paths[0].endswith("/block/inner")
    assert set(found) == {paths[0], paths[2], model.layers[3].path}
